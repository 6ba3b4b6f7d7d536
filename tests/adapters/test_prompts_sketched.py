"""An engine's connector sketches prompts that missed much, and people are told where they part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from paged_engine import PagedEngine, Shape
from service.sidecar import Sidecar

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(pages=160, budget=512, own_cache=False)
TOKENS = 1500


def prompt(number: int) -> list[int]:
    """A time at token 100, and the same from token 106 on."""
    stem = [one % 997 for one in range(7, 7 + 13 * TOKENS, 13)]
    return [*stem[:100], *(900_000 + 10 * number + one for one in range(6)), *stem[106:]]


def engine_of(sidecar: Sidecar, sketch_every: int) -> PagedEngine:
    return PagedEngine(SHAPE, sidecar.client, Random(1), session="5e" * 16, sketch_every=sketch_every)


def sketched_after(engine: PagedEngine, sidecar: Sidecar, prompt: Sequence[int]) -> int:
    """Run it; returns how many sketches the sidecar has then, of all prompts."""
    engine.add(f"r{len(engine.requests)}", prompt, 2)
    engine.run()
    engine.half._news.sampler.settle()
    namespace = engine.half._namespace.now()
    assert namespace is not None
    namespace.match(prompt[:16])  # messages of a connection are read in their order
    return sum(mine.prompts for mine in sidecar.prefixes._tenants.values())


def test_a_time_in_prompts_is_shown_at_its_token(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="32MiB") as sidecar:
        with engine_of(sidecar, sketch_every=1) as engine:
            # A sketch is lost where the sidecar is late, as on a busy machine: then one more prompt comes.
            counts = [sketched_after(engine, sidecar, prompt(0))]
            while counts[-1] < 5 and len(counts) < 40:
                counts.append(sketched_after(engine, sidecar, prompt(len(counts))))
            assert counts[-1] == 5
            engine.settle()
        sidecar.prefixes.step()
        sidecar.prefixes.check()
        (one,) = sidecar.admin.prefixes().partings
        assert (one.kind, one.place, one.last_place, one.earlier_tokens, one.tokens) == ("changed", 100, 100, 6, 6)
        assert one.is_exact and one.prompts == 5 - counts[0] and one.equal_tokens == TOKENS - 106
        assert one.sentence.endswith("Move what changes to the end.")


def test_a_prompt_that_was_found_is_not_sketched_nor_any_where_no_engine_is_told_to(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="32MiB") as sidecar:
        with engine_of(sidecar, sketch_every=1) as engine:
            missed = next(one for one in range(40) if sketched_after(engine, sidecar, prompt(one)) == 1)
            engine.settle()
            assert sketched_after(engine, sidecar, prompt(missed)) == 1
            assert sketched_after(engine, sidecar, prompt(missed)[:1000]) == 1
        with engine_of(sidecar, sketch_every=0) as engine:
            assert sketched_after(engine, sidecar, prompt(100)) == 1
