"""Prompts as users have them: lists, arrays, tensors, and what a tokenizer returns, with or without padding.

    input_ids        0 0 5 6 7        padded in front: a prompt of three tokens
    attention_mask   0 0 1 1 1
    input_ids        5 6 7 0 0        padded behind: the same prompt
    attention_mask   1 1 1 0 0

Imports torch only. Must never take padding for a prompt: where nothing says which tokens are padding, it is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from operator import index
from typing import Any, TypeVar, cast

import numpy as np
import torch

from kvstore.block.errors import BadInput
from kvstore.block.identity import token_bytes

MAX_NEW_TOKENS = 1 << 31
F = TypeVar("F", bound=Callable[..., Any])

_WITHOUT_EFFECT = frozenset(
    "length special_tokens_mask offset_mapping num_truncated_tokens overflow_to_sample_mapping assistant_masks".split()
)
"""What else a tokenizer may return; none of it goes into a model."""


def prompts_of(given: Any, attention_mask: Any, config: Any, generation_config: Any) -> list[array[int]]:
    """Several prompts without their padding. given: a sequence or a matrix of token ids, or what a tokenizer returned.

    Raises `BadInput`, with one line.
    """
    given, attention_mask = _unpacked(given, attention_mask)
    rows = _rows(given, "prompts")
    if not rows:
        raise BadInput("there are no prompts; give one or more")
    masks = _masks(attention_mask, len(rows))
    pads = _Pads(config, generation_config)
    pairs = [_unpacked(row, mask) for row, mask in zip(rows, masks, strict=True)]
    tokens = [array("I", token_bytes(_alone(_on_host(row)))) for row, _ in pairs]
    is_matrix = len(tokens) > 1 and len({len(row) for row in tokens}) == 1
    found = []
    for number, (row, (_, mask)) in enumerate(zip(tokens, pairs, strict=True)):
        if mask is None:
            pads.check(row, is_matrix)
            found.append(row)
        else:
            found.append(_unpadded(row, mask, number))
    return found


def prompt_of(given: Any, attention_mask: Any, config: Any, generation_config: Any) -> list[array[int]]:
    """One prompt, as a list of one: one dimension, or a matrix of one row."""
    given, attention_mask = _unpacked(given, attention_mask)
    if _is_flat(given, "a prompt"):
        given = [given]
    elif len(given) > 1:
        raise BadInput(f"generate takes one prompt, and these are {len(given)} rows of token ids; use generate_batch")
    if attention_mask is not None and _is_flat(attention_mask, "attention_mask"):
        attention_mask = [attention_mask]
    return prompts_of(given, attention_mask, config, generation_config)


def names_its_words(method: F) -> F:
    """A method that is called as transformers' own: `BadInput` says what it takes where other words are given."""
    taken = signature(method)
    words = f"it takes {', '.join([*taken.parameters][1:])}; other settings are those of model.generation_config"

    @wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            taken.bind(*args, **given)
        except TypeError as error:
            raise BadInput(f"PrefixCache.{method.__name__}: {error}; {words}, and sampling= draws tokens") from None
        return method(*args, **given)

    return cast(F, checked)


def checked_new_tokens(given: Any) -> int:
    """How many tokens to generate, as a whole number."""
    try:
        if isinstance(given, bool):
            raise TypeError
        count = index(given)
    except TypeError:
        raise BadInput(f"max_new_tokens={given!r}; give a whole number, 1 or more") from None
    if not 1 <= count < MAX_NEW_TOKENS:
        raise BadInput(f"max_new_tokens={count}; give 1 or more, and less than {MAX_NEW_TOKENS}")
    return count


def checked_stop_tokens(given: Any) -> frozenset[int]:
    """Token ids that end an answer: none, one, or several."""
    if given is None:
        return frozenset()
    many = [given] if _is_number(given) else given
    try:
        return frozenset(index(token) for token in many)
    except TypeError:
        raise BadInput(f"stop_tokens of type {type(given).__name__}; give token ids, e.g. stop_tokens=[2]") from None


# Inside -------------------------------------------------------------------------------------------------------------


def _unpacked(given: Any, attention_mask: Any) -> tuple[Any, Any]:
    if not isinstance(given, Mapping):
        return given, attention_mask
    if "input_ids" not in given:
        raise BadInput(f"a prompt with the keys {', '.join(map(str, given))}; it needs input_ids")
    for name, value in given.items():
        if name in ("input_ids", "attention_mask") or name in _WITHOUT_EFFECT or value is None:
            continue
        if name == "token_type_ids" and not any(np.any(_array(row)) for row in value):
            continue
        raise BadInput(f"a prompt with {name}: PrefixCache serves token ids alone; leave it out")
    if given.get("attention_mask") is None:
        return given["input_ids"], attention_mask
    if attention_mask is not None:
        raise BadInput("attention_mask is given, and the prompts bring one of their own; leave one of them out")
    return given["input_ids"], given["attention_mask"]


