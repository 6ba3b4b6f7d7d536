"""A stored block beside the block that the engine computed just now: the same, close, or drifted.

The same tokens, computed in chunks of another size, give other last bits: sums are added in another order, and what is
rounded differently in one layer is carried into the next. How far two such runs may be apart is derived here, layer by
layer; what is further apart was computed with something else. Imports torch only; works on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, isfinite, sqrt
from typing import Any

import torch

from engine_adapter.audit.audits import UNLIKE_ANYTHING, AuditResult, AuditVerdict
from kv_kernels import int8
from kv_kernels.int8 import Axis, Unwritable
from kvstore.block.errors import BadInput

Planes = Mapping[int, Sequence[torch.Tensor]]
"""For each of the model's layer numbers its planes, each [kv_head, token, width], of one block."""

# How far apart two runs may be -------------------------------------------------------------------------------------
#
# Let u be the distance of two neighbouring numbers, relative to the number (bfloat16 2**-8, float16 2**-11). Rounding
# is off by 0.2 u on average (rms), and two runs that round different numbers differ by 0.3 u. A layer rounds some
# twelve times on the way from its input to the next one's (norm, q, k, v, rope, attention, output, sum; norm, gate and
# up, product, down, sum), each independently of the others: 0.3 u * sqrt(12) = u. Layers add up as a random walk, so if
# nothing whatever were rounded alike, two runs would differ by u * sqrt(layers). Four times that is allowed.
#
# In float32 the sums themselves are rounded, and a sum of n numbers is off by about sqrt(n) times as much as one of
# them; and where factors are rounded to 2**-11 (TF32), a last bit can tip one of them. 2**-12 is far above both, and
# far below any other set of weights.
#
# Random Llamas of 4 to 32 layers, in chunks of 64 to 1280 tokens beside chunks of 256, are at most 2.2 u sqrt(layers)
# apart in 16 bits, and at 0.0031 of what is allowed in float32. Found for certain (the tests show it): weights that
# each change by a random share of themselves, 2 in 100 on average in bfloat16, 3 in 1000 in float16, 1 in 1000 in
# float32.
#
# What was computed behind a prefix that an 8-bit codec had restored carries that prefix's errors: two roundings more in
# each layer, of K and of V, of a size that is measured on the block itself; four times their random walk is allowed as
# well. Changes of less than that hide behind it, so an audit of 8 bits must compare first blocks too.
#
# Of tokens that go to experts by the order of their scores, a share 2 d is so near to another choice that two runs that
# differ by d choose differently; such a token has another expert for one of its own. That makes sqrt(2 d) / experts. An
# indexer that chooses which tokens are attended to (DSA) counts as one expert.

ALLOWED_AT_FIRST: dict[torch.dtype, float] = {
    torch.float32: 2.0**-12,
    torch.float16: 4 * 2.0**-11,
    torch.bfloat16: 4 * 2.0**-8,
}
"""Relative error (rms) that is allowed in a model's first layer."""

ALLOWED_CARRIED = 4
"""Times the error that an 8-bit codec makes in a layer's K and V: allowed in a model's first layer."""
CODEC_ERROR = 2.0**-7
"""Relative error (rms) of numbers in 8 bits, for states: nothing of these says what the KV before them lost."""

EIGHT_BITS: dict[torch.dtype, float] = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
"""Distance of neighbouring numbers, relative to the smaller one, of KV that a bfloat16 model keeps in 8-bit floats."""


EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def experts_of(config: Any) -> int:
    """To how many experts a token goes, by a model's configuration for text; 0 for a model without."""
    given = next((found for name in EXPERTS if (found := getattr(config, name, None))), 0)
    return 1 if getattr(config, "index_topk", None) else min(given) if isinstance(given, list) else given


def allowed_error(dtype: torch.dtype, layer: int) -> float:
    """Relative error (rms) up to which a layer's plane is close. layer: the model's number, from 0 on. Raises
    `BadInput` for numbers that are not floats.

    8-bit floats: of two numbers that differ by d, a share of d / spacing is rounded to different neighbours, which are
    a spacing apart; that makes sqrt(d * spacing).
    """
    if dtype in ALLOWED_AT_FIRST:
        return ALLOWED_AT_FIRST[dtype] * sqrt(layer + 1)
    if dtype in EIGHT_BITS:
        of_model = allowed_error(torch.bfloat16, layer)
        return of_model + sqrt(of_model * EIGHT_BITS[dtype])
    allowed = ", ".join(str(known).removeprefix("torch.") for known in (*ALLOWED_AT_FIRST, *EIGHT_BITS))
    raise BadInput(f"KV of dtype {str(dtype).removeprefix('torch.')} cannot be audited; view it as one of: {allowed}")


