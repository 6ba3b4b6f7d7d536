"""The admin socket of a door: who may ask what there, what it says, and what a drop or a purge does to tenants."""

from __future__ import annotations

import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asking import Asking
from kvstore.block.account import MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, Unreachable
from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import CallLimits, open_sidecar
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.service.connections import ADMIN_CONNECTIONS, DoorLimits
from service.sidecar import Sidecar, asked, patient, wire_to
from tiering.nvme.lmdb_index import LmdbMaker
from torture.peer import Peer
from waiting import wait_until
from workbench import MODEL, ids, one_line, random_pages, small_layout

CLOCK = SystemClock()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, nvme="16MiB", indexes=LmdbMaker) as sidecar:
        assert sidecar.store.warmed(20)
        yield sidecar


# Who may ask what -----------------------------------------------------------------------------------------------------


def test_only_its_owner_may_open_it(sidecar: Sidecar) -> None:
    assert stat.S_IMODE(os.stat(sidecar.admin_path).st_mode) == 0o600


def test_a_tenant_has_no_admin_verb(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(640), random_pages(handle.layout, 10))
    one = handle.namespace.digest().hex()
    answers = asked(sidecar.path, m.Stat(), m.DropAny(one), m.DropAny(one, "default"), m.Purge("default"))
    assert [isinstance(answer, m.Failed) and answer.fault for answer in answers] == [m.RequestFault.BAD_INPUT] * 4
    assert handle.match(ids(640)).blocks == 10 and len(sidecar.store.tenant_names()) == 1


def test_an_operator_has_no_verb_of_a_tenant(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(640), random_pages(handle.layout, 10))
    keys = handle.match(ids(640)).keys
    verbs: list[m.Verb] = [
        m.OpenNamespace(handle.namespace.pack(), [8192]),
        m.MatchPrefix(handle.number, keys),
        m.LeasePrefix(handle.number, keys, 0, 0),
        m.Extents([0], False),
        m.Drop(handle.number),
        m.Namespaces(),
    ]
    answers = asked(sidecar.admin_path, *verbs)
    assert [isinstance(answer, m.Failed) and answer.fault for answer in answers] == [m.RequestFault.BAD_INPUT] * 6
    with closing(Peer(str(sidecar.admin_path))) as peer:
        refused = peer.ask(m.Hello(9, 9))
    assert isinstance(refused, m.Failed) and refused.fault is m.RequestFault.VERSION


def test_what_is_no_hello_ends_an_admin_connection_too(sidecar: Sidecar) -> None:
    with closing(Peer(str(sidecar.admin_path))) as peer:
        answer = peer.ask(m.Stat())
    assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.MALFORMED
    assert ask.stat(str(sidecar.admin_path), CLOCK).door.malformed == 1


def test_an_operator_is_let_in_where_tenants_take_up_all_that_they_may(tmp_path: Path) -> None:
    with Sidecar(tmp_path, DoorLimits(connections=2, threads=1, long_threads=1)) as sidecar:
        wires = [wire_to(sidecar.path) for _ in range(2)]
        admins = [wire_to(sidecar.admin_path) for _ in range(ADMIN_CONNECTIONS - 1)]
        gate = threading.Event()
        for pool in (sidecar.door._threads._pool, sidecar.door._threads._long_pool):
            pool.executor.submit(gate.wait, 30)
        try:
            with pytest.raises(Unreachable):
                wire_to(sidecar.path)
            facts = ask.stat(str(sidecar.admin_path), CLOCK)
            assert (facts.door.connections, facts.door.admin_connections, facts.door.refused) == (2, 8, 1)
            admins.append(wire_to(sidecar.admin_path))
            admins.append(wire_to(sidecar.admin_path))
            used = ask.stat(str(sidecar.admin_path), CLOCK).door.admin_connections
            assert used == ADMIN_CONNECTIONS, "the one that has been idle for longest makes room"
        finally:
            gate.set()
            for wire in (*wires, *admins):
                wire.close()


# What it says ---------------------------------------------------------------------------------------------------------


