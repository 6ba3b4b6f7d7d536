"""Every kind of KV below vLLM's own scheduler: what is read is right, hits are found, and no boundary is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from engine_adapter.paged.worker import PagedWorker
from engines import models
from kvstore.block.account import MissReason
from scheduled_engine import VOCAB, ScheduledEngine, Writes
from service.sidecar import Sidecar

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not models.tells_states(), reason="this vLLM does not tell where states are whole"),
]

SEED = int(os.environ.get("KINDS_SEED", "0")) or SystemRandom().randrange(1 << 30)
STEPS = int(os.environ.get("KINDS_STEPS", "150"))
HISTORIES = int(os.environ.get("KINDS_HISTORIES", "1"))
"""In which something was loaded, for each case and share of failing loads."""
PROMPT = [(7 * at) % 900 for at in range(300)]


def full(block: int = 16, heads: int = 2, width: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=width, dtype=torch.bfloat16)


def window(tokens: int, block: int = 16, heads: int = 2, width: int = 64) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=width, dtype=torch.bfloat16, sliding_window=tokens
    )


def state(block: int = 16, page: FullAttentionSpec | None = None, **more: Any) -> MambaSpec:
    """As large as a page of `full`, or as this one, with what pads it."""
    return MambaSpec(
        block_size=block,
        shapes=((3, 32), (4, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=(page or full()).page_size_bytes,
        **more,
    )


def latents(width: int, block: int = 64, row: int = 1, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=width, dtype=torch.bfloat16, tokens_per_state=row, **more
    )


def latent_window(tokens: int, block: int, width: int = 64) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=width, dtype=torch.bfloat16, sliding_window=tokens, alignment=576
    )


def chunks(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=tokens
    )


KINDS: dict[str, tuple[dict[str, KVCacheSpec], dict[str, Any]]] = {
    "full and states": ({"a": full(), "b": state(), "c": state(), "d": state()}, {}),
    "states of several blocks": ({"a": full(), "b": state(64)}, {}),
    "states of several blocks, second runner": ({"a": full(), "b": state(64)}, {"second_runner": True}),
    "states, with drafts": ({"a": full(), "b": state(num_speculative_blocks=3)}, {"drafts": 3}),
    "states of two ranks": ({"a": full(), "b": state()}, {"shards": 2}),
    "two stages of two ranks": ({"a": full(), "b": state(), "c": full(), "d": state()}, {"shards": 4, "stages": 2}),
    "tokens of two ranks in turn": ({"a": full(), "b": full()}, {"shards": 2, "context": (2, 1), "proven": True}),
    "eight tokens of four ranks in turn": (
        {"a": latents(576, 16), "b": latents(66, 16)},
        {"shards": 4, "context": (4, 8)},
    ),
    "tokens in turn, states of all": ({"a": full(), "b": state(32)}, {"shards": 2, "context": (2, 4)}),
    "nothing but states": ({"b": state(), "c": state()}, {}),
    "windows": ({"a": full(), "b": window(64), "c": window(64)}, {}),
    "pages of two sizes": ({"a": full(width=32), "b": window(50), "c": window(50)}, {}),
    "chunks": ({"a": full(), "b": chunks(96)}, {}),
    "full attention": ({"a": full(), "b": full()}, {"proven": True}),
    "heads of two widths": ({"a": full(), "b": full(heads=1, width=32)}, {"proven": True}),
    "full attention and an indexer": ({"a": full(), "b": latents(66, 16)}, {}),
    "latents": ({"a": latents(576), "b": latents(576)}, {"pages": 30}),
    "latents and an indexer": ({"a": latents(576), "b": latents(66)}, {"pages": 30}),
    "latents and states": ({"a": latents(256, 16), "b": state(), "c": state()}, {}),
    "latents of 4 and 128 tokens, windows": (
        {
            "every 4": latents(128, 128, 4, alignment=576),
            "indexer": latents(32, 128, 4, alignment=576),
            "every 128": latents(128, 128, 128, alignment=576),
            "window": latent_window(100, 64),
            "sums of 4": latent_window(8, 4),
            "sums of 128": latent_window(128, 8),
        },
        {"layout": "BLHNC", "pages": 300},
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models.prepare()
    yield str(models.save_llama(tmp_path_factory.mktemp("model"), layers=1))


Begin = Callable[..., ScheduledEngine]


@pytest.fixture
def begin(llama: str, tmp_path: Path) -> Iterator[Begin]:
    """Engines at one sidecar, each at its end before the next one begins."""
    begun: list[ScheduledEngine] = []
    print(f"KINDS_SEED={SEED}")
    with Sidecar(tmp_path, dram="8MiB") as sidecar:

        def one(name: str, seed: object = "", **more: Any) -> ScheduledEngine:
            for earlier in begun:
                earlier.close()
            specs, options = KINDS[name]
            engine = ScheduledEngine(
                llama, specs, f"unix:{sidecar.path}", Random(f"{SEED} {name} {seed}"), **options, **more
            )
            engine.evict = sidecar.store.evict
            begun.append(engine)
            return engine

        yield one
        begun[-1].close()


def drive(engine: ScheduledEngine, steps: int) -> None:
    """Prompts that share prefixes, conversations that go on, some given up, evictions, and an engine that forgets."""
    random = engine.random
    stems = [[random.randrange(VOCAB) for _ in range(300)] for _ in range(3)]
    asked: list[list[int]] = []
    for number in range(steps):
        if len(engine.streams) < 6 and random.random() < 0.4:
            prompt = random.choice(asked if asked and random.random() < 0.3 else stems)[: random.randrange(1, 300)]
            prompt = prompt + [random.randrange(VOCAB) for _ in range(random.randrange(1, 60))]
            engine.add(f"r{number}", prompt, random.choice([1, 3, 20, 70]))
            asked.append(engine.streams[f"r{number}"][0])
        chance = random.random()
        if chance < 0.02:
            engine.evict(random.randrange(1, 6))
        elif chance < 0.06:
            engine.forget()
        elif chance < 0.3 and (given_up := [*engine.wrong] or [*engine.streams][: chance < 0.08]):
            engine.abort(random.choice(given_up))  # best before it has computed what did not come
        engine.step()
    engine.run()
    engine.settle()


@pytest.mark.parametrize(("load", "failing"), [("auto", 0.0), ("auto", 0.3), ("sync", 0.3)])
@pytest.mark.parametrize("name", KINDS)
def test_whatever_is_read_is_right(
    begin: Begin, name: str, load: str, failing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where loads fail half-way: their pages are then somebody else's, or computed."""
    engine = begin(name, failing, load=load, save_patience_ms=0)  # else saves wait for steps that never end
    bring, draw = PagedWorker._bring, Random(SEED)

    def spoilt(self: PagedWorker, *given: Any) -> Any:
        return bring(self, *given) if draw.random() >= failing else (given[-1].first_token, MissReason.CORRUPT)

    monkeypatch.setattr(PagedWorker, "_bring", spoilt)
    hits = failed = histories = 0
    for _ in range(30 * HISTORIES):
        drive(engine, STEPS)
        engine.forget()
        counts = engine.total()
        histories += counts["hit_dram"] > hits and counts["failed_loads"] >= failed + (failing > 0)
        hits, failed = counts["hit_dram"], counts["failed_loads"]
        if histories == HISTORIES:
            break
    print(f"{histories} histories: {counts}")
    assert histories == HISTORIES and counts["saved_blocks"] > 0, counts
    assert sum(tokens for name, tokens in counts.items() if name.startswith(("hit_", "miss_"))) == counts["asked"]
    assert engine.half._refused is None and not engine.half._is_broken


