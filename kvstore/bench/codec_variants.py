"""Ways of making K hard to quantize that leave what the model computes unchanged (floor 4).

Both are seen in large models, and a small one has neither, so that a codec that fails on them would pass unnoticed:

    outlier s   two rotary pairs of channels of every KV head: their rows of k_proj times s, those of q_proj divided by
                s. Every product of a query and a key stays as it was.
    bias b      after the rotation, + and - b times K's root mean square on two channels of every KV head, the same for
                every token. It adds one number to all scores of a query, and a softmax does not see that. So do biases
                of k_proj, which in some models are hundreds of times as large as K itself.

The pairs and channels are slow ones, that turn little from token to token: the fast ones smear what stands in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from engine_adapter.hf_layers import BufferLayer

# Of a head of 64 channels, of which i and i + 32 turn together.
OUTLIER_PAIRS = (24, 29)
BIAS_CHANNELS = (30, 59)


@dataclass(frozen=True, slots=True)
class Variant:
    """outlier: the factor on K's channels, 1 for none. bias: in units of K's root mean square, 0 for none."""

    name: str
    outlier: float = 1.0
    bias: float = 0.0


PLAIN = Variant("plain")
# 13 is no power of two: 16 would leave every float's relative error as it was.
OUTLIER = Variant("outlier 13", outlier=13.0)
BIAS = Variant("bias 100", bias=100.0)
VARIANTS = (PLAIN, OUTLIER, BIAS, Variant("outlier 13 + bias 100", outlier=13.0, bias=100.0))


def with_outliers(model: Any, variant: Variant) -> Any:
    """A copy of a Llama with this variant's weights."""
    changed = deepcopy(model)
    config = changed.config
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    rows = [channel for pair in OUTLIER_PAIRS for channel in (pair, pair + width // 2)]
    with torch.no_grad():
        for layer in changed.model.layers:
            of_keys = layer.self_attn.k_proj.weight.view(-1, width, config.hidden_size)
            of_queries = layer.self_attn.q_proj.weight.view(-1, width, config.hidden_size)
            assert len(of_queries) == group * len(of_keys)
            of_keys[:, rows] *= variant.outlier
            of_queries[:, rows] /= variant.outlier
    return changed


def offset_of(variant: Variant, width: int, rms: float) -> torch.Tensor:
    """[width]: what every K after the rotation gets on top."""
    offset = torch.zeros(width)
    for sign, channel in zip((1.0, -1.0), BIAS_CHANNELS, strict=True):
        offset[channel] = sign * variant.bias * rms
    return offset


class BiasedLayer(BufferLayer):
    """A layer's cache that adds the offset to each K that comes in; K that is put there by hand has it already."""

    def __init__(self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, length: int, offset: torch.Tensor) -> None:
        super().__init__(key_buffer, value_buffer, length)
        self.offset = offset

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the layer it is made from."""
        return super().update(key_states + self.offset, value_states, *args, **kwargs)


def spread(keys: Sequence[torch.Tensor]) -> float:
    """keys: of each layer, [heads, tokens, width]. How far the largest channel stands out: the largest number of each
    channel, the largest of these over their median; the mean over layers and heads."""
    found = []
    for layer in keys:
        largest = layer.float().abs().amax(1)
        found.append(largest.amax(1) / largest.median(1).values)
    return float(torch.stack(found).mean())
