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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from math import isinf

from kvstore.block.errors import BadInput, StoreClosed, StoreError
from kvstore.config import DEFAULT_POLICY, checked_policy
from kvstore.core.usage import NamespaceUsage, StoreUsage
from kvstore.insight.recording import Recording
from kvstore.insight.whatif import CurvePoint, WhatIf
from kvstore.node import EmbeddedStore
from kvstore.prefixes.book import PrefixBook, SpaceNames, Standing
from kvstore.protocol import messages as m
from kvstore.protocol.status import (
    ID_DIGITS,
    AwaitStatus,
    KeyStatus,
    NamespaceStatus,
    SessionStatus,
    SidecarStatus,
    TierStatus,
    WhatIfPoint,
    WhatIfStatus,
    checked_seconds,
    layout_in_words,
    pick,
    printable,
)
from kvstore.protocol.told import PrefixFigures
from kvstore.service.accounting import Counting, NamespaceCounts, looked
from kvstore.service.connections import AdminCaller
from kvstore.service.dispatch import version_in_common
from kvstore.service.local_door import LocalDoor
from kvstore.service.parked import LeftElsewhere, Parking, Response
from kvstore.service.sessions import Sessions
from kvstore.service.settings import StoreSettings
from kvstore.service.told import ToldRequests
from tiering.clock import Clock
from tiering.counts.histogram import percentile_ms
from tiering.errors import TierError
from tiering.tier import Usage

MAX_NAMESPACES, MAX_SESSIONS = 4096, 1024
"""Listed in one answer; further ones are only counted."""
FRESH_SECONDS = 0.5
"""All observers get the same status for this long, so that polling costs engines nothing."""
_FACTS = frozenset(SidecarStatus.__struct_fields__)
_STATES = ("used", "free", "reserved", "deleting", "quarantined", "zombie")