def test_what_is_held_and_served_is_seen(sidecar: Sidecar) -> None:
    path, token = str(sidecar.path), "5e" * 16
    with patient(open_sidecar(path, codecs=codec_named, clock=CLOCK, session=token, engine="eng\x1b[31m 1.0")) as store:
        layout = small_layout(head_shards=2)
        handle = store.namespace(model=MODEL, layout=layout, weights_epoch=3)
        handle.put(ids(640), random_pages(layout, 10), durability="disk")
        with handle.lease(handle.match(ids(640 + 64))):
            keys = handle.match(ids(128, 9)).keys
            reply = Asking(handle.door).reserve(handle.number, keys, 0, 0, None)
            facts = ask.stat(str(sidecar.admin_path), CLOCK)
            Asking(handle.door).abort(reply.reservation)
    frame = 4096 + 4096  # each of two parts: a header and half of 8 KiB
    (one,) = facts.namespaces
    assert (one.tenant, one.model, one.codec, one.weights_epoch) == ("default", MODEL, "raw", 3)
    assert one.digest == handle.namespace.digest().hex() and one.digest.startswith(one.id) and len(one.id) == 12
    assert one.layout == "2 layers x 2 heads x (8 + 8) bfloat16, 64 tokens, 2 head shards"
    assert (one.blocks, one.dram_blocks, one.dram_bytes) == (10, 10, 20 * frame)
    assert (one.nvme_blocks, one.nvme_bytes) == (10, 20 * frame)
    assert (facts.blocks, facts.leases, facts.reservations, facts.pinned_bytes) == (10, 1, 1, 20 * frame)
    dram, nvme = facts.tiers
    assert (dram.slots["used"], dram.slots["reserved"], nvme.slots["used"]) == (20, 4, 20)
    assert dram.budget_bytes == nvme.budget_bytes == 16 << 20 and 0 < dram.taken_bytes <= dram.budget_bytes
    (session,) = facts.sessions
    assert (session.engine, session.tenant, session.connections) == ("eng[31m 1.0", "default", 1)
    assert (session.leases, session.leased_blocks, session.reservations) == (1, 10, 1)
    assert facts.at - 60 < session.since <= facts.at
    (move,) = facts.moves
    assert (move.kind, move.priority, move.waiting, move.running, move.failed) == ("nvme writes", "save", 0, 0, 0)
    assert move.done >= 1 and facts.counters["stored_blocks"] == 10
    assert facts.looked.hit_blocks == {"dram": 10} and facts.looked.miss_blocks == {"absent": 3}
    assert facts.door.served["match"] == 2 and facts.door.served["lease"] == 1
    assert facts.door.wait_ms_p50 is not None and facts.door.wait_ms_p99 is not None
    assert 0 <= facts.door.wait_ms_p50 <= facts.door.wait_ms_p99
    assert facts.scrub is not None and facts.loading is not None


def test_a_tenant_sees_its_own_namespaces_alone_and_all_of_them(sidecar: Sidecar) -> None:
    theirs = sidecar.store.for_tenant("guest").namespace(model="secret", layout=small_layout())
    with sidecar.client() as store:
        mine = [store.namespace(model=f"model-{number}", layout=small_layout()) for number in range(70)]
        found: list[m.Opened] = []
        first, answers = 0, 0
        while True:
            (reply,) = asked(sidecar.path, m.Namespaces(first))
            assert isinstance(reply, m.NamespacesReply)
            found += reply.namespaces
            answers += 1
            first = reply.next
            if not first:
                break
    assert answers == 2 and [one.id for one in found] == [one.namespace.digest().hex() for one in mine]
    assert theirs.namespace.digest().hex() not in {one.id for one in found}
    assert found[0].packed == mine[0].namespace.pack() and found[0].payload_bytes == [8192]


# What it does ---------------------------------------------------------------------------------------------------------


def test_a_drop_names_its_tenant_where_two_have_the_namespace(sidecar: Sidecar) -> None:
    theirs = sidecar.store.for_tenant("guest").namespace(model=MODEL, layout=small_layout())
    theirs.put(ids(192), random_pages(theirs.layout, 3))
    with sidecar.client() as store:
        mine = store.namespace(model=MODEL, layout=small_layout())
        mine.put(ids(640), random_pages(mine.layout, 10), durability="disk")
        one, path = mine.namespace.digest().hex()[:6], str(sidecar.admin_path)
        with pytest.raises(BadInput, match=r"2 namespaces .*give --tenant"):
            ask.drop(path, CLOCK, one, "", 20)
        with pytest.raises(BadInput, match=r"no namespace of tenant 'nobody' begins with .*there are none"):
            ask.drop(path, CLOCK, one, "nobody", 20)
        for seconds in (-1.0, math.nan, 3601.0):
            with pytest.raises(BadInput, match=r"seconds=.*give 0 to 3600"):
                ask.drop(path, CLOCK, one, "default", seconds)
            answer = sidecar.admin.serve(m.DropAny(one, "default", seconds)).answer  # whoever asks it
            assert isinstance(answer, m.Failed) and "give 0 to 3600" in answer.text
        with pytest.raises(BadInput, match=r"namespace's id of 129 characters"):
            ask.drop(path, CLOCK, "a" * 129, "", 20)
        with pytest.raises(BadInput, match=r"tenant's name of 129 characters"):
            ask.purge(path, CLOCK, "a" * 129, 20)
        with pytest.raises(BadInput, match=r"this is a tenant's socket; that is a verb of the admin socket"):
            ask.stat(str(sidecar.path), CLOCK)
        assert ask.drop(path, CLOCK, one, "default", 20).blocks == 10
        assert mine.match(ids(640)).blocks == 0 and theirs.match(ids(192)).blocks == 3
        assert mine.put(ids(640), random_pages(mine.layout, 10)).stored == 10


