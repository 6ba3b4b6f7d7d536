"""What engines tell of their requests, and what an operator is shown of one: exact, bounded, and each tenant's own."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, Unreachable
from kvstore.cli import ask
from kvstore.client.connection import SidecarConnection
from kvstore.client.framing import FramedSocket
from kvstore.client.handle import NamespaceHandle
from kvstore.config import Limits
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.protocol.told import MAX_TOLD_REQUESTS, MAX_TOLD_WORDS, RequestTold, SavingsTold
from kvstore.service.accounting import MOST_LEASES, MOST_REQUESTS
from service.sidecar import Sidecar, asked, number_of, wire_to
from service.test_operate import refused, run, told
from tiering.nvme.lmdb_index import LmdbMaker
from torture.peer import Peer, come_in
from waiting import wait_until
from workbench import ids, random_pages, small_layout

CLOCK = SystemClock()
LAYOUT = small_layout()


def told_of(request: str, **more: Any) -> RequestTold:
    return RequestTold(request, **{"asked": 400, "hits": {"dram": 320}, "misses": {"partial_block": 80}, **more})


def why(sidecar: Sidecar, request: str) -> list[Any]:
    return ask.why(str(sidecar.admin_path), CLOCK, request).found


def test_a_request_is_shown_with_its_leases_and_with_what_its_engine_told(
    sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    handle.put(ids(320), random_pages(LAYOUT, 5))
    with handle.lease(handle.match(ids(400)), deadline_ms=5000, request="cmpl-1") as lease:
        assert lease.blocks == 5
    (one,) = why(sidecar, "cmpl-1")
    assert (one.request, one.tenant, one.engine, one.model) == ("cmpl-1", "default", "t", "small model")
    assert one.told is None and one.told_at is None
    (leased,) = one.leases
    assert (leased.first_block, leased.wanted, leased.blocks, leased.tiers) == (0, 5, 5, {"dram": 5})
    assert leased.reason == "" and leased.seconds >= 0
    told = told_of("cmpl-1", detail="as it is", load_ms=2.5, saved_blocks=1, put_reasons={"quota": 1})
    handle.tell([told, told_of("cmpl-2")])
    wait_until(lambda: len(why(sidecar, "cmpl-")) == 2)
    newest, older = why(sidecar, "cmpl-")
    assert {newest.request, older.request} == {"cmpl-1", "cmpl-2"}
    assert why(sidecar, "cmpl-1")[0].told == told and why(sidecar, "cmpl-2")[0].leases == []
    with pytest.raises(BadInput, match="nothing is known"):
        why(sidecar, "other")
    with pytest.raises(BadInput, match="characters"):
        why(sidecar, "")


def test_what_an_engine_reports_counts_and_not_what_its_look_ups_found(
    sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    """With a cache of its own an engine needs less than is found, and more than was not."""
    handle.put(ids(320), random_pages(LAYOUT, 5))
    handle.is_told = True
    with handle.lease(handle.match(ids(900), request="a"), deadline_ms=5000, request="a") as lease:
        assert lease.blocks == 5
    looked = sidecar.admin.facts().looked
    assert (looked.lookups, looked.leases, looked.asked_tokens, looked.found_tokens) == (1, 1, 0, 0)
    reported = told_of("a", asked=900, hits={"engine": 512, "dram": 128}, misses={"partial_block": 4, "newer": 256})
    handle.tell([msgspec.structs.replace(reported, counts=True), told_of("b")])
    wait_until(lambda: sidecar.admin.facts().looked.asked_tokens)
    looked = sidecar.admin.facts().looked
    assert (looked.asked_tokens, looked.hit_tokens) == (900, {"engine": 512, "dram": 128})
    assert looked.miss_tokens == {"partial_block": 4, "absent": 256} and looked.hit_rate == 128 / 900
    with sidecar.opened() as other:
        other.match(ids(400), request="c")  # as a client of before
    handle.match(ids(400))  # no engine's request
    looked = sidecar.admin.facts().looked
    assert (looked.asked_tokens, looked.found_tokens) == (900 + 2 * 384, 2 * 320)


@pytest.mark.parametrize(
    "wrong",
    [
        {"asked": 401},
        {"hits": {"dram": 319}},
        {"hits": {"tape": 320}},
        {"asked": 1 << 25, "hits": {"dram": (1 << 25) - 80}},
    ],
    ids=str,
)
def test_tokens_that_do_not_add_up_are_not_counted(
    wrong: dict[str, Any], sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    handle.is_told = True
    good, bad = (msgspec.structs.replace(told_of("a", **more), counts=True) for more in ({}, wrong))
    handle.tell([good, bad])
    handle.tell([good])
    wait_until(lambda: sidecar.admin.facts().looked.asked_tokens)
    looked = sidecar.admin.facts().looked
    assert (looked.asked_tokens, looked.hit_tokens) == (400, {"dram": 320})


def test_who_only_asks_whether_a_sidecar_answers_is_no_engine(sidecar: Sidecar) -> None:
    with closing(FramedSocket(str(sidecar.path), "kvstore doctor", b"", CLOCK, 5.0)):
        assert [one.engine for one in sidecar.admin.facts().sessions] == []
        with sidecar.opened():
            assert [one.engine for one in sidecar.admin.facts().sessions] == ["t"]


def test_loads_of_one_tier_say_how_fast_it_is(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(320), random_pages(LAYOUT, 5))
    for number in range(4):
        with handle.lease(handle.match(ids(320)), deadline_ms=5000, request=f"cmpl-{number}"):
            pass

    def rates() -> dict[str, float]:
        return sidecar.admin.facts().namespaces[0].load_tokens_per_second

    handle.tell([told_of("cmpl-0", load_ms=0.0), told_of("never leased", load_ms=5.0)])
    handle.tell([told_of("cmpl-1", hits={"dram": 160, "nvme": 160}, load_ms=5.0)])
    handle.tell([told_of("cmpl-2", hits={"engine": 80, "nvme": 240}, load_ms=24.0)])
    wait_until(lambda: rates() == {"nvme": 10_000.0})
    handle.tell([told_of("cmpl-3", load_ms=32.0)])
    wait_until(lambda: rates() == {"nvme": 10_000.0, "dram": 10_000.0})
    handle.tell([told_of("cmpl-3", load_ms=16.0)])  # the latest one counts most
    wait_until(lambda: rates()["dram"] > 10_000.0)
    assert rates()["dram"] == pytest.approx(1000 * (0.9 * 320 + 320) / (0.9 * 32 + 16))
    for load_ms in (1e-300, math.nan, 0.001):  # what cannot be spoils no figure of others
        handle.tell([told_of("cmpl-3", hits={"dram": (1 << 53) - 1}, load_ms=load_ms)])
    wait_until(lambda: rates()["dram"] == 1e12)
    assert ask.stat(str(sidecar.admin_path), CLOCK).namespaces[0].load_tokens_per_second == rates()
    sidecar.told.forget(sidecar.store.tenant_keys("default").tenant, "default")
    assert rates() == {}


@pytest.mark.slow
def test_the_command_prints_a_timeline_and_an_object(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(320), random_pages(LAYOUT, 5))
    handle.lease(handle.match(ids(400)), deadline_ms=5000, request="cmpl-1").release()
    handle.tell([told_of("cmpl-1", saved_blocks=1, put_reasons={"quota": 1}, detail="\x1b[31mred")])
    wait_until(lambda: why(sidecar, "cmpl-1")[0].told is not None)
    where = "--admin-socket", str(sidecar.admin_path)
    shown = run("why", "cmpl-1", *where)
    assert shown.returncode == 0, shown.stderr
    said = "cmpl-1 of t, tenant default, small model|leased 5 of 5 blocks|dram 5|400 tokens|quota 1"
    assert all(words in shown.stdout for words in said.split("|")) and "\x1b" not in shown.stdout, shown.stdout
    assert told("why", "cmpl-1", *where)["requests"][0]["told"]["saved_blocks"] == 1
    assert "nothing is known" in refused("why", "unknown", *where)


def evicted_note(sidecar: Sidecar, handle: NamespaceHandle, prompt: Any, request: str) -> Any:
    """What is told of how the first missed block of a prompt went, of its look-up, and of a lease for it."""
    match = handle.match(prompt, request=request)
    assert match.reason is MissReason.EVICTED, match
    (one,) = why(sidecar, request)
    assert [(note.blocks, note.wanted, note.reason) for note in one.looked] == [(match.blocks, 5, "evicted")]
    return one.looked[0].gone


@pytest.mark.parametrize(
    ("options", "hints", "tier", "cause"),
    [
        ({"nvme": None}, {}, "dram", "room"),
        ({"nvme": None}, {"ttl": 0.001}, "dram", "ttl"),
        ({"nvme": "1MiB", "indexes": LmdbMaker}, {}, "nvme", "room"),
        ({"nvme": "8MiB", "indexes": LmdbMaker, "nvme_writes": 0.001}, {}, "dram", "declined"),
    ],
    ids=("dram", "ttl", "nvme", "declined"),
)
def test_a_miss_says_how_its_block_went(
    tmp_path: Path, options: dict[str, Any], hints: dict[str, Any], tier: str, cause: str
) -> None:
    with Sidecar(tmp_path, dram="1MiB", **options) as sidecar, sidecar.opened() as handle:
        assert sidecar.store.warmed(20)
        handle.put(ids(320), random_pages(LAYOUT, 5), **hints)
        began = CLOCK.wall_seconds()
        for number in range(1, 1000):
            handle.put(ids(640, 10_000 * number), random_pages(LAYOUT, 10, seed=number))
            if handle.match(ids(320)).blocks < 5:
                break
        gone = evicted_note(sidecar, handle, ids(320), "cmpl-1")
        assert (gone.tier, gone.cause) == (tier, cause)
        assert began - 2 <= gone.at <= CLOCK.wall_seconds()
        again = evicted_note(sidecar, handle, ids(320), "cmpl-2")
        assert abs(again.at - gone.at) < 1.5 and again.cause == cause, "it is not forgotten by being asked"


def test_a_miss_behind_a_drop_says_so_and_what_nobody_remembers_is_not_made_up(tmp_path: Path) -> None:
    with Sidecar(tmp_path, limits=Limits(forgotten=3)) as sidecar, sidecar.opened() as handle:
        handle.put(ids(320), random_pages(LAYOUT, 5))
        assert ask.drop(str(sidecar.admin_path), CLOCK, sidecar.admin.facts().namespaces[0].id, "", 30.0).blocks == 5
        gone = evicted_note(sidecar, handle, ids(320), "cmpl-1")
        assert gone.cause == "drop"
        shown = run("why", "cmpl-1", "--admin-socket", str(sidecar.admin_path))
        assert "looked up: found 0 of 5 blocks" in shown.stdout and "as its namespace was dropped" in shown.stdout
        for number in range(1, 3):  # what is remembered is bounded, and these take its place
            handle.put(ids(320, 10_000 * number), random_pages(LAYOUT, 5))
        ask.drop(str(sidecar.admin_path), CLOCK, sidecar.admin.facts().namespaces[0].id, "", 30.0)
        assert handle.match(ids(320), request="cmpl-2").reason is MissReason.ABSENT
        (one,) = why(sidecar, "cmpl-2")
        assert one.looked[0].gone is None and one.looked[0].reason == "absent"


def test_a_purge_takes_what_is_known_of_requests_and_is_told_to_who_comes_after_it(sidecar: Sidecar) -> None:
    with sidecar.opened(name="small model") as handle:
        handle.put(ids(320), random_pages(LAYOUT, 5))
        handle.tell([told_of("mine")])
        wait_until(lambda: bool(sidecar.told.why("mine", sidecar.store.tenant_names(), str).found))
        tenants = dict(sidecar.store.tenant_names())
    ask.purge(str(sidecar.admin_path), CLOCK, "default", 30.0)
    assert sidecar.told.why("mine", tenants, str).kept == 0
    with sidecar.opened(name="small model") as handle:
        handle.match(ids(320), request="cmpl-1")
        (one,) = why(sidecar, "cmpl-1")
        assert one.purged_at is not None and abs(one.purged_at - CLOCK.wall_seconds()) < 60
        assert one.looked[0].gone is None and one.looked[0].reason == "absent"


def test_a_block_that_fails_its_readers_check_is_in_the_requests_record(
    sidecar: Sidecar, handle: NamespaceHandle, peer: Peer
) -> None:
    handle.put(ids(320), random_pages(LAYOUT, 5))
    with handle.lease(handle.match(ids(320)), deadline_ms=5000, request="cmpl-1") as lease:
        assert isinstance(peer.ask(m.ReportFrame(number_of(lease), 0, 0)), m.Done), "who does not hold it says nothing"
        assert why(sidecar, "cmpl-1")[0].reported == 0
        handle.door.call(m.ReportFrame(lease.reply.lease, 0, 0), m.Done)
        wait_until(lambda: why(sidecar, "cmpl-1")[0].reported == 1)


def test_a_name_that_is_too_long_costs_that_look_up_alone(handle: NamespaceHandle, peer: Peer) -> None:
    with pytest.raises(BadInput, match="256 characters"):
        handle.match(ids(320), request="x" * 300)
    assert isinstance(peer.ask(m.MatchPrefix(1, [b"k" * 32], request="x" * 300)), m.Failed)
    assert isinstance(peer.ask(m.Ping()), m.Done), "the connection goes on"


class CountedSends:
    """A socket, and how often something was sent over it."""

    def __init__(self, of: Any) -> None:
        self._of, self.count = of, 0

    def send(self, *given: Any) -> int:
        self.count += 1
        return int(self._of.send(*given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


@pytest.mark.parametrize(("seconds", "way"), [(0.0, "post"), (1.0, "post_later")])
def test_a_report_that_may_wait_is_posted_for_later(
    sidecar: Sidecar, handle: NamespaceHandle, monkeypatch: pytest.MonkeyPatch, seconds: float, way: str
) -> None:
    posted: list[str] = []
    for name in ("post", "post_later"):
        whole = getattr(SidecarConnection, name)

        def post(run: Any, verb: m.Verb, name: str = name, whole: Any = whole) -> None:
            if isinstance(verb, m.Tell):
                posted.append(name)
            whole(run, verb)

        monkeypatch.setattr(SidecarConnection, name, post)
    handle.tell([told_of("a")], SavingsTold(2.0, 0.5, 100.0, 10.0), seconds=seconds)
    assert posted == [way]
    wait_until(lambda: sidecar.told.sums() == (2.0, 0.5))  # the next ping takes along what may wait


def test_a_report_is_sent_with_the_next_request_or_as_the_connection_ends(sidecar: Sidecar) -> None:
    """A send of its own would wake the sidecar, and take the core from the engine's step."""
    wire = wire_to(sidecar.path)
    read_by_sidecar, take = list[str](), sidecar.told.tell

    def tell(caller: Any, verb: m.Tell) -> None:
        read_by_sidecar.extend(one.request for one in verb.requests)
        take(caller, verb)

    sidecar.told.tell = tell  # type: ignore[method-assign]
    sends = CountedSends(wire._socket)
    wire._socket = sends  # type: ignore[assignment]
    wire.post_later(m.Tell([told_of("a")]))
    wire.post_later(m.Tell([told_of("b")]))
    assert sends.count == 0
    wire.call(m.Ping(), 10.0)
    assert read_by_sidecar == ["a", "b"] and sends.count == 3
    wire.post_later(m.Tell([told_of("c")]))
    wire.submit(m.Ping())
    wait_until(lambda: read_by_sidecar == ["a", "b", "c"])
    wire.post_later(m.Tell([told_of("d")]))
    wire.close()
    assert sends.count == 6
    wait_until(lambda: read_by_sidecar == ["a", "b", "c", "d"])
    with pytest.raises(Unreachable):
        wire.post_later(m.Tell([told_of("e")]))


