"""`host.RawCopy` moves the same bits as `plain.PlainCopy`, from and into pages of any strides, and touches no others.

Pages are made by laying the four dimensions out in memory in any order, with gaps, or K and V fused in one buffer; what
is compared is the whole memory behind them, so that a byte written anywhere else is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels import host
from kv_kernels.host import Paged
from kv_kernels.plain import PlainCopy
from tiering.frame import digest
from tiering.tier import FrameSpan

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
PATTERN = 0xA5
PAGE, TOKEN, HEAD, WIDTH = range(4)


@dataclass(frozen=True)
class Shape:
    """A case: pages [pages, page_tokens, heads, width] per plane, and how they lie in memory."""

    layers: int
    planes: int
    pages: int
    page_tokens: int
    pages_per_block: int
    heads: int
    width: int
    dtype: str
    order: tuple[int, ...]  # dimensions from the outermost in memory to the innermost
    gap: int  # unused numbers behind each row of the innermost dimension
    fused: int  # K and V in one buffer: 0 one behind the other, 1 page by page, 2 head by head of a page, where it fits
    together: bool = False  # all layers in one buffer
    room: tuple[int, ...] = ()  # tokens left free behind those of a page, by layer; none for those that are not named
    copy_bytes: int = 1  # up to where layers are copied together
    run_bytes: int = 1 << 19  # the same of layers that adjoin

    @property
    def block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block

    @property
    def slice_bytes(self) -> int:
        item = getattr(torch, self.dtype).itemsize
        return self.planes * self.heads * self.block_tokens * self.width * item


RUNS = (PAGE, HEAD, TOKEN, WIDTH)
"""The order in which a page lies in memory as it does in the payload: the host copies it as one run."""

shapes = st.builds(
    Shape,
    layers=st.integers(1, 4),
    planes=st.integers(1, 2),
    pages=st.integers(1, 6),
    page_tokens=st.sampled_from([1, 2, 3, 5, 8, 16]),
    pages_per_block=st.integers(1, 4),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 3, 4, 7, 16]),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from([RUNS, RUNS, RUNS, *permutations(range(4))]),
    gap=st.sampled_from([0, 0, 1, 5]),
    fused=st.sampled_from([0, 1, 2]),
    together=st.booleans(),
    room=st.lists(st.sampled_from([0, 0, 2]), max_size=4).map(tuple),
    copy_bytes=st.sampled_from([1, 300, 1 << 19]),
    run_bytes=st.sampled_from([1, 300, 1 << 19]),
)


class Memory:
    """The bytes of each layer, in buffers of their own or in one, and the planes that are views of them."""

    def __init__(self, shape: Shape, seed: int | None) -> None:
        self.shape = shape
        self.buffers: list[torch.Tensor] = []
        self.planes: list[list[torch.Tensor]] = []
        sizes = [shape.pages, shape.page_tokens, shape.heads, shape.width]
        lying = [sizes[dimension] for dimension in shape.order]
        lying[-1] += shape.gap
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator().manual_seed(seed or 0)
        # Apart: [plane, ...]. Fused: [page, plane, ...], or [page, head, plane, ...].
        at = shape.fused if shape.order[: shape.fused] == (PAGE, HEAD)[: shape.fused] else 0
        token = shape.order.index(TOKEN)
        layers = []
        for layer in range(shape.layers):
            mine = list(lying)
            mine[token] += shape.room[layer] if layer < len(shape.room) else 0
            layers.append([*mine[:at], shape.planes, *mine[at:]])
        bytes_needed = max(int(np.prod(full)) for full in layers) * dtype.itemsize
        whole = torch.empty(shape.layers, bytes_needed, dtype=torch.uint8)
        for layer, full in enumerate(layers):
            buffer = whole[layer] if shape.together else torch.empty(bytes_needed, dtype=torch.uint8)
            if seed is None:
                buffer.fill_(PATTERN)
            else:
                buffer.random_(0, 256, generator=generator)
            numbers = buffer.view(dtype)[: int(np.prod(full))].view(full)
            self.buffers.append(buffer)
            planes = []
            for plane in range(shape.planes):
                lies = numbers.select(at, plane)
                lies = lies.narrow(token, 0, shape.page_tokens)[..., : sizes[shape.order[-1]]]
                planes.append(lies.permute([shape.order.index(dimension) for dimension in range(4)]))
            self.planes.append(planes)

    def as_numpy(self) -> list[list[np.ndarray[Any, Any]]]:
        """The same memory as numpy arrays of unsigned integers: numpy knows neither bfloat16 nor float8."""
        arrays = []
        for buffer, planes in zip(self.buffers, self.planes, strict=True):
            layer = []
            for plane in planes:
                item = plane.element_size()
                offset = plane.data_ptr() - buffer.data_ptr()
                layer.append(
                    np.ndarray(
                        tuple(plane.shape),
                        UNSIGNED[item],
                        buffer.numpy(),
                        offset,
                        tuple(stride * item for stride in plane.stride()),
                    )
                )
            arrays.append(layer)
        return arrays

    def bits(self) -> list[bytes]:
        return [buffer.numpy().tobytes() for buffer in self.buffers]

    def page_bits(self, page: int) -> list[bytes]:
        """One page of every layer and plane, in C order."""
        return [layer[page].tobytes() for planes in self.as_numpy() for layer in planes]


class Payload:
    """A payload in memory of its own, with guards on both sides."""

    GUARD = 64

    def __init__(self, size: int, fill: int = 0) -> None:
        self.size = size
        self.memory = np.full(size + 2 * self.GUARD, 0x5A, dtype=np.uint8)
        self.memory[self.GUARD : self.GUARD + size] = fill
        self.span = FrameSpan(
            self.memory.ctypes.data + self.GUARD, memoryview(self.memory)[self.GUARD : self.GUARD + size]
        )

    @property
    def bits(self) -> bytes:
        return bytes(self.span.view)

    def check_guards(self) -> None:
        assert set(bytes(self.memory[: self.GUARD]) + bytes(self.memory[-self.GUARD :])) == {0x5A}


def table_for(data: st.DataObject, shape: Shape, blocks: int, *, distinct: bool) -> list[int] | None:
    """A page table for that many blocks; None where the shape has too few pages for a distinct one."""
    count = blocks * shape.pages_per_block
    if distinct and count > shape.pages:
        return None
    page = st.integers(0, shape.pages - 1)
    return data.draw(st.lists(page, min_size=count, max_size=count, unique=distinct), label="table")


def sides(memory: Memory, table: list[int]) -> list[Any]:
    """A coder of the host over torch planes, and one over numpy planes."""
    shape = memory.shape
    with mock.patch.multiple(host, _COPY_BYTES=shape.copy_bytes, _RUN_BYTES=shape.run_bytes):
        return [
            host.RawCopy(Paged(memory.planes, table, shape.page_tokens, shape.block_tokens)),
            host.RawCopy(Paged(memory.as_numpy(), table, shape.page_tokens, shape.block_tokens)),
        ]


def plain(memory: Memory, table: list[int]) -> PlainCopy:
    return PlainCopy(None, Paged(memory.planes, table, memory.shape.page_tokens, memory.shape.block_tokens))


# Against the reference ------------------------------------------------------------------------------------------------


@given(shapes, st.integers(1, 3), st.integers(0, 1000), st.data())
@settings(max_examples=150)
def test_encode_is_the_reference_bit_for_bit(shape: Shape, blocks: int, seed: int, data: st.DataObject) -> None:
    memory = Memory(shape, seed)
    before = memory.bits()
    table = table_for(data, shape, blocks, distinct=False)
    assert table is not None
    token = data.draw(st.integers(0, blocks - 1)) * shape.block_tokens
    want = Payload(shape.layers * shape.slice_bytes, 0xFF)
    digests = plain(memory, table).encode_block(token, want.span, digest)
    slices = [want.bits[at : at + shape.slice_bytes] for at in range(0, want.size, shape.slice_bytes)]
    assert digests == [digest(one) for one in slices]
    for coder in sides(memory, table):
        got = Payload(want.size, 0x00)
        assert coder.encode_block(token, got.span, digest) == digests
        assert got.bits == want.bits
        got.check_guards()
    assert memory.bits() == before


@given(shapes, st.integers(1, 2), st.integers(0, 1000), st.data())
@settings(max_examples=150)
def test_decode_is_the_reference_and_touches_nothing_else(
    shape: Shape, blocks: int, seed: int, data: st.DataObject
) -> None:
    table = table_for(data, shape, blocks, distinct=True)
    if table is None:
        return
    block = data.draw(st.integers(0, blocks - 1), label="block")
    skip = data.draw(st.integers(0, shape.pages_per_block - 1), label="pages skipped") * shape.page_tokens
    payload = Payload(shape.layers * shape.slice_bytes)
    payload.memory[Payload.GUARD : Payload.GUARD + payload.size] = np.random.default_rng(seed).integers(
        0, 256, payload.size, dtype=np.uint8
    )
    bits = payload.bits
    digests = [digest(bits[at : at + shape.slice_bytes]) for at in range(0, len(bits), shape.slice_bytes)]
    token = block * shape.block_tokens
    want = Memory(shape, None)
    assert plain(want, table).decode_block(payload.span, token, skip, digests, digest)
    for kind in range(2):
        got = Memory(shape, None)
        assert sides(got, table)[kind].decode_block(payload.span, token, skip, digests, digest)
        assert got.bits() == want.bits()
        named = set(table[(token + skip) // shape.page_tokens : (token + shape.block_tokens) // shape.page_tokens])
        for page in set(range(shape.pages)) - named:
            assert all(set(one) == {PATTERN} for one in got.page_bits(page))
    assert payload.bits == bits


@given(shapes, st.integers(0, 1000), st.data())
@settings(max_examples=100)
def test_a_block_comes_back_as_it_was(shape: Shape, seed: int, data: st.DataObject) -> None:
    """scatter(gather(x)) == x, into other pages, other strides and an other position."""
    table = table_for(data, shape, 1, distinct=True)
    if table is None:
        return
    memory = Memory(shape, seed)
    payload = Payload(shape.layers * shape.slice_bytes)
    digests = sides(memory, table)[0].encode_block(0, payload.span, digest)
    order = data.draw(st.sampled_from([RUNS, *permutations(range(4))]))
    other = Memory(Shape(**{**vars(shape), "order": order, "pages": shape.pages + 2}), None)
    target = [page + 2 for page in table]
    assert sides(other, target)[0].decode_block(payload.span, 0, 0, digests, digest)
    for source, copy in zip(table, target, strict=True):
        assert memory.page_bits(source) == other.page_bits(copy)


# What the strides decide ----------------------------------------------------------------------------------------------


def shape_of(**changes: Any) -> Shape:
    usual: dict[str, Any] = {
        "layers": 2,
        "planes": 2,
        "pages": 4,
        "page_tokens": 16,
        "pages_per_block": 1,
        "heads": 2,
        "width": 8,
        "dtype": "bfloat16",
        "order": RUNS,
        "gap": 0,
        "fused": 0,
    }
    return Shape(**{**usual, **changes})


CASES = {
    "long runs": shape_of(),
    "fused K and V": shape_of(fused=1),
    "K and V fused head by head": shape_of(fused=2),
    "heads outside": shape_of(order=(HEAD, PAGE, TOKEN, WIDTH)),
    "heads of the first layer apart": shape_of(room=(3, 0)),
    "heads of the last layer apart": shape_of(room=(0, 3)),
    "token-major pages": shape_of(order=(PAGE, TOKEN, HEAD, WIDTH)),
    "transposed K": shape_of(order=(PAGE, HEAD, WIDTH, TOKEN)),
    "pages innermost": shape_of(order=(WIDTH, HEAD, TOKEN, PAGE)),
    "small pages": shape_of(page_tokens=4, pages_per_block=4, pages=8),
    "gaps": shape_of(gap=3),
    "one latent plane": shape_of(planes=1, heads=1, width=9),
}


RUN_CASES = (
    *("long runs", "fused K and V", "K and V fused head by head", "heads outside", "one latent plane"),
    *("heads of the first layer apart", "heads of the last layer apart"),
)
"""Copied straight into the pages."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_over_every_kind_of_page(name: str, dtype: str) -> None:
    shape = Shape(**{**vars(CASES[name]), "dtype": dtype})
    memory = Memory(shape, 7)
    table = [3, 1, 0, 2][: shape.pages_per_block] if shape.pages_per_block > 1 else [2]
    want, got = Payload(shape.layers * shape.slice_bytes), Payload(shape.layers * shape.slice_bytes)
    assert sides(memory, table)[0].encode_block(0, got.span, digest) == plain(memory, table).encode_block(
        0, want.span, digest
    )
    assert got.bits == want.bits and len(set(got.bits)) > 16


