"""Which KV a Hugging Face model computes at this moment (its identity), and whether that changed since the last look.

    1. every request   a look at the model's state (`ModelLook`, a millisecond): if nothing changed, the identity stands
    2. a change, or too long since the last run   the probe is run (`Probe`); its digest is part of the identity
    3. code that may change unseen (hooks, patched forwards)   the probe is run for every request

An identity has a fingerprint of weights and configuration, text for what is in neither (`described`: which adapters are
active, scaled, merged or disabled, hooks, patched forwards, modules of other libraries), and a digest of the KV of one
short prompt:

    chunk 1   p0 p1 p2 p3 p4 p5 p6 p7                              the first chunk attends to itself alone,
    chunk 2                           p8 p9 ... p15                the second one to what is behind it as well

The same prompt on one thread gives the same bits in every process of a machine, however many threads the process has
otherwise. Imports torch only: a configuration is a bag of attributes. Must never put an address, a path or a name of
this process into an identity, leave a setting of torch changed, let two models that compute differently have one
digest, or say that nothing changed because it did not look.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from logging import getLogger
from math import sqrt
from operator import itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_module

from engine_adapter.hf.kinds import CacheKinds, Path, values
from engine_adapter.hf.layers import ModelCall
from engine_adapter.model_files import is_embedding, spread
from kvstore.block.errors import BadInput
from kvstore.client.edge import contained

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


MAX_NESTED = 8
"""Wrappers within each other; torchao has two."""


def plain_tensors(name: str, tensor: torch.Tensor, nested: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own that this one wraps, by name; the name includes the wrapper's context for
    them. The tensor itself where it wraps none.

    Quantisation libraries subclass torch.Tensor, and such tensors cannot be viewed as bytes; torch's own protocol for
    these subclasses, which torch.compile needs too, names the tensors inside. Raises `BadInput` where one has no names.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    try:
        inner_names, context = tensor.__tensor_flatten__()
        held = {inner: getattr(tensor, inner) for inner in inner_names}
        if nested == MAX_NESTED or not all(isinstance(one, torch.Tensor | None) for one in held.values()):
            raise TypeError
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise unreadable(name, tensor, error) from error
    said = _ADDRESS.sub("", str(context))
    for inner, one in held.items():
        if one is not None:
            yield from plain_tensors(f"{name}.{inner} of {type(tensor).__name__} {said}", one, nested + 1)


def unreadable(name: str, tensor: torch.Tensor, error: Exception) -> BadInput:
    return BadInput(
        f"the weight {name} is a {type(tensor).__name__} that cannot be read "
        f"({type(error).__name__}): what it computes cannot be told from other weights"
    )


# State that is in no weight, no buffer and no configuration -----------------------------------------------------------


LIBRARIES = frozenset(
    "torch transformers transformers_modules peft torchao bitsandbytes gptqmodel optimum compressed_tensors".split()
)
"""Their modules compute from their own fields only. Other code may depend on anything: only running it tells."""

NUMBERS_PER_TENSOR = 8
"""Numbers of each weight that every look reads: an edit through `tensor.data` shows in nothing else."""

MAX_ITEMS = 1024
MAX_DEPTH = 5

_PLAIN_LIBRARIES = ("torch", "transformers", "transformers_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) | {"_is_hf_initialized", "_hf_hook", "_old_forward", "forward"}
LONGROPE = "longrope"
_OF_REQUESTS = frozenset({"rope_deltas", "_experts_implementation_internal"})
"""Fields that `generate` sets itself: positions, of which every call is given its own (`ModelCall.positions`), and how
experts are computed while it decodes on a GPU; between two calls that is in `namespace_config`."""
_ATOMS = (str, bool, int, type(None), float)


def described(model: torch.nn.Module) -> str:
    """Canonical text; empty for a model of transformers without adapters, hooks and patches."""
    entries = ((name, _module_described(module)) for name, module in model.named_modules())
    found = {name: entry for name, entry in entries if entry}
    everywhere = [_value(hook) for hook in _global_hooks()]
    return json.dumps([found, everywhere], sort_keys=True) if found or everywhere else ""


def is_opaque(model: torch.nn.Module) -> bool:
    """Whether code runs in the model that may change what it does without changing anything that can be looked at."""
    return bool(_global_hooks()) or any(
        _library(type(module)) not in LIBRARIES or "forward" in module.__dict__ or _hooks(module)
        for module in model.modules()
    )


def compiled_part(model: torch.nn.Module) -> str | None:
    """The name of the first module that torch.compile works on; None where there is none."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return name or "the model itself"
    return None


