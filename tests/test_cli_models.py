"""`kvstore models` as people and scripts see it, and the page that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from kvstore.insight.models import MODELS
from kvstore.insight.served import Engine, Verdict, shapes
from test_cli import Here, error_line
from test_cli_plan import LLAMA

PAGE = Path(__file__).resolve().parent.parent / "docs/models.md"


def test_the_page_is_what_the_command_writes(here: Here) -> None:
    assert here("models", "--markdown").stdout == PAGE.read_text("utf-8"), "kvstore models --markdown > docs/models.md"


def test_the_page_has_all_models_and_architectures() -> None:
    text = PAGE.read_text("utf-8")
    assert len(MODELS) == 65 and all(f"| {name} |" in text for name in MODELS)
    assert len(shapes()) == 48 and all(name in text for name, _, _ in shapes())


def test_a_model_by_name_by_directory_and_by_file_is_the_same(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    by_place = [json.loads(here("models", str(one), "--json").stdout)["models"] for one in (tmp_path, path)]
    (by_name,) = json.loads(here("models", "llama-3.1-8b", "--json").stdout)["models"]
    assert by_place[0] == by_place[1] == [{**by_name, "model": "llama"}]
    assert by_name["engines"]["vLLM"] == {"verdict": "served", "reason": "", "remedy": ""}


def test_of_what_is_not_served_the_reason_and_the_remedy_are_shown(here: Here) -> None:
    shown = here("models", "kimi-k3").stdout
    assert "transformers: served in part: prompts with videos or sound; allowed: text and images." in shown
    told = json.loads(here("models", "--json").stdout)["models"]
    answers = [one["engines"][engine] for one in told for engine in Engine]
    assert all(bool(one["reason"]) == (one["verdict"] != Verdict.SERVED) for one in answers)


@pytest.mark.parametrize("given", ["no such model", "deepseek-v4"])
def test_what_is_not_known_is_one_line(given: str, here: Here) -> None:
    assert given in error_line(here("models", given))
