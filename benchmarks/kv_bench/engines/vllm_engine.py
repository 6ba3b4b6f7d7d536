"""A vLLM in its own process, driven line by line: `bench ttft --engine vllm` measures with it.

    python -m kv_bench.engines.vllm_engine DESCRIPTOR

The first line of JSON configures the engine; each further line is a verb with its arguments, answered by one line on
the open file descriptor of that number. Steps are driven here, so that each is timed. vLLM must be imported before
anything that loads llvmlite, and logs to standard output from then on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time, sleep
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

SETTLED_SECONDS = 0.2
"""An engine idle for this long has finished saving."""
SETTLED_SHARE = 0.05
"""CPU share below which it counts as idle."""
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


@dataclass
class ArrivalWindow:
    """From an arrival among streams to its first token. gaps_ms: between tokens of a stream, over all streams."""

    kind: str
    gaps_ms: list[float] = field(default_factory=list)
    steps: int = 0
    answer: Answer = field(default_factory=Answer)


class Driver:
    """An engine, its requests, and the clock."""

    def __init__(self, plan: dict[str, Any]) -> None:
        own = "cuda" if torch.cuda.is_available() else "cpu"
        if own != plan["device"]:
            raise ValueError(f"this vLLM would run on {own}; give --device {own}")
        transfer = plan.get("transfer")
        arguments = EngineArgs(
            model=plan["model"],
            dtype="bfloat16",
            seed=0,
            skip_tokenizer_init=True,
            kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
            **plan["options"],
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        # As in an engine that has run for a while: all of its pages have been written to, so the kernel has them in
        # memory.
        for layer in self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches:
            layer.zero_()
        self._longest = int(plan["options"]["max_model_len"])
        self._requests = 0
        self._streams: dict[str, float] = {}

    # Verbs -----------------------------------------------------------------------------------------------------------

    def ask(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """One prompt after another, alone in the engine. hints: the requests' `kv_transfer_params`."""
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
        """Streams decode; arrivals come one after another, with so many steps before each."""
        self._begin_streams(step["streams"])
        alone = ArrivalWindow("none")
        windows = []
        for arrival in step["arrivals"]:
            for _ in range(step["steps_between"]):
                self._step(alone)
            window = ArrivalWindow(arrival["kind"])
            self._answer(arrival["prompt"], _parameters(1), window)
            windows.append(asdict(window))
        return {"alone": asdict(alone), "arrivals": windows, "streams": self._end_streams()}

    def under_load(self, step: dict[str, Any]) -> dict[str, Any]:
        """Streams decode and new prompts arrive every so many steps: time of all steps, and of our hooks in them."""
        self._begin_streams(step["streams"])
        connectors = self._connectors()
        before = _hook_times(connectors)
        every, fresh = step["steps_between"], step["fresh"]
        parameters = _parameters(1)
        steps, seconds = every * len(fresh), 0.0
        for number in range(steps):
            if number % every == 0:
                self._add(fresh[number // every], parameters)
            seconds += self._step()
        hooks = {
            name: (spent - before.get(name, (0.0, 0))[0], calls - before.get(name, (0.0, 0))[1])
            for name, (spent, calls) in _hook_times(connectors).items()
        }
        return {"steps": steps, "seconds": seconds, "hooks": hooks, "streams": self._end_streams()}

    # Inside ----------------------------------------------------------------------------------------------------------

    def _connectors(self) -> list[Any]:
        """Both halves of a timed connector, which are in this process; empty for another connector."""
        if not has_kv_transfer_group():
            return []
        halves = [self._engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]
        return [half for half in halves if hasattr(half, "times")]

    def _add(self, prompt: Sequence[int], parameters: SamplingParams) -> str:
        self._requests += 1
        name = f"request-{self._requests}"
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        return name

    def _answer(self, prompt: Sequence[int], parameters: SamplingParams, window: ArrivalWindow | None = None) -> Answer:
        """Send a request and step until it is answered. window: records the steps meanwhile."""
        answer = window.answer if window is not None else Answer()
        is_handed_over = parameters.extra_args is not None
        halves = self._connectors()
        loading_before, saved_before = _loading_seconds(halves), _saved_ms(halves)
        start = answer.began = perf_counter()
        name = self._add(prompt, parameters)
        while not answer.total_ms:
            outputs = self._outputs(window)
            for output in outputs:
                if output.request_id == name:
                    _note(answer, output, 1e3 * (perf_counter() - start))
            if is_handed_over and not outputs:
                sleep(WAITING_SECONDS)
            if perf_counter() - start > LONGEST_SECONDS:
                raise TimeoutError(f"a request was not answered in {LONGEST_SECONDS:.0f} s")
        for half in halves[:1]:  # the scheduler's
            answer.lookup_ms, answer.lease_ms = half.lookup.lookup_ms, half.lookup.lease_ms
        answer.load_ms = 1e3 * (_loading_seconds(halves) - loading_before)
        answer.saved_ms = _saved_ms(halves) - saved_before
        return answer

    def _step(self, window: ArrivalWindow | None = None) -> float:
        start = perf_counter()
        self._outputs(window)
        return perf_counter() - start

    def _outputs(self, window: ArrivalWindow | None) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        now = perf_counter()
        for output in outputs:
            last = self._streams.get(output.request_id)
            if last is None or not output.outputs[0].token_ids:
                continue
            if output.finished:
                del self._streams[output.request_id]
            else:
                self._streams[output.request_id] = now
            if window is not None:
                window.gaps_ms.append(1e3 * (now - last))
        if window is not None:
            window.steps += 1
        return outputs

    def _begin_streams(self, prompts: Sequence[Sequence[int]]) -> None:
        parameters = _parameters(self._longest - max(len(prompt) for prompt in prompts) - 1)
        self._streams = {self._add(prompt, parameters): 0.0 for prompt in prompts}
        give_up_at = perf_counter() + LONGEST_SECONDS
        while not all(self._streams.values()) and perf_counter() < give_up_at:
            self._step()
        for _ in range(FIRST_STEPS):
            self._step()

    def _end_streams(self) -> int:
        """Abort all streams and finish other requests; returns how many streams still ran."""
        running = len(self._streams)
        self._engine.abort_request(list(self._streams))
        self._streams = {}
        while self._engine.has_unfinished_requests():
            self._step()
        return running


def _note(answer: Answer, output: Any, ms: float) -> None:
    """Record a step's output of a request."""
    tokens = output.outputs[0].token_ids
    if tokens and not answer.generated:
        answer.ttft_ms = ms
    answer.generated += len(tokens)
    if output.finished:
        answer.total_ms = ms
        answer.prompt_tokens = len(output.prompt_token_ids)
        answer.cached_tokens = output.num_cached_tokens or 0
        answer.kvstore = (output.kv_transfer_params or {}).get("kvstore")


def _hook_times(halves: Sequence[Any]) -> dict[str, tuple[float, int]]:
    """Seconds and calls so far, by hook; the halves share no hook that a step calls."""
    return {name: (spent, half.times.calls[name]) for half in halves for name, spent in half.times.seconds.items()}


def _loading_seconds(halves: Sequence[Any]) -> float:
    seconds: float = sum(half.times.seconds.get("start_load_kv", 0.0) for half in halves)
    return seconds


def _saved_ms(halves: Sequence[Any]) -> float:
    for half in halves[:1]:  # the scheduler's
        choice = half._scheduler.half.choice
        if choice is not None:
            return float(choice.costs.counts.saved_ms - choice.costs.counts.regret_ms)
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
    """Start, then answer line by line until the input ends."""
    out = os.fdopen(int(sys.argv[1]), "w")
    driver = Driver(json.loads(sys.stdin.readline()))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    out.write(json.dumps({"vllm": vllm.__version__, "threads": torch.get_num_threads(), "device": device}) + "\n")
    out.flush()
    for line in sys.stdin:
        step = json.loads(line)
        out.write(json.dumps(getattr(driver, step["do"])(step)) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
