"""Chunks in a real sidecar for threads that may wait: chains, what is there of them, and no fault gets out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from asking import Asking
from engine_adapter.chunks import (
    SLICE_BYTES,
    ChunkOutcomes,
    ChunkRun,
    ChunkSpace,
    chunk_key,
    chunk_layout,
    chunk_planes,
)
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.codec import RawCodec
from kvstore.block.errors import BadInput
from kvstore.block.pages import Pages
from kvstore.client.sidecar_store import SidecarStore
from service.sidecar import Sidecar, patient
from tiering.frame import HEADER_BYTES, MAX_SLICES, digest
from tiering.tier import FrameSpan
from waiting import wait_until

SECONDS = 30
SLOTS, SIZES, TOKENS = 200, (64 << 10, 32 << 10, 4096), 64
NAMES = [b"%064x" % number for number in range(150)]


class Engine:
    """A host pool whose chunks lie in three runs each, and what is done with them."""

    def __init__(self, store: SidecarStore, seed: int = 1, *, opens: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.memory = [rng.integers(0, 256, (SLOTS, size), dtype=np.uint8) for size in SIZES]
        runs = [ChunkRun(one.ctypes.data, size, size) for one, size in zip(self.memory, SIZES, strict=True)]
        self.outcomes = ChunkOutcomes()
        spec = NamespaceSpec(1, "", "m", chunk_layout("kv", TOKENS, SIZES), "raw", 0, {})
        self.space = ChunkSpace(spec, runs, SLOTS, (store, store), self.outcomes)
        if opens:
            wait_until(lambda: self.space.handle is not None)

    def chunk(self, slot: int) -> bytes:
        return b"".join(one[slot].tobytes() for one in self.memory)

    def store(self, names: Sequence[bytes], slots: Sequence[int], before: Sequence[bytes] = ()) -> list[bool]:
        return self.space.store(before, names, self.space.pages(slots), 1000 * SECONDS)[0]

    def load(self, names: Sequence[bytes], slots: Sequence[int]) -> int:
        return self.space.load(names, self.space.pages(slots), 1000 * SECONDS)


@pytest.fixture
def engine(sidecar: Sidecar) -> Iterator[Engine]:
    with sidecar.client() as store:
        made = Engine(store)
        yield made
        made.space.close()


def rows(sidecar: Sidecar, engine: Engine, names: Sequence[bytes]) -> list[int]:
    """How deep in a chain each of these stands."""
    handle: Any = engine.space.handle
    index = sidecar.core.blocks.index
    found = [index.find(0, key) for key in engine.space.prompt(handle, names).keys]
    return [index.depth(row) for row in found]


def test_a_chain_is_stored_found_and_loaded(engine: Engine, sidecar: Sidecar) -> None:
    assert engine.space.found(NAMES) == 0
    assert engine.store(NAMES[:100], range(100)) == [True] * 100
    assert engine.store(NAMES[100:120], range(100, 120), before=NAMES[:100]) == [True] * 20
    assert rows(sidecar, engine, NAMES[:120]) == list(range(120)), "each behind the one before"
    assert engine.space.found(NAMES) == 120 and engine.space.found(NAMES[50:]) == 70
    wanted, untouched = [engine.chunk(slot) for slot in range(40, 90)], engine.chunk(199)
    assert engine.load(NAMES[40:90], range(149, 199)) == 50, "in the middle of a prompt, without what is before"
    assert [engine.chunk(slot) for slot in range(149, 199)] == wanted and engine.chunk(199) == untouched
    assert engine.load(NAMES[115:130], range(20)[:15]) == 5
    counts = engine.outcomes.take()
    assert (counts["stored"], counts["loaded"], counts["failed_loads"]) == (120, 55, 10) and "faults" not in counts


def test_what_cannot_stand_behind_what_is_before_stands_by_itself(engine: Engine, sidecar: Sidecar) -> None:
    assert engine.store(NAMES[50:60], range(10), before=NAMES[:50]) == [True] * 10, "which is not there"
    assert rows(sidecar, engine, NAMES[50:60]) == [0] * 10
    assert engine.store(NAMES[:50], range(10, 60)) == [True] * 50
    assert engine.store(NAMES[60:70], range(60, 70), before=NAMES[:60]) == [True] * 10, "a row stands elsewhere"
    assert engine.space.found(NAMES) == 70 and engine.load(NAMES[:70], range(100, 170)) == 70
    order = [*range(10, 60), *range(10), *range(60, 70)]
    assert [engine.chunk(slot) for slot in range(100, 170)] == [engine.chunk(slot) for slot in order]


def test_what_is_stored_again_is_counted_as_present(engine: Engine) -> None:
    engine.store(NAMES[:10], range(10))
    assert engine.space.store([], NAMES[:15], engine.space.pages(range(15)), 1000 * SECONDS) == ([True] * 15, 5)
    assert engine.space.store([], NAMES[:15], engine.space.pages(range(15)), 1000 * SECONDS) == ([True] * 15, 0)
    assert engine.outcomes.take() == {"stored": 15, "present": 25}


def test_a_batch_larger_than_may_be_pinned_is_loaded_in_pieces(tmp_path: Path) -> None:
    limits = kvstore.Limits(pinned_fraction=0.1)
    with Sidecar(tmp_path, dram="64MiB", limits=limits) as sidecar, sidecar.client() as store:
        engine = Engine(store)
        assert all(engine.store(NAMES, range(150)))
        wanted = [engine.chunk(slot) for slot in range(100)]
        assert engine.load(NAMES[:100], range(100, 200)) == 100
        assert [engine.chunk(slot) for slot in range(100, 200)] == wanted
        engine.space.close()


def test_a_corrupt_chunk_ends_what_is_loaded(engine: Engine, sidecar: Sidecar) -> None:
    engine.store(NAMES[:20], range(20))
    handle: Any = engine.space.handle
    with handle.lease(handle.match(engine.space.prompt(handle, NAMES[7:8]))) as lease:
        sidecar.core.spans([lease.reply.places[1][0]])[0].view[HEADER_BYTES + 77] ^= 1
    engine.outcomes.take()
    assert engine.load(NAMES[:20], range(100, 120)) == 7
    assert engine.outcomes.take() == {"loaded": 7, "failed_loads": 13, "corrupt": 1}
    assert engine.space.found(NAMES[:20]) == 7
    assert engine.store(NAMES[:20], range(20)) == [True] * 20, "it is filled again"
    assert engine.load(NAMES[:20], range(100, 120)) == 20


def test_pinning_finds_chunks_in_any_tier_and_promotes_none(tmp_path: Path) -> None:
    url, sizes = f"embedded:{tmp_path / 'kv'}", {"dram": "16MiB", "nvme": "64MiB", "extent": "1MiB"}
    with kvstore.open(url, **sizes) as store:
        assert all(Engine(store).store(NAMES[:20], range(20)))
    with kvstore.open(url, **sizes) as store:
        engine = Engine(store)
        found, lease = engine.space.pin(NAMES, SECONDS)
        assert found == 20 and lease is not None and not lease.blocks, "all are on disk"
        assert engine.load(NAMES[:8], range(8)) == 8
        found, lease = engine.space.pin(NAMES, SECONDS)
        assert found == 20 and lease is not None and lease.blocks == 8 and store.usage().leases == 1
        lease.release()
        assert store.usage().leases == 0 and engine.space.pin(NAMES[20:], SECONDS) == (0, None)


def test_clearing_evicts_for_all(engine: Engine, sidecar: Sidecar) -> None:
    engine.store(NAMES[:20], range(20))
    assert engine.space.clear() and engine.space.found(NAMES[:20]) == 0
    assert engine.store(NAMES[:20], range(20)) == [True] * 20


def test_without_a_sidecar_nothing_is_found_and_nothing_raises(tmp_path: Path) -> None:
    with patient(kvstore.open(f"unix:{tmp_path / 'absent.sock'}")) as store:
        engine = Engine(store, opens=False)
        space = engine.space
        assert space.found(NAMES[:2]) == space.load(NAMES[:2], space.pages([0, 1]), 10) == 0
        assert space.store([], NAMES[:2], space.pages([0, 1]), 10) == ([False] * 2, 0) and not space.clear()
        assert engine.outcomes.take() == {"missing": 2, "failed_loads": 2, "failed_stores": 2}
        space.close()


def test_a_fault_is_caught_and_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault")

    engine.store(NAMES[:1], [0])
    monkeypatch.setattr(engine.space, "prompt", fail)
    engine.outcomes.take()
    assert engine.space.found(NAMES[:2]) == engine.load(NAMES[:2], [0, 1]) == 0
    assert engine.store(NAMES[:2], [0, 1]) == [False, False]
    assert engine.outcomes.take() == {"missing": 2, "failed_loads": 2, "failed_stores": 2, "faults": 3}


def test_engines_that_store_one_beginning_at_once_store_every_end(sidecar: Sidecar) -> None:
    """In one batch, or chunk by chunk: each engine is told that all are held."""
    with sidecar.client() as one, sidecar.client() as other:
        engines = [Engine(one), Engine(other)]
        begin = threading.Barrier(2)

        def run(which: int, told: list[list[bool]]) -> None:
            for turn in range(20):
                names = [b"%d %d" % (turn, at if at < 20 else 100 * which + at) for at in range(30)]
                begin.wait(SECONDS)
                told.append(engines[which].store(names, range(30)))
                begin.wait(SECONDS)
                told.append([engines[which].store([b"a%d %d" % (turn, at)], [at])[0] for at in range(10)])
                assert engines[which].space.found(names) == 30

        answers: list[list[list[bool]]] = [[], []]
        threads = [threading.Thread(target=run, args=(which, answers[which])) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert [len(told) for told in answers] == [40, 40] and all(all(told) for each in answers for told in each)
        for engine in engines:
            engine.space.close()


@pytest.mark.parametrize("theirs", [[(0, 20)], [(5, 8), (20, 21)]])
def test_what_a_hung_engine_is_storing_counts_as_held_and_the_rest_is_stored(
    theirs: list[tuple[int, int]], engine: Engine, sidecar: Sidecar
) -> None:
    with sidecar.client() as client:
        hung = Engine(client)
        handle: Any = hung.space.handle
        for first, stop in theirs:
            keys = hung.space.prompt(handle, NAMES[first:stop]).keys
            assert Asking(handle.door).reserve(handle.number, keys).reservation
        in_flight = sum(stop - first for first, stop in theirs)
        assert engine.space.store([], NAMES[:30], engine.space.pages(range(30)), 20_000) == (
            [True] * 30,
            30 - in_flight,
        )
        assert engine.outcomes.take() == {"stored": 30 - in_flight, "in_flight": in_flight}
        here = [not any(first <= at < stop for first, stop in theirs) for at in range(30)]
        assert engine.space.which(NAMES[:30]) == here and engine.space.found(NAMES[:20]) == theirs[0][0]
        hung.space.close()


# What a chunk is in the store's words ---------------------------------------------------------------------------------


CHUNK_BYTES = 3 * (128 << 10)


@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 784, 4096])
@pytest.mark.parametrize("size", [1, 4001, 4096, 12288, 1 << 20, 3 * (128 << 10), 40 << 20])
def test_layouts_hold_all_bytes_in_slices(tokens: int, size: int) -> None:
    layout = chunk_layout("g", tokens, [size])
    (part,) = layout.parts
    assert part.raw_bytes == size and layout.block_tokens == tokens
    assert len(part.layers) <= 32 and (len(part.layers) == 1 or part.slice_bytes >= SLICE_BYTES)


@pytest.mark.parametrize(("tokens", "size"), [(32768, 32768), (16385, 4096), (64, 0)])
def test_sizes_that_no_block_can_have_are_refused_in_one_line(tokens: int, size: int) -> None:
    with pytest.raises(BadInput, match="at most") as raised:
        chunk_layout("g", tokens, [size])
    assert "\n" not in str(raised.value)


def test_runs_of_several_sizes_are_several_groups_within_what_a_frame_can_name() -> None:
    layout = chunk_layout("g", 64, [128 << 10, 4096] + [16384] * 600)
    assert sum(part.raw_bytes for part in layout.parts) == (128 << 10) + 4096 + 600 * 16384
    assert len({group.name for group in layout.groups}) == len(layout.groups) == 5
    assert max(len(part.layers) for part in layout.parts) <= MAX_SLICES


@pytest.mark.parametrize("tokens", [64, 784])
@pytest.mark.parametrize("sizes", [[CHUNK_BYTES], [65536, 65536], [4096] * 8, [128 << 10, 192, 4096], [2352, 5, 1568]])
def test_planes_are_views_of_the_whole_chunk(sizes: list[int], tokens: int) -> None:
    slots, rng = 8, np.random.default_rng(3)
    memory = [rng.integers(0, 256, (slots, size + 64), dtype=np.uint8) for size in sizes]
    before = [one.copy() for one in memory]
    runs = [ChunkRun(one.ctypes.data, size + 64, size) for one, size in zip(memory, sizes, strict=True)]
    layout, planes = chunk_layout("g", tokens, sizes), chunk_planes(tokens, runs, slots)
    assert b"".join(plane[5].numpy().tobytes() for (plane,) in planes.values()) == b"".join(
        one[5, :size].tobytes() for one, size in zip(memory, sizes, strict=True)
    )
    pages = Pages(planes, [5, 2], tokens)
    for part in layout.parts:  # through the codec, from slots 5 and 2 to slot 7 and back again
        coder, rows = RawCodec().bind(pages, layout, part), tokens // part.group.row_tokens
        payloads = [bytearray(part.raw_bytes) for _ in range(2)]
        spans = [FrameSpan(np.frombuffer(one, np.uint8).ctypes.data, memoryview(one), one) for one in payloads]
        digests: list[list[bytes]] = [one for one in coder.encode([0, rows], spans, digest) if isinstance(one, list)]
        into = RawCodec().bind(Pages(planes, [7, 0], tokens), layout, part)
        assert into.decode(spans, [0, rows], 0, digests, digest) == 2
    for one, old, size in zip(memory, before, sizes, strict=True):
        assert np.array_equal(one[[7, 0], :size], old[[5, 2], :size])
        assert np.array_equal(one[1:7], old[1:7]) and np.array_equal(one[:, size:], old[:, size:]), "and nothing else"


def test_keys_tell_names_apart(tmp_path: Path) -> None:
    with kvstore.embedded(str(tmp_path / "kv"), dram="16MiB") as store:
        space = store.namespace(model="m", layout=chunk_layout("g", 64, [CHUNK_BYTES]))
        assert len({chunk_key(space, name) for name in (b"one", b"two", b"")}) == 3
