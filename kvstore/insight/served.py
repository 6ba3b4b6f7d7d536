"""Whether an engine's adapter serves a model: the one place that says so.

`served` looks at the model's kinds of KV, and at the engine's version and settings. Adapters describe what they find in
an engine in the same kinds and settings and ask it too, so that they refuse what `kvstore models`, `kvstore plan` and
`kvstore doctor` say they refuse. To serve a kind in one more engine, name it in `SINCE`.

Pure: knows no engine's objects, opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvstore.insight.models import KvKind, ModelKv


class Engine(StrEnum):
    VLLM = "vLLM"
    SGLANG = "SGLang"
    TRANSFORMERS = "transformers"


class Verdict(StrEnum):
    SERVED = "served"
    PARTLY = "partly"  # some of its prompts, or with other settings of the engine: the remedy says which
    REFUSED = "refused"

    @property
    def words(self) -> str:
        return "served in part" if self is Verdict.PARTLY else str(self)


@dataclass(frozen=True, slots=True)
class Served:
    """reason: why not, or not wholly. remedy: what to do, or what is allowed; empty where there is nothing."""

    verdict: Verdict = Verdict.SERVED
    reason: str = ""
    remedy: str = ""

    @property
    def line(self) -> str:
        """Empty where all is served."""
        return "; ".join(filter(None, (self.reason, self.remedy)))


SINCE: Mapping[Engine, Mapping[KvKind, str]] = {
    Engine.VLLM: {
        KvKind.FULL: "0.28",
        KvKind.LATENT: "0.28",
        KvKind.INDEX: "0.28",
        KvKind.WINDOW: "0.31",
        KvKind.CHUNK: "0.31",
        KvKind.STATE: "0.32",
    },
    Engine.SGLANG: dict.fromkeys(KvKind, "0.5.23"),
    Engine.TRANSFORMERS: dict.fromkeys(KvKind, "5.17"),
}
"""From which version on the adapter serves a kind of KV."""

TRIED: Mapping[Engine, Mapping[KvKind, str]] = {
    Engine.VLLM: {
        **dict.fromkeys((KvKind.FULL, KvKind.WINDOW), "a whole engine"),
        **dict.fromkeys((KvKind.CHUNK, KvKind.LATENT, KvKind.INDEX, KvKind.STATE), "its scheduler and caches"),
    },
    Engine.SGLANG: {KvKind.FULL: "a whole engine", **dict.fromkeys([*KvKind][1:], "its host pools")},
    Engine.TRANSFORMERS: dict.fromkeys(KvKind, "small models"),
}
"""What of an engine a kind was tried in, on a CPU."""

TRIED_VERSIONS: Mapping[Engine, tuple[str, ...]] = {Engine.VLLM: ("0.28", "0.31", "0.32")}
"""With which releases the adapter's tests ran. Others are served if their interface has what is needed."""

