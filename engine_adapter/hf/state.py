"""What changes a model's KV and is in no weight, no buffer and no configuration. Imports torch only.

Two views of it. `described` is text for an identity: which adapters are active, scaled, merged or disabled, hooks,
patched forwards, modules of other libraries. `ModelLook` notices in about a millisecond that anything changed since
the last look. Neither runs the model: `probe` finds out what it computes. Must never put an address, a path or a name
of this process into an identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from engine_adapter.hf.tensors import plain_tensors

LIBRARIES = frozenset(
    "torch transformers transformers_modules peft torchao bitsandbytes gptqmodel optimum compressed_tensors".split()
)
"""Their modules compute from their own fields only. Other code may depend on anything: only running it tells."""

SAMPLES_PER_TENSOR = 8
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
                    step = max(1, len(flat) // SAMPLES_PER_TENSOR)
                    groups.setdefault((tensor.device, size), []).append(flat[step // 2 :: step][:SAMPLES_PER_TENSOR])
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
