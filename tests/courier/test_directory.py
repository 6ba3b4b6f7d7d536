"""The directory in a real valkey-server: what nodes see of each other, and that each works on alone without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.block.account import HitTier, Holder
from kvstore.block.errors import BadInput
from kvstore.block.identity import NodeIdentity
from kvstore.courier.directory import (
    FAILURES_TO_OPEN,
    LOOKUP_CONNECTIONS,
    DirectoryAddress,
    ValkeyDirectory,
)
from kvstore.courier.figures import Figures
from kvstore.pool.directory import (
    HINT_SECONDS,
    MAX_NODES,
    NODE_SECONDS,
    AliveTable,
    Announcer,
    DirectoryDown,
    NodeEntry,
    chunk_heads,
    entry_bytes,
    hint_value,
)
from remote.between import Harm, proxy, saying
from tiering.clock import SystemClock
from valkey_server import ValkeyServer, valkey_server
from waiting import together, wait_until

valkey = pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

DRAM = HitTier.DRAM
HEADS = chunk_heads(b"n" * 16, [index.to_bytes(32, "big") for index in range(80)])
NAMES = [name for _, name in HEADS]
SECONDS = 10.0
"""Of a look-up that is to succeed, on a machine that is busy."""
HEALS_SECONDS = NODE_SECONDS + 5.0
WITHOUT_HSETEX = ("--rename-command", "HSETEX", "")


class ShiftedClock(SystemClock):
    """Of a host whose clocks are off, both of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic_seconds(self) -> float:  # type: ignore[override]
        return time.monotonic() + self._seconds

    def wall_seconds(self) -> float:  # type: ignore[override]
        return time.time() - 3600.0 + self._seconds


@dataclass
class Member:
    """A node with a directory."""

    here: NodeIdentity
    directory: ValkeyDirectory
    announcer: Announcer

    def has(self, *names: bytes, tier: HitTier = DRAM) -> None:
        for name in names:
            self.announcer.stored(name, tier)

    def sees(self, *others: Member) -> bool:
        return set(self.directory.alive()) == {one.here.node for one in others}

    def finds(self, *holders: tuple[Member, int]) -> bool:
        try:
            found = self.directory.holders(HEADS, SECONDS)
        except DirectoryDown:
            return False
        want = {Holder(one.here.node, one.here.incarnation, blocks, DRAM) for one, blocks in holders}
        return set(found) == want


def node(number: int) -> bytes:
    return number.to_bytes(16, "big")


def run(number: int) -> bytes:
    return number.to_bytes(8, "big")


@contextmanager
def member(
    address: str, number: int, incarnation: int = 0, off: float = 0.0, password: Callable[[], str] = lambda: ""
) -> Iterator[Member]:
    here = NodeIdentity(node(number), run(incarnation))
    announcer, table = Announcer(), AliveTable(here)
    entry = NodeEntry(here.node, here.incarnation, f"127.0.0.1:{number}")
    where, clock = DirectoryAddress.read(address, password), ShiftedClock(off)
    directory = ValkeyDirectory(where, here, lambda: entry, table, announcer, clock, Figures(clock))
    before = set(threading.enumerate())
    directory.start()
    try:
        yield Member(here, directory, announcer)
    finally:
        directory.close()
        assert not [one for one in set(threading.enumerate()) - before if one.name == "kv-directory"]


def url(server: ValkeyServer) -> str:
    return f"valkey://127.0.0.1:{server.port}"


def unix(server: ValkeyServer) -> str:
    return f"valkey+unix:{server.socket_path}"


def operator(server: ValkeyServer, **of: Any) -> Any:
    """A client of the library, as people have."""
    return valkey.Valkey(unix_socket_path=server.socket_path, **of)


