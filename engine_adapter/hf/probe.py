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

from engine_adapter.hf.kinds import CacheKinds, Path, values
from engine_adapter.hf.layers import ModelCall
from engine_adapter.hf.model import refusal
from kvstore.block.errors import BadInput
from kvstore.client.edge import contained

CHUNK = 8
PROBE_TOKENS = 2 * CHUNK
ALIKE = CHUNK // 2
"""In the trial, this many leading tokens of a chunk stay the same, and those behind them change."""

MOST_OF_A_CUT = 0.3
"""Of what is computed in one piece, how much a cut may change. Where a state is not continued, it is all of it."""

Kv = dict[Path, torch.Tensor]
"""What a cache holds: K and V of each layer, [1, kv_heads, tokens, head_dim], and states."""


class Probe:
    """Runs one model over a prompt whose tokens are spread over the vocabulary."""

    def __init__(self, call: ModelCall, model: Any) -> None:
        self._call = call
        self._name = str(model.config.model_type)
        self._device: torch.device = next(model.parameters()).device
        config = model.config.get_text_config()
        types = getattr(config, "layer_types", None) or ()
        self._chunked = [number for number, kind in enumerate(types) if kind == "chunked_attention"]
        vocabulary = int(config.vocab_size)
        step = max(1, vocabulary // PROBE_TOKENS)
        # Spread over the whole vocabulary; adding 3 makes the stride odd where the step is even.
        self._tokens = [(number * step + 3 * number) % vocabulary for number in range(PROBE_TOKENS)]
        self._others = [(token + vocabulary // 2 + 1) % vocabulary for token in self._tokens]

    def digest(self) -> str:
        """Digest of the bits of K and V in every layer. Raises `BadInput` where the model cannot be run."""
        return _digest(self._kv(self._tokens)[0])

    def trial(self) -> tuple[CacheKinds, str | None]:
        """What its caches hold, and the digest, after checking that a token's KV does not depend on tokens behind it,
        nor on where a prompt is cut.

        No digest for a model that computes the same KV but not the same bits twice. Raises `BadInput`, with one line.
        """
        first, cache, before = self._kv(self._tokens)
        try:
            kinds = CacheKinds(before, cache, self._chunked)
        except BadInput as error:
            raise refusal(self._name, f"{error}; call model.generate") from error
        digest: str | None = _digest(first)
        later = "the KV of a token depends on the tokens behind it"
        second = self._kv(self._tokens[: CHUNK + ALIKE] + self._others[CHUNK + ALIKE :])[0]
        if not _is_equal(first, second, kinds, CHUNK + ALIKE):
            again = self._kv(self._tokens)[0]
            if not _is_equal(first, again, kinds, PROBE_TOKENS):
                digest, twice = None, "it does not compute the same KV twice (dropout, noise, a hook)"
                self._check(first, again, kinds, PROBE_TOKENS, twice)
            self._check(first, second, kinds, CHUNK + ALIKE, later)
        self._check(first, self._kv(self._tokens[:ALIKE] + self._others[ALIKE:CHUNK])[0], kinds, ALIKE, later)
        for mine, theirs in _leading(first, self._kv(self._tokens, PROBE_TOKENS)[0], kinds, PROBE_TOKENS):
            # Other shapes round otherwise, and a token on the edge between two experts may go to the other one.
            if (mine.float() - theirs.float()).norm() > MOST_OF_A_CUT * mine.float().norm():
                raise refusal(self._name, "it computes something else where a prompt is cut; call model.generate")
        return kinds, digest

    def _kv(self, tokens: Sequence[int], chunk: int = CHUNK) -> tuple[Kv, Any, dict[Path, Any]]:
        """What a cache holds behind the tokens, that cache, and what it held behind the first chunk."""
        before: dict[Path, Any] = {}
        with contained(self._refuse), _one_thread(self._device):
            cache, token_ids = self._call.new_cache(), torch.tensor([tokens], device=self._device)
            positions = self._call.positions(token_ids, torch.ones_like(token_ids))
            for begin in range(0, len(tokens), chunk):
                before = before or dict(values(cache)) if begin else before
                self._call(token_ids[:, begin : begin + chunk], cache, begin, positions)
        held = {path: one for path, one in values(cache).items() if isinstance(one, torch.Tensor) and one.ndim}
        return {path: one.clone() for path, one in held.items()}, cache, before

    def _refuse(self, error: Exception) -> None:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise refusal(self._name, f"a trial run failed: {said}; call model.generate") from error

    def _check(self, one: Kv, other: Kv, kinds: CacheKinds, tokens: int, reason: str) -> None:
        for mine, theirs in _leading(one, other, kinds, tokens):
            # Only rounding may differ: where a chunk is split among experts, shapes depend on all of its tokens.
            tolerance = min(1e-2, sqrt(torch.finfo(mine.dtype).eps))
            mine, theirs = mine.float(), theirs.float()
            if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * float(mine.abs().max())):
                raise refusal(self._name, f"{reason}; call model.generate")


def _digest(kv: Kv) -> str:
    state = blake2b(digest_size=16, person=b"kv-probe-v1")
    for plane in kv.values():
        state.update(f"{list(plane.shape)}{plane.dtype}".encode())
        state.update(plane.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _leading(one: Kv, other: Kv, kinds: CacheKinds, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what both hold of the first so many tokens; states only where that is all."""
    grown = [path for path in one if path not in kinds.states and path not in kinds.positions]
    states = [path for path in kinds.states if tokens == PROBE_TOKENS]
    pairs = [(one[path][..., :tokens, :], other[path][..., :tokens, :]) for path in grown]
    return [*pairs, *((one[path], other[path]) for path in states)]


def _is_equal(one: Kv, other: Kv, kinds: CacheKinds, tokens: int) -> bool:
    return all(
        torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        for mine, theirs in _leading(one, other, kinds, tokens)
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
