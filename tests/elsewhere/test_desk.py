"""Engines and couriers at a real door: what is elsewhere is located in time and fetched, or missed by its name."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, closing
from math import inf
from pathlib import Path

import pytest

from elsewhere.courier import PAYLOAD, SPACE, OtherNode, RawCourier, chain, sidecar_with_couriers
from kvstore.block.account import HitTier, MissReason
from kvstore.block.identity import Identity
from kvstore.client.connection import checked_facts
from kvstore.elsewhere.desk import MOST_OF_TENANT
from kvstore.protocol import courier as c
from kvstore.protocol import messages as m
from kvstore.protocol.hand_off_ticket import HandOff
from service.sidecar import Sidecar
from tiering.counts.awaits import AwaitEnd
from torture.peer import Peer, opened_by, packed_namespace, reply_in
from waiting import wait_until

sidecar = sidecar_with_couriers


class Engine(Peer):
    """A bare connection of an engine, with a namespace; it may ask without waiting."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        assert isinstance(self.ask(m.Hello(m.OLDEST_VERSION, m.NEWEST_VERSION)), m.Welcome)
        self.space = opened_by(self)
        self.next = 2

    def send(self, verb: m.Verb) -> int:
        self.next += 1
        self.socket.sendall(m.pack(m.Request(self.next, verb)))
        return self.next

    def locate(self, keys: list[bytes], ticket: str = "") -> m.Located:
        self.send(m.Locate(self.space, keys, ticket))
        return self.located()

    def located(self) -> m.Located:
        reply = self.reply()
        assert reply is not None and isinstance(reply.answer, m.Located), reply
        return reply.answer

    def awaited(self) -> m.Awaited:
        reply = self.reply()
        assert reply is not None and isinstance(reply.answer, m.Awaited), reply
        return reply.answer


class Fetcher(RawCourier):
    """A courier that has what `other` has."""

    def __init__(self, sidecar: Sidecar, **options: bytes) -> None:
        super().__init__(sidecar.courier_path, **options)  # type: ignore[arg-type]
        self.other = OtherNode(sidecar.store.tenant_keys("default"), SPACE, PAYLOAD)
        self.space = self.open(SPACE, PAYLOAD)
        self.questions()

    def one(self) -> c.QuestionsReply:
        """The next reply that has a question, or an end."""

        def found() -> c.QuestionsReply | None:
            reply = self.questions()
            return reply if reply.locates or reply.fetches or reply.forgets or reply.over else None

        return wait_until(found)

    def asked(self, engine: Engine, keys: list[bytes], ticket: str = "") -> c.LocateQuestion:
        """What an engine locates, taken within its 5 ms: asked again where the machine is too busy for that."""

        def taken() -> c.LocateQuestion | None:
            engine.send(m.Locate(engine.space, keys, ticket))
            for _ in range(20):
                if asked := self.questions().locates:
                    return asked[0]
            engine.located()
            return None

        return wait_until(taken)

    def bring(self, keys: list[bytes], tier: HitTier = HitTier.PEER) -> int:
        reply = self.reserve(self.space, keys)
        payloads = [bytes(PAYLOAD[0])] * len(reply.blocks)
        self.fill(reply.places[0] if reply.places else [], payloads)
        headers = [self.other.header(0, keys, at, bytes(PAYLOAD[0])) for at in reply.blocks]
        assert self.adopt(reply.reservation, 0, 0, headers, tier) == m.Counted(len(headers))
        return reply.present + len(headers)


def located(sidecar: Sidecar, engine: Engine, courier: Fetcher, keys: list[bytes], blocks: int) -> m.Located:
    """Ask until the courier was fast enough: it has 5 ms, on a busy machine too."""

    def found() -> m.Located | None:
        asked = courier.asked(engine, keys)
        courier.questions(c.QuestionAnswered(asked.number, blocks, HitTier.PEER, 1.5, "node-b"))
        answer = engine.located()
        return answer if answer.number else None

    return wait_until(found)


# Locate ---------------------------------------------------------------------------------------------------------------


def test_without_a_courier_it_is_answered_at_once(sidecar: Sidecar, tmp_path: Path) -> None:
    with closing(Engine(sidecar.path)) as engine:
        answer = engine.locate(chain(3))
        assert (answer.number, answer.blocks, answer.reason) == (0, 0, MissReason.UNREACHABLE)
    with Sidecar(tmp_path / "plain") as plain, closing(Engine(plain.path)) as engine:
        assert engine.locate(chain(3)) == m.Located(0, 0)


