"""Copies between pages in host memory and a payload, at memcpy speed.

Pages come as [pages, page_tokens, heads, width] with any strides, the payload is [layer][plane][head, token, width] in
C order. If pages lie in memory in the payload's own order, with or without gaps between heads, a few layer slices are
one copy of long runs; anything else is copied page by page along its strides. Either way numpy copies, by an assignment
(half the price of calling `copyto`), without the interpreter lock. Digests are taken after each copy, while its bytes
are in the cache.

Must never touch a page that the table does not name for the block, nor hand out bytes whose digest it did not compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kv_kernels.copies import Digest, Digests, Encoded, Flaw, Span, Spans

Array = np.ndarray[Any, Any]
Planes = Sequence[Sequence[Any]]
"""Per layer slice, per plane, a tensor [pages, page_tokens, heads, width] with any strides."""


class Paged(NamedTuple):
    """Pages that a copy is bound to. table: physical pages, in the order of their tokens."""

    planes: Planes
    table: Sequence[int]
    page_tokens: int
    block_tokens: int


_BYTE = np.dtype("u1")

_FIRST_ADDRESS = 4096
_MEMORY = memoryview((ctypes.c_char * ((1 << 57) - _FIRST_ADDRESS)).from_address(_FIRST_ADDRESS))
"""This process's address space as one buffer: the cheapest way to make an array over memory that others own."""

UNWRITABLE_PAGES = "pages that are read-only, or expanded, cannot be loaded into; give pages that can be written"

_COPY_BYTES = 1 << 20
"""Layers are copied together up to this size: the copied bytes must still be in the cache when their digest is taken;
and with fewer copies a thread gives the interpreter lock away, and waits for it, less often."""
_RUN_BYTES = 1 << 19
"""The same of layers that adjoin in memory, which numpy copies as one run: longer runs the C library copies past the
caches, which is slower (`kvstore bench tiers --only door`)."""


class _Form(NamedTuple):
    """Of a layer whose one or two planes have pages that lie in memory as the payload does, but for gaps between heads:
    head h of page p begins at address + p * stride + h * of_head, in the second plane `between` further."""

    stride: int
    pages: int
    of_head: int
    between: int


class _Group(NamedTuple):
    """Like layers at equal distances from each other: `array` [pages, layers, planes, pieces, length] is their runs.
    pieces: 1 where no plane of any layer has gaps, else the heads.

    low, high: addresses between which all of it lies, and much else may.
    """

    start: int
    stop: int
    low: int
    high: int
    array: Array


