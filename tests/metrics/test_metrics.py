"""The sidecar's metrics: they add up in every scrape, never fall, say what happened, and cost little."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from asking import Asking
from kvstore.block.account import HitTier, MissReason
from kvstore.protocol import messages as m
from kvstore.protocol.door import LeaseReply, MatchReply
from kvstore.service.accounting import NAMED_NAMESPACES, NAMED_TENANTS, Counting, NamespaceInfo, Outcome
from kvstore.service.connections import DoorLimits
from kvstore.status.declared import MetricKind, families
from kvstore.status.page import StatusPage
from kvstore.status.tree import SidecarStatus
from metrics.busy_sidecar import BLOCK, CAUSED, busy_sidecar, metrics_of, scrape
from metrics.promtool import promtool
from metrics.scraped import Scrape
from service.sidecar import Sidecar
from tiering.counts.tally import EVICTIONS, CheckedAt
from waiting import FakeClock, wait_until
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

METRICS = families(SidecarStatus)
VERBS = tuple(m.name_of(verb) for verb in get_args(m.Verb))
THREADS = 4
MOST_SERIES = 1000
MOST_BYTES = 100_000


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sidecar, StatusPage]]:
    with busy_sidecar(tmp_path_factory.mktemp("busy")) as both:
        yield both


@pytest.fixture(scope="module")
def page(busy: tuple[Sidecar, StatusPage]) -> Scrape:
    return scrape(busy[1])


# --- what it says ----------------------------------------------------------------------------------------------------


def test_every_family_has_series_once_everything_happened(page: Scrape) -> None:
    assert page.kinds == {one.name: one.kind.value for one in METRICS}
    for one in METRICS:
        ending = "_count" if one.kind is MetricKind.HISTOGRAM else ""
        labels = {frozenset(dict(mine)) for mine in page.series[f"{one.name}{ending}"]}
        assert labels == {frozenset(one.labels)}, one.name


def test_the_lint_of_prometheus_finds_nothing(page: Scrape) -> None:
    done = promtool("check", "metrics", text=page.text)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_all_that_may_happen_has_a_series_from_the_start(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        first = scrape(metrics_of(sidecar))
    reasons = {dict(labels)["reason"] for labels in first.series["kvstore_missed_tokens_total"]}
    assert reasons == set(MissReason)
    assert {dict(labels)["verb"] for labels in first.series["kvstore_requests_total"]} == set(VERBS)
    assert set(first.series["kvstore_missed_tokens_total"].values()) == {0.0}
    assert not any(name.startswith(("kvstore_nvme", "kvstore_moves", "kvstore_scrub")) for name in first.series)
    assert {dict(labels)["tier"] for labels in first.series["kvstore_tier_blocks"]} == {"dram"}


def test_it_says_what_happened(page: Scrape) -> None:
    assert page.adds_up()
    for reason in CAUSED:
        assert page.total("missed_tokens_total", reason=reason) > 0, reason
    assert page.total("granted_tokens_total", tier="dram") > 0
    assert page.total("granted_tokens_total", tier="nvme") == 4 * BLOCK
    assert page.total("revoked_tokens_total") == BLOCK == page.total("missed_tokens_total", reason="corrupt")
    assert page.total("found_tokens_total") - page.total("claimed_tokens_total") == 4 * BLOCK
    assert page.total("reports_total") == 1
    assert page.total("damaged_frames_total", where="report") == 1 and page.total("damaged_frames_total") == 1
    assert page.total("quarantined_blocks_total", tier="dram") == 1
    assert page.total("evicted_blocks_total", tier="dram", to="nvme") >= 4
    assert page.total("evicted_blocks_total", tier="dram", to="nothing") >= 4
    assert page.total("eviction_idle_seconds_count", tier="dram") >= 8
    assert page.total("wanted_again_seconds_count", tier="dram") >= 1
    assert page.total("moved_bytes_total", kind="promote") > 0 < page.total("moved_bytes_total", kind="demote")
    assert page.total("nvme_written_bytes_total") >= page.total("moved_bytes_total", kind="demote")
    assert page.total("verified_bytes_total", where="load") == page.total("moved_bytes_total", kind="promote")
    assert page.total("moves_total", kind="promote", result="done") >= 4
    assert page.total("move_duration_seconds_count", kind="promote") >= 4
    assert page.total("lease_wait_seconds_count", tier="nvme", result="whole") == 1
    assert page.total("scrub_last_pass_timestamp_seconds") > 1.7e9
    assert page.total("connections", door="tenant") == 1
    assert page.total("sessions") == 1, "the engine's: a courier has none of its own"
    assert page.total("requests_total", verb="match") > 0 < page.total("door_wait_seconds_count")
    put = {name: page.total("put_tokens_total", result=name) for name in ("reserved", "refused")}
    assert put["reserved"] >= page.total("stored_tokens_total") > 0
    assert page.total("put_refused_tokens_total") == put["refused"]
    assert page.total("put_duration_seconds_count") > 0
    assert page.total("state", state="ready") == 1 == page.total("state")
    assert page.total("tier_budget_bytes", tier="dram") == 1 << 20
    assert page.total("lookups_total") == page.total("lookup_duration_seconds_count")
    assert page.total("leases_total") == sum(page.series["kvstore_lease_wait_seconds_count"].values())


def test_what_is_counted_twice_is_the_same(busy: tuple[Sidecar, StatusPage]) -> None:
    sidecar, metrics = busy
    facts, page = sidecar.admin.facts(), scrape(metrics)
    looked = facts.looked
    for tier in ("dram", "nvme"):
        granted = page.total("granted_tokens_total", tier=tier) - page.total("revoked_tokens_total", tier=tier)
        assert granted == looked.hit_tokens.get(tier, 0)
    assert page.total("found_tokens_total") - page.total("claimed_tokens_total") == looked.found_tokens
    evicted = page.total("evicted_blocks_total") - page.total("evicted_blocks_total", to="nvme")
    assert evicted - page.total("evicted_blocks_total", to="dram") == facts.counters["evicted_blocks"]
    assert page.total("quarantined_blocks_total") == facts.counters["quarantined_blocks"]
    assert page.total("tier_blocks", tier="nvme") == sum(one.nvme_blocks or 0 for one in facts.namespaces)


def test_who_is_turned_away_and_what_is_no_message_is_counted(tmp_path: Path) -> None:
    with Sidecar(tmp_path, door=DoorLimits(connections=1)) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=small_layout()).match(ids(BLOCK))
        metrics = metrics_of(sidecar)
        with socket.socket(socket.AF_UNIX) as another:
            another.connect(str(sidecar.path))
            wait_until(lambda: scrape(metrics).total("refused_connections_total", reason="full") == 1)
        with socket.socket(socket.AF_UNIX) as operator:
            operator.connect(str(sidecar.admin_path))
            operator.sendall(bytes([4, 0, 0, 0]) * 4)
            wait_until(lambda: scrape(metrics).total("malformed_messages_total") == 1)
        page = scrape(metrics)
        assert page.total("refused_connections_total") == 1 and page.total("connections", door="tenant") == 1


def test_no_text_of_a_client_is_in_a_label_of_a_counter(tmp_path: Path) -> None:
    strange = 'a"b\\c\nd{e="f"}'
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        store.namespace(model=strange, layout=small_layout(), name=strange).match(ids(BLOCK))
        page = scrape(metrics_of(sidecar))
    (info,) = page.series["kvstore_namespace_info"]
    assert dict(info)["model"] == strange.replace("\n", "")
    others = {name: series for name, series in page.series.items() if not name.endswith("_info")}
    assert not [name for name, series in others.items() for labels in series if "d{e" in str(labels)]


# --- sums ------------------------------------------------------------------------------------------------------------


def has_both(page: Scrape) -> bool:
    """Whether tokens were taken back, and found by leases that no look-up came before."""
    return page.total("revoked_tokens_total") > 0 < page.total("claimed_tokens_total")


def counted(least: int, is_so: Callable[[], bool], most_seconds: float = 20.0) -> Iterator[int]:
    """That many at least, and on until something is so or time is over."""
    end = time.monotonic() + most_seconds
    for number in itertools.count():
        if number >= least and (is_so() or time.monotonic() > end):
            return
        yield number


@pytest.mark.parametrize("snapshots", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_sum_holds_in_each_snapshot_under_load(tmp_path: Path, snapshots: int) -> None:
    """Clients in several threads look up, lease, read, store and report; each snapshot adds up, and no
    counter falls."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    over, failed, layout = threading.Event(), [], small_layout()
    with Sidecar(tmp_path, dram="2MiB", extent="64KiB") as sidecar:
        metrics, done = metrics_of(sidecar), [0] * THREADS

        def work(number: int) -> None:
            chooser = random.Random(seed + number)
            try:
                with sidecar.client() as store:
                    handle = store.namespace(model=f"{MODEL}{number % 2}", layout=layout)
                    while not over.is_set():
                        blocks = chooser.randint(1, 6)
                        prompt = ids(BLOCK * blocks, 1000 * chooser.randrange(40))
                        match = handle.match(prompt)
                        if chooser.random() < 0.3:
                            handle.put(prompt, random_pages(layout, blocks))
                        elif chooser.random() < 0.8:
                            with handle.lease(match, deadline_ms=1000) as lease:
                                if lease.blocks and chooser.random() < 0.3:
                                    Asking(handle.door).report(lease.reply.lease, chooser.randrange(lease.blocks), 0)
                                else:
                                    handle.get(lease, blank_pages(layout, blocks))
                        done[number] += 1
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        began, before, moved = time.perf_counter(), None, 0
        try:
            for _ in counted(snapshots, lambda: has_both(scrape(metrics))):
                now = scrape(metrics)
                assert now.adds_up()
                if before is not None:
                    assert before.falls_behind(now) == []
                    moved += now.total("asked_tokens_total") > before.total("asked_tokens_total")
                before = now
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert failed == []
        seconds = time.perf_counter() - began
        print(f"{snapshots} snapshots in {seconds:.1f} s, {sum(done)} requests; {moved} snapshots saw new ones")
        last = scrape(metrics)
        assert last.adds_up() and moved > snapshots // 20
        assert has_both(last)


