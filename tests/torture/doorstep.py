"""A real sidecar with two tenants, watched from outside, and who comes to its door.

The keeper is the child of this process, the sidecar is the keeper's: a crash shows as another process id, and what the
sidecar could not serve shows in its log. `Household` is what a well-behaved engine does, byte by byte.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from msgspec import structs

import kvstore
from kvstore.block.errors import Unreachable
from kvstore.client.framing import FramedSocket
from kvstore.client.handle import Lease
from kvstore.client.sidecar_store import SidecarStore
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from kvstore.service.connections import DoorLimits
from programs import PATHS as PATHS
from service.sidecar import patient
from torture import outside
from torture.peer import LONG_SECONDS
from workbench import blank_pages, ids, random_pages, same_tokens, small_layout

SIZES = {"dram": "32MiB", "nvme": "64MiB", "extent": "1MiB"}
SLACK_BYTES = 64 << 20
"""What a sidecar's process may grow by beside what its limits name: threads' stacks, arenas, rows of its index."""
OTHER_TENANT = "other"


class Sidecar(outside.Sidecar):
    """`kvstore serve` with a keeper and two tenants. A context: it is ended in order, or killed where something
    failed."""

    def __init__(self, door: Mapping[str, float] | None = None) -> None:
        """door: settings of that section."""
        self.limits = DoorLimits(**(door or {}))  # type: ignore[arg-type]
        self._scratch = tempfile.TemporaryDirectory(prefix="kv-door-")
        scratch, other = Path(self._scratch.name), f"{self._scratch.name}/b.sock"
        tenants = {f"tenants.{OTHER_TENANT}": {"socket": other}}
        super().__init__(scratch, SIZES, 86400, door=structs.asdict(self.limits), **tenants)
        self.sockets = {"default": self.socket, OTHER_TENANT: other}

    def check(self) -> None:
        """That it is the process that was started, and that it met nothing that it was not made for."""
        assert self.process.poll() is None, f"the keeper ended with status {self.process.returncode}"
        assert self.starts == 1, "it was started again"
        facts = self.facts()
        assert (facts.pid, facts.run) == (self.pid, self.run), f"process {facts.pid} serves instead of {self.pid}"
        for line in self.log_file.read_text().splitlines():
            assert json.loads(line)["level"] == "info", f"the sidecar's log says {line}"

    def resident_bytes(self) -> int:
        """Of the sidecar's process, without the memory of blocks, which has a budget of its own."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Rss")}
        return (int(sizes["RssAnon"]) + int(sizes["RssFile"])) << 10

    def waited_for_core(self) -> float:
        """Seconds that all threads of the sidecar's process together were ready to run and had no core."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sum(int((tasks / one / "schedstat").read_text().split()[1]) for one in os.listdir(tasks)) / 1e9

    def descriptors(self) -> int:
        """How many the sidecar's process has open, without those of extents and slabs."""
        count = 0
        for one in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                count += os.readlink(f"/proc/{self.pid}/fd/{one}").startswith(("socket:", "pipe:", "anon_inode:"))
            except FileNotFoundError:  # closed meanwhile
                pass
        return count

    def most_bytes(self, connections: int) -> int:
        """What its limits allow so many connections to make it keep, and what it had before."""
        limits = self.limits
        each = limits.unread_bytes + limits.in_flight_bytes + 3 * m.MAX_BODY_BYTES
        return self.rest_bytes + SLACK_BYTES + min(connections, limits.connections) * each

    def await_rest(self, seconds: float = LONG_SECONDS, connections: int = 0) -> None:
        """Until nothing is left of anybody: no connection but these, no descriptor, nothing departed."""
        deadline = time.monotonic() + seconds
        while True:
            facts, descriptors = self.facts(), self.descriptors()
            most = self.rest_descriptors + connections + DESCRIPTORS_BESIDE
            if facts.door.connections <= connections and descriptors <= most and not facts.departed:
                return
            assert time.monotonic() < deadline, (
                f"not at rest after {seconds:.0f} s: {facts.door.connections} connections, {descriptors} descriptors "
                f"(at rest {self.rest_descriptors}), {facts.departed} departed"
            )
            time.sleep(0.02)

    def __enter__(self) -> Self:
        super().__enter__()
        self.run = self.facts().run
        self.rest_bytes = self.resident_bytes()
        self.rest_descriptors = self.descriptors()
        return self

    def __exit__(self, kind: type[BaseException] | None, *given: Any) -> None:
        try:
            if kind is None:
                self.check()
                status = self.end()
                assert status == 0, f"it ended with status {status}: {self.log()}"
        finally:
            super().__exit__(kind, *given)
            self._scratch.cleanup()


