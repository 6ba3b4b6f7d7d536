"""The digests of pictures, sound and the like, made of the bytes that an engine computes from.

An engine names such an item: by a hash of its own, or as its client likes (vLLM's `uuid`; also the id in a picture's
Exif data). Its caches of processed items, of the encoder's output and of KV go by that name. So what was computed under
a name belongs to the content that this engine first saw under it, and once it has seen other content there, nothing
under that name is looked up or saved any more. Must never put a name into an identity.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from kvstore.block.errors import BadInput

MOST_NAMES = 1 << 16
"""More than an engine's KV has room for: each item takes tokens there."""


@dataclass(slots=True)
class _Named:
    digest: bytes
    item: weakref.ref[Any]
    has_other_content: bool = False


class ContentDigests:
    """Digests of one engine's items. A thread of its own reads them: an item may have tens of megabytes."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, _Named] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "kv-content")

    def submit(self, features: Sequence[Any]) -> Future[list[bytes]]:
        """The digest of each of vLLM's `MultiModalFeatureSpec`. `BadInput`, in the future, says why one has none."""
        return self._reader.submit(lambda: [self._of(feature) for feature in features])

    def have_other_content(self, features: Sequence[Any]) -> bool:
        """Whether any of these names has stood for other content, too, since its digest was read."""
        named = [self._named.get(str(feature.identifier)) for feature in features]
        return any(one is not None and one.has_other_content for one in named)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _of(self, feature: Any) -> bytes:
        name, item = str(feature.identifier), feature.data
        known = self._named.get(name)
        if known is None or known.item() is not item:
            digest = content_digest(str(feature.modality), item)
            if known is None:
                known = self._named[name] = _Named(digest, weakref.ref(item))
            known.has_other_content |= known.digest != digest
            known.item = weakref.ref(item)
        self._named.move_to_end(name)
        if len(self._named) > MOST_NAMES:
            self._named.popitem(last=False)
        if known.has_other_content:
            raise BadInput("this engine has seen other content under the same name (uuid) of an image or the like")
        return known.digest


def content_digest(modality: str, item: Any) -> bytes:
    """BLAKE2b-256 of an item's fields as the model gets them: names, types, shapes and bytes, each with its length.
    Raises `BadInput` for an item whose bytes are not here."""
    if item is None or {"address", "monotonic_id"} <= set(item):
        raise BadInput("the bytes of an image or the like are not in the engine's scheduler (mm_processor_cache_type)")
    hashed = blake2b(digest_size=32, person=b"kv-content-v1")
    for piece in _pieces(modality):
        hashed.update(piece)
    for name in sorted(item):
        for piece in (*_pieces(name), *_pieces(item[name].data)):
            hashed.update(piece)
    return hashed.digest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """A value's kind, its size, and what it holds: so that no two values have the same pieces."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise BadInput("the bytes of an image or the like are on a device")
        yield b"tensor %s %s;" % (str(value.dtype).encode(), str(tuple(value.shape)).encode())
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().data
    elif isinstance(value, list | tuple):
        yield b"list %d;" % len(value)
        for one in value:
            yield from _pieces(one)
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        text = value if isinstance(value, bytes) else str(value).encode()
        yield b"%s %d;" % (type(value).__name__.encode(), len(text))
        yield text
    else:
        raise BadInput(f"an image or the like has a field of type {type(value).__name__}, which is not known")
