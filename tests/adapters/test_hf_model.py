"""Fingerprints and layouts of real transformers models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_adapter.hf import identity
from engine_adapter.hf.identity import HASH_WHOLE_BYTES, _pieces, fingerprint, namespace_config

T = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from engine_adapter.hf_cache import PrefixCache  # noqa: E402
from hf_models import refused, small_model  # noqa: E402


def test_equal_weights_have_one_fingerprint() -> None:
    model = small_model()
    named = small_model(_name_or_path="/somewhere/else", use_cache=False, eos_token_id=5)
    assert fingerprint(model) == fingerprint(named) == fingerprint(small_model())
    assert len(fingerprint(model)) == 64


def test_whatever_changes_kv_changes_the_fingerprint() -> None:
    prints = [
        fingerprint(model)
        for model in (
            small_model(),
            small_model(seed=1),
            small_model().to(torch.bfloat16),
            small_model(rms_norm_eps=1e-5),
            small_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            small_model(hidden_act="gelu"),
        )
    ]
    assert len(set(prints)) == len(prints)
    model = small_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 5] += 1e-6
    assert fingerprint(model) not in prints


def test_a_buffer_that_no_file_holds_changes_the_fingerprint() -> None:
    """Such as the frequencies of a rope, which are made from the configuration, and may be changed since."""
    model, other = small_model(), small_model()
    buffers = dict(other.named_buffers())
    assert buffers and not buffers.keys() & other.state_dict().keys()
    for buffer in buffers.values():
        before = buffer.clone()
        buffer.flatten()[-1] *= 2
        assert fingerprint(other) != fingerprint(model)
        buffer.copy_(before)
    assert fingerprint(other) == fingerprint(model)


def test_of_a_large_tensor_samples_are_taken() -> None:
    tensor = torch.zeros(3 << 20, dtype=torch.float32)
    assert torch.cat([*_pieces(tensor, whole=True)]).numel() == 12 << 20 < HASH_WHOLE_BYTES
    (samples,) = _pieces(tensor, whole=False)
    assert samples.numel() == 16 * (16 << 10)
    for position in (0, -1):
        changed = tensor.clone()
        changed[position] = 1
        (piece,) = _pieces(changed, whole=False)
        assert not torch.equal(piece, samples), "the first and the last bytes are among the samples"
    assert [piece.numel() for piece in _pieces(torch.tensor(3.0), whole=False)] == [4]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("told_by", ["name", "class"])
def test_of_a_large_model_each_row_of_the_embeddings_counts(
    monkeypatch: pytest.MonkeyPatch, told_by: str, is_tied: bool
) -> None:
    """Training a few new tokens changes their rows, and nothing else. A quantised table may be of another class."""
    model = small_model(tie_word_embeddings=is_tied)
    if told_by == "name":
        monkeypatch.setattr(torch.nn, "Embedding", type("Another", (torch.nn.Embedding,), {}))
    else:
        monkeypatch.setattr(identity, "is_embedding", lambda name: False)
    monkeypatch.setattr(identity, "HASH_WHOLE_BYTES", 0)
    monkeypatch.setattr(identity, "SAMPLES_PER_TENSOR", 2)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 64)
    monkeypatch.setattr(identity, "PIECE_BYTES", 100)
    before = fingerprint(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[30, 5] += 1
        assert fingerprint(model) == before, "of other tensors there are samples"
        model.model.embed_tokens.weight[30, 5] += 1
    assert fingerprint(model) != before


def test_the_namespace_names_what_a_person_would_look_for() -> None:
    config = namespace_config(small_model())
    assert config["dtype"] == "float32" and config["device"] == "cpu" and config["attention"] == "sdpa"
    assert '"rope_theta"' in config["rope"] and config["model_type"] == "llama"


def test_a_configuration_that_raises_is_refused_in_one_line() -> None:
    class Torn(T.LlamaConfig):
        def get_text_config(self, *_: Any, **__: Any) -> Any:
            raise KeyError("several\ncandidates")

    model = small_model()
    model.config.__class__ = Torn
    with refused("PrefixCache cannot serve a LlamaForCausalLM: KeyError: 'several"):
        PrefixCache(model)
