"""A vLLM in its own process, driven line by line and step by step.

vLLM must be imported before anything that loads llvmlite, and logs to standard output from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from kv_bench.process import Parent

SETTLED_SECONDS, SETTLED_SHARE = 0.2, 0.05
"""An engine that takes less of a CPU for this long has finished saving."""
LONGEST_SECONDS = 300.0
"""Timeout of everything: a shared machine may be ten times as slow."""
WAITING_SECONDS = 0.001
"""Pause between two steps that compute nothing, as in vLLM's own loop, so that another engine can compute."""
FIRST_STEPS = 10
"""Steps of streams that are not counted."""


@dataclass
class Answer:
    """One request. began: seconds on the host-wide clock; times in milliseconds; and where its prompt came from.
    kvstore: the connector's account. The last four are of our connector only; load_ms: of loads that their step waited
    for; saved_ms: time saved against computing, by the connector's estimate, negative if slower."""

    began: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    kvstore: dict[str, Any] | None = None
    lookup_ms: float = 0.0
    lease_ms: float = 0.0
    load_ms: float = 0.0
    saved_ms: float = 0.0

    def note(self, output: Any, ms: float) -> None:
        tokens = output.outputs[0].token_ids
        if tokens and not self.generated:
            self.ttft_ms = ms
        self.generated += len(tokens)
        if output.finished:
            self.total_ms, self.prompt_tokens = ms, len(output.prompt_token_ids)
            self.cached_tokens = output.num_cached_tokens or 0
            self.kvstore = (output.kv_transfer_params or {}).get("kvstore")


