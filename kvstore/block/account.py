"""Where every token asked for came from, or why it did not come.

`MissReason` is a closed set: it is appended to, never renamed, because people's dashboards and alerts name its members.
`Account` is the only way in which hits and misses are reported. It cuts a prompt into segments in the order of its
tokens, so hits and misses always add up to the tokens asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kv_kernels.copies import Flaw
from kvstore.block.errors import BadInput, LeaseExpired, NotReady, StoreClosed
from tiering.tier import TierMiss


class HitTier(StrEnum):
    """Where a token's KV was found. `engine` is the engine's own cache, which the store did not have to touch."""

    ENGINE = "engine"
    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    PEER = "peer"  # another node's
    REMOTE = "remote"  # a remote engine


class Holder(NamedTuple):
    """A node with this many leading blocks of a chain, by its own hints. tier: the slowest of them."""

    node: bytes
    incarnation: bytes
    blocks: int
    tier: HitTier


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """Other nodes that have leading blocks of a prompt, most first. left_out: why more may have some; empty if none."""

    holders: Sequence[Holder] = ()
    left_out: str = ""


class MissReason(StrEnum):
    """Why a token has to be computed."""

    ABSENT = "absent"  # never stored, or forgotten so long ago that nothing is known of it
    EVICTED = "evicted"  # was stored, and had to make room
    DIVERGED = "diverged"  # the prefix up to here is stored, with another continuation
    OTHER_NAMESPACE = "other_namespace"  # stored for this prompt, but under another model, layout or codec
    PARTIAL_BLOCK = "partial_block"  # the tail that does not fill a block; only full blocks are stored
    LAST_TOKEN = "last_token"  # the engine has to compute at least one token
    GRID = "grid"  # cut off so that cold and warm prefill compute the same shapes
    WARMING = "warming"  # not ready yet: the index is loading after a restart, or the namespace is being opened
    IN_FLIGHT = "in_flight"  # being stored at this moment
    PINNED_FULL = "pinned_full"  # leases pin as much as they may, or hold what could be evicted
    DEADLINE = "deadline"  # too late: the blocks, or memory for them that others still map, store into or move
    TIER_DOWN = "tier_down"  # the tier that holds it does not answer
    UNREACHABLE = "unreachable"  # the store does not answer, or no node or remote engine that holds it does
    CORRUPT = "corrupt"  # a check failed; the frame is quarantined
    KEY_MISMATCH = "key_mismatch"  # it was written under a key that this store does not hold
    STALE_HINT = "stale_hint"  # a directory, a ticket or another node said it was there, and it was not
    QUOTA = "quota"  # the tenant's limit is reached, by this prompt alone or not; or others are guaranteed the rest
    NOT_ADMITTED = "not_admitted"  # the policy chose not to keep it
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"  # loading would take longer than computing
    AUDIT = "audit"  # computed on purpose, to compare with what is stored
    UNSUPPORTED = "unsupported"  # the engine or the model cannot take it
    DISABLED = "disabled"  # nothing was asked: the store is closed or not used, the namespace dropped, the request over
    NONFINITE = "nonfinite"  # not stored: it holds a NaN or an infinity, which the codec cannot write
    OUT_OF_RANGE = "out_of_range"  # not stored: its numbers are too far apart for the codec's scales
    INCOMPLETE = "incomplete"  # not stored: the engine has freed pages of one of its groups, as behind a window
    BUSY = "busy"  # as much is in flight for the client as may be; it can ask again soon
    NO_STATE = "no_state"  # the KV is there, and no state of recurrent layers at this boundary


# What a tier reports about a block, as a reason for its tokens. Total: a test walks over every member of `TierMiss`.
REASON_OF_FINDING: dict[TierMiss, MissReason] = {
    TierMiss.NEVER_SEEN: MissReason.ABSENT,
    TierMiss.EVICTED: MissReason.EVICTED,
    TierMiss.IN_FLIGHT: MissReason.IN_FLIGHT,
    TierMiss.CORRUPT: MissReason.CORRUPT,
    TierMiss.RETIRED: MissReason.KEY_MISMATCH,
    TierMiss.TIMED_OUT: MissReason.DEADLINE,
    TierMiss.DOWN: MissReason.TIER_DOWN,
    TierMiss.PINNED_FULL: MissReason.PINNED_FULL,
}

# Why a codec could not write a block, as the reason for which it is not stored. Total likewise.
REASON_OF_FLAW: dict[Flaw, MissReason] = {
    Flaw.NONFINITE: MissReason.NONFINITE,
    Flaw.OUT_OF_RANGE: MissReason.OUT_OF_RANGE,
}


Origin = TypeVar("Origin", HitTier, MissReason)


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` consecutive tokens of one prompt with one origin."""

    origin: HitTier | MissReason
    tokens: int


