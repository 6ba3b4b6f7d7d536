"""--check: a target that was missed is named and is status 1, and a run without targets does not pass for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benches import bench as commands
from kv_bench.codec_speed import SpeedRow
from kvstore.bench.measure import judged, missed
from kvstore.block.errors import BadInput
from kvstore.cli import bench
from kvstore.cli.terminal import CHECK_FAILED, OK

MET = {"what": "match / chain", "measured": 1.5, "at_most": 2.2, "met": True}
MISSED = {"what": "bytes per block", "measured": 312.25, "at_most": 300, "met": False}
UNSET = {"what": "a row without a target", "ratio": 0.5, "met": None}


class Result:
    """What a bench found."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def to_dict(self) -> dict[str, object]:
        return {"bench": "b", "deep": {"rows": [*self.rows]}}

    def render(self, console: Any) -> None:
        console.print("a table")


def test_a_missed_target_is_found_however_deep_it_lies() -> None:
    found = {"bench": "all", "results": [{"targets": [MET, MISSED]}, {"door": {"rows": [UNSET]}}], "met": None}
    assert judged(found) == [MET, MISSED]
    assert missed(found) == ["target missed: what bytes per block, measured 312.2, at_most 300"]


@pytest.mark.parametrize("as_json", [False, True])
def test_with_check_the_status_says_so(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.judge([Result(MET, UNSET)], [], as_json, True) == OK
    assert bench.judge([Result(MET, MISSED)], [], as_json, False) == OK
    capsys.readouterr()
    assert bench.judge([Result(MET, MISSED)], [], as_json, True) == CHECK_FAILED
    said = capsys.readouterr()
    assert said.err.splitlines() == ["kvstore: target missed: what bytes per block, measured 312.2, at_most 300"]
    if as_json:
        assert json.loads(said.out)["bench"] == "b"
    with pytest.raises(BadInput, match="nothing that was measured has a target"):
        bench.judge([Result(UNSET)], [], as_json, True)
    assert bench.judge([Result(MET)], ["the answers differ"], as_json, True) == CHECK_FAILED


@pytest.mark.parametrize(("found", "target", "met"), [(4.1, 4.0, True), (3.9, 4.0, False), (3.9, None, None)])
def test_a_codec_s_rate_is_held_against_its_target(found: float, target: float | None, met: bool | None) -> None:
    row = SpeedRow("int8-th", "encode", "bfloat16", "hnd", found, found, 9.0, 0.5, 0.4, 0.6, target)
    assert row.met is met


def test_every_bench_with_a_target_takes_check() -> None:
    for command in commands.registered_commands:
        assert command.callback is not None
        assert "check" in command.callback.__annotations__, command.name
