"""`/metrics` of a sidecar that runs: from its settings, by its command, in its own process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest

import kvstore
from metrics.scraped import Scrape
from programs import PATHS, fetched
from service.sidecar import patient
from service.test_serve import ended, serving
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

TOKEN = "a-token-of-many-letters"


def with_tenants(directory: Path, http: str = "") -> Path:
    config = directory / "kvstore.toml"
    config.write_text(f'[tenants.other]\nsocket = "{directory}/other.sock"\n[http]\nlisten = "127.0.0.1:0"\n{http}')
    return config


def test_one_tenant_is_scraped_without_a_token(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off", "--http", "127.0.0.1:0") as (process, said):
        status, text = fetched(said["http_port"], "/metrics")
        assert status == 200
        scrape = Scrape(text)
        assert scrape.adds_up() and scrape.total("state") == 1
        assert scrape.total("tier_budget_bytes", tier="dram") == 16 << 20
        assert fetched(said["http_port"], "/metric")[0] == 404
        status, log = ended(process)
    assert status == 0 and {one["level"] for one in log} == {"info"}


def test_several_tenants_are_scraped_with_the_token_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    config = with_tenants(tmp_path, f'token_file = "{tmp_path}/token"\n[log]\nlevel = "warning"\n')
    with serving(tmp_path, "--nvme", "off", "--config", str(config)) as (process, said):
        port = said["http_port"]
        for token in ("", "another-token-of-many-letters"):
            status, text = fetched(port, "/metrics", token=token)
            assert status == 401 and text.count("\n") == 1 and "http.token_file" in text
        status, text = fetched(port, "/metrics", token=TOKEN)
        assert status == 200 and Scrape(text).adds_up()
        assert fetched(port, "/livez")[0] == fetched(port, "/readyz")[0] == 200
        assert ended(process) == (0, [])


@pytest.mark.slow
def test_several_tenants_without_a_token_have_no_metrics_and_the_log_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off", "--config", str(with_tenants(tmp_path))) as (process, said):
        status, text = fetched(said["http_port"], "/metrics", token=TOKEN)
        assert status == 401 and text.count("\n") == 1 and "set http.token_file" in text
        assert fetched(said["http_port"], "/readyz")[0] == 200
        status, log = ended(process)
    assert status == 0
    warnings = [one["message"] for one in log if one["level"] == "warning"]
    assert len(warnings) == 1 and "no http.token_file" in warnings[0]


@pytest.mark.slow
def test_a_token_that_cannot_be_read_ends_the_start_in_one_line(tmp_path: Path) -> None:
    config = with_tenants(tmp_path, 'token_file = "/nonexistent/token"\n')
    command = [sys.executable, "-m", "kvstore", "serve", "--data", f"{tmp_path}/kv", "--config", str(config)]
    done = subprocess.run(
        [*command, "--nvme", "off", "--dram", "16MiB"], capture_output=True, text=True, env={**PATHS}, timeout=60
    )
    assert done.returncode == 2
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("kvstore: ")]
    assert "http.token_file=/nonexistent/token cannot be read" in line


HOSTILE = (
    b"GET /metrics HTTP/1.1\r\nName: ",  # and then nothing
    b"GET /metrics HTTP/1.1\r\n\r\n" * 200,
    b"GET /" + b"a" * (64 << 10),
    b"BREW /pot HTCPCP/1.0\r\n\r\n",
    b"\0" * 4096,
    b"",
)


@pytest.mark.slow
def test_hostile_clients_never_stall_the_door(tmp_path: Path) -> None:
    """As many at a time as threads can make, for as long as an engine stores and loads."""
    over, made, layout = threading.Event(), [0] * len(HOSTILE), small_layout()

    def attack(number: int, port: int) -> None:
        held: deque[socket.socket] = deque()
        while not over.is_set():
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                held.append(sock)
                sock.sendall(HOSTILE[number])
                made[number] += 1
            except OSError:
                pass
            while len(held) > 40:  # until then nothing is read, and no connection ended
                held.popleft().close()
        for sock in held:
            sock.close()

    with serving(tmp_path, "--nvme", "off", "--http", "127.0.0.1:0") as (process, said):
        port = said["http_port"]
        threads = [threading.Thread(target=attack, args=(number, port)) for number in range(len(HOSTILE))]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: all(made))
            with patient(kvstore.open(f"unix:{said['serving'][0]}")) as store:
                handle = store.namespace(model=MODEL, layout=layout)
                for start in range(0, 100_000, 1000):
                    prompt = ids(128, start)
                    assert handle.put(prompt, random_pages(layout, 2)).stored == 2
                    with handle.lease(handle.match(prompt), deadline_ms=10_000) as lease:
                        loaded = handle.get(lease, blank_pages(layout, 2))
                    assert loaded.account.hit_tokens == 128, loaded.account
        finally:
            over.set()
            for thread in threads:
                thread.join(30)
        print(f"{sum(made)} hostile connections beside 100 puts and 100 loads")
        wait_until(lambda: _is_served(port))  # those that came before it are looked at first
        status, text = fetched(port, "/metrics")
        assert status == 200 and Scrape(text).total("granted_tokens_total", tier="dram") == 100 * 128
        assert Scrape(text).total("malformed_messages_total") == 0
        status, log = ended(process)
    assert status == 0 and {one["level"] for one in log} == {"info"}


def _is_served(port: int) -> bool:
    try:
        return fetched(port, "/livez")[0] == 200
    except OSError:
        return False