def switching_rope(module: torch.nn.Module) -> str:
    """The kind of a rope that writes other frequencies into itself as sequences grow; "" for all other modules. What
    it computes is seen by the probe, whose prompt is short."""
    kinds = getattr(module, "rope_type", "")
    given = kinds.values() if isinstance(kinds, dict) else [kinds]
    return next((kind for kind in given if kind == LONGROPE or (isinstance(kind, str) and "dynamic" in kind)), "")


class ModelLook:
    """What a model's state was at one moment, to be compared with what it is: a millisecond for 400 modules.

    Containers are compared with copies and all else by identity first, so that this runs in the interpreter's own code.
    Weights are compared by address, version and a few of their numbers, and are not kept alive.
    """

    def __init__(self, model: torch.nn.Module, sampler: WeightSampler) -> None:
        self._sampler, self._switches = sampler, _switches()
        self._classes = [(module, type(module)) for module in model.modules()]
        self._containers: list[tuple[Any, Any]] = []
        self._of_requests: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._holders: list[dict[str, Any]] = []
        self._loose: dict[str, torch.Tensor] = {}
        watched = [getattr(model, "config", None), *(one for one, _ in self._classes if not switching_rope(one))]
        for fields in (vars(one) for one in watched if one is not None):
            if _OF_REQUESTS.isdisjoint(fields):
                self._containers.append((fields, dict(fields)))
            else:
                self._of_requests.append((fields, _lasting(fields)))
            for name, value in fields.items():
                if name in ("_parameters", "_buffers"):
                    self._holders.append(value)
                elif name not in _OF_REQUESTS:
                    self._add(value, MAX_DEPTH)
        self._holders.append(self._loose)
        self._weights = self._places()
        self._numbers = sampler.numbers(self._weights)

    def is_same_state(self) -> bool:
        """Whether nothing but weights may have changed since."""
        try:
            return (
                self._switches == _switches()
                and all(type(module) is kind for module, kind in self._classes)
                and all(now == before for now, before in self._containers)
                and all(_lasting(now) == before for now, before in self._of_requests)
            )
        except (RuntimeError, TypeError, ValueError):
            return False  # values that cannot be compared count as changed

    def is_same_weights(self) -> bool:
        """Whether every parameter and buffer has the address, version and sampled numbers that it had."""
        places = self._places()
        return places == self._weights and self._sampler.numbers(places) == self._numbers

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            self._containers.append((value, dict(value)))
            inside: Any = value.values()
        elif isinstance(value, list):
            self._containers.append((value, list(value)))
            inside = value
        elif isinstance(value, set):
            self._containers.append((value, set(value)))
            return
        elif isinstance(value, tuple):
            inside = value
        else:
            if isinstance(value, torch.Tensor):
                self._loose[str(len(self._loose))] = value
            return
        if depth and len(inside) <= MAX_ITEMS:
            for item in inside:
                self._add(item, depth - 1)

    def _places(self) -> list[object]:
        places: list[object] = []
        for holder in self._holders:
            for name, tensor in holder.items():
                if tensor is not None:
                    places.append(name)
                    _add_places(places, tensor)
        return places


def _add_places(places: list[object], tensor: torch.Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):
        for _, inner in plain_tensors("", tensor):
            _add_places(places, inner)
        return
    version = -1 if tensor.is_inference() else tensor._version
    places += (tensor.data_ptr(), version, tensor.shape, tensor.dtype)


