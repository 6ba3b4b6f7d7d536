"""The half of a connector in an engine's worker: it loads and saves pages as the other half decided.

    step   begin (fences) > loads that the step waits for > forward > loads beside it, saves > finished loads, reports

Loads and saves run on threads of their own. A save reads pages that the engine may want back at any time: the scheduler
names such saves in the step that writes to their pages (`cancelled_saves`), and `begin` returns when none of them reads
any more. Any fault of the store becomes a miss here: nothing raises because of it. Must never import an engine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import torch

from engine_adapter.audit.audits import AuditResult
from engine_adapter.audit.blocks import compare_block, compare_opaque, compare_states
from engine_adapter.paged.namespace_opener import NamespaceOpener
from engine_adapter.paged.pages import EnginePages, opaque_dtype
from engine_adapter.paged.plans import SavePatience
from engine_adapter.paged.step_plan import (
    LoadOrder,
    LoadReport,
    SaveOrder,
    SaveReport,
    StepPlan,
    StepReports,
)
from kvstore.block.account import MissReason, reason_of
from kvstore.block.identity import Prompt
from kvstore.block.layout import Attention, Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.client.edge import contained
from kvstore.client.get import Loaded
from kvstore.client.handle import Lease, NamespaceHandle, OpenStore
from tiering.frame import KEY_BYTES

_log = getLogger(__name__)

PIECE_BYTES = 8 << 20
"""A save is put in pieces of this size: other clients' blocks go in between, and a fence waits for one at most."""
SAVE_NICENESS = 10
"""Niceness of the thread that saves: an engine that computes on the same CPU cores goes first."""
OPEN_SECONDS = 5.0
"""How long a load waits for its namespace to be opened, which happens once."""
WINDOW_FENCE_SECONDS = 0.02
"""With sliding windows, how long a step waits for saves of pages that it wants."""
IDLE_WAIT_SECONDS = 0.005
"""An engine that only waits for loads would spin, and keep the interpreter's lock from the loader."""
PRESSED_SHARE = 0.5
"""Of `save_bytes`: if more waits to be saved, saves no longer yield to the engine."""
SAVE_DEADLINE_MS = 5000.0
"""How long the put of a piece waits for the store, in a thread that no request waits for."""
NO_LAYER = 1 << 30


@dataclass(eq=False, slots=True)
class _Reader:
    """An order that reads pages, as `kvstore.client.handle.Reading`. after: the step that computes them. since: when it
    came. bytes: queued for it."""

    worker: PagedWorker
    order: SaveOrder
    after: Any
    since: float
    bytes: int = 0
    dropped: bool = False
    is_reading: bool = False

    def begin(self) -> bool:
        return self.worker.begin_reading(self)

    def end(self) -> None:
        self.worker.end_reading(self)


