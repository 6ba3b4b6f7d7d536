"""What a user tells a real vLLM's connector about a request and hears of it, and KV events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engines.session import FORGET, SEED, account_of, apart
from kvstore.block.errors import BadInput
from kvstore.cli import ask
from kvstore.node import SystemClock

OURS = "CPU"
"""The medium of blocks that the store has in DRAM."""
BLOCK = 128
"""Tokens of a stored block, which is the engine's page."""


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SALTED = apart(1, 500)[0]
TRACED = apart(1, 403)[0]
LONG, KEPT, REFUSED, WRONG = apart(1, 700)[0], apart(1, 400)[0], apart(1, 401)[0], apart(1, 402)[0]
TELLS = {"kvstore": {"ttl": 3600.5, "priority": 7, "conversation": "mine"}}
NOT_SAVED = {"kvstore": {"store": False}}
MISTAKES = {"kvstore": {"stroe": True, "store": "no", "ttl": -1, "priority": 101, "conversation": 5}}


@pytest.fixture(scope="module")
def told(pair: Any) -> dict[str, Any]:
    print(f"seed {SEED}")
    steps = [
        {"do": "listen", "endpoint": pair.events},
        # What is generated completes a block.
        {"do": "generate", "prompts": [LONG], "max_tokens": 140, "as": "long"},
        {"do": "report"},
        {"do": "events", "as": "events"},
        {"do": "generate", "prompts": [SALTED], "salt": "mine", "as": "salted"},
        {"do": "report"},
        {"do": "events", "as": "salted_events"},
        {"do": "drop", "admin": pair.admin, "as": "dropped"},
        {"do": "generate", "prompts": [[1, 2, 3]], "max_tokens": 60},  # steps, in which the store is asked
        {"do": "events", "as": "removed_events"},
        {"do": "generate", "prompts": [KEPT], "hints": TELLS, "as": "kept_first"},
        *FORGET,
        {"do": "generate", "prompts": [KEPT], "as": "kept"},
        {"do": "generate", "prompts": [REFUSED], "hints": NOT_SAVED, "as": "refused_first"},
        *FORGET,
        {"do": "generate", "prompts": [REFUSED], "hints": NOT_SAVED, "as": "refused"},
        {"do": "generate", "prompts": [WRONG], "hints": MISTAKES, "as": "wrong_first"},
        *FORGET,
        {"do": "generate", "prompts": [WRONG], "hints": {"kvstore": 7}, "as": "wrong"},
        {"do": "generate", "prompts": [[4, 5, 6]], "hints": {"somebody": "else"}, "as": "others"},
        {"do": "counted", "as": "counted"},
        {"do": "trace"},
        {"do": "generate", "prompts": [TRACED], "as": "traced_first"},
        *FORGET,
        {"do": "generate", "prompts": [TRACED], "trace_headers": HEADERS, "as": "traced"},
        {"do": "spans", "count": 3, "as": "spans"},
    ]
    return dict(pair.with_store(steps))


def test_a_request_with_a_parent_has_spans_below_it_and_one_without_has_none(told: dict[str, Any]) -> None:
    account, spans = one(told["traced"]), told["spans"]
    assert [span["name"] for span in spans] == ["kvstore match", "kvstore lease", "kvstore load"]
    assert {(span["trace"], span["parent"]) for span in spans} == {(TRACE, PARENT)}
    match, lease, load = (span["attributes"] for span in spans)
    assert match["kvstore.tokens.asked"] == lease["kvstore.tokens.asked"] == 403
    assert match["kvstore.tokens.hit.dram"] == lease["kvstore.tokens.hit.dram"] == account["hits"]["dram"] == 384
    assert load["gen_ai.usage.cache_read.input_tokens"] == 384 and load["kvstore.wait_seconds"] > 0
    assert {span["attributes"]["gen_ai.request.model"] for span in spans} == {match["gen_ai.request.model"]}
    allowed = ("gen_ai.request.model", "gen_ai.usage.", "kvstore.tokens.", "kvstore.miss.", "kvstore.wait_seconds")
    assert all(name.startswith(allowed) for span in spans for name in span["attributes"])


def one(told: list[dict[str, Any]]) -> dict[str, Any]:
    (answer,) = told
    return account_of(answer)


def test_a_request_is_told_what_became_of_it(told: dict[str, Any]) -> None:
    first, again = one(told["kept_first"]), one(told["kept"])
    assert first == {
        "asked": 400,
        "hits": {},
        "misses": {"absent": 384, "partial_block": 16},
        "detail": first["detail"],
        "load_ms": 0.0,
        "saved_blocks": first["saved_blocks"],
        "put_reasons": {},
        "block_tokens": BLOCK,
    }
    assert again["hits"] == {"dram": 384} and again["misses"] == {"partial_block": 16}
    assert again["load_ms"] > 0 and again["saved_blocks"] == 0
    assert "ignored" not in again


