"""Every way in which transformers decodes: the same tokens as `model.generate` gives, cold and from a hit."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from kvstore.node import EmbeddedStore

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from transformers import GenerationConfig, LogitsProcessor, TextIteratorStreamer  # noqa: E402

from adapters.test_hf_inputs import a_tokenizer  # noqa: E402
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import Each, ask, plain_answer, small_model, some_prompt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = some_prompt(150)
NEW_TOKENS = 24


class Shifted(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(1, dims=-1)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 40},
    "the model's own settings": {"generation_config": GenerationConfig(do_sample=True, temperature=2.0, min_p=0.01)},
    "beams": {"num_beams": 3, "do_sample": False},
    "drawn beams": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "drafts from the prompt": {"prompt_lookup_num_tokens": 4, "do_sample": False},
    "drafts of a model": {"assistant_model": "small", "do_sample": False},
    "penalties": {"repetition_penalty": 1.8, "encoder_no_repeat_ngram_size": 2, "do_sample": False},
    "an end": {"eos_token_id": 7, "min_new_tokens": 10, "do_sample": True},
    "guidance": {"guidance_scale": 1.5, "do_sample": False},
    "scores of the user": {"logits_processor": [Shifted()], "do_sample": False},
    "all that is to be had": {"return_dict_in_generate": True, "output_scores": True, "do_sample": False},
}


@pytest.mark.parametrize(
    ("way", "rows"), [(way, rows) for way in WAYS for rows in ([1] if "drafts" in way else [1, 2])]
)
def test_each_way_to_decode_is_transformers_own(way: str, rows: int, store: EmbeddedStore) -> None:
    """Of several prompts at once transformers itself checks no drafts."""
    model, given = small_model(), {"pad_token_id": 0, "max_new_tokens": NEW_TOKENS, **WAYS[way]}
    if "assistant_model" in given:
        given["assistant_model"] = small_model(seed=1)
    if "generation_config" in given:
        given = {"generation_config": given["generation_config"]}
        given["generation_config"].update(max_new_tokens=NEW_TOKENS, pad_token_id=0)
    ids = torch.tensor([PROMPT, some_prompt(150, seed=1)][:rows])
    cache = PrefixCache(model, store, codec="raw", chunk_tokens=64)
    torch.manual_seed(7)
    expected: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    for restored in (0, 128):
        torch.manual_seed(7)
        output = cache.generate(ids, attention_mask=torch.ones_like(ids), **given)
        assert [report.restored_tokens for report in cache.reports] == [restored] * rows
        assert type(output) is type(expected)
        if way == "all that is to be had":
            assert len(output.scores) == NEW_TOKENS
            output, wanted = output.sequences, expected.sequences
        else:
            wanted = expected
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("way", ["greedy", "several answers", "drafts from the prompt"])
def test_the_next_turn_hits_what_was_answered(way: str, store: EmbeddedStore) -> None:
    model, cache = small_model(), PrefixCache(small_model(), store, codec="raw", chunk_tokens=64)
    outputs = cache.generate(PROMPT, max_new_tokens=120, **WAYS[way])
    for output in outputs:
        turn = output.tolist() + some_prompt(30)
        answer = ask(cache, turn, 6)
        assert answer.report.restored_tokens == 256 and answer.token_ids == plain_answer(model, turn, 6)


def test_a_streamer_gets_each_token_while_it_is_generated(store: EmbeddedStore) -> None:
    model, tokenizer = small_model(), a_tokenizer("left")
    cache = PrefixCache(model, store, codec="raw")
    encoded = tokenizer(" ".join(f"w{token}" for token in range(10, 310)), return_tensors="pt")
    for _ in range(2):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        given = {**encoded, "streamer": streamer, "max_new_tokens": 8, "do_sample": False}
        thread = Thread(target=cache.generate, kwargs=given)
        thread.start()
        said = "".join(streamer)
        thread.join()
        expected = plain_answer(model, encoded["input_ids"][0].tolist(), 8)
        assert said.split() == tokenizer.decode(expected).split()
    assert cache.report.restored_tokens == 256


def test_criteria_of_the_user_end_an_answer_and_errors_are_transformers_own(store: EmbeddedStore) -> None:
    model = small_model()
    cache, expected = PrefixCache(model, store), plain_answer(model, PROMPT, 12)
    with pytest.raises(ValueError, match="stop strings"):
        ask(cache, PROMPT, 12, stop_strings=["."])
    assert ask(cache, PROMPT, 12, stopping_criteria=[Each(lambda count: count == 3)]).token_ids == expected[:3]


def test_settings_that_are_about_caches_are_the_adapters(store: EmbeddedStore) -> None:
    model = small_model()
    expected = plain_answer(model, PROMPT, 6)
    cache = PrefixCache(model, store, codec="raw")
    model.generation_config.use_cache = False
    model.generation_config.cache_implementation = "static"
    for restored in (0, 128):
        answer = ask(cache, PROMPT, 6)
        assert answer.token_ids == expected and answer.report.restored_tokens == restored
