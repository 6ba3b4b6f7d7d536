"""The result of a check, as one object and as text for people.

Each slot has exactly one classification, so a slab's counts add up to its slots. Tenants and namespaces appear as
prefixes of their opaque digests; keys and contents are never shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from kvstore.config import format_size
from tiering.slab_header import FORMAT_VERSION, SlabHeader

LISTED_PROBLEMS = 20
SHOWN_SLABS = 20
DIGEST_PREFIX = 12
"""Hexadecimal digits shown of a tenant's or namespace's digest: enough to tell them apart."""


class Slot(IntEnum):
    """Classification of a slot. The first four are in order, the others damaged."""

    EMPTY = 0
    GOOD = 1  # header MAC, slot class and all payload digests are right, and the index lists it
    IN_DOUBT = 2  # was being written or evicted when the store ended; the next start empties it
    GIVEN_UP = 3  # quarantined: failed a check before; neither it nor its slot is used
    DAMAGED_HEADER = 4  # neither zeros nor a header that verifies
    DAMAGED_PAYLOAD = 5  # the header verifies, the payload does not match it
    UNREADABLE = 6  # the disk returns an error
    MISSING = 7  # the index lists a frame, and the slot is empty
    OTHER_FRAME = 8  # the index lists another frame than the slot contains
    UNNAMED = 9  # a good frame that the index does not list


IN_ORDER = (Slot.EMPTY, Slot.GOOD, Slot.IN_DOUBT, Slot.GIVEN_UP)
DAMAGED = tuple(slot for slot in Slot if slot not in IN_ORDER)


class Seen(IntEnum):
    """What a slot contains, without regard to the index."""

    EMPTY = 0
    GOOD = 1
    DAMAGED_HEADER = 2
    DAMAGED_PAYLOAD = 3
    UNREADABLE_HEADER = 4
    UNREADABLE_PAYLOAD = 5


class SlabState(Enum):
    """State of a slab's headers."""

    GOOD = "good"
    ONE_HEADER = "one_header"  # one of the two copies is damaged
    UNUSABLE = "unusable"  # neither copy is usable, or it is not a slab of this directory: starts never touch it
    NEEDS_KEYS = "needs_keys"  # written under keys that are missing: digests are checked, MACs cannot be
    UNFINISHED = "unfinished"  # no header, and it never held a frame: the next start removes it


class IndexState(Enum):
    """Whether the next start can use the index; if not, it reads every header."""

    GOOD = "good"
    MISSING = "missing"
    DOUBTFUL = "doubtful"  # failed a check of its structure
    FOREIGN = "foreign"  # belongs to another directory, or is incomplete
    STALE = "stale"  # older than the stamp, or changed by another program


class Problem(NamedTuple):
    """slab: the file's name, empty for the directory; slot: None for all of it."""

    what: str
    slab: str
    slot: int | None
    detail: str

    def to_dict(self) -> dict[str, object]:
        return {"what": self.what, "slab": self.slab or None, "slot": self.slot, "detail": self.detail}


@dataclass
class Problems:
    """Counts all problems, and keeps the first ones in full."""

    listed: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, detail: str, slab: str = "", slot: int | None = None) -> None:
        self.counts[what] += 1
        if len(self.listed) < LISTED_PROBLEMS:
            self.listed.append(Problem(what, slab, slot, detail))

    @property
    def total(self) -> int:
        return self.counts.total()


