"""Tensors as plain memory: those that a quantised weight is made of. Imports torch only."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from kvstore.block.errors import BadInput

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own that this one wraps, by name, with what the wrapper says of them in the
    name; the tensor itself where it wraps none.

    Libraries of quantisation subclass torch.Tensor and refuse to be seen as bytes; torch's own protocol for such
    subclasses, which torch.compile needs too, names the tensors inside. Raises `BadInput` where one has no such names.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    try:
        inner_names, context = tensor.__tensor_flatten__()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise BadInput(
            f"the weight {name} is a {type(tensor).__name__} that cannot be read "
            f"({type(error).__name__}): what it computes cannot be told from other weights"
        ) from error
    said = _ADDRESS.sub("", str(context))
    for inner in inner_names:
        held = getattr(tensor, inner)
        if held is not None:
            yield from plain_tensors(f"{name}.{inner} of {type(tensor).__name__} {said}", held)
