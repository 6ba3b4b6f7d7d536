"""The keeper: memory that outlives a sidecar, and a sidecar that comes back, under clients that go on."""

from __future__ import annotations

import gc
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.protocol import messages as m
from kvstore.service.keeper import (
    FIRST_PAUSE_SECONDS,
    FORGET,
    LONGEST_CRASH_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    pause_before_start,
)
from kvstore.service.serve import KeeperWire
from programs import PATHS
from service.sidecar import asked
from service.test_serve import ended, opened, serving
from waiting import wait_until
from workbench import (
    blank_pages,
    prompt_of,
    put_prompt,
    read_prompt,
    small_layout,
)

LAYOUT = small_layout()
BLOCKS = 10
TOKENS = 64 * BLOCKS
AWAY = (MissReason.UNREACHABLE, MissReason.WARMING, MissReason.DEADLINE)


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


@pytest.mark.slow
@pytest.mark.parametrize("nvme", ["off", "64MiB"])
def test_what_memory_held_is_there_after_a_crash(tmp_path: Path, nvme: str) -> None:
    with serving(tmp_path, "--nvme", nvme) as (process, said), opened(said) as handle:
        assert all(put_prompt(handle, number, BLOCKS).stored == BLOCKS for number in range(5))
        for lap in range(3):
            os.kill(said["pid"], signal.SIGKILL)
            said = next_line(process)
            for number in range(5 + lap):
                wait_until(lambda number=number: read_prompt(handle, number, BLOCKS).blocks == BLOCKS)
                assert handle.match(prompt_of(number, BLOCKS)).tiers == ((HitTier.DRAM, BLOCKS),)
            assert put_prompt(handle, 5 + lap, BLOCKS).stored == BLOCKS
        status, log = ended(process)
        messages = [line["message"] for line in log]
        assert status == 0 and messages.count("serving") == 4
        written = [f"closing: of what memory alone held {8 * BLOCKS} blocks (960.0 KiB) written to NVMe"]
        assert messages[messages.index("draining") + 1 :] == [*(written if nvme != "off" else []), "stopped"]
        taken = [line for line in log if "taken over" in line["message"]]
        assert [line["blocks"] for line in taken] == [BLOCKS * count for count in (5, 6, 7)]


@pytest.mark.slow
def test_all_of_memory_is_there_before_anybody_asks_for_it(tmp_path: Path) -> None:
    def shared_bytes(pid: int) -> int:
        paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        return sum(
            {os.stat(path).st_ino: os.stat(path).st_size for path in paths if "kv-ext" in os.readlink(path)}.values()
        )

    with serving(tmp_path, "--nvme", "off", "--dram", "32MiB") as (_, said):
        wait_until(lambda: shared_bytes(said["pid"]) == 32 << 20)


