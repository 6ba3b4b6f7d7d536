"""How the next token is chosen from logits. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstore.block.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw tokens by probability. temperature: above 0. top_p: the smallest set of tokens with that much probability.

    generator: makes the draws repeatable; torch's default one of the device otherwise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0 or not 0 < self.top_p <= 1:
            raise BadInput(
                f"temperature={self.temperature}, top_p={self.top_p}; give a temperature above 0 and a top_p above 0 "
                "and at most 1 (for the most likely token always, leave sampling out)"
            )


def choose(logits: torch.Tensor, sampling: Sampling | None) -> torch.Tensor:
    """Token ids, [rows], from logits, [rows, vocabulary]: the most likely ones, or drawn ones."""
    if sampling is None:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True)
        before = ranked.cumsum(dim=-1) - ranked
        kept = ranked.masked_fill(before >= sampling.top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    return _drawn(probabilities, sampling.generator)


def draw(scores: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Token ids, [rows], drawn by the probabilities that scores, [rows, vocabulary], stand for."""
    return _drawn(torch.softmax(scores.float(), dim=-1), generator)


def _drawn(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    device = probabilities.device
    if generator is not None:
        probabilities = probabilities.to(generator.device)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(device)
