"""Two comparisons that keep the demo honest.

1. The cold pass is not slow on purpose: its first token against that of plain transformers `generate`. 2. The store is
really used: with a store whose payloads have every number's sign reversed, under matching digests, the
   answers must differ. Otherwise the stored bytes would not matter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from engine_adapter.hf_cache import PrefixCache
from kvstore.block.codec import RawCodec
from kvstore.block.layout import Layout, Part
from kvstore.block.pages import Coder, Digest, Encoded, Pages
from kvstore.config import StoreOptions, TierOptions
from kvstore.demo.passes import TEMPERATURE, PassResult, Progress, draws_of
from kvstore.node import StoreParts, open_embedded
from tiering.tier import FrameSpan

REVERSED_DRAM = "128MiB"
LEAST_COMPARED_TOKENS = 32
MAX_PAIRS = 8
SHORTEST_PAIRED_PROMPT = 2048


@dataclass(frozen=True)
class ColdAgainstGenerate:
    """Time to first token in milliseconds: medians, and the median of the pairs' quotients, cold / generate.

    same_first_token: pairs in which both chose the same token.
    """

    cold_ms: float
    generate_ms: float
    ratio: float
    pairs: int
    same_first_token: int

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class PlainGenerate:
    """Asks plain transformers for the first token of the longer prompts, right beside the cold pass's own request.

    A shared machine drifts, so each pair gives one quotient, and the result is their median. The two alternate in going
    first.
    """

    def __init__(self, model: torch.nn.Module, shortest_prompt: int = SHORTEST_PAIRED_PROMPT) -> None:
        self._model: Any = model
        self._shortest_prompt = shortest_prompt
        self._seen: dict[int, tuple[float, int]] = {}

    def warm_up(self, prompt: list[int]) -> None:
        """Pay for first-time work."""
        self._timed(0, prompt)

    def goes_first(self, number: int) -> bool:
        """Whether plain `generate` goes first for this request."""
        return number % 2 == 1

    def first_token(self, number: int, prompt: list[int]) -> None:
        """Time it, if the prompt is long enough and more pairs are wanted."""
        if len(prompt) >= self._shortest_prompt and len(self._seen) < MAX_PAIRS:
            self._seen[number] = self._timed(number, prompt)

    def against(self, cold: PassResult) -> ColdAgainstGenerate | None:
        """None if no prompt was long enough."""
        if not self._seen:
            return None
        cold_ms = [cold.reports[number].ttft_ms for number in self._seen]
        generate_ms = [milliseconds for milliseconds, _ in self._seen.values()]
        same = [cold.answers[number][0] == token for number, (_, token) in self._seen.items()]
        ratio = median(ours / plain for ours, plain in zip(cold_ms, generate_ms, strict=True))
        return ColdAgainstGenerate(median(cold_ms), median(generate_ms), ratio, len(same), sum(same))

    def _timed(self, number: int, prompt: list[int]) -> tuple[float, int]:
        """Milliseconds and the token, as a user of transformers would ask, with the passes' draws."""
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            start = time.perf_counter()
            with torch.inference_mode():
                output = self._model.generate(
                    tokens, attention_mask=mask, max_new_tokens=1, do_sample=True, temperature=TEMPERATURE, top_k=0
                )
            return 1e3 * (time.perf_counter() - start), int(output[0, -1])


class ReversedCodec(RawCodec):
    """`raw`, with every number's sign reversed before its digest is taken: valid frames of wrong numbers. (Reordered
    bytes would be NaNs here and there.) Queries then attend to the least similar keys."""

    def bind(self, pages: Pages, layout: Layout, part: Part) -> Coder:
        """A coder that reverses what it encodes, and decodes like `raw`."""
        return _ReversedCoder(super().bind(pages, layout, part), len(part.layers), part.group.element_bytes)


class _ReversedCoder:
    def __init__(self, raw: Coder, slices: int, element_bytes: int) -> None:
        self._raw = raw
        self._slices = slices
        self._number = np.dtype(f"<u{element_bytes}")
        self._sign = self._number.type(1 << (8 * element_bytes - 1))
        self.decode = raw.decode

    def encode(self, tokens: Sequence[int], into: Sequence[FrameSpan], digest: Digest) -> Encoded:
        for payload, encoded in zip(into, self._raw.encode(tokens, into, digest), strict=True):
            assert isinstance(encoded, list), "`raw` writes every block"
            step = len(payload.view) // self._slices
            digests = []
            for start in range(0, len(payload.view), step):
                turned = (np.frombuffer(payload.view[start : start + step], self._number) ^ self._sign).tobytes()
                payload.view[start : start + step] = turned
                digests.append(digest(turned))
            yield digests


def changed_by_reversing(
    closed: PrefixCache, prompts: Mapping[int, list[int]], answer_tokens: int, directory: Path, progress: Progress
) -> list[bool]:
    """Whether answers change when their prompts are loaded from a store with reversed payloads.

    closed: of the same model, without a store. prompts: by request number. A short answer may be equal by chance, so at
    least `LEAST_COMPARED_TOKENS` are compared.
    """
    changed: list[bool] = []
    compared_tokens = max(answer_tokens, LEAST_COMPARED_TOKENS)
    options, parts = StoreOptions(TierOptions(REVERSED_DRAM)), StoreParts(lambda _: ReversedCodec())
    with open_embedded(str(directory), options, parts) as store:
        cache = PrefixCache(closed.model, store, codec="raw")
        for number, prompt in prompts.items():
            progress("answering from reversed blocks", len(changed), len(prompts))
            right = closed.generate(prompt, max_new_tokens=compared_tokens, sampling=draws_of(number))
            cache.generate(prompt, max_new_tokens=1)
            wrong = cache.generate(prompt, max_new_tokens=compared_tokens, sampling=draws_of(number))
            assert wrong.report.account.hit_tokens, "the reversed blocks were not even read"
            changed.append(wrong.token_ids != right.token_ids)
    progress("answering from reversed blocks", len(prompts), len(prompts))
    return changed
