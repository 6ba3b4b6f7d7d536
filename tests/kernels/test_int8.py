"""The 8-bit forms in plain torch: the formula in float64, the bound for every number, and what cannot be written."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels.int8 import Unwritable, dequantize, quantize
from kv_kernels.int8_form import ALIGN_BYTES, GROUP, Axis, slice_form

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
AXES = tuple(Axis)


def numbers(
    kind: str, dtype: torch.dtype, seed: int, heads: int = 2, tokens: int = 128, width: int = 72
) -> torch.Tensor:
    """A plane of a block, [heads, tokens, width]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, width, generator=generator, dtype=torch.float64)
    if kind == "outlier":
        x[..., 3] *= 40
        x[..., 35] *= 13
    elif kind == "biased":
        x[..., 5] += 300
        x[..., 6] -= 100
    elif kind == "heavy-tailed":
        x = torch.sinh(3 * x)
    elif kind == "tiny":
        x *= 1e-7
    elif kind == "huge":
        x *= 15000 if dtype is torch.float16 else 5e5
    elif kind == "equal":
        x[:] = 1.2345
    elif kind == "zero":
        x[:] = -0.0
    elif kind == "mixed":
        x[:, 64:] = 0
        x[:, :, 7] = 3.5
        x[:, 11] = 0
    return (x.clamp(-65504, 65504) if dtype is torch.float16 else x).to(dtype)


KINDS = ("plain", "outlier", "biased", "heavy-tailed", "tiny", "huge", "equal", "zero", "mixed")


def spread(scales: torch.Tensor, axis: Axis, shape: torch.Size) -> torch.Tensor:
    """The scale, or the zero point, of every number."""
    x = scales.double()
    if axis is Axis.CHANNEL:
        return x.repeat_interleave(GROUP, 1)
    return x.repeat_interleave(axis.share(shape[2]), 2)[..., : shape[2]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_within_the_bound(kind: str, axis: Axis, dtype: torch.dtype) -> None:
    for seed in range(5):
        x = numbers(kind, dtype, seed)
        made = quantize(x, axis)
        back = dequantize(*made, dtype)
        assert back.dtype is dtype and back.shape == x.shape
        allowed = spread(made.scales, axis, x.shape) / 2 * (1 + 2**-12) + ROUNDING[dtype] * back.double().abs()
        error = (back.double() - x.double()).abs()
        assert bool((error <= allowed).all()), (error / allowed).nan_to_num().max()
        if kind in ("equal", "zero"):
            assert bool((made.scales == 0).all()) is (kind == "zero" or axis is Axis.CHANNEL)
        if kind == "zero" or (kind == "equal" and axis is Axis.CHANNEL):
            assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_formula(kind: str, axis: Axis, dtype: torch.dtype) -> None:
    """In float64, where nothing is rounded that matters: a code differs by one at most, and next to a tie only."""
    x = numbers(kind, dtype, 7)
    made = quantize(x, axis)
    exact = x.double()
    if axis is Axis.CHANNEL:
        grouped = exact.unflatten(1, (-1, GROUP))
        low, top = grouped.amin(2), (grouped.amax(2) - grouped.amin(2)) / 255
        assert made.zeros is not None and torch.equal(made.zeros.double(), low)
        y = (exact - spread(low, axis, x.shape)) / spread(made.scales, axis, x.shape)
        codes = made.codes.double() + 128
    else:
        assert made.zeros is None
        pieces = exact.split(axis.share(x.shape[2]), 2)
        top = torch.stack([piece.abs().amax(2) for piece in pieces], 2) / 127
        y = exact / spread(made.scales, axis, x.shape)
        codes = made.codes.double()
    below = (made.scales.view(torch.int16) - 1).view(torch.float16).double()
    assert bool((made.scales.double() >= top * (1 - 2**-23)).all()), "rounded up"
    assert bool(((below < top) | (made.scales == 0)).all()), "and by no more than it takes"
    y = y.nan_to_num()
    off = codes - torch.floor(y + 0.5)
    assert bool((off.abs() <= 1).all())
    from_tie = (y + 0.5 - torch.round(y + 0.5)).abs()
    assert bool((from_tie[off != 0] < 1e-4).all())


def test_a_tie_is_rounded_up() -> None:
    x = torch.zeros(1, 64, 4)
    x[0, 0] = 255.0
    x[0, 1] = torch.tensor([0.5, 1.5, 2.49, 254.5])
    made = quantize(x, Axis.CHANNEL)
    assert (made.codes[0, 1].int() + 128).tolist() == [1, 2, 2, 255]


def test_along_the_wrong_axis_a_biased_channel_is_lost() -> None:
    """What the codec is for: the other channels keep their numbers beside one that is far away."""
    x = numbers("biased", torch.bfloat16, 1)
    others = [channel for channel in range(x.shape[2]) if channel not in (5, 6)]

    def error(axis: Axis) -> float:
        back = dequantize(*quantize(x, axis), x.dtype)
        return float((back.double() - x.double())[..., others].norm() / x.double()[..., others].norm())

    assert error(Axis.CHANNEL) < 0.006 < 0.2 < error(Axis.TOKEN)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_written(bad: float, axis: Axis) -> None:
    for dtype in DTYPES:
        x = numbers("plain", dtype, 0)
        x[1, 70, 9] = bad
        with pytest.raises(Unwritable, match="nonfinite"):
            quantize(x, axis)


@pytest.mark.parametrize("axis", AXES)
def test_a_scale_beyond_fp16_is_not_written(axis: Axis) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = numbers("plain", dtype, 0)
        x[0, 0, 0] = 3e38
        x[0, 1, 0] = -3e38
        with pytest.raises(Unwritable, match="out_of_range"):
            quantize(x, axis)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(AXES),
    st.integers(0, 1 << 30),
    st.floats(-8, 4),
    st.floats(-8, 4),
    st.integers(1, 3),
    st.sampled_from([64, 128]),
    st.integers(1, 200),
)
def test_the_bound_holds_at_every_size(
    dtype: torch.dtype, axis: Axis, seed: int, size: float, offset: float, heads: int, tokens: int, width: int
) -> None:
    x = (numbers("plain", torch.float64, seed, heads, tokens, width) * 10**size + 10**offset).to(dtype)
    made = quantize(x, axis)
    back = dequantize(*made, dtype).double()
    allowed = spread(made.scales, axis, x.shape) / 2 * (1 + 2**-12) + ROUNDING[dtype] * back.abs()
    assert bool(((back - x.double()).abs() <= allowed + 2.0**-149).all())


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (7, 5), (192, 128), (576,), (576 - 9,), (1,)])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_nothing_in_a_slice_lies_over_anything_else(
    heads: int, tokens: int, widths: tuple[int, ...], element_bytes: int
) -> None:
    form = slice_form(heads, tokens, widths, element_bytes)
    spans = []
    for plane in form.planes:
        spans.append((plane.codes_at, heads * tokens * plane.width, 1))
        spans.append((plane.scales_at, heads * math.prod(plane.scales) * 2, 2))
        if plane.axis is Axis.CHANNEL:
            spans.append((plane.zeros_at, heads * math.prod(plane.scales) * element_bytes, element_bytes))
    end = 0
    for at, size, width in sorted(spans):
        assert at % width == 0 and end <= at < end + 4, "in order, without a gap that alignment does not need"
        end = at + size
    assert end == form.padding[0] <= form.size_bytes < end + ALIGN_BYTES
    assert form.size_bytes % ALIGN_BYTES == 0


