"""The HBM pool: decoded pages inside the engine's own process (the only file here that imports torch).

A bounded pool on any torch device, so that a CPU can test it. It belongs to the client, is not behind the `Tier`
contract and crosses no wire: a block that is still here costs one copy on the device and no request to the store. Its
contents were verified when loaded, or made by this engine; keys are opaque bytes that name tenant, namespace and
prefix, so that nothing can be mixed up.

One pool holds blocks of one shape. Not thread-safe: it is used from where the engine runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HbmUsage:
    """Blocks and bytes of a pool; `capacity_blocks` is the bound."""

    blocks: int
    capacity_blocks: int
    block_bytes: int
    evicted: int


class HbmPool:
    """Decoded blocks, least recently used out first.

    device: where the memory is. elements, dtype: of one block, all layers and planes, in an order that is the caller's.
    capacity_bytes: the bound; memory is taken once, at the start. A pool too small for one block holds nothing.
    """

    def __init__(self, device: torch.device | str, elements: int, dtype: torch.dtype, capacity_bytes: int) -> None:
        self._block_bytes = elements * dtype.itemsize
        self._capacity = max(0, capacity_bytes) // self._block_bytes
        self._memory = torch.empty((self._capacity, elements), dtype=dtype, device=device)
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self._capacity - 1, -1, -1))
        self._evicted = 0

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are here. Changes nothing."""
        for count, key in enumerate(keys):
            if key not in self._slots:
                return count
        return len(keys)

    def get(self, key: bytes) -> torch.Tensor | None:
        """A block's memory, valid until the next `put`; it counts as used now."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        self._slots.move_to_end(key)
        return self._memory[slot]

    def put(self, key: bytes) -> torch.Tensor | None:
        """Memory for a block, for the caller to fill at once; None where it is here already or the pool holds nothing.

        Evicts the least recently used block when full.
        """
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        if not self._capacity:
            return None
        if not self._free:
            _, slot = self._slots.popitem(last=False)
            self._free.append(slot)
            self._evicted += 1
        slot = self._free.pop()
        self._slots[key] = slot
        return self._memory[slot]

    def discard(self, key: bytes) -> None:
        """Drop a block, e.g. one whose filling failed."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Drop everything: the weights changed, or another model gets the pool."""
        self._slots.clear()
        self._free = list(range(self._capacity - 1, -1, -1))

    def usage(self) -> HbmUsage:
        """Blocks and bytes now."""
        return HbmUsage(len(self._slots), self._capacity, self._block_bytes, self._evicted)

    def check(self) -> None:
        """Every slot is free or holds exactly one block."""
        assert sorted([*self._slots.values(), *self._free]) == list(range(self._capacity))
