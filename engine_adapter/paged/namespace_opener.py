"""Opens a namespace in the background, for a scheduler that must not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from logging import getLogger

from engine_adapter.paged.step_plan import GroupSpec, NamespaceSpec
from kvstore.block.account import MissReason, reason_of
from kvstore.block.layout import Layout
from kvstore.client.edge import contained
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.client.states import PrefixStates

_log = getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between two attempts."""


def state_config(config: Mapping[str, str], groups: Iterable[GroupSpec], beside: str) -> dict[str, str]:
    """What names the namespace of a model's states. beside: the digest of its KV's namespace, of which they are a
    part; empty where it has no KV."""
    made_by = "; ".join(f"{group.name}: {group.text}" for group in groups if group.is_state)
    return {**config, "state": made_by, "beside": beside or blake2b(digest_size=16).hexdigest()}


class NamespaceOpener:
    """The namespace that was last wanted, once it is open. Thread-safe."""

    def __init__(self, open_store: Callable[[], OpenStore], shard: int | None = None, *, is_told: bool = False) -> None:
        """open_store: must not connect yet. shard: as in `kvstore.open(...).namespace`, of layouts that have several.
        is_told: as `NamespaceHandle.is_told`."""
        self._is_reported = is_told
        self._shard = shard
        self._open_store = open_store
        self._changed = threading.Condition()
        self._store: OpenStore | None = None
        self._wanted: NamespaceSpec | None = None
        self._handle: NamespaceHandle | None = None
        self.states: PrefixStates | None = None
        """Of the open namespace, for a model with recurrent states."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tell_when_open: Callable[[], None] | None = None
        self._failed: tuple[MissReason, str] | None = None
        """Why the last attempt failed."""
        self._is_told = False

    def want(self, facts: NamespaceSpec) -> None:
        with self._changed:
            self._wanted, self._handle = facts, None
            if self._failed is not None and self._failed[0] is not MissReason.UNREACHABLE:
                self._failed = None  # that fault was the earlier namespace's, not the store's
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="kv-open", daemon=True)
                self._thread.start()

    def now(self) -> NamespaceHandle | None:
        """The handle; None while there is none. Does not block."""
        return self._handle

    def why_not(self) -> tuple[MissReason, str]:
        if self._wanted is None:
            return MissReason.DISABLED, "nothing was opened yet"
        return self._failed or (MissReason.WARMING, "the namespace is being opened")

    def why(self, number: int) -> MissReason:
        """Why the namespace of that number did not open in time."""
        is_past = self._wanted is not None and self._wanted.number > number
        return MissReason.DISABLED if self._closed or is_past else self.why_not()[0]

    def wait(self, number: int, seconds: float) -> NamespaceHandle | None:
        """Wait for the namespace of that number, and return its handle; None after `seconds`, or at once if a later
        namespace is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(number), seconds)
            return self._handle if self._wanted is not None and self._wanted.number == number else None

    def tell_when_open(self, tell: Callable[[], None]) -> None:
        """Call `tell` once there is a handle: now, or in the thread that opens it. It must not raise."""
        with self._changed:
            if self._handle is None:
                self._tell_when_open = tell
                return
        tell()

    def close(self, seconds: float) -> None:
        with self._changed:
            self._closed, self._handle = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _is_known(self, number: int) -> bool:
        wanted = self._wanted.number if self._wanted is not None else -1
        return self._closed or wanted > number or (wanted == number and self._handle is not None)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._wanted is not None and self._handle is None))
                wanted = self._wanted
                if self._closed or wanted is None:
                    return
            handle = states = None
            with contained(self._not_opened):
                handle, states = self._opened(wanted)
            if handle is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)
                continue
            tell = None
            with self._changed:
                if self._wanted is wanted and not self._closed:
                    self.states, self._handle = states, handle
                    self._changed.notify_all()
                    tell, self._tell_when_open = self._tell_when_open, None
            if tell is not None:
                tell()
            self._failed, self._is_told = None, False

    def _opened(self, wanted: NamespaceSpec) -> tuple[NamespaceHandle, PrefixStates | None]:
        if self._store is None:
            self._store = self._open_store()
        handle = self._named(wanted, wanted.layout, wanted.codec, wanted.config)
        handle.is_told = self._is_reported
        if wanted.states is None or not wanted.has_kv:
            return handle, PrefixStates(handle) if wanted.states is not None else None
        config = state_config(wanted.config, wanted.groups, handle.namespace.digest().hex())
        return handle, PrefixStates(self._named(wanted, wanted.states, "raw", config))

    def _named(self, wanted: NamespaceSpec, layout: Layout, codec: str, config: Mapping[str, str]) -> NamespaceHandle:
        assert self._store is not None
        return self._store.namespace(
            model=wanted.model,
            layout=layout,
            codec=codec,
            weights_epoch=wanted.weights_epoch,
            config=config,
            shard=self._shard if layout.head_shards > 1 else None,
            name=wanted.name,
        )

    def _not_opened(self, error: Exception) -> None:
        if self._closed:
            return
        text = str(error).partition("\n")[0]
        self._failed = reason_of(error), text
        if not self._is_told:
            _log.warning("every look-up is a miss until the store is there: %s", text)
        self._is_told = True