def test_savings_are_summed_over_engines_and_stay_when_one_goes(sidecar: Sidecar) -> None:
    assert sidecar.admin.facts().savings is None
    with sidecar.opened() as one, sidecar.opened() as two:
        one.tell([told_of("a")], SavingsTold(2.0, 0.5, 100.0, 10.0))
        one.tell([told_of("b")], SavingsTold(1.0, 0.0, 100.0, 10.0))
        two.tell([told_of("c")], SavingsTold(4.0, 0.25, 200.0, 10.0))
        wait_until(lambda: sidecar.told.sums() == (7.0, 0.75))
        savings = sidecar.admin.facts().savings
        assert savings is not None and savings.engines == 2
        assert savings.ttft_saved_ms == pytest.approx(150.0)
        assert savings.ttft_saved_error_ms == pytest.approx(10.0 / math.sqrt(2))
    assert sidecar.admin.facts().savings is not None
    assert sidecar.told.sums() == (7.0, 0.75)


@pytest.mark.parametrize(
    "verb",
    [
        m.Tell([told_of("a", load_ms=math.nan)]),
        m.Tell([told_of("a", load_ms=-1.0)]),
        m.Tell([], SavingsTold(saved_seconds=math.inf)),
        m.Tell([], SavingsTold(saved_seconds=-1.0)),
        m.Tell([], SavingsTold(regret_seconds=math.nan)),
        m.Tell([], SavingsTold(ttft_saved_ms=math.nan)),
        m.Tell([], SavingsTold(ttft_saved_error_ms=1e300)),
    ],
    ids=lambda one: repr(one)[:60],
)
def test_numbers_that_cannot_be_are_refused_and_nothing_is_counted(sidecar: Sidecar, peer: Peer, verb: m.Tell) -> None:
    assert isinstance(peer.ask(verb), m.Failed)
    assert isinstance(peer.ask(m.Ping()), m.Done), "the connection goes on"
    assert sidecar.told.sums() == (0.0, 0.0) and sidecar.admin.facts().savings is None


