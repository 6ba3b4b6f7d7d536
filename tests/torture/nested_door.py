"""Fuzzing within, through sockets: packed namespaces to a real sidecar, and answers to a real client.

door       requests whose nested structures are changed (`torture.nested`), on a tenant's socket of a real sidecar;
           another tenant pings meanwhile, and the operator asks what there is
clients    a sidecar that answers what it should not: valid answers, changed within; a client has misses, no more
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.block.errors import StoreError
from kvstore.client import handle as put_limits
from kvstore.client.sidecar_store import SidecarStore
from kvstore.client.socket_door import CallLimits
from kvstore.protocol import messages as m
from kvstore.protocol.messages import Grant, LeaseReply, MatchReply, ReserveReply
from tiering.dram.extents import Extent
from tiering.frame import Stamp
from tiering.tier import place_of
from torture import Report, quiet
from torture.doorstep import OTHER_TENANT, PATHS, Household, Sidecar
from torture.mutate import mutated
from torture.mutations import VALID, Booty
from torture.nested import MOST_GROWN_BYTES, NAMESPACES, packed_bytes, some_payloads
from torture.peer import come_in, packed_namespace
from workbench import blank_pages, ids, random_pages, small_layout

BATCH = 2000
IN_ONE_CONNECTION = 200


# To a sidecar ---------------------------------------------------------------------------------------------------------


def door(count: int, seed: int, report: Report = quiet, most_ms: float = float("inf")) -> dict[str, float]:
    """That many requests. most_ms: that a ping of the other tenant may take."""
    random, counts = Random(seed), Counter[str]()
    with Sidecar() as sidecar:
        household = Household(sidecar.sockets[OTHER_TENANT], "household")
        command = [sys.executable, "-m", "torture.pinger", sidecar.sockets[OTHER_TENANT]]
        pinger = subprocess.Popen(
            command, env={**os.environ, **PATHS}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert pinger.stdout is not None and pinger.stdout.read(1) == "\n", "the other tenant is not let in"
            while sum(counts.values()) < count:
                done = sum(counts.values())
                until = min(count, done + BATCH)
                try:
                    while sum(counts.values()) < until:
                        _ask_oddly(sidecar, random, min(IN_ONE_CONNECTION, until - sum(counts.values())), counts)
                    household.turn()
                    sidecar.check()
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, requests {done} to {sum(counts.values())}: {error}") from error
                grown = sidecar.resident_bytes() - sidecar.rest_bytes
                assert grown <= MOST_GROWN_BYTES, f"seed {seed}: the sidecar grew by {grown >> 20} MiB"
                report(sum(counts.values()))
            assert pinger.poll() is None, f"the other tenant's client ended, with status {pinger.returncode}"
            told: dict[str, float] = json.loads(pinger.communicate("\n")[0])
            assert told["ping_ms_max"] <= most_ms, f"another tenant waited for {told['ping_ms_max']:.1f} ms: {told}"
        finally:
            pinger.kill()
            pinger.communicate()
            household.close()
        return {**counts, "grown_mib": max(0, grown) >> 20, **{name: round(one, 2) for name, one in told.items()}}


def _ask_oddly(sidecar: Sidecar, random: Random, most: int, counts: Counter[str]) -> None:
    """On one connection, until it is ended or has had enough."""
    peer = come_in(sidecar.sockets["default"])
    try:
        granted = peer.ask(m.OpenNamespace(packed_namespace(), [8192]))
        booty = Booty(granted.grant.number if isinstance(granted, m.Granted) else 0, 1, 1, 1, [bytes(32)] * 3)
        for number in range(2, 2 + most):
            peer.socket.sendall(_odd_request(random, booty, number))
            try:
                reply = peer.reply()
            except TimeoutError:
                raise AssertionError("no answer") from None
            if reply is None:
                counts["ended"] += 1
                return
            answer = reply.answer
            if isinstance(answer, m.Failed) and answer.fault is m.RequestFault.MALFORMED:
                counts["malformed"] += 1
                assert peer.reply() is None
                return
            assert reply.number == number, f"an answer to {reply.number}, not to {number}"
            if isinstance(answer, m.Failed):
                assert "log" not in answer.text, f"a fault of the sidecar: {answer}"
                counts["refused"] += 1
            else:
                counts["answered"] += 1
    except (BrokenPipeError, ConnectionResetError):
        counts["ended"] += 1
    finally:
        peer.close()


def _odd_request(random: Random, booty: Booty, number: int) -> bytes:
    if random.random() < 0.75:
        raw = packed_bytes(random)
        sizes = some_payloads(random, random.choice((1, 1, 2, 16, 512)))
        body = msgspec.msgpack.encode([number, ["namespace", raw, sizes]])
    else:
        kind = random.choice([one for one in VALID if one not in ("hello", "purge", "persist", "drop")])
        verb = msgspec.to_builtins(VALID[kind](random, booty), builtin_types=(bytes,))
        body = msgspec.msgpack.encode([number, mutated(random, verb, wire=True)])
    return len(body).to_bytes(m.LENGTH_BYTES, "little") + body


# To a client ----------------------------------------------------------------------------------------------------------

LAYOUT = small_layout()
EXTENT_BYTES, FRAME_BYTES = 64 << 10, 4096 + 8192


class OddSidecar:
    """Answers every request, and changes most of its answers within. A context."""

    def __init__(self, path: Path, seed: int) -> None:
        self._random = Random(seed)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._extent = Extent(EXTENT_BYTES)
        self._threads: list[threading.Thread] = []
        self._peers: list[socket.socket] = []
        self.is_odd = True
        self.answers = 0
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._peers.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        read = bytearray()
        with suppress(OSError, ValueError), sock:
            while True:
                piece = sock.recv(1 << 18)
                if not piece:
                    return
                read += piece
                while len(read) >= 4 and len(read) >= 4 + int.from_bytes(read[:4], "little"):
                    length = 4 + int.from_bytes(read[:4], "little")
                    request = m.unpack_request(bytes(read[4:length]))
                    del read[:length]
                    self._answer(sock, request)

    def _answer(self, sock: socket.socket, request: m.Request) -> None:
        answer, descriptors = self._right(request.verb)
        reply = msgspec.to_builtins(m.Reply(request.number, answer), builtin_types=(bytes,))
        self.answers += 1
        if self.is_odd and not isinstance(request.verb, m.Hello) and self._random.random() < 0.6:
            reply = [request.number, mutated(self._random, reply[1], wire=True), *reply[2:]]
            if self._random.random() < 0.1:
                reply = mutated(self._random, reply, wire=True)
        body = msgspec.msgpack.encode(reply)
        frame = len(body).to_bytes(4, "little") + body
        try:
            if descriptors:
                socket.send_fds(sock, [frame], descriptors)
            else:
                sock.sendall(frame)
        finally:
            for one in descriptors:
                os.close(one)

    def _right(self, verb: m.Verb) -> tuple[m.Answer, list[int]]:
        """An answer as it should be."""
        match verb:
            case m.Hello():
                return m.Welcome(1, b"r" * 16, verb.session or bytes(16)), []
            case m.OpenNamespace():
                stamp = Stamp(bytes(8), 1, bytes(16), bytes(32), "raw", 0, 1, 64, 2, 8192).pack()
                return m.Granted(Grant(0, b"i" * 32, (stamp,), (8192,), True)), []
            case m.MatchPrefix():
                return m.Matched(MatchReply(len(verb.keys), ((HitTier.DRAM, len(verb.keys)),))), []
            case m.LeasePrefix():
                count = len(verb.keys)
                places = [place_of(3, slot % 5) for slot in range(count - verb.first_block)]
                reply = LeaseReply(
                    9, verb.first_block, count, (places,), ([bytes(16)] * len(places),), [1] * len(places),
                    ((HitTier.DRAM, count),),
                )  # fmt: skip
                return m.Leased(reply), []
            case m.Reserve():
                blocks = list(range(verb.first_block, len(verb.keys)))
                return m.Reserved(ReserveReply(4, 0, blocks, ([place_of(3, at % 5) for at in blocks],))), []
            case m.Commit():
                return m.Counted(len(verb.digests)), []
            case m.Persist():
                return m.Persisted(len(verb.keys), None), []
            case m.Extents():
                one = m.ExtentEntry(3, EXTENT_BYTES, FRAME_BYTES)
                return m.ExtentsReply([one]), [self._extent.share(1, writable=verb.writable)]
            case m.Drop():
                return m.Counted(2), []
            case m.Attach():
                return m.Attached(verb.leases), []
            case _:
                return m.Done(), []

    def __enter__(self) -> OddSidecar:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._peers:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._accepting.join(10)
        self._extent.close()


def clients(count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many verbs of a client whose sidecar answers what it should not; only what is declared may be raised."""
    random, counts = Random(seed), Counter[str]()
    prompt = ids(3 * 64)
    pages, blank = random_pages(LAYOUT, 3), blank_pages(LAYOUT, 3)
    # A sidecar that never answers a durable put is waited for: half a second here, as for the other verbs.
    with tempfile.TemporaryDirectory(prefix="kv-odd-") as directory, patch.object(put_limits, "DURABLE_SECONDS", 0.5):
        path = Path(directory) / "odd.sock"
        with OddSidecar(path, seed) as sidecar:
            store = kvstore.open(f"unix:{path}", engine="test")
            assert isinstance(store, SidecarStore)
            store._door._limits = CallLimits(match=0.5, lease=0.5, fill=0.5, first_pause=0.0001, longest_pause=0.001)
            sidecar.is_odd = False
            handle = store.namespace(model=NAMESPACES[0].model, layout=LAYOUT)
            sidecar.is_odd = True

            def read() -> Any:
                match = handle.match(prompt)
                with handle.lease(match, deadline_ms=5) as lease:
                    loaded = handle.get(lease, blank)
                assert loaded.account.asked >= 0 and loaded.tokens == 0, "bytes that nobody vouches for were loaded"
                return match.reason or loaded.reason

            verbs: dict[str, Callable[[], Any]] = {
                "read": read,
                "put": lambda: handle.put(prompt, pages).reason,
                "durable": lambda: handle.put(prompt, pages, durability="disk").reason,
                "drop": lambda: store.drop(handle),
                "open": lambda: store.namespace(model="m", layout=LAYOUT),
            }
            names = ("read", "read", "read", "put", "put", "durable", "drop", "open")
            for number in range(count):
                name = random.choice(names)
                try:
                    came = verbs[name]()
                    counts[f"{name} {'missed' if isinstance(came, MissReason) else 'answered'}"] += 1
                except StoreError as error:
                    assert str(error) and name in ("drop", "open"), f"{name} raised {error!r}"
                    counts[f"{name} refused"] += 1
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    raise AssertionError(f"seed {seed}, verb {number}, {name}: {what}") from error
                if number % 100 == 99:
                    report(number + 1)
            store.close()
    return dict(sorted(counts.items()))