class Admin:
    """`AdminVerbs` over a store, its sessions and its door. Thread-safe."""

    is_operator = True

    def __init__(
        self,
        store: EmbeddedStore,
        sessions: Sessions,
        counting: Counting,
        recording: Recording,
        door: LocalDoor,
        run: bytes,
        state: Callable[[], str],
        chosen: StoreSettings | None = None,
        reasons: Callable[[], list[str]] | None = None,
        why_not_policy: str = "",
        whatif: WhatIf | None = None,
        told: ToldRequests | None = None,
        prefixes: PrefixBook | None = None,
        warnings: Callable[[], list[str]] = lambda: [],
        couriers: Parking | None = None,
    ) -> None:
        """run: names this run of the sidecar. state: returns its state, in a word. chosen: the store's settings.
        reasons: why it serves less than it has; by default, the store's own faults. why_not_policy: why the default
        policy runs in place of the one that was set. whatif: estimates other sizes. told: engines' reports on their
        requests. prefixes: prefix diagnostics. warnings: for the operator. couriers: if configured."""
        self._couriers = couriers
        self._store = store
        self._sessions = sessions
        self._counting = counting
        self._recording = recording
        self._door = door
        self._run = run
        self._state = state
        self._chosen = chosen or StoreSettings()
        self._why_not_policy = why_not_policy
        self._whatif = whatif
        self._told, self._warnings = told, warnings
        self._prefixes = prefixes
        self._naming, self._named_at = threading.Lock(), -FRESH_SECONDS
        self._named: dict[int, SpaceNames] = {}
        self._reasons = reasons or store.faults.reasons
        self._began_at = counting.now()

    def greet(self, hello: m.Hello) -> tuple[AdminCaller | None, m.Answer]:
        version = version_in_common(hello)
        if isinstance(version, m.Failed):
            return None, version
        return AdminCaller(), m.Welcome(version, self._run, b"")

    def serve(self, verb: m.Verb) -> Response:
        try:
            if isinstance(verb, m.Stat):
                return Response(m.StatReply(self.facts()))
            if isinstance(verb, m.DropAny):
                return Response(self._drop(verb))
            if isinstance(verb, m.Purge):
                return Response(self._purge(verb))
            if isinstance(verb, m.Record):
                return Response(self._record(verb))
            if isinstance(verb, m.Why):
                return Response(self._why(verb))
            if isinstance(verb, m.Prefixes):
                return Response(m.PrefixesReply(self.prefixes(verb.tenant)))
            if isinstance(verb, m.Ping):
                return Response(m.Done())
        except BadInput as error:
            return Response(m.failed(m.RequestFault.BAD_INPUT, str(error)))
        except StoreClosed:
            return Response(m.Failed(m.RequestFault.CLOSED, "the sidecar is going down"))
        except (TierError, StoreError) as error:
            return Response(m.failed(m.RequestFault.BUSY, str(error)))
        return Response(m.Failed(m.RequestFault.BAD_INPUT, "not a verb of the admin socket; ask at a tenant's socket"))

    # Giving up -----------------------------------------------------------------------------------------------------

    def _drop(self, verb: m.DropAny) -> m.Counted:
        space = chosen_space(self._spaces(), verb.id, verb.tenant)
        with self._forgetting(space.tenant, space.digest) as left:
            blocks = self._store.core.drop(space.number, checked_seconds(verb.seconds))
        return left.counted(blocks)

    def _forgetting(self, tenant: bytes, digest: bytes = b"") -> AbstractContextManager[LeftElsewhere]:
        return self._couriers.forgetting(tenant, digest) if self._couriers is not None else nullcontext(LeftElsewhere())

    def _purge(self, verb: m.Purge) -> m.Counted:
        seconds, tenant = checked_seconds(verb.seconds), self._store.keys.known(verb.tenant).tenant
        with self._forgetting(tenant) as left:
            keys, blocks = self._store.purge(verb.tenant, seconds)
        self._door.disconnect(keys.tenant)
        if self._told is not None:
            self._told.forget(keys.tenant, verb.tenant)
        if self._prefixes is not None:
            self._prefixes.forget(keys.tenant)
        return left.counted(blocks)

    # Recording -----------------------------------------------------------------------------------------------------

    def _record(self, verb: m.Record) -> m.Recorded:
        if verb.ends:
            self._recording.end(verb.recording)
            return m.Recorded(verb.recording, 0)
        if verb.recording:
            requests, lost = self._recording.take(verb.recording)
            return m.Recorded(verb.recording, 0, [(one.seconds, one.ids) for one in requests], lost)
        spaces = [one for name, one in self._spaces() if verb.tenant in ("", name)]
        if verb.id:
            spaces = [chosen_space(self._spaces(), verb.id, verb.tenant)]
        sizes = {one.namespace.layout.block_tokens for one in spaces}
        if len(sizes) != 1:
            there = ", ".join(str(size) for size in sorted(sizes))
            raise BadInput(
                f"namespaces have blocks of {there} tokens, and a trace has blocks of one size; give --namespace"
                if sizes
                else self._nothing_to_record(verb.tenant)
            )
        return m.Recorded(self._recording.begin(frozenset(one.number for one in spaces)), sizes.pop())

    def _nothing_to_record(self, tenant: str) -> str:
        others = ", ".join(sorted({printable(name) for name, _ in self._spaces()}))
        if not others:
            return "no engine has opened a namespace yet, so there is nothing to record; begin when one has"
        return f"--tenant {printable(tenant)} has no namespace; tenants that have one: {others}"

    # Requests ------------------------------------------------------------------------------------------------------

    def _why(self, verb: m.Why) -> m.WhyReply:
        if self._told is None:
            raise BadInput("this sidecar keeps no requests")
        return self._told.why(verb.request, self._shown(verb.tenant), self._model)

    def _shown(self, wanted: str) -> dict[bytes, str]:
        """Tenants and their names; only those shown as `wanted`, if that is given."""
        names = self._store.tenant_names()
        return {tenant: name for tenant, name in names.items() if wanted in ("", printable(name))}

    def prefixes(self, tenant: str = "") -> PrefixFigures:
        """Hot prefixes: of one tenant, by its shown name, or of all."""
        if self._prefixes is None:
            raise BadInput("this sidecar does not follow prefixes")
        with self._naming:  # callers share the result: the store walks over all namespaces for it
            now = self._store.core.clock.monotonic_seconds()
            if now - self._named_at >= FRESH_SECONDS:
                self._named_at = now
                self._named = {
                    one.number: SpaceNames(one.digest.hex()[:ID_DIGITS], printable(self._called(one)))
                    for _, one in self._spaces()
                }
        return self._prefixes.figures(self._shown(tenant), self._named, self._standing, of_all=not tenant)

    def _called(self, usage: NamespaceUsage) -> str:
        return self._name(usage.tenant, usage.digest) or usage.namespace.model

    def _name(self, tenant: bytes, digest: bytes) -> str:
        return self._store.names.get(tenant, digest) if self._store.names is not None else ""

    def _standing(self, number: int, keys: Sequence[bytes]) -> Standing:
        core, tiers = self._store.core, dict[str, int]()
        found = core.match(number, keys)
        for tier, blocks in found.tiers:
            tiers[str(tier)] = tiers.get(str(tier), 0) + blocks
        until = core.kept_until(number, keys)
        return Standing(found.blocks, tiers, until if until > self._counting.now() else None)

    def _model(self, number: int) -> str:
        """A namespace's model, as clients call it."""
        namespace = self._store.core.namespace_of(number)
        tenant = next((one.tenant for one in self._store.core.namespaces() if one.number == number), b"")
        return self._name(tenant, namespace.digest()) or namespace.model

    # Facts ---------------------------------------------------------------------------------------------------------

    def _spaces(self) -> list[tuple[str, NamespaceUsage]]:
        """Every namespace with its tenant's name, without those of retired keys."""
        names = self._store.tenant_names()
        return [(names[one.tenant], one) for one in self._store.core.namespaces() if one.tenant in names]

    def facts(self) -> SidecarStatus:
        """What `kvstore stat` shows."""
        usage, spaces, counts = self._store.usage(), self._spaces(), self._counting.all()
        of_store = {one.name: getattr(usage, one.name) for one in fields(usage) if one.name in _FACTS}
        sessions = self._session_facts()
        now, reasons, awaits = self._counting.now(), self._reasons(), self._store.core.awaits.counts()
        return SidecarStatus(
            run=self._run.hex(),
            pid=os.getpid(),
            state=self._state(),
            at=now,
            up_seconds=now - self._began_at,
            tiers=[_tier("dram", usage.dram)] + ([_tier("nvme", usage.nvme)] if usage.nvme is not None else []),
            looked=looked(list(counts.values())),
            namespaces=[self._namespace(name, one, counts.get(one.number)) for name, one in spaces[:MAX_NAMESPACES]],
            moves=self._store.core.moves(),
            sessions=sessions[:MAX_SESSIONS],
            departed=self._sessions.departed,
            door=self._door.usage(),
            tenants=self._store.core.tenants(self._store.tenant_names()),
            policy=DEFAULT_POLICY if self._why_not_policy else checked_policy(self._chosen.policy, "policy"),
            policy_note=printable(self._why_not_policy),
            nvme_writes=self._chosen.nvme_writes if usage.nvme is not None else None,
            hidden_namespaces=max(0, len(spaces) - MAX_NAMESPACES),
            hidden_sessions=max(0, len(sessions) - MAX_SESSIONS),
            health=f"degraded ({'; '.join(reasons)})" if reasons else "ok",
            faults=[replace(one, detail=printable(one.detail)) for one in self._store.faults.now()],
            fault_counts=self._store.faults.counts(),
            whatif=self._what_if(usage),
            savings=self._told.savings() if self._told is not None else None,
            node=self._store.core.node.node.hex(),
            incarnation=self._store.core.node.incarnation.hex(),
            keys=[
                KeyStatus(printable(one.tenant), one.fingerprint, one.epoch, one.accepted)
                for one in self._store.keys.told()
            ],
            warnings=self._warnings(),
            awaits=AwaitStatus(awaits.parked, {str(why): count for why, count in awaits.ended.items()}),
            elsewhere=self._couriers.status() if self._couriers is not None else None,
            **of_store,
        )

    def _what_if(self, usage: StoreUsage) -> WhatIfStatus | None:
        if self._whatif is None:
            return None
        budget = all_tiers_budget_bytes(usage)
        told = self._whatif.snapshot(budget)
        return WhatIfStatus(
            budget,
            [_point(one) for one in told.points],
            [_point(one) for one in told.curve],
            round(told.asked_tokens),
            told.tokens_per_second,
            told.sample_ratio,
            told.sampled_names,
            told.seconds,
            told.lookups,
            told.dropped_lookups,
            told.words,
        )

    def _namespace(self, tenant: str, usage: NamespaceUsage, counts: NamespaceCounts | None) -> NamespaceStatus:
        namespace, digest = usage.namespace, usage.digest.hex()
        return NamespaceStatus(
            digest[:ID_DIGITS],
            digest,
            printable(tenant),
            printable(namespace.model),
            layout_in_words(namespace.layout),
            printable(namespace.codec),
            namespace.weights_epoch,
            namespace.layout.block_tokens,
            usage.blocks,
            usage.dram_blocks,
            usage.dram_bytes,
            usage.nvme_blocks,
            usage.nvme_bytes,
            counts.last_used if counts is not None else None,
            looked([counts] if counts is not None else []),
            self._name(usage.tenant, usage.digest),
            self._told.load_rates(usage.tenant, usage.number) if self._told is not None else {},
        )

    def _session_facts(self) -> list[SessionStatus]:
        names, reservations = self._store.tenant_names(), self._sessions.reservations()
        waited = self._door.waited()
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


