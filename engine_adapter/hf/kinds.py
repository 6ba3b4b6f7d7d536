"""What a model's cache holds, found out by a trial run, and the way between a cache and the store's pages.

A cache is an object of transformers, with an object for each layer of the model. Its values are told apart by how they
grow while tokens are computed, and by nothing else, so that a kind of KV needs no code of its own:

    K and V, latents, keys of an indexer     [rows, kv_heads, tokens, width] or [rows, tokens, width]: pages. A layer
                                             with a window or with chunks needs the last of them only
    states of recurrences and convolutions   of one size, whatever came before: a state at one boundary
    positions, [..., rows, tokens]           of text, as they are
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

from engine_adapter.audit.audits import AuditResult
from engine_adapter.audit.blocks import allowed_of_state, compare_block
from kvstore.block.errors import BadInput
from kvstore.block.layout import DTYPE_BYTES, Attention, KvGroup, Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.states import layout_of_states

MAX_DEPTH = 4

Path = tuple[Any, ...]
"""Attributes, keys and numbers that lead from a cache to one of its values."""


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
        self.positions: dict[Path, torch.Tensor] = {}
        self._counters: list[Path] = []
        grown: dict[tuple[Any, ...], list[Path]] = {}
        for path, value in values(cache).items():
            earlier = before.get(path)
            if isinstance(value, int):
                self._counters += [path] if value != earlier else []
            elif isinstance(earlier, torch.Tensor) and earlier.shape == value.shape and value.numel():
                self.states |= {path: value} if value.ndim else {}
            elif isinstance(earlier, torch.Tensor) and not value.is_floating_point() and value.shape[-2] == 1:
                self.positions[path] = value[..., :1]
            else:
                dtype, heads = str(value.dtype).removeprefix("torch."), value.shape[1] if value.ndim == 4 else 1
                is_grown = isinstance(earlier, torch.Tensor) and value.shape[-2] == 2 * earlier.shape[-2] > 0
                if not is_grown or value.ndim not in (3, 4) or dtype not in DTYPE_BYTES:
                    where = f"its cache holds {'.'.join(map(str, path))} of shape {tuple(value.shape)} and {dtype}"
                    raise BadInput(f"{where}; allowed: a row for each token, states of one size")
                name = () if path[-1] in ("keys", "values") else path[2:]
                grown.setdefault((path[1], name, dtype, heads), []).append(path)
        found: dict[KvGroup, dict[int, list[Path]]] = {}
        for number, ((at, name, dtype, heads), paths) in enumerate(grown.items()):
            layer, local = cache.layers[at], Attention.CHUNKED if at in chunked else Attention.SLIDING
            window = layer.sliding_window if getattr(layer, "is_sliding", False) and not name else 0
            widths = tuple(_get(cache, path).shape[-1] for path in paths)
            group = KvGroup("", (0,), heads, widths, dtype, local if window else Attention.FULL, window)
            found.setdefault(group, {})[number] = paths
        if not found:
            raise BadInput("its cache holds nothing for each token")
        groups = [
            replace(group, name=f"{group.attention}{at or ''}", layers=tuple(members))
            for at, (group, members) in enumerate(found.items())
        ]
        self._layers = [
            (number, group, paths)
            for group, members in zip(groups, found.values(), strict=True)
            for number, paths in members.items()
        ]
        self.layout = Layout(tuple(groups))
        self.has_windows = any(group.window for group in groups)
        sizes: dict[int, list[int]] = {}
        for number, state in enumerate(self.states.values()):
            sizes.setdefault(state.numel() * state.element_size(), []).append(number)
        opaque = ("uint8", Attention.STATE, 0, self.layout.block_tokens)
        rows = tuple(KvGroup(f"state{size}", tuple(at), 1, (size,), *opaque) for size, at in sizes.items())
        self.state_layout = layout_of_states(rows) if rows else None
        self._form = cache
        for path in (path for _, _, paths in self._layers for path in paths):
            _set(cache, path, _get(cache, path)[..., :0, :])
        for path in (*self.states, *self.positions):
            _set(cache, path, None)

    def blank(self, tokens: int, device: torch.device) -> tuple[RestoredKv, Pages]:
        """Memory for that many tokens, whole blocks, and the store's view of it."""
        block, planes, tables = self.layout.block_tokens, dict[Path, torch.Tensor](), dict[str, GroupPages]()
        for _, group, paths in self._layers:
            first = group.needed_from(tokens) // block
            if group.window:
                tables[group.name] = GroupPages(range(tokens // block - first), first)
            for path, width in zip(paths, group.plane_widths, strict=True):
                shape = (1, group.kv_heads, tokens - first * block, width)
                planes[path] = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
        paged = {number: [_paged(planes[path][0], block) for path in paths] for number, _, paths in self._layers}
        return RestoredKv(tokens, planes), Pages(paged, range(tokens // block), block, tables)

    def filled(self, memory: RestoredKv, tokens: int, states: Sequence[torch.Tensor]) -> Any:
        """A cache of the first so many tokens of `memory`, with the states behind them."""
        planes = {}
        for _, group, paths in self._layers:
            kept = min(tokens, group.window - 1) if group.window else tokens
            for path in paths:
                stop = memory.planes[path].shape[-2] - memory.tokens + tokens
                held = memory.planes[path][..., max(0, stop - kept) : stop, :]
                held = pad(held, (0, 0, kept - held.shape[-2], 0))  # of chunks before the last one nothing is seen
                planes[path] = held if _get(self._form, path).ndim == 4 else held[:, 0]
        for path, first in self.positions.items():
            planes[path] = torch.arange(tokens, device=first.device).expand(*first.shape[:-1], tokens)
        return self._made({**planes, **dict(zip(self.states, states, strict=True))}, tokens)

    def compared(
        self, memory: RestoredKv, states: Sequence[torch.Tensor], tokens: int, cache: Any, codec: str, experts: int
    ) -> list[AuditResult]:
        """What the store brought of the last block of so many tokens, and of the states behind them, beside `cache`, in
        which the model computed as many."""
        block, deepest = self.layout.block_tokens, len(cache.layers) - 1
        stored, computed = dict[int, list[torch.Tensor]](), dict[int, list[torch.Tensor]]()
        for number, _, paths in self._layers:
            for path in paths if memory.planes[paths[0]].shape[-2] else ():  # else a chunk begins here
                plane, now = memory.planes[path][0], _get(cache, path)[0, ..., -block:, :]
                stop = plane.shape[-2] - memory.tokens + tokens
                stored.setdefault(number, []).append(plane[:, stop - block : stop])
                computed.setdefault(number, []).append(now.reshape(-1, block, now.shape[-1]))
        results = [compare_block(stored, computed, codec, deepest, is_first=tokens == block, experts=experts)]
        for (_, layer, *_), state, now in zip(self.states, states, self.states_of(cache, 0), strict=True):
            allowed = {layer: [allowed_of_state(now.dtype, plane.dtype, deepest, tokens, codec)]}
            brought, made = ({layer: [one.reshape(1, 1, -1)]} for one in (state, now))
            results.append(compare_block(brought, made, "raw", allowed=allowed, experts=experts))
        return results

    def joined(self, caches: Sequence[Any], tokens: int, repeats: int) -> Any:
        """One cache of several, each of one row, which end together, `tokens` columns wide; each row so many times."""
        made = {path: [_get(cache, path) for cache in caches] for path in self.states}
        for _, group, paths in self._layers:
            least = min(tokens, group.window - 1) if group.window else tokens
            for path in paths:
                planes = [_get(cache, path) for cache in caches]
                columns = max(least, *(plane.shape[-2] for plane in planes))
                made[path] = [pad(plane, (0, 0, columns - plane.shape[-2], 0)) for plane in planes]
        held = {path: torch.cat(ones).repeat_interleave(repeats, 0) for path, ones in made.items()}
        for path in self.positions:
            rows = [_get(cache, path) for cache in caches]
            rows = [pad(row, (tokens - row.shape[-1], 0)) for row in rows]
            held[path] = torch.cat(rows, -2).repeat_interleave(repeats, -2)
        return self._made(held, tokens)

    def first_held(self, cache: Any, tokens: int) -> int:
        """The column from which on a cache of `tokens` columns holds all layers; `tokens` where one holds another
        number of them, as after a forward pass that failed."""
        least = tokens
        for _, group, paths in self._layers:
            for path in paths:
                columns: int = _get(cache, path).shape[-2]
                if not group.window and columns != tokens:
                    return tokens
                least = min(least, columns)
        return tokens if any(_get(cache, path) != tokens for path in self._counters) else tokens - least

    def pages(self, cache: Any, row: int, first: int, stop: int, tokens: int) -> Pages:
        """Columns first .. stop - 1 of one row of a cache of `tokens` columns, whole blocks: views, no copy."""
        paged, block = {}, self.layout.block_tokens
        for number, _, paths in self._layers:
            planes = [_get(cache, path)[row] for path in paths]
            cut = [plane[..., first - tokens + plane.shape[-2] :, :][..., : stop - first, :] for plane in planes]
            paged[number] = [_paged(plane, block) for plane in cut]
        return Pages(paged, range((stop - first) // block), block)

    def forget(self, cache: Any, first: int, tokens: int) -> None:
        """Drop what lies before column `first` and before the windows."""
        for _, group, paths in self._layers:
            kept = max(min(tokens, group.window - 1), tokens - first) if group.window else tokens
            for path in paths if group.window else ():
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

    def _made(self, held: Mapping[Path, torch.Tensor], tokens: int) -> Any:
        cache = copy.deepcopy(self._form)
        for path, value in (*held.items(), *((path, tokens) for path in self._counters)):
            _set(cache, path, value)
        return cache


def values(cache: Any) -> dict[Path, Any]:
    """Every tensor and whole number in a cache, by where it lies."""
    found: dict[Path, Any] = {}

    def walk(value: Any, path: Path) -> None:
        if isinstance(value, torch.Tensor | int) and not isinstance(value, bool):
            found[path] = value
        elif len(path) < MAX_DEPTH:
            named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            for key, inner in enumerate(value) if isinstance(value, list | tuple) else named.items():
                walk(inner, (*path, key))

    walk(cache, ())
    return found


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
