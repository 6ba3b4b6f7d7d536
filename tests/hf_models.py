"""Small transformers models with wide random weights: greedy tokens vary, and their logits are far apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers as T

from engine_adapter.adapter import Report
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.errors import BadInput

VOCABULARY = 512
MANY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What every configuration knows; KV heads as many as heads."""
GATED: dict[str, Any] = {**MANY, "intermediate_size": 128, "num_key_value_heads": 2, "initializer_range": 0.2}
GATED |= {"max_position_embeddings": 2048}
OWN_HEADS: dict[str, Any] = {**MANY, "intermediate_size": 128, "initializer_range": 0.2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GATED),
    "llama, eager": ("LlamaForCausalLM", {**GATED, "attn_implementation": "eager"}),
    "llama, tied": ("LlamaForCausalLM", {**GATED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", GATED),
    "qwen3": ("Qwen3ForCausalLM", {**GATED, "head_dim": 32}),
    "mistral": ("MistralForCausalLM", {**GATED, "sliding_window": None, "head_dim": 16}),
    "mistral, sliding": ("MistralForCausalLM", {**GATED, "sliding_window": 64, "head_dim": 16}),
    "phi": ("PhiForCausalLM", GATED),
    "phi3": ("Phi3ForCausalLM", GATED),
    "gemma": ("GemmaForCausalLM", {**GATED, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {**GATED, "head_dim": 16}),
    "olmo": ("OlmoForCausalLM", GATED),
    "olmo2": ("Olmo2ForCausalLM", GATED),
    "stablelm": ("StableLmForCausalLM", GATED),
    "starcoder2": ("Starcoder2ForCausalLM", GATED),
    "cohere": ("CohereForCausalLM", GATED),
    "granite": ("GraniteForCausalLM", GATED),
    "glm": ("GlmForCausalLM", {**GATED, "head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", {**GATED, "head_dim": 16}),
    "helium": ("HeliumForCausalLM", {**GATED, "head_dim": 16}),
    "nemotron": ("NemotronForCausalLM", {**GATED, "head_dim": 16}),
    "smollm3": ("SmolLM3ForCausalLM", GATED),
    "arcee": ("ArceeForCausalLM", GATED),
    "mixtral": ("MixtralForCausalLM", {**GATED, "num_local_experts": 4}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", {**GATED, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {**GATED, **EXPERTS, "head_dim": 16}),
    "opt": ("OPTForCausalLM", {**MANY, "ffn_dim": 128, "init_std": 0.2, "word_embed_proj_dim": 64}),
    "gpt2": ("GPT2LMHeadModel", {**MANY, "initializer_range": 0.2}),
    "gpt neox": ("GPTNeoXForCausalLM", OWN_HEADS),
    "gptj": ("GPTJForCausalLM", {**MANY, "initializer_range": 0.2, "rotary_dim": 8}),
    "codegen": ("CodeGenForCausalLM", {**MANY, "initializer_range": 0.2, "rotary_dim": 8}),
    "bloom": ("BloomForCausalLM", {**MANY, "initializer_range": 0.2}),
    "mpt": ("MptForCausalLM", {**MANY, "initializer_range": 0.2}),
    "falcon": ("FalconForCausalLM", {**MANY, "initializer_range": 0.2}),
    "persimmon": ("PersimmonForCausalLM", OWN_HEADS),
    "biogpt": ("BioGptForCausalLM", OWN_HEADS),
}
"""The class, which names its configuration, and the configuration's fields. Some are refused: that is an answer too."""


def small_model(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    class_name, fields = MODELS[name]
    torch.manual_seed(seed)
    made = getattr(T, class_name)
    model = made(made.config_class(**{**fields, **changes})).to(dtype).eval()
    # Wide in every architecture, whatever its initialisation makes of it; norms stay as they are.
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    return model


def some_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids, none of which is 0."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(1, VOCABULARY, (tokens,), generator=generator).tolist()


def plain_answer(model: Any, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    """What transformers itself answers."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "pad_token_id": 0, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **options)
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


class Answer(NamedTuple):
    """What was generated behind a prompt, and the report of it."""

    token_ids: list[int]
    report: Report


def ask(cache: PrefixCache, prompt: Any, max_new_tokens: int, **options: Any) -> Answer:
    """One prompt, answered with the likeliest tokens if nothing else is said."""
    (answer,) = ask_all(cache, prompt, max_new_tokens, **options)
    return answer


def ask_all(cache: PrefixCache, prompts: Any, max_new_tokens: int, **options: Any) -> list[Answer]:
    """Several prompts of any lengths."""
    output = cache.generate(prompts, max_new_tokens=max_new_tokens, **{"do_sample": False, **options})
    width = max(report.prompt_tokens for report in cache.reports)
    return [Answer(row, report) for row, report in zip(output[:, width:].tolist(), cache.reports, strict=True)]


def cache_of(model: Any, store: Any = None, **options: Any) -> PrefixCache:
    """Bit for bit, in cells of 128 tokens whatever the default is."""
    return PrefixCache(model, store, **{"chunk_tokens": 128, "codec": "raw", **options})


PROMPT = some_prompt(300)


def answers(cache: PrefixCache) -> tuple[list[int], int]:
    """Of `PROMPT`: the tokens, and how many of the prompt's came from the store. The tokens are the model's own."""
    answer = ask(cache, PROMPT, 6)
    assert answer.token_ids == plain_answer(cache.model, PROMPT, 6)
    assert not answer.report.faults
    return answer.token_ids, answer.report.restored_tokens


@contextmanager
def refused(said: str) -> Iterator[pytest.ExceptionInfo[BadInput]]:
    """By one line that says this."""
    with pytest.raises(BadInput, match=said) as caught:
        yield caught
    assert "\n" not in str(caught.value)


class Each(T.StoppingCriteria):
    """Calls a function with the numbers of tokens so far, after each step; ends where it returns True."""

    def __init__(self, step: Callable[[int], object]) -> None:
        self._step, self._first = step, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._first = self._first or input_ids.shape[1]
        ends = self._step(input_ids.shape[1] - self._first + 1) is True
        return torch.full((len(input_ids),), ends, device=input_ids.device)


def projections(model: Any) -> list[str]:
    """The names of the projections inside the layers; some models have them as convolutions of width one."""
    head = model.get_output_embeddings()
    kinds = (torch.nn.Linear, T.pytorch_utils.Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and module is not head]


class Adapted(torch.nn.Module):
    """A projection with two adapters, as libraries of adapters make them: one is active, scaled, merged or disabled."""

    def __init__(self, inner: Any, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner
        rows, columns = inner.weight.shape
        given, made = (rows, columns) if isinstance(inner, T.pytorch_utils.Conv1D) else (columns, rows)
        self.parts = torch.nn.ParameterDict()
        for name in ("a", "b"):
            self.parts[f"{name} down"] = torch.nn.Parameter(0.3 * torch.randn(given, rank), requires_grad=False)
            self.parts[f"{name} up"] = torch.nn.Parameter(0.3 * torch.randn(rank, made), requires_grad=False)
        self.active, self.scale, self.merged, self.disabled = "a", 1.0, False, False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(states)
        if self.disabled or self.merged:
            return result
        return result + self.scale * (states @ self.parts[f"{self.active} down"] @ self.parts[f"{self.active} up"])

    def merge(self) -> None:
        """Into the weight, in place, past the tensor's version."""
        change = self.scale * (self.parts[f"{self.active} down"] @ self.parts[f"{self.active} up"])
        self.inner.weight.data += change if isinstance(self.inner, T.pytorch_utils.Conv1D) else change.T
        self.merged = True


def replace_linear(model: Any, name: str, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> torch.nn.Module:
    """Put another module into a projection's place; returns it."""
    holder = model.get_submodule(name.rpartition(".")[0])
    made = make(model.get_submodule(name))
    setattr(holder, name.rpartition(".")[2], made)
    return made
