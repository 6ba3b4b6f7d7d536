"""PrefixCache on real transformers models with random weights: cold, warm, batched, refused, failing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import Unreachable
from kvstore.block.identity import Namespace
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.client.socket_door import CallLimits
from kvstore.node import EmbeddedDoor, EmbeddedStore
from service.test_serve import serving
from service.test_silent_sidecar import AT_ONCE, LONG, stop, stopped
from waiting import wait_until
from workbench import bench

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf_cache import PrefixCache, SavedBlocks  # noqa: E402
from hf_models import OWN_HEADS, Each, ask, ask_all, plain_answer, refused  # noqa: E402
from hf_models import small_model as model_of  # noqa: E402
from hf_models import some_prompt as prompt_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def cache_of(model: Any, store: Any = None, **options: Any) -> PrefixCache:
    """A cache with cells of 256 tokens, whatever the default is: the figures below are counted on it. Bit for bit."""
    return PrefixCache(model, store, **{"chunk_tokens": 256, "codec": "raw", **options})


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of()


def reasons(account: Any) -> dict[str, int]:
    """Tiers and reasons by name, in one dictionary."""
    found = account.to_dict()
    return {**found["hits"], **found["misses"]}


# Cold and warm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tokens", [1, 63, 256, 257, 700])
def test_cold_answers_are_those_of_plain_generate_and_the_model_is_left_as_it_was(family: str, tokens: int) -> None:
    model, prompt = model_of(family), prompt_of(tokens)
    expected = plain_answer(model, prompt, 16)
    answer = ask(cache_of(model), prompt, 16)
    assert answer.token_ids == expected == plain_answer(model, prompt, 16)
    assert model.config._attn_implementation == "sdpa"
    assert len(set(answer.token_ids)) > 4, "these weights repeat themselves: nothing would be noticed"
    assert reasons(answer.report.account) == {"disabled": tokens}


def test_restored_kv_is_what_cold_prefill_computes_bit_for_bit(llama: Any, store: EmbeddedStore) -> None:
    cache, kept = cache_of(llama, store), {"return_dict_in_generate": True, "max_new_tokens": 1}
    computed, restored = (cache.generate(prompt_of(700), **kept).past_key_values for _ in range(2))
    assert cache.report.restored_tokens == 640
    for one, other in zip(computed.layers, restored.layers, strict=True):
        assert torch.equal(one.keys[..., :640, :], other.keys[..., :640, :])
        assert torch.equal(one.values[..., :640, :], other.values[..., :640, :])


@pytest.mark.parametrize("kept", list(SavedBlocks))
def test_what_is_found_is_not_computed(store: EmbeddedStore, kept: SavedBlocks) -> None:
    """A shared beginning of 256 tokens is found on the defaults of every device, whose cells are larger."""
    model, passes = model_of(), list[int]()
    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: passes.append(given[0].shape[1]))
    cache, shared = cache_of(model, store, kept=kept, chunk_tokens=2048), prompt_of(256)
    ask(cache, shared + prompt_of(100, seed=1), 1)
    before = len(passes)
    answer = ask(cache, shared + prompt_of(120, seed=2), 3)
    computed = 120 if kept is SavedBlocks.EVERYTHING else 376
    assert answer.report.computed_tokens == computed and sum(passes[before:]) >= computed + 2
    assert [count for count in passes[before:] if count not in (8, 16)] == [computed, 1, 1], "beside the probe's"


@pytest.mark.parametrize(
    ("kept", "tokens", "second"),
    [
        ("everything", 63, {"partial_block": 63}),
        ("everything", 64, {"grid": 63, "last_token": 1}),
        ("everything", 65, {"dram": 64, "partial_block": 1}),
        ("everything", 256, {"dram": 192, "grid": 63, "last_token": 1}),
        ("everything", 350, {"dram": 320, "partial_block": 30}),
        ("whole_chunks", 65, {"absent": 64, "partial_block": 1}),
        ("whole_chunks", 129, {"dram": 128, "partial_block": 1}),
        ("whole_chunks", 256, {"dram": 128, "absent": 128}),
        ("whole_chunks", 350, {"dram": 256, "absent": 64, "partial_block": 30}),
    ],
)
def test_every_token_is_accounted_for(
    llama: Any, store: EmbeddedStore, kept: str, tokens: int, second: dict[str, int]
) -> None:
    cache = cache_of(llama, store, chunk_tokens=128, kept=kept)
    whole, rest = tokens // 64 * 64, tokens % 64
    first = {**({"absent": whole} if whole else {}), **({"partial_block": rest} if rest else {})}
    for expected in (first, second):
        report = ask(cache, prompt_of(tokens), 1).report
        assert reasons(report.account) == expected
        assert report.to_dict()["asked"] == tokens
        assert report.grid_tokens == (128 if kept == "whole_chunks" else 64)


def test_a_store_that_is_closed_under_way_keeps_nothing_more_and_is_cold(llama: Any, tmp_path: Path) -> None:
    store = kvstore.open(f"embedded:{tmp_path}", dram="16MiB")
    cache, prompt, other = cache_of(llama, store), prompt_of(300), prompt_of(700)
    expected = ask(cache, prompt, 4).token_ids
    answer = ask(cache, other, 4, stopping_criteria=[Each(lambda count: store.close())])
    assert answer.token_ids == ask(cache_of(llama), other, 4).token_ids
    assert answer.report.saved_blocks == 0, "nothing is saved before the first token"
    assert set(answer.report.put_reasons) == {MissReason.DISABLED} and not answer.report.faults
    for closed in (cache, cache_of(llama, store)):
        answer = ask(closed, prompt, 4)
        assert answer.token_ids == expected
        assert reasons(answer.report.account) == {"disabled": 300}
        assert not answer.report.faults and not answer.report.put_reasons


# Chats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "chunk_tokens", "tokens", "new_tokens", "blocks"),
    [
        ("everything", 64, 100, 27, 1),
        ("everything", 64, 100, 28, 1),
        ("everything", 64, 100, 29, 2),
        ("whole_chunks", 128, 350, 130, 4),
    ],
)
def test_a_block_is_kept_once_its_last_token_was_computed(
    llama: Any, store: EmbeddedStore, kept: str, chunk_tokens: int, tokens: int, new_tokens: int, blocks: int
) -> None:
    """The newest token was chosen, and its KV is not in the buffers before the next step. Of whole chunks only those
    of the prompt are kept."""
    warm, prompt = cache_of(llama, store, kept=kept, chunk_tokens=chunk_tokens), prompt_of(tokens)
    answer = ask(warm, prompt, new_tokens)
    assert answer.report.saved_blocks == blocks
    turn = prompt + answer.token_ids + prompt_of(40, seed=1)
    assert ask(warm, turn, 1).report.restored_tokens == 64 * blocks


# Batches and streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama, eager"])
def test_a_ragged_batch(name: str, store: EmbeddedStore) -> None:
    """Also of a model with its own attention. Each answer's times are reported."""
    model = model_of(name)
    cold, warm = cache_of(model), cache_of(model, store)
    prompts = [prompt_of(300), prompt_of(70), prompt_of(600)]
    prompts[2][:256] = prompts[0][:256]
    expected = [plain_answer(model, prompt, 20) for prompt in prompts]
    assert [answer.token_ids for answer in ask_all(cold, prompts, 20)] == expected
    first, second = (ask_all(warm, prompts, 20) for _ in range(2))
    assert [answer.token_ids for answer in first] == expected
    assert [answer.token_ids for answer in second] == expected
    assert first[2].report.restored_tokens == 256, "the beginning it shares with the first one is computed once"
    assert [answer.report.restored_tokens for answer in second] == [256, 64, 576]
    for _, report in first:
        assert report.new_tokens == 20 and len(report.itl_ms) == 19
        assert report.ttft_ms > 0 and report.tokens_per_second > 0


