"""A whole vLLM on the CPU with the store as its secondary tier: what it computes once it does not compute again, what
it loads is what it computed, and without the store it answers the same.

One engine for all, which is the long part; the sidecar is another process, and it is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from engine_adapter.chunks import ChunkRun, chunk_key, chunk_planes
from engine_adapter.vllm_tier import CHUNKS_METRIC
from engines.conftest import Sidecar, started
from engines.models import save_llama
from engines.tier_engine import CHUNK_TOKENS, SMALL, Engine, engine, opened, prompt_of, tier_of
from kvstore.block.identity import Prompt
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from waiting import wait_until

TOKENS, CHUNKS = 1000, 15
WHOLE = CHUNKS * CHUNK_TOKENS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with started("tier", *SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def plain_answers(model: Path) -> dict[int, tuple[int, ...]]:
    """What an engine without a connector answers, by the prompt's seed."""
    with engine(model, None) as plain:
        return {seed: plain.generate(prompt_of(TOKENS, seed))[1] for seed in range(1, 9)}


@pytest.fixture(scope="module")
def vllm_engine(model: Path, sidecar: Sidecar, plain_answers: dict[int, tuple[int, ...]]) -> Iterator[Engine]:
    assert len(set(plain_answers.values())) == len(plain_answers), "a prompt's answer depends on all of it"
    # A chunk may take its time from disk: on a busy machine a late one would be a miss, which is not what is tested.
    with engine(model, [tier_of(sidecar.url, deadline_ms=5000)]) as running:
        yield running


@pytest.fixture
def ready(vllm_engine: Engine, sidecar: Sidecar) -> Engine:
    """The engine with nothing in its own memory, and a sidecar that answers it."""
    if not sidecar.is_started:
        sidecar.start()
    opened(vllm_engine.tier)
    vllm_engine.tier.is_storing = True
    until_it_hits(vllm_engine, prompt_of(CHUNK_TOKENS + 1, seed=999), CHUNK_TOKENS)
    vllm_engine.reset()
    return vllm_engine


