"""A data directory that an earlier version wrote opens warm, with every block as it was stored."""

from __future__ import annotations

import logging
import tarfile
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import torch

import kvstore
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.fsck import check
from kvstore.node import EmbeddedStore
from waiting import wait_until
from workbench import blank_pages, blank_planes, ids, same_tokens, small_layout

EARLIER = Path(__file__).parents[1] / "data/earlier/directory.tar.xz"
BLOCKS = 6
NAMESPACES = {
    "a": (small_layout(), "raw"),
    "b": (small_layout(layer_shards=2), "raw"),
    "c": (small_layout(head_dim=64), "int8-kc64"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with tarfile.open(EARLIER) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "kv").chmod(0o700)
    return tmp_path / "kv"


def stored_pages(layout: Layout, seed: int) -> Pages:
    """What the earlier version was given."""
    planes = blank_planes(layout, BLOCKS, 64)
    for layer, tensors in planes.items():
        for at, tensor in enumerate(tensors):
            values = (torch.arange(tensor.numel(), dtype=torch.float32) % 61 - 30) / 8 + layer + at + seed
            tensor.copy_(values.reshape(tensor.shape))
    return Pages(planes, range(BLOCKS), 64)


def test_it_opens_warm(directory: Path) -> None:
    with kvstore.open(f"embedded:{directory}", dram="1MiB", nvme="2MiB", slab="256KiB") as store:
        assert store.warmed(20)
        for seed, (model, (layout, codec)) in enumerate(NAMESPACES.items()):
            namespace = store.namespace(model=model, layout=layout, codec=codec)
            into, tokens = blank_pages(layout, BLOCKS), ids(64 * BLOCKS, 1000 * seed)
            with namespace.lease(namespace.match(tokens), deadline_ms=20_000) as lease:
                assert namespace.get(lease, into).tokens == 64 * BLOCKS, (model, lease.reason, lease.detail)
            stored = stored_pages(layout, seed)
            if codec == "raw":
                assert same_tokens(stored, into, range(64 * BLOCKS))
            else:  # 8 bits: as near as a step of its scale, which is below the largest number / 127
                for layer, planes in stored.planes.items():
                    for was, came in zip(planes, into.planes[layer], strict=True):
                        assert (was.float() - came.float()).abs().max() <= was.float().abs().max() / 127
        store.check()


def test_its_frames_and_its_index_are_sound(directory: Path) -> None:
    found = check(directory)
    assert found.is_well, found.to_dict()


def held(store: EmbeddedStore) -> dict[str, int]:
    """Readable blocks by codec."""
    found: Counter[str] = Counter()
    for one in store.core.namespaces():
        found[one.namespace.codec] += one.blocks
    return dict(+found)


def test_what_a_removed_codec_wrote_is_missed_and_gives_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six blocks of `int8-th` as model a, and of `int8-kc64` as model b."""
    with tarfile.open(EARLIER.with_name("removed-codec.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    directory, layout = tmp_path / "kv", small_layout(head_dim=64)
    directory.chmod(0o700)
    assert check(directory).is_well
    with kvstore.open(f"embedded:{directory}", dram="1MiB", nvme="2MiB", slab="256KiB") as store:
        assert store.warmed(20)
        assert held(store) == {"int8-th": BLOCKS, "int8-kc64": BLOCKS}
        ours = store.namespace(model="a", layout=layout, codec="int8-th")
        kept = store.namespace(model="b", layout=layout, codec="int8-kc64")
        assert ours.namespace.codec == "int8-kc64"
        (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert line == "codec 'int8-th' was removed and is 'int8-kc64' now; name that"
        assert ours.match(ids(64 * BLOCKS)).blocks == 0 and kept.match(ids(64 * BLOCKS, 1000)).blocks == BLOCKS
        puts = count(1)

        def has_given_way() -> bool:
            first = next(puts)
            ours.put(ids(64 * BLOCKS, 10_000 * first), stored_pages(layout, first))
            return "int8-th" not in held(store)

        wait_until(has_given_way)
        store.check()