class SliceBySlice:
    """A copy that does one block after another on the calling thread, slice by slice. Pages are written from
    a private copy whose digest was compared: they see no other byte. Holds the tensors for as long as it lives."""

    def __init__(self, paged: Paged, slice_bytes: int) -> None:
        planes, self._table, self._page_tokens, self._block_tokens = paged
        self._planes, self._slice_bytes = [list(layer) for layer in planes], slice_bytes

    def encode_slice(self, layer: int, pages: Any, into: memoryview, address: int) -> Flaw | None:
        """Encode a layer slice of a block. pages: those of the block. into: its bytes; address: where they begin."""
        raise NotImplementedError

    def decode_slice(self, layer: int, pages: Any, skip: int, private: Array, address: int) -> None:
        """The mirror, without the block's first `skip` tokens. pages: of the others. private: uint8 [slice_bytes]."""
        raise NotImplementedError

    def encode(self, tokens: Sequence[int], into: Spans, digest: Digest) -> Encoded:
        for token, payload in zip(tokens, into, strict=True):
            encoded = self.encode_block(token, payload, digest)
            yield encoded
            if isinstance(encoded, Flaw):
                return

    def decode(self, payloads: Spans, tokens: Sequence[int], skip: int, expected: Digests, digest: Digest) -> int:
        """As `BlockCopy.decode`."""
        for good, (payload, token, want) in enumerate(zip(payloads, tokens, expected, strict=True)):
            if not self.decode_block(payload, token, 0 if good else skip, want, digest):
                return good
        return len(tokens)

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """The block at `token` into a payload: the digests of its layer slices, taken from the payload, or a flaw."""
        pages, view, start, digests = self._pages(token, 0), into.view, 0, []
        for layer in range(len(self._planes)):
            target = view[start : start + self._slice_bytes]
            flaw = self.encode_slice(layer, pages, target, into.address + start)
            if flaw is not None:
                return flaw
            digests.append(digest(target))
            start += self._slice_bytes
        return digests

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """A payload into the block at `token`, without its first `skip` tokens; False if a digest differs."""
        self._check_writable()
        pages, source, (private, address) = self._pages(token, skip), payload.address, self._scratch
        for layer, want in zip(range(len(self._planes)), expected, strict=True):
            ctypes.memmove(address, source, self._slice_bytes)
            if digest(private) != want:
                return False
            self.decode_slice(layer, pages, skip, private, address)
            source += self._slice_bytes
        return True

    @cached_property
    def _is_writable(self) -> bool:
        """Whether pages can be loaded into all planes: none is read-only, and no two numbers of one share their memory,
        as those of an expanded tensor do."""
        return all([_is_writable(plane) for layer in self._planes for plane in layer])

    @cached_property
    def _scratch(self) -> tuple[Array, int]:
        scratch = np.empty(self._slice_bytes, dtype=_BYTE)
        return scratch, scratch.ctypes.data

    def _check_writable(self) -> None:
        if not self._is_writable:
            raise ValueError(UNWRITABLE_PAGES)

    def _pages(self, token: int, skip: int) -> Any:
        assert not skip % self._page_tokens, "whole pages are left out"
        first, rest = divmod(token + skip, self._page_tokens)
        stop = first + (self._block_tokens - skip) // self._page_tokens
        assert not rest and 0 <= first <= stop <= len(self._table), "the block is not inside the pages"
        return self._table[first:stop]


