"""What a trace asks, scaled to an engine: arrivals, lengths and shared prefixes stay as they were; tokens are made up.

Each block of the trace becomes a run of `block_tokens` random tokens that is drawn from its number, so that prompts
share exactly the prefixes that they shared when they were recorded. A salt makes the same workload anew: nothing of one
is a prefix of anything in another. A trace says nothing of words, and neither does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvstore.block.errors import BadInput
from kvstore.insight.trace import Trace

FIRST_TOKEN = 5
"""Below it tokenizers keep tokens that have a meaning."""
UNKNOWN_OUTPUT = 16
"""Tokens of an answer, in place of a length that a recording does not know."""
MOST_TOKENS = 1 << 20
"""Of one prompt, scaled."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """at: seconds from the first one on. chain: its blocks' numbers; tokens of the last one are tail, of the others
    all. output: tokens of its answer."""

    at: float
    chain: tuple[int, ...]
    tail: int
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """block_tokens: of a block of the trace, scaled. vocabulary: tokens are drawn below it. scale: tokens here for one
    of the trace."""

    name: str
    requests: tuple[TrafficRequest, ...]
    block_tokens: int
    scale: float
    vocabulary: int
    seed: int

    @staticmethod
    def of(
        trace: Trace,
        *,
        longest: int,
        seconds: float,
        requests: int,
        speed: float = 1.0,
        scale: float | None = None,
        vocabulary: int = 1000,
        seed: int = 0,
    ) -> Workload:
        """longest: tokens of a prompt and its answer that the engine takes. seconds, requests: at most, from the
        trace's beginning. speed: arrivals come so many times as fast. scale: None for the one by which the longest
        request fits, and 1 at most. Raises `BadInput`."""
        outputs = np.where(trace.output_tokens > 0, trace.output_tokens, UNKNOWN_OUTPUT)
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
            at = (stamp - first) / 1000 / speed
            if at >= seconds or len(found) == requests:
                break
            if stop == start:
                continue
            answer = min(max(1, round(output * scale)), longest - 1)
            last = tokens - (stop - start - 1) * trace.block_tokens
            tail = min(block_tokens, max(1, round(last * block_tokens / trace.block_tokens)))
            found.append(_cut(trace.blocks[start:stop].tolist(), tail, block_tokens, longest - answer, at, answer))
        if not found:
            raise BadInput(f"{trace.name} has no request in its first {seconds * speed:g} s; give more --seconds")
        return Workload(trace.name, tuple(found), block_tokens, block_tokens / trace.block_tokens, vocabulary, seed)

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
        """Of blocks that are different from each other."""
        return self.block_tokens * len({block for one in self.requests for block in one.chain})

    @property
    def shared_tokens(self) -> int:
        """What a cache that forgets nothing finds of whole blocks."""
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
        """Token ids."""
        found: list[int] = []
        for block in request.chain:
            found += self._block(block, salt)
        return found[: self.tokens_of(request)]

    def _block(self, block: int, salt: int) -> Sequence[int]:
        drawn = np.random.default_rng([self.seed, salt, block])
        numbers: list[int] = drawn.integers(FIRST_TOKEN, self.vocabulary, self.block_tokens).tolist()
        return numbers


def _cut(chain: list[int], tail: int, block_tokens: int, longest: int, at: float, output: int) -> TrafficRequest:
    """Where it is too long, its beginning."""
    whole, rest = divmod(min(longest, MOST_TOKENS), block_tokens)
    if (len(chain) - 1) * block_tokens + tail > longest:
        chain, tail = (chain[: whole + 1], rest) if rest else (chain[:whole], block_tokens)
    return TrafficRequest(at, tuple(chain), tail, output)