def test_a_courier_is_asked_and_what_it_says_is_passed_on(sidecar: Sidecar) -> None:
    keys = chain(5)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        assert courier.bring(keys[:2]) == 2
        found = located(sidecar, engine, courier, keys, 4)
        assert (found.blocks, found.tier, found.milliseconds, found.where) == (4, HitTier.PEER, 1.5, "node-b")
        assert engine.locate(keys[:2]) == m.Located(0, 2), "all of it is here"


def test_it_waits_for_five_milliseconds(sidecar: Sidecar) -> None:
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        answer = engine.locate(chain(3))
        assert (answer.number, answer.reason) == (0, MissReason.DEADLINE)
        assert engine.locate(chain(3)).reason is MissReason.UNREACHABLE, "it did not take the last one"
        assert courier.questions() == c.QuestionsReply(), "what is over is not asked"
        asked = courier.asked(engine, chain(3))
        assert engine.located().reason is MissReason.DEADLINE, "it took that, and is slow"
        assert courier.questions(c.QuestionAnswered(asked.number, 3, HitTier.PEER)) == c.QuestionsReply()


def test_the_bell_rings_when_there_is_a_question(sidecar: Sidecar) -> None:
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        courier.socket.sendall(m.pack(m.Request(999, m.Ping(wants_bell=True))))
        body, held, *_ = socket.recv_fds(courier.socket, 1 << 16, 1)
        assert isinstance(reply_in(body).answer, m.NotifyPipeReply)
        with open(held[0], "rb", buffering=0) as bell:
            assert select.select([bell], [], [], 0)[0] == []
            engine.locate(chain(2))
            assert select.select([bell], [], [], 20)[0] == [bell]
            bell.read(1)
            engine.locate(chain(2))
            assert select.select([bell], [], [], 0.05)[0] == [], "it has not asked since"
            courier.questions()
            engine.locate(chain(2))
            assert select.select([bell], [], [], 20)[0] == [bell]


def test_a_ticket_of_another_node_leads_there(sidecar: Sidecar) -> None:
    keys, mine = chain(4), sidecar.store.tenant_keys("default")
    with closing(Engine(sidecar.path)) as engine:
        until = int(1000 * (time.time() + 100))
        seal = Identity.of(mine, sidecar.core.node)
        about = mine.fingerprint, SPACE.digest()[:16], keys[-1], 4, SPACE.layout.block_tokens
        ticket = HandOff(*about, b"n" * 16, b"i" * 8, "10.0.0.9:7", until).seal(seal)
        opened = engine.ask(m.OpenTicket(engine.space, ticket))
        assert isinstance(opened, m.TicketOpened) and opened.reason is MissReason.STALE_HINT, "no courier is there"
        with closing(Fetcher(sidecar)) as courier:
            opened = engine.ask(m.OpenTicket(engine.space, ticket))
            assert isinstance(opened, m.TicketOpened) and (opened.head, opened.blocks) == (keys[-1], 4)
            asked = courier.asked(engine, keys, ticket)
            assert (asked.door, asked.node, asked.incarnation) == ("10.0.0.9:7", b"n" * 16, b"i" * 8)
            engine.located()
            altered = ticket[:-3] + ("AAA" if ticket[-3:] != "AAA" else "BBB")
            assert engine.locate(keys, altered).reason is MissReason.KEY_MISMATCH


# Await ----------------------------------------------------------------------------------------------------------------


def test_what_is_fetched_ends_the_wait_and_is_there_to_be_leased(sidecar: Sidecar) -> None:
    keys = chain(4)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        found = located(sidecar, engine, courier, keys, 4)
        engine.send(m.Await(engine.space, [keys[2]], 20.0, found.number))
        (asked,) = courier.one().fetches
        assert asked.keys == keys[:3] and asked.present == 0 and asked.located == found.number
        assert courier.bring(keys[:3]) == 3
        answer = engine.awaited()
        assert (answer.blocks, answer.end, answer.reason) == (1, AwaitEnd.READABLE, None)
        assert courier.one().over == [asked.number], "no engine waits for it any more"
        leased = engine.ask(m.LeasePrefix(engine.space, keys, 0, 1000.0))
        assert isinstance(leased, m.Leased) and leased.reply.tiers == ((HitTier.PEER, 3),)
        assert sidecar.desk is not None and sidecar.desk.fetched.kept_bytes == 0