@pytest.fixture(params=[(), WITHOUT_HSETEX], ids=["hsetex", "stamps"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ValkeyServer]:
    """One that knows HSETEX, and one that does not."""
    with valkey_server(tmp_path, request.param) as one:
        yield one


@pytest.fixture
def modern(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as one:
        yield one


@contextmanager
def pool(server: ValkeyServer, count: int = 3, **of: Any) -> Iterator[list[Member]]:
    """Nodes that see each other: over TCP and over the UNIX socket."""
    with ExitStack() as stack:
        members = [stack.enter_context(member((url, unix)[at % 2](server), at, **of)) for at in range(count)]
        for one in members:
            wait_until(lambda one=one: one.sees(*[other for other in members if other is not one]))
        yield members


def test_what_one_node_stores_the_others_find(server: ValkeyServer) -> None:
    with pool(server) as (a, b, c):
        a.has(*NAMES)
        b.has(*NAMES[:2])
        c.has(*NAMES[1:])
        wait_until(lambda: c.finds((a, 80), (b, 32)))
        wait_until(lambda: a.finds((b, 32)))  # c has not the first one
        assert [one.node for one in c.directory.holders(HEADS, SECONDS)] == [a.here.node, b.here.node]
        a.announcer.removed(NAMES[3])
        wait_until(lambda: c.finds((a, 48), (b, 32)))
        b.has(NAMES[2], tier=HitTier.NVME)
        wait_until(
            lambda: Holder(b.here.node, b.here.incarnation, 48, HitTier.NVME) in a.directory.holders(HEADS, SECONDS)
        )
        assert c.directory.holders([], SECONDS) == []
        assert c.directory.reason == "" and c.directory.figures().state == "up"
        assert a.directory.figures().hints == 4


def test_hints_and_entries_end_by_themselves(server: ValkeyServer) -> None:
    with pool(server, 2) as (a, _), operator(server) as people:
        a.has(*NAMES)
        wait_until(lambda: people.exists(b"kv:h:" + NAMES[-1]) == 1)
        for name in NAMES:
            key = b"kv:h:" + name
            ends = people.pttl(key)
            if ends < 0:  # of its fields
                (ends,) = people.execute_command("HPTTL", key, "FIELDS", 1, a.here.node)
            assert 0 < ends <= 1e3 * HINT_SECONDS
        assert 0 < people.pttl(b"kv:n:" + a.here.node) <= 1e3 * NODE_SECONDS


@pytest.mark.parametrize("kind", ["giant", "large", "another type"])
def test_a_list_of_nodes_that_none_can_read_is_made_anew(modern: ValkeyServer, kind: str) -> None:
    with operator(modern) as people:
        if kind == "another type":
            people.set(b"kv:nodes", b"x")
        else:
            people.sadd(b"kv:nodes", b"x" * (32 << 20 if kind == "giant" else 100 << 10))
        with pool(modern, 2) as (a, b):
            wait_until(lambda: set(people.smembers(b"kv:nodes")) == {a.here.node, b.here.node})
            assert a.sees(b)


def test_a_node_that_leaves_is_gone_at_once(modern: ValkeyServer) -> None:
    with pool(modern, 2) as (a, b), operator(modern) as people:
        b.directory.close()
        assert people.exists(b"kv:n:" + b.here.node) == 0
        wait_until(lambda: a.sees())
        wait_until(lambda: set(people.smembers(b"kv:nodes")) == {a.here.node})
        with pytest.raises(DirectoryDown, match="closed"):
            b.directory.holders(HEADS, SECONDS)
        b.directory.close()


def test_clocks_an_hour_apart_change_nothing(server: ValkeyServer) -> None:
    with ExitStack() as stack:
        a, b, c = (
            stack.enter_context(member(url(server), at, off=off)) for at, off in enumerate((0.0, 3600.0, -3600.0))
        )
        for one in (a, b, c):
            one.has(*NAMES)
        for one, *others in ((a, b, c), (b, a, c), (c, a, b)):
            wait_until(lambda one=one, others=others: one.finds(*[(other, 80) for other in others]))


def test_an_emptied_directory_is_filled_again(server: ValkeyServer) -> None:
    with pool(server) as (a, b, c), operator(server) as people:
        a.has(*NAMES)
        wait_until(lambda: c.finds((a, 80)))
        people.flushall()
        begun = time.monotonic()
        wait_until(lambda: c.finds((a, 80)) and b.finds((a, 80)))
        assert time.monotonic() - begun < HEALS_SECONDS
        assert a.sees(b, c)


def test_a_server_that_is_killed_and_comes_back_is_filled_again(server: ValkeyServer) -> None:
    with pool(server, 2) as (a, b):
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        server.kill()
        wait_until(lambda: "cannot be asked" in a.directory.reason and "cannot be asked" in b.directory.reason)
        assert b.directory.figures().state == "down"
        failures = b.directory.figures().failures
        for _ in range(1000):
            with pytest.raises(DirectoryDown):
                b.directory.holders(HEADS, SECONDS)
        assert b.directory.figures().failures == failures, "at once: the server was not asked"
        wait_until(lambda: b.sees())  # works alone
        a.announcer.removed(NAMES[4])
        server.start()
        begun = time.monotonic()
        wait_until(lambda: b.finds((a, 64)))
        assert time.monotonic() - begun < HEALS_SECONDS
        wait_until(lambda: a.directory.reason == b.directory.reason == "")


def test_a_server_that_hangs_costs_look_ups_their_time_and_then_none(modern: ValkeyServer) -> None:
    with pool(modern, 2) as (a, b):
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        modern.stop()
        refused = 0
        for _ in range(50):
            begun = time.monotonic()
            with pytest.raises(DirectoryDown):
                b.directory.holders(HEADS, 0.02)
            refused += time.monotonic() - begun < 0.005  # a look-up that finds no connection waits for twice as long
        assert refused >= 40, "the breaker opened, or the refresh noticed"
        assert b.directory.figures().failures <= FAILURES_TO_OPEN
        modern.go_on()
        wait_until(lambda: b.finds((a, 80)))
        assert b.directory.reason == ""


def test_look_ups_do_not_wait_for_announcements(modern: ValkeyServer) -> None:
    """All that writes is held up by the server for a while."""
    with pool(modern, 2) as (a, b), operator(modern) as people:
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        people.client_pause(700, all=False)
        b.has(*[bytes([one]) * 16 for one in range(200)])
        for _ in range(20):
            assert b.directory.holders(HEADS, 1.0)[0].blocks == 80
        wait_until(lambda: b.announcer.queued == 0 and not b.directory.reason)


def test_a_copied_data_directory_says_so_and_keeps_quiet(modern: ValkeyServer) -> None:
    with pool(modern, 2) as (a, b), member(url(modern), 0, incarnation=7) as clone:
        a.has(*NAMES)
        clone.has(*NAMES)
        wait_until(lambda: "is a copy" in clone.directory.reason)
        assert b.finds((a, 80)) and clone.announcer.queued == len(NAMES)
        assert a.directory.reason == "" and node(0).hex() in clone.directory.reason
        a.directory.close()
        wait_until(lambda: b.finds((clone, 80)))  # the place is free
        assert clone.directory.reason == ""


def test_a_node_that_was_killed_and_comes_back_is_another_run(modern: ValkeyServer) -> None:
    with member(url(modern), 1) as b, operator(modern) as people:
        old = NodeEntry(node(0), run(1), "127.0.0.1:1")
        people.set(b"kv:n:" + node(0), entry_bytes(old), px=6000)
        people.sadd(b"kv:nodes", node(0))
        for name in NAMES:
            people.hset(b"kv:h:" + name, node(0), hint_value(run(1), DRAM))
        wait_until(lambda: set(b.directory.alive()) == {node(0)})
        assert [one.incarnation for one in b.directory.holders(HEADS, SECONDS)] == [run(1)]
        with member(url(modern), 0, incarnation=2) as again:
            again.has(NAMES[0])
            wait_until(lambda: b.finds((again, 16)))  # what the run before said of the others counts no more
            assert again.directory.reason == ""


def test_what_is_no_hint_and_no_entry_is_left_out_and_bounded(server: ValkeyServer) -> None:
    with pool(server, 2) as (a, b), operator(server) as people:
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        bad = {b"short": b"x", node(77): b"y" * 9, a.here.node + b"!": b"z" * 9, b"": b"", node(78): b"w" * 100_000}
        for name in NAMES:
            people.hset(b"kv:h:" + name, mapping=bad)
        assert b.finds((a, 80))
        people.sadd(b"kv:nodes", b"odd", b"x" * 7000, node(50), node(51), node(52), node(53))
        people.set(b"kv:n:" + node(50), b"{" * 5000)
        people.set(b"kv:n:" + node(51), b"[]")
        people.hset(b"kv:n:" + node(52), "a", "b")
        people.set(b"kv:n:" + node(53), b"x" * 50_000_000)
        wait_until(lambda: set(people.smembers(b"kv:nodes")) == {a.here.node, b.here.node})
        assert b.sees(a) and b.finds((a, 80)) and b.directory.reason == ""
        people.delete(b"kv:h:" + NAMES[2])
        people.set(b"kv:h:" + NAMES[2], b"no hash")
        assert b.finds((a, 32)), "a gap"
        people.hset(b"kv:h:" + NAMES[1], node(79), b"v" * 20_000_000)
        with pytest.raises(DirectoryDown, match="20000000 bytes"):
            b.directory.holders(HEADS, SECONDS)
        people.delete(b"kv:h:" + NAMES[1], b"kv:h:" + NAMES[2])
        wait_until(lambda: b.finds((a, 16)))


def test_a_chunk_with_very_many_hints_and_a_pool_of_very_many_nodes_are_read_in_part(modern: ValkeyServer) -> None:
    with pool(modern, 2) as (a, b), operator(modern) as people:
        assert a.sees(b)
        for at in range(0, 100_000, 1000):
            with people.pipeline(transaction=False) as pipe:
                pipe.hset(b"kv:h:" + NAMES[0], mapping={node(number): b"x" * 9 for number in range(at, at + 1000)})
                pipe.sadd(b"kv:nodes", *[node(1000 + number) for number in range(at, at + 1000)])
                pipe.execute()
        assert b.finds(), "64 that are nobody's"
        wait_until(lambda: people.scard(b"kv:nodes") < 99_000)  # they are forgotten, some at a time
        assert len(b.directory.alive()) <= MAX_NODES and b.directory.reason == ""
        people.delete(b"kv:nodes", b"kv:h:" + NAMES[0])
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))


