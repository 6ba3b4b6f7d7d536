"""The supervisor (*keeper*): a small process that holds the sidecar's memory, and restarts the sidecar when it ends.

    keeper  ->  sidecar     what was kept: name, descriptors; then "that is all", and whether one was ready before;
                            then what the edge or the transfer agent lacks, or in its last line why it ended
    sidecar ->  keeper      keep (name, descriptors of an extent and its ledger), forget (name), ready
    child   ->  keeper      heartbeats, a line each: empty, or what the child lacks

For a sidecar that was ready it runs the edge and the transfer agent, if configured, and logs what they print; the
sidecar does not depend on them. It holds the sockets on which the edge serves health and metrics, so that probes wait
while an edge is replaced.

It does not interpret what it holds. It runs as its own program, from this very file, and imports only the standard
library, so that it stays small and has nothing to crash on. SIGTERM and SIGINT end both; SIGUSR2 restarts the sidecar
in order, for an upgrade; SIGHUP reloads settings and tokens; SIGKILL to it ends the sidecar too.

A sidecar that ends with its own status before any was ever ready cannot start: the keeper ends with that status. One
that was killed or crashed is restarted. The cause may be what it finds in memory: after `FAILURES_WITH_MEMORY` starts
in a row that were never ready it starts with none; but not if they ended with `CANNOT_START`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

NAME_BYTES = 16
KEEP, FORGET, READY, ALL, TOLD = b"k", b"f", b"r", b"a", b"t"
DESCRIPTORS = 2
AGAIN = 75
"""The sidecar's status that asks for another start (EX_TEMPFAIL of sysexits.h)."""
OUT_OF_RESOURCES = 71
CANNOT_START = (2, OUT_OF_RESOURCES)
"""Statuses that mean unusable input or a machine short of something, never what the sidecar found in memory."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 5.0
LONGEST_CRASH_PAUSE_SECONDS, CRASHES_AT_ONCE = 0.5, 3
"""A sidecar that was ready and crashed is restarted at once, a few times. After more crashes the pause doubles with
each, up to this: a client may repeat what crashed it, and a crash loop must not take the machine."""
CALM_SECONDS = 300.0
"""A sidecar that ran ready for this long clears the count of crashes."""
FAILURES_WITH_MEMORY = 3
MOST_FAILURES = 20
"""Starts in a row that never became ready; what ends with `CANNOT_START` is tried for as long as its cause lasts."""
END_SECONDS = 10.0
"""How long the supervisor waits beyond the sidecar's time for an orderly end."""
CHILD_NICE = 10
CHILD_PAUSE_SECONDS, LONGEST_CHILD_PAUSE_SECONDS = 0.1, 60.0
CHILD_END_SECONDS = 3.0
MOST_LINE = 1000
"""Characters of a line that is logged for a child process."""
EDGE = "edge"
BEAT_SECONDS, FIRST_BEAT_SECONDS = 5.0, 60.0
"""A child is killed after this much silence; the second applies to its start, which may be slow on a busy machine."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


class ChildProcess:
    """The edge, gRPC or the transfer agent: a client of the sidecar. It gets no memory, makes itself of lower priority,
    and is restarted when it ends, after growing pauses."""

    def __init__(
        self, name: str, command: list[str], selector: selectors.BaseSelector, descriptors: Sequence[int] = ()
    ) -> None:
        """name: for the log. command: gets `--keeper PID --beats FD` added; it must keep writing lines to that pipe, or
        is killed. selector: its output is registered there, with this object. descriptors: that it inherits."""
        self.name = name
        self.why = ""
        """What it lacks; or why it last ended, until it has run for a minute."""
        self.lines: list[tuple[str, str]] = []
        """Levels and lines of what it has printed, to be logged."""
        self._begun: dict[IO[bytes], bytes] = {}  # the last line of each of its outputs, which has no end yet
        self._last = self._lacks = ""
        self._has_beaten = self._reads_again = False
        self._selector = selector
        self._command = command
        self._descriptors = descriptors
        self._heard: int | None = None  # the pipe's end
        self._beat_by = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._starts_at = self._began_at = 0.0
        self._pause = CHILD_PAUSE_SECONDS

    def look(self) -> tuple[str, dict[str, object]] | None:
        """Start it if it should run and does not; returns what to log about its end, with figures."""
        now = time.monotonic()
        if not self._command or now < self._starts_at:
            return None
        if self._child is None:
            self._start(now)
            return None
        status = self._child.poll()
        if status is None:
            return ("is silent and killed", {}) if self._is_silent(now) else None
        for stream in list(self._begun):
            self.hear(stream, ends=True)
        ended = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
        self.why = f"the {self.name} {ended}: {self._last or 'it said nothing'}"
        self._child = None
        self._close_pipe()
        if now - self._began_at >= LONGEST_CHILD_PAUSE_SECONDS:
            self._pause = CHILD_PAUSE_SECONDS
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_CHILD_PAUSE_SECONDS)
        self._starts_at = now + pause
        return "ended and is started again", {"status": status, "pause_seconds": pause, "reason": self._last}

    def hear(self, stream: IO[bytes], ends: bool = False) -> None:
        """Take over what it has printed. ends: it has ended, and this is the rest."""
        read = stream.read(1 << 16)
        *lines, begun = (self._begun[stream] + (read or b"")).split(b"\n")
        if read == b"" or ends:
            self._selector.unregister(stream)
            stream.close()
            del self._begun[stream]
        else:
            self._begun[stream] = begun[:MOST_LINE]
            begun = b""
        is_error = self._child is not None and stream is self._child.stderr
        for line in filter(None, (one.decode("utf-8", "replace").strip()[:MOST_LINE] for one in (*lines, begun))):
            text = line.removeprefix("kvstore: ")
            self.lines.append(("error" if line != text else "warning" if is_error else "info", text))
            self._last = text if is_error else self._last

    def begin_again(self) -> None:
        """Restart it, with the version then installed."""
        if self._child is not None:
            self._child.terminate()

    def read_again(self) -> None:
        """Have it reload its tokens; one that has not beaten yet would be ended by the signal, and gets it later."""
        self._reads_again = not self._has_beaten
        if self._child is not None and self._has_beaten:
            self._child.send_signal(signal.SIGHUP)

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def looks_at(self) -> float:
        """When `look` has something to do at the latest, by the monotonic clock."""
        return self._starts_at if self._child is None and self._command else math.inf

    def end(self) -> None:
        """End it, and do not start it again."""
        self._command = []
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(CHILD_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _start(self, now: float) -> None:
        ends: list[int] = []
        self._last, self._has_beaten = "", False
        try:
            self._heard, beat = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            ends = [beat]
            self._child = subprocess.Popen(
                [*self._command, "--keeper", str(os.getpid()), "--beats", str(beat)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[*self._descriptors, beat],
            )
            self._began_at, self._beat_by = now, now + FIRST_BEAT_SECONDS
            for stream in (self._child.stdout, self._child.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, self)
                self._begun[stream] = b""
        except OSError as error:  # no process, memory or descriptors for it now
            self.why = f"the {self.name} cannot be started: {error.strerror}"
            self._close_pipe()
            self._starts_at, self._pause = now + self._pause, min(2 * self._pause, LONGEST_CHILD_PAUSE_SECONDS)
        finally:
            for one in ends:
                os.close(one)

    def _is_silent(self, now: float) -> bool:
        """Whether its heartbeat is overdue; if so it is killed, and the next look sees its end."""
        if self._heard is None or self._child is None:
            return False
        try:
            if beats := os.read(self._heard, 1 << 16):
                self._beat_by, self._has_beaten = now + BEAT_SECONDS, True
                if self._reads_again:
                    self.read_again()
                *_, lacks, _ = (b"\n" + beats).split(b"\n") if b"\n" in beats else (b"", b"")
                if lacks or self._lacks or now - self._began_at >= LONGEST_CHILD_PAUSE_SECONDS:
                    self._lacks = self.why = lacks.decode("utf-8", "replace")[:MOST_LINE]
        except BlockingIOError:
            pass
        if now < self._beat_by:
            return False
        self._child.kill()
        self._last = "it was silent and killed"
        self._close_pipe()
        return True

    def _close_pipe(self) -> None:
        if self._heard is not None:
            os.close(self._heard)
            self._heard = None


class Keeper:
    """Holds descriptors, and one child at a time."""

    def __init__(
        self,
        command: list[str],
        end_seconds: float,
        text: bool,
        children: dict[str, list[str]] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """command: the sidecar's, gets `--kept-at FD` added. end_seconds: for its orderly end. children: commands of
        the processes that start once it was ready, by name. descriptors: that the edge inherits."""
        self._command = command
        self._selector = selectors.DefaultSelector()
        self._children = [
            ChildProcess(name, one, self._selector, descriptors if name == EDGE else ())
            for name, one in (children or {}).items()
        ]
        self._told = dict.fromkeys(children or {}, "")
        self._end_seconds = end_seconds
        self._text = text
        self._kept: dict[bytes, list[int]] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._wire: socket.socket | None = None
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._is_ready = False
        self._was_ready = False
        self._has_told_of_short = False
        self._failures = 0
        self._crashes = 0  # since the last calm
        self._ready_at = 0.0
        self._ending = self._reads_again = False
        self._kill_at: float | None = None
        self._ends_by: float | None = None  # when the sidecar gets its signal, once the agent has left
        self._signals, self._signalled = socket.socketpair()
        self._signals.setblocking(False)
        self._signalled.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ)

    def run(self) -> int:
        """Run until the sidecar has ended and is not restarted; returns its status."""
        try:
            return self._run()
        finally:
            for one in self._children:  # all at once
                one.begin_again()
            for one in self._children:
                one.end()

    def _run(self) -> int:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        while True:
            self._start()
            status = self._attend()
            self._drain()
            if self._ending and status in (AGAIN, -signal.SIGTERM):
                return 0  # it had drained to restart, or had opened nothing yet
            if self._ending or status == 0:
                return status if status >= 0 else 128 - status
            if status == AGAIN:
                self._failures = self._crashes = 0
                for one in self._children:
                    one.begin_again()
                continue
            if status > 0 and not self._was_ready:
                return status
            self._failures = 0 if self._is_ready else self._failures + 1
            if self._is_ready and time.monotonic() - self._ready_at >= CALM_SECONDS:
                self._crashes = 0
            self._crashes += 1
            if self._failures >= MOST_FAILURES and status not in CANNOT_START:
                self._say("error", "the sidecar cannot be started any more", status=status)
                return status if status > 0 else 128 - status
            if self._failures >= FAILURES_WITH_MEMORY and self._kept and status not in CANNOT_START:
                self._say("error", "the sidecar begins with empty memory", extents=len(self._kept))
                for name in list(self._kept):
                    self._forget(name)
            pause = pause_before_start(self._crashes, self._failures)
            more = {"crashes": self._crashes, "pause_seconds": pause} if self._crashes > CRASHES_AT_ONCE else {}
            self._say("error", "the sidecar ended and is started again", status=status, extents=len(self._kept), **more)
            if self._is_told_to_end(pause):
                return 128 - status if status < 0 else status

    # The child -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._is_ready, self._kill_at = False, None
        mine, its = self._spawned()
        its.close()
        mine.setblocking(False)
        self._wire = mine
        self._unsent = deque((KEEP + name, descriptors) for name, descriptors in self._kept.items())
        self._unsent.append((ALL + READY * self._was_ready, []))
        self._told = dict.fromkeys(self._told, "")
        self._selector.register(mine, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _spawned(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of its socket. Exits this process if the machine never has what the child needs."""
        for _ in range(MOST_FAILURES):
            ends: tuple[socket.socket, ...] = ()
            try:
                mine, its = ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                command = [*self._command, "--kept-at", str(its.fileno())]
                self._child = subprocess.Popen(command, pass_fds=[its.fileno()])
                return mine, its
            except OSError as error:
                for one in ends:
                    one.close()
                self._say("error", "the sidecar cannot be started now", reason=error.strerror)
            if self._is_told_to_end(LONGEST_PAUSE_SECONDS):
                sys.exit(0)
        self._say("error", "the sidecar cannot be started any more", status=OUT_OF_RESOURCES)
        sys.exit(OUT_OF_RESOURCES)

    def _attend(self) -> int:
        assert self._child is not None and self._wire is not None
        while True:
            due = min([one.looks_at for one in self._children], default=math.inf) - time.monotonic()
            for key, events in self._selector.select(
                min(1.0, max(0.0, due)) if self._was_ready and not self._ending else 1.0
            ):
                if key.fileobj is self._signals:
                    self._take_signals()
                    continue
                if key.data is not None:
                    self._log_lines(key.data, key.fileobj)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._send()
                if events & selectors.EVENT_READ and not self._receive():
                    self._selector.unregister(self._wire)  # the child closed it, and is about to end
            status = self._child.poll()
            if status is not None:
                return status
            if self._reads_again and self._is_ready:  # before it is ready the signal would end it
                self._reads_again = False
                self._child.send_signal(signal.SIGHUP)
                for one in self._children:
                    one.read_again()
            if self._was_ready and not self._ending:
                for one in self._children:
                    ended = one.look()
                    self._log_lines(one)
                    if ended is not None:
                        words, figures = ended
                        self._say("warning", f"the {one.name} {words}", **figures)
                    self._tell(one)
            if self._ends_by is not None and (
                time.monotonic() > self._ends_by or not any(one.is_running for one in self._leaving())
            ):
                self._ends_by, self._kill_at = None, time.monotonic() + self._end_seconds + END_SECONDS
                self._child.send_signal(signal.SIGTERM)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._say("error", "the sidecar did not end in time and is killed")
                self._child.kill()
                self._kill_at = None

    def _take_signals(self) -> None:
        assert self._child is not None
        for number in self._signals.recv(4096):
            if number in (signal.SIGTERM, signal.SIGINT):
                self._ends_by = 0.0 if self._ending else time.monotonic() + CHILD_END_SECONDS  # a second signal: now
                self._ending = True
                for one in self._leaving():
                    one.begin_again()
            elif number == signal.SIGUSR2:
                self._kill_at = time.monotonic() + self._end_seconds + END_SECONDS
                self._child.send_signal(signal.SIGUSR2)
            elif number == signal.SIGHUP:
                self._reads_again = True

    def _is_told_to_end(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                if key.data is not None:
                    self._log_lines(key.data, key.fileobj)
                elif {signal.SIGTERM, signal.SIGINT} & set(self._signals.recv(4096)):
                    return True
        return False

    # The children ---------------------------------------------------------------------------------------------------

    def _leaving(self) -> list[ChildProcess]:
        """Those that end before the sidecar, which they need for that; the edge says until the end how it stands."""
        return [one for one in self._children if one.name != EDGE]

    def _log_lines(self, one: ChildProcess, *streams: Any) -> None:
        for stream in streams:
            one.hear(stream)
        room = select.poll()
        room.register(2, select.POLLOUT)
        for level, line in one.lines:
            if room.poll(0):
                self._say(level, line, f"kvstore.{one.name.split()[-1]}")
        one.lines.clear()

    def _tell(self, one: ChildProcess) -> None:
        if one.why != self._told[one.name] and self._is_wired():
            self._told[one.name] = one.why
            self._unsent.append((TOLD + json.dumps([one.name, one.why[: MOST_LINE // 2]]).encode(), []))
            assert self._wire is not None
            self._selector.modify(self._wire, selectors.EVENT_READ | selectors.EVENT_WRITE)

    # Kept memory -----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        assert self._wire is not None
        try:
            while self._unsent:
                message, descriptors = self._unsent[0]
                socket.send_fds(self._wire, [message], descriptors)
                self._unsent.popleft()
            self._selector.modify(self._wire, selectors.EVENT_READ)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors are in flight: the child has to read some
                time.sleep(0.001)
            else:
                self._unsent.clear()  # it is gone

    def _receive(self) -> bool:
        assert self._wire is not None
        try:
            message, descriptors, _, _ = socket.recv_fds(self._wire, 64, DESCRIPTORS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        kind, name = message[:1], message[1:]
        if kind == KEEP and len(descriptors) == DESCRIPTORS:
            self._forget(name)
            self._kept[name] = descriptors
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == KEEP and not self._has_told_of_short:
            self._has_told_of_short = True
            self._say("warning", "no descriptors left: what memory holds is not all kept for a restart")
        if kind == FORGET:
            self._forget(name)
        elif kind == READY:
            self._is_ready = self._was_ready = True
            self._ready_at = time.monotonic()
        return bool(message)

    def _forget(self, name: bytes) -> None:
        for descriptor in self._kept.pop(name, ()):
            os.close(descriptor)

    def _drain(self) -> None:
        assert self._wire is not None
        while self._has_more():
            if not self._receive():
                break
        if self._is_wired():
            self._selector.unregister(self._wire)
        self._wire.close()

    def _is_wired(self) -> bool:
        return any(key.fileobj is self._wire for key in self._selector.get_map().values())

    def _has_more(self) -> bool:
        assert self._wire is not None
        try:
            return bool(self._wire.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _say(self, level: str, message: str, logger: str = "kvstore.keeper", /, **more: object) -> None:
        try:
            print(log_line(self._text, time.time(), level, logger, message, more), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # standard error has no reader; the supervisor goes on holding the memory
            pass


def log_line(is_text: bool, at: float, level: str, logger: str, message: str, more: dict[str, object]) -> str:
    """Also the sidecar's: one JSON object, or text with figures as name=value. at: seconds since 1970."""
    if is_text:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(at))},{int(at % 1 * 1000):03} {level.upper()}"
        return f"{line} {logger}: {message}" + "".join(f" {name}={value}" for name, value in more.items())
    told: dict[str, object] = {"time": round(at, 3), "level": level, "logger": logger, "message": message}
    return json.dumps(told | more, default=str)


def pause_before_start(crashes: int, failures: int) -> float:
    """In seconds. crashes: since the last calm, this one included. failures: of these, the last ones in a row that were
    never ready."""
    doublings = max(crashes - CRASHES_AT_ONCE, failures - 1, 0)
    longest = LONGEST_PAUSE_SECONDS if failures else LONGEST_CRASH_PAUSE_SECONDS
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(doublings, 32), longest)


if __name__ == "__main__":
    _, seconds, style, children, descriptors, *command = sys.argv
    given = json.loads(children), json.loads(descriptors)
    sys.exit(Keeper(command, float(seconds), style == "text", *given).run())
