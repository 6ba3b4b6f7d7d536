"""A tenant's key and the server's certificate are exchanged while engines and callers work: none of them notices."""

from __future__ import annotations

import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random

import pytest

from keys.test_rotation import BLOCKS, LAYOUT, SIZES, Pool, put, quarantined, read, settle
from kvstore.block.account import MissReason
from kvstore.client.handle import NamespaceHandle
from network.running import Issuer, RunningNetwork, certified
from service.sidecar import Sidecar
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import MODEL, prompt_of, put_prompt

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")
OLD = 1
"""The prompt that the first epoch signed, and no later one."""
WHOLE = (BLOCKS, None)
ROUNDS = 3
SEED = 20261126


class Phase(Enum):
    """Of the first epoch."""

    KEPT, RETIRING, GONE = range(3)


class Load:
    """Engines at the sidecar's socket, and callers at the network's. Each request is judged by the phase around it."""

    def __init__(self, sidecar: Sidecar, running: RunningNetwork, issuer: Issuer) -> None:
        self.phase, self.faults = Phase.KEPT, list[BaseException]()
        self.counts = dict.fromkeys(("reads", "calls", "connections"), 0)
        self._sidecar, self._running = sidecar, running
        self._credentials = issuer.credentials("router", "URI:kvstore:tenant:default")
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in (lambda: self._store(0), lambda: self._store(1), self._call)
        ]

    def goes_on(self, more: int = 15) -> None:
        wanted = {name: count + (more if name != "connections" else 3) for name, count in self.counts.items()}
        wait_until(lambda: bool(self.faults) or all(self.counts[name] >= wanted[name] for name in wanted))
        assert not self.faults, self.faults

    def __enter__(self) -> Load:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for one in self._threads:
            one.join()
        assert not self.faults, self.faults

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.faults.append(error)

    def _judged(self, look: Callable[[], object], kept: object, gone: object) -> None:
        """What it finds, unless the epoch is being retired meanwhile."""
        before = self.phase
        found = look()
        if before is self.phase is not Phase.RETIRING:
            assert found == (kept if before is Phase.KEPT else gone), found

    def _store(self, number: int) -> None:
        draw = Random(SEED + number)
        with self._sidecar.client() as store:
            handle = store.namespace(model=MODEL, layout=LAYOUT)
            mine = 10 * (number + 1)
            while not self._ends.is_set():
                prompt, durability = mine + draw.randrange(3), draw.choice(["volatile", "disk"])
                self._judged(lambda: self._stored(handle, prompt, durability), WHOLE, WHOLE)  # noqa: B023
                self._judged(lambda: read(handle, OLD), WHOLE, (0, MissReason.KEY_MISMATCH))
                self.counts["reads"] += 1

    def _stored(self, handle: NamespaceHandle, prompt: int, durability: str) -> object:
        """What is read of a prompt that was just put, each byte compared."""
        done = put_prompt(handle, prompt, BLOCKS, durability=durability)
        found = read(handle, prompt)
        return found if done.reason is None else done

    def _call(self) -> None:
        kept = self._running.caller(None, credentials=self._credentials)
        (space,) = kept.namespaces()
        while not self._ends.is_set():
            is_anew = self.counts["calls"] % 5 == 0
            caller = self._running.caller(None, credentials=self._credentials) if is_anew else kept
            ask = partial(caller.match, space.id, token_ids=prompt_of(OLD, BLOCKS))
            self._judged(lambda: ask().blocks, BLOCKS, 0)  # noqa: B023
            self.counts["calls"] += 1
            if is_anew:
                caller.close()
                self.counts["connections"] += 1


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path / "pool")


@pytest.fixture
def sidecar(tmp_path: Path, pool: Pool) -> Iterator[Sidecar]:
    sizes = {**SIZES, "dram": "8MiB", "nvme": "16MiB"}  # nothing is evicted
    with Sidecar(tmp_path, **sizes, indexes=LmdbMaker, keys=pool.options) as one:
        assert one.store.warmed(60)
        yield one


def test_no_request_fails_and_the_old_epoch_is_readable_until_it_is_retired(
    sidecar: Sidecar, pool: Pool, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    issuer = Issuer(tmp_path / "ca")
    with ExitStack() as stack:
        store = stack.enter_context(sidecar.client())
        put(store.namespace(model=MODEL, layout=LAYOUT), OLD)
        running = stack.enter_context(certified(sidecar.path.parent, issuer))
        certificate, key = issuer.folder / "server.pem", issuer.folder / "server.key"
        host, port = running.target.rsplit(":", 1)

        def is_served(wanted: str) -> bool:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)))) == ssl.PEM_cert_to_DER_cert(
                wanted
            )

        load = stack.enter_context(Load(sidecar, running, issuer))
        load.goes_on()
        for number in range(ROUNDS):
            fresh = [path.read_text() for path in issuer.server(f"fresh{number}")]
            pool.rotate()
            certificate.write_text(fresh[0][: len(fresh[0]) // 2])  # as it is for a moment
            sidecar.store.rotation.step()
            load.goes_on()
            certificate.write_text(fresh[0])
            key.write_text(fresh[1])
            wait_until(lambda fresh=fresh: is_served(fresh[0]))  # type: ignore[misc]
            load.goes_on()
        assert sidecar.store.keys.told()[0].accepted == list(range(1, ROUNDS + 2))
        load.phase = Phase.RETIRING
        pool.retire(1)
        settle(sidecar.store)
        load.phase = Phase.GONE
        load.goes_on()
        print(load.counts)
    assert quarantined(sidecar.store) == 0 and sidecar.store.usage().counters["retired_blocks"] >= BLOCKS
    assert sidecar.store.keys.told()[0].accepted == list(range(2, ROUNDS + 2))
