"""deploy/kubernetes, deploy/kustomize and deploy/helm: valid for the schemas of Kubernetes, and true of the sidecar."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import kvstore
from deploy.sidecar_process import AROUND_SECONDS, DEPLOY, flags_in, known_flags
from edge.test_edge import LIVENESS_SECONDS
from kvstore.config import parse_size
from kvstore.doctor import Health, configuration, read_transfer_config
from kvstore.edge.pages import PATHS
from kvstore.service.settings import Settings, host_and_port, read_settings

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the extra test")

KUSTOMIZE = DEPLOY / "kustomize"
OVERLAYS = ("base", "monitored", "vllm")
OTHERS = ("kustomization", "servicemonitor", "token")
"""Files of kinds that are not Kubernetes' own, and a patch."""
FILES = {
    f"vllm-{path.stem}" if path.parent.name == "vllm" else path.stem: path
    for folder in (DEPLOY / "kubernetes", *(KUSTOMIZE / one for one in OVERLAYS))
    for path in folder.glob("*.yaml")
    if path.stem not in OTHERS
}
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
    kustomized = {"service", "networkpolicy", *(f"vllm-{one}" for one in ("deployment", "autoscaler", "networkpolicy"))}
    assert set(FILES) == {*SERVERS, *kustomized, "engine", "pool"}, "the last one in tests/courier/test_compose.py"


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
    wanted = 2 * settings_of(name).limits.close_seconds + AROUND_SECONDS + seconds_before_stop(store_of(name))
    assert pod_of(name)["terminationGracePeriodSeconds"] >= wanted


