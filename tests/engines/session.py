"""One run of a real vLLM in a process of its own: python -m engines.session < plan.json > outcome.json

A plan says which model, how the engine is started, and what is asked of it, step by step; the outcome has for each step
with a name ("as") the tokens, how many of each prompt's were cached, and what the connector told.
No process has two engines, since one is never quite gone from the process that made it. An engine may be kept for more
plans; each begins with nothing cached, nothing stored and nothing counted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patience
from engines import models
from engines.nursery import wanted_version
from waiting import wait_until

SEED = int(os.environ.get("ENGINE_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
"""Of what tests draw."""
SAVE_SECONDS = 60.0
FORGET: list[dict[str, Any]] = [{"do": "settle"}, {"do": "reset"}]
"""Steps after which what was computed is in the store alone."""
OURS = "kvstore:"
"""Begins the names of what the connector counted, among the engine's counters."""


def prompts(count: int, seed: int, *, vocab: int = 999, page: int = 64, longest: int = 1200) -> list[list[int]]:
    """Prompts that share prefixes: each goes on from the beginning of one of a few, and its last page is not full. None
    is shorter than two pages, which is the largest stored block of these tests, and a token."""
    rng = random.Random(seed)
    stems = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(max(2, count // 6))]
    made = []
    for _ in range(count):
        shared = rng.choice(stems)[: rng.randrange(2 * page, longest)]
        tail = [rng.randrange(vocab) for _ in range(rng.randrange(10, 200))]
        whole = (len(shared) + len(tail)) // page * page
        made.append(((shared + tail)[:whole] + tail)[: whole + rng.randrange(1, 32)])
    return made


def apart(count: int, tokens: int) -> list[list[int]]:
    """Prompts of which none begins as another one does."""
    rng = random.Random(f"{SEED} {count} {tokens}")
    return [[rng.randrange(999) for _ in range(tokens)] for _ in range(count)]


def tokens(told: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in told]


def account_of(one: dict[str, Any]) -> dict[str, Any]:
    """What the connector told of a prompt, which adds up."""
    account: dict[str, Any] = one["kvstore"]
    assert account["asked"] == one["prompt_tokens"]
    assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"], account
    return account


def _lead(token: int, logprobs: dict[int, Any]) -> float:
    """By how much more a token was likely than any other, in logarithms."""
    return float(logprobs[token].logprob - max(other.logprob for one, other in logprobs.items() if one != token))


class Session:
    """An engine, and what it answered. asked: the prompts of the steps that have names, with what was generated."""

    def __init__(self, plan: dict[str, Any]) -> None:
        options = plan.get("options", {})
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        models.prepare(multiprocessing=plan.get("multiprocessing", False), ranks=ranks)
        patience.wait_for_sidecars()
        model = Path(plan["model"])
        self.llm = models.start(model, plan.get("transfer"), **options)
        self.asked: dict[str, list[list[int]]] = {}
        self._listener: Any = None
        self._exporter: Any = None
        self._before: dict[str, float] = {}

    def begin_again(self) -> None:
        """As if the engine were new: it has forgotten everything, the store has nothing under its names, and what was
        counted until now does not count."""
        from engines.wrong_connectors import ChangingConnector

        self.asked = {}
        ChangingConnector.become(None)
        self.settle({})
        assert self.reset({"connector": bool(ChangingConnector.halves)}) and ChangingConnector.wait_open()
        self.report({"seconds": 0.0})
        self._before = self._totals()

    def follow(self, steps: list[dict[str, Any]]) -> str:
        """One after the other. What those told that have names, as JSON."""
        told = [(step.get("as"), getattr(self, step["do"])(step)) for step in steps]
        return json.dumps({name: one for name, one in told if name is not None})

    def generate(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """All prompts of the step; `at_once` of them are in the engine together.

        prompts: token ids, or how they are drawn, or the name of a step: its prompts, each with what was generated.
        """
        given = step["prompts"]
        if isinstance(given, dict):
            given = prompts(**given)
        elif isinstance(given, str):
            given = self.asked[given]
        params, more = self._params(step), self._adapter(step)
        told: list[dict[str, Any]] = []
        at_once = step.get("at_once", 1)
        for first in range(0, len(given), at_once):
            if step.get("reset_before_each"):
                self.reset({})
            part = [self._prompt(step, ids) for ids in given[first : first + at_once]]
            with self._traced(step.get("trace_headers")):
                answers = self.llm.generate(part, params, use_tqdm=False, **more)
            told += [self._told(step, *one) for one in zip(given[first:], answers, strict=False)]
            if step.get("report_after_each"):
                self.report({})
        if "as" in step:
            self.asked[step["as"]] = [ids + one["tokens"] for ids, one in zip(given, told, strict=True)]
        return told

    def _told(self, step: dict[str, Any], ids: list[int], answer: Any) -> dict[str, Any]:
        made = answer.outputs[0]
        told = {
            "tokens": list(made.token_ids),
            "prompt_tokens": len(ids),
            "cached": answer.num_cached_tokens,
            "finish": made.finish_reason,
            "kvstore": (answer.kv_transfer_params or {}).get("kvstore"),
            "transfer_keys": sorted(answer.kv_transfer_params or {}),
        }
        if step.get("leads"):
            told["lead"] = min(map(_lead, made.token_ids, made.logprobs))
        if step.get("logprobs"):
            chosen = zip(made.token_ids, made.logprobs, strict=True)
            told["logprobs"] = [logprobs[token].logprob for token, logprobs in chosen]
        return told

    @contextmanager
    def _traced(self, headers: dict[str, str] | None) -> Iterator[None]:
        """What is asked for meanwhile comes with these, as over HTTP."""
        engine, ask = self.llm.llm_engine, self.llm.llm_engine.add_request
        if headers is not None:
            engine.add_request = lambda *args, **named: ask(*args, **{**named, "trace_headers": headers})
        try:
            yield
        finally:
            engine.add_request = ask

    def trace(self, step: dict[str, Any]) -> bool:
        """Spans of this process are kept from here on."""
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace import set_tracer_provider

        provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        set_tracer_provider(provider)
        return True

    def spans(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """The connector's, once there are so many."""

        def ours() -> list[Any]:
            return [one for one in self._exporter.get_finished_spans() if one.name.startswith("kvstore ")]

        wait_until(lambda: len(ours()) >= step["count"])
        return [
            {
                "name": one.name,
                "trace": f"{one.context.trace_id:032x}",
                "parent": f"{one.parent.span_id:016x}",
                "attributes": dict(one.attributes),
            }
            for one in ours()
        ]

    def _params(self, step: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=step.get("max_tokens", 12),
            ignore_eos=True,
            extra_args={"kv_transfer_params": step["hints"]} if "hints" in step else None,
            logprobs=2 if step.get("leads") else 0 if step.get("logprobs") else None,
            skip_reading_prefix_cache=True if step.get("skip_reading") else None,
        )

    def _adapter(self, step: dict[str, Any]) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        if "adapter" not in step:
            return {}
        return {
            "lora_request": LoRARequest("adapter", step["adapter"], step["path"], load_inplace=step.get("anew", False))
        }

    def _prompt(self, step: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """As ids, or as that many embeddings."""
        import torch

        if step.get("embeddings"):
            config = self.llm.llm_engine.model_config
            drawn = torch.Generator().manual_seed(len(ids))
            return {"prompt_embeds": torch.randn(len(ids), config.get_hidden_size(), generator=drawn).to(config.dtype)}
        prompt = {"prompt_token_ids": ids, **({"cache_salt": step["salt"]} if "salt" in step else {})}
        if "pictures" in step:  # one a prompt; their names are the prompts', whatever they show
            prompt["multi_modal_data"] = {"image": models.picture(step["pictures"], ids[0])}
            prompt["multi_modal_uuids"] = {"image": [f"picture {ids[0]}" if step.get("named") else None]}
        return prompt

    def churn(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """The prompts arrive one by one while others run; some are given up on the way. The others, as above."""
        from vllm import SamplingParams

        rng = random.Random(step["seed"])
        given = step["prompts"]
        engine, told = self.llm.llm_engine, {}
        waiting = list(enumerate(given))
        running: set[str] = set()
        aborted: set[int] = set()
        params = SamplingParams(temperature=0, max_tokens=step.get("max_tokens", 12), ignore_eos=True)
        steps = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and len(running) < step["at_once"] and (not running or rng.random() < 0.7):
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
            if not engine.has_unfinished_requests():
                continue  # an engine in a process of its own would be waited for
            for answer in engine.step():
                if answer.finished:
                    running.discard(answer.request_id)
                    told[int(answer.request_id)] = answer
        return [
            {"aborted": True} if number not in told or number in aborted else self._told({}, ids, told[number])
            for number, ids in enumerate(given)
        ]

    def overtaken(self, step: dict[str, Any]) -> list[int]:
        """One prompt, with an adapter whose files are written anew after some tokens. What was generated."""
        engine, made, is_written = self.llm.llm_engine, [], False
        engine.add_request("overtaken", {"prompt_token_ids": step["prompt"]}, self._params(step), **self._adapter(step))
        while engine.has_unfinished_requests():
            if len(made) >= step["after"] and not is_written:
                is_written = self.adapter(step)
            for answer in engine.step():
                made = list(answer.outputs[0].token_ids)
        self.asked[step["as"]] = [step["prompt"] + made]
        return made

    def about(self, step: dict[str, Any]) -> dict[str, Any]:
        """How this vLLM runs: what it chose where nothing was asked for."""
        import torch
        import vllm

        config = self.llm.llm_engine.vllm_config
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        page, group = runner.kv_caches[0], runner.attn_groups[0]
        backend = (group[0] if isinstance(group, list) else group).backend
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "pages": f"{page.dtype} {tuple(page.shape)} {tuple(page.stride())} {page.device}",
            "runner": type(runner).__module__,
            "is_async": bool(config.scheduler_config.async_scheduling),
            "compiled": str(config.compilation_config.mode),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "attention": backend.get_name(),
        }

    def reset(self, step: dict[str, Any]) -> bool:
        """Forget the engine's own cache."""
        for _ in range(200):
            if self.llm.reset_prefix_cache(reset_connector=step.get("connector", False)):
                return True
            self.llm.llm_engine.step()
        return False

    def reload(self, step: dict[str, Any]) -> bool:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": step["path"]})
        return True

    def settle(self, step: dict[str, Any]) -> bool:
        """Let what is being saved be saved, however long a busy machine takes for it, and all else for a while."""
        give_up_at = time.monotonic() + SAVE_SECONDS
        while self._is_saving():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        time.sleep(step.get("seconds", 0.5))
        return True

    def report(self, step: dict[str, Any]) -> bool:
        """The same; and a step of the engine, which brings reports of saves, and verdicts."""
        self.settle(step)
        self.generate({"prompts": [[1, 2, 3]]})
        return True

    def idle(self, step: dict[str, Any]) -> bool:
        """Ask for nothing until the test removes the file that says so."""
        path = Path(step["file"])
        path.touch()
        wait_until(lambda: not path.exists())
        return True

    @staticmethod
    def _is_saving() -> bool:
        """What cannot be seen where the connector's worker is in another process, or is one of several."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
        return worker is not None and bool(worker._saves or worker._saving)

    def run(self, step: dict[str, Any]) -> Any:
        """Another process's turn: it ends with its answer."""
        return os.system(step["command"])

    def become(self, step: dict[str, Any]) -> bool:
        """A `ChangingConnector`: do this wrong from here on."""
        from engines.wrong_connectors import ChangingConnector

        ChangingConnector.become(step.get("wrong"))
        return bool(ChangingConnector.halves)

    def metrics(self, step: dict[str, Any]) -> dict[str, float]:
        """Counters of the engine, since the plan began."""
        return {
            name: total - self._before.get(name, 0.0)
            for name, total in self._totals().items()
            if not name.startswith(OURS)
        }

    def counted(self, step: dict[str, Any]) -> dict[str, float]:
        """The connector's own, by origin and by event, since the plan began: what was counted at all."""
        counts = {
            name.removeprefix(OURS): total - self._before.get(name, 0.0)
            for name, total in self._totals().items()
            if name.startswith(OURS)
        }
        return {name: count for name, count in counts.items() if count}

    def _totals(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        totals = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("kvstore:") and sample.name.endswith("_total"):
                    totals[OURS + (sample.labels.get("origin") or sample.labels["event"])] = sample.value
        return totals

    def adapter(self, step: dict[str, Any]) -> bool:
        """Write an adapter, over what is there."""
        models.save_adapter(Path(step["path"]), seed=step["seed"])
        return True

    def listen(self, step: dict[str, Any]) -> bool:
        """To KV events from here on."""
        import zmq

        self._listener = zmq.Context.instance().socket(zmq.SUB)
        self._listener.connect(step["endpoint"])
        self._listener.subscribe("")
        time.sleep(0.5)  # a publisher drops what it has no subscriber for
        return True

    def events(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """Those about blocks, since they were asked for last; the engine's own have another medium."""
        import msgspec
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

        heard: list[dict[str, Any]] = []
        while self._listener.poll(500):
            *_, payload = self._listener.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                if not isinstance(event, BlockStored | BlockRemoved):
                    continue
                told = {
                    "medium": event.medium,
                    "hashes": [str(one) for one in event.block_hashes],
                    "locality": getattr(event, "locality", None),
                    "group": getattr(event, "group_idx", None),
                }
                if isinstance(event, BlockStored):
                    told |= {
                        "parent": event.parent_block_hash and str(event.parent_block_hash),
                        "tokens": event.token_ids,
                        "block": event.block_size,
                        "extra_keys": getattr(event, "extra_keys", None),
                        "kind": getattr(event, "kv_cache_spec_kind", None),
                        "window": getattr(event, "kv_cache_spec_sliding_window", None),
                    }
                heard.append(told)
        return heard

    def drop(self, step: dict[str, Any]) -> int:
        """All that an operator can drop at a sidecar: how many blocks that were."""
        from kvstore.cli import ask
        from kvstore.node import SystemClock

        socket, clock = step["admin"], SystemClock()
        spaces = ask.stat(socket, clock).namespaces
        return sum(ask.drop(socket, clock, one.digest, one.tenant, 30.0).blocks for one in spaces)


class Sessions:
    """What follows plans that agree in all but their steps: with one engine, which only a plan that says that it is
    `kept` begins anew."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def outcome_of(self, text: str) -> str:
        """Follow a plan. Both are JSON."""
        plan = json.loads(text)
        if self._session is None:
            self._session = Session(plan)
        if plan.get("kept"):
            self._session.begin_again()
        return self._session.follow(plan["steps"])


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    out.write(Sessions().outcome_of(sys.stdin.read()))
    wanted_version()
    out.close()


if __name__ == "__main__":
    main()