def _lasting(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _OF_REQUESTS}


class WeightSampler:
    """Reads a few numbers of each of a model's tensors in one copy."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._places: list[object] = []
        self._views: list[list[torch.Tensor]] = []

    def numbers(self, places: list[object]) -> bytes:
        """Their bytes. places: where the tensors lie; views are made anew where that changed."""
        if places != self._places:
            self._views = self._viewed()
            self._places = list(places)
        return b"".join(torch.cat(views).cpu().numpy().tobytes() for views in self._views)

    def _viewed(self) -> list[list[torch.Tensor]]:
        groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        for module in self._model.modules():
            if switching_rope(module):
                continue
            held = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
            for tensor in (tensor for one in held for _, tensor in plain_tensors("", one)):
                size = tensor.element_size()
                if tensor.is_contiguous() and tensor.numel() and size in kinds and tensor.device.type != "meta":
                    flat = tensor.detach().view(-1).view(kinds[size])
                    step = max(1, len(flat) // NUMBERS_PER_TENSOR)
                    groups.setdefault((tensor.device, size), []).append(flat[step // 2 :: step][:NUMBERS_PER_TENSOR])
        return list(groups.values())


def _switches() -> list[object]:
    return [
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *_global_hooks(),
    ]


def _global_hooks() -> list[object]:
    kinds = ("_global_forward_pre_hooks", "_global_forward_hooks")
    return [hook for kind in kinds for hook in getattr(torch_module, kind, {}).values()]


# Text for an identity -----------------------------------------------------------------------------------------------


def _module_described(module: torch.nn.Module) -> dict[str, object]:
    kind = type(module)
    entry: dict[str, object] = {}
    if _library(kind) not in _PLAIN_LIBRARIES:
        entry["class"] = _named(kind)
        entry["fields"] = {
            name: _value(value) for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE
        }
    if "forward" in module.__dict__:
        entry["forward"] = _value(module.__dict__["forward"])
    if hooks := _hooks(module):
        entry["hooks"] = [_value(hook) for hook in hooks]
    return entry


def _hooks(module: torch.nn.Module) -> list[object]:
    """All but those of transformers, which only read outputs, and come and go with earlier calls."""
    return [
        hook
        for kind in _HOOKS
        for hook in module.__dict__[kind].values()
        if str(getattr(hook, "__module__", "")).partition(".")[0] != "transformers"
    ]


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _named(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"


def _value(value: Any, depth: int = MAX_DEPTH) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, bytes | torch.dtype | torch.device | torch.Size):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype), _tensor_digest(value)]
    if isinstance(value, torch.nn.Module) or not depth:
        return _named(type(value))  # a module has its own entry
    if isinstance(value, type):
        return _named(value)
    if isinstance(value, Mapping):
        return [[_value(key, depth - 1), _value(value[key], depth - 1)] for key in sorted(value, key=str)][:MAX_ITEMS]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [_value(item, depth - 1) for item in value[:MAX_ITEMS]]
    return _code(value, depth)


def _code(value: Any, depth: int) -> Any:
    if isinstance(value, partial):
        return ["partial", *(_value(part, depth - 1) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return ["method", _value(value.__func__, depth - 1), _value(value.__self__, depth - 1)]
    if isinstance(value, FunctionType):
        digest = blake2b(digest_size=16)
        for piece in _code_pieces(value.__code__):
            digest.update(piece)
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        parts = (held, value.__defaults__, value.__kwdefaults__)
        return [_named(value), digest.hexdigest(), *(_value(part, depth - 1) for part in parts)]
    return [_named(type(value)), _value(getattr(value, "__dict__", None), depth - 1)]


def _code_pieces(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_pieces(constant)
        elif isinstance(constant, _ATOMS):
            yield repr(constant).encode()


def _is_filled(cell: Any) -> bool:
    with suppress(ValueError):
        return cell.cell_contents is not None
    return False


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = blake2b(digest_size=16)
    for _, inner in plain_tensors("", tensor):
        if inner.device.type != "meta":
            digest.update(inner.detach().cpu().contiguous().view(-1)[: 1 << 20].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Weights and configuration --------------------------------------------------------------------------------------------


HASH_WHOLE_BYTES = 256 << 20
"""Models up to this size are hashed whole; of larger ones the token embeddings, and samples of every other tensor."""

SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 16 << 10
PIECE_BYTES = 16 << 20
"""A tensor that is hashed whole is copied to the host in such pieces."""

_FIELDS_WITHOUT_EFFECT = frozenset(
    "_name_or_path architectures bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range "
    "label2id max_position_embeddings output_attentions output_hidden_states pad_token_id problem_type return_dict "
    "transformers_version use_cache".split()
)
"""Fields of a configuration that do not change KV. All others do, unknown ones included."""


def check_model(model: torch.nn.Module) -> None:
    """Raise `BadInput`, with one line, for a model whose KV cannot be stored by prefix or that is not ready to run.

    What its caches hold is found out by a trial run (`probe`).
    """
    check_not_wrapped(model)
    config: Any = getattr(model, "config", None)
    name = getattr(config, "model_type", type(model).__name__)
    if config is None or not getattr(model, "can_generate", bool)():
        raise refusal(name, "it is not a language model of transformers with `generate` (a ...ForCausalLM class)")
    if getattr(config, "is_encoder_decoder", False) or not getattr(config, "is_causal", True):
        raise refusal(name, "it is not a decoder with causal attention")
    if model.training:
        raise BadInput("the model is in training mode; call model.eval() first")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or devices == {"meta"}:
        raise BadInput(f"the model's weights are on {', '.join(sorted(devices))}; put them on one device")


def check_not_wrapped(model: torch.nn.Module) -> None:
    """Raise `BadInput` for a wrapper around a model, or a compiled model; the line says what to pass instead."""
    kind, reason = type(model), ""
    if hasattr(model, "_orig_mod"):
        reason = "it is compiled by torch.compile; pass the model that was compiled (model._orig_mod)"
    elif part := compiled_part(model):
        reason = f"torch.compile works on {part}, for lengths that change with every chunk, so that its numbers depend "
        reason += "on earlier calls; pass a model that is not compiled"
    elif kind.__module__.startswith("peft.") and hasattr(model, "get_base_model"):
        reason = f"it is wrapped in peft's {kind.__name__}; pass model.get_base_model(), in which the adapter stays as "
        reason += "active as it is"
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            reason = f"{kind.__name__} puts virtual tokens in front of a prompt, which no prompt names"
    elif isinstance(getattr(model, "module", None), torch.nn.Module):
        reason = f"it is wrapped in {kind.__name__}; pass the model inside (model.module)"
    if reason:
        raise refusal(getattr(getattr(model, "config", None), "model_type", kind.__name__), reason)


def refusal(model_type: str, reason: str) -> BadInput:
    return BadInput(f"PrefixCache cannot serve model type {model_type!r}: {reason}")


def fingerprint(model: torch.nn.Module) -> str:
    """BLAKE2b-256 of a model's weights and configuration, as hexadecimal text.

    Covers the name, shape and dtype of every parameter and buffer, and their bytes: all of them up to 256 MiB in total,
    beyond that all of the token embeddings, of which training may change the rows of a few new tokens alone, and 16
    samples of 16 KiB from each other tensor (0.1 s for 8 billion parameters, and a second for each GB of embeddings).
    Of a quantised weight it covers the tensors that it is made of. A change so small that it hides between the samples,
    such as an edit of single weights in place, has to be announced by `weights_epoch`.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = sorted((pair for name, tensor in held.items() for pair in plain_tensors(name, tensor)), key=itemgetter(0))
    whole = {name for name, _ in tensors}
    if sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) > HASH_WHOLE_BYTES:
        tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
        rows = {id(tensor) for table in tables for tensor in table.parameters()}
        embeddings = [(of, tensor) for of, tensor in held.items() if id(tensor) in rows or is_embedding(of)]
        whole = {name for of, tensor in embeddings for name, _ in plain_tensors(of, tensor)}
    state = blake2b(digest_size=32, person=b"kv-model-v1")
    state.update(_config_text(model).encode())
    for name, tensor in tensors:
        state.update(f"\0{name}\0{list(tensor.shape)}\0{tensor.dtype}\0".encode())
        try:
            for piece in _pieces(tensor, whole=name in whole):
                state.update(piece.cpu().numpy().tobytes())
        except (RuntimeError, TypeError) as error:  # a subclass that names no inner tensors and hides its bytes
            raise unreadable(name, tensor, error) from error
    return state.hexdigest()


