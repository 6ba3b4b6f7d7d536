"""--check: a target that was missed is named and is status 1, and a run without targets does not pass for one."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from benches import bench as commands
from kvstore.bench.row import BenchResult, Row, Section, Target
from kvstore.block.errors import BadInput
from kvstore.cli.bench import judge
from kvstore.cli.terminal import CHECK_FAILED, OK

MET = Row({"figure": "match"}, 1.5, "ms", limit_of="chain", limit=1.0, ratio=1.5, target=Target(2.2, is_least=False))
MISSED = Row({"figure": "bytes per block"}, 312.25, "bytes", target=Target(300, is_least=False, of="value"))
UNSET = Row({"figure": "a row without a target"}, 0.5, "")
DETAIL = Row({"codec": "raw"}, 1.0, "GB/s", ratio=0.4, target=Target(4.0, of="core"), details={"core": 3.9})


def found(*rows: Row, faults: Sequence[str] = ()) -> BenchResult:
    """What a bench found, in two tables."""
    return BenchResult("b", sections=[Section(rows[:1]), Section(rows[1:], name="more")], faults=list(faults))


def test_a_row_is_met_by_the_figure_that_its_target_names() -> None:
    assert (MET.met, MISSED.met, UNSET.met, DETAIL.met) == (True, False, None, False)
    assert (
        Row({}, 1.0, "", ratio=0.7, target=Target(0.7)).met and not Row({}, 1.0, "", ratio=0.6, target=Target(0.7)).met
    )
    assert DETAIL.to_dict() | {"limit_of": "", "samples": 1} == DETAIL.to_dict()
    told = DETAIL.to_dict()
    assert (told["target"], told["target_of"], told["met"], told["core"]) == (4.0, "core, at least", False, 3.9)
    with pytest.raises(AttributeError):
        Row({}, 1.0, "", target=Target(1.0, of="rate"))
    with pytest.raises(AssertionError, match="two figures"):
        Row({"ratio": 1}, 1.0, "")


def test_every_row_of_every_table_is_in_the_json_and_on_the_screen() -> None:
    result = found(MET, MISSED, UNSET)
    told = json.loads(json.dumps(result.to_dict()))
    assert [row["figure"] for row in told["rows"]] == ["match"] and len(told["more"]) == 2
    assert told["bench"] == "b" and told["machine"]["cores"] >= 1 and told["faults"] == []
    shown = Console(file=io.StringIO(), width=120)
    result.render(shown)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "chain 1.00" in text and "<= 2.2 met" in text and "312.2 bytes" in text and "<= 300 missed" in text


def test_a_missed_target_is_one_line() -> None:
    assert found(MET, MISSED, UNSET).missed() == [
        "target missed: figure bytes per block: 312.2 bytes, wanted <= 300",
    ]
    assert found(DETAIL).missed() == ["target missed: codec raw: 1.00 GB/s, ratio 0.400, core 3.90, wanted >= 4"]


@pytest.mark.parametrize("as_json", [False, True])
def test_with_check_the_status_says_so(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge([found(MET, UNSET)], as_json, True) == OK
    assert judge([found(MET, MISSED)], as_json, False) == OK
    capsys.readouterr()
    assert judge([found(MET, MISSED)], as_json, True) == CHECK_FAILED
    said = capsys.readouterr()
    assert said.err.splitlines() == ["kvstore: target missed: figure bytes per block: 312.2 bytes, wanted <= 300"]
    if as_json:
        assert json.loads(said.out)["bench"] == "b"
    with pytest.raises(BadInput, match="nothing that was measured has a target"):
        judge([found(UNSET)], as_json, True)
    assert judge([found(MET, faults=["the answers differ"])], as_json, False) == CHECK_FAILED
    capsys.readouterr()
    assert judge([found(MET), found(MISSED)], as_json, True) == CHECK_FAILED
    if as_json:
        assert [one["bench"] for one in json.loads(capsys.readouterr().out)["results"]] == ["b", "b"]


def test_every_bench_with_a_target_takes_check() -> None:
    for command in commands.registered_commands:
        assert command.callback is not None
        assert "check" in command.callback.__annotations__, command.name