def _is_flat(given: Any, what: str) -> bool:
    if isinstance(given, torch.Tensor | np.ndarray):
        return int(_with_dimension(given, what).ndim) == 1
    if isinstance(given, bytes | bytearray | memoryview):
        return True
    if isinstance(given, str) or (isinstance(given, Sequence) and len(given) and isinstance(given[0], str)):
        raise BadInput(f"{what} of text; give token ids, e.g. what tokenizer(text) returns")
    if not isinstance(given, Sequence | array):
        raise BadInput(f"{what} of type {type(given).__name__}; give a sequence of token ids")
    return not len(given) or _is_number(given[0])


def _rows(given: Any, what: str) -> list[Any]:
    if isinstance(given, torch.Tensor):
        given = _with_dimension(_on_host(given), what)
        if given.is_nested:
            return list(given.unbind())
    if isinstance(given, Iterable) and not isinstance(given, str | Sequence | np.ndarray):
        given = list(given)
    if _is_flat(given, what) and len(given):
        raise BadInput(f"{what}: one row where several are meant; give one prompt to generate, or [prompt] here")
    return list(given)


def _with_dimension(given: Any, what: str) -> Any:
    if not given.ndim:
        raise BadInput(f"{what} without a dimension; give a sequence of token ids")
    return given


def _masks(given: Any, rows: int) -> list[Any]:
    if given is None:
        return [None] * rows
    masks = _rows(given, "attention_mask")
    if len(masks) != rows:
        raise BadInput(f"attention_mask has {len(masks)} rows for {rows} prompts; give one row to each")
    return masks


def _unpadded(row: array[int], given: Any, number: int) -> array[int]:
    mask = _alone(_array(given))
    if mask.ndim != 1 or len(mask) != len(row) or mask.dtype.kind not in "biu":
        raise BadInput(
            f"attention_mask of prompt {number} has shape {mask.shape} and type {mask.dtype} for {len(row)} tokens; "
            "give a 0 or a 1 for each token"
        )
    if mask.size and (mask.astype(np.int64) & ~1).any():
        raise BadInput(
            f"attention_mask of prompt {number} has other values than 0 and 1; give a 0 or a 1 for each token"
        )
    kept = np.flatnonzero(mask)
    if not len(kept):
        raise BadInput(f"attention_mask of prompt {number} is 0 everywhere; a prompt needs at least one token")
    first, stop = int(kept[0]), int(kept[-1]) + 1
    if stop - first != len(kept):
        raise BadInput(
            f"attention_mask of prompt {number} has a hole; a prompt is one run of ones, with zeros before or behind it"
        )
    return row[first:stop]


class _Pads:
    """Which token ids a model's settings call padding."""

    def __init__(self, config: Any, generation_config: Any) -> None:
        pad = getattr(generation_config, "pad_token_id", None)
        if pad is None:
            pad = getattr(config, "pad_token_id", None)
        ends = set(checked_stop_tokens(getattr(generation_config, "eos_token_id", None)))
        self._pad = None if pad is None or pad < 0 or pad in ends else int(pad)
        self._maybe = ends | (set() if pad is None else {int(pad)})

    def check(self, row: array[int], is_matrix: bool) -> None:
        """Refuse a prompt without a mask that contains the padding token; in a matrix, also one that begins or ends
        with a token that may be padding, as end-of-sequence tokens often are."""
        if self._pad is not None and self._pad in row:
            raise BadInput(
                f"a prompt has the padding token {self._pad} in it and there is no attention_mask; pass the one that "
                "the tokenizer returned, or one of ones if that token is meant"
            )
        if is_matrix and row and (row[0] in self._maybe or row[-1] in self._maybe):
            end = row[0] if row[0] in self._maybe else row[-1]
            raise BadInput(
                f"prompts of one length, and one has token {end} at an end, which may be padding, and there is no "
                "attention_mask; pass the one that the tokenizer returned"
            )


def _on_host(given: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        return given
    if given.device.type == "meta":
        raise BadInput("token ids on the device meta, which holds no numbers; give them in memory")
    return given.detach().cpu()


def _array(given: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(_on_host(given))
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"an attention_mask of type {type(given).__name__} that cannot be read; give 0 and 1") from None


def _alone(given: Any) -> Any:
    if isinstance(given, torch.Tensor | np.ndarray):
        return given[0] if given.ndim == 2 and len(given) == 1 else given
    if isinstance(given, list | tuple) and len(given) == 1 and not _is_number(given[0]):
        return given[0]
    return given


def _is_number(given: Any) -> bool:
    if isinstance(given, torch.Tensor | np.ndarray):
        return not given.ndim
    return isinstance(given, int | float | np.generic)
