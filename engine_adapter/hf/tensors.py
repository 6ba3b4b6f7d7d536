"""The plain tensors that a quantised weight is made of. Imports torch only."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from kvstore.block.errors import BadInput

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


MAX_NESTED = 8
"""Wrappers within each other; torchao has two."""


def plain_tensors(name: str, tensor: torch.Tensor, nested: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own that this one wraps, by name; the name includes the wrapper's context for
    them. The tensor itself where it wraps none.

    Quantisation libraries subclass torch.Tensor, and such tensors cannot be viewed as bytes; torch's own protocol for
    these subclasses, which torch.compile needs too, names the tensors inside. Raises `BadInput` where one has no names.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    try:
        inner_names, context = tensor.__tensor_flatten__()
        held = {inner: getattr(tensor, inner) for inner in inner_names}
        if nested == MAX_NESTED or not all(isinstance(one, torch.Tensor | None) for one in held.values()):
            raise TypeError
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise unreadable(name, tensor, error) from error
    said = _ADDRESS.sub("", str(context))
    for inner, one in held.items():
        if one is not None:
            yield from plain_tensors(f"{name}.{inner} of {type(tensor).__name__} {said}", one, nested + 1)


def unreadable(name: str, tensor: torch.Tensor, error: Exception) -> BadInput:
    return BadInput(
        f"the weight {name} is a {type(tensor).__name__} that cannot be read "
        f"({type(error).__name__}): what it computes cannot be told from other weights"
    )
