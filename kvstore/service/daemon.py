"""The sidecar as a process: a store, an API socket for each tenant, and an orderly end.

    keys, directory, budgets > sockets > recovery from disk, in the background > serve > SIGTERM > drain

Connections are accepted as soon as the directory is open. Draining answers the requests in flight, then flushes dirty
blocks, each within `Limits.close_seconds`.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvstore.block.errors import BadInput, StoreError
from kvstore.config import AUTO, MIN_NVME_BYTES, OFF, Size, parse_rate
from kvstore.node import EmbeddedStore, memory_here
from kvstore.service.accounting import set_aside
from kvstore.service.admin import Admin, Observer, StatusReport
from kvstore.service.dispatch import Handlers
from kvstore.service.local_door import LocalDoor
from kvstore.service.parked import Parking
from kvstore.service.sessions import Sessions
from kvstore.service.settings import Settings, shares_of, socket_key
from tiering.errors import TierError
from tiering.files import make_directory
from tiering.nvme.slab_files import disk_room, slab_bytes

DRAM_SHARE, NVME_SHARE = 0.5, 0.8
KEYS_LOOK_SECONDS = 1.0
"""Between two looks at the directory of keys."""

CouriersMaker = Callable[[EmbeddedStore, Sessions, Handlers, str], Parking]
"""The last argument: the address at which other nodes reach this one."""

_log = logging.getLogger(__name__)


class Daemon:
    """Serves an open store, until `drain`."""

    def __init__(
        self,
        store: EmbeddedStore,
        settings: Settings,
        first_number: int,
        new_token: Callable[[int], bytes],
        why_not_policy: str = "",
        couriers: CouriersMaker | None = None,
    ) -> None:
        """first_number: of a connection, above those of every earlier run. new_token: returns so many random bytes.
        why_not_policy: why the default policy runs in place of the one that was set. couriers: makes the part that
        serves couriers, if configured.

        Raises `BadInput` if a socket cannot be made.
        """
        self.store = store
        self.settings = settings
        self._insight_ends, self._keys_end = threading.Event(), threading.Event()
        handlers = self._handlers = Handlers(store.core, first_number, new_token, store.names)
        self.door = LocalDoor(handlers, settings.door, store.faults)
        self.sockets: list[str] = []
        desk = couriers(store, handlers.sessions, handlers, settings.peers_door) if couriers else None
        self.report = StatusReport(store, handlers, self.door, settings.store, why_not_policy)
        try:
            for name, one in settings.sockets().items():
                key, where, renew = socket_key(name), one.socket, partial(store.tenant_keys, name)
                is_served = store.keys.find(name) is not None  # else it was purged, while a pool still has its keys
                tenant = renew() if is_served else None
                self.door.listen(Path(where), tenant, int(settings.door.mode, 8), one.users, renew)
                self.sockets.append(where)
            key, where = "admin.socket", settings.admin_socket
            admin = Admin(self.report)
            self.door.listen_apart(Path(where), admin)
            key, where, observe = "observe.socket", settings.observe_socket, settings.observe
            self.door.listen_apart(Path(where), Observer(admin), int(observe.mode, 8), observe.users)
            if desk is not None:
                key, where = "the couriers' socket", settings.courier_socket
                self.door.listen_apart(Path(where), desk)
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
        ends, whatif, thread_seconds = self._insight_ends, self._handlers.whatif, self.store.core.clock.thread_seconds
        estimate = partial(whatif.run, ends, lambda: (thread_seconds(), process_seconds()))
        try:
            threading.Thread(target=estimate, name="kv-whatif", daemon=True).start()
        except RuntimeError as error:
            _log.warning("no estimates of what other sizes would find: %s", error)

    def _follow_keys(self) -> None:
        while not self._keys_end.wait(KEYS_LOOK_SECONDS):
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
        self._insight_ends.set()
        self._keys_end.set()
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
