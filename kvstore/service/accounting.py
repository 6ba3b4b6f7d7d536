"""Counts what tenants asked the sidecar for and what they got: hits by tier and misses by reason, by namespace; and
service by threads that all of them share, which decides whose turn is next.

    look-up   asked += the prompt's full blocks; if the match ends early, the rest is missed for its reason, and the
              blocks found are `found` until a lease claims them
    lease     takes what its look-up found: granted blocks are hits of the tier where they lay (of `engine` if the
              client said that it has them), the others are missed for the reason why the lease ended
    report    a block that failed its reader's check: from there to the lease's end hits become misses, `corrupt`
    told      an engine reports what it had itself, what it loaded and why it missed the rest, to the token. The
              look-ups and leases of its requests say so (`is_told`), and book no tokens

    asked == hits + misses + found          always, in every namespace and in sum

Hits and `found` rise and fall, and a scraped counter must never fall. So each of them is two counters that only rise:
hits == granted - revoked, and found == found then - claimed.

A lease without a look-up counts as asked for too. Matches of puts are no look-ups. Of a prompt that no engine reports
only whole blocks count: the sidecar never sees its tail. Keys lead from a lease to its look-up and are forgotten then;
token ids never come here.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import BadInput
from kvstore.protocol import messages as m
from kvstore.protocol.messages import LeaseReply, MatchReply, ReserveReply
from kvstore.protocol.told import GoneNote, RequestRecord, RequestTold, SavingsTold, StoreNote
from kvstore.protocol.words import ID_DIGITS, printable
from kvstore.service.sessions import ClientState
from kvstore.status.tree import LookupCounts, PutCounts, SavingsStatus, ServedCounts
from tiering.clock import Clock
from tiering.counts.histogram import Histogram, HistogramCounts
from tiering.counts.tally import Eviction, EvictionCause

OPEN_LOOKUPS = 4096
"""Look-ups of all namespaces that a lease may still claim; older ones' blocks stay `found`."""

_IN_DRAM = frozenset({HitTier.DRAM, HitTier.PEER, HitTier.REMOTE})
REMEMBERED_LEASES = 16384
"""How many of the last leases may still be reported."""
MOST_ASKED = 1 << 24
"""Tokens of one reported request."""
NAMED_TENANTS = 20
"""Tenants with counts of their own: the first ones of this run. All later ones share one count for the whole run: if a
tenant moved between the two, both counts would fall."""
NAMED_NAMESPACES = 32
"""Namespaces that are described: those opened last."""
OTHER = "other"


class Outcome(StrEnum):
    """Of tokens: asked == (granted - revoked) + missed + (found - claimed). Found: by look-ups; claimed: of these,
    leased later. Granted: by leases, by tier; revoked: of these, what failed its reader's check. Missed: by reason."""

    ASKED = "asked"
    FOUND = "found"
    CLAIMED = "claimed"
    GRANTED = "granted"
    REVOKED = "revoked"
    MISSED = "missed"


class OfferedTokens(StrEnum):
    """The fate of tokens that a put offered. Tokens stored before are not counted: a long put names them with each of
    its pieces."""

    RESERVED = "reserved"
    REFUSED = "refused"


class LeaseResult(StrEnum):
    """How much of the wanted prefix a lease was granted."""

    WHOLE = "whole"
    PART = "part"
    NONE = "none"


LEASE_ENDS = (
    ("dram", LeaseResult.WHOLE),
    ("dram", LeaseResult.PART),
    ("nvme", LeaseResult.WHOLE),
    ("nvme", LeaseResult.PART),
    ("none", LeaseResult.NONE),
)
"""Every pair of the slowest tier of a lease's blocks and how many of those wanted were granted."""


class NamespaceInfo(NamedTuple):
    """A namespace, for people. tenant: its opaque id. model, codec: clients' text, printable. block: in tokens."""

    digest: bytes
    tenant: bytes
    model: str
    codec: str
    block_tokens: int


Counts = Counter[tuple[str, str]]
"""By what is counted, and its origin: a tier, a reason, or "". In tokens but for look-ups, leases and reports."""


@dataclass(slots=True)
class _Ledger:
    """Of one namespace. tenant: where its tokens count as well, by outcome."""

    block_tokens: int
    tenant: Counter[str]
    counts: Counts = field(default_factory=Counter)
    used_at: float | None = None


