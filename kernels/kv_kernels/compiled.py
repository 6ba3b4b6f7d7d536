"""Loops that numba compiles; without numba they run as they are, and are slow.

Imported by what computes alone, and not with `kv_kernels`: numba takes 0.2 s, and vLLM 0.31 and 0.32 cannot make a
worker for a CPU in a process where llvmlite is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}

try:
    from numba import config, njit
except (ImportError, OSError):  # an extra; OSError: its llvmlite does not find its library
    IS_USABLE = False

    def compiled(function: Callable[..., Any]) -> Any:
        return function
else:
    IS_USABLE = not config.DISABLE_JIT  # type: ignore[attr-defined]
    """It can be told not to compile (NUMBA_DISABLE_JIT)."""

    def compiled(function: Callable[..., Any]) -> Any:
        """When it is first called with arguments of these types; later processes find the result on disk."""
        try:
            return njit(cache=True, **OPTIONS)(function)
        except RuntimeError:  # no such place: each process compiles for itself
            return njit(**OPTIONS)(function)
