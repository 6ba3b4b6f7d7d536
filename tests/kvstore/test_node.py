"""Opening a store: its directory, its keys, and one clear line for everything that cannot be."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import kvstore
from descriptors import open_files, opened_since
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, DirectoryInUse, KeysUnusable, StoreClosed
from kvstore.block.identity import TenantKeys
from kvstore.block.key_file import KeyFile
from kvstore.node import EmbeddedStore, SystemClock
from programs import run_python, start_python
from small_disk import files_of_at_most
from workbench import MODEL, blank_pages, ids, one_line, random_pages, refused, same_tokens, small_layout


def opened(directory: Path, **options: Any) -> EmbeddedStore:
    return kvstore.open(f"embedded:{directory}", **{"dram": "1MiB", **options})


def keys_in(store: EmbeddedStore, **options: Any) -> list[bytes]:
    """The names of two blocks, as this store's tenant gives them."""
    return store.namespace(model=MODEL, layout=small_layout(), **options).match(ids(128)).keys


# Opening --------------------------------------------------------------------------------------------------------------


def test_a_store_is_opened_used_and_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "deep" / "kv") as store:
        ns = store.namespace(model=MODEL, layout=small_layout(), config={"rope": "10000"})
        pages, into = random_pages(ns.layout, 2), blank_pages(ns.layout, 2)
        assert ns.put(ids(130), pages).stored == 2
        with ns.lease(ns.match(ids(130))) as lease:
            assert ns.get(lease, into).tokens == 128
        assert same_tokens(into, pages, range(128))
        store.check()
        usage = store.usage()
        assert (usage.blocks, usage.leases, usage.dram.used, usage.dram.budget_bytes) == (2, 0, 2, 1 << 20)
        assert store.evict(1) == 1 and store.drop(ns) == 1 and store.usage().blocks == 0
        assert not store.closed and store.tenant == "default"
    assert store.closed
    store.close()
    assert ns.match(ids(130)).reason is MissReason.DISABLED
    with pytest.raises(StoreClosed):
        store.namespace(model=MODEL, layout=small_layout())


def test_only_keys_and_lock_are_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        ns.put(ids(64), random_pages(ns.layout, 1))
        assert sorted(os.listdir(tmp_path / "kv")) == ["keys", "lock", "node"]
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) for name in ("keys", "lock")} == {0o600}


@pytest.mark.slow
def test_a_closed_store_leaves_no_descriptor(tmp_path: Path) -> None:
    opened(tmp_path).close()
    before = open_files()
    with opened(tmp_path) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        ns.put(ids(640), random_pages(ns.layout, 10))
    for thread in threading.enumerate():
        if thread.name == "kv-extent":  # it makes an extent ahead, and gives it back as soon as it is ready
            thread.join()
    assert not opened_since(before)


def test_importing_and_opening_start_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with opened(tmp_path):
        assert set(threading.enumerate()) <= before


def test_the_clock_of_the_machine() -> None:
    clock = SystemClock()
    first, then = clock.monotonic_seconds(), clock.monotonic_seconds()
    assert then >= first and clock.wall_seconds() > 1_700_000_000


# The directory --------------------------------------------------------------------------------------------------------

HOLD = """
import sys, kvstore
store = kvstore.open("embedded:" + sys.argv[1], dram="1MiB")
print("open", flush=True)
sys.stdin.readline()
"""


def test_a_directory_that_another_process_uses(tmp_path: Path) -> None:
    other = start_python(HOLD, tmp_path)
    assert other.stdout is not None and other.stdout.readline() == "open\n"
    before = (tmp_path / "keys").read_bytes()
    with refused(DirectoryInUse, str(tmp_path), f"process {other.pid}", "another directory"):
        opened(tmp_path)
    assert (tmp_path / "keys").read_bytes() == before
    other.kill()
    other.communicate(timeout=30)
    opened(tmp_path).close()


def test_a_directory_that_this_process_uses(tmp_path: Path) -> None:
    with opened(tmp_path), refused(DirectoryInUse, f"process {os.getpid()}", "close that store"):
        opened(tmp_path)
    opened(tmp_path).close()