ACL = (
    "on", ">a password", "~kv:nodes", "~kv:n:*", "~kv:h:*", "-@all",
    *"+get +getrange +set +del +sadd +srem +srandmember +time +hset +hsetex +hdel +hrandfield +pexpire".split(),
)  # fmt: skip
"""As docs/cluster.md has it."""


def test_the_documented_acl_is_enough_and_no_more_is_needed(server: ValkeyServer) -> None:
    with operator(server) as people:
        try:
            people.execute_command("ACL", "SETUSER", "kvdir", *ACL)
        except valkey.ResponseError:  # it does not know HSETEX
            people.execute_command("ACL", "SETUSER", "kvdir", *[rule for rule in ACL if rule != "+hsetex"])
        people.execute_command("ACL", "SETUSER", "default", "off")
    password = ["a password"]
    with ExitStack() as stack:
        of = {"password": lambda: password[0]}
        a = stack.enter_context(member(f"valkey://kvdir@127.0.0.1:{server.port}", 0, **of))
        b = stack.enter_context(member(f"valkey+unix://kvdir@{server.socket_path}", 1, **of))
        wait_until(lambda: a.sees(b) and b.sees(a))
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        a.announcer.removed(NAMES[1])
        wait_until(lambda: b.finds((a, 16)))
        assert a.directory.reason == b.directory.reason == ""
        with operator(server, username="kvdir", password="a password") as people:
            for words in ("KEYS *", "FLUSHALL", "CONFIG GET maxmemory", "GET other", "SCAN 0", "ACL LIST"):
                with pytest.raises(valkey.exceptions.NoPermissionError):
                    people.execute_command(*words.split())
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    assert " ".join(ACL[2:]) in " ".join(text.replace("\\\n", " ").split())


