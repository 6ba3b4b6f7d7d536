"""Pages on a device, by way of streams: right in every legal order, and with any one wait taken out, found out.

What comes out is compared with what plain torch makes of the same pages. A hazard is the same story without one wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

from chaos import ChaosEvent, NoWait
from chaos_route import ChaosRoute, needs_interpreter
from happens_before import HazardError, Region
from kv_bench.on_device import AtOnceDevice
from kv_kernels import gpu, int8, triton_pools
from kv_kernels.copies import BlockCopy, Flaw
from kv_kernels.cuda import Direction
from kv_kernels.device_copy import DeviceCopy, DeviceTransfers, Moving
from kv_kernels.host import Paged
from kv_kernels.int8_form import slice_form
from kv_kernels.plain import PlainCopy
from kv_kernels.routes import block_copy
from paged_memory import kernels_can_run
from tiering.frame import digest
from tiering.tier import FrameSpan

__all__ = ["kernels_can_run"]

pytestmark = [needs_interpreter, pytest.mark.usefixtures("kernels_can_run")]

LAYERS, HEADS, WIDTH, TOKENS, PAGE_TOKENS = 2, 1, 4, 64, 32
SHAPE = (PAGE_TOKENS, HEADS, WIDTH)
CODECS = ["raw", int8.KC64]
FORMS = {int8.KC64: slice_form(HEADS, TOKENS, (WIDTH, WIDTH), 2)}
SLICE_BYTES = {"raw": 2 * HEADS * TOKENS * WIDTH * 2, **{name: form.size_bytes for name, form in FORMS.items()}}


def planes_of(pages: int, seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn((pages, *SHAPE), generator=generator).to(torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)
    ]


def slots_of(codec: str, blocks: int) -> list[FrameSpan]:
    """Payloads in memory of their own, with a gap between them, as headers make one."""
    size = LAYERS * SLICE_BYTES[codec]
    memory = torch.zeros(blocks, size + 64, dtype=torch.uint8)
    views = [memoryview(row.numpy()) for row in memory]
    return [FrameSpan(row.data_ptr() + 64, view[64:]) for row, view in zip(memory, views, strict=True)]


def region_of(span: FrameSpan) -> Region:
    return Region(span.address, len(span.view))


def copy_of(codec: str, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int], route: Any) -> BlockCopy:
    return block_copy(FORMS.get(codec), Paged(planes, table, PAGE_TOKENS, TOKENS), "bfloat16", route)


def plain_of(codec: str, planes: Sequence[Sequence[torch.Tensor]], table: Sequence[int]) -> BlockCopy:
    return PlainCopy(FORMS.get(codec), Paged(planes, table, PAGE_TOKENS, TOKENS))


def same(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def good(encoded: Any) -> list[list[bytes]]:
    """Encoded blocks without a flaw."""
    found = list(encoded)
    assert all(isinstance(one, list) for one in found)
    return found


@dataclass
class Story:
    """An engine writes pages, a prompt is stored, the pages are used for something else, and it is loaded again."""

    route: ChaosRoute
    codec: str = "raw"
    blocks: int = 5
    is_locked: bool = False

    def __post_init__(self) -> None:
        self.pages = 2 * self.blocks + 1
        self.table = list(range(self.pages - 1, 0, -1))
        self.tokens = [TOKENS * block for block in range(self.blocks)]
        self.planes = [
            [torch.zeros((self.pages, *SHAPE), dtype=torch.bfloat16) for _ in range(2)] for _ in range(LAYERS)
        ]
        self.slots = slots_of(self.codec, self.blocks)
        if self.is_locked:
            start = self.slots[0].address - 64
            size = self.slots[-1].address + len(self.slots[-1].view) - start
            self.route.transfers.extents.adopt(start, size, lambda leave: None, writable=True)
            self.route.lock()

    def steps(self, values: list[list[torch.Tensor]], writes: bool = True) -> None:
        """The engine's own work with these pages, which nobody waits for: they are written, or read."""
        flat = [plane for layer in self.planes for plane in layer]
        regions = [Region(plane.data_ptr(), plane.numel() * 2) for plane in flat]
        given = [plane for layer in values for plane in layer]

        def body() -> None:
            for target, source in zip(flat, given, strict=True):
                if writes:
                    target.copy_(source)

        self.route.device.compute().step(body, **{"writes" if writes else "reads": regions})

    def copy(self) -> BlockCopy:
        return copy_of(self.codec, self.planes, self.table, self.route)

    def end(self) -> None:
        """Slots are given up, which is a race where something of this is under way."""
        for slot in self.slots:
            self.route.chaos.release([region_of(slot)], "gives up a slot")
        self.route.close()

    def run(self, rounds: int = 2) -> None:
        chaos, copy = self.route.chaos, self.copy()
        assert isinstance(copy, DeviceCopy)
        for turn in range(rounds):
            values, others = planes_of(self.pages, 10 * turn), planes_of(self.pages, 10 * turn + 1)
            self.steps(values)
            digests = []
            with closing(copy.encode(self.tokens, self.slots, digest)) as encoding:
                for slot, encoded in zip(self.slots, encoding, strict=True):
                    assert isinstance(encoded, list)
                    chaos.host_read([region_of(slot)], "seals a frame")
                    digests.append(encoded)
            self.steps(others)
            want = slots_of(self.codec, self.blocks)
            assert digests == good(plain_of(self.codec, values, self.table).encode(self.tokens, want, digest))
            assert [bytes(slot.view) for slot in self.slots] == [bytes(slot.view) for slot in want]
            self.steps(others, writes=False)
            assert copy.decode(self.slots, self.tokens, 0, digests, digest) == self.blocks
            chaos.host_read([Region(self.planes[0][0].data_ptr(), 2)], "looks at a page")
            chaos.finish()
            plain = plain_of(self.codec, others, self.table)
            assert plain.decode(want, self.tokens, 0, digests, digest) == self.blocks and same(self.planes, others)
            for slot in self.slots:
                chaos.release([region_of(slot)], "evicts a slot")
                chaos.take([region_of(slot)], "reserves a slot")


