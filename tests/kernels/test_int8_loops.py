"""The compiled route of the 8-bit codecs against plain torch: every byte of a payload, every bit of a page."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels import compiled, int8_loops, plain, routes
from kv_kernels.copies import Flaw
from kv_kernels.host import Paged
from kv_kernels.int8_form import Axis, SliceForm, slice_form
from paged_memory import LAYOUTS, Case, Memory, ones, page_table
from tiering.frame import digest
from tiering.tier import FrameSpan

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CANARY = 0xA5

Shape = tuple[int, int, int, int]


def numbers(kind: str, shape: Shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A plane of pages."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "outlier":
        x[..., -1] *= 40
        x[..., 0] += 300
    elif kind == "heavy-tailed":
        x = torch.sinh(4 * x)
    elif kind == "tiny":
        x *= 1e-6
    elif kind == "denormal":
        x *= 1e-39 if dtype is not torch.float16 else 1e-7
    elif kind == "zeros of both signs":
        x = torch.where(x > 0.5, 0.0, torch.where(x > 0, -0.0, x))
    elif kind == "zeros":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, -0.0)
    elif kind == "equal":
        x[:] = -1.2345
    elif kind == "steps":  # ties, and both ends of the range
        x = torch.randint(-255, 256, shape, generator=generator) / 2.0
    elif kind == "large":
        x *= 9000 if dtype is torch.float16 else 1e6
    return (x.clamp(-65504, 65504) if dtype is torch.float16 else x).to(dtype)


KINDS = ["plain", "outlier", "heavy-tailed", "tiny", "denormal", "zeros", "equal", "steps", "large"]
KINDS += ["zeros of both signs"]


def room(form: SliceForm, layers: int) -> tuple[FrameSpan, np.ndarray[Any, Any]]:
    """A payload, and the memory around it."""
    memory = np.full(form.size_bytes * layers + 128, CANARY, np.uint8)
    return FrameSpan(memory.ctypes.data + 64, memoryview(memory)[64:-64]), memory


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.slow
@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    kind=st.sampled_from(KINDS),
    widths=st.sampled_from([(8, 8), (72, 64), (128, 128), (64, 3), (1, 3), (192, 200), (576,), (65,), (16,)]),
    heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 16, 32, 64, 192]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=80, deadline=None)
def test_both_routes_write_the_same_bytes_and_the_same_pages(
    dtype: str,
    layout: str,
    kind: str,
    widths: tuple[int, ...],
    heads: int,
    groups: int,
    page_tokens: int,
    seed: int,
) -> None:
    tokens, chance = max(64 * groups, page_tokens), Random(seed)
    case = Case(layout, dtype, page_tokens, tokens // page_tokens, heads, widths)
    form, table = (
        slice_form(heads, tokens, widths, case.torch_dtype.itemsize),
        page_table(case, seed).flatten().tolist(),
    )

    def both(memory: Memory) -> list[Any]:
        paged = Paged(memory.planes, table, page_tokens, tokens)
        return [int8_loops.Int8Copy(form, paged, dtype), plain.PlainCopy(form, paged)]

    source = Memory.of(case, ones)
    for at, plane in enumerate([plane for layer in source.planes for plane in layer]):
        plane.copy_(numbers(kind, tuple(plane.shape), case.torch_dtype, seed + at))
    block = chance.randrange(case.blocks)
    spans, around = zip(*[room(form, case.layers) for _ in range(2)], strict=True)
    digests, others = [
        copy.encode_block(block * tokens, span, digest) for copy, span in zip(both(source), spans, strict=True)
    ]
    assert digests == others
    assert all((memory[:64] == CANARY).all() and (memory[-64:] == CANARY).all() for memory in around)
    if not isinstance(digests, list):
        return  # what is in such a payload is garbage
    assert bytes(around[0]) == bytes(around[1])
    skip = chance.randrange(case.pages_per_block)
    mine, theirs = Memory.of(case, ones), Memory.of(case, ones)
    for copy in (both(mine)[0], both(theirs)[1]):
        assert copy.decode_block(spans[0], block * tokens, skip * page_tokens, digests, digest)
    assert torch.equal(mine.bits(), theirs.bits())
    wanted = table[block * case.pages_per_block + skip : (block + 1) * case.pages_per_block]
    for plane in [plane for layer in mine.planes for plane in layer]:
        written = (~torch.isnan(plane)).flatten(1).any(1)
        assert written.nonzero().flatten().tolist() == sorted(wanted)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("plane", [0, 1])
def test_a_block_that_is_not_finite_has_a_flaw(dtype: str, value: str, plane: int) -> None:
    seed = 5
    chance = Random(f"{seed} {dtype} {value} {plane}")
    form = slice_form(2, 128, (72, 80), DTYPES[dtype].itemsize)
    for _ in range(4):
        layer = [numbers("plain", (4, 64, 2, width), DTYPES[dtype], seed) for width in (72, 80)]
        at = (chance.randrange(4), chance.randrange(64), chance.randrange(2), chance.randrange((72, 80)[plane]))
        bad = torch.tensor(float(value.strip("-")))
        layer[plane][at] = -bad if value.startswith("-") else bad
        copy = int8_loops.Int8Copy(form, Paged([layer], [0, 1, 2, 3], 64, form.tokens), dtype)
        found = [copy.encode_block(token, room(form, 1)[0], digest) for token in (0, 128)]
        assert found[at[0] // 2] is Flaw.NONFINITE
        assert isinstance(found[1 - at[0] // 2], list), "the block beside it was not concerned"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axis", list(Axis))
def test_numbers_beyond_the_scales_have_a_flaw(dtype: str, axis: Axis) -> None:
    """The largest that can be written is 127 or 255 times the largest fp16; float32's whole range is beyond."""
    widths = (8,) if axis is Axis.LATENT else (8, 8)
    form = slice_form(1, 64, widths, DTYPES[dtype].itemsize)
    steps = 255 if axis is Axis.CHANNEL else 127
    for top, fits in ((0.99 * steps * 65504, True), (1.01 * steps * 65504, False), (3e38, False)):
        layer = [torch.zeros(1, 64, 1, width, dtype=DTYPES[dtype]) for width in widths]
        layer[axis is Axis.TOKEN][0, 5, 0, 3] = top
        if axis is Axis.CHANNEL and top > 1e38:
            layer[0][0, 6, 0, 3] = -top  # their distance is beyond float32
        copy = int8_loops.Int8Copy(form, Paged([layer], [0], 64, form.tokens), dtype)
        found = copy.encode_block(0, room(form, 1)[0], digest)
        assert isinstance(found, list) if fits else found is Flaw.OUT_OF_RANGE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_thread_that_flushes_denormals_writes_the_same_bytes(dtype: str) -> None:
    """Engines switch that on (torch.set_flush_denormal); of bfloat16 only what is no float32 denormal can be kept."""
    kind = "tiny" if dtype == "bfloat16" else "denormal"
    form = slice_form(2, 64, (72, 80), 2)
    layer = [numbers(kind, (1, 64, 2, width), DTYPES[dtype], 3) for width in (72, 80)]
    copy = int8_loops.Int8Copy(form, Paged([layer], [0], 64, form.tokens), dtype)
    payloads = []
    pages = []
    try:
        for flush in (False, True):
            if not torch.set_flush_denormal(flush):
                pytest.skip("this processor cannot flush denormals")
            span, memory = room(form, 1)
            digests = copy.encode_block(0, span, digest)
            assert isinstance(digests, list)
            into = [torch.zeros_like(plane) for plane in layer]
            back = int8_loops.Int8Copy(form, Paged([into], [0], 64, form.tokens), dtype)
            assert back.decode_block(span, 0, 0, digests, digest)
            payloads.append(bytes(memory))
            pages.append(b"".join(bits(plane).numpy().tobytes() for plane in into))
    finally:
        torch.set_flush_denormal(False)
    assert payloads[0] == payloads[1] and pages[0] == pages[1]


