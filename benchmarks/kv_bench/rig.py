"""What benches store and load: frames of a shape, an engine's pages, and prompts through handles.

All memory is walked through in turn, so that a turn never finds its bytes in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle

MODEL = "0" * 40
PROMPTS = 4
"""Prompts of a working set: enough that the others flush the caches before one comes round again."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """bfloat16 K and V of `layers` layers, `kv_heads` heads of `head_dim`, `block_tokens` tokens."""

    layers: int
    block_tokens: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def layout(self) -> Layout:
        sizes = dict(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)
        return Layout.gqa(**sizes, dtype="bfloat16", block_tokens=self.block_tokens)

    @property
    def payload_bytes(self) -> int:
        return self.layout.raw_bytes


SMALLEST = BlockShape(layers=1, block_tokens=64, kv_heads=1, head_dim=8)
"""At most a page of payload: for what does not look at it."""


def prompt_of(number: int, tokens: int) -> np.ndarray[Any, Any]:
    """0, 1, 2, ... except for its first token, the number, which is part of every key."""
    prompt = np.arange(tokens, dtype=np.uint32)
    prompt[0] = number
    return prompt


class PagePool:
    """An engine's pages for a whole working set, handed out prompt by prompt, cyclically. Thread-safe.

    page_tokens 0: a page is a block, [head, token, dim], so each plane of a block is contiguous. Otherwise pages of so
    many tokens, [token, head, dim], as engines often keep them: a block is gathered from rows.
    """

    def __init__(self, shape: BlockShape, blocks: int, page_tokens: int = 0, prompts: int = 1) -> None:
        """blocks: of a prompt. prompts: in the working set."""
        self.page_tokens = page_tokens or shape.block_tokens
        self._pages_of_prompt = blocks * shape.block_tokens // self.page_tokens
        self._prompts, self._next = prompts, count()
        sizes = [self.page_tokens, shape.kv_heads] if page_tokens else [shape.kv_heads, self.page_tokens]
        pages = [torch.ones(self._pages_of_prompt * prompts, *sizes, shape.head_dim, dtype=torch.bfloat16)]
        pages += [torch.ones_like(pages[0]) for _ in range(2 * shape.layers - 1)]
        planes = pages if page_tokens else [plane.permute(0, 2, 1, 3) for plane in pages]
        self.planes = {layer: planes[2 * layer : 2 * layer + 2] for layer in range(shape.layers)}

    def take(self) -> Pages:
        first = next(self._next) % self._prompts * self._pages_of_prompt
        return Pages(self.planes, range(first, first + self._pages_of_prompt), self.page_tokens)

    def fill_randomly(self) -> None:
        for planes in self.planes.values():
            for plane in planes:
                plane.view(torch.int16).random_(-(1 << 15), 1 << 15)


class PromptTraffic:
    """Whole prompts through handles, one per thread: the user's own calls."""

    def __init__(self, shape: BlockShape, blocks: int, pool: PagePool, handles: Sequence[NamespaceHandle]) -> None:
        """blocks: of a prompt."""
        self.handles, self.tokens = handles, blocks * shape.block_tokens
        self._pool, self._numbers, self._rounds = pool, count(), count()
        self._stored: list[np.ndarray] = []

    def get(self, thread: int) -> None:
        handle = self.handles[thread]
        prompt = self._stored[next(self._rounds) % len(self._stored)]
        pages = self._pool.take()
        with handle.lease(handle.match(prompt)) as lease:
            loaded = handle.get(lease, pages)
        assert loaded.tokens == len(prompt), f"{loaded.tokens} of {len(prompt)} tokens loaded: {loaded.reason}"

    def put(self, thread: int) -> np.ndarray:
        prompt = prompt_of(next(self._numbers), self.tokens)
        result = self.handles[thread].put(prompt, self._pool.take())
        assert result.reason is None and result.stored, f"stored {result.stored} blocks: {result.reason}"
        return prompt

    def stock(self, prompts: int) -> None:
        self._stored = [self.put(0) for _ in range(prompts)]
