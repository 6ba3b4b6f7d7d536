"""Runs `kvstore serve`: logs, a store, an API socket for each tenant, signals, and an orderly end; and the socket to
the supervisor (*keeper*).

    keys, directory, budgets > sockets > recovery from disk, in the background > serve > SIGTERM > drain

Connections are accepted as soon as the directory is open. Draining answers the requests in flight, then flushes dirty
blocks, each within `Limits.close_seconds`. Randomness is handed in.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import msgspec

from kvstore.block.errors import BadInput, DirectoryInUse, OutOfResources, StoreError
from kvstore.config import (
    AUTO,
    DEFAULT_POLICY,
    MIN_NVME_BYTES,
    OFF,
    DramConfig,
    NvmeConfig,
    SettingsSection,
    Size,
    StoreOptions,
    TierOptions,
    format_size,
    kinds_of,
    marks,
    parse_rate,
)
from kvstore.node import EmbeddedStore, StoreParts, memory_here, open_embedded
from kvstore.service.accounting import set_aside
from kvstore.service.admin import Admin
from kvstore.service.dispatch import Handlers, Parking
from kvstore.service.keeper import (
    ALL,
    CHILD_END_SECONDS,
    DESCRIPTORS,
    EDGE,
    FORGET,
    KEEP,
    READY,
    TOLD,
    ChildProcess,
    log_line,
)
from kvstore.service.local_door import ADMIN_MODE, LocalDoor
from kvstore.service.sessions import Sessions
from kvstore.service.settings import Settings, read_token, settings_of, shares_of, socket_key
from tiering.dram.extents import Extent
from tiering.dram.keeping import NAME_BYTES, KeptExtent
from tiering.errors import TierError
from tiering.faults import SHORTAGES, FaultKind, kind_of
from tiering.files import make_directory
from tiering.nvme.frame_index import IndexMaker
from tiering.nvme.slab_files import disk_room, private_pages, slab_bytes
from tiering.policies.policy import PolicyMaker

_log = logging.getLogger(__name__)

ENDS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR2})
HEARD = ENDS | {signal.SIGHUP}
SWITCH_SECONDS = 0.0001
"""How long a thread keeps the interpreter while others want it; the socket thread must not wait long."""
FAILED = 70
"""Exit status after an internal fault (EX_SOFTWARE of sysexits.h)."""

RECEIVE_SECONDS = FREEZE_SECONDS = 10.0
EDGE_LOOK_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1

PROBE_BYTES = 4096
OWN_DESCRIPTORS, OWN_ADDRESS_BYTES = 64, 256 << 20
"""Of a sidecar besides its tiers, with a few clients: sockets and pipes, and what its threads map."""
MEND = {
    FaultKind.NO_MEMORY: "give it less dram, or raise the limits of memory and address space (ulimit -v, cgroup)",
    FaultKind.NO_THREADS: "raise the limits of processes and address space (ulimit -u, ulimit -v, pids.max, TasksMax)",
    FaultKind.NO_DESCRIPTORS: "raise the limit of open files (ulimit -n, LimitNOFILE)",
    FaultKind.DISK_FULL: "make room on the disk of its directory",
}

DRAM_SHARE, NVME_SHARE = 0.5, 0.8
KEYS_LOOK_SECONDS = 1.0
"""Between two looks at the directory of keys."""

CouriersMaker = Callable[[EmbeddedStore, Sessions, Handlers, str], Parking]
"""The last argument: the address at which other nodes reach this one."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What a sidecar is handed. process_seconds: CPU time of this process. first_number: of a connection, above those
    of every earlier run, which have fewer than 2**`sessions.CONNECTION_BITS` in practice. new_token: returns so many
    random bytes. policies: finds one by its name. settings: reads them again, as at the start. keeper: holds the memory
    for the next process, if there is one. couriers: makes the part that serves couriers, if configured. edge: the
    command of an edge that the sidecar itself starts, and the descriptors that it inherits."""

    process_seconds: Callable[[], float]
    first_number: int
    new_token: Callable[[int], bytes]
    indexes: Callable[[Path], IndexMaker]
    policies: Callable[[str], PolicyMaker]
    settings: Callable[[], Settings]
    keeper: KeeperWire | None = None
    couriers: CouriersMaker | None = None
    edge: tuple[list[str], list[int]] | None = None


def serve(settings: Settings, outside: Outside, started: Callable[[list[str]], None]) -> bool:
    """Serve until SIGTERM or SIGINT, or SIGUSR2 if a supervisor starts the next process; returns whether it should.
    SIGHUP reloads the settings.

    started: called with the sockets once connections are accepted.

    Raises `BadInput`, `DirectoryInUse`, `KeysUnusable`, and `OutOfResources` if the machine lacks something essential.
    """
    try:
        return _serve(settings, outside, started)
    except DirectoryInUse:  # raised from an error that elsewhere means that there is no thread
        raise
    except (OSError, MemoryError, RuntimeError, TierError, StoreError) as error:
        for number in ENDS:  # however slow the end is from here on, a signal ends it
            signal.signal(number, signal.SIG_DFL)
        kind = kind_of(error)  # also of the cause of an error for people
        if kind not in SHORTAGES:
            raise
        words = getattr(error, "strerror", None) or error or "none left"
        raise OutOfResources(f"the sidecar cannot serve, {kind}: {words}; {MEND[kind]}") from None


def _serve(settings: Settings, outside: Outside, started: Callable[[list[str]], None]) -> bool:
    signals = _Signals()
    log_to_stderr(settings.log.level, settings.log.format)
    sys.setswitchinterval(SWITCH_SECONDS)
    dram, nvme = budgets(settings)
    _try_limits(settings, dram, nvme)
    policy, why_not = _usable_policy(settings.store.policy, outside.policies)
    tiers = msgspec.structs.replace(
        settings.store, dram=dram, nvme=nvme, slab=settings.store.slab if nvme is not None else None
    )
    with _open(settings, outside, policy, tiers) as store:
        daemon = Daemon(store, settings, outside, why_not)
        keeper, edge = outside.keeper, None
        if settings.http.listen is not None and settings.http.token_file is None and len(settings.sockets()) > 1:
            _log.warning("/metrics is closed: several tenants are configured, and there is no http.token_file")
        try:
            daemon.start(outside.process_seconds, _end_at_once)
            if keeper is not None:
                daemon.report.lacks = keeper.lacks
                keeper.start(lambda: os.kill(os.getpid(), signal.SIGTERM))
                keeper.ready()
            if outside.edge is not None:
                edge = _OwnEdge(*outside.edge, daemon)
            started(daemon.sockets)
            while (number := signals.wait()) == signal.SIGHUP:
                settings = _read_again(settings, outside.settings, daemon)
                if edge is not None:
                    edge.read_again()
            begins_again = number == signal.SIGUSR2 and keeper is not None
            daemon.drain(lambda: keeper.freeze() if keeper is not None and begins_again else None)
            return begins_again
        finally:
            daemon.door.close(settings.limits.close_seconds)
            if edge is not None:
                edge.close()


class Daemon:
    """Serves an open store, until `drain`."""

    def __init__(
        self,
        store: EmbeddedStore,
        settings: Settings,
        outside: Outside,
        why_not_policy: str = "",
    ) -> None:
        """why_not_policy: why the default policy runs in place of the one that was set. Raises `BadInput` if a socket
        cannot be made."""
        self.store = store
        self.settings = settings
        self._ends = threading.Event()
        handlers = self._handlers = Handlers(store.core, outside.first_number, outside.new_token, store.names)
        self.door = LocalDoor(handlers, settings.door, store.faults)
        self.sockets: list[str] = []
        makes = outside.couriers
        desk = makes(store, handlers.sessions, handlers, settings.peers_door) if makes is not None else None
        self.report = Admin(store, handlers, self.door, settings.store, why_not_policy)
        try:
            for name, one in settings.sockets().items():
                key, where, renew = socket_key(name), one.socket, partial(store.tenant_keys, name)
                is_served = store.keys.find(name) is not None  # else it was purged, while a pool still has its keys
                tenant = renew() if is_served else None
                self.door.listen(Path(where), tenant, int(settings.door.mode, 8), one.users, renew)
                self.sockets.append(where)
            key, where = "admin.socket", settings.admin_socket
            self.door.listen(Path(where), self.report.serve, ADMIN_MODE, is_operator=True)
            key, where, observe = "observe.socket", settings.observe_socket, settings.observe
            self.door.listen(Path(where), self.report.observe, int(observe.mode, 8), observe.users)
            if desk is not None:
                key, where = "the couriers' socket", settings.courier_socket
                self.door.listen(Path(where), desk, ADMIN_MODE)
        except OSError as error:
            self.door.close(0)
            mend = {
                errno.ENOENT: "make its directory first",
                errno.EACCES: "let this user write to its directory",
                errno.EEXIST: "move it away",
            }
            raise BadInput(
                f"{key}={where} cannot be used: {error.strerror}; "
                f"{mend.get(error.errno or 0, 'end who listens there')}, or give another path"
            ) from None

    def start(self, process_seconds: Callable[[], float], failed: Callable[[], None]) -> None:
        """Accept connections. process_seconds: CPU time of this process. failed: called when an internal fault stops
        the service."""
        set_aside()  # the program itself
        for warning in self.report.warnings():
            _log.warning("%s", warning)
        self.door.start(failed)
        self._start_insight(process_seconds)
        if self.settings.keys.directory is not None:
            threading.Thread(target=self._follow_keys, name="kv-keys", daemon=True).start()
        if self.settings.store.prefault:
            self.store.core.prefault()
        usage = self.store.usage()
        nvme = usage.nvme.budget_bytes if usage.nvme is not None else 0
        budgets = {"dram_bytes": usage.dram.budget_bytes, "nvme_bytes": nvme}
        sockets = {"sockets": self.sockets, "admin_socket": self.settings.admin_socket}
        _log.info("serving", extra={**sockets, "data": self.settings.store.data, **budgets})

    def _start_insight(self, process_seconds: Callable[[], float]) -> None:
        ends, whatif, thread_seconds = self._ends, self._handlers.whatif, self.store.core.clock.thread_seconds
        estimate = partial(whatif.run, ends, lambda: (thread_seconds(), process_seconds()))
        try:
            threading.Thread(target=estimate, name="kv-whatif", daemon=True).start()
            follow = partial(self._handlers.prefixes.run, ends)
            threading.Thread(target=follow, name="kv-prefixes", daemon=True).start()
        except RuntimeError as error:
            _log.warning("no estimates of what other sizes would find, or of which prefixes are hot: %s", error)

    def _follow_keys(self) -> None:
        while not self._ends.wait(KEYS_LOOK_SECONDS):
            try:
                self.store.rotation.step()
            except (StoreError, TierError, OSError, MemoryError, RuntimeError) as error:  # the next look may succeed
                _log.warning("the directory of keys cannot be followed: %s", error or type(error).__name__)

    def check_settings(self, settings: Settings) -> None:
        """Raises `BadInput` if `change_settings` could not apply them."""
        self.store.core.check_shares(shares_of(settings))

    def change_settings(self, settings: Settings) -> None:
        """Apply the settings from `settings.taken_over`."""
        found = {self.store.keys.find(name): share for name, share in shares_of(settings).items()}
        self.store.core.change_shares({one.tenant: share for one, share in found.items() if one})
        self.store.core.change_scrub(parse_rate(settings.store.scrub, "store.scrub"))
        self.door.change_limits(settings.door)
        self.settings = settings

    def drain(self, drained: Callable[[], None]) -> None:
        """End the service. drained: called once no client is served, when memory may be handed on."""
        self.report.is_stopping = True
        self._ends.set()
        _log.info("draining")
        self.door.close(self.settings.limits.close_seconds)
        drained()
        self.store.close()
        _log.info("stopped")


def budgets(settings: Settings) -> tuple[Size, Size | None]:
    """The budgets of DRAM and NVMe: as set, or from what the cgroup and the disk allow. Raises `BadInput`."""
    dram, nvme = settings.store.dram, settings.store.nvme
    if dram == AUTO:
        dram = int(DRAM_SHARE * memory_here())
    if nvme == OFF:
        return dram, None
    if nvme == AUTO:
        directory = Path(settings.store.data)
        try:
            for one in (directory, directory / "nvme"):
                make_directory(one)
            nvme, held = int(NVME_SHARE * disk_room(directory / "nvme")), slab_bytes(directory / "nvme")
            if held:  # whatever others left of the disk
                nvme = max(nvme, held, MIN_NVME_BYTES)
        except OSError as error:
            raise BadInput(f"{directory} cannot be used: {error.strerror}; give another --data") from None
    return dram, nvme


class _OwnEdge:
    """The edge as a child of the sidecar, where there is no supervisor to run it."""

    def __init__(self, command: list[str], descriptors: Sequence[int], daemon: Daemon) -> None:
        """As `ChildProcess`."""
        self._selector = selectors.PollSelector()
        self._child = ChildProcess(EDGE, command, self._selector, descriptors)
        self._lacks = daemon.report.lacks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-edge", daemon=True)
        self._thread.start()

    def read_again(self) -> None:
        self._child.read_again()

    def close(self) -> None:
        self._over.set()
        self._thread.join(2 * CHILD_END_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(EDGE_LOOK_SECONDS):
            ended = self._child.look()
            for key, _ in self._selector.select(0):
                self._child.hear(cast(IO[bytes], key.fileobj))
            for level, line in self._child.lines:
                _log.log(logging.getLevelNamesMapping()[level.upper()], "the edge: %s", line)
            self._child.lines.clear()
            self._lacks[EDGE] = self._child.why
            if ended is not None:
                _log.warning("the edge %s", ended[0], extra=ended[1])
        self._child.end()


def _read_again(now: Settings, read: Callable[[], Settings], daemon: Daemon) -> Settings:
    """Reload the settings; returns those in force. If any cannot be applied, none is."""
    try:
        settings, changed, in_vain = taken_over(now, read())
        daemon.check_settings(settings)
        if settings.http.token_file is not None:
            read_token(settings.http.token_file)  # the edge reads it too: both take the new settings, or neither does
    except (StoreError, OSError, MemoryError) as error:
        _log.error("the settings could not be read again, and nothing is changed: %s", error or type(error).__name__)
        return now
    daemon.change_settings(settings)
    set_level(settings.log.level)
    _log.log(max(logging.INFO, _log.getEffectiveLevel()), "settings were read again", extra={"changed": changed})
    if in_vain:
        level = max(logging.WARNING, _log.getEffectiveLevel())
        _log.log(level, "these settings changed and need a restart: %s", ", ".join(in_vain))
    return settings


def _end_at_once() -> None:
    """A sidecar that serves no client is useless, and a supervisor starts another on the same memory."""
    os._exit(FAILED)


class _Signals:
    """Signals to end or to reload. The system's own handler records each, in any thread, so none is lost: Python's
    handler may run just as the main thread goes to sleep."""

    def __init__(self) -> None:
        self._heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        self._unseen: deque[int] = deque()
        for number in HEARD:
            signal.signal(number, lambda *_: None)

    def wait(self) -> int:
        """Wait for the next signal, or return one that came before."""
        while not self._unseen:
            self._unseen.extend(number for number in self._heard.recv(64) if number in HEARD)
        return self._unseen.popleft()


def _try_limits(settings: Settings, dram: Size, nvme: Size | None) -> None:
    """Have for a moment what the settings need of each limit, as the first start and every later one find it. Raises
    `BadInput` without shared memory, and what `serve` takes for a shortage: a store that lacks any of it would say that
    it is ready, and let no client in."""
    memory = DramConfig.of(dram, settings.store.extent, memory_here())
    disk = NvmeConfig.of(nvme, settings.store.slab, None) if nvme is not None else None
    _try_shared_memory()
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(memory.extent_bytes, disk.slab_bytes if disk is not None else 0)
    if largest > longest != resource.RLIM_INFINITY:
        raise BadInput(
            f"a file may have {format_size(longest)} here, and pieces of dram and nvme of this size have "
            f"{format_size(largest)}; raise the limit of file size (ulimit -f, LimitFSIZE), or give smaller ones"
        )
    slabs = disk.budget_bytes // disk.slab_bytes if disk is not None else 0
    wanted = 2 * -(-memory.budget_bytes // memory.extent_bytes) + slabs + OWN_DESCRIPTORS
    had: list[int] = []
    try:
        while len(had) < wanted:
            had.append(os.dup(sys.stderr.fileno()))
    except OSError as error:
        words = f"{len(had)} more files may be open, and dram and nvme of this size want {wanted}"
        raise OSError(error.errno, words) from None
    finally:
        for one in had:
            os.close(one)
    mapped = memory.budget_bytes + OWN_ADDRESS_BYTES
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        try:
            private_pages(mapped)  # and gives them back, untouched
        except OSError as error:
            words = f"{format_size(mapped)} more of address space cannot be had, which dram of this size wants"
            raise OSError(error.errno, words) from None


def _try_shared_memory() -> None:
    """Raises `BadInput`: a store without it could serve nothing."""
    try:
        Extent(PROBE_BYTES).close()
    except OSError as error:
        if kind_of(error) is FaultKind.NO_DESCRIPTORS:
            raise
        raise BadInput(
            f"no shared memory can be made here (memfd_create and its seals: {error.strerror}); allow it in the "
            "container's seccomp profile, or raise the memory limit"
        ) from None


def _usable_policy(name: str, policies: Callable[[str], PolicyMaker]) -> tuple[PolicyMaker, str]:
    """The policy that was set; or, if it cannot run here, the default one and why."""
    try:
        return policies(name), ""
    except BadInput as error:
        if name == DEFAULT_POLICY:
            raise
        _log.warning("blocks go by %s instead: %s", DEFAULT_POLICY, error)
        return policies(DEFAULT_POLICY), str(error)


def _open(settings: Settings, outside: Outside, policy: PolicyMaker, tiers: TierOptions) -> EmbeddedStore:
    limits, keeper = settings.limits.shared_by(len(settings.sockets())), outside.keeper
    return open_embedded(
        settings.store.data,
        StoreOptions(tiers, limits=limits, shares=shares_of(settings)),
        StoreParts(
            dram_policy=policy,
            indexes=outside.indexes,
            keeper=keeper,
            kept=keeper.receive() if keeper is not None else (),
            guard=outside.first_number,
            keys=settings.keys,
        ),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Reloaded settings.


def taken_over(now: Settings, given: Settings) -> tuple[Settings, list[str], list[str]]:
    """Compare reloaded settings: returns those in force, the names of changed ones, and of those that need a restart.
    A setting says itself whether it is applied while the sidecar serves (`config.marks`). Raises `BadInput` if they
    conflict."""
    table = msgspec.to_builtins(now)
    before, after = dict(_flat(table)), dict(_flat(msgspec.to_builtins(given)))
    different = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    live = {path for path in different if _is_live(path, now, given)}
    for path in live:
        _at(table, path[:-1])[path[-1]] = after[path]
    changed, in_vain = (sorted(map(".".join, paths)) for paths in (live, different - live))
    return settings_of(table), changed, in_vain


def _flat(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        path = (*above, name)
        yield from _flat(value, path) if isinstance(value, dict) else [(path, value)]


def _at(one: Any, path: tuple[str, ...]) -> Any:
    """The section there, of settings or of their table; None without one."""
    for name in path:
        one = one.get(name) if isinstance(one, dict) else getattr(one, name)
    return one


def _is_live(path: tuple[str, ...], now: Settings, given: Settings) -> bool:
    sections = [_at(one, path[:-1]) for one in (now, given)]
    if None in sections:
        return False
    section: type[SettingsSection] = type(sections[0])
    may_change = marks(kinds_of(section)[path[-1]]).get("live")
    return may_change is not None and all(may_change(one) for one in sections)


# ---------------------------------------------------------------------------------------------------------------------
# Logs on standard error: one JSON object per line, or text. Never with keys, token ids or payload.


_KNOWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogLines(logging.Formatter):
    """As the supervisor's, with the call's `extra`. style: "json" or "text"; there an exception follows below."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._is_text = style == "text"

    def format(self, record: logging.LogRecord) -> str:
        more = {key: value for key, value in record.__dict__.items() if key not in _KNOWN}
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        if exception and not self._is_text:
            more["exception"] = exception
        level, message = record.levelname.lower(), record.getMessage()
        line = log_line(self._is_text, record.created, level, record.name, message, more)
        return f"{line}\n{exception}" if exception and self._is_text else line