# A recurrent state is a sum over all tokens. Each term is a product of at most four numbers (key, value, decay, step
# size), and each of these is as far off as the K and V of that layer, so a term is twice as far off (four errors,
# independent of each other), and so is the sum, relative to its size. That holds for decays too: one of e^-x that is
# off by x u in each step is off by sqrt(x) u over the 1 / x steps that it lets through. Beside that the state is itself
# rounded to its own dtype, at most once for each token: 0.3 u in two runs, a random walk. Four times all this is
# allowed. In float32 the walk is 1 in 10,000 after two million tokens; in bfloat16 it is 0.3 after 4,096, where the
# state of another prompt, or of an earlier block, is off by its whole size.

STEP_ERROR: dict[torch.dtype, float] = {
    torch.float32: 4 * 0.3 * 2.0**-24,
    torch.float16: 4 * 0.3 * 2.0**-11,
    torch.bfloat16: 4 * 0.3 * 2.0**-8,
}
"""Relative error (rms) that each step's rounding may add to a state."""


def allowed_of_state(dtype: torch.dtype, made_of: torch.dtype, deepest: int, tokens: int, codec: str) -> float:
    """Relative error (rms) up to which a state of that dtype behind so many tokens is close. made_of: the model's
    dtype. deepest: its last layer. codec: of the KV before it. Raises `BadInput` for numbers that are not floats."""
    if dtype not in STEP_ERROR:
        known = ", ".join(str(one).removeprefix("torch.") for one in STEP_ERROR)
        raise BadInput(f"a state of {str(dtype).removeprefix('torch.')} cannot be audited; view it as one of: {known}")
    carried = 0.0 if codec == "raw" else ALLOWED_CARRIED * CODEC_ERROR * sqrt(deepest + 1)
    return hypot(2 * allowed_error(made_of, deepest), 2 * carried, STEP_ERROR[dtype] * sqrt(tokens))


def compare_block(
    stored: Planes,
    computed: Planes,
    codec: str,
    deepest: int | None = None,
    *,
    is_first: bool = True,
    allowed: Mapping[int, Sequence[float]] | None = None,
    experts: int = 0,
) -> AuditResult:
    """Compare one block. stored: as decoded. computed: as the engine has it. codec: the namespace's, whose bound each
    number may be off by. deepest: the model's last layer, where layers are not numbered by depth. is_first: whether it
    is a prompt's first block; a later one may have been computed behind blocks that the codec restored. allowed: of
    each layer and plane, instead of `allowed_error`. experts: to which each token goes; 0 for a model without. Raises
    `BadInput` if the two are not of one shape."""
    rows, bounds, layers = [], [], []
    for layer, planes in computed.items():
        if layer not in stored or len(stored[layer]) != len(planes):
            raise BadInput(f"layer {layer}: what is stored and what was computed have not the same planes")
        for number, plane in enumerate(planes):
            rows.append(_compare_plane(stored[layer][number], plane, _axis(codec, number, len(planes))))
            depth = layer if deepest is None else deepest
            bounds.append(allowed_error(plane.dtype, depth) if allowed is None else allowed[layer][number])
            layers.append(layer)
    if not rows:
        raise BadInput("a block without planes; give those of one layer at least")
    table = torch.stack(rows).double().cpu()  # one wait for the device
    if not is_first:
        carried = ALLOWED_CARRIED * _codec_error(table, len(set(layers)))
        depths = layers if deepest is None else [deepest] * len(layers)
        bounds = [hypot(own, carried * sqrt(layer + 1)) for own, layer in zip(bounds, depths, strict=True)]
    if experts:
        bounds = [hypot(own, sqrt(2 * own) / experts) for own in bounds]
    errors = [_relative(excess, size) for size, _, excess, _ in table.tolist()]
    worst = max(range(len(rows)), key=lambda row: errors[row] / bounds[row])
    if table[:, 3].all():
        verdict = AuditVerdict.EXACT
    else:
        verdict = AuditVerdict.CLOSE if errors[worst] <= bounds[worst] else AuditVerdict.DRIFTED
    return AuditResult(verdict, errors[worst], bounds[worst], layers[worst])


def compare_opaque(
    stored: Planes, computed: Planes, dtype: torch.dtype, deepest: int | None = None, experts: int = 0
) -> AuditResult | None:
    """The same for opaque pages, in which the places of K and V are unknown. dtype: of the engine's tensors. If these
    are not floats, equal bytes are `EXACT`, and for all others there is no verdict: None."""
    size = torch.empty((), dtype=dtype).element_size()
    widths = [plane.shape[-1] for planes in computed.values() for plane in planes if plane.dtype is torch.uint8]
    if dtype in ALLOWED_AT_FIRST and all(width % size == 0 for width in widths):
        stored, computed = _as_numbers(stored, dtype), _as_numbers(computed, dtype)
        return compare_block(stored, computed, "raw", deepest, experts=experts)
    pairs = [pair for layer, planes in computed.items() for pair in zip(stored[layer], planes, strict=True)]
    if not pairs or not all(torch.equal(_bits(one), _bits(other)) for one, other in pairs):
        return None
    return AuditResult(AuditVerdict.EXACT, 0.0, 1.0, next(iter(computed)))


