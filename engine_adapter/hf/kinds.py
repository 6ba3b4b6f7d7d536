"""What a model's cache holds, found out by a trial run, and the way between a cache and the store's pages.

A cache is an object of transformers, with an object for each layer of the model. Its values are told apart by how they
grow while tokens are computed, and by nothing else, so that a kind of KV needs no code of its own:

    K and V, latents, keys of an indexer     [rows, kv_heads, tokens, width] or [rows, tokens, width]: pages. A layer
                                             with a window or with chunks needs the last of them only
    states of recurrences and convolutions   of one size, whatever came before: a state at one boundary
    counters                                 one more for each token

Imports torch only. Must never hand out tokens that a cache does not hold.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from kvstore.block.errors import BadInput
from kvstore.block.layout import DTYPE_BYTES, Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.states import layout_of_states

MAX_DEPTH = 4

Path = tuple[Any, ...]
"""Attributes, keys and numbers that lead from a cache to one of its values."""


@dataclass(frozen=True)
class LayerKv:
    """K and V of one layer, or another tensor with a row for each token. number: the layer's in the layout."""

    number: int
    paths: tuple[Path, ...]
    group: KvGroup


@dataclass(frozen=True)
class RestoredKv:
    """KV of the first `tokens` tokens of a prompt; of a window only the end of it."""

    tokens: int
    planes: dict[Path, torch.Tensor]


