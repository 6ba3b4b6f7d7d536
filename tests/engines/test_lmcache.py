"""LMCache's own server with the store below it, on a CPU and asked by its own client; and the adapter's tasks."""

from __future__ import annotations

import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from engine_adapter.lmcache_backend import KvStoreL2, _Lane
from engines.conftest import PRODUCT, started
from engines.conftest import Sidecar as SidecarProcess
from engines.tier_engine import SMALL
from kvstore.block.errors import BadInput
from service.sidecar import Sidecar
from waiting import wait_until

GIVEN = {"model_name": "test-model", "model": "digest-1", "deadline_ms": 2000, "save_deadline_ms": 5000}
CHUNKS, CHUNK_TOKENS, PAGE, OBJECT_BYTES, ANSWER_SECONDS = 4, 256, 16, 256 << 10, 3.0


class Server:
    """`lmcache server`, whose only L2 is the store, and an engine's requests to it."""

    def __init__(self, url: str, log: Path, dtype: str = "bfloat16") -> None:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            port, http = one.getsockname()[1], other.getsockname()[1]
        place = {"type": "plugin", "module_path": "engine_adapter.lmcache_backend", "class_name": "KvStoreL2"}
        options = f"server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 0.25"
        options += " --no-l1-use-lazy --eviction-policy LRU --disable-observability --supported-transfer-mode auto"
        adapter = json.dumps({**place, "adapter_params": {**GIVEN, "url": url}})
        command = [Path(sys.executable).parent / "lmcache", *options.split(), "--l2-adapter", adapter]
        environment = {**os.environ, **PRODUCT, "LMCACHE_TRACK_USAGE": "false"}
        self._process = subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment)
        self._http, self._requests = f"http://127.0.0.1:{http}", 0
        shape, rpc = f"(2,256,{PAGE},2,64):{dtype}:2", f"tcp://127.0.0.1:{port}"
        config = BenchConfig(rpc, self._http, "cpu", "auto", 1, False, CHUNKS * CHUNK_TOKENS, shape, 256, PAGE)
        self.client = ServerBenchClient(config, lambda _: None)

    def __enter__(self) -> Server:
        wait_until(lambda: self._process.poll() is not None or self.status())
        self.client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.terminate()
        assert self._process.wait(60) in (0, -signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        """Empty before the server is up."""
        with suppress(OSError), urllib.request.urlopen(f"{self._http}/status", timeout=10) as reply:
            return dict(json.load(reply)["storage_manager"])
        return {}

    def generate(self, prompt: int, *, from_l1: bool = False, stores: bool = True) -> tuple[int, list[str]]:
        """Look up, load what is found, compute and store the rest, as an engine does; what it computes is the same for
        each prompt. Returns how many chunks were found, and digests of all chunks as it has them then."""
        if not from_l1:
            urllib.request.urlopen(urllib.request.Request(f"{self._http}/cache/clear", method="POST"), timeout=10)
        self._requests += 1
        request = self.client.create_request(prompt, f"request-{self._requests}", "")
        for layer, kv in enumerate(self.client._workers[0].kv_caches.values()):
            kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(97 * prompt + layer)))
        found = self.client.lookup(request).hit_chunks
        self.client.zero_destination(request, 0, found * CHUNK_TOKENS)
        self.client.retrieve(request, 0, found * CHUNK_TOKENS)
        if stores:
            self.client.store(request, found * CHUNK_TOKENS, (CHUNKS - found) * CHUNK_TOKENS)
        digests = self.client.compute_checksums(request, 0, CHUNKS * CHUNK_TOKENS)
        self.client.end_session(request)
        wait_until(lambda: not self.status()["store_controller"]["in_flight_task_count"])
        return found, list(digests)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[SidecarProcess]:
    with started(tmp_path.name, *SMALL) as running:
        yield running


