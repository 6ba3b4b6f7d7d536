"""deploy/systemd and deploy/kvstore.toml: what stands there is what `kvstore serve` and systemd take."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from deploy.restricted import MISSING, filtered_calls, settings_of
from deploy.sidecar_process import AROUND_SECONDS, DEPLOY, ROOT, flags_in, known_flags, serving, stores_and_reads
from kvstore.service.settings import Settings, read_settings
from wrong_values import every_setting

UNIT = DEPLOY / "systemd" / "kvstore.service"
EXAMPLE = DEPLOY / "kvstore.toml"
RESTRICTED = Path(__file__).with_name("restricted.py")


@pytest.fixture(scope="module")
def unit() -> dict[str, str]:
    return dict(settings_of(UNIT))


@pytest.fixture(scope="module")
def example() -> Settings:
    return read_settings(EXAMPLE.read_text())


def test_the_example_says_what_it_says_with_its_comments_taken_as_settings_too() -> None:
    everything = re.sub(r"^#(?=[\w\[])", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert everything != EXAMPLE.read_text()
    settings = read_settings(everything)
    assert settings.door.users and "team-a" in settings.tenants


def test_the_unit_gives_what_the_example_uses(unit: dict[str, str], example: Settings) -> None:
    assert Path(example.store.data) == Path("/var/lib") / unit["StateDirectory"]
    assert Path(example.door.socket or "").parent == Path("/run") / unit["RuntimeDirectory"]
    command = shlex.split(unit["ExecStart"])
    assert command[1] == "serve" and flags_in(command) <= known_flags()
    config = Path(command[command.index("--config") + 1])
    assert config.parent == Path("/etc") / unit["ConfigurationDirectory"] and config.name == EXAMPLE.name
    assert (DEPLOY / "systemd" / "kvstore.sysusers.conf").read_text().count(f"\nu {unit['User']} ") == 1


def test_the_unit_waits_for_an_orderly_end(unit: dict[str, str], example: Settings) -> None:
    assert int(unit["TimeoutStopSec"]) >= 2 * example.limits.close_seconds + AROUND_SECONDS
    assert unit["KillMode"] == "mixed"


@pytest.mark.parametrize("name", ["SendSIGKILL", "PrivateUsers", "ProcSubset", "PrivateNetwork", "RootDirectory"])
def test_what_would_break_the_store_is_not_set(unit: dict[str, str], name: str) -> None:
    assert name not in unit


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    systemd_analyze = _systemd_analyze()
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text(), flags=re.MULTILINE))
    done = subprocess.run(
        [systemd_analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    mine = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    if done.returncode and not mine:
        pytest.skip(f"systemd-analyze verify cannot run here: {done.stderr.strip().splitlines()[-1:]}")
    assert not mine, mine
    copy.write_text(copy.read_text().replace("KillMode=mixed", "KillMode=mixt"))
    done = subprocess.run(
        [systemd_analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert "kill mode" in done.stdout + done.stderr, "it would not have noticed"


def test_little_is_left_exposed() -> None:
    command = [_systemd_analyze(), "security", "--offline=true", "--no-pager", "--threshold=20", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze has no --offline; systemd 250 has")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


@pytest.mark.slow
def test_it_serves_under_the_unit_s_restrictions(tmp_path: Path) -> None:
    """Start, put to disk, get, health, orderly end, and a start after a kill, which reads the index in a child."""
    _systemd_analyze()
    under = [sys.executable, str(RESTRICTED), str(UNIT)]
    tried = subprocess.run([*under, sys.executable, "-c", "pass"], capture_output=True, text=True, timeout=60)
    if tried.returncode == MISSING:
        pytest.skip(tried.stderr.strip())
    bad = "import ctypes, mmap; mmap.mmap(-1, 4096, prot=7)"
    assert subprocess.run([*under, sys.executable, "-c", bad], capture_output=True, timeout=60).returncode != 0
    bad = "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)"
    killed = subprocess.run([*under, sys.executable, "-c", bad], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGSYS
    flags = ["--data", str(tmp_path / "kv"), "--dram", "16MiB", "--nvme", "64MiB", "--http", "127.0.0.1:0"]
    for end in (signal.SIGKILL, signal.SIGTERM):
        with serving(*flags, under=under) as (process, said):
            with urllib.request.urlopen(f"http://127.0.0.1:{said['http_port']}/livez", timeout=10) as answer:
                assert answer.status == 200
            stores_and_reads(said, "disk")
            process.send_signal(end)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == (0 if end is signal.SIGTERM else -end), errors


def test_the_calls_that_the_store_lives_on_are_allowed() -> None:
    _systemd_analyze()
    allowed, _ = filtered_calls([value for key, value in settings_of(UNIT) if key == "SystemCallFilter"])
    assert {"memfd_create", "fcntl", "fallocate", "sendmsg", "madvise", "flock", "kcmp", "pidfd_open"} <= allowed
    assert not {"ptrace", "pidfd_getfd", "mount", "bpf", "chroot"} & allowed


def _systemd_analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed; on Debian it is in the package systemd")
    return found


# docs/deploy.md: what it names is there ----------------------------------------------------------------------------


PAGE = (ROOT / "docs" / "deploy.md").read_text()


def test_its_files_are_there() -> None:
    files = set(re.findall(r"deploy/[\w./-]*\w", PAGE))
    assert files and all((ROOT / one).exists() for one in files), files


def test_its_settings_are_settings() -> None:
    named = re.findall(r"`(store|limits|door|http)\.(\w+)", PAGE)
    assert named
    assert set(named) <= {(section, key) for section, key, _, _ in every_setting()}


def test_its_commands_and_units_are_the_ones_of_deploy() -> None:
    run = re.search(r"  kvstore:0\.1\.0 (--.*)", PAGE)
    assert run is not None and set(re.findall(r"--[a-z]+", run.group(1))) <= known_flags()
    unit = (DEPLOY / "systemd" / "kvstore.service").read_text()
    for line in ("MemorySwapMax=0", "OOMScoreAdjust=500", "OOMPolicy=kill", "LimitNOFILE=65536", "LimitMEMLOCK=0"):
        assert line in unit
    assert "`ulimit -l` may be 0" in PAGE
    for key, value in re.findall(r"`(MemorySwapMax|OOMScoreAdjust|OOMPolicy|LimitNOFILE)=(\w+)`", PAGE):
        assert f"\n{key}={value}\n" in unit
