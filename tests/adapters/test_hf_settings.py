"""Settings of a model's generation config: every one is applied as transformers applies it, or refused by name."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.errors import BadInput

transformers = pytest.importorskip("transformers")

from transformers import GenerationConfig  # noqa: E402

from engine_adapter.hf.sampling import Sampling  # noqa: E402
from engine_adapter.hf.settings import (  # noqa: E402
    APPLIED,
    APPLIED_TO_DRAWS,
    REFUSED,
    SAID_BY_ARGUMENTS,
    WITHOUT_EFFECT,
    check_settings,
    chooser_of,
)
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import plain_answer, small_model, some_prompt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = some_prompt(90)
NEW_TOKENS = 24


def test_every_field_that_transformers_has_is_in_exactly_one_table() -> None:
    tables = [APPLIED, APPLIED_TO_DRAWS, SAID_BY_ARGUMENTS, frozenset(REFUSED), WITHOUT_EFFECT]
    for name in vars(GenerationConfig()):
        if name.startswith("_"):  # where it came from
            continue
        assert sum(name in table for table in tables) == 1, f"{name} is in no table, or in several"


def test_a_field_that_nobody_knows_yet_is_refused_by_name() -> None:
    class Newer(GenerationConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.sharpen = given.get("sharpen")

    check_settings(Newer())
    with pytest.raises(BadInput, match=r"sharpen=0\.5, which PrefixCache does not know; set it to None") as caught:
        check_settings(Newer(sharpen=0.5))
    assert "\n" not in str(caught.value)
    check_settings(GenerationConfig(chat_format="chatml"))  # a note of the model's that transformers reads nowhere


ODD: dict[str, Any] = {
    "num_beams": 3,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "max_time": 5.0,
    "stop_strings": ["END"],
    "guidance_scale": 2.0,
    "token_healing": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": ["x"],
    "force_words_ids": [[5]],
    "is_assistant": True,
    "assistant_ensemble_weight": 0.5,
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_applied_is_refused_by_name(name: str) -> None:
    model = small_model()
    cache = PrefixCache(model)
    idle, _ = REFUSED[name]
    setattr(model.generation_config, name, ODD[name])
    with pytest.raises(BadInput, match=f"generation config has {name}=") as caught:
        cache.generate(PROMPT, max_new_tokens=2)
    assert "\n" not in str(caught.value)
    setattr(model.generation_config, name, idle)
    cache.generate(PROMPT, max_new_tokens=2)


GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "suppress_tokens": {},
    "begin_suppress_tokens": {},
    "bad_words_ids": {},
    "sequence_bias": {},
    "forced_bos_token_id": {"forced_bos_token_id": 77},
    "forced_eos_token_id": {"forced_eos_token_id": 78},
    "min_new_tokens": {"min_new_tokens": 20},
    "min_length": {"min_length": 110},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.9)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": transformers.WatermarkingConfig(bias=30.0)},
}
ALIKE_HERE = ("remove_invalid_values", "renormalize_logits", "forced_bos_token_id")
"""Of a greedy answer to this prompt they change nothing, in transformers neither."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APPLIED))
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = small_model()
    before = plain_answer(model, PROMPT, NEW_TOKENS)
    changes = dict(GREEDY[name])
    if name in ("suppress_tokens", "begin_suppress_tokens"):
        changes[name] = before[:3]
    elif name == "bad_words_ids":
        changes[name] = [before[:1], before[2:4]]
    elif name == "sequence_bias":
        changes[name] = [[before[1:3], -60.0], [[9], 4.0]]
    elif name in ("min_new_tokens", "min_length", "exponential_decay_length_penalty"):
        changes["eos_token_id"] = 400 if name == "exponential_decay_length_penalty" else before[5]
        model.generation_config.eos_token_id = changes["eos_token_id"]
        before = plain_answer(model, PROMPT, NEW_TOKENS)
    for field, value in changes.items():
        setattr(model.generation_config, field, value)
    expected = plain_answer(model, PROMPT, NEW_TOKENS)
    assert (expected != before) is (name not in ALIKE_HERE), "this setting changes nothing: nothing would be noticed"
    with kvstore.open(f"embedded:{tmp_path}", dram="16MiB") as store:
        cache = PrefixCache(model, store, codec="raw", chunk_tokens=64)
        other = some_prompt(70)
        for _ in range(2):
            alone = cache.generate(PROMPT, max_new_tokens=NEW_TOKENS)
            assert alone.token_ids == expected
            both = cache.generate_batch([other, PROMPT], max_new_tokens=NEW_TOKENS)
            assert both[1].token_ids == expected
            assert both[0].token_ids == plain_answer(model, other, NEW_TOKENS)
        assert alone.report.restored_tokens == 64