def test_a_wrong_password_is_said_and_a_right_one_is_taken_with_the_next_try(modern: ValkeyServer) -> None:
    with operator(modern) as people:
        people.execute_command("ACL", "SETUSER", "kvdir", *ACL)
    password = ["wrong"]
    with member(f"valkey://kvdir@127.0.0.1:{modern.port}", 0, password=lambda: password[0]) as one:
        wait_until(lambda: "WRONGPASS" in one.directory.reason)
        password[0] = "a password"
        wait_until(lambda: one.directory.reason == "")


def test_a_server_that_takes_no_more_is_said_and_look_ups_go_on(tmp_path: Path) -> None:
    with valkey_server(tmp_path, ("--maxmemory-policy", "noeviction")) as server, pool(server, 2) as (a, b):
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        with operator(server) as people:
            people.config_set("maxmemory", "1mb")
            b.has(b"one more.one mor")
            wait_until(lambda: "OOM" in b.directory.reason)
            people.config_set("maxmemory", "0")
        wait_until(lambda: b.directory.reason == "" and b.finds((a, 80)))
        with operator(server) as people:
            wait_until(lambda: people.hexists(b"kv:h:one more.one mor", b.here.node))


def test_many_threads_look_up_at_once(modern: ValkeyServer) -> None:
    with pool(modern, 2) as (a, b):
        a.has(*NAMES)
        wait_until(lambda: b.finds((a, 80)))
        many = 3 * LOOKUP_CONNECTIONS
        assert together(lambda number: all(b.finds((a, 80)) for _ in range(50)), many) == [True] * many