def test_messages_that_are_too_large_end_their_connection_alone(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    for verb in (
        m.Tell([told_of(f"r{number}") for number in range(MAX_TOLD_REQUESTS + 1)]),
        m.Tell([told_of("r", hits={f"word{number}": 1 for number in range(MAX_TOLD_WORDS + 1)})]),
        m.Tell([told_of("r" * 300)]),
        m.Tell([told_of("r", asked=-1)]),
    ):
        peer = come_in(sidecar.path, newest=2)
        assert isinstance(peer.ask(verb), m.Failed)
        peer.close()
    assert handle.match(ids(64)).blocks == 0 and sidecar.told.why("r", sidecar.store.tenant_names(), str).kept == 0


def test_what_is_remembered_is_bounded_and_the_last_ones_stay(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(64), random_pages(LAYOUT, 1))
    for _ in range(MOST_LEASES + 3):
        handle.lease(handle.match(ids(70), request="many"), deadline_ms=5000, request="many").release()
    (many,) = why(sidecar, "many")
    assert len(many.leases) == len(many.looked) == MOST_LEASES
    handle.tell([told_of(f"r{number:05}") for number in range(MOST_REQUESTS + 64)])
    last = f"r{MOST_REQUESTS + 63:05}"
    wait_until(lambda: bool(sidecar.told.why(last, sidecar.store.tenant_names(), str).found))
    reply = ask.why(str(sidecar.admin_path), CLOCK, "r")
    assert reply.kept == MOST_REQUESTS and len(reply.found) == m.MAX_RECORDS
    assert reply.found[0].request == last
    with pytest.raises(BadInput):
        why(sidecar, "many")


def test_a_tenants_socket_tells_nothing_of_requests_and_the_observers_does(
    sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    handle.tell([told_of("mine")])
    wait_until(lambda: bool(why(sidecar, "mine")))
    (refused,), (reply,) = (asked(path, m.Why("mine")) for path in (sidecar.path, sidecar.observe_path))
    assert isinstance(refused, m.Failed)
    assert isinstance(reply, m.WhyReply) and reply.found[0].request == "mine"