@pytest.mark.slow
def test_chunks_outlive_servers_and_sidecars_for_their_dtype_alone_and_damaged_ones_are_computed(
    apart: SidecarProcess, tmp_path: Path
) -> None:
    with Server(apart.url, tmp_path / "log") as server, Server(apart.url, tmp_path / "log", "float16") as other:
        found, computed = server.generate(1)
        assert found == 0 and len(set(computed)) == CHUNKS and server.generate(1) == (CHUNKS, computed)
        found, in_float16 = other.generate(1)
        assert found == 0 and other.generate(1) == (CHUNKS, in_float16) and not {*computed} & {*in_float16}
    with Server(apart.url, tmp_path / "log") as server:
        assert server.generate(1) == (CHUNKS, computed), "of a server that ended"
        apart.kill()
        wait_until(lambda: server.generate(1, stores=False) == (CHUNKS, computed))
        apart.stop()
        number = server.client.create_request(1, "", "").block_offset + CHUNK_TOKENS // PAGE  # of the second chunk
        kv = next(iter(server.client._workers[0].kv_caches.values()))[0, number].contiguous()
        needle = bytes(kv.view(torch.uint8).flatten().tolist()[:64])
        (slab,) = [path for path in (apart.directory / "nvme").glob("*.slab") if needle in path.read_bytes()]
        content = bytearray(slab.read_bytes())
        content[content.index(needle) + 33] ^= 4
        slab.write_bytes(content)
        apart.start()
        assert wait_until(lambda: (server.generate(1, stores=False)[0]) or None) == 1, "the one before the damaged one"
        assert server.generate(1) == (1, computed) and server.generate(1) == (CHUNKS, computed), "it is stored anew"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_while_the_sidecar_does_not_answer_the_server_does(
    fault: signal.Signals, apart: SidecarProcess, tmp_path: Path
) -> None:
    with Server(apart.url, tmp_path / "log") as server:
        _, computed = server.generate(1)
        is_killed = fault is signal.SIGKILL
        apart.kill_all() if is_killed else os.kill(apart.said["pid"], fault)
        began = time.monotonic()
        assert server.generate(1, from_l1=True) == (CHUNKS, computed) and server.generate(1) == (0, computed)
        assert server.generate(2)[0] == 0 and time.monotonic() - began < 6 * ANSWER_SECONDS
        status = server.status()
        apart.start() if is_killed else os.kill(apart.said["pid"], signal.SIGCONT)
        assert status["is_healthy"] and status["prefetch_controller"]["in_flight_request_count"] == 0
        assert status["l2_adapters"][0]["store"] == "cannot be asked"
        wait_until(lambda: server.generate(3)[0] == CHUNKS)


class L1(KvStoreL2):
    """The adapter with LMCache's memory and objects in it, whose tasks are waited for as LMCache waits."""

    def __init__(self, url: str, tokens: int = CHUNK_TOKENS, dtype: torch.dtype = torch.bfloat16, **given: Any) -> None:
        self._shape, self._dtype, self._memory = torch.Size([2, 2, tokens, 128]), dtype, bytearray(33 * OBJECT_BYTES)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._raw = raw[-raw.data_ptr() % 4096 :]
        desc = L1MemoryDesc(self._raw.data_ptr(), 32 * OBJECT_BYTES, 4096)
        super().__init__({**GIVEN, "url": url, **given}, l1_memory_desc=desc)

    def object(self, place: int, seed: int = 0, offset: int = 0) -> TensorMemoryObj:
        raw = self._raw[place * OBJECT_BYTES + offset :][: self._shape.numel() * self._dtype.itemsize]
        raw.random_(0, 256, generator=torch.Generator().manual_seed(seed)) if seed else raw.zero_()
        about = MemoryObjMetadata(self._shape, self._dtype, raw.data_ptr(), len(raw), 1)
        about.shapes, about.dtypes = [self._shape], [self._dtype]
        return TensorMemoryObj(raw, about, parent_allocator=None)

    def store(self, keys: list[ObjectKey], offset: int = 0) -> bool:
        objects = [self.object(place, key.chunk_hash[1] + 1, offset) for place, key in enumerate(keys)]
        number = self.submit_store_task(keys, objects)
        answered(self.get_store_event_fd())
        return self.pop_completed_store_tasks()[number].is_successful()

    def look(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        """Those that are found, and locked."""
        layouts = {group: MemoryLayoutDesc([self._shape], [self._dtype]) for group in (0, 1)}
        number = self.submit_lookup_and_lock_task(keys, layouts)
        answered(self.get_lookup_and_lock_event_fd())
        found = self.query_lookup_and_lock_result(number)
        return [key for at, key in enumerate(keys) if found.test(at)]

    def load(self, keys: list[ObjectKey]) -> list[ObjectKey]:
        """Those that are loaded: each with the bytes that were stored."""
        objects = [self.object(16 + place) for place in range(len(keys))]
        number = self.submit_load_task(keys, objects)
        answered(self.get_load_event_fd())
        loaded = self.query_load_result(number)
        good = [(key, one) for at, (key, one) in enumerate(zip(keys, objects, strict=True)) if loaded.test(at)]
        assert all(one.raw_data.equal(self.object(0, key.chunk_hash[1] + 1).raw_data) for key, one in good)
        return [key for key, _ in good]


def answered(event: int) -> None:
    assert select.select([event], [], [], ANSWER_SECONDS)[0], "no answer by the deadline"
    consume_fd(event)


def keys_of(count: int, prompt: int = 1, rank: int = 0x1000100, group: int = 0, salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(bytes([prompt, at]) * 16, "test-model", rank, group, salt) for at in range(count)]


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="64MiB") as running:
        yield running


def test_the_interface_is_the_one_that_is_known() -> None:
    ours = {name for name in vars(KvStoreL2) if not name.startswith("_")}
    assert L2AdapterInterface.__abstractmethods__ == ours - {"delete", "report_status"}
    for one, theirs in [(vars(KvStoreL2)[name], vars(L2AdapterInterface)[name]) for name in ours]:
        assert [*inspect.signature(one).parameters] == [*inspect.signature(theirs).parameters]
    assert [*ObjectKey.__dataclass_fields__] == "chunk_hash model_name kv_rank object_group_id cache_salt".split()