@dataclass(frozen=True, slots=True)
class Account:
    """Every token of one prompt, in order: hits first (a prefix), then misses. `asked` is their sum, always.

    >>> Account.of([(HitTier.DRAM, 128), (MissReason.ABSENT, 64), (MissReason.PARTIAL_BLOCK, 3)]).asked
    195
    """

    segments: tuple[Segment, ...]

    @staticmethod
    def of(parts: Iterable[tuple[HitTier | MissReason, int]]) -> Account:
        """Build from (origin, tokens) pairs in prompt order; empty ones are dropped, equal neighbours are joined."""
        segments: list[Segment] = []
        missed = False
        for origin, tokens in parts:
            assert tokens >= 0, "a segment cannot be negative"
            if tokens == 0:
                continue
            assert not (missed and isinstance(origin, HitTier)), "hits are a prefix: none may follow a miss"
            missed = missed or isinstance(origin, MissReason)
            if segments and segments[-1].origin is origin:
                segments[-1] = Segment(origin, segments[-1].tokens + tokens)
            else:
                segments.append(Segment(origin, tokens))
        return Account(tuple(segments))

    @staticmethod
    def missed(reason: MissReason, tokens: int, block_tokens: int) -> Account:
        """For a prompt about which the store could not be asked; the tail that fills no block would be missed anyway.

        >>> Account.missed(MissReason.UNREACHABLE, 130, 64).to_dict()["misses"]
        {'unreachable': 128, 'partial_block': 2}
        """
        tail = tokens % block_tokens if block_tokens else 0
        return Account.of([(reason, tokens - tail), (MissReason.PARTIAL_BLOCK, tail)])

    @property
    def asked(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def hits(self) -> dict[HitTier, int]:
        return self._sums(HitTier)

    @property
    def misses(self) -> dict[MissReason, int]:
        return self._sums(MissReason)

    def _sums(self, kind: type[Origin]) -> dict[Origin, int]:
        sums: dict[Origin, int] = {}
        for segment in self.segments:
            if isinstance(segment.origin, kind):
                sums[segment.origin] = sums.get(segment.origin, 0) + segment.tokens
        return sums

    @property
    def hit_tokens(self) -> int:
        """Length of the prefix that was found."""
        return sum(self.hits.values())

    def cut(self, at_token: int, reason: MissReason) -> Account:
        """The same prompt with every hit at or after `at_token` turned into a miss of `reason`."""
        before, after = self._split(at_token)
        return Account.of(before + [(reason if isinstance(one, HitTier) else one, tokens) for one, tokens in after])

    def missed_before(self, stop_token: int, reason: MissReason) -> Account:
        """The same prompt with `reason` for every miss before `stop_token`.

        >>> Account.of([(HitTier.DRAM, 64), (MissReason.ABSENT, 128)]).missed_before(128, MissReason.DEADLINE).misses
        {<MissReason.DEADLINE: 'deadline'>: 64, <MissReason.ABSENT: 'absent'>: 64}
        """
        before, after = self._split(stop_token)
        return Account.of([(one if isinstance(one, HitTier) else reason, tokens) for one, tokens in before] + after)

    def behind(self, tier: HitTier, tokens: int) -> Account:
        """The same prompt with its first `tokens` tokens counted as found in `tier`, which is above the others."""
        return Account.of([(tier, tokens), *self._split(tokens)[1]])

    def _split(self, at_token: int) -> tuple[list[tuple[HitTier | MissReason, int]], ...]:
        """Origins and their tokens, before that token and from it on."""
        before, after = [], []
        for segment in self.segments:
            taken = max(0, min(at_token, segment.tokens))
            before.append((segment.origin, taken))
            after.append((segment.origin, segment.tokens - taken))
            at_token -= taken
        return before, after

    def to_dict(self) -> dict[str, object]:
        """For `--json`: asked, hits by tier and misses by reason, in tokens."""
        return {
            "asked": self.asked,
            "hits": {str(tier): tokens for tier, tokens in self.hits.items()},
            "misses": {str(reason): tokens for reason, tokens in self.misses.items()},
        }


def reason_of(error: Exception) -> MissReason:
    """The miss reason of an exception that a verb, or opening a store, may raise."""
    if isinstance(error, StoreClosed):
        return MissReason.DISABLED
    if isinstance(error, NotReady):
        return MissReason.WARMING
    if isinstance(error, LeaseExpired):
        return MissReason.STALE_HINT
    if isinstance(error, BadInput):
        return MissReason.UNSUPPORTED
    return MissReason.UNREACHABLE
