"""The store below LMCache: `KvStoreL2`, an L2 adapter of its `plugin` kind.

LMCache copies between engines and its own memory (L1); this copies between L1 and the store. It sees objects, each the
KV of one chunk of tokens in one group of layers on one rank, and their keys: hashes over the whole prefix. All else
that decides an object's bytes is in the namespace: LMCache's keys have nothing of it. LMCache submits tasks from own
threads and waits for answers without a limit, so each is answered by a deadline, whatever happens. Must know nothing of
how chunks are kept. Any fault of the store is an object that is not found, or not stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from itertools import count
from logging import getLogger
from math import prod
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj, MemoryObjMetadata
from lmcache.v1.platform import create_event_notifier
from msgspec import Meta

import kvstore
from engine_adapter.chunks import (
    ChunkOutcomes,
    ChunkRun,
    ChunkSettings,
    ChunkSpace,
    Milliseconds,
    chunk_layout,
    open_twice,
)
from engine_adapter.model_files import model_fingerprint
from engine_adapter.paged.step_plan import NamespaceSpec
from kvstore.block.errors import BadInput
from kvstore.client.edge import contained, in_one_line
from kvstore.client.lease import Lease
from kvstore.config import read

HASH_BYTES = 32
"""Of a key's hash: blake3 or sha256_cbor. Shorter ones may be another prompt's."""
LOAD_THREADS = 2
MAX_LAYOUTS = 64
MAX_LOCKED_KEYS = 1 << 16
"""Beyond that the oldest are unlocked."""
Layout: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]
Keys: TypeAlias = list[ObjectKey]
Row: TypeAlias = tuple[ChunkSpace, list[int], list[bytes]]
"""Keys of one task: their space, their places in the task, and their names in the space."""
A = TypeVar("A")

_log = getLogger(__name__)


class L2Settings(ChunkSettings, frozen=True, kw_only=True):
    """`adapter_params`: docs/lmcache.md says what they mean."""

    model_name: Annotated[str, Meta(min_length=1, description="the model's name, as the engine names it")]
    model: str | None = None
    settings: Any = ""
    chunk_size: Annotated[int, Meta(ge=1)] = 256
    deadline_ms: Milliseconds = 500.0
    save_deadline_ms: Milliseconds = 5000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.model) is bool(self.model_dir):
            raise BadInput('model, model_dir: give either "model_dir", where the weights are, or "model", their digest')


class KvStoreL2(L2AdapterInterface):
    """Objects of LMCache's L1, kept in the store. Thread-safe.

    Raises `BadInput`, one line, for parameters that are not those of `L2Settings`, and for an L1 that is not in memory.
    """

    @in_one_line("KvStoreL2")
    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        given = self._given = read(L2Settings, params, "KvStoreL2: ")
        self._engine = f"lmcache {version('lmcache')}"
        if l1_memory_desc is None:
            raise BadInput("KvStoreL2: LMCache's L1 is not in host memory; use one of type DRAM")
        self._l1, self._model = l1_memory_desc, given.model or model_fingerprint(given.model_dir or "")
        self._stores = open_twice(kvstore.open, given.url, self._engine)
        self._outcomes, self._lock = ChunkOutcomes(), threading.Lock()
        self._spaces: dict[Layout, ChunkSpace | None] = {}
        self._locks: dict[ObjectKey, list[Lease | None]] = {}
        self._refused: set[str] = set()
        self._looking = _Lane[Bitmap]("look", 1, given.deadline_ms)
        self._loading = _Lane[Bitmap]("load", LOAD_THREADS, given.deadline_ms)
        self._storing = _Lane[L2StoreResult]("store", 1, given.save_deadline_ms)

    def get_store_event_fd(self) -> int:
        return self._storing.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looking.fd

    def get_load_event_fd(self) -> int:
        return self._loading.fd

    def submit_store_task(self, keys: Keys, objects: list[MemoryObj]) -> int:
        """Store objects. One that is there, or that another engine is storing, counts as stored."""
        return self._storing.begin(lambda ends_at: self._store(keys, objects, ends_at), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._storing.take_all()

    def submit_lookup_and_lock_task(self, keys: Keys, group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        """Find objects in any tier, and pin those in memory: of each group and rank the leading ones. Where others have
        more of the prompt, the last run in that, too: of a sliding window only the end may be stored."""
        found = Bitmap(len(keys))
        layouts = {group: _layout(desc) for group, desc in group_layout_descs.items()}
        return self._looking.begin(lambda ends_at: self._look(keys, layouts, found, ends_at), found)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looking.take(task_id)

    def submit_unlock(self, keys: Keys) -> None:
        """Take back one lock of each key. The client releases a lease that nothing refers to any more."""
        with self._lock:
            for key in keys:
                self._unlock(key)

    def submit_load_task(self, keys: Keys, objects: list[MemoryObj]) -> int:
        """Fill objects. A bit is set once its object is verified."""
        loaded = Bitmap(len(keys))
        return self._loading.begin(lambda ends_at: self._load(keys, objects, loaded, ends_at), loaded)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loading.take(task_id)

    def delete(self, keys: Keys) -> None:
        """Deletes nothing, and reports nothing as deleted: the store evicts by itself."""
        self._refuse("LMCache's eviction and quotas do not apply to the store; leave them out")

    def report_status(self) -> dict[str, Any]:
        """Healthy with or without a sidecar: all tasks are answered. objects: by outcome, as in `ChunkSpace`."""
        counts, is_away = self._outcomes.status()
        store = "cannot be asked" if is_away else "answers"
        return {"is_healthy": True, "type": type(self).__name__, "store": store, "objects": counts}

    def close(self) -> None:
        """Answer all tasks, wait for those that touch L1, and disconnect. Safe to call again."""
        for lane in (self._looking, self._loading, self._storing):
            lane.close()
        for space in self._spaces.values():
            if space is not None:
                space.close()

    def _look(self, keys: Keys, layouts: dict[int, Layout], found: Bitmap, ends_at: float) -> Bitmap:
        rows = self._rows(keys, [layouts[key.object_group_id] for key in keys])
        leading = [self._pinned(keys, row, 0, len(keys), found, ends_at) for row in rows]
        for row, blocks in zip(rows, leading, strict=True):
            in_run = False
            for at in range(max(leading) - 1, blocks, -1):
                was_in_run, in_run = in_run, bool(self._pinned(keys, row, at, at + 1, found, ends_at))
                if not _left_ms(ends_at) or (was_in_run and not in_run):
                    break
        return found

    def _pinned(self, keys: Keys, row: Row, start: int, stop: int, found: Bitmap, ends_at: float) -> int:
        space, places, names = row
        blocks, lease = space.pin(names[start:stop], _left_ms(ends_at) / 1000, counts=not start)
        with self._lock:
            for at in places[start : start + blocks]:
                self._locks.setdefault(keys[at], []).append(lease)
                found.set(at)
            while len(self._locks) > MAX_LOCKED_KEYS:
                self._unlock(next(iter(self._locks)))
        return blocks

    def _unlock(self, key: ObjectKey) -> None:
        if locks := self._locks.pop(key, [])[1:]:
            self._locks[key] = locks

    def _load(self, keys: Keys, objects: Sequence[MemoryObj], loaded: Bitmap, ends_at: float) -> Bitmap:
        for space, places, names in self._rows(keys, [_layout(one.metadata) for one in objects]):
            slots = self._slots(space, [objects[at] for at in places])
            done = space.load(names, space.pages(slots), _left_ms(ends_at)) if slots else 0
            loaded.batched_set(places[:done])
            with self._outcomes.caught():
                self._notify_keys_accessed([keys[at] for at in places[:done]])
        return loaded

    def _store(self, keys: Keys, objects: Sequence[MemoryObj], ends_at: float) -> L2StoreResult:
        """Each by itself, since LMCache does not tell what is before it; a prompt's last one first, since what was used
        last is evicted last."""
        kept, sizes = 0, dict[ObjectKey, int]()
        for space, places, names in self._rows(keys, [_layout(one.metadata) for one in objects]):
            slots = self._slots(space, [objects[at] for at in places])
            for at, name, slot in reversed(list(zip(places, names, slots, strict=False))):
                (is_kept,), new = space.store([], [name], space.pages([slot]), _left_ms(ends_at))
                kept += is_kept
                if new:  # LMCache must not be told of one twice
                    sizes[keys[at]] = space.chunk_bytes
        with self._outcomes.caught():
            self._notify_keys_stored(list(sizes), list(sizes.values()))
        return L2StoreResult(kept == len(keys), sum(sizes.values()))

    def _rows(self, keys: Keys, layouts: Sequence[Layout]) -> list[Row]:
        """The keys that can be served, of each group, rank and salt in the task's order."""
        places: dict[tuple[int, int, str, Layout], list[int]] = {}
        for at, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            if key.model_name != self._given.model_name:
                self._refuse(f"it serves the model {self._given.model_name!r}, and not {key.model_name!r}")
            elif len(key.chunk_hash) != HASH_BYTES:
                self._refuse(f"hashes of {len(key.chunk_hash)} bytes may collide; use --hash-algorithm blake3")
            else:
                places.setdefault((key.object_group_id, key.kv_rank, key.cache_salt, layout), []).append(at)
        found = [(self._space(layout), own) for (*_, layout), own in places.items()]
        return [(space, own, [_name(keys[at]) for at in own]) for space, own in found if space is not None]

    def _space(self, layout: Layout) -> ChunkSpace | None:
        with self._lock:
            if layout not in self._spaces and len(self._spaces) < MAX_LAYOUTS:
                self._spaces[layout] = None
                with contained(lambda error: self._refuse(str(error))):
                    self._spaces[layout] = self._opened(layout)
            return self._spaces.get(layout)

    def _opened(self, layout: Layout) -> ChunkSpace:
        size, name = sum(prod(shape) * dtype.itemsize for shape, dtype in layout), self._given.model_name
        what = "; ".join(f"{list(shape)} {dtype}" for shape, dtype in layout)
        facts = {"engine": self._engine, "model": name, "object": what, "settings": str(self._given.settings)}
        chunk = chunk_layout("objects", self._given.chunk_size, [size])
        spec = NamespaceSpec(1, "", self._model, chunk, "raw", self._given.weights_epoch, facts, name)
        slots = (self._l1.size - size) // self._l1.align_bytes + 1
        runs = [ChunkRun(self._l1.ptr, self._l1.align_bytes, size)]  # a slot wherever L1 may put an object
        return ChunkSpace(spec, runs, slots, self._stores, self._outcomes)

    def _slots(self, space: ChunkSpace, objects: Sequence[MemoryObj]) -> list[int]:
        """Where these objects lie in L1; empty if one of them does not."""
        places = [divmod(one.data_ptr - self._l1.ptr, self._l1.align_bytes) for one in objects]
        if any(off or not 0 <= slot < space.slots for slot, off in places):
            self._refuse("objects that do not lie in L1 are not served; leave out other L1s, or serde")
            return []
        return [slot for slot, _ in places]

    def _refuse(self, why: str) -> None:
        if why not in self._refused and len(self._refused) < MAX_LAYOUTS:
            self._refused.add(why)
            _log.warning("KvStoreL2: %s", why)


