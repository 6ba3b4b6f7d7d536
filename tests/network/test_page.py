"""docs/grpc.md, as a new user walks it: its commands do what it says of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvstore
from kv_bench.process import free_port
from network.running import ENVIRONMENT, Issuer, Stubs, certified, grpc
from service.sidecar import Sidecar, patient
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

PAGE = (Path(__file__).resolve().parents[2] / "docs/grpc.md").read_text("utf-8")
NAME = "org/model"
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("openssl", "curl"))), reason="the commands openssl and curl are not installed"
)


def commands_with(word: str) -> str:
    """The one block of commands in which it stands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (found,) = [text for language, text in blocks if not language and word in text]
    return str(found)


def shell(folder: Path, lines: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_serving(caller: Stubs) -> bool:
    try:
        return caller.is_serving()
    except grpc.RpcError:  # it is not there yet
        return False


@contextmanager
def in_background(folder: Path, line: str) -> Iterator[None]:
    program, *flags = shlex.split(line, comments=True)
    assert program == "kvstore"
    with (folder / f"{flags[0]}.log").open("wb") as log:
        command = [sys.executable, "-m", program, *flags]
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_two_commands_a_match_and_a_query(tmp_path: Path) -> None:
    grpc_port, http_port = str(free_port()), str(free_port())

    def here(text: str) -> str:
        return text.replace("7470", grpc_port).replace("7471", http_port)

    tokens, serve, network = commands_with("kvstore serve").splitlines()
    shell(tmp_path, tokens)
    assert (tmp_path / "tokens").stat().st_mode & 0o77 == 0
    network = f"{here(network).partition('#')[0]} --listen 127.0.0.1:{grpc_port}"  # the page's is the default
    with in_background(tmp_path, f"{serve} --dram 16MiB --nvme off"), in_background(tmp_path, network):
        layout, door = small_layout(), tmp_path / "kv/kvstore.sock"
        wait_until(door.exists)
        with patient(kvstore.open(f"unix:{door}")) as store:
            handle = store.namespace(model=MODEL, layout=layout, name=NAME)
            handle.put(ids(640), random_pages(layout, 10))
            told = commands_with("/query").splitlines()
            assert json.loads(told.pop())["default"], "the answer that the page shows is one"
            asked = here("\n".join(told)).replace("[1, 2, ...]", json.dumps(ids(640)))
            token = shell(tmp_path, f"{told[0]}\nprintf %s $TOKEN")
            caller = Stubs(f"127.0.0.1:{grpc_port}", token)
            wait_until(lambda: is_serving(caller))
            (space,) = caller.namespaces()
            assert caller.match(space.id, token_ids=ids(640)).blocks == 10
            ((tenant, instances),) = json.loads(shell(tmp_path, asked)).items()
            assert tenant == "default" and [one["longest_matched"] for one in instances.values()] == [640]


def test_a_callers_certificate(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "ca")
    for name, used in (("ca.pem", "ca.crt"), ("ca.key", "ca.key")):
        shutil.copy(issuer.folder / name, tmp_path / used)
    shell(tmp_path, commands_with("openssl req -newkey"))
    ca, key, certificate = ((tmp_path / one).read_bytes() for one in ("ca.crt", "router.key", "router.crt"))
    with Sidecar(tmp_path / "sidecar") as sidecar, certified(sidecar.path.parent, issuer) as running:
        caller = running.caller(None, credentials=grpc.ssl_channel_credentials(ca, key, certificate))
        assert caller.namespaces() == []
