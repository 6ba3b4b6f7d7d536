"""Prompts in every form that users have them in, and padding that is never taken for a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node import EmbeddedStore

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from transformers import PreTrainedTokenizerFast  # noqa: E402

from engine_adapter.hf.inputs import prompts_of  # noqa: E402
from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import ask, ask_all, cache_of, refused, small_model, some_prompt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Settings:
    """A generation config that names padding and ends, and a configuration."""

    vocab_size = 512

    def __init__(self, pad: int | None = None, eos: Any = None) -> None:
        self.pad_token_id, self.eos_token_id = pad, eos


NOTHING = Settings()


def read(given: Any, mask: Any = None, settings: Settings = NOTHING) -> list[list[int]]:
    return [row.tolist() for row in prompts_of(given, mask, NOTHING, settings).rows]


def read_one(given: Any, mask: Any = None, settings: Settings = NOTHING) -> list[int]:
    (row,) = read(given, mask, settings)
    return row


PADDED = {
    "behind": ([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]], [[1, 1, 1, 0, 0], [1] * 5]),
    "in front": ([[0, 0, 5, 6, 7], [5, 6, 7, 8, 9]], [[0, 0, 1, 1, 1], [1] * 5]),
    "on both sides": ([[0, 5, 6, 7, 0], [5, 6, 7, 8, 9]], [[0, 1, 1, 1, 0], [1] * 5]),
}
FORMS = {
    "lists": lambda rows: rows,
    "a tensor": torch.tensor,
    "an int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "an array": np.array,
    "tensors in a list": lambda rows: [torch.tensor(row) for row in rows],
    "tuples": lambda rows: tuple(tuple(row) for row in rows),
}


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_takes_padding_away(side: str, form: str) -> None:
    rows, mask = PADDED[side]
    make: Any = FORMS[form]
    expected = [[5, 6, 7], [5, 6, 7, 8, 9]]
    assert read(make(rows), make(mask)) == expected
    assert read(make(rows), torch.tensor(mask).bool()) == expected
    assert read(make(rows), make(mask), Settings(pad=0)) == expected
    assert prompts_of(make(rows), make(mask), NOTHING, NOTHING).width == 5, "as wide as it came"


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", [Settings(0), Settings(0, 0), Settings(None, 0), Settings(None, [9, 0])], ids=vars)
def test_a_padded_matrix_without_a_mask_is_refused(side: str, form: str, settings: Settings) -> None:
    make: Any = FORMS[form]
    with refused("attention_mask"):
        read(make(PADDED[side][0]), settings=settings)


def test_a_row_of_a_padded_matrix_is_refused_too() -> None:
    for row in (torch.tensor([5, 6, 7, 0, 0]), [0, 5, 6], [[5, 0, 6]]):
        with refused("padding token 0"):
            read_one(row, settings=Settings(pad=0))
    assert read_one([5, 6, 0], [1, 1, 1], settings=Settings(pad=0)) == [5, 6, 0], "a mask says that it is meant"


def test_a_token_that_ends_prompts_is_padding_in_a_matrix_only() -> None:
    """Many tokenizers pad with the token that ends a text, and chats are full of it."""
    settings = Settings(pad=2, eos=[2, 7])
    assert read_one([2, 5, 2, 6, 2], settings=settings) == [2, 5, 2, 6, 2]
    assert read([[5, 2], [5, 6, 2]], settings=settings) == [[5, 2], [5, 6, 2]], "no rectangle, so nothing is padded"
    assert read([[5, 2, 6], [5, 6, 8]], settings=settings) == [[5, 2, 6], [5, 6, 8]]
    with refused("may be padding"):
        read([[5, 6, 2], [5, 6, 8]], settings=settings)


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), min_size=1, max_size=5), st.booleans(), st.data())
def test_whatever_was_padded_comes_back(prompts: list[list[int]], is_left: bool, data: st.DataObject) -> None:
    width = max(map(len, prompts)) + data.draw(st.integers(0, 3))
    gaps = [[0] * (width - len(prompt)) for prompt in prompts]
    rows = [gap + prompt if is_left else prompt + gap for prompt, gap in zip(prompts, gaps, strict=True)]
    ones = [[1] * len(prompt) for prompt in prompts]
    masks = [gap + one if is_left else one + gap for one, gap in zip(ones, gaps, strict=True)]
    assert read(torch.tensor(rows), torch.tensor(masks)) == prompts
    if any(gaps):
        with refused("attention_mask"):
            read(torch.tensor(rows), settings=Settings(pad=0))


@pytest.mark.parametrize(
    ("rows", "mask", "said"),
    [
        ([[5, 6, 7]], [[1, 0, 1]], "a hole"),
        ([[5, 6, 7]], [[0, 0, 0]], "0 everywhere"),
        ([[5, 6, 7]], [[1, 1]], "for 3 tokens"),
        ([[5, 6, 7]], [[1, 1, 1], [1, 1, 1]], "2 rows for 1 prompts"),
        ([[5, 6, 7]], [[1, 2, 1]], "other values than 0 and 1"),
        ([[5, 6, 7]], [[1, -1, 1]], "other values than 0 and 1"),
        ([[5, 6, 7]], [[0.0, 1.0, 1.0]], "type float64"),
        ([[5, 6, 7]], torch.zeros(1, 1, 3, 3), "of 4 dimensions"),
        ([[5, 6, 7]], 7, "attention_mask of type int"),
        ([[5, 6, 7]], torch.ones(1, 3, device="meta"), "device meta"),
        (torch.tensor(5), None, "of 0 dimensions"),
        (torch.zeros(2, 3, dtype=torch.long, device="meta"), None, "device meta"),
        ([torch.zeros(3, dtype=torch.long, device="meta")], None, "device meta"),
        ("a text", None, "of text"),
        (["a text"], None, "of text"),
        (7, None, "inputs of type int"),
        (None, None, "inputs of type NoneType"),
        ([], None, "no prompts"),
        ([[]], None, "empty"),
        ([[512]], None, "0 to 511"),
        ([None], None, "token ids"),
        ([[5.5, 6.0]], None, "token ids"),
        ([[-1]], None, "token ids"),
        (torch.zeros(2, 3), None, "token ids"),
    ],
)
def test_what_cannot_be_read_gets_one_line(rows: Any, mask: Any, said: str) -> None:
    with refused(said):
        read(rows, mask)


def test_one_prompt_in_any_form() -> None:
    tensor = torch.tensor([5, 6])
    for form in ([5, 6], (5, 6), tensor, tensor[None], np.array([[5, 6]]), [[5, 6]], range(5, 7)):
        assert read_one(form) == [5, 6]
    assert read_one(torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])) == [5, 6]
    assert read_one([0, 5, 6], [0, 1, 1]) == [5, 6]
    assert read(torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([7])])) == [[5, 6], [7]]
    assert read(iter([[5, 6], [7]])) == [[5, 6], [7]]


# With a model and a real tokenizer --------------------------------------------------------------------------------


def a_tokenizer(side: str) -> Any:
    """Of whole words, one for each token, padding with the first."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: hf)")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word_of(n): n for n in range(512)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", padding_side=side)
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def text_of(prompt: list[int]) -> str:
    return " ".join(map(word_of, prompt))