class Observer:
    """`AdminVerbs` of the observers' socket: the operator's answers, and no verb that changes anything. Thread-safe."""

    is_operator = False

    def __init__(self, admin: Admin, clock: Clock) -> None:
        """admin: gives the answers."""
        self._admin = admin
        self._clock = clock
        self._lock = threading.Lock()
        self._told = Response(m.Done())
        self._told_at = -FRESH_SECONDS

    def greet(self, hello: m.Hello) -> tuple[AdminCaller | None, m.Answer]:
        return self._admin.greet(hello)

    def serve(self, verb: m.Verb) -> Response:
        """Serves `Stat`, at most `FRESH_SECONDS` old, `Why`, `Prefixes`, and `Ping`."""
        if isinstance(verb, m.Stat):
            return self._stat(verb)
        if isinstance(verb, m.Why | m.Prefixes):
            return self._admin.serve(verb)
        if isinstance(verb, m.Ping):
            return Response(m.Done())
        text = f"the observers' socket serves stat, why, prefixes and ping, and not {m.name_of(verb)}"
        return Response(m.Failed(m.RequestFault.BAD_INPUT, f"{text}; ask at the admin socket"))

    def _stat(self, verb: m.Stat) -> Response:
        with self._lock:  # other observers wait and get the same
            now = self._clock.monotonic_seconds()
            if now - self._told_at >= FRESH_SECONDS or not isinstance(self._told.answer, m.StatReply):
                self._told, self._told_at = self._admin.serve(verb), now
            return self._told


