"""Two comparisons that keep the demo honest (floor 4).

1. Cold is not made slow on purpose: the first token without a store, against plain transformers `generate`.
2. The store is really used: from a store whose payloads are reversed byte for byte, with digests that fit the reversed
   bytes, the answers must come out different. If they did not, the stored bytes would not matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine_adapter.hf_cache import PrefixCache
from kvstore.codec import RawCodec
from kvstore.demo.passes import Progress
from kvstore.layout import Layout, Part
from kvstore.node import open_embedded
from kvstore.pages import Coder, Digest, Pages
from tiering.tier import FrameSpan

REVERSED_DRAM = "128MiB"


@dataclass(frozen=True)
class ColdAgainstGenerate:
    """Time to the first token, in milliseconds: medians, and the median of the pairs' quotients, cold / generate.

    same_first_token: pairs in which both chose the same token.
    """

    cold_ms: float
    generate_ms: float
    ratio: float
    pairs: int
    same_first_token: int

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


class ReversedCodec(RawCodec):
    """`raw`, but every layer slice is reversed before its digest is taken: valid frames of wrong numbers."""

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """A coder that reverses what it encodes, and decodes like `raw`."""
        return _ReversedCoder(super().bind(pages, layout, part), len(part.layers))


class _ReversedCoder:
    def __init__(self, raw: Coder, slices: int) -> None:
        self._raw = raw
        self._slices = slices
        self.decode = raw.decode

    def encode(self, token: int, into: FrameSpan, digest: Digest) -> list[bytes]:
        self._raw.encode(token, into, digest)
        step = len(into.view) // self._slices
        digests = []
        for start in range(0, len(into.view), step):
            turned = bytes(into.view[start : start + step])[::-1]
            into.view[start : start + step] = turned
            digests.append(digest(turned))
        return digests


def cold_against_generate(
    model: torch.nn.Module, cold: PrefixCache, prompts: Sequence[list[int]], progress: Progress
) -> ColdAgainstGenerate:
    """Both ways to the first token of each prompt, in pairs; which of the two begins alternates.

    A shared machine drifts, so each pair gives one quotient and the median of those is the result.
    """
    cold_ms, generate_ms, same = [], [], 0
    for number, prompt in enumerate(prompts):
        progress("comparing with plain generate", number, len(prompts))
        if number % 2:
            plain, plain_token = _plain_first_token(model, prompt)
            ours, our_token = _cold_first_token(cold, prompt)
        else:
            ours, our_token = _cold_first_token(cold, prompt)
            plain, plain_token = _plain_first_token(model, prompt)
        cold_ms.append(ours)
        generate_ms.append(plain)
        same += our_token == plain_token
    progress("comparing with plain generate", len(prompts), len(prompts))
    ratio = median(ours / plain for ours, plain in zip(cold_ms, generate_ms, strict=True))
    return ColdAgainstGenerate(median(cold_ms), median(generate_ms), ratio, len(prompts), same)


def answers_from_reversed(
    model: torch.nn.Module, prompts: Sequence[list[int]], answer_tokens: int, directory: Path, progress: Progress
) -> list[list[int]]:
    """Answers whose prompts are restored from a store that holds reversed payloads."""
    answers = []
    with open_embedded(str(directory), codecs=lambda name: ReversedCodec(), dram=REVERSED_DRAM) as store:
        cache = PrefixCache(model, store)
        for number, prompt in enumerate(prompts):
            progress("answering from reversed blocks", number, len(prompts))
            cache.generate(prompt, max_new_tokens=1)
            generation = cache.generate(prompt, max_new_tokens=answer_tokens)
            assert generation.report.account.hit_tokens, "the reversed blocks were not even read"
            answers.append(generation.token_ids)
    progress("answering from reversed blocks", len(prompts), len(prompts))
    return answers


def _cold_first_token(cold: PrefixCache, prompt: list[int]) -> tuple[float, int]:
    generation = cold.generate(prompt, max_new_tokens=1)
    return generation.report.ttft_ms, generation.token_ids[0]


def _plain_first_token(model: torch.nn.Module, prompt: list[int]) -> tuple[float, int]:
    """As a user of transformers would ask for it."""
    plain: Any = model
    tokens = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        output = plain.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, do_sample=False)
    return 1e3 * (time.perf_counter() - start), int(output[0, -1])
