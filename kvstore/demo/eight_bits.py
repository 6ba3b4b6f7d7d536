"""The same requests from blocks in 8 bits, beside those stored bit for bit.

The draws are those of every other pass, so an answer differs from the cold one where the chosen token depends on a
difference that rounding made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import kvstore
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.codec import codec_named, default_codec
from kvstore.demo.passes import PassResult, Progress, run_pass


@dataclass(frozen=True)
class EightBits:
    """codec: the adapters' default. blocks, stored_bytes: payload in the store; raw_bytes: the same blocks bit for bit.
    ttft_ms_p50: of answers from these blocks. answers, same_answers: asked, and equal to the cold ones. tokens,
    same_tokens: of all answers, and before each answer's first difference."""

    codec: str
    blocks: int
    stored_bytes: int
    raw_bytes: int
    ttft_ms_p50: float
    answers: int
    same_answers: int
    tokens: int
    same_tokens: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def answer_from_8_bits(
    model: torch.nn.Module, cold: PassResult, answer_tokens: int, dram: str | int, directory: Path, progress: Progress
) -> EightBits:
    """Fill a separate store, and answer from it."""
    with kvstore.embedded(str(directory), dram=dram) as store:
        cache = PrefixCache(model, store)
        run_pass("fill in 8 bits", cache, cold.prompts, 1, progress)
        warm = run_pass("warm in 8 bits", cache, cold.prompts, answer_tokens, progress)
        blocks = store.usage().blocks
    layout = cache.layout
    codec = default_codec(layout)
    pairs = list(zip(cold.answers, warm.answers, strict=True))
    return EightBits(
        codec=codec,
        blocks=blocks,
        stored_bytes=blocks * sum(codec_named(codec).payload_bytes(part) for part in layout.parts),
        raw_bytes=blocks * layout.raw_bytes,
        ttft_ms_p50=warm.ttft_ms()["p50"],
        answers=len(pairs),
        same_answers=sum(mine == theirs for mine, theirs in pairs),
        tokens=sum(len(mine) for mine, _ in pairs),
        same_tokens=sum(_leading_alike(mine, theirs) for mine, theirs in pairs),
    )


def _leading_alike(mine: list[int], theirs: list[int]) -> int:
    for count, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return count
    return min(len(mine), len(theirs))
