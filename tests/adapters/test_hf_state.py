"""What changes KV and is in no weight or configuration: a cache never serves what the model computed before."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvstore.node import EmbeddedStore
from programs import run_python

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from transformers.models.llama import modeling_llama  # noqa: E402

from engine_adapter.hf.identity import PROBE_SECONDS  # noqa: E402
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import (  # noqa: E402
    PROMPT,
    Adapted,
    Each,
    answers,
    ask,
    ask_all,
    cache_of,
    plain_answer,
    refused,
    replace_linear,
    small_model,
    some_prompt,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ROTATE, FORWARD = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaMLP.forward

# Changes: each is made, and returns what takes it back ---------------------------------------------------------------

Undo = Callable[[], object]


def deep(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj


def replaced(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def edited(tensor: torch.Tensor, edit: Callable[[torch.Tensor], object]) -> Undo:
    before = tensor.detach().clone()
    with torch.no_grad():
        edit(tensor)
    return torch.no_grad()(lambda: tensor.copy_(before))


def patched_forward(model: Any) -> Undo:
    module = deep(model)
    module.forward = functools.partial(lambda inner, states: 3 * inner(states), module.forward)
    return lambda: delattr(module, "forward")


def another_checkpoint(model: Any) -> Undo:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(small_model(seed=1).state_dict())
    return lambda: model.load_state_dict(before)


def other_order(model: Any) -> Undo:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    model.model.layers[0].mlp, model.model.layers[1].mlp = second, first
    return lambda: other_order(model)


CHANGES: dict[str, Callable[[Any], Undo]] = {
    "a hook": lambda model: deep(model).register_forward_hook(lambda module, given, output: 2 * output).remove,
    "a hook before": lambda model: (
        model.model.layers[1].register_forward_pre_hook(lambda module, given: (given[0] + 1, *given[1:])).remove
    ),
    "a hook on every module": lambda model: (
        torch.nn.modules.module.register_module_forward_hook(
            lambda module, given, output: 2 * output if module is deep(model) else None
        ).remove
    ),
    "a patched forward": patched_forward,
    # Nothing of the model changes at all: only running it tells.
    "a patched function of the library": lambda model: replaced(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *given, **named: ROTATE(q, k, sin, cos)
    ),
    "a patched class": lambda model: replaced(
        modeling_llama.LlamaMLP, "forward", lambda self, states: 2 * FORWARD(self, states)
    ),
    "a module of somebody else": lambda model: replaced(model.model.layers[1].mlp, "down_proj", Adapted(deep(model))),
    "a buffer that is in no state dict": lambda model: edited(
        model.model.rotary_emb.inv_freq, lambda numbers: numbers.mul_(0.5)
    ),
    "weights in place": lambda model: edited(deep(model).weight, lambda numbers: numbers[3].add_(3)),
    # Without a trace in the version of the tensor, as some trainers and merges do it.
    "weights through data": lambda model: edited(deep(model).weight.data, lambda numbers: numbers.mul_(1.5)),
    "another checkpoint": another_checkpoint,
    "another tensor": lambda model: replaced(
        deep(model), "weight", torch.nn.Parameter(1.5 * deep(model).weight.detach())
    ),
    "layers in another order": other_order,
}
UNSEEN_BY_A_LOOK = ("a patched function of the library", "a patched class")


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_cache_on_a_changed_model_is_served_nothing_of_before(change: str, store: EmbeddedStore) -> None:
    model = small_model()
    before, none = answers(cache_of(model, store))
    assert not none and answers(cache_of(model, store)) == (before, 256)
    with ExitStack() as stack:
        stack.callback(CHANGES[change](model))
        changed, restored = answers(cache_of(model, store))
        assert changed != before, "this change changes nothing: nothing would be noticed"
        assert restored == 0
        assert answers(cache_of(model, store)) == (changed, 256), "it has a namespace of its own"
    assert answers(cache_of(model, store)) == (before, 256)


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_notices_that_its_model_was_changed(change: str, store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store, hbm="4MiB")
    now = _clock_of(cache)
    before, _ = answers(cache)
    with ExitStack() as stack:
        stack.callback(CHANGES[change](model))
        if change in UNSEEN_BY_A_LOOK:
            now[0] += PROBE_SECONDS + 1
        changed, restored = answers(cache)
        assert changed != before and restored == 0
        assert answers(cache) == (changed, 256)
    if change in UNSEEN_BY_A_LOOK:
        now[0] += PROBE_SECONDS + 1
    assert answers(cache) == (before, 256)


def _clock_of(cache: PrefixCache) -> list[float]:
    """A clock of the test's in place of the watch's; a list of its one reading."""
    now = [0.0]
    cache._watch._clock = lambda: now[0]
    cache._watch._good_until = PROBE_SECONDS
    return now


# Code that changes unseen -----------------------------------------------------------------------------------------


def test_what_a_hook_reads_from_outside_is_found_at_the_next_request(store: EmbeddedStore) -> None:
    model, strength = small_model(), {"value": 2.0}
    deep(model).register_forward_hook(lambda module, given, output: strength["value"] * output)
    cache = cache_of(model, store)
    first, _ = answers(cache)
    strength["value"] = 3.0
    second, restored = answers(cache)
    assert second != first and restored == 0
    strength["value"] = 2.0
    assert answers(cache) == (first, 256)


def test_two_hooks_that_differ_in_what_they_hold_have_two_states() -> None:
    """Even where the probe's prompt shows no difference: both act from the thousandth token on."""

    def late(start: int) -> Any:
        def hook(module: Any, given: Any, output: Any) -> Any:
            return 2 * output if output.shape[1] >= start else None

        return hook

    seen = set()
    for start in (500, 1000, 1000):
        model = small_model()
        deep(model).register_forward_hook(late(start))
        config = dict(cache_of(model)._identity.config)
        seen.add((config["computes"], config["state"]))
    assert len(seen) == 2 and len({computes for computes, _ in seen}) == 1


