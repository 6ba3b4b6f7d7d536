"""Three nodes in network namespaces, a directory and a remote tier in namespaces of their own, certificates, sealing,
clocks an hour apart, and random events. Nothing wrong is ever served, no wait is longer than its time, and in the end
all is as before."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")
pytest.importorskip("cryptography", reason="cryptography is not installed (extra: tls)")

from courier.namespaces import Rack, rack
from courier.nodes import Asker, HostClock, Node, make_keys, wait_for_peers
from kvstore.block.errors import StoreError
from kvstore.client.framing import TimedOut
from kvstore.pool.directory import NODE_SECONDS
from valkey_server import ValkeyServer, server_binary
from waiting import wait_until

CERTIFICATES = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "certificates.sh"
NODES, DIRECTORY, REMOTE = 3, 3, 4
BLOCKS, PROMPTS = 24, 12
WAIT_SECONDS = 0.8
APART = (0, 3600, -3600)
"""By how many seconds the nodes' wall clocks are ahead; a node's may be set to any of these while it runs."""
LATE_SECONDS = 0.1
"""That an await may be longer than its time, as the sidecar's own clock has it; and for a machine that is busy:"""
BUSY_SECONDS = 2.0
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")


@dataclass
class World:
    rack: Rack
    nodes: list[Node]
    valkeys: list[ValkeyServer]
    clocks: list[HostClock]
    stored: dict[int, int] = field(default_factory=dict)  # prompt > a node that stored it
    waits: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@contextmanager