@dataclass(slots=True)
class _Granted:
    """A lease: the origin of each of its blocks, in runs from the first on, up to the first that was reported."""

    namespace: int
    runs: list[tuple[HitTier, int]]


class Counting:
    """Counts of one run of a sidecar. Thread-safe; the lock is held for a few additions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ledgers: dict[int, _Ledger] = {}
        self._whole: Counts = Counter()
        self._tenants: dict[bytes, Counter[str]] = {}
        # Namespace, last key found, number of keys -> how many such look-ups no lease has claimed yet.
        self._open: OrderedDict[tuple[int, bytes, int], int] = OrderedDict()
        self._granted: OrderedDict[int, _Granted] = OrderedDict()
        self._lookup_seconds, self._put_seconds = Histogram(), Histogram()
        self._lease_seconds = {end: Histogram() for end in LEASE_ENDS}
        self._described: OrderedDict[bytes, NamespaceInfo] = OrderedDict()

    def now(self) -> float:
        """Unix time."""
        return self._clock.wall_seconds()

    def opened(self, number: int, block_tokens: int, info: NamespaceInfo | None = None) -> None:
        """A namespace was opened. info: for people."""
        with self._lock:
            tenant = self._tenant(info.tenant if info is not None else b"")
            self._ledgers.setdefault(number, _Ledger(block_tokens, tenant)).used_at = self.now()
            if info is not None:
                self._described[info.tenant + info.digest] = info
                self._described.move_to_end(info.tenant + info.digest)
                if len(self._described) > NAMED_NAMESPACES:
                    self._described.popitem(last=False)

    def looked_up(
        self, number: int, keys: Sequence[bytes], reply: MatchReply, seconds: float = 0.0, is_told: bool = False
    ) -> None:
        """A look-up was answered. seconds: spent in the store. is_told: its engine reports the request's tokens."""
        with self._lock:
            ledger = self._used(number)
            self._book(ledger, "lookups", 1)
            self._lookup_seconds.add(seconds)
            if is_told:
                return
            asked, found = len(keys) * ledger.block_tokens, reply.blocks * ledger.block_tokens
            self._book(ledger, Outcome.ASKED, asked)
            self._book(ledger, Outcome.FOUND, found)
            self._book(ledger, Outcome.MISSED, asked - found, reply.reason or MissReason.ABSENT)
            if reply.blocks:
                name = number, keys[0], reply.blocks
                self._open[name] = self._open.get(name, 0) + 1
                if len(self._open) > OPEN_LOOKUPS:
                    self._open.popitem(last=False)

    def leased(
        self,
        number: int,
        keys: Sequence[bytes],
        reply: LeaseReply,
        seconds: float = 0.0,
        found: int = 0,
        is_told: bool = False,
    ) -> None:
        """A lease was answered. seconds: spent in the store. found: blocks of the look-up before it, if fewer: those
        that are not leased stay found. is_told: as in `looked_up`."""
        with self._lock:
            ledger = self._used(number)
            if not keys:
                return
            self._book(ledger, "leases", 1)
            runs = _runs(reply)
            granted = sum(blocks for _, blocks in runs)
            self._lease_seconds[_lease_end(runs, granted == len(keys))].add(seconds)
            if is_told:
                runs = []
            else:
                self._claim(ledger, (number, keys[0], max(found, len(keys))), len(keys) * ledger.block_tokens)
                for tier, blocks in runs:
                    self._book(ledger, Outcome.GRANTED, blocks * ledger.block_tokens, tier)
                missed = (len(keys) - granted) * ledger.block_tokens
                self._book(ledger, Outcome.MISSED, missed, reply.reason or MissReason.ABSENT)
            if reply.lease:
                self._granted[reply.lease] = _Granted(number, runs)
                if len(self._granted) > REMEMBERED_LEASES:
                    self._granted.popitem(last=False)

    def told(self, number: int, requests: Sequence[RequestTold]) -> None:
        """An engine reports its requests' tokens. Raises `BadInput`, and books nothing, if they do not add up."""
        accounts = [_account_of(one) for one in requests if one.counts]
        with self._lock:
            ledger = self._used(number)
            for asked, hits, misses in accounts:
                self._book(ledger, Outcome.ASKED, asked)
                for tier, tokens in hits:
                    self._book(ledger, Outcome.GRANTED, tokens, tier)
                for reason, tokens in misses:
                    self._book(ledger, Outcome.MISSED, tokens, reason)

    def reported(self, lease: int, block: int) -> None:
        """A lease's holder reports that a block failed a check: from there on its blocks count as missed."""
        with self._lock:
            granted = self._granted.get(lease)
            if granted is None:
                return
            ledger = self._used(granted.namespace)
            self._book(ledger, "reports", 1)
            kept, left = [], max(0, block)
            for tier, blocks in granted.runs:
                stays = min(blocks, left)
                left -= stays
                if stays:
                    kept.append((tier, stays))
                lost = (blocks - stays) * ledger.block_tokens
                self._book(ledger, Outcome.REVOKED, lost, tier)
                self._book(ledger, Outcome.MISSED, lost, MissReason.CORRUPT)
            granted.runs = kept

    def offered(self, number: int, blocks: int, skipped: int, reply: ReserveReply, *, waits: bool = False) -> None:
        """A client asked to store the blocks of a chain behind its first `skipped`. waits: it will ask again for those
        that it did not get."""
        with self._lock:
            tokens, refused = self._used(number).block_tokens, 0
            if reply.stopped_at is not None and not waits:
                refused = min(blocks, skipped + blocks - reply.stopped_at)
                self._whole["put refused", reply.reason or MissReason.ABSENT] += refused * tokens
            self._whole["put", OfferedTokens.REFUSED] += refused * tokens
            self._whole["put", OfferedTokens.RESERVED] += len(reply.blocks) * tokens

    def filled(self, seconds: float) -> None:
        """A client committed the last block of a reservation, so many seconds after it had asked for it."""
        with self._lock:
            self._put_seconds.add(seconds)

    def of_namespaces(self) -> dict[int, tuple[LookupCounts, float | None]]:
        """Of each namespace its look-ups, and when it was last used."""
        with self._lock:
            found = {
                number: (Counter(one.counts), one.block_tokens, one.used_at) for number, one in self._ledgers.items()
            }
        return {number: (_looked(counts, tokens), used_at) for number, (counts, tokens, used_at) in found.items()}

    def served(self, names: Mapping[bytes, str]) -> tuple[LookupCounts, ServedCounts]:
        """All look-ups in tokens, and all other counts, at one moment. names: of tenants."""
        with self._lock:
            whole, described = Counter(self._whole), list(self._described.values())
            tenants = {tenant: Counter(mine) for tenant, mine in self._tenants.items()}
            lookups, puts = self._lookup_seconds.now(), self._put_seconds.now()
            leases: dict[str, dict[str, HistogramCounts]] = {}
            for (tier, end), one in self._lease_seconds.items():
                leases.setdefault(tier, {})[end] = one.now()
        offered = {str(result): whole["put", result] for result in OfferedTokens}
        return _looked(whole), ServedCounts(
            lookups,
            leases,
            PutCounts(offered, _of(whole, "put refused"), puts),
            {_tenant_label(one): {what: mine[what] for what in Outcome} for one, mine in tenants.items()},
            [(_tenant_label(one), printable(names[one])) for one in tenants if one in names],
            [
                (one.digest.hex()[:ID_DIGITS], _tenant_label(one.tenant), one.model, one.codec, str(one.block_tokens))
                for one in described
                if one.tenant in names
            ],
        )

    def _tenant(self, tenant: bytes) -> Counter[str]:
        by_tenant = self._tenants
        name = tenant if tenant in by_tenant or len(by_tenant) - (b"" in by_tenant) < NAMED_TENANTS else b""
        return by_tenant.setdefault(name, Counter())

    def _book(self, ledger: _Ledger, what: str, count: int, origin: str = "") -> None:
        if count:
            ledger.counts[what, origin] += count
            ledger.tenant[what] += count
            self._whole[what, origin] += count

    def _claim(self, ledger: _Ledger, name: tuple[int, bytes, int], tokens: int) -> None:
        """Take a lease's tokens from what its look-up found; without one they are asked for now."""
        times = self._open.pop(name, 0)
        self._book(ledger, Outcome.CLAIMED if times else Outcome.ASKED, tokens)
        if times > 1:
            self._open[name] = times - 1

    def _used(self, number: int) -> _Ledger:
        ledger = self._ledgers[number]
        ledger.used_at = self.now()
        return ledger


