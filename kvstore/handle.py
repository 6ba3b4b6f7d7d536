"""What a user holds: a store, its namespaces, and the five verbs over token ids and pages (floor 2).

    match > lease > get > release,  put
    submit_match, submit_lease: the same for a thread that must not wait     attach: a lease of another process

The handle hashes prompts, encodes and decodes pages, and checks every byte that it hands out; the store behind the
`Door` sees keys, places and digests only. The same handle works on a store in this process and on one behind a socket.
A miss is never an exception: the account of a match, a lease or a load says where each token came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from numbers import Integral, Real
from typing import Any

from kv_kernels.flaws import Flaw
from kvstore.config import MAX_SECONDS
from kvstore.door import DirectReply, Door, Grant, LeaseReply, MatchReply, ReserveReply
from kvstore.errors import BadInput, LayoutMismatch, LeaseExpired, StoreClosed
from kvstore.holding import Lease
from kvstore.identity import ExtraKey, Namespace, PrefixHasher, Prompt, as_extra_keys, token_bytes
from kvstore.joint import check_joint, joint_of
from kvstore.miss import REASON_OF_FLAW, Account, HitTier, MissReason
from kvstore.pages import Codec, Coder, Digest, Pages
from kvstore.pending import Pending
from kvstore.requests import check_request
from kvstore.ticket import LeaseTicket
from tiering.frame import HEADER_BYTES, digest, names_block, split_digests
from tiering.tier import FrameSpan

DURABILITIES = ("volatile", "disk")
MAX_PRIORITY = 100
DURABLE_SECONDS = 30.0
"""How long a put waits for the disk before it says that it was too slow."""
DIRECT_BLOCKS = 16
"""Read past DRAM at a time: each needs memory of its own."""
DIRECT_MS = 1000.0
"""How long a get waits for these."""
EARLY_BLOCKS, LAST_BLOCKS = 48, 16
"""Where it helps, so many blocks at a time are committed while the next ones are being filled; the last few are waited
for."""
WINDOW_BLOCKS = 128
"""Long prompts go in pieces of this many blocks. Others see the first blocks of a put early, and wait at most about a
millisecond for the lock. Of a piece, what is small is done for all blocks, then the copies: after a copy of megabytes
nothing of the interpreter's is left in a cache, and each change from one to the other stops a second thread that puts
(pieces of 64 took it from 0.88 to 0.83 of memcpy)."""

_Opened = list[tuple[list[FrameSpan], list[tuple[bytes, ...]]]]
"""Of each part the blocks' payloads, and the digests of their layer slices."""


@dataclass(frozen=True)
class Match:
    """How much of a prompt is stored. Pins nothing: only a lease is a promise.

    keys: the prefix key of every full block. blocks, tokens: the readable prefix. tiers: runs of (tier, blocks).
    account: every token of the prompt, by tier or reason. reason, detail: why the prefix ends where it does.
    """

    keys: list[bytes] = field(repr=False)
    blocks: int
    tokens: int
    tiers: tuple[tuple[HitTier, int], ...]
    account: Account
    reason: MissReason | None
    detail: str

    @property
    def tier_of_block(self) -> list[HitTier]:
        """The tier of every readable block, in order."""
        return [tier for tier, blocks in self.tiers for _ in range(blocks)]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `get` delivered: pages hold the prompt's tokens up to `tokens`, verified; anything behind is not valid.

    account: as in the lease, with what failed turned into a miss. reason: why it is less than leased, else None.
    """

    tokens: int
    account: Account
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did, in blocks from the prompt's start.

    present: leading blocks that were there before. stored: blocks that are new. stopped_at: the first offered block
    that is not held, with its reason; None when all full blocks of the prompt are held.

    Of a joint put it is what this process did: stored counts blocks that it filled, which are readable once all others
    have filled theirs. What ends the put elsewhere afterwards is not in it: the next match says what is there.
    """

    present: int
    stored: int
    stopped_at: int | None
    reason: MissReason | None