def test_objects_are_shared_by_those_alone_whose_bytes_are_alike(near: Sidecar) -> None:
    keys, url = keys_of(6), f"unix:{near.path}"
    with closing(L1(url)) as l1:
        assert l1.look(keys) == l1.load(keys) == []
        assert l1.store(keys[:4]) and l1.store(keys[:4]), "stored, and there already"
        assert l1.get_usage().total_bytes_used == 4 * OBJECT_BYTES, "counted once"
        assert l1.look(keys) == l1.load(keys) == keys[:4] and l1.load(keys[2:]) == keys[2:4]
        for other in (keys_of(2, rank=0x2000200), keys_of(2, group=1), keys_of(2, salt="b")):
            assert l1.look(other) == l1.load(other) == []
        window = keys_of(6, group=1)  # a sliding one: the last run within the other's prefix is found
        assert l1.store(window[:1]) and l1.store(window[2:3]) and l1.store(window[4:])
        assert l1.look([*keys, *window]) == [*keys[:4], window[0], window[2]]
    others: list[dict[str, Any]] = [{"dtype": torch.float16}, {"tokens": 128}, {"weights_epoch": 1}]
    for given in [*others, {"model": "digest-2"}, {"settings": "rope"}, {"chunk_size": 128}]:
        with closing(L1(url, **given)) as l1:
            assert l1.look(keys) == l1.load(keys) == []
    with closing(L1(url)) as l1:
        assert l1.look(keys) == keys[:4], "at once, after a start"


def test_locks_are_leases_that_end_with_the_last_unlock(near: Sidecar) -> None:
    keys = keys_of(4)
    with closing(L1(f"unix:{near.path}")) as l1:
        assert l1.store(keys) and l1.look(keys) == l1.look(keys) == keys and len(near.core.leases) == 2
        l1.submit_unlock(keys)
        wait_until(lambda: len(near.core.leases) == 1)
        l1.submit_unlock(keys[:3])
        assert not l1.look(keys_of(1, prompt=2)) and len(near.core.leases) == 1, "one key is still locked"
        l1.submit_unlock(keys)
        wait_until(lambda: not len(near.core.leases))


def test_what_cannot_be_told_apart_is_not_served_and_one_line_says_so(
    near: Sidecar, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"unix:{near.path}"
    with closing(L1(url)) as l1:
        for keys in ([ObjectKey(b"12345678", "test-model", 1)], [ObjectKey(bytes(32), "other-model", 1)]):
            assert not l1.store(keys) and l1.look(keys) == l1.load(keys) == []
        assert not l1.store(keys_of(1), offset=64), "LMCache puts no object there"
        l1.delete(keys_of(1))
    for word in ("--hash-algorithm blake3", "other-model", "serde", "quotas"):
        assert sum(word in line for line in caplog.messages) == 1
    for given in ({"colour": 1}, {"model": ""}, {"url": ""}):
        with pytest.raises(BadInput, match=r"known: url, model_dir|either \"model_dir\"|give the store's") as refused:
            L1(**{"url": url, **given})
        assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="DRAM"):
        KvStoreL2({**GIVEN, "url": url})


def test_each_task_is_answered_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(1)
    with closing(L1(f"unix:{tmp_path}/absent.sock", save_deadline_ms=100)) as l1:
        events = {l1.get_store_event_fd(), l1.get_lookup_and_lock_event_fd(), l1.get_load_event_fd()}
        assert len(events) == 3 and not l1.store(keys) and l1.look(keys) == l1.load(keys) == []
        monkeypatch.setattr(KvStoreL2, "_rows", lambda *_: 1 // 0)
        assert not l1.store(keys) and l1.look(keys) == l1.load(keys) == []


def test_a_task_that_does_not_begin_in_time_is_answered_and_one_that_waits_at_the_end() -> None:
    lane, begins, goes_on = _Lane[str]("t", 1, 5000.0), Event(), Event()

    def work(_: float) -> str:
        begins.set()
        return "done" if goes_on.wait(ANSWER_SECONDS) else "left alone"

    running = lane.begin(work, "late")
    assert begins.wait(ANSWER_SECONDS)
    lane._seconds = 0.0
    late, answers = lane.begin(work, "late"), dict[int, str]()
    goes_on.set()
    while len(answers) < 2:
        answered(lane.fd)
        answers |= lane.take_all()
    assert answers == {running: "done", late: "late"}
    lane._seconds = 5.0
    for event in (begins, goes_on):
        event.clear()
    running, waiting = lane.begin(work, "closed"), lane.begin(work, "closed")
    assert begins.wait(ANSWER_SECONDS)
    lane._tasks[waiting][0].add_done_callback(lambda _: goes_on.set())
    lane.close()
    assert lane.take_all() == {running: "done", waiting: "closed"}
