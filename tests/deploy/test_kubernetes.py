"""deploy/kubernetes: valid for the schemas of Kubernetes, and true of the sidecar."""

from __future__ import annotations

import copy
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from deploy.sidecar_process import AROUND_SECONDS, DEPLOY, flags_in, known_flags
from kvstore.config import parse_size
from kvstore.metrics.http_server import HttpServer
from kvstore.metrics.pages import MetricsAccess, sidecar_pages
from kvstore.node import SystemClock
from kvstore.protocol.status import Readiness
from kvstore.service.settings import Settings, host_and_port, read_settings

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the extra test")

FILES = {path.stem: path for path in (DEPLOY / "kubernetes").glob("*.yaml")}
SERVERS = ("sidecar", "daemonset")
OLDEST = "1.29"
"""The first in which an init container that goes on is switched on by default."""
Object = dict[str, Any]


def objects_of(name: str) -> list[Object]:
    return list(yaml.safe_load_all(FILES[name].read_text()))


def pod_of(name: str) -> Object:
    """The pod's specification."""
    (one,) = (one for one in objects_of(name) if one["kind"] in ("Deployment", "DaemonSet", "Pod"))
    spec: Object = one["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def store_of(name: str) -> Object:
    """The sidecar's container."""
    pod = pod_of(name)
    (one,) = (one for one in pod.get("initContainers", []) + pod["containers"] if one["name"] == "kvstore")
    return one


def settings_of(name: str) -> Settings:
    (one,) = (one for one in objects_of(name) if one["kind"] == "ConfigMap")
    return read_settings(one["data"]["kvstore.toml"])


@pytest.mark.parametrize("name", FILES)
def test_the_schemas_of_kubernetes_take_it(name: str) -> None:
    validate = _validator()
    for one in objects_of(name):
        validate(one)


def test_the_schemas_would_notice() -> None:
    validate = _validator()
    for path, key in (((), "specc"), (("securityContext",), "runAsNonRooot"), (("containers", 0), "livenesProbe")):
        (broken,) = copy.deepcopy(objects_of("engine"))
        place = broken["spec"]
        for step in path:
            place = place[step]
        place[key] = True
        with pytest.raises(ValueError, match=key):
            validate(broken)


def test_all_of_them_are_looked_at() -> None:
    assert set(FILES) == {*SERVERS, "engine", "pool"}, "the last one in tests/courier/test_compose.py"


@pytest.mark.parametrize("name", SERVERS)
def test_the_settings_fit_the_container(name: str) -> None:
    settings, store = settings_of(name), store_of(name)
    assert flags_in(store["args"]) <= known_flags()
    mounts = {mount["name"]: mount["mountPath"] for mount in store["volumeMounts"]}
    assert store["args"] == ["--config", mounts["config"] + "/kvstore.toml"]
    assert settings.store.data == mounts["data"]
    for one in settings.sockets().values():
        assert PurePosixPath(one.socket).is_relative_to(mounts["sockets"])
    limit = parse_size(store["resources"]["limits"]["memory"].replace("Gi", "GiB"), "limit")
    assert store["resources"]["requests"]["memory"] == store["resources"]["limits"]["memory"]
    if settings.store.dram != "auto":
        assert parse_size(settings.store.dram, "dram") <= 0.88 * limit


@pytest.mark.parametrize("name", SERVERS)
def test_the_pod_waits_for_an_orderly_end(name: str) -> None:
    assert pod_of(name)["terminationGracePeriodSeconds"] >= 2 * settings_of(name).limits.close_seconds + AROUND_SECONDS


@pytest.mark.parametrize("name", SERVERS)
def test_the_probes_ask_for_pages_that_exist(name: str) -> None:
    store, settings = store_of(name), settings_of(name)
    host, port = host_and_port(settings.http.listen or "")
    assert host == "0.0.0.0", "the kubelet asks the pod's address"
    probes = {key: probe["httpGet"] for key, probe in store.items() if key.endswith("Probe")}
    assert {"startupProbe", "livenessProbe"} <= set(probes)
    assert ("readinessProbe" in probes) is (name == "daemonset"), (
        "in an engine's pod it would stop the engine's traffic"
    )
    with health_pages() as answers:
        for probe in probes.values():
            assert [one["containerPort"] for one in store["ports"] if one["name"] == probe["port"]] == [port]
            assert answers(probe["path"]) == 200
        assert answers("/nothing") == 404, "it would not have noticed"


@pytest.mark.parametrize("name", SERVERS)
def test_the_store_runs_with_next_to_nothing(name: str) -> None:
    pod, store = pod_of(name), store_of(name)
    context = {**pod["securityContext"], **store["securityContext"]}
    assert context["runAsNonRoot"] and context["runAsUser"] == context["runAsGroup"] == 47110
    assert context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))


