"""What the order of documents in a prompt costs: the demo's model is asked about the same documents, as they were
retrieved (another order for each question) and sorted by name.

    python benchmarks/document_order.py [--seed 1] [--write PREFIX]

--write: the prompts as PREFIX-shuffled.jsonl and PREFIX-sorted.jsonl, for `kvstore lint --bytes`.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import kvstore
from engine_adapter.hf_cache import PrefixCache
from kv_bench import script
from kvstore.demo.passes import load_trained
from kvstore.demo.questions import MAX_PROMPT_TOKENS, SYSTEM_PROMPT, cut_to_lines, read_page

DOCUMENTS = ("blocks", "misses", "operating", "promises", "tiers")
QUESTIONS, PER_PROMPT, DOCUMENT_BYTES = 40, 3, 1000
ORDERS = ("shuffled", "sorted")


def prompts_of(seed: int) -> dict[str, list[str]]:
    pages = {name: f"## {name}\n{cut_to_lines(read_page(name), DOCUMENT_BYTES)}" for name in DOCUMENTS}
    draws = random.Random(seed)
    found: dict[str, list[str]] = {order: [] for order in ORDERS}
    for number in range(QUESTIONS):
        drawn = draws.sample(DOCUMENTS, PER_PROMPT)
        for order, names in zip(ORDERS, (drawn, sorted(drawn)), strict=True):
            question = f"Question {number}: what is said there?"
            text = "\n".join([SYSTEM_PROMPT, *(pages[name] for name in names), question])
            assert len(text.encode()) < MAX_PROMPT_TOKENS, "the demo's model reads no more"
            found[order].append(text)
    return found


def asked(prompts: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Both orders, question by question, so that what the machine does beside falls on both."""
    torch.set_num_threads(1)
    model, counts = load_trained(), {order: Counter[str]() for order in ORDERS}
    times: dict[str, list[float]] = {order: [] for order in ORDERS}
    with tempfile.TemporaryDirectory() as folder:
        stores = {order: kvstore.embedded(str(Path(folder) / order), dram="512MiB") for order in ORDERS}
        caches = {order: PrefixCache(model, stores[order]) for order in ORDERS}
        for pair in zip(*prompts.values(), strict=True):
            for order, prompt in zip(ORDERS, pair, strict=True):
                caches[order].generate(list(prompt.encode()), max_new_tokens=1)
                report = caches[order].report
                counts[order] += {"asked": report.account.asked, "found": report.account.hit_tokens}
                times[order].append(report.ttft_ms)
        for store in stores.values():
            store.close()
    return {order: {**counts[order], "ttft_ms_p50": statistics.median(times[order])} for order in ORDERS}


def main() -> None:
    given = script.options(__doc__, seed=1, write="")
    prompts = prompts_of(given.seed)
    if given.write:
        for order, texts in prompts.items():
            Path(f"{given.write}-{order}.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    script.end(asked(prompts))


if __name__ == "__main__":
    script.run(main)
