"""Every kind of KV that transformers computes: cold, hit, longer, forked and restarted answers are the model's own, at
every boundary, alone, in batches and in beams.

PYTHONPATH=.:kernels:tests python tests/adapters/test_hf_shapes.py [NAME ...]      all 48, with what is refused
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from engine_adapter.adapter import StoreRequest
from engine_adapter.audit.audits import AuditResult
from engine_adapter.audit.blocks import compare_block
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput
from kvstore.block.states import DEFAULT_SHARE, StatePolicy
from kvstore.node import EmbeddedStore

pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf import kinds as hf_kinds
from engine_adapter.hf_cache import PrefixCache
from hf_shapes import BESIDE, SHAPES, VOCABULARY, model_of_shape
from kvstore.insight.models import KvKind
from kvstore.insight.served import Verdict, shapes

pytestmark = pytest.mark.usefixtures("one_thread")

IN_EVERY_RUN = ("Qwen3-Next", "Gemma 4", "Llama 4")
SAID = {name: answer for name, _, answer in shapes()}
SERVED = {name: kinds for name, kinds, answer in shapes() if answer.verdict is not Verdict.REFUSED}
HYBRIDS = [*(name for name, kinds in SERVED.items() if KvKind.STATE in kinds), *BESIDE]
CHUNK = 128


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Without the tokens that stand for padding and pictures."""
    return torch.randint(20, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class Conversations:
    """A model beside a cache on a store: what the cache answers, the model has to answer too."""

    def __init__(self, model: Any, store: EmbeddedStore, **options: Any) -> None:
        self.model = model
        self.cache = PrefixCache(model, store, **{"codec": "raw", "chunk_tokens": CHUNK, **options})

    def ask(self, prompts: list[list[int]], new_tokens: int = 6, **options: Any) -> list[list[int]]:
        """The prompts with their answers. Raises where one is not the model's, or where the store failed."""
        given = {"max_new_tokens": new_tokens, "do_sample": False, **options}
        masks = [[0] * (max(map(len, prompts)) - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        rows = [[5] * mask.count(0) + prompt for prompt, mask in zip(prompts, masks, strict=True)]
        output = self.cache.generate(rows, attention_mask=masks, **given)
        found = []
        for prompt, row, report in zip(prompts, output.tolist(), self.cache.reports, strict=True):
            ids = torch.tensor([prompt])
            expected = self.model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0].tolist()
            found.append(row[len(row) - len(expected) :])
            assert found[-1] == expected, f"{len(prompt)} tokens, {report.restored_tokens} of them restored"
            assert report.account.asked == len(prompt) and not report.faults, report.fault
        return found

    @property
    def restored(self) -> list[int]:
        return [report.restored_tokens for report in self.cache.reports]


def judge(name: str, directory: str) -> None:
    """Raises where anything is wrong, `BadInput` where the model is refused."""
    model, first = model_of_shape(name), prompt_of(400, 1)
    with kvstore.embedded(directory, dram="64MiB", nvme="64MiB") as store:
        talk = Conversations(model, store)
        (answered,) = talk.ask([first], 80)
        assert talk.restored == [0]
        talk.ask([first])
        assert talk.restored == [384], "a prompt again"
        (longer,) = talk.ask([answered + prompt_of(30, 3)], 20)
        assert talk.restored == [448], "the answer too"
        few_states = talk.cache.states is not None and "conv" not in model.config.layer_types
        for seed, found in ((5, 0 if few_states else 256), (6, 256)):
            talk.ask([first[:300] + prompt_of(100, seed)])
            assert talk.restored == [found], "where prompts part a state is kept the second time"
            assert talk.cache.report.account.misses.get(MissReason.NO_STATE, 0) == 256 - found
        for tokens in (1, 63, 64, 65, 95, 96, 97, 128, 129, 192, 193):
            talk.ask([first[:tokens]])
        talk.ask([first[:350] + prompt_of(40, 2), first, first[:90]])
        assert talk.restored[1:] == [384, 64], "in a batch"
        talk.ask([first], num_beams=3)
        store.check()
    with kvstore.embedded(directory, dram="64MiB", nvme="64MiB") as store:
        assert store.warmed(60)
        talk = Conversations(model_of_shape(name), store, deadline_ms=5000)
        talk.ask([longer + prompt_of(20, 4)])
        assert talk.restored == [(len(longer) - 1) // 64 * 64], "after a restart"
        exact = Conversations(model, store, kept="whole_chunks", deadline_ms=5000)
        cold, warm = (exact.ask([first], 20) for _ in range(2))
        assert exact.restored == [384] and cold == warm


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in SHAPES]
)
def test_each_kind_of_kv_is_restored_as_it_was_computed(name: str, tmp_path: Path) -> None:
    """And is what `served` says: a refusal is one line."""
    if SAID[name].verdict is Verdict.REFUSED:
        with pytest.raises(
            BadInput,
            match=r"cannot serve model type '\w+': (its cache holds|a trial run failed)[^\n]+; call model.generate$",
        ):
            judge(name, str(tmp_path))
    else:
        judge(name, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_from_each_blocks_end_a_hybrid_goes_on_bit_for_bit(name: str, store: EmbeddedStore) -> None:
    """As without a store, where it prefills in the same cells: 20 prompts, tokens and logits."""
    model, given = model_of_shape(name), {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    alone, cache = (PrefixCache(model, one, codec="raw", chunk_tokens=64, deadline_ms=5000) for one in (None, store))
    for seed, blocks in product(range(20), range(6)):
        prompt = prompt_of(340, seed)[: 64 * blocks + 20]
        expected, found = (one.generate(prompt, **given) for one in (alone, cache))
        assert cache.report.restored_tokens == 64 * max(0, blocks - 1)
        assert torch.equal(found.sequences, expected.sequences) and all(map(torch.equal, found.logits, expected.logits))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_chat_of_six_turns_is_found_again_by_few_states(name: str, store: EmbeddedStore) -> None:
    """Nine tenths of the tokens of earlier turns; by two states for each turn, and by others within their share."""
    talk, chat, earlier, found = Conversations(model_of_shape(name), store), list[int](), 0, 0
    for turn in range(6):
        earlier += len(chat)
        (chat,) = talk.ask([chat + prompt_of(250, turn)], 70)
        found += talk.restored[0]
    assert found >= 0.9 * earlier
    kv, states = talk.cache.namespace, talk.cache.states
    keys, size, of_token = kv.hashed(chat).keys, states.handle.layout.raw_bytes, kv.layout.raw_bytes // 64
    ends = [64 * number for number, is_there in enumerate(states.handle.which(keys), 1) if is_there]
    between = [end for end in ends if not end % StatePolicy(64, size, of_token).every_tokens]
    assert len(between) * size <= DEFAULT_SHARE * kv.match(chat).tokens * of_token
    assert len(ends) - len(between) <= 2 * 6


@pytest.mark.parametrize("codec", ["raw", "int8-kc64"])
def test_a_share_of_the_hits_is_computed_and_compared(
    codec: str, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not what the model computes is left, with one line in the log."""
    model, save = model_of_shape("Qwen3 MoE"), StoreRequest.save
    talk, first, second = Conversations(model, store, codec=codec), prompt_of(400, 1), prompt_of(400, 2)
    talk.cache.audit = 0.5
    for restored, audited in ((0, 0), (384, 0), (0, 384), (384, 0), (0, 384)):
        talk.cache.generate([first], max_new_tokens=4)
        misses = talk.cache.report.account.misses
        assert talk.restored == [restored] and misses.get(MissReason.AUDIT, 0) == audited
    with monkeypatch.context() as patched:
        patched.setattr(StoreRequest, "save", lambda self, ids, *given: save(self, second[: len(ids)], *given))
        Conversations(model, store, codec=codec).cache.generate([prompt_of(400, 3)], max_new_tokens=1)
    talk.cache.generate([first], max_new_tokens=4)
    talk.ask([second])
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "is not what the engine computes" in line and talk.restored == [0]
    assert talk.cache.report.detail == "what is stored is not what the model computes"
    talk.ask([first])
    assert talk.cache.report.account.misses == {MissReason.DISABLED: 400}


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_an_audited_hit_finds_a_wrong_state(name: str, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block before, of another prompt, or off by four times what is allowed: 20 of each, and no false alarm."""
    model, given = model_of_shape(name).to(torch.bfloat16), {"codec": "raw", "chunk_tokens": 64, "deadline_ms": 5000}
    saving, allowed = PrefixCache(model, store, **given), list[float]()
    kinds, call, save, compare = saving._watch.kinds, saving._watch.call, StoreRequest.save_state, compare_block

    def states_of(tokens: list[int]) -> list[torch.Tensor]:
        ids, computed = torch.tensor([tokens]), call.new_cache()
        call(ids, computed, 0, call.positions(ids, torch.ones_like(ids)))
        return kinds.states_of(computed, 0)

    def is_found(seed: int, wrong: str, states: list[torch.Tensor] | None) -> bool:
        """Whether a hit on a prompt that is stored with these states at 320 tokens is taken for wrong."""
        prompt, of_prompt = prompt_of(340, seed), {"max_new_tokens": 1, "extra_keys": [wrong]}
        with monkeypatch.context() as patched:
            planted = {320: kinds.state_pages(states)} if states else {}
            patched.setattr(
                StoreRequest, "save_state", lambda self, ids, right: save(self, ids, planted.get(len(ids), right))
            )
            saving.generate(prompt, **of_prompt)
        audited = PrefixCache(model, store, **given)
        audited.audit = 1
        audited.generate(prompt, **of_prompt)
        assert audited.report.account.misses[MissReason.AUDIT] == 320
        return audited.namespace is None

    def noted(*planes: Any, **options: Any) -> AuditResult:
        result = compare(*planes, **options)
        allowed.append(result.allowed_error)
        return result

    monkeypatch.setattr(hf_kinds, "compare_block", noted)
    for seed in range(20):
        prompt, right = prompt_of(340, seed), states_of(prompt_of(340, seed)[:320])
        allowed.clear()
        assert not is_found(seed, "right", None)
        changed = [(state * (1 + 4 * bound)).to(state.dtype) for state, bound in zip(right, allowed[1:], strict=True)]
        assert is_found(seed, "before", states_of(prompt[:256]))
        assert is_found(seed, "other", states_of(prompt_of(320, seed + 20)))
        assert is_found(seed, "changed", changed)


def with_pictures(name: str, seed: int, last: int = 230) -> tuple[list[int], dict[str, Any]]:
    """A prompt of 300 tokens with two pictures, the second one from token `last` on; as a processor makes them."""
    drawn, tokens = torch.Generator().manual_seed(seed), 1 if "Mistral" in name else 4
    prompt, picture = prompt_of(300, 1), [12, *[10] * tokens, 13]
    prompt[20 : 20 + len(picture)] = prompt[last : last + len(picture)] = picture
    types = torch.tensor([[int(token == 10) for token in prompt]])
    if "Qwen" in name:  # 4 x 4 patches each, of which 2 x 2 are merged
        patches, grid = torch.randn(32, 3 * 2 * 14 * 14, generator=drawn), torch.tensor([[1, 4, 4]] * 2)
        return prompt, {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": types}
    sizes = {"image_sizes": torch.tensor([[28, 28]] * 2)} if "Mistral" in name else {"token_type_ids": types}
    return prompt, {"pixel_values": torch.randn(2, 3, 28, 28, generator=drawn), **sizes}


@pytest.mark.parametrize("name", ["Mistral Small 3", "Gemma 3 4B", "Qwen2.5-VL", "Qwen3-VL"])
def test_prompts_with_pictures_are_found_again_with_the_same_pictures(name: str, store: EmbeddedStore) -> None:
    talk = Conversations(model_of_shape(name), store)
    answers = []
    for seed, restored in ((1, 0), (1, 256), (2, 0), (2, 256), (1, 256)):
        prompt, pictures = with_pictures(name, seed)
        ids = torch.tensor([prompt])
        given = {**pictures, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        expected = talk.model.generate(ids, **given, return_dict_in_generate=True, output_logits=True)
        assert torch.equal(talk.cache.generate(ids, **given), expected.sequences)
        assert talk.restored == [restored] and not talk.cache.report.faults
        answers.append(expected.logits[0])
        talk.ask([prompt_of(200, 3)])  # of text, between two prompts with pictures
    assert torch.equal(answers[0], answers[4]) and not torch.equal(answers[0], answers[2]), (
        "these pictures change nothing: nothing would be noticed"
    )
    prompt, pictures = with_pictures(name, 1, last=285)
    ids = torch.tensor([prompt])
    for _ in range(2):
        assert torch.equal(
            talk.cache.generate(ids, **{**given, **pictures}), talk.model.generate(ids, **{**given, **pictures})
        )
        assert talk.restored == [0], "what is found ends before the last picture"
    beams = {**given, **pictures, "num_beams": 2}
    assert torch.equal(talk.cache.generate(ids, **beams), talk.model.generate(ids, **beams))


def test_a_rope_with_two_tables_has_a_namespace_for_each(store: EmbeddedStore) -> None:
    """Of up to 200 tokens, and of more. Nothing of an answer that grows over it is kept behind it."""
    talk = Conversations(model_of_shape("Phi-4-mini", original_max_position_embeddings=200), store)
    prompt = prompt_of(400, 1)
    (crossing,) = talk.ask([prompt[:150]], 120)
    assert talk.cache.report.saved_blocks <= 3
    for tokens, restored in ((190, 128), (193, 128), (199, 192), (203, 0), (330, 192), (400, 320), (190, 128)):
        talk.ask([prompt[:tokens]])
        assert talk.restored == [restored] and not talk.cache.report.put_reasons
    talk.ask([crossing])
    assert talk.restored == [128], "what the longer prompts left"
    talk.ask([prompt[:300], prompt[:250]])
    assert talk.restored == [256, 192]
    with pytest.raises(BadInput, match="longrope changes at 200; ask them apart"):
        talk.cache.generate([prompt[:300], prompt[:100]], max_new_tokens=1)


def test_beyond_the_length_from_which_a_dynamic_rope_stretches_nothing_is_kept(store: EmbeddedStore) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    talk = Conversations(model_of_shape("Qwen3", rope_parameters=rope, max_position_embeddings=256), store)
    prompt = prompt_of(400, 1)
    for tokens, restored in ((200, 0), (200, 192), (300, 0), (300, 0), (250, 192)):
        if tokens > 256:  # what the model answers depends on what it was asked before
            talk.cache.generate(prompt[:tokens], max_new_tokens=6)
            assert talk.cache.report.account.misses == {MissReason.DISABLED: tokens}
        else:
            talk.ask([prompt[:tokens]])
        assert talk.restored == [restored]


def main() -> int:
    torch.set_num_threads(1)
    served = 0
    for name in sys.argv[1:] or SHAPES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                judge(name, directory)
                said, served = "served", served + 1
            except BadInput as error:
                said = str(error)
            except AssertionError as error:
                said = f"WRONG: {error}"
        print(f"{name:20} {said}", flush=True)
    print(f"{served} of {len(sys.argv[1:] or SHAPES)} are served")
    return 0


if __name__ == "__main__":
    sys.exit(main())