def test_a_fetch_that_ends_short_says_why(sidecar: Sidecar) -> None:
    keys = chain(4)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        found = located(sidecar, engine, courier, keys, 4)
        engine.send(m.Await(engine.space, keys, 20.0, found.number))
        (asked,) = courier.one().fetches
        courier.bring(keys[:2])
        courier.questions(c.QuestionAnswered(asked.number, 2, reason=MissReason.STALE_HINT, detail="node-b has it not"))
        assert engine.awaited() == m.Awaited(2, AwaitEnd.SHORT, MissReason.STALE_HINT, "node-b has it not")
        assert courier.questions().over == []


@pytest.mark.parametrize("how", ["deadline", "cancelled", "gone", "hang-up"])
def test_however_the_wait_ends_its_fetch_is_over(sidecar: Sidecar, how: str) -> None:
    keys = chain(3)
    with ExitStack() as stack:
        engine = stack.enter_context(closing(Engine(sidecar.path)))
        courier = stack.enter_context(closing(Fetcher(sidecar)))
        found = located(sidecar, engine, courier, keys, 3)
        number = engine.send(m.Await(engine.space, keys, 0.05 if how == "deadline" else 20.0, found.number))
        (asked,) = courier.one().fetches
        if how == "cancelled":
            engine.send(m.Cancel([number]))
        elif how == "gone":
            sidecar.core.drop(0)
        elif how == "hang-up":
            engine.close()
        assert courier.one().over == [asked.number]
        if how in ("deadline", "gone"):
            answer = engine.awaited()
            assert answer.end is (AwaitEnd.DEADLINE if how == "deadline" else AwaitEnd.GONE)
            assert answer.reason is (MissReason.DEADLINE if how == "deadline" else None)


def test_places_that_are_not_known_and_keys_that_are_elsewhere(sidecar: Sidecar) -> None:
    keys = chain(4)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        engine.send(m.Await(engine.space, keys, 20.0, 77))
        answer = engine.awaited()
        assert (answer.end, answer.reason) == (AwaitEnd.SHORT, MissReason.STALE_HINT)
        found = located(sidecar, engine, courier, keys, 3)
        for odd in ([keys[3]], chain(1)):
            refused = engine.ask(m.Await(engine.space, odd, 20.0, found.number), 900)
            assert isinstance(refused, m.Failed) and refused.fault is m.RequestFault.BAD_INPUT
        courier.bring(keys[:1])
        engine.send(m.Await(engine.space, keys[:1], 20.0, found.number))
        assert engine.awaited().end is AwaitEnd.READABLE


def test_a_place_is_never_taken_for_one_that_a_later_courier_found(sidecar: Sidecar) -> None:
    keys = chain(3)
    with closing(Engine(sidecar.path)) as engine:
        with closing(Fetcher(sidecar)) as courier:
            found = located(sidecar, engine, courier, keys, 3)
        wait_until(lambda: sidecar.admin.facts().elsewhere.couriers == 0)  # type: ignore[union-attr]
        with closing(Fetcher(sidecar)) as courier:
            assert located(sidecar, engine, courier, chain(3), 3).number > found.number
            engine.send(m.Await(engine.space, keys, 20.0, found.number))
            answer = engine.awaited()
            assert (answer.end, answer.reason) == (AwaitEnd.SHORT, MissReason.STALE_HINT)


def test_couriers_that_hang_up_leave_no_waiter(sidecar: Sidecar) -> None:
    keys = chain(3)
    with closing(Engine(sidecar.path)) as engine:
        first, second = Fetcher(sidecar), Fetcher(sidecar)
        found = located(sidecar, engine, second, keys, 3)
        engine.send(m.Await(engine.space, keys, 20.0, found.number))
        (asked,) = second.one().fetches
        reply = second.reserve(second.space, keys)
        assert len(reply.blocks) == 3
        second.close()
        assert first.one().fetches == [asked], "the next one has them"
        first.close()
        answer = engine.awaited()
        assert (answer.end, answer.reason) == (AwaitEnd.SHORT, MissReason.UNREACHABLE)
        assert engine.locate(chain(1)).reason is MissReason.UNREACHABLE
        wait_until(lambda: sidecar.core.usage().dram.reserved == 0)
        assert sidecar.core.usage().reservations == 0


