"""What vLLM's configuration says about the KV that an engine has.

Reads vLLM's objects and imports none of its modules: whether such KV can be stored, whose weights made it, what its
pages are, and what else decides its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from inspect import isfunction, ismethod, signature
from math import prod
from typing import Any

import torch
from msgspec.structs import replace

from engine_adapter.audit.blocks import experts_of
from engine_adapter.model_files import model_fingerprint, snapshot_directory
from engine_adapter.paged.pages import EnginePages, RegisteredGroup, register
from engine_adapter.paged.settings import ConnectorSettings, LoadMode
from engine_adapter.paged.step_plan import WorkerSpec
from kvstore.block.errors import BadInput
from kvstore.block.layout import Attention
from kvstore.insight.models import KvKind
from kvstore.insight.served import TRIED_VERSIONS, Engine, served, untried

_KINDS = {
    Attention.FULL: KvKind.FULL,
    Attention.SLIDING: KvKind.WINDOW,
    Attention.CHUNKED: KvKind.CHUNK,
    Attention.STATE: KvKind.STATE,
}
PLACES = ("_name_or_path", "_commit_hash", "transformers_version")
"""Fields of a model's configuration that say where it was found and what wrote it."""
WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Ways to draft tokens that need no layers."""
WITHOUT_PREFIX_CACHING = (
    'where it is known that one may be, set "without_prefix_caching": true in kv_connector_extra_config'
)


def untried_version(version: str, ours: type) -> str:
    """About a vLLM that was not tried; empty for others. ours: a class of vLLM's interface. Raises `BadInput` if this
    vLLM calls a hook of it with arguments that it does not take."""
    text = untried(Engine.VLLM, version)
    changed = [name for name in vars(ours) if text and not _takes(ours, name)]
    if changed:
        allowed = ", ".join(TRIED_VERSIONS[Engine.VLLM])
        raise BadInput(
            f"vLLM {version} calls {', '.join(changed)} with arguments that are not known here; use {allowed}"
        )
    return text


def _takes(ours: type, name: str) -> bool:
    hook = getattr(super(ours, ours), name, None)
    if name.startswith("_") or not (isfunction(hook) or ismethod(hook)):
        return True
    given = {key: None for key, one in signature(hook).parameters.items() if one.kind not in (2, 4)}  # not *, **
    try:
        signature(getattr(ours, name)).bind(**given)
    except TypeError:
        return False
    return True


def unsupported(config: Any, groups: Any, *, is_failure_told: bool, are_states_told: bool = True) -> str:
    """Why this engine's KV cannot be stored at all; empty where it can. is_failure_told: whether the engine can be told
    that a request's load has failed, which is needed where it cannot be told which pages (`is_told_by_page`).
    are_states_told: whether it tells in which pages recurrent states are whole."""
    specs = [
        spec for group in cached_groups(groups).values() for spec in layer_specs(group.kv_cache_spec, ("",)).values()
    ]
    interface = "0.32" if is_failure_told and are_states_told else "0.31" if is_failure_told else "0.28"
    kinds = {_KINDS[kind] for kind, _ in map(kind_of, specs) if kind is not None}
    return served(kinds, Engine.VLLM, interface, {**_settings(config, groups), **_spec_settings(specs)}).line


def cached_groups(groups: Any) -> dict[int, Any]:
    """The KV groups, by number, whose prefixes vLLM itself reuses. It leaves out those that a hit does not need, such
    as buffers of tokens that are not compressed yet."""
    return {
        number: group
        for number, group in enumerate(groups.kv_cache_groups)
        if getattr(group.kv_cache_spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)
    }


def layer_specs(spec: Any, names: Sequence[str]) -> dict[str, Any]:
    """What vLLM says of each of a group's layers: of all the same, or of each something else in pages that one table
    names (`UniformTypeKVCacheSpecs`, which only workers are given)."""
    nested = getattr(spec, "kv_cache_specs", None)
    return nested if nested is not None else dict.fromkeys(names, spec)


def page_tokens_of(config: Any, spec: Any) -> int:
    """Tokens that a page stands for: with decode context parallelism each of so many ranks has a share of them, and its
    pages of one number are of the same tokens."""
    return int(spec.block_size) * _token_ranks(config, spec)


def _token_ranks(config: Any, spec: Any) -> int:
    ranks = getattr(config.parallel_config, "decode_context_parallel_size", 1)
    return ranks if getattr(spec, "dcp_sharded", True) else 1


def kind_of(spec: Any) -> tuple[Attention | None, int]:
    """What a hit needs of such layers, and their window or chunk; None for what has no such rule. By what a spec says
    of itself, whatever it is called: one of full attention names windows and chunks that its layers only compute with,
    while its pages hold all tokens."""
    has_window, has_chunk = hasattr(spec, "sliding_window"), hasattr(spec, "attention_chunk_size")
    if hasattr(spec, "mamba_cache_mode"):
        return Attention.STATE, 0
    if has_window and has_chunk:
        return Attention.FULL, 0
    if has_window:
        return Attention.SLIDING, int(spec.sliding_window)
    if has_chunk:
        return Attention.CHUNKED, int(spec.attention_chunk_size)
    return None, 0


def _settings(config: Any, groups: Any) -> dict[str, Any]:
    return {
        "prefill_context_parallel_size": getattr(config.parallel_config, "prefill_context_parallel_size", 1),
        "runner_type": config.model_config.runner_type,
        "load_format": config.load_config.load_format,
        "enable_return_routed_experts": tells_experts(config),
        "calculate_kv_scales": getattr(config.cache_config, "calculate_kv_scales", False),
        "hisparse": getattr(groups, "hisparse_host_num_blocks", None) is not None,
        "prefix_replay_tokens": any(
            getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in groups.kv_cache_groups
        ),
        "kv_groups": len(groups.kv_cache_groups),
        "nothing_reused": not cached_groups(groups),
    }


def _spec_settings(specs: Sequence[Any]) -> dict[str, Any]:
    """The same, of what layers say: the first that is not as it is by itself."""
    modes = [mode for spec in specs if (mode := getattr(spec, "mamba_cache_mode", "align")) != "align"]
    return {
        "unknown_spec": next((type(spec).__name__ for spec in specs if kind_of(spec)[0] is None), None),
        "rswa_spec": next((type(spec).__name__ for spec in specs if hasattr(spec, "rswa_window")), None),
        "mamba_cache_mode": next(iter(modes), None),
        "extra_retained_tokens": any(getattr(spec, "extra_retained_tokens", 0) for spec in specs),
        "non_causal": any(getattr(spec, "non_causal", False) for spec in specs),
    }


def tells_experts(config: Any) -> bool:
    """Whether vLLM ends where it has a token's KV and not which experts the token had."""
    place = getattr(config, "aux_output_config", None) or config.model_config  # the latter before 0.32
    return bool(getattr(place, "enable_return_routed_experts", False))


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
    of a prompt."""
    kinds = [layer_specs(group.kv_cache_spec, ("",)).values() for group in groups.kv_cache_groups]
    return len(kinds) == 1 and all(kind_of(spec)[0] is Attention.FULL for spec in kinds[0])


def unwaitable(config: Any) -> str:
    """Why no step of this engine may wait for a load; empty where one may. If such a load fails, vLLM computes its
    tokens again, or ends the request. In neither case does it take back steps that it scheduled before it knew, and the
    second model runner goes on from a wrong place (vLLM issue 49250)."""
    if config.scheduler_config.async_scheduling:
        return "steps are scheduled ahead (async_scheduling)"
    if stages_of(config) > 1:
        return "steps are scheduled ahead (pipeline_parallel_size)"
    if getattr(config, "use_v2_model_runner", False):
        return "the second model runner (VLLM_USE_V2_MODEL_RUNNER)"
    return ""


def stages_of(config: Any) -> int:
    """Pipeline stages of an engine: workers with other layers."""
    return int(getattr(config.parallel_config, "pipeline_parallel_size", 1))


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
    registered: list[RegisteredGroup] = []
    for number, group in cached_groups(groups).items():
        shapes: list[tuple[Any, dict[str, torch.Tensor]]] = []
        taken: list[torch.Tensor] = []
        for name, spec in layer_specs(group.kv_cache_spec, group.layer_names).items():
            if name not in kv_caches or any(kv_caches[name] is other for other in taken):
                continue  # some models have layers that use the pages of another one
            taken.append(kv_caches[name])
            layers = next((layers for known, layers in shapes if known == spec), None)
            if layers is None:
                shapes.append((spec, layers := {}))
            layers[name] = kv_caches[name]
        for at, (spec, layers) in enumerate(shapes or [(group.kv_cache_spec, {})]):
            name = f"group{number}.{at}" if at else f"group{number}"
            registered.append(_registered(config, name, number, spec, layers, groups.num_blocks))
    registered.sort(key=lambda group: group.attention is Attention.STATE)
    modules = config.compilation_config.static_forward_context

    def write(name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        layer = modules[name]
        layer.impl.do_kv_cache_update(layer, key, value, kv_caches[name], slots)

    pages = register(registered, parallel.rank % parallel.world_size, _scales(modules, kv_caches), write)
    pages.experts = experts_of(config.model_config.hf_text_config)
    return pages


def _registered(
    config: Any, name: str, table: int, spec: Any, layers: Mapping[str, torch.Tensor], num_pages: int
) -> RegisteredGroup:
    kind, window = kind_of(spec)
    text, made_of, row = "", "", getattr(spec, "tokens_per_state", 1)
    tensors: tuple[tuple[str, int], ...] = ()
    widths: tuple[int, ...]
    if kind is Attention.STATE:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
        tensors = tuple((dtype, prod(shape)) for dtype, shape in zip(dtypes, spec.shapes, strict=True))
        shapes = " ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(dtypes, spec.shapes, strict=True))
        text = f"{getattr(spec.mamba_type, 'value', spec.mamba_type)} {shapes}"
        made_of = str(config.model_config.dtype).removeprefix("torch.")
        widths, row = (sum(count * getattr(torch, dtype).itemsize for dtype, count in tensors),), spec.block_size
    else:
        width = getattr(spec, "head_size", 0)
        value_width = getattr(spec, "head_size_v", width)
        widths = (width, value_width) if value_width else (width,)
        row = row if isinstance(row, int) else 1  # a fraction: several rows for each token
        row *= _token_ranks(config, spec)
    return RegisteredGroup(
        name,
        layers,
        getattr(spec, "num_kv_heads", 1),
        widths,
        page_tokens_of(config, spec),
        num_pages,
        window,
        kind or Attention.FULL,
        row,
        table,
        text,
        tensors,
        made_of,
    )


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
        stages=stages if (stages := stages_of(config)) > 1 else None,  # a rank's numbers are then of other layers
        context=_context(config.parallel_config),
        # For these a position's K depends on how long a prompt may get.
        max_model_len=model.max_model_len if any(kind in rope for kind in ("longrope", "dynamic")) else None,
        draft=" ".join(filter(None, (getattr(config.speculative_config, "method", None), draft_fingerprint(config)))),
        settings=blake2b(plain(model_settings(config)).encode(), digest_size=16).hexdigest(),
        engine=f"vllm {version}",  # a model's code may be mended from one to the next
    )


def _context(parallel: Any) -> str | None:
    """Which tokens a rank has. Older versions and workers have the second name for how many it has in turn."""
    if (ranks := getattr(parallel, "decode_context_parallel_size", 1)) == 1:
        return None
    names = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
    return f"{ranks} ranks, {' '.join(str(getattr(parallel, name, 1)) for name in names)} in turn"


def _named(**fields: object) -> Mapping[str, str]:
    return {name: str(value) for name, value in fields.items() if value not in (None, "", {})}
