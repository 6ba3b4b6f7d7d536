"""What users give to `generate`: lists, arrays, tensors, and what a tokenizer returns, with or without padding.

    input_ids        0 0 5 6 7        padded in front: a prompt of three tokens
    attention_mask   0 0 1 1 1
    input_ids        5 6 7 0 0        padded behind: the same prompt
    attention_mask   1 1 1 0 0

Imports torch only. Must never take padding for a prompt: where nothing says which tokens are padding, it is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from kvstore.block.errors import BadInput
from kvstore.block.identity import token_bytes

_WITHOUT_EFFECT = frozenset(
    "length special_tokens_mask offset_mapping num_truncated_tokens overflow_to_sample_mapping assistant_masks".split()
)
"""What else a tokenizer may return; none of it goes into a model."""

_OF_PICTURES = frozenset("pixel_values image_grid_thw image_sizes mm_token_type_ids token_type_ids".split())
"""Tensors of images, and what says where they stand."""

_GONE = {
    "sampling": "do_sample=True, temperature= and top_p=",
    "stop_tokens": "eos_token_id=",
    "on_token": "streamer=",
    "prompt": "inputs",
    "prompts": "inputs",
}
"""Arguments of before, and transformers' own in their place."""

_NOT_TAKEN = {
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "custom_generate": (None,),
    "use_mtp": (None, False),
}
"""Arguments of `model.generate` that a prefix cache leaves no choice for, and what they may be."""