def test_what_a_courier_leaves_reserved_keeps_engines_from_storing_for_a_time_only(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(2)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        assert len(courier.reserve(courier.space, keys).blocks) == 2
        refused = engine.ask(m.Reserve(engine.space, keys, 0), 5)
        assert isinstance(refused, m.Reserved) and refused.reply.reason is MissReason.IN_FLIGHT
        monkeypatch.setattr("kvstore.elsewhere.desk.RESERVED_SECONDS", 0.0)

        def is_free() -> bool:
            answer = engine.ask(m.Reserve(engine.space, keys, 0), 6)
            return isinstance(answer, m.Reserved) and len(answer.reply.blocks) == 2

        wait_until(is_free)


# The socket -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenant", "says"), [("", "names its tenant"), ("nobody", "no keys here")])
def test_a_courier_names_a_tenant_that_there_is(sidecar: Sidecar, tenant: str, says: str) -> None:
    with closing(RawCourier(sidecar.courier_path, tenant)) as courier:
        assert isinstance(courier.welcome, m.Failed) and says in courier.welcome.text
        assert courier.reply() is None, "it is hung up on"
    assert "nobody" not in sidecar.store.tenant_names().values(), "no keys are made for it"


def test_it_has_few_verbs(sidecar: Sidecar) -> None:
    with closing(RawCourier(sidecar.courier_path)) as courier, closing(Engine(sidecar.path)) as engine:
        space = courier.open(SPACE, PAYLOAD)
        for verb in (
            m.Commit(1, 0, 0, []),
            m.Drop(space),
            m.Persist(space, [], 0.1),
            m.Tell([]),
            m.SealTicket(space, chain(1), 1.0),
            m.OpenTicket(space, ""),
            m.Locate(space, chain(1)),
            m.Attach([1]),
            m.Stat(),
            m.Purge("default"),
            m.Reserve(space, chain(1), 0, priority=1),
            m.Reserve(space, chain(1), 0, collective="x"),
        ):
            answer = courier.call(verb)
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, verb
        refused = courier.call(m.Await(space, chain(1), 0.0))
        assert isinstance(refused, m.Failed) and "couriers wait for no blocks" in refused.text
        for verb in (m.Adopt(1, 0, 0, [], HitTier.PEER), m.Questions(), m.Holdings(space)):
            answer = engine.ask(verb)
            assert isinstance(answer, m.Failed) and "courier.sock" in answer.text


def test_a_hello_at_a_tenants_socket_names_none(sidecar: Sidecar) -> None:
    with closing(Peer(str(sidecar.path))) as peer:
        assert isinstance(peer.ask(m.Hello(1, m.NEWEST_VERSION, tenant="other")), m.Welcome)
        opened = peer.ask(m.OpenNamespace(packed_namespace(), PAYLOAD))
        assert isinstance(opened, m.Granted)
        assert opened.grant.identity_key == sidecar.store.tenant_keys("default").identity


def test_couriers_of_a_tenant_are_bounded_and_keep_no_engine_out(sidecar: Sidecar) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_OF_TENANT):
            courier = stack.enter_context(closing(RawCourier(sidecar.courier_path)))
            assert isinstance(courier.welcome, m.Welcome)
        late = stack.enter_context(closing(RawCourier(sidecar.courier_path)))
        assert isinstance(late.welcome, m.Failed) and late.welcome.fault is m.RequestFault.BUSY
        stack.enter_context(closing(Engine(sidecar.path)))


def test_a_purge_shows_its_couriers_out_and_lets_none_in(sidecar: Sidecar) -> None:
    sidecar.store.tenant_keys("other")
    with closing(RawCourier(sidecar.courier_path, "other")) as gone, closing(RawCourier(sidecar.courier_path)) as stays:
        answer = sidecar.admin.serve(m.Purge("other", 10.0)).answer
        assert isinstance(answer, m.Counted) and "no courier" in answer.elsewhere, "it took no questions"
        assert gone.reply() is None
        assert stays.call(m.Ping()) == m.Done()
    with closing(RawCourier(sidecar.courier_path, "other")) as late:
        assert isinstance(late.welcome, m.Failed)


