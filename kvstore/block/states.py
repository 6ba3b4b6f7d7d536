"""Where recurrent states are kept: at which block boundaries of a request a state is worth its room.

A state is of one boundary and serves prefixes that end exactly there, so states are chosen, where KV is kept whole:

    1  where the prompt ends, at the deepest whole block that an engine may offer (an engine computes the last token)
    2  at the deepest whole block of the answer: there the conversation's next turn begins
    3  where prompts part: KV was found further than a state, and the next prompt that parts there finds both
    4  and every `every_tokens`, counted from the prompt's start, so that all prompts with that prefix share them

Rule 4 alone is bounded by bytes: its states take at most `share` of what the KV between them takes. The others keep up
to three for each request. (Marconi, MLSys 2025, has 1 to 3.) Pure: no clock, no store, no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from kvstore.block.errors import BadInput, shown
from kvstore.block.layout import MAX_BLOCK_TOKENS, MAX_PLANE_WIDTH, is_whole

DEFAULT_SHARE = 0.125
"""One state of Qwen3.5-27B is 147 MiB, as much as the KV of 2,350 of its tokens: one every 2,350 / 0.125 = 18,800
tokens takes an eighth of what its KV takes. More of them find more only where there is room for everything: elsewhere
they push out KV that would have been found (docs/policies.md has the figures)."""
MOST_SHARE = 64.0
_MOST_BYTES = MAX_PLANE_WIDTH << 20


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """state_bytes: of one state, in all layers. kv_bytes_per_token: of all layers with KV; 0 for a model without any,
    which then has no states by rule 4. share: of the KV's bytes, for the states of rule 4; 0 for none."""

    block_tokens: int
    state_bytes: int
    kv_bytes_per_token: int
    share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block_tokens", 1, MAX_BLOCK_TOKENS),
            ("state_bytes", 1, _MOST_BYTES),
            ("kv_bytes_per_token", 0, _MOST_BYTES),
        ):
            given = getattr(self, name)
            if not is_whole(given, least, most):
                raise BadInput(f"{name}={shown(given)}; give a whole number from {least} to {most}")
        if not isinstance(self.share, int | float) or not 0 <= self.share <= MOST_SHARE:
            raise BadInput(
                f"a share of {shown(self.share)} for states; give their bytes for each byte of KV, 0 to "
                f"{MOST_SHARE:g}, such as {DEFAULT_SHARE:g}"
            )

    @property
    def every_tokens(self) -> int:
        """Tokens between two states of rule 4: the smallest multiple of a block within the share. 0 for none."""
        affordable = self.share * self.kv_bytes_per_token
        return ceil(self.state_bytes / affordable / self.block_tokens) * self.block_tokens if affordable else 0

    def wanted(
        self, first_token: int, stop_token: int, prompt_tokens: int, *, parted_at: int = 0, end: int | None = None
    ) -> tuple[int, ...]:
        """The boundaries at which to keep a state, ascending, as numbers of tokens.

        An engine computes the tokens from `first_token` to before `stop_token`, in one step or in all: it passes each
        boundary above the first and up to the last of these numbers. parted_at: tokens of the prompt that were found
        in KV, whatever was found in states. end: tokens that were computed when the answer ended; None before: an
        engine that loses states behind its back gives each step's `stop_token` in its place, and keeps the last.
        """
        wanted = {self._whole(prompt_tokens - 1), self._whole(parted_at)}
        if end is not None and end > prompt_tokens:
            wanted.add(self._whole(end))
        if every := self.every_tokens:
            wanted.update(range(first_token // every * every, stop_token + 1, every))
        return tuple(sorted(one for one in wanted if first_token < one <= stop_token))

    def _whole(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_tokens
