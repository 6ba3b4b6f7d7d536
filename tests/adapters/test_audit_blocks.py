"""Stored blocks beside computed ones, on real transformers models with random weights: what is close, what has drifted,
and how small a change is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.audit.audits import UNLIKE_ANYTHING, AuditResult, AuditVerdict
from engine_adapter.audit.blocks import allowed_error, compare_block, compare_opaque, compare_states, experts_of
from kv_kernels import int8
from kv_kernels.int8 import Axis
from kvstore.block.errors import BadInput

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf.layers import ModelCall  # noqa: E402
from hf_models import GATED  # noqa: E402
from hf_shapes import model_of_shape  # noqa: E402
from kvstore.demo.passes import load_trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 64
TOKENS = 5 * BLOCK
CODECS = ["raw", int8.KC64]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
USUAL, WIDE = 0.05, 0.2
"""Ranges of weights: with wide ones an error grows from layer to layer."""

Block = dict[int, list[torch.Tensor]]


def model_of(dtype: torch.dtype, layers: int = 3, spread: float = USUAL, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**GATED, "num_hidden_layers": layers, "initializer_range": spread})
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def prompt_of(seed: int = 5) -> list[int]:
    return torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def computed(model: Any, tokens: list[int], chunk_tokens: int) -> list[Block]:
    """The KV of a prompt's blocks, each plane [kv_head, token, width], computed in chunks."""
    call, ids = ModelCall(model), torch.tensor([tokens])
    cache = call.new_cache()
    for begin in range(0, len(tokens), chunk_tokens):
        call(ids[:, begin : begin + chunk_tokens], cache, begin, call.positions(ids, torch.ones_like(ids)))
    return [block_at(cache, at) for at in range(0, TOKENS, BLOCK)]


def block_at(cache: Any, at: int) -> Block:
    pairs = {number: (layer.keys, layer.values) for number, layer in enumerate(cache.layers)}
    return {number: [plane[0, :, at : at + BLOCK].clone() for plane in pair] for number, pair in pairs.items()}


@cache
def reference(dtype: torch.dtype, layers: int = 3, spread: float = USUAL) -> list[Block]:
    return computed(model_of(dtype, layers, spread), prompt_of(), 256)


def axis_of(codec: str, plane: int, planes: int = 2) -> Axis:
    if planes == 1:
        return Axis.LATENT
    return Axis.CHANNEL if codec == int8.KC64 and plane == 0 else Axis.TOKEN


def decoded(block: Block, codec: str) -> Block:
    """What is in the pages once the store has kept and restored it."""
    if codec == "raw":
        return block
    return {
        layer: [
            int8.dequantize(*int8.quantize(plane, axis_of(codec, number, len(planes))), plane.dtype)
            for number, plane in enumerate(planes)
        ]
        for layer, planes in block.items()
    }


def compare(stored: list[Block], now: list[Block], codec: str, **more: bool) -> list[AuditResult]:
    return [compare_block(decoded(old, codec), new, codec, **more) for old, new in zip(stored, now, strict=True)]