def rope_switch(model: torch.nn.Module) -> tuple[str, int]:
    """The kind of a rope whose frequencies depend on a sequence's length, and up to how many tokens they do not. Beyond
    that longrope has one other table, and a dynamic rope one for each length. ("", 0) for a rope that never changes."""
    for module in model.modules():
        if kind := switching_rope(module):
            held: Any = module
            most = held.config.rope_parameters.get("original_max_position_embeddings") if kind == LONGROPE else None
            return kind, int(most or held.original_max_seq_len)
    return "", 0


def namespace_config(model: torch.nn.Module) -> dict[str, str]:
    """Fields of the namespace that a person can read when two models' KV are not interchangeable."""
    config: Any = model.config
    return {
        "model_type": str(config.model_type),
        "rope": json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True, default=str),
        "dtype": _dtype_name(model),
        "device": next(model.parameters()).device.type,
        "attention": str(config._attn_implementation),
        "experts": str(getattr(config, "_experts_implementation", None)),
    }


def _pieces(tensor: torch.Tensor, *, whole: bool) -> Iterator[torch.Tensor]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if whole:
        yield from data.split(PIECE_BYTES)
    else:
        ranges = spread(0, data.numel(), SAMPLES_PER_TENSOR, SAMPLE_BYTES)
        yield torch.cat([data[start:stop] for start, stop in ranges])