def test_a_prompt_of_one_token_is_forced_to_begin_as_transformers_begins_it() -> None:
    model = small_model(vocab_size=512)
    model.generation_config.forced_bos_token_id = 77
    answer = PrefixCache(model).generate([5], max_new_tokens=3).token_ids
    assert answer == plain_answer(model, [5], 3) and answer[0] == 77


DRAWS: dict[str, Any] = {
    "top_k": 2,
    "min_p": 0.3,
    "top_h": 0.3,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.99,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APPLIED_TO_DRAWS))
def test_draws_are_those_of_transformers(name: str) -> None:
    """From the same random numbers: a batch of one draws one number per token in both."""
    model = small_model()
    options = {"do_sample": True, "temperature": 3.0, "top_p": 0.95, "top_k": 0}
    torch.manual_seed(7)
    free = plain_answer(model, PROMPT, NEW_TOKENS, **options)
    setattr(model.generation_config, name, DRAWS[name])
    torch.manual_seed(7)
    expected = plain_answer(model, PROMPT, NEW_TOKENS, **{**options, "top_k": model.generation_config.top_k or 0})
    assert expected != free, "this setting changes nothing: nothing would be noticed"
    torch.manual_seed(7)
    drawn = PrefixCache(model).generate(PROMPT, max_new_tokens=NEW_TOKENS, sampling=Sampling(3.0, 0.95))
    assert drawn.token_ids == expected
    greedy = PrefixCache(model).generate(PROMPT, max_new_tokens=4)
    assert greedy.token_ids == plain_answer(model, PROMPT, 4), "of a greedy answer it changes nothing"


def test_fields_without_effect_change_no_token() -> None:
    model = small_model()
    expected = plain_answer(model, PROMPT, 6)
    cache = PrefixCache(model)
    odd: dict[str, Any] = {"use_cache": False, "early_stopping": True, "length_penalty": 2.0, "output_scores": True}
    odd |= {"pad_token_id": 500, "bos_token_id": 3, "prompt_lookup_num_tokens": 3, "cache_implementation": "static"}
    assert odd.keys() <= WITHOUT_EFFECT
    for name, value in odd.items():
        setattr(model.generation_config, name, value)
    assert cache.generate(PROMPT, max_new_tokens=6).token_ids == expected


def test_a_setting_that_makes_no_sense_gets_one_line() -> None:
    model = small_model()
    for name, value in (("repetition_penalty", -1.0), ("suppress_tokens", ["a"]), ("sequence_bias", [])):
        settings = GenerationConfig()
        setattr(settings, name, value)
        model.generation_config = settings
        with pytest.raises(BadInput, match="cannot be applied") as caught:
            PrefixCache(model).generate(PROMPT, max_new_tokens=1)
        assert "\n" not in str(caught.value)
    model.generation_config = GenerationConfig()
    with pytest.raises(BadInput, match="sampling of type dict"):
        PrefixCache(model).generate(PROMPT, max_new_tokens=1, sampling={"temperature": 1.0})  # type: ignore[arg-type]


def test_where_nothing_is_set_no_processor_runs() -> None:
    model = small_model()
    prompt = array("I", PROMPT)
    model.generation_config = GenerationConfig(
        repetition_penalty=1.0, no_repeat_ngram_size=0, top_k=50, temperature=0.6, do_sample=True, eos_token_id=2
    )
    assert chooser_of(model, prompt, 5, None, frozenset()).processors is None
    assert chooser_of(model, prompt, 5, Sampling(), frozenset()).processors is not None


def test_several_tokens_that_end_an_answer() -> None:
    model = small_model()
    answer = plain_answer(model, PROMPT, 8)
    model.generation_config.eos_token_id = [511, answer[4]]
    cache = PrefixCache(model)
    stopped = cache.generate(PROMPT, max_new_tokens=8)
    assert stopped.token_ids == plain_answer(model, PROMPT, 8) == answer[:5] and stopped.is_stopped
    assert cache.generate(PROMPT, max_new_tokens=8, stop_tokens=[]).token_ids == answer