@pytest.mark.parametrize("seed", range(3))
def test_tenants_add_up_as_the_whole_does_and_never_change_places(seed: int) -> None:
    chooser, one = random.Random(seed), Counting(FakeClock())
    print(f"seed {seed}")
    before: dict[str, dict[str, int]] = {}
    for step in range(600):
        number = chooser.randrange(2 * NAMED_TENANTS)
        tenant = bytes([number]) * 16
        one.opened(number, BLOCK, NamespaceInfo(b"d", tenant, "model", "raw", BLOCK))
        keys, found = [bytes([step % 251, at]) * 16 for at in range(4)], chooser.randint(0, 4)
        one.looked_up(number, keys, MatchReply(found, ((HitTier.DRAM, found),)))
        if found and chooser.random() < 0.7:
            one.leased(number, keys[:found], LeaseReply(step + 1, 0, found, tiers=((HitTier.DRAM, found),)))
            if chooser.random() < 0.3:
                one.reported(step + 1, chooser.randrange(found))
        looked, served = one.served({})
        for outcome, whole in (
            (Outcome.ASKED, looked.asked_tokens),
            (Outcome.FOUND, looked.found_in_all),
            (Outcome.CLAIMED, looked.claimed),
            (Outcome.GRANTED, sum(looked.granted.values())),
            (Outcome.REVOKED, sum(looked.revoked.values())),
            (Outcome.MISSED, sum(looked.miss_tokens.values())),
        ):
            assert sum(mine[outcome] for mine in served.tenants.values()) == whole
        for name, outcomes in before.items():
            assert all(served.tenants[name][outcome] >= count for outcome, count in outcomes.items())
        before = served.tenants
    assert len(before) == NAMED_TENANTS + 1 and before["other"]


