"""A real vLLM prefills on one node and another one decodes on another node: two sidecars with keys that they share,
with a network process each, all as people start them. The tokens are those of one engine, what the first node stored
counts as `peer`, and whatever of the first node ends costs time and nothing else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest

from courier.nodes import Node, pool, wait_for_peers
from engines.conftest import sidecar_python
from engines.two_roles import BLOCK, DECODE, LONGEST_SECONDS, PREFILL, Engines, drawn, full
from kvstore.block.identity import Identity, Namespace, PrefixHasher, token_bytes
from kvstore.client.framing import FramedSocket
from kvstore.protocol import messages as m
from kvstore.protocol.hand_off_ticket import sealed
from tiering.clock import SystemClock
from valkey_server import valkey_server
from waiting import wait_until

SOON = 60.0
AWAY = {"unreachable", "stale_hint", "deadline", "absent"}
"""Why blocks did not come of a node that is gone, or has no more."""
WAYS = ["peers", "directory"]


def without_network_packages() -> str:
    """Why the sidecars' Python cannot be a node of a pool; nothing where it can."""
    command = [sidecar_python(), "-c", "import grpc, grpc_health"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2]


WHY_NOT = without_network_packages()
pytestmark = [
    pytest.mark.slow,  # two engines and two nodes, each with two processes
    pytest.mark.skipif(bool(WHY_NOT), reason=f"a node needs the extra server: {WHY_NOT}"),
]


class TwoNodes:
    """An engine on each; who knows of whom by a list, or by a directory."""

    def __init__(self, nodes: list[Node], engines: Engines, directory: str) -> None:
        self.nodes, self.engines = nodes, engines
        self._networks = {
            "peers": [one.network_settings for one in nodes],
            "directory": [{"directory": directory} for _ in nodes],
        }
        self._way = "peers"

    @property
    def first(self) -> Node:
        return self.nodes[0]

    @property
    def second(self) -> Node:
        return self.nodes[1]

    def know_by(self, way: str) -> None:
        """With network processes that are started anew, if it is another way; the engines notice nothing."""
        if way != self._way:
            self._way = way
            for at, settings in enumerate(self._networks[way]):
                self.nodes[at].kill_network()
                self.nodes[at] = replace(self.nodes[at], network_settings=settings)
                self.nodes[at].start_network()
        wait_for_peers(self.nodes, 1)

    def start_engines(self) -> None:
        """Both at once, if they do not run."""
        first = threading.Thread(target=lambda: self.engines.prefill([[1, 2, 3]]))
        first.start()
        self.engines.decode([[1, 2, 3]], [{}])
        first.join(SOON)

    def decoding(self, ids: list[int], ticket: str) -> AbstractContextManager[dict[str, Any]]:
        return self.engines.decoding(ids, {"ticket": ticket}, lambda: self.second.stat()["awaits"]["parked"])

    def hits_of(self, account: dict[str, Any]) -> dict[str, int]:
        """How many tokens came from where. Nothing is left of it."""
        wait_until(lambda: all(map(all_is_let_go, self.nodes)))
        hits: dict[str, int] = account["hits"]
        return hits


def all_is_let_go(node: Node) -> bool:
    """No pin, no slot, no waiter, no fetch."""
    told = node.stat()
    elsewhere = told["elsewhere"]
    left = told["leases"], told["reservations"], told["pinned_bytes"], told["awaits"]["parked"]
    return not any((*left, elsewhere["kept_bytes"], elsewhere["fetching"] if elsewhere["couriers"] else 0))


@pytest.fixture(scope="module")
def kept(saved: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    python = sidecar_python()
    with (
        valkey_server(tmp_path_factory.mktemp("valkey"), python=python) as server,
        pool(tmp_path_factory.mktemp("pool"), 2, static=True, dram="512MiB", python=python) as nodes,
    ):
        urls = {role: f"unix:{one.socket}" for role, one in zip((PREFILL, DECODE), nodes, strict=True)}
        engines = Engines(saved(), urls, tmp_path_factory.mktemp("engines"), lease_deadline_ms=5000)
        made = TwoNodes(nodes, engines, f"valkey+unix:{server.socket_path}")
        yield made
        engines.end()


@pytest.fixture
def two(kept: TwoNodes) -> Iterator[TwoNodes]:
    kept.start_engines()
    yield kept
    for one in kept.nodes:
        if one.network is None or one.network.poll() is not None:
            one.start_network()


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, kept: TwoNodes) -> str:
    """How nodes know of each other: first this, then that, and thus it stays."""
    kept.know_by(request.param)
    return str(request.param)


