"""Identities of models and LoRA adapters, made from the contents of their files.

    model_fingerprint(model_dir) -> str             64 hexadecimal digits, for `Namespace.model`
    adapter_digest(adapter_dir)  -> str | None      64 hexadecimal digits, for an extra key of prompts that use a LoRA

For adapters of engines that load weights themselves, where no model object can be asked. Knows no engine and imports
no torch. A digest covers contents only: no path, no owner and no time enters it, so that copies of a model on several
hosts are one model. Nothing here unpickles or runs what it reads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

from kvstore.block.errors import BadInput
from kvstore.insight.models import names_more_than_text

HASH_WHOLE_BYTES = 256 << 20
"""Models whose weight files have up to this many bytes together are hashed whole. Of larger ones' safetensors files,
samples; other files do not tell where the embeddings lie, which no sample may miss, and are hashed whole."""

SAMPLES, SAMPLE_BYTES = 16, 16 << 10
"""Of a large safetensors file: evenly spread samples, the first and the last bytes among them."""

TENSOR_SAMPLE_BYTES = 4 << 10
"""From the middle of every tensor of a large safetensors file. Training, or merging an adapter, changes all of a tensor
and may change few tensors, which samples spread over the file can miss."""

MAX_HEADER_BYTES = 100 << 20
"""What the safetensors format allows for a header."""

_SAFETENSORS = ".safetensors"
_WEIGHT_SUFFIXES = (_SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")
_WEIGHTS_OF_NO_ENGINE = frozenset("optimizer.bin optimizer.pt scaler.pt scheduler.pt training_args.bin".split())
"""What trainers leave beside weights and engines do not load."""

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_SUFFIXES = (_SAFETENSORS, ".bin", ".pt")

_CONFIG = "config.json"
_SETTINGS = frozenset(
    "hf_quant_config.json params.json quant_config.json quantize_config.json "
    "model.safetensors.index.json pytorch_model.bin.index.json".split()
)
"""Files besides the configuration that decide what an engine makes of the weights. Model code (*.py) is another."""

_FIELDS_WITHOUT_EFFECT = frozenset(
    "_commit_hash _name_or_path bos_token_id eos_token_id id2label initializer_range label2id output_attentions "
    "output_hidden_states pad_token_id problem_type return_dict transformers_version use_cache".split()
)
"""Fields of a configuration, at any depth, that do not change KV. All others do, unknown ones included."""

_PIECE_BYTES = 1 << 20


def model_fingerprint(model_dir: str | Path) -> str:
    """BLAKE2b-256 of a model's configuration and weight files, as hexadecimal text.

    model_dir: the directory that the engine loads from, or a single weight file. A hub id is not looked up: give the
    directory of its snapshot. Covers the fields of config.json that can change KV, quantisation settings, indices and
    model code; of every weight file (*.safetensors, *.bin, *.pt, *.pth, *.gguf) its size, and all bytes, but for the
    safetensors files of models above 256 MiB: of those the whole header, the token embeddings, 4 KiB of each other
    tensor, and 16 samples of 16 KiB. A change so small that it hides between the samples, such as an edit of single
    weights in place, has to be announced by `weights_epoch`.

    Raises `BadInput`, one line, where there are no weights or they cannot be read.
    """
    place = Path(model_dir)
    try:
        files = _files(place)
        weights = [one for one in files if one.suffix in _WEIGHT_SUFFIXES and one.name not in _WEIGHTS_OF_NO_ENGINE]
        if not weights:
            raise BadInput(
                f"no weight files in {place}; give the directory that holds the model's "
                f"{', '.join('*' + suffix for suffix in _WEIGHT_SUFFIXES)} (of a hub id, its snapshot directory)"
            )
        whole = sum(path.stat().st_size for path in weights) <= HASH_WHOLE_BYTES
        state = blake2b(digest_size=32, person=b"kv-files-v1")
        for digest in [_config_digest(place), *sorted(_weight_digest(path, whole=whole) for path in weights)]:
            state.update(digest)
        for path in (one for one in files if one.is_file() and (one.name in _SETTINGS or one.suffix == ".py")):
            state.update(path.name.encode() + b"\0" + _whole_digest(path))
    except OSError as error:
        raise BadInput(
            f"the model files in {place} cannot be read ({error.strerror or error}); give a directory with a model's "
            "weights (of a hub id, its snapshot directory)"
        ) from None
    return state.hexdigest()


def snapshot_directory(model: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """Where a model's files are: a path as it is, a hub id's snapshot in the cache of this host. Raises `BadInput`."""
    if Path(model).exists():
        return str(model)
    from huggingface_hub import snapshot_download  # only where a model is named by its hub id

    try:
        return str(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError) as error:
        raise BadInput(f"the files of model {model!r} were not found on this host ({type(error).__name__})") from None


def takes_more_than_text(model_dir: str | Path) -> bool:
    """Whether the model's configuration, where there is one, speaks of images, video or sound. Raises `BadInput`."""
    return names_more_than_text(_config(Path(model_dir)) or {})


def adapter_digest(adapter_dir: str | Path) -> str | None:
    """BLAKE2b-256 of all files of a LoRA adapter, whole, as hexadecimal text: configuration and weights, with their
    names. None where there is no such adapter or a file of it cannot be read: then its KV must not be stored."""
    place = Path(adapter_dir)
    try:
        files = [path for path in _files(place) if path.suffix in _ADAPTER_SUFFIXES]
        if not files:
            return None
        state = blake2b(digest_size=32, person=b"kv-adapter-v1")
        for path in [place / _ADAPTER_CONFIG, *files]:
            state.update(path.name.encode() + b"\0" + _whole_digest(path))
    except OSError:
        return None
    return state.hexdigest()


