"""What changes KV and is in no weight or configuration: a cache never serves what the model computed before."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kvstore.block.errors import BadInput
from kvstore.node import EmbeddedStore
from service.test_serve import PATHS

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from transformers.models.llama import modeling_llama  # noqa: E402

from engine_adapter.hf.watch import PROBE_SECONDS  # noqa: E402
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import Each, Scaled, ask, ask_all, plain_answer, replace_linear, small_model, some_prompt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = some_prompt(300)
DEEP = "model.layers.1.mlp.down_proj"


def cache_of(model: Any, store: Any = None, **options: Any) -> PrefixCache:
    return PrefixCache(model, store, **{"chunk_tokens": 128, "codec": "raw", **options})


def answers(cache: PrefixCache) -> tuple[list[int], int]:
    """Of the prompt: the tokens, and how many of the prompt's came from the store. The tokens are the model's own."""
    answer = ask(cache, PROMPT, 6)
    assert answer.token_ids == plain_answer(cache.model, PROMPT, 6)
    assert not answer.report.faults
    return answer.token_ids, answer.report.restored_tokens


# Changes that are made and taken back -----------------------------------------------------------------------------


@contextmanager
def a_hook(model: Any) -> Iterator[None]:
    handle = model.get_submodule(DEEP).register_forward_hook(lambda module, given, output: 2 * output)
    yield
    handle.remove()


@contextmanager
def a_hook_before(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].register_forward_pre_hook(lambda module, given: (given[0] + 1, *given[1:]))
    yield
    handle.remove()


@contextmanager
def a_hook_on_every_module(model: Any) -> Iterator[None]:
    def doubled(module: Any, given: Any, output: Any) -> Any:
        return 2 * output if module is model.get_submodule(DEEP) else None

    handle = torch.nn.modules.module.register_module_forward_hook(doubled)
    yield
    handle.remove()


@contextmanager
def a_patched_forward(model: Any) -> Iterator[None]:
    module = model.get_submodule(DEEP)
    module.forward = functools.partial(lambda inner, states: 3 * inner(states), module.forward)
    yield
    del module.forward


@contextmanager
def a_patched_function_of_the_library(model: Any) -> Iterator[None]:
    """Nothing of the model changes at all: only running it tells."""
    before = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *given, **named: before(q, k, sin, cos)
    yield
    modeling_llama.apply_rotary_pos_emb = before


@contextmanager
def a_patched_class(model: Any) -> Iterator[None]:
    before = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = lambda self, states: 2 * before(self, states)
    yield
    modeling_llama.LlamaMLP.forward = before


@contextmanager
def a_module_of_somebody_else(model: Any) -> Iterator[None]:
    inner = model.get_submodule(DEEP)
    replace_linear(model, DEEP, lambda linear: Scaled(linear, 1.0))
    yield
    replace_linear(model, DEEP, lambda scaled: inner)


@contextmanager
def another_rope(model: Any) -> Iterator[None]:
    """A buffer that is in no state dict."""
    before = model.model.rotary_emb.inv_freq.clone()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    yield
    model.model.rotary_emb.inv_freq.copy_(before)


@contextmanager
def weights_in_place(model: Any) -> Iterator[None]:
    weight = model.get_submodule(DEEP).weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[3] += 3
        yield
        weight.copy_(before)


@contextmanager
def weights_through_data(model: Any) -> Iterator[None]:
    """Without a trace in the version of the tensor, as some trainers and merges do it."""
    weight = model.get_submodule(DEEP).weight
    before = weight.detach().clone()
    weight.data.mul_(1.5)
    yield
    weight.data.copy_(before)


@contextmanager
def another_checkpoint(model: Any) -> Iterator[None]:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(small_model(seed=1).state_dict())
    yield
    model.load_state_dict(before)


@contextmanager
def another_tensor(model: Any) -> Iterator[None]:
    module = model.get_submodule(DEEP)
    before = module.weight
    module.weight = torch.nn.Parameter(1.5 * before.detach())
    yield
    module.weight = before


@contextmanager
def layers_in_another_order(model: Any) -> Iterator[None]:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
    yield
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


CHANGES: list[Callable[[Any], Any]] = [
    a_hook,
    a_hook_before,
    a_hook_on_every_module,
    a_patched_forward,
    a_patched_function_of_the_library,
    a_patched_class,
    a_module_of_somebody_else,
    another_rope,
    weights_in_place,
    weights_through_data,
    another_checkpoint,
    another_tensor,
    layers_in_another_order,
]
UNSEEN_BY_A_LOOK = (a_patched_function_of_the_library, a_patched_class)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_new_cache_on_a_changed_model_is_served_nothing_of_before(
    change: Callable[[Any], Any], store: EmbeddedStore
) -> None:
    model = small_model()
    before, none = answers(cache_of(model, store))
    assert not none and answers(cache_of(model, store)) == (before, 256)
    with change(model):
        changed, restored = answers(cache_of(model, store))
        assert changed != before, "this change changes nothing: nothing would be noticed"
        assert restored == 0
        assert answers(cache_of(model, store)) == (changed, 256), "it has a namespace of its own"
    assert answers(cache_of(model, store)) == (before, 256)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_cache_notices_that_its_model_was_changed(change: Callable[[Any], Any], store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store, hbm="4MiB")
    now = _clock_of(cache)
    before, _ = answers(cache)
    with change(model):
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
    model.get_submodule(DEEP).register_forward_hook(lambda module, given, output: strength["value"] * output)
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
        model.get_submodule(DEEP).register_forward_hook(late(start))
        config = dict(cache_of(model)._identity.config)
        seen.add((config["computes"], config["state"]))
    assert len(seen) == 2 and len({computes for computes, _ in seen}) == 1


def test_noise_is_refused() -> None:
    model = small_model()
    model.get_submodule(DEEP).register_forward_hook(lambda m, given, output: output + torch.rand_like(output))
    with pytest.raises(BadInput, match="does not compute the same KV twice") as caught:
        cache_of(model)
    assert "\n" not in str(caught.value)


def test_last_bits_that_vary_are_refused_with_a_hook_and_known_by_weights_without() -> None:
    model = small_model()

    def noisy(module: Any, given: Any, output: Any) -> Any:
        return output * (1 + 1e-7 * torch.randint(0, 3, output.shape))

    hooked = small_model()
    hooked.get_submodule(DEEP).register_forward_hook(noisy)
    with pytest.raises(BadInput, match="other last bits in every run"):
        cache_of(hooked)
    before = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = lambda self, states: noisy(self, None, before(self, states))
    try:
        assert "computes" not in dict(cache_of(model)._identity.config)
    finally:
        modeling_llama.LlamaMLP.forward = before


def test_kv_that_depends_on_what_comes_later_is_refused() -> None:
    """Activations scaled by the largest of a whole chunk, as per-tensor quantisation does it: a difference of a few
    thousandths, and a wrong one."""
    model = small_model()

    def quantized(module: Any, given: Any, output: Any) -> Any:
        scale = output.abs().max() / 127
        return (output / scale).round() * scale

    model.get_submodule(DEEP).register_forward_hook(quantized)
    with pytest.raises(BadInput, match="depends on the tokens behind it"):
        cache_of(model)


# During a request ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [weights_in_place, a_hook], ids=lambda change: change.__name__)
def test_what_is_computed_after_a_change_in_a_request_is_not_kept(
    change: Callable[[Any], Any], store: EmbeddedStore
) -> None:
    model = small_model()
    cache, changed = cache_of(model, store), ExitStack()
    with torch.no_grad(), changed:
        step = Each(lambda count: changed.enter_context(change(model)) if count == 3 else None)
        answer = ask(cache, PROMPT, 100, stopping_criteria=[step])
    assert answer.report.saved_blocks == 4 and answer.report.detail == "the model changed during the request"
    turn = PROMPT + answer.token_ids
    again = ask(cache, turn, 6)
    assert again.report.restored_tokens == 256
    assert again.token_ids == plain_answer(model, turn, 6)


def test_adapters_that_take_turns_within_a_request_leave_nothing(store: EmbeddedStore) -> None:
    model = small_model()
    scaled: Any = replace_linear(model, DEEP, lambda linear: Scaled(linear, 1.0))
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
            changed.enter_context(a_hook(model))
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
    model.get_submodule(DEEP).register_forward_hook(lambda module, given, output: strength["value"] * output)
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
    for change, said in (
        (lambda model: model.train(), "training mode"),
        (
            lambda model: setattr(model.model.layers[1], "_compiled_call_impl", lambda *given: None),
            "torch.compile works",
        ),
    ):
        model = small_model()
        cache = cache_of(model, store)
        ask(cache, PROMPT, 1)
        change(model)
        with pytest.raises(BadInput, match=said) as caught:
            ask(cache, PROMPT, 1)
        assert "\n" not in str(caught.value)


def test_autocast_around_a_call_is_another_namespace(store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    before, _ = answers(cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask(cache, PROMPT, 6).report.restored_tokens == 0
        assert ask(cache, PROMPT, 6).report.restored_tokens == 256
    assert answers(cache) == (before, 256)


def test_another_attention_is_another_namespace(store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    answers(cache)
    model.set_attn_implementation("eager")
    assert answers(cache)[1] == 0
    assert answers(cache)[1] == 256


def test_a_model_that_is_cast_goes_on_in_another_namespace(store: EmbeddedStore) -> None:
    model = small_model()
    cache = cache_of(model, store)
    answers(cache)
    model.to(torch.bfloat16)
    assert answers(cache)[1] == 0 and answers(cache)[1] == 256
    assert cache.layout.groups[0].dtype == "bfloat16"


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
        "from hf_models import Each, Scaled, replace_linear, small_model\n"
        "model = small_model()\n"
        "if sys.argv[2] == 'adapted':\n"
        "    torch.manual_seed(5)\n"
        "    replace_linear(model, 'model.layers.1.mlp.down_proj', lambda linear: Scaled(linear, 1.0))\n"
        "    model.model.layers[0].register_forward_hook(lambda module, given, output: None)\n"
        "model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=False)\n"
        "print(PrefixCache(model)._identity)"
    )
    for kind in ("plain", "adapted"):
        found = {
            subprocess.run(
                [sys.executable, "-c", script, threads, kind],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
                env={**os.environ, **PATHS},
            ).stdout
            for threads in ("1", "3")
        }
        assert len(found) == 1 and ("is_plain=True" in found.pop()) is (kind == "plain")