class NamespaceHandle:
    """The five verbs in one namespace. Thread-safe; pages and leases belong to whoever passes them."""

    def __init__(
        self, door: Door, namespace: Namespace, codec: Codec, digest: Digest = digest, shard: int | None = None
    ) -> None:
        """shard: whose heads pages hold; all heads if None. The namespace in the store is the same for all."""
        self._parts = namespace.layout.parts_of(shard)
        self.shard = shard
        self.namespace = namespace
        self.layout = namespace.layout
        self.model = namespace.model
        self.block_tokens = namespace.layout.block_tokens
        self._door = door
        self._codec = codec
        self._digest = digest
        self._grant: Grant = door.open_namespace(
            namespace, [codec.payload_bytes(part) for part in namespace.layout.parts]
        )
        self._hasher = PrefixHasher(self._grant.identity_key, self.block_tokens)
        codec.prepare(namespace.layout)

    @property
    def door(self) -> Door:
        """The store behind this handle, as its tenant sees it."""
        return self._door

    @property
    def is_exact(self) -> bool:
        """Whether `get` delivers bit for bit what was put. If not, what it delivered must not be put again: every
        further encoding would add its own error."""
        return self._codec.is_exact

    @property
    def number(self) -> int:
        """The namespace's number in its store."""
        return self._grant.number

    def hashed(
        self, token_ids: Any, extra_keys: Sequence[ExtraKey | bytes | str] = (), after: Prompt | None = None
    ) -> Prompt:
        """A prompt's keys, to be used by several verbs, or by another process of the engine.

        after: what an earlier call made of the beginning of this prompt; token_ids are then those behind its last full
        block, and extra_keys those of the whole prompt.
        """
        known = after.keys if after is not None else []
        raw = token_bytes(token_ids)
        keys = self._hasher.keys(raw, as_extra_keys(extra_keys), known)
        return Prompt(len(known) * self.block_tokens + len(raw) // 4, keys)

    def match(self, token_ids: Any, extra_keys: Sequence[ExtraKey | bytes | str] = ()) -> Match:
        """The longest stored prefix of a prompt, and why it ends there. Pins nothing and changes nothing.

        token_ids: list, array, numpy array or torch tensor of ids, or their uint32 little-endian bytes; or a `Prompt`.
        extra_keys: what else the KV depends on (adapter digest, image hashes, salt), in an order of the caller's; a
        `Prompt` has them already.
        """
        tokens, keys = self._hashed(token_ids, extra_keys)
        return self._matched(tokens, keys, self._door.match(self.number, keys))

    def submit_match(self, token_ids: Any, extra_keys: Sequence[ExtraKey | bytes | str] = ()) -> Pending[Match]:
        """`match` for a thread that must not wait: `poll` returns the `Match` once it is there.

        The prompt is hashed here, in the caller's thread: some 0.3 ms for 32,768 tokens given as an array.
        """
        tokens, keys = self._hashed(token_ids, extra_keys)
        submitted = self._door.submit_match(self.number, keys)
        cancelled = MatchReply(0, reason=MissReason.DISABLED, detail="it was cancelled")
        return Pending(submitted, partial(self._matched, tokens, keys), partial(self._matched, tokens, keys, cancelled))

    def lease(self, match: Match, first_token: int = 0, deadline_ms: float = 50, request: str = "") -> Lease:
        """Pin what `match` found, or less: what was evicted meanwhile, or would pin too much, is cut off with a reason.

        first_token: the prompt's tokens before it are not wanted; frames are pinned from its block on.
        deadline_ms: how long to wait for blocks that have to be brought up from lower tiers. request: the engine's name
        for what this serves; `release_request` of the store ends all leases of that name.
        """
        wanted = self._wanted(match, first_token, deadline_ms, request)
        return self._leased(match, request, self._door.lease(self.number, *wanted))

    def submit_lease(
        self, match: Match, first_token: int = 0, deadline_ms: float = 50, request: str = ""
    ) -> Pending[Lease]:
        """`lease` for a thread that must not wait: `poll` returns the `Lease` once it is there.

        Soon after its deadline, or where the store cannot be asked, that is an empty one with a reason. A lease that is
        granted after it was cancelled or forgotten is given back.
        """
        wanted = self._wanted(match, first_token, deadline_ms, request)
        submitted = self._door.submit_lease(self.number, *wanted)
        cancelled = LeaseReply(0, wanted[1], 0, reason=MissReason.DISABLED, detail="it was cancelled")
        pending = Pending(submitted, partial(self._leased, match, request), partial(self._leased, match, "", cancelled))
        self._door.requests.add(request, pending)
        return pending

    def attach(self, ticket: bytes) -> Lease:
        """Hold a lease that another process of the same engine took, by its `Lease.ticket`: a lease of this process.

        It is read and released like any other, and its blocks are unpinned with the last of its holders. A ticket that
        names nothing any more, of another session or run of the sidecar, or damaged: an empty lease with a reason.
        """
        try:
            opened = LeaseTicket.open(ticket, self._grant)
        except ValueError as error:
            reply = LeaseReply(0, 0, 0, reason=MissReason.STALE_HINT, detail=str(error))
            return Lease(self._door, reply, [], Account.of([]), self.block_tokens, grant=self._grant)
        granted = opened.reply()
        reply = self._door.attach(opened.run, granted) if opened.lease else granted
        lost = reply.reason if reply.blocks < granted.blocks else granted.reason
        account = opened.account().cut(reply.blocks * self.block_tokens, lost or MissReason.EVICTED)
        lease = Lease(
            self._door, reply, opened.prompt_keys(), account, self.block_tokens, None, opened.request, self._grant
        )
        self._door.requests.add(opened.request, lease)
        return lease

    def get(self, lease: Lease, into: Pages, first_token: int = 0) -> Loaded:
        """Copy leased blocks into pages, decode them and verify the copy; of one shard, where this handle is of one.

        into: pages that cover the prompt's tokens from `first_token` on, which is a page boundary at or after the
        lease's first block. Loads up to the lease's end or the pages', whichever comes first, in whole blocks.
        Raises `LeaseExpired` for a lease that was released; where `release_request` did that, it is a miss.
        """
        _check_kind("lease", lease, Lease, "what `lease` returned")
        _check_kind("into", into, Pages, "kvstore.Pages(planes=..., table=..., page_tokens=...)")
        if lease.released and not lease.ended:
            raise LeaseExpired("the lease was released; take a new one")
        if first_token < lease.first_token or first_token % into.page_tokens:
            raise BadInput(
                f"first_token={first_token} must be a multiple of the page ({into.page_tokens} tokens) and not before "
                f"the lease's first token {lease.first_token}"
            )
        page_numbers = into.page_numbers()
        if len(set(page_numbers)) != len(page_numbers):
            raise LayoutMismatch("the page table names a page twice; a page can hold one piece of a prompt only")
        coders = [self._codec.bind(into, self.layout, part) for part in self._parts]
        start = first_token // self.block_tokens
        stop = min(lease.blocks, (first_token + into.tokens) // self.block_tokens)
        if not lease.begin_read():
            return self._cut_short(lease, start, MissReason.DISABLED)
        try:
            return self._get(lease, start, stop, coders, first_token)
        finally:
            lease.end_read()

    def release(self, lease: Lease) -> None:
        """Unpin. The same as leaving the lease's context."""
        lease.release()

    def put(
        self,
        token_ids: Any,
        pages: Pages,
        first_token: int = 0,
        durability: str = "volatile",
        ttl: float | None = None,
        priority: int = 0,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        joint: str = "",
    ) -> PutResult:
        """Store the full blocks of a prompt; those that are there already are skipped.

        pages: cover the prompt's tokens from `first_token` on, which is a page boundary; blocks before them must be
        stored already. durability: with "disk" this returns when the whole chain is on NVMe, or says which block is
        not and why; "volatile" does not wait for the disk. ttl (seconds) and priority (-100 .. 100) are kept with the
        block; nothing acts on them yet.

        joint: all processes of the engine that hold a shard put these tokens, from the same first token on, under this
        name, which no other put of theirs has; in one session, each on a handle of its shard. Each fills its own parts,
        and of those that several hold the first one to come does. None waits for the others: blocks are readable once
        the last one has filled them, and never if one gives up, is gone, or takes longer than the store allows (30 s).
        """
        self._check_put(pages, first_token, durability, ttl, priority)
        check_joint(joint)
        if not joint and len(self._parts) < len(self.layout.parts):
            raise BadInput(
                f"this handle is of shard {self.shard} and fills {len(self._parts)} of a block's "
                f"{len(self.layout.parts)} parts; give joint=, the same name in all processes that hold a shard"
            )
        _, keys = self._hashed(token_ids, extra_keys)
        first_block = -(-first_token // self.block_tokens)
        offered = min(len(keys), (first_token + pages.tokens) // self.block_tokens)
        if offered < len(keys):
            raise LayoutMismatch(
                f"pages cover the prompt up to token {first_token + pages.tokens}, its full blocks go up to "
                f"{len(keys) * self.block_tokens}; give more pages or fewer token ids"
            )
        if joint:  # the same windows for all, whatever is there by the time that each of them asks
            present, start = len(keys), _first_window(first_block, len(keys))
        else:
            start = present = self._door.present(self.number, keys)
        if start == len(keys):
            return self._made_durable(PutResult(len(keys), 0, None, None), keys, durability)
        # Unusable pages must show before anything is evicted for them.
        coders = [self._codec.bind(pages, self.layout, part) for part in self._parts]
        stored: set[int] = set()
        for window in range(start, len(keys), WINDOW_BLOCKS):
            stop = min(window + WINDOW_BLOCKS, len(keys))
            wanted = min(max(first_block, window) if joint else first_block, stop)
            named = joint_of(joint, stop, [part.index for part in self._parts]) if joint else None
            reply = self._door.reserve(self.number, keys[:stop], wanted, priority, ttl, named)
            present = min(present, reply.present) if reply.present < stop else present
            filled, flaw = self._fill(reply, coders, first_token) if reply.reservation else (0, None)
            if flaw and joint:
                filled = 0  # it ended with that, for all
            stored.update(reply.blocks[:filled])
            if filled < len(reply.blocks):
                stopped_at = reply.blocks[filled]
                ended = PutResult(
                    present, len(stored), stopped_at, REASON_OF_FLAW[flaw] if flaw else MissReason.DISABLED
                )
                return self._made_durable(ended, keys[:stopped_at], durability) if flaw else ended
            if reply.reason is not None:
                ended = PutResult(present, len(stored), reply.stopped_at, reply.reason)
                return self._made_durable(ended, keys[: reply.stopped_at], durability)
        return self._made_durable(PutResult(present, len(stored), None, None), keys, durability)

    # Inside --------------------------------------------------------------------------------------------------------

    def _hashed(self, token_ids: Any, extra_keys: Sequence[ExtraKey | bytes | str]) -> tuple[int, list[bytes]]:
        """Tokens asked for, and the keys of their full blocks."""
        prompt = token_ids if isinstance(token_ids, Prompt) else self.hashed(token_ids, extra_keys)
        if prompt is token_ids and (extra_keys or len(prompt.keys) > prompt.tokens // self.block_tokens):
            raise BadInput(
                f"{prompt} with {len(extra_keys)} extra keys; a prompt is hashed with its extra keys, and has no more "
                f"blocks than whole ones of {self.block_tokens} tokens"
            )
        return prompt.tokens, prompt.keys

    def _matched(self, tokens: int, keys: list[bytes], reply: MatchReply) -> Match:
        account = self._account(tokens, len(keys), reply)
        found = reply.blocks * self.block_tokens
        return Match(keys, reply.blocks, found, reply.tiers, account, reply.reason, reply.detail)

    def _wanted(
        self, match: Match, first_token: int, deadline_ms: float, request: str
    ) -> tuple[list[bytes], int, float, str]:
        """What a lease asks for: keys, first block, milliseconds, request. Raises `BadInput`."""
        _check_kind("match", match, Match, "what `match` or `submit_match(...).poll` returned")
        if first_token < 0:
            raise BadInput(f"first_token={first_token}; give 0 or more")
        if not isinstance(deadline_ms, Real) or not deadline_ms >= 0:
            raise BadInput(f"deadline_ms={deadline_ms!r}; give milliseconds, 0 or more")
        check_request(request)
        first_block = min(first_token // self.block_tokens, match.blocks)
        return match.keys[: match.blocks], first_block, min(float(deadline_ms), 1000 * MAX_SECONDS), request

    def _leased(self, match: Match, request: str, reply: LeaseReply) -> Lease:
        parts: list[tuple[HitTier | MissReason, int]] = [
            (tier, blocks * self.block_tokens) for tier, blocks in reply.tiers
        ]
        direct = self._lease_directly(match, reply)
        if direct is not None:
            parts.append((HitTier.NVME, (direct.blocks - reply.blocks) * self.block_tokens))
        lost = (match.blocks - (direct.blocks if direct is not None else reply.blocks)) * self.block_tokens
        parts.append((reply.reason or MissReason.EVICTED, lost))
        parts += [(part.origin, part.tokens) for part in match.account.segments if isinstance(part.origin, MissReason)]
        account = Account.of(parts)
        lease = Lease(self._door, reply, match.keys, account, self.block_tokens, direct, request, self._grant)
        self._door.requests.add(request, lease)
        return lease

    def _made_durable(self, result: PutResult, keys: Sequence[bytes], durability: str) -> PutResult:
        """These blocks are held; with `disk` that counts only once they are on disk."""
        if durability != "disk":
            return result
        done, reason = self._door.persist(self.number, keys, DURABLE_SECONDS)
        if reason is None:
            return result
        return PutResult(result.present, result.stored, done, reason)

    def _fill(self, reply: ReserveReply, coders: Sequence[Coder], first_token: int) -> tuple[int, Flaw | None]:
        """Encode blocks straight into their slots and commit each part; returns the blocks that are committed, and what
        the codec found in the first block that it could not write.

        Those that are filled are sealed while the next ones are being filled: only the last few are waited for.
        """
        committed, count = 0, len(reply.blocks)
        flaw: Flaw | None = None
        cuts = set(range(count - LAST_BLOCKS, 0, -EARLY_BLOCKS)) if self._door.commits_early else set()
        try:
            for part, coder in zip([one.index for one in self._parts], coders, strict=True):
                if not reply.places[part]:  # another process fills it
                    continue
                size = self._grant.payload_bytes[part]
                spans = [_payload(span, size) for span in self._door.spans_to_fill(reply.places[part])]
                tokens = [block * self.block_tokens - first_token for block in reply.blocks[:count]]
                first = 0
                digests: list[Sequence[bytes]] = []
                # Closed before any slot is given up: a device may be writing into those that did not come yet.
                known = min(len(tokens), len(spans))
                with closing(coder.encode(tokens[:known], spans[:known], self._digest)) as encoding:
                    for at, encoded in enumerate(encoding, 1):
                        if isinstance(encoded, Flaw):  # those behind it are not stored either: a put stores a prefix
                            flaw, count = encoded, at - 1
                            break
                        digests.append(encoded)
                        if at in cuts:
                            self._door.post_commit(reply.reservation, part, first, digests)
                            first, digests = at, []
                committed = self._door.commit(reply.reservation, part, first, digests)
        except StoreClosed:
            return 0, None
        finally:
            self._door.abort(reply.reservation)
        return committed, flaw if committed == count else None

    def _get(self, lease: Lease, start: int, stop: int, coders: Sequence[Coder], first_token: int) -> Loaded:
        first = start
        while first < stop:
            if lease.released:  # meanwhile, by another thread
                return self._cut_short(lease, first, MissReason.DISABLED)
            is_direct = lease.direct is not None and first >= lease.reply.blocks
            step = DIRECT_BLOCKS if is_direct else WINDOW_BLOCKS
            end = min(first + step, stop if is_direct else min(stop, lease.reply.blocks))
            load = self._load_directly if is_direct else self._load
            reason, block = load(lease, range(first, end), coders, first_token)
            if reason is not None:
                return self._cut_short(lease, block, reason)
            first = end
        tokens = max(stop, start) * self.block_tokens if stop > start else min(lease.tokens, first_token)
        return Loaded(tokens, lease.account, None)

    def _cut_short(self, lease: Lease, block: int, reason: MissReason) -> Loaded:
        tokens = block * self.block_tokens
        return Loaded(tokens, lease.account.cut(tokens, reason), reason)

    def _load(
        self, lease: Lease, blocks: range, coders: Sequence[Coder], first_token: int
    ) -> tuple[MissReason | None, int]:
        """Blocks into the pages; where it ended, and why if that is before the last one's end."""
        opened, count, reason = self._open(lease, blocks)
        good, part = self._decode(opened, blocks[:count], coders, first_token)
        if part is None:
            return reason, blocks.start + count
        self._door.report(lease.reply.lease, blocks.start + good, self._parts[part].index)
        return MissReason.CORRUPT, blocks.start + good

    def _decode(
        self, opened: _Opened, blocks: Sequence[int], coders: Sequence[Coder], first_token: int
    ) -> tuple[int, int | None]:
        """How many leading blocks are good in all of this handle's parts; and which of these is not in the next one, if
        it is that."""
        good, bad_part = len(blocks), None
        tokens = [block * self.block_tokens - first_token for block in blocks]
        for part, (payloads, expected) in enumerate(opened):
            if not good:
                break
            skip = max(0, -tokens[0])
            found = coders[part].decode(payloads[:good], tokens[:good], skip, expected[:good], self._digest)
            if found < good:
                good, bad_part = found, part
        return good, bad_part

    def _lease_directly(self, match: Match, reply: LeaseReply) -> DirectReply | None:
        """What DRAM has no room for, and NVMe has."""
        door = self._door.direct
        if door is None or reply.reason is not MissReason.PINNED_FULL or reply.blocks >= match.blocks:
            return None
        direct = door.lease(self.number, match.keys[: match.blocks], reply.blocks)
        return direct if direct.lease else None

    def _load_directly(
        self, lease: Lease, blocks: range, coders: Sequence[Coder], first_token: int
    ) -> tuple[MissReason | None, int]:
        """The same as `_load`, of blocks that come from NVMe, past DRAM."""
        assert lease.direct is not None and self._door.direct is not None
        reply = self._door.direct.fetch(lease.direct.lease, blocks.start, len(blocks), DIRECT_MS)
        opened: _Opened = [([], []) for _ in self._parts]
        reason, count = reply.reason, len(reply.frames)
        for at, (block, frames) in enumerate(zip(blocks, reply.frames, strict=False)):
            headers = [bytes(frames[part.index].view[:HEADER_BYTES]) for part in self._parts]
            stamps = [self._grant.stamps[part.index] for part in self._parts]
            if not all(map(names_block, headers, stamps, repeat(lease.keys[block]))):
                reason, count = MissReason.EVICTED, at
                break
            for part, header, (payloads, expected) in zip(self._parts, headers, opened, strict=True):
                payloads.append(_payload(frames[part.index], self._grant.payload_bytes[part.index]))
                expected.append(split_digests(header, len(part.layers)))
        good, part_or_none = self._decode(opened, blocks[:count], coders, first_token)
        return MissReason.CORRUPT if part_or_none is not None else reason, blocks.start + good

    def _open(self, lease: Lease, blocks: range) -> tuple[_Opened, int, MissReason | None]:
        """Check the blocks' headers: what is in those up to the first that is not right, how many, and why not more.

        A header is checked in a private copy, against the lease's digest of it and the block's name.
        """
        reply, keys = lease.reply, lease.keys
        pinned = slice(blocks.start - reply.first_block, blocks.stop - reply.first_block)
        opened: _Opened = [([], []) for _ in self._parts]
        try:
            columns = [
                (
                    one.index,
                    self._grant.payload_bytes[one.index],
                    len(one.layers),
                    self._grant.stamps[one.index],
                    self._door.spans(reply.places[one.index][pinned]),
                    reply.header_digests[one.index][pinned],
                    target,
                )
                for one, target in zip(self._parts, opened, strict=True)
            ]
        except StoreClosed:
            return opened, 0, MissReason.DISABLED
        for at, block in enumerate(blocks):
            for part, size, slices, stamp, spans, digests, (payloads, expected) in columns:
                if at >= len(spans):  # condemned meanwhile, and its extent given back; or the sidecar is another one
                    is_there = self._door.is_within_reach(reply.lease)
                    return opened, at, MissReason.CORRUPT if is_there else MissReason.UNREACHABLE
                address, view, memory = spans[at]
                raw = bytes(view[:HEADER_BYTES])
                if digest(raw) != digests[at] or not names_block(raw, stamp, keys[block]):
                    self._door.report(reply.lease, block, part)
                    return opened, at, MissReason.CORRUPT
                payloads.append(FrameSpan(address + HEADER_BYTES, view[HEADER_BYTES : HEADER_BYTES + size], memory))
                expected.append(split_digests(raw, slices))
        return opened, len(blocks), None

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

    def _check_put(self, pages: Pages, first_token: int, durability: str, ttl: float | None, priority: int) -> None:
        _check_kind("pages", pages, Pages, "kvstore.Pages(planes=..., table=..., page_tokens=...)")
        if durability not in DURABILITIES:
            raise BadInput(f"durability={durability!r}; allowed: {', '.join(DURABILITIES)}")
        if durability == "disk" and not self._grant.durable:
            raise BadInput("durability='disk' needs an NVMe tier, which this store does not have; open it with nvme=")
        if first_token < 0 or first_token % pages.page_tokens:
            raise BadInput(f"first_token={first_token} is not a page boundary; give a multiple of {pages.page_tokens}")
        if ttl is not None and not (isinstance(ttl, Real) and 0 < ttl < 1 << 40):
            raise BadInput(f"ttl={ttl!r}; give seconds above 0, or None")
        if not isinstance(priority, Integral) or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadInput(f"priority={priority!r}; give a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")


def _first_window(first_block: int, blocks: int) -> int:
    """The first block of the window that a joint put from there on begins with."""
    return min(first_block, max(blocks - 1, 0)) // WINDOW_BLOCKS * WINDOW_BLOCKS


def _check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        raise BadInput(f"{name} of type {type(value).__name__}; give {wanted}")


def _payload(span: FrameSpan, payload_bytes: int) -> FrameSpan:
    view = span.view[HEADER_BYTES : HEADER_BYTES + payload_bytes]
    return FrameSpan(span.address + HEADER_BYTES, view, span.memory)