@pytest.mark.parametrize(
    "answer",
    [b"*1000000000\r\n", b"$9999999999\r\n", b"*3\r\n*1\r\n*1\r\n*1\r\n", b"x" * 10_000, b"?\r\n", b":1\r\n" * 5,
     b"*-5\r\n" * 3, b"+\r\n*2\r\n:" + b"9" * 4000 + b"\r\n:1\r\n*0\r\n", b"$5\r\nabcdefghi\r\n", b"-ERR no\r\n" * 3],
)  # fmt: skip
def test_a_server_that_is_none_is_said_and_takes_no_memory(answer: bytes) -> None:
    with saying(answer, answer) as port, member(f"valkey://127.0.0.1:{port}", 0) as one:
        wait_until(lambda: "cannot be asked" in one.directory.reason and "not asked yet" not in one.directory.reason)
        with pytest.raises(DirectoryDown):
            one.directory.holders(HEADS, SECONDS)


def test_a_server_that_drips_is_waited_for_no_longer_than_one_that_hangs() -> None:
    answer = b"$1000\r\n" + b"x" * 1000
    with saying(answer, answer) as port, proxy(port) as between:
        between.plan(Harm.DRIP, 0)
        with member(f"valkey://127.0.0.1:{between.port}", 0) as one:
            wait_until(lambda: "no answer in 1000 ms" in one.directory.reason)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("valkey://10.0.0.1:7000", DirectoryAddress("10.0.0.1", 7000, "", "")),
        ("valkey://kv%40dir@cache.local", DirectoryAddress("cache.local", 6379, "", "kv@dir")),
        ("valkey://[::1]:7000", DirectoryAddress("::1", 7000, "", "")),
        ("valkey+unix:/run/valkey.sock", DirectoryAddress("", 6379, "/run/valkey.sock", "")),
        ("valkey+unix://kvdir@/run/valkey.sock", DirectoryAddress("", 6379, "/run/valkey.sock", "kvdir")),
    ],
)
def test_addresses_are_read(text: str, want: DirectoryAddress) -> None:
    assert DirectoryAddress.read(text) == want


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1:7000", "redis://a:1", "valkey://", "valkey://a:b@c", "valkey://a:99999", "valkey://a/5",
     "valkey+unix:relative", "valkey+unix://host/path", "valkey://a?b=c", "valkey://[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(BadInput, match="give valkey://"):
        DirectoryAddress.read(text)


def test_who_waits_for_a_connection_in_vain_is_no_failure_of_the_directory(modern: ValkeyServer) -> None:
    """Else a tenant that floods its node with look-ups would have the directory called slow for all."""
    with member(url(modern), 1) as one, member(url(modern), 2) as two:
        two.has(*NAMES)
        wait_until(lambda: one.finds((two, 80)))
        wires = [one.directory._lookups.get(timeout=SECONDS) for _ in range(LOOKUP_CONNECTIONS)]
        for _ in range(2 * FAILURES_TO_OPEN):
            with pytest.raises(DirectoryDown, match="all connections are in use"):
                one.directory.holders(HEADS, 0.002)
        assert one.directory.figures().failures == 0 and not one.directory.reason
        for wire in wires:
            one.directory._lookups.put(wire)
        assert one.finds((two, 80))
