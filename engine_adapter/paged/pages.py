"""An engine's registered paged KV, and the proof that it is read the way it is written.

Engines lay out K and V in a page in one of several *forms*. None is assumed: the engine itself writes a page of random
numbers, and the form under which exactly these are found is the right one. If there is none, or the engine cannot be
made to write, a page is an opaque run of bytes, which `raw` still copies, and so is a recurrent state. If K lies
transposed, `raw` keeps each head's numbers in their order, since transposing costs more than the rest of a copy; the
form is part of the namespace's name. In either case one block is copied to another through the store's own codec and
compared byte for byte before anything is stored. Must never import an engine, and must leave pages as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from logging import getLogger
from math import lcm
from typing import Any

import torch

from engine_adapter.paged.step_plan import GroupSpec, PageRun, WorkerSpec
from kv_kernels.copies import Flaw
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.layout import DTYPE_BYTES, MAX_NAME_CHARACTERS, Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.edge import contained
from kvstore.client.states import layout_of_states
from tiering.frame import digest
from tiering.tier import FrameSpan

_log = getLogger(__name__)

Write = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The engine's own way to write tokens of a layer: (layer, K, V, slots), each [tokens, kv_heads, width], slots [tokens]
of page * page_tokens + token. Raises if it has none."""

PROBE_SEED = 20261122
OPAQUE = "opaque"
SLABS, ACROSS = "slabs", "slabs-k-across"


@dataclass(frozen=True, slots=True)
class RegisteredGroup:
    """Layers of one shape of one worker. layers: the engine's names, with the tensor of each. kv_heads: of this rank.
    widths: of K and V, or of one latent plane. num_pages, page_tokens: as the scheduler counts them. The other fields
    are those of `GroupSpec`."""

    name: str
    layers: Mapping[str, torch.Tensor]
    kv_heads: int
    widths: tuple[int, ...]
    page_tokens: int
    num_pages: int
    window: int = 0
    attention: Attention = Attention.FULL
    row_tokens: int = 1
    table: int = 0
    text: str = ""
    tensors: tuple[tuple[str, int], ...] = ()
    made_of: str = ""

    @property
    def rows(self) -> int:
        """Rows of a page."""
        return self.page_tokens // self.row_tokens


