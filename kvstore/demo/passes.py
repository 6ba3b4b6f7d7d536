"""One pass over the demo's requests, and its result.

A pass is the same requests in the same order on one `PrefixCache`. Tokens are drawn by their probabilities with each
request's own random numbers, equal in every pass: the likeliest tokens would hardly depend on the prompt, as a small
model repeats what is likely anywhere. Each request's account is checked: hits by tier and misses by reason must add up
to its prompt's tokens, or the demo stops.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any, TypeVar

import torch

from engine_adapter.adapter import Report
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.account import HitTier, MissReason
from kvstore.demo.questions import DemoRequest

DRAWS: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
MAX_PAIRS = 8
SHORTEST_PAIRED_PROMPT = 2048

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and steps done of how many."""

Origin = TypeVar("Origin", HitTier, MissReason)


@dataclass(frozen=True)
class PassResult:
    """Prompts, answers and reports of a pass, by request number."""

    name: str
    prompts: list[list[int]]
    answers: list[list[int]]
    reports: list[Report]

    def to_dict(self) -> dict[str, object]:
        """Sums in tokens, times in milliseconds."""
        gaps = self._gaps()
        return {
            "prompt_tokens": sum(len(prompt) for prompt in self.prompts),
            "hits": self.hits(),
            "misses": self.misses(),
            "ttft_ms": self.ttft_ms(),
            "itl_ms": self.itl_ms(),
            "tokens_per_second": 1e3 * len(gaps) / sum(gaps) if gaps else 0.0,
            "saved_blocks": self.saved_blocks,
            "faults": sum(report.faults for report in self.reports),
        }

    def ttft_ms(self) -> dict[str, float]:
        times = [report.ttft_ms for report in self.reports]
        return {"p50": percentile(times, 50), "p99": percentile(times, 99)}

    def itl_ms(self) -> dict[str, float]:
        gaps = self._gaps()
        return {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99)}

    @property
    def saved_blocks(self) -> int:
        return sum(report.saved_blocks for report in self.reports)

    def hits(self) -> dict[str, int]:
        return _sums(report.account.hits for report in self.reports)

    def misses(self) -> dict[str, int]:
        return _sums(report.account.misses for report in self.reports)

    def _gaps(self) -> list[float]:
        return [gap for report in self.reports for gap in report.itl_ms]


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
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            start = time.perf_counter()
            with torch.inference_mode():
                output = self._model.generate(tokens, attention_mask=mask, max_new_tokens=1, **DRAWS)
            return 1e3 * (time.perf_counter() - start), int(output[0, -1])


def run_pass(
    name: str,
    cache: PrefixCache,
    next_prompt: Callable[[PassResult], list[int]],
    count: int,
    answer_tokens: int,
    progress: Progress,
    beside: PlainGenerate | None = None,
) -> PassResult:
    """Answer so many requests. next_prompt: the next one's, given the pass so far."""
    done = PassResult(name, [], [], [])
    for number in range(count):
        progress(name, number, count)
        prompt = next_prompt(done)
        if beside is not None and beside.goes_first(number):
            beside.first_token(number, prompt)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            output = cache.generate(prompt, max_new_tokens=answer_tokens, **DRAWS)
        account = cache.report.account
        assert account.hit_tokens + sum(account.misses.values()) == account.asked == len(prompt), "unexplained tokens"
        done.prompts.append(prompt)
        done.answers.append(output[0, len(prompt) :].tolist())
        done.reports.append(cache.report)
        if beside is not None and not beside.goes_first(number):
            beside.first_token(number, prompt)
    progress(name, count, count)
    return done


def restored_answer_tokens(requests: Sequence[DemoRequest], result: PassResult, block_tokens: int) -> int:
    """Tokens of earlier answers in a chat's prompts that came from the store, although decoding had made them.

    Decoding fills blocks one token at a time. The KV of an answer's last token is not computed, so the blocks that
    decoding completed end before it.
    """
    restored = 0
    for number, report in enumerate(result.reports):
        earlier = requests[number].follows
        while earlier is not None:
            start = len(result.prompts[earlier])
            decoded = start + len(result.answers[earlier]) - 1
            whole = decoded - decoded % block_tokens
            restored += max(0, min(whole, report.account.hit_tokens) - start)
            earlier = requests[earlier].follows
    return restored


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: of twenty values the 99th percentile is the largest. 0 without values."""
    ranked = sorted(values)
    return ranked[max(0, ceil(len(ranked) * percent / 100) - 1)] if ranked else 0.0


def _sums(counts: Iterable[Mapping[Origin, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for count in counts:
        for origin, tokens in count.items():
            sums[str(origin)] += tokens
    return dict(sums)