def word_of(token: int) -> str:
    return ("<pad>", "<unk>")[token] if token < 2 else f"w{token}"


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_tokenizers_return_is_answered_as_the_prompts_alone(side: str, store: EmbeddedStore) -> None:
    model, tokenizer = small_model(), a_tokenizer(side)
    model.generation_config.pad_token_id = 0
    prompts = [some_prompt(300), some_prompt(150), some_prompt(70)]
    alone = PrefixCache(model)
    expected = [ask(alone, prompt, 6).token_ids for prompt in prompts]
    cache = cache_of(model, store)
    saved = []
    for form in ("pt", "np", None):
        encoded = tokenizer([text_of(prompt) for prompt in prompts], padding=True, return_tensors=form)
        answers = ask_all(cache, encoded, 6)
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.report.prompt_tokens for answer in answers] == [300, 150, 70]
        output = cache.generate(**encoded, max_new_tokens=6, do_sample=False)
        assert output[:, 300:].tolist() == expected
        with refused("attention_mask"):
            ask_all(cache, encoded["input_ids"], 6)
        saved.append([answer.report.saved_blocks for answer in answers])
    assert saved == [[4, 2, 1], [0] * 3, [0] * 3], "whole blocks of the prompts, and none with padding"
    chat = [{"role": "user", "content": text_of(prompts[0])}]
    for options in (
        {},
        {"return_tensors": "pt"},
        {"return_tensors": "pt", "return_dict": True},
        {"return_dict": False},
    ):
        given = tokenizer.apply_chat_template(chat, tokenize=True, **options)
        answer = ask(cache, given, 6)
        assert answer.token_ids == expected[0] and answer.report.restored_tokens == 256
    ragged = tokenizer([text_of(prompt) for prompt in prompts])
    assert [answer.token_ids for answer in ask_all(cache, ragged, 6)] == expected
    with refused("extra_keys of type NoneType"):
        ask(cache, prompts[0], 1, extra_keys=None)


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("generate", {"sampling": object()}, "give it do_sample=True, temperature= and top_p="),
        ("generate", {"stop_tokens": [2]}, "give it eos_token_id="),
        ("generate", {"on_token": print}, "give it streamer="),
        ("generate", {"use_cache": False}, "use_cache=False"),
        ("generate", {"cache_implementation": "static"}, "cache_implementation='static'"),
        ("generate", {"max_tokens": 5}, "max_tokens"),
        ("generate", {"input_ids": [[1]]}, "and not as both"),
        ("prefill", {"max_new_tokens": 2}, "prefill takes one prompt of text, and no max_new_tokens"),
    ],
)
def test_arguments_that_are_not_taken_get_one_line(method: str, given: dict[str, Any], said: str) -> None:
    with refused(said):
        getattr(PrefixCache(small_model()), method)([1, 2], **given)


