"""What `kvstore bench lookup` matches, and one of its client processes that match at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from time import perf_counter, process_time, sleep, thread_time

import numpy as np

from kv_bench.measure import Cost, Stopwatch
from kv_bench.process import Parent, open_patiently
from kv_bench.rig import MODEL, SMALLEST, BlockShape, prompt_of
from kvstore.block.errors import BadInput
from kvstore.block.identity import token_bytes
from kvstore.client.handle import NamespaceHandle


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """prompt_tokens, block_tokens: of every prompt. small_blocks, large_blocks: in the two indexes, whole prompts; a
    sidecar holds as many as the small one. laps, door_laps: measurements of a match, embedded and through the socket.
    clients: processes that match at once, client_laps times for client_seconds."""

    prompt_tokens: int = 32768
    block_tokens: int = SMALLEST.block_tokens
    small_blocks: int = 10_000
    large_blocks: int = 2_000_000
    laps: int = 200
    door_laps: int = 2000
    clients: int = 8
    client_laps: int = 5
    client_seconds: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens // self.block_tokens <= self.small_blocks <= self.large_blocks:
            raise BadInput(
                f"prompts of {self.prompt_tokens} tokens in indexes of {self.small_blocks} and {self.large_blocks} "
                "blocks: give prompts of at least one block, indexes of at least one prompt, the larger one last"
            )

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // self.block_tokens

    @property
    def shape(self) -> BlockShape:
        return BlockShape(1, self.block_tokens, 1, 8)


def matching(
    handle: NamespaceHandle, options: LookupOptions, prompt_at: Callable[[int], np.ndarray]
) -> Callable[[], Cost]:
    turns = count()

    def match() -> Cost:
        prompt = prompt_at(next(turns))
        watch = Stopwatch(thread_time)
        found = handle.match(prompt)
        cost = watch.cost()
        assert found.blocks == options.prompt_blocks and found.reason is None, found
        return cost

    return match


def hashing(options: LookupOptions) -> Callable[[], Cost]:
    """The limit: the keys of one prompt, one keyed BLAKE2b-256 per block over the key before and the block's tokens."""
    raw, step = token_bytes(prompt_of(0, options.prompt_tokens)), options.block_tokens * 4
    base = blake2b(digest_size=32, key=bytes(32), person=b"kv-bench")

    def chain() -> Cost:
        watch = Stopwatch(thread_time)
        parent = bytes(32)
        for at in range(0, len(raw) - step + 1, step):
            state = base.copy()
            state.update(parent + raw[at : at + step])
            parent = state.digest()
        return watch.cost()

    return chain


def timed_until(work: Callable[[], object], start: float, end: float) -> dict[str, object]:
    seconds: list[float] = []
    sleep(max(0.0, start - perf_counter()))
    cpu, before = process_time(), perf_counter()
    while True:
        work()
        now = perf_counter()
        if now > end:
            return {"seconds": seconds, "cpu": process_time() - cpu}
        seconds.append(now - before)
        before = now


def main() -> None:
    parent = Parent()
    job = parent.job
    options = LookupOptions(**job["options"])
    order = np.random.default_rng(job["number"]).permutation(job["prompts"]).tolist()
    prompts = [prompt_of(number, options.prompt_tokens) for number in order]
    with open_patiently(job["socket"]) as store:
        handle = store.namespace(model=MODEL, layout=options.shape.layout)
        work = {"match": matching(handle, options, lambda turn: prompts[turn % len(prompts)]), "hash": hashing(options)}
        parent.answer("ready")
        for turn in parent:
            parent.answer(timed_until(work[turn["work"]], turn["start"], turn["end"]))


if __name__ == "__main__":
    main()
