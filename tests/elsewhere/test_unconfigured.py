"""Where nothing of other nodes, a directory or a remote engine is configured, nothing of it is imported: neither by a
sidecar that serves, nor by an engine's client that stores and loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from programs import PATHS, run_python

ROOMS = ("kvstore.courier", "kvstore.elsewhere", "kvstore.peers", "kvstore.pool", "tiering.remote", "valkey")
ABSENT = (
    *ROOMS,
    "kvstore.network",
    "cryptography",
    "grpc",
    "ucxx",
    "fastapi",
    "h11",
    "prometheus_client",
    "starlette",
    "uvicorn",
)
SAY = f"""
import atexit, sys
there = lambda: [one for one in sys.modules if (one + ".").startswith(tuple(name + "." for name in {ABSENT!r}))]
"""
SIDECAR = """
atexit.register(lambda: print(there(), file=sys.stderr))
from kvstore.cli.main import main
sys.argv = ["kvstore", "serve", "--json", "--config", sys.argv[1]]
main()
"""
CLIENT = """
import engine_adapter.paged.scheduler, engine_adapter.paged.worker
import kvstore
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

layout = small_layout()
with kvstore.open(f"unix:{sys.argv[1]}", engine="test 1.0") as store:
    handle = store.namespace(model=MODEL, layout=layout)
    assert not handle.has_courier
    put = handle.put(ids(640), random_pages(layout, 10, seed=3))
    assert put.reason is None, put
    with handle.lease(handle.match(ids(640)), deadline_ms=60_000) as lease:
        assert handle.get(lease, blank_pages(layout, 10)).tokens == 640
print(there())
"""


@pytest.mark.slow
def test_nothing_of_it_is_imported(tmp_path: Path) -> None:
    config = tmp_path / "kvstore.toml"
    data = tmp_path / "kv"
    config.write_text(
        f'[store]\ndata = "{data}"\ndram = "32MiB"\nnvme = "off"\nkeeper = false\n[http]\nlisten = "127.0.0.1:0"\n'
    )
    environment = {**os.environ, **PATHS}
    sidecar = subprocess.Popen(
        [sys.executable, "-c", SAY + SIDECAR, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert sidecar.stdout is not None
    try:
        assert json.loads(sidecar.stdout.readline())["serving"]
        assert not (data / "courier.sock").exists()
        command = [sys.executable, "-c", SAY + CLIENT, str(data / "kvstore.sock")]
        client = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        assert (client.returncode, client.stdout.strip()) == (0, "[]"), client.stderr
    finally:
        sidecar.send_signal(signal.SIGTERM)
        _, said = sidecar.communicate(timeout=60)
    assert said.splitlines()[-1] == "[]", said


def test_the_edge_and_the_network_import_what_is_configured_alone() -> None:
    text = f"""
import sys, kvstore.network.part, kvstore.edge.pages
rooms = {ROOMS!r}
print([one for one in sys.modules if one.startswith(rooms)])
"""
    assert run_python(text) == "[]"
