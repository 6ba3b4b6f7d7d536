"""What every `Codec` keeps: fixed sizes, digests of what it wrote, a round trip, and no page but those it was given.

An implementation is a subclass of `CodecContract` that makes one and says what a number may look like afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_route import ChaosRoute, needs_interpreter
from kv_kernels.copies import BlockCopy, Flaw
from kv_kernels.device_copy import DeviceCopy
from kvstore.block.codec import RawCodec, codec_named
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.layout import KvGroup, Layout, Part
from kvstore.block.pages import Codec, Pages
from paged_memory import kernels_can_run
from tiering.frame import digest
from tiering.tier import FrameSpan
from workbench import blank_planes, one_line, plausible_planes, random_pages, random_planes, small_layout

__all__ = ["kernels_can_run"]

LAYOUTS = {
    "grouped query": small_layout(),
    "by head": small_layout(kv_heads=4, head_shards=2),
    "by layer": small_layout(layers=3, layer_shards=2),
    "by both": small_layout(layers=2, kv_heads=2, head_shards=2, layer_shards=2),
    "latent": Layout.mla(layers=2, latent_dim=12, rope_dim=4, dtype="bfloat16"),
    "two groups": Layout((
        KvGroup("full", (0, 2), 2, (8, 8), "float16"),
        KvGroup("thin", (1,), 1, (16,), "float32"),
    ), block_tokens=128),
    "large pages": small_layout(page_tokens=128),
}  # fmt: skip
PAGE_TOKENS = [16, 32, 64]
NAMES = st.sampled_from(sorted(LAYOUTS))
# Of what is tried with many values: less often where each try takes long.
BLOCKS: dict[str, Any] = {"name": NAMES, "page_tokens": st.sampled_from(PAGE_TOKENS), "data": st.data()}
BITS: dict[str, Any] = {"name": NAMES, "at": st.integers(0, 10**6), "bit": st.integers(0, 7)}
MANY: dict[str, Any] = {
    "name": NAMES,
    "skip": st.integers(0, 1),
    "damaged": st.none() | st.integers(0, 3),
    "at": st.integers(0, 10**6),
}


def room_for(codec: Codec, part: Part) -> FrameSpan:
    memory = np.zeros(codec.payload_bytes(part), dtype=np.uint8)
    return FrameSpan(memory.ctypes.data, memoryview(memory))


def encode(coder: BlockCopy, token: int, span: FrameSpan) -> list[bytes] | Flaw:
    """One block."""
    (encoded,) = coder.encode([token], [span], digest)
    return encoded


def decode(coder: BlockCopy, span: FrameSpan, token: int, skip: int, digests: Sequence[bytes]) -> bool:
    """One block."""
    return coder.decode([span], [token], skip, [digests], digest) == 1


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class CodecContract:
    """What a codec must do; `make` gives one, `close` says whether a decoded tensor stands for the original."""

    def make(self) -> Codec:
        raise NotImplementedError

    def close(self, decoded: torch.Tensor, original: torch.Tensor) -> bool:
        raise NotImplementedError

    def values(self, layout: Layout, pages: int, page_tokens: int, seed: int) -> dict[int, list[torch.Tensor]]:
        """Numbers as a model makes them."""
        return plausible_planes(layout, pages, page_tokens, seed)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_sizes_are_fixed_and_whole_per_layer(self, name: str) -> None:
        codec = self.make()
        assert 0 < len(codec.name.encode("ascii")) <= 16
        for part in LAYOUTS[name].parts:
            size = codec.payload_bytes(part)
            assert size > 0 and size % len(part.layers) == 0 and size == self.make().payload_bytes(part)

    @pytest.mark.slow
    @given(**BLOCKS)
    @settings(max_examples=40)
    def test_a_block_comes_back_where_it_belongs(self, name: str, page_tokens: int, data: st.DataObject) -> None:
        self.a_block_comes_back(name, page_tokens, data)

    def a_block_comes_back(self, name: str, page_tokens: int, data: st.DataObject) -> None:
        layout, codec, blocks, spare = LAYOUTS[name], self.make(), 2, 3
        per_block = layout.block_tokens // page_tokens
        pages = blocks * per_block + spare
        tables = st.permutations(range(pages)).map(lambda order: order[: blocks * per_block])
        source = Pages(self.values(layout, pages, page_tokens, 1), data.draw(tables), page_tokens)
        target = Pages(self.values(layout, pages, page_tokens, 2), data.draw(tables), page_tokens)
        untouched = {layer: [plane.clone() for plane in planes] for layer, planes in target.planes.items()}
        block = data.draw(st.integers(0, blocks - 1))
        skip = data.draw(st.integers(0, per_block - 1)) * page_tokens
        token = block * layout.block_tokens
        for part in layout.parts:
            span = room_for(codec, part)
            digests = encode(codec.bind(source, layout, part), token, span)
            assert isinstance(digests, list)
            size = codec.payload_bytes(part) // len(part.layers)
            assert digests == [digest(span.view[at : at + size]) for at in range(0, len(span.view), size)]
            assert decode(codec.bind(target, layout, part), span, token, skip, digests)
        first, stop = (token + skip) // page_tokens, (token + layout.block_tokens) // page_tokens
        written = dict(zip(target.table[first:stop], source.table[first:stop], strict=True))
        for layer, planes in target.planes.items():
            for plane, tensor in enumerate(planes):
                for page in range(pages):
                    if page in written:
                        assert self.close(tensor[page], source.planes[layer][plane][written[page]])
                    else:
                        assert same_bits(tensor[page], untouched[layer][plane][page])

    @pytest.mark.slow
    @pytest.mark.parametrize("name", LAYOUTS)
    def test_the_same_numbers_are_the_same_bytes(self, name: str) -> None:
        layout = LAYOUTS[name]
        page_tokens = 32
        per_block = layout.block_tokens // page_tokens
        planes = self.values(layout, per_block, page_tokens, 3)
        turned = {layer: [plane.flip(0) for plane in tensors] for layer, tensors in planes.items()}
        for part in layout.parts:
            payloads = []
            for source in (
                Pages(planes, range(per_block), page_tokens),
                Pages(turned, list(reversed(range(per_block))), page_tokens),
            ):
                span = room_for(self.make(), part)
                encode(self.make().bind(source, layout, part), 0, span)
                payloads.append(bytes(span.view))
            assert payloads[0] == payloads[1]

    @pytest.mark.slow
    @given(**BITS)
    @settings(max_examples=40)
    def test_a_flipped_bit_is_refused(self, name: str, at: int, bit: int) -> None:
        self.a_flipped_bit(name, at, bit)

    def a_flipped_bit(self, name: str, at: int, bit: int) -> None:
        layout, codec = LAYOUTS[name], self.make()
        pages = random_pages(layout, 1, 32)
        for part in layout.parts:
            span = room_for(codec, part)
            coder = codec.bind(Pages(self.values(layout, len(pages.table), 32, 4), pages.table, 32), layout, part)
            digests = encode(coder, 0, span)
            assert isinstance(digests, list)
            span.view[at % len(span.view)] ^= 1 << bit
            assert not decode(codec.bind(pages, layout, part), span, 0, 0, digests)

    @pytest.mark.slow
    @given(**MANY)
    @settings(max_examples=30)
    def test_blocks_are_good_up_to_the_first_that_is_not(
        self, name: str, skip: int, damaged: int | None, at: int
    ) -> None:
        self.blocks_are_good(name, skip, damaged, at)

    def blocks_are_good(self, name: str, skip: int, damaged: int | None, at: int) -> None:
        layout, codec, page_tokens, blocks = LAYOUTS[name], self.make(), 32, 4
        per_block = layout.block_tokens // page_tokens
        source = Pages(self.values(layout, blocks * per_block, page_tokens, 5), range(blocks * per_block), page_tokens)
        tokens = [block * layout.block_tokens for block in range(blocks)]
        for part in layout.parts:
            spans = [room_for(codec, part) for _ in range(blocks)]
            digests = list(codec.bind(source, layout, part).encode(tokens, spans, digest))
            assert digests == [encode(codec.bind(source, layout, part), t, room_for(codec, part)) for t in tokens]
            expected = [one for one in digests if isinstance(one, list)]
            if damaged is not None:
                spans[damaged].view[at % len(spans[damaged].view)] ^= 0x10
            # Pages begin in the middle of the first block, and lie in another order.
            planes = self.values(layout, blocks * per_block, page_tokens, 6)
            target = Pages(planes, range(blocks * per_block - 1, skip - 1, -1), page_tokens)
            shifted = [token - skip * page_tokens for token in tokens]
            coder = codec.bind(target, layout, part)
            good = coder.decode(spans, shifted, skip * page_tokens, expected, digest)
            assert good == (blocks if damaged is None else damaged)
            heads = slice(part.head_start, part.head_stop)
            for layer in part.layers:
                for mine, theirs in zip(target.planes[layer], source.planes[layer], strict=True):
                    for page in range(skip, good * per_block):
                        loaded = mine[target.table[page - skip], :, heads]
                        assert self.close(loaded, theirs[page, :, heads])

    @pytest.mark.parametrize("kind", ["list", "range", "tuple", "int32 array", "int64 array", "tensor"])
    def test_page_tables_of_every_kind(self, kind: str) -> None:
        layout, codec = small_layout(), self.make()
        table: Any = {
            "list": [1, 0],
            "range": range(1, -1, -1),
            "tuple": (1, 0),
            "int32 array": np.array([1, 0], dtype=np.int32),
            "int64 array": np.array([1, 0]),
            "tensor": torch.tensor([1, 0], dtype=torch.int32),
        }[kind]
        planes = {
            layer: [plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in tensors]  # as long runs
            for layer, tensors in self.values(layout, 2, 64, 5).items()
        }
        spans = [room_for(codec, layout.parts[0]) for _ in range(2)]
        for span, pages in zip(spans, (Pages(planes, table, 64), Pages(planes, [1, 0], 64)), strict=True):
            encode(codec.bind(pages, layout, layout.parts[0]), 64, span)
        assert bytes(spans[0].view) == bytes(spans[1].view)

    @pytest.mark.parametrize("case", ["no layer", "planes", "heads", "width", "page", "dtype", "table", "below 0",
                                      "short plane", "divide", "not numbers", "numpy"])  # fmt: skip
    def test_pages_of_another_layout_are_one_clear_line(self, case: str) -> None:
        layout = small_layout()
        good = Pages(blank_planes(layout, 2, 64), range(2), 64)
        short = {layer: [planes[0], planes[1][:1]] for layer, planes in good.planes.items()}
        bad, fragments = {
            "no layer": (Pages({0: good.planes[0]}, range(2), 64), ("no layer 1", "[0, 1]")),
            "planes": (Pages({0: good.planes[0][:1], 1: good.planes[1]}, range(2), 64), ("layer 0", "1 planes", "2")),
            "heads": (
                Pages(blank_planes(small_layout(kv_heads=4), 2, 64), range(2), 64),
                ("(2, 64, 4, 8)", "64, 2, 8"),
            ),
            "width": (
                Pages(blank_planes(small_layout(head_dim=4), 2, 64), range(2), 64),
                ("(2, 64, 2, 4)", "64, 2, 8"),
            ),
            "page": (Pages(blank_planes(layout, 2, 32), range(2), 64), ("(2, 32, 2, 8)", "64, 2, 8")),
            "dtype": (Pages(blank_planes(small_layout(dtype="float16"), 2, 64), range(2), 64), ("float16", "bfloat16")),
            "table": (replace(good, table=[0, 2]), ("page 2", "2 pages")),
            "below 0": (replace(good, table=[0, -1]), ("page -1", "2 pages")),
            "short plane": (Pages(short, range(2), 64), ("page 1", "1 pages")),
            "divide": (Pages(blank_planes(layout, 2, 48), range(2), 48), ("48 tokens", "64", "multiple")),
            "not numbers": (replace(good, table=[0.0, 1.0]), ("integers",)),
            "numpy": (
                Pages({layer: [np.zeros((2, 64, 2, 8), np.int16)] * 2 for layer in layout.layers}, range(2), 64),
                ("int16", "bfloat16", "unsigned integers of 2 bytes"),
            ),
        }[case]
        with pytest.raises(LayoutMismatch) as caught:
            self.make().bind(bad, layout, layout.parts[0])
        assert one_line(caught.value, *fragments)


class Int8Contract(CodecContract):
    """The bound of every number is in kernels/test_int8.py; here a number only has to be the one that was written."""

    def close(self, decoded: torch.Tensor, original: torch.Tensor) -> bool:
        half_a_step = 2 * original.float().abs().max() / 255
        apart = (decoded.float() - original.float()).abs()
        return bool((apart <= half_a_step + 2**-8 * decoded.float().abs()).all()) and not same_bits(decoded, original)

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint8", "int8"])
    def test_numbers_that_it_cannot_write_are_one_clear_line(self, dtype: str) -> None:
        with pytest.raises(BadInput) as caught:
            self.make().payload_bytes(small_layout(dtype=dtype).parts[0])
        assert one_line(caught.value, self.make().name, dtype, "bfloat16, float16, float32", "codec='raw'")

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_it_is_nearly_half_of_sixteen_bits(self, name: str) -> None:
        for part in LAYOUTS[name].parts:
            slices = len(part.layers)
            numbers = part.raw_bytes // part.group.element_bytes
            size = self.make().payload_bytes(part)
            assert numbers < size <= 1.5 * numbers + 16 * slices and size // slices % 16 == 0

    def test_a_block_that_it_cannot_write_says_why(self) -> None:
        layout = small_layout()
        for value, flaw in ((float("nan"), Flaw.NONFINITE), (float("-inf"), Flaw.NONFINITE), (3e38, Flaw.OUT_OF_RANGE)):
            planes = self.values(layout, 2, 64, 6)
            planes[1][1][1, 7, 1, 3] = value
            coder = self.make().bind(Pages(planes, [0, 1], 64), layout, layout.parts[0])
            assert isinstance(encode(coder, 0, room_for(self.make(), layout.parts[0])), list)
            assert encode(coder, 64, room_for(self.make(), layout.parts[0])) is flaw

    def test_memory_that_was_used_before_leaves_nothing_in_the_padding(self) -> None:
        layout = Layout.mla(layers=1, latent_dim=60, rope_dim=5, dtype="float16")
        payloads = []
        for filler in (0x00, 0xFF):
            span = room_for(self.make(), layout.parts[0])
            span.view[:] = bytes([filler]) * len(span.view)
            pages = Pages(self.values(layout, 1, 64, 8), [0], 64)
            encode(self.make().bind(pages, layout, layout.parts[0]), 0, span)
            payloads.append(bytes(span.view))
        assert payloads[0] == payloads[1]

    def test_a_block_that_it_cannot_write_is_the_last_one(self) -> None:
        layout = small_layout()
        planes = self.values(layout, 4, 64, 9)
        planes[0][0][2, 5, 0, 1] = float("nan")
        coder = self.make().bind(Pages(planes, range(4), 64), layout, layout.parts[0])
        spans = [room_for(self.make(), layout.parts[0]) for _ in range(4)]
        encoded = list(coder.encode([0, 64, 128, 192], spans, digest))
        alone = [encode(coder, token, room_for(self.make(), layout.parts[0])) for token in (0, 64)]
        assert encoded == [*alone, Flaw.NONFINITE]


class TestInt8Kc64(Int8Contract):
    def make(self) -> Codec:
        return codec_named("int8-kc64")


class TestRawCodec(CodecContract):
    def make(self) -> Codec:
        return RawCodec()

    def close(self, decoded: torch.Tensor, original: torch.Tensor) -> bool:
        return same_bits(decoded, original)

    def values(self, layout: Layout, pages: int, page_tokens: int, seed: int) -> dict[int, list[torch.Tensor]]:
        """Any bits: NaNs with their payloads, negative zeros, denormals."""
        return random_planes(layout, pages, page_tokens, seed)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_its_payload_is_the_numbers(self, name: str) -> None:
        for part in LAYOUTS[name].parts:
            assert self.make().payload_bytes(part) == part.raw_bytes

    def test_the_order_of_a_payload(self) -> None:
        """[layer, plane, kv_head, token, width], of the part's layers and heads alone."""
        layout = small_layout(layers=2, kv_heads=2, head_shards=2, layer_shards=2)
        pages = random_pages(layout, 2, 16)
        for part in layout.parts:
            span = room_for(self.make(), part)
            encode(self.make().bind(pages, layout, part), 64, span)
            want = b"".join(
                pages.planes[layer][plane][4:8, :, head].contiguous().view(torch.uint8).numpy().tobytes()
                for layer in part.layers
                for plane in range(2)
                for head in range(part.head_start, part.head_stop)
            )
            assert bytes(span.view) == want