def _tenant_label(tenant: bytes) -> str:
    """From a tenant's opaque id: it does not reveal the name, and is the same after a restart."""
    return tenant.hex()[:ID_DIGITS] if tenant else OTHER


def _of(counts: Counts, wanted: str) -> dict[str, int]:
    return {str(origin): count for (what, origin), count in counts.items() if what == wanted and count}


def _looked(counts: Counts, block_tokens: int = 0) -> LookupCounts:
    """In blocks each tier, each reason and what was found is rounded down; in none without block_tokens."""
    granted, revoked, missed = (_of(counts, one) for one in (Outcome.GRANTED, Outcome.REVOKED, Outcome.MISSED))
    hits, found = dict(Counter(granted) - Counter(revoked)), counts[Outcome.FOUND, ""] - counts[Outcome.CLAIMED, ""]

    def in_blocks(tokens: dict[str, int]) -> dict[str, int]:
        return {origin: count // block_tokens for origin, count in tokens.items()} if block_tokens else {}

    hit_blocks, miss_blocks, found_blocks = in_blocks(hits), in_blocks(missed), sum(in_blocks({"": found}).values())
    asked = counts[Outcome.ASKED, ""]
    loaded = sum(count for origin, count in hits.items() if origin != HitTier.ENGINE)
    return LookupCounts(
        asked,
        hits,
        missed,
        found,
        sum(hit_blocks.values()) + sum(miss_blocks.values()) + found_blocks,
        hit_blocks,
        miss_blocks,
        found_blocks,
        counts["lookups", ""],
        counts["leases", ""],
        counts["reports", ""],
        loaded,
        loaded / asked if asked else None,
        counts[Outcome.FOUND, ""],
        counts[Outcome.CLAIMED, ""],
        granted,
        revoked,
    )


def _runs(reply: LeaseReply) -> list[tuple[HitTier, int]]:
    """The origins of the granted blocks; those before the first one wanted are the engine's own."""
    own = min(reply.first_block, reply.blocks)
    runs = [(HitTier.ENGINE, own)] if own else []
    for tier, blocks in reply.tiers:
        skipped = min(own, blocks)
        own -= skipped
        if blocks > skipped:
            runs.append((tier, blocks - skipped))
    return runs


def _lease_end(runs: Sequence[tuple[HitTier, int]], is_whole: bool) -> tuple[str, LeaseResult]:
    """The engine's own blocks come from no tier; fetched ones are in DRAM by then."""
    tiers = {tier for tier, _ in runs}
    if not tiers & _IN_DRAM and HitTier.NVME not in tiers:
        return "none", LeaseResult.NONE
    return "nvme" if HitTier.NVME in tiers else "dram", LeaseResult.WHOLE if is_whole else LeaseResult.PART


def _account_of(told: RequestTold) -> tuple[int, list[tuple[HitTier, int]], list[tuple[MissReason, int]]]:
    """What an engine reports of a request. A reason of a newer client counts as absent."""
    explained, tiers = sum(told.hits.values()) + sum(told.misses.values()), set(HitTier)
    if explained != told.asked or told.asked > MOST_ASKED or not told.hits.keys() <= tiers:
        raise BadInput(
            f"a request's {told.asked} tokens, and hits and misses of {explained}; give at most {MOST_ASKED}, each "
            f"once, and tiers of {', '.join(HitTier)}"
        )
    known = set(MissReason)
    misses = [(MissReason(name) if name in known else MissReason.ABSENT, count) for name, count in told.misses.items()]
    return told.asked, [(HitTier(name), count) for name, count in told.hits.items()], misses


# ---------------------------------------------------------------------------------------------------------------------
# Engines' reports on their requests, beside what the sidecar saw of these: for `kvstore why`, and the time that hits
# saved. For people: nothing here decides anything.
#
#     a lease names the request that it serves  > noted    > its engine reports its fate         > noted beside that
#     an engine reports what its loads saved    > summed   > the sums stay when it disconnects
#
# Each tenant has an equal number of remembered requests, so that none displaces another's. Reports are bounded by the
# message and shown as text.


Gone = tuple[Eviction, bool] | None
"""How a block was evicted, and whether it had a ttl."""
TTL = "ttl"

MOST_REQUESTS = 1024
"""Of one tenant, the latest."""
MOST_LEASES = 8
"""Of one request, the first ones, and as many look-ups; only the engine counts more."""
MOST_PURGES = 1024
"""Tenants whose last purge is remembered."""
MOST_SECONDS = 1e9
"""The most that an engine may report as saved at once."""
MOST_MS = 1e9
LOADED_TIERS = ("dram", "nvme")
LATEST_LOADS = 0.9
"""Weight that earlier loads of a tier keep with each new one."""
LEAST_LOAD_MS, MOST_RATE = 0.001, 1e12
"""Bounds of a reported load time, and of the tokens per second that are shown."""
MOST_ENGINES = 1024
"""Engines whose times to first token are kept; of more, the one that reported longest ago is dropped."""


@dataclass(slots=True)
class _KnownRequest:
    engine: str
    namespace: int = -1
    looked: list[StoreNote] = field(default_factory=list)
    leases: list[StoreNote] = field(default_factory=list)
    reported: int = 0
    told_at: float | None = None
    told: RequestTold | None = None

    @property
    def noted_at(self) -> float:
        """When it was last noted."""
        return max([self.told_at or 0.0, *(one.at for one in self.looked), *(one.at for one in self.leases)])


class ToldRequests:
    """One sidecar's. Thread-safe; the lock is held for some additions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By tenant, then by session and request; the most recently noted at the end.
        self._requests: dict[bytes, OrderedDict[tuple[bytes, str], _KnownRequest]] = {}
        self._saved = self._regretted = 0.0
        self._tellers: OrderedDict[bytes, SavingsTold] = OrderedDict()  # by session
        self._loads: dict[bytes, dict[int, dict[str, tuple[float, float]]]] = {}  # tokens, ms: tenant, namespace, tier
        self._purged: OrderedDict[str, float] = OrderedDict()  # by tenant's name: when

    def answered(
        self,
        caller: ClientState,
        verb: m.MatchPrefix | m.LeasePrefix,
        number: int,
        reply: MatchReply | LeaseReply,
        seconds: float,
        gone: Gone,
    ) -> None:
        """A look-up or a lease for a request was answered, after so many seconds in the store. number: of the
        namespace. gone: how the first block that it missed was evicted."""
        now, lease = self._clock.wall_seconds(), verb if isinstance(verb, m.LeasePrefix) else None
        first = lease.first_block if lease is not None else 0
        counts = seconds, len(verb.keys) - first, max(0, reply.blocks - first), by_tier(reply.tiers)
        reasons = str(reply.reason or ""), printable(reply.detail)
        with self._lock:
            noted = self._noted(caller, verb.request)
            noted.namespace = number
            notes = noted.looked if lease is None else noted.leases
            if len(notes) < MOST_LEASES:
                notes.append(StoreNote(now, *counts, *reasons, _gone_note(gone, now), None if lease is None else first))

    def reported(self, caller: ClientState, request: str) -> None:
        """A block that was leased for a request failed its reader's check."""
        with self._lock:
            noted = self._requests.get(caller.keys.tenant, OrderedDict()).get((caller.session.token, request))
            if noted is not None:
                noted.reported += 1

    def tell(self, caller: ClientState, verb: m.Tell) -> None:
        """An engine reports on its requests. Raises `BadInput` for impossible numbers."""
        savings = verb.savings
        if savings is not None:
            _check(savings)
        for one in verb.requests:
            if not 0 <= one.load_ms <= MOST_MS:
                raise BadInput(f"load_ms={one.load_ms:g} of a request; give 0 to {MOST_MS:g}")
        now = self._clock.wall_seconds()
        with self._lock:
            for one in (some for some in verb.requests if some.request):
                noted = self._noted(caller, one.request)
                noted.told_at, noted.told = now, _shown(one)
                if one in verb.firsts:
                    self._took(caller.keys.tenant, noted.namespace, one)
            if savings is not None:
                self._saved += savings.saved_seconds
                self._regretted += savings.regret_seconds
                self._tellers[caller.session.name] = savings
                self._tellers.move_to_end(caller.session.name)
                if len(self._tellers) > MOST_ENGINES:
                    self._tellers.popitem(last=False)

    def why(self, request: str, names: Mapping[bytes, str], models: Callable[[int], str]) -> m.WhyReply:
        """What is known of requests whose names begin so. names: of the tenants to search. models: a namespace's model,
        by its number."""
        found: list[tuple[float, str, str, _KnownRequest]] = []
        kept = 0
        for tenant, name in names.items():
            with self._lock:  # one tenant at a time, so that leases can be noted in between
                mine = list(reversed(self._requests.get(tenant, OrderedDict()).items()))
            kept += len(mine)
            found += [(one.noted_at, own, name, one) for (_, own), one in mine if own.startswith(request)]
        found.sort(key=lambda one: -one[0])
        records = [
            RequestRecord(
                printable(own),
                printable(name),
                printable(one.engine),
                printable(models(one.namespace)) if one.namespace >= 0 else "",
                list(one.leases),
                one.told_at,
                one.told,
                list(one.looked),
                one.reported,
                self._purged.get(name),
            )
            for _, own, name, one in found[: m.MAX_RECORDS]
        ]
        return m.WhyReply(records, kept)

    def savings(self) -> SavingsStatus | None:
        """The sum of all engines' reports since the sidecar began; None without any."""
        with self._lock:
            if not self._tellers:
                return None
            measured = [
                (one.ttft_saved_ms, one.ttft_saved_error_ms)
                for one in self._tellers.values()
                if one.ttft_saved_ms is not None and one.ttft_saved_error_ms is not None
            ]
            mean = error = None
            if measured:  # engines are weighted by certainty
                weights = [1.0 / max(spread, 1e-3) ** 2 for _, spread in measured]
                mean = sum(value * weight for (value, _), weight in zip(measured, weights, strict=True)) / sum(weights)
                error = (1.0 / sum(weights)) ** 0.5
            return SavingsStatus(self._saved, self._regretted, len(self._tellers), mean, error)

    def sums(self) -> tuple[float, float]:
        """GPU seconds saved, and regretted: both only grow."""
        with self._lock:
            return self._saved, self._regretted

    def load_rates(self, tenant: bytes, number: int) -> dict[str, float]:
        """Tokens per second of engines' recent loads from a namespace, by the tier that had all of a load."""
        with self._lock:
            loads = self._loads.get(tenant, {}).get(number, {})
            return {tier: min(1000 * tokens / ms, MOST_RATE) for tier, (tokens, ms) in loads.items()}

    def forget(self, tenant: bytes, name: str) -> None:
        """A tenant was purged."""
        with self._lock:
            self._requests.pop(tenant, None)
            self._loads.pop(tenant, None)
            self._purged[name] = self._clock.wall_seconds()
            self._purged.move_to_end(name)
            if len(self._purged) > MOST_PURGES:
                self._purged.popitem(last=False)

    def _took(self, tenant: bytes, number: int, told: RequestTold) -> None:
        """Note a load that its request waited for, if one tier had all of it. Under the lock."""
        tiers = [tier for tier in LOADED_TIERS if told.hits.get(tier)]
        if number < 0 or len(tiers) != 1 or told.load_ms < LEAST_LOAD_MS:
            return
        loads = self._loads.setdefault(tenant, {}).setdefault(number, {})
        tokens, ms = loads.get(tiers[0], (0.0, 0.0))
        loads[tiers[0]] = tokens * LATEST_LOADS + told.hits[tiers[0]], ms * LATEST_LOADS + told.load_ms

    def _noted(self, caller: ClientState, request: str) -> _KnownRequest:
        """Under the lock."""
        mine = self._requests.setdefault(caller.keys.tenant, OrderedDict())
        name = caller.session.token, request
        noted = mine.get(name)
        if noted is None:
            noted = mine[name] = _KnownRequest(caller.session.engine)
            if len(mine) > MOST_REQUESTS:
                mine.popitem(last=False)
        mine.move_to_end(name)
        return noted


def by_tier(runs: Sequence[tuple[HitTier, int]]) -> dict[str, int]:
    """Blocks of each tier, in runs."""
    tiers: dict[str, int] = {}
    for tier, blocks in runs:
        tiers[str(tier)] = tiers.get(str(tier), 0) + blocks
    return tiers


def _gone_note(gone: Gone, now: float) -> GoneNote | None:
    if gone is None:
        return None
    eviction, had_ttl = gone
    cause = TTL if had_ttl and eviction.cause is not EvictionCause.DROP else str(eviction.cause)
    return GoneNote(now - eviction.seconds_ago, str(eviction.tier), cause)


def _check(savings: SavingsTold) -> None:
    for name in ("saved_seconds", "regret_seconds"):
        value = getattr(savings, name)
        if not 0 <= value <= MOST_SECONDS:
            raise BadInput(f"{name}={value:g}; give 0 to {MOST_SECONDS:g}")
    for name in ("ttft_saved_ms", "ttft_saved_error_ms"):
        value = getattr(savings, name)
        if value is not None and not (isfinite(value) and abs(value) <= MOST_MS):
            raise BadInput(f"{name}={value:g}; give a number of milliseconds")


def _shown(told: RequestTold) -> RequestTold:
    """Made safe for a terminal."""
    hits, misses, put_reasons = (
        {printable(name): count for name, count in counts.items()}
        for counts in (told.hits, told.misses, told.put_reasons)
    )
    return msgspec.structs.replace(
        told,
        request=printable(told.request),
        detail=printable(told.detail),
        hits=hits,
        misses=misses,
        put_reasons=put_reasons,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Exempts objects that live until the sidecar ends from the interpreter's search for cycles. A part of a namespace is
# five objects, and a search of 1.2 million, for 512 namespaces of 450 parts, stops every thread for a third of a
# second. So they are set aside (`gc.freeze`) after every few thousand parts, behind a search that walks only the
# objects made since.


SET_ASIDE_PARTS = 4096
"""Set aside after this many parts: their objects are walked in some milliseconds."""


def set_aside() -> None:
    """Exempt all live objects from the search for cycles."""
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------------------------------------------------------------
# Turns at a thread that all tenants share: the least-served tenant comes first. Start-time fair queueing (Goyal, Vin,
# Cheng, SIGCOMM 1996). A tenant's next piece of work starts where its last one ended, or at the virtual time if that is
# later; the smallest start comes first, and the virtual time is the start of the piece begun last. So a tenant waits
# for one piece of each other tenant, however many connections they have; and a tenant that was idle, or is new, has no
# credit that others would have to wait for.


T = TypeVar("T")


class Turns:
    """The turns at one thread. now: the virtual time, in the unit of costs."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class ServiceShare:
    """One tenant's service at the thread."""

    __slots__ = ("_ends_at", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._ends_at = 0.0

    @property
    def starts_at(self) -> float:
        """Start of its next piece; the tenant with the smallest is served next."""
        return max(self._ends_at, self._turns.now)

    def begin(self) -> None:
        """Begin a piece; pay its cost before or while others are begun."""
        self._turns.now = self.starts_at

    def pay(self, cost: float) -> None:
        """Pay for the begun piece, or for service without a turn."""
        self._ends_at = self.starts_at + cost


class Line(Generic[T]):
    """One tenant's work for a pool of threads: waiting pieces, how many run, and its share of the threads' time."""

    __slots__ = ("_pool", "running", "share", "waiting")

    def __init__(self, pool: Lines[T], turns: Turns) -> None:
        self._pool = pool
        self.running = 0
        self.share = ServiceShare(turns)
        self.waiting: deque[T] = deque()

    def leave_out(self, is_gone: Callable[[T], bool]) -> None:
        """Drop pieces of clients that are gone."""
        self.waiting = deque(one for one in self.waiting if not is_gone(one))

    def end(self, seconds: float) -> None:
        """A piece of it has ended that took so long."""
        self.running -= 1
        self._pool.running -= 1
        self.share.pay(seconds)


class Lines(Generic[T]):
    """A pool of threads with a line per tenant: the next free thread goes to the tenant with the fewest running, of
    these to the least-served one, and while several tenants have work, each leaves some threads to the others."""

    def __init__(self, threads: int, name: str, rank: Callable[[T], float] | None = None) -> None:
        """name: of the threads. rank: the tenant's piece with the lowest is begun first; without it, the oldest."""
        self.executor = ThreadPoolExecutor(threads, name)
        self.running = 0
        self._threads, self._rank, self._turns = threads, rank, Turns()
        self._lines: list[Line[T]] = []

    def new_line(self) -> Line[T]:
        self._lines.append(Line(self, self._turns))
        return self._lines[-1]

    def begin(self) -> T | None:
        """Begin the next piece; None if none waits, or all threads are busy."""
        if self.running >= self._threads:
            return None
        most = self._threads if len(self._lines) == 1 else max(1, self._threads * 3 // 4)
        wanting = [one for one in self._lines if one.waiting and one.running < most]
        if not wanting:
            return None
        line = min(wanting, key=lambda one: (one.running, one.share.starts_at))
        line.running += 1
        self.running += 1
        line.share.begin()
        piece = min(line.waiting, key=self._rank) if self._rank is not None else line.waiting[0]
        line.waiting.remove(piece)
        return piece
