"""The messages between the two halves of a connector about one step of the engine.

The half in the scheduler's process decides, and the half in each worker executes. Orders go out with the step's
metadata, reports come back with its output; the engine pickles both, so they are plain and small. Pages are named by
the engine's numbers, and blocks by their prefix keys: no token ids cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_adapter.audit.audits import AuditResult
from kvstore.block.account import MissReason
from kvstore.block.layout import Attention, Layout
from kvstore.client.handle import Lease, NamespaceHandle


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers as a worker's engine registered it: this rank's heads. layers: numbers over all groups.
    page_tokens: of its pages; row_tokens: that one stored row covers, of a state the whole page. split: kernel pages to
    a page. table: which of the engine's page tables names its pages; several groups may share one. Of a state, text:
    what its bytes are; tensors: (dtype, numbers) of those in them; made_of: the dtype of what it was computed from."""

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    widths: tuple[int, ...]
    dtype: str
    attention: Attention
    window: int
    page_tokens: int
    row_tokens: int = 1
    split: int = 1
    table: int = 0
    text: str = ""
    tensors: tuple[tuple[str, int], ...] = ()
    made_of: str = ""

    @property
    def is_state(self) -> bool:
        return self.attention is Attention.STATE


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The pages of one worker. page_tokens: the least common multiple of the groups' pages. packing: how numbers lie in
    a page, proven; scales: digest of the KV scales. page_bytes: of `page_tokens` tokens in all layers, without states.
    refused: why nothing can be stored, else empty."""

    rank: int
    page_tokens: int
    groups: tuple[GroupSpec, ...]
    packing: str
    scales: str
    device: str
    page_bytes: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """The namespace that a worker opens. number: raised with each change, so that orders and namespaces cannot be mixed
    up. name: of the model, for people. groups: of which the layouts are made; table_tokens: of a page in each of the
    engine's tables. states: the layout of recurrent states, which have a namespace of their own; where the model has no
    KV it is `layout`."""

    number: int
    session: str
    model: str
    layout: Layout
    codec: str
    weights_epoch: int
    config: Mapping[str, str]
    name: str = ""
    groups: tuple[GroupSpec, ...] = ()
    table_tokens: tuple[int, ...] = ()
    states: Layout | None = None

    @property
    def has_kv(self) -> bool:
        return self.states != self.layout

    @property
    def kv_groups(self) -> tuple[GroupSpec, ...]:
        return tuple(group for group in self.groups if not group.is_state)

    @property
    def state_groups(self) -> tuple[GroupSpec, ...]:
        return tuple(group for group in self.groups if group.is_state)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive logical pages of one KV group of one request: pages[i] is the physical page of number first + i."""

    first: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class LeaseHere:
    """A lease of the scheduler's half, and the handle it was taken on: a worker in the same process reads with these,
    without a query to the store. In another process it is None."""

    lease: Lease
    namespace: NamespaceHandle

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load leased blocks into pages. number: the order's own. tables: by group, from the page of first_token on. waits:
    the step needs it; otherwise the request is parked until it is reported. here: the scheduler's lease, for a worker
    in its process and a load that its step waits for: the lease cannot be released meanwhile. state: loads the one
    behind stop_token, without which nothing counts as loaded."""

    number: int
    request: str
    namespace: int
    ticket: bytes
    first_token: int
    stop_token: int
    tables: tuple[PageRun, ...]
    waits: bool
    layerwise: bool = False
    here: LeaseHere | None = None
    state: LoadOrder | None = None


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Read pages once the step is over, and offer a prompt's blocks from first_token on. keys: of all its blocks up to
    the last that is offered, joined. tables: by group, from the page of first_token on. is_urgent: it does not wait for
    an idle engine. is_state: the block is the state behind its last token. ticket: of the stored block of first_token,
    which is compared with these pages (an audit); nothing is offered then."""

    number: int
    request: str
    namespace: int
    keys: bytes
    first_token: int
    tables: tuple[PageRun, ...]
    ttl: float | None
    priority: int
    is_urgent: bool = False
    is_state: bool = False
    ticket: bytes = b""


@dataclass(slots=True)
class StepPlan:
    """One step. namespace: if it is a new one. cancelled_saves: those whose pages this step writes to.
    failures_seen: by rank, of how many failed loads the scheduler knows, if of any. number: of a step that computes
    anything, else 0."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    cancelled_saves: list[int] = field(default_factory=list)
    namespace: NamespaceSpec | None = None
    failures_seen: Mapping[int, int] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """tokens: of the prompt, up to which pages are verified. seconds: from the order to its end. reason: why there are
    fewer than ordered."""

    number: int
    request: str
    rank: int
    tokens: int
    seconds: float
    reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class SaveReport:
    """held: leading blocks of the prompt that the store has; stored: new ones of these. reason: why there are no more,
    None if all offered blocks are held. dropped: given up, since the engine wanted the pages, the step was computed
    behind a failed load, too much waits to be saved, or the worker is closed. results: of an audit, for this rank's
    part of the block; empty if there was nothing left to compare."""

    number: int
    request: str
    rank: int
    held: int = 0
    stored: int = 0
    seconds: float = 0.0
    reason: MissReason | None = None
    dropped: bool = False
    results: tuple[AuditResult, ...] = ()


@dataclass(slots=True)
class StepReports:
    """All workers' reports after a step. failures: failed loads that steps waited for, by rank, if any. facts: of
    workers that could not give them when the engine started. step: its number."""

    loads: list[LoadReport] = field(default_factory=list)
    saves: list[SaveReport] = field(default_factory=list)
    failures: dict[int, int] = field(default_factory=dict)
    facts: list[WorkerSpec] = field(default_factory=list)
    step: int = 0

    def merge(self, other: StepReports) -> None:
        self.step = max(self.step, other.step)
        self.loads += other.loads
        self.saves += other.saves
        self.failures.update(other.failures)
        self.facts += other.facts