def test_no_page_is_saved_that_vllm_writes_to_meanwhile(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that vLLM copies a state into stand in no request's table, and the second runner says too late which."""
    monkeypatch.setattr(PagedWorker, "_pause", lambda worker: None)
    waiting = begin("states of several blocks")
    waiting.add("a", PROMPT)
    waiting.run()
    (save, *_) = waiting.workers[0]._worker._saves
    output = waiting.scheduler.schedule()
    output.kv_cache_block_copies = [KVCacheBlockCopy(1, save.order.tables[0].pages[0])]
    assert save.order.number in waiting.connector.build_connector_meta(output).step.cancelled_saves
    at_once = begin("states of several blocks, second runner")
    at_once.add("a", PROMPT)
    at_once.run()
    assert not at_once.workers[0]._worker._saves and at_once.total()["dropped_saves"] > 0


@pytest.mark.parametrize(("name", "block"), [("full and states", 16), ("states of several blocks", 64)])
def test_where_prompts_part_a_state_is_kept(begin: Begin, name: str, block: int) -> None:
    """The second one that parts there finds it. Where a prompt ended, the first one does."""
    engine = begin(name)
    assert engine.ask("a", PROMPT) == 0
    engine.forget()
    assert engine.ask("b", [*PROMPT, 1, 2]) == 299 // block * block
    found = []
    for at, name in enumerate("cde"):
        engine.forget()
        found.append(engine.ask(name, [*PROMPT[:150], *(at + 1 for _ in range(50))]))
    assert found == [0, 150 // block * block, 150 // block * block]
    assert engine.total()["miss_no_state"] >= 150 // block * block


def test_a_load_that_failed_is_not_promised_again(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begin("full and states")
    engine.ask("a", PROMPT)
    engine.forget()
    bring = PagedWorker._bring

    def without_states(*given: Any) -> Any:
        return bring(*given) if given[-1].state else (0, MissReason.CORRUPT)

    monkeypatch.setattr(PagedWorker, "_bring", without_states)
    assert engine.ask("b", [*PROMPT, 1]) == 288, "it was promised, once"
    assert engine.total()["miss_corrupt"] == 288 and "b" in engine.over


@pytest.mark.parametrize("together", [True, False])
def test_nobody_shares_pages_that_a_failed_load_left_behind(
    begin: Begin, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM names them before the step that loads them; the request that would compute them again is given up."""
    engine = begin("heads of two widths", load="sync")
    engine.ask("a", PROMPT)
    engine.forget()
    monkeypatch.setattr(PagedWorker, "_bring", lambda self, *given: (given[-1].first_token, MissReason.CORRUPT))
    for name in ("given up", "other")[: 1 + together]:
        engine.add(name, [*PROMPT, len(name)])
    while "given up" not in engine.wrong:
        engine.step()
    engine.abort("given up")
    if not together:
        engine.add("other", [*PROMPT, 5])
    engine.run()
    assert engine.over[-1] == "other"


def test_another_state_is_found_by_the_first_hit(begin: Begin) -> None:
    """It is computed all the same, and compared; where nothing is wrong, hits are loaded after two of them."""
    engine = begin("full and states", audit=0.001)
    engine.ask("a", PROMPT)
    brought = []
    for name in "bcd":
        engine.forget()
        brought.append(engine.ask(name, [*PROMPT, 1]))
    assert brought == [0, 0, 288] and engine.total()["audited_exact"] == 4
    other = begin("full and states", audit=0.001, state_salt=1)
    assert other.ask("e", [*PROMPT, 1]) == 0
    assert other.half._refused is not None and other.half._refused[0] is MissReason.AUDIT
    assert other.total()["audited_drifted"] == 1


@pytest.mark.parametrize("name", ["full attention", "full and states", "states of two ranks"])
def test_pages_that_moved_are_read_and_written_where_they_are(begin: Begin, name: str) -> None:
    engine, other = begin(name, save_patience_ms=0), PROMPT[::-1]
    assert engine.ask("a", PROMPT) == 0
    engine.settle()
    engine.move_pages()
    assert engine.ask("b", [*PROMPT, 1]) >= 256 and engine.ask("c", other) == 0
    engine.settle()
    engine.move_pages()
    assert engine.ask("d", [*other, 1]) >= 256
    assert not engine.total()["failed_loads"]


def test_pages_that_moved_and_are_of_no_form_are_left_alone(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begin("full attention", save_patience_ms=0)
    assert engine.ask("a", PROMPT) == 0
    engine.settle()
    monkeypatch.setattr(Writes, "do_kv_cache_update", lambda *_: None)
    engine.move_pages()
    saved = engine.total()["saved_blocks"]
    assert engine.ask("b", [*PROMPT, 1]) == 256 and engine.ask("c", PROMPT[::-1]) == 0
    told = engine.total()
    assert told["miss_unsupported"] == 256, "what was promised before it was known was computed"
    assert told["saved_blocks"] == saved
