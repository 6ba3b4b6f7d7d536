"""Caches, forward passes and steps of transformers: the one file of the serving path that imports it, 5.17 and newer.

Must never change the user's model: caches, criteria and views of the model are objects of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicSlidingWindowLayer

WORDS = frozenset(
    {*inspect.signature(GenerationMixin.generate).parameters, *vars(GenerationConfig()), "tokenizer"}
    | {"assistant_tokenizer"}
)
"""What `generate` takes beside inputs of the model's forward pass."""


class RememberingLayer(DynamicSlidingWindowLayer):
    """A layer with a window that keeps what has left the window, until it is cut off: it is still to be saved."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.activate_past_recording()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add K and V, [rows, kv_heads, tokens, head_dim]; returns those that the new tokens may see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        seen = self.sliding_window - 1 + key_states.shape[-2]
        return keys[..., -seen:, :], values[..., -seen:, :]


class ModelCall:
    """Forward passes of one model over its own caches."""

    def __init__(self, model: Any) -> None:
        self._model = model
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._more = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

    def new_cache(self) -> Any:
        """An empty one, with the layers that transformers has for this model."""
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[number] = RememberingLayer(layer.sliding_window)
        return cache

    def positions(self, token_ids: torch.Tensor, mask: torch.Tensor, **inputs: Any) -> dict[str, torch.Tensor]:
        """The model's own positions of these tokens, [..., tokens], as an argument; none where it takes none. Without
        them, `generate` behind a cache may go on from the positions of an earlier call."""
        if not self._takes_positions:
            return {}
        given = {"attention_mask": mask, **inputs}
        return {"position_ids": self._model._prepare_position_ids_for_generation(token_ids, given)}

    @torch.no_grad()
    def __call__(self, token_ids: torch.Tensor, cache: Any, first: int, positions: Mapping[str, torch.Tensor]) -> None:
        """One forward pass over token_ids, [1, tokens], which are those of a prompt from `first` on. positions: of the
        whole prompt."""
        cut = {name: one[..., first : first + token_ids.shape[1]] for name, one in positions.items()}
        self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, return_dict=True, **self._more, **cut)


class _EachStep(StoppingCriteria):
    def __init__(self, step: Callable[[torch.Tensor], None]) -> None:
        self._step = step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._step(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def each_step(step: Callable[[torch.Tensor], None], given: Any) -> StoppingCriteriaList:
    """`step`, which is called with all tokens, [rows, tokens], after each step, and the user's stopping criteria."""
    return StoppingCriteriaList([_EachStep(step), *(given or ())])


def from_the_hit_on(model: Any) -> Any:
    """The same model, with the same parameters, whose `generate` leaves out what the cache holds already where drafts
    are checked too: transformers leaves it out in all other ways to decode."""

    class _View(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            if kwargs.get("next_sequence_length") is None:
                cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]  # its name before 5.24
                kwargs["next_sequence_length"] = input_ids.shape[1] - cache.get_seq_length()
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    _View.__name__, _View.__module__ = type(model).__name__, type(model).__module__
    view = object.__new__(_View)
    view.__dict__ = model.__dict__
    return view