@pytest.mark.parametrize(("name", "said"), [("stream", "streamer="), ("generate_batch", r"generate\(prompts")])
def test_methods_of_before_name_what_is_there_in_their_place(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(PrefixCache(small_model()), name)


@pytest.mark.parametrize(
    "name",
    "pixel_values pixel_values_videos input_features inputs_embeds position_ids token_type_ids cache_position "
    "past_key_values adapter_names".split(),
)
def test_what_is_no_token_id_is_refused_by_name(name: str) -> None:
    """What decides KV besides token ids: an attention_mask takes padding away (above), an adapter is its bytes
    (test_hf_adapters.py), `extra_keys` are the caller's bytes, and nothing else is taken."""
    cache = PrefixCache(small_model())
    for prompt, words in (({"input_ids": [[5, 6]], name: [[0, 1]]}, {}), ([5, 6], {name: [[0, 1]]})):
        with refused(rf"\b{name}\b"):
            ask(cache, prompt, 1, **words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store": "embedded:./kv"}, "PrefixCache: AttributeError: 'str' object"),
        ({"namespace": "mine"}, "PrefixCache: .* unexpected keyword argument 'namespace'"),
        ({"chunk_tokens": "64"}, "PrefixCache: TypeError"),
        ({"cache_size": 3}, "PrefixCache: .* unexpected keyword argument 'cache_size'"),
        ({"model": None}, "cannot serve a NoneType: AttributeError"),
        ({"chunk_tokens": 100}, "use 64"),
        ({"chunk_tokens": 0}, "use 64"),
        ({"kept": "all"}, "everything, whole_chunks"),
        ({"hbm": "lots"}, "hbm='lots'"),
        ({"codec": "zip"}, "codec 'zip'"),
    ],
)
def test_no_foreign_exception_leaves_the_constructor(given: dict[str, Any], said: str, store: EmbeddedStore) -> None:
    with refused(said):
        PrefixCache(**{"model": small_model(), "store": store, **given})
