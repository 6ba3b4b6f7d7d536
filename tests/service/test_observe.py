"""The observers' socket: it tells what the operator's tells, and nothing that changes anything passes."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec

from kvstore.block.account import HitTier
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.protocol.told import SavingsTold
from kvstore.service.connections import ADMIN_CONNECTIONS, DoorLimits
from kvstore.service.settings import read_settings
from service.sidecar import Sidecar, asked, wire_to
from workbench import MODEL, ids, random_pages, small_layout

CLOCK = SystemClock()
TELLING = (m.Hello, m.Stat, m.Why, m.Prefixes, m.Ping)


def one_of_each(packed: bytes, keys: list[bytes], lease: int) -> list[m.Verb]:
    """Every verb that there is, with arguments that would do something at another socket."""
    given: dict[str, Any] = {
        **{"packed": packed, "payload_bytes": [8192], "namespace": 0, "keys": keys, "first_block": 0, "after": 0},
        **{"deadline_ms": 100.0, "leases": [lease], "lease": lease, "request": "r", "requests": [], "block": 0},
        **{"part": 0, "reservation": 1, "first": 0, "digests": [[bytes(16)]], "seconds": 1.0, "numbers": [0]},
        **{"writable": True, "id": "", "tenant": "default", "ticket": "kv1.", "headers": [bytes(4096)]},
        **{"tier": HitTier.PEER, "savings": SavingsTold(1.0)},
    }
    wanted = {kind: [one.name for one in msgspec.structs.fields(kind) if one.required] for kind in m.Verb.__args__}
    wanted[m.Tell].append("savings")
    return [kind(**{name: given[name] for name in names}) for kind, names in wanted.items() if kind not in TELLING]


def test_nothing_that_changes_anything_passes(sidecar: Sidecar) -> None:
    with sidecar.opened() as handle:
        handle.put(ids(640), random_pages(handle.layout, 10))
        match = handle.match(ids(640))
        with handle.lease(match, deadline_ms=5000) as lease:
            before = ask.stat(str(sidecar.admin_path), CLOCK)
            verbs = one_of_each(handle.namespace.pack(), list(match.keys), lease._store_name[1])
            for verb, answer in zip(verbs, asked(sidecar.observe_path, *verbs), strict=True):
                assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, verb
                assert m.name_of(verb) in answer.text and "\n" not in answer.text
            after = ask.stat(str(sidecar.admin_path), CLOCK)
    unchanged = ("blocks", "leases", "reservations", "pinned_bytes", "looked", "counters", "sessions", "tiers")
    assert [getattr(after, one) for one in unchanged] == [getattr(before, one) for one in unchanged]


def test_it_tells_what_the_operator_is_told(sidecar: Sidecar) -> None:
    with sidecar.opened() as handle:
        handle.put(ids(640), random_pages(handle.layout, 10))
        handle.match(ids(640))
        told, by_admin = (ask.stat(str(path), CLOCK) for path in (sidecar.observe_path, sidecar.admin_path))
    differing = {"at", "up_seconds", "door", "sessions", "whatif"}  # what it counted since
    mine, others = (msgspec.to_builtins(one) for one in (told, by_admin))
    assert {key for key in mine if mine[key] != others[key]} <= differing
    assert told.looked.asked_tokens == 640 and asked(sidecar.observe_path, m.Ping()) == [m.Done()]


def test_a_flood_of_questions_has_the_sidecar_look_twice_a_second(sidecar: Sidecar) -> None:
    found = asked(sidecar.observe_path, *[m.Stat()] * 200)
    looks = {one.facts.at for one in found if isinstance(one, m.StatReply)}
    assert len(found) == 200 and 1 <= len(looks) < 20


def test_observers_take_no_connection_and_no_thread_of_the_operators(tmp_path: Path) -> None:
    with Sidecar(tmp_path, DoorLimits(connections=2)) as sidecar:
        wires = [wire_to(sidecar.observe_path) for _ in range(ADMIN_CONNECTIONS)]
        gate = threading.Event()
        (observers,) = [one for one in sidecar.door._listeners if one.path == sidecar.observe_path]
        for _ in range(8):
            observers.lines[0]._pool.executor.submit(gate.wait, 30)
        try:
            wires.append(wire_to(sidecar.observe_path))  # one that is idle makes room
            assert ask.stat(str(sidecar.admin_path), CLOCK).door.admin_connections == ADMIN_CONNECTIONS + 1
            with sidecar.client() as store:
                assert store.namespace(model=MODEL, layout=small_layout()).match(ids(64)).blocks == 0
        finally:
            gate.set()
            for wire in wires:
                wire.close()


def test_its_mode_and_its_users_are_settings(sidecar: Sidecar) -> None:
    assert stat.S_IMODE(os.stat(sidecar.observe_path).st_mode) == 0o660
    settings = read_settings('[observe]\nsocket = "/run/o.sock"\nmode = "600"\nusers = [7]\n')
    assert settings.observe_socket == "/run/o.sock" and settings.observe.mode == "600"
    assert settings.observe.users == [7] and read_settings("").observe_socket == "kv/observe.sock"
