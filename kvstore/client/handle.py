"""What a user holds: a store, its namespaces, and the five verbs over token ids and pages.

    match > lease > get > release,  put                                      get_by_layer: for attention to begin early
    submit_match, submit_lease: the same for a thread that must not wait     attach: a lease of another process
    which, submit_which: of blocks that are no chain, such as states, those that are there

The handle hashes prompts and encodes pages; `get` decodes them and checks every byte that it hands out. The store
behind the `Door` sees keys, places and digests only. The same handle works on a store in this process and on one behind
a socket. A miss is never an exception: the account of a match, a lease or a load says where each token came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec

from kv_kernels.copies import BlockCopy, Digest, Flaw
from kvstore.block.account import REASON_OF_FLAW, Account, HitTier, MissReason
from kvstore.block.display_names import checked_name
from kvstore.block.errors import BadInput, LayoutMismatch, LeaseExpired, StoreClosed
from kvstore.block.identity import ExtraKey, Namespace, PrefixHasher, Prompt, as_extra_keys, token_bytes
from kvstore.block.layout import Layout
from kvstore.block.pages import Codec, Pages, codec_meant, cut
from kvstore.client.get import GetOperation, GetSource, Loaded
from kvstore.client.lease import Lease
from kvstore.client.pending import AWAIT_GRACE_SECONDS, PendingReply, ReadyReply
from kvstore.config import MAX_SECONDS
from kvstore.protocol import messages as m
from kvstore.protocol.door import (
    MAX_PRIORITY,
    AttachLease,
    Door,
    NamedLease,
    Request,
    ReservationLost,
    Submitted,
    check_collective,
    window_name,
)
from kvstore.protocol.lease_ticket import LeaseTicket
from kvstore.protocol.messages import MAX_TICKET_CHARACTERS, Grant, LeaseReply, MatchReply, ReserveReply
from kvstore.protocol.requests import Requests, check_request
from kvstore.protocol.told import MAX_TOLD_REQUESTS, RequestTold, SavingsTold
from tiering.counts.awaits import MAX_AWAIT_SECONDS, AwaitEnd
from tiering.frame import HEADER_BYTES, digest

A = TypeVar("A")
ExtraKeys = Sequence[ExtraKey | bytes | str]
DURABILITIES = ("volatile", "disk")
DURABLE_SECONDS = 30.0  # a put's default wait for the disk
EARLY_BLOCKS, LAST_BLOCKS = 48, 16
"""Through a socket, so many blocks at a time are committed while the next are filled; a put waits for the last few."""
IN_FLIGHT_SECONDS = 2.0
"""How long a put waits for blocks that another put is storing, from the last one on that became readable. It takes no
more than half of the time that its deadline leaves, so that the rest can still be stored."""
WINDOW_BLOCKS = 128
"""Blocks that a put stores at a time. Readers see the first blocks early, and wait at most about a millisecond for the
lock. Small steps are done for all blocks first, then the copies: a copy of megabytes evicts the interpreter from the
caches, and each change stops a second thread that puts (windows of 64 took it from 0.88 to 0.83 of memcpy)."""
LOCATE_GRACE_SECONDS = 0.05
"""A sidecar's answer is here within 5 ms (`LOCATE_SECONDS`); without an answer by then nothing is elsewhere."""
_STANDS_IN_THE_WAY = frozenset(
    {MissReason.DISABLED, MissReason.UNREACHABLE, MissReason.IN_FLIGHT, MissReason.DEADLINE, MissReason.BUSY}
)
"""Reasons that end a put regardless of its pages."""


@dataclass(frozen=True)
class Match:
    """How much of a prompt is stored. Pins nothing: only a lease is a promise.

    keys: the prefix key of every full block. blocks, tokens: the readable prefix. tiers: runs of (tier, blocks).
    account: every token, by tier or reason. reason, detail: why the prefix ends there. found: blocks before `cut`."""

    keys: list[bytes] = field(repr=False)
    blocks: int
    tokens: int
    tiers: tuple[tuple[HitTier, int], ...]
    account: Account
    reason: MissReason | None
    detail: str
    found: int = 0

    def cut(self, blocks: int, account: Account) -> Match:
        """The match of fewer blocks, so that a lease pins no more. account: of every token of the prompt, then."""
        found, kept = self.found or self.blocks, min(blocks, self.blocks)
        return replace(self, blocks=kept, tokens=account.hit_tokens, account=account, found=found)

    @property
    def tier_of_block(self) -> list[HitTier]:
        """The tier of every readable block, in order."""
        return [tier for tier, blocks in self.tiers for _ in range(blocks)]