OURS = ("kvstore", "tiering", "kv_kernels", "engine_adapter")
"""Loggers that the level applies to. Others log from warnings on: a compiler has tens of thousands of lines for its own
developers."""


def log_to_stderr(level: str, style: str) -> None:
    """Configure the whole process. style: "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLines(style))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(number, logging.WARNING))
    for name in OURS:
        logging.getLogger(name).setLevel(number)


# ---------------------------------------------------------------------------------------------------------------------
# The supervisor's socket.


class KeeperWire:
    """The sidecar's end of the socket to its supervisor (*keeper*): `tiering.dram.extents.MemoryKeeper` over it, which
    memory was kept, and which to keep. Thread-safe.

    Its own thread sends, in order, so that a thread that holds a lock never waits for the supervisor. If the supervisor
    ends, so does the sidecar: otherwise the next one would find the directory in use.
    """

    def __init__(self, descriptor: int, new_token: Callable[[int], bytes]) -> None:
        """Takes the descriptor over. new_token: returns that many random bytes."""
        _end_with_parent(True)  # until the thread watches it: a slow start must not outlive the supervisor
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(RECEIVE_SECONDS)
        os.set_inheritable(descriptor, False)
        self._new_token = new_token
        self._lock = threading.Lock()
        self._frozen = False
        self.lacks: dict[str, str] = {}
        """What the edge and the transfer agent lack, or why they ended, by name; empty text for one that is well."""
        self._queue: SimpleQueue[tuple[bytes, list[int]] | threading.Event] = SimpleQueue()
        self._is_sending = False

    def receive(self) -> list[KeptExtent]:
        """The memory that an earlier process left, once. Raises `OSError` if the supervisor does not answer."""
        kept = []
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, 64, DESCRIPTORS)
            if message[:1] == KEEP and len(descriptors) == DESCRIPTORS:
                for one in descriptors:
                    os.set_inheritable(one, False)
                kept.append(KeptExtent(message[1:], *descriptors))
                continue
            for one in descriptors:
                os.close(one)
            if not message:
                raise ConnectionResetError("the keeper is gone")
            if message[:1] == ALL:
                return kept

    def start(self, gone: Callable[[], None]) -> None:
        """Start sending, and watch the supervisor. gone: called when it ends."""
        self._socket.settimeout(None)
        self._is_sending = True
        threading.Thread(target=self._send_all, name="kv-keep", daemon=True).start()
        threading.Thread(target=self._watch, args=(gone,), name="kv-keeper", daemon=True).start()
        _end_with_parent(False)

    # The contract --------------------------------------------------------------------------------------------------

    def new_name(self) -> bytes:
        return self._new_token(NAME_BYTES)

    def keep(self, name: bytes, extent: int, ledger: int) -> None:
        copies: list[int] = []
        try:
            for one in (extent, ledger):
                copies.append(os.dup(one))
        except OSError:  # no descriptors left: this extent is not kept
            for one in copies:
                os.close(one)
            return
        self._put(KEEP + name, copies)

    def forget(self, name: bytes) -> None:
        self._put(FORGET + name, [])

    # Beyond it -----------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """The sidecar has started."""
        self._put(READY, [])

    def freeze(self) -> None:
        """Make the supervisor hold what it holds now, whatever this process does later: the next process starts from
        there.

        On return the supervisor has read everything, or does not read.
        """
        told = threading.Event()
        with self._lock:
            self._frozen = True
            self._queue.put(told)
        if self._is_sending:
            told.wait(FREEZE_SECONDS)

    def _put(self, message: bytes, descriptors: list[int]) -> None:
        with self._lock:
            if not self._frozen:
                self._queue.put((message, descriptors))
                return
        for one in descriptors:
            os.close(one)

    def _send_all(self) -> None:
        while True:
            asked = self._queue.get()
            if isinstance(asked, threading.Event):
                asked.set()
                continue
            message, descriptors = asked
            try:
                socket.send_fds(self._socket, [message], descriptors)
            except OSError:  # the supervisor is gone, and this process is about to end
                pass
            for one in descriptors:
                os.close(one)

    def _watch(self, gone: Callable[[], None]) -> None:
        try:
            while message := self._socket.recv(8192):
                if message[:1] == TOLD:
                    name, why = json.loads(message[1:])
                    self.lacks[name] = why
        except OSError:
            pass
        gone()


def _end_with_parent(does: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if does else 0)
