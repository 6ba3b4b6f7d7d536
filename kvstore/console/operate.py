"""Operators' actions: drop a namespace, purge a tenant, warm prefixes. Knows no HTTP library.

    a ticket, good for one action > the name, given twice > a line in the audit log > the sidecar acts > another line

Reading a ticket takes the operator's token, and a ticket works once: a request repeated by a browser, a proxy or an
eavesdropper does nothing. One action at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from kvstore.block.errors import BadInput, StoreError
from kvstore.console.audit import AuditEntry, AuditLog
from kvstore.protocol.messages import MAX_NAME
from kvstore.protocol.words import ID_DIGITS, printable
from tiering.clock import Clock

TICKET_SECONDS = 600.0
MOST_TICKETS = 64
"""Of more, the oldest are void."""
MOST_ORDER_BYTES = 1 << 20
MOST_TEXT = 1000

Ticket = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Digits = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{ID_DIGITS},64}}$")]


class OperatorVerbs(Protocol):
    """Carried out by the part of the process that has the sockets. Each waits, and raises `BadInput` and
    `StoreError`."""

    def drop(self, tenant: str, namespace: str) -> tuple[int, str]:
        """Evict a namespace from every tier; how many blocks it had, and a line on what others may still have, or
        nothing."""
        ...

    def purge(self, tenant: str) -> tuple[int, str]:
        """Void all of a tenant and retire its key; likewise."""
        ...

    def warm(self, tenant: str, namespace: str, prompts: str) -> tuple[int, str]:
        """Promote the stored prefixes of prompts, given as JSON lines of token ids. Returns the blocks now in DRAM, and
        a line about the outcome."""
        ...


class DropOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/api/operator/drop`. namespace: its id, at least the digits shown; confirm: the same again."""

    ticket: Ticket
    tenant: Name
    namespace: Digits
    confirm: Name


class PurgeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/api/operator/purge`. confirm: the tenant's name again."""

    ticket: Ticket
    tenant: Name
    confirm: Name


class WarmOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/api/operator/warm`. prompts: JSON lines, as `kvstore warm` reads them; confirm: the namespace's id
    again."""

    ticket: Ticket
    tenant: Name
    namespace: Digits
    confirm: Name
    prompts: Annotated[str, Meta(min_length=1)]


Order = DropOrder | PurgeOrder | WarmOrder
ORDERS: dict[str, type[Order]] = {"drop": DropOrder, "purge": PurgeOrder, "warm": WarmOrder}


class TicketAnswer(msgspec.Struct, frozen=True):
    """`/api/operator`. ticket: for one action, within so many seconds."""

    ticket: str
    seconds: float


class ActionAnswer(msgspec.Struct, frozen=True):
    """The outcome. number: the action's in the audit log. blocks: dropped, or now in DRAM."""

    number: str
    what: str
    blocks: int
    text: str


class ActionUnderWay(StoreError):
    """Another action is still running."""


class OperatorActions:
    """One console's. Thread-safe."""

    def __init__(self, verbs: OperatorVerbs, audit: AuditLog, clock: Clock, new_token: Callable[[int], bytes]) -> None:
        self.audit = audit
        self._verbs = verbs
        self._clock = clock
        self._new_token = new_token
        self._lock = threading.Lock()
        self._acting = threading.Lock()
        self._tickets: OrderedDict[str, float] = OrderedDict()  # ticket > its end

    def ticket(self) -> TicketAnswer:
        name = self._new_token(16).hex()
        with self._lock:
            self._tickets[name] = self._clock.monotonic_seconds() + TICKET_SECONDS
            if len(self._tickets) > MOST_TICKETS:
                self._tickets.popitem(last=False)
        return TicketAnswer(name, TICKET_SECONDS)

    def act(self, order: Order, who: str) -> ActionAnswer:
        """Carry out an order and wait for it. Raises `BadInput` for a refused order, `ActionUnderWay`, and `StoreError`
        if the action or its audit line failed."""
        with self._lock:
            until = self._tickets.pop(order.ticket, None)
        if until is None or self._clock.monotonic_seconds() >= until:
            raise BadInput("that ticket is not good, or was used; read another one from /api/operator")
        if not self._acting.acquire(blocking=False):
            raise ActionUnderWay("another action is under way; wait until it is over")
        try:
            return self._act(order, who)
        finally:
            self._acting.release()

    def _act(self, order: Order, who: str) -> ActionAnswer:
        what = next(name for name, kind in ORDERS.items() if isinstance(order, kind))
        namespace = "" if isinstance(order, PurgeOrder) else order.namespace
        entry = AuditEntry(
            self._new_token(8).hex(), self._clock.wall_seconds(), who, what, printable(order.tenant), namespace
        )
        if order.confirm != (namespace or order.tenant):
            text = (
                f"confirm is not the {'id of the namespace' if namespace else 'name of the tenant'}; nothing was done"
            )
            self.audit.write(_ended(entry, "refused", text))
            raise BadInput(text)
        self.audit.write(entry)
        try:
            blocks, text = self._done(order)
        except BadInput as error:
            self.audit.write(_ended(entry, "refused", str(error)))
            raise
        except (StoreError, OSError, ValueError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self.audit.write(_ended(entry, "failed", text))
            raise StoreError(text) from None
        try:
            self.audit.write(_ended(entry, "done", text))
        except StoreError as error:
            text = f"{text}; {error}"
        return ActionAnswer(entry.number, what, blocks, text)

    def _done(self, order: Order) -> tuple[int, str]:
        if isinstance(order, WarmOrder):
            return self._verbs.warm(order.tenant, order.namespace, order.prompts)
        if isinstance(order, DropOrder):
            blocks, left = self._verbs.drop(order.tenant, order.namespace)
            done = f"namespace {order.namespace} is gone"
        else:
            blocks, left = self._verbs.purge(order.tenant)
            done = f"tenant {printable(order.tenant)} is purged"
        return blocks, f"{done}; it had {blocks:,} readable blocks" + (f"; elsewhere: {left}" if left else "")


def _ended(entry: AuditEntry, result: str, text: str) -> AuditEntry:
    line = "".join(one for one in " ".join(text.split()) if one.isprintable())
    return msgspec.structs.replace(entry, result=result, text=line[:MOST_TEXT])