def test_a_drop_that_is_not_over_in_time_says_so(sidecar: Sidecar) -> None:
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        handle.put(ids(640), random_pages(handle.layout, 10), durability="disk")
        sidecar.core.leases.promoting.append((handle.number, []))  # a lease that waits for blocks on their way up
        handle.door._limits = CallLimits(match=10.0, drop=0.2)  # type: ignore[attr-defined]
        with pytest.raises(Unreachable, match="nothing was dropped; ask again"):
            store.drop(handle)
        with pytest.raises(Exception, match="nothing was dropped; ask again") as wrong:
            ask.drop(str(sidecar.admin_path), CLOCK, handle.namespace.digest().hex(), "", 0.2)
        assert one_line(wrong.value)
        assert handle.match(ids(640)).blocks == 10
        sidecar.core.leases.promoting.clear()
        settle = sidecar.core._levels._lower.tier.settle  # type: ignore[union-attr]
        gate = threading.Event()
        sidecar.core._levels._lower.tier.settle = lambda: gate.wait(30) and settle()  # type: ignore
        with pytest.raises(Exception, match="gone from memory, but not durably from the disk") as wrong:
            ask.drop(str(sidecar.admin_path), CLOCK, handle.namespace.digest().hex(), "", 0.2)
        assert handle.match(ids(640)).blocks == 0
        gate.set()
        assert ask.drop(str(sidecar.admin_path), CLOCK, handle.namespace.digest().hex(), "", 20).blocks == 0
        assert sidecar.store.usage().nvme.used == 0  # type: ignore[union-attr]


def test_a_purged_tenant_is_shown_out_and_comes_again_with_other_keys(sidecar: Sidecar) -> None:
    theirs = sidecar.store.for_tenant("guest").namespace(model=MODEL, layout=small_layout())
    theirs.put(ids(192), random_pages(theirs.layout, 3))
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        handle.put(ids(640), random_pages(handle.layout, 10), durability="disk")
        before, wire = handle._grant.identity_key, handle.door._run.wire  # type: ignore[attr-defined]
        connections = set(sidecar.sessions._callers)
        assert ask.purge(str(sidecar.admin_path), CLOCK, "default", 20).blocks == 10
        wait_until(lambda: not connections & set(sidecar.sessions._callers))  # it may be back, with another connection
        wait_until(lambda: handle.match(ids(640)).reason is MissReason.KEY_MISMATCH)
        assert wire.closed and set(sidecar.store.tenant_names().values()) == {"guest", "default"}
        again = store.namespace(model=MODEL, layout=small_layout())
        assert again._grant.identity_key != before and again.match(ids(640)).blocks == 0
        assert again.put(ids(640), random_pages(handle.layout, 10), durability="disk").stored == 10
        facts = ask.stat(str(sidecar.admin_path), CLOCK)
        assert {(one.tenant, one.blocks) for one in facts.namespaces} == {("default", 10), ("guest", 3)}
    assert theirs.match(ids(192)).blocks == 3
    wait_until(lambda: len(sidecar.sessions.departed) == 0)


def test_keys_that_cannot_be_made_keep_a_purged_tenant_out_and_nobody_else(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask.purge(str(sidecar.admin_path), CLOCK, "default", 20)
    with monkeypatch.context() as patched:

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        patched.setattr("kvstore.block.key_file.write_secret_file", full)
        with pytest.raises(Exception, match="cannot be written"):
            wire_to(sidecar.path)
        assert ask.stat(str(sidecar.admin_path), CLOCK).state == "ready"
    wire_to(sidecar.path).close()
