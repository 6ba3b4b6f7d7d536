"""Which route moves blocks between these pages and a payload.

    pages in host memory      raw    numpy, at memcpy speed (`host`)
                              8 bits loops compiled by numba (`int8_loops`); plain torch where there is no numba
    pages on one GPU          streams and kernels (`device_copy`), if the store was opened with a route to that GPU that
                              takes the pages
    anything else             plain torch (`plain`): no triton, planes on different devices

All routes of a codec write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from logging import getLogger
from typing import Any, Protocol

import numpy as np
import torch

from kv_kernels import host, plain
from kv_kernels.copies import BlockCopy
from kv_kernels.host import Paged, Planes
from kv_kernels.int8_form import Form

_log = getLogger(__name__)


class OnDevice(Protocol):
    """The route of one device: `device_copy.DeviceTransfers`, which a process without triton cannot import."""

    def bind(self, form: Form, paged: Paged) -> BlockCopy | None:
        """None if the pages are not for it."""
        ...

    def close(self, timeout_s: float) -> bool: ...


Devices = Callable[[torch.device], OnDevice | None]
"""The route of a device, made when it is first asked for; None if there is none, as for host memory."""


def block_copy(form: Form, paged: Paged, dtype: str, devices: Devices | None = None) -> BlockCopy:
    """dtype: of the pool's numbers; arrays of numpy are of integers of its width. Raises `ValueError` if strides are
    not whole numbers of elements."""
    way = _way(paged.planes, devices)
    if way is None and all([host.is_host(plane) for layer in paged.planes for plane in layer]):
        if form is None:
            return host.RawCopy(paged)
        if (loops := compiled_loops()) is not None:
            return loops.Int8Copy(form, paged, dtype)  # type: ignore[no-any-return]
    copy = way.bind(form, paged) if way is not None else None
    return copy or plain.PlainCopy(form, paged, dtype)


def prepare_int8(dtypes: Iterable[str]) -> None:
    """Compile, which takes time at first. dtypes: `bfloat16`, `float16`, `float32`."""
    if (loops := compiled_loops()) is not None:
        for dtype in dtypes:
            loops.prepare(dtype)


@cache
def compiled_loops() -> Any:
    """`int8_loops`; None without numba, which is said once.

    Imported when 8 bits are first asked for, and not with this file: it takes 0.2 s, and vLLM 0.31 and 0.32 cannot make
    a worker for a CPU in a process where llvmlite is loaded.
    """
    from kv_kernels import compiled

    if not compiled.IS_USABLE:
        _log.warning(
            "numba is not installed, broken or switched off: 8-bit codecs on the CPU run some ten times slower; "
            "pip install numba, or unset NUMBA_DISABLE_JIT"
        )
        return None
    from kv_kernels import int8_loops

    return int8_loops


def _way(planes: Planes, devices: Devices | None) -> OnDevice | None:
    first = planes[0][0]
    if devices is None or isinstance(first, np.ndarray):
        return None
    way = devices(first.device)
    if way is None or any([getattr(plane, "device", None) != first.device for layer in planes for plane in layer]):
        return None
    return way
