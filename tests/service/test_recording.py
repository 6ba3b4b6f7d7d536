"""Recording: what is noted of look-ups, what of it leaves the sidecar, and that a replay reads it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import pytest

import kvstore
from kvstore.block.errors import BadInput
from kvstore.client.handle import NamespaceHandle
from kvstore.insight import recording
from kvstore.insight.recording import ID_BITS, SILENCE_SECONDS, Recording
from kvstore.insight.trace import read_trace
from service.sidecar import patient
from service.test_operate import client, refused, run, told
from service.test_serve import PATHS, crash, serving
from waiting import FakeClock
from workbench import MODEL, ids, random_pages, small_layout

KEYS = [bytes([number]) * 32 for number in range(5)]


class Noted:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.drawn = 0
        self.recording = Recording(self.clock, self.draw)

    def draw(self, count: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(count, "little")


def test_a_lookup_becomes_numbers_that_say_nothing_of_a_key() -> None:
    noted = Noted()
    token = noted.recording.begin(frozenset([3]))
    noted.recording.looked_up(3, KEYS[:3])
    noted.clock.advance(2)
    noted.recording.looked_up(4, KEYS)
    noted.recording.looked_up(3, [KEYS[0], KEYS[4]])
    (first, second), lost = noted.recording.take(token)
    assert (first.seconds, second.seconds, lost) == (0.0, 2.0, 0)
    assert first.ids[0] == second.ids[0] and len({*first.ids, *second.ids}) == 4
    assert all(0 <= one < 1 << ID_BITS for one in first.ids)
    assert noted.recording.take(token) == ([], 0)
    noted.recording.end(token)
    again = noted.recording.begin(frozenset([3]))
    noted.recording.looked_up(3, KEYS[:3])
    assert not {*first.ids} & {*noted.recording.take(again)[0][0].ids}, "the same prompt, another recording"


@pytest.mark.parametrize("seed", range(5))
def test_numbers_are_those_that_every_reader_of_json_takes(seed: int) -> None:
    """Many read a number as a double: above 2**53 two blocks would become one."""
    noted, keys = Noted(), [blake2b(b"%d %d" % (seed, number)).digest()[:32] for number in range(400)]
    token = noted.recording.begin(frozenset([seed]))
    noted.recording.looked_up(seed, keys)
    ((found,), _) = noted.recording.take(token)
    assert max(found.ids) < 1 << 53 and len(set(found.ids)) == len(keys)
    assert [int(float(one)) for one in json.loads(json.dumps(found.ids))] == list(found.ids)


def test_equal_keys_of_two_namespaces_are_two_blocks() -> None:
    noted = Noted()
    token = noted.recording.begin(frozenset([1, 2]))
    noted.recording.looked_up(1, KEYS[:1])
    noted.recording.looked_up(2, KEYS[:1])
    (first, second), _ = noted.recording.take(token)
    assert first.ids != second.ids


def test_while_nobody_records_nothing_is_noted() -> None:
    noted = Noted()
    noted.recording.looked_up(1, KEYS)
    token = noted.recording.begin(frozenset([1]))
    assert noted.recording.take(token) == ([], 0)
    noted.recording.end(token)
    noted.recording.looked_up(1, KEYS)
    assert not noted.recording._noted
    with pytest.raises(BadInput, match="over"):
        noted.recording.take(token)


def test_one_records_at_a_time_and_one_that_is_gone_is_over() -> None:
    noted = Noted()
    first = noted.recording.begin(frozenset([1]))
    noted.clock.advance(2.5)
    with pytest.raises(BadInput, match=r"somebody else is recording; .* where it was killed, try again in 8 s"):
        noted.recording.begin(frozenset([1]))
    noted.recording.looked_up(1, KEYS)
    noted.clock.advance(SILENCE_SECONDS - 2.5)
    noted.recording.looked_up(2, KEYS)
    assert not noted.recording._noted, "nobody came for it"
    second = noted.recording.begin(frozenset([1]))
    with pytest.raises(BadInput, match="over"):
        noted.recording.take(first)
    assert noted.recording.take(second) == ([], 0)


def test_what_waits_is_bounded_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 20)
    monkeypatch.setattr(recording, "MOST_AT_ONCE", 6)
    noted = Noted()
    token = noted.recording.begin(frozenset([1]))
    for _ in range(4):
        noted.recording.looked_up(1, KEYS)
    taken = []
    while (found := noted.recording.take(token))[0]:
        assert len(found[0]) == 1 and found[1] == 2
        taken += found[0]
    assert len(taken) == 2
    noted.recording.looked_up(1, KEYS)
    assert len(noted.recording.take(token)[0]) == 1


@pytest.mark.slow
def test_a_sidecars_traffic_is_written_and_replayed(tmp_path: Path) -> None:
    """Two engines, one after the other; the file says what was asked and nothing of it."""
    out = tmp_path / "trace.jsonl"
    layout = small_layout()
    with serving(tmp_path, "--nvme", "off") as _, client(tmp_path) as store:
        handle = store.namespace(model=MODEL, layout=layout)
        data = str(tmp_path / "kv")
        writing = recording_of(data, out, handle)
        assert handle.put(ids(640), random_pages(layout, 10)).reason is None
        for tokens in (ids(640), ids(704), ids(30), ids(320)):
            handle.match(tokens)
        with patient(kvstore.open(f"unix:{data}/kvstore.sock")) as another:
            another.namespace(model=MODEL, layout=layout).match(ids(640))
        time.sleep(1.5)
        assert "give a number" in refused("record", str(tmp_path / "other"), "--data", data, "--seconds", "inf")
        said = refused("record", str(tmp_path / "o"), "--data", data, "--tenant", "b")
        assert "--tenant b has no namespace; tenants that have one: " in said
        assert "somebody else is recording" in refused("record", str(tmp_path / "other"), "--data", data)
        assert not (tmp_path / "other").exists()
        writing.send_signal(signal.SIGINT)
        said, errors = writing.communicate(timeout=20)
        assert writing.returncode == 0, errors
        report = json.loads(said)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        mine = [line for line in lines if len(line["hash_ids"]) != 10 or line["hash_ids"] != lines[0]["hash_ids"]]
        assert [len(line["hash_ids"]) for line in mine] == [10, 11, 5, 10], (
            "puts are no look-ups, nor is a short prompt"
        )
        assert mine[0]["hash_ids"] == mine[3]["hash_ids"] == mine[1]["hash_ids"][:10]
        assert [line["input_length"] for line in mine] == [640, 704, 320, 640]
        assert report["requests"] == len(lines) and (report["lost"], report["block_tokens"]) == (0, 64)
        assert report["blocks"] == sum(len(line["hash_ids"]) for line in lines)
        assert "is there already" in run("record", str(out), "--data", data).stderr
        again = tmp_path / "again.jsonl"
        ended = told("record", str(again), "--data", data, "--seconds", "0.5")
        assert ended["requests"] == 0 and not again.exists()
        shown = run("record", str(again), "--data", data, "--seconds", "0")
        assert (shown.returncode, shown.stdout) == (0, f"nothing was looked up in 0 s: there is no {again}\n")
        assert "is to be text, not gzip" in refused("record", f"{again}.GZ", "--data", data)
        assert "there is no folder" in refused("record", str(tmp_path / "no" / "o"), "--data", data)
    trace = read_trace("trace", out.read_text().splitlines(), 64)
    assert trace.requests == len(lines)
    found = told("replay", str(out), "--blocks", "100", "--block-tokens", "64")
    assert found["rows"][0]["hit_blocks"] >= 25


def recording_of(data: str, out: Path, handle: NamespaceHandle, before: str = "pass") -> subprocess.Popen[str]:
    """A command in a process of its own that has written something. before: Python that runs there first."""
    program = f"import signal, sys; {before}; from kvstore.cli.main import main; main()"
    command = [sys.executable, "-c", program, "record", str(out), "--data", data, "--json"]
    environment = {**os.environ, **PATHS}
    writing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 30
    while not out.exists() or not out.stat().st_size:
        assert time.monotonic() < deadline and writing.poll() is None, writing.communicate()
        handle.match(ids(640, 5))
        time.sleep(0.05)
    return writing


@pytest.mark.slow
def test_a_job_in_the_background_is_ended_by_sigterm(tmp_path: Path) -> None:
    """What was looked up just before is in the file, and the next recording may begin at once."""
    out = tmp_path / "trace.jsonl"
    with serving(tmp_path, "--nvme", "off") as _, client(tmp_path) as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        data = str(tmp_path / "kv")
        writing = recording_of(data, out, handle, "signal.signal(signal.SIGINT, signal.SIG_IGN)")
        writing.send_signal(signal.SIGINT)
        time.sleep(1)
        assert writing.poll() is None, "SIGINT is ignored there"
        handle.match(ids(700, 7))
        writing.send_signal(signal.SIGTERM)
        said, errors = writing.communicate(timeout=20)
        assert (writing.returncode, errors) == (0, "")
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert json.loads(said)["requests"] == len(lines) and lines[-1]["input_length"] == 640
        assert lines[-1]["hash_ids"] != lines[0]["hash_ids"], "the last one"
        assert told("record", str(tmp_path / "next"), "--data", data, "--seconds", "0")["requests"] == 0


@pytest.mark.slow
def test_a_sidecar_that_goes_away_leaves_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with serving(tmp_path, "--nvme", "off") as (process, said), client(tmp_path) as store:
        handle = store.namespace(model=MODEL, layout=small_layout())
        writing = recording_of(str(tmp_path / "kv"), out, handle)
        crash(process, said)
        shown, errors = writing.communicate(timeout=20)
        assert (writing.returncode, shown) == (2, "")
        (line,) = errors.splitlines()
        count = len(out.read_text().splitlines())
        assert line.startswith(f"kvstore: {count} requests are in {out}, and then: {tmp_path}/kv/admin.sock: ")


@pytest.mark.slow
def test_without_a_namespace_there_is_nothing_to_record(tmp_path: Path) -> None:
    with serving(tmp_path, "--nvme", "off") as _:
        out = tmp_path / "trace.jsonl"
        assert "no engine has opened a namespace yet" in refused("record", str(out), "--data", str(tmp_path / "kv"))
        assert not out.exists()
        with client(tmp_path) as store:
            store.namespace(model=MODEL, layout=small_layout())
            store.namespace(model=MODEL, layout=small_layout(block_tokens=128))
            line = refused("record", str(out), "--data", str(tmp_path / "kv"))
            assert "blocks of 64, 128 tokens" in line and "--namespace" in line
            (one, _) = told("namespaces", "--data", str(tmp_path / "kv"))["namespaces"]
            done = told("record", str(out), "--data", str(tmp_path / "kv"), "--namespace", one["id"], "--seconds", "0")
            assert done["block_tokens"] in (64, 128)
