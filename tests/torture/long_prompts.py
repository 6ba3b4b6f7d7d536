"""Prompts of a million tokens and short ones, mixed on one connection of a sidecar, with as little KV as there can be.

One thread asks for the long ones, one after the other: look-up, lease, load, release. Another one asks for short ones
meanwhile, from the first long one to the last, and as many as were ordered at least. All of it is in DRAM.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

import kvstore
from kv_bench.measure import quantile
from kv_bench.process import Sidecar
from kvstore.block.account import MissReason
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import NamespaceHandle
from kvstore.client.sidecar_store import SidecarStore
from torture import Report, quiet

LAYOUT = Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
FRAME_BYTES = 8 << 10
LONG_TOKENS, SHORT_TOKENS = 1_000_000, 6_400
SHORT_PROMPTS = 100
"""That are stored, and asked for in turn."""
SHORT_MS_P99 = 50.0
PACE_SECONDS = 0.001


@dataclass
class Told:
    """reasons: of each lease, by (which prompts, why it ended, blocks, tokens that were loaded). Seconds from asking to
    the lease: of the long ones, and of the short ones."""

    reasons: Counter[tuple[str, MissReason | None, int, int]] = field(default_factory=Counter)
    long_seconds: list[float] = field(default_factory=list)
    short_seconds: list[float] = field(default_factory=list)


def prompt(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 30, tokens, dtype=np.uint32)


def blank(tokens: int) -> Pages:
    blocks = tokens // LAYOUT.block_tokens
    planes = {0: [torch.zeros(blocks, LAYOUT.block_tokens, 1, 8, dtype=torch.bfloat16) for _ in range(2)]}
    return Pages(planes, range(blocks), LAYOUT.block_tokens)


def mixed(
    store: SidecarStore, long: int, short: int, long_tokens: int, short_tokens: int, report: Report = quiet
) -> Told:
    """So many of each."""
    handle = store.namespace(model="f" * 40, layout=LAYOUT)
    longs = [prompt(long_tokens, seed) for seed in range(long)]
    shorts = [prompt(short_tokens, 1_000_000 + seed) for seed in range(min(short, SHORT_PROMPTS))]
    for one in (*longs, *shorts):
        put = handle.put(one, blank(len(one)))
        assert put.reason is None and put.stored == len(one) // LAYOUT.block_tokens, put
    told, over = Told(), threading.Event()
    failures: list[BaseException] = []

    def ask_long() -> None:
        try:
            into = blank(long_tokens)
            for number, one in enumerate(longs, 1):
                told.long_seconds.append(_ask(handle, "long", one, into, told))
                report(number)
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=ask_long)
    thread.start()
    into = blank(short_tokens)
    number = 0
    while number < short or (not over.is_set() and short >= SHORT_PROMPTS * 10):
        told.short_seconds.append(_ask(handle, "short", shorts[number % len(shorts)], into, told))
        number += 1
        time.sleep(PACE_SECONDS)
    thread.join()
    assert not failures, f"a long prompt failed: {failures[0]!r}"
    return told


def _ask(handle: NamespaceHandle, which: str, one: np.ndarray, into: Pages, told: Told) -> float:
    began = time.perf_counter()
    match = handle.match(one)
    with handle.lease(match) as lease:
        seconds = time.perf_counter() - began
        loaded = handle.get(lease, into)
        told.reasons[which, match.reason or lease.reply.reason, lease.blocks, loaded.tokens] += 1
    return seconds


def long_prompts(long: int, short: int, report: Report = quiet) -> dict[str, float | str]:
    """The same against a sidecar of its own, as it is by default; what came of the leases, and how long they took."""
    blocks = (long * LONG_TOKENS + SHORT_PROMPTS * SHORT_TOKENS) // LAYOUT.block_tokens
    with Sidecar({"dram": (blocks * FRAME_BYTES * 5 // 4) + (256 << 20), "nvme": "off"}) as sidecar:
        sidecar.greeted()
        with kvstore.open(f"unix:{sidecar.socket}") as store:
            assert isinstance(store, SidecarStore)
            told = mixed(store, long, short, LONG_TOKENS, SHORT_TOKENS, report)
    counts: dict[str, float | str] = {}
    for (which, reason, _, _), count in told.reasons.items():
        name = f"{which}_{reason or 'whole'}"
        counts[name] = int(counts.get(name, 0)) + count
    for which, seconds in (("long", told.long_seconds), ("short", told.short_seconds)):
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            counts[f"{which}_ms_{name}"] = round(1000 * quantile(seconds, share), 2)
    whole = {("long", None, LONG_TOKENS // LAYOUT.block_tokens, LONG_TOKENS)}
    whole.add(("short", None, SHORT_TOKENS // LAYOUT.block_tokens, SHORT_TOKENS))
    assert set(told.reasons) == whole, f"not all was leased and loaded whole: {dict(told.reasons)}"
    assert float(counts["short_ms_p99"]) < SHORT_MS_P99, f"short prompts waited for long ones: {counts}"
    return counts