def test_an_operator_is_shown_what_became_of_a_request(told: dict[str, Any], pair: Any) -> None:
    """By the engine's own names, which this test does not know."""
    records = {}
    for begins in "0123456789abcdef":
        try:
            found = ask.why(pair.admin, SystemClock(), begins).found
        except BadInput:
            continue
        records |= {one.request: one for one in found}
    assert records and all(one.engine.startswith("vllm ") for one in records.values())
    # Engines of other tests share this sidecar.
    mine = [one for one in records.values() if one.told is not None and one.told.asked in (400, 402)]
    hits = [one for one in mine if one.told is not None and one.told.hits == {"dram": 384}]
    assert hits, records
    for one in hits:
        assert one.told is not None and sum(one.told.misses.values()) in (16, 18)
        assert sum(lease.blocks for lease in one.leases) >= 3 and one.told.load_ms >= 0
    savings = ask.stat(pair.admin, SystemClock()).savings
    assert savings is not None and savings.engines >= 1


def test_what_is_not_to_be_stored_is_not_found_again(told: dict[str, Any]) -> None:
    """Beside one that is: `test_a_request_is_told_what_became_of_it`."""
    for name in ("refused_first", "refused"):
        account = one(told[name])
        assert account["hits"] == {} and account["misses"] == {"absent": 384, "partial_block": 17}
        assert account["saved_blocks"] == 0 and "ignored" not in account


def test_hints_that_are_wrong_are_named_and_have_no_effect(told: dict[str, Any]) -> None:
    first, again = one(told["wrong_first"]), one(told["wrong"])
    ignored = [line.partition("=")[0].partition(";")[0] for line in first["ignored"]]
    assert ignored == ["stroe", "store", "ttl", "priority", "conversation"], first["ignored"]
    assert again["hits"] == {"dram": 384}, "it was stored"
    assert again["ignored"] == ["kvstore=7; give an object with store, ttl, priority, conversation, ticket, await"]
    assert "ignored" not in one(told["others"])


def test_counters_add_up_to_what_requests_were_told(told: dict[str, Any]) -> None:
    counted = told["counted"]
    names = ("long", "kept_first", "kept", "refused_first", "refused", "wrong_first", "wrong", "others", "salted")
    accounts = [one(told[name]) for name in names]
    assert counted["hit_dram"] == sum(account["hits"].get("dram", 0) for account in accounts) == 2 * 384
    assert counted["miss_absent"] == sum(account["misses"].get("absent", 0) for account in accounts)
    assert counted["loads"] == 2 and "failed_loads" not in counted and "dropped_saves" not in counted
    # 140 tokens behind 700 make a sixth block; of the last token no KV is ever computed.
    assert counted["saved_blocks"] == (700 + 139) // BLOCK + 3 + 3 + 3


def test_blocks_that_were_stored_are_events_with_the_engines_own_hashes(told: dict[str, Any]) -> None:
    own, stored = ([*each(told["events"], is_ours)] for is_ours in (False, True))
    assert len(stored) == (700 + 139) // BLOCK
    assert sorted(stored) == sorted(own)
    assert {event["medium"] for event in told["events"]} == {OURS, "GPU"}, "words that routers know"
    chain = {name: parent for name, parent, _ in stored}
    assert list(chain.values()).count(None) == 1 and all(parent is None or parent in chain for parent in chain.values())


def each(events: list[dict[str, Any]], is_ours: bool) -> Iterator[tuple[Any, Any, list[int]]]:
    """Block by block: (hash, its parent's, tokens)."""
    for event in events:
        if (event["medium"] == OURS) is is_ours and "tokens" in event:
            block, parent = event["block"], event["parent"]
            assert len(event["tokens"]) == block * len(event["hashes"])
            for number, name in enumerate(event["hashes"]):
                yield name, parent, event["tokens"][number * block : (number + 1) * block]
                parent = name


def test_a_salted_block_is_told_with_its_salt_and_what_the_store_gives_up_is_taken_back(told: dict[str, Any]) -> None:
    """As a consumer of vLLM's events sees it: by the engine's hashes."""

    def salted(is_ours: bool) -> list[tuple[str, Any]]:
        """Hashes, and what else makes each of them what it is."""
        events = [one for one in told["salted_events"] if (one["medium"] == OURS) is is_ours and "tokens" in one]
        keys = [keys for one in events for keys in one["extra_keys"] or [None] * len(one["hashes"])]
        return list(zip([name for one in events for name in one["hashes"]], keys, strict=True))

    assert salted(True) == salted(False)
    (_, salt), *others = salted(True)
    assert salt and not any(keys for _, keys in others), "vLLM has the salt in the first block alone"
    assert told["dropped"] > len(others)
    believed: set[str] = set()
    for event in [*told["events"], *told["salted_events"], *told["removed_events"]]:
        if event["medium"] == OURS:
            (believed.update if "tokens" in event else believed.difference_update)(event["hashes"])
    assert believed == set(), "nothing is believed to be where it is not any more"
    assert any("tokens" not in event for event in told["removed_events"])
