"""What the store has to know of a Hugging Face model: its layout, its fingerprint, and whether it can be served at all.

Floor 3. Reads the model and its configuration, changes nothing, and imports torch only: a configuration is a bag of
attributes. Must never put a path or a name into an identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import torch

from engine_adapter.hf.state import LONGROPE, compiled_part, switching_rope
from engine_adapter.hf.tensor_names import is_embedding
from engine_adapter.hf.tensors import plain_tensors, unreadable
from kvstore.block.errors import BadInput

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
    data = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.dim() else tensor.detach().view(1)
    data = data.view(torch.uint8)
    if whole or data.numel() <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        yield from data.split(PIECE_BYTES)
        return
    last = data.numel() - SAMPLE_BYTES
    starts = [last * number // (SAMPLES_PER_TENSOR - 1) for number in range(SAMPLES_PER_TENSOR)]
    yield torch.cat([data[start : start + SAMPLE_BYTES] for start in starts])


def _config_text(model: torch.nn.Module) -> str:
    config: Any = model.config
    fields = {name: value for name, value in config.to_dict().items() if name not in _FIELDS_WITHOUT_EFFECT}
    return json.dumps(fields, sort_keys=True, default=str)


def _dtype_name(model: torch.nn.Module) -> str:
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    parameter = next(model.parameters()) if embedding is None else embedding.weight
    return str(parameter.dtype).removeprefix("torch.")
