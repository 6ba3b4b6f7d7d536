"""A directory of keys: what is written, what may stand there, and what an operator may do with it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import workbench
from kvstore.block.errors import BadInput, KeysUnusable
from kvstore.block.identity import TenantKeys
from kvstore.block.key_file import KeyFile
from kvstore.keys import pool_keys
from kvstore.keys.pool_keys import (
    MAX_EPOCHS,
    MOST_FILE_BYTES,
    PoolKeys,
    SecretDirectory,
    TenantSecrets,
    file_name,
    read_source,
)
from tiering.files import Unfit

SECRET, OTHER = "ab" * 32, "cd" * 32
GOOD: dict[str, Any] = {
    "version": 1,
    "tenant": "a",
    "identity": {"epoch": 1, "secret": SECRET},
    "epochs": [{"epoch": 1, "secret": SECRET}, {"epoch": 2, "secret": OTHER}],
}
NAMES = ["default", "search-1", "A_b", "mit Leerzeichen", "ü", "x" * 64, ".hidden", "..", "a/b", "a.b"]


def one_line(error: BaseException, *fragments: str) -> bool:
    assert SECRET[:16] not in str(error) and OTHER[:16] not in str(error), "no secret in a message"
    return workbench.one_line(error, *fragments)


@contextmanager
def refused(kind: Any, *fragments: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert one_line(caught.value, *fragments)


def made(path: Path, *tenants: str) -> SecretDirectory:
    directory = SecretDirectory(path)
    pool_keys.init(directory, tenants or ("default",), secrets.token_bytes)
    return directory


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_tenant_has_a_file_of_mode_0400_that_says_whose_it_is(tmp_path: Path, name: str) -> None:
    directory = made(tmp_path / "d", name)
    assert os.listdir(tmp_path / "d") == [file_name(name)] and "/" not in file_name(name) and file_name(name)[0] != "."
    file = tmp_path / "d" / file_name(name)
    assert stat.S_IMODE(file.stat().st_mode) == 0o400 and stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700
    assert list(PoolKeys.read(directory).tenants) == [name]


def test_names_have_files_of_their_own() -> None:
    assert len({file_name(name) for name in NAMES}) == len(NAMES)
    assert all(
        set(file_name(name)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
        for name in NAMES
    )


def test_what_is_written_is_read() -> None:
    one = TenantSecrets.unpack(json.dumps(GOOD).encode())
    assert TenantSecrets.unpack(one.pack()) == one and SECRET not in repr(one)
    first, second = one.in_epochs()
    assert first == TenantKeys.derive(bytes.fromhex(SECRET)) and second == first.in_epoch(bytes.fromhex(OTHER), 2)
    assert one.fingerprint == first.fingerprint.hex() == second.fingerprint.hex()


def changed(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "[" * 50_000,
        "\x00\xff",
        changed(version=2),
        changed(version=True),
        changed(version="1"),
        changed(tenant=""),
        changed(tenant=1),
        changed(tenant="x" * 65),
        changed(tenant="b"),
        changed(identity=None),
        changed(identity={"epoch": 1}),
        changed(identity={"epoch": 1, "secret": OTHER}),
        changed(identity={"epoch": 2, "secret": SECRET}),
        changed(epochs=[]),
        changed(epochs={}),
        changed(epochs=[{"epoch": 1, "secret": SECRET}] * 2),
        changed(epochs=list(reversed(GOOD["epochs"]))),
        changed(epochs=[{"epoch": 1, "secret": SECRET[:-2]}]),
        changed(epochs=[{"epoch": 1, "secret": None}]),
        changed(epochs=[{"epoch": 0, "secret": SECRET}]),
        changed(epochs=[{"epoch": True, "secret": SECRET}]),
        changed(epochs=[{"epoch": 1.0, "secret": SECRET}]),
        changed(epochs=[{"epoch": 1 << 32, "secret": SECRET}]),
        changed(epochs=[{"epoch": number, "secret": OTHER} for number in range(2, MAX_EPOCHS + 3)]),
        '{"version": 1, "tenant": "a", "identity": {"epoch": 1' + "0" * 5000 + "}}",
        changed()[: len(changed()) // 2],
        changed() + "\0" * MOST_FILE_BYTES,
    ],
)
def test_a_damaged_file_is_said_and_costs_nothing_else(tmp_path: Path, contents: str) -> None:
    directory = made(tmp_path / "d")
    file = tmp_path / "d" / "a.key"
    file.write_bytes(contents.encode("latin-1"))
    file.chmod(0o400)
    there = PoolKeys.read(directory)
    assert list(there.tenants) == ["default"] and list(there.faults) == ["a.key"]
    for attempt in (
        lambda: pool_keys.init(directory, ["a"], secrets.token_bytes),
        lambda: pool_keys.rotate(directory, "a", secrets.token_bytes),
        lambda: pool_keys.retire(directory, "a", 1),
        lambda: read_source(tmp_path / "d"),
        *([lambda: read_source(file)] if contents != changed(tenant="b") else []),  # by itself it may have any name
    ):
        with refused(KeysUnusable, str(file)):
            attempt()
    assert file.read_bytes() == contents.encode("latin-1"), "what is damaged is left for somebody to look at"


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "dangling", "loop", "device", "huge", "open", "write"])
def test_what_is_no_file_of_keys_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    directory = made(tmp_path / "d")
    file = tmp_path / "d" / "a.key"
    match kind:
        case "fifo":
            os.mkfifo(file, 0o400)
        case "directory":
            file.mkdir()
        case "socket":
            import socket

            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(file))
        case "dangling":
            file.symlink_to(tmp_path / "nowhere")
        case "loop":
            file.symlink_to(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "huge":
            with file.open("wb") as huge:
                huge.truncate(1 << 40)
            file.chmod(0o400)
        case _:
            file.write_text(changed())
            file.chmod(0o404 if kind == "open" else 0o420)
    there = PoolKeys.read(directory)
    assert list(there.tenants) == ["default"] and list(there.faults) == ["a.key"], there.faults
    words = {"fifo": "FIFO", "device": "device", "huge": "the most that it may have", "open": "0404"}
    assert words.get(kind, "") in there.faults["a.key"] and "\n" not in there.faults["a.key"]


def test_a_group_may_read_a_secret_that_is_roots(tmp_path: Path) -> None:
    """As Kubernetes mounts it where a pod has an fsGroup."""
    directory = made(tmp_path / "d")
    file = tmp_path / "d" / "default.key"
    if file.stat().st_uid != 0:
        pytest.skip("needs files of root's")
    file.chmod(0o440)
    assert list(PoolKeys.read(directory).tenants) == ["default"]
    file.chmod(0o444)
    assert not PoolKeys.read(directory).tenants


def test_too_many_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number in range(4097):
        (tmp_path / "d" / f"{number}.key").touch()
    with pytest.raises(Unfit):
        SecretDirectory(tmp_path / "d").names()
    with refused(KeysUnusable, str(tmp_path / "d"), "4096"):
        PoolKeys.read(SecretDirectory(tmp_path / "d"))


def mounted(path: Path, contents: dict[str, bytes], number: int) -> None:
    """As the kubelet does it: a new directory, and one link that is replaced."""
    new = path / f"..2026_{number}"
    new.mkdir(parents=True)
    for name, raw in contents.items():
        (new / name).write_bytes(raw)
        (new / name).chmod(0o400)
        if not (path / name).is_symlink():
            (path / name).symlink_to(f"..data/{name}")
    (path / "..data_tmp").symlink_to(new.name)
    os.replace(path / "..data_tmp", path / "..data")


def test_a_mounted_secret_is_read_followed_and_never_written(tmp_path: Path) -> None:
    source = made(tmp_path / "d")
    mount = SecretDirectory(tmp_path / "mount")
    mounted(mount.path, {"default.key": source.read("default.key")}, 1)
    assert PoolKeys.read(mount).tenants == PoolKeys.read(source).tenants
    before = mount.stamp()
    pool_keys.rotate(source, "default", secrets.token_bytes)
    mounted(mount.path, {"default.key": source.read("default.key")}, 2)
    assert mount.stamp() != before and PoolKeys.read(mount).tenants == PoolKeys.read(source).tenants
    for attempt in (
        lambda: pool_keys.rotate(mount, "default", secrets.token_bytes),
        lambda: pool_keys.init(mount, ["b"], secrets.token_bytes),
        lambda: pool_keys.take_in(mount, source.path),
    ):
        with refused(BadInput, str(mount.path), "mounted secret"):
            attempt()


# What an operator does ------------------------------------------------------------------------------------------------


def test_a_rotation_keeps_the_identity_and_numbers_are_not_used_again(tmp_path: Path) -> None:
    directory = made(tmp_path / "d")
    first = PoolKeys.read(directory).tenants["default"]
    second = pool_keys.rotate(directory, "default", secrets.token_bytes)
    assert second.fingerprint == first.fingerprint and [number for number, _ in second.epochs] == [1, 2]
    pool_keys.retire(directory, "default", 1)
    third = pool_keys.rotate(directory, "default", secrets.token_bytes)
    assert [number for number, _ in third.epochs] == [2, 3] and third.first == first.first
    with refused(BadInput, "epoch 3", "rotate first"):
        pool_keys.retire(directory, "default", 3)
    with refused(BadInput, "no epoch 1", "2, 3"):
        pool_keys.retire(directory, "default", 1)
    with refused(BadInput, "'nobody'", "default"):
        pool_keys.rotate(directory, "nobody", secrets.token_bytes)


def test_epochs_are_bounded(tmp_path: Path) -> None:
    directory = made(tmp_path / "d")
    for _ in range(MAX_EPOCHS - 1):
        pool_keys.rotate(directory, "default", secrets.token_bytes)
    with refused(BadInput, str(MAX_EPOCHS), "retire"):
        pool_keys.rotate(directory, "default", secrets.token_bytes)


def test_init_makes_all_or_none(tmp_path: Path) -> None:
    directory = made(tmp_path / "d")
    before = directory.read("default.key")
    with refused(BadInput, "default", PoolKeys.read(directory).tenants["default"].fingerprint):
        pool_keys.init(directory, ["b", "default"], secrets.token_bytes)
    assert directory.names() == ["default.key"] and directory.read("default.key") == before
    with pytest.raises(BadInput):
        pool_keys.init(directory, ["b", "bad\nname"], secrets.token_bytes)
    assert directory.names() == ["default.key"]


def test_another_identity_is_imported_after_an_explicit_cold_start_alone(tmp_path: Path) -> None:
    here, there = made(tmp_path / "here"), made(tmp_path / "there", "default", "b")
    before = here.read("default.key")
    with pytest.raises(BadInput) as caught:
        pool_keys.take_in(here, there.path)
    fingerprints = [PoolKeys.read(one).tenants["default"].fingerprint for one in (here, there)]
    assert one_line(caught.value, *fingerprints, "--cold-start")
    assert here.names() == ["default.key"] and here.read("default.key") == before, "nothing was changed"
    assert [one.tenant for one in pool_keys.take_in(here, there.path, ["b"])] == ["b"]
    pool_keys.take_in(here, there.path, cold_start=True)
    assert PoolKeys.read(here).tenants == PoolKeys.read(there).tenants


def test_an_older_state_does_not_come_back_by_an_import(tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    pool_keys.take_in(SecretDirectory(tmp_path / "copy"), here.path)
    copy = SecretDirectory(tmp_path / "copy")
    pool_keys.rotate(here, "default", secrets.token_bytes)
    with refused(BadInput, "epoch 2", "epoch 1", "other direction"):
        pool_keys.take_in(here, copy.path)
    pool_keys.rotate(copy, "default", secrets.token_bytes)
    with pytest.raises(BadInput):
        pool_keys.take_in(here, copy.path)  # two operators rotated: neither epoch 2 is the other's
    pool_keys.take_in(SecretDirectory(tmp_path / "new"), here.path)
    assert PoolKeys.read(SecretDirectory(tmp_path / "new")).tenants == PoolKeys.read(here).tenants


def test_a_stores_own_keys_become_a_pools(tmp_path: Path) -> None:
    own = KeyFile(tmp_path / "keys")
    keys = own.tenant("default")
    directory = SecretDirectory(tmp_path / "d")
    (taken,) = pool_keys.take_in(directory, tmp_path / "keys")
    assert taken.in_epochs() == [keys] and PoolKeys.read(directory).tenants["default"] == taken
    (again,) = pool_keys.take_in(directory, tmp_path / "d" / "default.key")
    assert again == taken
    for source in ("nowhere", "nowhere.key"):
        with refused((BadInput, KeysUnusable), source):
            pool_keys.take_in(directory, tmp_path / source)
    with refused(BadInput, "'guest'", "default"):
        pool_keys.take_in(directory, tmp_path / "keys", ["guest"])


@pytest.mark.parametrize("step", ["secret draft made", "secret written", "secret synced", "secret renamed"])
@pytest.mark.parametrize("work", ["init", "import", "cold start", "rotate", "retire"])
def test_killed_between_two_steps_it_was_done_or_not(tmp_path: Path, work: str, step: str) -> None:
    source, target = made(tmp_path / "source"), SecretDirectory(tmp_path / "d")
    if work != "init":
        pool_keys.take_in(target, source.path if work != "cold start" else made(tmp_path / "other").path)
    if work in ("import", "retire"):
        pool_keys.rotate(source if work == "import" else target, "default", secrets.token_bytes)
    before = target.read("default.key") if work != "init" else None

    def do(directory: SecretDirectory) -> None:
        match work:
            case "init":
                pool_keys.init(directory, ["default"], secrets.token_bytes)
            case "import" | "cold start":
                pool_keys.take_in(directory, source.path, cold_start=work == "cold start")
            case "rotate":
                pool_keys.rotate(directory, "default", secrets.token_bytes)
            case "retire":
                pool_keys.retire(directory, "default", 1)

    child = os.fork()
    if not child:
        try:
            do(
                SecretDirectory(
                    target.path, lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == step else None
                )
            )
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    there = PoolKeys.read(target)
    assert not there.faults
    after = target.read("default.key") if "default" in there.tenants else None
    assert (after == before) is (step != "secret renamed")
    if step != "secret renamed":
        do(target)  # what was left behind hinders no later change
        assert target.read("default.key") != before
    assert set(os.listdir(target.path)) == {"default.key"}


def test_two_at_once(tmp_path: Path) -> None:
    """Importers, and others who write: each one does all of its work or says that another one is at it."""
    sources = [made(tmp_path / f"source-{number}", "a", "b") for number in range(4)]
    target, told = SecretDirectory(tmp_path / "d"), []

    def import_one(source: SecretDirectory) -> None:
        try:
            pool_keys.take_in(target, source.path)
            told.append("done")
        except BadInput as error:
            assert one_line(error)
            told.append("at work" if "at work" in str(error) else "another identity")

    threads = [threading.Thread(target=import_one, args=(source,)) for source in sources]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(told) == 4 and told.count("done") == 1, told
    assert PoolKeys.read(target).tenants in [PoolKeys.read(source).tenants for source in sources]


def test_another_one_at_work_is_said(tmp_path: Path) -> None:
    directory = made(tmp_path / "d")
    with directory.locked(), pytest.raises(BadInput) as caught:
        pool_keys.rotate(directory, "default", secrets.token_bytes)
    assert one_line(caught.value, str(directory.path), "at work")
    pool_keys.rotate(directory, "default", secrets.token_bytes)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "d", Path("/proc/d")):
        with refused(KeysUnusable, str(path)):
            pool_keys.init(SecretDirectory(path), ["a"], secrets.token_bytes)
