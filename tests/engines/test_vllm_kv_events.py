"""A router that hears an engine's KV events through vLLM's own publisher, loses one message in a hundred and asks for
it again, ends with what the store holds: 10,000 operations at random, and the sidecar killed in their midst."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

import kvstore
from engine_adapter.paged.announcements import Announcements
from engine_adapter.vllm_connector import MEDIA, BlockEvents, described
from engine_adapter.vllm_requests import EngineView
from engines import models
from engines.conftest import Run, Sidecar, started
from kvstore.block.account import MissReason
from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore
from kvstore.node import SystemClock
from service.sidecar import patient
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

OPERATIONS = int(os.environ.get("EVENT_OPERATIONS", "10000"))
LOSS = 0.01
MOST_LAG_SECONDS = 0.1
QUIET_SECONDS = 1.0
PROMPTS, BLOCK, HASH = 400, 64, 16
LAYOUT = small_layout()
TIERS = {"KVSTORE_STORE_EXTENT": "1MiB", "KVSTORE_STORE_SLAB": "1MiB"}
NO_STORE = {MissReason.UNREACHABLE, MissReason.WARMING, MissReason.DISABLED}
SIZES = ("--dram", "4MiB", "--nvme", "8MiB")
"""Some 340 and 680 blocks, of 1,200 that are put."""


class LossyRouter(threading.Thread):
    """Believes what it hears. A number that is left out it asks for, as vLLM's publisher has it."""

    def __init__(self, heard_at: str, asked_at: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.believed: dict[Any, set[str]] = {}
        self.lags: list[float] = []
        """Seconds from the engine's step to what is believed, of each event."""
        self.lost = self.replays = 0
        self.false: list[str] = []
        self._draw = random.Random(seed)
        self._next = 0
        context = zmq.Context.instance()
        self._heard, self._asked = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._heard.connect(heard_at)
        self._heard.subscribe("")
        self._asked.connect(asked_at)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            if not self._heard.poll(200):
                if self._next:
                    self._replay()  # the last ones may be lost
                continue
            _, number, payload = self._heard.recv_multipart()
            if self._draw.random() < LOSS:
                self.lost += 1
            elif int.from_bytes(number, "big") > self._next:
                self._replay()
                self._take(number, payload)
            else:
                self._take(number, payload)

    def end(self) -> None:
        self._over.set()
        self.join(10)
        self._heard.close(0)
        self._asked.close(0)

    @property
    def next(self) -> int:
        return self._next

    def _replay(self) -> None:
        self.replays += 1
        self._asked.send_multipart((b"", self._next.to_bytes(8, "big")))
        while self._asked.poll(5000):
            *_, number, payload = self._asked.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return
            self._take(number, payload)
        raise AssertionError("the publisher does not answer")

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") != self._next:
            return  # it came before
        self._next += 1
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        for event in batch.events:
            assert isinstance(event, BlockStored | BlockRemoved) and event.medium and event.locality == "LOCAL"
            for name in event.block_hashes:
                media = self.believed.setdefault(name, set())
                if isinstance(event, BlockStored):
                    assert len(event.token_ids) == HASH * len(event.block_hashes) and not media
                    media.add(event.medium)
                else:
                    media.remove(event.medium)
            self.lags.append(time.time() - batch.ts)


class Engine:
    """The scheduler's half of a connector as far as it tells of blocks: it saves, and takes a step now and then."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self.handle: NamespaceHandle | None = None
        self.published = 0
        self._publisher = publisher
        self._events = BlockEvents([("full_attention", None)])
        describe = partial(described, block_tokens=BLOCK, hash_tokens=HASH)
        self.announced: Announcements[Any] = Announcements(time.monotonic, describe, lambda: self.handle)

    def step(self) -> None:
        self.announced.step()
        events = self._events.of(self.announced.take(), HASH)
        if events:
            self.publish(events)

    def publish(self, events: list[Any]) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
        self.published += 1


def requested(tokens: Any, hasher: Callable[[Request], list[Any]]) -> EngineView:
    return EngineView(Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher))


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    for name, size in TIERS.items():
        monkeypatch.setenv(name, size)
    with started(tmp_path.name, *SIZES) as made:
        yield made


@pytest.mark.slow
def test_a_router_that_loses_messages_ends_with_what_the_store_holds(sidecar: Sidecar) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"\nseed {seed}")
    draw, clock, admin = random.Random(seed), SystemClock(), f"{sidecar.directory}/admin.sock"
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(HASH, sha256_cbor)
    prompts = [ids(BLOCK * (1 + number % 5), 10_000 * number) for number in range(PROMPTS)]
    views = [requested(tokens, hasher) for tokens in prompts]
    pages = {blocks: random_pages(LAYOUT, blocks, seed=blocks) for blocks in range(1, 6)}
    heard_at, asked_at = (f"ipc://{sidecar.directory}/{name}" for name in ("events", "replay"))
    publisher = ZmqEventPublisher(0, heard_at, asked_at, buffer_steps=1000)
    router = LossyRouter(heard_at, asked_at, seed)
    with ExitStack() as stack:
        stack.callback(publisher.shutdown)
        stores = []
        for _ in range(2):
            store = stack.enter_context(kvstore.open(sidecar.url))
            assert isinstance(store, SidecarStore)
            stores.append(patient(store))
        engine = Engine(publisher)
        router.start()
        stack.callback(router.end)
        wait_until(lambda: engine.publish([]) is None and router.next > 0)  # without a subscriber messages are dropped
        engine.handle, others = (store.namespace(model=MODEL, layout=LAYOUT) for store in stores)
        wait_until(lambda: (engine.step(), engine.announced._run)[1] != b"")
        mine: set[Any] = set()
        resets = drops = kills = 0
        for operation in range(OPERATIONS):
            if operation == OPERATIONS // 2:
                sidecar.kill()
                kills += 1
                wait_until(lambda: engine.handle.match(prompts[0]).reason not in NO_STORE)  # type: ignore[union-attr]
            number, chance = draw.randrange(PROMPTS), draw.random()
            tokens, blocks = prompts[number], 1 + number % 5
            if chance < 0.5:
                keys, first = engine.handle.hashed(tokens).keys, engine.handle.match(tokens).blocks
                engine.announced.expect(views[number], keys[first:], first)  # what is found is not saved again
                if draw.random() < 0.5:
                    engine.step()
                result = engine.handle.put(tokens, pages[blocks])
                mine.update(maybe_convert_block_hash(one) for one in views[number].request.block_hashes[4 * first :])
                if draw.random() < 0.5:
                    engine.step()
                held = result.present + result.stored if result.stopped_at is None else 0
                engine.announced.saved(b"".join(keys), first, held)
            elif chance < 0.85:
                others.put(tokens, pages[blocks])
            elif chance < 0.999:
                engine.handle.lease(engine.handle.match(tokens), deadline_ms=1000).release()
            else:
                for one in ask.stat(admin, clock).namespaces:
                    drops += ask.drop(admin, clock, one.digest, one.tenant, 30.0).blocks
                engine.handle, others = (store.namespace(model=MODEL, layout=LAYOUT) for store in stores)
            engine.step()
            if engine.announced.resets != resets:  # of what was stored before nothing is told any more
                resets = engine.announced.resets
                mine.clear()
        told, since = -1, 0.0

        def is_quiet() -> bool:
            """Blocks go on moving between the tiers for a while: nothing new was told for some answers."""
            nonlocal told, since
            engine.step()
            if engine.announced._after != told:
                told, since = engine.announced._after, time.monotonic()
            return time.monotonic() - since > QUIET_SECONDS and router.next == engine.published

        wait_until(is_quiet)
        believed = {name: media for name, media in router.believed.items() if media}
        held: dict[Any, set[str]] = {}
        for number, view in enumerate(views):
            found = engine.handle.match(prompts[number])
            for at, tier in enumerate(found.tier_of_block):
                names = [maybe_convert_block_hash(one) for one in view.request.block_hashes[4 * at : 4 * at + 4]]
                held |= {name: {MEDIA[tier]} for name in names}
        of_mine = mine & held.keys()
        false = [name for name, media in believed.items() if held.get(name) != media]
        lag = statistics.quantiles(router.lags, n=100)[98]
        print(f"{OPERATIONS} operations, {drops} blocks dropped, {kills} kill, {resets} times all taken back")
        print(f"{engine.published} messages, {len(router.lags)} events, {router.lost} lost, {router.replays} replays")
        print(f"believed {len(believed)} of {len(held)} hashes, {len(false)} of them falsely")
        print(f"lag p50 {1e3 * statistics.median(router.lags):.1f} ms, p99 {1e3 * lag:.1f} ms")
        assert router.is_alive() and router.lost and router.replays >= router.lost // 2
        assert false == [], "nothing is believed that is not there"
        assert believed.keys() >= of_mine, "and all that the engine stored since the last time"
        assert kills and resets >= 1 and len(of_mine) > 100
        assert lag < MOST_LAG_SECONDS


def test_what_an_engine_stores_first_is_announced_in_each_group_of_its_layers(
    saved: Callable[..., str], run: Run, sidecar: Sidecar
) -> None:
    """As vLLM announces its own: a router that knows a model's groups asks for each of them."""
    endpoint, prompt = f"ipc://{sidecar.directory}/events", [(7 * one) % 899 for one in range(1290)]
    publishing = dict(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    steps = [
        {"do": "listen", "endpoint": endpoint},
        {"do": "generate", "prompts": [prompt], "max_tokens": 1},
        {"do": "report"},  # events come with steps
        {"do": "events", "as": "events"},
    ]
    transfer = models.connector(sidecar.url)
    options = {"dtype": "float32", "block_size": 32, "max_model_len": 2048, "kv_events_config": publishing}
    told = run({"model": saved("windowed"), "transfer": transfer, "options": options, "steps": steps})
    own, ours = Counter[Any](), Counter[Any]()
    for event in told["events"]:
        if "tokens" in event:
            names = own if event["medium"] == "GPU" else ours
            names.update((one, event["group"], event["kind"], event["window"]) for one in event["hashes"])
    (space,) = ask.stat(f"{sidecar.directory}/admin.sock", SystemClock()).namespaces
    stored = space.blocks * space.block_tokens
    assert stored
    groups = {one[1:] for one in own}
    assert len(groups) > 1 and {kind for _, kind, _ in groups} == {"full_attention", "sliding_window"}
    full = {one for one in own if one[2] == "full_attention"}
    assert {one[1:] for one in ours} == groups and set(ours.values()) == {1}
    for group in groups:
        announced = {one[0] for one in ours if one[1:] == group}
        assert len(announced) == stored // 32 and announced <= {one[0] for one in full}, group
