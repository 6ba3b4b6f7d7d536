"""The verbs of the admin socket: the sidecar's status, and orders to evict blocks; and those of the observers' socket,
which change nothing.

An operator opens the admin socket, an observer (the console) the other one. Both see all tenants by name, their counts
and the text that their engines gave, never a key, a token or a byte of KV. Clients' text is made printable before it
goes out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from kvstore.block.errors import BadInput, StoreError
from kvstore.block.identity import key_difference
from kvstore.config import DEFAULT_POLICY, checked_policy
from kvstore.core.usage import NamespaceUsage, StoreUsage
from kvstore.insight.prefixes import SpaceNames, Standing
from kvstore.node import EmbeddedStore
from kvstore.protocol import messages as m
from kvstore.protocol.words import ID_DIGITS, checked_seconds, layout_in_words, pick, printable
from kvstore.service.accounting import by_tier
from kvstore.service.dispatch import Handlers, Response, refusal
from kvstore.service.local_door import LocalDoor
from kvstore.service.settings import StoreSettings
from kvstore.status.declared import picked
from kvstore.status.tree import (
    SLOT_STATES,
    AwaitStatus,
    KeyStatus,
    LookupCounts,
    NamespaceStatus,
    QueueStatus,
    Readiness,
    SessionStatus,
    SidecarStatus,
    TierEvents,
    TierStatus,
)
from tiering.counts.histogram import percentile_ms
from tiering.counts.tally import CheckedAt, EvictedTo, TierName
from tiering.errors import TierError
from tiering.faults import NEW_SLABS, NVME_READS, NVME_WRITES, FaultKind
from tiering.move_queue import MoveQueue, Priority
from tiering.nvme.slab_files import disk_room
from tiering.tier import Usage

MAX_NAMESPACES, MAX_SESSIONS = 4096, 1024
"""Listed in one answer; further ones are only counted."""
FRESH_SECONDS = 0.5
"""All observers get the same status for this long, so that polling costs engines nothing."""
MOST_WARNINGS = 64
KINDS_OF_MOVES = {
    Priority.WAITING: "promote",
    Priority.SAVE: "save",
    Priority.DEMOTION: "demote",
    Priority.SCRUB: "scrub",
}


class Admin:
    """What a sidecar reports of itself: whether it is well, what its operator should see to, and its figures; and what
    it does for an operator (`serve`) and an observer (`observe`). Thread-safe."""

    def __init__(
        self,
        store: EmbeddedStore,
        handlers: Handlers,
        door: LocalDoor,
        chosen: StoreSettings,
        why_not_policy: str = "",
    ) -> None:
        """chosen: the store's settings. why_not_policy: why the default policy runs in place of the one that was
        set."""
        self.store, self.handlers, self.door = store, handlers, door
        self._sessions, self._counting = handlers.sessions, handlers.counting
        self._chosen, self._why_not_policy = chosen, why_not_policy
        self._began_at = self._counting.now()
        self.is_stopping = False
        self.lacks: dict[str, str] = {}
        """What the edge and the transfer agent lack, or why they ended, as the supervisor reports."""
        self._clock = store.core.clock
        self._naming, self._named_at = threading.Lock(), -FRESH_SECONDS
        self._named: dict[int, SpaceNames] = {}
        self._observing = threading.Lock()
        self._observed: dict[bool, tuple[float, Response]] = {}  # by whether it has numbers only: when, and which
        self._verbs: dict[type, Callable[[Any], m.Answer]] = {
            m.Stat: self._stat,
            m.DropAny: self._drop,
            m.Purge: self._purge,
            m.Record: self._record,
            m.Why: self._why,
            m.Prefixes: self._hottest,
            m.Ping: lambda verb: m.Done(),
        }

    # Whether it is well --------------------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        if self.is_stopping:
            return Readiness.STOPPING
        if not self.store.core.is_loaded:
            return Readiness.WARMING
        return Readiness.DEGRADED if self.reasons() else Readiness.READY

    def reasons(self) -> list[str]:
        """Why it serves less than it has, a line for each."""
        faults = self.store.faults
        if set(faults.failing.get(NEW_SLABS, ())) == {FaultKind.DISK_FULL} and self._has_disk_room():
            faults.worked(NEW_SLABS)
        reasons = faults.reasons()
        if self.store.core.is_loaded and not self.store.warmed(0):
            reasons.append("some of what is on disk could not be taken in: kvstore fsck tells what")
        return [*reasons, *self.handlers.parking.reasons()]

    def _has_disk_room(self) -> bool:
        """Whether the disk has room for all of `nvme`, whether or not a slab is wanted now."""
        nvme = self.store.usage().nvme
        try:
            return nvme is not None and nvme.budget_bytes <= disk_room(Path(self._chosen.data) / "nvme")
        except OSError:
            return False

    def warnings(self) -> list[str]:
        """What the operator should attend to although everything is served, a line each; one line for all of a tenant's
        clients with other keys."""
        names, lines = self.store.tenant_names(), {}
        for one in self._sessions.callers():
            if one.fingerprint:
                name, engine = printable(names.get(one.keys.tenant, "")), printable(one.session.engine) or "a client"
                difference = key_difference(one.keys.fingerprint, one.fingerprint)
                lines[name] = (
                    f"{engine} of tenant {name} hashes with other keys, {difference}: it misses as key_mismatch until "
                    "it opens its namespaces anew"
                )
        lock = self.store.node_lock
        found = [*self.store.keys.warnings(), *(lock.warnings() if lock is not None else []), *lines.values()]
        found += filter(None, list(self.lacks.values()))
        return (
            found if len(found) <= MOST_WARNINGS else [*found[:MOST_WARNINGS], f"and {len(found) - MOST_WARNINGS} more"]
        )

    def public_warnings(self) -> list[str]:
        """The same without naming tenants: readable without a token."""
        lock = self.store.node_lock
        kinds = {
            "the keys of tenants": bool(self.store.keys.warnings()),
            "clients with other keys than this sidecar's": any(one.fingerprint for one in self._sessions.callers()),
            "another process of this host that is this node, too": lock is not None and lock.is_clone(),
            "the edge or the transfer agent": any(list(self.lacks.values())),
        }
        return [f"{what}: kvstore stat says more" for what, is_so in kinds.items() if is_so]

    # Its figures ----------------------------------------------------------------------------------------------------

    def spaces(self) -> list[tuple[str, NamespaceUsage]]:
        """Every namespace with its tenant's name, without those of retired keys."""
        names = self.store.tenant_names()
        return [(names[one.tenant], one) for one in self.store.core.namespaces() if one.tenant in names]

    def facts(self) -> SidecarStatus:
        """What `kvstore stat` shows."""
        spaces, counts, sessions = self.spaces(), self._counting.of_namespaces(), self._session_facts()
        faults, core, unused = self.store.faults, self.store.core, (LookupCounts(), None)
        listed = [self._namespace(name, one, *counts.get(one.number, unused)) for name, one in spaces[:MAX_NAMESPACES]]
        return structs.replace(
            self.numbers(),
            looked=LookupCounts.summed([looked for looked, _ in counts.values()]),
            namespaces=listed,
            moves=core.moves(),
            sessions=sessions[:MAX_SESSIONS],
            departed=len(self._sessions.departed),
            tenants=core.tenants(self.store.tenant_names()),
            hidden_namespaces=max(0, len(spaces) - MAX_NAMESPACES),
            hidden_sessions=max(0, len(sessions) - MAX_SESSIONS),
            faults=[replace(one, detail=printable(one.detail)) for one in faults.now()],
            fault_counts=faults.counts(),
            keys=[
                KeyStatus(printable(name), keys[-1].fingerprint.hex(), keys[-1].epoch, [one.epoch for one in keys])
                for name, keys in sorted(self.store.keys.by_name().items())
            ],
        )

    def numbers(self) -> SidecarStatus:
        """The same without what is listed of namespaces, sessions and tenants: all that metrics tell."""
        usage, chosen, core = self.store.usage(), self._chosen, self.store.core
        now, awaits, reasons = self._counting.now(), core.awaits.counts(), self.reasons()
        looked, served = self._counting.served(self.store.tenant_names())
        budget_bytes = usage.dram.budget_bytes + (usage.nvme.budget_bytes if usage.nvme is not None else 0)
        return picked(
            SidecarStatus,
            usage,
            run=self.handlers.run.hex(),
            pid=os.getpid(),
            state=self.readiness().value,
            at=now,
            up_seconds=now - self._began_at,
            tiers=[_tier(TierName.DRAM, usage.dram, usage.dram_blocks)]
            + ([_tier(TierName.NVME, usage.nvme, usage.nvme_blocks or 0)] if usage.nvme is not None else []),
            looked=looked,
            namespaces=[],
            moves=[],
            sessions=[],
            departed=0,
            door=self.door.usage(),
            policy=DEFAULT_POLICY if self._why_not_policy else checked_policy(chosen.policy, "policy"),
            policy_note=printable(self._why_not_policy),
            nvme_writes=chosen.nvme_writes if usage.nvme is not None else None,
            health=f"degraded ({'; '.join(reasons)})" if reasons else "ok",
            whatif=self.handlers.whatif.snapshot(budget_bytes),
            savings=self.handlers.told.savings(),
            node=core.node.node.hex(),
            incarnation=core.node.incarnation.hex(),
            warnings=self.warnings(),
            reasons=reasons,
            public_warnings=self.public_warnings(),
            awaits=AwaitStatus(awaits.parked, {str(why): count for why, count in awaits.ended.items()}, awaits.seconds),
            elsewhere=self.handlers.parking.status(),
            open_sessions=self._sessions.open_sessions,
            served=served,
            events=_events(usage),
            queue=_queue(core.move_queue),
        )

    def _namespace(
        self, tenant: str, usage: NamespaceUsage, looked: LookupCounts, used_at: float | None
    ) -> NamespaceStatus:
        namespace, digest = usage.namespace, usage.digest.hex()
        return picked(
            NamespaceStatus,
            usage,
            id=digest[:ID_DIGITS],
            digest=digest,
            tenant=printable(tenant),
            model=printable(namespace.model),
            layout=layout_in_words(namespace.layout),
            codec=printable(namespace.codec),
            weights_epoch=namespace.weights_epoch,
            block_tokens=namespace.layout.block_tokens,
            used_at=used_at,
            looked=looked,
            name=self.name(usage.tenant, usage.digest),
            load_tokens_per_second=self.handlers.told.load_rates(usage.tenant, usage.number),
        )

    def name(self, tenant: bytes, digest: bytes) -> str:
        """What an engine called a namespace's model, "" if none did."""
        return self.store.names.get(tenant, digest)

    def _session_facts(self) -> list[SessionStatus]:
        names, reservations = self.store.tenant_names(), self._sessions.reservations()
        waited = self.door.waited()
        return [
            SessionStatus(
                printable(one.engine),
                printable(names.get(one.tenant.tenant, "")),
                len(one.connections),
                len(one.leases),
                one.leased_blocks,
                reservations.get(one.token, 0),
                one.since,
                percentile_ms(waits, 50),
                percentile_ms(waits, 99),
            )
            for one in self._sessions.sessions()
            if one.is_engine
            for waits in [[waited[number] for number in list(one.connections) if number in waited]]
        ]

    # Its verbs ------------------------------------------------------------------------------------------------------

    def serve(self, verb: m.Verb) -> Response:
        """Never raises for what a client can cause."""
        handler = self._verbs.get(type(verb))
        if handler is None:
            text = "not a verb of the admin socket; ask at a tenant's socket"
            return Response(m.Failed(m.RequestFault.BAD_INPUT, text))
        try:
            return Response(handler(verb))
        except (TierError, StoreError) as error:
            return refusal(error)

    def observe(self, verb: m.Verb) -> Response:
        """The operator's answers, and no verb that changes anything. `Stat` is at most `FRESH_SECONDS` old."""
        if isinstance(verb, m.Stat):
            return self._observed_stat(verb)
        if isinstance(verb, m.Why | m.Prefixes | m.Ping):
            return self.serve(verb)
        text = f"the observers' socket serves stat, why, prefixes and ping, and not {m.name_of(verb)}"
        return Response(m.Failed(m.RequestFault.BAD_INPUT, f"{text}; ask at the admin socket"))

    def _observed_stat(self, verb: m.Stat) -> Response:
        with self._observing:  # other observers wait and get the same
            now = self._clock.monotonic_seconds()
            at, told = self._observed.get(verb.numbers_only, (-FRESH_SECONDS, Response(m.Done())))
            if now - at >= FRESH_SECONDS or not isinstance(told.answer, m.StatReply):
                told = self.serve(verb)
                self._observed[verb.numbers_only] = now, told
            return told

    def _stat(self, verb: m.Stat) -> m.StatReply:
        return m.StatReply(self.numbers() if verb.numbers_only else self.facts())

    # Giving up -----------------------------------------------------------------------------------------------------

    def _drop(self, verb: m.DropAny) -> m.Counted:
        space = chosen_space(self.spaces(), verb.id, verb.tenant)
        with self.handlers.parking.forgetting(space.tenant, space.digest) as left:
            blocks = self.store.core.drop(space.number, checked_seconds(verb.seconds))
        return left.counted(blocks)

    def _purge(self, verb: m.Purge) -> m.Counted:
        seconds, tenant = checked_seconds(verb.seconds), self.store.keys.known(verb.tenant).tenant
        with self.handlers.parking.forgetting(tenant) as left:
            keys, blocks = self.store.purge(verb.tenant, seconds)
        self.door.disconnect(keys.tenant)
        self.handlers.told.forget(keys.tenant, verb.tenant)
        self.handlers.prefixes.forget(keys.tenant)
        return left.counted(blocks)

    # Recording -----------------------------------------------------------------------------------------------------

    def _record(self, verb: m.Record) -> m.Recorded:
        recording = self.handlers.recording
        if verb.ends:
            recording.end(verb.recording)
            return m.Recorded(verb.recording, 0)
        if verb.recording:
            requests, lost = recording.take(verb.recording)
            return m.Recorded(verb.recording, 0, [(one.seconds, one.ids) for one in requests], lost)
        spaces = [one for name, one in self.spaces() if verb.tenant in ("", name)]
        if verb.id:
            spaces = [chosen_space(self.spaces(), verb.id, verb.tenant)]
        sizes = {one.namespace.layout.block_tokens for one in spaces}
        if len(sizes) != 1:
            there = ", ".join(str(size) for size in sorted(sizes))
            raise BadInput(
                f"namespaces have blocks of {there} tokens, and a trace has blocks of one size; give --namespace"
                if sizes
                else self._nothing_to_record(verb.tenant)
            )
        return m.Recorded(recording.begin(frozenset(one.number for one in spaces)), sizes.pop())

    def _nothing_to_record(self, tenant: str) -> str:
        others = ", ".join(sorted({printable(name) for name, _ in self.spaces()}))
        if not others:
            return "no engine has opened a namespace yet, so there is nothing to record; begin when one has"
        return f"--tenant {printable(tenant)} has no namespace; tenants that have one: {others}"

    # Requests ------------------------------------------------------------------------------------------------------

    def _why(self, verb: m.Why) -> m.WhyReply:
        return self.handlers.told.why(verb.request, self._shown(verb.tenant), self._model)

    def _shown(self, wanted: str) -> dict[bytes, str]:
        """Tenants and their names; only those shown as `wanted`, if that is given."""
        names = self.store.tenant_names()
        return {tenant: name for tenant, name in names.items() if wanted in ("", printable(name))}

    def _hottest(self, verb: m.Prefixes) -> m.PrefixesReply:
        with self._naming:  # callers share the result: the store walks over all namespaces for it
            now = self._clock.monotonic_seconds()
            if now - self._named_at >= FRESH_SECONDS:
                self._named_at = now
                self._named = {
                    one.number: SpaceNames(
                        one.digest.hex()[:ID_DIGITS],
                        printable(self.name(one.tenant, one.digest) or one.namespace.model),
                    )
                    for _, one in self.spaces()
                }
        tenants, of_all = self._shown(verb.tenant), not verb.tenant
        return m.PrefixesReply(self.handlers.prefixes.figures(tenants, self._named, self._standing, of_all=of_all))

    def _standing(self, number: int, keys: Sequence[bytes]) -> Standing:
        core = self.store.core
        found = core.match(number, keys)
        until = core.kept_until(number, keys)
        return Standing(found.blocks, by_tier(found.tiers), until if until > core.clock.wall_seconds() else None)

    def _model(self, number: int) -> str:
        namespace = self.store.core.namespace_of(number)
        tenant = next((one.tenant for one in self.store.core.namespaces() if one.number == number), b"")
        return self.name(tenant, namespace.digest()) or namespace.model


