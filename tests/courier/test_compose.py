"""deploy/compose and deploy/kubernetes/pool.yaml: the same settings as processes, with the same addresses."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the extra test")
pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")
pytest.importorskip("cryptography", reason="cryptography is not installed (extra: tls)")

from courier.namespaces import rack  # noqa: E402
from courier.nodes import Node, make_keys, wait_for_peers  # noqa: E402
from kvstore.config import check_network  # noqa: E402
from kvstore.service.settings import read_settings  # noqa: E402
from valkey_server import ValkeyServer, server_binary  # noqa: E402

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
CONFIG = (DEPLOY / "compose" / "kvstore.toml").read_text()
BLOCKS = 20
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")


def address(service: dict[str, Any]) -> str:
    found: str = service["networks"]["pool"]["ipv4_address"]
    return found


class ComposedNode(Node):
    """A node whose configuration is the file's, but for its paths and sizes."""

    def of_service(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        text = CONFIG.replace("/var/lib/kvstore", str(self.folder / "kv")).replace("4GiB", "32MiB")
        text = text.replace("/run/kvstore/kvstore.sock", str(self.socket)).replace("keeper = true", "keeper = false")
        for file, path in (("keys", folder / "keys"), ("ca.pem", folder / "nodes" / "ca.pem")):
            text = text.replace(f"/etc/kvstore/{file}", str(path))
        for file in ("node.pem", "node.key"):
            text = text.replace(f"/etc/kvstore/{file}", str(folder / "nodes" / name / file))
        pull, listen = environment["KVSTORE_NETWORK_PULL"], environment["KVSTORE_NETWORK_LISTEN"]
        text = text.replace("[network]\n", f'[network]\nlisten = "{listen}"\npull = "{pull}"\n')
        self.config.write_text(text)
        (self.folder / "kv").mkdir(mode=0o700)
        shutil.copy(folder / "nodes" / name / "node", self.folder / "kv" / "node")
        os.chmod(self.folder / "kv" / "node", 0o600)


@pytest.mark.timeout(300)
def test_the_composed_pool_serves_from_node_to_node_and_from_its_remote_tier(tmp_path: Path) -> None:
    services = COMPOSE["services"]
    stores = {name: one for name, one in services.items() if name in ("a", "b")}
    names = [f"{name}={address(one)}" for name, one in stores.items()]
    script = DEPLOY / "compose" / "certificates.sh"
    subprocess.run(["sh", str(script), str(tmp_path / "nodes"), *names], check=True, capture_output=True)
    make_keys(tmp_path)
    with rack(1) as host, ExitStack() as stack:
        for one in services.values():
            subprocess.run([*host.wrap(0), "ip", "addr", "add", f"{address(one)}/24", "dev", "eth0"], check=True)
        for name in ("directory", "frames"):
            program, *options = services[name]["command"]
            assert program == "valkey-server"
            (tmp_path / name).mkdir()
            where = ["--bind", address(services[name]), "--port", "6379"]
            server = ValkeyServer(tmp_path / name, [*options, *where], server_binary(), host.wrap(0))
            stack.callback(server.kill)
        nodes = []
        for name, one in stores.items():
            node = ComposedNode(tmp_path / name, None, {}, {}, wrap=host.wrap(0))
            node.of_service(name, tmp_path, one["environment"])
            settings = read_settings(node.config.read_text())
            node.host, node.port = address(one), int(settings.peers_door.rpartition(":")[2])
            nodes.append(node)
            stack.callback(node.close)
        for node in nodes:
            node.start()
        wait_for_peers(nodes, 1)
        nodes[0].put(1, BLOCKS)
        got = nodes[1].get(1, BLOCKS)
        assert got.is_right and got.tiers == {"peer": BLOCKS}, got


def test_every_path_of_the_files_is_mounted_and_the_entry_makes_the_node() -> None:
    for name in ("a", "b"):
        service = COMPOSE["services"][name]
        targets = {one.split(":")[1] for one in service["volumes"]}
        settings = read_settings(CONFIG, environment=service["environment"])
        check_network(settings.network, settings.remote)
        network = settings.network
        assert {network.certificate, network.key, network.client_ca, settings.keys.directory} <= targets
        words = shlex.split(service["entrypoint"][2].replace(";", " ; "))
        assert words[-4:] == ["kvstore", "serve", "--config", "/etc/kvstore/kvstore.toml"] or "serve" in words
        assert settings.peers_door.startswith(address(service)) and settings.wants_courier


def test_the_pool_s_pods_have_what_their_settings_name() -> None:
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "pool.yaml").read_text()))
    (config,) = (one for one in objects if one["kind"] == "ConfigMap")
    (pods,) = (one["spec"]["template"]["spec"] for one in objects if one["metadata"]["name"] == "kvstore")
    (store,) = pods["containers"]
    environment = {one["name"]: one["value"].replace("$(POD_IP)", "10.1.2.3") for one in store["env"] if "value" in one}
    settings = read_settings(config["data"]["kvstore.toml"], environment=environment)
    mounts = [one["mountPath"] for one in store["volumeMounts"]]
    network = settings.network
    for path in (network.certificate, network.client_ca, settings.keys.directory, settings.store.data):
        assert path is not None and any(path.startswith(one) for one in mounts), path
    services = {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}
    assert settings.network.directory == "valkey://kvstore-directory:6379" and "kvstore-directory" in services
    assert settings.remote.url == "valkey://kvstore-frames:6379" and "kvstore-frames" in services
    ports = {one["containerPort"] for one in store["ports"]}
    assert {7470, 7471} <= ports and settings.peers_door == "10.1.2.3:7470"


@pytest.mark.parametrize("name", ["directory", "frames"])
def test_the_servers_keep_nothing_on_a_disk(name: str) -> None:
    command = COMPOSE["services"][name]["command"]
    assert command[command.index("--save") + 1] == "" and command[command.index("--appendonly") + 1] == "no"
