"""A cache that is copied or pickled says what to do instead; after an edit that nothing shows, what docs name helps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.node import EmbeddedStore

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
from hf_models import PROMPT, answers, cache_of, small_model

pytestmark = pytest.mark.usefixtures("one_thread")


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