@dataclass(frozen=True)
class Prompts:
    """Token ids without padding; width: of the matrix that `generate` continues, all prompts at its right end."""

    rows: list[array[int]]
    width: int

    def pictures_end(self, token: int | None) -> int:
        """Behind the last token that stands for a picture; 0 where that cannot be told of these prompts."""
        if len(self.rows) != 1 or token is None or token not in self.rows[0]:
            return 0
        return len(self.rows[0]) - self.rows[0][::-1].index(token)

    def matrix(self, pad_token: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and their mask, [rows, width]."""
        token_ids = torch.full((len(self.rows), self.width), pad_token)
        mask = torch.zeros_like(token_ids)
        for row, tokens in enumerate(self.rows):
            token_ids[row, -len(tokens) :] = torch.from_numpy(np.asarray(tokens).astype(np.int64))
            mask[row, -len(tokens) :] = 1
        return token_ids.to(device), mask.to(device)


def prompts_of(given: Any, attention_mask: Any, config: Any, generation_config: Any) -> Prompts:
    """One prompt or several, as a sequence or a matrix of token ids. Raises `BadInput`, with one line."""
    rows = _rows(given, "inputs")
    if not rows:
        raise BadInput("there are no prompts; give one or more")
    masks = [None] * len(rows) if attention_mask is None else _rows(attention_mask, "attention_mask")
    if len(masks) != len(rows):
        raise BadInput(f"attention_mask has {len(masks)} rows for {len(rows)} prompts; give one row to each")
    ends = token_set(getattr(generation_config, "eos_token_id", None))
    pads = [token_set(getattr(one, "pad_token_id", None)) for one in (generation_config, config)]
    tokens = [array("I", token_bytes(_on_host(row))) for row in rows]
    width, is_matrix = max(map(len, tokens)), len(tokens) > 1 and len({len(row) for row in tokens}) == 1
    found = []
    for number, (row, mask) in enumerate(zip(tokens, masks, strict=True)):
        if mask is None:
            _check_unmasked(row, is_matrix, {pad for pad in pads[0] or pads[1] if pad >= 0}, ends)
        found.append(row if mask is None else _unpadded(row, mask, number))
        if not row:
            raise BadInput("a prompt is empty; give at least one token")
        if max(row) >= config.vocab_size:
            raise BadInput(f"a prompt has token id {max(row)}; the model knows 0 to {config.vocab_size - 1}")
    return Prompts(found, width)


def digests_of(pictures: Mapping[str, torch.Tensor]) -> list[bytes]:
    """What all pictures of a prompt show, as an extra key of it."""
    state = blake2b(digest_size=32, person=b"kv-pictures-v1")
    for name, one in sorted(pictures.items()):
        state.update(f"{name}{list(one.shape)}{one.dtype}".encode())
        state.update(one.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [state.digest()] if pictures else []


def checked_words(given: Mapping[str, Any], words: Collection[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Arguments for `model.generate`, and pictures. words: the names that it knows beside inputs of the model's forward
    pass, of which token ids and images are taken here. Raises `BadInput`, with one line that names the argument."""
    passed, pictures = {}, {}
    for name, value in given.items():
        if name in _GONE:
            raise BadInput(
                f"PrefixCache takes {name}= no longer: `generate` is transformers' own; give it {_GONE[name]}"
            )
        if name in _NOT_TAKEN and value not in _NOT_TAKEN[name]:
            raise BadInput(f"{name}={value!r}: PrefixCache brings the cache, so leave it out, or call model.generate")
        if name in words:
            passed[name] = value
        elif name in _OF_PICTURES and isinstance(value, torch.Tensor):
            pictures[name] = value
        elif value is not None and name not in _WITHOUT_EFFECT:
            if name != "token_type_ids" or any(np.any(_array(row)) for row in value):
                raise BadInput(f"{name}: PrefixCache takes token ids, images, and what `model.generate` has besides")
    return passed, pictures if "pixel_values" in pictures else {}


# Inside -------------------------------------------------------------------------------------------------------------


def _rows(given: Any, what: str) -> list[Any]:
    if isinstance(given, str) or (isinstance(given, list | tuple) and len(given) and isinstance(given[0], str)):
        raise BadInput(f"{what} of text; give token ids, e.g. what tokenizer(text) returns")
    if isinstance(given, torch.Tensor):
        given = _on_host(given)
        if given.is_nested:
            return list(given.unbind())
    if isinstance(given, torch.Tensor | np.ndarray):
        if given.ndim not in (1, 2):
            raise BadInput(f"{what} of {given.ndim} dimensions; give one row of numbers for each prompt")
        return list(given) if given.ndim == 2 else [given]
    if isinstance(given, bytes | bytearray | memoryview):
        return [given]
    if not isinstance(given, Iterable):
        raise BadInput(f"{what} of type {type(given).__name__}; give a sequence of token ids")
    given = given if isinstance(given, Sequence) else list(given)
    return [given] if len(given) and _is_number(given[0]) else list(given)


def _unpadded(row: array[int], given: Any, number: int) -> array[int]:
    mask, wrong = _array(given), ""
    kept = np.flatnonzero(mask)
    if mask.shape != (len(row),) or mask.dtype.kind not in "biu":
        wrong = f"has shape {mask.shape} and type {mask.dtype} for {len(row)} tokens; give a 0 or a 1 for each token"
    elif (mask.astype(np.int64) & ~1).any():
        wrong = "has other values than 0 and 1; give a 0 or a 1 for each token"
    elif not len(kept):
        wrong = "is 0 everywhere; a prompt needs at least one token"
    elif kept[-1] + 1 - kept[0] != len(kept):
        wrong = "has a hole; a prompt is one run of ones, with zeros before or behind it"
    if wrong:
        raise BadInput(f"attention_mask of prompt {number} {wrong}")
    return row[kept[0] : kept[-1] + 1]


def token_set(given: Any) -> set[int]:
    """Token ids of a setting: none, one, or several."""
    return set() if given is None else {int(token) for token in np.atleast_1d(_array(given))}


def _check_unmasked(row: array[int], is_matrix: bool, pads: set[int], ends: set[int]) -> None:
    """Refuse a prompt without a mask that contains the padding token; in a matrix, also one that begins or ends with a
    token that may be padding, as end-of-sequence tokens often are."""
    if found := (pads - ends).intersection(row):
        raise BadInput(
            f"a prompt has the padding token {found.pop()} in it and there is no attention_mask; pass the one that the "
            "tokenizer returned, or one of ones if that token is meant"
        )
    if is_matrix and (maybe := (pads | ends).intersection((*row[:1], *row[-1:]))):
        raise BadInput(
            f"prompts of one length, and one has token {maybe.pop()} at an end, which may be padding, and there is no "
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


def _is_number(given: Any) -> bool:
    if isinstance(given, torch.Tensor | np.ndarray):
        return not given.ndim
    return isinstance(given, int | float | np.generic)
