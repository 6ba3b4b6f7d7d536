"""Replays traces through the store's own index, tables and policies, without payload and without a clock; and compares
policies at several sizes, beside the offline optimum: `kvstore replay`.

    request   match > what is found counts as a hit, in DRAM or below > blocks below are promoted > used
              slots for the rest: free ones, else the worst leaves are evicted > readable > used
    leaf      evicted from DRAM > if NVMe lacks it and admission agrees, it is written there, ancestors first > gone
    state     of a model with recurrent states: a hit ends at the deepest block that has one > after the blocks, states
              are stored where the policy wants them, each as a chain of its own that takes as many blocks' room

These are the steps of an undisturbed lease and put, in the store's order. A request ends when the next one begins. Only
a policy's seed is random, so equal traces give equal figures. Every figure is a ratio over the requests behind the
warm-up; the warm-up fills the store and is not counted. Prefill seconds are modelled: n tokens take n / rate * (1 + n /
QUADRATIC_TOKENS).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.block.errors import BadInput
from kvstore.block.identity import SECRET_BYTES, KeyRing, Namespace, TenantKeys
from kvstore.block.layout import Layout
from kvstore.block.states import DEFAULT_SHARE, StatePolicy
from kvstore.config import format_size
from kvstore.core.index import NO_ROW, PrefixIndex
from kvstore.core.table import BlockTable, Lower
from kvstore.insight.trace import Column, Trace
from tiering.dram.extents import BlankPool
from tiering.dram.tier import DramTier
from tiering.frame import frame_bytes
from tiering.policies.admission import Admission, AdmitAll, LearnedAdmission
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.residency import Pins, Residency
from tiering.slots import FrameEvent, Piece, SlotLedger
from tiering.tier import SlotClass

if TYPE_CHECKING:
    from rich.table import Table

QUADRATIC_TOKENS = 61_000
"""Prompt length at which attention costs as much as all else: 16 GFLOP per token for a model with 8 billion weights,
and 262,144 n for the attention of 32 layers and 4,096 channels behind n tokens."""

KV_BYTES_PER_TOKEN = 128 << 10
"""The same model's, in bfloat16 with 8 KV heads."""

OPTIMUM = "optimum"
ALL, LEARNED, COIN, ORACLE = ADMISSIONS = ("all", "learned", "random", "oracle")
POLICY, EACH_BLOCK, ENDS_ALONE = STATES = ("policy", "each block", "ends alone")
"""Where states are kept: as adapters do, and what that is compared with."""
BUDGETS, NEAR_ENOUGH = 4, 0.002
"""Replays to find the budget that writes the wanted share of bytes, and how near is near enough."""
BISECTIONS = 8
"""Replays to tune the coin's writes to within some percent."""
MOST_BLOCKS = 1 << 22
"""Capacity limit of the tables; a trace with that many distinct blocks has some million requests."""
REQUESTS_PER_LOOK = 200
"""Requests between two reports of progress."""
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Replayed:
    """Per request: blocks found in DRAM, blocks found on NVMe alone, and blocks written to each. A promotion counts as
    a write to DRAM. state_writes: states, in DRAM too."""

    dram_hits: Column
    dram_writes: Column
    nvme_hits: Column
    nvme_writes: Column
    state_writes: Column


@dataclass(frozen=True, slots=True)
class StatesKept:
    """Where states are kept. parted: also where KV was found further than a state. blocks: room that one takes."""

    policy: StatePolicy
    parted: bool
    blocks: int