@needs_interpreter
@pytest.mark.usefixtures("kernels_can_run")
class OnDevice(CodecContract):
    """Through streams, staging and kernels; whether their order is right is tested in kernels/test_device_copy.py."""

    def route(self) -> ChaosRoute:
        return ChaosRoute(1)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_it_is_the_devices_route(self, name: str) -> None:
        layout = LAYOUTS[name]
        for part in layout.parts:
            assert isinstance(self.make().bind(random_pages(layout, 1, 32), layout, part), DeviceCopy)

    @given(**BLOCKS)
    @settings(max_examples=4)
    def test_a_block_comes_back_where_it_belongs(self, name: str, page_tokens: int, data: st.DataObject) -> None:
        self.a_block_comes_back(name, page_tokens, data)

    @given(**BITS)
    @settings(max_examples=3)
    def test_a_flipped_bit_is_refused(self, name: str, at: int, bit: int) -> None:
        self.a_flipped_bit(name, at, bit)

    @pytest.mark.parametrize(("name", "skip", "damaged"), [("grouped query", 1, 2), ("latent", 0, None)])
    def test_blocks_are_good_up_to_the_first_that_is_not(self, name: str, skip: int, damaged: int | None) -> None:
        self.blocks_are_good(name, skip, damaged, 4711)


@pytest.mark.slow
class TestRawOnDevice(OnDevice, TestRawCodec):
    def make(self) -> Codec:
        return codec_named("raw", self.route())


@pytest.mark.slow  # `make test` has raw blocks, and the schemes' kernels
class TestInt8Kc64OnDevice(OnDevice, Int8Contract):
    def make(self) -> Codec:
        return codec_named("int8-kc64", self.route())
