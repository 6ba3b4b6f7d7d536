"""A real vLLM prefills and another real vLLM decodes, over one sidecar: the tokens are those of one engine that does
both, and the full blocks are hit. What goes between them is what proxies pass on, word for word.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.conftest import Sidecar, started
from engines.two_roles import AT_ONCE, BLOCK, FOR_PREFILL, OPTIONS, Engines, drawn, full, is_right, killed
from kvstore.cli import ask
from kvstore.node import SystemClock
from kvstore.status.tree import SidecarStatus
from waiting import wait_until

COUNT = int(os.environ.get("HAND_OVER_PROMPTS", "40"))
"""1,000 of up to 4,000 tokens is the long form."""
LONGEST = 2000 if COUNT <= 40 else 4000


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """Of all tests here."""
    with started("handover") as made:
        yield made


@pytest.fixture(scope="module")
def engines(sidecar: Sidecar, saved: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Of all tests here."""
    urls = dict.fromkeys(("kv_producer", "kv_consumer"), sidecar.url)
    made = Engines(saved(), urls, tmp_path_factory.mktemp("handover"))
    yield made
    made.end()


def facts(sidecar: Sidecar) -> SidecarStatus:
    return ask.stat(f"{sidecar.directory}/admin.sock", SystemClock())


@pytest.mark.slow
def test_what_one_prefills_the_other_one_decodes(engines: Engines) -> None:
    prompts = drawn(COUNT, longest=LONGEST)
    hit = wanted = 0
    for first in range(0, COUNT, AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        prefilled = engines.prefill(some)
        assert all(one["transfer_keys"] == ["kvstore"] and one["kvstore"]["ticket"] for one in prefilled)
        decoded = engines.decode(some, [{"kvstore": one["kvstore"], "remote_host": "10.0.0.7"} for one in prefilled])
        for ids, (told, truth) in zip(some, decoded, strict=True):
            account = told["kvstore"]
            assert is_right(told, truth), (told, truth)
            assert "ignored" not in account and "ticket" not in account
            assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"] == len(ids)
            hit += account["hits"].get("dram", 0)
            wanted += full(len(ids))
            assert truth["cached"] == 0
    print(f"hit {hit} of {wanted} tokens of full blocks")
    assert hit >= 0.999 * wanted


def test_both_legs_at_once_and_decode_first(engines: Engines, sidecar: Sidecar) -> None:
    prompts = drawn(3, shortest=900, longest=LONGEST, salt=1)
    engines.prefill([[1, 2, 3]])  # it runs
    for ids in prompts:
        found: list[Any] = []
        decoding = threading.Thread(
            target=lambda ids=ids, found=found: found.extend(  # type: ignore[misc]
                engines.decode([ids], [{"kvstore": {"await": True}}])
            )
        )
        decoding.start()
        wait_until(lambda: facts(sidecar).awaits.parked == 1)  # it asks first
        engines.prefill([ids])
        decoding.join(120)
        ((told, truth),) = found
        assert is_right(told, truth)
        assert told["kvstore"]["hits"] == {"dram": full(len(ids))}, told["kvstore"]


def test_the_first_token_appended_shifts_nothing(engines: Engines) -> None:
    prompts = [
        ids[: 3 * BLOCK + more]
        for ids, more in zip(drawn(4, shortest=600, longest=LONGEST, salt=2), (-1, 0, 1, 60), strict=True)
    ]
    prefilled = engines.prefill(prompts)
    longer = [ids + one["tokens"] for ids, one in zip(prompts, prefilled, strict=True)]
    decoded = engines.decode(longer, [{"kvstore": one["kvstore"]} for one in prefilled])
    for ids, (told, truth) in zip(prompts, decoded, strict=True):
        assert is_right(told, truth) and told["kvstore"]["hits"]["dram"] == len(ids) // BLOCK * BLOCK


def test_stale_and_foreign_tickets_are_computed(engines: Engines) -> None:
    prompts = drawn(4, shortest=600, longest=900, salt=3)
    ticket = engines.prefill(prompts[:1])[0]["kvstore"]["ticket"]
    asked = [prompts[1], prompts[2], prompts[3], prompts[0]]
    hints = [ticket, ticket[:-6] + "AAAAA=", "kv1.", ticket]
    decoded = engines.decode(asked, [{"kvstore": {"ticket": one}} for one in hints])
    for (told, truth), reason in zip(decoded, ("stale_hint", "key_mismatch", "key_mismatch", ""), strict=True):
        account = told["kvstore"]
        assert is_right(told, truth)
        if reason:
            assert account["hits"] == {} and account["misses"][reason] == truth["prompt_tokens"] // BLOCK * BLOCK, (
                account
            )
        else:
            assert account["hits"] == {"dram": full(truth["prompt_tokens"])}


@pytest.mark.slow
def test_unequal_tensor_parallelism_is_named_and_computed(
    engines: Engines, sidecar: Sidecar, run: Callable[..., Any]
) -> None:
    (ids,) = drawn(1, shortest=600, longest=900, salt=5)
    transfer = models.connector(sidecar.url, codec="raw", **models.PATIENT) | {"kv_role": "kv_producer"}
    step = {"do": "generate", "prompts": [ids], "max_tokens": 1, "hints": FOR_PREFILL}
    plan = {"model": engines.model, "transfer": transfer, "steps": [step]}
    ((prefilled,),) = run({**plan, "options": {**OPTIONS, "tensor_parallel_size": 2}})
    ((told, truth),) = engines.decode([ids], [{"kvstore": prefilled["kvstore"]}])
    assert is_right(told, truth) and told["kvstore"]["misses"]["other_namespace"] == len(ids) // BLOCK * BLOCK, told


def test_a_prefill_that_is_killed_costs_time_and_nothing_else(engines: Engines, sidecar: Sidecar) -> None:
    """Last: the engine is gone."""
    (ids,) = drawn(1, shortest=LONGEST - 10, longest=LONGEST, salt=4)
    engines.prefill([[1, 2, 3]])
    prefilling = threading.Thread(target=lambda: killed(engines, ids))
    found: list[Any] = []
    decoding = threading.Thread(target=lambda: found.extend(engines.decode([ids], [{"kvstore": {"await": True}}])))
    decoding.start()
    wait_until(lambda: facts(sidecar).awaits.parked == 1)
    before = facts(sidecar).awaits.ended
    prefilling.start()
    wait_until(lambda: facts(sidecar).awaits.ended != before)  # the first block came
    engines.end("kv_producer")
    decoding.join(150)
    prefilling.join(150)
    ((told, truth),) = found
    account = told["kvstore"]
    assert is_right(told, truth)
    assert account["hits"].get("dram", 0) + sum(account["misses"].values()) == account["asked"] == len(ids)