def world(folder: Path) -> Iterator[World]:
    with rack(NODES + 2) as made, ExitStack() as stack:
        names = [f"n{at}={made.address(at)}" for at in range(NODES)]
        subprocess.run(["sh", str(CERTIFICATES), str(folder / "pki"), *names], check=True, capture_output=True)
        keys = make_keys(folder)
        valkeys = []
        for at in (DIRECTORY, REMOTE):
            (folder / f"v{at}").mkdir()
            where = ("--port", "6379", "--bind", made.address(at), "--protected-mode", "no")
            options = (*where, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
            valkeys.append(ValkeyServer(folder / f"v{at}", options, server_binary(), made.wrap(at)))
            stack.callback(valkeys[-1].kill)
        nodes, clocks = [], []
        for at in range(NODES):
            pki = folder / "pki"
            clocks.append(HostClock(folder / f"clock{at}"))
            clocks[at].set(APART[at])
            network = {
                "directory": f"valkey://{made.address(DIRECTORY)}:6379",
                "certificate": str(pki / f"n{at}" / "node.pem"),
                "key": str(pki / f"n{at}" / "node.key"),
                "client_ca": str(pki / "ca.pem"),
            }
            remote = {"url": f"valkey://{made.address(REMOTE)}:6379", "writes": "learned"}
            one = Node(
                folder / f"n{at}",
                keys,
                network,
                remote,
                host=made.address(at),
                wrap=made.wrap(at),
                dram="16MiB",
                environment=clocks[at].environment,
            )
            (one.folder / "kv").mkdir(mode=0o700)
            shutil.copy(pki / f"n{at}" / "node", one.folder / "kv" / "node")
            os.chmod(one.folder / "kv" / "node", 0o600)
            nodes.append(one)
            stack.callback(one.close)
        try:
            for one in nodes:
                one.start()
            wait_for_peers(nodes, NODES - 1)
            yield World(made, nodes, valkeys, clocks)
        except BaseException:
            for one in nodes:
                print(f"--- {one.folder.name}\n{one.log()[-3000:]}")
            raise


def happen(this: World, rng: random.Random) -> str:
    """One event; what it was."""
    node = rng.randrange(NODES)
    one, valkey = this.nodes[node], rng.choice(this.valkeys)
    events: list[tuple[str, Callable[[], object]]] = [
        ("network killed", lambda: (one.kill_network(), one.start_network())),
        ("network ended", lambda: (one.kill_network(signal.SIGTERM), one.start_network())),
        ("network stopped", lambda: _stopped(one.network, rng)),
        ("sidecar killed", lambda: (one.kill_sidecar(), one.start_sidecar())),
        ("sidecar ended", lambda: (one.kill_sidecar(signal.SIGTERM), one.start_sidecar())),
        ("sidecar stopped", lambda: _stopped(one.sidecar, rng)),
        ("valkey killed", lambda: (valkey.kill(), valkey.start())),
        ("valkey stopped", lambda: _stopped(valkey.process, rng)),
        ("valkey emptied", lambda: _emptied(valkey)),
        ("cut", lambda: this.rack.cut(rng.randrange(NODES + 2))),
        ("cut one way", lambda: this.rack.cut_one_way(node, rng.choice([x for x in range(NODES + 2) if x != node]))),
        ("throttled", lambda: this.rack.throttle(rng.randrange(NODES + 2))),
        ("clock set", lambda: this.clocks[node].set(rng.choice(APART))),
        ("healed", this.rack.heal),
        ("healed", this.rack.heal),
    ]
    name, do = rng.choice(events)
    do()
    return name


def _emptied(valkey: ValkeyServer) -> None:
    with suppress(OSError):  # it may be stopped
        valkey.empty()


_asleep: list[tuple[float, int]] = []


def _stopped(process: subprocess.Popen[str] | subprocess.Popen[bytes] | None, rng: random.Random) -> None:
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    _asleep.append((time.monotonic() + rng.uniform(0.2, 2.0), process.pid))


def wake(all_of_them: bool = False) -> None:
    """Those whose time has come."""
    for due, pid in list(_asleep):
        if all_of_them or time.monotonic() >= due:
            _asleep.remove((due, pid))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


def is_asleep(node: Node) -> bool:
    return node.sidecar is not None and any(pid == node.sidecar.pid for _, pid in _asleep)


def ask(this: World, rng: random.Random) -> None:
    """A request at a node: looked up here, elsewhere, awaited, leased, read; or stored."""
    wake()
    at, number = rng.randrange(NODES), rng.randrange(PROMPTS)
    node = this.nodes[at]
    if is_asleep(node):
        return
    try:
        if number not in this.stored or rng.random() < 0.2:
            node.put(number, BLOCKS)
            this.stored[number] = at
            this.counts["put"] += 1
            return
        ticket = ticket_of(this, number) if rng.random() < 0.25 else ""
        with Asker(node) as asker:
            got = asker.get(number, BLOCKS, WAIT_SECONDS, 0.3, ticket)
    except (StoreError, TimedOut, AssertionError, OSError) as error:
        if isinstance(error, AssertionError) and not is_asleep(node) and node.sidecar.poll() is None:
            raise
        this.counts["away"] += 1
        return
    assert got.is_right, f"wrong bytes of prompt {number} at node {at}: {got}"
    this.counts["hit" if got.blocks else "miss"] += 1
    for tier, blocks in got.tiers.items():
        this.counts[tier] += blocks
    if got.awaited is not None:
        this.waits.append(got.seconds - WAIT_SECONDS)
        assert got.seconds < WAIT_SECONDS + BUSY_SECONDS, got


def ticket_of(this: World, number: int) -> str:
    """As the node makes one that stored the prompt, by its own clock."""
    giver = this.nodes[this.stored[number]]
    if is_asleep(giver):
        return ""
    with Asker(giver) as asker:
        this.counts["ticket"] += 1
        return asker.ticket(asker.hashed(number, BLOCKS).keys)


def check_clocks(this: World) -> None:
    """The processes go by the clocks that their nodes have."""
    for node, clock in zip(this.nodes, this.clocks, strict=True):
        wait_until(lambda: abs(node.stat()["at"] - time.time() - clock.ahead_seconds) < 600)  # noqa: B023


def run(folder: Path, events: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    with world(folder) as this:
        check_clocks(this)
        for number in range(PROMPTS // 2):
            this.nodes[number % NODES].put(number, BLOCKS)
            this.stored[number] = number % NODES
        what = Counter[str]()
        for _ in range(events):
            what[happen(this, rng)] += 1
            for _ in range(rng.randrange(1, 4)):
                ask(this, rng)
        wake(all_of_them=True)
        this.rack.heal()
        for clock, ahead in zip(this.clocks, rng.sample(APART, NODES), strict=True):
            clock.set(ahead)
        healed_at = time.monotonic()
        for number in range(PROMPTS):
            this.nodes[0].put(number, BLOCKS)
        wait_for_peers(this.nodes, NODES - 1)
        missing = [(node, number) for node in this.nodes[1:] for number in range(PROMPTS)]

        def all_are_served() -> bool:
            missing[:] = [(node, n) for node, n in missing if not _is_served(node, n)]
            return not missing

        wait_until(all_are_served)
        took = time.monotonic() - healed_at
        late = sum(wait > LATE_SECONDS for wait in this.waits)
        print(f"events {dict(what)}; {dict(this.counts)}; {len(this.waits)} awaits, {late} late by more than 100 ms,"
              f" at most {max(this.waits, default=0.0):.3f}; served again after {took:.1f} s")  # fmt: skip
        assert took < NODE_SECONDS + 5 + BUSY_SECONDS * PROMPTS, "hit rates come back"
        check_clocks(this)
        for one in this.nodes:
            wait_until(lambda: one.stat()["elsewhere"]["kept_bytes"] == 0 and not one.stat()["elsewhere"]["fetching"])  # noqa: B023


def _is_served(node: Node, number: int) -> bool:
    with Asker(node) as asker:
        got = asker.get(number, BLOCKS, 5.0, locates=0.0)
    assert got.is_right
    return got.blocks == BLOCKS


@pytest.mark.timeout(600)
def test_fifteen_events(tmp_path: Path) -> None:
    run(tmp_path, 15, random.SystemRandom().randrange(1 << 30))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(6))
def test_three_hundred_events(tmp_path: Path, part: int) -> None:
    run(tmp_path, 50, random.SystemRandom().randrange(1 << 30))
