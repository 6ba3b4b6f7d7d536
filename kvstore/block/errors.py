"""Typed faults of the store.

Expected outcomes are values: a shorter match, a refused put, a miss reason. Exceptions are either something that the
user gave and can mend (`BadInput` and its kin: one clear line), or an operating fault. A miss is never an exception,
and nothing here may carry token ids, keys or prompt text.
"""

from __future__ import annotations

_SHOWN_CHARACTERS = 300
_SHOWN_BITS = 256


def shown(value: object) -> str:
    """A wrong value as an error line shows it: short and printable. Raises nothing itself."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits within, or too deep
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


class StoreError(Exception):
    """Any fault of the store that a caller may want to catch."""


class BadInput(StoreError, ValueError):
    """The caller gave something unusable; the message says what was given, what is allowed and what to do."""


class LayoutMismatch(BadInput):
    """Pages, or a model, do not have the layout of the namespace they are used with."""


class DirectoryInUse(StoreError):
    """Another process holds the store's directory."""


class KeysUnusable(StoreError):
    """The key file of a directory is missing, damaged or open to others; nothing was changed."""


class TenantPurged(KeysUnusable):
    """A pool has keys of a tenant that was purged here; the text says how to serve the tenant again."""


class OutOfResources(StoreError):
    """The machine has no memory, threads, descriptors or disk space for it now; the same call may succeed later."""


class LeaseExpired(StoreError):
    """The lease was released before its blocks were read. (An expired one can still be read from.)"""


class Unreachable(StoreError):
    """The sidecar does not answer. Raised when a namespace is opened; afterwards that is a miss."""


class Rejected(Unreachable):
    """A sidecar, or its socket's mode, rejects this process. The text says what to do."""


class NotReady(Unreachable):
    """A sidecar has not opened the namespace in time. It may be ready soon."""


class StoreClosed(StoreError):
    """The store was closed."""
