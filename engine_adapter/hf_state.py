"""What changes a model's KV and is in no weight, no buffer and no configuration (floor 3). Imports torch only.

Two views of it. `described` is text for an identity: which adapters are active, scaled, merged or disabled, hooks,
patched forwards, modules of other libraries. `ModelLook` notices in about a millisecond that anything changed since
the last look. Neither runs the model: what it computes is for `hf_probe` to find out. Must never put an address, a
path or a name of this process into an identity.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from engine_adapter.hf_tensors import plain_tensors

LIBRARIES = frozenset(
    "torch transformers transformers_modules peft torchao bitsandbytes gptqmodel optimum compressed_tensors".split()
)
"""Whose modules compute by what they hold. Code from anywhere else may depend on anything: only running it tells."""

SAMPLES_PER_TENSOR = 8
"""Numbers of each weight that every look reads: an edit through `tensor.data` shows in nothing else."""

MAX_ITEMS = 1024
MAX_DEPTH = 5

_PLAIN_LIBRARIES = ("torch", "transformers", "transformers_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) | {"_is_hf_initialized", "_hf_hook", "_old_forward", "forward"}
_DICTIONARIES = (dict, OrderedDict)
_ATOMS = (str, bool, int, type(None), float)


def described(model: torch.nn.Module) -> str:
    """Canonical text; empty for a model of transformers without adapters, hooks and patches."""
    found = {}
    for name, module in model.named_modules():
        entry = _module_described(module)
        if entry:
            found[name] = entry
    everywhere = [
        [hook_kind, _value(hook)]
        for hook_kind in ("_global_forward_pre_hooks", "_global_forward_hooks")
        for hook in getattr(torch_module, hook_kind, {}).values()
    ]
    if not found and not everywhere:
        return ""
    return json.dumps([found, everywhere], sort_keys=True)


def is_opaque(model: torch.nn.Module) -> bool:
    """Whether code runs in the model that may change what it does without changing anything that can be looked at."""
    if getattr(torch_module, "_global_forward_pre_hooks", {}) or getattr(torch_module, "_global_forward_hooks", {}):
        return True
    for module in model.modules():
        if _library(type(module)) not in LIBRARIES or "forward" in module.__dict__ or _hooks(module):
            return True
    return False


def compiled_part(model: torch.nn.Module) -> str | None:
    """The name of the first module that torch.compile works on; None where there is none."""
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return name or "the model itself"
    return None


class ModelLook:
    """One look at a model's state: cheap, and equal to the next one as long as nothing changed.

    weights: where each tensor lies, its version, and a few of its numbers. state: everything else.
    """

    def __init__(self, model: torch.nn.Module, sampler: WeightSampler) -> None:
        self._kept: list[object] = []  # so that no new object can have the id of one that was looked at
        self.state: list[object] = _switches()
        self.weights: list[object] = []
        self._add_fields(getattr(model, "config", None))
        for module in model.modules():
            self._add_module(module)
        self.weights.append(sampler.numbers(self.weights))

    def _add_module(self, module: torch.nn.Module) -> None:
        self.state.append(type(module))
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    self.weights.append(key)
                    if tensor is not None:
                        self._add_tensor(tensor)
            elif name == "_modules":
                self.state.extend(value)
                self.state.extend(map(id, value.values()))
            elif type(value) in _DICTIONARIES and not value:  # most are, being for hooks
                continue
            elif type(value) in _ATOMS:
                self.state.append(value)
            else:
                self._add(value, MAX_DEPTH)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            for _, inner in plain_tensors("", tensor):
                self._add_tensor(inner)
            return
        version = -1 if tensor.is_inference() else tensor._version
        self.weights += (tensor.data_ptr(), version, tensor.shape, tensor.dtype)

    def _add_fields(self, holder: object) -> None:
        for name, value in vars(holder).items() if holder is not None else ():
            self.state.append(name)
            self._add(value, MAX_DEPTH)

    def _add(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.state.append(value)
        elif isinstance(value, dict) and depth and len(value) <= MAX_ITEMS:
            for key, item in value.items():
                self.state.append(key if isinstance(key, _ATOMS) else id(key))
                self._add(item, depth - 1)
        elif kind in (list, tuple, set, frozenset) and depth and len(value) <= MAX_ITEMS:
            self.state.append(len(value))
            for item in value:
                self._add(item, depth - 1)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        else:
            self._kept.append(value)
            self.state.append(id(value))


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
            for held in (*module._parameters.values(), *module._buffers.values()):
                if held is None:
                    continue
                for _, tensor in plain_tensors("", held):
                    size = tensor.element_size()
                    if tensor.is_contiguous() and tensor.numel() and size in kinds and tensor.device.type != "meta":
                        flat = tensor.detach().view(-1).view(kinds[size])
                        step = max(1, len(flat) // SAMPLES_PER_TENSOR)
                        samples = flat[step // 2 :: step][:SAMPLES_PER_TENSOR]
                        groups.setdefault((tensor.device, size), []).append(samples)
        return list(groups.values())


def _switches() -> list[object]:
    """Of torch, by which kernels and the dtype that they compute in are chosen."""
    found: list[object] = [
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
    ]
    for kind in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        found += list(getattr(torch_module, kind, {}).values())
    return found


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
    hooks = _hooks(module)
    if hooks:
        entry["hooks"] = [_value(hook) for hook in hooks]
    return entry


def _hooks(module: torch.nn.Module) -> list[object]:
    """But those of transformers, which read outputs and come and go with how it was called before."""
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
    """What JSON can write and the next process writes alike."""
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
        return [_value(item, depth - 1) for item in sorted(value, key=str)][:MAX_ITEMS]
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
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = blake2b(digest_size=16)
    for _, inner in plain_tensors("", tensor):
        if inner.device.type != "meta":
            digest.update(inner.detach().cpu().contiguous().view(-1)[: 1 << 20].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
