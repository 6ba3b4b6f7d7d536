"""A real vLLM prefills and another real vLLM decodes, over one sidecar: the tokens are those of one engine that does
both, and the full blocks are hit. What goes between them is what proxies pass on, word for word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from engines import models
from engines.conftest import Run, Sidecar, started
from engines.two_roles import (
    AT_ONCE,
    BLOCK,
    DECODE,
    FOR_PREFILL,
    LONGEST_SECONDS,
    OPTIONS,
    PREFILL,
    Engines,
    drawn,
    full,
)
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.status.tree import SidecarStatus
from waiting import wait_until

COUNT = int(os.environ.get("HAND_OVER_PROMPTS", "40"))
"""1,000 of up to 4,000 tokens is the long form."""
LONGEST = 2000 if COUNT <= 40 else 4000


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with started("handover") as made:
        yield made


@pytest.fixture(scope="module")
def engines(sidecar: Sidecar, saved: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    urls = dict.fromkeys((PREFILL, DECODE), sidecar.url)
    made = Engines(saved(), urls, tmp_path_factory.mktemp("handover"))
    yield made
    made.end()


def facts(sidecar: Sidecar) -> SidecarStatus:
    return ask.stat(f"{sidecar.directory}/admin.sock", SystemClock())


@pytest.mark.slow
def test_what_one_prefills_the_other_one_decodes(engines: Engines) -> None:
    prompts = drawn(COUNT, longest=LONGEST)
    engines.prefill([[1, 2, 3]])  # it runs
    hit = 0
    for first in range(0, COUNT, AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        prefilled = engines.prefill(some)
        assert all(one["transfer_keys"] == ["kvstore"] and one["kvstore"]["ticket"] for one in prefilled)
        hints = [{"kvstore": one["kvstore"], "remote_host": "10.0.0.7"} for one in prefilled]
        for account in engines.decode(some, hints):
            assert "ignored" not in account and "ticket" not in account
            hit += account["hits"].get("dram", 0)
    wanted = sum(full(len(ids)) for ids in prompts)
    print(f"hit {hit} of {wanted} tokens of full blocks")
    assert hit >= 0.999 * wanted


def test_both_legs_at_once_and_decode_first(engines: Engines, sidecar: Sidecar) -> None:
    engines.prefill([[1, 2, 3]])  # it runs
    for ids in drawn(3, shortest=900, longest=LONGEST, salt=1):
        with engines.decoding(ids, {"await": True}, lambda: facts(sidecar).awaits.parked) as account:
            engines.prefill([ids])
        assert account["hits"] == {"dram": full(len(ids))}, account


def test_the_first_token_appended_shifts_nothing(engines: Engines) -> None:
    prompts = [
        ids[: 3 * BLOCK + more]
        for ids, more in zip(drawn(4, shortest=600, longest=LONGEST, salt=2), (-1, 0, 1, 60), strict=True)
    ]
    prefilled = engines.prefill(prompts)
    longer = [ids + one["tokens"] for ids, one in zip(prompts, prefilled, strict=True)]
    decoded = engines.decode(longer, [{"kvstore": one["kvstore"]} for one in prefilled])
    assert [one["hits"]["dram"] for one in decoded] == [len(ids) // BLOCK * BLOCK for ids in prompts]


def test_stale_and_foreign_tickets_are_computed(engines: Engines) -> None:
    prompts = drawn(4, shortest=600, longest=900, salt=3)
    ticket = engines.prefill(prompts[:1])[0]["kvstore"]["ticket"]
    strange = {ticket: "stale_hint", ticket[:-6] + "AAAAA=": "key_mismatch", "kv1.": "key_mismatch"}
    hints = [{"kvstore": {"ticket": one}} for one in (*strange, ticket)]
    *decoded, its_own = engines.decode([*prompts[1:], prompts[0]], hints)
    for account, reason in zip(decoded, strange.values(), strict=True):
        assert account["hits"] == {} and account["misses"][reason] == account["asked"] // BLOCK * BLOCK, account
    assert its_own["hits"] == {"dram": full(its_own["asked"])}


@pytest.mark.slow
def test_unequal_tensor_parallelism_is_named_and_computed(engines: Engines, sidecar: Sidecar, run: Run) -> None:
    (ids,) = drawn(1, shortest=600, longest=900, salt=5)
    transfer = models.connector(sidecar.url) | {"kv_role": PREFILL}
    step = {"do": "generate", "prompts": [ids], "max_tokens": 1, "hints": FOR_PREFILL, "as": "told"}
    options = {**OPTIONS, "tensor_parallel_size": 2}
    (prefilled,) = run({"model": engines.model, "transfer": transfer, "steps": [step], "options": options})["told"]
    (account,) = engines.decode([ids], [{"kvstore": prefilled["kvstore"]}])
    assert account["misses"]["other_namespace"] == len(ids) // BLOCK * BLOCK, account


def test_a_prefill_that_is_killed_costs_time_and_nothing_else(engines: Engines, sidecar: Sidecar) -> None:
    """`decoding` looks at the tokens and the account. Last: the engine is gone."""
    (ids,) = drawn(1, shortest=LONGEST - 10, longest=LONGEST, salt=4)
    engines.prefill([[1, 2, 3]])
    with engines.decoding(ids, {"await": True}, lambda: facts(sidecar).awaits.parked):
        before = facts(sidecar).awaits.ended
        prefilling = engines.prefill_fails(ids)
        wait_until(lambda: facts(sidecar).awaits.ended != before)  # the first block came
        engines.end(PREFILL)
        prefilling.join(LONGEST_SECONDS)
