"""transformers in two processes: one prefills, the other one goes on with it, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter import handoff
from engine_adapter.hf_cache import PrefixCache, SavedBlocks
from hf_models import ask, cache_of, plain_answer, small_model, some_prompt
from kvstore.block.account import HitTier, MissReason
from programs import start_python
from service.sidecar import Sidecar
from tiering.counts.awaits import AwaitEnd
from waiting import wait_until
from workbench import open_at

CHUNK = 128
NEW_TOKENS = 6
PREFILL = """
import sys
import kvstore
from engine_adapter.hf.layers import ModelCall
from engine_adapter.hf_cache import PrefixCache
from hf_models import small_model, some_prompt

path, tokens, stops_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cache = PrefixCache(small_model(), kvstore.open("unix:" + path), codec="raw", chunk_tokens=128)
cells, inner = [], ModelCall.__call__

def stopping(*given, **more):
    cells.append(1)
    if len(cells) > stops_after:
        sys.stdin.readline()
    return inner(*given, **more)

if stops_after:
    ModelCall.__call__ = stopping
cache.prefill(some_prompt(tokens), on_ticket=lambda ticket: print(ticket, flush=True))
print("over", flush=True)
sys.stdin.readline()
"""


@contextmanager
def prefilling(sidecar: Sidecar, tokens: int, stops_after: int = 0) -> Iterator[str]:
    """The ticket of a process of its own, which is killed at the end."""
    process: Any = start_python(PREFILL, sidecar.path, tokens, stops_after)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)


def test_one_process_prefills_and_another_one_generates(sidecar: Sidecar) -> None:
    prompt, cache = some_prompt(900), cache_of(small_model(), sidecar.client())
    right = plain_answer(cache.model, prompt, NEW_TOKENS)
    with prefilling(sidecar, 900) as ticket:
        answer = ask(cache, prompt, NEW_TOKENS, ticket=ticket)
    assert answer.token_ids == right
    assert answer.report.account.hits == {HitTier.DRAM: 896}


def test_a_prefill_that_dies_between_two_chunks_costs_what_is_missing(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 1.0)
    prompt, cache = some_prompt(900), cache_of(small_model(), sidecar.client())
    right = plain_answer(cache.model, prompt, NEW_TOKENS)
    namespace: Any = cache.namespace
    hashed = namespace.hashed(prompt)
    with prefilling(sidecar, 900, stops_after=4) as ticket:
        wait_until(lambda: namespace.await_block(hashed, 1, 30_000).end is AwaitEnd.READABLE)
    answer = ask(cache, prompt, NEW_TOKENS, ticket=ticket)
    assert answer.token_ids == right
    assert CHUNK <= answer.report.account.hits[HitTier.DRAM] < 900 // CHUNK * CHUNK
    assert "another engine" in answer.report.detail


def test_tickets_that_are_of_no_use_are_named(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.2)
    cache = cache_of(small_model(), sidecar.client())
    ticket = cache.prefill(some_prompt(400))
    for tokens, given, reason in ((500, ticket, MissReason.STALE_HINT), (600, "kv1.x", MissReason.KEY_MISMATCH)):
        prompt = some_prompt(tokens)
        answer = ask(cache, prompt, NEW_TOKENS, ticket=given)
        assert answer.token_ids == plain_answer(cache.model, prompt, NEW_TOKENS)
        assert answer.report.account.hits == {} and answer.report.account.misses[reason] == tokens // 64 * 64


@pytest.mark.parametrize("kept", list(SavedBlocks))
def test_in_one_process_and_without_a_store(kept: SavedBlocks, tmp_path: Path) -> None:
    model = small_model()
    prompt = some_prompt(300)
    assert PrefixCache(model).prefill(prompt) == ""
    with open_at(tmp_path / "kv", dram="16MiB") as store:
        cache = cache_of(model, store, kept=kept)
        seen: list[str] = []
        ticket = cache.prefill(prompt, on_ticket=seen.append)
        assert seen == [ticket] and ticket.startswith("kv1.")
        answer = ask(cache, prompt, NEW_TOKENS, ticket=ticket)
        assert answer.report.account.hits == {HitTier.DRAM: 256}
        assert answer.token_ids == plain_answer(model, prompt, NEW_TOKENS)