def test_axes_and_bits_per_number() -> None:
    """As small as the formats promise, for 64 tokens of 8 heads of 128."""
    keys_and_values, latent = slice_form(8, 64, (128, 128), 2), slice_form(1, 64, (576,), 2)
    assert [plane.axis for plane in keys_and_values.planes] == [Axis.CHANNEL, Axis.TOKEN]
    assert [plane.axis for plane in latent.planes] == [Axis.LATENT]
    assert 8 * keys_and_values.size_bytes / (8 * 64 * 256) == pytest.approx(8.3125)
    assert 8 * latent.size_bytes / (64 * 576) == pytest.approx(8.25)


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("flush", "most"), [(False, 2.0**-142), (True, 2.0**-118)])
def test_numbers_too_small_for_a_scale(axis: Axis, dtype: torch.dtype, flush: bool, most: float) -> None:
    """The bound's exception: from where numbers have a scale of their own, it holds as it is."""
    generator = torch.Generator().manual_seed(3)
    exceeded = False
    for exponent in range(-149, -90):
        steps = torch.randint(-1, 2, (2, 64, 128), generator=generator)
        x = (steps.double() * 2.0**exponent).to(dtype)
        try:
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor cannot flush denormals")
            made = quantize(x, axis)
            back = dequantize(*made, dtype)
        finally:
            torch.set_flush_denormal(False)
        allowed = spread(made.scales, axis, x.shape) / 2 * (1 + 2**-12) + ROUNDING[dtype] * back.double().abs()
        error = (x.double() - back.double()).abs()
        exceeded |= bool((error > allowed).any())
        assert (error <= allowed + most).all(), exponent
    # bfloat16's smallest number still has a scale.
    assert exceeded is (flush or dtype is torch.float32), "else the exception need not be told"
