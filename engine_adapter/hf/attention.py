"""Causal attention over a prefix and a chunk, for transformers' attention interface. Imports torch only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvstore.block.errors import BadInput

ATTENTION_NAME = "prefix_cache_sdpa"
"""The name of `attend` in transformers. No mask builder has this name, so a model builds no masks of its own."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the last query_len of kv_len tokens, with the signature that transformers calls.

    query: [rows, heads, query_len, head_dim]; key and value: [rows, kv_heads, kv_len, head_dim]; attention_mask: to be
    added or boolean, [rows or 1, 1, query_len, kv_len], or None where the causal pattern alone decides. Returns
    [rows, query_len, heads, head_dim]. It differs from transformers' own sdpa in two ways: on CUDA a chunk behind a
    prefix needs no mask in memory, as the flash kernel aligns the diagonal to the lower right; and KV heads are not
    repeated in memory where there is a mask.
    """
    if not getattr(module, "is_causal", True):
        raise BadInput("its attention is not causal")
    for name in ("position_bias", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise BadInput(f"its attention uses {name}")
    rows, heads, query_len, _ = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    bias: Any = attention_mask
    is_causal = False
    if query_len == 1:
        # The heads that share a KV head become its queries: each K and V is read once, by any kernel.
        query = query.reshape(rows, kv_heads, heads // kv_heads, -1)
    elif attention_mask is None:
        is_causal = query_len == kv_len
        bias = None if is_causal else causal_lower_right(query_len, kv_len)
    is_grouped = query.shape[1] != kv_heads
    if is_grouped and query.is_cuda and (attention_mask is not None or query.dtype == torch.float32):
        # On CUDA only the flash kernel knows grouped heads, and it takes neither masks nor float32.
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
        is_grouped = False
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=is_causal, scale=scaling, enable_gqa=is_grouped
    )
    return output.reshape(rows, heads, query_len, -1).transpose(1, 2).contiguous(), None


class ChunkMask:
    """Masks for chunks behind a prefix, all of them views of one matrix [1, 1, chunk, capacity].

    The CPU's kernels need a mask wherever query_len < kv_len. The last row and column of every chunk coincide, so the
    lower right corner of one matrix fits all:

        0 0 0 0 0 0 0 - - -        row: a token of a full chunk; column: a token of prefix and chunk
        0 0 0 0 0 0 0 0 - -        a chunk of 2 behind 3 is the last 2 rows and the last 5 columns
        0 0 0 0 0 0 0 0 0 -
        0 0 0 0 0 0 0 0 0 0        0: attend, -: minus infinity
    """

    def __init__(self, chunk_tokens: int, dtype: torch.dtype) -> None:
        self._chunk_tokens = chunk_tokens
        self._matrix = torch.empty(1, 1, chunk_tokens, 0, dtype=dtype)

    def of(self, query_len: int, kv_len: int) -> torch.Tensor | None:
        """The mask of the last `query_len` of `kv_len` tokens; None where the kernels need none."""
        if query_len in (1, kv_len):
            return None
        if kv_len > self._matrix.shape[-1]:
            chunk, dtype = self._chunk_tokens, self._matrix.dtype
            self._matrix = torch.zeros(1, 1, chunk, max(2 * kv_len, 16 * chunk), dtype=dtype)
            corner = torch.full((chunk, chunk), float("-inf"), dtype=dtype)
            self._matrix[..., -chunk:] = corner.triu(1)
        return self._matrix[..., -query_len:, -kv_len:]