def test_one_plane_as_runs_beside_one_with_strides() -> None:
    key, value = torch.randn(2, 2, 8, 16).to(torch.float16), torch.randn(2, 2, 16, 8).to(torch.float16)
    planes = [[key.permute(0, 3, 1, 2), value.permute(0, 2, 1, 3)]]
    want, got = Payload(2 * 2 * 16 * 8 * 2), Payload(2 * 2 * 16 * 8 * 2)
    digests = PlainCopy(None, Paged(planes, [1], 16, 16)).encode_block(0, want.span, digest)
    assert (
        host.RawCopy(Paged(planes, [1], 16, 16)).encode_block(0, got.span, digest) == digests and got.bits == want.bits
    )
    copies = [[torch.zeros_like(plane) for plane in planes[0]]]
    assert host.RawCopy(Paged(copies, [1], 16, 16)).decode_block(got.span, 0, 0, digests, digest)
    assert all(torch.equal(copy[1], plane[1]) for copy, plane in zip(copies[0], planes[0], strict=True))
    assert all(not copy[0].any() for copy in copies[0])


def test_layers_that_adjoin_are_copied_in_runs_of_half_a_mebibyte() -> None:
    """Longer copies take the C library's way past the caches. Layers that do not adjoin are copied together further."""
    run = host._RUN_BYTES
    for size, apart, groups in (
        (run // 2, 0, [(0, 2), (2, 4)]),
        (run // 4 * 3, 0, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (run // 4, 64, [(0, 4)]),
    ):
        buffer = np.zeros(4 * (size + apart), np.uint8)
        layers = [buffer[at * (size + apart) :][:size] for at in range(4)]
        planes = [[one.view(np.uint16).reshape(1, 1, 16, -1).transpose(0, 2, 1, 3)] for one in layers]
        coder = host.RawCopy(Paged(planes, [0], 16, 16))
        assert [(group.start, group.stop) for group in coder._groups] == groups


@pytest.mark.parametrize("copy_bytes", [1, 1 << 19])
def test_a_payload_between_the_layers_of_its_pages(copy_bytes: int) -> None:
    """Numpy takes what lies between two runs for overlapping with them; nothing may come of that but time."""
    plane_bytes, layers = 3 * 2 * 16 * 8 * 2, 4
    payload_bytes = layers * 2 * 16 * 8 * 2
    buffer = np.random.default_rng(5).integers(0, 256, layers * plane_bytes + payload_bytes, dtype=np.uint8)
    memory = buffer.copy()
    starts = [layer * plane_bytes + (payload_bytes if layer >= 2 else 0) for layer in range(layers)]
    span = FrameSpan(
        memory.ctypes.data + 2 * plane_bytes, memoryview(memory)[2 * plane_bytes : 2 * plane_bytes + payload_bytes]
    )
    planes = []
    for start in starts:
        pages = memory[start : start + plane_bytes].view(np.uint16).reshape(3, 2, 16, 8)
        planes.append([pages.transpose(0, 2, 1, 3)])
    with mock.patch.object(host, "_COPY_BYTES", copy_bytes):
        coder = host.RawCopy(Paged(planes, [1], 16, 16))
    digests = coder.encode_block(0, span, digest)
    page = plane_bytes // 3
    want = b"".join(bytes(buffer[start + page : start + 2 * page]) for start in starts)
    assert bytes(span.view) == want
    for start in starts:
        memory[start : start + plane_bytes] = PATTERN
    assert coder.decode_block(span, 0, 0, digests, digest) and bytes(span.view) == want
    for layer, start in enumerate(starts):
        assert bytes(memory[start + page : start + 2 * page]) == want[layer * page : (layer + 1) * page]
        assert set(memory[start : start + page]) | set(memory[start + 2 * page : start + plane_bytes]) == {PATTERN}


def test_pages_that_run_backwards_in_memory() -> None:
    forwards = np.arange(4 * 2 * 16 * 4, dtype=np.uint16).reshape(4, 2, 16, 4)
    backwards = forwards[::-1].transpose(0, 2, 1, 3)
    payload = Payload(2 * 16 * 4 * 2)
    host.RawCopy(Paged([[backwards]], [0], 16, 16)).encode_block(0, payload.span, digest)
    assert payload.bits == forwards[3].tobytes()


# Wrong bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_wrong_digest_is_refused(name: str, layer: int) -> None:
    shape = CASES[name]
    table = list(range(shape.pages_per_block))
    payload = Payload(shape.layers * shape.slice_bytes)
    digests = sides(Memory(shape, 3), table)[0].encode_block(0, payload.span, digest)
    payload.span.view[layer * shape.slice_bytes + 5] ^= 1
    for kind in range(2):
        memory = Memory(shape, None)
        coder = sides(memory, table)[kind]
        assert not coder.decode_block(payload.span, 0, 0, digests, digest)
        through_scratch = name not in RUN_CASES
        untouched = [set(bits) == {PATTERN} for bits in memory.bits()]
        if through_scratch:
            assert untouched == [one >= layer for one in range(shape.layers)], "the layer that failed was not written"
        else:
            assert untouched == [one > layer for one in range(shape.layers)], "nothing goes on behind a failure"


def test_with_a_skip_a_wrong_layer_is_never_written() -> None:
    shape = shape_of(page_tokens=8, pages_per_block=2)
    payload = Payload(shape.layers * shape.slice_bytes)
    digests = sides(Memory(shape, 3), [0, 1])[0].encode_block(0, payload.span, digest)
    memory = Memory(shape, None)
    wrong = [b"\x00" * 16, digests[1]]
    assert not sides(memory, [0, 1])[0].decode_block(payload.span, 0, 8, wrong, digest)
    assert all(set(bits) == {PATTERN} for bits in memory.bits())


@pytest.mark.parametrize(("pages", "skip"), [(1, 0), (2, 0), (2, 8)], ids=["as it lies", "scattered", "behind a skip"])
def test_the_digest_is_taken_from_the_copy(pages: int, skip: int) -> None:
    """Bytes that change after the check must not count: what is compared is what lies in the pages."""
    shape = shape_of(page_tokens=8, pages_per_block=pages)
    table = list(range(pages))
    payload = Payload(shape.layers * shape.slice_bytes)
    digests = sides(Memory(shape, 3), table)[0].encode_block(0, payload.span, digest)
    memory = Memory(shape, None)

    calls = []

    def digest_late(*buffers: Any) -> bytes:
        payload.memory[:] = 0  # the producer overwrites its slot between the copy and the check
        calls.append(digest(*buffers))
        return calls[-1]

    assert not sides(memory, table)[0].decode_block(payload.span, 0, skip, digests, digest_late)
    assert calls[0] == digests[0], "the first layer had been copied before the change"
    assert calls[1:] == [digest(bytes(shape.slice_bytes))], "the second one was not"


def test_pages_that_are_read_only_are_not_written() -> None:
    values = np.frombuffer(bytes(2 * 16 * 4 * 2), dtype=np.uint16).reshape(1, 2, 16, 4).transpose(0, 2, 1, 3)
    payload = Payload(2 * 16 * 4 * 2, 7)
    coder = host.RawCopy(Paged([[values]], [0], 16, 16))
    with pytest.raises(ValueError, match="read-only"):
        coder.decode_block(payload.span, 0, 0, [digest(payload.span.view)], digest)
    assert not values.any()


# Edges ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [0, 16, -16])
def test_a_block_outside_of_the_pages_is_a_bug(token: int) -> None:
    shape = shape_of()
    table = [] if token == 0 else [1]
    coder = sides(Memory(shape, 1), table)[0]
    payload = Payload(shape.layers * shape.slice_bytes)
    with pytest.raises(AssertionError, match="not inside the pages"):
        coder.encode_block(token, payload.span, digest)


def test_no_pages_at_all() -> None:
    empty = torch.empty(0, 16, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        host.RawCopy(Paged([[empty, empty]], [], 16, 16)).encode_block(0, Payload(1024).span, digest)


def test_a_block_cut_at_its_front_needs_no_pages_for_what_is_cut() -> None:
    shape = shape_of(page_tokens=8, pages_per_block=2)
    source = Memory(shape, 5)
    payload = Payload(shape.layers * shape.slice_bytes)
    digests = sides(source, [0, 1])[0].encode_block(0, payload.span, digest)
    memory = Memory(shape, None)
    assert sides(memory, [3])[0].decode_block(payload.span, -8, 8, digests, digest)
    assert memory.page_bits(3) == source.page_bits(1)
    assert all(set(bits) == {PATTERN} for page in range(3) for bits in memory.page_bits(page))


def test_the_memory_behind_a_tensor_lives_as_long_as_the_copy() -> None:
    planes = [[torch.full((1, 2, 16, 4), 3, dtype=torch.uint8).permute(0, 2, 1, 3)]]
    coder = host.RawCopy(Paged(planes, [0], 16, 16))
    planes.clear()
    rubbish = [torch.zeros(128, dtype=torch.uint8) for _ in range(64)]
    payload = Payload(128)
    coder.encode_block(0, payload.span, digest)
    assert payload.bits == b"\x03" * 128 and len(rubbish) == 64


@pytest.mark.parametrize(
    ("tensor", "element_bytes", "name", "stands_for"),
    [
        (torch.zeros(1, dtype=torch.bfloat16), 2, "bfloat16", False),
        (torch.zeros(1, dtype=torch.float8_e5m2), 1, "float8_e5m2", False),
        (np.zeros(1, dtype=np.uint16), 2, "uint16", True),
        (np.zeros(1, dtype=np.uint16), 4, "uint16", False),
        (np.zeros(1, dtype=np.float32), 4, "float32", False),
        (np.zeros(1, dtype=">u2"), 2, ">u2", False),
    ],
)
def test_names_of_dtypes(tensor: Any, element_bytes: int, name: str, stands_for: bool) -> None:
    assert host.is_host(tensor)
    assert host.dtype_name(tensor) == name
    assert host.is_same_width_numpy(tensor, element_bytes) == stands_for
