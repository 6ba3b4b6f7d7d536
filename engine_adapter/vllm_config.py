"""What vLLM's configuration says about the KV that an engine has.

Reads vLLM's objects and imports none of its modules: whether such KV can be stored, whose weights made it, what its
pages are, and what else decides its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch

from engine_adapter.model_files import model_fingerprint, snapshot_directory
from engine_adapter.paged.pages import EnginePages, RegisteredGroup, register
from engine_adapter.paged.settings import ConnectorSettings, LoadMode
from engine_adapter.paged.step_plan import WorkerSpec
from kvstore.block.errors import BadInput

ATTENTION_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""KV groups of these kinds can be stored."""
PLACES = ("_name_or_path", "_commit_hash", "transformers_version")
"""Fields of a model's configuration that say where it was found and what wrote it."""
WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Ways to draft tokens that need no layers."""
WITHOUT_PREFIX_CACHING = (
    'where it is known that one may be, set "without_prefix_caching": true in kv_connector_extra_config'
)


def unsupported(config: Any, groups: Any, *, is_failure_told: bool) -> str:
    """Why this engine's KV cannot be stored at all; empty where it can. is_failure_told: whether the engine can be told
    that a request's load has failed, which is needed where it cannot be told which pages (`is_told_by_page`)."""
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)} is not supported; allowed: 1"
    if config.model_config.runner_type != "generate":
        return f"a model that is run to {config.model_config.runner_type}; allowed: to generate"
    if config.load_config.load_format == "dummy":
        return "load_format=dummy makes weights up, which no file tells"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales makes scales of the first prompt's KV, and another engine's are others"
    kinds = [type(group.kv_cache_spec).__name__ for group in groups.kv_cache_groups]
    unknown = sorted({kind for kind in kinds if kind not in ATTENTION_SPECS})
    if unknown:
        return f"KV groups of kind {', '.join(unknown)}; allowed: {', '.join(ATTENTION_SPECS)}"
    if not is_told_by_page(groups) and not is_failure_told:
        return "several KV groups or windows, where this vLLM cannot be told that a load has failed; use 0.31 or later"
    if any(getattr(group.kv_cache_spec, "extra_retained_tokens", 0) for group in groups.kv_cache_groups):
        return "sliding windows with drafts of several layers, for which vLLM keeps more than a window"
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups.kv_cache_groups):
        return "attention that is not causal"
    return ""


def reuse_refused(config: Any, remedy: str = WITHOUT_PREFIX_CACHING) -> str:
    """Why one request's KV must not be used in another: vLLM's own prefix caching is off. Empty where it is on. vLLM
    switches it off because a user wants that, or for a model, a platform or an attention whose steps would not read the
    KV before them, or whose KV depends on more than the tokens before it; it does not tell which. remedy: what to do
    then."""
    if config.cache_config.enable_prefix_caching:
        return ""
    return (
        "vLLM's own prefix caching is off (enable_prefix_caching=False, which vLLM sets itself for models and "
        f"platforms on which a prefix must not be reused); {remedy}"
    )


def is_told_by_page(groups: Any) -> bool:
    """Whether vLLM can be told which pages a load did not bring: only with a single group whose tables have all pages
    of a prompt, which those of a sliding window do not."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups.kv_cache_groups]
    return len(kinds) == 1 and kinds != ["SlidingWindowSpec"]


def unwaitable(config: Any) -> str:
    """Why no step of this engine may wait for a load; empty where one may. If such a load fails, vLLM computes its
    tokens again, or ends the request. In neither case does it take back steps that it scheduled before it knew, and the
    second model runner goes on from a wrong place (vLLM issue 49250)."""
    if config.scheduler_config.async_scheduling:
        return "steps are scheduled ahead (async_scheduling)"
    if getattr(config, "use_v2_model_runner", False):
        return "the second model runner (VLLM_USE_V2_MODEL_RUNNER)"
    return ""


def with_load_mode(settings: ConnectorSettings, unwaitable: str) -> tuple[ConnectorSettings, str]:
    """The settings, with all loads beside the steps if no step may wait for one; and a line about a setting that this
    overrules, or ""."""
    if not unwaitable or settings.load is LoadMode.ASYNC:
        return settings, ""
    overruled = ""
    if settings.load is not LoadMode.AUTO:
        overruled = (
            f'"load": "{settings.load}" is not done, loads run beside the steps ("async"), since a load that failed '
            f"could not be taken back: {unwaitable}"
        )
    return replace(settings, load=LoadMode.ASYNC), overruled


def has_draft_layers(config: Any) -> bool:
    """Whether tokens are drafted by layers that have KV of their own, which may depend on a token that comes later."""
    speculative = config.speculative_config
    return speculative is not None and getattr(speculative, "method", None) not in WITHOUT_LAYERS


def fingerprint(config: Any, remedy: str = 'give their fingerprint as "model" in kv_connector_extra_config') -> str:
    """Fingerprint of the weights' files. remedy: what to do where they are not found. Raises `BadInput`."""
    model = config.model_config
    try:
        return _fingerprint(config, getattr(model, "model_weights", "") or model.model, model.revision)
    except BadInput as error:
        raise BadInput(f"{error}; {remedy}") from None