class EnginePages:
    """The planes of all layers. numbers: of the engine's layers, by name. stream: in which the engine reads and writes
    them. experts: to which each token goes, 0 for a model without."""

    def __init__(
        self,
        facts: WorkerSpec,
        planes: Mapping[int, Sequence[torch.Tensor]],
        numbers: Mapping[str, int] | None = None,
        as_they_lie: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        """planes: by layer number, [pages, rows of a kernel page, kv_heads, width]. as_they_lie: the same memory in
        that shape, but with each head's numbers of a page in the engine's order."""
        self.facts = facts
        self.numbers = dict(numbers or {})
        self.experts = 0
        self._planes = planes
        self._as_they_lie = as_they_lie or planes
        self._sizes = {group.name: group.page_tokens for group in facts.groups}
        self._splits = {group.name: group.split for group in facts.groups}
        self.stream = EngineStream(next((both[0].device for both in planes.values()), torch.device("cpu")))

    def pages(self, tables: Sequence[PageRun], layout: Layout, first_token: int, *, is_exact: bool) -> Pages:
        """The pages for a verb of the store, from `first_token` on. tables: by group, in the layout's order; of a
        group without full attention, its present pages. is_exact: for a codec that copies numbers without reading
        them. Raises `BadInput` where pages are refused: the scheduler knows others."""
        if self.facts.refused:
            raise BadInput(self.facts.refused)
        groups: dict[str, GroupPages] = {}
        for group, run in zip(layout.groups, tables, strict=True):
            page, split = self._page_tokens(group, layout), self._splits.get(group.name, 1)
            table = [number * split + at for number in run.pages for at in range(split)] if split > 1 else run.pages
            groups[group.name] = GroupPages(table, (run.first - first_token // page) * split, page // split)
        whole = next((one for one in groups.values() if not one.first_page), None)
        if whole is None:  # every group lacks its first pages: this table only says where they end
            last = next(iter(groups.values()))
            whole = replace(last, table=[0] * last.stop_page, first_page=0)
        own = {name: one for name, one in groups.items() if one is not whole}
        planes = self._as_they_lie if is_exact else self._planes
        return Pages(planes, whole.table, whole.page_tokens, own)

    def cut(self, tables: Sequence[PageRun], layout: Layout, first_token: int, stop_token: int) -> list[PageRun]:
        """Of each group the pages of these tokens. tables: as for `pages`."""
        runs = []
        for group, run in zip(layout.groups, tables, strict=True):
            page = self._page_tokens(group, layout)
            start = max(first_token // page, run.first)
            runs.append(PageRun(start, run.pages[start - run.first : -(-stop_token // page) - run.first]))
        return runs

    def _page_tokens(self, group: KvGroup, layout: Layout) -> int:
        """A page of a state has the state behind a whole block, whatever the engine's page is."""
        if group.attention is Attention.STATE:
            return layout.block_tokens
        return self._sizes.get(group.name, self.facts.page_tokens)


def register(groups: Sequence[RegisteredGroup], rank: int, scales: str, write: Write) -> EnginePages:
    """Find the pages' form, and prove it. If they cannot be stored, the spec says why (`refused`): nothing is raised,
    since it would end the engine's start."""
    why: list[str] = []
    with contained(lambda error: why.append(_first_line(error))):
        return _register(groups, rank, scales, write)
    return _refused(rank, scales, "", f"its pages cannot be read: {why[0]}")


def _refused(rank: int, scales: str, device: str, why: str) -> EnginePages:
    return EnginePages(WorkerSpec(rank, 1, (), "", scales, device, 0, refused=why), {})


def _register(groups: Sequence[RegisteredGroup], rank: int, scales: str, write: Write) -> EnginePages:
    empty = next((group.name for group in groups if not group.layers), None)
    if not groups or empty is not None:
        return _refused(rank, scales, "", f"group {empty!r} has no pages here" if groups else "it has no pages at all")
    device = next(iter(groups[0].layers.values())).device.type
    planes: dict[int, Sequence[torch.Tensor]] = {}
    as_they_lie: dict[int, Sequence[torch.Tensor]] = {}
    specs: list[GroupSpec] = []
    packings: set[str] = set()
    page_tokens, page_bytes = lcm(*(group.page_tokens for group in groups)), 0
    try:
        for group in groups:
            packing, layers, split = _planes_of(group, write)
            numbers = tuple(range(len(planes), len(planes) + len(layers)))
            planes.update(zip(numbers, layers, strict=True))
            as_they_lie.update(planes)
            if packing == ACROSS:
                lying = (_planes_in(SLABS, tensor, group) for tensor in group.layers.values())
                as_they_lie.update(zip(numbers, lying, strict=True))
            first = layers[0]
            found: dict[str, Any] = {
                "layers": numbers,
                "kv_heads": first[0].shape[2],
                "widths": tuple(plane.shape[3] for plane in first),
                "dtype": str(first[0].dtype).removeprefix("torch."),
                "split": split,
            }
            same = {one.name: getattr(group, one.name) for one in fields(GroupSpec) if one.name not in found}
            specs.append(GroupSpec(**found, **same))
            if group.attention is not Attention.STATE:
                packings.add(packing)
                of_pages = sum(tensor.nbytes for tensor in group.layers.values())
                page_bytes += of_pages * page_tokens // (group.num_pages * group.page_tokens)
    except LayoutMismatch as error:
        return _refused(rank, scales, device, str(error))
    facts = WorkerSpec(rank, page_tokens, tuple(specs), _named(packings), scales, device, page_bytes)
    names = [name for group in groups for name in group.layers]
    pages = EnginePages(facts, planes, {name: number for number, name in enumerate(names)}, as_they_lie)
    refused = _refusal(pages, groups)
    return _refused(rank, scales, device, refused) if refused else pages


def _named(packings: Collection[str]) -> str:
    """All of them, or their kinds and dtypes and a digest where that is too long for a name."""
    whole = "+".join(sorted(packings))
    if len(whole) <= MAX_NAME_CHARACTERS:
        return whole
    short = {":".join(one.split(":")[:2]) for one in packings}
    return "+".join([*sorted(short), blake2b(whole.encode(), digest_size=16).hexdigest()])


def is_opaque(packing: str) -> bool:
    return any(one.startswith(OPAQUE) for one in packing.split("+"))


def opaque_dtype(packing: str) -> torch.dtype | None:
    """The dtype of the engine's opaque tensors; bytes if there are several. None if no pages are opaque."""
    kinds = {one.split(":")[1] for one in packing.split("+") if one.startswith(f"{OPAQUE}:")}
    if len(kinds) != 1:
        return torch.uint8 if is_opaque(packing) else None
    dtype: torch.dtype = getattr(torch, kinds.pop().removeprefix("torch."))
    return dtype


def layout_of(
    facts: Sequence[WorkerSpec], total_kv_heads: int, block_tokens: int, *, states: bool = False
) -> Layout | None:
    """The layout of whole blocks, from all ranks' specs: of KV, or of recurrent states. None if the engine has none of
    that kind. Raises `BadInput` if the ranks disagree."""
    first = facts[0]
    for other in facts[1:]:
        if (other.page_tokens, other.groups, other.packing) != (first.page_tokens, first.groups, first.packing):
            raise BadInput(
                f"ranks {first.rank} and {other.rank} of this engine have pages of different kinds; pipeline stages "
                "must have equally many layers of each kind"
            )
    has_states = any(group.is_state for group in first.groups)
    if has_states and not block_tokens:
        block_tokens = first.page_tokens  # a larger block would have no state where the engine keeps one
    groups = []
    for group in first.groups:
        if group.is_state is not states:
            continue
        heads, rows = group.kv_heads * len(facts), block_tokens if states else group.row_tokens
        if not states and not is_opaque(first.packing) and len(facts) > 1:
            heads = min(heads, max(total_kv_heads, group.kv_heads))  # with more ranks than heads, each has one head
        groups.append(
            KvGroup(group.name, group.layers, heads, group.widths, group.dtype, group.attention, group.window, rows)
        )
    if not groups:
        return None
    if states:
        return layout_of_states(groups, len(facts), f"{OPAQUE}:state")
    return Layout(tuple(groups), block_tokens, first.page_tokens, head_shards=len(facts), packing=first.packing)


# Forms ---------------------------------------------------------------------------------------------------------------
#
#   H kv heads, N tokens of a page, D and V the widths of K and V; a view of each is [pages, N, H, width]
#   heads-first     [pages, H, N, D + V]         of each token K, then V
#   tokens-first    [pages, N, H, D + V]         the same, tokens outside
#   slabs           [pages, H, N, 2 D]           of each head N rows of K, then N rows of V; the shape says otherwise
#   slabs-k-across  [pages, H, N, 2 D]           of each head D rows of N numbers of K, then N rows of V
#   planes          [2, pages, N, H, D]          K of all pages, then V; or heads outside, or [pages, 2, ...]
#   latent          [pages, N, D]                one plane for all heads (MLA)


def _forms(tensor: torch.Tensor, group: RegisteredGroup) -> Iterator[tuple[str, int, list[torch.Tensor]]]:
    heads, widths = group.kv_heads, group.widths
    shape = tuple(tensor.shape)
    if len(widths) == 1 and len(shape) == 3 and shape[2] == widths[0]:
        split = _split(shape[0], shape[1], group)
        if split:
            yield "latent", split, [tensor.unsqueeze(2)]
    if len(widths) != 2:
        return
    k_width, v_width = widths
    if len(shape) == 4 and shape[3] == k_width + v_width:
        if shape[1] == heads and (split := _split(shape[0], shape[2], group)):
            by_token = tensor.permute(0, 2, 1, 3)
            yield "heads-first", split, [by_token[..., :k_width], by_token[..., k_width:]]
            if k_width == v_width and tensor[0].is_contiguous():
                rows = tensor.view(shape[0], heads, 2 * shape[2], k_width)
                k_rows, v_rows = rows[:, :, : shape[2]], rows[:, :, shape[2] :]
                yield SLABS, split, [k_rows.permute(0, 2, 1, 3), v_rows.permute(0, 2, 1, 3)]
                size = (shape[0], shape[2], heads, k_width)
                strides = (tensor.stride(0), 1, tensor.stride(1), shape[2])
                across = tensor.as_strided(size, strides, tensor.storage_offset())
                yield ACROSS, split, [across, v_rows.permute(0, 2, 1, 3)]
        if shape[2] == heads and (split := _split(shape[0], shape[1], group)):
            yield "tokens-first", split, [tensor[..., :k_width], tensor[..., k_width:]]
    if len(shape) == 5 and k_width == v_width == shape[4] and 2 in shape[:2]:
        for axis in (0, 1):
            if shape[axis] != 2:
                continue
            k, v = tensor.unbind(axis)
            if k.shape[2] == heads and (split := _split(k.shape[0], k.shape[1], group)):
                yield f"planes-{axis}-tokens", split, [k, v]
            if k.shape[1] == heads and (split := _split(k.shape[0], k.shape[2], group)):
                yield f"planes-{axis}-heads", split, [k.transpose(1, 2), v.transpose(1, 2)]


def _planes_in(form: str, tensor: torch.Tensor, group: RegisteredGroup) -> list[torch.Tensor]:
    return next(planes for name, _, planes in _forms(tensor, group) if name == form)


def _opaque(tensor: torch.Tensor, group: RegisteredGroup) -> tuple[int, list[torch.Tensor]]:
    """Pages as bytes, cut into as many pieces as they have rows. Raises `LayoutMismatch`."""
    axis = 0 if tensor.shape[0] % group.num_pages == 0 else 1
    halves = [tensor] if axis == 0 else list(tensor.unbind(0)) if tensor.shape[0] == 2 else []
    planes = []
    for half in halves:
        split = half.shape[0] // group.num_pages
        page_bytes = half[0].nbytes
        rows = group.rows // split if split else 0
        flat = _as_bytes(half)
        if not rows or flat is None or page_bytes % rows or half.shape[0] % group.num_pages:
            break
        planes.append(flat.unflatten(1, (rows, 1, page_bytes // rows)))
    if not planes or len(planes) < len(halves) or group.rows % (halves[0].shape[0] // group.num_pages):
        raise LayoutMismatch(
            f"group {group.name!r} has pages of shape {tuple(tensor.shape)} and strides {tensor.stride()}, of which "
            f"{group.num_pages} pages of {group.page_tokens} tokens cannot be made out"
        )
    return halves[0].shape[0] // group.num_pages, planes


def _split(pages: int, tokens: int, group: RegisteredGroup) -> int:
    split, rest = divmod(pages, group.num_pages)
    return split if not rest and split and tokens * split == group.page_tokens else 0


# Proof ---------------------------------------------------------------------------------------------------------------


def _planes_of(group: RegisteredGroup, write: Write) -> tuple[str, list[list[torch.Tensor]], int]:
    """Packing, planes of each layer, and kernel pages to a page. Raises `LayoutMismatch`."""
    names, tensors = list(group.layers), list(group.layers.values())
    if group.page_tokens % group.row_tokens:
        raise LayoutMismatch(
            f"group {group.name!r} has rows of {group.row_tokens} in pages of {group.page_tokens} tokens"
        )
    if any(tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise LayoutMismatch(f"group {group.name!r} has layers with pages of different shapes")
    is_float = str(tensors[0].dtype).removeprefix("torch.") in DTYPE_BYTES and tensors[0].dtype.is_floating_point
    for form, split, _ in _forms(tensors[0], group) if is_float and group.row_tokens == 1 else ():
        layers = [_planes_in(form, tensor, group) for tensor in tensors]
        if all(_is_written(*each, group, write) for each in zip(names, tensors, layers, strict=True)):
            return form, layers, split
    opened = [_opaque(tensor, group) for tensor in tensors]
    shape, strides = list(tensors[0].shape[1:]), list(tensors[0].stride())
    return f"{OPAQUE}:{tensors[0].dtype}:{shape}:{strides}", [planes for _, planes in opened], opened[0][0]


def _is_written(
    name: str, tensor: torch.Tensor, planes: Sequence[torch.Tensor], group: RegisteredGroup, write: Write
) -> bool:
    tokens, page = planes[0].shape[1], min(1, planes[0].shape[0] - 1)
    random = torch.Generator().manual_seed(PROBE_SEED)
    meant = [
        torch.randn((tokens, group.kv_heads, width), generator=random).to(tensor.dtype).to(tensor.device)
        for width in group.widths
    ]
    before = [plane[page].clone() for plane in planes]
    slots = torch.arange(page * tokens, (page + 1) * tokens, dtype=torch.int64, device=tensor.device)
    is_written = False

    def failed(error: Exception) -> None:
        _log.info("the engine cannot be made to write a page of layer %s: %s", name, _first_line(error))

    try:
        with contained(failed):
            write(name, meant[0], meant[-1], slots)
            is_written = all(torch.equal(plane[page], part) for plane, part in zip(planes, meant, strict=True))
    finally:
        for plane, part in zip(planes, before, strict=True):
            plane[page] = part
    return is_written


def _refusal(pages: EnginePages, groups: Sequence[RegisteredGroup]) -> str:
    """Copy a page of random bytes to another as a save and a load would, and compare all bytes; returns why it failed,
    or nothing."""
    num_pages = groups[0].num_pages
    if num_pages < 3:
        return f"the engine has {num_pages} pages; 3 are needed"
    facts = pages.facts
    layouts = [one for one in (layout_of([facts], 0, 0, states=states) for states in (False, True)) if one is not None]
    # Pages of several groups may be the same memory: those that are read and those that are written lie apart in all.
    counts = {
        group.name: 1 if group.attention is Attention.STATE else layouts[0].block_tokens // group.page_tokens
        for group in groups
    }
    most = max(counts.values())
    if 2 * most >= num_pages:
        return f"the engine has {num_pages} pages; a block needs {most}"
    rows = [
        (row, counts[group.name])
        for group in groups
        for tensor in group.layers.values()
        for row in _page_bytes(tensor, num_pages)
    ]
    random = torch.Generator().manual_seed(PROBE_SEED)
    touched = torch.arange(1, 1 + 2 * most)
    before = [row[touched].clone() for row, _ in rows]
    try:
        for row, _ in rows:
            row[1 : 1 + most] = torch.randint(0, 256, (most, *row.shape[1:]), generator=random, dtype=torch.uint8).to(
                row.device
            )
        for is_exact in (False, True):
            for row, _ in rows:
                row[1 + most : 1 + 2 * most] = 0
            for layout in layouts:
                _copy_block(pages, layout, counts, most, is_exact=is_exact)
            for row, count in rows:
                if not torch.equal(row[1 : 1 + count], row[1 + most : 1 + most + count]):
                    return f"a page that was copied as {facts.packing or OPAQUE} is not what it was"
        return ""
    except (LayoutMismatch, BadInput) as error:
        return _first_line(error)
    finally:
        for (row, _), was in zip(rows, before, strict=True):
            row[touched] = was


def _copy_block(pages: EnginePages, layout: Layout, counts: Mapping[str, int], most: int, *, is_exact: bool) -> None:
    codec = codec_named("raw")
    for part in layout.parts:
        payload = torch.zeros(codec.payload_bytes(part), dtype=torch.uint8)
        view = memoryview(payload.numpy().data)
        span = [FrameSpan(payload.data_ptr(), view, None)]
        tables = [
            [PageRun(0, list(range(first, first + counts[group.name]))) for group in layout.groups]
            for first in (1, 1 + most)
        ]
        given, into = (codec.bind(pages.pages(table, layout, 0, is_exact=is_exact), layout, part) for table in tables)
        (encoded,) = given.encode([0], span, digest)
        if isinstance(encoded, Flaw) or into.decode(span, [0], 0, [encoded], digest) != 1:
            raise LayoutMismatch("a page's digests are not those of its copy")


def _page_bytes(tensor: torch.Tensor, num_pages: int) -> list[torch.Tensor]:
    """All bytes of each page, as views [pages, kernel pages to a page, ..., bytes], wherever they lie. Raises
    `LayoutMismatch` where numbers have gaps between them."""
    halves = [tensor] if tensor.shape[0] % num_pages == 0 else list(tensor.unbind(0))
    if any(half.shape[0] % num_pages or half.stride(-1) != 1 for half in halves):
        raise LayoutMismatch(f"pages of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be compared")
    return [half.view(torch.uint8).unflatten(0, (num_pages, half.shape[0] // num_pages)) for half in halves]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [pages, bytes] of pages [pages, ...], each in the order of memory: an engine may name a page's heads
    before its tokens and lay them the other way round, as vLLM does on GPUs. None if a page is not one run of bytes."""
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    lying = tensor.permute(0, *inner)
    return lying.flatten(1).view(torch.uint8) if lying[0].is_contiguous() else None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0][:200]


# Orders a worker's own threads behind its engine on a device's streams ---------------------------------------------


class EngineStream:
    """The streams of one device. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._own = threading.local()

    def mark(self) -> Any:
        """A point in the calling thread's stream; not while it captures a graph."""
        return self._module.current_stream(self._device).record_event() if self._module is not None else None

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Work enqueued within this context comes after the mark; the host does not wait."""
        if self._module is None:
            yield
            return
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._module.Stream(self._device)
        stream.wait_event(mark)
        with self._module.stream(stream):
            yield

    def wait(self) -> None:
        """Wait until everything that this thread has enqueued is done."""
        if self._module is not None:
            self._module.current_stream(self._device).synchronize()
