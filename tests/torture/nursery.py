"""Children to be killed, forked from one process that has imported what they need.

A new interpreter with torch takes two seconds; a fork of one takes a few milliseconds, and is a process of its own all
the same. The nursery opens nothing and starts no thread, so there is nothing that a fork could inherit half done.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

MESSAGE_BYTES = 1 << 16
STARTS_WITHIN_SECONDS = 120
NURSERY = "import sys; from torture.nursery import tend; tend(*sys.argv[1:])"


@dataclass
class Child:
    """A process at work, and the end of its pipe. heard: all that it said so far."""

    pid: int
    out: int
    heard: bytearray = field(default_factory=bytearray)
    ended: bool = False  # nobody can say anything on the pipe any more

    def listen(self, deadline: float, until: bytes | None = None, times: int = 1) -> bool:
        """Hear what it says up to a moment; True as soon as it has said `until` so often, or can say nothing more."""
        while not self.ended and (until is None or self.heard.count(until) < times):
            ready, _, _ = select.select([self.out], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self.heard += (piece := os.read(self.out, 1 << 16))
            self.ended = not piece
        return True

    def kill(self) -> None:
        """End it, wherever it is, and hear the rest."""
        os.kill(self.pid, signal.SIGKILL)
        while not self.ended:
            self.listen(time.monotonic() + 60)

    def lines(self) -> list[str]:
        """What it said, whole lines only: it may have been ended in the middle of one."""
        return bytes(self.heard[: self.heard.rfind(b"\n") + 1]).decode().splitlines()


class Nursery:
    """Forks children of one kind: `module.live(say, **options)` in a process of its own. Thread-safe."""

    def __init__(self, module: str) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(STARTS_WITHIN_SECONDS)
        one_thread = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", NURSERY, str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()  # the children that are left end with it
        self._process.wait()

    def start(self, **options: Any) -> Child:
        out, into = os.pipe()
        try:
            pid = self._ask({"live": options}, into)
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(into)
        return Child(pid, out)

    def bury(self, child: Child) -> int:
        """Wait for the end of a child; its status, negative for a signal. Until then its number is not used again."""
        os.close(child.out)
        return os.waitstatus_to_exitcode(self._ask({"bury": child.pid}))

    def _ask(self, request: dict[str, Any], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            reply = self._socket.recv(MESSAGE_BYTES)
        assert reply, "the nursery has ended"
        return int(reply)


def tend(descriptor: str, module: str) -> None:
    """The nursery's own life: forks, and buries, until nobody asks any more."""
    live: Callable[..., None] = importlib.import_module(module).live
    gc.freeze()
    door = socket.socket(fileno=int(descriptor))
    living: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(door, MESSAGE_BYTES, 1)
        if not message:
            break
        request = json.loads(message)
        if "bury" in request:
            _, answer = os.waitpid(request["bury"], 0)
            living.discard(request["bury"])
        else:
            answer = os.fork()
            if answer == 0:
                door.close()
                _grow_up(live, Voice(descriptors[0]), request["live"])
            living.add(answer)
            os.close(descriptors[0])
        door.send(str(answer).encode())
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Voice:
    """What a child says: lines on a pipe, each shorter than what a pipe takes as a whole."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def __call__(self, *words: object) -> None:
        line = (" ".join(map(str, words)) + "\n").encode()
        assert len(line) <= select.PIPE_BUF
        try:
            os.write(self._pipe, line)
        except BrokenPipeError:  # nobody listens any more
            os._exit(2)

    def fault(self) -> None:
        """Something was raised that must not be: say so and end."""
        kind, error, trace = sys.exc_info()
        where = " < ".join(
            f"{one.filename.rsplit('/', 1)[-1]}:{one.lineno}" for one in traceback.extract_tb(trace)[::-1]
        )
        self("fault", f"{kind.__name__ if kind else ''}: {error} ({where})".replace("\n", " ")[:2000])
        os._exit(1)


def _grow_up(live: Callable[..., None], voice: Voice, options: dict[str, Any]) -> None:
    try:
        live(voice, **options)
    except BaseException:
        voice.fault()
    os._exit(0)
