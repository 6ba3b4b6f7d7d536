"""`kvstore demo --dashboard`: one command, and the demo's hits are in a browser; at its end nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytest.importorskip("fastapi", reason="fastapi is not installed (extra: server)")

from programs import PATHS, fetched
from waiting import wait_until


def api(url: str, path: str) -> Any:
    return json.loads(fetched(int(url.rstrip("/").rpartition(":")[2]), path)[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_its_dashboard_shows_the_demos_tokens_until_it_is_ended(tmp_path: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvstore", "demo", "--dashboard", "--requests", "2", "--tokens", "2", "--json"]
    environment = {**os.environ, **PATHS, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert demo.stdout is not None and demo.stderr is not None
    try:
        url = demo.stderr.readline().split()[-1]
        assert api(url, "/api/status")["version"]
        result = json.loads(demo.stdout.readline())
        assert result["identical"] == 2 and not result["failures"]
        assert demo.stderr.readline() == f"the dashboard stays on {url} until you press Ctrl-C\n"
        last = result["passes"]["restart"]
        seen = list[Any]()

        def is_told() -> bool:
            seen.append(api(url, "/api/status"))
            looked = seen[-1]["looked"]
            return looked is not None and looked["asked_tokens"] == last["prompt_tokens"]

        wait_until(is_told)
        status = seen[-1]
        looked = status["looked"]
        assert (looked["hit_tokens"], looked["miss_tokens"]) == (last["hits"], last["misses"])
        assert looked["found_tokens"] == 0, "each token is one of these"
        told = api(url, "/api/events")
        assert "restart" in {one["kind"] for one in told}
        assert [one["at"] for one in told] == sorted((one["at"] for one in told), reverse=True)
        pid = status["pid"]
        demo.send_signal(end)
        demo.communicate(timeout=60)
        assert demo.returncode == 0
        wait_until(lambda: not is_running(pid))
        assert not list(tmp_path.glob("kvstore*")), "what it made is gone"
    finally:
        demo.kill()
        demo.communicate()
