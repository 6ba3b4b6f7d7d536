"""Several KV groups, ranks, stages and LoRA adapters below vLLM's own scheduler: what one engine stored another one
reads, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.32 is not installed here; see docs/vllm-tier.md")

from engines.models import save_adapter, save_llama
from engines.scheduled_tier import ScheduledTier, adapter_of
from engines.test_vllm_kinds import full, state, window
from engines.tier_engine import prompt_of, tier_of
from service.sidecar import Sidecar
from waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), layers=1)


def stages(*layers: Any, count: int = 1) -> list[dict[str, Any]]:
    """So many stages of these layers each."""
    each = len(layers)
    return [{f"layers.{stage * each + at}.a": one for at, one in enumerate(layers)} for stage in range(count)]


def hybrid(block: int, count: int = 1) -> list[dict[str, Any]]:
    small = full(block, width=16)
    return stages(small, state(block, small), count=count)


SMALL = full(width=16)
WINDOWS = (SMALL, window(40, width=16), window(40, width=16))
LONG_WINDOW = window(20, 32, heads=1, width=16)  # pages have one size
KINDS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = {
    "windows": (stages(*WINDOWS), {"blocks_per_chunk": 2}, 64),
    "windows with blocks of another size": (stages(SMALL, LONG_WINDOW, LONG_WINDOW), {}, 191),
    "windows on two ranks": (stages(*WINDOWS), {"blocks_per_chunk": 2, "ranks": 2}, 64),
    "states of 784 tokens": (hybrid(784), {}, 5 * 784),
    "states of 544 tokens on two ranks": (hybrid(544), {"ranks": 2}, 5 * 544),
    "two stages": (stages(SMALL, SMALL, count=2), {"blocks_per_chunk": 2}, 95),
    "two stages of two ranks with states": (hybrid(544, count=2), {"ranks": 2}, 5 * 544),
}
Begin = Callable[..., ScheduledTier]


@pytest.fixture
def begin(model: Path, tmp_path: Path) -> Iterator[Begin]:
    """Engines at one sidecar."""
    with Sidecar(tmp_path, dram="64MiB") as sidecar:
        tier = tier_of(f"unix:{sidecar.path}", deadline_ms=5000)
        yield lambda kind, **more: ScheduledTier(
            model, **{"specs": KINDS[kind][0], "tier": tier, **KINDS[kind][1], **more}
        )


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_computed_another_one_reads(kind: str, begin: Begin) -> None:
    specs, _, wanted = KINDS[kind]
    prompt = prompt_of(6 * max(spec.block_size for stage in specs for spec in stage.values()), seed=1)
    with begin(kind) as first:
        assert first.ask("computed", prompt) == 0
    with begin(kind) as second:
        assert second.ask("loaded", prompt) == wanted and second.compared
        assert second.ask("of its own", prompt[::-1]) == 0
        second.forget()
        assert second.ask("loaded again", prompt) == wanted
        assert all(job.success for job in second.tier.jobs)


def test_ranks_are_no_stages(begin: Begin) -> None:
    """The same bytes of a chunk, laid out in another way."""
    prompt = prompt_of(96, seed=1)
    with begin("two stages") as staged:
        staged.ask("computed", prompt)
    with begin("two stages", specs=stages(SMALL, SMALL), ranks=2) as ranked:
        assert ranked.ask("another layout's", prompt) == 0
        assert ranked.tier._chunks._spaces[0].chunk_bytes == staged.tier._chunks._spaces[0].chunk_bytes


def test_after_a_reset_no_page_of_another_request_is_stored(begin: Begin) -> None:
    """vLLM offers a running request's chunks anew then, out of pages that left a window and are another's by now."""
    prompt = prompt_of(100, seed=1)
    pages = {"max_model_len": 256, "num_gpu_blocks_override": 56}
    with begin("windows", blocks_per_chunk=4, **pages) as running:
        running.tier.is_storing = False
        running.add("goes on", prompt, outputs=140)
        for _ in range(60):
            running.step()
        running.add("takes pages", prompt_of(180, seed=2))
        while "takes pages" in running.scheduler.requests:
            running.step()
        assert not running.scheduler.reset_prefix_cache(reset_connector=True), "a request is running"
        running.tier.is_storing, offered = True, len(running.tier.stored)
        running.run()
        assert len(running.tier.stored) > offered
    with begin("windows", blocks_per_chunk=4, **pages) as other:
        other.ask("the same", prompt)


def test_an_adapter_is_known_by_its_files(begin: Begin, tmp_path: Path) -> None:
    prompt, place = prompt_of(96, seed=1), tmp_path / "adapter"
    options = {"enable_lora": True, "max_lora_rank": 8}

    def engine_with(files: int, *known: int) -> None:
        save_adapter(place, seed=files)
        with begin("windows", **options) as engine:
            lora = adapter_of("polite", 1, place)
            wait_until(lambda: engine.tier._adapters._digests.of(1, str(place), reads_anew=False)[0])
            assert bool(engine.ask("adapted", prompt, lora=lora, weights=files)) == (files in known)
            assert bool(engine.ask("plain", prompt)) == bool(known)

    engine_with(1)
    engine_with(2, 1)
    engine_with(1, 1, 2)


@pytest.mark.parametrize("what", ["changed", "a number's second name", "a name's second place"])
def test_an_adapter_in_doubt_is_computed(
    what: str, begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, other, prompt = tmp_path / "adapter", tmp_path / "other", prompt_of(96, seed=1)
    for seed, one in enumerate((place, other)):
        save_adapter(one, seed=seed)
    with begin("windows", enable_lora=True, max_lora_rank=8) as engine:
        for number, one in ((1, place), (2, other)):
            wait_until(
                lambda number=number, one=one: engine.tier._adapters._digests.of(number, str(one), reads_anew=False)[0]
            )
        engine.ask("known", prompt, lora=adapter_of("polite", 1, place))
        doubtful = adapter_of("polite", 1, place)
        if what == "changed":
            save_adapter(place, seed=9)
        else:
            doubtful = adapter_of("rude", 1, other) if "number" in what else adapter_of("polite", 2, other)
        engine.forget()
        assert engine.ask("in doubt", prompt, lora=doubtful, weights=3) == 0
        assert not engine.tier.jobs[-1].success
        assert sum("'polite' is not cached" in it.message or "'rude' is" in it.message for it in caplog.records) == 1
        engine.forget()
        assert engine.ask("plain", prompt[::-1]) == 0 and engine.tier.jobs[-1].success


def test_an_adapter_newer_than_the_engine_is_computed(begin: Begin, tmp_path: Path) -> None:
    """vLLM may have read others there before, and does not tell."""
    with begin("windows", enable_lora=True, max_lora_rank=8) as engine:
        save_adapter(tmp_path / "adapter", seed=1)
        lora = adapter_of("late", 1, tmp_path / "adapter")
        wait_until(lambda: engine.tier._adapters._digests.of(1, lora.lora_path, reads_anew=False)[0])
        assert engine.ask("late", prompt_of(96, seed=1), lora=lora) == 0 and not engine.tier.jobs[-1].success
