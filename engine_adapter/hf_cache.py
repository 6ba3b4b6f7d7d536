"""Prefix caching for models of Hugging Face transformers.

    cache = PrefixCache(model, kvstore.open("embedded:./kv", dram="2GiB"))
    output = cache.generate(token_ids, max_new_tokens=64)      # what model.generate(...) returns
    print(cache.report.to_dict())

A request: 1. match and lease. 2. restore into a cache of transformers' own. 3. compute the rest of the prompt in cells,
but for the last one. 4. the model's own `generate` goes on from there: it computes the last cell and all tokens, and
after each of them one cell of the prompt is saved. 5. save the rest, and generated blocks. So nothing is saved before a
first token, except in a batch where a prompt begins like an earlier one.
Must never change the user's model, nor let a fault of the store reach the user.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from logging import getLogger
from math import inf
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from engine_adapter.adapter import HbmBlocks, Report, StoreRequest, chosen_codec
from engine_adapter.audit.audits import FRACTION, AuditVerdict, judged
from engine_adapter.audit.blocks import experts_of
from engine_adapter.cost import PrefillSpeed
from engine_adapter.hf.identity import LONGROPE, ModelIdentity, ModelWatch
from engine_adapter.hf.inputs import Prompts, checked_words, digests_of, prompts_of, token_set
from engine_adapter.hf.kinds import RestoredKv
from engine_adapter.hf.layers import WORDS, each_step, from_the_hit_on
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput, StoreClosed, StoreError
from kvstore.block.identity import ExtraKey, as_extra_keys
from kvstore.block.layout import Layout
from kvstore.block.states import StatePolicy
from kvstore.client.edge import in_one_line
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.client.states import PrefixStates, config_of_states
from kvstore.config import checked, parse_size
from kvstore.protocol.told import MAX_TOLD_TEXT, RequestTold, SavingsTold

CHUNK_TOKENS_CPU = 384
"""Of a prompt's cells. Smaller ones waste some of the cores' work, larger ones take more memory. `kvstore demo` prints
what they cost: the time to a cold first token beside plain `generate`."""
CHUNK_TOKENS_CUDA, GRID_TOKENS_CUDA = 8192, 2048
"""Enough rows to keep a large GPU busy. A grid is finer, since hits are whole multiples of it."""
MAX_NAMESPACES = 16
"""Namespaces that a cache keeps open, one for each state of its model, as where adapters are switched."""
TICKET_SECONDS = 60.0
"""For how long a ticket of `prefill` is good, and its blocks are retained."""
MAX_WAITING_TOKENS = 16_384
"""Of a prompt in layers with windows: more of them are saved before the first token, as keeping them takes memory."""
PAUSE_SECONDS = 10.0
"""Before a namespace that a store refused is opened again: a request may wait 5 s for a store that does not answer."""

CHANGED = "the model changed during the request"
_log = getLogger(__name__)
_GONE = {"generate_batch": "generate(prompts, ...)", "stream": "generate(..., streamer=...)"}


class SavedBlocks(StrEnum):
    EVERYTHING = "everything"  # every full block, of prompts and of answers
    WHOLE_CHUNKS = "whole_chunks"  # only blocks of whole cells of a prompt


class PrefixCache:
    """Generates with a model, reusing the KV of prompts from a store and keeping new KV there.

    Size. Where no codec is given, KV is kept in 8 bits ("int8-kc64"), each number within half a step of what was
    computed: an answer can leave the cold one where two tokens are close. What was restored is never put again.

    Exactness. With codec "raw" what is restored is bit for bit what was computed. `SavedBlocks.EVERYTHING` restores all
    whole blocks and computes the rest in other shapes than cold, so with other last bits. `SavedBlocks.WHOLE_CHUNKS`
    restores whole cells of a fixed grid alone: warm and cold compute the same shapes and are bit-identical.

    Batches. Each prompt is looked up and prefilled by itself, so what is stored does not depend on neighbours, and a
    prefix that prompts of one batch share is computed once. Then all rows decode together, padded in front.

    Changes. What the model computes for a short prompt is part of the namespace: after a change of adapters, hooks,
    weights and the like the same cache goes on in another one, and finds the old one again when it is taken back. What
    a running request computes after a change is not kept.

    Not thread-safe; no other code may use the model during a call.
    """

    @in_one_line("PrefixCache")
    def __init__(
        self,
        model: Any,
        store: OpenStore | None = None,
        *,
        codec: str | None = None,
        chunk_tokens: int | None = None,
        kept: SavedBlocks | str = SavedBlocks.EVERYTHING,
        hbm: str | int = 0,
        deadline_ms: float = 50,
    ) -> None:
        """store: without one, or with a closed one, the same code computes everything. codec: any of
        `kvstore.block.codec.CODECS`; left out, "int8-kc64", or "raw" for KV that 8 bits cannot hold. chunk_tokens: the
        most that a prompt's forward pass computes, a multiple of the block; with whole_chunks also the grid. hbm: the
        size of a pool of decoded blocks on the model's device, asked before the store. deadline_ms: how long a lookup
        may wait for blocks. Raises `BadInput`, with one line.
        """
        self.model = model
        with in_one_line(f"PrefixCache cannot serve a {type(model).__name__}"):
            self._watch = ModelWatch(model)
        self.kept = checked("kept", kept, SavedBlocks)
        if chunk_tokens is None:
            of_cuda = CHUNK_TOKENS_CUDA if self.kept is SavedBlocks.EVERYTHING else GRID_TOKENS_CUDA
            chunk_tokens = CHUNK_TOKENS_CPU if self._watch.device.type == "cpu" else of_cuda
        block, self.chunk_tokens = self.layout.block_tokens, chunk_tokens
        if chunk_tokens < 1 or chunk_tokens % block:
            use = max(1, chunk_tokens // block) * block
            raise BadInput(f"chunk_tokens={chunk_tokens} is not a multiple of the block of {block} tokens; use {use}")
        self.reports: list[Report] = []
        """Of the last request, one for each of its prompts."""
        self.audit, self._hits = FRACTION, 0
        """The share of hits that are computed all the same, misses called `audit`, and compared with what is stored: a
        block that is another one ends the store's use, with an error in the log. 0 for none, 1 for all."""
        self._deadline_ms = deadline_ms
        self._identity = self._watch.identity()
        self._store, self._codec = store, codec
        self._opened: dict[tuple[ModelIdentity, str], tuple[NamespaceHandle | None, PrefixStates | None]] = {}
        self._table = "short"
        self.states: PrefixStates | None = None
        """Of recurrent layers, beside the namespace."""
        self._open_again_at = inf
        self._pool_bytes = parse_size(hbm, "hbm")
        self.namespace = self._namespace_of(self._identity)
        self.pool = self._new_pool()
        self._news = CacheNews()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy` and `pickle`. Raises `TypeError`."""
        raise TypeError(
            "a PrefixCache cannot be copied, deep-copied or pickled, since it belongs to its model and to an open "
            "store of this process; make another one, PrefixCache(model, store), with the same store or one that is "
            "opened on the same directory or socket: it finds all prompts that were kept"
        )

    def __getattr__(self, name: str) -> NoReturn:
        instead = f"; call {_GONE[name]}" if name in _GONE else ""
        raise AttributeError(f"PrefixCache has no {name}{instead}")

    @property
    def layout(self) -> Layout:
        return self._watch.kinds.layout

    @property
    def report(self) -> Report:
        """Of the last request's first prompt."""
        return self.reports[0]

    def generate(
        self,
        inputs: Any = None,
        *,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        ticket: str = "",
        **given: Any,
    ) -> Any:
        """What `model.generate` returns for these prompts and arguments, with their known prefixes from the store;
        `report` and `reports` then say what came from there.

        inputs: token ids of one prompt or several, as lists, arrays or tensors, or what a tokenizer or
        `apply_chat_template` returned; `input_ids=` and `attention_mask=` as in transformers. Padding is taken away by
        the mask, and added anew in front, where prompts differ in length. extra_keys: what else KV depends on, as in
        `NamespaceHandle.match`. ticket: of `prefill` in another process, whose blocks are waited for as long as they
        keep coming. given: all that `model.generate` takes besides: lengths, sampling, beams, drafts, streamers,
        stopping criteria. Raises `BadInput`, and what `model.generate` raises.
        """
        prompts, pictures, given = self._read(inputs, given)
        request = _Request(self, prompts, pictures, as_extra_keys(extra_keys), ticket)
        self.reports = [row.request.report for row in request.rows]
        beams, answers = self._setting(given, "num_beams") or 1, self._setting(given, "num_return_sequences") or 1
        ends = token_set(self._setting(given, "eos_token_id"))
        pad_token = min(token_set(self._setting(given, "pad_token_id")), default=0)
        token_ids, mask = prompts.matrix(max(0, pad_token), self._watch.device)
        given["stopping_criteria"] = each_step(request.step, given.get("stopping_criteria"))
        is_drafted = given.get("assistant_model") or self._setting(given, "prompt_lookup_num_tokens")
        try:
            given["past_key_values"] = request.prefilled(max(beams, answers), None if beams > 1 else ends)
            given |= {**request.unseen, **self._watch.call.positions(token_ids, mask, **pictures)}
            view = from_the_hit_on(self.model) if is_drafted else self.model
            return view.generate(token_ids, attention_mask=mask, **given)
        finally:
            request.end()

    def prefill(
        self,
        inputs: Any = None,
        *,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_ticket: Callable[[str], None] | None = None,
        **given: Any,
    ) -> str:
        """Compute a prompt and store it cell by cell, for `generate(prompt, ticket=...)` in another process with the
        same model and the same store. Returns the ticket; "" where nothing can be stored. on_ticket: called with it
        before the first cell is computed, so that the other process can load while this one computes."""
        prompts, pictures, given = self._read(inputs, given)
        if len(prompts.rows) > 1 or given or pictures:
            wrong = ", ".join([*given, *pictures]) or "batch"
            raise BadInput(f"prefill takes one prompt of text, and no {wrong}; give these to generate")
        request = _Request(self, prompts, {}, as_extra_keys(extra_keys), "")
        (row,) = request.rows
        self.reports, row.request.ttl = [row.request.report], TICKET_SECONDS
        ticket = row.request.sealed(row.tokens[: self.kept_tokens(len(row.tokens))], TICKET_SECONDS)
        if on_ticket is not None:
            on_ticket(ticket)
        try:
            request.compute(row, len(row.tokens), saves=True)
        finally:
            request.end()
        return ticket

    def kept_tokens(self, prompt_tokens: int) -> int:
        """How many of a prompt's tokens may be stored. Of whole cells, not the one that `generate` computes."""
        if self.kept is SavedBlocks.EVERYTHING:
            return prompt_tokens
        return (prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens

    def _audits_hit(self) -> bool:
        self._hits += 1  # evenly spread
        return int(self._hits * self.audit) > int((self._hits - 1) * self.audit)

    # Checks --------------------------------------------------------------------------------------------------------

    def _read(self, inputs: Any, given: dict[str, Any]) -> tuple[Prompts, dict[str, torch.Tensor], dict[str, Any]]:
        """The prompts, their pictures, and what else goes to `model.generate`. If the model computes other KV than
        before, this switches to that KV's namespace."""
        if isinstance(inputs, Mapping):
            if twice := inputs.keys() & given.keys():
                raise BadInput(f"{', '.join(sorted(twice))} is given, and the inputs bring their own; leave one out")
            inputs, given = None, {**inputs, **given}
        given = dict(given)
        token_ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
        if (inputs is None) == (token_ids is None):
            raise BadInput("give the prompts as the first argument or as input_ids=, and not as both")
        given, pictures = checked_words(given, WORDS)
        settings = given.get("generation_config") or self.model.generation_config
        config = self.model.config.get_text_config()
        prompts = prompts_of(token_ids if inputs is None else inputs, mask, config, settings)
        if self._setting(given, "use_cache") is False or self._setting(given, "cache_implementation"):
            given |= {"use_cache": True, "cache_implementation": None}
        self._look_at_model(max(map(len, prompts.rows)), min(map(len, prompts.rows)))
        return prompts, {name: one.to(self._watch.device) for name, one in pictures.items()}, given

    def _setting(self, given: Mapping[str, Any], name: str) -> Any:
        for place in (given.get("generation_config"), self.model.generation_config):
            if (value := given.get(name, getattr(place, name, None))) is not None:
                return value
        return None

    def _look_at_model(self, longest: int, shortest: int) -> None:
        """If the model computes other KV than before, of prompts of these lengths, switch to that KV's namespace. If
        the store does not open it, go on without one, and ask again after a pause. Raises `BadInput`."""
        identity, (rope, most) = self._watch.identity(), self._watch.rope
        table = "long" if rope and longest > most else "short"
        if table == "long" and shortest <= most:
            raise BadInput(f"{shortest} and {longest} tokens in a batch, and {rope} changes at {most}; ask them apart")
        is_same = (identity, table) == (self._identity, self._table)
        if is_same and time.monotonic() < self._open_again_at:
            return
        self._table, self._identity, self._open_again_at = table, identity, inf
        try:
            self.namespace = self._namespace_of(identity)
        except BadInput:
            raise
        except StoreError as error:  # the answer needs no store
            self.namespace, self._open_again_at = None, time.monotonic() + PAUSE_SECONDS
            _log.warning("nothing is kept or found of the model as it is now: %s", error)
        self.pool = self._new_pool()  # a pool's keys do not name the namespace

    def _new_pool(self) -> HbmBlocks | None:
        if self._pool_bytes <= 0 or self.namespace is None:
            return None
        if self._watch.kinds.has_windows or self._watch.kinds.states:
            raise BadInput("hbm=: the pool on the device is for models with full attention alone; leave it out")
        return HbmBlocks(self.layout, self._pool_bytes)

    def _namespace_of(self, identity: ModelIdentity) -> NamespaceHandle | None:
        kind, _ = self._watch.rope
        if self._store is None or (self._table == "long" and kind != LONGROPE):
            return None  # each length has other KV
        if (identity, self._table) not in self._opened:
            config = {**dict(identity.config), "kept": str(self.kept), **({"rope_table": self._table} if kind else {})}
            if self.kept is SavedBlocks.WHOLE_CHUNKS:
                config["prefill_chunk_tokens"] = str(self.chunk_tokens)
            name = str(getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__)
            codec = chosen_codec(self._codec, self.layout)
            made: dict[str, Any] = {"model": identity.weights, "name": name}
            states, shapes = None, [f"{list(one.shape)} {one.dtype}" for one in self._watch.kinds.states.values()]
            try:
                opened = self._store.namespace(layout=self.layout, codec=codec, config=config, **made)
                if (layout := self._watch.kinds.state_layout) is not None:
                    beside = config_of_states(opened.namespace, ", ".join(shapes))
                    states = PrefixStates(self._store.namespace(layout=layout, codec="raw", config=beside, **made))
            except StoreClosed:
                return None
            while len(self._opened) >= MAX_NAMESPACES:
                self._opened.pop(next(iter(self._opened)))
            opened.is_told = True
            self._opened[identity, self._table] = opened, states
        namespace, self.states = self._opened[identity, self._table]
        return namespace


@dataclass
class _Row:
    """One sequence, prompt and answer. cache, number, left: where its KV is, which row of it, and behind how many
    columns of padding. with_kv: leading tokens whose KV is there. first: of those that may be offered to the store.
    offered: how many leading ones were. states: to be saved, by the boundary behind which they are."""

    tokens: array[int]
    prompt_tokens: int
    request: StoreRequest
    generation: int
    cache: Any = None
    number: int = 0
    left: int = 0
    with_kv: int = 0
    first: int = 0
    offered: int = 0
    is_over: bool = False
    states: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class _Request:
    """The prompts of one call: looked up and prefilled one by one, then continued together by `model.generate`."""

    def __init__(
        self, owner: PrefixCache, prompts: Prompts, pictures: dict[str, torch.Tensor], extra_keys: Any, ticket: str
    ) -> None:
        self._owner, self._watch, self._news = owner, owner._watch, owner._news
        self._kinds, self._call, self._block = self._watch.kinds, self._watch.call, owner.layout.block_tokens
        self._namespace, (rope, most) = owner.namespace, self._watch.rope
        self._is_long, self._most_kept = owner._table == "long", most if rope and owner._table == "short" else 1 << 62
        self.unseen, shown = pictures, prompts.pictures_end(self._watch.picture_token) if pictures else 0
        """Pictures that the model has still to look at."""
        has_unknown = bool(pictures) and (not shown or self._kinds.positions != {})
        self._is_left_alone = has_unknown or (self._is_long and rope != LONGROPE)
        self._changes_unseen = not owner._identity.is_plain and not self._watch.is_opaque
        grid = self._block if owner.kept is SavedBlocks.EVERYTHING else owner.chunk_tokens
        self._policy: StatePolicy | None = None
        if self._kinds.state_layout is not None and owner.namespace is not None:
            kv_bytes = owner.layout.raw_bytes // self._block
            self._policy = StatePolicy(grid, self._kinds.state_layout.raw_bytes, kv_bytes)
        more: dict[str, Any] = dict(pool=owner.pool, states=owner.states, deadline_ms=owner._deadline_ms, ticket=ticket)
        self.rows: list[_Row] = []
        for tokens in prompts.rows:
            report = Report(len(tokens), grid, request=self._news.new_request())
            namespace = None if self._is_left_alone else owner.namespace
            request = StoreRequest(namespace, report, extra_keys=[*extra_keys, *digests_of(pictures)], **more)
            request.least_tokens = shown
            self.rows.append(_Row(tokens, len(tokens), request, self._watch.generation))
        self._columns, self._repeats, self._held = prompts.width, 1, 0
        self._ends: set[int] | None = None
        self._began = self._stepped = time.perf_counter()

    def prefilled(self, repeats: int, ends: set[int] | None) -> Any:
        """A cache of all rows, each of them so many times, up to where `generate` goes on: the last cell of a prompt
        that is alone, else the last token. ends: tokens that end an answer; None where answers are not kept."""
        self._repeats, self._ends = repeats, ends
        is_alone = len(self.rows) * repeats == 1 and self._columns == self.rows[0].prompt_tokens
        if self._is_left_alone or (self.unseen and not is_alone):
            for row in self.rows:
                row.request.withdraw("it is left to transformers alone")
                row.request.matched_tokens(row.tokens)
            return self._call.new_cache()
        for number, row in enumerate(self.rows):
            self._save_what_is_shared(row, self.rows[:number])
            self.compute(row, None if is_alone and not self._is_long else row.prompt_tokens - 1)
        if is_alone:
            return self.rows[0].cache
        self._held = self._columns - 1
        cache = self._kinds.joined([row.cache for row in self.rows], self._held, repeats)
        each = [row for row in self.rows for _ in range(repeats)]
        lefts = [self._columns - row.prompt_tokens for row in each]
        self.rows = [
            replace(row, tokens=row.tokens[:], cache=cache, number=number, left=left)
            for number, (row, left) in enumerate(zip(each, lefts, strict=True))
        ]
        return cache

    def compute(self, row: _Row, stop: int | None, saves: bool = False) -> None:
        """Restore what the store has of a prompt, and compute cells up to `stop`; without one, all but the last cell,
        or nothing where the rest has pictures. saves: whether each cell is saved before the next one is computed."""
        self._withdraw_if_changed(row)
        matched, start, device = row.request.matched_tokens(row.tokens), 0, self._watch.device
        (memory, pages), states = self._kinds.blank(matched, device), self._kinds.blank_states()
        if matched:
            start = row.request.load(pages, self._kinds.state_pages(states) if states else None)
        brought, audited = states, 0
        if start and start == matched and not (self._is_long or self.unseen) and self._owner._audits_hit():
            report, states = row.request.report, self._kinds.blank_states()
            report.account, audited, start = report.account.cut(0, MissReason.AUDIT), start, 0
        is_empty = not start and stop != 0
        row.cache = self._call.new_cache() if is_empty else self._kinds.filled(memory, start, states)
        row.with_kv = row.offered = start
        row.first = start if self._kinds.has_windows or not row.request.is_exact else 0
        token_ids = torch.from_numpy(np.asarray(row.tokens).astype(np.int64)).to(device)[None]
        positions = self._call.positions(token_ids, torch.ones_like(token_ids), **self.unseen)
        # Of longrope the last token of a forward pass chooses the table for all of them.
        chunk = row.prompt_tokens if self._is_long else self._owner.chunk_tokens
        computed = start + (row.prompt_tokens - 1 - start) // chunk * chunk if stop is None else stop
        wanted: tuple[int, ...] = ()
        if self._policy is not None:
            last, parted = row.prompt_tokens - 1, row.request.found_tokens
            wanted = self._policy.wanted(start, last, row.prompt_tokens, parted_at=parted)
        ends = {*wanted, audited}
        computed = max(computed, *ends)
        self.unseen = {} if start else self.unseen
        while (begin := row.with_kv) < computed and not self.unseen:
            end = min([begin + chunk, computed, *(one for one in ends if one > begin)])
            self._news.pass_begins(begin, end, time.perf_counter())
            self._call(token_ids[:, begin:end], row.cache, begin, positions)
            if device.type == "cpu":  # elsewhere it is not computed yet
                self._news.pass_ends(time.perf_counter())
            row.with_kv = end
            if end in wanted:
                row.states[end] = self._kinds.states_of(row.cache, 0)
            if end == audited:
                self._compare(row, memory, brought)
            if saves or (end - row.offered > MAX_WAITING_TOKENS and self._kinds.has_windows):
                self._save(row, end)
        if stop is None:
            self._news.pass_begins(row.with_kv, row.prompt_tokens, time.perf_counter())

    def _compare(self, row: _Row, memory: RestoredKv, states: Sequence[torch.Tensor]) -> None:
        assert self._namespace is not None
        owner, stored = self._owner, self._namespace.namespace
        experts = experts_of(owner.model.config.get_text_config())
        results = self._kinds.compared(memory, states, row.with_kv, row.cache, stored.codec, experts)
        if judged(stored.digest().hex()[:12], results) is AuditVerdict.DRIFTED:
            owner._opened[owner._identity, owner._table] = owner.namespace, owner.states = None, None
            owner.pool = None
            for one in self.rows:
                one.request.withdraw("what is stored is not what the model computes")

    def step(self, token_ids: torch.Tensor) -> None:
        """After each step of `generate`, before it hands out the new tokens. token_ids: all of them, [rows, columns];
        of the newest ones there is no KV yet."""
        now, is_first = time.perf_counter(), self._stepped == self._began
        self._news.pass_ends(now)
        new = token_ids[:, self._columns :].tolist()
        self._columns = token_ids.shape[1]
        self._held = self._columns - 1
        for row in self.rows:
            if not row.is_over and not row.number % self._repeats:
                report, count = row.request.report, len(new[row.number])
                report.ttft_ms = report.ttft_ms or 1e3 * (now - self._began)
                report.itl_ms += [1e3 * (now - self._stepped) / count] * (count - is_first)
                report.new_tokens += count
            for token in new[row.number] if self._ends is not None and not row.is_over else ():
                row.tokens.append(token)
                row.is_over = row.is_over or token in (self._ends or ())
            row.with_kv = max(row.prompt_tokens, len(row.tokens) - 1)
            self._keep_state(row)
            if self._changes_unseen:  # adapters may be switched and back before a block is full
                self._withdraw_if_changed(row)
        if not is_first:
            self._save_next()
        if not self._columns % self._block:
            self._forget(self.rows[0])
        self._stepped = now

    def end(self) -> None:
        for row in self.rows:
            self._save(row, row.with_kv)
            row.request.release()
        reports = {id(row.request): row.request.report for row in self.rows}
        self._news.requests_end(self._namespace, list(reports.values()))

    # Saves ---------------------------------------------------------------------------------------------------------

    def _save_what_is_shared(self, row: _Row, earlier: Sequence[_Row]) -> None:
        """Save what an earlier row of the batch computed and this one begins with, so that the look-up finds it."""
        for other in earlier:
            if row.tokens[: self._block] == other.tokens[: self._block]:
                self._save(other, other.with_kv)

    def _keep_state(self, row: _Row) -> None:
        """At a block's end in an answer, keep the states in place of those of the block before."""
        at, before, is_kept = row.with_kv, row.with_kv - self._block, self._owner.kept is SavedBlocks.EVERYTHING
        if self._policy is not None and is_kept and at > row.prompt_tokens and not at % self._block and not row.is_over:
            if before > row.prompt_tokens and before not in self._policy.wanted(0, before, row.prompt_tokens):
                row.states.pop(before, None)
            row.states[at] = self._kinds.states_of(row.cache, row.number)

    def _save_next(self) -> None:
        """Save one cell of one prompt, so that no token waits long. Rows whose store is away are left out: the save
        behind the last token offers everything."""
        for row in self.rows:
            chunk, offered = self._owner.chunk_tokens, row.offered
            if offered < row.prompt_tokens // self._block * self._block and not row.request.is_away:
                self._save(row, min((offered // chunk + 1) * chunk, row.prompt_tokens))
                if row.offered > offered:
                    return

    def _save(self, row: _Row, stop: int) -> None:
        if self._owner.kept is SavedBlocks.WHOLE_CHUNKS:
            stop = min(stop, self._owner.kept_tokens(row.prompt_tokens))
        if self._watch.is_opaque or self._ends is None:  # a hook may have changed it between two tokens, and back
            stop = min(stop, row.prompt_tokens)
        stop = min(stop, self._most_kept) // self._block * self._block
        if stop <= row.offered or row.cache is None or not row.request.is_open:
            return
        columns = self._held or row.with_kv
        first = max(self._kinds.first_held(row.cache, columns) - row.left, row.first)
        first = -(-first // self._block) * self._block
        if first <= row.offered and stop <= columns - row.left:
            row.offered = stop
            self._withdraw_if_changed(row)
            pages = self._kinds.pages(row.cache, row.number, row.left + first, row.left + stop, columns)
            row.request.save(row.tokens[:stop], pages, first)
            for at in sorted(at for at in row.states if at <= stop):
                row.request.save_state(row.tokens[:at], self._kinds.state_pages(row.states.pop(at)))
            self._forget(row)

    def _forget(self, row: _Row) -> None:
        """Have windows drop what no row of this one's cache has still to save."""
        if self._kinds.has_windows and row.cache is not None:
            sharing = [one for one in self.rows if one.cache is row.cache and one.request.is_open]
            columns = self._held or row.with_kv
            self._kinds.forget(row.cache, min((one.left + one.offered for one in sharing), default=columns), columns)

    def _withdraw_if_changed(self, row: _Row) -> None:
        if row.request.is_open and not self._watch.is_still(row.generation):
            row.request.withdraw(CHANGED)


# The outcomes of a cache's requests, and the time that hits saved, reported to the sidecar for `kvstore why` -----


class CacheNews:
    """The news of one cache. Used by one thread."""

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        self._name = f"hf-{secrets.token_hex(4)}"
        self._numbers = count(1)
        self._passes: list[tuple[int, int, float]] = []

    def new_request(self) -> str:
        """A name for the next request, unlike those of other caches."""
        return f"{self._name}-{next(self._numbers)}"

    def pass_begins(self, start: int, stop: int, now: float) -> None:
        self._passes.append((start, stop, now))

    def pass_ends(self, now: float) -> None:
        """All begun passes are computed. Of several at once it is not known what each took."""
        if len(self._passes) == 1:
            start, stop, began = self._passes[0]
            self.speed.observe([(start, stop - start)], 0, now - began)
        self._passes.clear()

    def requests_end(self, namespace: NamespaceHandle | None, reports: Sequence[Report]) -> None:
        """Requests are over. One that was not begun has no account, and is not reported."""
        asked = [one for one in reports if one.account.asked]
        if namespace is None or not asked:
            return
        gains = [self._gain(one) for one in asked]
        savings = None
        if self.speed.is_learned:
            savings = SavingsTold(sum(max(0.0, gain) for gain in gains), sum(max(0.0, -gain) for gain in gains))
        namespace.tell([_told(one) for one in asked], savings)

    def _gain(self, report: Report) -> float:
        computing = self.speed.more_seconds(0, report.account.hit_tokens)
        return computing - _load_seconds(report) if computing is not None and report.account.hit_tokens else 0.0


def _load_seconds(report: Report) -> float:
    return (report.lookup_ms + report.restored_ms) / 1000


def _told(report: Report) -> RequestTold:
    outcome: dict[str, Any] = report.account.to_dict()
    return RequestTold(
        report.request,
        **outcome,
        detail=(report.detail or report.fault)[:MAX_TOLD_TEXT],
        load_ms=1000 * _load_seconds(report) if report.account.hit_tokens else 0.0,
        saved_blocks=report.saved_blocks,
        put_reasons={str(reason): times for reason, times in report.put_reasons.items()},
        counts=True,
    )