@pytest.mark.parametrize("below", ["file", "file/kv"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    with refused(BadInput, str(tmp_path / below), "cannot be used", "another one"):
        opened(tmp_path / below)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with refused(BadInput, str(tmp_path), "lock is a directory, where a file is to be"):
        opened(tmp_path)


# The keys -------------------------------------------------------------------------------------------------------------

OPEN_AND_MATCH = """
import sys, kvstore
with kvstore.open("embedded:" + sys.argv[1], dram="1MiB") as store:
    layout = kvstore.Layout.gqa(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16")
    match = store.namespace(model=sys.argv[2], layout=layout).match(list(range(128)))
    print(*[key.hex() for key in match.keys])
"""


@pytest.mark.slow
def test_the_same_prompt_has_the_same_names_in_a_new_process(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        mine = keys_in(store)
    assert run_python(OPEN_AND_MATCH, tmp_path, MODEL).split() == [key.hex() for key in mine]
    assert run_python(OPEN_AND_MATCH, tmp_path / "other", MODEL).split() != [key.hex() for key in mine]


def test_every_tenant_and_every_directory_has_keys_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "one") as one, opened(tmp_path / "two") as two:
        names = [
            *keys_in(one),
            *keys_in(one.for_tenant("another")),
            *keys_in(two),
            *keys_in(two.for_tenant("another")),
        ]
        assert len(set(names)) == 8
        assert keys_in(one.for_tenant("default")) == keys_in(one)
        assert one.for_tenant("another").tenant == "another"


def test_tenants_keep_their_keys(tmp_path: Path) -> None:
    with opened(tmp_path, tenant="first") as store:
        first, second = keys_in(store), keys_in(store.for_tenant("second"))
    with opened(tmp_path, tenant="second") as store:
        assert keys_in(store) == second and keys_in(store.for_tenant("first")) == first


def test_tenants_share_memory_and_nothing_else(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        ns.put(ids(128), random_pages(ns.layout, 2))
        other = store.for_tenant("other")
        theirs = other.namespace(model=MODEL, layout=small_layout())
        assert theirs.match(ids(128)).reason is MissReason.ABSENT
        assert theirs.put(ids(128), random_pages(ns.layout, 2, seed=1)).stored == 2
        assert other.usage().blocks == store.usage().blocks == 4
        store.check()


def test_a_tenant_that_is_asked_for_by_many_threads_gets_one_secret(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys")
    barrier = threading.Barrier(8)
    found: list[TenantKeys] = []

    def ask(number: int) -> None:
        barrier.wait()
        found.append(keys.tenant("shared"))
        keys.tenant(f"own-{number}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({one.identity for one in found}) == 1
    again = KeyFile(tmp_path / "keys")
    assert again.tenant("shared") == found[0]
    assert len(json.loads((tmp_path / "keys").read_text())["tenants"]) == 9


def test_what_the_key_file_holds(tmp_path: Path) -> None:
    with opened(tmp_path):
        contents = json.loads((tmp_path / "keys").read_text())
    secret = contents["tenants"]["default"]["secret"]
    assert contents == {"version": 1, "tenants": {"default": {"secret": secret, "epoch": 1}}}
    assert KeyFile(tmp_path / "keys").tenant("default") == TenantKeys.derive(bytes.fromhex(secret), 1)


GOOD = {"version": 1, "tenants": {"default": {"secret": "ab" * 32, "epoch": 1}}}


def changed(**change: Any) -> str:
    return json.dumps({**GOOD, "tenants": {"default": {**GOOD["tenants"]["default"], **change}}})  # type: ignore[index]


@pytest.mark.parametrize(
    ("contents", "fragments"),
    [
        ("", ("damaged", "backup")),
        ("{", ("damaged", "backup")),
        ("\x00\xff", ("damaged",)),
        ("[]", ("damaged",)),
        ("null", ("damaged",)),
        ("{}", ("damaged",)),
        ('{"version": 1}', ("damaged",)),
        ('{"version": 1, "tenants": []}', ("damaged",)),
        ('{"version": 1, "tenants": {"default": "secret"}}', ("damaged",)),
        (changed(secret="ab" * 31), ("damaged",)),
        (changed(secret="xy" * 32), ("damaged",)),
        (changed(secret=None), ("damaged",)),
        (changed(epoch="second"), ("damaged",)),
        (changed(epoch=0), ("damaged",)),
        (changed(epoch=1 << 32), ("damaged",)),
        (changed(epoch=float("inf")), ("damaged",)),
        (json.dumps({**GOOD, "tenants": {"\ud800": GOOD["tenants"]["default"]}}), ("damaged",)),
        (json.dumps({**GOOD, "tenants": {"": GOOD["tenants"]["default"]}}), ("damaged",)),
        (json.dumps({**GOOD, "tenants": {"x" * 65: GOOD["tenants"]["default"]}}), ("damaged",)),
        (json.dumps({**GOOD, "tenants": {"a\nb": GOOD["tenants"]["default"]}}), ("damaged",)),
        ('{"version": 1, "tenants": ' + "[" * 100_000, ("damaged",)),
        ('{"version": 1' + "0" * 4200 + ', "tenants": {}}', ("version", "knows version 1")),
        (json.dumps(GOOD)[:-10], ("damaged",)),
        (json.dumps({**GOOD, "version": 2}), ("damaged",)),
        *[
            (
                json.dumps(
                    {"version": 2, "tenants": {"a": {"fingerprint": "ab" * 8, "epochs": {"cd" * 8: 1}} | one}} | two
                ),
                ("damaged",),
            )
            for one, two in [
                ({}, {}),
                ({}, {"purged": []}),
                ({}, {"purged": {"ab" * 8: 1}}),
                ({}, {"purged": {"ab" * 7: "a"}}),
                ({"fingerprint": "ab"}, {"purged": {}}),
                ({"fingerprint": None}, {"purged": {}}),
                ({"epochs": {"cd" * 8: 0}}, {"purged": {}}),
                ({"epochs": {"cd" * 9: 1}}, {"purged": {}}),
                ({"epochs": [1]}, {"purged": {}}),
                ({"epochs": {"cd" * 8: "1"}}, {"purged": {}}),
            ]
        ],
        ('{"version": 3, "keys": "in another form"}', ("version 3", "knows version 1")),
        ('{"version": "1", "tenants": {}}', ("version '1'", "knows version 1")),
    ],
)
def test_a_key_file_that_cannot_be_used_is_told_and_not_touched(
    tmp_path: Path, contents: str, fragments: tuple[str, ...]
) -> None:
    path = tmp_path / "keys"
    path.write_text(contents, encoding="latin-1")
    path.chmod(0o600)
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino
    with pytest.raises(KeysUnusable) as caught:
        opened(tmp_path)
    assert one_line(caught.value, str(path), *fragments)
    assert "ab" * 8 not in str(caught.value), "no secret in a message"
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert sorted(os.listdir(tmp_path)) == ["keys", "lock"]
    path.unlink()
    opened(tmp_path).close()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660])
def test_a_key_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    with opened(tmp_path) as store:
        mine = keys_in(store)
    path = tmp_path / "keys"
    before = path.read_bytes()
    path.chmod(mode)
    with refused(KeysUnusable, str(path), f"{mode:04o}", f"chmod 600 {path}"):
        opened(tmp_path)
    assert path.read_bytes() == before and stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o600)
    with opened(tmp_path) as store:
        assert keys_in(store) == mine


def test_no_more_tenants_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    tenants = {f"tenant-{number}": {"secret": f"{number:064x}", "epoch": 1} for number in range(1024)}
    path.write_text(json.dumps({"version": 1, "tenants": tenants}))
    path.chmod(0o600)
    with refused(BadInput, "1024 tenants", "limit"):
        opened(tmp_path)
    opened(tmp_path, tenant="tenant-7").close()


FORKED = """
import os, sys, numpy as np, kvstore
layout = kvstore.Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="float32")
store = kvstore.open("embedded:" + sys.argv[1], dram="4MiB")
ns = store.namespace(model="abc", layout=layout)
pages = kvstore.Pages({0: [np.ones((2, 64, 1, 8), np.float32)] * 2}, range(2), 64)
assert ns.put(list(range(128)), pages).stored == 2
child = os.fork()
if child == 0:
    found = ns.match(list(range(128)))
    stored = ns.put(list(range(1000, 1128)), pages)
    good = found.reason is kvstore.MissReason.DISABLED and stored.stored == 0 and store.closed
    store.close()
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0, "the child used the store"
assert ns.match(list(range(128))).blocks == 2 and not store.closed
store.check()
if os.fork() == 0:
    import time
    time.sleep(5)
    os._exit(0)
os._exit(0)  # the parent goes without closing; its child must not keep the directory locked
"""


@pytest.mark.slow
def test_a_forked_child_finds_the_store_closed_and_holds_no_lock(tmp_path: Path) -> None:
    run_python(FORKED, tmp_path)
    kvstore.open(f"embedded:{tmp_path}", dram="1MiB").close()


def test_a_namespace_is_dropped_where_it_was_opened(tmp_path: Path) -> None:
    with (
        kvstore.open(f"embedded:{tmp_path / 'a'}", dram="1MiB") as one,
        kvstore.open(f"embedded:{tmp_path / 'b'}", dram="1MiB") as two,
    ):
        mine = one.namespace(model=MODEL, layout=small_layout())
        theirs = two.namespace(model=MODEL, layout=small_layout())
        assert mine.put(ids(128), random_pages(mine.layout, 2)).stored == 2
        for stranger in (two, one.for_tenant("somebody else")):
            with refused(BadInput, "this store opened for this tenant"):
                stranger.drop(mine)
        with refused(BadInput, "give a namespace"):
            one.drop("mine")  # type: ignore[arg-type]
        assert mine.match(ids(128)).blocks == 2
        assert one.drop(mine) == 2 and two.drop(theirs) == 0


# Keys and what was written under them ---------------------------------------------------------------------------------


def test_a_new_tenant_whose_keys_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        before = keys_in(store)
        with files_of_at_most(0), pytest.raises(KeysUnusable) as caught:
            keys_in(store.for_tenant("new"))
        assert one_line(caught.value, str(tmp_path / "keys"), "cannot be written (File too large)", "make room")
        assert keys_in(store) == before
        new = keys_in(store.for_tenant("new"))
    with opened(tmp_path) as store:
        assert keys_in(store) == before and keys_in(store.for_tenant("new")) == new


def stored_on_disk(directory: Path, **options: Any) -> None:
    """Ten blocks: a slab of 20 slots beside the stamp."""
    with opened(directory, nvme="1MiB", **options) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        assert ns.put(ids(640), random_pages(ns.layout, 10), durability="disk").stored == 10


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("options", [{}, {"nvme": "1MiB"}, {"nvme": "8MiB", "tenant": "another"}])
def test_without_its_keys_a_directory_with_slabs_is_not_opened(tmp_path: Path, options: dict[str, Any]) -> None:
    stored_on_disk(tmp_path)
    kept = (tmp_path / "keys").read_bytes()
    (tmp_path / "keys").unlink()
    before = files_below(tmp_path)
    with pytest.raises(KeysUnusable) as caught:
        opened(tmp_path, **options)
    assert one_line(caught.value, f"{tmp_path}/keys is missing", "1 slab (248.0 KiB)", str(tmp_path / "nvme"))
    assert one_line(caught.value, "restore it from a backup", f"move {tmp_path}/nvme away to begin anew")
    assert files_below(tmp_path) == before, "nothing is made and nothing is lost"
    write_keys(tmp_path, kept)
    with opened(tmp_path, nvme="1MiB") as store:
        assert store.warmed(20)
        assert store.namespace(model=MODEL, layout=small_layout()).match(ids(640)).blocks == 10


def write_keys(directory: Path, contents: bytes) -> None:
    (directory / "keys").write_bytes(contents)
    (directory / "keys").chmod(0o600)


def test_what_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    stored_on_disk(tmp_path / "kv")
    (tmp_path / "kv" / "keys").unlink()
    (tmp_path / "kv" / "nvme").rename(tmp_path / "aside")
    stored_on_disk(tmp_path / "kv")


def test_a_directory_that_holds_no_slabs_gets_keys(tmp_path: Path) -> None:
    opened(tmp_path, nvme="1MiB").close()
    assert [path.name for path in (tmp_path / "nvme").glob("*.slab")] == ["00000000.slab"]
    (tmp_path / "keys").unlink()
    stored_on_disk(tmp_path)


def test_slabs_of_other_keys_are_told_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored_on_disk(tmp_path)
    kept = (tmp_path / "keys").read_bytes()
    opened(tmp_path / "other").close()
    write_keys(tmp_path, (tmp_path / "other" / "keys").read_bytes())
    with caplog.at_level(logging.WARNING), opened(tmp_path, nvme="1MiB") as store:
        assert store.warmed(20)
        ns = store.namespace(model=MODEL, layout=small_layout())
        assert ns.match(ids(640)).reason is MissReason.ABSENT
        usage = store.usage().nvme
        assert usage is not None and usage.taken_bytes == 248 << 10
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelname == "WARNING" and "\n" not in line
    for words in (
        "1 slab (248.0 KiB)",
        f"{tmp_path}/keys does not hold the keys",
        "left alone",
        "counts against nvme=",
        "backup",
    ):
        assert words in line, line
    caplog.clear()
    write_keys(tmp_path, kept)
    with caplog.at_level(logging.WARNING), opened(tmp_path, nvme="1MiB") as store:
        assert store.warmed(20)
        assert store.namespace(model=MODEL, layout=small_layout()).match(ids(640)).blocks == 10
    assert not caplog.records


def test_slabs_that_cannot_be_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored_on_disk(tmp_path)
    os.truncate(tmp_path / "nvme" / "00000001.slab", 100_000)
    with caplog.at_level(logging.WARNING):
        opened(tmp_path, nvme="1MiB").close()
    (record,) = caplog.records
    for words in ("1 slab (97.7 KiB)", "unusable", "counts against nvme=", f"kvstore fsck {tmp_path} says why"):
        assert words in record.getMessage(), record.getMessage()