def test_a_damaged_slice_reaches_no_page() -> None:
    form = slice_form(2, 64, (16, 16), 2)
    layers = [[numbers("plain", (1, 64, 2, 16), torch.bfloat16, seed) for seed in (1, 2)] for _ in range(2)]
    span, _ = room(form, 2)
    digests = int8_loops.Int8Copy(form, Paged(layers, [0], 64, form.tokens), "bfloat16").encode_block(0, span, digest)
    assert isinstance(digests, list)
    span.view[form.size_bytes + 100] ^= 4
    into = [[torch.zeros_like(plane) for plane in layer] for layer in layers]
    assert not int8_loops.Int8Copy(form, Paged(into, [0], 64, form.tokens), "bfloat16").decode_block(
        span, 0, 0, digests, digest
    )
    assert into[0][0].any() and not into[1][0].any() and not into[1][1].any()


def test_pages_that_are_read_only_and_odd_strides_are_refused() -> None:
    form = slice_form(1, 64, (4, 4), 2)
    plane = np.zeros((1, 64, 1, 4), np.uint16)
    plane.flags.writeable = False
    copy = int8_loops.Int8Copy(form, Paged([[plane, plane]], [0], 64, form.tokens), "bfloat16")
    span, _ = room(form, 1)
    digests = copy.encode_block(0, span, digest)
    assert isinstance(digests, list)
    with pytest.raises(ValueError, match="read-only"):
        copy.decode_block(span, 0, 0, digests, digest)
    odd = np.zeros((64, 9), np.uint8)[:, 1:].view(np.uint16).reshape(1, 64, 1, 4, order="A")
    with pytest.raises(ValueError, match="whole numbers"):
        int8_loops.Int8Copy(form, Paged([[odd, odd]], [0], 64, form.tokens), "bfloat16")
    backwards = np.zeros((1, 64, 1, 4), np.uint16)[..., ::-1]
    with pytest.raises(ValueError, match="last one up"):
        int8_loops.Int8Copy(form, Paged([[backwards, backwards]], [0], 64, form.tokens), "bfloat16")


