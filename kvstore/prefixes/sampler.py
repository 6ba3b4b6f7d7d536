"""In an engine's process: samples prompts with many misses, sketches them, and reports how they differ from recent
ones.

    a request is over > one in `every` of those that missed more than LEAST_MISSED tokens > a queue > this thread
        > sketched under the tenant's key, compared by tokens with the last MOST_PROMPTS prompts > Tell

Tokens stay in this process; what leaves it are fingerprints with their places, and counts of how a prompt differs from
an earlier one. The engine's own thread draws a number, copies a sampled prompt's ids and never waits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from queue import Empty, Full, Queue

import numpy as np

from kvstore.block.account import Account, MissReason
from kvstore.block.identity import ExtraKey
from kvstore.client.handle import NamespaceHandle
from kvstore.insight.divergence import (
    LEAST_START_TOKENS,
    Divergence,
    PromptSketch,
    SeenPrompt,
    Shingler,
    compare_prompts,
    shared_start,
)
from kvstore.insight.trace import Column
from kvstore.prefixes.sketches import SketchTable
from kvstore.protocol.told import (
    LINK_BYTES,
    MAX_FINGERPRINTS,
    MAX_SKETCHED_BLOCKS,
    MAX_SKETCHED_TOKENS,
    SHORT_BYTES,
    PromptParted,
    PromptTold,
)

LEAST_MISSED = 1024
"""In tokens: only prompts that missed more are sampled."""
MOST_PROMPTS = 64
MOST_TOKENS = 1 << 21
"""Of all recent prompts kept, 8 MiB."""
MOST_WAITING = 4
MOST_COMPARED = 3
"""Earlier prompts compared with each: 1 ms for 2,048 tokens, 20 ms for 32,768."""
_MISSED = frozenset(
    {MissReason.ABSENT, MissReason.DIVERGED, MissReason.OTHER_NAMESPACE, MissReason.EVICTED, MissReason.PARTIAL_BLOCK}
)
"""Reasons that a prompt's text can cause."""


@dataclass(frozen=True, slots=True, repr=False)
class Sampled:
    """stored_tokens: how many of its tokens were found."""

    namespace: NamespaceHandle
    tokens: Column
    extra_keys: Sequence[ExtraKey]
    stored_tokens: int


@dataclass(frozen=True, slots=True, repr=False)
class KeptPrompt:
    """A recent prompt, for comparison. start: a digest of its first tokens."""

    seen: SeenPrompt
    start: bytes


class PromptSampler:
    """Offer it prompts from one thread."""

    def __init__(self, every: int, choose: Callable[[], float]) -> None:
        """every: samples one in so many; 0 for none. choose: uniform in [0, 1)."""
        self._every, self._choose = every, choose
        self._queue: Queue[Sampled | None] = Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._namespace: NamespaceHandle | None = None
        self._forget()

    def offer(
        self,
        namespace: NamespaceHandle,
        account: Account,
        extra_keys: Sequence[ExtraKey],
        token_ids: Callable[[], Sequence[int]],
    ) -> None:
        """A request has ended. account: its prompt's; token_ids: called only if it is sampled. If samples come faster
        than they are compared, they are dropped."""
        missed = sum(tokens for reason, tokens in account.misses.items() if reason in _MISSED)
        if missed <= LEAST_MISSED or not self._every or self._choose() * self._every >= 1:
            return
        if any(one.first_token or not one.value.startswith((b"salt:", b"adapter:")) for one in extra_keys):
            return  # its tokens do not tell images apart
        tokens = np.array(token_ids()[:MAX_SKETCHED_TOKENS], np.uint32)
        stored = min(account.asked - missed, len(tokens))
        try:
            self._queue.put_nowait(Sampled(namespace, tokens, extra_keys, stored))
        except Full:
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kv-prompt-sampler", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread available
                self._every = 0
                return
            self._thread = thread

    def settle(self) -> None:
        """Wait until everything offered is reported."""
        self._queue.join()

    def close(self) -> None:
        """End the thread; what is queued is dropped."""
        while self._thread is not None and self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
                break
            except Full:
                try:
                    self._queue.get_nowait()
                    self._queue.task_done()
                except Empty:
                    pass
        self._thread = None

    # In its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (sampled := self._queue.get()) is not None:
            sampled.namespace.tell([], prompts=[self.sketched(sampled)])
            self._queue.task_done()
        self._queue.task_done()

    def _forget(self) -> None:
        self.kept: OrderedDict[int, KeptPrompt] = OrderedDict()
        self._table, self._number, self._tokens = SketchTable(), 0, 0

    def sketched(self, sampled: Sampled) -> PromptTold:
        """Sketch and compare a prompt, and keep it for later comparisons."""
        namespace, tokens = sampled.namespace, sampled.tokens
        if namespace is not self._namespace:  # prompts of other weights do not compare
            self._forget()
            self._namespace, self._key = namespace, namespace.sketch_key
            self._shingler = Shingler(self._key)
        apart = {b"salt": b"", b"adapter": b""}
        for one in sampled.extra_keys:
            name = one.value.partition(b":")[0]
            apart[name] = self._short(apart[name] + one.value)
        salt, adapter = apart[b"salt"], apart[b"adapter"]
        prompt = SeenPrompt(tokens, salt.hex(), {"adapter": adapter.hex()} if adapter else {})
        start = self._short(tokens[:LEAST_START_TOKENS].tobytes()) if len(tokens) >= LEAST_START_TOKENS else b""
        sketch = self._shingler.sketch(tokens)
        parted = self._parted(prompt, start, sketch, sampled.stored_tokens)
        self._keep(KeptPrompt(prompt, start), sketch)
        keys = namespace.hashed(tokens, sampled.extra_keys).keys[:MAX_SKETCHED_BLOCKS]
        return PromptTold(
            namespace.number,
            self._every,
            len(tokens),
            sampled.stored_tokens,
            b"".join(key[:LINK_BYTES] for key in keys),
            sketch.fingerprints[:MAX_FINGERPRINTS].astype("<u8").tobytes(),
            sketch.places[:MAX_FINGERPRINTS].astype("<u4").tobytes(),
            start,
            salt,
            adapter,
            PromptParted(
                parted.kind, parted.place, parted.earlier_tokens, parted.tokens, parted.equal_tokens, parted.what
            )
            if parted is not None
            else None,
        )

    def _short(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=SHORT_BYTES).digest()

    def _parted(self, prompt: SeenPrompt, start: bytes, sketch: PromptSketch, stored_tokens: int) -> Divergence | None:
        """Compare with those that share most fingerprints, or begin alike, longest shared start first."""
        assert self._namespace is not None
        near = self._table.nearest(sketch, stored_tokens)
        alike = [number for number, one in self.kept.items() if one.start == start and number not in near]
        candidates = [self.kept[number].seen for number in [*near, *(alike if start and not stored_tokens else ())]]
        candidates.sort(key=lambda one: -shared_start(one.tokens, prompt.tokens))
        for earlier in candidates[:MOST_COMPARED]:
            found = compare_prompts(earlier, prompt, self._namespace.block_tokens, self._shingler, stored_tokens)
            if found is not None:
                return found
        return None

    def _keep(self, kept: KeptPrompt, sketch: PromptSketch) -> None:
        self.kept[self._number] = kept
        self._table.add(self._number, sketch)
        self._number += 1
        self._tokens += len(kept.seen.tokens)
        while len(self.kept) > MOST_PROMPTS or self._tokens > MOST_TOKENS:
            number, oldest = self.kept.popitem(last=False)
            self._table.forget(number)
            self._tokens -= len(oldest.seen.tokens)
