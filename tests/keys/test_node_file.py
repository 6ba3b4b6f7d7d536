"""Which node a store is: kept in its directory, told from a copy of it that runs as well."""

from __future__ import annotations

import json
import os
import secrets
import stat
from functools import partial
from pathlib import Path

import pytest

from kvstore.block.errors import KeysUnusable
from kvstore.keys.store_keys import NodeLock, node_of
from programs import start_python
from workbench import refused

node_at = partial(node_of, new_secret=secrets.token_bytes)


def test_the_node_stays_and_each_run_is_another_incarnation(tmp_path: Path) -> None:
    first, second = node_at(tmp_path / "node"), node_at(tmp_path / "node")
    assert first.node == second.node and len(first.node) == 16 and first.node != bytes(16)
    assert first.incarnation != second.incarnation and len(first.incarnation) == 8
    assert node_at(tmp_path / "other").node != first.node
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "node").read_text()) == {"version": 1, "node": first.node.hex()}


@pytest.mark.parametrize(
    "contents",
    [
        *("", "{", "null", "[]", "{}", '{"version": 1}', '{"version": 1, "node": 5}', "[" * 5000, "\x00" * 5000),
        *('{"version": 2, "node": "' + "ab" * 16 + '"}', '{"version": 1, "node": "' + "ab" * 15 + '"}'),
    ],
)
def test_damage_is_refused_and_left_as_it_is(tmp_path: Path, contents: str) -> None:
    (tmp_path / "node").write_text(contents)
    (tmp_path / "node").chmod(0o600)
    with refused(KeysUnusable, str(tmp_path / "node"), "new node"):
        node_at(tmp_path / "node")
    assert (tmp_path / "node").read_text() == contents


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling", "open"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "node"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to("nowhere")
        case "open":
            node_at(path)
            path.chmod(0o644)
    with refused(KeysUnusable, str(path)):
        node_at(path)


def test_a_copy_that_runs_is_said_to_be_one_until_the_first_one_ends(tmp_path: Path) -> None:
    here = node_at(tmp_path / "node")
    first, second = NodeLock(here), NodeLock(node_at(tmp_path / "node"))
    assert not first.is_clone() and first.warnings() == []
    assert second.is_clone()
    (warning,) = second.warnings()
    assert here.node.hex() in warning and "copy" in warning and "\n" not in warning
    assert not NodeLock(node_at(tmp_path / "other")).is_clone()
    first.release()
    first.release()
    assert not second.is_clone() and second.warnings() == [], "it is the node now"
    assert not first.is_clone(), "it is over"
    second.release()


def test_a_process_that_is_killed_holds_the_name_no_more(tmp_path: Path) -> None:
    node_at(tmp_path / "node")
    program = (
        "import secrets, sys; from pathlib import Path; from kvstore.keys.store_keys import NodeLock, node_of\n"
        "lock = NodeLock(node_of(Path(sys.argv[1]), secrets.token_bytes))\n"
        "print(lock.is_clone(), flush=True); sys.stdin.read()"
    )
    child = start_python(program, tmp_path / "node")
    assert child.stdout is not None and child.stdout.readline() == "False\n"
    lock = NodeLock(node_at(tmp_path / "node"))
    assert lock.is_clone()
    child.kill()
    child.communicate()
    assert not lock.is_clone()
    lock.release()
