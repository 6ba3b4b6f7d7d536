"""The demo from start to end: four passes over the same requests, and the cold one beside plain transformers.

    cold   the same code with a closed store: every token is computed
    fill   the store is empty at first; requests find what earlier ones stored
    warm   the same requests again, with everything stored
    restart  the store is opened anew on the same directory: memory is empty, and the disk has what was stored

Nothing here prints; the result is a `DemoResult`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import kvstore
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.account import HitTier
from kvstore.block.errors import StoreError
from kvstore.client.sidecar_store import SidecarStore
from kvstore.demo.dashboard import DemoSidecar
from kvstore.demo.model import describe_model, model_of
from kvstore.demo.options import MAX_ANSWER_TOKENS, DemoOptions, usable_cores
from kvstore.demo.passes import PassResult, PlainGenerate, Progress, run_pass
from kvstore.demo.questions import MAX_PROMPT_TOKENS, DemoRequest, prompt_of, twenty_requests
from kvstore.demo.result import DemoResult
from kvstore.node import EmbeddedStore
from tiering.counts.tally import CopyKind

WARM_SECONDS = 60.0
"""How long a store that is opened anew may take to take in what is on disk."""


def run(
    options: DemoOptions | None = None,
    progress: Progress | None = None,
    requests: Sequence[DemoRequest] | None = None,
    model: torch.nn.Module | None = None,
    sidecar: DemoSidecar | None = None,
) -> DemoResult:
    """Run everything. requests, model: in place of the demo's own. sidecar: a running one to answer from, restarted for
    the last pass; `options` then do not configure the store. Raises `StoreError` if the store cannot open."""
    options, progress = options or DemoOptions(), progress or (lambda doing, done, steps: None)
    if requests is None:
        requests = twenty_requests(options.tokens)
    asked = list(requests[: options.requests])
    tokens, start = options.tokens, time.perf_counter()
    with ExitStack() as stack:
        most = 1 if options.seed is None else min(usable_cores(), torch.get_num_threads())
        threads = stack.enter_context(_torch_threads(options.threads or most))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        directory = options.data if options.data is not None else str(scratch / "store")

        def opened() -> EmbeddedStore | SidecarStore:
            if sidecar is not None:
                return sidecar.open()
            return kvstore.embedded(directory, dram=options.dram, nvme=options.nvme)

        store = opened()
        stack.callback(store.close)
        progress("making a model", 0, 1)
        if model is None:
            model = model_of(options.seed, MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS, is_hybrid=options.hybrid)
        cold_cache = _closed_cache(model, scratch / "closed")
        warm_cache = PrefixCache(model, store, codec="raw")
        plain = PlainGenerate(model)
        plain.warm_up(list(asked[0].text))
        cold_cache.generate(list(asked[0].text), max_new_tokens=2)  # pays for first-time work
        progress("making a model", 1, 1)

        def first(done: PassResult) -> list[int]:
            return prompt_of(len(done.prompts), asked, done.prompts, done.answers)

        count = len(asked)
        cold = run_pass("cold", cold_cache, first, count, tokens, progress, plain)

        def again(done: PassResult) -> list[int]:
            return cold.prompts[len(done.prompts)]

        fill = run_pass("fill", warm_cache, again, count, tokens, progress)
        warm = run_pass("warm", warm_cache, again, count, tokens, progress)
        stored_blocks, block_bytes = fill.saved_blocks, warm_cache.layout.raw_bytes
        stored_bytes = stored_blocks * block_bytes
        if isinstance(store, EmbeddedStore):
            stored_blocks = store.usage().blocks
            stored_bytes = sum(one.blocks * sum(one.payload_bytes) for one in store.core.namespaces())

        progress("restart", 0, 1)
        store.close()
        if sidecar is not None:
            sidecar.restart()
        with opened() as store:
            if isinstance(store, EmbeddedStore) and not store.warmed(WARM_SECONDS):
                raise StoreError("what is on disk could not be taken in")
            reopened = PrefixCache(model, store, codec="raw")
            restarted = run_pass("restart", reopened, again, count, tokens, progress)
            read_bytes = restarted.hits().get(HitTier.NVME.value, 0) // warm_cache.layout.block_tokens * block_bytes
            if isinstance(store, EmbeddedStore):
                read_bytes = store.core.blocks.tally.now().copied_bytes[CopyKind.PROMOTE]
        progress("restart", 1, 1)
    return DemoResult(
        requests=asked,
        passes=[cold, fill, warm, restarted],
        against_generate=plain.against(cold),
        model=describe_model(model, is_trained=options.seed is None),
        seed=options.seed,
        threads=threads,
        answer_tokens=tokens,
        block_tokens=warm_cache.layout.block_tokens,
        stored_blocks=stored_blocks,
        stored_bytes=stored_bytes,
        has_states=warm_cache.states is not None,
        read_bytes=read_bytes,
        seconds=time.perf_counter() - start,
    )


def _closed_cache(model: torch.nn.Module, directory: Path) -> PrefixCache:
    with kvstore.embedded(str(directory), dram="64MiB") as store:
        return PrefixCache(model, store, codec="raw")


@contextmanager
def _torch_threads(threads: int) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
