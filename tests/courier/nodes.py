"""Nodes of a pool, all real processes on loopback: each a sidecar and a network process of its own, started as people
start them, so that each can be killed, stopped and started again by itself."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import kvstore
from kv_bench.process import free_port
from kvstore.block.account import HitTier
from kvstore.block.identity import Prompt
from kvstore.client.connection import asked_stat
from kvstore.client.framing import FramedSocket
from kvstore.protocol import messages as m
from network.tokens import ENVIRONMENT, OPERATOR_TOKEN, token_of
from service.sidecar import patient
from tiering.clock import SystemClock
from waiting import wait_until
from workbench import MODEL, blank_pages, random_pages, same_tokens, small_layout

LAYOUT = small_layout()
BLOCK_TOKENS = 64
MOST_BLOCKS = 48
SOON = 60.0
HOST_CLOCK = Path(__file__).resolve().parent / "host_clock"


def prompt(number: int, blocks: int = 20) -> list[int]:
    """Token ids; each prompt begins otherwise."""
    return list(range(number * 1_000_000, number * 1_000_000 + blocks * BLOCK_TOKENS))


def pages_of(number: int) -> Any:
    """Its KV, of `MOST_BLOCKS` of it."""
    return random_pages(LAYOUT, MOST_BLOCKS, seed=number)


FLAGS = """
import json, sys
from pathlib import Path
from kvstore.cli.main import _network_flags
from kvstore.service.settings import read_configuration, read_settings
settings = read_settings(read_configuration(Path(sys.argv[1])))
print(json.dumps(["--observe-socket", settings.observe_socket, *_network_flags(settings)]))
"""


def of_tree(tree: Path | None, more: dict[str, str] | None = None) -> dict[str, Any]:
    """Where a command runs, and with which environment, so that it runs these sources; None: those under test. `python
    -m` looks in the folder that it runs in first."""
    given = {**ENVIRONMENT, **(more or {})}
    if tree is None:
        return {"env": given}
    paths = (tree, tree / "kernels", tree / "tests")
    return {"env": {**given, "PYTHONPATH": os.pathsep.join(map(str, paths))}, "cwd": tree}


class HostClock:
    """The wall clock of a node, which can be set. environment: of the node's processes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ahead_seconds = 0
        path.write_bytes(bytes(8))
        paths = os.pathsep.join([str(HOST_CLOCK), ENVIRONMENT["PYTHONPATH"]])
        self.environment = {"KV_TEST_CLOCK": str(path), "PYTHONPATH": paths}

    def set(self, ahead_seconds: int) -> None:
        """Relative to the clock of this machine; at once, also for processes that run."""
        self.ahead_seconds = ahead_seconds
        with self._path.open("r+b") as file:
            file.write(struct.pack("=q", ahead_seconds))


@dataclass
class Got:
    """What an engine got of a prompt. located: what it was told is elsewhere."""

    blocks: int
    tiers: dict[str, int]
    located: m.Located
    awaited: m.Awaited | None
    seconds: float
    is_right: bool


