"""What `kvstore bench lookup` asks for, and the limit: the chain of hashes by itself (floor 4)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from kvstore.bench.measure import Cost
from kvstore.errors import BadInput
from kvstore.identity import token_bytes


@dataclass(frozen=True, slots=True)
class Options:
    """prompt_tokens, block_tokens: of every prompt. small_blocks, large_blocks: in the two indexes, whole prompts; a
    sidecar holds as many as the small one. laps, door_laps: how often a match is measured, embedded and through the
    door. clients: processes that match together, client_laps times for client_seconds.
    """

    prompt_tokens: int = 32768
    block_tokens: int = 64
    small_blocks: int = 10_000
    large_blocks: int = 2_000_000
    laps: int = 200
    door_laps: int = 2000
    clients: int = 8
    client_laps: int = 5
    client_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens // self.block_tokens <= self.small_blocks <= self.large_blocks:
            raise BadInput(
                f"prompts of {self.prompt_tokens} tokens in indexes of {self.small_blocks} and {self.large_blocks} "
                "blocks: give prompts of at least one block, indexes of at least one prompt, the larger one last"
            )

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt."""
        return self.prompt_tokens // self.block_tokens


class Prompts:
    """Prompt number n: 0, 1, 2, ... but for the first token, which is n and so in every key of its chain."""

    def __init__(self, options: Options) -> None:
        self._tokens = np.arange(options.prompt_tokens, dtype=np.uint32)

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        tokens = self._tokens.copy()
        tokens[0] = number
        return tokens


class Chain:
    """The limit: one keyed BLAKE2b-256 per block over the one before and the block's tokens, and nothing else."""

    def __init__(self, options: Options) -> None:
        self._raw = token_bytes(Prompts(options)[0])
        self._step = options.block_tokens * 4
        self._base = blake2b(digest_size=32, key=bytes(32), person=b"kv-bench")

    def turn(self) -> Cost:
        """The keys of one prompt."""
        raw, step, base = self._raw, self._step, self._base
        cpu, start = thread_time(), perf_counter()
        parent = bytes(32)
        for at in range(0, len(raw) - step + 1, step):
            state = base.copy()
            state.update(parent + raw[at : at + step])
            parent = state.digest()
        return Cost(perf_counter() - start, thread_time() - cpu)