class Driver:
    """An engine, its requests, and the clock."""

    def __init__(self, plan: dict[str, Any]) -> None:
        own = "cuda" if torch.cuda.is_available() else "cpu"
        if own != plan["device"]:
            raise ValueError(f"this vLLM would run on {own}; give --device {own}")
        transfer = plan["transfer"]
        given = {"kv_transfer_config": None if transfer is None else KVTransferConfig(**transfer), **plan["options"]}
        arguments = EngineArgs(model=plan["model"], dtype="bfloat16", seed=0, skip_tokenizer_init=True, **given)
        self._engine = LLMEngine.from_engine_args(arguments)
        # As in an engine that has run for a while: all of its pages have been written to, so the kernel has them in
        # memory.
        for layer in self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches:
            layer.zero_()
        self._longest = int(plan["options"]["max_model_len"])
        self._requests = 0
        self._streams: dict[str, float] = {}
        # Both halves of a timed connector are in this process: the scheduler's and the worker's.
        self._halves: list[Any] = []
        if has_kv_transfer_group():
            halves = [self._engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]
            self._halves = [half for half in halves if hasattr(half, "times")]

    # Verbs -----------------------------------------------------------------------------------------------------------

    def ask(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        parameters = _parameters(step["max_tokens"], step.get("hints"))
        return [asdict(self._answer(prompt, parameters)) for prompt in step["prompts"]]

    def forget(self, step: dict[str, Any]) -> bool:
        """Drop the engine's own cache; stored blocks stay."""
        return bool(self._engine.reset_prefix_cache())

    def settle(self, step: dict[str, Any]) -> bool:
        """Wait until no save is in progress; False on timeout."""
        give_up_at = perf_counter() + LONGEST_SECONDS
        while perf_counter() < give_up_at:
            before = process_time()
            sleep(SETTLED_SECONDS)
            if process_time() - before < SETTLED_SHARE * SETTLED_SECONDS:
                return True
        return False

    def among_streams(self, step: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds between tokens of all streams: with no arrival, and from each arrival to its first token."""
        self._begin_streams(step["streams"])
        alone, arrivals = list[float](), []
        for prompt in step["arrivals"]:
            for _ in range(step["steps_between"]):
                self._outputs(alone)
            gaps = list[float]()
            answer = self._answer(prompt, _parameters(1), gaps)
            arrivals.append({"gaps_ms": gaps, "answer": asdict(answer)})
        return {"alone_ms": alone, "arrivals": arrivals, "streams": self._end_streams()}

    def under_load(self, step: dict[str, Any]) -> dict[str, Any]:
        """Streams decode and new prompts arrive every so many steps: time of all steps, and of our hooks in them."""
        self._begin_streams(step["streams"])
        before, every, fresh = self._hook_times(), step["steps_between"], step["arrivals"]
        steps, seconds = every * len(fresh), 0.0
        for number in range(steps):
            if number % every == 0:
                self._add(fresh[number // every], _parameters(1))
            start = perf_counter()
            self._outputs()
            seconds += perf_counter() - start
        after = {name: np.subtract(one, before.get(name, (0.0, 0))) for name, one in self._hook_times().items()}
        hooks = {name: (float(spent), int(calls)) for name, (spent, calls) in after.items()}
        return {"steps": steps, "seconds": seconds, "hooks": hooks, "streams": self._end_streams()}

    # Inside ----------------------------------------------------------------------------------------------------------

    def _add(self, prompt: Sequence[int], parameters: SamplingParams) -> str:
        self._requests += 1
        name = f"request-{self._requests}"
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        return name

    def _answer(self, prompt: Sequence[int], parameters: SamplingParams, gaps: list[float] | None = None) -> Answer:
        is_handed_over = parameters.extra_args is not None
        loading_before, saved_before = self._loading_seconds(), self._saved_ms()
        start = perf_counter()
        answer, name = Answer(start), self._add(prompt, parameters)
        while not answer.total_ms:
            outputs = self._outputs(gaps)
            for output in outputs:
                if output.request_id == name:
                    answer.note(output, 1e3 * (perf_counter() - start))
            if is_handed_over and not outputs:
                sleep(WAITING_SECONDS)
            if perf_counter() - start > LONGEST_SECONDS:
                raise TimeoutError(f"a request was not answered in {LONGEST_SECONDS:.0f} s")
        for half in self._halves[:1]:
            answer.lookup_ms, answer.lease_ms = half.lookup_ms()
        answer.load_ms = 1e3 * (self._loading_seconds() - loading_before)
        answer.saved_ms = self._saved_ms() - saved_before
        return answer

    def _outputs(self, gaps: list[float] | None = None) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        now = perf_counter()
        for output in outputs:
            last = self._streams.get(output.request_id)
            if last is None or not output.outputs[0].token_ids:
                continue
            self._streams[output.request_id] = now
            if output.finished:
                del self._streams[output.request_id]
            if gaps is not None:
                gaps.append(1e3 * (now - last))
        return outputs

    def _begin_streams(self, prompts: Sequence[Sequence[int]]) -> None:
        parameters = _parameters(self._longest - max(len(prompt) for prompt in prompts) - 1)
        self._streams = {self._add(prompt, parameters): 0.0 for prompt in prompts}
        give_up_at = perf_counter() + LONGEST_SECONDS
        while not all(self._streams.values()) and perf_counter() < give_up_at:
            self._outputs()
        for _ in range(FIRST_STEPS):
            self._outputs()

    def _end_streams(self) -> int:
        """Abort all streams and finish other requests; returns how many streams still ran."""
        running = len(self._streams)
        self._engine.abort_request(list(self._streams))
        self._streams = {}
        while self._engine.has_unfinished_requests():
            self._outputs()
        return running

    def _hook_times(self) -> dict[str, tuple[float, int]]:
        return {name: one for half in self._halves for name, one in half.times.items()}

    def _loading_seconds(self) -> float:
        return float(sum(half.times.get("start_load_kv", (0.0, 0))[0] for half in self._halves))

    def _saved_ms(self) -> float:
        for half in self._halves[:1]:
            counts = half.half.choice.costs.counts
            return float(counts["saved_ms"] - counts["regret_ms"])
        return 0.0


def _parameters(max_tokens: int, hints: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if hints is None else {"kv_transfer_params": hints},
    )


def main() -> None:
    parent = Parent()
    driver = Driver(parent.job)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    parent.answer({"vllm": vllm.__version__, "threads": torch.get_num_threads(), "device": device})
    for step in parent:
        parent.answer(getattr(driver, step["do"])(step))


if __name__ == "__main__":
    main()
