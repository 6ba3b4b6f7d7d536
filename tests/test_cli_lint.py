"""`kvstore lint` as people and scripts see it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="typer is not installed (extra: server)")

from test_cli import NO_TORCH, Here, error_line, run_cli

RULES = " ".join(f"Rule {number}: name the source, and write no more than {number} words." for number in range(40))


def written(path: Path, *prompts: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", *(f"Today is {day}.\n{RULES}" for day in ("Monday", "Friday", "Sunday")))


@pytest.mark.slow
def test_a_sentence_for_people_and_an_object_for_scripts(prompts: Path) -> None:
    packed = prompts.with_suffix(".gz")
    packed.write_bytes(gzip.compress(prompts.read_bytes()))
    shown = run_cli("lint", str(packed), "--bytes", before=NO_TORCH)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "prompts.gz: 3 prompts, " in shown.stdout and "bytes, taken for tokens" in shown.stdout
    assert "1. 2 prompts part at token 9, differ for 3 tokens, and are the same again for" in shown.stdout
    assert "Move what changes to the end." in shown.stdout
    assert "Compare lines 1 and 2. They part in line 1 of the text, behind 'Today is '." in shown.stdout
    told = json.loads(run_cli("lint", str(prompts), "--bytes", "--json", before=NO_TORCH).stdout)
    assert told["groups"][0]["prompts"] == 2 and told["hit_tokens"] == 0


def test_the_status_of_a_check(prompts: Path, here: Here) -> None:
    given = ("lint", str(prompts), "--bytes", "--min-hit-rate")
    assert here(*given, "0").returncode == 0
    failed = here(*given, "0.5")
    assert (failed.returncode, failed.stderr) == (1, "") and "Below --min-hit-rate 0.5." in failed.stdout
    told = here(*given, "0.5", "--json")
    assert told.returncode == 1 and json.loads(told.stdout)["is_below"]


def test_a_models_own_tokenizer(prompts: Path, here: Here) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra: hf)")
    words = dict.fromkeys(f"Today is Monday Friday Sunday . , : {RULES}".split())
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(words)} | {"?": len(words)}, unk_token="?")
    known = tokenizers.Tokenizer(model)
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = prompts.parent / "model"
    folder.mkdir()
    known.save(str(folder / "tokenizer.json"))
    given = ("lint", str(prompts), "--block", "16", "--json", "--tokenizer")
    by_folder = here(*given, str(folder))
    (group,) = json.loads(by_folder.stdout)["groups"]
    assert (group["first_place"], group["tokens"], group["earlier_tokens"]) == (2, 1, 1)
    assert group["where"] == "They part in line 1 of the text, behind 'Today is '"
    by_file = here(*given, str(folder / "tokenizer.json"))
    assert by_file.stdout == by_folder.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("none.jsonl",), "none.jsonl: No such file or directory"),
        (("/",), "/ is a folder; give a file of JSON lines"),
        (("{prompts}",), "prompts.jsonl line 1: it has text, and no tokenizer was given; give --tokenizer"),
        (("{prompts}", "--bytes", "--tokenizer", "x"), "--bytes is for prompts without a tokenizer"),
        (("{prompts}", "--tokenizer", "nowhere"), "--tokenizer nowhere: there is no nowhere; give a folder with"),
        (("{prompts}", "--tokenizer", "{prompts}"), "is no tokenizer.json; give that of a model"),
        (("{prompts}", "--bytes", "--block", "0"), "--block '0'; give a whole number from 1 to 4096"),
        (("{prompts}", "--bytes", "--min-hit-rate", "x"), "--min-hit-rate 'x'; give a share of the tokens, 0 to 1"),
        (("{prompts}", "--bytes", "--min-hit-rate", "60"), "--min-hit-rate 60; give a share of the tokens, 0 to 1"),
        (("{prompts}", "--bytes", "--min-hit-rate", "nan"), "--min-hit-rate nan; give a share of the tokens"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(given: tuple[str, ...], says: str, prompts: Path, here: Here) -> None:
    filled = [one.replace("{prompts}", str(prompts)) for one in given]
    assert says in error_line(here("lint", *filled))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, here: Here) -> None:
    path = tmp_path / "packed.gz"
    path.write_bytes(gzip.compress(b" " * (40 << 20)))
    said = error_line(here("lint", str(path), "--bytes"))
    assert "packed.gz line 1: more than 16777216 characters; give shorter prompts" in said