def quantized(output: torch.Tensor) -> torch.Tensor:
    """Activations scaled by the largest of a whole chunk, as per-tensor quantisation does it: a difference of a few
    thousandths, and a wrong one."""
    scale = output.abs().max() / 127
    return (output / scale).round() * scale


def last_bits_vary(output: torch.Tensor) -> torch.Tensor:
    return output * (1 + 1e-7 * torch.randint(0, 3, output.shape))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda output: output + torch.rand_like(output), "does not compute the same KV twice"),
        (last_bits_vary, "other last bits in every run"),
        (quantized, "depends on the tokens behind it"),
    ],
)
def test_a_hook_whose_kv_cannot_be_shared_is_refused(
    changed: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    model = small_model()
    deep(model).register_forward_hook(lambda module, given, output: changed(output))
    with refused(said):
        cache_of(model)


def test_where_last_bits_vary_without_a_hook_a_model_is_known_by_its_weights() -> None:
    noisy = replaced(modeling_llama.LlamaMLP, "forward", lambda self, states: last_bits_vary(FORWARD(self, states)))
    with ExitStack() as stack:
        stack.callback(noisy)
        assert "computes" not in dict(cache_of(small_model())._identity.config)


# During a request ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["weights in place", "a hook"])
def test_what_is_computed_after_a_change_in_a_request_is_not_kept(change: str, store: EmbeddedStore) -> None:
    model = small_model()
    cache, changed = cache_of(model, store), ExitStack()
    with changed:
        step = Each(lambda count: changed.callback(CHANGES[change](model)) if count == 3 else None)
        answer = ask(cache, PROMPT, 100, stopping_criteria=[step])
    assert answer.report.saved_blocks == 4 and answer.report.detail == "the model changed during the request"
    turn = PROMPT + answer.token_ids
    again = ask(cache, turn, 6)
    assert again.report.restored_tokens == 256
    assert again.token_ids == plain_answer(model, turn, 6)


def test_adapters_that_take_turns_within_a_request_leave_nothing(store: EmbeddedStore) -> None:
    model = small_model()
    scaled: Any = replace_linear(model, "model.layers.1.mlp.down_proj", Adapted)
    cache = cache_of(model, store)
    step = Each(lambda count: setattr(scaled, "scale", 4.0 if 10 <= count < 60 else 1.0))
    answer = ask(cache, PROMPT, 100, stopping_criteria=[step])
    assert answer.report.saved_blocks == 4, "those of the prompt, before anything changed"
    turn = PROMPT + answer.token_ids
    assert ask(cache, turn, 6).token_ids == plain_answer(model, turn, 6)


def test_a_request_goes_on_beside_requests_of_another_state(store: EmbeddedStore) -> None:
    """The other request looks at the model and finds it changed; this one must not take that look for its own."""
    model = small_model()
    cache, changed = cache_of(model, store), ExitStack()

    def step(count: int) -> None:
        if count == 3:
            changed.callback(CHANGES["a hook"](model))
            answers(cache)

    with changed:
        output = cache.generate(PROMPT, max_new_tokens=100, do_sample=False, stopping_criteria=[Each(step)])
        first = next(iter(cache.reports))
        assert first.prompt_tokens == len(PROMPT)
    turn = output[0].tolist()
    again = ask(cache, turn, 6)
    assert again.token_ids == plain_answer(model, turn, 6) and again.report.restored_tokens == 256


def test_of_a_model_with_a_hook_answers_are_not_kept_and_changed_prompts_neither(store: EmbeddedStore) -> None:
    model, strength = small_model(), {"value": 2.0}
    deep(model).register_forward_hook(lambda module, given, output: strength["value"] * output)
    cache = cache_of(model, store)
    prompts = [PROMPT, PROMPT[::-1]]
    step = Each(lambda count: strength.update(value=3.0 if count < 90 else 2.0))
    for answer in ask_all(cache, prompts, 100, stopping_criteria=[step]):
        assert answer.report.saved_blocks == 0, "it had changed before the first save"
    for prompt in prompts:
        turn = prompt + some_prompt(40)
        answer = ask(cache, turn, 100)
        assert answer.token_ids == plain_answer(model, turn, 100)
        assert answer.report.saved_blocks == len(turn) // 64, "the prompt, and none of the answer"


# What a model may not become ---------------------------------------------------------------------------------------


def test_a_model_that_can_no_longer_be_served_is_refused_by_one_line(store: EmbeddedStore) -> None:
    """As is one that is compiled meanwhile (test_hf_matrix.py)."""
    model = small_model()
    cache = cache_of(model, store)
    ask(cache, PROMPT, 1)
    model.train()
    with refused("training mode"):
        ask(cache, PROMPT, 1)


def test_autocast_around_a_call_is_another_namespace(store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    before, _ = answers(cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask(cache, PROMPT, 6).report.restored_tokens == 0
        assert ask(cache, PROMPT, 6).report.restored_tokens == 256
    assert answers(cache) == (before, 256)


@pytest.mark.parametrize("change", ["eager attention", "bfloat16"])
def test_a_model_that_computes_otherwise_goes_on_in_another_namespace(change: str, store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    answers(cache)
    if change == "bfloat16":
        model.to(torch.bfloat16)
    else:
        model.set_attn_implementation("eager")
    assert answers(cache)[1] == 0 and answers(cache)[1] == 256
    assert cache.layout.groups[0].dtype == str(model.dtype).removeprefix("torch.")


# What it costs ------------------------------------------------------------------------------------------------------


def test_a_plain_model_is_probed_once_and_again_when_its_time_is_over(store: EmbeddedStore) -> None:
    cache = cache_of(small_model(), store)
    now = _clock_of(cache)
    assert cache._watch.probes == 1
    for _ in range(3):
        answers(cache)
    assert cache._watch.probes == 1, "running the model is no change"
    now[0] += PROBE_SECONDS + 1
    for _ in range(3):
        answers(cache)
    assert cache._watch.probes == 2


def test_another_process_and_another_number_of_threads_find_the_same_identity() -> None:
    """And transformers' own way of calling the model before: it leaves hooks of its own behind."""
    script = (
        "import sys, torch; torch.set_num_threads(int(sys.argv[1]))\n"
        "from engine_adapter.hf_cache import PrefixCache\n"
        "from hf_models import Adapted, replace_linear, small_model\n"
        "model = small_model()\n"
        "if sys.argv[2] == 'adapted':\n"
        "    torch.manual_seed(5)\n"
        "    replace_linear(model, 'model.layers.1.mlp.down_proj', Adapted)\n"
        "    model.model.layers[0].register_forward_hook(lambda module, given, output: None)\n"
        "model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=False)\n"
        "print(PrefixCache(model)._identity)"
    )
    for kind in ("plain", "adapted"):
        found = {run_python(script, threads, kind, timeout=300) for threads in (1, 3)}
        assert len(found) == 1 and ("is_plain=True" in found.pop()) is (kind == "plain")


# Copies, and edits that nothing shows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_inside", ["alone", "in a list", "in its model"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_by_one_line(how: Callable[[Any], object], is_inside: str, store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    model.cache = cache
    copied = {"alone": cache, "in a list": [cache], "in its model": model}[is_inside]
    if how is copy.copy and is_inside != "alone":
        how(copied)  # it is the same cache
        return
    with pytest.raises(TypeError) as refused:
        how(copied)
    line = str(refused.value)
    assert "copied" in line and "pickled" in line and "PrefixCache(model, store)" in line and "\n" not in line


@pytest.mark.parametrize("how", ["data", "numpy"])
@pytest.mark.parametrize("then", ["add_(0)", "a new cache"])
def test_after_an_edit_that_nothing_shows_what_is_to_be_called_helps(how: str, then: str, store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    answers(cache)
    weight = model.model.embed_tokens.weight
    if how == "data":
        weight.data[PROMPT[10]] += 3
    else:
        weight.detach().numpy()[PROMPT[10]] += 3
    if then == "add_(0)":
        with torch.no_grad():
            weight.add_(0)
    else:
        cache = cache_of(model, store)
    assert answers(cache)[1] == 0