class CacheKinds:
    """What the caches of one model hold, as it computes now."""

    def __init__(self, before: Mapping[Path, Any], cache: Any, chunked: Collection[int] = ()) -> None:
        """cache: as it is behind some tokens; it becomes the form of others. before: its `values` behind half as many.
        chunked: layers whose window is a chunk. Raises `BadInput` for a cache that cannot be stored by prefix."""
        self.states: dict[Path, torch.Tensor] = {}
        self._counters: list[Path] = []
        grown: dict[tuple[Any, ...], list[Path]] = {}
        for path, value in values(cache).items():
            earlier = before.get(path)
            if isinstance(value, int):
                if value != earlier:
                    self._counters.append(path)
            elif isinstance(earlier, torch.Tensor) and earlier.shape == value.shape:
                self.states |= {path: value} if value.ndim else {}
            else:
                dtype, heads = str(value.dtype).removeprefix("torch."), value.shape[1] if value.ndim == 4 else 1
                is_grown = isinstance(earlier, torch.Tensor) and value.shape[-2] == 2 * earlier.shape[-2]
                if not is_grown or value.ndim not in (3, 4) or dtype not in DTYPE_BYTES:
                    raise BadInput(
                        f"its cache has {'.'.join(map(str, path))} of shape {tuple(value.shape)} and {dtype}"
                    )
                name = "" if path[-1] in ("keys", "values") else path[2:]
                grown.setdefault((path[:2], name, dtype, heads), []).append(path)
        found: dict[KvGroup, list[tuple[int, tuple[Path, ...]]]] = {}
        extra = len(cache.layers)
        for (_, name, dtype, heads), paths in grown.items():
            layer = cache.layers[paths[0][1]]
            window = layer.sliding_window if getattr(layer, "is_sliding", False) and not name else 0
            local = Attention.CHUNKED if paths[0][1] in chunked else Attention.SLIDING
            attention = local if window else Attention.FULL
            widths = tuple(_get(cache, path).shape[-1] for path in paths)
            number, extra = (extra, extra + 1) if name else (paths[0][1], extra)
            group = KvGroup("", (0,), heads, widths, dtype, attention, window)
            found.setdefault(group, []).append((number, tuple(paths)))
        if not found:
            raise BadInput("its cache holds nothing for each token")
        self._slots, groups, kinds = list[LayerKv](), list[KvGroup](), list[str]()
        for group, members in found.items():
            kinds.append(str(group.attention))
            count = kinds.count(kinds[-1])
            name = kinds[-1] if count == 1 else f"{kinds[-1]}{count}"
            groups.append(replace(group, name=name, layers=tuple(number for number, _ in members)))
            self._slots += [LayerKv(*member, groups[-1]) for member in members]
        self.layout = Layout(tuple(groups))
        self.has_windows = any(group.window for group in groups)
        sizes: dict[int, list[int]] = {}
        for number, state in enumerate(self.states.values()):
            sizes.setdefault(state.numel() * state.element_size(), []).append(number)
        opaque = ("uint8", Attention.STATE, 0, self.layout.block_tokens)
        rows = tuple(KvGroup(f"state{size}", tuple(at), 1, (size,), *opaque) for size, at in sizes.items())
        self.state_layout = layout_of_states(rows) if rows else None
        self._form = cache
        for slot in self._slots:
            for path in slot.paths:
                _set(cache, path, _get(cache, path)[..., :0, :])
        for path in self.states:
            _set(cache, path, None)

    def blank(self, tokens: int, device: torch.device) -> tuple[RestoredKv, Pages]:
        """Memory for that many tokens, whole blocks, and the store's view of it."""
        block, planes, tables = self.layout.block_tokens, dict[Path, torch.Tensor](), dict[str, GroupPages]()
        paged: dict[int, list[torch.Tensor]] = {}
        for slot in self._slots:
            group, first = slot.group, slot.group.needed_from(tokens) // block
            if group.window:
                tables[group.name] = GroupPages(range(tokens // block - first), first)
            for path, width in zip(slot.paths, group.plane_widths, strict=True):
                shape = (1, group.kv_heads, tokens - first * block, width)
                planes[path] = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
                paged.setdefault(slot.number, []).append(_paged(planes[path][0], block))
        return RestoredKv(tokens, planes), Pages(paged, range(tokens // block), block, tables)

    def filled(self, memory: RestoredKv, tokens: int, states: Sequence[torch.Tensor]) -> Any:
        """A cache of the first so many tokens of `memory`, with the states behind them."""
        cache = copy.deepcopy(self._form)
        for slot in self._slots:
            kept = min(tokens, slot.group.window - 1) if slot.group.window else tokens
            for path in slot.paths:
                plane = memory.planes[path]
                stop = plane.shape[-2] - memory.tokens + tokens
                held = plane[..., max(0, stop - kept) : stop, :]
                held = pad(held, (0, 0, kept - held.shape[-2], 0))  # of chunks before the last one nothing is seen
                _set(cache, path, held if _get(self._form, path).ndim == 4 else held[:, 0])
        for path, state in zip(self.states, states, strict=True):
            _set(cache, path, state)
        self._count(cache, tokens)
        return cache

    def joined(self, caches: Sequence[Any], tokens: int, repeats: int) -> Any:
        """One cache of several, each of one row, which end together, `tokens` columns wide; each row so many times."""
        joined = copy.deepcopy(self._form)
        for slot in self._slots:
            least = min(tokens, slot.group.window - 1) if slot.group.window else tokens
            for path in slot.paths:
                planes = [_get(cache, path) for cache in caches]
                columns = max(least, *(plane.shape[-2] for plane in planes))
                planes = [pad(plane, (0, 0, columns - plane.shape[-2], 0)) for plane in planes]
                _set(joined, path, torch.cat(planes).repeat_interleave(repeats, 0))
        for path in self.states:
            _set(joined, path, torch.cat([_get(cache, path) for cache in caches]).repeat_interleave(repeats, 0))
        self._count(joined, tokens)
        return joined

    def first_held(self, cache: Any, tokens: int) -> int:
        """The column from which on a cache of `tokens` columns holds all layers; `tokens` where one holds another
        number of them, as after a forward pass that failed."""
        if any(_get(cache, path) != tokens for path in self._counters):
            return tokens
        held: list[tuple[LayerKv, int]] = [
            (slot, _get(cache, path).shape[-2]) for slot in self._slots for path in slot.paths
        ]
        if any(not slot.group.window and columns != tokens for slot, columns in held):
            return tokens
        return tokens - min(columns for _, columns in held)

    def pages(self, cache: Any, row: int, first: int, stop: int, tokens: int) -> Pages:
        """Columns first .. stop - 1 of one row of a cache of `tokens` columns, whole blocks: views, no copy."""
        paged = {}
        for slot in self._slots:
            planes = [_get(cache, path)[row] for path in slot.paths]
            cut = [plane[..., first - tokens + plane.shape[-2] :, :][..., : stop - first, :] for plane in planes]
            paged[slot.number] = [_paged(plane, self.layout.block_tokens) for plane in cut]
        return Pages(paged, range((stop - first) // self.layout.block_tokens), self.layout.block_tokens)

    def forget(self, cache: Any, first: int, tokens: int) -> None:
        """Drop what lies before column `first` and before the windows."""
        for slot in self._slots:
            if slot.group.window:
                kept = max(min(tokens, slot.group.window - 1), tokens - first)
                for path in slot.paths:
                    _set(cache, path, _get(cache, path)[..., -kept:, :])

    def blank_states(self) -> list[torch.Tensor]:
        """Memory for states, zeros: as they are before the first token."""
        return [torch.zeros_like(state) for state in self.states.values()]

    def states_of(self, cache: Any, row: int) -> list[torch.Tensor]:
        """A copy of one row's states, as they are now."""
        return [_get(cache, path)[row : row + 1].clone() for path in self.states]

    def state_pages(self, states: Sequence[torch.Tensor]) -> Pages:
        """States as one block of the store: views of what is contiguous."""
        planes = {at: [state.reshape(-1).view(torch.uint8)[None, None, None]] for at, state in enumerate(states)}
        return Pages(planes, range(1), self.layout.block_tokens)

    def _count(self, cache: Any, tokens: int) -> None:
        for path in self._counters:
            _set(cache, path, tokens)


def values(cache: Any) -> dict[Path, Any]:
    """Every tensor and whole number in a cache, by where it lies."""
    found: dict[Path, Any] = {}

    def walk(value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor | int) and not isinstance(value, bool):
            found[path] = value
        elif len(path) < MAX_DEPTH:
            for key, inner in _inside(value):
                walk(inner, (*path, key))

    walk(cache, ())
    return found


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).items())


def _get(cache: Any, path: Path) -> Any:
    for key in path:
        cache = getattr(cache, key) if hasattr(cache, "__dict__") else cache[key]
    return cache


def _set(cache: Any, path: Path, value: Any) -> None:
    holder = _get(cache, path[:-1])
    if hasattr(holder, "__dict__"):
        setattr(holder, path[-1], value)
    else:
        holder[path[-1]] = value


def _paged(plane: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """One row's plane, [kv_heads, tokens, width] or [tokens, width], as pages [pages, block, kv_heads, width]."""
    plane = plane if plane.ndim == 3 else plane[None]
    pages: torch.Tensor = plane.unflatten(1, (-1, block_tokens)).permute(1, 2, 0, 3)
    return pages
