"""Processes of an earlier version beside today's, each from its own sources: as nodes of a pool, as clients, and with
data of theirs. What one stored the other serves or misses, never wrong, and nothing stays pinned.

The earlier versions are commits of this repository, so a checkout without its history skips these."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

from courier.nodes import Asker, Node, ending, make_keys, of_tree, wait_for_peers
from kvstore.block.account import MissReason
from kvstore.protocol import messages as m
from network.running import beside, network
from valkey_server import valkey_server
from waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).resolve().parents[2]
FIRST_POOL = "0f1dae16f4468a42b7097a73c2ca94da038bbb0d"
"""The first version whose nodes fetch from each other: protocol 4, and no offers of a node that leaves."""
BEFORE_POOLS = "e77fab6e5eacb0dfe93b425b55df11325448b761"
"""The last one of protocol 3, which knows nothing of other nodes."""
BLOCKS = 20
STORED, RIGHT = (BLOCKS, "stored"), (BLOCKS, "right")
WAIT_SECONDS = 0.8
CLIENT = """
import json
import sys
import kvstore
from workbench import MODEL, blank_pages, random_pages, same_tokens, small_layout
socket, blocks, durability, wanted = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
layout, found = small_layout(), []
with kvstore.open(f"unix:{socket}", engine="test") as store:
    handle = store.namespace(model=MODEL, layout=layout)
    for one in wanted:
        verb, number = one.split()
        first = int(number) * 1_000_000
        tokens, pages = list(range(first, first + blocks * 64)), random_pages(layout, blocks, seed=int(number))
        if verb == "put":
            result = handle.put(tokens, pages, durability=durability)
            found.append((result.stored, str(result.reason or "stored")))
        else:
            blank = blank_pages(layout, blocks)
            with handle.lease(handle.match(tokens), deadline_ms=5000) as lease:
                got = handle.get(lease, blank).tokens
            found.append((got // 64, "right" if same_tokens(pages, blank, range(got)) else "wrong"))
print(json.dumps([kvstore.__file__, found]))
"""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


def tree_of(commit: str, folder: Path) -> Path:
    """Its sources, in that folder."""
    try:
        found = git("cat-file", "-e", f"{commit}^{{commit}}")
    except FileNotFoundError:
        pytest.skip("git is not installed, so there is no earlier version to run")
    if found.returncode:
        pytest.skip(f"this checkout has no history with {commit[:8]}, so there is no earlier version to run")
    packed = git("archive", "--format=tar", commit)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    said = subprocess.run(
        [sys.executable, "-c", "import kvstore; print(kvstore.__file__)"],
        capture_output=True,
        text=True,
        **of_tree(folder),
    )
    assert said.stdout.strip() == str(folder / "kvstore" / "__init__.py"), said.stdout + said.stderr
    return folder


@pytest.fixture(scope="module")
def first_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of(FIRST_POOL, tmp_path_factory.mktemp("earlier"))


@pytest.fixture(scope="module")
def before_pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of(BEFORE_POOLS, tmp_path_factory.mktemp("before"))


def client(tree: Path | None, node: Node, *wanted: str) -> list[tuple[int, str]]:
    """A client of that version at a node does this, such as `put 1` or `get 1`: how many blocks of each it stored or
    got, and how they were."""
    durability = "volatile" if node.nvme == "off" else "disk"
    command = [sys.executable, "-c", CLIENT, str(node.socket), str(BLOCKS), durability, *wanted]
    where = of_tree(tree) if tree is not None else {**of_tree(None), "cwd": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON_SECONDS, **where)
    assert done.returncode == 0, done.stderr
    path, found = json.loads(done.stdout)
    assert Path(path).is_relative_to(tree or ROOT), "it is of that version"
    return [(blocks, how) for blocks, how in found]


def runs_from(process: subprocess.Popen[str] | None, tree: Path | None) -> bool:
    assert process is not None
    return Path(os.readlink(f"/proc/{process.pid}/cwd")) == (tree or Path.cwd())


def nothing_is_left(node: Node) -> bool:
    stat = node.stat()
    slots = [tier["slots"].get("reserved", 0) for tier in stat["tiers"]]
    return (
        stat["elsewhere"]["kept_bytes"] == 0
        and stat["elsewhere"]["fetching"] == 0
        and stat["awaits"]["parked"] == 0
        and stat["pinned_bytes"] == 0
        and stat["leases"] == 0
        and not any(slots)
    )


@pytest.fixture(params=["sidecar", "network", "sidecar and network"])
def old_and_new(request: pytest.FixtureRequest, first_pool: Path, tmp_path: Path) -> Iterator[tuple[Node, Node, str]]:
    """Two nodes; of the first one these processes are earlier ones."""
    which, keys = str(request.param), make_keys(tmp_path)
    with valkey_server(tmp_path) as server:
        network_settings = {"directory": f"valkey+unix:{server.socket_path}"}
        trees = {f"{one}_tree": first_pool for one in which.split(" and ")}
        old = Node(tmp_path / "old", keys, network_settings, {}, **trees)
        new = Node(tmp_path / "new", keys, network_settings, {})
        with ending(old, new):
            for one in (old, new):
                one.start()
            assert runs_from(old.sidecar, old.sidecar_tree) and runs_from(old.network, old.network_tree)
            wait_for_peers((old, new), 1)
            yield old, new, which


def is_served(node: Node, number: int) -> bool:
    got = node.get(number, BLOCKS, locates=1.0)
    assert got.is_right, got
    return got.blocks == BLOCKS


def test_nodes_of_two_versions_serve_each_other(old_and_new: tuple[Node, Node, str]) -> None:
    old, new, which = old_and_new
    for number, (giver, taker) in enumerate([(old, new), (new, old)], 1):
        giver.put(number, BLOCKS)
        wait_until(lambda: is_served(taker, number))  # noqa: B023
        wait_until(lambda: nothing_is_left(taker) and nothing_is_left(giver))  # noqa: B023
        with Asker(giver) as asker:
            keys = asker.hashed(number + 10, BLOCKS).keys
            ticket = asker.ticket(keys)
        giver.put(number + 10, BLOCKS)
        with Asker(taker) as asker:
            got = asker.get(number + 10, BLOCKS, 10.0, 10.0, ticket)
        assert got.is_right, got
    _a_fetch_is_cut(new, old, 3)
    _a_fetch_is_cut(old, new, 4)
    for process in which.split(" and "):  # the upgrade: what its node stored is stored, or is missed
        getattr(old, f"kill_{process}")(signal.SIGTERM)
        setattr(old, f"{process}_tree", None)
        getattr(old, f"start_{process}")()
    old.put(5, BLOCKS)
    wait_until(lambda: is_served(new, 5))
    for one in (old, new):
        wait_until(lambda: nothing_is_left(one))  # noqa: B023


def _a_fetch_is_cut(giver: Node, taker: Node, number: int) -> None:
    """The giver's network process hangs in the middle, then is killed; in its place a new one of its version comes."""
    giver.put(number, BLOCKS)
    with Asker(taker) as asker:
        keys = asker.hashed(number, BLOCKS).keys
        located = asker.find(keys)
        assert giver.network is not None
        os.kill(giver.network.pid, signal.SIGSTOP)
        told: list[m.Awaited] = []

        waiter = threading.Thread(target=lambda: told.append(asker.awaits(keys, located, WAIT_SECONDS)))
        waiter.start()
        waiter.join(60.0)
        giver.kill_network()
        assert told and told[0].blocks == 0, told
        assert told[0].reason in (MissReason.DEADLINE, MissReason.UNREACHABLE), told
    wait_until(lambda: nothing_is_left(taker) and nothing_is_left(giver))
    giver.start_network()
    wait_until(lambda: is_served(taker, number))


def test_todays_network_process_asks_nothing_of_a_sidecar_that_knows_no_other_nodes(
    before_pools: Path, tmp_path: Path
) -> None:
    """That sidecar serves its engines as ever, and nodes beside it do without it."""
    keys = make_keys(tmp_path)
    with valkey_server(tmp_path) as server:
        settings = {"directory": f"valkey+unix:{server.socket_path}"}
        new = Node(tmp_path / "new", keys, settings, {})
        old = Node(tmp_path / "old", keys, {}, {}, sidecar_tree=before_pools)
        with ending(new, old):
            new.start()
            old.start_sidecar()
            kv = old.folder / "kv"
            flags = beside(kv, old.tokens, old.address)
            flags += [f"--directory={settings['directory']}", f"--courier-socket={kv / 'courier.sock'}"]
            with network(*flags, f"--pull=127.0.0.1:{old.pull_port}") as running:
                assert client(None, old, "put 1") == [STORED]
                assert client(before_pools, old, "get 1") == [RIGHT]
                caller = running.of_tenant()
                wait_until(lambda: bool(caller.namespaces()))
                assert [one.blocks for one in caller.namespaces()] == [BLOCKS]
                caller.close()
                got = new.get(1, BLOCKS, locates=1.0)
                assert (got.blocks, got.is_right) == (0, True), "no courier speaks for that sidecar"
                new.put(2, BLOCKS)
                assert client(None, old, "get 2") == [(0, "right")]
                assert running.process.poll() is None and old.sidecar is not None and old.sidecar.poll() is None
                stat: Any = old.stat()
                assert stat["pinned_bytes"] == 0 and stat["leases"] == 0
            assert nothing_is_left(new)


@pytest.mark.parametrize("version", ["first_pool", "before_pools"])
def test_clients_and_data_of_two_versions(request: pytest.FixtureRequest, version: str, tmp_path: Path) -> None:
    """Clients of both at a sidecar of each, whose directory the next one has: an upgrade, and the way back."""
    tree: Path = request.getfixturevalue(version)
    node = Node(tmp_path / "node", None, {}, {}, nvme="64MiB", sidecar_tree=tree)
    stored: list[int] = []
    with ending(node):
        for run, of_sidecar in enumerate([tree, None, tree]):  # upgraded, and taken back
            node.sidecar_tree = of_sidecar
            node.start_sidecar()
            assert runs_from(node.sidecar, of_sidecar)
            wait_until(lambda: node.stat()["state"] in ("ready", "degraded"))
            gets = [f"get {number}" for number in stored]
            mine, other = 2 * run, 2 * run + 1
            assert client(tree, node, *gets, f"put {mine}") == [RIGHT] * len(gets) + [STORED]
            assert client(None, node, *gets, f"get {mine}", f"put {other}") == [RIGHT] * (len(gets) + 1) + [STORED]
            assert client(tree, node, f"get {other}") == [RIGHT]
            stored += [mine, other]
            stat: Any = node.stat()
            assert stat["pinned_bytes"] == 0 and stat["leases"] == 0
            node.kill_sidecar(signal.SIGTERM)
