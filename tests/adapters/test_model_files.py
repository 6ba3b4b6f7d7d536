"""Fingerprints of models and adapters by their files: contents count, places and times do not."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_adapter import model_files
from engine_adapter.model_files import adapter_digest, model_fingerprint
from kvstore.block.errors import BadInput

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": 2}


def write_safetensors(path: Path, tensors: dict[str, bytes], note: str = "") -> None:
    header: dict[str, Any] = {"__metadata__": {"note": note}} if note else {}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def change_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def changed_from(before: str, model: Path, what: str) -> str:
    after = model_fingerprint(model)
    assert after != before, what
    return after


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two weight files of some hundred KiB and a configuration."""
    place = tmp_path / "model"
    place.mkdir()
    rng = random.Random(11)
    (place / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(
        place / "model-1.safetensors", {f"layer.{n}": rng.randbytes(100_000 + n) for n in range(4)}, "first"
    )
    write_safetensors(place / "model-2.safetensors", {"head": rng.randbytes(300_000)})
    return place


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model is a large one."""
    monkeypatch.setattr(model_files, "HASH_WHOLE_BYTES", 0)
    monkeypatch.setattr(model_files, "SAMPLES", 3)
    monkeypatch.setattr(model_files, "SAMPLE_BYTES", 64)


def test_a_copy_elsewhere_is_the_same_model(model: Path, tmp_path: Path) -> None:
    before = model_fingerprint(model)
    assert re.fullmatch("[0-9a-f]{64}", before)
    copy = tmp_path / "another place" / "snapshots" / "abc"
    shutil.copytree(model, copy)
    os.utime(copy / "model-1.safetensors", (1, 1))
    (copy / "README.md").write_text("what people read is no part of it")
    (copy / "tokenizer.json").write_text("{}")
    (copy / "training_args.bin").write_bytes(b"what a trainer left")
    assert model_fingerprint(copy) == model_fingerprint(str(copy)) == before
    linked = tmp_path / "links"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert model_fingerprint(linked) == before


def test_files_named_anew_and_fields_without_effect_are_the_same_model(model: Path) -> None:
    before = model_fingerprint(model)
    (model / "model-1.safetensors").rename(model / "z.safetensors")
    assert model_fingerprint(model) == before
    text = {**CONFIG, "_name_or_path": "/home/someone", "eos_token_id": 7, "transformers_version": "9"}
    (model / "config.json").write_text(json.dumps(text, indent=4))
    assert model_fingerprint(model) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "a field of the configuration": lambda m: (m / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 3})),
    "a nested field": lambda m: (m / "config.json").write_text(
        json.dumps({**CONFIG, "rope_parameters": {"rope_theta": 5e5}})
    ),
    "a byte in the middle": lambda m: change_byte(m / "model-2.safetensors", 150_000),
    "the last byte": lambda m: change_byte(m / "model-1.safetensors", -1),
    "the header's note": lambda m: change_byte(m / "model-1.safetensors", 8 + len('{"__metadata__": {"note": "')),
    "one more byte": lambda m: (m / "model-2.safetensors").open("ab").write(b"\0"),
    "one more file": lambda m: (m / "extra.bin").write_bytes(b"x"),
    "one file less": lambda m: (m / "model-2.safetensors").unlink(),
    "quantisation": lambda m: (m / "quantize_config.json").write_text("{}"),
    "which files are read": lambda m: (m / "model.safetensors.index.json").write_text("{}"),
    "model code": lambda m: (m / "modeling.py").write_text("pass"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_kv_changes_the_fingerprint(what: str, model: Path) -> None:
    before = model_fingerprint(model)
    CHANGES[what](model)
    assert model_fingerprint(model) != before


@pytest.mark.usefixtures("sampled")
def test_of_a_large_model_each_tensor_is_sampled(model: Path) -> None:
    before = model_fingerprint(model)
    file = model / "model-1.safetensors"
    for tensor in range(4):
        change_byte(file, -400_006 + 100_000 * tensor + 50_000)  # the four tensors are the file's last 400,006 bytes
        before = changed_from(before, model, f"tensor {tensor}")
    for at in (8 + len('{"__metadata__": {"note": "'), -1, -64, -400_006):
        change_byte(file, at)
        before = changed_from(before, model, f"byte {at}")
    with file.open("ab") as grown:
        grown.write(b"\0")
    assert model_fingerprint(model) != before, "its size counts"


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "transformer.wte.weight", "tokenEmbedding"])
def test_of_a_large_model_each_row_of_the_embeddings_counts(name: str, model: Path) -> None:
    """Training a few new tokens changes their rows, and nothing else."""
    size = 3_000_000
    file = model / "embeddings.safetensors"
    write_safetensors(file, {"first": bytes(100_000), name: bytes(size), "last": bytes(100_000)})
    before = model_fingerprint(model)
    for at in (0, size // 3, size // 2 + 50_000, size - 1):
        change_byte(file, at - size - 100_000)
        before = changed_from(before, model, f"byte {at} of {name}")
    change_byte(file, -100_000 + 20_000)
    assert model_fingerprint(model) == before, "of other tensors there are samples"


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "gguf"])
def test_of_a_large_file_of_another_kind_each_byte_counts(suffix: str, model: Path) -> None:
    """Where its embeddings lie is not known."""
    file = model / f"weights.{suffix}"
    file.write_bytes(random.Random(3).randbytes(3_000_000))
    before = model_fingerprint(model)
    for at in (0, 1_000_001, 2_345_678, 2_999_999):
        change_byte(file, at)
        before = changed_from(before, model, f"byte {at}")


def test_large_is_what_all_files_hold_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    monkeypatch.setattr(model_files, "SAMPLES", 3)
    monkeypatch.setattr(model_files, "SAMPLE_BYTES", 64)
    seen = []
    for limit in (total, total - 1):
        monkeypatch.setattr(model_files, "HASH_WHOLE_BYTES", limit)
        before = model_fingerprint(model)
        change_byte(model / "model-2.safetensors", 20_000)  # in no sample
        seen.append(model_fingerprint(model) != before)
    assert seen == [True, False], "whole up to the limit, samples beyond it"


def test_a_single_file_is_a_model(model: Path, tmp_path: Path) -> None:
    alone = tmp_path / "model.gguf"
    alone.write_bytes(b"GGUF" + bytes(100))
    before = model_fingerprint(alone)
    change_byte(alone, 50)
    assert model_fingerprint(alone) != before
    assert len({before, model_fingerprint(model), model_fingerprint(model / "model-1.safetensors")}) == 3


def test_a_place_without_weights_is_refused_in_one_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "empty" / "optimizer.pt").write_bytes(b"x")
    for place in ("empty", "not there", "meta/hub-id"):
        with pytest.raises(BadInput, match="snapshot directory") as raised:
            model_fingerprint(tmp_path / place)
        assert "\n" not in str(raised.value)
    (model / "model-3.safetensors").symlink_to(tmp_path / "not downloaded yet")
    with pytest.raises(BadInput, match="cannot be read"):
        model_fingerprint(model)
    (model / "model-3.safetensors").unlink()
    (model / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        model_fingerprint(model)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"true",
        struct.pack("<Q", 10) + b'{"a": {} }',
        struct.pack("<Q", 34) + b'{"a": {"data_offsets": [0, 5000]}}',
    ],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match="not a safetensors file"):
        model_fingerprint(model)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    write_safetensors(place / "adapter_model.safetensors", {"a": bytes(2 << 20), "b": b"b" * 1000})
    return place


def test_all_of_an_adapter_counts(adapter: Path, tmp_path: Path) -> None:
    before = adapter_digest(adapter)
    assert before is not None and re.fullmatch("[0-9a-f]{64}", before)
    shutil.copytree(adapter, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("of no account")
    assert adapter_digest(str(tmp_path / "copy")) == before
    seen = {before}
    for change in (
        lambda: (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}'),
        lambda: change_byte(adapter / "adapter_model.safetensors", 1_500_001),
        lambda: (adapter / "new_embeddings.bin").write_bytes(b"x"),
        lambda: (adapter / "new_embeddings.bin").rename(adapter / "other.bin"),
    ):
        change()
        seen.add(adapter_digest(adapter) or "")
    assert len(seen) == 5 and "" not in seen


def test_an_adapter_that_cannot_be_read_has_no_digest(adapter: Path, tmp_path: Path) -> None:
    assert adapter_digest(tmp_path / "not there") is None
    assert adapter_digest(adapter / "adapter_config.json") is None
    (adapter / "adapter_config.json").unlink()
    assert adapter_digest(adapter) is None, "weights without their scale"
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").unlink()
    assert adapter_digest(adapter) is None, "no weights"
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    assert adapter_digest(adapter) is None