class PagedWorker:
    """One worker's half. The engine's thread calls all methods that name no other. It waits only for a fence, for loads
    that a step waits for (`OPEN_SECONDS` for their namespace, then the store's own deadlines), for all loads where
    pages move, and at most `IDLE_WAIT_SECONDS` in a step that computes nothing."""

    def __init__(
        self,
        pages: EnginePages,
        open_store: Callable[[str], OpenStore],
        clock: Callable[[], float],
        *,
        load_threads: int,
        save_bytes: int,
        save_patience: float | None = 0.0,
    ) -> None:
        """open_store: of a session. clock: monotonic seconds. save_patience: seconds for which a save waits until the
        engine is idle; not if pages leave a window while it waits. None: a save is over before the next step begins,
        since the engine then writes to pages before it tells which they are."""
        self.pages = pages
        self._told, self._rank = pages.facts, pages.facts.rank
        self._clock = clock
        self._save_bytes = save_bytes
        self._lock = threading.Lock()
        # By who waits: a change wakes the threads that wait for it, and no other takes the interpreter's lock for it.
        self._changed, self._loaders, self._savers = (threading.Condition(self._lock) for _ in range(3))
        self._session = ""
        self._namespace = NamespaceOpener(lambda: open_store(self._session), self._rank)
        self._loads: deque[tuple[LoadOrder, float, Any]] = deque()
        """Each with the time when it was ordered, and with the stream's mark behind earlier steps."""
        self._loading = 0
        self._saves: deque[_Reader] = deque()
        self._saving: _Reader | None = None
        """By one thread, since ranks that put parts of the same blocks do so in one order."""
        self._waiting_bytes = 0
        self._frees_early = any(group.attention is not Attention.FULL for group in pages.facts.groups)
        """Whether the engine takes pages back from requests that run."""
        self._save_patience = SavePatience(0.0 if self._frees_early else save_patience or 0.0)
        self._is_hurried, self._saves_in_steps = False, save_patience is None
        self._done_loads: list[LoadReport] = []
        self._reports: list[LoadReport] = []
        self._save_reports: list[SaveReport] = []
        self.awaited_layers: dict[int, int] = {}
        """By order, of loads that the step needs layer by layer: the last loaded layer. Without any, no layer is waited
        for."""
        self._invalid: set[int] = set()
        self._failures = 0
        self._orders = StepPlan()
        self._told_step = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._load_loop, name=f"kv-load-{number}", daemon=True)
            for number in range(load_threads)
        ]
        self._threads.append(threading.Thread(target=self._save_loop, name="kv-save", daemon=True))
        for thread in self._threads:
            thread.start()

    def leave_pages(self) -> None:
        """What is in the pages is gone: drop saves, and return when no load writes to them any more."""
        with self._changed:
            numbers = {reader.order.number for reader in self._readers()}
        self._fence(numbers)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not (self.awaited_layers or len(self._done_loads) < self._loading)
            )

    def register(self, pages: EnginePages) -> None:
        """After `leave_pages`: the engine has these from here on. Where they lie otherwise than those of which the
        scheduler was told, they are refused."""
        if pages.facts != self._told:
            why = pages.facts.refused or "its pages were registered again, and lie otherwise than before"
            pages.facts = replace(self._told, refused=why)
        self.pages = pages

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(self, orders: StepPlan) -> None:
        """Before the engine writes to any page. Safe to call again with the same orders."""
        if orders is self._orders:
            return
        self._orders = orders
        if orders.number:
            self._save_patience.step_began()
        if orders.namespace is not None:
            self._session = orders.namespace.session
            self._namespace.want(orders.namespace)
        if orders.cancelled_saves:
            self._fence(set(orders.cancelled_saves))

    def start_loads(self) -> None:
        """Run the loads that the step waits for; begin the others."""
        orders, self._orders.loads = self._orders.loads, []
        before = self.pages.stream.mark() if orders else None  # earlier steps may still read these pages
        for order in orders:
            if order.waits and not order.layerwise:
                self._finish_load(self._load(order, self._clock()), order)
                continue
            with self._changed:
                self._loads.append((order, self._clock(), before))
                if order.waits:
                    self.awaited_layers[order.number] = -1
                else:
                    self._loading += 1
                self._loaders.notify()

    def wait_layer(self, name: str) -> None:
        """Wait until this layer's pages are loaded, or the load has failed."""
        number = self.pages.numbers.get(name, NO_LAYER)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or min(self.awaited_layers.values(), default=NO_LAYER) >= number
            )

    def start_saves(self) -> None:
        """After the forward: its pages are complete."""
        if not self._orders.saves and not self.awaited_layers:
            return
        if self.awaited_layers:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self.awaited_layers)
        orders, self._orders.saves = self._orders.saves, []
        if not orders:
            return
        after = self.pages.stream.mark()
        now = self._clock()
        is_stale = self._orders.failures_seen.get(self._rank, 0) != self._failures
        with self._changed:
            is_first = not self._saves
            for order in orders:
                size = self._bytes_of(order)
                # A step computed behind a failed load is wrong, until the scheduler knows and repeats it.
                if is_stale or self._waiting_bytes + size > self._save_bytes or self._closed:
                    if not is_stale and self._saves:  # if they had not waited, there might be room
                        self._save_patience.gave_up(now)
                    reason = None if is_stale else MissReason.BUSY
                    lost = SaveReport(order.number, order.request, self._rank, reason=reason, dropped=True)
                    self._save_reports.append(lost)
                    continue
                self._waiting_bytes += size
                self._saves.append(_Reader(self, order, after, now, size))
            if is_first or not self._pause_of(self._saves[0]):  # else the saver sleeps, and would take this core
                self._savers.notify_all()
        if self._saves_in_steps:
            self._fence({order.number for order in orders})

    def finished(self) -> tuple[set[str], set[str], set[int]]:
        """Requests whose loads are over, those of them that got less, and invalid pages: theirs, and those of loads
        that the step waited for."""
        if not self._loading and not self.awaited_layers and not self._invalid:
            return set(), set(), set()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.awaited_layers)
            if not self._orders.number and self._loading and not self._done_loads:
                self._changed.wait(IDLE_WAIT_SECONDS)
            done, self._done_loads = self._done_loads, []
            self._loading -= len(done)
            self._reports += done
            invalid, self._invalid = self._invalid, set()
            failed = {report.request for report in done if report.reason is not None}
            return {report.request for report in done}, failed, invalid

    def take_reports(self) -> StepReports | None:
        """New reports for the scheduler; None without any. The step is over."""
        with self._lock:
            self._save_patience.step_ended(self._clock())
            step = self._orders.number if self._orders.number != self._told_step else 0
            self._told_step = self._orders.number
            if not step and not self._reports and not self._save_reports:
                return None
            failures = {self._rank: self._failures} if self._failures else {}
            taken = StepReports(self._reports, self._save_reports, failures, step=step)
            self._reports, self._save_reports = [], []
            return taken

    def close(self, seconds: float = 5.0) -> None:
        """Finish waiting saves as far as time allows; then disconnect. Safe to call again."""
        give_up_at = self._clock() + seconds
        with self._changed:
            self._is_hurried = True
            self._savers.notify_all()
            while (self._saves or self._saving) and not self._closed and self._clock() < give_up_at:
                self._changed.wait(0.05)
            self._closed = True
            for waiting in (self._changed, self._loaders, self._savers):
                waiting.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - self._clock()) + 0.5)
        self._namespace.close(max(0.0, give_up_at - self._clock()) + 0.5)

    def _bytes_of(self, order: SaveOrder) -> int:
        facts = self.pages.facts
        if order.ticket:
            return 0  # it is not held up for room: its lease runs out
        if order.is_state:
            return sum(len(group.layers) * sum(group.widths) for group in facts.groups if group.is_state)
        run, page = (
            order.tables[0],
            next((one.page_tokens for one in facts.groups if not one.is_state), facts.page_tokens),
        )
        tokens = (run.first + len(run.pages)) * page - order.first_token
        return tokens * facts.page_bytes // facts.page_tokens

    # Loads -----------------------------------------------------------------------------------------------------------

    def _load_loop(self) -> None:
        while True:
            with self._changed:
                while not self._loads and not self._closed:
                    self._loaders.wait()
                if self._closed:
                    return
                order, asked_at, before = self._loads.popleft()
            with self.pages.stream.behind(before):
                report = self._load(order, asked_at)
            if order.waits:
                self._finish_load(report, order)
                continue
            with self._changed:
                self._mark_invalid(report, order)
                self._done_loads.append(report)
                self._changed.notify_all()
                if self._saves and len(self._done_loads) >= self._loading:
                    self._savers.notify_all()

    def _finish_load(self, report: LoadReport, order: LoadOrder) -> None:
        with self._changed:
            self._mark_invalid(report, order)
            self._reports.append(report)
            self.awaited_layers.pop(order.number, None)
            self._changed.notify_all()

    def _mark_invalid(self, report: LoadReport, order: LoadOrder) -> None:
        if report.tokens >= order.stop_token:
            return
        if order.waits:
            self._failures += 1
        first = max(report.tokens, order.first_token) // self.pages.facts.page_tokens
        last = -(-order.stop_token // self.pages.facts.page_tokens)
        for run in order.tables:
            self._invalid.update(run.pages[max(0, first - run.first) : last - run.first])

    def _load(self, order: LoadOrder, asked_at: float) -> LoadReport:
        """Any thread. Attach, copy, verify, release."""
        tokens = order.first_token
        reason: MissReason | None = None

        def failed(error: Exception) -> None:
            nonlocal tokens, reason
            tokens, reason = order.first_token, self._fault(error)

        with contained(failed):
            here = order.here
            namespace = here.namespace if here is not None else self._opened(order.namespace, OPEN_SECONDS)
            if namespace is None:
                reason = self._namespace.why(order.namespace)
            else:
                tokens, reason = order.stop_token, None
                if order.tables:
                    tokens, reason = self._bring(namespace, order)
                states = self._states()
                if order.state is not None:
                    came = 0
                    if tokens >= order.stop_token and states is not None:  # where it ends early, there is no state
                        came, reason = self._bring(states, order.state)
                    tokens = tokens if came >= order.state.stop_token else order.first_token
        # An engine with several groups is told only by the reason that the load failed.
        reason = None if tokens >= order.stop_token else reason or MissReason.STALE_HINT
        seconds = self._clock() - asked_at
        return LoadReport(order.number, order.request, self._rank, tokens, seconds, reason)

    def _bring(self, namespace: NamespaceHandle, order: LoadOrder) -> tuple[int, MissReason | None]:
        """Up to which token, and why not further."""
        tokens, reason, here = order.first_token, None, order.here
        lease = here.lease if here is not None else namespace.attach(order.ticket)
        with nullcontext() if here is not None else lease:
            if lease.tokens <= order.first_token:
                return tokens, lease.reason or MissReason.STALE_HINT
            pages = self.pages.pages(order.tables, namespace.layout, order.first_token, is_exact=namespace.is_exact)
            for loaded in self._loaded(namespace, lease, pages, order):
                tokens, reason = min(loaded.tokens, order.stop_token), loaded.reason
        return max(tokens, order.first_token), reason

    def _loaded(self, namespace: NamespaceHandle, lease: Lease, pages: Pages, order: LoadOrder) -> Iterator[Loaded]:
        """At once, or layer by layer; the last report holds for all layers."""
        if not order.layerwise:
            yield namespace.get(lease, into=pages, first_token=order.first_token)
            return
        layers = sorted(layer for group in namespace.layout.groups for layer in group.layers)
        for layer, loaded in zip(layers, namespace.get_by_layer(lease, pages, order.first_token), strict=True):
            yield loaded
            with self._changed:
                if order.number in self.awaited_layers:
                    self.awaited_layers[order.number] = layer
                self._changed.notify_all()

    # Saves -----------------------------------------------------------------------------------------------------------

    def _save_loop(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._saving = None
                self._changed.notify_all()
                while not self._closed and (pause := self._pause()) != 0:
                    self._savers.wait(pause)
                if self._closed:
                    return
                self._saving = reader = self._saves.popleft()
            order, started = reader.order, self._clock()
            report = SaveReport(order.number, order.request, self._rank)
            with self.pages.stream.behind(reader.after):
                if order.ticket:
                    report = replace(report, results=self._audit(order, reader))
                else:
                    held, stored, reason = self._save(order, reader)
                    is_dropped = reader.dropped and reason is MissReason.DISABLED
                    report = replace(report, held=held, stored=stored, reason=reason, dropped=is_dropped)
            with self._changed:
                self._waiting_bytes -= reader.bytes
                if report.dropped:
                    self._save_patience.gave_up(self._clock())
                self._save_reports.append(replace(report, seconds=self._clock() - started))

    def _pause(self) -> float | None:
        """Seconds until the first save may go, 0 for now; None: wait for a change. Under the lock."""
        # Requests wait for loads; none waits for a save.
        if not self._saves or (len(self._done_loads) < self._loading and not self._saves_in_steps):
            return None
        return self._pause_of(self._saves[0])

    def _pause_of(self, save: _Reader) -> float:
        """How long one save still waits for the engine. Under the lock."""
        if not self._save_patience or self._is_hurried or self._waiting_bytes > PRESSED_SHARE * self._save_bytes:
            return 0
        if any(reader.order.is_urgent for reader in (save, *self._saves)):
            return 0
        return self._save_patience.seconds_left(save.since, self._clock())

    def _yield_to_engine(self, save: _Reader) -> None:
        """The saver's thread, between two pieces: wait while an engine that has work again goes first."""
        if not self._save_patience:
            return
        with self._changed:
            while not self._closed and not save.dropped and (pause := self._pause_of(save)):
                self._savers.wait(pause)

    def _audit(self, order: SaveOrder, reader: _Reader) -> tuple[AuditResult, ...]:
        """Any thread. Compare the stored block with the computed one."""
        with contained(self._fault):
            kv = self._opened(order.namespace, OPEN_SECONDS)
            namespace = self._states() if kv is not None and order.is_state else kv
            if kv is None or namespace is None:
                return ()
            first, layout = 0 if order.is_state else order.first_token, namespace.layout
            pages = self.pages.pages(order.tables, layout, first, is_exact=namespace.is_exact)
            into = _blank(pages, layout)
            with namespace.attach(order.ticket) as lease:
                if namespace.get(lease, into=into, first_token=first).tokens < first + layout.block_tokens:
                    return ()
            if not reader.begin():
                return ()
            try:
                computed = _block(pages, layout, first)
                self.pages.stream.wait()  # these are copies: pages may be written to once they are complete
            finally:
                reader.end()
            if not computed:
                return ()
            stored, codec = _block(into, layout, first), kv.namespace.codec
            if order.is_state:
                groups = [group for group in self.pages.facts.groups if group.is_state]
                tensors = {layer: group.tensors for group in groups for layer in group.layers}
                made_of, tokens = getattr(torch, groups[0].made_of), order.first_token + layout.block_tokens
                return (compare_states(stored, computed, tensors, made_of, tokens, codec, self.pages.experts),)
            # With several groups a layer's depth in the model is unknown: all may then differ as much as the last.
            deepest = len(pages.planes) - 1 if len(layout.groups) > 1 else None
            dtype = opaque_dtype(layout.packing)
            if dtype is not None:
                result = compare_opaque(stored, computed, dtype, deepest, self.pages.experts)
                return () if result is None else (result,)
            is_first, experts = order.first_token == 0, self.pages.experts
            return (compare_block(stored, computed, codec, deepest, is_first=is_first, experts=experts),)
        return ()

    def _save(self, order: SaveOrder, save: _Reader) -> tuple[int, int, MissReason | None]:
        """Any thread. Returns leading blocks that are held, new ones, and why there are no more."""
        stored, held = 0, 0
        reason: MissReason | None = None

        def failed(error: Exception) -> None:
            nonlocal reason
            reason = self._fault(error)

        with contained(failed):
            namespace = self._opened(order.namespace, OPEN_SECONDS, is_state=order.is_state)
            if namespace is None:
                return 0, 0, self._namespace.why(order.namespace)
            block = namespace.block_tokens
            keys = [order.keys[at : at + KEY_BYTES] for at in range(0, len(order.keys), KEY_BYTES)]
            step = max(1, PIECE_BYTES * namespace.layout.head_shards // namespace.layout.raw_bytes)
            first = held = order.first_token // block
            if first == len(keys):
                namespace.renew(Prompt(first * block, keys), order.ttl, order.priority, SAVE_DEADLINE_MS)
            while first < len(keys):
                stop = min(first + step, len(keys))
                runs = self.pages.cut(order.tables, namespace.layout, first * block, stop * block)
                pages = self.pages.pages(runs, namespace.layout, first * block, is_exact=namespace.is_exact)
                prompt = Prompt(stop * block, keys[:stop])
                # A name that all ranks' puts of these blocks share.
                collective = f"{order.number}.{first}" if namespace.shard is not None else ""
                result = namespace.put(
                    prompt,
                    pages,
                    first * block,
                    ttl=order.ttl,
                    priority=order.priority,
                    reading=save,
                    collective=collective,
                    deadline_ms=SAVE_DEADLINE_MS,
                )
                stored += result.stored
                if result.reason is not None:
                    return result.stopped_at or 0, stored, result.reason
                first = held = stop
                if first < len(keys):
                    self._yield_to_engine(save)
        return held, stored, reason

    def _fence(self, numbers: set[int]) -> None:
        """Cancel these saves; when this returns, none of them reads pages any more.

        Saves of pages that leave a window get a short grace period: without those blocks nothing later in the prompt
        could be stored any more.
        """
        with self._changed:
            if self._frees_early:
                self._changed.wait_for(lambda: self._closed or not self._reads_any(numbers), WINDOW_FENCE_SECONDS)
            kept: deque[_Reader] = deque()
            for reader in self._saves:
                if reader.order.number not in numbers:
                    kept.append(reader)
                else:
                    self._waiting_bytes -= reader.bytes
                    lost = SaveReport(reader.order.number, reader.order.request, self._rank, dropped=True)
                    self._save_reports.append(lost)
                    self._save_patience.gave_up(self._clock())
            self._saves = kept
            fenced = self._saving
            if fenced is not None and fenced.order.number in numbers:
                fenced.dropped = True
                self._savers.notify_all()
                self._changed.wait_for(lambda: not fenced.is_reading)

    def _reads_any(self, numbers: set[int]) -> bool:
        return any(reader.order.number in numbers for reader in self._readers())

    def _readers(self) -> list[_Reader]:
        return [*self._saves, *([self._saving] if self._saving is not None else ())]

    def begin_reading(self, save: _Reader) -> bool:
        """A saver's thread: whether this save may still read its pages."""
        with self._changed:
            save.is_reading = not save.dropped
            return save.is_reading

    def end_reading(self, save: _Reader) -> None:
        with self._changed:
            save.is_reading = False
            self._changed.notify_all()

    # The store -------------------------------------------------------------------------------------------------------

    def _opened(self, number: int, seconds: float, *, is_state: bool = False) -> NamespaceHandle | None:
        handle = self._namespace.wait(number, seconds)
        return self._states() if handle is not None and is_state else handle

    def _states(self) -> NamespaceHandle | None:
        states = self._namespace.states
        return states.handle if states is not None else None

    def _fault(self, error: Exception) -> MissReason:
        reason = reason_of(error)
        if reason is not MissReason.DISABLED:
            _log.warning("the store failed a worker: %s: %s", type(error).__name__, str(error).partition("\n")[0])
        return reason


def lower_priority() -> None:
    """Of the calling thread, which saves."""
    if sys.platform == "linux":  # on other systems it would apply to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)


def _blank(pages: Pages, layout: Layout) -> Pages:
    planes, groups = {}, {}
    for group in layout.groups:
        of_group = pages.of_group(group.name)
        groups[group.name] = GroupPages(range(of_group.stop_page), 0, of_group.page_tokens)
        for layer in group.layers:
            planes[layer] = [plane[: of_group.stop_page].clone() for plane in pages.planes[layer]]
    return Pages(planes, range(len(pages.table)), pages.page_tokens, groups)


def _block(pages: Pages, layout: Layout, first_token: int) -> dict[int, list[torch.Tensor]]:
    """The numbers of all pages, as one block: by layer and plane [kv_head, row, width]. Without groups whose first
    pages the engine has freed, and those of which a load brings a part only."""
    found = {}
    for group in layout.groups:
        of_group = pages.of_group(group.name)
        needed = group.needed_from(first_token + layout.block_tokens)
        if of_group.first_page or needed - first_token >= of_group.page_tokens:
            continue
        table = torch.tensor(list(of_group.table))
        for layer in group.layers:
            found[layer] = [
                plane[table.to(plane.device)].flatten(0, 1).transpose(0, 1).clone() for plane in pages.planes[layer]
            ]
    return found
