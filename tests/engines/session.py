"""One run of a real vLLM in a process of its own: python -m engines.session < plan.json > outcome.json

A plan says which model, how the engine is started, and what is asked of it, step by step; the outcome has for each step
the tokens, how many of each prompt's were cached, and what the connector told. Processes are not reused: an engine is
never quite gone from the one that made it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engines import models


def prompts(count: int, seed: int, *, vocab: int = 999, page: int = 64, longest: int = 1200) -> list[list[int]]:
    """Prompts that share prefixes: each goes on from the beginning of one of a few, and its last page is not full."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(max(2, count // 6))]
    made = []
    for _ in range(count):
        shared = rng.choice(stems)[: rng.randrange(page, longest)]
        tail = [rng.randrange(vocab) for _ in range(rng.randrange(10, 200))]
        whole = (len(shared) + len(tail)) // page * page
        made.append(((shared + tail)[:whole] + tail)[: whole + rng.randrange(1, 32)])
    return made


class Session:
    """An engine, and what it answered."""

    def __init__(self, plan: dict[str, Any]) -> None:
        options = plan.get("options", {})
        models.prepare(multiprocessing=plan.get("multiprocessing", False), ranks=options.get("tensor_parallel_size", 1))
        model = Path(plan["model"])
        started = time.perf_counter()
        self.llm = models.start(model, plan.get("transfer"), **options)
        self.started_seconds = time.perf_counter() - started

    def generate(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """All prompts of the step; `at_once` of them are in the engine together."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": step["hints"]} if "hints" in step else None
        params = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 12), ignore_eos=True, extra_args=extra)
        given = prompts(**step["prompts"]) if isinstance(step["prompts"], dict) else step["prompts"]
        told: list[dict[str, Any]] = []
        at_once = step.get("at_once", 1)
        for first in range(0, len(given), at_once):
            if step.get("reset_before_each"):
                self.reset({})
            part = [
                {"prompt_token_ids": ids, **({"cache_salt": step["salt"]} if "salt" in step else {})}
                for ids in given[first : first + at_once]
            ]
            for answer in self.llm.generate(part, params, use_tqdm=False):
                told.append(
                    {
                        "tokens": list(answer.outputs[0].token_ids),
                        "prompt_tokens": len(answer.prompt_token_ids),
                        "cached": answer.num_cached_tokens,
                        "finish": answer.outputs[0].finish_reason,
                        "kvstore": (answer.kv_transfer_params or {}).get("kvstore"),
                    }
                )
        return told

    def churn(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """The prompts arrive one by one while others run; some are given up on the way. The others, as above."""
        from vllm import SamplingParams

        rng = random.Random(step["seed"])
        given = prompts(**step["prompts"])
        engine, told = self.llm.llm_engine, {}
        waiting = list(enumerate(given))
        running: set[str] = set()
        aborted: set[int] = set()
        params = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 12), ignore_eos=True)
        steps = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and len(running) < step["at_once"] and rng.random() < 0.7:
                number, ids = waiting.pop(0)
                engine.add_request(str(number), {"prompt_token_ids": ids}, params)
                running.add(str(number))
            if running and rng.random() < step.get("aborts", 0.0):
                victim = rng.choice(sorted(running))
                engine.abort_request([victim])
                running.discard(victim)
                aborted.add(int(victim))
            steps += 1
            if steps == step.get("kill_at"):
                os.kill(step["kill"], signal.SIGKILL)
            for answer in engine.step():
                if answer.finished:
                    running.discard(answer.request_id)
                    told[int(answer.request_id)] = answer
        return [
            {"aborted": True}
            if number not in told or number in aborted
            else {
                "tokens": list(told[number].outputs[0].token_ids),
                "prompt_tokens": len(ids),
                "cached": told[number].num_cached_tokens,
                "kvstore": (told[number].kv_transfer_params or {}).get("kvstore"),
            }
            for number, ids in enumerate(given)
        ]

    def reset(self, step: dict[str, Any]) -> bool:
        """Forget the engine's own cache."""
        for _ in range(200):
            if self.llm.reset_prefix_cache(reset_connector=step.get("connector", False)):
                return True
            self.llm.llm_engine.step()
        return False

    def settle(self, step: dict[str, Any]) -> bool:
        """Let what is being saved be saved."""
        time.sleep(step.get("seconds", 0.5))
        return True

    def run(self, step: dict[str, Any]) -> Any:
        """Another process's turn: it ends with its answer."""
        return os.system(step["command"])

    def metrics(self, step: dict[str, Any]) -> dict[str, float]:
        """Counters of the engine."""
        return {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}


def outcome_of(text: str) -> str:
    """Follow a plan. Both are JSON."""
    plan = json.loads(text)
    session = Session(plan)
    outcome = [getattr(session, step["do"])(step) for step in plan["steps"]]
    return json.dumps({"started_seconds": session.started_seconds, "steps": outcome})


def main() -> None:
    """Read the plan, follow it, tell."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    out.write(outcome_of(sys.stdin.read()))
    out.close()


if __name__ == "__main__":
    main()
