"""A trace's requests scaled to an engine: arrivals, length ratios and shared prefixes are kept; tokens are made up.

Each block of the trace becomes `block_tokens` random tokens drawn from its number, so prompts share exactly the
prefixes that they shared when recorded. Another salt gives the same workload with other tokens: no prefix in common.
Neither a trace nor this workload has natural text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvstore.block.errors import BadInput
from kvstore.insight.trace import Trace

FIRST_TOKEN = 5
"""Lower ids have special meanings in tokenizers."""
UNKNOWN_OUTPUT = 16
"""Tokens of an answer whose length the recording does not have."""
MOST_TOKENS = 1 << 20
"""Of one prompt, scaled."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """at: seconds since the first. chain: its blocks' numbers; the last block has `tail` tokens, the others all.
    output: tokens of the answer."""

    at: float
    chain: tuple[int, ...]
    tail: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What of a trace is sent. seconds, requests: limits, from its beginning. speed: factor of arrivals. scale: tokens
    per token of the trace, None for the largest, up to 1, by which the longest request fits. vocabulary: tokens are
    drawn below it."""

    seconds: float = 60.0
    requests: int = 1000
    speed: float = 1.0
    scale: float | None = None
    vocabulary: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """block_tokens: of a trace's block, scaled. vocabulary: tokens are drawn below it. scale: tokens per token of the
    trace."""

    name: str
    requests: tuple[TrafficRequest, ...]
    block_tokens: int
    scale: float
    vocabulary: int
    seed: int

    @staticmethod
    def of(trace: Trace, load: Load, longest: int) -> Workload:
        """longest: the engine's limit for a prompt and its answer, in tokens. Raises `BadInput`."""
        outputs = np.where(trace.output_tokens > 0, trace.output_tokens, UNKNOWN_OUTPUT)
        scale = load.scale
        if scale is None:
            scale = min(1.0, longest / int((trace.input_tokens + outputs).max()))
        block_tokens = int(trace.block_tokens * scale)
        if block_tokens < 1:
            raise BadInput(
                f"{trace.name}: blocks of {trace.block_tokens} tokens are less than one at a scale of {scale:.2g}; "
                "give a larger --scale, or an engine that takes longer prompts"
            )
        found: list[TrafficRequest] = []
        first = int(trace.timestamps_ms[0])
        for (start, stop), stamp, tokens, output in zip(
            pairwise(trace.starts.tolist()),
            trace.timestamps_ms.tolist(),
            trace.input_tokens.tolist(),
            outputs.tolist(),
            strict=True,
        ):
            at = (stamp - first) / 1000 / load.speed
            if at >= load.seconds or len(found) == load.requests:
                break
            if stop == start:
                continue
            answer = min(max(1, round(output * scale)), longest - 1)
            last = tokens - (stop - start - 1) * trace.block_tokens
            tail = min(block_tokens, max(1, round(last * block_tokens / trace.block_tokens)))
            found.append(_cut(trace.blocks[start:stop].tolist(), tail, block_tokens, longest - answer, at, answer))
        if not found:
            covered = load.seconds * load.speed
            raise BadInput(f"{trace.name} has no request in its first {covered:g} s; give more --seconds")
        scale = block_tokens / trace.block_tokens
        return Workload(trace.name, tuple(found), block_tokens, scale, load.vocabulary, load.seed)

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max(self.tokens_of(one) + one.output for one in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(map(self.tokens_of, self.requests))

    @property
    def working_set_tokens(self) -> int:
        """Of distinct blocks."""
        return self.block_tokens * len({block for one in self.requests for block in one.chain})

    @property
    def shared_tokens(self) -> int:
        """In whole blocks that an unlimited cache finds."""
        seen: set[int] = set()
        found = 0
        for one in self.requests:
            whole = one.chain if one.tail == self.block_tokens else one.chain[:-1]
            found += self.block_tokens * sum(block in seen for block in whole)
            seen.update(whole)
        return found

    def tokens_of(self, request: TrafficRequest) -> int:
        """Of its prompt."""
        return (len(request.chain) - 1) * self.block_tokens + request.tail

    def prompt(self, request: TrafficRequest, salt: int) -> list[int]:
        found: list[int] = []
        for block in request.chain:
            found += self._block(block, salt)
        return found[: self.tokens_of(request)]

    def _block(self, block: int, salt: int) -> Sequence[int]:
        drawn = np.random.default_rng([self.seed, salt, block])
        numbers: list[int] = drawn.integers(FIRST_TOKEN, self.vocabulary, self.block_tokens).tolist()
        return numbers


def _cut(chain: list[int], tail: int, block_tokens: int, longest: int, at: float, output: int) -> TrafficRequest:
    whole, rest = divmod(min(longest, MOST_TOKENS), block_tokens)
    if (len(chain) - 1) * block_tokens + tail > longest:
        chain, tail = (chain[: whole + 1], rest) if rest else (chain[:whole], block_tokens)
    return TrafficRequest(at, tuple(chain), tail, output)
