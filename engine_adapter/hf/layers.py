"""Cache layers and a model call: the one file of the serving path that imports transformers, 5.17 and newer.

Cache layers here write into preallocated buffers and hand out views; nothing is ever concatenated. Only what both 5.17
and 5.23 have is overridden. Must never change the user's model for longer than one forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from engine_adapter.hf.attention import ATTENTION_NAME, attend
from engine_adapter.hf.model import refusal
from kvstore.block.errors import LayoutMismatch

Planes = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each [rows, kv_heads, capacity, head_dim]."""


class ModelCall:
    """Forward passes of one model over buffers.

    takes_masks: whether attention runs through `attend`, which takes ready masks of four dimensions; a model with any
    other attention builds its own from a mask of two.
    """

    def __init__(self, model: Any) -> None:
        """Raises `BadInput` for a model whose cache is not plain KV of every token in every layer."""
        _check_cache_layers(model)
        self._model = model
        self._attention = str(model.config._attn_implementation)
        if self._attention == "sdpa" and getattr(model, "_supports_attention_backend", False):
            AttentionInterface.register(ATTENTION_NAME, attend)
            self._attention = ATTENTION_NAME
        self.takes_masks = self._attention == ATTENTION_NAME
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: torch.Tensor,
        cache: Cache,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One forward pass over token_ids, [rows, tokens]; returns the last token's logits, [rows, vocabulary]."""
        if mask is not None and positions is None and self._takes_positions and self.takes_masks:
            # Some models would count positions from the mask, which has four dimensions here.
            length = cache.get_seq_length()
            positions = torch.arange(length, length + token_ids.shape[1], device=token_ids.device)[None]
        with _attention_of(self._model.config, self._attention):
            output = self._model(
                input_ids=token_ids,
                past_key_values=cache,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                return_dict=True,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def even_cache(planes: Sequence[Planes], length: int) -> Cache:
    """A cache over buffers, one pair per layer, whose rows all hold `length` tokens."""
    return Cache(layers=[BufferLayer(*pair, length) for pair in planes])


def ragged_cache(planes: Sequence[Planes], length: int, positions: torch.Tensor) -> Cache:
    """A cache for decoding rows of different lengths, `length` being the longest; see `RaggedLayer`."""
    return Cache(layers=[RaggedLayer(*pair, length, positions) for pair in planes])


class BufferLayer(CacheLayerMixin):
    """One layer's cache over preallocated K and V, [rows, kv_heads, capacity, head_dim]: written in place, never
    concatenated. All rows have the same length."""

    is_sliding = False

    def __init__(self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, length: int) -> None:
        super().__init__()
        self.key_buffer, self.value_buffer, self.length = key_buffer, value_buffer, length
        self.dtype, self.device = key_buffer.dtype, key_buffer.device
        self.is_initialized = True
        self._show()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are there before the first token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V, [rows, kv_heads, tokens, head_dim], behind what is there; returns views of everything."""
        _check_states(key_states, self.key_buffer)
        stop = self.length + key_states.shape[-2]
        self.key_buffer[:, :, self.length : stop] = key_states
        self.value_buffer[:, :, self.length : stop] = value_states
        self.length = stop
        return self._show()

    def get_seq_length(self) -> int:
        """Tokens held, of the longest row."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of K in a forward pass over `query_length` new tokens."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return int(self.key_buffer.shape[-2])

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = self.key_buffer[:, :, : self.length]
        self.values = self.value_buffer[:, :, : self.length]
        return self.keys, self.values


class RaggedLayer(BufferLayer):
    """A `BufferLayer` for rows of different lengths, one token a step. positions: [rows], where each row writes; the
    caller moves them on."""

    def __init__(
        self, key_buffer: torch.Tensor, value_buffer: torch.Tensor, length: int, positions: torch.Tensor
    ) -> None:
        super().__init__(key_buffer, value_buffer, length)
        self.positions = positions
        self.row_numbers = torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's K and V, [rows, kv_heads, 1, head_dim], at its own position."""
        _check_states(key_states, self.key_buffer)
        self.key_buffer[self.row_numbers, :, self.positions] = key_states[:, :, 0]
        self.value_buffer[self.row_numbers, :, self.positions] = value_states[:, :, 0]
        self.length += 1
        return self._show()


@contextmanager
def _attention_of(config: Any, name: str) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _check_cache_layers(model: Any) -> None:
    name = model.config.model_type
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            kind = type(layer).__name__
            if "Sliding" in kind:
                reason = "it keeps only a sliding window of KV"
            elif "Linear" in kind:
                reason = "it keeps a recurrent state (linear attention)"
            else:
                reason = f"its KV is not plain full attention ({kind})"
            raise refusal(name, f"layer {number}: {reason}")
    if getattr(model.generation_config, "cache_implementation", None) == "quantized":
        raise refusal(name, "its generation config asks for a quantized cache; set cache_implementation to None")


def _check_states(states: torch.Tensor, buffer: torch.Tensor) -> None:
    rows, heads, _, width = states.shape
    wanted = (buffer.shape[0], buffer.shape[1], buffer.shape[3], buffer.dtype)
    if (rows, heads, width, states.dtype) != wanted:
        raise LayoutMismatch(
            f"the model makes KV of (rows, kv_heads, head_dim, dtype) = ({rows}, {heads}, {width}, {states.dtype}), "
            f"its configuration says {wanted}"
        )
