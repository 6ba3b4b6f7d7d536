"""The engine-neutral half of an adapter: one request's way through the store.

An engine's adapter knows tensors, streams and schedulers; this file knows the store's verbs, the grid, and how every
prompt token is accounted for. Any fault of the store becomes a miss here: nothing raises because of the store, and
after one fault a request goes on without it. Must never import an engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from logging import getLogger
from math import ceil

import torch

from engine_adapter.handoff import UNLEARNED_SECONDS, FetchPolicy, WaitPlan, WaitPolicy, wait_for_blocks
from kvstore.block.account import Account, HitTier, MissReason, reason_of
from kvstore.block.codec import default_codec
from kvstore.block.errors import StoreError
from kvstore.block.identity import ExtraKey, Prompt
from kvstore.block.layout import Layout
from kvstore.block.pages import Pages
from kvstore.client.edge import contained
from kvstore.client.handle import Lease, Match, NamespaceHandle
from kvstore.client.states import PrefixStates

SAVE_DEADLINE_MS = 1000.0
"""How long a save waits for the store, whatever its size: another request may be waiting behind it."""
SAVE_BYTES_PER_MS = 500_000
"""Added to that for each save, its bytes divided by this: memory that the store touches for the first time comes from
the system at some 2 GB a second."""

_AWAY = frozenset({MissReason.UNREACHABLE, MissReason.DEADLINE, MissReason.DISABLED})

_log = getLogger(__name__)


@dataclass
class Report:
    """What one request got from the store, and how long it took. Times in milliseconds, counts as named.

    account: every prompt token, by tier or by miss reason; asked == prompt_tokens. grid_tokens: what a hit is whole
    multiples of.
    detail: why the match ended, where there is more to say than a reason. lookup_ms: match and lease. restored_ms:
    copying and verifying blocks. save_ms: all saving, behind the first token. saved_blocks: newly stored.
    put_reasons: saves that stored less than was offered, by reason. faults: errors of the store, with the last one's
    text. ttft_ms: from the call to this request's first token. itl_ms: every gap between two of its tokens. request:
    its name, for `kvstore why`; "" where it has none.
    """

    prompt_tokens: int
    grid_tokens: int
    account: Account = field(default_factory=lambda: Account(()))
    detail: str = ""
    lookup_ms: float = 0.0
    restored_ms: float = 0.0
    save_ms: float = 0.0
    saved_blocks: int = 0
    put_reasons: dict[MissReason, int] = field(default_factory=dict)
    faults: int = 0
    fault: str = ""
    new_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    request: str = ""

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens whose KV was not computed."""
        return self.account.hit_tokens

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.account.hit_tokens

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second after the first one; 0 where there is only one."""
        return 1e3 * len(self.itl_ms) / sum(self.itl_ms) if any(self.itl_ms) else 0.0

    def itl_percentile(self, percent: float) -> float:
        """Inter-token latency in milliseconds at a percentile (nearest rank); 0 where there is only one token."""
        ranked = sorted(self.itl_ms) or [0.0]
        return ranked[max(0, ceil(len(ranked) * percent / 100) - 1)]

    def to_dict(self) -> dict[str, object]:
        made = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("account", "itl_ms")}
        made |= self.account.to_dict()
        made |= {f"itl_ms_p{one}": self.itl_percentile(one) for one in (50, 99)}
        made |= {"tokens_per_second": self.tokens_per_second}
        return {**made, "put_reasons": {str(reason): count for reason, count in self.put_reasons.items()}}


class HbmBlocks:
    """Decoded blocks of one namespace in the engine's own memory, asked before the store; the oldest go first.

    A block is what its page holds, for each layer and plane [token, kv_head, width]. A prompt's first blocks are always
    evicted last, so what is found is a prefix. Keys are prefix keys alone: blocks of two namespaces must not meet here.
    Pages begin with the first key, and each is a block.
    """

    def __init__(self, layout: Layout, capacity_bytes: int) -> None:
        self.capacity_blocks = max(0, capacity_bytes) // layout.raw_bytes
        self._blocks: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()
        """The planes of the layers in turn, by prefix key."""

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are here."""
        return len(list(takewhile(self._blocks.__contains__, keys)))

    def load(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Copy these blocks into pages. All of them must be here."""
        blocks = [self._blocks[key] for key in keys]
        for number, plane in enumerate(_planes(pages)):
            plane[pages.table[0] : pages.table[0] + len(keys)].copy_(torch.stack([one[number] for one in blocks]))
        self._touch(keys)

    def save(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Keep as many of these blocks as fit, the first ones first."""
        keys = keys[: self.capacity_blocks]
        for number in range(self.leading(keys), len(keys)):
            if len(self._blocks) >= self.capacity_blocks:
                self._touch(keys[:number])
                self._blocks.popitem(last=False)
            self._blocks[keys[number]] = [plane[pages.table[number]].clone() for plane in _planes(pages)]
        self._touch(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Use blocks from the last to the first: the first becomes the most recent."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _planes(pages: Pages) -> list[torch.Tensor]:
    return [plane for layer in sorted(pages.planes) for plane in pages.planes[layer]]


class StoreRequest:
    """One request on a namespace. Without a namespace, or with a closed store, every token is a `disabled` miss.

    1. `matched_tokens` before the request is scheduled; what it promises is pinned until `load` or `release`.
    2. `load` once the engine has memory for it.
    3. `save` whenever more of the prompt is computed.
    4. `release` at the end.

    report: filled in here; a match is cut to its grid_tokens. An engine whose results do not depend on how prefill is
    split passes its block size. pool: asked before the store. deadline_ms: of a look-up. ticket: from the engine that
    computes the prompt; the look-up waits for that engine's blocks. states: of recurrent layers, for a model that has
    some: what is matched ends where there is one. Not thread-safe.
    """

    def __init__(
        self,
        namespace: NamespaceHandle | None,
        report: Report,
        *,
        pool: HbmBlocks | None = None,
        deadline_ms: float = 50,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        ticket: str = "",
        states: PrefixStates | None = None,
    ) -> None:
        self.report = report
        self.ttl: float | None = None
        """Of saves, as in `NamespaceHandle.put`."""
        self.least_tokens = 0
        """Of a hit: of less no use can be made."""
        self.found_tokens = 0
        """Of the last look-up, in KV alone: behind it prompts part."""
        self._namespace, self._pool, self._states = namespace, pool, states
        self._deadline_ms, self._extra_keys, self._ticket = deadline_ms, extra_keys, ticket
        self._lease: Lease | None = None
        self._state_lease: Lease | None = None
        self._keys: list[bytes] = []
        self._pooled_tokens = 0
        self.is_away = False
        """Whether the last save found the store unreachable, too slow or disabled: another one soon would fail too."""

    def matched_tokens(self, token_ids: Sequence[int]) -> int:
        """Match; take from the pool what it has; lease the rest, as far as the grid can use it. Returns how many of the
        prompt's leading tokens `load` will bring, always fewer than the prompt has."""
        report, asked = self.report, len(token_ids)
        report.account = Account.of([(MissReason.DISABLED, asked)])
        if self._namespace is None:
            return 0
        block = self._namespace.block_tokens

        def failed(error: Exception) -> None:
            report.account = Account.missed(self._fail(error), asked, block)

        with self._timed("lookup_ms"), contained(failed):
            report.account = self._look_up(self._namespace, token_ids)
        return report.account.hit_tokens

    def sealed(self, token_ids: Sequence[int], seconds: float) -> str:
        """A ticket with which another engine waits for the prompt's full blocks; "" if none can be made."""
        if self._namespace is None:
            return ""
        try:
            prompt = self._namespace.hashed(token_ids, self._extra_keys)
            return self._namespace.seal(prompt, seconds).ticket if prompt.keys else ""
        except StoreError as error:
            self._fail(error)
            return ""

    def load(self, pages: Pages, state: Pages | None = None) -> int:
        """Copy and verify, then release the lease. Pages may cover less than was matched. state: for the states behind
        what was matched, where there are any. Returns how many tokens are valid in them."""
        report = self.report
        if self._namespace is None or not report.account.hit_tokens:
            return 0

        def failed(error: Exception) -> None:
            report.account = report.account.cut(0, self._fail(error))

        with self._timed("restored_ms"), contained(failed):
            report.account = self._bring(self._namespace, pages)
            if state is not None and self._states is not None and self._state_lease is not None:
                with self._state_lease as lease:
                    loaded = self._states.handle.get(lease, into=state)
                if not loaded.tokens or report.account.hit_tokens < pages.tokens:
                    report.account = report.account.cut(0, loaded.reason or MissReason.NO_STATE)
        return report.account.hit_tokens

    def save(self, token_ids: Sequence[int], pages: Pages, first_token: int = 0) -> None:
        """Put the full blocks; pages hold the KV of `token_ids` from `first_token` on. All of them are offered each
        time: stored blocks are skipped without a copy, and evicted or refused ones get another chance. What an inexact
        codec restored must not be among them (`is_exact`)."""
        if self._namespace is not None:
            with self._timed("save_ms"), contained(lambda error: self._count(self._fail(error))):
                prompt = self._namespace.hashed(token_ids, self._extra_keys)
                self._put(self._namespace, prompt, pages, first_token)
                if self._pool is not None and not first_token:
                    self._pool.save(prompt.keys, pages)

    def save_state(self, token_ids: Sequence[int], state: Pages) -> None:
        """Put the states of recurrent layers as they are behind these tokens, whole blocks."""
        if self._namespace is not None and self._states is not None:
            with self._timed("save_ms"), contained(lambda error: self._count(self._fail(error))):
                key = self._namespace.hashed(token_ids, self._extra_keys).keys[-1]
                self._put(self._states.handle, self._states.prompt_of(key), state, 0)

    def _put(self, handle: NamespaceHandle, prompt: Prompt, pages: Pages, first: int) -> None:
        blocks = pages.tokens // handle.block_tokens
        wait_ms = SAVE_DEADLINE_MS + blocks * handle.layout.raw_bytes / SAVE_BYTES_PER_MS
        result = handle.put(prompt, pages, first, deadline_ms=wait_ms, ttl=self.ttl)
        self.report.saved_blocks += result.stored if handle is self._namespace else 0
        self.is_away = result.reason in _AWAY
        if result.reason is not None:
            self._count(result.reason)

    def release(self) -> None:
        """Unpin."""
        leases = [lease for lease in (self._lease, self._state_lease) if lease is not None]
        self._lease = self._state_lease = None
        for lease in leases:
            with contained(self._fail):
                lease.release()

    @property
    def is_open(self) -> bool:
        return self._namespace is not None

    @property
    def is_exact(self) -> bool:
        """Whether what was restored may be offered again: of an inexact codec errors would add up."""
        return self._namespace is not None and self._namespace.is_exact

    def withdraw(self, detail: str) -> None:
        """Load and save nothing more in this request: the model that computes it no longer is the namespace's."""
        if self._namespace is not None:
            self._namespace = None
            self.release()
            self.report.detail = detail
            self._count(MissReason.DISABLED)

    # Inside --------------------------------------------------------------------------------------------------------

    def _look_up(self, namespace: NamespaceHandle, token_ids: Sequence[int]) -> Account:
        prompt = namespace.hashed(token_ids, self._extra_keys)
        match = self._found(namespace, prompt)
        self.report.detail, request = match.detail, self.report.request
        if match.reason is MissReason.DISABLED:
            self._namespace = None
            return Account.of([(MissReason.DISABLED, len(token_ids))])
        self._keys, self.found_tokens = match.keys, match.tokens
        if self._states is not None:
            match = self._to_state(self._states, prompt, match)
        found = self._pool.leading(match.keys) * namespace.block_tokens if self._pool is not None else 0
        account = match.account.behind(HitTier.HBM, found)
        usable = self._cut(account).hit_tokens
        self._pooled_tokens = min(found, usable)
        if usable > self._pooled_tokens:
            first_token, account = self._pooled_tokens, self._cut(match.account)
            match = match.cut(usable // namespace.block_tokens, account.cut(usable, MissReason.GRID))
            self._lease = namespace.lease(match, first_token, deadline_ms=self._deadline_ms, request=request)
            account = self._lease.account.behind(HitTier.HBM, found)
        account = self._cut(account)
        if self._state_lease is not None and account.hit_tokens < match.tokens:
            account = account.cut(0, MissReason.NO_STATE)  # less could be leased, and there the state is another one
        self._pooled_tokens = min(found, account.hit_tokens)
        if account.hit_tokens <= self._pooled_tokens:
            self.release()
        return account

    def _to_state(self, states: PrefixStates, prompt: Prompt, match: Match) -> Match:
        """The match up to where a state is, which is leased."""
        block, grid = states.handle.block_tokens, self.report.grid_tokens
        usable = reusable_tokens(match.tokens, prompt.tokens, grid) // block
        ends = states.ends(prompt) if usable else []
        ends = [end and not (number * block) % grid for number, end in enumerate(ends, 1)]
        while True:
            cut = states.cut(match, ends, usable)
            if not cut.blocks:
                return cut
            state, request = states.match_of(match.keys[cut.blocks - 1]), self.report.request
            self._state_lease = states.handle.lease(state, deadline_ms=self._deadline_ms, request=request)
            if self._state_lease.blocks:
                return cut
            self._state_lease, ends[cut.blocks - 1] = None, False

    def _found(self, namespace: NamespaceHandle, prompt: Prompt) -> Match:
        """The match, after waiting for blocks elsewhere or being stored. The last look-up counts as the request's."""
        usable = reusable_tokens(prompt.tokens, prompt.tokens, self.report.grid_tokens) // namespace.block_tokens
        policy = None
        if self._ticket:
            policy = WaitPolicy(prompt, namespace.block_tokens, lambda *_: None, time.perf_counter, 0.0)
            policy.opened(namespace.open_ticket(self._ticket))
        plan = WaitPlan(policy, FetchPolicy(usable, UNLEARNED_SECONDS, namespace.block_tokens))
        request = self.report.request
        is_open = plan.is_open(namespace.has_courier)
        match = namespace.match(prompt, counts=not is_open, request="" if is_open else request)
        has_waited = wait_for_blocks(namespace, prompt, self._ticket, plan, match.blocks)
        if is_open or has_waited:
            match = namespace.match(prompt, counts=is_open, request=request)
        return replace(match, account=plan.account(match.account), detail=plan.detail or match.detail)

    def _bring(self, namespace: NamespaceHandle, pages: Pages) -> Account:
        block, account = namespace.block_tokens, self.report.account
        valid = pooled = min(self._pooled_tokens, pages.tokens // block * block)
        if pooled < self._pooled_tokens:
            account = account.cut(pooled, MissReason.GRID)
            self.release()
        if pooled and self._pool is not None:
            self._pool.load(self._keys[: pooled // block], pages)
        lease, self._lease = self._lease, None
        if lease is not None:
            with lease:
                rest = pages.cut(pooled // pages.page_tokens, len(pages.table))
                loaded = namespace.get(lease, into=rest, first_token=pooled)
            valid = max(pooled, loaded.tokens)
            account = account.cut(valid, loaded.reason or MissReason.GRID)
            if self._pool is not None:
                self._pool.save(self._keys[: valid // block], pages)
        return self._cut(account)

    def _cut(self, account: Account) -> Account:
        account = cut_to_grid(account, self.report.grid_tokens)
        return account if account.hit_tokens >= self.least_tokens else account.cut(0, MissReason.GRID)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self.report, name, getattr(self.report, name) + 1e3 * (time.perf_counter() - start))

    def _fail(self, error: Exception) -> MissReason:
        self._namespace = None
        self.release()
        reason = reason_of(error)
        if reason is not MissReason.DISABLED:
            self.report.faults += 1
            self.report.fault = f"{type(error).__name__}: {error}"
        return reason

    def _count(self, reason: MissReason) -> None:
        self.report.put_reasons[reason] = self.report.put_reasons.get(reason, 0) + 1


def chosen_codec(given: str | None, layout: Layout) -> str:
    """An adapter's codec: the given one, else 8 bits if the layout's numbers allow it."""
    if given is not None:
        return given
    codec = default_codec(layout)
    if codec == "raw":
        dtypes = sorted({group.dtype for group in layout.groups})
        _log.warning("KV of dtype %s is kept as it is (codec 'raw'): 8-bit codecs write 16- and 32-bit floats", dtypes)
    return codec


def reusable_tokens(found: int, asked: int, grid_tokens: int) -> int:
    """How much of a found prefix can be used: whole grid cells, and at least one token is left to compute."""
    return min(found, asked - 1) // grid_tokens * grid_tokens


def cut_to_grid(account: Account, grid_tokens: int) -> Account:
    """Turn hits that cannot be used into misses: the prompt's last token into `last_token`, the others into `grid`.

    >>> from kvstore.block.account import HitTier
    >>> cut_to_grid(Account.of([(HitTier.DRAM, 512)]), 256).to_dict()["misses"]
    {'grid': 255, 'last_token': 1}
    """
    reusable = reusable_tokens(account.hit_tokens, account.asked, grid_tokens)
    return account.cut(account.asked - 1, MissReason.LAST_TOKEN).cut(reusable, MissReason.GRID)