def chosen_space(spaces: Sequence[tuple[str, NamespaceUsage]], id: str, tenant: str) -> NamespaceUsage:
    """The one namespace whose digest begins with that id. Raises `BadInput`, which lists the candidates."""
    mine = [one for one in spaces if not tenant or one[0] == tenant]
    digests = [one.digest.hex() for _, one in mine]
    words = [f"{name}, {printable(one.namespace.model)}" for name, one in mine]
    is_shared = len({one for one in digests if one.startswith(id.lower())}) == 1
    whose = f" of tenant {printable(tenant)!r}" if tenant else ""
    return mine[pick(id, digests, words, whose, "give --tenant" if is_shared else "give more digits")][1]


def _tier(name: str, usage: Usage, blocks: int) -> TierStatus:
    slots = {state: getattr(usage, state) for state in SLOT_STATES}
    return TierStatus(str(name), usage.budget_bytes, usage.taken_bytes, slots, blocks)


def _events(usage: StoreUsage) -> TierEvents | None:
    """Of those tiers that the store has. What the scrub verified is in its own counts."""
    tally = usage.tally
    if tally is None:
        return None
    tiers = [TierName.DRAM] if usage.nvme is None else list(TierName)
    evicted: dict[str, dict[str, int]] = {}
    for (tier, to), count in tally.evicted.items():
        if usage.nvme is not None or (tier, to) == (TierName.DRAM, EvictedTo.NOTHING):
            evicted.setdefault(str(tier), {})[str(to)] = count
    verified, damaged = (
        {str(at): count for at, count in counts.items() if at is not CheckedAt.SCRUB}
        for counts in (tally.verified_bytes, tally.damaged)
    )
    return TierEvents(
        evicted,
        {str(tier): tally.idle[tier] for tier in tiers},
        {str(tier): tally.wanted_again[tier] for tier in tiers},
        {str(tier): tally.quarantined[tier] for tier in tiers},
        verified,
        damaged,
        {str(kind): count for kind, count in tally.copied_bytes.items()},
        tally.written_bytes if usage.nvme is not None else None,
        tally.stored_tokens,
    )


def _queue(queue: MoveQueue | None) -> QueueStatus | None:
    if queue is None:
        return None
    ended = {kind: {"done": 0, "failed": 0} for kind in KINDS_OF_MOVES.values()}
    for one in queue.counts():
        if kind := KINDS_OF_MOVES.get(Priority[one.priority.upper()]):
            ended[kind]["done"] += one.done
            ended[kind]["failed"] += one.failed
    seconds, depths = queue.seconds(), queue.depths()
    return QueueStatus(
        ended,
        {kind: seconds[priority] for priority, kind in KINDS_OF_MOVES.items()},
        {kind: depths[priority] for priority, kind in KINDS_OF_MOVES.items()},
        {
            TierName.NVME.value: {
                way: int(queue.is_open(tier)) for way, tier in (("read", NVME_READS), ("write", NVME_WRITES))
            }
        },
    )
