"""Adapters of peft and weights of torchao on transformers models; skipped where those are not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.node import EmbeddedStore

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf.identity import fingerprint
from hf_models import (
    PROMPT,
    answers,
    ask_all,
    cache_of,
    plain_answer,
    projections,
    refused,
    small_model,
    some_prompt,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def adapted(targets: list[str] | None = None, **options: Any) -> Any:
    """A model with the adapters a and b, of which b was added last and is active."""
    peft = pytest.importorskip("peft", reason="peft is not installed: adapters of transformers need it")
    model = small_model()
    for name in ("a", "b"):
        config = peft.LoraConfig(
            r=4, lora_alpha=32, target_modules=targets or ["q_proj", "v_proj"], init_lora_weights=False, **options
        )
        model.add_adapter(config, name)
    return model.eval()


def lora_parts(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "merged_adapters")]


def test_an_adapter_is_its_bytes_and_not_its_name(store: EmbeddedStore) -> None:
    first, _ = answers(cache_of(adapted(), store))
    model = adapted()
    assert answers(cache_of(model, store)) == (first, 256)
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            tensor.data.mul_(2)
    other, restored = answers(cache_of(model, store))
    assert other != first and restored == 0


@pytest.mark.parametrize(
    "targets",
    [["k_proj"], *(pytest.param([one], marks=pytest.mark.slow) for one in "down_proj lm_head embed_tokens".split())],
)
def test_switched_scaled_merged_disabled_deleted(targets: list[str], store: EmbeddedStore) -> None:
    """Each state answers as without a store. One that changes no KV, as the head's does, may share or not."""
    model = adapted(targets)
    cache, parts = cache_of(model, store), lora_parts(model)
    states: list[Callable[[], object]] = [
        lambda: model.set_adapter("a"),
        lambda: [part.scaling.update(a=0.5 * part.scaling["a"]) for part in parts],
        lambda: model.set_adapter(["a", "b"]),
        lambda: [part.merge() for part in parts],
        lambda: [part.unmerge() for part in parts],
        model.disable_adapters,
        model.enable_adapters,
        lambda: model.delete_adapter("b"),
    ]
    seen = [tuple(answers(cache)[0])]
    for change in states:
        change()
        seen.append(tuple(answers(cache)[0]))
        assert tuple(answers(cache_of(model, store))[0]) == seen[-1]
    assert len(set(seen)) >= 4, "these adapters change nothing: nothing would be noticed"


def test_dropout_in_an_adapter_that_trains_is_refused() -> None:
    model = adapted(lora_dropout=0.5)
    cache_of(model)
    lora_parts(model)[0].train()
    with refused("does not compute the same KV twice"):
        cache_of(model)


def test_models_wrapped_by_peft_are_refused_with_the_model_to_pass(store: EmbeddedStore) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: it wraps models")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(small_model(), lora).eval()
    with refused(r"pass model\.get_base_model\(\)"):
        cache_of(wrapped)
    inner = wrapped.get_base_model()
    cache = cache_of(inner, store)
    with_adapter, _ = answers(cache)
    with wrapped.disable_adapter():
        without, restored = answers(cache)
        assert without != with_adapter and restored == 0
    assert answers(cache) == (with_adapter, 256)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with refused("virtual tokens"):
        cache_of(peft.get_peft_model(small_model(), prefix).eval())


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_quantised_weights_are_served(kind: str, store: EmbeddedStore) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: it quantises weights")
    plain = small_model()
    answers(cache_of(plain, store))
    model = small_model()
    quantization.quantize_(model, getattr(quantization, kind)())
    cache = cache_of(model, store)
    first, restored = answers(cache)
    assert restored == 0 and fingerprint(model) != fingerprint(plain)
    assert answers(cache) == (first, 256) and answers(cache_of(model, store)) == (first, 256)
    other = small_model(seed=1)
    quantization.quantize_(other, getattr(quantization, kind)())
    assert fingerprint(other) != fingerprint(model)
    quantization.quantize_(plain, getattr(quantization, kind)())
    assert fingerprint(plain) == fingerprint(model)


