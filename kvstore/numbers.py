"""Numbers that cross to tenants: a count, permuted under a key (floor 2).

A tenant sees the numbers of its own leases, reservations, extents and connections. If they were the store's count, it
would read off the gaps between two of its own what all others did meanwhile. Permuted they are unique as the count is,
and to whoever lacks the key as good as drawn at random: how far two of them are apart says nothing.

    count ---> upper half, lower half of `bits` bits ---> ROUNDS x (upper, lower = lower, upper ^ F(round, lower)) --->

That is a Feistel network with keyed BLAKE2b for F (Luby and Rackoff, 1988), so that no two counts have one number,
whatever F is. Nobody has to look back from a number to its count: tables are by the number. The key is handed in.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import count

KEY_BYTES = 16
ROUNDS = 6
_WORD_BYTES = 8


class Numbers:
    """Distinct numbers above 0, none of which tells how many there were. Thread-safe."""

    def __init__(self, key: bytes, bits: int) -> None:
        """key: `KEY_BYTES` random bytes. bits: even. Numbers are below 2**bits, the first 2**bits of them; the next
        ones, if anybody ever needs those, are from there to twice as much, and so on."""
        assert bits % 2 == 0 and 0 < bits <= 64 and len(key) == KEY_BYTES
        self._half = bits // 2
        self._bits = bits
        self._mask = (1 << self._half) - 1
        self._rounds = [blake2b(bytes([one]), key=key, digest_size=_WORD_BYTES) for one in range(ROUNDS)]
        self._counts = count()  # which threads may share

    def __call__(self) -> int:
        """The next one."""
        while True:
            number = self.of(next(self._counts))
            if number:  # 0 stands for none
                return number

    def of(self, counted: int) -> int:
        """The number that a count has, which may be 0."""
        half, mask = self._half, self._mask
        upper, lower = counted >> half & mask, counted & mask
        for keyed in self._rounds:
            state = keyed.copy()
            state.update(lower.to_bytes(_WORD_BYTES, "little"))
            upper, lower = lower, upper ^ int.from_bytes(state.digest(), "little") & mask
        return counted >> self._bits << self._bits | upper << half | lower
