"""A client in another language, of the .proto files and docs/grpc.md alone: Node's, where it and its packages are.

`KVSTORE_NODE_MODULES` may name a folder that has them; else npm fetches them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from network.running import beside, network, token_file, token_of
from network.test_services import own_id
from service.sidecar import Sidecar
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")
SAID = f"npm install {' '.join(PACKAGES)}"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages are, or a skip that says what is missing."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    given = os.environ.get("KVSTORE_NODE_MODULES")
    if given is not None:
        return Path(given)
    if shutil.which("npm") is None:
        pytest.skip(f"npm is not installed, and KVSTORE_NODE_MODULES names no folder with: {SAID}")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the registry of npm does not answer: {SAID}")
    if done.returncode:
        assert "E404" not in done.stderr and "ERESOLVE" not in done.stderr, f"the packages are wrong: {done.stderr}"
        pytest.skip(f"{SAID} failed: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "node_modules"


@pytest.mark.slow
def test_node_asks_what_python_asks(modules: Path, tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=LAYOUT).put(ids(640), random_pages(LAYOUT, 10))
        with network(*beside(tmp_path, token_file(tmp_path))) as running:
            space = own_id(sidecar)
            prompt = ",".join(map(str, ids(700)))
            script = Path(__file__).parent / "node" / "client.js"
            done = subprocess.run(
                ["node", str(script), running.target, token_of("default"), str(ROOT / "proto"), space, prompt],
                capture_output=True, text=True, timeout=120, env={**os.environ, "NODE_PATH": str(modules)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            said = json.loads(done.stdout)
            assert [one["id"] for one in said["namespaces"]["namespaces"]] == [space]
            assert (said["match"]["blocks"], said["match"]["tiers"]) == (10, [{"tier": "dram", "blocks": 10}])
            (node,) = said["score"]["nodes"]
            assert (said["score"]["asked_tokens"], node["hit_tokens"]) == (640, {"dram": 640})
            assert said["without_deadline"]["code"] == 3 and "deadline" in said["without_deadline"]["details"]