def segment_of(codec: str, blocks: float = 2) -> int:
    return int(blocks * LAYERS * SLICE_BYTES[codec]) // 16 * 16


@pytest.mark.parametrize("way", ["by the driver", "page-locked", "reached", "reached where it can be"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(2))
def test_every_legal_order_gives_the_right_bytes(seed: int, codec: str, way: str) -> None:
    route = ChaosRoute(seed, segment_of(codec), reaches=way.startswith("reached"))
    story = Story(route, codec, is_locked=way in ("page-locked", "reached"))
    story.run()
    story.route.close()


@pytest.mark.parametrize("codec", CODECS)
def test_payloads_that_are_larger_than_a_segment_go_by_layers(codec: str) -> None:
    story = Story(ChaosRoute(5, SLICE_BYTES[codec] + 16), codec, blocks=3)
    story.run(1)
    story.route.close()


HAZARDS = {
    "pages are written while a step reads them": ("load 0", "compute"),
    "kernels read tables before they are uploaded": ("load 1", "load 0"),
    "digests are read, and pages called loaded, before the kernels end": ("engine", "load 1"),
    "pages are stored before the forward has written them": ("save 0", "compute"),
    "a frame is sealed, and its digests read, before they have landed": ("engine", "save 0"),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_wait_that_is_missing_is_found(name: str) -> None:
    no_wait = NoWait(*HAZARDS[name])
    for seed in range(2):
        with pytest.raises(HazardError) as found:
            story = Story(ChaosRoute(seed, segment_of("raw"), no_wait), is_locked=True)
            story.run()
            story.route.close()
        print(found.value)
    assert no_wait.times, f"no such wait was about to be done: {name}"


def test_a_flaw_in_the_middle_ends_it_and_nothing_is_under_way_then() -> None:
    for value, flaw in ((float("nan"), Flaw.NONFINITE), (3e38, Flaw.OUT_OF_RANGE)):
        story = Story(ChaosRoute(3, segment_of(int8.KC64)), int8.KC64, blocks=7, is_locked=True)
        values = planes_of(story.pages, 1)
        values[1][0][story.table[2 * 3 + 1], 7, 0, 2] = value
        story.steps(values)
        copy = story.copy()
        encoded = list(copy.encode(story.tokens, story.slots, digest))
        want = plain_of(int8.KC64, values, story.table).encode(story.tokens, slots_of(int8.KC64, 7), digest)
        assert len(encoded) == 4 and encoded == list(want) and encoded[3] is flaw
        story.end()


def test_who_stops_early_has_his_slots_for_himself() -> None:
    for seed in range(4):
        story = Story(ChaosRoute(seed, segment_of("raw")), blocks=7, is_locked=True)
        story.steps(planes_of(story.pages, 1))
        encoding = story.copy().encode(story.tokens, story.slots, digest)
        assert isinstance(next(encoding), list)
        encoding.close()
        story.end()


def test_an_interrupt_does_not_end_the_wait_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(ChaosRoute(1, segment_of("raw"), eagerness=0.0), blocks=7, is_locked=True)
    story.steps(planes_of(story.pages, 1))
    encoding = story.copy().encode(story.tokens, story.slots, digest)
    assert isinstance(next(encoding), list)
    wait, interrupts = ChaosEvent.synchronize, count(1)

    def interrupted(self: ChaosEvent) -> None:
        if next(interrupts) in (2, 4):
            raise KeyboardInterrupt
        wait(self)

    monkeypatch.setattr(ChaosEvent, "synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encoding.close()
    story.end()


def test_what_was_first_can_be_used_while_the_rest_is_under_way() -> None:
    """On a device that does only what is waited for, the first segment comes without the others."""
    story = Story(ChaosRoute(1, segment_of("raw"), eagerness=0.0), blocks=7, is_locked=True)
    story.steps(planes_of(story.pages, 1))
    encoding = story.copy().encode(story.tokens, story.slots, digest)
    assert isinstance(next(encoding), list) and any(story.slots[0].view) and not any(story.slots[6].view)
    assert len(good(encoding)) == 6 and any(story.slots[6].view)
    story.route.close()


@pytest.mark.parametrize(
    ("rows", "heads", "widths", "number"),
    [
        (1, 1, (9600, 640), torch.uint8),  # a state, wider than any program takes
        (1, 4, (24, 40), torch.float32),
        (4, 1, (576,), torch.bfloat16),  # compressed latents
        (112, 2, (24, 8), torch.bfloat16),
    ],
)
def test_blocks_of_any_number_of_rows(
    rows: int, heads: int, widths: tuple[int, ...], number: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A page each, alone and between others, gathered and scattered as the plain route does."""
    route, table = ChaosRoute(2, 1 << 16), [3, 1]

    def planes(seed: int) -> list[list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        made = [[torch.empty(5, rows, heads, width, dtype=number) for width in widths] for _ in range(LAYERS)]
        for plane in [plane for layer in made for plane in layer]:
            plane.view(torch.uint8).random_(generator=generator)
        return made

    def spans() -> list[FrameSpan]:
        memory = torch.zeros(2, LAYERS * rows * heads * sum(widths) * number.itemsize, dtype=torch.uint8)
        return [FrameSpan(row.data_ptr(), memoryview(row.numpy())) for row in memory]

    source, slots, wanted = planes(1), spans(), spans()
    tokens = [0, rows]
    digests = good(block_copy(None, Paged(source, table, rows, rows), "", route).encode(tokens, slots, digest))
    assert digests == good(PlainCopy(None, Paged(source, table, rows, rows)).encode(tokens, wanted, digest))
    assert [bytes(one.view) for one in slots] == [bytes(one.view) for one in wanted]
    mine, theirs = planes(2), planes(2)
    assert block_copy(None, Paged(mine, table, rows, rows), "", route).decode(slots, tokens, 0, digests, digest) == 2
    assert PlainCopy(None, Paged(theirs, table, rows, rows)).decode(slots, tokens, 0, digests, digest) == 2
    assert all(map(torch.equal, _bits(mine), _bits(theirs)))
    assert not caplog.records, "none of it took the plain route"
    route.close()


def _bits(planes: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [plane.view(torch.uint8) for layer in planes for plane in layer]


@pytest.mark.parametrize("reaches", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_behind_a_damaged_one_do_not_count(codec: str, reaches: bool) -> None:
    story = Story(ChaosRoute(4, segment_of(codec), reaches=reaches), codec, is_locked=reaches)
    values = planes_of(story.pages, 2)
    digests = good(plain_of(codec, values, story.table).encode(story.tokens, story.slots, digest))
    copy = story.copy()
    for damaged in (3, 1):
        story.slots[damaged].view[-1] ^= 1
        assert copy.decode(story.slots, story.tokens, 0, digests, digest) == damaged
    story.route.close()


@pytest.mark.parametrize("codec", CODECS)
def test_pages_that_are_left_out_are_not_touched(codec: str) -> None:
    story = Story(ChaosRoute(6, segment_of(codec)), codec, blocks=3)
    values = planes_of(story.pages, 3)
    digests = good(plain_of(codec, values, story.table).encode(story.tokens, story.slots, digest))
    mine, theirs = planes_of(story.pages, 4), planes_of(story.pages, 4)
    tokens = [token - PAGE_TOKENS for token in story.tokens]  # the table begins with the first block's second page
    for copy in (copy_of(codec, mine, story.table, story.route), plain_of(codec, theirs, story.table)):
        assert copy.decode(story.slots[:2], tokens[:2], PAGE_TOKENS, digests[:2], digest) == 2
    story.route.chaos.finish()
    assert same(mine, theirs) and not same(mine, planes_of(story.pages, 4))
    with pytest.raises(AssertionError, match="not inside the pages"):
        copy_of(codec, mine, story.table, story.route).decode(story.slots, tokens, 0, digests, digest)
    story.route.close()


def test_a_closed_way_leaves_the_plain_route() -> None:
    story = Story(ChaosRoute(1, segment_of("raw"), eagerness=0.0))
    planes = planes_of(story.pages, 1)
    copy = copy_of("raw", planes, story.table, story.route)
    story.route.close()
    digests = good(copy.encode(story.tokens, story.slots, digest))
    assert digests == good(plain_of("raw", planes, story.table).encode(story.tokens, slots_of("raw", 5), digest))
    assert copy.decode(story.slots, story.tokens, 0, digests, digest) == 5
    story.route.chaos.finish()  # the tables of the one were on their way before the other's


def test_a_device_that_fails_is_told_and_keeps_what_it_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(ChaosRoute(1, segment_of("raw")))
    planes = planes_of(story.pages, 1)
    copy = copy_of("raw", planes, story.table, story.route)
    digests = good(copy.encode(story.tokens, story.slots, digest))

    def broken(self: ChaosEvent) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as failing:
        failing.setattr(ChaosEvent, "synchronize", broken)
        with pytest.raises(RuntimeError, match="the device failed") as found:
            copy.decode(story.slots, story.tokens, 0, digests, digest)
        assert "an illegal memory access" in str(found.value.__cause__)
    (kept,) = story.route.transfers.movers[Direction.LOAD].under_way
    assert isinstance(kept, Moving) and kept.copy is copy, "kernels may still read its tables, and write its pages"
    assert copy.decode(story.slots, story.tokens, 0, digests, digest) == 5, "by the other route"
    story.route.chaos.finish()


def test_a_kernel_that_fails_is_told_and_waited_for() -> None:
    story = Story(ChaosRoute(1, segment_of("raw")))
    copy = copy_of("raw", planes_of(story.pages, 1), story.table, story.route)
    story.route.chaos.failures[2] = OSError("a kernel that does not compile")
    encoding = copy.encode(story.tokens, story.slots, digest)
    with pytest.raises(OSError, match="does not compile"):
        good(encoding)
    story.end()


def test_both_ways_are_measured_and_one_that_moves_other_bytes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[gpu.Measured]:
        ways = DeviceTransfers(AtOnceDevice(), 1 << 16)
        ways.extents.run()
        ways.programs = 4
        measured = list(gpu.measured(ways, 1 << 13, heads=1, width=8, layers=(1,)))
        assert ways.close(30.0) and all(one.copied_gb_per_second > 0 for one in measured)
        return measured

    monkeypatch.setattr(gpu, "LAPS", 1)
    right = found()
    assert [(one.direction, one.codec) for one in right[::2]] == [("save", "raw"), ("save", int8.KC64)]
    assert all(one.reached_gb_per_second > 0 for one in right)
    launch = triton_pools._launch

    def wrong(loads: bool, pools: Any, form: Any, table: Any, payloads: Any, status: Any, reached: Any) -> None:
        launch(loads, pools, form, table if reached is None else table.flip(1), payloads, status, reached)

    def nothing(*given: Any) -> None:
        if given[-1] is None:
            launch(*given)

    for reaching in (wrong, nothing):
        monkeypatch.setattr(triton_pools, "_launch", reaching)
        assert not any(one.reached_gb_per_second for one in found())


@pytest.mark.parametrize(
    ("planes", "reason"),
    [
        ([[torch.zeros(3, 64, 1, 1, dtype=torch.uint8)]], "layer slices of 64 bytes, where 241 to"),
        ([[torch.zeros(3, 64, 8, 64, dtype=torch.float32)]], "layer slices of 131072 bytes, where 241 to 4096"),
        ([[torch.zeros(3, 64, 1, 4, dtype=torch.float64)]], "numbers of 8 bytes"),
        (
            [[torch.zeros(3, 64, 1, 4)], [torch.zeros(3, 1, 64, 4).transpose(1, 2)]],
            "plane 0 of layer 1 has the strides",
        ),
    ],
)
def test_pages_that_are_not_for_it_take_the_plain_route(
    planes: list[list[torch.Tensor]], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    route = ChaosRoute(1, 4096)
    with caplog.at_level(logging.WARNING, "kv_kernels"):
        for _ in range(2):
            # Not the route of host memory: what is not for this one is on a device.
            assert route.transfers.bind(None, Paged(planes, [0, 1, 2], 64, 64)) is None
    (record,) = caplog.records
    assert reason in record.getMessage() and "slow" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_planes_on_two_devices_take_the_plain_route() -> None:
    there = torch.empty(3, 64, 1, 4, device="meta")
    route = ChaosRoute(1)
    paged = Paged([[torch.zeros(3, 64, 1, 4), there]], [0], 64, 64)
    assert isinstance(block_copy(None, paged, "float32", route), PlainCopy)


def test_several_threads_on_one_device() -> None:
    route = ChaosRoute(9, segment_of("raw"))
    route.transfers.extents.run()
    wrong: list[str] = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        codec = CODECS[number % 2]
        story = Story(route, codec, blocks=3)
        for turn in range(2):
            values, others = planes_of(story.pages, 7 * number + turn), planes_of(story.pages, 99)
            copy = copy_of(codec, values, story.table, route)
            digests = good(copy.encode(story.tokens, story.slots, digest))
            want = slots_of(codec, 3)
            if digests != good(plain_of(codec, values, story.table).encode(story.tokens, want, digest)):
                wrong.append(f"thread {number} stored something else")
            if copy_of(codec, others, story.table, route).decode(story.slots, story.tokens, 0, digests, digest) != 3:
                wrong.append(f"thread {number} did not load")
            plain = planes_of(story.pages, 99)
            plain_of(codec, plain, story.table).decode(want, story.tokens, 0, digests, digest)
            if not same(plain, others):
                wrong.append(f"thread {number} loaded something else")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    route.close()