@pytest.mark.parametrize("has_loops", [True, False])
@pytest.mark.parametrize("kind", ["mapped read-only", "expanded array", "expanded tensor"])
def test_no_route_loads_into_pages_that_cannot_hold_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_loops: bool, kind: str
) -> None:
    """A mapping that is read-only would end the process."""
    loops = routes.compiled_loops
    monkeypatch.setattr(routes, "compiled_loops", loops if has_loops else lambda: None)
    (tmp_path / "pages").write_bytes(bytes(64 * 4 * 2))
    plane: Any = {
        "mapped read-only": np.memmap(tmp_path / "pages", np.uint16, "r", shape=(1, 64, 1, 4)),
        "expanded array": np.lib.stride_tricks.as_strided(np.zeros(4, np.uint16), (1, 64, 1, 4), (8, 0, 8, 2)),
        "expanded tensor": torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16).expand(1, 64, 1, 4),
    }[kind]
    form = slice_form(1, 64, (4, 4), 2)
    for copy in (
        routes.block_copy(form, Paged([[plane, plane]], [0], 64, 64), "bfloat16"),
        routes.block_copy(None, Paged([[plane, plane]], [0], 64, 64), "bfloat16"),
    ):
        memory = np.zeros(4096, np.uint8)[: form.size_bytes if copy.__module__ != "kv_kernels.host" else 1024]
        span = FrameSpan(memory.ctypes.data, memoryview(memory.data))
        (digests,) = copy.encode([0], [span], digest)
        assert isinstance(digests, list)
        with pytest.raises(ValueError, match="read-only, or expanded"):
            copy.decode([span], [0], 0, [digests], digest)


def test_pages_whose_tokens_and_heads_run_backwards() -> None:
    form = slice_form(2, 64, (8, 8), 4)
    straight = numbers("plain", (2, 64, 2, 8), torch.float32, 1).numpy()
    turned = np.ascontiguousarray(straight[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    payloads = []
    for plane in (straight, turned):
        span, memory = room(form, 1)
        copy = int8_loops.Int8Copy(form, Paged([[plane, plane]], [1], 64, form.tokens), "float32")
        assert isinstance(copy.encode_block(0, span, digest), list)
        payloads.append(bytes(memory))
    assert payloads[0] == payloads[1]


def test_without_numba_it_is_said_once_and_the_bytes_are_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form = slice_form(2, 64, (8, 8), 2)
    layer = [numbers("plain", (2, 64, 2, 8), torch.bfloat16, seed) for seed in (1, 2)]
    arrays = [plane.view(torch.uint16).numpy() for plane in layer]
    payloads = []
    for has_loops in (True, False):
        monkeypatch.setattr(compiled, "IS_USABLE", has_loops)
        monkeypatch.setattr(routes, "compiled_loops", cache(routes.compiled_loops.__wrapped__))
        for planes in (layer, arrays):
            routes.prepare_int8(["bfloat16"])
            span, memory = room(form, 1)
            copy = routes.block_copy(form, Paged([planes], [1], 64, 64), "bfloat16")
            assert isinstance(copy, int8_loops.Int8Copy if has_loops else plain.PlainCopy)
            assert [isinstance(encoded, list) for encoded in copy.encode([0], [span], digest)] == [True]
            payloads.append(bytes(memory))
    assert len(set(payloads)) == 1
    assert caplog.text.count("numba is not installed, broken or switched off") == 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["emptied", "full"])
def test_a_cache_of_numba_that_is_damaged_or_full_costs_seconds_only(tmp_path: Path, damage: str) -> None:
    """In processes of their own, because numba reads its settings when it is imported."""
    kept = tmp_path / "kept"
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(kept), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from kv_kernels import int8_loops; int8_loops.prepare('bfloat16')"]

    def prepared() -> str:
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    if damage == "full":
        # A file of 4 KiB still goes in, which is numba's test of a folder; an index is smaller, compiled code is not.
        command[2] = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); " + command[2]
    else:
        assert not prepared()
        for path in kept.rglob("*.nbc"):
            os.truncate(path, 0)
    assert "compiled for this process alone" in prepared()


@pytest.mark.slow
@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_numba_that_cannot_be_imported_is_done_without(error: type[Exception]) -> None:
    """OSError is what llvmlite raises where its shared library is missing or of another system."""
    script = f"""
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "llvmlite":
            raise {error.__name__}("could not find or load shared object file")
sys.meta_path.insert(0, Broken())
from kv_kernels import routes
routes.prepare_int8(["bfloat16"])
assert routes.compiled_loops() is None
"""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "ten times slower" in done.stderr
