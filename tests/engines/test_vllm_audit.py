"""Hits of a real vLLM that are computed all the same: what is right is found right, and drift is found before it harms.

Two engines with other weights share a namespace here because both were told the same fingerprint by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from engines import models
from engines.session import FORGET, SEED, account_of, apart, tokens

PROMPTS = apart(4, 450)
MADE = 66
"""A block more: what is stored is asked for again where it was not there when the prompt was through."""


def audited(saved: Any, run: Any, url: str, salt: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """An engine that computes the prompts, forgets them, and audits every hit: one at a time, until its verdict."""
    print(f"seed {SEED}")
    ask = {"do": "generate", "prompts": PROMPTS, "max_tokens": MADE}
    plan = {
        "model": saved(**model),
        "transfer": models.connector(url, audit=1.0, model="by hand"),
        "options": {"dtype": "float32", "block_size": 32},
        "steps": [
            {**ask, **(salt or {}), "as": "computed"},
            *FORGET,
            {**ask, "report_after_each": True, "as": "asked"},
            {"do": "counted", "as": "counted"},
        ],
    }
    told: dict[str, Any] = run(plan)
    for one in told["asked"]:
        account = account_of(one)
        assert account["hits"] == {} and one["cached"] == 0 and "audit" in account["misses"]
    assert tokens(told["asked"]) == tokens(told["computed"])
    return told


def check_exact(told: dict[str, Any]) -> None:
    assert all(one["kvstore"]["misses"] == {"audit": 448, "partial_block": 2} for one in told["asked"])
    verdicts = {name: count for name, count in told["counted"].items() if name.startswith("audited_")}
    assert sum(verdicts.values()) == len(PROMPTS) and not set(verdicts) - {"audited_exact", "audited_close"}, verdicts


def test_every_hit_is_compared_and_drift_ends_the_use_of_what_is_stored(sidecar: Any, saved: Any, run: Any) -> None:
    before = audited(saved, run, sidecar.url)
    check_exact(before)
    # Nobody has stored anything with this salt: it computes all of it.
    after = audited(saved, run, sidecar.url, {"salt": "alone"}, seed=1)
    assert all(one["cached"] == 0 for one in after["computed"])
    assert all(old != new for old, new in zip(tokens(before["computed"]), tokens(after["computed"]), strict=True))
    for one in after["asked"][1:]:
        assert one["kvstore"]["misses"] == {"audit": 450} and one["kvstore"]["saved_blocks"] == 0
        assert "is not what this engine computes" in one["kvstore"]["detail"]
    assert after["counted"]["audited_drifted"] == 1


@pytest.mark.slow
def test_with_windows_nothing_that_is_right_has_drifted(sidecar: Any, saved: Any, run: Any) -> None:
    if not models.takes_windows():
        pytest.skip("this vLLM is refused models with windows: nothing is audited")
    check_exact(audited(saved, run, sidecar.url, kind="windowed"))
