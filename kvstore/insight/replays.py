"""Compares policies on traces at several sizes, beside the offline optimum: `kvstore replay`.

Every figure is a ratio over the requests behind the warm-up; the warm-up fills the store and is not counted. Prefill
seconds are modelled: n tokens take n / rate * (1 + n / QUADRATIC_TOKENS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from kvstore.block.errors import BadInput
from kvstore.block.states import DEFAULT_SHARE, StatePolicy
from kvstore.config import format_size
from kvstore.insight.replay import Replay, Replayed, StatesKept
from kvstore.insight.trace import Column, Trace
from kvstore.insight.yardsticks import CoinAdmission, OracleAdmission, optimal_hits, requests_of, share_that_writes
from tiering.policies.admission import Admission, LearnedAdmission
from tiering.policies.policy import PolicyMaker

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
MOST_BLOCKS = 1 << 22
"""Capacity limit of the tables; a trace with that many distinct blocks has some million requests."""


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


Builder = Callable[..., Replay]
"""Makes a store's tables: `node.build_replay`."""
Progress = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Rows by trace, size and policy, the optimum last of each. policies: their names."""

    options: ReplayOptions
    traces: tuple[Trace, ...]
    rows: tuple[ReplayRow, ...]
    policies: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        options = asdict(self.options)
        for name in ("blocks", "admission", "write_shares"):
            options[name] = list(options[name])
        options["policies"] = list(self.policies)
        return {
            "options": options,
            "traces": [one.to_dict() for one in self.traces],
            "rows": [asdict(row) for row in self.rows],
        }

    def render(self, console: Any) -> None:
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
            console.print(_tiers(rows) if self.options.nvme_blocks else _one_tier(rows))
            if self.options.state_bytes:
                console.print(Text("the same, where a hit needs a state at its end"))
                console.print(_with_states(rows))


def headed(heads: str) -> Table:
    """A table with these heads, parted by |; a column whose head begins with * stands to the right."""
    table = Table(box=None, pad_edge=False)
    for head in heads.split("|"):
        table.add_column(head.lstrip("*"), justify="right" if head.startswith("*") else "left")
    return table


def _one_tier(rows: Sequence[ReplayRow]) -> Table:
    table = headed("policy|*DRAM blocks|*hit blocks|*of asked|*of optimum|*tokens|*prefill saved|*written")
    best = {row.dram_blocks: row.hit_blocks for row in rows if row.policy == OPTIMUM}
    for row in (one for one in rows if one.states is None):
        table.add_row(
            row.policy,
            f"{row.dram_blocks:,}",
            f"{row.hit_blocks:,}",
            f"{row.block_hit_rate:.4f}",
            f"{row.hit_blocks / best[row.dram_blocks]:.3f}" if best[row.dram_blocks] else "-",
            f"{row.token_hit_rate:.4f}",
            f"{row.saved_prefill_seconds:,.0f} of {row.prefill_seconds:,.0f} s",
            _size(row.written_bytes),
        )
    return table


def _tiers(rows: Sequence[ReplayRow]) -> Table:
    table = headed(
        "policy|admission|*DRAM blocks|*NVMe blocks|*DRAM hits|*NVMe hits|*of asked|*prefill saved|*to DRAM|*to NVMe"
        "|*share"
    )
    of_all = {(row.policy, row.dram_blocks): row.nvme_written_blocks for row in rows if row.admission == ALL}
    for row in rows:
        everything = of_all.get((row.policy, row.dram_blocks))
        table.add_row(
            row.policy,
            "-"
            if row.admission is None
            else row.admission + ("" if row.write_share is None else f" {row.write_share:g}"),
            f"{row.dram_blocks:,}",
            f"{row.nvme_blocks:,}",
            _number(row.dram_hit_blocks),
            _number(row.nvme_hit_blocks),
            f"{row.block_hit_rate:.4f}",
            f"{row.saved_prefill_seconds:,.0f} s",
            _size(row.written_bytes),
            _size(row.nvme_written_bytes),
            f"{row.nvme_written_blocks / everything:.3f}"
            if everything and row.nvme_written_blocks is not None
            else "-",
        )
    return table


def _with_states(rows: Sequence[ReplayRow]) -> Table:
    table = headed("policy|*DRAM blocks|states at|*tokens|*prefill saved|*KV written|*states written|*states / KV")
    for row in (one for one in rows if one.states is not None):
        table.add_row(
            row.policy,
            f"{row.dram_blocks:,}",
            row.states,
            f"{row.token_hit_rate:.4f}",
            f"{row.saved_prefill_seconds:,.0f} of {row.prefill_seconds:,.0f} s",
            _size(row.written_bytes),
            _size(row.written_state_bytes),
            f"{row.written_state_bytes / row.written_bytes:.3f}" if row.written_bytes else "-",
        )
    return table


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)


def run(
    traces: Sequence[Trace],
    policies: Mapping[str, PolicyMaker],
    options: ReplayOptions,
    build: Builder,
    progress: Progress,
) -> ReplayResult:
    """Run every policy at every size on every trace."""
    if not policies:
        raise BadInput("no policy was given")
    names = [trace.name for trace in traces]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise BadInput(f"trace {', '.join(twice)} was given twice; give each once")
    used = traces if options.count_partial else [trace.without_partial() for trace in traces]
    rows = []
    for trace in used:
        account = _Account(trace, options)
        for blocks in dict.fromkeys(options.blocks):
            for name, policy in policies.items():
                here = _Here(
                    trace, policy, blocks, options, build, progress, f"{trace.name}: {name}, {blocks:,} blocks"
                )
                if not options.nvme_blocks:
                    rows.append(account.row(name, blocks, here.run("")))
                    rows += [account.row(name, blocks, done, states=at) for at, done in here.with_states()]
                    continue
                for admission, share, done in here.admitted():
                    rows.append(account.row(name, blocks, done, admission, share))
            progress(f"{trace.name}: optimum, {blocks:,} blocks", 0, 0)
            hits = optimal_hits(trace, blocks + options.nvme_blocks)
            best = account.row(OPTIMUM, blocks, Replayed(hits, *[np.zeros_like(hits)] * 4))
            if options.nvme_blocks:
                best = replace(best, dram_hit_blocks=None, nvme_hit_blocks=None)
            rows.append(
                replace(
                    best, written_blocks=None, written_bytes=None, nvme_written_blocks=None, nvme_written_bytes=None
                )
            )
    return ReplayResult(options, tuple(used), tuple(rows), tuple(policies))


@dataclass(frozen=True, slots=True)
class _Here:
    trace: Trace
    policy: PolicyMaker
    blocks: int
    options: ReplayOptions
    build: Builder
    progress: Progress
    doing: str

    def run(
        self, words: str, admission: Callable[[Replay], Admission] | None = None, states: StatesKept | None = None
    ) -> Replayed:
        """Replay once. words: names the admission in reports of progress."""

        def told(done: int) -> None:
            self.progress(self.doing + words, done, self.trace.requests)

        replay = self.build(self.policy, self.blocks, self.options.seed, self.options.nvme_blocks, admission, states)
        return replay.run(self.trace, told)

    def with_states(self) -> Iterator[tuple[str, Replayed]]:
        """(one of `STATES`, result), if the model has states."""
        options, size = self.options, self.trace.block_tokens
        if not options.state_bytes:
            return
        policy = StatePolicy(size, options.state_bytes, options.kv_bytes_per_token, options.state_share)
        room = -(-options.state_bytes // (size * options.kv_bytes_per_token))
        each_block = StatePolicy(size, 1, 1, 1.0)
        for at, kept in (
            (POLICY, StatesKept(policy, True, room)),
            (EACH_BLOCK, StatesKept(each_block, False, room)),
            (ENDS_ALONE, StatesKept(replace(policy, share=0), False, room)),
        ):
            yield at, self.run(f", states at {at}", states=kept)

    def admitted(self) -> Iterator[tuple[str, float | None, Replayed]]:
        """(admission, its share of the bytes, result): everything admitted first, then what the options ask for."""
        everything = self.run(", everything admitted")
        yield ALL, None, everything
        total = int(everything.nvme_writes.sum())
        seconds = float(np.ptp(self.trace.timestamps_ms)) / 1000
        shares = list(dict.fromkeys(self.options.write_shares))
        written = {share: int(share * total) for share in shares}
        if LEARNED in self.options.admission:
            yield LEARNED, None, self.run(", learned", self._learned(None))
            for share in shares:
                done = self._within(share, share * total, seconds) if total else everything
                written[share] = int(done.nvme_writes.sum())
                yield LEARNED, share, done
        if COIN in self.options.admission:
            for share in shares:
                yield COIN, share, self._coin(share, written[share]) if total else everything
        if ORACLE in self.options.admission:
            requests = requests_of(self.trace)
            yield (
                ORACLE,
                None,
                self.run(
                    ", an oracle admits",
                    lambda replay: OracleAdmission(requests, replay.names, lambda: replay.request),
                ),
            )

    def _learned(self, blocks_per_second: float | None) -> Callable[[Replay], Admission]:
        def learned(replay: Replay) -> Admission:
            budget = None if blocks_per_second is None else blocks_per_second * replay.block_bytes
            return LearnedAdmission(replay.names, lambda: replay.seconds, budget)

        return learned

    def _within(self, share: float, wanted: float, seconds: float) -> Replayed:
        """Search the budget whose replay writes nearest to so many blocks: what is left of the bucket at the end cannot
        be predicted."""
        tried: dict[int, Replayed] = {}
        planned = wanted
        for number in range(1, BUDGETS + 1):
            words = f", learned, {share:g} of the bytes, try {number}"
            done = self.run(words, self._learned(LearnedAdmission.rate_for(planned, seconds)))
            count = int(done.nvme_writes.sum())
            is_same = count in tried  # the budget no longer limits it
            tried[count] = done
            if is_same or not count or abs(count - wanted) <= wanted * NEAR_ENOUGH:
                break
            planned *= wanted / count
        return tried[min(tried, key=lambda count: abs(count - wanted))]

    def _coin(self, share: float, wanted: int) -> Replayed:
        tried: dict[int, Replayed] = {}

        def written(chance: float) -> int:
            words = f", random, {share:g} of the bytes, try {len(tried) + 1}"
            done = self.run(words, lambda replay: CoinAdmission(chance, self.options.seed))
            count = int(done.nvme_writes.sum())
            tried[count] = done
            return count

        written(share_that_writes(wanted, written))
        return tried[min(tried, key=lambda count: abs(count - wanted))]


class _Account:
    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        self._trace = trace
        self._options = options
        self._first = int(options.warmup * trace.requests)
        self._asked_blocks = int(np.diff(trace.starts)[self._first :].sum())
        self._tokens = trace.input_tokens[self._first :]

    def row(
        self,
        policy: str,
        dram_blocks: int,
        done: Replayed,
        admission: str | None = None,
        write_share: float | None = None,
        states: str | None = None,
    ) -> ReplayRow:
        dram, nvme = done.dram_hits[self._first :], done.nvme_hits[self._first :]
        blocks = dram + nvme
        written, written_below, written_states = (
            int(one[self._first :].sum()) for one in (done.dram_writes, done.nvme_writes, done.state_writes)
        )
        block_bytes = self._trace.block_tokens * self._options.kv_bytes_per_token
        tokens = np.minimum(blocks * self._trace.block_tokens, self._tokens)
        asked, hit = self._asked_blocks, int(blocks.sum())
        asked_tokens, hit_tokens = int(self._tokens.sum()), int(tokens.sum())
        return ReplayRow(
            self._trace.name,
            policy,
            dram_blocks,
            self._options.nvme_blocks,
            admission,
            write_share,
            asked,
            hit,
            int(dram.sum()),
            int(nvme.sum()),
            hit / asked if asked else 0.0,
            asked_tokens,
            hit_tokens,
            hit_tokens / asked_tokens if asked_tokens else 0.0,
            self._seconds(self._tokens),
            self._seconds(tokens),
            written,
            written * block_bytes,
            written_below,
            written_below * block_bytes,
            states,
            written_states,
            written_states * self._options.state_bytes,
        )

    def _seconds(self, tokens: Column) -> float:
        return float((tokens / self._options.prefill_rate * (1 + tokens / QUADRATIC_TOKENS)).sum())