@dataclass(frozen=True, slots=True)
class PutResult:
    """Result of `put`, in blocks from the prompt's start.

    present: leading blocks stored before. stored: new blocks. stopped_at: the first offered block that is not stored,
    with its reason; None if all full blocks are. detail: of the reason, for people; may be empty. in_flight: how many
    blocks from there on another put is still storing.

    Of a collective put it is this process's share: stored counts the blocks that it filled, which become readable once
    all others have filled theirs. If the put fails elsewhere later, only the next match tells.
    """

    present: int
    stored: int
    stopped_at: int | None
    reason: MissReason | None
    detail: str = field(default="", compare=False)
    in_flight: int = field(default=0, compare=False)


class Reading(Protocol):
    """A put calls it before and after it reads pages: while it fills slots, never while it waits for them."""

    def begin(self) -> bool:
        """Whether the pages may still be read."""
        ...

    def end(self) -> None:
        """The put has stopped reading. Called once for each `begin` that returned True."""
        ...


class NamespaceHandle:
    """The five verbs in one namespace. Thread-safe, except the pages and leases that are passed in."""

    def __init__(
        self,
        door: Door,
        namespace: Namespace,
        codec: Codec,
        digest: Digest = digest,
        shard: int | None = None,
        name: str = "",
    ) -> None:
        """shard: whose heads the pages hold; None for all. The store's namespace is the same for all. name: for
        people."""
        self._parts = namespace.layout.parts_of(shard)
        self.shard = shard
        self.namespace = namespace
        self.layout = namespace.layout
        self.model = namespace.model
        self.block_tokens = namespace.layout.block_tokens
        self.door = door
        """The store behind this handle, as its tenant sees it."""
        self._codec = codec
        self.is_exact = codec.is_exact
        """Whether `get` delivers what was put bit for bit. If not, that must not be put again: errors would add up."""
        self._digest = digest
        payload_bytes = [codec.payload_bytes(part) for part in namespace.layout.parts]
        codec.prepare(namespace.layout)  # may take long, and needs no store
        opening = m.OpenNamespace(namespace.pack(), payload_bytes, name)
        self._grant: Grant = door.call(opening, m.Granted).grant
        self.number = self._grant.number
        """The namespace's number in its store."""
        self._hasher = PrefixHasher(self._grant.identity_key, self.block_tokens)
        self.is_told = False
        """Whether the engine reports the tokens of all requests that it names here (`RequestTold.counts`)."""
        self.has_courier = False
        """Whether the last look-up's answer reported a courier; if not, none is asked."""
        self._source = GetSource(door, self._grant, codec, digest, namespace.layout, self._parts)

    def hashed(self, token_ids: Any, extra_keys: ExtraKeys = (), after: Prompt | None = None) -> Prompt:
        """A prompt's keys, to be used by several verbs, or by another process of the engine.

        after: an earlier call's result for the beginning of this prompt; token_ids are then those behind its last full
        block, and extra_keys those of the whole prompt.
        """
        known = after.keys if after is not None else []
        raw = token_bytes(token_ids)
        keys = self._hasher.keys(raw, as_extra_keys(extra_keys), known)
        return Prompt(len(known) * self.block_tokens + len(raw) // 4, keys)

    def match(self, token_ids: Any, extra_keys: ExtraKeys = (), counts: bool = True, request: str = "") -> Match:
        """The longest stored prefix of a prompt, and why it ends there. Pins nothing and changes nothing.

        token_ids: list, array, numpy array or torch tensor of ids, or their uint32 little-endian bytes; or a `Prompt`.
        extra_keys: what else the KV depends on (adapter digest, image hashes, salt), in an order of the caller's; a
        `Prompt` has them already. counts: whether statistics count it as a look-up. request: the engine's name of its
        request, for people.
        """
        tokens, asked = self._asked(token_ids, extra_keys, counts, request, True)
        return self._matched(tokens, asked.keys, self.door.call(asked, m.Matched))

    def submit_changes(self, after: int, deadline_ms: float = 1000) -> PendingReply[m.Changed]:
        """Changes of this namespace's blocks, in order, from the change of that number on; 0 for from now on. Without
        an answer its `run` is empty."""
        submitted = self.door.submit(m.Changes(self.number, after), m.Changed, deadline_ms / 1000)
        return PendingReply(submitted, lambda told: told, lambda: m.Changed(b"", [], 0))

    def tell(
        self,
        requests: Sequence[RequestTold],
        savings: SavingsTold | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Report on requests of this engine, and what hits saved since the last report: for `kvstore why` and the
        dashboard. Does not block; no effect without a sidecar. seconds: above 0, it may wait for the next request or
        ping, and go with it."""
        number = self.number if self.is_told else -1
        for first in range(0, len(requests) or 1, MAX_TOLD_REQUESTS):
            some = list(requests[first : first + MAX_TOLD_REQUESTS])
            self.door.submit(m.Tell(some, savings, namespace=number), m.Done, seconds)
            savings = None

    def submit_match(
        self,
        token_ids: Any,
        extra_keys: ExtraKeys = (),
        deadline_ms: float = 50,
        counts: bool = True,
        request: str = "",
        counts_short: bool = True,
    ) -> PendingReply[Match]:
        """`match` for a thread that must not wait: `poll` returns it once it is there, or a miss once it is late. The
        prompt is hashed here, in the caller's thread: some 0.3 ms for 32,768 tokens given as an array. counts_short:
        whether it counts even if not all of it is stored."""
        _check_deadline(deadline_ms)
        tokens, asked = self._asked(token_ids, extra_keys, counts, request, counts_short)
        submitted = self.door.submit(asked, m.Matched, float(deadline_ms) / 1000)
        cancelled = m.Matched(MatchReply(0, reason=MissReason.DISABLED, detail="it was cancelled"))
        matched = partial(self._matched, tokens, asked.keys)
        return PendingReply(submitted, matched, partial(matched, cancelled))

    def which(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these blocks are readable, each for itself: not as a chain. Pins, changes and counts nothing. Those
        that were not asked for, because the store does not answer or takes fewer keys, are not.

        For blocks that stand alone, as states do (`kvstore.client.states`): a lease of one is of a chain of one.
        """
        return _flags(self.door.call(m.Which(self.number, list(keys)), m.Held), len(keys))

    def submit_which(self, keys: Sequence[bytes], deadline_ms: float = 50) -> PendingReply[list[bool]]:
        """`which` for a thread that must not wait: `poll` returns it once it is there, or none of them once it is
        late."""
        _check_deadline(deadline_ms)
        submitted = self.door.submit(m.Which(self.number, list(keys)), m.Held, float(deadline_ms) / 1000)
        return PendingReply(submitted, partial(_flags, count=len(keys)), lambda: [False] * len(keys))

    def lease(self, match: Match, first_token: int = 0, deadline_ms: float = 50, request: str = "") -> Lease:
        """Pin what `match` found, or less: blocks that were evicted meanwhile, or would pin too much, are cut off with
        a reason.

        first_token: earlier tokens are not wanted; frames are pinned from its block on. deadline_ms: how long to wait
        for blocks that have to be promoted. request: the engine's name of the request that this serves; the store's
        `release_request` ends all leases of that name.
        """
        wanted = self._wanted(match, first_token, deadline_ms, request)
        return self._leased(match, request, self.door.call(wanted, NamedLease))

    def submit_lease(
        self, match: Match, first_token: int = 0, deadline_ms: float = 50, request: str = "", counts: bool = True
    ) -> PendingReply[Lease]:
        """`lease` for a thread that must not wait: `poll` returns the `Lease` once it is there. counts: as in `match`.

        Soon after its deadline, or if the store cannot be asked, that is an empty one with a reason. A lease that is
        granted after it was cancelled or forgotten is given back.
        """
        wanted = self._wanted(match, first_token, deadline_ms, request, counts)
        submitted = self.door.submit(wanted, NamedLease, wanted.deadline_ms / 1000)
        ended = NamedLease(LeaseReply(0, wanted.first_block, 0, reason=MissReason.DISABLED, detail="it was cancelled"))
        pending = PendingReply(
            submitted, partial(self._leased, match, request), partial(self._leased, match, "", ended)
        )
        self.door.requests.add(request, pending)
        return pending

    def attach(self, ticket: bytes) -> Lease:
        """Hold a lease that another process of the same engine took, by its `Lease.ticket`: a lease of this process.

        It is read and released like any other, and its blocks are unpinned with the last of its holders. For a ticket
        that is out of date, damaged, or of another session or run of the sidecar: an empty lease with a reason.
        """
        try:
            opened = LeaseTicket.open(ticket, self._grant)
        except ValueError as error:
            stale = NamedLease(LeaseReply(0, 0, 0, reason=MissReason.STALE_HINT, detail=str(error)))
            return Lease(self.door, stale, [], Account.of([]), self.block_tokens, self._grant)
        granted = opened.reply()
        asked = AttachLease(opened.run, granted)
        leased = self.door.call(asked, NamedLease) if opened.lease else NamedLease(granted)
        reply = leased.reply
        lost = reply.reason if reply.blocks < granted.blocks else granted.reason
        account = opened.account().cut(reply.blocks * self.block_tokens, lost or MissReason.EVICTED)
        lease = Lease(self.door, leased, opened.prompt_keys(), account, self.block_tokens, self._grant, opened.request)
        self.door.requests.add(opened.request, lease)
        return lease

    def get(self, lease: Lease, into: Pages, first_token: int = 0) -> Loaded:
        """Copy leased blocks into pages, decode them and verify the copy; of one shard, if this handle is of one.

        into: pages that cover the prompt's tokens from `first_token` on, which is a page boundary at or after the
        lease's first block. Loads up to the lease's end or the pages', whichever comes first, in whole blocks. Of a
        group without full attention only what that end needs is read; earlier pages of it are neither needed nor
        touched.
        Tokens before `first_token` are the engine's own, in all groups. Raises `LayoutMismatch` if pages that this load
        needs are missing, and `LeaseExpired` for a released lease; one that `release_request` released is a miss.
        """
        return self._getting(lease, into, first_token).whole()

    def get_by_layer(self, lease: Lease, into: Pages, first_token: int = 0) -> Iterator[Loaded]:
        """`get`, layer by layer in order of their numbers, so that attention can begin with the first one.

        Yields once per layer: the tokens it reports hold in that layer and in all before it, and never grow; the last
        report equals what `get` would return. Reads when the next layer is asked for, and pins nothing meanwhile:
        releasing the lease in between ends it. Blocks that DRAM has no room for come from NVMe with all their layers,
        and then everything is read before the first layer is reported. Raises as `get` does, at once.
        """
        return self._getting(lease, into, first_token).by_layer()

    def _getting(self, lease: Lease, into: Pages, first_token: int) -> GetOperation:
        _check_kind("lease", lease, Lease, "what `lease` returned")
        _check_kind("into", into, Pages, "kvstore.Pages(planes=..., table=..., page_tokens=...)")
        if lease.released and not lease.ended:
            raise LeaseExpired("the lease was released; take a new one")
        if first_token < lease.first_token:
            raise BadInput(f"first_token={first_token}; give at least the lease's first token, {lease.first_token}")
        return GetOperation(self._source, lease, into, first_token)

    def release(self, lease: Lease) -> None:
        """Unpin, like leaving the lease's context."""
        lease.release()

    def locate(self, prompt: Prompt, ticket: str = "") -> m.Located:
        """How much of a prompt, from its first block on, is elsewhere and could be here soon."""
        return self.door.call(self._locating(prompt, ticket), m.Located) if self.has_courier else m.Located(0, 0)

    def submit_locate(self, prompt: Prompt, ticket: str = "") -> PendingReply[m.Located]:
        """`locate` for a thread that must not wait. Sends nothing without a courier."""
        submitted: Submitted[m.Located] = ReadyReply(m.Located(0, 0))
        if self.has_courier:
            submitted = self.door.submit(self._locating(prompt, ticket), m.Located, LOCATE_GRACE_SECONDS)
        return PendingReply(submitted, lambda told: told, lambda: m.Located(0, 0))

    def await_block(self, prompt: Prompt, block: int, deadline_ms: float, located: int = 0) -> m.Awaited:
        """Wait until a block of a prompt can be read, even one that was never stored, for that long and at most 30 s.
        located: the number from `locate`, whose blocks are then fetched up to this one."""
        return self.door.call(self._waiting(prompt, block, deadline_ms, located), m.Awaited)

    def submit_await(self, prompt: Prompt, block: int, deadline_ms: float, located: int = 0) -> PendingReply[m.Awaited]:
        """`await_block` for a thread that must not wait. Cancelling it ends the fetch."""
        waiting = self._waiting(prompt, block, deadline_ms, located)
        submitted = self.door.submit(waiting, m.Awaited, waiting.seconds + AWAIT_GRACE_SECONDS)
        return PendingReply(submitted, lambda told: told, lambda: m.Awaited(0, AwaitEnd.CANCELLED))

    def seal(self, prompt: Prompt, seconds: float) -> m.Sealed:
        """A ticket with which another engine waits for this prompt's blocks, of which there must be at least one;
        stored ones are retained for so many seconds."""
        return self.door.call(m.SealTicket(self._grant.number, prompt.keys, seconds), m.Sealed)

    def submit_seal(self, prompt: Prompt, seconds: float, deadline_ms: float = 1000) -> PendingReply[m.Sealed]:
        """`seal` for a thread that must not wait."""
        sealing = m.SealTicket(self._grant.number, prompt.keys, seconds)
        submitted = self.door.submit(sealing, m.Sealed, deadline_ms / 1000)
        return PendingReply(submitted, lambda told: told, lambda: m.Sealed(""))

    def open_ticket(self, ticket: str) -> m.TicketOpened:
        """What a ticket promises here; or that it promises nothing, and why."""
        return self.door.call(self._opening(ticket), m.TicketOpened)

    def submit_open(self, ticket: str, deadline_ms: float = 1000) -> PendingReply[m.TicketOpened]:
        """`open_ticket` for a thread that must not wait."""
        submitted = self.door.submit(self._opening(ticket), m.TicketOpened, deadline_ms / 1000)
        return PendingReply(submitted, lambda told: told, lambda: m.TicketOpened(b"", 0, 0.0, MissReason.DISABLED))

    def _opening(self, ticket: str) -> m.OpenTicket:
        return m.OpenTicket(self._grant.number, ticket[: MAX_TICKET_CHARACTERS + 1])

    def _locating(self, prompt: Prompt, ticket: str) -> m.Locate:
        fitting = ticket if len(ticket) <= MAX_TICKET_CHARACTERS else ""
        return m.Locate(self._grant.number, prompt.keys[: m.MAX_KEYS], fitting)

    def _waiting(self, prompt: Prompt, block: int, deadline_ms: float, located: int) -> m.Await:
        _check_deadline(deadline_ms)
        if not 0 <= block < len(prompt.keys):
            raise BadInput(f"block={block}; give one of the prompt's {len(prompt.keys)} full blocks, from 0 on")
        seconds = min(deadline_ms / 1000, MAX_AWAIT_SECONDS)
        return m.Await(self._grant.number, prompt.keys[block : block + 1], seconds, located)

    def put(
        self,
        token_ids: Any,
        pages: Pages,
        first_token: int = 0,
        durability: str = "volatile",
        ttl: float | None = None,
        priority: int = 0,
        extra_keys: ExtraKeys = (),
        reading: Reading | None = None,
        collective: str = "",
        deadline_ms: float | None = None,
    ) -> PutResult:
        """Store the full blocks of a prompt; those already stored are skipped, and those that another put is storing
        are waited for (`IN_FLIGHT_SECONDS`).

        pages: cover the prompt's tokens from `first_token` on, which is a page boundary; blocks before them must be
        stored already. A block that lacks pages of a group ends the put before it, as `incomplete`, unless it is stored
        already. durability: with "disk" this returns when the whole chain is on NVMe, or says which block is not and
        why; "volatile" does not wait for the disk. ttl: seconds for which these blocks are retained in preference to
        all others, as far as the store's budget for that goes; priority: from 1 to 100, the same for as many times nine
        seconds since their last use. 0 and less means no wish. reading: asked before pages are read, if they may be
        wanted back meanwhile; if it refuses, the put ends with what is visible, `disabled`. deadline_ms: how long it
        may wait for the store in all, the disk included; then it ends as `deadline`. Copies do not count; without it
        each answer has 5 s, and the disk 30.

        collective: all processes of the engine that hold a shard put these tokens, from the same first token on, under
        this name, which no other put of theirs has; in one session, each on a handle of its shard. Each fills its own
        parts; a part that several hold is filled by the first that comes. None waits for the others: blocks are
        readable once the last one has filled them, and never if one gives up, ends, or takes longer than the store
        allows (30 s).
        """
        self._check_put(pages, durability, ttl, priority)
        begins = pages.first_tokens(self.layout, first_token)
        if collective != "":
            check_collective(collective)
        wait = DoorTime(self.door, deadline_ms)
        if not collective and len(self._parts) < len(self.layout.parts):
            raise BadInput(
                f"this handle is of shard {self.shard} and fills {len(self._parts)} of a block's "
                f"{len(self.layout.parts)} parts; give collective=, the same name in all processes that hold a shard"
            )
        _, keys = self._hashed(token_ids, extra_keys)
        first_block = -(-first_token // self.block_tokens)
        offered = min(len(keys), (first_token + pages.tokens) // self.block_tokens)
        if offered < len(keys):
            raise LayoutMismatch(
                f"pages cover the prompt up to token {first_token + pages.tokens}, its full blocks go up to "
                f"{len(keys) * self.block_tokens}; give more pages or fewer token ids"
            )
        # Unusable pages must be found before anything is evicted for them.
        coders = [self._codec.bind(pages, self.layout, part) for part in self._parts]
        pages.check_apart(self.layout)
        bases = [begins[part.group.name] for part in self._parts]
        complete = -(-max(bases) // self.block_tokens)
        stored: set[int] = set()
        present = len(keys)
        # All processes of a collective put must use the same windows, regardless of what is stored when each reserves.
        first_window = min(first_block, max(len(keys) - 1, 0)) // WINDOW_BLOCKS * WINDOW_BLOCKS
        for window in range(first_window, len(keys), WINDOW_BLOCKS):
            stop = min(window + WINDOW_BLOCKS, len(keys))
            wanted = min(max(complete, window) if collective else complete, stop)
            reserve = m.Reserve(
                self.number, keys[:stop], wanted, int(priority), float(ttl) if ttl is not None else None, waits=True
            )
            at = -1
            for tries in count():
                if collective:
                    parts, name = [part.index for part in self._parts], window_name(collective, stop, tries)
                    reserve = msgspec.structs.replace(reserve, collective=name, parts=parts)
                reply = wait.of(reserve, m.Reserved).reply
                present = len(keys) if tries and not stored else present  # what another put stored was not there
                present = min(present, reply.present) if reply.present < stop else present
                filled, flaw, lost = 0, None, None
                if reply.reservation:
                    filled, flaw, lost = self._fill(reply, coders, bases, reading, wait)
                if flaw and collective:
                    filled = 0  # a flaw in one share ends the put for all
                stored.update(reply.blocks[:filled])
                if filled < len(reply.blocks):
                    stopped_at = reply.blocks[filled]
                    reason = REASON_OF_FLAW[flaw] if flaw else lost or MissReason.DISABLED
                    ended = PutResult(present, len(stored), stopped_at, reason)
                    return self._made_durable(ended, keys[:stopped_at], durability, wait) if flaw else ended
                if not reply.in_flight or not reserve.waits or reply.stopped_at is None:
                    break
                # Nothing of this put is open meanwhile. Ranks decide by the store's answers alone: these are the same
                # for all, and each must take part in the next try.
                has_ended = self._wait_for_others(keys, reply, wait)
                waits = (reply.stopped_at > at if collective else has_ended) and tries < WINDOW_BLOCKS
                reserve, at = msgspec.structs.replace(reserve, waits=waits), reply.stopped_at
            if reply.reason is not None:
                lacks_pages = reply.stopped_at is not None and first_block <= reply.stopped_at < complete
                is_incomplete = lacks_pages and reply.reason not in _STANDS_IN_THE_WAY
                reason = MissReason.INCOMPLETE if is_incomplete else reply.reason
                detail = reply.detail if reason is reply.reason else ""
                ended = PutResult(present, len(stored), reply.stopped_at, reason, detail, reply.in_flight)
                return self._made_durable(ended, keys[: reply.stopped_at], durability, wait)
        return self._made_durable(PutResult(present, len(stored), None, None), keys, durability, wait)

    def renew(self, prompt: Prompt, ttl: float | None, priority: int = 0, deadline_ms: float | None = None) -> int:
        """Retain what is stored of a prompt, as a `put` of it would; returns how many leading blocks.

        For adapters: it takes no pages, so an engine that has read blocks need not keep them.
        """
        keys = prompt.keys
        renewal = m.Reserve(self.number, keys, len(keys), int(priority), float(ttl) if ttl is not None else None)
        return DoorTime(self.door, deadline_ms).of(renewal, m.Reserved).reply.present

    # Inside --------------------------------------------------------------------------------------------------------

    def _hashed(self, token_ids: Any, extra_keys: ExtraKeys) -> tuple[int, list[bytes]]:
        prompt = token_ids if isinstance(token_ids, Prompt) else self.hashed(token_ids, extra_keys)
        if prompt is token_ids and (extra_keys or len(prompt.keys) > prompt.tokens // self.block_tokens):
            raise BadInput(
                f"{prompt} with {len(extra_keys)} extra keys; a prompt is hashed with its extra keys, and has no more "
                f"blocks than whole ones of {self.block_tokens} tokens"
            )
        return prompt.tokens, prompt.keys

    def _asked(self, ids: Any, extra: ExtraKeys, counts: bool, request: str, short: bool) -> tuple[int, m.MatchPrefix]:
        if request != "":
            check_request(request)
        tokens, keys = self._hashed(ids, extra)
        return tokens, m.MatchPrefix(self.number, keys, counts, request, short, self.is_told and bool(request))

    def _matched(self, tokens: int, keys: list[bytes], matched: m.Matched) -> Match:
        self.has_courier, reply = matched.has_courier, matched.reply
        account, found = self._account(tokens, len(keys), reply), reply.blocks * self.block_tokens
        return Match(keys, reply.blocks, found, reply.tiers, account, reply.reason, reply.detail)

    def _wanted(
        self, match: Match, first_token: int, deadline_ms: float, request: str, counts: bool = True
    ) -> m.LeasePrefix:
        _check_kind("match", match, Match, "what `match` or `submit_match(...).poll` returned")
        if first_token < 0:
            raise BadInput(f"first_token={first_token}; give 0 or more")
        _check_deadline(deadline_ms)
        if request != "":
            check_request(request)
        first_block = min(first_token // self.block_tokens, match.blocks)
        wait_ms = min(float(deadline_ms), 1000 * MAX_SECONDS)
        keys = match.keys[: match.blocks]
        is_told = self.is_told and bool(request)
        return m.LeasePrefix(self.number, keys, first_block, wait_ms, request, counts, match.found, is_told)

    def _leased(self, match: Match, request: str, leased: NamedLease) -> Lease:
        reply = leased.reply
        parts: list[tuple[HitTier | MissReason, int]] = [
            (tier, blocks * self.block_tokens) for tier, blocks in reply.tiers
        ]
        lost = (match.blocks - reply.blocks) * self.block_tokens
        parts.append((reply.reason or MissReason.EVICTED, lost))
        parts += [(part.origin, part.tokens) for part in match.account.segments if isinstance(part.origin, MissReason)]
        account = Account.of(parts)
        lease = Lease(self.door, leased, match.keys, account, self.block_tokens, self._grant, request)
        self.door.requests.add(request, lease)
        return lease

    def _wait_for_others(self, keys: Sequence[bytes], reply: ReserveReply, wait: DoorTime) -> bool:
        start = reply.stopped_at or 0
        stop = start + min(reply.in_flight, m.MAX_AWAITED_KEYS)
        seconds = IN_FLIGHT_SECONDS if wait.left is None else min(IN_FLIGHT_SECONDS, wait.left / 2)
        awaited = wait.of(m.Await(self.number, list(keys[start:stop]), seconds), m.Awaited)
        return awaited.end in (AwaitEnd.READABLE, AwaitEnd.SHORT) or awaited.blocks > 0

    def _made_durable(self, result: PutResult, keys: Sequence[bytes], durability: str, wait: DoorTime) -> PutResult:
        if durability != "disk":
            return result
        left = wait.left
        seconds = DURABLE_SECONDS if left is None else min(DURABLE_SECONDS, left)
        kept = self.door.call(m.Persist(self.number, list(keys), seconds), m.Persisted)
        if kept.reason is None:
            return result
        return PutResult(result.present, result.stored, kept.blocks, kept.reason)

    def _fill(
        self,
        reply: ReserveReply,
        coders: Sequence[BlockCopy],
        bases: Sequence[int],
        reading: Reading | None,
        wait: DoorTime,
    ) -> tuple[int, Flaw | None, MissReason | None]:
        """Returns the number of committed blocks, the codec's finding in the first block that it could not write, and
        why the reservation was lost, if it was. bases: for each coder, the prompt's token that its pages begin with.
        The sidecar seals filled blocks while the next ones are being filled."""
        committed, count, reservation = 0, len(reply.blocks), reply.reservation
        flaw: Flaw | None = None
        cuts = set(range(count - LAST_BLOCKS, 0, -EARLY_BLOCKS)) if self.door.commits_early else set()
        try:
            for one, coder, base in zip(self._parts, coders, bases, strict=True):
                part, row = one.index, one.group.row_tokens
                if not reply.places[part]:  # another process fills it
                    continue
                size = self._grant.payload_bytes[part]
                frames = self.door.memory(reservation, reply.places[part], writable=True)
                spans = [cut(span, HEADER_BYTES, size) for span in frames]
                rows = [(block * self.block_tokens - base) // row for block in reply.blocks[:count]]
                first = 0
                digests: list[Sequence[bytes]] = []
                # Closed before any slot is given up: a device may still be writing into later ones.
                known = min(len(rows), len(spans))
                if reading is not None and not reading.begin():
                    return 0, None, None
                try:
                    with closing(coder.encode(rows[:known], spans[:known], self._digest)) as encoding:
                        for at, encoded in enumerate(encoding, 1):
                            if isinstance(encoded, Flaw):  # later blocks are not stored: a put stores a prefix
                                flaw, count = encoded, at - 1
                                break
                            digests.append(encoded)
                            if at in cuts:
                                self.door.submit(m.Commit(reservation, part, first, digests), m.Counted, 0.0)
                                first, digests = at, []
                finally:
                    if reading is not None:
                        reading.end()
                committed = wait.of(m.Commit(reservation, part, first, digests), m.Counted).blocks
        except ReservationLost as lost:
            return 0, None, lost.reason
        except StoreClosed:
            return 0, None, None
        finally:
            if committed < len(reply.blocks):  # else it ended with its last block
                self.door.call(m.Abort(reservation), m.Done)
        return committed, flaw if committed == count else None, None

    def _account(self, asked: int, full_blocks: int, reply: MatchReply) -> Account:
        parts: list[tuple[HitTier | MissReason, int]] = [
            (tier, blocks * self.block_tokens) for tier, blocks in reply.tiers
        ]
        if reply.reason is not None:
            parts.append((reply.reason, (full_blocks - reply.blocks) * self.block_tokens))
        parts.append((MissReason.PARTIAL_BLOCK, asked - full_blocks * self.block_tokens))
        account = Account.of(parts)
        assert account.asked == asked, "hits and misses do not add up to the tokens asked"
        return account

    def _check_put(self, pages: Pages, durability: str, ttl: float | None, priority: int) -> None:
        _check_kind("pages", pages, Pages, "kvstore.Pages(planes=..., table=..., page_tokens=...)")
        if durability not in DURABILITIES:
            raise BadInput(f"durability={durability!r}; allowed: {', '.join(DURABILITIES)}")
        if durability == "disk" and not self._grant.durable:
            raise BadInput("durability='disk' needs an NVMe tier, which this store does not have; open it with nvme=")
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, Real) or not 0 < ttl < 1 << 40):
            raise BadInput(f"ttl={ttl!r}; give seconds above 0 and below 2**40, or None")
        is_whole = isinstance(priority, Integral) and not isinstance(priority, bool)
        if not is_whole or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadInput(f"priority={priority!r}; give a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")


def _flags(held: m.Held, count: int) -> list[bool]:
    bits = f"{int.from_bytes(held.bits, 'little'):0{count}b}"[::-1]
    return [bit == "1" for bit in bits[:count]]


def _check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise BadInput(f"{name} of type {type(value).__name__}; give {wanted}")


class OpenStore(ABC):
    """A store that was opened, in this process or behind a socket. Close it, or use it as a context manager."""

    def __init__(self, codecs: Callable[[str], Codec], before_close: Callable[[], object], requests: Requests) -> None:
        """codecs: finds one by its name. before_close: ends the codecs' work in the store's memory. requests: leases
        held for an engine's requests."""
        self._codecs, self._before_close, self._requests = codecs, before_close, requests

    @abstractmethod
    def _door_for_handle(self) -> Door: ...

    @abstractmethod
    def close(self) -> None:
        """Safe to call again."""

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        codec: str = "raw",
        weights_epoch: int = 0,
        config: Mapping[str, str] | None = None,
        shard: int | None = None,
        name: str = "",
    ) -> NamespaceHandle:
        """The namespace of these weights, this layout and this codec; see `identity.Namespace` for the fields.

        name: of the model, or its path, which people are shown beside the fingerprint; no part of what decides.

        shard: for one rank of `layout.head_shards`, whose pages have its own heads only: what it gets and puts are the
        parts of that shard (`Layout.parts_of`). The namespace is the same for all ranks. Raises `BadInput`, and
        `Unreachable` if no sidecar answers for some time.
        """
        codec = codec_meant(codec)
        namespace = Namespace(model, layout, codec, weights_epoch, dict(config or {}))
        door, chosen = self._door_for_handle(), self._codecs(codec)
        return NamespaceHandle(door, namespace, chosen, shard=shard, name=checked_name(name))

    def release_request(self, request: str) -> None:
        """End every lease, pending ones too, that this process took or attached to for a request of the engine.

        Does not block. A get in progress ends at its next piece. Other processes keep their holds.
        """
        self._requests.release(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DoorTime:
    """How long a put may still wait. left: seconds; None without a deadline: each answer has the store's default."""

    def __init__(self, door: Door, deadline_ms: float | None) -> None:
        if deadline_ms is not None:
            _check_deadline(deadline_ms)
        self._door = door
        self.left = min(float(deadline_ms) / 1000, MAX_SECONDS) if deadline_ms is not None else None

    def of(self, request: Request, kind: type[A]) -> A:
        """The answer, in the time that is left."""
        if self.left is None:
            return self._door.call(request, kind)
        now, asked_at = self._door.clock.monotonic_seconds, self._door.clock.monotonic_seconds()
        try:
            return self._door.call(request, kind, self.left)
        finally:
            self.left = max(0.0, self.left - (now() - asked_at))


def _check_deadline(deadline_ms: float) -> None:
    if not isinstance(deadline_ms, Real) or not deadline_ms >= 0:
        raise BadInput(f"deadline_ms={deadline_ms!r}; give milliseconds, 0 or more")