@dataclass
class Node:
    """One of them. python: that has its packages. tenants: besides the one at its door, each at a socket of its own.
    environment: of its processes, besides that of all. sidecar_tree, network_tree: the sources of another version that
    the process runs."""

    folder: Path
    keys: Path | None
    network_settings: dict[str, Any]
    remote_settings: dict[str, Any]
    nvme: str = "off"
    dram: str = "32MiB"
    port: int = field(default_factory=free_port)
    pull_port: int = field(default_factory=free_port)
    with_keeper: bool = False
    wrap: Sequence[str] = ()
    sidecar: subprocess.Popen[str] | None = None
    network: subprocess.Popen[str] | None = None
    host: str = "127.0.0.1"
    python: str = sys.executable
    tenants: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    sidecar_tree: Path | None = None
    network_tree: Path | None = None
    said: dict[str, Any] = field(default_factory=dict)
    """By process, what it printed when it was ready."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.socket = self.folder / "kv" / "kvstore.sock"
        self.tokens = self.folder / "tokens"
        tokens = [f"{name} {token_of(name)}" for name in ("default", *self.tenants)]
        self.tokens.write_text("\n".join([OPERATOR_TOKEN, *tokens]) + "\n")
        self.config = self.folder / "kvstore.toml"
        lines = [
            "[store]",
            f'data = "{self.folder / "kv"}"',
            f'dram = "{self.dram}"',
            f'nvme = "{self.nvme}"',
            f"keeper = {'true' if self.with_keeper else 'false'}",
            "[door]",
            "sweep_seconds = 0.1",
        ]
        if self.keys is not None:
            lines += ["[keys]", f'directory = "{self.keys}"']
        for name in self.tenants:
            lines += [f"[tenants.{name}]", f'socket = "{self.socket_of(name)}"']
        if self.network_settings:
            given = {"listen": self.address, "token_file": str(self.tokens), **self.network_settings}
            given.setdefault("pull", f"{self.host}:{self.pull_port}")
            lines += ["[network]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]
        if self.remote_settings:
            lines += ["[remote]", *(f"{key} = {json.dumps(value)}" for key, value in self.remote_settings.items())]
        self.config.write_text("\n".join(lines) + "\n")

    def socket_of(self, tenant: str) -> Path:
        return self.socket if tenant == "default" else self.folder / "kv" / f"{tenant}.sock"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        self.start_sidecar()
        if not self.with_keeper:
            self.start_network()

    def start_sidecar(self) -> None:
        self.sidecar = self._run("sidecar", self.sidecar_tree, "serve", "--json", "--config", str(self.config))

    def network_command(self) -> list[str]:
        """As the keeper makes it, which is of the version of the transfer agent."""
        if self.network_tree is None:
            return ["agent", "--json", "--config", str(self.config)]
        command = [self.python, "-c", FLAGS, str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, **of_tree(self.network_tree))
        assert done.returncode == 0, done.stderr
        return ["network", "--json", *json.loads(done.stdout)]

    def start_network(self) -> None:
        self.network = self._run("network", self.network_tree, *self.network_command())

    def _run(self, name: str, tree: Path | None, *arguments: str) -> subprocess.Popen[str]:
        where = of_tree(tree, self.environment)
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [*self.wrap, self.python, "-m", "kvstore", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                **where,
            )
        assert process.stdout is not None
        line = ""
        try:
            line = process.stdout.readline()
        finally:
            if not line:
                process.kill()
        assert line, (self.folder / f"{name}.log").read_text()[-3000:]
        self.said[name] = json.loads(line)
        return process

    def kill_network(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._kill(self.network, how)

    def kill_sidecar(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._kill(self.sidecar, how)

    def _kill(self, process: subprocess.Popen[str] | None, how: signal.Signals) -> None:
        assert process is not None
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)  # it may be stopped
        process.wait()

    def close(self) -> None:
        for one in (self.network, self.sidecar):
            if one is not None and one.poll() is None:
                with suppress(OSError):
                    one.send_signal(signal.SIGCONT)
                one.send_signal(signal.SIGTERM if self.with_keeper else signal.SIGKILL)
                one.communicate()

    # What an engine does ---------------------------------------------------------------------------------------------

    def open(self, tenant: str = "default") -> Any:
        return patient(kvstore.open(f"unix:{self.socket_of(tenant)}", engine="test"))

    def put(self, number: int, blocks: int = 20, tenant: str = "default") -> None:
        with self.open(tenant) as store:
            handle = store.namespace(model=MODEL, layout=LAYOUT)
            result = handle.put(prompt(number, blocks), pages_of(number))
            assert result.reason is None, result

    def stat(self) -> dict[str, Any]:
        """What the sidecar says of itself to observers."""
        wire = FramedSocket(str(self.folder / "kv" / "observe.sock"), "test", b"", SystemClock(), SOON)
        try:
            found: dict[str, Any] = msgspec.to_builtins(asked_stat(wire, SOON))
            return found
        finally:
            wire.close()

    def space(self) -> str:
        """The id of its namespace, once observers are told of it: they are told now and then."""
        wait_until(lambda: bool(self.stat()["namespaces"]))
        return str(self.stat()["namespaces"][0]["digest"])

    def get(self, number: int, blocks: int = 20, seconds: float = 10.0, locates: float = 10.0) -> Got:
        """As an engine gets a prompt: what is elsewhere is asked for until something is, then awaited, then leased and
        compared with what was put."""
        with Asker(self) as asker:
            return asker.get(number, blocks, seconds, locates)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`kvstore` for this node's operator."""
        command = [self.python, "-m", "kvstore", *arguments, "--data", str(self.folder / "kv")]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=SOON)
        assert done.returncode == 0, done.stderr
        return done

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


