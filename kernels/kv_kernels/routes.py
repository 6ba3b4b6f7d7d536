"""Which route moves blocks between these pages and a payload (floor 0).

    pages in host memory      raw    numpy, at memcpy speed (`host`)
                              8 bits loops compiled by numba (`int8_host`); plain torch where there is no numba
    pages on another device   plain torch (`reference`, `int8_plain`)

All routes of a codec write the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from logging import getLogger
from typing import Any

import numpy as np
import torch

from kv_kernels import host, int8_plain, reference
from kv_kernels.copies import Copy
from kv_kernels.int8 import SliceForm

try:
    from kv_kernels import int8_host, int8_loops
except ImportError:  # numba is an extra
    _HAS_LOOPS = False
else:
    _HAS_LOOPS = int8_loops.is_usable()

Planes = Sequence[Sequence[Any]]
"""Per layer slice, per plane, a tensor [pages, page_tokens, heads, width] with any strides."""

_log = getLogger(__name__)


def raw_copy(planes: Planes, table: Sequence[int], page_tokens: int, block_tokens: int) -> Copy:
    """Bit for bit."""
    if _is_on_host(planes):
        return host.RawCopy(planes, table, page_tokens, block_tokens)
    return reference.RawCopy(planes, table, page_tokens, block_tokens)


def prepare_int8(dtypes: Iterable[str]) -> None:
    """What takes time at first: compiling. dtypes: `bfloat16`, `float16`, `float32`."""
    if not _HAS_LOOPS:
        _say_that_it_is_slow()
        return
    for dtype in dtypes:
        int8_loops.prepare(dtype)


def int8_copy(form: SliceForm, planes: Planes, table: Sequence[int], page_tokens: int, dtype: str) -> Copy:
    """dtype: of the pool's numbers, which tensors of integers of its width may stand for. Raises `ValueError` where
    strides are not whole numbers of elements."""
    if _HAS_LOOPS and _is_on_host(planes):
        return int8_host.Int8Copy(int8_loops.prepare(dtype), form, planes, table, page_tokens)
    kind = getattr(torch, dtype)
    tensors = [[_as_torch(plane, kind) for plane in layer] for layer in planes]
    return int8_plain.Int8Copy(form, tensors, table, page_tokens, writable=host.are_writable(planes))


@cache
def _say_that_it_is_slow() -> None:
    """Once per process."""
    _log.warning(
        "numba is not installed or switched off: 8-bit codecs on the CPU run some ten times slower; "
        "pip install numba, or unset NUMBA_DISABLE_JIT"
    )


def _is_on_host(planes: Planes) -> bool:
    return all([host.is_host(plane) for layer in planes for plane in layer])


def _as_torch(plane: Any, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(plane, np.ndarray):
        return plane.view(dtype)  # type: ignore[no-any-return]
    return torch.from_numpy(plane.view(f"i{plane.itemsize}")).view(dtype)