def chosen_space(spaces: Sequence[tuple[str, NamespaceUsage]], id: str, tenant: str) -> NamespaceUsage:
    """The one namespace whose digest begins with that id. Raises `BadInput`, which lists the candidates."""
    mine = [one for one in spaces if not tenant or one[0] == tenant]
    digests = [one.digest.hex() for _, one in mine]
    words = [f"{name}, {printable(one.namespace.model)}" for name, one in mine]
    is_shared = len({one for one in digests if one.startswith(id.lower())}) == 1
    whose = f" of tenant {printable(tenant)!r}" if tenant else ""
    return mine[pick(id, digests, words, whose, "give --tenant" if is_shared else "give more digits")][1]


def all_tiers_budget_bytes(usage: StoreUsage) -> int:
    """The budgets of all tiers together."""
    return usage.dram.budget_bytes + (usage.nvme.budget_bytes if usage.nvme is not None else 0)


def _point(one: CurvePoint) -> WhatIfPoint:
    if isinf(one.size_bytes):
        return WhatIfPoint(None, None, one.token_hit_rate)
    return WhatIfPoint(round(one.size_bytes), one.scale, one.token_hit_rate)


def _tier(name: str, usage: Usage) -> TierStatus:
    slots = {state: getattr(usage, state) for state in _STATES}
    return TierStatus(name, usage.budget_bytes, usage.taken_bytes, slots)