def compare_states(
    stored: Planes,
    computed: Planes,
    tensors: Mapping[int, Sequence[tuple[str, int]]],
    made_of: torch.dtype,
    tokens: int,
    codec: str,
    experts: int = 0,
) -> AuditResult:
    """The same for recurrent states, of which each layer's plane is the bytes of some tensors. tensors: dtype and
    numbers of each. made_of, tokens, codec: as for `allowed_of_state`. Raises `BadInput`."""
    deepest = max(computed, default=0)
    allowed = {
        layer: [allowed_of_state(getattr(torch, dtype), made_of, deepest, tokens, codec) for dtype, _ in held]
        for layer, held in tensors.items()
    }
    stored, computed = (
        {layer: _tensors(planes[layer][0].flatten(), held) for layer, held in tensors.items()}
        for planes in (stored, computed)
    )
    return compare_block(stored, computed, "raw", allowed=allowed, experts=experts)


def _tensors(raw: torch.Tensor, tensors: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
    found, at = [], 0
    for name, count in tensors:
        dtype: torch.dtype = getattr(torch, name)
        stop = at + count * dtype.itemsize
        found.append(raw[at:stop].clone().view(dtype).view(1, 1, count))
        at = stop
    return found


def _as_numbers(block: Planes, dtype: torch.dtype) -> Planes:
    return {
        layer: [plane.contiguous().view(dtype) if plane.dtype is torch.uint8 else plane for plane in planes]
        for layer, planes in block.items()
    }


def _codec_error(table: torch.Tensor, layers: int) -> float:
    shares = table[:, 1] / table[:, 0]
    return sqrt(float(shares[shares.isfinite()].sum()) / layers)


def _axis(codec: str, plane: int, planes: int) -> Axis | None:
    if codec == "raw":
        return None
    if codec != int8.KC64:
        raise BadInput(f"blocks of codec {codec!r} cannot be audited; allowed: raw, {int8.KC64}")
    if planes == 1:
        return Axis.LATENT
    return Axis.CHANNEL if plane == 0 else Axis.TOKEN


def _compare_plane(stored: torch.Tensor, computed: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """[4]: sums of squares of 0 the computed numbers, 1 the codec's errors in these, 2 the difference without the
    codec's errors; 3 is 1 if both are the same.

    A codec's errors are independent of all others, so squares add up; and its errors in the computed numbers are on
    average as large as those in the stored ones. A sum of n squares of evenly spread errors has a standard deviation
    of 0.9 / sqrt(n) of itself, the difference of two 1.3 / sqrt(n): three of those are taken off as well.
    """
    if stored.shape != computed.shape or stored.dtype != computed.dtype:
        raise BadInput(
            f"stored: {list(stored.shape)} of {stored.dtype}, computed: {list(computed.shape)} of {computed.dtype}; "
            "a block is compared with a block of its own namespace"
        )
    stored = stored.to(computed.device)
    expected = computed if axis is None else _through_codec(computed, axis)
    is_equal = torch.equal(_bits(stored), _bits(expected))
    size = computed.float()
    # Equal bits do not differ, even where a number is NaN.
    difference = torch.zeros_like(size) if is_equal and axis is None else (stored.float() - size).abs()
    of_codec = (expected.float() - size).square().sum()
    return torch.stack(
        [
            size.square().sum(),
            of_codec,
            (difference.square().sum() - of_codec * (1 + 4 / sqrt(size.numel()))).clamp(min=0),
            size.new_tensor(float(is_equal)),
        ]
    )


def _through_codec(computed: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The computed plane after the codec. If the codec cannot write the plane, it is not what was stored: then the
    plane itself."""
    if computed.dtype not in ALLOWED_AT_FIRST or (axis is Axis.CHANNEL and computed.shape[1] % int8.GROUP):
        raise BadInput(
            f"a block of {list(computed.shape)} numbers of {computed.dtype} is none of an 8-bit codec: give 16- or "
            f"32-bit floats, [kv_head, token, width], of a multiple of {int8.GROUP} tokens"
        )
    try:
        codes, scales, zeros = int8.quantize(computed, axis)
    except Unwritable:
        return computed
    decoded: torch.Tensor = int8.dequantize(codes, scales, zeros, computed.dtype)
    return decoded


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _relative(squares: float, of_squares: float) -> float:
    if squares == 0.0:
        return 0.0
    if not (isfinite(squares) and isfinite(of_squares)) or of_squares == 0.0:
        return UNLIKE_ANYTHING
    return sqrt(squares / of_squares)