class RawCopy(SliceBySlice):
    """Copies blocks between host pages and payloads, bit for bit."""

    def __init__(self, paged: Paged) -> None:
        """Layers differ in their strides and in the number of their pages only."""
        planes, block_tokens = paged.planes, paged.block_tokens
        lengths = [plane.shape[2] * block_tokens * plane.shape[3] * plane.dtype.itemsize for plane in planes[0]]
        super().__init__(paged, sum(lengths))
        # Where the one or two planes are runs of equal length; else nothing.
        alike, heads = len(set(lengths)) == 1 and len(lengths) <= 2, planes[0][0].shape[2]
        runs = _runs(self._planes, lengths[0] // heads, block_tokens) if alike else []
        has_gaps = any([form.of_head != lengths[0] // heads for _, form in runs])
        pieces = heads if has_gaps else 1
        most = max(1, _COPY_BYTES // self._slice_bytes)
        self._groups = _groups(runs, most, (len(lengths), pieces, lengths[0] // pieces))
        if self._groups:
            self._shape: tuple[int, ...] = (len(planes), *self._groups[0].array.shape[2:])

    @cached_property
    def _arrays(self) -> list[list[Array]]:
        """Of each layer the planes as [pages, head, token, width] in numbers, for planes that are no runs."""
        return [[_as_unsigned(plane).transpose(0, 2, 1, 3) for plane in layer] for layer in self._planes]

    @cached_property
    def _checked(self) -> list[list[Array]]:
        """Of each layer all pieces of its planes, as [pages, length]: digests are taken from these."""
        return [
            [array[:, layer, plane, piece] for plane in range(array.shape[2]) for piece in range(array.shape[3])]
            for _, _, _, _, array in self._groups
            for layer in range(array.shape[1])
        ]

    def encode_block(self, token: int, into: Span, digest: Digest) -> list[bytes] | Flaw:
        """As `SliceBySlice.encode_block`; never a flaw."""
        if not self._groups:
            return super().encode_block(token, into, digest)
        slices, digests = np.ndarray(self._shape, _BYTE, into.view), []
        page, address = self._page(token), into.address
        for start, stop, low, high, array in self._groups:
            if low < address + slices.size and address < high:
                _copy_apart(slices[start:stop], array[page])
            else:
                slices[start:stop] = array[page]
            digests += [digest(slices[layer]) for layer in range(start, stop)]
        return digests

    def decode(self, payloads: Spans, tokens: Sequence[int], skip: int, expected: Digests, digest: Digest) -> int:
        """As `BlockCopy.decode`."""
        if skip or not self._groups:
            return super().decode(payloads, tokens, skip, expected, digest)
        self._check_writable()
        checked, groups, shape = self._checked, self._groups, self._shape
        for good, (payload, token, want) in enumerate(zip(payloads, tokens, expected, strict=True)):
            if len(want) != len(checked):
                raise ValueError(f"{len(want)} digests; there is one for each of {len(checked)} layer slices")
            page, address, slices = self._page(token), payload.address, np.ndarray(shape, _BYTE, payload.view)
            for start, stop, low, high, array in groups:
                if low < address + slices.size and address < high:
                    _copy_apart(array[page], slices[start:stop])
                else:
                    array[page] = slices[start:stop]
                for layer in range(start, stop):
                    pieces = checked[layer]
                    if len(pieces) == 1:  # a call with a list takes a tenth of a small block's time
                        found = digest(pieces[0][page])
                    elif len(pieces) == 2:
                        found = digest(pieces[0][page], pieces[1][page])
                    else:
                        found = digest(*[piece[page] for piece in pieces])
                    if found != want[layer]:
                        return good
        return len(tokens)

    def decode_block(self, payload: Span, token: int, skip: int, expected: Sequence[bytes], digest: Digest) -> bool:
        """As `SliceBySlice.decode_block`; without a private copy where pages are runs."""
        if self._groups and not skip:
            return self.decode([payload], [token], 0, [expected], digest) == 1
        return super().decode_block(payload, token, skip, expected, digest)

    def encode_slice(self, layer: int, pages: Sequence[int], into: memoryview, address: int) -> None:
        for plane, block in self._blocks(layer, np.ndarray(self._slice_bytes, _BYTE, into)):
            position = 0
            for page in pages:
                block[:, position : position + self._page_tokens] = plane[page]
                position += self._page_tokens

    def decode_slice(self, layer: int, pages: Sequence[int], skip: int, private: Array, address: int) -> None:
        for plane, block in self._blocks(layer, private):
            position = skip
            for page in pages:
                plane[page] = block[:, position : position + self._page_tokens]
                position += self._page_tokens

    def _blocks(self, layer: int, slice_bytes: Array) -> Iterator[tuple[Array, Array]]:
        """Each plane of a layer, with its bytes of a layer slice as [head, token, width]."""
        start = 0
        for plane in self._arrays[layer]:
            _, heads, _, width = plane.shape
            stop = start + heads * self._block_tokens * width * plane.itemsize
            yield plane, slice_bytes[start:stop].view(plane.dtype).reshape(heads, self._block_tokens, width)
            start = stop

    def _page(self, token: int) -> int:
        number, rest = divmod(token, self._page_tokens)
        assert not rest and 0 <= number < len(self._table), "the block is not inside the pages"
        return self._table[number]


def is_tensor(given: Any) -> bool:
    """Whether it is an array or a tensor; works without torch."""
    return isinstance(given, np.ndarray) or hasattr(given, "is_cpu")


def is_host(tensor: Any) -> bool:
    """Whether the tensor's bytes lie in host memory (numpy, or torch on the CPU)."""
    return isinstance(tensor, np.ndarray) or bool(tensor.is_cpu)


def address(tensor: Any) -> int:
    """Where the first number of a tensor or an array lies."""
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def strides(tensor: Any) -> tuple[int, ...]:
    """In bytes."""
    if isinstance(tensor, np.ndarray):
        return tensor.strides
    size = tensor.dtype.itemsize
    return tuple([stride * size for stride in tensor.stride()])


def page_step(tensor: Any) -> tuple[int, int]:
    """Bytes from one page of a plane to the next, and from its first to behind its last, which is more where pages lie
    in each other."""
    step, *inner = map(abs, strides(tensor))
    reach = sum([(size - 1) * stride for size, stride in zip(tensor.shape[1:], inner, strict=True)])
    return step, max(step, reach + tensor.dtype.itemsize)


def _is_writable(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
        return False
    return all([stride or size < 2 for stride, size in zip(strides(tensor), tensor.shape, strict=True)])


def dtype_name(tensor: Any) -> str:
    """`bfloat16`, `float32`, ...: torch's and numpy's names without their prefix."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def is_same_width_numpy(tensor: Any, element_bytes: int) -> bool:
    """Numpy has no bfloat16 or float8: an array of unsigned integers of the same width stands for them."""
    return isinstance(tensor, np.ndarray) and tensor.dtype == f"<u{element_bytes}"


def _runs(planes: Planes, head_bytes: int, block_tokens: int) -> list[tuple[int, _Form]]:
    """Of each layer where its first plane begins, and its form; nothing where any layer has another kind of pages.
    head_bytes: of one head of a block."""
    known: Any = None
    run: tuple[int, int, int] | None = None
    layers = []
    for layer in planes:
        found, addresses = [], []
        for plane in layer:
            if isinstance(plane, np.ndarray):
                form, address = (plane.shape, plane.strides, plane.dtype), plane.ctypes.data
            else:
                form, address = (plane.shape, plane.stride(), plane.dtype), plane.data_ptr()
            if form != known:  # nearly always that of the plane before
                known, run = form, _run_form(plane, head_bytes, block_tokens)
            if run is None:
                return []
            found.append(run)
            addresses.append(address)
        if found[0] != found[-1]:
            return []
        layers.append((addresses[0], _Form(*found[0], addresses[-1] - addresses[0])))
    return layers


def _groups(layers: Sequence[tuple[int, _Form]], most: int, shape: tuple[int, int, int]) -> list[_Group]:
    """Neighbouring layers, up to `most`, in as few groups as can be; of those that adjoin no more than `_RUN_BYTES`.
    shape: planes, pieces and length."""
    groups: list[_Group] = []
    start = 0
    planes, pieces, length = shape
    while start < len(layers):
        (address, form), step, stop = layers[start], 0, start + 1
        while stop < len(layers) and stop - start < most and layers[stop][1] == form:
            further = layers[stop][0] - layers[stop - 1][0]
            if stop - start > 1 and further != step:
                break
            if further == planes * pieces * length and (stop - start + 1) * further > _RUN_BYTES:
                break
            step = further
            stop += 1
        sizes = form.pages, stop - start, planes, pieces
        steps = form.stride, step, form.between, form.of_head
        array = np.ndarray((*sizes, length), _BYTE, _MEMORY, address - _FIRST_ADDRESS, (*steps, 1))
        reach = [way * (size - 1) for way, size in zip(steps, sizes, strict=True)]
        low, high = sum([way for way in reach if way < 0]), sum([way for way in reach if way > 0])
        groups.append(_Group(start, stop, address + low, address + high + length, array))
        start = stop
    return groups


def _copy_apart(target: Array, source: Array) -> None:
    """Copy [layers, planes, pieces, length] where each may have something of the other between two of its runs.

    Numpy compares the ends of what it copies and takes such a pair for overlapping: it would copy twice, through a
    temporary. So these are copied plane by plane.
    """
    for into, layer in zip(target, source, strict=True):
        for plane in range(len(layer)):
            into[plane] = layer[plane]


def _run_form(tensor: Any, head_bytes: int, block_tokens: int) -> tuple[int, int, int] | None:
    """Stride, pages and of_head of a plane where a page [page_tokens, heads, width] is a block, and in memory [head,
    token, width] in C order, with or without gaps between heads; None where it lies otherwise."""
    pages, tokens, heads, width = tensor.shape
    stride, of_token, of_head, of_number = strides(tensor)
    item = tensor.dtype.itemsize
    is_run = (
        pages > 0
        and tokens == block_tokens
        and (of_number == item or width == 1)
        and (of_token == width * item or tokens == 1)
    )
    return (stride, pages, of_head if heads > 1 else head_bytes) if is_run else None


def _as_unsigned(tensor: Any) -> Array:
    """A tensor's memory, which the caller holds."""
    number = f"<u{tensor.dtype.itemsize}"
    if isinstance(tensor, np.ndarray):
        return tensor.view(number)
    return np.ndarray(tuple(tensor.shape), number, _MEMORY, tensor.data_ptr() - _FIRST_ADDRESS, strides(tensor))
