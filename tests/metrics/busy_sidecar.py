"""A sidecar that served hits, misses of each kind that clients can bring about, a corrupt block, an eviction and moves,
for what is held against its scrape: rules, dashboard and the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from elsewhere.courier import RawCourier
from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle
from kvstore.edge.pages import ALWAYS
from kvstore.protocol import courier as c
from kvstore.status.page import StatusPage
from metrics.scraped import Scrape
from service.sidecar import Sidecar
from simulation.two_tiers import wait_until_idle
from tiering.frame import HEADER_BYTES
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.scrub import ScrubLimits
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

BLOCK = 64
CAUSED = (
    MissReason.ABSENT,
    MissReason.EVICTED,
    MissReason.DIVERGED,
    MissReason.OTHER_NAMESPACE,
    MissReason.IN_FLIGHT,
    MissReason.PINNED_FULL,
    MissReason.CORRUPT,
)
"""Misses that it has seen at the end."""
SOURCES = (
    c.SourceFigures("peer", "10.0.0.7:9400", "up", 3, 0, 3 << 20, 0, 5, 3, 1, {"digest": 2}, 2.5, 8.0, 40),
    c.SourceFigures("peer", "10.0.0.8:9400", "banned", refused={"seal": 1}, detail="for 10 s"),
    c.SourceFigures("remote", "valkey", "open", 0, 9, 0, 9 << 20, 4, 0, 6, {}, 0.75, 21.5, 0, "timed out"),
    c.SourceFigures("directory", "10.0.0.2:9500", "down", lookups=7, failures=7, detail="connection refused"),
)
"""One in each state."""


def tell_sources(courier: RawCourier) -> None:
    """Until it goes, the sidecar tells of them."""
    courier.questions(told=c.CourierFigures(list(SOURCES), ["directory 10.0.0.2:9500 does not answer"], 1, 3, 3 << 20))


def metrics_of(sidecar: Sidecar) -> StatusPage:
    facts = sidecar.admin.numbers
    return StatusPage(lambda: replace(facts(), state="ready", version="0.0.0"), sidecar.core.clock, ALWAYS)


def scrape(page: StatusPage) -> Scrape:
    """As it is now, and not as it was within the last second."""
    return Scrape(page.render().decode())


@contextmanager
def busy_sidecar(directory: Path) -> Iterator[tuple[Sidecar, StatusPage]]:
    """Everything happened when it is there, and no move between the tiers is left."""
    options = {
        "dram": "1MiB",
        "extent": "64KiB",
        "nvme": "1MiB",
        "slab": "64KiB",
        "indexes": LmdbMaker,
        "nvme_writes": 100.0,
        "scrub_limits": ScrubLimits(1 << 30, first_seconds=0.0, pass_seconds=0.1),
    }
    layout = small_layout()
    with Sidecar(directory, **options) as earlier, earlier.client() as store:  # what it left is taken in
        before = ids(4 * BLOCK, 800_000)
        assert (
            store.namespace(model=MODEL, layout=layout).put(before, random_pages(layout, 4), durability="disk").stored
        )
    with Sidecar(directory, couriers=True, **options) as sidecar, sidecar.client() as store, ExitStack() as there:
        assert sidecar.store.warmed(20)
        courier = RawCourier(sidecar.courier_path)
        there.callback(courier.close)
        tell_sources(courier)
        handle, other = (store.namespace(model=name, layout=layout) for name in (MODEL, "other"))
        _hits_and_misses(sidecar, handle, other)
        _eviction(sidecar, handle)
        _pinned_full(handle)
        wait_until(lambda: (sidecar.store.usage().scrub or _none()).passes > 0)
        while sidecar.whatif.step():
            pass
        wait_until_idle(sidecar.core)
        yield sidecar, metrics_of(sidecar)


def _none() -> object:
    raise AssertionError("nothing is scrubbed")


def get(handle: NamespaceHandle, prompt: list[int]) -> None:
    with handle.lease(handle.match(prompt), deadline_ms=5000) as lease:
        handle.get(lease, blank_pages(handle.layout, len(prompt) // BLOCK))


def _hits_and_misses(sidecar: Sidecar, handle: NamespaceHandle, other: NamespaceHandle) -> None:
    layout, prompt = handle.layout, ids(4 * BLOCK)
    get(handle, prompt)  # absent
    assert handle.put(prompt, random_pages(layout, 4), durability="disk").stored == 4
    get(handle, prompt)  # a hit
    get(other, prompt)  # other_namespace
    get(handle, prompt[: 2 * BLOCK] + ids(2 * BLOCK, 900_000))  # diverged
    handle.match(prompt)  # found, and not claimed
    with handle.lease(handle.match(prompt), deadline_ms=5000) as lease:  # corrupt
        sidecar.core.spans([lease.reply.places[0][3]])[0].view[HEADER_BYTES + 5] ^= 1
        handle.get(lease, blank_pages(layout, 4))
    later = ids(2 * BLOCK, 500_000)
    number = sidecar.core.namespaces()[0].number
    keys = handle.match(later).keys
    reserved = sidecar.core.reserve(number, keys, 0, 0, None)
    get(handle, later)  # in_flight
    assert handle.put(later, random_pages(layout, 2)).reason is MissReason.IN_FLIGHT
    sidecar.core.abort(reserved.reservation)


def _eviction(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    first = ids(4 * BLOCK, 100_000)
    handle.put(first, random_pages(handle.layout, 4))
    sidecar.store.evict(1000)
    get(handle, first)  # evicted
    kept = ids(4 * BLOCK, 200_000)
    handle.put(kept, random_pages(handle.layout, 4), durability="disk")
    sidecar.store.evict(1000)
    get(handle, kept)  # a hit of NVMe, which promotes


def _pinned_full(handle: NamespaceHandle) -> None:
    with ExitStack() as held:
        for start in range(300_000, 400_000, 1000):
            prompt = ids(8 * BLOCK, start)
            handle.put(prompt, random_pages(handle.layout, 8))
            match = handle.match(prompt)
            lease = held.enter_context(handle.lease(match, deadline_ms=5000))
            if lease.blocks < match.blocks:
                return
    raise AssertionError("everything could be pinned")
