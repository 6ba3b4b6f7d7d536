"""What a model's generation config asks for beside the answer's length: applied by transformers, or refused.

Every field of a GenerationConfig is in one of the tables here. Those that change which tokens come are applied by
transformers' own logits processors, which the model brings along; those that need more than one forward pass per token
are refused by name; and so is a field that a newer transformers adds, until it has its place in a table.
Must never leave out a setting that changes `model.generate`'s tokens without saying so.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_adapter.hf.sampling import Sampling
from kvstore.block.errors import BadInput

APPLIED = frozenset(
    "min_length min_new_tokens repetition_penalty encoder_repetition_penalty no_repeat_ngram_size bad_words_ids "
    "encoder_no_repeat_ngram_size forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty sequence_bias watermarking_config "
    "renormalize_logits".split()
)
"""Fields that transformers' logits processors apply."""

APPLIED_TO_DRAWS = frozenset("top_k min_p top_h typical_p epsilon_cutoff eta_cutoff".split())
"""Fields that they apply where tokens are drawn: `model.generate` too ignores these in a greedy answer."""

SAID_BY_ARGUMENTS = frozenset("max_length max_new_tokens do_sample temperature top_p eos_token_id".split())
"""Fields that the arguments `max_new_tokens`, `sampling` and `stop_tokens` (else the config's eos_token_id) replace."""

REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beams are not searched"),
    "num_beam_groups": (1, "beams are not searched"),
    "num_return_sequences": (1, "a prompt has one answer; give the prompt several times"),
    "max_time": (None, "answers end by tokens, not by time; leave a stream early instead"),
    "stop_strings": (None, "there is no tokenizer here; pass stop_tokens"),
    "guidance_scale": (1, "guidance needs a second forward pass for each token"),
    "token_healing": (False, "there is no tokenizer here"),
    "penalty_alpha": (0, "contrastive search needs several forward passes for each token"),
    "dola_layers": (None, "contrasting layers is not done here"),
    "constraints": (None, "beams are not searched"),
    "force_words_ids": (None, "beams are not searched"),
    "assistant_ensemble_weight": (None, "a draft's weight changes the answer"),
    "is_assistant": (False, "an assistant stops by its confidence"),
}
"""Those that change tokens and cannot be applied: the value that asks for nothing, and why any other is refused."""

WITHOUT_EFFECT = frozenset(
    # how fast it goes, and where KV is kept
    "use_cache cache_implementation cache_config max_cache_len compile_config disable_compile low_memory "
    "prefill_chunk_size continuous_batching_config "
    # what else is handed out
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    # of beams alone, which are refused
    "early_stopping length_penalty diversity_penalty "
    # of drafts, which the model itself accepts or corrects
    "use_mtp num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_lookbehind target_lookbehind "
    "speculation_type "
    # padding, beginnings and notes
    "pad_token_id bos_token_id decoder_start_token_id transformers_version".split()
)

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Chooser:
    """How one row's next token is chosen. processors: of transformers, called with the row's tokens and its scores;
    None where the model's settings ask for nothing. If there are any, they apply temperature and top_p too."""

    sampling: Sampling | None
    processors: Processors | None

    def processed(self, tokens: array[int], scores: torch.Tensor) -> torch.Tensor:
        """A row's scores, [vocabulary], by the processors. tokens: its prompt and what was generated."""
        assert self.processors is not None, "one config holds for all rows"
        # Cloned: these come out of a forward pass in inference mode, and processors may write.
        return self.processors(_as_row(tokens, scores.device), scores[None].clone())[0]


def chooser_of(
    model: Any, prompt: array[int], max_new_tokens: int, sampling: Sampling | None, stop_tokens: frozenset[int]
) -> Chooser:
    """Raises `BadInput`, with one line that names the setting, where one cannot be applied."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise BadInput(f"sampling of type {type(sampling).__name__}; give a Sampling, or leave it out")
    config = model.generation_config
    check_settings(config)
    asked = APPLIED if sampling is None else APPLIED | APPLIED_TO_DRAWS
    if all(_asks_nothing(config, name) for name in asked):
        return Chooser(sampling, None)
    config = copy.deepcopy(config)
    config.max_new_tokens = max_new_tokens
    config.max_length = len(prompt) + max_new_tokens
    config.num_beams = 1
    if isinstance(config.watermarking_config, dict):
        config.update(watermarking_config=config.watermarking_config)  # makes an object of it
    config.do_sample = sampling is not None
    if sampling is not None:
        config.temperature, config.top_p = sampling.temperature, sampling.top_p
    device = next(model.parameters()).device
    config._eos_token_tensor = torch.tensor(sorted(stop_tokens), device=device) if stop_tokens else None
    try:
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=_as_row(prompt, device),
            device=str(device),
            model_kwargs={},
        )
    except (AttributeError, TypeError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the model's generation config cannot be applied: {said}") from error
    return Chooser(sampling, processors)


def check_settings(config: Any) -> None:
    """Raise `BadInput` for the first field of a generation config that changes tokens and cannot be applied."""
    standard = vars(type(config)())
    for name, value in vars(config).items():
        if name in REFUSED:
            idle, reason = REFUSED[name]
            if value is None or value == idle or (isinstance(value, list | tuple) and not value):
                continue
            raise BadInput(f"the model's generation config has {name}={value!r}: {reason}; set it to {idle!r}")
        if name in APPLIED or name in APPLIED_TO_DRAWS or name in SAID_BY_ARGUMENTS or name in WITHOUT_EFFECT:
            continue
        # Fields that transformers itself does not know, and its private notes, change no tokens.
        if name in standard and not name.startswith("_") and value != standard[name]:
            raise BadInput(
                f"the model's generation config has {name}={value!r}, which PrefixCache does not know; set it to "
                f"{standard[name]!r}"
            )


def _as_row(tokens: array[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens).astype(np.int64)).to(device)[None]


def _asks_nothing(config: Any, name: str) -> bool:
    value = getattr(config, name, None)
    if value is None or value is False:
        return True
    if name in ("repetition_penalty", "encoder_repetition_penalty", "typical_p"):
        return bool(value == 1)
    if name in (
        "min_length",
        "min_new_tokens",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "top_k",
        "epsilon_cutoff",
        "eta_cutoff",
    ):
        return bool(value == 0)
    return False
