"""When PrefixCache saves: never before a first token, and a sidecar that hangs costs a request one look-up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from adapters.test_hf_cache import cache_of, reasons
from engine_adapter.hf_cache import SavedBlocks
from hf_models import Each, ask, ask_all, small_model, some_prompt
from kvstore.block.account import MissReason
from kvstore.block.errors import Unreachable
from kvstore.client.handle import NamespaceHandle
from kvstore.client.socket_door import CallLimits
from kvstore.node import EmbeddedStore
from service.test_serve import serving
from service.test_silent_sidecar import AT_ONCE, LONG, stop
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama() -> Any:
    return small_model()


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("kept", list(SavedBlocks))
def test_nothing_is_saved_before_the_first_token(
    llama: Any, store: EmbeddedStore, kept: SavedBlocks, new_tokens: int
) -> None:
    """And all is found by the next request, however short the answer was."""
    cache, saved = cache_of(llama, store, kept=kept), list[int]()

    def step(count: int) -> None:
        saved.append(cache.report.saved_blocks)
        assert count > 1 or cache.report.save_ms == 0 == store.usage().blocks

    cold = ask(cache, some_prompt(1300), new_tokens, stopping_criteria=[Each(step)])
    assert saved == [min(4 * count, 20) for count in range(new_tokens)], "a cell of 256 tokens between two tokens"
    assert cold.report.saved_blocks == 20 and not cold.report.put_reasons
    warm = ask(cache, some_prompt(1300), new_tokens)
    assert reasons(warm.report.account)["dram"] == 1280 and warm.token_ids == cold.token_ids


def test_in_a_batch_what_a_prompt_shares_is_saved_before_it_is_looked_up_and_nothing_else(
    llama: Any, store: EmbeddedStore
) -> None:
    one, other = some_prompt(700), some_prompt(640, seed=2)
    cache = cache_of(llama, store)

    def step(count: int) -> None:
        first, second, third = cache.reports
        assert count > 1 or (first.saved_blocks, second.save_ms) == (10, 0)
        assert reasons(third.account)["dram"] == 512

    ask_all(cache, [one, other, one[:520]], 2, stopping_criteria=[Each(step)])
    assert cache.reports[1].saved_blocks == 10


@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_what_was_decoded_is_not_encoded_again(llama: Any, store: EmbeddedStore, codec: str) -> None:
    """Blocks are restored, and go meanwhile. With an inexact codec they are not offered, so what is computed behind
    them cannot be stored; with an exact one all are."""
    cache, prompt = cache_of(llama, store, codec=codec), some_prompt(700)
    ask(cache, prompt[:450], 1)
    leaves = Each(lambda count: store.drop(cache.namespace) if count == 1 else None)  # type: ignore[arg-type]
    answer = ask(cache, prompt, 2, stopping_criteria=[leaves])
    assert answer.report.restored_tokens == 448
    assert answer.report.saved_blocks == (10 if codec == "raw" else 0)
    assert (MissReason.EVICTED in answer.report.put_reasons) == (codec != "raw")


@pytest.mark.slow
def test_a_sidecar_that_hangs_costs_no_token(llama: Any, tmp_path: Path) -> None:
    prompt = some_prompt(1300)
    expected = ask(cache_of(llama), prompt, 6).token_ids
    with serving(tmp_path, "--nvme", "off") as (_, said), kvstore.open(f"unix:{said['serving'][0]}") as store:
        cache = cache_of(llama, store)
        door: Any = store._door  # type: ignore[union-attr]
        door._limits = CallLimits(fill=LONG)
        stop(said["pid"])
        try:
            started = time.monotonic()
            answers = [ask(cache, prompt, 6) for _ in range(3)]
            assert time.monotonic() - started < AT_ONCE
        finally:
            os.kill(said["pid"], signal.SIGCONT)
        for answer in answers:
            assert answer.token_ids == expected and not answer.report.faults
            assert answer.report.put_reasons == {MissReason.UNREACHABLE: 2}, "a chunk, and all of it at the end"
        first, *later = [reasons(answer.report.account) for answer in answers]
        assert first == {"deadline": 1280, "partial_block": 20}
        assert later == [{"unreachable": 1280, "partial_block": 20}] * 2
        wait_until(lambda: not door._run.breaker.is_open)
        door._limits = CallLimits(match=LONG, lease=LONG)
        ask(cache, prompt, 1)
        warm = ask(cache, prompt, 6)
        assert warm.token_ids == expected and reasons(warm.report.account)["dram"] == 1280


@pytest.mark.slow
def test_a_sidecar_that_hangs_behind_the_first_token_costs_one_deadline(llama: Any, tmp_path: Path) -> None:
    prompt = some_prompt(1300)
    expected = ask(cache_of(llama), prompt, 6).token_ids
    with serving(tmp_path, "--nvme", "off") as (_, said), kvstore.open(f"unix:{said['serving'][0]}") as store:
        cache = cache_of(llama, store)
        door: Any = store._door  # type: ignore[union-attr]
        door._limits = CallLimits(match=LONG, fill=LONG, lease=LONG)

        def stops(count: int) -> None:
            if count == 1:
                stop(said["pid"])
                door._limits = CallLimits(fill=LONG)

        try:
            started = time.monotonic()
            answer = ask(cache, prompt, 6, stopping_criteria=[Each(stops)])
            assert time.monotonic() - started < AT_ONCE
        finally:
            os.kill(said["pid"], signal.SIGCONT)
        assert answer.token_ids == expected and not answer.report.faults
        assert answer.report.put_reasons == {MissReason.DEADLINE: 1, MissReason.UNREACHABLE: 1}


def test_a_model_that_changes_while_the_store_does_not_open_anything_is_answered(
    llama: Any, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the store is asked again later, not by each request."""
    cache = cache_of(llama, store)
    tokens = some_prompt(600)
    before = ask(cache, tokens, 2)
    asked = []

    def away(**_: Any) -> NamespaceHandle:
        asked.append(1)
        raise Unreachable("away")

    with llama.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 0.5):
        with monkeypatch.context() as patched:
            patched.setattr(store, "namespace", away)
            for _ in range(3):
                changed = ask(cache, tokens, 2)
                assert changed.report.account.hit_tokens == 0
            assert len(asked) == 1 and cache.namespace is None
        monkeypatch.setattr(cache, "_open_again_at", 0.0)
        assert ask(cache, tokens, 2).token_ids == changed.token_ids
        assert ask(cache, tokens, 2).report.account.hit_tokens > 0
    again = ask(cache, tokens, 2)
    assert again.token_ids == before.token_ids and again.report.account.hit_tokens > 0
