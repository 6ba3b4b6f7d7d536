"""Long prompts through a sidecar: they are found and leased whole, or the limit that bites is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.miss import MissReason
from kvstore.service import messages as m
from kvstore.service import remote_door
from kvstore.service.remote_door import CallLimits
from service.sidecar import Sidecar
from torture.long_prompts import LAYOUT, blank, mixed, prompt
from workbench import MODEL

LONG = 160_000


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="256MiB") as sidecar:
        yield sidecar


def test_long_and_short_prompts_of_one_connection(tmp_path: Path) -> None:
    """All of them are found, leased and loaded whole: how long that takes is for `make torture` to say."""
    with Sidecar(tmp_path, dram="256MiB") as sidecar, sidecar.client() as store:
        told = mixed(store, long=2, short=100, long_tokens=LONG, short_tokens=6400)
    assert told.reasons == Counter({("long", None, LONG // 64, LONG): 2, ("short", None, 100, 6400): 100})


def test_a_client_waits_the_longer_for_an_answer_the_more_it_asks_for(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is for each block is enough, where there is no time for a call as such."""
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        tokens = prompt(LONG, 1)
        assert handle.put(tokens, blank(LONG)).reason is None
        hashed = handle.hashed(tokens)
        store._door._limits = CallLimits(match=0.0, lease=0.0)
        monkeypatch.setattr(remote_door, "BLOCK_SECONDS", 0.0)
        with sidecar.core._lock:  # which its answer waits for
            assert handle.match(hashed).reason is MissReason.DEADLINE
        monkeypatch.setattr(remote_door, "BLOCK_SECONDS", 0.01)  # 25 seconds for these
        match = handle.match(hashed)
        assert (match.blocks, match.reason) == (LONG // 64, None)
        with handle.lease(match, deadline_ms=0) as lease:
            assert (lease.blocks, lease.reply.reason) == (LONG // 64, None)
        asked = handle.submit_match(hashed, deadline_ms=0)
        while (found := asked.poll()) is None:
            pass
        assert (found.blocks, found.reason) == (LONG // 64, None)
        wanted = handle.submit_lease(match, deadline_ms=0)
        while (leased := wanted.poll()) is None:
            pass
        assert (leased.blocks, leased.reply.reason) == (LONG // 64, None)
        leased.release()
        assert handle.put(tokens, blank(LONG)).present == LONG // 64


def test_a_prompt_of_more_blocks_than_a_message_takes(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is kept and found; the line says how much, and why not the rest."""
    monkeypatch.setattr(m, "MAX_KEYS", 200)
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT)
        tokens = prompt(300 * 64 + 5, 1)
        put = handle.put(tokens, blank(300 * 64 + 64))
        assert (put.present, put.stored, put.stopped_at, put.reason) == (0, 200, 200, MissReason.UNSUPPORTED)
        again = handle.put(tokens, blank(300 * 64 + 64))
        assert (again.present, again.stored, again.stopped_at, again.reason) == (200, 0, 200, MissReason.UNSUPPORTED)
        asked = handle.submit_match(tokens, deadline_ms=10_000)
        while (found := asked.poll()) is None:
            pass
        for match in (handle.match(tokens), found):
            assert (match.blocks, match.reason) == (200, MissReason.UNSUPPORTED)
            assert "300 blocks" in match.detail and "first 200" in match.detail and "\n" not in match.detail
            assert match.account.misses == {MissReason.UNSUPPORTED: 6400, MissReason.PARTIAL_BLOCK: 5}
            with handle.lease(match, deadline_ms=10_000) as lease:
                assert handle.get(lease, blank(200 * 64)).tokens == 200 * 64
        assert store._door.persist(handle.number, handle.hashed(tokens).keys, 1.0) == (0, MissReason.UNSUPPORTED)
        elsewhere = handle.match(prompt(300 * 64, 2))
        assert (elsewhere.blocks, elsewhere.reason) == (0, MissReason.ABSENT), "the store's own reason comes first"