KIND_WORDS = {
    KvKind.FULL: "full attention",
    KvKind.WINDOW: "sliding windows",
    KvKind.CHUNK: "chunked attention",
    KvKind.LATENT: "latents (MLA)",
    KvKind.INDEX: "an indexer's keys",
    KvKind.STATE: "recurrent states",
}
ALLOWED = "allowed: full attention, sliding windows, chunked attention, recurrent states"
_TOO_OLD = {
    "0.31": "several KV groups or windows, where this vLLM cannot be told that a load has failed",
    "0.32": "recurrent states, of which this vLLM does not tell where they are whole",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a setting of the engine, or a trait of the model, forbids. forbids: of its value, which `reason` may show.
    kinds: only of models with one of these; empty for all."""

    setting: str
    reason: str
    remedy: str = ""
    forbids: Callable[[Any], object] = bool
    kinds: frozenset[KvKind] = frozenset()
    verdict: Verdict = Verdict.REFUSED


def _is_other_than(allowed: str) -> Callable[[Any], bool]:
    return lambda value: value != allowed


_OWN_WEIGHTS = _Rule(
    "load_format", "load_format=dummy makes weights up, which no file tells", forbids=lambda value: value == "dummy"
)
_RULES: Mapping[Engine, tuple[_Rule, ...]] = {
    Engine.VLLM: (
        _Rule(
            "prefill_context_parallel_size",
            "prefill_context_parallel_size={} is not supported",
            "allowed: 1",
            lambda value: value > 1,
        ),
        _Rule("runner_type", "a model that is run to {}", "allowed: to generate", _is_other_than("generate")),
        _OWN_WEIGHTS,
        _Rule(
            "calculate_kv_scales",
            "calculate_kv_scales makes scales of the first prompt's KV, and another engine's are others",
        ),
        _Rule(
            "hisparse",
            "KV that is kept in host memory beside the engine (HiSparse)",
            "give vLLM no HiSparse configuration",
        ),
        _Rule(
            "enable_return_routed_experts",
            "enable_return_routed_experts tells the experts of all tokens of a prompt, and the store has none",
            "start vLLM without it",
        ),
        _Rule("prefix_replay_tokens", "windows that vLLM computes again behind each hit (bounded replay)"),
        _Rule("nothing_reused", "no KV group whose prefixes vLLM itself would reuse"),
        _Rule("unknown_spec", "KV groups of kind {}", ALLOWED),
        _Rule("rswa_spec", "KV groups of kind {}, in which generated tokens see another past than a prompt's", ALLOWED),
        _Rule(
            "mamba_cache_mode",
            "recurrent states in mamba_cache_mode={}",
            "start vLLM with --mamba-cache-mode align",
            _is_other_than("align"),
            frozenset({KvKind.STATE}),
        ),
        _Rule(
            "extra_retained_tokens",
            "sliding windows with drafts of several layers, for which vLLM keeps more than a window",
        ),
        _Rule("non_causal", "attention that is not causal"),
    ),
    Engine.SGLANG: (
        _Rule("lora", "page hashes name a LoRA adapter, and not what is in it", "serve without LoRA"),
        _OWN_WEIGHTS,
        _Rule(
            "pictures",
            "page hashes have 64 bits for an image or the like, which a client may choose, and not what it shows",
            "give SGLang enable_multimodal=false where prompts are text",
            verdict=Verdict.PARTLY,
        ),
    ),
    Engine.TRANSFORMERS: (
        _Rule("pictures", "prompts with videos or sound", "allowed: text and images", verdict=Verdict.PARTLY),
        _Rule("own_cache", "its class keeps KV in a cache of its own"),
    ),
}


def served(
    model: ModelKv | Collection[KvKind], engine: Engine, version: str = "", settings: Mapping[str, Any] | None = None
) -> Served:
    """model: or the kinds of KV that an engine has. version: of the engine, whose interface may be that of an older
    one; any for "". settings: by the names in this file; one that is left out is as its engine has it by itself."""
    given = dict(settings or {})
    kinds = frozenset(model.kinds if isinstance(model, ModelKv) else model)
    if isinstance(model, ModelKv):
        given = {**dict.fromkeys(model.traits, True), **given}
    for rule in _RULES[engine]:
        value = given.get(rule.setting)
        if value is not None and rule.forbids(value) and (not rule.kinds or rule.kinds & kinds):
            return Served(rule.verdict, rule.reason.format(value), rule.remedy)
    since = SINCE[engine]
    if absent := [kind for kind in KvKind if kind in kinds and kind not in since]:
        return Served(
            Verdict.REFUSED,
            f"{' and '.join(KIND_WORDS[kind] for kind in absent)}",
            f"allowed with {engine}: {', '.join(KIND_WORDS[kind] for kind in since)}",
        )
    needs = [since[kind] for kind in kinds] + ["0.31"] * (given.get("kv_groups", 1) > 1)
    least_version = max(needs, key=_numbers, default="")
    if version and _numbers(version) < _numbers(least_version):
        reason = _TOO_OLD.get(least_version, f"{engine} {version}")
        return Served(Verdict.REFUSED, reason, f"use {least_version} or later")
    return Served()


def untried(engine: Engine, version: str) -> str:
    """About a release that is not among `TRIED_VERSIONS`; empty for others."""
    tried = TRIED_VERSIONS.get(engine, ())
    if not version or not tried or ".".join(version.split(".")[:2]) in tried:
        return ""
    return f"{engine} {version} was not tried ({', '.join(tried)} were)"


def vllm_page_tokens(model: ModelKv) -> int:
    """Tokens of a page of vLLM's: 16, or with states so many that a layer's KV of them is as large as its state.
    Source: vLLM 0.32, `Platform._align_hybrid_block_size`, with FlashAttention."""
    if not model.states:
        return 16
    rows = (one for one in model.layers if one.kind is not KvKind.INDEX)
    row = max(one.bytes_per_token(model.dtype) // one.layers for one in rows)
    step = 128 if KvKind.LATENT in model.kinds else 16
    state = max(one.bytes_each for one in model.states)
    return step * -(-state // (step * row))


def _numbers(version: str) -> list[int]:
    parts = version.split(".")[:3]
    return [int("".join(filter(str.isdigit, part)) or 0) for part in parts]


_SHAPES = {
    "full": "Llama 3.1; Qwen2.5; Qwen3; Qwen3 MoE; Qwen3 YaRN; GLM-4 9B; GLM-4.5; Mistral 7B v0.3; Ministral 3; "
    "Granite 3; Granite 4 Micro; MiniMax M2; Hunyuan dense; Hunyuan 3; Phi-4; OLMo 2; SmolLM3; Seed-OSS; ERNIE 4.5 MoE",
    "full longrope": "Phi-4-mini",
    "full dynamic": "Hunyuan dense, NTK",
    "full pictures": "Mistral Small 3; Qwen2.5-VL; Qwen3-VL",
    "full window pictures": "Gemma 3 4B",
    "full window": "gpt-oss; Gemma 2; Gemma 3; Gemma 4; OLMo 3; Command A; EXAONE 4; MiMo-V2-Flash",
    "window": "Mistral 7B v0.1",
    "full chunk": "Llama 4",
    "latent": "DeepSeek V3; GLM-4.7 Flash",
    "latent index": "DeepSeek V3.2; GLM-5",
    "latent window own_cache": "DeepSeek V4",
    "full state": "Qwen3-Next; Qwen3.5; Nemotron-H; Granite 4 hybrid; Falcon-H1; LFM2",
    "full state own_cache": "MiniMax M1",
    "latent state": "Kimi Linear",
}


def shapes() -> list[tuple[str, frozenset[KvKind], Served]]:
    """Architectures that small copies were made of in transformers: name, kinds of KV, and whether they are served
    there."""
    found = []
    for words, names in _SHAPES.items():
        kinds = frozenset(one for one in KvKind if one in words.split())
        settings = dict.fromkeys({*words.split()} - {*kinds}, True)
        answer = served(kinds, Engine.TRANSFORMERS, settings=settings)
        found += [(name, kinds, answer) for name in names.split("; ")]
    return found
