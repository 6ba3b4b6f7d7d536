"""What a model computes, found out by running it: a digest of the KV of one short prompt. Imports torch only.

    chunk 1   p0 p1 p2 p3 p4 p5 p6 p7                              the first chunk attends to itself alone,
    chunk 2                           p8 p9 ... p15                the second one to what is behind it as well

The same prompt on one thread gives the same bits in every process of a machine, however many threads the process has
otherwise. Must never leave a setting of torch changed, nor let two models that compute differently have one digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import sqrt
from typing import Any

import torch

from engine_adapter.hf.attention import ChunkMask
from engine_adapter.hf.buffers import BufferSet
from engine_adapter.hf.layers import ModelCall, even_cache
from engine_adapter.hf.model import refusal
from kvstore.block.layout import Layout
from kvstore.client.edge import contained

CHUNK = 8
PROBE_TOKENS = 2 * CHUNK
ALIKE = CHUNK // 2
"""In the trial, this many leading tokens of a chunk stay the same, and those behind them change."""

Kv = list[torch.Tensor]
"""K and V of each layer in turn, each [kv_heads, tokens, head_dim]."""


class Probe:
    """Runs one model over a prompt whose tokens are spread over the vocabulary."""

    def __init__(self, call: ModelCall, is_masked: bool, layout: Layout, model: Any) -> None:
        """is_masked: whether chunks behind a prefix are given a mask, as requests' chunks are then."""
        self._call = call
        self._mask = ChunkMask(CHUNK, getattr(torch, layout.groups[0].dtype)) if is_masked else None
        self._name = str(model.config.model_type)
        self._device: torch.device = next(model.parameters()).device
        vocabulary = int(model.config.vocab_size)
        step = max(1, vocabulary // PROBE_TOKENS)
        # Spread over the whole vocabulary; adding 3 makes the stride odd where the step is even.
        self._tokens = [(number * step + 3 * number) % vocabulary for number in range(PROBE_TOKENS)]
        self._others = [(token + vocabulary // 2 + 1) % vocabulary for token in self._tokens]
        capacity = -(-PROBE_TOKENS // layout.block_tokens) * layout.block_tokens
        self._buffers = BufferSet(layout, 1, capacity, self._device)

    def digest(self) -> str:
        """Digest of the bits of K and V in every layer. Raises `BadInput` where the model cannot be run."""
        return _digest(self._kv(self._tokens))

    def trial(self) -> str | None:
        """The digest, after checking that a token's KV does not depend on tokens behind it.

        None for a model that computes the same KV but not the same bits twice. Raises `BadInput`, with one line.
        """
        first = self._kv(self._tokens)
        digest: str | None = _digest(first)
        behind = self._tokens[: CHUNK + ALIKE] + self._others[CHUNK + ALIKE :]
        second = self._kv(behind)
        if not _is_equal(first, second, CHUNK + ALIKE):
            again = self._kv(self._tokens)
            if not _is_equal(first, again, PROBE_TOKENS):
                digest = None
                self._check(
                    first, again, PROBE_TOKENS, "it does not compute the same KV twice (dropout, noise, a hook)"
                )
            self._check(first, second, CHUNK + ALIKE, "the KV of a token depends on the tokens behind it")
        alone = self._kv(self._tokens[:ALIKE] + self._others[ALIKE:CHUNK])
        self._check(first, alone, ALIKE, "the KV of a token depends on the tokens behind it")
        return digest

    def _kv(self, tokens: Sequence[int]) -> Kv:
        planes = self._buffers.of_rows(0, 1)
        cache = even_cache(planes, 0)
        with contained(self._refuse), _one_thread(self._device):
            for begin in range(0, len(tokens), CHUNK):
                end = begin + CHUNK
                mask = self._mask.of(CHUNK, end) if self._mask is not None else None
                self._call(torch.tensor([tokens[begin:end]], device=self._device), cache, mask)
        if any(cache.get_seq_length(layer) != len(tokens) for layer in range(len(planes))):
            raise refusal(self._name, "it does not keep its KV in the cache that it is given")
        return [plane[0, :, : len(tokens)].clone() for pair in planes for plane in pair]

    def _refuse(self, error: Exception) -> None:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise refusal(self._name, f"a trial run failed: {said}") from error

    def _check(self, one: Kv, other: Kv, tokens: int, reason: str) -> None:
        for mine, theirs in zip(one, other, strict=True):
            # Only rounding may differ: where a chunk is split among experts, shapes depend on all of its tokens.
            tolerance = min(1e-2, sqrt(torch.finfo(mine.dtype).eps))
            mine, theirs = mine[:, :tokens].float(), theirs[:, :tokens].float()
            if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * float(mine.abs().max())):
                raise refusal(self._name, reason)


def _digest(kv: Kv) -> str:
    state = blake2b(digest_size=16, person=b"kv-probe-v1")
    for plane in kv:
        state.update(f"{list(plane.shape)}{plane.dtype}".encode())
        state.update(plane.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _is_equal(one: Kv, other: Kv, tokens: int) -> bool:
    return all(
        torch.equal(mine[:, :tokens].view(torch.uint8), theirs[:, :tokens].view(torch.uint8))
        for mine, theirs in zip(one, other, strict=True)
    )


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run on one thread: on a CPU, the number of threads decides how sums are split, and so their last bits."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
