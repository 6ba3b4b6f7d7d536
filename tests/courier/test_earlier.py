"""Processes of an earlier version beside today's, each from its own sources, as nodes of a pool. What one stored the
other serves or misses, never wrong, and nothing stays pinned.

The earlier version is a commit of this repository, so a checkout without its history skips these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

from courier.nodes import Asker, Node, ending, make_keys, of_tree, wait_for_peers
from kvstore.block.account import MissReason
from kvstore.protocol import messages as m
from valkey_server import valkey_server
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FIRST_POOL = "0f1dae16f4468a42b7097a73c2ca94da038bbb0d"
"""The first version whose nodes fetch from each other: protocol 4, and no offers of a node that leaves."""
BLOCKS = 20
WAIT_SECONDS = 0.8


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