DESCRIPTORS_BESIDE = 8
"""Connections that end just now, and what the sidecar opens for a moment."""


class Household:
    """A well-behaved engine: what it stores it gets, bit by bit; what it holds stays as it is."""

    BLOCKS = 4

    def __init__(self, path: str, model: str, session: str = "") -> None:
        """model: names its namespace. Raises `Unreachable`."""
        self.model = model
        store = kvstore.open(f"unix:{path}", engine=f"household {model}", **({"session": session} if session else {}))
        assert isinstance(store, SidecarStore)
        self.store = patient(store)
        self.handle = store.namespace(model=model, layout=small_layout())
        self._turn = 0
        self._held: tuple[Lease, Any] | None = None

    def turn(self) -> None:
        """Put, match, lease, get: all of it, and the right bytes."""
        self._turn += 1
        blocks, tokens = self.BLOCKS, self.BLOCKS * 64
        prompt, pages = ids(tokens, self._turn), random_pages(self.handle.layout, blocks, seed=self._turn)
        deadline = time.monotonic() + LONG_SECONDS
        while True:
            put = self.handle.put(prompt, pages)
            match = self.handle.match(prompt)
            with self.handle.lease(match, deadline_ms=5000) as lease:
                blank = blank_pages(self.handle.layout, blocks)
                loaded = self.handle.get(lease, blank)
            assert same_tokens(pages, blank, range(loaded.tokens)), f"{self.model}: wrong bytes in turn {self._turn}"
            if loaded.tokens == tokens:
                return
            assert time.monotonic() < deadline, f"{self.model}: {put}, {match.reason}, {loaded.tokens}: {loaded.reason}"
            time.sleep(0.05)

    def hold(self) -> Lease:
        """A lease of what was put last, to be looked at by `check_held`."""
        tokens = self.BLOCKS * 64
        lease = self.handle.lease(self.handle.match(ids(tokens, self._turn)), deadline_ms=5000)
        assert lease.blocks == self.BLOCKS
        self._held = lease, random_pages(self.handle.layout, self.BLOCKS, seed=self._turn)
        return lease

    def check_held(self) -> None:
        """That what is held is still to be read, with the bytes that it had."""
        assert self._held is not None
        lease, pages = self._held
        blank, tokens = blank_pages(self.handle.layout, self.BLOCKS), self.BLOCKS * 64
        loaded = self.handle.get(lease, blank)
        assert loaded.tokens == tokens and same_tokens(pages, blank, range(tokens)), (
            f"{self.model} lost what it holds: {loaded.tokens} of {tokens} tokens, {loaded.reason}"
        )

    def close(self) -> None:
        """Hang up."""
        self.store.close()


def visit(path: str, model: str, seconds: float) -> float:
    """A household comes in, does what it does, and goes; how long it was kept waiting, at most that many seconds."""
    began = time.monotonic()
    while True:
        try:
            wire = FramedSocket(path, "visitor", b"", SystemClock(), LONG_SECONDS)
            wire.close()
            break
        except Unreachable as error:
            assert time.monotonic() - began < seconds, f"not let in for {seconds:.1f} s: {error}"
            time.sleep(0.01)
    waited = time.monotonic() - began
    household = Household(path, model)
    try:
        household.turn()
    finally:
        household.close()
    return waited
