"""The console's API against its own document, by schemathesis: requests that the document allows and requests that it
does not get the answers that it names, and never a fault of the server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra: test)")

from hypothesis import HealthCheck, given, settings  # noqa: E402

from console.running import busy_console  # noqa: E402
from kvstore.console.http_api import ACTIONS  # noqa: E402

TOKEN = "operator-" + "o" * 16
HEADERS = {"authorization": f"Bearer {TOKEN}"}
ACCEPTED = importlib.import_module("schemathesis.specs.openapi.checks").positive_data_acceptance


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("served")
    flags = ["--operator", str(directory / "admin.sock"), "--audit-file", str(directory / "audit")]
    with busy_console(directory, *flags, tokens=TOKEN, prompts=8) as (_, shown):
        yield schemathesis.openapi.from_url(f"{shown.url}openapi.json", headers=HEADERS)


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_request_gets_an_answer_that_the_document_names(document: Any, mode: str) -> None:
    """positive: what the document allows; negative: what it does not."""
    wanted = schemathesis.GenerationMode(mode)
    asked: dict[str, set[int]] = {}
    for found in document.get_all_operations():
        operation = found.ok()
        is_action = operation.path in ACTIONS
        if mode == "negative" and not operation.query.items and not is_action:
            continue  # there is nothing that could be wrong

        @given(case=operation.as_strategy(generation_mode=wanted))
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def ask(case: Any) -> None:
            answer = case.call(headers=HEADERS)
            # What can be planned is a matter of several fields together, which a schema cannot say; nor which ticket is
            # good.
            excluded = [ACCEPTED] if case.path == "/api/plan" or case.path in ACTIONS else []
            case.validate_response(answer, excluded_checks=excluded)
            assert answer.status_code < 500, answer.text
            asked.setdefault(case.path, set()).add(answer.status_code)

        ask()
    print(asked)
    assert len(asked) >= (8 if mode == "negative" else 15)
    wrong = 422 if mode == "negative" else 200
    assert all((422 if path in ACTIONS else wrong) in statuses for path, statuses in asked.items()), asked