class _Lane(Generic[A]):
    """Tasks of one kind, threads for them, and answers until LMCache takes them. Thread-safe."""

    def __init__(self, name: str, threads: int, deadline_ms: float) -> None:
        self._event = create_event_notifier()
        self.fd: int = self._event.fileno()
        self._threads, self._seconds = ThreadPoolExecutor(threads, f"kv-{name}"), deadline_ms / 1000
        self._numbers, self._tasks = count(1), dict[int, tuple[Future[A], A]]()

    def begin(self, work: Callable[[float], A], default: A) -> int:
        """Begin a task; returns its number. work: is called with its deadline. default: the answer to a task that did
        not begin by then, that failed, or that waited when this was closed."""
        number, ends_at = next(self._numbers), time.monotonic() + self._seconds
        task = self._threads.submit(lambda: work(ends_at) if _left_ms(ends_at) else default)
        self._tasks[number] = task, default
        task.add_done_callback(self._tell)
        return number

    def _tell(self, task: Future[A]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("KvStoreL2: a task failed: %s: %s", type(error).__name__, error)
        self._event.notify()

    def take(self, number: int) -> A | None:
        task, default = self._tasks.get(number, (None, None))
        if task is None or not task.done():
            return None
        del self._tasks[number]
        return default if task.cancelled() or task.exception() is not None else task.result()

    def take_all(self) -> dict[int, A]:
        taken = {number: self.take(number) for number in list(self._tasks)}
        return {number: answer for number, answer in taken.items() if answer is not None}

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._event.close()


def _layout(of: MemoryLayoutDesc | MemoryObjMetadata) -> Layout:
    return tuple(zip(of.shapes or (), of.dtypes or (), strict=True))


def _name(key: ObjectKey) -> bytes:
    return b"%d %d %s\0" % (key.object_group_id, key.kv_rank, key.cache_salt.encode()) + bytes(key.chunk_hash)


def _left_ms(ends_at: float) -> float:
    return max(0.0, 1000 * (ends_at - time.monotonic()))