@pytest.mark.slow
def test_an_upgrade_keeps_memory_and_ends_in_order(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as (process, said), opened(said) as handle:
        assert put_prompt(handle, 1, BLOCKS).stored == BLOCKS
        process.send_signal(signal.SIGUSR2)
        again = next_line(process)
        assert again["pid"] != said["pid"] and again["keeper_pid"] == said["keeper_pid"]
        wait_until(lambda: read_prompt(handle, 1, BLOCKS).blocks == BLOCKS)
        status, log = ended(process)
        assert status == 0
        assert [line["message"] for line in log].count("stopped") == 2


@pytest.mark.slow
def test_a_flipped_bit_in_memory_that_was_taken_over_is_a_miss(tmp_path: Path) -> None:
    """Nobody has read it since the crash: it is verified when it is leased for the first time."""
    with serving(tmp_path, "--nvme", "off") as (process, said), opened(said) as handle:
        assert put_prompt(handle, 1, BLOCKS).stored == BLOCKS
        lease = handle.lease(handle.match(prompt_of(1, BLOCKS)))
        handle.get(lease, blank_pages(LAYOUT, BLOCKS))
        place = lease.reply.places[0][4]
        with open(f"/proc/{said['pid']}/fd/{extent_descriptor(said['pid'])}", "r+b", buffering=0) as memory:
            offset = (place & 0xFFFFFF) * 12288 + 4096 + 100
            memory.seek(offset)
            byte = memory.read(1)
            memory.seek(offset)
            memory.write(bytes([byte[0] ^ 4]))
        os.kill(said["pid"], signal.SIGKILL)
        next_line(process)
        wait_until(lambda: handle.match(prompt_of(1, BLOCKS)).reason not in AWAY)
        with handle.lease(handle.match(prompt_of(1, BLOCKS)), deadline_ms=5000) as lease:
            assert lease.blocks == 4 and lease.reason is MissReason.CORRUPT
            assert handle.get(lease, blank_pages(LAYOUT, BLOCKS)).tokens == 4 * 64
        assert put_prompt(handle, 1, BLOCKS).stored == 1  # what hangs below it stayed
        assert read_prompt(handle, 1, BLOCKS).blocks == BLOCKS


@pytest.mark.slow
def test_an_idle_client_lets_go_of_what_is_gone(tmp_path: Path) -> None:
    """Nobody asks it for anything: the sidecar that came back must not wait for it all the same."""
    gc.collect()
    others = mapped_extents()  # of stores of other tests
    with serving(tmp_path, "--nvme", "off") as (process, said), opened(said) as handle:
        assert put_prompt(handle, 1, BLOCKS).stored == BLOCKS
        assert mapped_extents() - others
        os.kill(said["pid"], signal.SIGKILL)
        wait_until(lambda: not mapped_extents() - others)
        next_line(process)
        wait_until(lambda: read_prompt(handle, 1, BLOCKS).blocks == BLOCKS)


WIRE = "import os, signal, socket, sys, time; wire = socket.socket(fileno=int(sys.argv[-1]))"


@contextmanager
def keeping(sidecar: str, setup: str = "", **children: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of programs in Python, in a group of its own, which is killed in the end."""
    keeper = "keeper.Keeper([*python, sys.argv[1]], 0.0, False, {name: [*python, one] for name, one in children})"
    program = f"from kvstore.service import keeper; import json, sys; {setup}\n"
    program += (
        f"python, children = [sys.executable, '-S', '-c'], json.loads(sys.argv[2]).items(); sys.exit({keeper}.run())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, sidecar, json.dumps(children)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=PATHS,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # what it runs too
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


IGNORES = "signal.signal(signal.SIGTERM, lambda *_: wire.send(b'r')); print('up', flush=True); time.sleep(600)"
AGAIN_AT_TERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(600)"
DIES_OF_TERM = "print('up', flush=True); time.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status"),
    [(AGAIN_AT_TERM, 0), (DIES_OF_TERM, 0), (IGNORES, 128 + signal.SIGKILL)],
    ids=["in an upgrade", "before it had begun", "goes on"],
)
def test_a_keeper_that_is_told_to_end_ends(body: str, status: int) -> None:
    """Also in the middle of another start of the sidecar, and where that says that it is ready and goes on."""
    with keeping(f"{WIRE}\n{body}", "keeper.END_SECONDS = 0.5") as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == status


CRASHES_WHEN_READY = "wire.send(b'r'); os.kill(os.getpid(), signal.SIGKILL)"
CRASHES_BEFORE = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("calm_seconds", "body", "crashes", "pauses"),
    [
        (300.0, CRASHES_WHEN_READY, [None, None, None, 4, 5, 6], [None, None, None, 0.002, 0.004, 0.008]),
        (0.0, CRASHES_WHEN_READY, [None] * 6, [None] * 6),
        (300.0, CRASHES_BEFORE, [None, None, None, 4, 5, 6], [None, None, None, 0.008, 0.016, 0.032]),
    ],
    ids=["ready each time", "and calm for long enough", "never ready"],
)
def test_a_loop_of_crashes_is_slowed_down(
    calm_seconds: float, body: str, crashes: list[int | None], pauses: list[float | None]
) -> None:
    """Also of a sidecar that was ready each time: a client may end it again and again."""
    setup = f"keeper.CALM_SECONDS = {calm_seconds}; keeper.FIRST_PAUSE_SECONDS = 0.001"
    with keeping(f"{WIRE}\n{body}", setup) as process:
        assert process.stderr is not None
        told = [json.loads(process.stderr.readline()) for _ in crashes]
    assert [one.get("crashes") for one in told] == crashes and [one.get("pause_seconds") for one in told] == pauses


def test_the_pause_before_a_start_is_bounded() -> None:
    longest = [pause_before_start(crashes, 0) for crashes in range(1, 2000)]
    assert (
        longest == sorted(longest) and longest[0] == FIRST_PAUSE_SECONDS and longest[-1] == LONGEST_CRASH_PAUSE_SECONDS
    )
    assert max(pause_before_start(failures, failures) for failures in range(1, 2000)) == LONGEST_PAUSE_SECONDS


@pytest.mark.slow
def test_what_clients_of_an_earlier_run_still_map_is_told(tmp_path: Path) -> None:
    """A process stopped over the crash still maps it; once it is gone nothing is guarded."""
    with serving(tmp_path, "--nvme", "off") as (process, said):
        with opened(said) as handle:
            assert put_prompt(handle, 1, BLOCKS).stored == BLOCKS
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, said["serving"][0]],
            stdout=subprocess.PIPE,
            text=True,
            env=PATHS,
        )
        try:
            assert holder.stdout is not None and holder.stdout.readline() == f"{BLOCKS}\n"
            holder.send_signal(signal.SIGSTOP)
            os.kill(said["pid"], signal.SIGKILL)
            next_line(process)
            assert guarded_bytes(tmp_path) > 0
        finally:
            holder.kill()
            holder.communicate()
        wait_until(lambda: guarded_bytes(tmp_path) == 0)


HOLD = """
import sys, time
from service.test_serve import opened
from workbench import read_prompt
with opened({"serving": sys.argv[1:]}) as handle:
    print(read_prompt(handle, 1, 10).blocks, flush=True)
    time.sleep(600)
"""


def guarded_bytes(directory: Path) -> int:
    """As `kvstore stat` says."""
    (answer,) = asked(directory / "kv" / "admin.sock", m.Stat())
    assert isinstance(answer, m.StatReply), answer
    return answer.facts.guarded_bytes


def test_what_was_said_before_a_hand_over_is_said() -> None:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        wire = KeeperWire(its.detach(), secrets.token_bytes)
        wire.start(lambda: None)
        names = [wire.new_name() for _ in range(100)]
        for name in names:
            wire.forget(name)
        wire.freeze()
        wire.forget(names[0])
        mine.setblocking(False)
        assert [mine.recv(64) for _ in names] == [FORGET + name for name in names]
        with pytest.raises(BlockingIOError):
            mine.recv(64)


def mapped_extents() -> set[str]:
    """Shared memory that this process has mapped, by its inode."""
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "kv-extent" in line}


def extent_descriptor(pid: int) -> int:
    """The descriptor of the one extent of a sidecar that has frames."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError):  # the sidecar opens and closes others meanwhile
            if "kv-extent" in os.readlink(path):
                with open(path, "rb") as memory:
                    if memory.read(7) == b"KVFRAME":
                        found[os.stat(path).st_ino] = int(name)
    assert len(found) == 1, found
    return next(iter(found.values()))