class CountingTier:
    """A `LowerTier` with a single slot class that keeps no bytes: it counts slots as a real tier would."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._ledger = ledger = SlotLedger[Piece]()
        # `check` verifies that the slots of all states add up to the capacity.
        self.reserve, self.free_slots, self.check = ledger.reserve, ledger.free_slots, ledger.check
        self.own, self.own_many, self.rows_in = ledger.own, ledger.own_many, ledger.rows_in

    def open(self, slot_class: SlotClass) -> None:
        """Give the whole budget to one slot class. Call it once."""
        self._ledger.add(Piece(0, slot_class, self.budget_bytes // slot_class.frame_bytes))

    def commit(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.COMMIT)

    def abort(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.ABORT)

    def delete(self, places: Sequence[int], *, claim: bool = False) -> None:
        self._ledger.step(places, FrameEvent.EVICT, FrameEvent.DELETED)

    def quarantine(self, places: Sequence[int]) -> None:
        self._ledger.step(places, FrameEvent.CONDEMN)

    def held(self) -> dict[bytes, int]:
        return self._ledger.held

    @property
    def piece_bytes(self) -> int:
        """The whole budget: it is a single piece."""
        return self.budget_bytes

    def pieces(self) -> int:
        return 1

    def frames_of(self, slot_class: SlotClass) -> int:
        return sum(piece.slots.live for piece in self._ledger.all_pieces(slot_class))


class Replay:
    """The tables of one store, without memory. Call `run` once."""

    def __init__(
        self,
        policy: PolicyMaker,
        dram_blocks: int,
        seed: int = 0,
        nvme_blocks: int = 0,
        admission: Callable[[Replay], Admission] | None = None,
        states: StatesKept | None = None,
    ) -> None:
        """Room for so many blocks. nvme_blocks: of NVMe, if there is one. admission: to it; None for everything.
        states: of a model that has them, without NVMe."""
        payload_bytes = 1 << 12
        self.block_bytes = frame_bytes(payload_bytes)
        """The size that blocks are accounted with; they have no payload."""
        dram_bytes = dram_blocks * self.block_bytes
        dram, index, pins = DramTier(BlankPool(dram_bytes, dram_bytes)), PrefixIndex(forgotten_limit=0), Pins()
        nvme = CountingTier(nvme_blocks * self.block_bytes) if nvme_blocks else None
        lower = Lower(nvme, Residency(LeafFirstLru(), pins), AdmitAll()) if nvme is not None else None
        keys = TenantKeys.derive(bytes(SECRET_BYTES))
        blocks = BlockTable(index, Residency(policy(index.names, seed), pins), dram, KeyRing([keys]), lower)
        layout = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64)
        space = blocks.add_space(keys, Namespace("0" * 40, layout, "raw"), [payload_bytes])
        (self._class,) = space.classes
        dram.adopt(dram.new_extent(), self._class)
        self.seconds = 0.0
        """Time of the current request, since the trace's first."""
        self.request = 0
        """Number of the current request."""
        self.names = index.names
        """For each row, its block in the trace."""
        self._blocks = blocks
        self._number = space.number
        self._nvme = nvme
        self._states = states
        self._written_below = 0
        self._first_state = 0
        self._rows: list[tuple[int, int, int, int, int]] = []
        if nvme is not None:
            nvme.open(self._class)
            if admission is not None:
                assert lower is not None
                lower.admission = admission(self)
                lower.admission.expect(nvme_blocks)

    def run(self, trace: Trace, progress: Callable[[int], object] = lambda done: None) -> Replayed:
        """Replay all requests in order. progress: called with the number done."""
        names = [_name(number) for number in range(trace.distinct_blocks)]
        self._first_state = len(names)
        seconds = ((trace.timestamps_ms - trace.timestamps_ms[0]) / 1000).tolist()
        tokens = trace.input_tokens.tolist()
        for done, chain in enumerate(trace.chains()):
            if done % REQUESTS_PER_LOOK == 0:
                progress(done)
            self.request, self.seconds = done, max(self.seconds, seconds[done])
            self._request([names[block] for block in chain], tokens[done])
        progress(trace.requests)
        return Replayed(*np.array(self._rows, np.int64).reshape(-1, 5).T)

    def check(self) -> None:
        """Verify the invariants of all tables."""
        self._blocks.index.check()
        self._blocks.dram.check()
        self._blocks.residency.check()
        if self._blocks.lower is not None:
            self._blocks.lower.tier.check()
            self._blocks.lower.residency.check()

    def _request(self, keys: Sequence[bytes], tokens: int) -> None:
        blocks = self._blocks
        rows = blocks.index.match(self._number, keys)
        above = next((at for at, row in enumerate(rows) if not blocks.is_above(row)), len(rows))
        self._written_below = 0
        brought, stored, states = 0, 0, 0
        blocks.residency.pins.pin(rows)
        if above < len(rows):
            brought = self._bring_up(rows[above:])
        if rows:
            blocks.used(rows[::-1], len(rows), at_once=True)
        blocks.residency.pins.unpin(rows)
        hits = above if self._states is None else self._to_a_state(self._states, keys[:above], tokens)
        if above + brought == len(rows):
            stored = self._store(keys[len(rows) :], rows[-1] if rows else NO_ROW)
        if self._states is not None:
            states = self._store_states(self._states, keys[: len(rows) + stored], hits, len(rows), tokens)
        self._rows.append((hits, brought + stored, len(rows) - above, self._written_below, states))

    def _to_a_state(self, kept: StatesKept, keys: Sequence[bytes], tokens: int) -> int:
        """How many of the blocks a request begins behind: up to the deepest state, and its last token is computed."""
        blocks = self._blocks
        for count in range(min(len(keys), (tokens - 1) // kept.policy.block_tokens), 0, -1):
            state = blocks.index.match(self._number, self._state_keys(kept, keys[count - 1]))
            if len(state) == kept.blocks:
                blocks.used(state[::-1], len(state), at_once=True)
                return count
        return 0

    def _store_states(self, kept: StatesKept, keys: Sequence[bytes], first: int, found: int, tokens: int) -> int:
        size, written = kept.policy.block_tokens, 0
        parted_at = found * size if kept.parted else 0
        for boundary in kept.policy.wanted(first * size, len(keys) * size, tokens, parted_at=parted_at):
            state = self._state_keys(kept, keys[boundary // size - 1])
            there = self._blocks.index.match(self._number, state)
            written += self._store(state[len(there) :], there[-1] if there else NO_ROW) > 0
        return written

    def _state_keys(self, kept: StatesKept, key: bytes) -> list[bytes]:
        first = self._first_state + int.from_bytes(key, "little") * kept.blocks
        return [_name(number) for number in range(first, first + kept.blocks)]

    def _bring_up(self, rows: Sequence[int]) -> int:
        filled = 0
        for taken in self._with_room(rows):
            self._blocks.make_place_above(self._number, taken)
            for row in taken:
                self._blocks.promoted(row, [b""])
            filled += len(taken)
        return filled

    def _with_room(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """These rows in parts for which there are slots in DRAM, as far as there are: free ones, else the worst leaves
        are evicted."""
        blocks, filled = self._blocks, 0
        while filled < len(rows):
            while not (free := blocks.dram.free_slots(self._class)):
                if not blocks.evict_worst(len(rows) - filled, self._leaves):
                    return
            yield rows[filled : filled + free]
            filled += free

    def _leaves(self, row: int) -> None:
        """DRAM evicts a block that NVMe lacks: write it and its missing ancestors, if admitted."""
        blocks, number = self._blocks, self._number
        lower, below, nvme = blocks.lower, blocks.below, self._nvme
        assert lower is not None and below is not None and nvme is not None
        way = []
        while row != NO_ROW and not blocks.is_below(row):
            way.append(row)
            row = blocks.index.parent(row)
        if not lower.admission.admits(way, self.block_bytes):
            return
        pinned = [*way] if row == NO_ROW else [*way, row]  # its ancestors must not be evicted for it
        blocks.residency.pins.pin(pinned)
        way.reverse()
        while way and (nvme.free_slots(self._class) or below.evict(1, number)[0]):
            taken = way[: nvme.free_slots(self._class)]
            (places,) = below.make_place(number, taken)
            nvme.commit(places)
            below.demoted(number, taken, blocks.residency.generations_of(taken))
            self._written_below += len(taken)
            del way[: len(taken)]
        blocks.residency.pins.unpin(pinned)

    def _store(self, keys: Sequence[bytes], parent: int) -> int:
        blocks, number = self._blocks, self._number
        rows: list[int] = []
        for key in keys:
            rows.append(blocks.begin(number, key, rows[-1] if rows else parent, 0, 0))
        filled = 0
        for taken in self._with_room(rows):
            (places,) = blocks.place(number, taken)
            blocks.dram.commit(places, [b""] * len(places))
            filled += len(taken)
        for row in reversed(rows[filled:]):  # only this request's own ancestors are left to evict
            blocks.free(blocks.orphan(row))
        if filled:
            blocks.publish(number, rows[:filled], blocks.next_generations(number, filled))
            blocks.used(blocks.index.chain(rows[filled - 1]), filled, at_once=True)
        return filled


def _name(number: int) -> bytes:
    return number.to_bytes(32, "little")


# Yardsticks ------------------------------------------------------------------------------------------------------


def optimal_hits(trace: Trace, capacity_blocks: int) -> Column:
    """Hits of each request by MIN with bypass: how many blocks a policy could have found, had it known the future.

    The block whose next use is furthest away goes first, even if it just came. In a chain an ancestor's next use is
    never later than its descendant's, and ties go to the deeper block, so whole prefixes are kept: the optimum for
    single blocks is the optimum for prefixes. L. A. Belady, "A study of replacement algorithms for a virtual-storage
    computer", IBM Systems Journal 5 (2), 1966.
    """
    earlier, later = trace.repeats()
    next_uses = np.full(len(trace.blocks), NEVER, np.int64)
    next_uses[earlier] = trace.request_numbers()[later]
    following = iter(next_uses.tolist())
    hits = np.zeros(trace.requests, np.int64)
    held: dict[int, int] = {}  # block -> its next use
    worst: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale if `held` has another next use
    for request, chain in enumerate(trace.chains()):
        is_prefix = True
        for depth, block in enumerate(chain):
            found = block in held
            is_prefix = is_prefix and found
            hits[request] += is_prefix
            use = next(following)
            if use == NEVER:
                held.pop(block, None)
                continue
            held[block] = use
            heappush(worst, (-use, -depth, block))
            if found or len(held) <= capacity_blocks:
                continue
            while True:
                next_use, _, gone = heappop(worst)
                if held.get(gone) == -next_use:
                    del held[gone]
                    break
        if len(worst) > 4 * capacity_blocks + 1024:
            worst = [one for one in worst if held.get(one[2]) == -one[0]]
            heapify(worst)
    return hits


class CoinAdmission(AdmitAll):
    """Admits a random share of evicted blocks. No store can use it. It takes ancestors along as every admission does,
    so it favours the beginnings of prompts: it is a stronger baseline than it sounds."""

    chooses = True

    def __init__(self, share: float, seed: int) -> None:
        self._least = int(share * (1 << 64))
        self._seed = seed
        self._throws = 0

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        self._throws += 1
        return xxh3_64_intdigest(self._throws.to_bytes(8, "little"), self._seed) < self._least


class OracleAdmission(AdmitAll):
    """Admits blocks that a later request asks for. No store can use it."""

    chooses = True

    def __init__(self, trace: Trace, names: array[int], now: Callable[[], int]) -> None:
        """names: block of each row. now: the current request."""
        last = np.zeros(trace.distinct_blocks, np.int64)
        last[trace.blocks] = trace.request_numbers()  # of those of one block, the last one stays
        self._last: list[int] = last.tolist()
        self._names = names
        self._now = now

    def admits(self, way: Sequence[int], block_bytes: int) -> bool:
        return self._last[self._names[way[0]]] > self._now()


# Policies compared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """blocks: sizes of DRAM. warmup: share of requests that are not counted. prefill_rate: tokens per second of a short
    prompt. kv_bytes_per_token: for bytes written. nvme_blocks: size of the lower tier, 0 for none. admission: to it;
    `ALL` is always shown too. write_shares: of the bytes that `ALL` writes over the whole trace, as budgets of
    `LEARNED`; `COIN` is tuned to write as much as that did. state_bytes: of one state of a model that has them, 0 for
    none: each policy is then replayed for all of `STATES`, too. state_share: of the KV's bytes (`StatePolicy`)."""

    blocks: Sequence[int]
    count_partial: bool = False
    warmup: float = 0.0
    seed: int = 0
    prefill_rate: float = 10_000.0
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    nvme_blocks: int = 0
    admission: Sequence[str] = (LEARNED,)
    write_shares: Sequence[float] = ()
    state_bytes: int = 0
    state_share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        if not self.blocks:
            raise BadInput("no size was given; give --blocks, such as --blocks 1000,10000")
        if not 0 <= self.warmup < 1:
            raise BadInput(f"--warmup {self.warmup:g}; give the share of requests that is not counted, 0 to below 1")
        if not 1e-3 <= self.prefill_rate < 1e12:
            raise BadInput(f"--prefill-rate {self.prefill_rate:g}; give tokens per second, 0.001 or more")
        StatePolicy(1, 1, 1, self.state_share)  # raises for a share that cannot be
        if self.state_bytes and self.nvme_blocks:
            raise BadInput("states are replayed in DRAM alone; give --blocks without --nvme-blocks, or another --model")
        for name in self.admission:
            if name not in ADMISSIONS:
                raise BadInput(f"--admission {name[:40]!r}; allowed: {', '.join(ADMISSIONS)}")
        for share in self.write_shares:
            if not 0.01 <= share <= 1:
                raise BadInput(f"--write-share {share:g}; give a share of what is written without a choice, 0.01 to 1")
        if COIN in self.admission and not self.write_shares:
            raise BadInput("--admission random writes a share; give --write-share, such as --write-share 0.5")
        if self.write_shares and not self.nvme_blocks:
            raise BadInput("--write-share is of what is written to NVMe; give --nvme-blocks, too")
        if self.write_shares and LEARNED not in self.admission and COIN not in self.admission:
            raise BadInput(
                f"--write-share is a budget of {LEARNED} and {COIN}, and --admission {','.join(self.admission)} names "
                f"neither; add one of them, such as --admission {LEARNED}, or leave --write-share out"
            )


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One policy at one size. Rates are shares of what was asked for. Hits without a tier's name are of all tiers;
    writes without one are to DRAM. write_share: the admission's budget. None where the optimum says nothing: which tier
    finds a block, and what is written. states: one of `STATES`, or None where a hit needs none; their bytes take room
    in DRAM like the KV's and are no part of `written_bytes`."""

    trace: str
    policy: str
    dram_blocks: int
    nvme_blocks: int
    admission: str | None
    write_share: float | None
    asked_blocks: int
    hit_blocks: int
    dram_hit_blocks: int | None
    nvme_hit_blocks: int | None
    block_hit_rate: float
    asked_tokens: int
    hit_tokens: int
    token_hit_rate: float
    prefill_seconds: float
    saved_prefill_seconds: float
    written_blocks: int | None
    written_bytes: int | None
    nvme_written_blocks: int | None
    nvme_written_bytes: int | None
    states: str | None = None
    written_states: int = 0
    written_state_bytes: int = 0


Progress = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Rows by trace, size and policy, the optimum last of each. policies: their names."""

    options: ReplayOptions
    traces: tuple[Trace, ...]
    rows: tuple[ReplayRow, ...]
    policies: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "options": asdict(self.options) | {"policies": list(self.policies)},
            "traces": [one.to_dict() for one in self.traces],
            "rows": [asdict(row) for row in self.rows],
        }

    def render(self, console: Any) -> None:
        from rich.text import Text

        counted = "partly filled blocks count" if self.options.count_partial else "full blocks alone"
        for trace in self.traces:
            read = (
                f"{trace.name}: {trace.requests:,} requests, {len(trace.blocks):,} blocks of {trace.block_tokens} "
                f"tokens, {trace.distinct_blocks:,} distinct ({counted})"
            )
            if trace.out_of_order:
                read += (
                    f"; {trace.out_of_order:,} stood behind a later one, and are put in the order of their timestamps"
                )
            console.print(Text(read), soft_wrap=True)
            rows = [row for row in self.rows if row.trace == trace.name]
            stateless = [row for row in rows if row.states is None]
            console.print(_table(TWO_TIERS if self.options.nvme_blocks else ONE_TIER, stateless))
            if self.options.state_bytes:
                console.print(Text("the same, where a hit needs a state at its end"))
                console.print(_table(WITH_STATES, [row for row in rows if row.states is not None]))


def run(
    traces: Sequence[Trace], policies: Mapping[str, PolicyMaker], options: ReplayOptions, progress: Progress
) -> ReplayResult:
    """Run every policy at every size on every trace."""
    if not policies:
        raise BadInput("no policy was given")
    names = [trace.name for trace in traces]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise BadInput(f"trace {', '.join(twice)} was given twice; give each once")
    used = traces if options.count_partial else [trace.without_partial() for trace in traces]
    rows: list[ReplayRow] = []
    for trace in used:
        for blocks in dict.fromkeys(options.blocks):
            for name, policy in policies.items():
                rows += _Comparison(trace, options, progress, name, policy, blocks).rows()
            progress(f"{trace.name}: optimum, {blocks:,} blocks", 0, 0)
            rows.append(_optimum(trace, options, blocks))
    return ReplayResult(options, tuple(used), tuple(rows), tuple(policies))


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One policy at one size on one trace."""

    trace: Trace
    options: ReplayOptions
    progress: Progress
    name: str
    policy: PolicyMaker
    blocks: int

    def rows(self) -> Iterator[ReplayRow]:
        for admission, share, done in self._admitted() if self.options.nvme_blocks else ():
            yield self._row(done, admission=admission, write_share=share)
        if not self.options.nvme_blocks:
            yield self._row(self._replayed(""))
            for at, kept in self._states():
                yield self._row(self._replayed(f", states at {at}", states=kept), states=at)

    def _replayed(
        self, words: str, admission: Callable[[Replay], Admission] | None = None, states: StatesKept | None = None
    ) -> Replayed:
        """words: name the admission, or where states are, in reports of progress."""
        doing, requests = f"{self.trace.name}: {self.name}, {self.blocks:,} blocks{words}", self.trace.requests
        replay = Replay(self.policy, self.blocks, self.options.seed, self.options.nvme_blocks, admission, states)
        return replay.run(self.trace, lambda done: self.progress(doing, done, requests))

    def _row(self, done: Replayed, **of: Any) -> ReplayRow:
        return _row_of(self.trace, self.options, self.name, self.blocks, done, **of)

    def _states(self) -> list[tuple[str, StatesKept]]:
        """(one of `STATES`, where they are kept), if the model has states."""
        options, size = self.options, self.trace.block_tokens
        if not options.state_bytes:
            return []
        policy = StatePolicy(size, options.state_bytes, options.kv_bytes_per_token, options.state_share)
        room = -(-options.state_bytes // (size * options.kv_bytes_per_token))
        return [
            (POLICY, StatesKept(policy, True, room)),
            (EACH_BLOCK, StatesKept(StatePolicy(size, 1, 1, 1.0), False, room)),
            (ENDS_ALONE, StatesKept(replace(policy, share=0), False, room)),
        ]

    def _admitted(self) -> Iterator[tuple[str, float | None, Replayed]]:
        """(admission, its share of the bytes, result): everything admitted first, then what the options ask for."""
        everything = self._replayed(", everything admitted")
        yield ALL, None, everything
        total = _written(everything)
        shares = list(dict.fromkeys(self.options.write_shares))
        written = {share: int(share * total) for share in shares}
        if LEARNED in self.options.admission:
            yield LEARNED, None, self._replayed(", learned", _learned(None))
            for share in shares:
                done = self._within(share, share * total) if total else everything
                written[share] = _written(done)
                yield LEARNED, share, done
        if COIN in self.options.admission:
            for share in shares:
                yield COIN, share, self._coin(share, written[share]) if total else everything
        if ORACLE in self.options.admission:

            def oracle(replay: Replay) -> Admission:
                return OracleAdmission(self.trace, replay.names, lambda: replay.request)

            yield ORACLE, None, self._replayed(", an oracle admits", oracle)

    def _within(self, share: float, wanted: float) -> Replayed:
        """Search the budget whose replay writes nearest to so many blocks: what is left of the bucket at the end cannot
        be predicted."""
        seconds = float(np.ptp(self.trace.timestamps_ms)) / 1000
        tried: dict[int, Replayed] = {}
        planned = wanted
        for number in range(1, BUDGETS + 1):
            words = f", learned, {share:g} of the bytes, try {number}"
            done = self._replayed(words, _learned(LearnedAdmission.rate_for(planned, seconds)))
            count = _written(done)
            is_same = count in tried  # the budget no longer limits it
            tried[count] = done
            if is_same or not count or abs(count - wanted) <= wanted * NEAR_ENOUGH:
                break
            planned *= wanted / count
        return tried[min(tried, key=lambda count: abs(count - wanted))]

    def _coin(self, share: float, wanted: int) -> Replayed:
        """Search the coin's chance with which about so many blocks are written."""
        tried: dict[int, Replayed] = {}
        low, high = -10.0, 0.0  # powers of two: ancestors come along, so even a small chance writes much
        for number in range(1, BISECTIONS + 1):
            middle = (low + high) / 2
            words = f", random, {share:g} of the bytes, try {number}"
            done = self._replayed(words, _coin_of(2**middle, self.options.seed))
            tried[_written(done)] = done
            low, high = (middle, high) if _written(done) < wanted else (low, middle)
        return tried[min(tried, key=lambda count: abs(count - wanted))]


def _learned(blocks_per_second: float | None) -> Callable[[Replay], Admission]:
    def learned(replay: Replay) -> Admission:
        budget = None if blocks_per_second is None else blocks_per_second * replay.block_bytes
        return LearnedAdmission(replay.names, lambda: replay.seconds, budget)

    return learned


def _coin_of(share: float, seed: int) -> Callable[[Replay], Admission]:
    return lambda replay: CoinAdmission(share, seed)


def _written(done: Replayed) -> int:
    return int(done.nvme_writes.sum())


def _optimum(trace: Trace, options: ReplayOptions, blocks: int) -> ReplayRow:
    hits = optimal_hits(trace, blocks + options.nvme_blocks)
    row = _row_of(trace, options, OPTIMUM, blocks, Replayed(hits, *[np.zeros_like(hits)] * 4))
    if options.nvme_blocks:
        row = replace(row, dram_hit_blocks=None, nvme_hit_blocks=None)
    return replace(row, written_blocks=None, written_bytes=None, nvme_written_blocks=None, nvme_written_bytes=None)


def _row_of(
    trace: Trace,
    options: ReplayOptions,
    policy: str,
    dram_blocks: int,
    done: Replayed,
    admission: str | None = None,
    write_share: float | None = None,
    states: str | None = None,
) -> ReplayRow:
    first = int(options.warmup * trace.requests)
    dram, nvme, written, written_below, written_states = (
        one[first:] for one in (done.dram_hits, done.nvme_hits, done.dram_writes, done.nvme_writes, done.state_writes)
    )
    asked_tokens = trace.input_tokens[first:]
    hit_tokens = np.minimum((dram + nvme) * trace.block_tokens, asked_tokens)
    asked, hit = int(np.diff(trace.starts)[first:].sum()), int((dram + nvme).sum())
    block_bytes = trace.block_tokens * options.kv_bytes_per_token
    return ReplayRow(
        trace=trace.name,
        policy=policy,
        dram_blocks=dram_blocks,
        nvme_blocks=options.nvme_blocks,
        admission=admission,
        write_share=write_share,
        asked_blocks=asked,
        hit_blocks=hit,
        dram_hit_blocks=int(dram.sum()),
        nvme_hit_blocks=int(nvme.sum()),
        block_hit_rate=hit / asked if asked else 0.0,
        asked_tokens=int(asked_tokens.sum()),
        hit_tokens=int(hit_tokens.sum()),
        token_hit_rate=int(hit_tokens.sum()) / int(asked_tokens.sum()) if asked_tokens.any() else 0.0,
        prefill_seconds=_prefill_seconds(asked_tokens, options.prefill_rate),
        saved_prefill_seconds=_prefill_seconds(hit_tokens, options.prefill_rate),
        written_blocks=int(written.sum()),
        written_bytes=int(written.sum()) * block_bytes,
        nvme_written_blocks=int(written_below.sum()),
        nvme_written_bytes=int(written_below.sum()) * block_bytes,
        states=states,
        written_states=int(written_states.sum()),
        written_state_bytes=int(written_states.sum()) * options.state_bytes,
    )


def _prefill_seconds(tokens: Column, rate: float) -> float:
    return float((tokens / rate * (1 + tokens / QUADRATIC_TOKENS)).sum())


# Tables for people -----------------------------------------------------------------------------------------------


def headed(heads: str) -> Table:
    """A table with these heads, parted by |; a column whose head begins with * stands to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads.split("|"):
        table.add_column(head.lstrip("*"), justify="right" if head.startswith("*") else "left")
    return table


ONE_TIER = "policy|*DRAM blocks|*hit blocks|*of asked|*of optimum|*tokens|*prefill saved|*written"
TWO_TIERS = (
    "policy|admission|*DRAM blocks|*NVMe blocks|*DRAM hits|*NVMe hits|*of asked|*prefill saved|*to DRAM|*to NVMe|*share"
)
WITH_STATES = "policy|*DRAM blocks|states at|*tokens|*prefill saved|*KV written|*states written|*states / KV"


def _table(heads: str, rows: Sequence[ReplayRow]) -> Table:
    best = {row.dram_blocks: row.hit_blocks for row in rows if row.policy == OPTIMUM}
    of_all = {(row.policy, row.dram_blocks): row.nvme_written_blocks for row in rows if row.admission == ALL}
    table = headed(heads)
    for row in rows:
        of_prefill = "" if heads == TWO_TIERS else f"of {row.prefill_seconds:,.0f} "
        share = "" if row.write_share is None else f" {row.write_share:g}"
        cells = {
            "policy": row.policy,
            "admission": "-" if row.admission is None else row.admission + share,
            "states at": row.states,
            "DRAM blocks": f"{row.dram_blocks:,}",
            "NVMe blocks": f"{row.nvme_blocks:,}",
            "hit blocks": f"{row.hit_blocks:,}",
            "DRAM hits": _number(row.dram_hit_blocks),
            "NVMe hits": _number(row.nvme_hit_blocks),
            "of asked": f"{row.block_hit_rate:.4f}",
            "of optimum": _ratio(row.hit_blocks, best.get(row.dram_blocks)),
            "tokens": f"{row.token_hit_rate:.4f}",
            "prefill saved": f"{row.saved_prefill_seconds:,.0f} {of_prefill}s",
            "written": _size(row.written_bytes),
            "to DRAM": _size(row.written_bytes),
            "to NVMe": _size(row.nvme_written_bytes),
            "share": _ratio(row.nvme_written_blocks, of_all.get((row.policy, row.dram_blocks))),
            "KV written": _size(row.written_bytes),
            "states written": _size(row.written_state_bytes),
            "states / KV": _ratio(row.written_state_bytes, row.written_bytes),
        }
        table.add_row(*(cells[head.lstrip("*")] for head in heads.split("|")))
    return table


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def _ratio(count: int | None, of: int | None) -> str:
    return f"{count / of:.3f}" if of and count is not None else "-"