class Asker:
    """An engine of a node: one that speaks of elsewhere."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.store = node.open()
        self.handle = self.store.namespace(model=MODEL, layout=LAYOUT)
        self.wire = FramedSocket(str(node.socket), "test", os.urandom(16), SystemClock(), SOON)
        listed = self._ask(m.Namespaces(0), m.NamespacesReply).namespaces
        (mine,) = (one for one in listed if one.id == self.handle.namespace.digest().hex())
        grant = self._ask(m.OpenNamespace(mine.packed, mine.payload_bytes), m.Granted).grant
        self.number = grant.number

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()
        self.store.close()

    def _ask(self, verb: m.Verb, kind: Any, seconds: float = SOON) -> Any:
        answer = self.wire.call(verb, seconds).answer
        assert isinstance(answer, kind), answer
        return answer

    def hashed(self, number: int, blocks: int) -> Prompt:
        return self.handle.hashed(prompt(number, blocks))

    def locate(self, keys: list[bytes], ticket: str = "") -> m.Located:
        found: m.Located = self._ask(m.Locate(self.number, keys, ticket), m.Located)
        return found

    def awaits(self, keys: list[bytes], located: m.Located, seconds: float) -> m.Awaited:
        """Waits for all that was located."""
        last = keys[located.blocks - 1 : located.blocks]
        awaited: m.Awaited = self._ask(m.Await(self.number, last, seconds, located.number), m.Awaited, seconds + SOON)
        return awaited

    def ticket(self, keys: list[bytes]) -> str:
        """As an engine seals one before it stores these."""
        return str(self._ask(m.SealTicket(self.number, keys, 60.0), m.Sealed).ticket)

    def find(self, keys: list[bytes]) -> m.Located:
        """Looks again until something is elsewhere: a look-up of 5 ms may come to nothing on a busy machine."""

        def found() -> m.Located | None:
            located = self.locate(keys)
            return located if located.number else None

        return wait_until(found)

    def get(self, number: int, blocks: int, seconds: float, locates: float, ticket: str = "") -> Got:
        keys = self.hashed(number, blocks).keys
        deadline = time.monotonic() + locates
        while True:
            located = self.locate(keys, ticket)
            if located.number or located.blocks >= blocks or time.monotonic() > deadline:
                break
            time.sleep(0.05)  # as an engine's next request would come
        awaited, began_at = None, time.monotonic()
        if located.number:
            awaited = self.awaits(keys, located, seconds)
        took = time.monotonic() - began_at
        tokens = prompt(number, blocks)
        blank = blank_pages(LAYOUT, blocks)
        with self.handle.lease(self.handle.match(tokens), deadline_ms=5000) as lease:
            got = self.handle.get(lease, blank).tokens
            segments = lease.account.segments
        tiers = {str(one.origin): one.tokens // BLOCK_TOKENS for one in segments if isinstance(one.origin, HitTier)}
        is_right = same_tokens(pages_of(number), blank, range(got))
        return Got(got // BLOCK_TOKENS, tiers, located, awaited, took, is_right)


def make_keys(folder: Path, python: str = sys.executable, tenants: Sequence[str] = ()) -> Path:
    """Secrets that nodes share."""
    keys = folder / "keys"
    command = [python, "-m", "kvstore", "keys", "init", str(keys), "default", *tenants]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return keys


@contextmanager
def ending(*nodes: Node) -> Iterator[None]:
    """They end with it, and print their logs where something failed."""
    try:
        yield
    except BaseException:
        for one in nodes:
            print(f"--- {one.folder.name}\n{one.log()[-4000:]}")
        raise
    finally:
        for one in nodes:
            one.close()


@contextmanager
def pool(
    folder: Path,
    nodes: int,
    network: dict[str, Any] | None = None,
    remote: dict[str, Any] | None = None,
    static: bool = False,
    **options: Any,
) -> Iterator[list[Node]]:
    """network: settings of all. static: each is told of the others."""
    keys = make_keys(folder, options.get("python", sys.executable), options.get("tenants", ()))
    ports = [free_port() for _ in range(nodes)]
    made = []
    for at, port in enumerate(ports):
        given = dict(network or {})
        if static:
            given["peers"] = [f"127.0.0.1:{other}" for other in ports if other != port]
        made.append(Node(folder / f"n{at}", keys, given, dict(remote or {}), port=port, **options))
    with ending(*made):
        for one in made:
            one.start()
        yield made


def wait_for_peers(nodes: Sequence[Node], each_sees: int) -> None:
    """Until each knows so many others, and says so."""

    def is_so() -> bool:
        for one in nodes:
            elsewhere = one.stat().get("elsewhere") or {}
            peers = [source for source in elsewhere.get("sources", ()) if source["kind"] == "peer"]
            if len(peers) < each_sees:
                return False
        return True

    wait_until(is_so)
