"""PrefixCache on real transformers models with random weights: cold, warm, batched, streamed, refused, failing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.account import HitTier, MissReason
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.identity import Namespace
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.node import EmbeddedDoor, EmbeddedStore
from workbench import bench

transformers = pytest.importorskip("transformers")

from engine_adapter.hf.sampling import Sampling  # noqa: E402
from engine_adapter.hf_cache import PrefixCache, SavedBlocks, Token  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # wide: greedy tokens vary, and their logits are far apart
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def cache_of(model: Any, store: Any = None, **options: Any) -> PrefixCache:
    """A cache on a grid of 256 tokens, whatever the default is: the figures below are counted on it. Bit for bit."""
    return PrefixCache(model, store, **{"chunk_tokens": 256, "codec": "raw", **options})


def model_of(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    config_name, model_name = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**SHAPE, **changes})
    return getattr(transformers, model_name)(config).to(dtype).eval()


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator).tolist()


def plain(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of()


def reasons(account: Any) -> dict[str, int]:
    """Tiers and reasons by name, in one dictionary."""
    found = account.to_dict()
    return {**found["hits"], **found["misses"]}


# Cold and warm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 63, 256, 257, 700])
def test_cold_answers_are_those_of_plain_generate(family: str, tokens: int) -> None:
    model = model_of(family)
    answer = cache_of(model).generate(prompt_of(tokens), max_new_tokens=16)
    assert answer.token_ids == plain(model, prompt_of(tokens), 16)
    assert len(set(answer.token_ids)) > 4, "these weights repeat themselves: nothing would be noticed"
    assert reasons(answer.report.account) == {"disabled": tokens}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kept", list(SavedBlocks))
def test_warm_answers_are_the_cold_ones(
    family: str, dtype: torch.dtype, kept: SavedBlocks, store: EmbeddedStore
) -> None:
    model = model_of(family, dtype)
    cold, warm = cache_of(model), cache_of(model, store, kept=kept)
    for tokens in (257, 512, 700):
        prompt = prompt_of(tokens)
        expected = cold.generate(prompt, max_new_tokens=12).token_ids
        filling, reusing = (warm.generate(prompt, max_new_tokens=12) for _ in range(2))
        assert filling.token_ids == reusing.token_ids == expected
        assert filling.report.restored_tokens == 0
        assert reusing.report.restored_tokens == (tokens - 1) // 256 * 256
        for report in (filling.report, reusing.report):
            assert report.account.asked == report.prompt_tokens == tokens
            assert not report.faults and not report.put_reasons
    store.check()


def test_restored_kv_is_what_cold_prefill_computes_bit_for_bit(llama: Any, store: EmbeddedStore) -> None:
    prompt = prompt_of(700)
    warm = cache_of(llama, store)
    first = warm.generate(prompt, max_new_tokens=1).report
    assert first.saved_blocks == 10
    buffers = warm._free.take(1, 701)
    computed = [[plane[0, :, :700].clone() for plane in planes] for planes in buffers.planes]
    for planes in buffers.planes:
        for plane in planes:
            plane.fill_(float("nan"))
    warm._free.give(buffers)
    assert warm.generate(prompt, max_new_tokens=1).report.restored_tokens == 512
    assert all(
        torch.equal(plane[0, :, :700], before)
        for planes, befores in zip(buffers.planes, computed, strict=True)
        for plane, before in zip(planes, befores, strict=True)
    )


@pytest.mark.parametrize(
    ("tokens", "first", "second"),
    [
        (63, {"partial_block": 63}, {"partial_block": 63}),
        (64, {"absent": 64}, {"grid": 63, "last_token": 1}),
        (65, {"absent": 64, "partial_block": 1}, {"grid": 64, "partial_block": 1}),
        (128, {"absent": 128}, {"grid": 127, "last_token": 1}),
        (129, {"absent": 128, "partial_block": 1}, {"dram": 128, "partial_block": 1}),
        (256, {"absent": 256}, {"dram": 128, "grid": 127, "last_token": 1}),
        (350, {"absent": 320, "partial_block": 30}, {"dram": 256, "grid": 64, "partial_block": 30}),
    ],
)
def test_every_token_is_accounted_for(
    llama: Any, store: EmbeddedStore, tokens: int, first: dict[str, int], second: dict[str, int]
) -> None:
    cache = cache_of(llama, store, chunk_tokens=128)
    for expected in (first, second):
        report = cache.generate(prompt_of(tokens), max_new_tokens=1).report
        assert reasons(report.account) == expected
        assert report.to_dict()["asked"] == tokens
        assert report.chunk_tokens == 128


def test_another_prompt_with_the_same_beginning(llama: Any, store: EmbeddedStore) -> None:
    shared = prompt_of(300)
    cache, cold = cache_of(llama, store), cache_of(llama)
    cache.generate(shared + prompt_of(200, seed=1), max_new_tokens=4)
    prompt = shared + prompt_of(200, seed=2)
    answer = cache.generate(prompt, max_new_tokens=8)
    assert reasons(answer.report.account) == {"dram": 256, "diverged": 192, "partial_block": 52}
    assert answer.token_ids == cold.generate(prompt, max_new_tokens=8).token_ids


def test_a_closed_store_is_cold(llama: Any, tmp_path: Path) -> None:
    store = kvstore.open(f"embedded:{tmp_path}", dram="16MiB")
    cache = cache_of(llama, store)
    expected = cache.generate(prompt_of(300), max_new_tokens=4).token_ids
    store.close()
    for closed in (cache, cache_of(llama, store)):
        answer = closed.generate(prompt_of(300), max_new_tokens=4)
        assert answer.token_ids == expected
        assert reasons(answer.report.account) == {"disabled": 300}
        assert not answer.report.faults and not answer.report.put_reasons


def test_a_model_with_its_own_attention_is_served_with_it(store: EmbeddedStore) -> None:
    model = model_of(attn_implementation="eager")
    cache = cache_of(model, store)
    prompts = [prompt_of(300), prompt_of(90), prompt_of(600)]
    first, second = (cache.generate_batch(prompts, max_new_tokens=8) for _ in range(2))
    assert [answer.token_ids for answer in first] == [plain(model, prompt, 8) for prompt in prompts]
    assert [answer.token_ids for answer in second] == [answer.token_ids for answer in first]
    assert second[2].report.restored_tokens == 512


def test_the_model_is_left_as_it_was(llama: Any) -> None:
    before = llama.config._attn_implementation
    prompt = prompt_of(300)
    expected = plain(llama, prompt, 4)
    cache_of(llama).generate(prompt, max_new_tokens=4)
    assert llama.config._attn_implementation == before == "sdpa"
    assert plain(llama, prompt, 4) == expected


# Chats ------------------------------------------------------------------------------------------------------------


def test_the_next_turn_reuses_the_answer(llama: Any, store: EmbeddedStore) -> None:
    cold, warm = cache_of(llama, chunk_tokens=64), cache_of(llama, store, chunk_tokens=64)
    prompt = prompt_of(100)
    answer = warm.generate(prompt, max_new_tokens=130)
    assert answer.report.saved_blocks == 229 // 64, "the last token was never computed"
    turn = prompt + answer.token_ids + prompt_of(40, seed=1)
    second = warm.generate(turn, max_new_tokens=10)
    assert reasons(second.report.account) == {"dram": 192, "absent": 64, "partial_block": 14}
    assert second.token_ids == cold.generate(turn, max_new_tokens=10).token_ids


@pytest.mark.parametrize(("new_tokens", "blocks"), [(27, 1), (28, 1), (29, 2)])
def test_a_block_is_kept_once_its_last_token_was_computed(
    llama: Any, store: EmbeddedStore, new_tokens: int, blocks: int
) -> None:
    """The newest token was chosen, and its KV is not in the buffers before the next step."""
    warm = cache_of(llama, store, chunk_tokens=64)
    prompt = prompt_of(100)
    answer = warm.generate(prompt, max_new_tokens=new_tokens)
    assert answer.report.saved_blocks == blocks
    turn = prompt + answer.token_ids + prompt_of(40, seed=1)
    assert warm.generate(turn, max_new_tokens=1).report.restored_tokens == 64 * blocks


def test_whole_chunks_only(llama: Any, store: EmbeddedStore) -> None:
    cache = cache_of(llama, store, chunk_tokens=128, kept=SavedBlocks.WHOLE_CHUNKS)
    prompt = prompt_of(350)
    answer = cache.generate(prompt, max_new_tokens=130)
    assert answer.report.saved_blocks == 4
    report = cache.generate(prompt + answer.token_ids, max_new_tokens=1).report
    assert report.restored_tokens == 256


# Batches and streams ----------------------------------------------------------------------------------------------


def test_a_ragged_batch(llama: Any, store: EmbeddedStore) -> None:
    cold, warm = cache_of(llama), cache_of(llama, store)
    prompts = [prompt_of(300), prompt_of(70), prompt_of(600)]
    prompts[2][:256] = prompts[0][:256]
    expected = [cold.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]
    assert [answer.token_ids for answer in cold.generate_batch(prompts, max_new_tokens=20)] == expected
    first, second = (warm.generate_batch(prompts, max_new_tokens=20) for _ in range(2))
    assert [answer.token_ids for answer in first] == expected
    assert [answer.token_ids for answer in second] == expected
    assert first[2].report.restored_tokens == 256, "the beginning it shares with the first one is computed once"
    assert [answer.report.restored_tokens for answer in second] == [256, 0, 512]


@pytest.mark.parametrize("lengths", [(300, 70), (300, 300)])
def test_what_an_earlier_request_left_in_the_buffers_does_no_harm(llama: Any, lengths: tuple[int, int]) -> None:
    cache = cache_of(llama)
    prompts = [prompt_of(tokens, seed) for seed, tokens in enumerate(lengths)]
    expected = [answer.token_ids for answer in cache.generate_batch(prompts, max_new_tokens=12)]
    buffers = cache._free.take(2, 312)
    for planes in buffers.planes:
        for plane in planes:
            plane.fill_(float("nan"))
    cache._free.give(buffers)
    assert [answer.token_ids for answer in cache.generate_batch(prompts, max_new_tokens=12)] == expected


def test_tokens_arrive_in_order(llama: Any) -> None:
    cache = cache_of(llama)
    prompts = [prompt_of(30), prompt_of(90)]
    heard: list[Token] = []
    answers = cache.generate_batch(prompts, max_new_tokens=6, on_token=heard.append)
    streamed = list(cache.stream(prompts, max_new_tokens=6))
    assert heard == streamed
    assert [(token.row, token.number) for token in heard] == [(row, number) for number in range(6) for row in (0, 1)]
    for row, answer in enumerate(answers):
        assert [token.token_id for token in heard if token.row == row] == answer.token_ids
        assert answer.report.new_tokens == 6 and len(answer.report.itl_ms) == 5
        assert answer.report.ttft_ms > 0 and answer.report.tokens_per_second > 0


def test_a_stream_that_is_left_keeps_what_was_computed(llama: Any, store: EmbeddedStore) -> None:
    cache = cache_of(llama, store, chunk_tokens=64)
    prompt = prompt_of(120)
    stream = cache.stream([prompt], max_new_tokens=500)
    answer = [next(stream).token_id for _ in range(20)]
    stream.close()
    assert stream.results[0].token_ids == answer
    assert stream.results[0].report.saved_blocks == 2
    report = cache.generate(prompt + answer, max_new_tokens=1).report
    assert report.restored_tokens == 128
    assert list(cache.stream([prompt], max_new_tokens=2)), "the buffers are free again"


def test_a_stop_token_ends_a_row_and_not_the_others(llama: Any) -> None:
    cache = cache_of(llama)
    prompts = [prompt_of(40), prompt_of(50)]
    full = cache.generate_batch(prompts, max_new_tokens=12)
    stop = full[0].token_ids[3]
    assert stop not in full[1].token_ids and full[0].token_ids.index(stop) == 3
    short = cache.generate_batch(prompts, max_new_tokens=12, stop_tokens=[stop])
    assert short[0].token_ids == full[0].token_ids[:4] and short[0].is_stopped
    assert short[1].token_ids == full[1].token_ids and not short[1].is_stopped


def test_sampling_is_repeatable_cold_and_warm(llama: Any, store: EmbeddedStore) -> None:
    prompts = [prompt_of(300), prompt_of(290)]
    answers = []
    for cache in (cache_of(llama), warm := cache_of(llama, store), warm):
        sampling = Sampling(temperature=1.5, top_p=0.9, generator=torch.Generator().manual_seed(5))
        answers.append([a.token_ids for a in cache.generate_batch(prompts, max_new_tokens=12, sampling=sampling)])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != [answer.token_ids for answer in warm.generate_batch(prompts, max_new_tokens=12)]


# The pool on the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hbm", "tiers"), [("16MiB", {"hbm": 512}), (6 * 49152, {"hbm": 384, "dram": 128})])
def test_the_pool_is_asked_before_the_store(
    llama: Any, store: EmbeddedStore, hbm: str | int, tiers: dict[str, int]
) -> None:
    prompt = prompt_of(700)
    cache = cache_of(llama, store, hbm=hbm)
    assert cache.layout.raw_bytes == 49152
    expected = [cache_of(llama).generate(prompt, max_new_tokens=8).token_ids] * 3
    answers = [cache.generate(prompt, max_new_tokens=8) for _ in range(3)]
    assert [answer.token_ids for answer in answers] == expected
    for answer in answers[1:]:
        assert answer.report.account.to_dict()["hits"] == tiers


def test_the_pool_keeps_what_the_store_lost(llama: Any, store: EmbeddedStore) -> None:
    prompt = prompt_of(700)
    cache = cache_of(llama, store, hbm="16MiB")
    expected = cache.generate(prompt, max_new_tokens=4).token_ids
    assert cache.namespace is not None
    store.drop(cache.namespace)
    answer = cache.generate(prompt, max_new_tokens=4)
    assert answer.token_ids == expected
    assert answer.report.account.hits == {HitTier.HBM: 512}
    assert answer.report.saved_blocks == 10, "the store has them again"


# What can go wrong ------------------------------------------------------------------------------------------------


def test_altered_blocks_change_the_answer(llama: Any, store: EmbeddedStore) -> None:
    """The negative control: if this passes with the cold answer, restored KV is not what attention reads."""
    prompt = prompt_of(520)
    cache = cache_of(llama, store)
    expected = cache_of(llama).generate(prompt, max_new_tokens=8).token_ids
    assert cache.namespace is not None
    donor = cache_of(llama)
    donor.generate(prompt, max_new_tokens=1)
    pages = donor._free.take(1, 521).pages(0, 512)
    reversed_pages = Pages(
        {layer: [plane.flip(0, 1) for plane in planes] for layer, planes in pages.planes.items()}, range(8), 64
    )
    assert cache.namespace.put(prompt[:512], reversed_pages).stored == 8
    answer = cache.generate(prompt, max_new_tokens=8)
    assert answer.report.restored_tokens == 512
    assert answer.token_ids != expected


@pytest.mark.parametrize(("block", "restored"), [(0, 0), (3, 0), (5, 256)])
def test_a_corrupt_block_is_computed_again(llama: Any, block: int, restored: int) -> None:
    parts = bench(dram=16 << 20, extent=1 << 20)
    cache = cache_of(llama, namespace=_namespace(llama, parts.door()))
    prompt = prompt_of(700)
    expected = cache.generate(prompt, max_new_tokens=8).token_ids
    assert cache.namespace is not None
    with cache.namespace.lease(cache.namespace.match(prompt)) as lease:
        view = parts.store.spans([lease.reply.places[0][block]])[0].view
        view[5000] ^= 1
    answer = cache.generate(prompt, max_new_tokens=8)
    assert answer.token_ids == expected
    report = answer.report
    assert report.restored_tokens == restored and report.account.asked == 700
    assert report.account.misses[MissReason.CORRUPT] == 512 - block * 64
    assert report.account.misses.get(MissReason.GRID, 0) == 128 + block * 64 - restored
    assert cache.generate(prompt, max_new_tokens=1).report.restored_tokens == 512, "it was stored anew"


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
    expected = cache_of(llama).generate(prompt, max_new_tokens=3).token_ids
    for calls in range(0, 60):
        door = DyingDoor(bench(dram=16 << 20, extent=1 << 20).door())
        cache = cache_of(llama, namespace=_namespace(llama, door, chunk="128"), chunk_tokens=128)
        if is_warm:
            cache.generate(prompt, max_new_tokens=3)
        door.calls_left = calls
        answer = cache.generate(prompt, max_new_tokens=3)
        assert answer.token_ids == expected
        assert answer.report.account.asked == 330
        if answer.report.faults == 0:
            break
        assert "ConnectionResetError" in answer.report.fault
    assert 5 <= calls < 59, "it died at each of its calls, and at last at none"


def test_a_store_that_closes_under_way(llama: Any, tmp_path: Path) -> None:
    store = kvstore.open(f"embedded:{tmp_path}", dram="16MiB")
    cache = cache_of(llama, store)
    prompt = prompt_of(700)
    answer = cache.generate(prompt, max_new_tokens=4, on_token=lambda token: store.close())
    assert answer.token_ids == cache_of(llama).generate(prompt, max_new_tokens=4).token_ids
    assert answer.report.saved_blocks == 0, "nothing is saved before the first token"
    assert set(answer.report.put_reasons) == {MissReason.DISABLED} and not answer.report.faults


def test_a_store_without_room_counts_what_it_refused(llama: Any, tmp_path: Path) -> None:
    with kvstore.open(f"embedded:{tmp_path}", dram="1MiB", extent="256KiB") as store:
        cache = cache_of(llama, store, chunk_tokens=128)
        prompt = prompt_of(1900)
        expected = cache_of(llama, chunk_tokens=128).generate(prompt, max_new_tokens=4).token_ids
        for _ in range(2):
            answer = cache.generate(prompt, max_new_tokens=4)
            assert answer.token_ids == expected
            assert answer.report.account.asked == 1900
            assert sum(answer.report.put_reasons.values()) > 0 and not answer.report.faults
        store.check()


# Refusals ---------------------------------------------------------------------------------------------------------


def _tiny(config_name: str, model_name: str, **fields: Any) -> Any:
    config = getattr(transformers, config_name)(**fields)
    return getattr(transformers, model_name)(config).eval()


MANY_HEADS = {"num_key_value_heads": 4}
FALCON = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "sliding window, by its layers": lambda: model_of(
        "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    ),
    "sliding window, everywhere": lambda: _tiny("MistralConfig", "MistralForCausalLM", **SHAPE, sliding_window=64),
    "linear attention": lambda: _tiny(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        **{**SHAPE, "num_hidden_layers": 4},
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "Mamba": lambda: _tiny("MambaConfig", "MambaForCausalLM", vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "encoder and decoder": lambda: _tiny(
        "T5Config", "T5ForConditionalGeneration", vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    ),
    "attention in both directions": lambda: _tiny("BertConfig", "BertLMHeadModel", **{**SHAPE, **MANY_HEADS}),
    "KV heads that its configuration does not tell": lambda: _tiny("FalconConfig", "FalconForCausalLM", **FALCON),
    "rope that depends on the length": lambda: model_of(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_it_cannot_serve_is_refused_with_one_line(kind: str) -> None:
    model = REFUSED[kind]()
    with pytest.raises(BadInput) as caught:
        cache_of(model)
    assert model.config.model_type in str(caught.value) and "\n" not in str(caught.value)


def test_models_that_are_not_ready_are_refused() -> None:
    with pytest.raises(BadInput, match=r"model\.eval\(\)"):
        cache_of(model_of().train())
    quantized = model_of()
    quantized.generation_config.cache_implementation = "quantized"
    with pytest.raises(BadInput, match="quantized cache"):
        cache_of(quantized)
    with torch.device("meta"):
        config = transformers.LlamaConfig(**SHAPE)
        empty = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(BadInput, match="meta"):
        cache_of(empty)


def test_a_namespace_of_another_model_is_refused_by_the_field_that_differs(llama: Any, store: EmbeddedStore) -> None:
    mine = cache_of(llama, store).namespace
    assert mine is not None
    assert cache_of(llama, namespace=mine).namespace is mine
    others = {
        "model is": model_of(seed=1),
        "layout.groups": model_of(num_key_value_heads=4),
        "config.dtype|layout.groups": model_of(dtype=torch.bfloat16),
    }
    for field, other in others.items():
        with pytest.raises(LayoutMismatch, match=field) as caught:
            cache_of(other, namespace=mine)
        assert "\n" not in str(caught.value)
    with pytest.raises(LayoutMismatch, match="prefill_chunk_tokens"):
        cache_of(llama, namespace=mine, chunk_tokens=512)


def test_another_grid_is_another_namespace(llama: Any, store: EmbeddedStore) -> None:
    cache_of(llama, store, chunk_tokens=128).generate(prompt_of(300), max_new_tokens=1)
    report = cache_of(llama, store, chunk_tokens=64).generate(prompt_of(300), max_new_tokens=1).report
    assert reasons(report.account) == {"other_namespace": 256, "partial_block": 44}
    assert "prefill_chunk_tokens is 64 here and 128 there" in report.detail


def test_bad_input_gets_one_line(llama: Any, store: EmbeddedStore) -> None:
    for options, said in (
        ({"chunk_tokens": 100}, "use 64"),
        ({"chunk_tokens": 0}, "use 64"),
        ({"kept": "all"}, "everything, whole_chunks"),
        ({"hbm": "lots"}, "hbm='lots'"),
        ({"codec": "zip"}, "codec 'zip'"),
        ({"block_tokens": 65}, "block_tokens=65"),
    ):
        with pytest.raises(BadInput, match=said) as caught:
            cache_of(llama, store, **options)
        assert "\n" not in str(caught.value)
    cache = cache_of(llama)
    for prompt, new_tokens, said in (
        ([], 1, "empty"),
        ([VOCABULARY], 1, "0 to 511"),
        ([[1, 2], [3]], 1, "use generate_batch"),
        ([1], 0, "max_new_tokens=0"),
        (prompt_of(2040), 9, "2048 positions"),
    ):
        with pytest.raises(BadInput, match=said):
            cache.generate(prompt, max_new_tokens=new_tokens)
    with pytest.raises(BadInput, match="no prompts"):
        cache.generate_batch([], max_new_tokens=1)


def test_prompts_in_any_form_are_the_same_prompt(llama: Any, store: EmbeddedStore) -> None:
    cache = cache_of(llama, store)
    prompt = prompt_of(300)
    expected = cache.generate(prompt, max_new_tokens=4).token_ids
    for form in (torch.tensor(prompt), torch.tensor(prompt, dtype=torch.int32).numpy(), tuple(prompt)):
        answer = cache.generate(form, max_new_tokens=4)
        assert answer.token_ids == expected and answer.report.restored_tokens == 256
    salted = cache.generate(prompt, max_new_tokens=4, extra_keys=["another adapter"])
    assert salted.report.restored_tokens == 0


def _namespace(model: Any, door: EmbeddedDoor, chunk: str = "256") -> NamespaceHandle:
    """The model's own namespace, on a door of the test's."""
    from engine_adapter.hf.model import fingerprint, layout_of

    layout: Layout = layout_of(model)
    namespace = Namespace(fingerprint(model), layout, "raw", config={"prefill_chunk_tokens": chunk})
    return NamespaceHandle(door, namespace, codec_named("raw"))
