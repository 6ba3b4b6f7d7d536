"""What engines call their models is shown beside the fingerprint, stays over a restart, and decides nothing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import kvstore
from kvstore.block import display_names
from kvstore.block.display_names import MOST_CHARACTERS, MOST_NAMES, DisplayNames, read_names, shown
from kvstore.fsck import check
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from tiering.faults import Faults
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

TENANT, OTHER = b"t" * 16, b"o" * 16
DIGEST = b"d" * 32


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("a\x1b[2J\nb\0c", "a[2Jbc"),
        ("\ud800x", "x"),
        ("x" * 5000 + "/the end", "..." + "x" * (MOST_CHARACTERS - 11) + "/the end"),
        ("", ""),
        ("   ", ""),
    ],
)
def test_a_name_is_cut_and_printable(given: str, seen: str) -> None:
    assert shown(given) == seen and len(shown(given)) <= MOST_CHARACTERS


def test_names_are_kept_per_tenant_and_bounded(tmp_path: Path) -> None:
    names = DisplayNames(tmp_path / "names")
    names.note(OTHER, DIGEST, "another's")
    for number in range(MOST_NAMES + 5):
        names.note(TENANT, number.to_bytes(32, "big"), f"model {number}")
    names.note(TENANT, (7).to_bytes(32, "big"), "")
    names.close()
    again = DisplayNames(tmp_path / "names")
    assert again.get(OTHER, DIGEST) == "another's", "one tenant's names take nothing from another's"
    assert again.get(TENANT, (4).to_bytes(32, "big")) == "" and again.get(TENANT, (7).to_bytes(32, "big")) == "model 7"
    assert len(read_names(tmp_path / "names")[TENANT.hex()]) == MOST_NAMES
    again.forget(TENANT)
    again.close()
    assert list(read_names(tmp_path / "names")) == [OTHER.hex()]


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "names": 5}',
        b'{"version": 1}',
        b'{"version": 1, "names": [1]}',
        b"\xff",
        b"[" * 9000,
    ],
)
def test_a_damaged_file_costs_the_names_alone(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "names").write_bytes(contents)
    (tmp_path / "names").chmod(0o600)
    names = DisplayNames(tmp_path / "names")
    assert names.get(TENANT, DIGEST) == ""
    names.note(TENANT, DIGEST, "m")
    names.close()
    assert read_names(tmp_path / "names") == {TENANT.hex(): {DIGEST.hex(): "m"}}


def test_a_disk_that_takes_no_names_is_told(tmp_path: Path) -> None:
    faults = Faults(SystemClock())
    names = DisplayNames(tmp_path / "missing" / "names", faults)
    names.note(TENANT, DIGEST, "m")
    names.close()
    assert names.get(TENANT, DIGEST) == "m" and [one.what for one in faults.now()] == ["writes of model names"]


def test_a_name_is_written_once_the_disk_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_names, "FAILED_PAUSE_SECONDS", 0.01)
    faults, path = Faults(SystemClock()), tmp_path / "missing" / "names"
    names = DisplayNames(path, faults)
    names.note(TENANT, DIGEST, "m")
    wait_until(lambda: bool(faults.now()))
    path.parent.mkdir()
    wait_until(lambda: not faults.now())
    names.close()
    assert DisplayNames(path).get(TENANT, DIGEST) == "m"


@pytest.mark.parametrize("config", [None, {"rope": "1", "kept": "all"}])
def test_an_embedded_stores_name_is_the_one_it_was_given(tmp_path: Path, config: dict[str, str] | None) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB") as store:
        handle = store.namespace(model=MODEL, layout=small_layout(), config=config, name="m")
        tenant = store.tenant_keys(store.tenant).tenant  # type: ignore[union-attr]
        assert store.names.get(tenant, handle.namespace.digest()) == "m"  # type: ignore[union-attr]


def test_a_name_decides_nothing_and_is_there_after_a_restart(tmp_path: Path) -> None:
    layout = small_layout()
    for turn in range(2):
        with Sidecar(tmp_path, nvme="16MiB", indexes=LmdbMaker) as sidecar:
            assert sidecar.store.warmed(60)
            if turn:
                assert [one.name for one in sidecar.admin.facts().namespaces] == ["/models/a name"], (
                    "nobody told it again"
                )
            with sidecar.client() as client:
                handle = client.namespace(model=MODEL, layout=layout, name="" if turn else "/models/a\n name")
                if not turn:
                    assert handle.put(ids(640), random_pages(layout, 10), durability="disk").reason is None
                assert client.namespace(model=MODEL, layout=layout, name="other").match(ids(640)).tokens == 640
                assert client.namespace(model=MODEL, layout=layout, name="/models/a name").match(ids(640)).tokens == 640
            facts = sidecar.admin.facts().namespaces
            assert len(facts) == 1 and facts[0].name == "/models/a name" and facts[0].model == MODEL
    result = check(str(tmp_path / "kv"))
    (namespace,) = result.to_dict()["namespaces"]  # type: ignore[misc]
    assert namespace["tenant_name"] == "default" and namespace["name"] == "/models/a name"  # type: ignore[index]
    keys = json.loads((tmp_path / "kv" / "names").read_text())
    assert keys["version"] == 1


def test_clients_and_sidecars_of_before_understand_each_other() -> None:
    fields = [("packed", bytes), ("payload_bytes", list[int])]
    before = msgspec.defstruct("OpenNamespace", fields, array_like=True, frozen=True, tag="namespace")
    old, new = before(b"x", [1]), m.OpenNamespace(b"x", [1], "a name")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=before) == old
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=m.OpenNamespace) == m.OpenNamespace(b"x", [1])


def test_a_purge_takes_the_names_along(tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}/kv", dram="1MiB") as store:
        assert isinstance(store, kvstore.EmbeddedStore)
        store.namespace(model=MODEL, layout=small_layout(), name="mine")
        store.purge("default")
    assert read_names(tmp_path / "kv" / "names") == {}
