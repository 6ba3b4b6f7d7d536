"""Who wants blocks to be kept has them kept, also where they were stored before: loaded, or held by the engine."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import kvstore
from engine_adapter.paged.requests import RequestSpec
from kvstore.block.account import HitTier
from kvstore.block.identity import Prompt
from kvstore.node import EmbeddedStore
from paged_engine import PagedEngine, Shape, SharedStore
from workbench import MODEL, ids, random_pages, small_layout

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = 3
SHAPES = {"as it is": Shape(), "8 bits": Shape(codec="int8-kc64", error=1 / 250), "two ranks": Shape(ranks=2)}


@pytest.mark.parametrize("wish", [RequestSpec(ttl=600.0), RequestSpec(priority=100)])
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_wish_holds_for_what_is_stored_already(name: str, forgets: bool, wish: RequestSpec, tmp_path: Path) -> None:
    shape = SHAPES[name]
    with kvstore.embedded(str(tmp_path), dram="64MiB") as store:
        engine = PagedEngine(shape, lambda session: SharedStore(store), Random(1), session="5e" * 16)
        with engine:
            prompt = ids(BLOCKS * engine.layout.block_tokens + 5)
            for number, facts in enumerate((None, None, wish)):
                request = engine.ask(f"r{number}", prompt, 1, facts)
                engine.settle()
                assert (store.usage().dram_retained_bytes > 0) == (facts is wish)
                if forgets:
                    engine.forget()
            tier = HitTier.DRAM if forgets else HitTier.ENGINE
            assert request.account["hits"] == {str(tier): BLOCKS * engine.layout.block_tokens}
            renewed = store.usage().dram_retained_bytes
            engine.ask("new", ids(len(prompt), start=400), 1, wish)
            engine.settle()
            assert store.usage().dram_retained_bytes == 2 * renewed, "as much as of one that is stored with it"


def test_a_renewal_stores_nothing_and_says_how_much_there_is(store: EmbeddedStore) -> None:
    layout = small_layout()
    handle = store.namespace(model=MODEL, layout=layout)
    handle.put(ids(128), random_pages(layout, 2))
    assert handle.renew(handle.hashed(ids(192)), 600.0) == 2
    assert handle.renew(handle.hashed(ids(64, start=500)), 600.0) == 0
    assert handle.renew(Prompt(0, []), 600.0) == 0
    usage = store.usage()
    assert (usage.blocks, usage.reservations) == (2, 0)
