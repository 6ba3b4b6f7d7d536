"""The operator's commands as people and scripts run them, against `kvstore serve` in a process of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvstore
from kvstore.block.errors import BadInput, Unreachable
from kvstore.cli.ask import read_prompts
from kvstore.cli.report import namespace_table
from kvstore.client.framing import HANGS
from kvstore.status.tree import LookupCounts, NamespaceStatus
from programs import KVSTORE, PATHS
from service.sidecar import patient
from service.test_serve import crash, ended, serving
from test_cli import NO_TORCH, error_line, run_cli, told
from waiting import wait_until
from workbench import MODEL, ids, one_line, random_pages, small_layout

run = partial(run_cli, before=NO_TORCH, seconds=60)


def refused(*arguments: str) -> str:
    """The one line of a command that fails."""
    return error_line(run(*arguments))


def client(directory: Path) -> kvstore.SidecarStore:
    store = kvstore.open(f"unix:{directory / 'kv' / 'kvstore.sock'}", engine="test 1.0")
    assert isinstance(store, kvstore.SidecarStore)
    return patient(store)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Running]:
    """Its directory, a client, and what `serving` gives."""
    with serving(tmp_path, "--nvme", "64MiB") as served, client(tmp_path) as store:
        yield str(tmp_path / "kv"), store, served


Running = tuple[str, kvstore.SidecarStore, "tuple[subprocess.Popen[str], dict[str, Any]]"]


@pytest.mark.slow
def test_stat_and_namespaces(sidecar: Running) -> None:
    data, store, (_, said) = sidecar
    handle = store.namespace(model=MODEL, layout=small_layout())
    handle.put(ids(640), random_pages(handle.layout, 10), durability="disk")
    handle.lease(handle.match(ids(700))).release()
    handle.match(ids(128, 9))
    found = told("stat", "--data", data)
    assert found["pid"] == said["pid"] and found["state"] == "ready" and found["up_seconds"] > 0
    assert found["looked"]["asked_tokens"] == 768 and found["looked"]["hit_tokens"] == {"dram": 640}
    assert found["looked"]["miss_tokens"] == {"absent": 128} and found["looked"]["hit_rate"] == 640 / 768
    assert [one["name"] for one in found["tiers"]] == ["dram", "nvme"] and found["sessions"][0]["engine"] == "test 1.0"
    shown = run("stat", "--socket", f"{data}/admin.sock")
    assert shown.returncode == 0 and "hit rate: 640 of 768 tokens (83.3 %)" in shown.stdout
    assert "miss: absent" in shown.stdout and "test 1.0" in shown.stdout and "nvme writes" in shown.stdout
    (one,) = told("namespaces", "--data", data)["namespaces"]
    assert one["digest"] == handle.namespace.digest().hex() and (one["tenant"], one["blocks"]) == ("default", 10)
    shown = run("namespaces", "--data", data)
    assert one["id"] in shown.stdout and "2 layers x 2 heads x (8 + 8) bfloat16, 64 tokens" in shown.stdout


@pytest.mark.slow
def test_a_tenant_keeps_its_share_and_stat_shows_it(tmp_path: Path) -> None:
    other = tmp_path / "other.sock"
    config = tmp_path / "config.toml"
    config.write_text(f'[door]\nshare = 0.5\n[tenants.other]\nsocket = "{other}"\nweight = 2.5\n')
    layout = small_layout()
    with serving(tmp_path, "--dram", "1MiB", "--nvme", "off", "--config", str(config)) as _:
        with client(tmp_path) as store, patient(kvstore.open(f"unix:{other}")) as another:
            mine, theirs = (one.namespace(model=MODEL, layout=layout) for one in (store, another))
            assert mine.put(ids(640), random_pages(layout, 10)).reason is None
            for prompt in range(30):
                assert theirs.put(ids(640, 10_000 * prompt), random_pages(layout, 10)).reason is None
            assert mine.match(ids(640)).blocks == 10 and theirs.match(ids(640)).blocks == 0
            found = {one["tenant"]: one for one in told("stat", "--data", str(tmp_path / "kv"))["tenants"]}
            assert (found["default"]["share"], found["default"]["dram_guaranteed_bytes"]) == (0.5, 1 << 19)
            assert (found["other"]["weight"], found["other"]["dram_guaranteed_bytes"]) == (2.5, 0)
            assert 0 < found["default"]["dram_bytes"] < found["other"]["dram_bytes"] < 1 << 20
            assert found["default"]["dram_bytes"] + found["other"]["dram_bytes"] == 1 << 20
            assert found["other"]["nvme_bytes"] is None
        shown = run("stat", "--data", str(tmp_path / "kv"))
        line = next(line.split() for line in shown.stdout.splitlines() if line.startswith("default  "))
        head = next(line.split() for line in shown.stdout.splitlines() if line.startswith("tenant  "))
        assert line[:3] == ["default", "0.5", "1"] and head[:3] == ["tenant", "share", "weight"]
        assert "nvme" not in head, "a column in which nothing stands is left out"


@pytest.mark.slow
def test_stat_shows_what_decides_what_is_worth_holding(tmp_path: Path) -> None:
    """The policy, what is written to NVMe and how much still may be, and what is kept for a time beside its budget."""
    config = tmp_path / "config.toml"
    config.write_text(
        '[store]\npolicy = "s3-fifo"\nnvme_writes = 2.0\n[limits]\nretained_fraction = 0.5\n'
        f'[door]\nshare = 0.25\n[tenants.other]\nsocket = "{tmp_path / "other.sock"}"\n'
    )
    with (
        serving(tmp_path, "--dram", "4MiB", "--nvme", "64MiB", "--config", str(config)) as (process, _),
        client(tmp_path) as store,
    ):
        handle = store.namespace(model=MODEL, layout=small_layout())
        assert handle.put(ids(640), random_pages(handle.layout, 10), ttl=3600).reason is None
        data = str(tmp_path / "kv")
        found = told("stat", "--data", data)
        assert (found["policy"], found["nvme_writes"], found["retained_fraction"]) == ("adaptive", 2.0, 0.5)
        rate = 2 * (64 << 20) / 86_400
        assert found["write_budget"] == {"bytes_per_second": rate, "left_bytes": 3600 * rate, "most_bytes": 3600 * rate}
        tenants = {one["tenant"]: one for one in found["tenants"]}
        # A quarter is its own; of the rest it has half, and those of whom nothing is said have the other half together.
        part = 0.25 + 0.75 / 2
        assert tenants["default"]["dram_retained_budget_bytes"] == int(part * 0.5 * (4 << 20))
        assert tenants["default"]["nvme_retained_budget_bytes"] == int(part * 0.5 * (64 << 20))
        assert found["dram_retained_budget_bytes"] == 2 << 20 and found["nvme_retained_budget_bytes"] == 32 << 20
        kept = found["dram_retained_bytes"]
        assert 0 < kept == tenants["default"]["dram_retained_bytes"] and found["nvme_retained_bytes"] == 0
        assert tenants["other"]["dram_retained_bytes"] is None, "it has its budget together with others"
        shown = run("stat", "--data", data).stdout
        status, log = ended(process)
        warned = [line["message"] for line in log if line["level"] == "warning"]
        assert status == 0 and warned == ["policy 's3-fifo' was removed and is 'adaptive' now; name that, or lru"]
    for words in (
        "policy: adaptive; nvme_writes: 2.0",
        "left 5.3 MiB, most 5.3 MiB",
        "retained fraction: 0.5",
        "dram retained budget: 2.0 MiB",
        "nvme retained budget: 32.0 MiB",
    ):
        assert words in shown
    assert "  tenant default, share 0.25," in shown and "nvme retained budget 20.0 MiB" in " ".join(shown.split())


@pytest.mark.slow
def test_stat_without_nvme_has_no_writes(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as _:
        found = told("stat", "--data", str(tmp_path / "kv"))
        shown = run("stat", "--data", str(tmp_path / "kv")).stdout
    assert (found["policy"], found["nvme_writes"], found["write_budget"]) == ("lru", None, None)
    assert found["nvme_retained_budget_bytes"] is None and found["retained_fraction"] == 0.25
    assert "\npolicy: lru\n" in shown and "\ndram retained budget: 4.0 MiB\n" in shown and "nvme" not in shown


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_namespaces_cuts_no_id_and_no_figure(width: int) -> None:
    looked = LookupCounts(asked_tokens=10, hit_tokens={"dram": 10}, granted_tokens=10, hit_rate=1.0)
    one = NamespaceStatus(
        *("645350dde047", "64" * 32, "default", "3f5e1c0d9a" * 4, "a layout", "raw"),
        *(0, 64, 1_000_000, 12_000, 12 << 30, 988_000, 1 << 40, 28.0, looked),
    )
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(namespace_table([one], 100.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    words = (
        "645350dde047",
        "default",
        "3f5e1c0d9a",
        "1,000,000",
        "12,000",
        "12.0 GiB",
        "988,000",
        "100.0 %",
        "1 min 12 s ago",
    )
    assert all(word in shown for word in words) and shown.count("\u2026") == 1, shown
    assert shown.count("645350dde047") == (2 if width == 80 else 1)


@pytest.mark.slow
def test_watch_draws_again_and_again(sidecar: Running) -> None:
    data, store, _ = sidecar
    command = [*KVSTORE, "stat", "--data", data]
    env = {**os.environ, **PATHS}
    with subprocess.Popen([*command, "--watch", "0.2", "--json"], stdout=subprocess.PIPE, text=True, env=env) as watch:
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["namespaces"] == []
        handle = store.namespace(model=MODEL, layout=small_layout())
        deadline = time.monotonic() + 30
        while not (found := json.loads(watch.stdout.readline()))["namespaces"]:
            assert time.monotonic() < deadline
        assert found["namespaces"][0]["model"] == handle.model
        watch.send_signal(signal.SIGINT)
        assert watch.wait(20) == 130
    with subprocess.Popen([*command, "--watch", "0.2"], stdout=subprocess.PIPE, text=True, env=env) as watch:
        assert watch.stdout is not None
        pages, lines = 0, 0
        while pages < 2:  # into a pipe: one page behind the other, each as soon as it is there
            line = watch.stdout.readline()
            pages += ": " in line and " up " in line.split(":")[0]
            lines += 1
            assert line and lines < 200
        watch.send_signal(signal.SIGINT)
        assert watch.wait(20) == 130
    terminal, theirs = pty.openpty()
    with subprocess.Popen([*command, "--watch"], stdout=theirs, stderr=theirs, stdin=theirs, env=env) as watch:
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 30
        while seen.count(b"up ") < 2:  # every two seconds
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 1 << 16)
        watch.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while watch.poll() is None and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    os.read(terminal, 1 << 16)
                except OSError:
                    break
        assert watch.wait(5) == 130
    os.close(terminal)


@pytest.mark.slow
def test_warm_promotes_what_is_on_disk(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "64MiB") as (process, _):
        with client(tmp_path) as store:
            handle = store.namespace(model=MODEL, layout=small_layout())
            other = store.namespace(model="other", layout=small_layout())
            assert handle.put(ids(640), random_pages(handle.layout, 10), durability="disk").stored == 10
            pages = random_pages(handle.layout, 2)
            assert handle.put(ids(128), pages, extra_keys=["salt"], durability="disk").stored == 2
            one = handle.namespace.digest().hex()[:8]
        assert ended(process)[0] == 0
    file, data = tmp_path / "prompts.jsonl", str(tmp_path / "kv")
    lines = [ids(704), {"token_ids": ids(128), "extra_keys": ["salt"]}, ids(320), ids(64, 5000)]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    with serving(tmp_path, "--nvme", "64MiB") as (_, said):
        wait_until(lambda: told("stat", "--data", data)["state"] == "ready")
        found = told("warm", str(file), "--namespace", one, "--data", data)
        assert (found["prompts"], found["asked"], found["promoted"], found["warm"]) == (4, 19, 12, 5)
        assert found["left"] == {} and sum(found["absent"].values()) == 2
        assert found["namespace"].startswith(one)
        again = told("warm", str(file), "--namespace", one, "--socket", said["serving"][0])
        assert (again["promoted"], again["warm"], again["asked"]) == (0, 17, 19)
        stat = told("stat", "--data", data)
        assert stat["looked"]["asked_tokens"] == 0, "that was no engine"
        assert stat["leases"] == 0 and stat["counters"]["promoted_blocks"] == 12
        assert stat["namespaces"][0]["dram_blocks"] == 12
        shown = run("warm", str(file), "--namespace", one, "--data", data)
        assert "warm already" in shown.stdout and "not there: " in shown.stdout
        assert "no namespace begins with 'ffff'; there" in refused(
            "warm", str(file), "--namespace", "ffff", "--data", data
        )
        assert other.namespace.digest().hex() != handle.namespace.digest().hex()
        file.write_text("[1, 2]\n[1, -2]\n")
        assert f"{file} line 2: token ids must be" in refused("warm", str(file), "--namespace", one, "--data", data)


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("[1, 2", "not JSON"),
        ("7", "give a list of token ids"),
        ('{"tokens": [1]}', "give a list of token ids"),
        ('{"token_ids": [1], "salt": 1}', "'salt' is not known"),
        ("[true]", "true or false"),
        ('["a"]', "token ids must be"),
        ('{"token_ids": [1], "extra_keys": "x"}', "must be a list"),
        ('{"token_ids": [1], "extra_keys": [7]}', "an extra key is text"),
        ('{"token_ids": [1], "extra_keys": [{"hex": "zz"}]}', "an extra key is text"),
        ('{"token_ids": [1], "extra_keys": [{"hex": "00", "first_token": -1}]}', "from token 0 on"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_wrong_line_is_named(line: str, fragment: str) -> None:
    with pytest.raises(BadInput) as wrong:
        read_prompts("f.jsonl", ["[1]\n", "\n", line])
    assert one_line(wrong.value, "f.jsonl line 3: ", fragment)


@pytest.mark.slow
def test_drop_and_purge(sidecar: Running, tmp_path: Path) -> None:
    data, store, (process, said) = sidecar
    handle = store.namespace(model=MODEL, layout=small_layout())
    handle.put(ids(640), random_pages(handle.layout, 10), durability="disk")
    one = handle.namespace.digest().hex()[:8]
    here_alone = {"elsewhere": "", "not_reached": []}
    assert told("drop", one, "--data", data) == {"namespace": one, "blocks": 10, **here_alone}
    assert handle.match(ids(640)).blocks == 0
    assert f"there is: {one}" in refused("drop", "zz", "--data", data)
    assert "there are none" in refused("drop", one, "--tenant", "nobody", "--data", data)
    handle.put(ids(640), random_pages(handle.layout, 10), durability="disk")
    assert "no terminal to ask at; give --yes" in refused("purge", "default", "--data", data)
    assert "tenant 'nobody' has no keys here; there are: default" in refused("purge", "nobody", "--yes", "--data", data)
    assert handle.match(ids(640)).blocks == 10
    secret = json.loads((tmp_path / "kv" / "keys").read_text())["tenants"]["default"]["secret"]
    assert told("purge", "default", "--yes", "--data", data) == {"tenant": "default", "blocks": 10, **here_alone}
    assert secret not in (tmp_path / "kv" / "keys").read_text(), "whoever comes again meanwhile has another one"
    crash(process, said)
    process.communicate()
    with serving(tmp_path, "--nvme", "64MiB"), client(tmp_path) as again:
        found = again.namespace(model=MODEL, layout=small_layout())
        wait_until(lambda: told("stat", "--data", data)["state"] == "ready")
        assert found.match(ids(640)).blocks == 0
        assert json.loads((tmp_path / "kv" / "keys").read_text())["tenants"]["default"]["secret"] != secret


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_purged"), [(b"n\n", False), (b"y\n", True)])
def test_a_purge_asks_at_a_terminal(sidecar: Running, answer: bytes, is_purged: bool) -> None:
    data, store, _ = sidecar
    store.namespace(model=MODEL, layout=small_layout())
    secret = json.loads((Path(data) / "keys").read_text())["tenants"]["default"]["secret"]
    terminal, theirs = pty.openpty()
    command = [*KVSTORE, "purge", "default", "--data", data, "--json"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **PATHS}
    ) as process:
        os.write(terminal, answer)
        out, error = process.communicate(timeout=30)
    os.close(terminal)
    os.close(theirs)
    assert b"Void all blocks of tenant default and retire its key? [y/N]" in error
    assert (process.returncode, bool(out)) == ((0, True) if is_purged else (130, False))
    assert (secret in (Path(data) / "keys").read_text()) is not is_purged


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("stat",), ("namespaces",), ("drop", "ab"), ("purge", "a", "--yes"), ("stat", "--watch", "--json")]
)
def test_without_a_sidecar_there_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    line = refused(*arguments, "--data", str(tmp_path))
    assert f"no sidecar to talk to: {tmp_path}/admin.sock does not answer (No such file or directory)" in line
    assert "kvstore serve" in line and "--admin-socket" in line and "--data" in line


@pytest.mark.slow
def test_a_sidecar_that_hangs_is_said_to_hang_by_each_command(sidecar: Running, tmp_path: Path) -> None:
    """It is there, so that none says that it has to be started."""
    data, store, (_, said) = sidecar
    store.namespace(model=MODEL, layout=small_layout())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2]\n")
    words = "stat|stat --json|stat --watch --json|why x|prefixes|namespaces|drop ab|purge default --yes"
    commands = [one.split() for one in words.split("|")]
    commands += [["warm", str(prompts), "--namespace", "ab"], ["record", str(tmp_path / "out"), "--seconds", "1"]]
    os.kill(said["pid"], signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(len(commands)) as pool:
            lines = list(pool.map(lambda one: refused(*one, "--data", data), commands))
        with pytest.raises(Unreachable, match=HANGS):
            kvstore.open(f"unix:{data}/kvstore.sock").namespace(model=MODEL, layout=small_layout())
        assert any(
            "hangs" in one["text"] for one in json.loads(run("doctor", "--data", data, "--json").stdout)["findings"]
        )
    finally:
        os.kill(said["pid"], signal.SIGCONT)
    for command, line in zip(commands, lines, strict=True):
        assert HANGS in line and "start" not in line, (command, line)


@pytest.mark.slow
def test_other_wrong_things_are_one_line(sidecar: Running, tmp_path: Path) -> None:
    data, _, _ = sidecar
    (tmp_path / "f").write_text("[1]\n")
    for flag in ("--admin-socket", "--socket"):  # its former name
        assert "the admin socket, admin.sock in the sidecar's --data" in refused("stat", flag, f"{data}/kvstore.sock")
        assert "there are none" in refused("drop", "ab", flag, f"{data}/admin.sock")
    assert "tenant's socket" in refused(
        "warm", str(tmp_path / "f"), "--namespace", "a", "--socket", f"{data}/admin.sock"
    )
    assert "does not answer" in refused("warm", str(tmp_path / "f"), "--namespace", "a", "--data", str(tmp_path))
    assert "No such file" in refused("warm", str(tmp_path / "none"), "--namespace", "a", "--data", data)
    assert "there are none" in refused("warm", str(tmp_path / "f"), "--namespace", "a", "--data", data)
    assert "give 0.1 to 86400" in refused("stat", "--watch", "0", "--data", data)