def test_a_request_that_is_ended_early_keeps_what_was_computed(llama: Any, store: EmbeddedStore) -> None:
    cache, prompt = cache_of(llama, store, chunk_tokens=64), prompt_of(120)
    answer = ask(cache, prompt, 500, stopping_criteria=[Each(lambda count: count == 20)])
    assert len(answer.token_ids) == 20 and answer.report.saved_blocks == 2
    left = ask(cache, prompt + answer.token_ids, 1)
    assert left.report.restored_tokens == 128

    def raises(count: int) -> None:
        if count == 30:
            raise KeyboardInterrupt

    other = prompt_of(120, seed=1)
    with pytest.raises(KeyboardInterrupt):
        ask(cache, other, 500, stopping_criteria=[Each(raises)])
    assert cache.report.saved_blocks == 2 and store.usage().leases == 0


def test_after_a_forward_pass_that_failed_nothing_shifted_is_kept(
    llama: Any, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, prompt, calls = cache_of(llama, store), prompt_of(120), list[int]()
    kind = type(llama.model.layers[0].mlp)
    forward = kind.forward

    def failing(self: Any, states: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if self is llama.model.layers[1].mlp and len(calls) > 150:
            raise RuntimeError("out of memory")
        return forward(self, states)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            ask(cache, prompt, 200)
    turn = prompt + ask(cache_of(llama), prompt, 60).token_ids
    answer = ask(cache, turn, 40)
    assert answer.token_ids == plain_answer(llama, turn, 40) and answer.report.restored_tokens == 64


def test_a_token_that_ends_a_row_ends_no_other(llama: Any, store: EmbeddedStore) -> None:
    cache = cache_of(llama, store)
    prompts = [prompt_of(40), prompt_of(50)]
    full = ask_all(cache, prompts, 120)
    stop = full[0].token_ids[3]
    assert full[0].token_ids.index(stop) == 3
    short = ask_all(cache, prompts, 120, eos_token_id=stop, pad_token_id=0)
    assert short[0].token_ids[:4] == full[0].token_ids[:4] and not any(short[0].token_ids[4:])
    ends = [*full[1].token_ids, stop].index(stop) + 1
    assert short[1].token_ids[:ends] == full[1].token_ids[:ends]
    assert [answer.report.new_tokens for answer in short] == [4, min(ends, 120)]


# The pool on the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hbm", "tiers"), [("16MiB", {"hbm": 640}), (6 * 49152, {"hbm": 384, "dram": 256})])
def test_the_pool_is_asked_before_the_store(
    llama: Any, store: EmbeddedStore, hbm: str | int, tiers: dict[str, int]
) -> None:
    prompt = prompt_of(700)
    cache = cache_of(llama, store, hbm=hbm)
    assert cache.layout.raw_bytes == 49152
    expected = [ask(cache_of(llama), prompt, 8).token_ids] * 3
    answers = [ask(cache, prompt, 8) for _ in range(3)]
    assert [answer.token_ids for answer in answers] == expected
    for answer in answers[1:]:
        assert answer.report.account.to_dict()["hits"] == tiers


def test_the_pool_keeps_what_the_store_lost(llama: Any, store: EmbeddedStore) -> None:
    prompt = prompt_of(700)
    cache = cache_of(llama, store, hbm="16MiB")
    expected = ask(cache, prompt, 4).token_ids
    store.drop(cache.namespace)
    answer = ask(cache, prompt, 70)
    assert answer.token_ids[:4] == expected
    assert answer.report.account.hits == {HitTier.HBM: 640}
    assert answer.report.saved_blocks == 12, "the store has them again"


# What can go wrong ------------------------------------------------------------------------------------------------


def test_altered_blocks_change_the_answer(llama: Any, store: EmbeddedStore) -> None:
    """The negative control: if this passes with the cold answer, restored KV is not what attention reads."""
    prompt = prompt_of(520)
    cache = cache_of(llama, store)
    expected = ask(cache_of(llama), prompt, 8).token_ids
    layers = cache_of(llama).generate(prompt, max_new_tokens=1, return_dict_in_generate=True).past_key_values.layers
    planes = {n: [one[0, :, :512].transpose(0, 1) for one in (at.keys, at.values)] for n, at in enumerate(layers)}
    pages = {n: [plane.flip(1).reshape(8, 64, 2, 16) for plane in pair] for n, pair in planes.items()}
    assert cache.namespace.put(prompt[:512], Pages(pages, range(8), 64)).stored == 8
    answer = ask(cache, prompt, 8)
    assert answer.report.restored_tokens == 512
    assert answer.token_ids != expected


@pytest.mark.parametrize(("block", "restored"), [(0, 0), (3, 0), (5, 256)])
def test_a_corrupt_block_is_computed_again(llama: Any, block: int, restored: int) -> None:
    parts = bench(dram=16 << 20, extent=1 << 20)
    cache = cache_of(llama, DoorStore(parts.door()), kept=SavedBlocks.WHOLE_CHUNKS)
    prompt = prompt_of(700)
    expected = ask(cache, prompt, 8).token_ids
    with cache.namespace.lease(cache.namespace.match(prompt)) as lease:
        view = parts.store.spans([lease.reply.places[0][block]])[0].view
        view[5000] ^= 1
    answer = ask(cache, prompt, 8)
    assert answer.token_ids == expected
    report = answer.report
    assert report.restored_tokens == restored and report.account.asked == 700
    assert report.account.misses[MissReason.CORRUPT] == 512 - block * 64
    assert report.account.misses.get(MissReason.GRID, 0) == block * 64 - restored
    assert ask(cache, prompt, 1).report.restored_tokens == 512, "it was stored anew"


class DoorStore:
    """A store whose only door is the test's."""

    def __init__(self, door: EmbeddedDoor) -> None:
        self._door = door

    def namespace(self, *, model: str, layout: Any, codec: str, config: dict[str, str], name: str) -> NamespaceHandle:
        return NamespaceHandle(
            self._door, Namespace(model, layout, codec, config=config), codec_named(codec), name=name
        )


class DyingDoor(EmbeddedDoor):
    """A door whose connection breaks at the n-th call and stays broken."""

    def __init__(self, door: EmbeddedDoor) -> None:
        self._door = door
        self.calls_left = 1 << 30
        self.call, self.memory = self._counted(door.call), self._counted(door.memory)  # type: ignore[method-assign]
        self.forgotten, self.requests, self.clock = door.forgotten, door.requests, door.clock

    def _counted(self, call: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise ConnectionResetError("the store is gone")
            return call(*given, **named)

        return counted


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_store_that_dies_at_any_moment_costs_no_answer(llama: Any, is_warm: bool) -> None:
    prompt = prompt_of(330)
    expected = ask(cache_of(llama), prompt, 3).token_ids
    for calls in range(0, 60):
        door = DyingDoor(bench(dram=16 << 20, extent=1 << 20).door())
        cache = cache_of(llama, DoorStore(door), chunk_tokens=128)
        if is_warm:
            ask(cache, prompt[:200], 3)
        door.calls_left = calls
        answer = ask(cache, prompt, 3)
        assert answer.token_ids == expected
        assert answer.report.account.asked == 330
        if answer.report.faults == 0:
            break
        assert "ConnectionResetError" in answer.report.fault
    assert 5 <= calls < 59, "it died at each of its calls, and at last at none"


def test_a_store_without_room_counts_what_it_refused(llama: Any, tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", extent="256KiB") as store:
        cache = cache_of(llama, store, chunk_tokens=128)
        prompt = prompt_of(1900)
        expected = ask(cache_of(llama, chunk_tokens=128), prompt, 4).token_ids
        for _ in range(2):
            answer = ask(cache, prompt, 4)
            assert answer.token_ids == expected
            assert answer.report.account.asked == 1900
            assert sum(answer.report.put_reasons.values()) > 0 and not answer.report.faults
        store.check()


# Refusals ---------------------------------------------------------------------------------------------------------


def _tiny(class_name: str, **fields: Any) -> Any:
    made = getattr(transformers, class_name)
    return made(made.config_class(**fields)).eval()


REFUSED: dict[str, Callable[[], Any]] = {
    "'mamba'": lambda: _tiny("MambaForCausalLM", vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "'t5'": lambda: _tiny(  # encoder and decoder
        "T5ForConditionalGeneration", vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    ),
    "'bert'": lambda: _tiny("BertLMHeadModel", **OWN_HEADS),  # attention in both directions
    r"model\.eval\(\)": lambda: model_of().train(),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_model_it_cannot_serve_is_refused_with_one_line(said: str) -> None:
    with refused(said):
        cache_of(REFUSED[said]())


def test_another_grid_is_another_namespace(llama: Any, store: EmbeddedStore) -> None:
    """As is another extra key."""

    def asked(chunk: int, kept: str, **options: Any) -> Any:
        return ask(cache_of(llama, store, chunk_tokens=chunk, kept=kept), prompt_of(300), 1, **options).report

    asked(128, "whole_chunks")
    report = asked(64, "whole_chunks")
    assert reasons(report.account) == {"other_namespace": 256, "partial_block": 44}
    assert "prefill_chunk_tokens is 64 here and 128 there" in report.detail
    assert not asked(64, "everything").restored_tokens and asked(128, "everything").restored_tokens == 256
    assert not asked(128, "everything", extra_keys=["another adapter"]).restored_tokens


# When it saves: never before a first token, and a sidecar that hangs costs a request one look-up ----------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 9, 40])
@pytest.mark.parametrize("kept", list(SavedBlocks))
def test_nothing_is_saved_before_the_first_token(
    llama: Any, store: EmbeddedStore, kept: SavedBlocks, new_tokens: int
) -> None:
    """And all is found by the next request, however short the answer was."""
    cache, saved = cache_of(llama, store, kept=kept), list[int]()

    def step(count: int) -> None:
        saved.append(cache.report.saved_blocks)
        assert count > 1 or cache.report.save_ms == 0 == store.usage().blocks

    cold = ask(cache, prompt_of(1300), new_tokens, stopping_criteria=[Each(step)])
    assert saved == [min(4 * count, 20) for count in range(new_tokens)], "a cell of 256 tokens between two tokens"
    assert cold.report.saved_blocks == 20 and not cold.report.put_reasons
    warm = ask(cache, prompt_of(1300), new_tokens)
    assert reasons(warm.report.account)["dram"] == 1280 and warm.token_ids == cold.token_ids


def test_in_a_batch_what_a_prompt_shares_is_saved_before_it_is_looked_up_and_nothing_else(
    llama: Any, store: EmbeddedStore
) -> None:
    one, other = prompt_of(700), prompt_of(640, seed=2)
    cache = cache_of(llama, store)

    def step(count: int) -> None:
        first, second, third = cache.reports
        assert count > 1 or (first.saved_blocks, second.save_ms) == (10, 0)
        assert reasons(third.account)["dram"] == 512

    ask_all(cache, [one, other, one[:520]], 2, stopping_criteria=[Each(step)])
    assert cache.reports[1].saved_blocks == 10


@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_what_was_decoded_is_not_encoded_again(llama: Any, store: EmbeddedStore, codec: str) -> None:
    """Blocks are restored, and go meanwhile. With an inexact codec they are not offered, so what is computed behind
    them cannot be stored; with an exact one all are."""
    cache, prompt = cache_of(llama, store, codec=codec), prompt_of(700)
    ask(cache, prompt[:450], 1)
    leaves = Each(lambda count: store.drop(cache.namespace) if count == 1 else None)  # type: ignore[arg-type]
    answer = ask(cache, prompt, 2, stopping_criteria=[leaves])
    assert answer.report.restored_tokens == 448
    assert answer.report.saved_blocks == (10 if codec == "raw" else 0)
    assert (MissReason.EVICTED in answer.report.put_reasons) == (codec != "raw")


@pytest.mark.slow
def test_a_sidecar_that_hangs_costs_no_token(llama: Any, tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    expected = ask(cache_of(llama), prompt, 6).token_ids
    with serving(tmp_path, "--nvme", "off") as (_, said), kvstore.open(f"unix:{said['serving'][0]}") as store:
        cache = cache_of(llama, store)
        door: Any = store._door  # type: ignore[union-attr]
        door._limits = CallLimits(fill=LONG)
        with stopped(said["pid"]):
            started = time.monotonic()
            answers = [ask(cache, prompt, 6) for _ in range(3)]
            assert time.monotonic() - started < AT_ONCE
        for answer in answers:
            assert answer.token_ids == expected and not answer.report.faults
            assert answer.report.put_reasons == {MissReason.UNREACHABLE: 2}, "a chunk, and all of it at the end"
        first, *later = [reasons(answer.report.account) for answer in answers]
        assert first == {"deadline": 1280, "partial_block": 20}
        assert later == [{"unreachable": 1280, "partial_block": 20}] * 2
        wait_until(lambda: not door._run.breaker.is_open)
        door._limits = CallLimits(match=LONG, lease=LONG)
        ask(cache, prompt, 1)
        warm = ask(cache, prompt, 6)
        assert warm.token_ids == expected and reasons(warm.report.account)["dram"] == 1280


@pytest.mark.slow
def test_a_sidecar_that_hangs_behind_the_first_token_costs_one_deadline(llama: Any, tmp_path: Path) -> None:
    prompt = prompt_of(1300)
    expected = ask(cache_of(llama), prompt, 6).token_ids
    with serving(tmp_path, "--nvme", "off") as (_, said), kvstore.open(f"unix:{said['serving'][0]}") as store:
        cache = cache_of(llama, store)
        door: Any = store._door  # type: ignore[union-attr]
        door._limits = CallLimits(match=LONG, fill=LONG, lease=LONG)

        def stops(count: int) -> None:
            if count == 1:
                stop(said["pid"])
                door._limits = CallLimits(fill=LONG)

        try:
            started = time.monotonic()
            answer = ask(cache, prompt, 6, stopping_criteria=[Each(stops)])
            assert time.monotonic() - started < AT_ONCE
        finally:
            os.kill(said["pid"], signal.SIGCONT)
        assert answer.token_ids == expected and not answer.report.faults
        assert answer.report.put_reasons == {MissReason.DEADLINE: 1, MissReason.UNREACHABLE: 1}


def test_a_model_that_changes_while_the_store_does_not_open_anything_is_answered(
    llama: Any, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the store is asked again later, not by each request."""
    cache = cache_of(llama, store)
    tokens = prompt_of(600)
    before = ask(cache, tokens, 2)
    asked = []

    def away(**_: Any) -> NamespaceHandle:
        asked.append(1)
        raise Unreachable("away")

    with llama.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 0.5):
        with monkeypatch.context() as patched:
            patched.setattr(store, "namespace", away)
            for _ in range(3):
                changed = ask(cache, tokens, 2)
                assert changed.report.account.hit_tokens == 0
            assert len(asked) == 1 and cache.namespace is None
        monkeypatch.setattr(cache, "_open_again_at", 0.0)
        assert ask(cache, tokens, 2).token_ids == changed.token_ids
        assert ask(cache, tokens, 2).report.account.hit_tokens > 0
    again = ask(cache, tokens, 2)
    assert again.token_ids == before.token_ids and again.report.account.hit_tokens > 0
