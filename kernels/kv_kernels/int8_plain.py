"""The 8-bit codecs between pages on any device and a payload in host memory, in plain torch.

The slow route, for devices without a faster one; every other route must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_kernels import int8, reference
from kv_kernels.copies import Digest, Flaw, Span
from kv_kernels.host import UNWRITABLE_PAGES, BlockByBlock
from kv_kernels.int8 import SliceForm, Unwritable


class PlainInt8Copy(BlockByBlock):
    """Encodes and decodes blocks. Holds the tensors for as long as it lives."""

    def __init__(
        self,
        form: SliceForm,
        planes: Sequence[Sequence[torch.Tensor]],
        table: Sequence[int],
        page_tokens: int,
        *,
        writable: bool = True,
    ) -> None:
        """planes: per layer slice, per plane, a tensor [pages, page_tokens, heads, width]; table: physical pages.
        writable: whether they can be loaded into, which torch cannot tell of memory that it was given."""
        self._form = form
        self._writable = writable
        self._planes = planes
        self._table = table
        self._page_tokens = page_tokens

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """Encode the block at `token` into a payload; returns each layer slice's digest, taken from the payload."""
        first = token // self._page_tokens
        pages = self._table[first : first + self._form.tokens // self._page_tokens]
        digests = []
        start = 0
        for layer in self._planes:
            stop = start + self._form.size_bytes
            try:
                parts = [
                    int8.quantize(reference.gather_plane(plane, pages), of_plane.axis)
                    for plane, of_plane in zip(layer, self._form.planes, strict=True)
                ]
            except Unwritable as unwritable:
                return unwritable.flaw
            torch.frombuffer(into.view[start:stop], dtype=torch.uint8).copy_(int8.packed(self._form, parts))
            digests.append(digest(into.view[start:stop]))
            start = stop
        return digests

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """Decode a payload into the block at `token`, without its first `skip` tokens; False if any digest differs.

        A layer slice is verified in a private copy before any of it reaches the pages.
        """
        if not self._writable:
            raise ValueError(UNWRITABLE_PAGES)
        first = (token + skip) // self._page_tokens
        pages = self._table[first : first + (self._form.tokens - skip) // self._page_tokens]
        start = 0
        for layer, want in zip(self._planes, expected, strict=True):
            stop = start + self._form.size_bytes
            private = torch.frombuffer(bytearray(payload.view[start:stop]), dtype=torch.uint8)
            if digest(private.numpy()) != want:
                return False
            start = stop
            for plane, of_plane in zip(layer, self._form.planes, strict=True):
                part = int8.unpacked(private.to(plane.device), self._form, of_plane, plane.dtype)
                block = int8.dequantize(*part, plane.dtype)
                reference.scatter_plane(block[:, skip:], plane, pages)
        return True
