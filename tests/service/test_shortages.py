"""A sidecar whose machine runs out of something: disk, descriptors, memory, address space, threads, or a reader of what
it prints. It serves on as far as it can, says what is wrong, in the log, in `stat` and at `/readyz`, and says when that
is over. One that cannot serve says so in one line, and ends with a status.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.block.account import MissReason
from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle
from kvstore.node import SystemClock
from kvstore.service import keeper as keeper_program
from kvstore.status.tree import SidecarStatus
from service.test_serve import PATHS, SERVE, ended, opened, page, serving
from small_disk import fill, small_disk
from waiting import wait_until
from workbench import put_prompt, read_prompt, small_layout

LAYOUT = small_layout()
OUT_OF_RESOURCES = 71
CLOCK = SystemClock()


def stat(directory: Path) -> SidecarStatus:
    return ask.stat(str(directory / "kv" / "admin.sock"), CLOCK)


def put(handle: NamespaceHandle, first: int, durability: str = "disk") -> MissReason | None:
    return put_prompt(handle, first, 10, durability=durability).reason


def fault_lines(log: list[dict[str, Any]]) -> list[str]:
    return [line["message"] for line in log if line["logger"] == "tiering.faults"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, 24 << 20) as mount:
        yield mount


@pytest.mark.slow
def test_a_full_disk_is_said_while_it_lasts_and_that_it_is_over(disk: Path) -> None:
    with serving(disk, "--nvme", "16MiB", "--http", "127.0.0.1:0") as (process, said), opened(said) as handle:
        wait_until(lambda: stat(disk).state == "ready")
        assert put(handle, 0) is None
        assert (stat(disk).health, stat(disk).faults) == ("ok", [])
        filler = fill(disk)
        refused = [put(handle, first) for first in range(1, 26)]
        assert set(refused) <= {None, MissReason.TIER_DOWN, MissReason.PINNED_FULL} and any(refused)
        facts = stat(disk)
        assert facts.state == "degraded" and facts.health.startswith("degraded (disk full: ")
        assert facts.fault_counts["disk_full"] >= sum(one.count for one in facts.faults) > 0
        status, answer = page(said["http_port"], "readyz")
        assert status == 200 and answer["state"] == "degraded"
        assert "disk full" in answer["reasons"][0]
        shown = subprocess.run(
            [*SERVE[:-2], "stat", "--data", str(disk / "kv")],
            env={**os.environ, **PATHS},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "health: degraded (disk full: " in shown.stdout
        filler.unlink()
        wait_until(lambda: put(handle, 50) is None and stat(disk).state == "ready")
        facts = stat(disk)
        assert facts.health == "ok"
        ready = {"ready": True, "state": "ready", "node": facts.node, "incarnation": facts.incarnation}
        assert page(said["http_port"], "readyz")[1] == ready
        status, log = ended(process)
    assert status == 0
    lines = fault_lines(log)
    assert any("disk full" in line for line in lines) and any("again" in line for line in lines)
    assert len(lines) <= 2 * len({line.split(" failed")[0] for line in lines}), lines


@pytest.mark.slow
def test_without_descriptors_the_operator_is_let_in_and_told(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, said):
        wait_until(lambda: stat(tmp_path).state == "ready")
        in_use = len(os.listdir(f"/proc/{said['pid']}/fd"))
        _, hard = resource.prlimit(said["pid"], resource.RLIMIT_NOFILE)
        resource.prlimit(said["pid"], resource.RLIMIT_NOFILE, (in_use + 4, hard))
        with ExitStack() as stack:
            for _ in range(12):  # they say nothing, and are let in as far as there are descriptors
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(said["serving"][0])
            wait_until(lambda: (facts := stat(tmp_path)).state == "degraded" and "no descriptors" in facts.health)
            assert stat(tmp_path).fault_counts["no_descriptors"] > 0
        resource.prlimit(said["pid"], resource.RLIMIT_NOFILE, (hard, hard))
        with opened(said) as handle:
            assert put(handle, 0, "volatile") is None
        wait_until(lambda: stat(tmp_path).health == "ok")
        status, log = ended(process)
    assert status == 0
    assert [line for line in fault_lines(log) if "no descriptors: connections failed" in line]
    assert len(fault_lines(log)) <= 8


@pytest.mark.slow
def test_memory_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[store]\nprefault = false\nextent = "4MiB"\n')
    with serving(tmp_path, "--nvme", "off", "--dram", "64MiB", "--config", str(config)) as (process, said):
        with opened(said) as handle:
            assert put(handle, 0, "volatile") is None
            pages = int(Path(f"/proc/{said['pid']}/statm").read_text().split()[0])
            limit = pages * os.sysconf("SC_PAGE_SIZE") + (2 << 20)
            _, hard = resource.prlimit(said["pid"], resource.RLIMIT_AS)
            resource.prlimit(said["pid"], resource.RLIMIT_AS, (limit, hard))
            for first in range(1, 200):
                put(handle, first, "volatile")
            assert "no memory" in stat(tmp_path).health
            resource.prlimit(said["pid"], resource.RLIMIT_AS, (hard, hard))
            for first in range(200, 400):
                put(handle, first, "volatile")
            assert stat(tmp_path).health == "ok"
        status, log = ended(process)
    assert status == 0
    assert any("no memory: extents of dram failed" in line for line in fault_lines(log))


# Starts --------------------------------------------------------------------------------------------------------------


def started(
    directory: Path,
    limits: dict[int, int],
    *flags: str,
    under: Sequence[str] = (),
    meanwhile: Callable[[dict[str, Any]], object] = lambda said: None,
) -> tuple[int | None, str, str]:
    """Status, output and errors of a start under these limits; SIGTERM is sent once it serves. meanwhile: called before
    that with what it printed."""

    def limit() -> None:
        for what, most in limits.items():
            resource.setrlimit(what, (most, most))

    process = subprocess.Popen(
        [*under, *SERVE, "--data", str(directory / "kv"), "--dram", "16MiB", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **PATHS, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=limit,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            meanwhile(json.loads(line))
            process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        return process.returncode, line + output, errors
    finally:
        process.kill()
        process.communicate()


def configured(directory: Path, keeper: bool) -> list[str]:
    config = directory / "c.toml"
    config.write_text(f"[store]\nkeeper = {str(keeper).lower()}\n")
    return ["--nvme", "16MiB", "--http", "127.0.0.1:0", "--config", str(config)]


def says_why_not(status: int | None, errors: str, words: str) -> bool:
    """Whether it ended for want of something, with one line for people, which says so."""
    said = [line for line in errors.splitlines() if not line.startswith("{")]
    assert status == OUT_OF_RESOURCES and len(said) == 1 and said[0].startswith("kvstore: ") and words in said[0], (
        errors
    )
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("descriptors", "keeper"), [(12, False), (16, True), (20, False), (28, False), (28, True)])
def test_a_start_with_few_descriptors_says_why_not(tmp_path: Path, descriptors: int, keeper: bool) -> None:
    flags = configured(tmp_path, keeper)
    status, output, errors = started(tmp_path, {resource.RLIMIT_NOFILE: descriptors}, *flags)
    assert output == "" and says_why_not(status, errors, "ulimit -n")


@pytest.mark.slow
@pytest.mark.parametrize("keeper", [False, True])
def test_a_start_names_the_descriptors_that_it_lacks_and_serves_with_them(tmp_path: Path, keeper: bool) -> None:
    flags = configured(tmp_path, keeper)
    _, _, errors = started(tmp_path, {resource.RLIMIT_NOFILE: 30}, *flags)
    had, wanted = map(int, re.findall(r"(\d+) more files may be open, .* want (\d+)", errors)[0])
    enough = 30 - had + wanted
    found = []

    def use(said: dict[str, Any]) -> None:
        with ExitStack() as stack:
            for _ in range(4):
                handle = stack.enter_context(opened(said))
            assert {put(handle, first) for first in range(100)} <= {None, MissReason.PINNED_FULL}
            found.append(is_found(handle, 99))

    status, _, errors = started(tmp_path, {resource.RLIMIT_NOFILE: enough}, *flags, meanwhile=use)
    assert (status, found) == (0, [True]) and "no descriptors" not in errors, errors
    status, output, errors = started(tmp_path, {resource.RLIMIT_NOFILE: enough - 1}, *flags)
    assert (status, output) == (OUT_OF_RESOURCES, "") and "ulimit -n" in errors


@pytest.mark.slow
def test_a_start_with_a_small_limit_of_file_size_says_so(tmp_path: Path) -> None:
    status, output, errors = started(tmp_path, {resource.RLIMIT_FSIZE: 1000 << 10}, "--nvme", "16MiB")
    assert (status, output) == (2, "") and len(errors.splitlines()) == 1 and "ulimit -f" in errors


@pytest.mark.slow
@pytest.mark.parametrize(("mib", "keeper"), [(210, False), (260, True), (275, False), (300, True), (400, False)])
def test_a_start_with_little_address_space_serves_or_says_why_not(tmp_path: Path, mib: int, keeper: bool) -> None:
    flags = configured(tmp_path, keeper)
    status, output, errors = started(tmp_path, {resource.RLIMIT_AS: mib << 20}, *flags)
    assert status == 0 if output else says_why_not(status, errors, "address space"), errors


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3, 6, 40])
def test_a_start_with_few_threads_serves_or_says_why_not(tmp_path: Path, threads: int) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv of util-linux: it starts as a user whose threads are limited")
    caps = [f"--{which}=-all,+dac_override" for which in ("inh-caps", "ambient-caps", "bounding-set")]
    somebody = ["setpriv", "--reuid", str(61_000 + threads), *caps]  # root may have as many threads as it likes
    if subprocess.run([*somebody, "true"], capture_output=True).returncode:
        pytest.skip("no other user can be had here")
    flags = configured(tmp_path, keeper=False)
    status, output, errors = started(tmp_path, {resource.RLIMIT_NPROC: threads}, *flags, under=somebody)
    if output:
        assert status == 0, errors
        return
    assert status == OUT_OF_RESOURCES, errors
    assert "no threads" in errors.splitlines()[-1] and "ulimit -u" in errors.splitlines()[-1], errors


@pytest.mark.slow
def test_a_start_on_a_full_disk_says_why_not(disk: Path) -> None:
    fill(disk)
    status, output, errors = started(disk, {}, "--nvme", "8MiB")
    assert (status, output) == (OUT_OF_RESOURCES, "")
    assert len(errors.splitlines()) == 1 and "disk full" in errors and "make room" in errors


# Who reads what it prints ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("unread", ["stdout", "both", "full"])
def test_nobody_reads_what_it_prints_and_it_comes_back_after_a_crash(tmp_path: Path, unread: str) -> None:
    directory = tmp_path / "kv"
    full = os.open("/dev/full", os.O_WRONLY) if unread == "full" else None
    process = subprocess.Popen(
        [*SERVE, "--data", str(directory), "--dram", "16MiB", "--nvme", "off"],
        stdout=full if full is not None else subprocess.PIPE,
        stderr=full if full is not None else subprocess.PIPE,
        text=True,
        env={**os.environ, **PATHS},
    )
    if full is not None:
        os.close(full)
    else:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["serving"]
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if unread in (name, "both"):
                stream.close()  # as `head -1` does

    def pid() -> int:
        try:
            return ask.stat(str(directory / "admin.sock"), CLOCK).pid
        except kvstore.StoreError:
            return 0

    try:
        wait_until(lambda: pid() > 0)
        for _ in range(2):
            before = pid()
            os.kill(before, signal.SIGKILL)
            wait_until(lambda before=before: pid() not in (0, before))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        for one in (process.stdout, process.stderr):
            if one is not None:
                one.close()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_no_slab_and_no_socket_gets_the_number_of_an_output_that_was_closed(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    directory = tmp_path / "kv"
    process = subprocess.Popen(
        [*SERVE, "--data", str(directory), "--dram", "16MiB", "--nvme", "16MiB"],
        env={**os.environ, **PATHS},
        preexec_fn=close,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        socket_path = directory / "admin.sock"

        def serves() -> bool:
            try:
                return ask.stat(str(socket_path), CLOCK).state == "ready"
            except kvstore.StoreError:
                return False

        wait_until(serves)
        pid = ask.stat(str(socket_path), CLOCK).pid
        for each in (process.pid, pid):
            for descriptor in closed:
                assert os.readlink(f"/proc/{each}/fd/{descriptor}") == "/dev/null"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_keeper_that_finds_no_process_for_the_sidecar_says_so_and_ends_when_told(tmp_path: Path) -> None:
    """As where the machine has no memory for a fork, or no descriptors: here the command cannot be run at all."""
    process = subprocess.Popen(
        [sys.executable, "-P", keeper_program.__file__, "1", "json", "{}", "[]", str(tmp_path / "nothing")],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert line["message"] == "the sidecar cannot be started now" and line["reason"] == "No such file or directory"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


# Starts again ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB on a loop device, as of a disk: what is full there is full."""
    image, mount = tmp_path / "image", tmp_path / "ext4"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    commands = (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)])
    for command in commands:
        try:
            made = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no ext4 can be had here: {error}")
        if made.returncode:
            pytest.skip(f"no ext4 can be mounted here: {made.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def later(directory: Path, pid: int) -> SidecarStatus:
    """Of the sidecar that was started after the one of that process, once it has taken in what is on disk."""
    wait_until(lambda: stat(directory).pid != pid)
    wait_until(lambda: stat(directory).state != "warming")
    return stat(directory)


def is_found(handle: NamespaceHandle, first: int) -> bool:
    """Whether what `put` stored is there, to the byte."""
    return read_prompt(handle, first, 10).blocks == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file_system", "nvme", "kills"), [("ext4", "16MiB", 20), ("disk", "16MiB", 2), ("ext4", "auto", 2)]
)
def test_a_disk_that_others_filled_makes_no_outage_of_a_crash(
    request: pytest.FixtureRequest, file_system: str, nvme: str, kills: int
) -> None:
    disk = request.getfixturevalue(file_system)
    with serving(disk, "--nvme", nvme) as (process, said):
        pid, durable, seconds = said["pid"], [], []
        wait_until(lambda: stat(disk).state == "ready")
        with opened(said) as handle:
            durable += [first for first in range(12) if put(handle, first) is None]
            filler = fill(disk)
            for number in range(kills):
                os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                wait_until(lambda: is_found(handle, 11))
                seconds.append(time.monotonic() - began)
                if put(handle, 100 + number) is None:
                    durable.append(100 + number)
                facts = later(disk, pid)
                pid = facts.pid
                if nvme != "auto":
                    assert facts.state == "degraded" and "disk full" in facts.health, facts.health
        print(f"DRAM hits again after {[round(one, 1) for one in seconds]} s")
        filler.unlink()
        with opened(said) as handle:
            assert [first for first in durable if not is_found(handle, first)] == []
            wait_until(lambda: put(handle, 999) is None and stat(disk).state == "ready")
        status, log = ended(process)
    restarts = [line["status"] for line in log if "is started again" in line["message"]]
    assert (status, restarts) == (0, [-signal.SIGKILL] * kills), "the first start after each kill serves"
    with serving(disk, "--nvme", nvme) as (process, said), opened(said) as handle:
        wait_until(lambda: stat(disk).state == "ready")
        assert [first for first in durable if not is_found(handle, first)] == [], "and from the disk alone"


@pytest.mark.slow
def test_an_existing_directory_is_opened_on_a_full_disk_and_a_new_one_refused(disk: Path) -> None:
    with serving(disk, "--nvme", "16MiB") as (process, said), opened(said) as handle:
        wait_until(lambda: stat(disk).state == "ready")
        assert put(handle, 0) is None
        ended(process)
    filler = fill(disk)
    with serving(disk, "--nvme", "16MiB") as (process, said), opened(said) as handle:
        wait_until(lambda: stat(disk).state == "degraded")
        assert "disk full" in stat(disk).health
        assert is_found(handle, 0)
        filler.unlink()
        wait_until(lambda: stat(disk).state == "ready")
        assert {put(handle, first) for first in range(20)} == {None}, "it has grown"
        ended(process)
    fill(disk)
    status, output, errors = started(disk / "new", {}, "--nvme", "8MiB")
    assert (status, output) == (OUT_OF_RESOURCES, "") and "make room" in errors