def _config_text(model: torch.nn.Module) -> str:
    config: Any = model.config
    fields = {name: value for name, value in config.to_dict().items() if name not in _FIELDS_WITHOUT_EFFECT}
    return json.dumps(fields, sort_keys=True, default=str)


def _dtype_name(model: torch.nn.Module) -> str:
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    parameter = next(model.parameters()) if embedding is None else embedding.weight
    return str(parameter.dtype).removeprefix("torch.")


# What it computes -----------------------------------------------------------------------------------------------------


CHUNK = 8
PROBE_TOKENS = 2 * CHUNK
ALIKE = CHUNK // 2
"""In the trial, this many leading tokens of a chunk stay the same, and those behind them change."""

MOST_OF_A_CUT = 0.3
"""Of what is computed in one piece, how much a cut may change. Where a state is not continued, it is all of it."""

Kv = dict[Path, torch.Tensor]
"""What a cache holds: K and V of each layer, [1, kv_heads, tokens, head_dim], and states."""


class Probe:
    """Runs one model over a prompt whose tokens are spread over the vocabulary."""

    def __init__(self, call: ModelCall, model: Any) -> None:
        self._call = call
        self._name = str(model.config.model_type)
        self._device: torch.device = next(model.parameters()).device
        config = model.config.get_text_config()
        types = getattr(config, "layer_types", None) or ()
        self._chunked = [number for number, kind in enumerate(types) if kind == "chunked_attention"]
        vocabulary = int(config.vocab_size)
        step = max(1, vocabulary // PROBE_TOKENS)
        # Spread over the whole vocabulary; adding 3 makes the stride odd where the step is even.
        self._tokens = [(number * step + 3 * number) % vocabulary for number in range(PROBE_TOKENS)]
        self._others = [(token + vocabulary // 2 + 1) % vocabulary for token in self._tokens]

    def digest(self) -> str:
        """Digest of the bits of K and V in every layer. Raises `BadInput` where the model cannot be run."""
        return _digest(self._kv(self._tokens)[0])

    def trial(self) -> tuple[CacheKinds, str | None]:
        """What its caches hold, and the digest, after checking that a token's KV does not depend on tokens behind it,
        nor on where a prompt is cut.

        No digest for a model that computes the same KV but not the same bits twice. Raises `BadInput`, with one line.
        """
        first, cache, before = self._kv(self._tokens)
        try:
            kinds = CacheKinds(before, cache, self._chunked)
        except BadInput as error:
            raise refusal(self._name, f"{error}; call model.generate") from error
        digest: str | None = _digest(first)
        later = "the KV of a token depends on the tokens behind it"
        second = self._kv(self._tokens[: CHUNK + ALIKE] + self._others[CHUNK + ALIKE :])[0]
        if not _is_equal(first, second, kinds, CHUNK + ALIKE):
            again = self._kv(self._tokens)[0]
            if not _is_equal(first, again, kinds, PROBE_TOKENS):
                digest, twice = None, "it does not compute the same KV twice (dropout, noise, a hook)"
                self._check(first, again, kinds, PROBE_TOKENS, twice)
            self._check(first, second, kinds, CHUNK + ALIKE, later)
        self._check(first, self._kv(self._tokens[:ALIKE] + self._others[ALIKE:CHUNK])[0], kinds, ALIKE, later)
        for mine, theirs in _leading(first, self._kv(self._tokens, PROBE_TOKENS)[0], kinds, PROBE_TOKENS):
            # Other shapes round otherwise, and a token on the edge between two experts may go to the other one.
            if (mine.float() - theirs.float()).norm() > MOST_OF_A_CUT * mine.float().norm():
                raise refusal(self._name, "it computes something else where a prompt is cut; call model.generate")
        return kinds, digest

    def _kv(self, tokens: Sequence[int], chunk: int = CHUNK) -> tuple[Kv, Any, dict[Path, Any]]:
        """What a cache holds behind the tokens, that cache, and what it held behind the first chunk."""
        before: dict[Path, Any] = {}
        with contained(self._refuse), _one_thread(self._device):
            cache, token_ids = self._call.new_cache(), torch.tensor([tokens], device=self._device)
            positions = self._call.positions(token_ids, torch.ones_like(token_ids))
            for begin in range(0, len(tokens), chunk):
                before = before or dict(values(cache)) if begin else before
                self._call(token_ids[:, begin : begin + chunk], cache, begin, positions)
        held = {path: one for path, one in values(cache).items() if isinstance(one, torch.Tensor) and one.ndim}
        return {path: one.clone() for path, one in held.items()}, cache, before

    def _refuse(self, error: Exception) -> None:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise refusal(self._name, f"a trial run failed: {said}; call model.generate") from error

    def _check(self, one: Kv, other: Kv, kinds: CacheKinds, tokens: int, reason: str) -> None:
        for mine, theirs in _leading(one, other, kinds, tokens):
            # Only rounding may differ: where a chunk is split among experts, shapes depend on all of its tokens.
            tolerance = min(1e-2, sqrt(torch.finfo(mine.dtype).eps))
            mine, theirs = mine.float(), theirs.float()
            if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance * float(mine.abs().max())):
                raise refusal(self._name, f"{reason}; call model.generate")


def _digest(kv: Kv) -> str:
    state = blake2b(digest_size=16, person=b"kv-probe-v1")
    for plane in kv.values():
        state.update(f"{list(plane.shape)}{plane.dtype}".encode())
        state.update(plane.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _leading(one: Kv, other: Kv, kinds: CacheKinds, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what both hold of the first so many tokens; states only where that is all."""
    grown = [path for path in one if path not in kinds.states and path not in kinds.positions]
    states = [path for path in kinds.states if tokens == PROBE_TOKENS]
    pairs = [(one[path][..., :tokens, :], other[path][..., :tokens, :]) for path in grown]
    return [*pairs, *((one[path], other[path]) for path in states)]


def _is_equal(one: Kv, other: Kv, kinds: CacheKinds, tokens: int) -> bool:
    return all(
        torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        for mine, theirs in _leading(one, other, kinds, tokens)
    )


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run on one thread: on a CPU, the number of threads decides how sums are split, and so their last bits."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


# Whether that changed since the last look -----------------------------------------------------------------------------


PROBE_SECONDS = 5.0
"""A digest is trusted for this long, or for 100 times the probe's duration if that is longer: it costs at most 1 %."""

T = TypeVar("T")
_log = getLogger(__name__)


@dataclass(frozen=True)
class ModelIdentity:
    """weights: their fingerprint. config: fields of the namespace. is_plain: nothing but weights and configuration
    decides what the model computes."""

    weights: str
    config: tuple[tuple[str, str], ...]
    is_plain: bool


class ModelWatch:
    """Looks at one model for one cache. call: its forward passes. kinds: what its caches hold."""

    def __init__(self, model: torch.nn.Module, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `BadInput`, with one line, for a model that cannot be served."""
        self._model = model
        self._clock = clock
        self.probes = 0
        self.generation = 0
        """Counts the changes that were found: a request of an earlier generation began with another model."""
        self._sampler = WeightSampler(model)
        self._digest: str | None = None
        self._try()
        self._check_digest()
        self._weights = fingerprint(model)
        self._seen = ModelLook(model, self._sampler)

    def identity(self) -> ModelIdentity:
        """As of now. Raises `BadInput` where the model cannot be served any longer."""
        is_same_state, is_same_weights = self._seen.is_same_state(), self._seen.is_same_weights()
        is_same = is_same_state and is_same_weights
        if not is_same or self.is_opaque or self._clock() >= self._good_until:
            self._look_again(is_same_state, is_same_weights)
        fields = namespace_config(self._model)
        if self._digest is not None:
            fields["computes"] = self._digest
        if self._text:
            fields["state"] = blake2b(self._text.encode(), digest_size=16, person=b"kv-state-v1").hexdigest()
        return ModelIdentity(self._weights, tuple(fields.items()), not self._text)

    def is_still(self, generation: int) -> bool:
        """Whether a look finds the model as it was in that generation; and a run of the probe, if code may change
        unseen."""
        if generation != self.generation or not (self._seen.is_same_state() and self._seen.is_same_weights()):
            return False
        try:
            return not self.is_opaque or self._probe.digest() == self._digest
        except BadInput:
            return False

    def _look_again(self, is_same_state: bool, is_same_weights: bool) -> None:
        before = self._digest
        if not (is_same_state and is_same_weights):
            self._try()
        elif self._digest is not None:
            self._digest = self._probed(self._probe.digest)
        if not is_same_weights or (is_same_state and self._digest != before):
            self._weights = fingerprint(self._model)
        if not (is_same_state and is_same_weights) or self._digest != before:
            self.generation += 1
        self._check_digest()
        self._seen = ModelLook(self._model, self._sampler)

    def _try(self) -> None:
        check_model(self._model)
        self.device: torch.device = next(self._model.parameters()).device
        self.call = ModelCall(self._model)
        self.is_opaque = is_opaque(self._model)
        self.rope = rope_switch(self._model)
        config: Any = self._model.config
        self.picture_token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        self._probe = Probe(self.call, self._model)
        self._text = described(self._model)
        self.kinds, self._digest = self._probed(self._probe.trial)

    def _probed(self, run: Callable[[], T]) -> T:
        start = self._clock()
        self.probes += 1
        result = run()
        now = self._clock()
        self._good_until = now + max(PROBE_SECONDS, 100 * (now - start))
        return result

    def _check_digest(self) -> None:
        says = "its KV has other last bits in every run, so"
        if self._digest is None and self._text:
            config: Any = self._model.config
            raise refusal(config.model_type, f"{says} what adapters, hooks or patches change cannot be told")
        if self._digest is None:
            _log.warning("of the model: %s it is identified by weights and configuration alone", says)