def draft_fingerprint(config: Any) -> str:
    """Fingerprint of a separate draft model, whose layers have KV in the blocks as well; empty where there is none.
    Raises `BadInput`."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is None or draft.model == config.model_config.model:
        return ""
    try:
        return _fingerprint(config, draft.model, draft.revision)
    except BadInput as error:
        raise BadInput(f"the draft model: {error}; give vLLM its snapshot directory") from None


def _fingerprint(config: Any, name: str, revision: str | None) -> str:
    return model_fingerprint(snapshot_directory(name, revision, config.load_config.download_dir))


def registered_pages(config: Any, groups: Any, kv_caches: Mapping[str, torch.Tensor]) -> EnginePages:
    """Register the pages of this worker, of all its KV groups."""
    parallel = config.parallel_config
    registered = []
    for number, group in enumerate(groups.kv_cache_groups):
        spec = group.kv_cache_spec
        layers: dict[str, torch.Tensor] = {}
        for name in group.layer_names:
            if name in kv_caches and all(kv_caches[name] is not other for other in layers.values()):
                layers[name] = kv_caches[name]  # some models have layers that use the pages of another one
        heads, width = getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0)
        value_width = getattr(spec, "head_size_v", width)
        widths = (width, value_width) if value_width else (width,)
        window = int(spec.sliding_window) if type(spec).__name__ == "SlidingWindowSpec" else 0
        registered.append(
            RegisteredGroup(f"group{number}", layers, heads, widths, spec.block_size, groups.num_blocks, window)
        )
    modules = config.compilation_config.static_forward_context

    def write(name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        layer = modules[name]
        layer.impl.do_kv_cache_update(layer, key, value, kv_caches[name], slots)

    return register(registered, parallel.rank % parallel.world_size, _scales(modules, kv_caches), write)


def _scales(layers: Mapping[str, Any], names: Iterable[str]) -> str:
    scales = [
        (name, scale, float(getattr(layers.get(name), f"{scale}_float", 1.0)))
        for name in names
        for scale in ("_k_scale", "_v_scale")
    ]
    if all(value == 1.0 for _, _, value in scales):
        return ""
    return blake2b(repr(scales).encode(), digest_size=16).hexdigest()


def model_settings(config: Any) -> dict[str, object]:
    """What defines a model besides its weights' files, as vLLM has resolved it: with overrides, and with what was given
    beside the model. Not how the engine computes."""
    model = config.model_config
    draft = getattr(config.speculative_config, "draft_model_config", None)
    return {
        "hf_config": model.hf_config.to_dict(),
        "quantization": [str(model.quantization), getattr(model, "quantization_config", None)],
        "model_impl": str(model.model_impl),
        "disable_sliding_window": model.disable_sliding_window,
        "kv_cache_dtype_skip_layers": str(getattr(config.cache_config, "kv_cache_dtype_skip_layers", None)),
        "load": [str(config.load_config.load_format), config.load_config.model_loader_extra_config],
        "draft": draft.hf_config.to_dict() if draft is not None else None,
    }


def plain(value: object) -> str:
    """The value as text: equal values give equal text, wherever the model was found."""
    return json.dumps(_without_places(value), sort_keys=True, default=str)


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_places(it) for key, it in value.items() if key not in PLACES}
    return [_without_places(it) for it in value] if isinstance(value, list | tuple) else value


def config_fields(config: Any, facts: Sequence[WorkerSpec], version: str) -> Mapping[str, str]:
    """What decides KV besides weights and layout, in words that a person can compare, and all the rest as a digest.
    version: of vLLM. Raises `BadInput` where a draft model's weights cannot be read."""
    model, cache = config.model_config, config.cache_config
    rope = str(getattr(model.hf_text_config, "rope_parameters", None) or "")
    return _named(
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization,
        kv_cache_dtype=cache.cache_dtype,
        kv_scales="+".join(sorted({one.scales for one in facts})),
        rope=rope,
        device=facts[0].device,
        # For these a position's K depends on how long a prompt may get.
        max_model_len=model.max_model_len if any(kind in rope for kind in ("longrope", "dynamic")) else None,
        draft=" ".join(filter(None, (getattr(config.speculative_config, "method", None), draft_fingerprint(config)))),
        settings=blake2b(plain(model_settings(config)).encode(), digest_size=16).hexdigest(),
        engine=f"vllm {version}",  # a model's code may be mended from one to the next
    )


def _named(**fields: object) -> Mapping[str, str]:
    return {name: str(value) for name, value in fields.items() if value not in (None, "", {})}