@pytest.mark.parametrize("name", ["sidecar", "engine"])
def test_an_engine_is_another_user_of_the_store_s_group(name: str) -> None:
    pod = pod_of(name)
    (engine,) = (one for one in pod["containers"] if one["name"] == "engine")
    context = {**pod["securityContext"], **engine["securityContext"]}
    assert context["runAsUser"] != 47110 and context["runAsUser"] != 0
    assert 47110 in [context.get("fsGroup"), *context.get("supplementalGroups", [])]
    paths = [mount["mountPath"] for mount in engine["volumeMounts"]]
    assert paths == ["/run/kvstore"], "the directory, because a restart makes another socket"


def test_an_engine_mounts_the_sockets_of_one_tenant_alone() -> None:
    (volume,) = pod_of("engine")["volumes"]
    inside = {mount["name"]: mount["mountPath"] for mount in store_of("daemonset")["volumeMounts"]}["sockets"]
    (outside,) = (one["hostPath"]["path"] for one in pod_of("daemonset")["volumes"] if one["name"] == "sockets")
    tenants = settings_of("daemonset").sockets()
    on_host = {name: outside / PurePosixPath(one.socket).parent.relative_to(inside) for name, one in tenants.items()}
    assert len(set(on_host.values())) == len(tenants) == 3
    mounted = PurePosixPath(volume["hostPath"]["path"])
    assert [name for name, path in on_host.items() if path.is_relative_to(mounted)] == ["team-a"]


def test_the_directories_are_handed_over_once(tmp_path: Path) -> None:
    """The init container's own script, on other paths, with the one capability that it asks for."""
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    (first,) = pod_of("daemonset")["initContainers"]
    assert first["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    (script,) = first["args"]
    for one in ("/run/kvstore", "/var/lib/kvstore"):
        (tmp_path / one[1:]).mkdir(parents=True)
        script = script.replace(one, f"{tmp_path}{one}")
    command = ["setpriv", "--bounding-set=-all,+chown", *first["command"], script]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        for tenant in settings_of("daemonset").sockets().values():
            facts = (tmp_path / tenant.socket[1:]).parent.stat()
            assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (47110, 47110, 0o750)
        facts = (tmp_path / "var/lib/kvstore").stat()
        assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (47110, 47110, 0o700)


@contextmanager
def health_pages() -> Iterator[Callable[[str], int]]:
    """The status that a sidecar's pages answer with."""
    access = MetricsAccess(None, is_shared=False)
    pages = sidecar_pages(lambda: Readiness.READY, lambda: True, list, bytes, access)
    health = HttpServer("127.0.0.1", 0, pages, SystemClock().monotonic_seconds)
    health.start()

    def status_of(path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{health.port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        yield status_of
    finally:
        health.close(5)


def _validator() -> Callable[[Object], None]:
    """Raises `ValueError` for an object that the oldest or the newest schemas refuse."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed; it comes with the extra test"
    )

    def validate(one: Object) -> None:
        for version in (OLDEST, schemas.latest_version()):
            try:
                schemas.validate(one, version, strict=True)
            except schemas.ValidationError as error:
                raise ValueError(f"{version}: {one['kind']}: {error.message}") from None

    return validate
