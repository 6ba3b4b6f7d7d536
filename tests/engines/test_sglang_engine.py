"""A whole SGLang with the store behind its HiCache, on a CPU: its answers are those that it gives without a store."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.conftest import started
from engines.models import save_llama
from engines.sglang_whole import WholeEngines
from engines.tier_engine import SMALL
from kvstore.status.tree import LookupCounts
from service.sidecar import Sidecar
from waiting import wait_until

RNG = random.Random(1)
HEADS = [[RNG.randrange(1000) for _ in range(length)] for length in (0, 128, 300, 520)]
PROMPTS = [HEADS[at % 4] + [RNG.randrange(1000) for _ in range(RNG.randrange(70, 500))] for at in range(20)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeEngines]:
    with WholeEngines(save_llama(tmp_path_factory.mktemp("model"))) as made:
        yield made


@pytest.fixture(scope="module")
def right(engines: WholeEngines) -> list[list[int]]:
    """What an engine without a store answers, to each prompt by itself."""
    with engines.started(disable_radix_cache=True) as engine:
        return [tokens for prompt in PROMPTS for tokens, _ in engine.answer([prompt])]


def asked(engine: WholeEngines, right: list[list[int]]) -> list[dict[str, int]]:
    """What was cached of each prompt, all of which are answered right."""
    told = [engine.answer([prompt])[0] for prompt in PROMPTS]
    assert [tokens for tokens, _ in told] == right
    return [cached for _, cached in told]


def pages_of(page: int) -> int:
    return len({tuple(prompt[:end]) for prompt in PROMPTS for end in range(page, len(prompt) + 1, page)})


@pytest.mark.parametrize(
    ("layout", "page", "first", "second"),
    [("layer_first", 64, 1, 0), ("page_first_direct", 16, 0, 1), ("page_first_direct", 256, 1, 1)],
)
def test_a_restarted_engine_finds_what_the_first_one_stored(
    layout: str, page: int, first: int, second: int, engines: WholeEngines, right: list[list[int]], tmp_path: Path
) -> None:
    """first, second: `interface_v1` of each; 0 if SGLang itself copies pages out of its host pool."""
    with Sidecar(tmp_path, dram="512MiB") as sidecar:
        url = f"unix:{sidecar.path}"
        with engines.started(url, layout, first, page_size=page) as engine:
            assert not any(cached.get("storage") for cached in asked(engine, right)), "nothing is there yet"
            wait_until(lambda: sidecar.core.usage().blocks >= pages_of(page))
        with engines.started(url, layout, second, page_size=page) as engine:
            cached = asked(engine, right)
        whole = [(len(prompt) - 1) // page * page for prompt in PROMPTS]
        assert [sum(one.get(tier, 0) for tier in ("device", "host", "storage")) for one in cached] == whole
        loaded = sum(one.get("storage", 0) for one in cached)
        counts = LookupCounts.summed(looked for looked, _ in sidecar.counting.of_namespaces().values())
        assert loaded == page * pages_of(page) == counts.hit_tokens["dram"], "and the sidecar counts what SGLang does"
        missed, repeated = sum(counts.miss_tokens.values()), 0 if second else counts.found_tokens  # asked page by page
        assert counts.asked_tokens == loaded + missed + repeated


def test_answers_stay_right_when_caches_evict_and_the_sidecar_is_killed(
    engines: WholeEngines, right: list[list[int]], tmp_path: Path
) -> None:
    """SGLang's own caches hold 2,048 and 3,000 tokens of 10,000, and the sidecar's DRAM lacks room, too."""
    with (
        started(tmp_path.name, *SMALL) as sidecar,
        engines.started(sidecar.url, max_total_tokens=2048, hicache_ratio=1.5) as engine,
    ):

        def stored() -> int:
            """Tokens that came from the store, of prompts that are answered right."""
            return sum(cached.get("storage", 0) for cached in asked(engine, right))

        assert stored() == 0
        wait_until(lambda: stored() > 0)
        answers = list[list[int]]()
        together = threading.Thread(
            target=lambda: answers.extend(tokens for tokens, _ in engine.answer(PROMPTS, tokens=32))
        )
        together.start()
        sidecar.kill_all()
        together.join()
        assert [tokens[:8] for tokens in answers] == right
        assert stored() == 0, "nor is anything waited for"
        sidecar.start()
        wait_until(lambda: stored() > 0)