def test_a_drop_says_what_remains_elsewhere(sidecar: Sidecar) -> None:
    keys = chain(2)
    with closing(Engine(sidecar.path)) as engine, closing(Fetcher(sidecar)) as courier:
        courier.bring(keys)
        for blocks, reason, detail, says in (
            (0, None, "", ""),
            (7, None, "node-c is away", "7 blocks remain elsewhere: node-c is away"),
            (0, MissReason.UNREACHABLE, "valkey does not answer", "valkey does not answer"),
            (0, None, "2 other nodes may have copies", "2 other nodes may have copies"),
            (3, None, "", "3 blocks remain elsewhere"),
            (0, MissReason.DEADLINE, "", "evicted there: deadline"),
        ):
            number = engine.send(m.Drop(engine.space))
            (asked,) = courier.one().forgets
            assert asked.namespace == SPACE.digest()
            assert isinstance(courier.reserve(courier.space, keys).reason, MissReason), "nothing comes back meanwhile"
            courier.questions(c.QuestionAnswered(asked.number, blocks, reason=reason, detail=detail))
            reply = engine.reply()
            assert reply is not None and reply.number == number and isinstance(reply.answer, m.Counted)
            assert says in reply.answer.elsewhere and bool(says) == bool(reply.answer.elsewhere)
            assert not reply.answer.not_reached
        for nodes in ([("0a" * 16, "10.0.0.2:7470"), ("", "10.0.0.3:7470")], []):
            engine.send(m.Drop(engine.space))
            (asked,) = courier.one().forgets
            courier.questions(c.QuestionAnswered(asked.number, 0, detail="not reached", not_reached=nodes))
            reply = engine.reply()
            assert reply is not None and isinstance(reply.answer, m.Counted)
            assert reply.answer.not_reached == nodes
        engine.send(m.Drop(engine.space))
        reply = engine.reply()  # a second later
        assert reply is not None and isinstance(reply.answer, m.Counted) and "in time" in reply.answer.elsewhere


def test_changes_tell_where_in_its_chain_a_block_is_and_holdings_list_what_is_there(sidecar: Sidecar) -> None:
    keys = chain(3)
    with closing(Fetcher(sidecar)) as courier:
        began = courier.call(m.Changes(courier.space, 0))
        assert isinstance(began, m.Changed) and began.indexes == []
        courier.bring(keys)
        told = courier.call(m.Changes(courier.space, began.next))
        assert isinstance(told, m.Changed)
        assert told.changes == [(key, 1) for key in keys] and told.indexes == [0, 1, 2]
        held = courier.call(m.Holdings(courier.space))
        assert isinstance(held, m.HoldingsReply) and held.next == 0
        assert sorted(held.blocks) == sorted((key, at, 1) for at, key in enumerate(keys))
        assert isinstance(courier.call(m.Holdings(9)), m.Failed)


# What is told ---------------------------------------------------------------------------------------------------------


def test_what_a_courier_tells_is_shown_and_cleaned(sidecar: Sidecar) -> None:
    source = c.SourceFigures("peer", "node-b\x1b[2J", "up", 3, 4, 5, 6, 7, 8, 9, {"mac": 2}, float("nan"), -inf, 10)
    huge = c.SourceFigures("remote", "r", "up", gbps=1e300, p99_ms=1e300)
    figures = c.CourierFigures([source, huge], ["the directory is gone"], 1, 2, 3, 4)
    assert sidecar.desk is not None
    with closing(Fetcher(sidecar)) as courier:
        courier.questions(told=figures)
        courier.questions(told=c.CourierFigures([]))  # too soon
        status = sidecar.admin.facts().elsewhere
        assert status is not None and status.couriers == 1 and status.fetching == 1
        assert status.reasons == sidecar.desk.reasons() == ["the directory is gone"]
        one, other = status.sources
        assert (other.gbps, other.p99_ms) == (1e9, 1e9) and checked_facts(sidecar.admin.facts())
        assert one.name == "node-b[2J" and (one.gbps, one.p99_ms) == (0.0, 0.0) and one.refused == {"mac": 2}
        wait_until(lambda: courier.questions(told=c.CourierFigures([])) and not sidecar.desk.reasons())
    wait_until(lambda: sidecar.desk.status().couriers == 0)
