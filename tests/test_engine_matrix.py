"""README's table of engines is what the recorded results make of it, and the matrix knows what it runs."""

from __future__ import annotations

import json
import re

import engine_matrix as matrix


def row(outcome: str) -> dict[str, object]:
    return {"outcome": outcome, "seconds": 1.0}


def test_readme_has_the_table_of_the_results() -> None:
    text = matrix.README.read_text()
    assert matrix.with_table(text, json.loads(matrix.RESULTS.read_text())) == text, "run: make matrix ARGS=--table"


def test_a_table_says_what_ran_on_each_release_and_what_failed() -> None:
    files = {
        "test_vllm": {"a": row("passed"), "b": row("passed"), "c": row("skipped")},
        "test_vllm_tier": {"d": row("passed")},
    }
    worse = {**files, "test_vllm": {"a": row("passed"), "b": row("failed")}}
    results = {
        "vLLM": {"0.32.0": files, "0.28.0": files, "0.33.1": worse, "0.9.0": {"test_vllm": {"c": row("skipped")}}}
    }
    lines = matrix.table(results).splitlines()
    assert (
        "| 0.28, 0.31, 0.32, 0.33.1 | 0.28, 0.32: 2 of 2 tests; 0.33.1: 1 of 2 tests; 0.31: not in the matrix yet |"
        in lines[2]
    )
    assert "0.28, 0.32, 0.33.1: 1 of 1 tests; 0.31: not in the matrix yet |" in lines[3]
    assert matrix.with_table(f"a\n{matrix.BEGIN}\nold\n{matrix.END}\nb", results).count("\n| [vLLM]") == 1


def test_results_of_tests_that_are_gone_are_dropped() -> None:
    engine = matrix.ENGINES["transformers"]
    files = {"test_hf_matrix": {"test_gone": row("passed")}, "test_none": {"a": row("passed")}}
    assert matrix.kept(engine, files) == {}
    for name, engine in matrix.ENGINES.items():
        recorded = json.loads(matrix.RESULTS.read_text()).get(name, {})
        assert {version: matrix.kept(engine, one) for version, one in recorded.items()} == recorded
        assert engine.tests(), name


def test_what_is_served_is_what_engines_are_installed_with() -> None:
    pins = (matrix.ROOT / "engines.txt").read_text() + (matrix.ROOT / "engines-alone.txt").read_text()
    for name in ("vLLM", "SGLang"):
        engine = matrix.ENGINES[name]
        assert f"{engine.distribution}=={engine.served[-1]}\n" in pins
    constraints = (matrix.ROOT / "constraints.txt").read_text()
    assert re.search(rf"^transformers=={matrix.ENGINES['transformers'].served[-1]}$", constraints, re.M)