def test_namespaces_are_described_as_long_as_they_are_few() -> None:
    one = Counting(FakeClock())
    for number in range(3 * NAMED_NAMESPACES):
        one.opened(number, BLOCK, NamespaceInfo(bytes([number]), b"t", "model", "raw", BLOCK))
    one.opened(0, BLOCK, NamespaceInfo(bytes([0]), b"t", "model", "raw", BLOCK))
    named = [int(digest, 16) for digest, *_ in one.served({b"t": "default"})[1].namespaces]
    assert named == [*range(2 * NAMED_NAMESPACES + 1, 3 * NAMED_NAMESPACES), 0]


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_a_page_is_small(busy: tuple[Sidecar, StatusPage], page: Scrape) -> None:
    series = sum(map(len, page.series.values()))
    many = MOST_SERIES - series - (NAMED_TENANTS + 1) * len(Outcome) - NAMED_NAMESPACES - NAMED_TENANTS
    assert many > 0, f"{series} series, and those of more tenants and namespaces"
    assert len(page.text) < MOST_BYTES
    sidecar, metrics = busy
    took = _shortest(sidecar.admin.numbers), _shortest(metrics.render)
    print(f"{series} series, {len(page.text)} bytes; sampled in {took[0]:.2f} ms, made in {took[1]:.2f} ms")
    held = _shortest(sidecar.store.usage), _shortest(lambda: sidecar.counting.served({}))
    print(f"under the store's lock {held[0]:.3f} ms at most, under the accounting's {held[1]:.3f} ms")


def _shortest(work: object) -> float:
    """Milliseconds."""
    assert callable(work)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return min(times)


def test_every_event_of_the_tiers_is_named(page: Scrape) -> None:
    pairs = {(dict(mine)["tier"], dict(mine)["to"]) for mine in page.series["kvstore_evicted_blocks_total"]}
    assert pairs == {(tier.value, to.value) for tier, to in EVICTIONS}
    assert {dict(mine)["where"] for mine in page.series["kvstore_damaged_frames_total"]} == set(CheckedAt)
