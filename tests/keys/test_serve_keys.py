"""`kvstore serve` on a directory of keys, as an operator and its engines meet it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import kvstore
from kvstore.block.account import MissReason
from kvstore.block.errors import Unreachable
from kvstore.cli import ask
from kvstore.node import SystemClock
from programs import KVSTORE, PATHS, fetched, refused_start, serving_program
from service.sidecar import patient
from test_cli import run_cli, told
from waiting import wait_until
from workbench import (
    MODEL,
    prompt_of,
    put_prompt,
    random_pages,
    read_prompt,
    small_layout,
)

LAYOUT = small_layout()


class Served:
    """A sidecar that runs on `directory / data`, with the keys of `directory / pool`."""

    def __init__(self, said: dict[str, Any], process: subprocess.Popen[str], data: Path) -> None:
        self.said, self.process, self.data = said, process, str(data)

    def readyz(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(fetched(self.said["http_port"], "/readyz")[1])
        return found

    def metrics(self) -> str:
        return fetched(self.said["http_port"], "/metrics")[1]

    def stat(self) -> Any:
        return msgspec.to_builtins(ask.stat(f"{self.data}/admin.sock", SystemClock()))

    def client(self) -> Any:
        return patient(kvstore.open(f"unix:{self.data}/kvstore.sock", engine="test 1.0"))


@contextmanager
def served(directory: Path, *flags: str, data: str = "kv", **variables: str) -> Iterator[Served]:
    command = [*KVSTORE, "serve", "--json", "--data", str(directory / data), "--dram", "16MiB", "--nvme", "16MiB"]
    command += ["--http", "127.0.0.1:0", "--keys", str(directory / "pool"), *flags]
    with serving_program(command, {**os.environ, **PATHS, **variables}) as (process, said):
        yield Served(said, process, directory / data)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def put(handle: Any, prompt: int, blocks: int = 4) -> Any:
    return put_prompt(handle, prompt, blocks, durability="disk")


def read(handle: Any, prompt: int, blocks: int = 4) -> tuple[int, MissReason | None]:
    return read_prompt(handle, prompt, blocks)[:2]


def test_rotation_and_retirement_under_load_without_a_restart(tmp_path: Path) -> None:
    pool = str(tmp_path / "pool")
    fingerprint = told("keys", "init", pool)["tenants"][0]["fingerprint"]
    ends, faults, counts = threading.Event(), [], {"read": 0, "after": 0}
    with served(tmp_path) as sidecar:
        pid = sidecar.said["pid"]

        def engine(number: int) -> None:
            random = Random(number)
            try:
                with sidecar.client() as store:
                    handle = store.namespace(model=MODEL, layout=LAYOUT)
                    while not ends.is_set():
                        prompt = random.randrange(6)
                        assert put(handle, prompt).reason in (None, MissReason.IN_FLIGHT, MissReason.KEY_MISMATCH)
                        found, why = read(handle, prompt)
                        assert why in (None, MissReason.IN_FLIGHT, MissReason.KEY_MISMATCH, MissReason.ABSENT), why
                        counts["read"] += found
            except BaseException as error:
                faults.append(error)
                raise

        engines = [threading.Thread(target=engine, args=(number,)) for number in range(2)]
        for one in engines:
            one.start()
        try:
            for epoch in (2, 3):
                told("keys", "rotate", pool, "default")
                wait_until(lambda epoch=epoch: sidecar.stat()["keys"][0]["epoch"] == epoch or bool(faults))
            assert sidecar.stat()["keys"][0]["accepted"] == [1, 2, 3]
            for epoch in (1, 2):
                told("keys", "retire", pool, "default", str(epoch))
            wait_until(lambda: sidecar.stat()["keys"][0]["accepted"] == [3] or bool(faults))
            before = counts["read"]
            wait_until(lambda: counts["read"] > before + 50 or bool(faults))
        finally:
            ends.set()
            for one in engines:
                one.join()
        assert not faults
        stat, ready = sidecar.stat(), sidecar.readyz()
        assert stat["pid"] == pid and stat["warnings"] == [] and stat["health"] == "ok", stat["health"]
        assert stat["keys"] == [{"tenant": "default", "fingerprint": fingerprint, "epoch": 3, "accepted": [3]}]
        assert stat["counters"].get("quarantined_blocks", 0) == stat["looked"]["reports"] == 0
        assert ready == {"ready": True, "state": "ready", "node": stat["node"], "incarnation": stat["incarnation"]}
        text = sidecar.metrics()
        assert f'node="{stat["node"]}"' in text and f'incarnation="{stat["incarnation"]}"' in text
        assert "kvstore_warnings 0" in text
    with served(tmp_path) as sidecar:
        again = sidecar.stat()
        assert again["node"] == stat["node"] and again["incarnation"] != stat["incarnation"]
        with sidecar.client() as store:
            handle = store.namespace(model=MODEL, layout=LAYOUT)
            assert any(read(handle, prompt)[0] for prompt in range(6)), "it is warm"


def test_another_identity_is_refused_at_the_start_and_its_clients_are_told(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    old = told("keys", "init", str(pool))["tenants"][0]["fingerprint"]
    with served(tmp_path) as sidecar:
        client = sidecar.client()
        handle = client.namespace(model=MODEL, layout=LAYOUT)
        assert put(handle, 1).reason is None and read(handle, 1) == (4, None)
    other = told("keys", "init", str(tmp_path / "other"))["tenants"][0]["fingerprint"]
    assert old in refused_start("keys", "import", str(tmp_path / "other"), str(pool))
    told("keys", "import", str(tmp_path / "other"), str(pool), "--cold-start")
    line = refused_start("serve", "--data", str(tmp_path / "kv"), "--keys", str(pool))
    assert old in line and other in line and f"keys.cold_start={other}" in line
    with served(tmp_path, KVSTORE_KEYS_COLD_START=other) as sidecar:
        wait_until(lambda: handle.match(prompt_of(1, 1)).reason is MissReason.KEY_MISMATCH)
        match = handle.match(prompt_of(1, 1))
        assert match.reason is MissReason.KEY_MISMATCH and old in match.detail and other in match.detail
        put_back = handle.put(prompt_of(1, 1), random_pages(LAYOUT, 1))
        assert put_back.reason is MissReason.KEY_MISMATCH and old in put_back.detail
        (warning,) = sidecar.stat()["warnings"]
        assert old in warning and other in warning and "test 1.0" in warning and "default" in warning
        (public,) = sidecar.readyz()["warnings"]
        assert "kvstore stat" in public and not any(one in public for one in (old, other, "default", "test"))
        assert sidecar.readyz()["state"] == "ready", "it keeps nothing from being served"
        assert "kvstore_warnings 1" in sidecar.metrics()
        anew = client.namespace(model=MODEL, layout=LAYOUT)
        assert put(anew, 1).reason is None and read(anew, 1) == (4, None)
        assert sidecar.stat()["warnings"] == []
        client.close()


def test_a_purged_tenant_is_not_revived_by_its_mount(tmp_path: Path) -> None:
    pool, config = str(tmp_path / "pool"), tmp_path / "kvstore.toml"
    told("keys", "init", pool, "default", "guest")
    config.write_text(f'[tenants.guest]\nsocket = "{tmp_path}/guest.sock"\n')
    with served(tmp_path, "--config", str(config)) as sidecar:
        with sidecar.client() as store:
            assert put(store.namespace(model=MODEL, layout=LAYOUT), 1).reason is None
        assert told("purge", "default", "--yes", "--data", sidecar.data)["blocks"] == 4
        with pytest.raises(Unreachable, match="purged"):
            sidecar.client().namespace(model=MODEL, layout=LAYOUT)
    for _ in range(2):
        with served(tmp_path, "--config", str(config)) as sidecar:
            with pytest.raises(Unreachable, match="kvstore keys revive default"):
                sidecar.client().namespace(model=MODEL, layout=LAYOUT)
            with patient(kvstore.open(f"unix:{tmp_path}/guest.sock")) as store:  # others are served
                assert put(store.namespace(model=MODEL, layout=LAYOUT), 2).reason is None
            (warning,) = sidecar.stat()["warnings"]
            assert "purged" in warning and len(sidecar.readyz()["warnings"]) == 1
            assert "in use" in refused_start("keys", "revive", "default", "--data", sidecar.data)
    told("keys", "revive", "default", "--data", str(tmp_path / "kv"))
    with served(tmp_path, "--config", str(config)) as sidecar, sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        assert handle.match(prompt_of(1, 1)).blocks == 0, "what was purged stays so"
        assert put(handle, 1).reason is None and sidecar.stat()["warnings"] == []


def test_a_copied_directory_that_runs_as_well_says_so(tmp_path: Path) -> None:
    told("keys", "init", str(tmp_path / "pool"))
    with served(tmp_path) as first:
        node = first.stat()["node"]
        shutil.copytree(tmp_path / "kv", tmp_path / "copy", ignore=shutil.ignore_patterns("*.sock"))
        with served(tmp_path, data="copy") as second:
            (warning,) = second.stat()["warnings"]
            assert second.stat()["node"] == node and node in warning and "copy" in warning
            assert first.stat()["warnings"] == [] and len(second.readyz()["warnings"]) == 1
            first.process.send_signal(signal.SIGTERM)
            first.process.wait(30)
            wait_until(lambda: not second.stat()["warnings"])


def test_settings_of_keys_that_cannot_be(tmp_path: Path) -> None:
    line = refused_start("serve", "--data", str(tmp_path / "kv"), "--keys", str(tmp_path / "nowhere"))
    assert "nowhere" in line and "kvstore keys init" in line
    told("keys", "init", str(tmp_path / "pool"), "b")
    line = refused_start("serve", "--data", str(tmp_path / "kv"), "--keys", str(tmp_path / "pool"))
    assert "tenant default has no keys" in line


def test_show_prints_fingerprints_and_never_a_secret(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    made = told("keys", "init", str(pool), "default", "b")
    shown = told("keys", "show", str(pool))
    assert shown["tenants"] == sorted(made["tenants"], key=lambda one: one["tenant"])
    rotated = told("keys", "rotate", str(pool), "b")["tenants"][0]
    assert [one["epoch"] for one in rotated["epochs"]] == [1, 2] and rotated["epoch"] == 2
    assert told("keys", "show", str(pool / "b.key"))["tenants"] == [rotated]
    texts = [file.read_text() for file in pool.iterdir()]
    secrets = {one["secret"] for text in texts for one in (json.loads(text)["identity"], *json.loads(text)["epochs"])}
    for words in (["show", str(pool)], ["rotate", str(pool), "b"], ["retire", str(pool), "b", "1"]):
        for form in ([], ["--json"]):
            ended = run_cli("keys", *words, *form)
            assert not any(secret in ended.stdout + ended.stderr for secret in secrets)
    with kvstore.open(f"embedded:{tmp_path / 'kv'}", dram="1MiB") as store:
        own = store.tenant_keys("default").fingerprint.hex()
    assert told("keys", "show", str(tmp_path / "kv" / "keys"))["tenants"][0]["fingerprint"] == own
