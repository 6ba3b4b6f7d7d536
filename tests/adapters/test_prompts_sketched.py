"""An engine's connector sketches prompts that missed much, and people are told where they part."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from paged_engine import PagedEngine, Shape
from service.sidecar import Sidecar
from waiting import wait_until

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = Shape(pages=160, budget=512, own_cache=False)
TOKENS = 1500


def prompt(number: int) -> list[int]:
    """A time at token 100, and the same from token 106 on."""
    stem = [one % 997 for one in range(7, 7 + 13 * TOKENS, 13)]
    return [*stem[:100], *(900_000 + 10 * number + one for one in range(6)), *stem[106:]]


def run(sidecar: Sidecar, prompts: list[list[int]], all_sketched: int, **settings: Any) -> None:
    """Until so many sketches have come in all: what a connection had to say when it is closed may be lost."""
    with PagedEngine(SHAPE, sidecar.client, Random(1), session="5e" * 16, **settings) as engine:
        for number, tokens in enumerate(prompts):
            engine.add(f"r{number}", tokens, 2)
            engine.run()
            engine.half._news.sampler.settle()
        engine.settle()
        wait_until(lambda: sum(mine.prompts for mine in sidecar.prefixes._tenants.values()) == all_sketched)
    sidecar.prefixes.step()
    sidecar.prefixes.check()


def test_a_time_in_prompts_is_shown_at_its_token(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="32MiB") as sidecar:
        run(sidecar, [prompt(number) for number in range(5)], 5, sketch_every=1)
        (one,) = sidecar.admin.prefixes().partings
        assert (one.kind, one.place, one.last_place, one.earlier_tokens, one.tokens) == ("changed", 100, 100, 6, 6)
        assert one.is_exact and one.prompts == 4 and one.equal_tokens == TOKENS - 106
        assert one.sentence.endswith("Move what changes to the end.")


def test_a_prompt_that_was_found_is_not_sketched_nor_any_where_nobody_wants_it(tmp_path: Path) -> None:
    with Sidecar(tmp_path, dram="32MiB") as sidecar:
        run(sidecar, [prompt(1), prompt(1), prompt(1)[:1000]], 1, sketch_every=1)
        run(sidecar, [prompt(2)], 1, sketch_every=0)
