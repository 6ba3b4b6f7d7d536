"""States of recurrent layers: which boundaries of a prompt have one, and how far a match may therefore reach.

A state covers all tokens before it and cannot be cut, so a prefix of n blocks needs the state behind block n, and no
other. Each is a block of its own, in a namespace beside that of the KV: a chain of one block, named by the prefix key
of the block that it stands behind. It is put, leased, read and evicted by itself, so `ends` is a hint as a match is:
only a lease of the state says that it is there. For all adapters; must never touch pages.

    KV       block 1    block 2    block 3    block 4        found: 4 blocks
    states              state 2               (evicted)      ends: no yes no no   > cut to 2, the rest is `no_state`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.identity import Namespace, Prompt
from kvstore.block.layout import KvGroup, Layout
from kvstore.client.handle import Match, NamespaceHandle
from kvstore.client.pending import PendingReply

MOST_PART_BYTES = 4 << 20
"""Of a state's part, unless one layer's state is larger. One of Qwen3.5-27B has 147 MiB, an extent 64."""


def config_of_states(kv: Namespace, made_by: str) -> dict[str, str]:
    """The config of the namespace that keeps the states beside this KV; model, epoch and block size are the same, the
    codec is raw. made_by: what decides a state's bytes, such as the engine's mode, dtypes and shapes."""
    return {**kv.config, "state": made_by, "beside": kv.digest().hex()}


def layout_of_states(groups: Sequence[KvGroup], ranks: int = 1, packing: str = "planes") -> Layout:
    """The layout of states, one row a block: in parts of few layers, since a frame has to fit into an extent. ranks:
    that hold equal shares of each group's heads."""
    shards = 1
    for one in groups:
        layer_bytes = one.kv_heads * sum(one.plane_widths) * one.element_bytes // ranks
        shards = max(shards, -(-len(one.layers) // max(1, MOST_PART_BYTES // layer_bytes)))
    shards = min(shards, *(len(one.layers) for one in groups))
    return Layout(tuple(groups), groups[0].row_tokens, groups[0].row_tokens, ranks, shards, packing)


class PrefixStates:
    """The states of a model's prompts. Thread-safe."""

    def __init__(self, handle: NamespaceHandle) -> None:
        """handle: of the states' namespace, with blocks of as many tokens as the KV's."""
        self.handle = handle

    def ends(self, prompt: Prompt) -> list[bool]:
        """Behind which of a prompt's full blocks a state is readable."""
        return self.handle.which(prompt.keys)

    def submit(self, prompt: Prompt, deadline_ms: float = 50) -> PendingReply[list[bool]]:
        """`ends`, for a thread that must not wait: none of them if it is late."""
        return self.handle.submit_which(prompt.keys, deadline_ms)

    def cut(self, match: Match, ends: Sequence[bool], last_block: int) -> Match:
        """The longest part of a match that ends at a state, and behind no later block than `last_block`; what else was
        found is missed for want of a state. Cut the match first where something else limits it."""
        most = min(match.blocks, last_block, len(ends))
        blocks = next((end for end in range(most, 0, -1) if ends[end - 1]), 0)
        if blocks == match.blocks:
            return match
        tokens = blocks * self.handle.block_tokens
        detail = f"of {match.blocks} blocks that are found the first {blocks} end at a state"
        shorter = match.cut(blocks, match.account.cut(tokens, MissReason.NO_STATE))
        return replace(shorter, reason=MissReason.NO_STATE, detail=detail)

    def whole(self, prompt: Prompt) -> Match:
        """What `cut` takes for a model that has states alone: every full block counts as found."""
        blocks = len(prompt.keys)
        return self._found(prompt, blocks * self.handle.block_tokens)

    def match_of(self, key: bytes) -> Match:
        """The state at a boundary, to be leased. key: the prefix key of the block that ends there."""
        return self._found(self.prompt_of(key), self.handle.block_tokens)

    def prompt_of(self, key: bytes) -> Prompt:
        """The state at a boundary, to be put."""
        return Prompt(self.handle.block_tokens, [key])

    def _found(self, prompt: Prompt, tokens: int) -> Match:
        blocks = len(prompt.keys)
        tiers = ((HitTier.DRAM, blocks),) if blocks else ()
        account = Account.of([(HitTier.DRAM, tokens), (MissReason.PARTIAL_BLOCK, prompt.tokens - tokens)])
        return Match(prompt.keys, blocks, tokens, tiers, account, None, "")
