"""The store's blocks as vLLM's own KV events, so that a router knows them by the engine's hashes and by where they lie.

    a block of the store   one or more of the engine's hashes, with the tokens, the parent and the extra keys of each
    came                   `BlockStored` with the medium of its tier; moved: removed from one, stored in the other
    went                   `BlockRemoved` of all its hashes
    several KV groups      one event for each, with its number and kind, as vLLM has them of its own cache

Media are those that routers know: `CPU` for DRAM, `STORAGE` for NVMe. Reads attributes of vLLM's objects, is handed its
classes, and imports nothing of it: fields that this vLLM does not have are left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine_adapter.paged.announcements import Announcement
from kvstore.block.account import HitTier

MEDIA = {HitTier.DRAM: "CPU", HitTier.NVME: "STORAGE"}
LOCALITY = "LOCAL"
"""To the engine that publishes: the store is on its host."""


@dataclass(frozen=True, slots=True)
class EventBlock:
    """A block of the store. hashes: the engine's, in order. parent: of the first one. extra_keys: for each hash."""

    hashes: tuple[Any, ...]
    parent: Any
    token_ids: array[int]
    extra_keys: list[Any] | None
    lora_id: int | None
    lora_name: str | None


class BlockEvents:
    def __init__(
        self,
        stored: type,
        removed: type,
        hash_of: Callable[[Any], Any],
        extra_keys: Callable[[Any, int, int], Any],
        groups: Sequence[tuple[str | None, int | None]],
    ) -> None:
        """stored, removed: vLLM's event classes. hash_of: a block's hash in the form that events use. extra_keys: of
        (request, first, stop), those of the one hash of tokens first .. stop - 1. groups: of each KV group vLLM's word
        for its layers, and their window."""
        self._stored, self._removed = stored, removed
        self._hash_of = hash_of
        self._extra_keys = extra_keys
        each = [
            {"group_idx": at, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, "locality": LOCALITY}
            for at, (kind, window) in enumerate(groups)
        ]
        has_groups = "group_idx" in getattr(stored, "__struct_fields__", ())
        each = each if has_groups else each[:1]  # earlier versions' events are of a block, whatever its groups
        self._of_stored = [self._known(stored, one) for one in each]
        self._of_removed = [self._known(removed, one) for one in each]

    def described(self, view: Any, number: int, block_tokens: int, hash_tokens: int) -> EventBlock | None:
        """Describe a request's block of that number for later events. None if a block is not a whole number of the
        engine's hashes, or the engine has not hashed it. view: an `EngineView`."""
        request, each = view.request, block_tokens // hash_tokens
        first, stop = number * each, (number + 1) * each
        hashes = request.block_hashes
        if block_tokens % hash_tokens or stop > len(hashes):
            return None
        extra = [self._extra_keys(request, at * hash_tokens, (at + 1) * hash_tokens) for at in range(first, stop)]
        lora = request.lora_request
        return EventBlock(
            tuple(self._hash_of(one) for one in hashes[first:stop]),
            self._hash_of(hashes[first - 1]) if first else None,
            array("I", view.token_ids(first * hash_tokens, stop * hash_tokens)),
            extra if any(extra) else None,
            lora.lora_int_id if lora is not None else None,
            lora.lora_name if lora is not None else None,
        )

    def of(self, news: Iterable[Announcement[EventBlock]], hash_tokens: int) -> list[Any]:
        """The events for these announcements, in their order; if a block moved, its removal comes first."""
        events: list[Any] = []
        for one in news:
            block = one.block
            if one.went is not None:
                events += [self._removed(list(block.hashes), MEDIA[one.went], **each) for each in self._of_removed]
            if one.came is not None:
                more = self._known(self._stored, {"extra_keys": block.extra_keys})
                events += [
                    self._stored(
                        block_hashes=list(block.hashes),
                        parent_block_hash=block.parent,
                        token_ids=list(block.token_ids),
                        block_size=hash_tokens,
                        lora_id=block.lora_id,
                        medium=MEDIA[one.came],
                        lora_name=block.lora_name,
                        **each,
                        **more,
                    )
                    for each in self._of_stored
                ]
        return events

    @staticmethod
    def _known(event: type, fields: dict[str, Any]) -> dict[str, Any]:
        names = getattr(event, "__struct_fields__", ())
        return {name: value for name, value in fields.items() if name in names and value is not None}
