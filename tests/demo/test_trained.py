"""The trained model as it is shipped: its digest, and that it has learned something, also far into a text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: hf)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

import torch

import kvstore.demo
from kv_bench import corpus
from kv_bench.corpus import TextFile, read_sources, windows
from kvstore.block.errors import BadInput, StoreError
from kvstore.demo.passes import build_model, load_trained, trained_origin

TRAINED = Path(kvstore.demo.__file__).parent / "trained"

RANDOM_NATS = 5.545
"""ln 256: what a model that knows nothing loses on a byte. One that knows how often each occurs loses 3.1."""

LARGEST_NATS = 2.2


def losses(model: Any, text: bytes) -> Any:
    tokens = torch.tensor([list(text)])
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_trained()


def test_it_predicts_held_out_text_of_this_machine_also_far_behind_the_start(model: Any) -> None:
    found = torch.stack([losses(model, text) for text in windows(read_sources(held_out=True), 4096, 6)])
    near, far = float(found[:, :2048].mean()), float(found[:, 2048:].mean())
    assert near < LARGEST_NATS and far < LARGEST_NATS, (near, far)
    assert float(losses(build_model(0, 512, layers=1), windows(read_sources(held_out=True), 512, 1)[0]).mean()) > 5


def test_its_shape_is_as_documented(model: Any) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.max_position_embeddings == 4096
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_820_352
    assert next(model.parameters()).dtype is torch.float32 and not model.training
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_origin_says_how_well_it_does_at_every_position() -> None:
    by_position = trained_origin()["held_out_nats_per_byte"]
    middle = by_position["512 to 1024"]
    assert by_position["all"] < LARGEST_NATS
    for bucket in ("2048 to 3072", "3072 to 4096"):
        assert by_position[bucket] < middle + 0.1, "it was trained on long texts"
    assert by_position["last 512"] < by_position["last 512 without what is before them"]


def test_changed_weights_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "trained"
    shutil.copytree(TRAINED, copy)
    monkeypatch.setattr("kvstore.demo.passes.resources.files", lambda package: tmp_path)
    load_trained()
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(StoreError, match=r"is damaged: SHA-256 .* install kvstore again"):
        load_trained()


# The text -------------------------------------------------------------------------------------------------------


def test_the_split_goes_by_name_alone() -> None:
    held_out, learned = read_sources(held_out=True), read_sources(held_out=False)
    names = {source.name for source in held_out}
    assert names and not names & {source.name for source in learned}
    assert 0.01 < len(names) / (len(names) + len(learned)) < 0.12
    assert all(TextFile(source.name, b"").is_held_out for source in held_out)
    assert not any({"test", "tests", "encodings", "site-packages"} & set(name.split("/")) for name in names)


def test_a_python_without_sources_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BadInput, match="has no sources of Python's standard library; use a Python"):
        read_sources(held_out=True)
