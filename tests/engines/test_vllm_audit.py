"""Hits of a real vLLM that are computed all the same: what is right is found right, and drift is found before it harms.

Two engines with other weights share a namespace here because both were told the same fingerprint by hand.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.session import SEED, apart, named, tokens

PROMPTS = apart(4, 450)
MADE = 66
"""A block more: what is stored is asked for again where it was not there when the prompt was through."""
OTHERS = (1, 2, 3)
"""What is asked after the first of them."""


def transfer(url: str, audit: float, model: str = "by hand") -> dict[str, Any]:
    return models.connector(url, codec="raw", **{**models.PATIENT, "audit": audit, "model": model})


def one_by_one() -> list[dict[str, Any]]:
    """Each prompt alone, and a step behind it that brings the verdict: one hit is audited at a time."""
    tell = {"do": "generate", "prompts": [[1, 2, 3]]}
    return [
        step
        for number, prompt in enumerate(PROMPTS)
        for step in (
            {"do": "generate", "prompts": [prompt], "max_tokens": MADE, "as": f"asked_{number}"},
            {"do": "settle", "seconds": 0.5},
            tell,
        )
    ]


def asked(told: dict[str, Any]) -> list[dict[str, Any]]:
    answers = [told[f"asked_{number}"][0] for number in range(len(PROMPTS))]
    for one in answers:
        account = one["kvstore"]
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"]
    return answers


def audited(saved: Any, run: Any, url: str, **model: Any) -> dict[str, Any]:
    """An engine that stores the prompts, forgets them, and audits every hit."""
    plan = {
        "model": saved(**model),
        "transfer": transfer(url, audit=1.0),
        "options": {"dtype": "float32", "block_size": 32},
        "steps": [
            {"do": "generate", "prompts": PROMPTS, "max_tokens": MADE, "as": "first"},
            {"do": "settle"},
            {"do": "reset"},
            *one_by_one(),
            {"do": "counted", "as": "counted"},
        ],
    }
    told = named(plan["steps"], run(plan))
    for one in asked(told):
        assert one["kvstore"]["hits"] == {} and one["cached"] == 0
        assert one["kvstore"]["misses"] == {"audit": 448, "partial_block": 2}
    assert tokens(asked(told)) == tokens(told["first"])
    counted = told["counted"]
    verdicts = {name: counted[name] for name in counted if name.startswith("audited_")}
    assert sum(verdicts.values()) == len(PROMPTS) and not set(verdicts) - {"audited_exact", "audited_close"}, verdicts
    return told


def test_every_hit_is_compared_and_drift_ends_the_use_of_what_is_stored(sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    before = audited(saved, run, sidecar.url)
    plan = {
        "model": saved(seed=1),
        "transfer": transfer(sidecar.url, audit=1.0),
        "options": {"dtype": "float32", "block_size": 32},
        "steps": [
            # Nobody has stored anything with this salt: it computes all of it.
            {"do": "generate", "prompts": PROMPTS, "max_tokens": MADE, "salt": "alone", "as": "alone"},
            {"do": "settle"},
            {"do": "reset"},
            *one_by_one(),
            {"do": "counted", "as": "counted"},
        ],
    }
    after = named(plan["steps"], run(plan))
    for one in after["alone"]:
        assert one["cached"] == 0
    assert all(old != new for old, new in zip(tokens(before["first"]), tokens(after["alone"]), strict=True))
    for one in asked(after):
        assert one["kvstore"]["hits"] == {} and one["cached"] == 0
        assert "audit" in one["kvstore"]["misses"]
    assert tokens(asked(after)) == tokens(after["alone"])
    for number in OTHERS:
        (one,) = after[f"asked_{number}"]
        assert one["kvstore"]["misses"] == {"audit": 450} and one["kvstore"]["saved_blocks"] == 0
        assert "is not what this engine computes" in one["kvstore"]["detail"]
    assert after["counted"]["audited_drifted"] == 1


@pytest.mark.slow
def test_with_windows_nothing_that_is_right_has_drifted(sidecar: Any, saved: Any, run: Any) -> None:
    print(f"seed {SEED}")
    if not models.takes_windows():
        pytest.skip("this vLLM is refused models with windows: nothing is audited")
    audited(saved, run, sidecar.url, kind="windowed")
