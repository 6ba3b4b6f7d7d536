"""Many small models and everything that is done to models: each answers as without a store, or one line refuses it.

PYTHONPATH=.:kernels:tests python tests/adapters/test_hf_matrix.py [MODEL ...]  the whole table, with what was refused
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.errors import BadInput

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf_cache import PrefixCache
from hf_models import MODELS, Adapted, ask, plain_answer, projections, replace_linear, small_model, some_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

IN_EVERY_RUN = ("llama", "qwen3 moe", "opt", "gpt2", "gemma2")
PROMPT = some_prompt(150)
NEW_TOKENS = 4


def adapted(model: Any) -> list[Adapted]:
    torch.manual_seed(3)
    return [replace_linear(model, name, Adapted) for name in projections(model)]  # type: ignore[misc]


def with_adapters(**values: Any) -> Callable[[Any], Callable[[], None]]:
    """A change that is made to a model's adapters after a cache has seen it."""

    def prepare(model: Any) -> Callable[[], None]:
        parts = adapted(model)
        return lambda: [vars(part).update(values) for part in parts] and None

    return prepare


def merging(model: Any) -> Callable[[], None]:
    parts = adapted(model)
    return lambda: [part.merge() for part in parts] and None


def hooking(model: Any) -> Callable[[], None]:
    third = model.get_submodule(projections(model)[2])
    return lambda: third.register_forward_hook(lambda module, given, output: 1.5 * output) and None


def patching(model: Any) -> Callable[[], None]:
    third = model.get_submodule(projections(model)[2])
    inner = third.forward
    return lambda: setattr(third, "forward", lambda states: 1.5 * inner(states))


def compiling(model: Any) -> Callable[[], None]:
    return lambda: model.compile(backend="eager")


def quantizing(model: Any) -> Callable[[], None]:
    """Weights by torchao, where it is installed; otherwise by torch, whose activations have one scale for a chunk."""
    if importlib.util.find_spec("torchao") is None:
        return lambda: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True) and None
    quantization = importlib.import_module("torchao.quantization")
    return lambda: quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def peft_switching(model: Any) -> Callable[[], None]:
    peft = pytest.importorskip("peft", reason="peft is not installed: adapters of transformers need it")
    targets = _targets(model)
    for name in ("b", "a"):
        lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets, init_lora_weights=False)
        model.add_adapter(lora, name)
    model.eval()
    return lambda: model.set_adapter("b")


def _targets(model: Any) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in projections(model)} - {"gate", "shared_expert_gate"})


CHANGES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "switched": with_adapters(active="b"),
    "scaled": with_adapters(scale=3.0),
    "disabled": with_adapters(disabled=True),
    "merged": merging,
    "switched by peft": peft_switching,
    "hook": hooking,
    "patch": patching,
    "compiled": compiling,
    "quantised": quantizing,
}


def judged(name: str, change: str) -> str:
    """That it is served, or the line by which this model is refused; raises where an answer is wrong."""
    model = small_model(name)
    apply = CHANGES[change](model)
    with tempfile.TemporaryDirectory() as directory, kvstore.open(f"embedded:{directory}", dram="16MiB") as store:
        said: list[str] = []
        expected: list[list[int] | None] = []
        caches: list[PrefixCache | None] = [None]
        for is_changed in (False, True):
            if is_changed:
                apply()
            expected.append(None if change == "compiled" and is_changed else _plain(model))
            for cache in caches:  # after the change: the one that saw it, and a new one
                try:
                    cache = cache or PrefixCache(model, store, codec="raw", chunk_tokens=64)
                    answer = ask(cache, PROMPT, NEW_TOKENS)
                except BadInput as error:
                    assert "\n" not in str(error), error
                    said.append(str(error))
                    continue
                assert answer.token_ids == expected[-1], f"{answer.token_ids} instead of {expected[-1]}"
                assert not answer.report.faults
                said.append("served")
            caches = [cache, None]
        store.check()
    assert said[1] == said[2], said
    if said[-1] == "served" and expected[0] == expected[1]:
        return "served, though the change changes nothing"
    return said[-1]


def _plain(model: Any) -> list[int] | None:
    """What transformers answers; nothing, where it cannot run the model either."""
    try:
        return plain_answer(model, PROMPT, NEW_TOKENS)
    except NotImplementedError:
        return None


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in MODELS]
)
def test_answered_as_without_a_store_or_refused_by_one_line(name: str, change: str) -> None:
    verdict = judged(name, change)
    if change == "compiled":
        assert verdict != "served"
    elif name in ("llama", "qwen3 moe", "opt", "gpt2") and change not in ("quantised", "merged"):
        assert verdict == "served", "and with another answer, or nothing would be noticed"


def main() -> int:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(MODELS)
    counts: Counter[str] = Counter()
    wrong = 0
    for name in names:
        for change in CHANGES:
            try:
                verdict = judged(name, change)
            except pytest.skip.Exception as skipped:
                verdict = f"skipped: {skipped}"
            except Exception as error:
                verdict, wrong = f"WRONG: {type(error).__name__}: {error}", wrong + 1
            counts["refused" if verdict.startswith("PrefixCache cannot") else verdict.partition(":")[0]] += 1
            print(f"{name:18} {change:18} {verdict}", flush=True)
    print(f"{len(names)} models, {sum(counts.values())} cells: {dict(counts)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