class Asker:
    """A client of a node that has the engines' namespace."""

    def __init__(self, node: Node) -> None:
        self.wire = FramedSocket(str(node.socket), "test", os.urandom(16), SystemClock(), SOON)
        (listed,) = self.ask(m.Namespaces(0), m.NamespacesReply).namespaces
        self.grant = self.ask(m.OpenNamespace(listed.packed, listed.payload_bytes), m.Granted).grant
        self.space = Namespace.unpack(listed.packed)

    def ask(self, verb: m.Verb, kind: Any) -> Any:
        answer = self.wire.call(verb, SOON).answer
        assert isinstance(answer, kind), answer
        return answer

    def keys(self, ids: list[int]) -> list[bytes]:
        return PrefixHasher(self.grant.identity_key, BLOCK).keys(token_bytes(ids))


def ticket_of(node: Node, ids: list[int]) -> str:
    """As its engine is told one, before anything of the prompt is stored."""
    asker = Asker(node)
    try:
        made: m.Sealed = asker.ask(m.SealTicket(asker.grant.number, asker.keys(ids), 300.0), m.Sealed)
        return made.ticket
    finally:
        asker.wire.close()


def test_what_one_node_prefills_another_one_decodes(two: TwoNodes, way: str) -> None:
    prompts = drawn(3, shortest=300, longest=1500, salt=WAYS.index(way))
    prefilled = two.engines.prefill(prompts)
    hints = [{"kvstore": one["kvstore"], "remote_host": "10.0.0.7"} for one in prefilled]
    for account in two.engines.decode(prompts, hints):
        assert two.hits_of(account) == {"peer": full(account["asked"])}, account


def test_it_is_decoded_while_the_other_node_still_stores(two: TwoNodes, way: str) -> None:
    (ids,) = drawn(1, shortest=1800, salt=10 + WAYS.index(way))
    with two.decoding(ids, ticket_of(two.first, ids)) as account:
        two.engines.prefill([ids])
    assert two.hits_of(account) == {"peer": full(len(ids))}, account


def test_no_door_that_a_ticket_names_is_dialled(two: TwoNodes) -> None:
    """A node of the pool is where the pool says that it is; one that is not of it is asked nothing."""
    prompts = drawn(2, shortest=600, longest=900, salt=20)
    two.engines.prefill(prompts[1:])
    first, asker = two.first.stat(), Asker(two.second)
    owners = (os.urandom(16), os.urandom(8)), (bytes.fromhex(first["node"]), bytes.fromhex(first["incarnation"]))
    with socket.create_server(("127.0.0.1", 0)) as door:
        address, tickets = f"127.0.0.1:{door.getsockname()[1]}", []
        for ids, owner in zip(prompts, owners, strict=True):
            identity = Identity(asker.wire.welcome.fingerprint, asker.grant.identity_key, *owner)
            request = m.SealTicket(0, asker.keys(ids), 300.0)
            tickets.append(sealed(request, identity, asker.space.digest(), BLOCK, time.time(), address).ticket)
        asker.wire.close()
        unknown, known = two.engines.decode(prompts, [{"kvstore": {"ticket": one}} for one in tickets])
        door.setblocking(False)
        with pytest.raises(BlockingIOError):
            door.accept()
    assert two.hits_of(unknown) == {} and unknown["misses"]["stale_hint"], unknown
    assert two.hits_of(known) == {"peer": full(len(prompts[1]))}, known


def test_a_network_process_that_is_killed_costs_time_and_nothing_else(two: TwoNodes) -> None:
    (ids,) = drawn(1, shortest=1800, salt=30)
    (prefilled,) = two.engines.prefill([ids])
    two.first.kill_network()
    (account,) = two.engines.decode([ids], [{"kvstore": prefilled["kvstore"]}])
    assert two.hits_of(account) == {} and AWAY & account["misses"].keys(), account


@pytest.mark.parametrize("what", ["before", "between", "after", "prefill's network", "decode's network"])
def test_whatever_is_killed_the_tokens_are_right(two: TwoNodes, what: str) -> None:
    """The engine that prefills: before it stored anything, when it stored some, when it told its ticket. A network
    process while blocks come."""
    wait_for_peers(two.nodes, 1)
    (ids,) = drawn(1, shortest=1990, salt=40 + len(what))
    ticket, came = ticket_of(two.first, ids), adopted(two.second)
    if what == "after":
        two.engines.prefill([ids])
        two.engines.end(PREFILL)
        (account,) = two.engines.decode([ids], [{"kvstore": {"ticket": ticket}}])
    else:
        with two.decoding(ids, ticket) as account:
            if what == "before":
                two.engines.end(PREFILL)
            else:
                prefilling = two.engines.prefill_fails(ids)
                wait_until(lambda: adopted(two.second) > came or not prefilling.is_alive())
                if what == "between":
                    two.engines.end(PREFILL)
                else:
                    (two.first if what == "prefill's network" else two.second).kill_network()
                prefilling.join(LONGEST_SECONDS)
    hits = two.hits_of(account)
    print(what, hits, account)
    if what == "before":
        assert hits == {} and AWAY & account["misses"].keys(), account
    else:
        assert 0 < hits.get("peer", 0) <= full(len(ids)), account


def adopted(node: Node) -> int:
    """Blocks that came from other nodes."""
    return int(node.stat()["elsewhere"]["adopted"].get("peer", 0))