def until_it_hits(
    running: Engine, prompt: list[int], tokens: int, right: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """A client calls a sidecar again after a pause: generate until that many tokens come from the store, and be right
    meanwhile, too. What is computed is in the store after that, if there is one."""

    def hits() -> tuple[int, ...] | None:
        running.reset()
        cached, answer = running.generate(prompt)
        assert right in (None, answer)
        return answer if cached == tokens else None

    return wait_until(hits)


def test_what_was_computed_once_is_loaded(ready: Engine, plain_answers: dict[int, tuple[int, ...]]) -> None:
    prompt, answer = prompt_of(TOKENS, seed=1), plain_answers[1]
    assert ready.generate(prompt) == (0, answer)
    ready.reset()
    before = len(ready.tier.loaded)
    assert ready.generate(prompt) == (WHOLE, answer)
    assert len(ready.tier.loaded) - before == CHUNKS
    ready.reset()
    longer = [*prompt[: 10 * CHUNK_TOKENS], *prompt_of(300, seed=2)]
    assert ready.generate(longer)[0] == 10 * CHUNK_TOKENS, "as far as the prefix is the same"
    ready.reset()
    assert ready.generate(prompt_of(TOKENS, seed=3))[0] == 0
    assert all(job.success for job in ready.tier.jobs)
    metrics = [one for one in ready.llm.get_metrics() if one.name.startswith(CHUNKS_METRIC)]
    assert {"loaded", "stored", "held", "missing"} <= {one.labels.get("outcome") for one in metrics}, metrics


def test_what_the_primary_tier_evicted_is_loaded(ready: Engine, plain_answers: dict[int, tuple[int, ...]]) -> None:
    prompt, answer = prompt_of(TOKENS, seed=4), plain_answers[4]
    assert ready.generate(prompt) == (0, answer)
    for seed in range(40, 46):  # 64 chunks fit
        ready.generate(prompt_of(TOKENS, seed=seed))
    assert ready.llm.reset_prefix_cache()
    before = len(ready.tier.loaded)
    assert ready.generate(prompt) == (WHOLE, answer)
    assert len(ready.tier.loaded) - before == CHUNKS


def test_other_bytes_under_the_same_names_change_the_answer(
    ready: Engine, sidecar: Sidecar, plain_answers: dict[int, tuple[int, ...]]
) -> None:
    """The negative control: if what is loaded were not used, the answer would not change."""
    prompt = prompt_of(TOKENS, seed=5)
    first = len(ready.tier.stored)
    sidecar.kill_all()
    _, answer = ready.generate(prompt)
    ready.reset()
    names = ready.tier.stored[first:]
    assert len(names) == CHUNKS and not any(job.success for job in ready.tier.jobs[-1:])
    sidecar.start()
    with kvstore.open(sidecar.url) as store:
        handle = space_like(store, ready)
        for name in names:
            numbers = np.frombuffer(ready.tier.bytes_of[name], np.float32)[::-1].copy()
            put(handle, name, numbers.view(np.uint8))
    changed = until_it_hits(ready, prompt, WHOLE)
    assert changed != answer == plain_answers[5]


def test_without_the_sidecar_it_computes_the_same(
    ready: Engine, sidecar: Sidecar, plain_answers: dict[int, tuple[int, ...]]
) -> None:
    prompt, answer = prompt_of(TOKENS, seed=6), plain_answers[6]
    assert ready.generate(prompt) == (0, answer)
    ready.reset()
    assert ready.generate(prompt) == (WHOLE, answer)
    sidecar.kill_all()
    ready.reset()
    assert ready.generate(prompt) == (0, answer)
    sidecar.start()
    until_it_hits(ready, prompt, WHOLE, answer)


def test_after_an_orderly_end_all_is_found_on_disk_but_what_is_damaged_there(ready: Engine, sidecar: Sidecar) -> None:
    prompt = prompt_of(TOKENS, seed=7)
    _, answer = ready.generate(prompt)
    ready.reset()
    names, payloads = ready.tier.stored[-CHUNKS:], ready.tier.bytes_of  # in no order
    sidecar.stop()
    assert ready.generate(prompt) == (0, answer)
    stored = len(ready.tier.stored)
    sidecar.start()
    ready.tier.is_storing = False  # else it would be stored anew before it is found
    until_it_hits(ready, prompt, WHOLE, answer)
    assert len(ready.tier.stored) == stored
    sidecar.stop()
    assert damage(sidecar.directory, payloads[names[6]]) == 1
    sidecar.start()
    first = len(ready.tier.loaded)

    def loads() -> bool:
        ready.reset()
        cached, again = ready.generate(prompt)
        assert again == answer and cached < WHOLE and cached % CHUNK_TOKENS == 0
        return len(ready.tier.loaded) > first

    wait_until(loads)
    assert names[6] not in ready.tier.loaded[first:]
    ready.tier.is_storing = True
    until_it_hits(ready, prompt, WHOLE, answer)  # computed and stored again, it is good again


def space_like(store: kvstore.SidecarStore | kvstore.EmbeddedStore, running: Engine) -> NamespaceHandle:
    """The tier's namespace, as another client of the same tenant."""
    (space,) = running.tier._chunks._spaces
    named = space.handle.namespace
    return store.namespace(
        model=named.model, layout=named.layout, weights_epoch=named.weights_epoch, config=named.config
    )


def put(handle: NamespaceHandle, name: bytes, payload: np.ndarray) -> None:
    run = ChunkRun(payload.ctypes.data, payload.nbytes, payload.nbytes)
    pages = Pages(chunk_planes(handle.block_tokens, [run], 1), [0], handle.block_tokens)
    assert handle.put(Prompt(handle.block_tokens, [chunk_key(handle, name)]), pages).stored == 1


def damage(data: Path, payload: bytes) -> int:
    """Flip a bit in each copy of this payload on disk; how many there were. Found by its last bytes, which lie behind
    each other in a frame as they do in memory."""
    found = 0
    for path in (data / "nvme").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(payload[-4096:])) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                byte = file.read(1)[0]
                file.seek(at + 1000)
                file.write(bytes([byte ^ 8]))
            found += 1
    return found