# The same weights and tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [USUAL, WIDE])
@pytest.mark.parametrize("layers", [3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_chunks_are_close_or_exact(dtype: torch.dtype, layers: int, spread: float) -> None:
    stored, model = reference(dtype, layers, spread), model_of(dtype, layers, spread)
    seen = set()
    for chunk_tokens in (64, 100):
        now = computed(model, prompt_of(), chunk_tokens)
        for codec in CODECS:
            for result in compare(stored, now, codec):
                seen.add(result.verdict)
                assert result.of_allowed < 0.75, "the allowance has room to spare"
    assert seen == {AuditVerdict.EXACT, AuditVerdict.CLOSE}, (
        "other chunks must give other bits somewhere, or nothing is shown"
    )


@pytest.mark.parametrize("layers", [3, 16])
def test_8_bit_floats_of_other_chunks_are_close_and_of_others_not(layers: int) -> None:
    for kept in (torch.float8_e4m3fn, torch.float8_e5m2):

        def narrowed(blocks: list[Block], kept: torch.dtype = kept) -> list[Block]:
            return [{layer: [plane.to(kept) for plane in pair] for layer, pair in b.items()} for b in blocks]

        model = model_of(torch.bfloat16, layers)
        stored = narrowed(reference(torch.bfloat16, layers))
        near = compare(stored, narrowed(computed(model, prompt_of(), 100)), "raw")
        assert {result.verdict for result in near} <= {AuditVerdict.EXACT, AuditVerdict.CLOSE}
        assert max(result.of_allowed for result in near) < 0.75
        far = compare(stored, narrowed(computed(model, prompt_of(6), 256)), "raw")
        assert {result.verdict for result in far} == {AuditVerdict.DRIFTED}


# Something else ---------------------------------------------------------------------------------------------------


def with_noise(model: Any, share: float) -> Any:
    """Each weight off by this share of itself, on average."""
    generator = torch.Generator().manual_seed(9)
    for weights in model.parameters():
        if weights.dim() > 1:
            noise = 1 + share * torch.randn(weights.shape, generator=generator)
            weights.data.copy_((weights.data.float() * noise).to(weights.dtype))
    return model


def with_adapter(model: Any, share: float, of: tuple[str, ...] = ("q_proj", "v_proj")) -> Any:
    """A LoRA of rank 4, merged, whose norm is this share of the weights'."""
    generator = torch.Generator().manual_seed(9)
    for name, weights in model.named_parameters():
        if any(part in name for part in of):
            rows, columns = weights.shape
            change = torch.randn(rows, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
            full = weights.data.float()
            weights.data.copy_((full + change * (share * full.norm() / change.norm())).to(weights.dtype))
    return model


OTHERS: dict[str, Callable[[torch.dtype], list[Block]]] = {
    "other weights": lambda dtype: computed(model_of(dtype, seed=1), prompt_of(), 256),
    "other tokens": lambda dtype: computed(model_of(dtype), prompt_of(6), 256),
    "shifted by a token": lambda dtype: computed(model_of(dtype), [*prompt_of()[1:], 3], 256),
    "an adapter": lambda dtype: computed(with_adapter(model_of(dtype), 0.1), prompt_of(), 256),
    "an adapter behind attention": lambda dtype: computed(
        with_adapter(model_of(dtype), 0.1, of=("o_proj",)), prompt_of(), 256
    ),
}


def _transposed(plane: torch.Tensor) -> torch.Tensor:
    return plane.transpose(0, 1).contiguous().view(plane.shape)


def _paged_wrongly(plane: torch.Tensor) -> torch.Tensor:
    """One page of 16 tokens is another one's."""
    plane = plane.clone()
    plane[:, 16:32] = plane[:, 48:64]
    return plane


LAYOUTS: dict[str, Callable[[Block], Block]] = {
    "K transposed": lambda b: {layer: [_transposed(keys), values] for layer, (keys, values) in b.items()},
    "V transposed": lambda b: {layer: [keys, _transposed(values)] for layer, (keys, values) in b.items()},
    "K and V swapped": lambda b: {layer: [values, keys] for layer, (keys, values) in b.items()},
    "heads swapped": lambda b: {layer: [plane.flip(0) for plane in pair] for layer, pair in b.items()},
    "layers swapped": lambda b: {layer: b[len(b) - 1 - layer] for layer in b},
    "a page of one layer": lambda b: {**b, 2: [_paged_wrongly(plane) for plane in b[2]]},
    "a scale left out": lambda b: {layer: [2 * plane for plane in pair] for layer, pair in b.items()},
    "zeros": lambda b: {layer: [torch.zeros_like(plane) for plane in pair] for layer, pair in b.items()},
}


@pytest.mark.parametrize(
    ("codec", "is_first", "beyond"), [*((codec, True, 2) for codec in CODECS), (int8.KC64, False, 1)]
)
@pytest.mark.parametrize("other", [*OTHERS, *LAYOUTS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_computed_or_lies_otherwise_has_drifted(
    dtype: torch.dtype, other: str, codec: str, is_first: bool, beyond: float
) -> None:
    """Also with the larger allowance of a block behind others that the codec restored."""
    right = reference(dtype)
    wrong = OTHERS[other](dtype) if other in OTHERS else [LAYOUTS[other](block) for block in right]
    results = compare(wrong, right, codec, is_first=is_first)
    assert {result.verdict for result in results} == {AuditVerdict.DRIFTED}
    assert min(result.of_allowed for result in results) > beyond


# Weights off by these shares of themselves: (dtype, found, not found) in random models, and found in the trained one.
LIMITS = [(torch.float32, 1e-3, 5e-5, 2e-3), (torch.float16, 3e-3, 5e-4, 1e-2), (torch.bfloat16, 2e-2, 1e-3, 5e-2)]


@pytest.mark.parametrize("layers", [3, 16])
@pytest.mark.parametrize(("dtype", "found", "hidden", "_trained"), LIMITS)
def test_how_small_a_change_of_the_weights_is_found(
    dtype: torch.dtype, found: float, hidden: float, _trained: float, layers: int
) -> None:
    stored = reference(dtype, layers)
    for share, verdicts in ((found, {AuditVerdict.DRIFTED}), (hidden, {AuditVerdict.CLOSE})):
        now = computed(with_noise(model_of(dtype, layers), share), prompt_of(), 256)
        for codec in CODECS:
            assert {result.verdict for result in compare(stored, now, codec)} == verdicts, (share, codec)


@pytest.mark.parametrize(("dtype", "_found", "_hidden", "found"), LIMITS)
def test_a_trained_model(dtype: torch.dtype, _found: float, _hidden: float, found: float) -> None:
    text = list(Path(__file__).read_bytes()[:TOKENS])
    stored = computed(load_trained().to(dtype), text, 256)
    close = computed(load_trained().to(dtype), text, 100)
    changed = computed(with_noise(load_trained().to(dtype), found), text, 256)
    adapted = computed(with_adapter(load_trained().to(dtype), 0.1), text, 256)
    for codec in CODECS:
        near = compare(stored, close, codec)
        assert max(result.of_allowed for result in near) < 0.25
        assert {result.verdict for result in near} <= {AuditVerdict.EXACT, AuditVerdict.CLOSE}
        assert {result.verdict for result in compare(stored, changed, codec)} == {AuditVerdict.DRIFTED}, codec
        assert {result.verdict for result in compare(stored, adapted, codec)} == {AuditVerdict.DRIFTED}, codec


# Behind what a codec restored -------------------------------------------------------------------------------------


def in_turns(model: Any, tokens: list[int], codec: str) -> list[Block]:
    """The KV of a prompt's blocks where each is computed behind the blocks before it as the codec restored them."""
    call, ids = ModelCall(model), torch.tensor([tokens])
    cache, blocks = call.new_cache(), []
    for begin in range(0, len(tokens), BLOCK):
        call(ids[:, begin : begin + BLOCK], cache, begin, call.positions(ids, torch.ones_like(ids)))
        blocks.append(block_at(cache, begin))
        for number, (keys, values) in decoded(blocks[-1], codec).items():
            cache.layers[number].keys[0, :, begin:], cache.layers[number].values[0, :, begin:] = keys, values
    return blocks


MODELS: dict[str, tuple[Callable[[torch.dtype], Any], float]] = {
    "usual": (lambda dtype: model_of(dtype), 0.25),
    "wide and deep": (lambda dtype: model_of(dtype, 16, WIDE), 0.9),
    "trained": (lambda dtype: load_trained().to(dtype), 0.2),
}
"""With the share of what is allowed that is used at most."""


@pytest.mark.parametrize("codec", [int8.KC64])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_computed_behind_restored_blocks_is_close(dtype: torch.dtype, name: str, codec: str) -> None:
    make, share = MODELS[name]
    model = make(dtype)
    prompt = list(Path(__file__).read_bytes()[:TOKENS]) if name == "trained" else prompt_of()
    stored, now = in_turns(model, prompt, codec), computed(model, prompt, 256)
    results = [
        compare_block(decoded(old, codec), new, codec, is_first=not number)
        for number, (old, new) in enumerate(zip(stored, now, strict=True))
    ]
    assert AuditVerdict.DRIFTED not in {result.verdict for result in results}
    assert max(result.of_allowed for result in results) < share
    if name == "wide and deep" and dtype is not torch.bfloat16:
        as_if_first = compare_block(decoded(stored[-1], codec), now[-1], codec)
        assert as_if_first.verdict is AuditVerdict.DRIFTED


# Numbers ----------------------------------------------------------------------------------------------------------


def test_errors_are_what_they_are_called() -> None:
    now = {0: [torch.full((2, 64, 4), 2.0), torch.full((2, 64, 4), 1.0)], 5: [torch.full((2, 64, 4), 1.0)] * 2}
    stored = {layer: [plane.clone() for plane in planes] for layer, planes in now.items()}
    stored[5][1] = stored[5][1] + 0.25
    result = compare_block(stored, now, "raw")
    assert result.verdict is AuditVerdict.DRIFTED and result.worst_layer == 5
    assert result.worst_error == pytest.approx(0.25)
    assert result.allowed_error == allowed_error(torch.float32, 5) == pytest.approx(2**-12 * 6**0.5)


@pytest.mark.parametrize("codec", [int8.KC64])
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 3),
    tokens=st.sampled_from([64, 128]),
    widths=st.sampled_from([(8, 8), (16, 3), (80,), (64,), (1,)]),
    exponent=st.integers(-60, 13),
)
def test_what_a_codec_made_of_a_block_is_exact(
    codec: str, seed: int, dtype: torch.dtype, heads: int, tokens: int, widths: tuple[int, ...], exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    planes = [
        (
            torch.randn(heads, tokens, width, generator=generator)
            * 2.0 ** max(exponent, -10 if dtype == torch.float16 else -60)
        ).to(dtype)
        for width in widths
    ]
    block = {3: planes}
    result = compare_block(decoded(block, codec), block, codec)
    assert result.verdict is AuditVerdict.EXACT and result.worst_error == 0.0


def test_numbers_that_are_none() -> None:
    plane = torch.randn(1, 64, 8)
    broken = plane.clone()
    broken[0, 3, 3] = float("nan")
    for codec in CODECS:
        for stored, now in ((broken, plane), (plane, broken)):
            result = compare_block({0: [stored, plane]}, {0: [now, plane]}, codec)
            assert result.verdict is AuditVerdict.DRIFTED and result.worst_error == UNLIKE_ANYTHING, codec
    same = compare_block({0: [broken, plane]}, {0: [broken.clone(), plane]}, "raw")
    assert same.verdict is AuditVerdict.EXACT
    nothing = torch.zeros(1, 64, 8)
    assert compare_block({0: [nothing]}, {0: [-nothing]}, "raw").verdict is AuditVerdict.CLOSE
    assert compare_block({0: [plane]}, {0: [nothing]}, "raw").verdict is AuditVerdict.DRIFTED


def test_what_cannot_be_compared_is_said() -> None:
    plane = torch.zeros(1, 64, 8)
    for stored, now, codec, words in (
        ({0: [plane]}, {1: [plane]}, "raw", "not the same planes"),
        ({0: [plane]}, {0: [plane, plane]}, "raw", "not the same planes"),
        ({0: [plane]}, {0: [plane.half()]}, "raw", "its own namespace"),
        ({0: [plane]}, {0: [plane[:, :32]]}, "raw", "its own namespace"),
        ({0: [plane]}, {0: [plane]}, "zip", "allowed: raw, int8-kc64"),
        ({0: [plane.to(torch.uint8)]}, {0: [plane.to(torch.uint8)]}, "raw", "view it as one of"),
        ({0: [plane[:, :32]] * 2}, {0: [plane[:, :32]] * 2}, int8.KC64, "a multiple of 64 tokens"),
        ({0: [plane.to(torch.float8_e5m2)]}, {0: [plane.to(torch.float8_e5m2)]}, int8.KC64, "16- or 32-bit floats"),
        ({}, {}, "raw", "without planes"),
    ):
        with pytest.raises(BadInput, match=words):
            compare_block(stored, now, codec)


# Pages that nobody can read as K and V --------------------------------------------------------------------------------


def as_bytes(*planes: torch.Tensor) -> Block:
    return {layer: [plane.view(torch.uint8)] for layer, plane in enumerate(planes)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_compared_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(3)
    first, second = (torch.randn((1, BLOCK, 36), generator=drawn).to(dtype) for _ in range(2))
    right = as_bytes(first, second)
    for factor, verdict in (
        (1.0, AuditVerdict.EXACT),
        (1 + allowed_error(dtype, 1) / 2, AuditVerdict.CLOSE),
        (1.5, AuditVerdict.DRIFTED),
    ):
        result = compare_opaque(as_bytes(first, (second * factor).to(dtype)), right, dtype)
        assert result is not None and result.verdict is verdict
        assert result.worst_layer == 1 or verdict is AuditVerdict.EXACT


@pytest.mark.parametrize(
    ("dtype", "width"),
    [*((dtype, 40) for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float64, torch.int32)), (torch.float32, 6)],
)
def test_of_bytes_that_are_no_such_numbers_only_equal_ones_say_something(dtype: torch.dtype, width: int) -> None:
    """Or slices that are no whole numbers."""
    plane = torch.randint(0, 256, (1, BLOCK, width), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    right = {0: [plane], 1: [plane.clone()]}
    result = compare_opaque(right, {0: [plane.clone()], 1: [plane]}, dtype)
    assert result is not None and result.verdict is AuditVerdict.EXACT
    other = plane.clone()
    other[0, -1, -1] ^= 1
    for layer in (0, 1):
        assert compare_opaque({**right, layer: [other]}, right, dtype) is None


# Recurrent states -------------------------------------------------------------------------------------------------

RUNS, STEPS, KEYS, VALUES = 10_000, 64, 8, 8
LAST_LAYER = 2


def states_of(dtype: torch.dtype, seed: int, noise: int) -> list[torch.Tensor]:
    """Of many prompts at once: a gated sum of k v^T as it is behind each step, kept in `dtype`, of inputs that a model
    in bfloat16 has rounded on its way to its last layer. noise: of another way to compute the same. Returned are those
    of a block before the last step, and those of the last one."""
    drawn, rounded = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(noise)
    state, found = torch.zeros(RUNS, KEYS, VALUES), []
    off = 2.0**-8 * ((LAST_LAYER + 1) / 2) ** 0.5  # two ways differ by a bit for each layer
    for step in range(STEPS):
        k, v = torch.randn(RUNS, KEYS, 1, generator=drawn), torch.randn(RUNS, 1, VALUES, generator=drawn)
        decay = 0.2 * torch.rand(RUNS, 1, 1, generator=drawn)
        k, v, decay = (one * (1 + off * torch.randn(one.shape, generator=rounded)) for one in (k, v, decay))
        state = (torch.exp(-decay) * state + k * v).to(dtype).float()
        if step in (STEPS - 16, STEPS - 1):
            found.append(state.flatten(1).to(dtype))
    return found


def compared_states(stored: torch.Tensor, now: torch.Tensor) -> AuditResult:
    tensors = {LAST_LAYER: ((str(now.dtype).split(".")[1], now.numel()),)}
    planes = ({LAST_LAYER: [one.view(torch.uint8).view(1, 1, -1)]} for one in (stored, now))
    return compare_states(*planes, tensors, torch.bfloat16, STEPS, "raw")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_is_close_to_the_same_one_and_to_no_other(dtype: torch.dtype) -> None:
    """No false alarm in 10,000; one of a block before, one of another prompt, and a change of four times the bound are
    found."""
    now, stored, other = states_of(dtype, 1, 2), states_of(dtype, 1, 3)[1], states_of(dtype, 4, 5)[1]
    bound = compared_states(stored[0], now[-1][0]).allowed_error
    last = now[-1].float()
    off = (stored.float() - last).norm(dim=1) / last.norm(dim=1)
    assert float(off.max()) < bound < 0.1, "of 10,000"
    assert compared_states(now[-1][0], now[-1][0]).verdict is AuditVerdict.EXACT
    for run in range(50):
        assert compared_states(stored[run], now[-1][run]).verdict is AuditVerdict.CLOSE
        changed = now[-1][run] * (1 + 4 * bound)
        for wrong in (now[0][run], other[run], changed):
            assert compared_states(wrong, now[-1][run]).verdict is AuditVerdict.DRIFTED


def test_a_token_that_went_to_another_expert_is_no_drift() -> None:
    """Rounding decides between two experts of the same score; a block of which all tokens are off has drifted."""
    experts, dsa = experts_of(model_of_shape("Qwen3 MoE").config), model_of_shape("DeepSeek V3.2").config
    now = reference(torch.bfloat16)[0]
    one, each = ({layer: [plane.clone() for plane in planes] for layer, planes in now.items()} for _ in range(2))
    one[LAST_LAYER][0][:, 5] *= 1.5
    each[LAST_LAYER][0] *= 1.5
    assert (experts, experts_of(model_of(torch.float32).config), experts_of(dsa)) == (2, 0, 1)
    for stored, told, verdict in ((one, 0, "drifted"), (one, experts, "close"), (each, experts, "drifted")):
        assert compare_block(stored, now, "raw", experts=told).verdict == verdict


def test_a_state_of_numbers_that_are_none_is_said() -> None:
    one = torch.zeros(8, dtype=torch.int8)
    with pytest.raises(BadInput, match="a state of int8 cannot be audited"):
        compared_states(one, one)