@dataclass
class SlabResult:
    """good_page: the correct header; bad_offsets: copies that have to be rewritten.

    seen, slots: one byte for each slot, a `Seen` and a `Slot`; empty if the slots are unknown.
    """

    name: str
    size_bytes: int
    state: SlabState
    detail: str = ""
    header: SlabHeader | None = None
    good_page: bytes = b""
    bad_offsets: tuple[int, ...] = ()
    seen: bytearray = field(default_factory=bytearray)
    slots: bytearray = field(default_factory=bytearray)

    @property
    def counts(self) -> dict[str, int]:
        return {slot.name.lower(): self.slots.count(slot) for slot in Slot}

    @property
    def owner(self) -> tuple[str, str]:
        """Prefixes of the tenant's and the namespace's digests."""
        if self.header is None:
            return "", ""
        owner = self.header.slot_class
        return owner.tenant.hex()[:DIGEST_PREFIX], owner.namespace.hex()[:DIGEST_PREFIX]

    @property
    def is_damaged(self) -> bool:
        in_order = self.state in (SlabState.GOOD, SlabState.UNFINISHED)
        return not in_order or any(self.slots.count(slot) for slot in DAMAGED)

    def to_dict(self) -> dict[str, object]:
        tenant, namespace = self.owner
        owner = self.header.slot_class if self.header is not None else None
        return {
            "slab": self.name,
            "bytes": self.size_bytes,
            "state": self.state.value,
            "detail": self.detail,
            "tenant": tenant or None,
            "namespace": namespace or None,
            "part": owner.part if owner is not None else None,
            "frame_bytes": owner.frame_bytes if owner is not None else None,
            "slots": len(self.slots),
            **self.counts,
        }


class StampResult(NamedTuple):
    """How the directory was left. session and clean: None without a readable stamp. faults: of its file."""

    session: int | None
    clean: bool | None
    faults: list[str]


class RepairResult(NamedTuple):
    """left: what a repair must not or cannot mend, one line each."""

    headers_rewritten: int
    emptied: int
    given_up: int
    frames: int
    left: list[str]


