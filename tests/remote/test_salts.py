"""A drop makes every frame of a namespace unreachable at once, by replacing its salt."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from remote.frames import STAMP, halves, prefix_key
from remote.test_valkey import CLOCK, PATIENT
from tiering.remote.driver import RemoteFault, remote_key, salt_key
from tiering.remote.salts import SALT_SECONDS, WARM_SECONDS, NamespaceSalts
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine
from valkey_server import ValkeyServer, server_of_module

TENANT, NAMESPACE, OTHER = b"tenant-16-bytes-", b"n" * 32, b"o" * 32


class Later:
    """The machine's clock, with a part of it that a test moves."""

    def __init__(self) -> None:
        self.ahead = 0.0

    wall_seconds, thread_seconds, sleep = CLOCK.wall_seconds, CLOCK.thread_seconds, CLOCK.sleep

    def monotonic_seconds(self) -> float:
        return CLOCK.monotonic_seconds() + self.ahead


server = server_of_module


@pytest.fixture
def engine(server: ValkeyServer) -> Iterator[ValkeyEngine]:
    server.empty()
    one = ValkeyEngine(ValkeyAddress("127.0.0.1", server.port), CLOCK, **PATIENT)
    yield one
    one.close()


class Node:
    def __init__(self, engine: Any) -> None:
        self.clock = Later()
        self.salts = NamespaceSalts(engine, self.clock, os.urandom)
        self._engine = engine

    def name(self, namespace: bytes = NAMESPACE, tenant: bytes = TENANT) -> bytes:
        return remote_key(self.salts.of(tenant, namespace), STAMP.pack(), prefix_key(1), 0)

    def put(self, namespace: bytes = NAMESPACE) -> None:
        self._engine.write(self.name(namespace), *halves(1), 0)

    def has(self, namespace: bytes = NAMESPACE) -> bool:
        return self._engine.exists([self.name(namespace)]) == [True]


def test_nodes_agree(engine: ValkeyEngine) -> None:
    nodes = [Node(engine) for _ in range(3)]
    assert len({node.name() for node in nodes}) == 1
    assert len({nodes[0].name(), nodes[0].name(OTHER), nodes[0].name(tenant=b"another-tenant--")}) == 3


def test_a_drop_is_seen_at_once_here_and_soon_elsewhere(engine: ValkeyEngine) -> None:
    here, there = Node(engine), Node(engine)
    here.put()
    here.put(OTHER)
    assert there.has() and there.has(OTHER)
    here.salts.replace(TENANT, NAMESPACE)
    assert not here.has() and here.has(OTHER), "the other namespace stays"
    there.clock.ahead += SALT_SECONDS
    assert not there.has() and there.has(OTHER)
    assert here.name() == there.name(), "what is stored from now on is found everywhere"


def test_a_purge_takes_all_namespaces(engine: ValkeyEngine) -> None:
    here, there = Node(engine), Node(engine)
    here.put()
    here.put(OTHER)
    there.salts.replace(TENANT)
    here.clock.ahead += SALT_SECONDS
    assert not any(node.has(which) for node in (here, there) for which in (NAMESPACE, OTHER))


def test_a_lost_salt_is_another_one(engine: ValkeyEngine, server: ValkeyServer) -> None:
    here = Node(engine)
    before = here.name()
    server.empty()
    here.clock.ahead += SALT_SECONDS
    assert here.name() != before


def test_salts_in_use_are_read_again_before_they_have_aged(engine: ValkeyEngine) -> None:
    here = Node(engine)
    name = here.name()
    here.clock.ahead += SALT_SECONDS / 2
    here.salts.warm()
    engine.close()
    here.clock.ahead += 0.8 * SALT_SECONDS
    assert here.name() == name, "the server was not asked"
    here.clock.ahead += SALT_SECONDS
    with pytest.raises(RemoteFault):
        here.name()
    here.clock.ahead += WARM_SECONDS
    assert not here.salts.are_used


def test_a_salt_is_not_asked_for_each_time(engine: ValkeyEngine, server: ValkeyServer) -> None:
    here = Node(engine)
    here.name()
    before = calls(server)
    for _ in range(100):
        here.name()
    assert calls(server) - before < 10


def test_a_drop_that_cannot_be_told_is_a_fault(server: ValkeyServer) -> None:
    gone = ValkeyEngine(ValkeyAddress(path=server.socket_path + ".none"), CLOCK)
    with pytest.raises(RemoteFault, match="No such file"):
        NamespaceSalts(gone, CLOCK, os.urandom).replace(TENANT, NAMESPACE)


def calls(server: ValkeyServer) -> int:
    told = server.say(b"INFO", b"stats").decode()
    return int(told.partition("total_commands_processed:")[2].split()[0])


def test_what_lies_where_a_salt_should_and_is_none_makes_room(engine: ValkeyEngine, server: ValkeyServer) -> None:
    key = salt_key(TENANT)
    server.say(b"RPUSH", key, b"x")
    node = Node(engine)
    node.put()
    assert node.has()


class Held:
    """An engine whose answer to one thread, of the namespace's salt, arrives when the test lets it."""

    def __init__(self, engine: ValkeyEngine) -> None:
        self._engine = engine
        self.asked, self.arrives = threading.Event(), threading.Event()

    def read(self, key: bytes, into: memoryview, deadline: float) -> bool:
        found = self._engine.read(key, into, deadline)
        if key == salt_key(TENANT, NAMESPACE) and threading.current_thread() is not threading.main_thread():
            self.asked.set()
            assert self.arrives.wait(20)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_a_salt_that_is_read_while_a_drop_replaces_it_is_not_kept(engine: ValkeyEngine) -> None:
    held = Held(engine)
    here, there = Node(held), Node(engine)
    here.put()
    here.clock.ahead += SALT_SECONDS
    with ThreadPoolExecutor(1) as reader:
        name = reader.submit(here.name)
        assert held.asked.wait(20)
        here.salts.replace(TENANT, NAMESPACE)
        held.arrives.set()
        assert name.result(20)
    assert not here.has(), "what was dropped is found"
    assert here.name() == there.name()
