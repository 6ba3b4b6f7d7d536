"""The demo on short pages and a smaller model: what it asks, what it counts, and that it can fail. Nothing is timed."""

import dataclasses
import io
import itertools
import json

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytest.importorskip("rich", reason="rich is not installed (extra: server)")

from rich.console import Console

from kvstore.demo.passes import DemoResult, build_model, percentiles, run
from kvstore.demo.questions import (
    CHAT_PAGE,
    MAX_ANSWER_TOKENS,
    MAX_PROMPT_TOKENS,
    QUESTIONS_ON_PAGES,
    SYSTEM_PROMPT,
    DemoOptions,
    Kind,
    cut_to_lines,
    prompt_of,
    read_page,
    twenty_requests,
)

ANSWER_TOKENS = 6
REQUESTS = 7  # up to the chat's second turn
POSITIONS = 2048


@pytest.fixture(scope="module", params=[False, True], ids=["llama", "hybrid"])
def result(request: pytest.FixtureRequest) -> DemoResult:
    given = {"requests": REQUESTS, "tokens": ANSWER_TOKENS, "threads": 1, "seed": 0, "hybrid": request.param}
    return run_short(DemoOptions(dram="64MiB", **given))


def run_short(options: DemoOptions) -> DemoResult:
    assert options.seed is not None
    requests = twenty_requests(options.tokens, page_bytes=600)
    return run(
        options, requests=requests, model=build_model(options.seed, POSITIONS, layers=1, is_hybrid=options.hybrid)
    )


# What is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer_tokens", [1, 32, MAX_ANSWER_TOKENS])
def test_twenty_requests_fit_the_model_and_share_their_beginnings(answer_tokens: int) -> None:
    requests = twenty_requests(answer_tokens)
    assert len(requests) == 20
    assert {kind: sum(request.kind is kind for request in requests) for kind in Kind} == {
        Kind.SYSTEM_PROMPT: 2,
        Kind.PAGE: 12,
        Kind.CHAT: 6,
    }
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for number in range(len(requests)):
        prompts.append(prompt_of(number, requests, prompts, answers))
        answers.append([number] * answer_tokens)
        assert len(prompts[-1]) <= MAX_PROMPT_TOKENS
        assert bytes(prompts[-1]).startswith(SYSTEM_PROMPT.encode())
    chat = [number for number, request in enumerate(requests) if request.kind is Kind.CHAT]
    for earlier, later in itertools.pairwise(chat):
        before = prompts[earlier] + answers[earlier]
        assert prompts[later][: len(before)] == before
    assert len({bytes(prompt) for prompt in prompts}) == 20


def test_most_prompts_are_long() -> None:
    lengths = sorted(len(request.text) for request in twenty_requests(32) if request.kind is Kind.PAGE)
    assert lengths[0] > 3000


@pytest.mark.parametrize("name", [*QUESTIONS_ON_PAGES, CHAT_PAGE])
def test_pages_are_whole_texts(name: str) -> None:
    page = read_page(name)
    assert page.startswith("# ") and page.endswith("\n") and 3000 <= len(page.encode()) <= 6000


def test_pages_are_cut_between_lines() -> None:
    assert cut_to_lines("one\ntwo\n", 100) == "one\ntwo\n"
    assert cut_to_lines("one\ntwo\n", 7) == "one\n"
    assert cut_to_lines("one\ntwo\n", 2) == ""


# What comes of it -----------------------------------------------------------------------------------------------


def test_all_answers_are_identical_and_one_that_is_not_is_found(result: DemoResult) -> None:
    assert result.differing == [] and result.failures == []
    assert all(len(answer) == ANSWER_TOKENS for one in result.passes for answer in one.answers)
    *others, restart = result.passes
    wrong = dataclasses.replace(restart, answers=[*restart.answers[:-1], [*restart.answers[-1][:-1], -1]])
    failed = dataclasses.replace(result, passes=[*others, wrong])
    assert failed.differing == [REQUESTS - 1] and failed.to_dict()["identical"] == REQUESTS - 1
    assert failed.failures == [f"1 of {REQUESTS} answers differ between passes: {REQUESTS}"]


def test_every_token_is_explained_in_every_pass(result: DemoResult) -> None:
    cold, fill, warm, restart = passes = [one.to_dict() for one in result.passes]
    for one in passes:
        assert sum(one["hits"].values()) + sum(one["misses"].values()) == one["prompt_tokens"] and not one["faults"]
    assert cold["hits"] == {} and set(cold["misses"]) == {"disabled"}
    assert 0 < fill["hits"]["dram"] < warm["hits"]["dram"]
    assert {"absent", "diverged"} <= set(fill["misses"])
    assert set(warm["misses"]) <= {"grid", "partial_block", "last_token"}
    assert restart["hits"]["nvme"] > 0 and sum(restart["hits"].values()) <= sum(warm["hits"].values())
    assert set(restart["misses"]) <= {"grid", "partial_block", "last_token", "deadline"}, "all is on disk"
    assert result.read_bytes >= restart["hits"]["nvme"] * 2 * 2 * 64 * 4
    assert cold["saved_blocks"] == warm["saved_blocks"] == 0 < fill["saved_blocks"] <= result.stored["blocks"]
    assert result.has_states == (fill["saved_blocks"] < result.stored["blocks"])


def test_json_and_table_say_the_same(result: DemoResult) -> None:
    found = json.loads(json.dumps(result.to_dict()))
    assert found["requests"] == found["identical"] == REQUESTS
    blocks = found["passes"]["fill"]["saved_blocks"]
    of_states = 3 * (3 * 64 * 4 * 4 + 4 * 64 * 64) * 4  # layers, convolution, recurrence, bytes
    of_kv = 64 * 2 * 2 * 64 * 4  # tokens, planes, heads, width, bytes
    assert found["stored"]["bytes"] == of_kv * blocks + of_states * (found["stored"]["blocks"] - blocks)
    shown = io.StringIO()
    result.render(Console(file=shown, width=100))
    for text in (
        "reused from dram",
        "missed: partial_block",
        f"{found['passes']['warm']['hits']['dram']:,}",
        f"Identical answers in all passes: {REQUESTS} of {REQUESTS}",
    ):
        assert text in shown.getvalue()


def test_a_store_that_is_too_small_evicts_and_stays_right() -> None:
    small = run_short(DemoOptions(dram="2MiB", nvme="1MiB", requests=REQUESTS, tokens=2, threads=1, seed=7))
    assert small.differing == []
    assert small.to_dict()["passes"]["warm"]["misses"]["evicted"] > 0


# Details --------------------------------------------------------------------------------------------------------


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([float(one) for one in range(20, 0, -1)]) == {"p50": 10.0, "p99": 20.0}
    assert percentiles([]) == {"p50": 0.0, "p99": 0.0}


def test_the_model_depends_on_its_seed_alone() -> None:
    first, again, other = (build_model(seed, 64, layers=1).state_dict() for seed in (1, 1, 2))
    name = "model.embed_tokens.weight"
    assert first[name].equal(again[name]) and not first[name].equal(other[name])
