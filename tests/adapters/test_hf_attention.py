"""Attention against its definition, in every shape that prefill and decode use."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.hf.attention import ChunkMask, attend
from kvstore.block.errors import BadInput


class Attention(torch.nn.Module):
    is_causal = True


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v in float64, KV heads repeated; returns [rows, query_len, heads, head_dim]."""
    repeat = query.shape[1] // key.shape[1]
    query, key, value = (tensor.double() for tensor in (query, key, value))
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def random_qkv(
    rows: int, query_len: int, kv_len: int, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_len)
    return (
        torch.randn(rows, heads, query_len, 16, generator=generator),
        torch.randn(rows, kv_heads, kv_len, 16, generator=generator),
        torch.randn(rows, kv_heads, kv_len, 16, generator=generator),
    )


@pytest.mark.parametrize(("query_len", "kv_len"), [(1, 1), (1, 130), (7, 7), (7, 130), (64, 192), (64, 65)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("is_masked", [True, False])
def test_a_chunk_behind_a_prefix(query_len: int, kv_len: int, heads: int, kv_heads: int, is_masked: bool) -> None:
    query, key, value = random_qkv(2, query_len, kv_len, heads, kv_heads)
    allowed = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    mask = ChunkMask(64, torch.float32).of(query_len, kv_len) if is_masked else None
    output, _ = attend(Attention(), query, key, value, mask, scaling=16**-0.5)
    assert output.shape == (2, query_len, heads, 16) and output.is_contiguous()
    torch.testing.assert_close(output.double(), by_definition(query, key, value, allowed), rtol=0, atol=2e-6)


def test_rows_of_different_lengths() -> None:
    query, key, value = random_qkv(3, 1, 90, 4, 2)
    allowed = (torch.arange(90) <= torch.tensor([[89], [0], [40]]))[:, None, None]
    output, _ = attend(Attention(), query, key, value, allowed, scaling=None)
    torch.testing.assert_close(output.double(), by_definition(query, key, value, allowed), rtol=0, atol=2e-6)
    key[1, :, 1:], value[1, :, 1:] = 1e30, 1e30
    again, _ = attend(Attention(), query, key, value, allowed, scaling=None)
    assert torch.equal(again, output), "what is masked has no part in the sum"


def test_masks_are_one_matrix() -> None:
    masks = ChunkMask(8, torch.bfloat16)
    assert masks.of(1, 50) is None and masks.of(8, 8) is None
    for query_len, kv_len in ((8, 24), (3, 19), (8, 500), (2, 9)):
        mask = masks.of(query_len, kv_len)
        assert mask is not None and mask.dtype == torch.bfloat16
        allowed = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
        assert torch.equal(mask[0, 0] == 0, allowed) and bool(mask[0, 0][~allowed].isinf().all())
    assert masks.of(8, 24).data_ptr() != masks.of(8, 16).data_ptr()  # type: ignore[union-attr]


def test_what_it_cannot_compute_is_refused() -> None:
    query, key, value = random_qkv(1, 4, 4, 4, 2)
    with pytest.raises(BadInput, match="softcap"):
        attend(Attention(), query, key, value, None, softcap=30.0)
    free = Attention()
    free.is_causal = False
    with pytest.raises(BadInput, match="not causal"):
        attend(free, query, key, value, None)
