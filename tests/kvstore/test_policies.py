"""Policies in a store: chosen by name, told the same as in a replay, and never in the way of what the tables keep."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvstore
from kvstore.config import POLICIES
from kvstore.insight.replay import Replay
from learned_policy import by_worth
from programs import PATHS, run_python
from recorded import made_of
from tiering.policies.adaptive import Adaptive
from tiering.policies.lru import LeafFirstLru
from workbench import MODEL, open_at, random_pages, small_layout

SEED = 11


def prompts(random: Random, count: int) -> list[list[int]]:
    """Chains with common beginnings, some of them hot."""
    made = []
    for _ in range(count):
        first = min(int(random.paretovariate(0.8)), 30)
        made.append([first * 100 + random.choice([0, 0, 0, depth]) for depth in range(random.randrange(1, 14))])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POLICIES, "by worth"])
def test_a_replay_tells_what_the_store_does(name: str, tmp_path: Path) -> None:
    """The same prompts through a store with leases, puts and real pages, and through its tables alone."""
    print("seed", SEED)
    maker = kvstore.policy_named(name) if name in POLICIES else by_worth

    def seeded(names: Any, seed: int) -> Any:
        return maker(names, SEED)

    asked = prompts(Random(SEED), 400)
    hits = []
    with open_at(tmp_path, dram="1MiB", extent="1MiB", dram_policy=seeded) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        room = (1 << 20) // store.core.blocks.spaces[0].block_bytes
        pages = random_pages(ns.layout, 14, seed=SEED)
        for ids in asked:
            tokens = [one for block in ids for one in range(block, block + 64)]
            match = ns.match(tokens)
            with ns.lease(match) as lease:
                hits.append(lease.tokens // 64)
            assert ns.put(tokens, pages).reason is None
        store.check()
        assert store.usage().counters["evicted_blocks"] > 100
    replay = Replay(seeded, room)
    assert replay.run(made_of(*asked)).dram_hits.tolist() == hits
    replay.check()


def test_names_make_policies() -> None:
    assert [kvstore.policy_named(name) for name in POLICIES] == [LeafFirstLru, Adaptive]


@pytest.mark.parametrize("name", POLICIES)
def test_a_store_in_this_process_takes_one(name: str, tmp_path: Path) -> None:
    with kvstore.embedded(str(tmp_path), dram="1MiB", policy=name) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        for first in range(40):
            assert ns.put(list(range(first * 1000, first * 1000 + 320)), random_pages(ns.layout, 5)).stored == 5
        store.check()


def run_without(setup: str, program: str) -> str:
    return run_python(f"import os, sys\n{setup}\n{program}", env={**PATHS, "PATH": ""})


SAY = "import kvstore\ntry: kvstore.policy_named('adaptive')\nexcept kvstore.BadInput as error: print(error)"


def test_without_numba_it_says_what_to_install() -> None:
    assert run_without("sys.modules['numba'] = None", SAY) == (
        "policy='adaptive' needs the package numba; run: pip install 'prefix-kvstore[adaptive]', or take lru"
    )
    assert "NUMBA_DISABLE_JIT forbids; unset it, or take lru" in run_without("os.environ['NUMBA_DISABLE_JIT']='1'", SAY)


def test_what_is_not_compiled_needs_no_numba() -> None:
    program = "import kvstore, kvstore.node\nkvstore.policy_named('lru')\nprint('numba' in sys.modules)"
    assert run_without("", program) == "False"


def test_a_policy_that_was_removed_opens_with_its_successor_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvstore.embedded(str(tmp_path), dram="1MiB", policy="s3-fifo") as store:
        assert isinstance(store.core.blocks.residency.policy, Adaptive)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert line == "policy 's3-fifo' was removed and is 'adaptive' now; name that, or lru"
    program = f"import kvstore\nwith kvstore.open('embedded:{tmp_path}', dram='1MiB', policy='s3-fifo'): print('open')"
    assert run_without("sys.modules['numba'] = None", program) == "open", "it needed no numba before"


def test_each_use_is_told_once(tmp_path: Path) -> None:
    """What a lease grants and what a put adds count; what lies before a lease, or before a put, does not."""
    told: list[tuple[int, int]] = []

    class Told(LeafFirstLru):
        def used(self, chain: Sequence[int], count: int) -> None:
            told.append((len(chain), count))

    with open_at(tmp_path, dram="1MiB", dram_policy=Told) as store:
        ns = store.namespace(model=MODEL, layout=small_layout())
        tokens, pages = list(range(320)), random_pages(ns.layout, 5)
        ns.put(tokens[:192], pages)
        for first_token in (0, 128):
            ns.lease(ns.match(tokens), first_token=first_token).release()
        ns.put(tokens, pages)
        ns.put(tokens, pages)
    assert told == [(3, 3), (3, 3), (3, 1), (5, 2)]