class Sealed(torch.Tensor):
    """A weight as libraries of quantisation make them: a subclass that names the tensors inside, or does not."""

    named: Callable[[], Any]

    def __tensor_flatten__(self) -> Any:
        return self.named()


class Unseen(torch.Tensor):
    """One that names nothing, and refuses to be seen as bytes or copied."""

    is_sealed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "detach" and args[0].is_sealed:
            raise NotImplementedError(f"{cls.__name__} has no detach")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def raising(error: Exception) -> Callable[[], Any]:
    def named() -> Any:
        raise error

    return named


def sealed(model: Any, name: str, kind: type[torch.Tensor] = Sealed, **held: Any) -> None:
    linear = model.get_submodule(name)
    weight: Any = torch.nn.Parameter(linear.weight.detach(), requires_grad=False).as_subclass(kind)  # type: ignore[arg-type]
    weight._is_param = True
    for attribute, value in held.items():
        setattr(weight, attribute, value)
    linear.weight = weight


UNREADABLE: dict[str, Callable[[], dict[str, Any]]] = {
    "a fault of torch": lambda: {"named": raising(RuntimeError("no storage"))},
    "another protocol": lambda: {"named": raising(TypeError("one argument more"))},
    "half made": lambda: {"named": raising(AttributeError("scale"))},
    "no pair": lambda: {"named": lambda: ["inner"]},
    "nothing": lambda: {"named": lambda: None},
    "names what is not there": lambda: {"named": lambda: (["inner"], None)},
    "names what is no tensor": lambda: {"named": lambda: (["inner"], None), "inner": "text"},
    "fails when it is asked for": lambda: {"named": raising(KeyError("inner"))},
    "is no subclass with names": lambda: {"kind": Unseen, "is_sealed": True},
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_weight_that_cannot_be_read_is_refused_by_one_line(how: str) -> None:
    model = small_model()
    given = UNREADABLE[how]()
    sealed(model, projections(model)[0], **given)
    kind = given.get("kind", Sealed).__name__
    with refused(f"{projections(model)[0]}.*{kind} that cannot be read"):
        cache_of(model)


def test_a_weight_that_wraps_itself_is_refused_by_one_line() -> None:
    model = small_model()
    sealed(model, projections(model)[0], named=lambda: (["inner"], None))
    weight = model.get_submodule(projections(model)[0]).weight
    weight.inner = weight
    with refused("Sealed that cannot be read") as caught:
        cache_of(model)
    assert len(str(caught.value)) < 1000


def test_compiled_models_are_refused_with_the_model_to_pass() -> None:
    """Nothing is compiled here: that happens at the first call, which never comes."""
    with refused(r"pass the model that was compiled \(model\._orig_mod\)"):
        cache_of(torch.compile(small_model(), backend="eager"))
    in_place = small_model()
    in_place.compile(backend="eager")
    with refused(r"torch\.compile works on the model itself"):
        cache_of(in_place)
    by_layer = small_model()
    by_layer.model.layers[1].compile(backend="eager")
    with refused(r"torch\.compile works on model\.layers\.1"):
        cache_of(by_layer)
    patched = small_model()
    patched.forward = torch.compile(patched.forward, backend="eager")
    with refused(r"torch\.compile works on the model itself"):
        cache_of(patched)


def test_other_wrappers_are_refused_with_the_model_to_pass() -> None:
    with refused(r"pass the model inside \(model\.module\)"):
        cache_of(torch.nn.DataParallel(small_model()))
    with refused("it is not a language model of transformers"):
        cache_of(torch.nn.Sequential(small_model()))
    with refused("on meta"):
        cache_of(small_model().to("meta"))


def test_a_model_that_counts_positions_from_its_mask_is_served(store: EmbeddedStore) -> None:
    model = small_model("opt")
    cache = cache_of(model, store)
    first, _ = answers(cache)
    assert len(set(first)) > 2 and answers(cache) == (first, 256)
    prompts = [some_prompt(90), PROMPT, some_prompt(140)]
    batch = ask_all(cache, prompts, 6)
    assert [answer.token_ids for answer in batch] == [plain_answer(model, prompt, 6) for prompt in prompts]