def seconds_before_stop(container: Object) -> int:
    """What preStop takes of the pod's time."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert command[0] == "sleep"
    return int(command[1])


@pytest.mark.parametrize("name", SERVERS)
def test_the_probes_ask_for_pages_that_exist(name: str) -> None:
    store, settings = store_of(name), settings_of(name)
    host, port = host_and_port(settings.http.listen or "")
    assert host == "0.0.0.0", "the kubelet asks the pod's address"
    probes = {key: probe["httpGet"] for key, probe in store.items() if key.endswith("Probe") and "httpGet" in probe}
    assert "startupProbe" in probes
    liveness = store["livenessProbe"]["exec"]["command"]
    assert liveness == ["kvstore", "ping", "--data", settings.store.data] and settings.admin.socket is None
    assert store["livenessProbe"]["periodSeconds"] * store["livenessProbe"]["failureThreshold"] >= LIVENESS_SECONDS
    assert ("readinessProbe" in probes) is (name == "daemonset"), (
        "in an engine's pod it would stop the engine's traffic"
    )
    for probe in probes.values():
        assert [one["containerPort"] for one in store["ports"] if one["name"] == probe["port"]] == [port]
        assert probe["path"] in PATHS


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


@pytest.mark.parametrize("name", ["sidecar", "engine", "vllm-deployment"])
def test_an_engine_is_another_user_of_the_store_s_group(name: str) -> None:
    pod = pod_of(name)
    (engine,) = (one for one in pod["containers"] if one["name"] == "engine")
    context = {**pod["securityContext"], **engine["securityContext"]}
    assert context["runAsUser"] != 47110 and context["runAsUser"] != 0
    assert 47110 in [context.get("fsGroup"), *context.get("supplementalGroups", [])]
    paths = [mount["mountPath"] for mount in engine["volumeMounts"] if mount["name"] not in ("home", "shm")]
    assert paths == ["/run/kvstore"], "the directory, because a restart makes another socket"


@pytest.mark.parametrize("name", ["engine", "vllm-deployment"])
def test_an_engine_mounts_the_sockets_of_one_tenant_alone(name: str) -> None:
    (volume,) = (one for one in pod_of(name)["volumes"] if "hostPath" in one)
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


# Kustomize, and values of others' charts ------------------------------------------------------------------------


def built(overlay: str) -> dict[str, Object]:
    """What kustomize makes of it, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, which has kustomize in it")
    command = ["kubectl", "kustomize", str(KUSTOMIZE / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    assert len({one["kind"] for one in objects}) == len(objects)
    return {one["kind"]: one for one in objects}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_kustomization_names_the_files_that_are_there(overlay: str) -> None:
    folder = KUSTOMIZE / overlay
    given = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = [*given["resources"], *(one["path"] for one in given.get("patches", []))]
    assert sorted({*named} - {"../base"}) == sorted(
        path.name for path in folder.iterdir() if path.stem != "kustomization"
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_builds_is_valid(overlay: str) -> None:
    validate = _validator()
    for kind, one in built(overlay).items():
        if kind != "ServiceMonitor":
            validate(one)
        assert one["metadata"].get("namespace", "kvstore") == ("team-a" if overlay == "vllm" else "kvstore")


def test_service_policy_and_monitor_find_the_store() -> None:
    objects = built("monitored")
    labels = objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    service, policy, monitor = (objects[kind] for kind in ("Service", "NetworkPolicy", "ServiceMonitor"))
    assert service["spec"]["selector"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,), (port,) = monitor["spec"]["endpoints"], service["spec"]["ports"]
    (container,) = objects["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] == port["name"] and port["targetPort"] in [one["name"] for one in container["ports"]]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [SCRAPES]
    assert [one["port"] for one in rule["ports"]] == [port["targetPort"]] and policy["spec"]["egress"] == []
    assert endpoint["path"] in PATHS


SCRAPES = {one: {"matchLabels": {"kvstore/scrapes": "yes"}} for one in ("namespaceSelector", "podSelector")}


def images_in(objects: dict[str, Object]) -> set[str]:
    found, waiting = set(), list(objects.values())
    while waiting:
        one = waiting.pop()
        values = one.values() if isinstance(one, dict) else one
        waiting += [value for value in values if isinstance(value, dict | list)]
        found |= {value for key, value in one.items() if key == "image"} if isinstance(one, dict) else set()
    return found


def test_an_image_is_named_in_one_place() -> None:
    assert images_in(built("base")) == {f"kvstore:{kvstore.__version__}"}
    assert images_in(built("vllm")) == {"registry.example/vllm-kvstore:0.32.0"}
    for overlay in ("base", "vllm"):
        given = yaml.safe_load((KUSTOMIZE / overlay / "kustomization.yaml").read_text())
        assert len(given["images"]) == 1
    for path in DEPLOY.rglob("*.yaml"):
        for version in re.findall(r"(?:(?<![\w-])kvstore:|prefix_kvstore-)(\d+\.\d+\.\d+)", path.read_text()):
            assert version == kvstore.__version__, path


def test_vllm_is_reached_by_label_and_has_a_token_for_gated_models() -> None:
    objects = built("vllm")
    pod, policy = objects["Deployment"]["spec"]["template"], objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (rule,), (out,), (engine,) = policy["ingress"], policy["egress"], pod["spec"]["containers"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"kvstore/asks": "yes"}}}, SCRAPES]
    assert [one["port"] for one in rule["ports"]] == [one["name"] for one in engine["ports"]]
    assert {(one["port"], one["protocol"]) for one in out["ports"]} == {(53, "UDP"), (53, "TCP"), (443, "TCP")}
    (token,) = (one for one in engine["env"] if one["name"] == "HF_TOKEN")
    secret = token["valueFrom"]["secretKeyRef"]
    assert secret["optional"], "open models need none"
    command = f"create secret generic {secret['name']} --from-file={secret['key']}="
    assert command in (KUSTOMIZE / "vllm" / "kustomization.yaml").read_text()


def test_the_token_of_the_metrics_is_where_the_settings_look_for_it() -> None:
    objects = built("monitored")
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    settings = read_settings(objects["ConfigMap"]["data"]["kvstore.toml"], environment=environment)
    (volume,) = (one for one in pod["volumes"] if "secret" in one)
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == volume["name"])
    credentials = objects["ServiceMonitor"]["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert settings.http.token_file == f"{mount['mountPath']}/{credentials['key']}"
    assert volume["secret"]["secretName"] == credentials["name"]
    assert volume["secret"]["defaultMode"] == 0o440 and pod["securityContext"]["fsGroup"] == 47110


def test_what_scales_is_there() -> None:
    objects = built("vllm")
    target, deployment = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"], objects["Deployment"]
    assert {"kind": deployment["kind"], "apiVersion": deployment["apiVersion"]}.items() <= target.items()
    assert target["name"] == deployment["metadata"]["name"]


def arguments_of(place: str) -> list[str]:
    """Of vLLM."""
    if place == "vllm":
        (engine,) = pod_of("vllm-deployment")["containers"]
        return list(engine["args"])
    values = yaml.safe_load((DEPLOY / "helm" / f"{place}.yaml").read_text())
    if place == "llm-d":
        return list(values["decode"]["containers"][0]["args"])
    return list(values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"])


@pytest.mark.parametrize("place", ["vllm", "production-stack", "llm-d"])
def test_the_connector_takes_what_vllm_is_given(place: str) -> None:
    arguments = arguments_of(place)
    given = read_transfer_config(arguments[arguments.index("--kv-transfer-config") + 1])
    found = list(configuration(given))
    lacking = [one.text for one in found if one.health is Health.LACKS]
    assert lacking == ["/run/kvstore/kvstore.sock is not there"], "nothing else"
    assert not any(one.health is Health.NOTE for one in found)


@pytest.mark.parametrize("place", ["production-stack", "llm-d"])
def test_values_of_others_are_marked_as_not_run(place: str) -> None:
    assert "NOT RUN HERE" in (DEPLOY / "helm" / f"{place}.yaml").read_text().partition(":\n")[0]


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