def is_embedding(tensor_name: str) -> bool:
    """Whether a tensor has a row for each token. A fingerprint covers each row: training may change those of a few new
    tokens alone, which no sample meets."""
    return any(part in tensor_name.lower() for part in ("embed", "wte"))


def spread(start: int, stop: int, samples: int, sample_bytes: int) -> Iterator[tuple[int, int]]:
    """Where samples of a range lie: evenly spread, the first and the last bytes among them; of a short one all."""
    if stop - start <= samples * sample_bytes:
        yield start, stop
        return
    last = stop - start - sample_bytes
    for number in range(samples):
        at = start + last * number // (samples - 1)
        yield at, at + sample_bytes


# Inside ------------------------------------------------------------------------------------------------------------


def _files(place: Path) -> list[Path]:
    """Including dangling links: they mean an incomplete download, and reading them fails."""
    return [place] if place.is_file() else sorted(path for path in place.iterdir() if not path.is_dir())


def _config_digest(place: Path) -> bytes:
    config = _config(place)
    text = json.dumps(_that_count(config), sort_keys=True) if config is not None else ""
    return blake2b(text.encode(), digest_size=32).digest()


def _config(place: Path) -> Any:
    path = place / _CONFIG
    if place.is_file() or not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise BadInput(f"{path} is not JSON; it is the model's configuration, which names its weights' use") from None


def _that_count(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _that_count(field) for name, field in value.items() if name not in _FIELDS_WITHOUT_EFFECT}
    return [_that_count(item) for item in value] if isinstance(value, list) else value


def _weight_digest(path: Path, *, whole: bool) -> bytes:
    if whole or path.suffix != _SAFETENSORS:
        return _whole_digest(path)
    size = path.stat().st_size
    state = blake2b(size.to_bytes(8, "little"), digest_size=32)
    with path.open("rb") as file:
        for start, stop in _ranges(file, size, path):
            file.seek(start)
            state.update(start.to_bytes(8, "little") + file.read(stop - start))
    return state.digest()


def _whole_digest(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(size.to_bytes(8, "little"), digest_size=32)).digest()


def _ranges(file: BinaryIO, size: int, path: Path) -> Iterator[tuple[int, int]]:
    data, tensors = _safetensors_header(file, size, path)
    yield 0, data
    for start, stop, name in tensors:
        if is_embedding(name):
            for piece in range(data + start, data + stop, _PIECE_BYTES):
                yield piece, min(piece + _PIECE_BYTES, data + stop)
            continue
        middle = data + (start + stop - TENSOR_SAMPLE_BYTES) // 2
        yield max(data + start, middle), min(data + stop, middle + TENSOR_SAMPLE_BYTES)
    yield from spread(data, size, SAMPLES, SAMPLE_BYTES)


def _safetensors_header(file: BinaryIO, size: int, path: Path) -> tuple[int, list[tuple[int, int, str]]]:
    """Where the data begins, and each tensor's (start, stop, name) in it, in the order in which they lie.

    The format: 8 bytes, the header's length (little-endian); the header, which is JSON; the data.
    """
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
        offsets = [(*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__"]
        tensors = sorted((int(start), int(stop), name) for start, stop, name in offsets)
        if any(not 0 <= start <= stop <= size - 8 - length for start, stop, _ in tensors):
            raise ValueError("a tensor outside the file")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path} is not a safetensors file ({error}); is it still being downloaded?") from None
    return 8 + length, tensors


# Digests of adapters, for a thread that must not wait -----------------------------------------------------------------


MAX_ADAPTERS = 4096
"""With more, the adapter that was seen first is forgotten, and read again when it is next used."""
Signature = tuple[tuple[str, int, int, int], ...]
UNREADABLE = "the adapter's files cannot be read"


@dataclass(slots=True)
class _Known:
    signature: Signature
    digest: str = ""
    detail: str = "the adapter's files are being read"


class AdapterDigests:
    """Digests by the engine's number of each adapter. One thread asks.

    An engine reads an adapter's files once, under a number that it gives the adapter, and keeps the weights; the files
    at the path may change later. So a digest belongs to a number and to the files as they were then. If the files
    change and the engine reads them anew, the adapter gets a new digest; if it does not, the adapter's weights are in
    doubt, and nothing is cached for it any more.
    """

    def __init__(self, digest: Callable[[Path], str | None]) -> None:
        """digest: of an adapter's folder; None if it cannot be read. Called in threads."""
        self._digest = digest
        self._known: dict[int, _Known] = {}

    def of(self, number: int, path: str, *, reads_anew: bool) -> tuple[str, str]:
        """An adapter's digest, or why there is none: ("", detail). reads_anew: the engine loads it for this request."""
        signature, known = _signature(Path(path)), self._known.get(number)
        if known is None or (known.signature != signature and reads_anew):
            known = self._known[number] = _Known(signature)
            if len(self._known) > MAX_ADAPTERS:
                del self._known[next(iter(self._known))]
            if signature:
                threading.Thread(target=self._read, args=(known, Path(path)), name="kv-adapter", daemon=True).start()
            else:
                known.detail = UNREADABLE
        elif known.signature != signature:
            known.digest, known.detail = "", "the adapter's files have changed since the engine read them"
            return "", known.detail
        return known.digest, known.detail

    def _read(self, known: _Known, path: Path) -> None:
        digest = self._digest(path)
        if digest is None:
            known.detail = UNREADABLE
        elif _signature(path) != known.signature:
            known.detail = "the adapter's files changed while they were read"
        else:
            known.digest = digest


def _signature(path: Path) -> Signature:
    try:
        files = sorted(one for one in path.iterdir() if one.is_file())
        stats = [(one.name, one.stat()) for one in files]
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