@dataclass
class FsckResult:
    """The result of a check, and of the repair if there was one.

    seconds: of the whole check. read_seconds: of reading `checked_bytes`. tenant_names: of tenants whose keys are here,
    by digest prefix; model_names: the engines' names of models, by tenant and namespace.
    """

    directory: str
    has_keys: bool
    stamp: StampResult
    index: IndexState
    index_detail: str
    slabs: list[SlabResult]
    problems: Problems
    checked_bytes: int
    seconds: float
    read_seconds: float
    repair: RepairResult | None = None
    tenant_names: Mapping[str, str] = field(default_factory=dict)
    model_names: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether nothing is damaged, or a repair left nothing damaged."""
        return not self.problems.total if self.repair is None else not self.repair.left

    @property
    def gb_per_second(self) -> float:
        return self.checked_bytes / self.read_seconds / 1e9 if self.read_seconds else 0.0

    def totals(self) -> dict[str, int]:
        return _sum(self.slabs)

    def by_namespace(self) -> dict[tuple[str, str], list[SlabResult]]:
        groups: dict[tuple[str, str], list[SlabResult]] = {}
        for slab in self.slabs:
            if slab.header is not None:
                groups.setdefault(slab.owner, []).append(slab)
        return groups

    def to_dict(self) -> dict[str, object]:
        return {
            "directory": self.directory,
            "ok": self.is_well,
            "format": FORMAT_VERSION,
            "keys": self.has_keys,
            "stamp": self.stamp._asdict(),
            "index": {"state": self.index.value, "detail": self.index_detail},
            "slabs": [slab.to_dict() for slab in self.slabs],
            "totals": self.totals(),
            "namespaces": [
                {
                    "tenant": tenant,
                    "namespace": namespace,
                    "slabs": len(slabs),
                    **_sum(slabs),
                    "tenant_name": self.tenant_names.get(tenant),
                    "name": self.model_names.get((tenant, namespace)),
                }
                for (tenant, namespace), slabs in self.by_namespace().items()
            ],
            "problems": self.problems.total,
            "problems_by_kind": dict(self.problems.counts),
            "first_problems": [problem.to_dict() for problem in self.problems.listed],
            "checked_bytes": self.checked_bytes,
            "seconds": self.seconds,
            "gb_per_second": self.gb_per_second,
            "repair": self.repair._asdict() if self.repair is not None else None,
        }

    # For people ------------------------------------------------------------------------------------------------------

    def render(self, console: Any) -> None:
        for line in self._facts():
            console.print(Text(line), soft_wrap=True)
        for table in self._tables():
            console.print(table)
        for problem in self.problems.listed:
            where = problem.slab + (f" slot {problem.slot}" if problem.slot is not None else "")
            line = ": ".join(part for part in (where, problem.what.replace("_", " "), problem.detail) if part)
            console.print(Text(line), soft_wrap=True)
        if self.problems.total > len(self.problems.listed):
            console.print(Text(f"and {self.problems.total - len(self.problems.listed)} more"), soft_wrap=True)
        for line in self._verdict():
            console.print(Text(line), soft_wrap=True)

    def _facts(self) -> list[str]:
        ended = {True: "closed in order", False: "not closed in order", None: "not known"}[self.stamp.clean]
        session = "unknown session" if self.stamp.session is None else f"session {self.stamp.session}"
        index = f"index {self.index.value} ({self.index_detail})"
        lines = [f"{self.directory}: format {FORMAT_VERSION}, {session}, {ended}; {index}"]
        if not self._all_keys:
            lines.append("Without keys only digests can be checked: who wrote the headers is not known.")
        if self.totals()["in_doubt"]:
            lines.append("Slots in doubt are no damage: the next start empties them.")
        return lines

    def _tables(self) -> Iterator[Table]:
        room = SHOWN_SLABS
        for (tenant, namespace), slabs in self.by_namespace().items():
            whose = f"{self.tenant_names[tenant]} ({tenant})" if tenant in self.tenant_names else tenant
            title = f"tenant {whose}, namespace {namespace}"
            if (tenant, namespace) in self.model_names:
                title += f", {self.model_names[tenant, namespace]}"
            table = Table(
                title=Text(title),
                title_justify="left",
                title_style="bold",
                box=None,
                padding=(0, 2, 0, 0),
                pad_edge=False,
            )
            for name in ("slab", "part", "frame"):
                table.add_column(name)
            for name in ("slots", "good", "empty", "in doubt", "given up", "damaged"):
                table.add_column(name, justify="right")
            shown = sorted(slabs, key=lambda slab: not slab.is_damaged)[:room]
            room -= len(shown)
            for slab in shown:
                assert slab.header is not None
                owner = slab.header.slot_class
                table.add_row(slab.name, str(owner.part), format_size(owner.frame_bytes), *_row(_sum([slab])))
            if len(slabs) > 1:
                table.add_row(f"all {len(slabs)}", "", "", *_row(_sum(slabs)))
            yield table

    def _verdict(self) -> list[str]:
        good = "good frames" if self._all_keys else "frames whose digests fit"
        slabs = f"{len(self.slabs)} slab{'s' * (len(self.slabs) != 1)}"
        size = f"{format_size(self.checked_bytes)} in {self.read_seconds:.2f} s ({self.gb_per_second:.2f} GB/s)"
        read = f"{self.totals()['good']} {good} in {slabs}; read {size}"
        if not self.problems.total:
            return [f"All is well: {read}", *(["Nothing to repair."] if self.repair is not None else [])]
        kinds = ", ".join(f"{what.replace('_', ' ')} {count}" for what, count in self.problems.counts.most_common())
        lines = [f"Not well: {kinds}; {read}"]
        if self.repair is not None:
            lines.append(
                f"Repaired: frames in the index {self.repair.frames}, given up {self.repair.given_up}, slots emptied "
                f"{self.repair.emptied}, slab headers written again {self.repair.headers_rewritten}"
            )
            lines += [f"Left as it is: {line}" for line in self.repair.left]
        elif self._all_keys:
            lines.append(f"kvstore fsck {self.directory} --repair gives up what is damaged and builds the index again.")
        else:
            lines.append(f"Restore {self.directory}/keys from a backup and check again; nothing is repaired without.")
        return lines

    @property
    def _all_keys(self) -> bool:
        return self.has_keys and not any(slab.state is SlabState.NEEDS_KEYS for slab in self.slabs)


def _sum(slabs: list[SlabResult]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for slab in slabs:
        counts.update(slab.counts)
    return {slot.name.lower(): counts[slot.name.lower()] for slot in Slot}


def _row(counts: dict[str, int]) -> list[str]:
    damaged = sum(counts[slot.name.lower()] for slot in DAMAGED)
    return [str(n) for n in (sum(counts.values()), *(counts[slot.name.lower()] for slot in _COLUMNS), damaged)]


_COLUMNS = (Slot.GOOD, Slot.EMPTY, Slot.IN_DOUBT, Slot.GIVEN_UP)
