"""A sidecar as a process, with its keeper, and what can be seen of them from outside: descriptors, memory, `stat`."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.block.errors import StoreError
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.status.tree import SidecarStatus

SERVES_WITHIN_SECONDS = 60
SETTLES_WITHIN_SECONDS = 60
UNSETTLED = ("reserved", "deleting", "zombie", "quarantined")


@dataclass(frozen=True)
class Opened:
    """What a process has open. kinds: how many descriptors of each kind, memory left out. memory: bytes by inode of
    shared memory. double: descriptors of memory beyond the first one of each."""

    kinds: dict[str, int]
    memory: dict[int, int]
    double: int


def opened_by(pid: int) -> Opened:
    """By /proc; what is closed meanwhile is left out."""
    kinds: Counter[str] = Counter()
    memory: dict[int, int] = {}
    double = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            path, status = os.readlink(f"/proc/{pid}/fd/{name}"), os.stat(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if path.startswith("/memfd:"):
            double += status.st_ino in memory
            memory[status.st_ino] = status.st_size
        elif stat.S_ISREG(status.st_mode):
            kinds["slabs" if "/slabs/" in path or path.endswith(".slab") else "files"] += 1
        else:
            kinds[path.partition(":")[0]] += 1
    return Opened(dict(kinds), memory, double)


class Sidecar:
    """`kvstore serve` on a directory, from its start on. A context: it is killed with its keeper at the end."""

    def __init__(
        self, directory: Path, store: dict[str, Any], lease_seconds: float, **sections: dict[str, Any]
    ) -> None:
        """store, sections: settings of these sections."""
        self.socket = str(directory / "door")
        self.admin = str(directory / "admin")
        self.log_file = directory / "log"
        self.extent_bytes = int(str(store["extent"]).removesuffix("MiB")) << 20
        config = directory / "config.toml"
        config.write_text(
            "\n".join(
                f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
                for name, section in {
                    # Not prefaulted: every extent that is there is somebody's.
                    "store": {"data": str(directory / "kv"), "prefault": False, **store},
                    "admin": {"socket": self.admin},
                    "limits": {"lease_seconds": lease_seconds},
                    **sections,
                    "door": {"socket": self.socket, **sections.get("door", {})},
                }.items()
            )
        )
        command = [sys.executable, "-m", "kvstore", "serve", "--json", "--config", str(config)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._served: list[int] = []  # process ids, in the order in which they said that they serve
        self._says = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Self:
        try:
            self.serves()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)  # else it starts another one
            for child in self._children():
                os.kill(child, signal.SIGKILL)
            self.process.kill()
        self.process.wait()
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end(self) -> int:
        """SIGTERM; its status."""
        self.process.terminate()
        return self.process.wait(SERVES_WITHIN_SECONDS)

    @property
    def pid(self) -> int:
        """Of the sidecar that serves now, or served last."""
        return self._served[-1]

    @property
    def keeper_pid(self) -> int:
        return self.process.pid

    def serves(self, times: int = 1) -> None:
        """Wait until so many have said that they serve."""
        with self._says:
            is_so = self._says.wait_for(
                lambda: len(self._served) >= times or self.process.poll() is not None, SERVES_WITHIN_SECONDS
            )
        assert is_so and self.process.poll() is None, f"the sidecar does not serve: {self.log()}"

    @property
    def starts(self) -> int:
        """How many have served."""
        return len(self._served)

    def kill(self) -> None:
        """SIGKILL to the sidecar, not to the keeper."""
        os.kill(self.pid, signal.SIGKILL)

    def kill_the_next(self, seconds: float) -> bool:
        """SIGKILL to the one that the keeper starts now, so long after it was started; whether there was one."""
        deadline = time.monotonic() + SERVES_WITHIN_SECONDS
        while not (children := [one for one in self._children() if one != self.pid]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        time.sleep(seconds)
        if self.pid == children[0]:  # it serves already
            return False
        os.kill(children[0], signal.SIGKILL)
        return True

    def facts(self) -> SidecarStatus:
        """What `kvstore stat` says."""
        return ask.stat(self.admin, SystemClock())

    def log(self) -> str:
        """Its last lines."""
        return self.log_file.read_text(errors="replace")[-2000:]

    def _children(self) -> list[int]:
        text = Path(f"/proc/{self.keeper_pid}/task/{self.keeper_pid}/children").read_text()
        return [int(one) for one in text.split()]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._says:
                self._served.append(json.loads(line)["pid"])
                self._says.notify_all()
        with self._says:
            self._says.notify_all()

    # Nothing leaks -------------------------------------------------------------------------------------------------

    def settled(self, baseline: Baseline | None = None) -> Baseline:
        """What is open once no client uses it and all moves are done; no more than at first, if that is given.

        Two looks in a row have to agree: the sidecar closes a connection's socket before its bell, so that a look may
        find no connection left and still count the bell."""
        deadline = time.monotonic() + SETTLES_WITHIN_SECONDS
        now: Baseline | None = None
        while True:
            try:
                last = now
                now = Baseline(opened_by(self.pid), opened_by(self.keeper_pid))  # without the connection of stat
                facts = self.facts()
                left = [*_left_in(facts), *now.wrong(facts, self.extent_bytes), *(now.beyond(baseline))]
            except (StoreError, OSError) as error:
                left = [str(error)]
            if not left and now is not None and now == last:
                return now
            if time.monotonic() > deadline:
                left = left or [f"what is open changes from {last} to {now}"]
                raise AssertionError(f"{'; '.join(left)} when all clients were gone")
            time.sleep(0.05)


@dataclass(frozen=True)
class Baseline:
    """What the sidecar and its keeper have open."""

    sidecar: Opened
    keeper: Opened

    @property
    def memory_bytes(self) -> int:
        """Of shared memory, each piece once."""
        return sum({**self.keeper.memory, **self.sidecar.memory}.values())

    def wrong(self, facts: SidecarStatus, extent_bytes: int) -> list[str]:
        """What does not fit together: memory by its descriptors, by the keeper's and by stat."""
        wrong = []
        taken = next(tier.taken_bytes for tier in facts.tiers if tier.name == "dram")
        budget = next(tier.budget_bytes for tier in facts.tiers if tier.name == "dram")
        extents = sum(size == extent_bytes for size in self.sidecar.memory.values())
        ledgers = len(self.sidecar.memory) - extents
        spare = extents * extent_bytes - taken  # one may be made ahead
        if spare not in (0, extent_bytes) or extents * extent_bytes > budget:
            wrong.append(f"{extents} extents of {extent_bytes} bytes are open and {taken} bytes of {budget} taken")
        if ledgers != taken // extent_bytes:
            wrong.append(f"{ledgers} ledgers are open, of {taken // extent_bytes} extents")
        if self.sidecar.double or self.keeper.double:
            wrong.append(f"memory is open more than once: {self.sidecar.double} and {self.keeper.double} descriptors")
        if len(self.keeper.memory) != 2 * ledgers or self.keeper.memory.keys() - self.sidecar.memory.keys():
            wrong.append(f"the keeper holds {len(self.keeper.memory)} pieces of memory for {ledgers} extents")
        return wrong

    def beyond(self, first: Baseline | None) -> list[str]:
        """What is open now and was not at first."""
        if first is None:
            return []
        return [
            f"the {who} has {now} open and had {before}"
            for who, now, before in (
                ("sidecar", _without_slabs(self.sidecar), _without_slabs(first.sidecar)),
                ("keeper", self.keeper.kinds, first.keeper.kinds),
            )
            if now != before
        ]


def _without_slabs(opened: Opened) -> dict[str, int]:
    return {kind: count for kind, count in opened.kinds.items() if kind != "slabs"}


def _left_in(facts: SidecarStatus) -> list[str]:
    counts = {
        "leases": facts.leases,
        "reservations": facts.reservations,
        "pinned bytes": facts.pinned_bytes,
        "departed connections": facts.departed,
        "sessions": len(facts.sessions) + facts.hidden_sessions,
        "connections": facts.door.connections,
        "moves": sum(move.waiting + move.running for move in facts.moves),
    }
    for tier in facts.tiers:
        for state in UNSETTLED:
            counts[f"{state} slots of {tier.name}"] = tier.slots.get(state, 0)
    return [f"{count} {what} left" for what, count in counts.items() if count]
