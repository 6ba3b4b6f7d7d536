"""Prefix caching for models of Hugging Face transformers.

    cache = PrefixCache(model, kvstore.open("embedded:./kv", dram="2GiB"))
    answer = cache.generate(token_ids, max_new_tokens=64)
    print(answer.token_ids, answer.report.to_dict())

A request: 1. match and lease. 2. restore into a preallocated buffer. 3. prefill the rest chunk by chunk. 4. the first
token. 5. decode; between two tokens one chunk of a prompt is saved. 6. save the rest, and generated blocks. So nothing
is saved before a first token, except in a batch where a prompt begins like an earlier one.
Must never change the user's model for longer than one forward pass, nor let a fault of the store reach the user.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from logging import getLogger
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import numpy as np
import torch

from engine_adapter.adapter import Report, StoreRequest, chosen_codec, grid_chunks
from engine_adapter.hf.buffers import BufferSet, FreeList
from engine_adapter.hf.hbm_blocks import HbmBlocks
from engine_adapter.hf.inputs import checked_new_tokens, checked_stop_tokens, names_its_words, prompt_of, prompts_of
from engine_adapter.hf.layers import ModelCall, even_cache, ragged_cache
from engine_adapter.hf.model import check_model, layout_of
from engine_adapter.hf.sampling import Sampling, choose, draw
from engine_adapter.hf.settings import Chooser, chooser_of
from engine_adapter.hf.watch import ModelIdentity, ModelWatch
from engine_adapter.hf_news import CacheNews
from kvstore.block.errors import BadInput, LayoutMismatch, StoreClosed, StoreError
from kvstore.block.identity import ExtraKey, Namespace, as_extra_keys
from kvstore.client.edge import in_one_line
from kvstore.client.handle import NamespaceHandle, OpenStore
from kvstore.config import parse_size

CHUNK_TOKENS_CPU = 384
"""Smaller chunks waste some of the cores' work, a coarser grid loses more of a prefix to cutting. `kvstore demo` prints
what both cost: the time to a cold first token beside plain `generate`, and to a warm one."""

CHUNK_TOKENS_CUDA = 2048
"""Enough rows to keep a large GPU busy; smaller chunks read the weights more often."""

MAX_NAMESPACES = 16
"""Namespaces that a cache keeps open, one for each state of its model, as where adapters are switched."""
TICKET_SECONDS = 60.0
"""For how long a ticket of `prefill` is good, and its blocks are retained."""
MAX_PAUSE_SECONDS = 60.0
"""Longest pause before retrying to open a namespace that a store refused."""

_log = getLogger(__name__)

CHANGED = "the model changed during the request"


class SavedBlocks(StrEnum):
    """Which blocks are saved."""

    EVERYTHING = "everything"  # every full block, of prompts and of answers
    WHOLE_CHUNKS = "whole_chunks"  # only blocks of whole chunks of a prompt


class Token(NamedTuple):
    """A generated token: the prompt's row in the batch, its number in the answer, and its id."""

    row: int
    number: int
    token_id: int


@dataclass(frozen=True)
class Generation:
    """An answer. token_ids: what was generated, a stop token included. is_stopped: whether it ended with one."""

    token_ids: list[int]
    is_stopped: bool
    report: Report


class PrefixCache:
    """Generates with a model, reusing the KV of prompts from a store and keeping new KV there.

    Size. Where no codec is given, KV is kept in 8 bits ("int8-kc64"): half the memory of 16-bit numbers, each of them
    within half a step of what was computed. An answer can then leave the cold one where two tokens are close. What was
    restored is never put again, so errors do not add up.

    Exactness. With codec "raw", a prompt asked again is answered from the same numbers, bit for bit: chunks have the
    same shapes cold and warm, and what is restored is what those chunks produced. Two things produce KV in shapes that
    a cold run would not use, and so with other last bits: decoding, one token at a time, and the tail behind a prompt's
    last whole chunk, once a longer prompt continues it. `SavedBlocks.EVERYTHING`, the default, keeps such blocks, so
    that a chat's next turn need not compute the last answer again; that turn's answer can leave the cold one where two
    tokens are closer than rounding (of 60 turns with random weights: none in float32, a quarter in bfloat16).
    `SavedBlocks.WHOLE_CHUNKS` never keeps them, and warm is bit-identical to cold (none of 60 in either). The two, and
    different chunk sizes, are namespaces of their own and never mix.

    Batches. Each prompt is looked up and prefilled by itself, in its own row of the buffers: what is stored does not
    depend on neighbours, and a prefix that prompts of one batch share is computed once. Then all rows decode together,
    one forward pass per token; rows begin at index 0 and write at their own positions, and where their lengths differ a
    mask hides what lies behind them.

    Changes. What the model computes for a short prompt is part of the namespace (`engine_adapter.hf.watch`): after a
    change of adapters, hooks, weights and the like the same cache goes on in another namespace, and finds the old one
    again when the change is taken back. What a running stream computes after a change is not kept.

    Not thread-safe; no other code may use the model during a call.
    """

    @in_one_line("PrefixCache")
    def __init__(
        self,
        model: torch.nn.Module,
        store: OpenStore | None = None,
        *,
        namespace: NamespaceHandle | None = None,
        codec: str | None = None,
        block_tokens: int = 0,
        chunk_tokens: int | None = None,
        kept: SavedBlocks | str = SavedBlocks.EVERYTHING,
        hbm: str | int = 0,
        deadline_ms: float = 50,
    ) -> None:
        """store: without one, or with a closed one, the same code computes everything. namespace: to use instead of the
        one that is made for this model in `store`. codec: any of `kvstore.block.codec.CODECS`; left out, "int8-kc64",
        or "raw" for KV that 8 bits cannot hold. chunk_tokens: the prefill grid, a multiple of the block. hbm: the size
        of a pool of decoded blocks on the model's device, asked before the store. deadline_ms: how long a lookup may
        wait for blocks. Raises `BadInput` or `LayoutMismatch`, with one line.
        """
        self.model = model
        with in_one_line(f"PrefixCache cannot serve a {type(model).__name__}"):
            check_model(model)
            self.device: torch.device = next(model.parameters()).device
            self.layout = layout_of(model, namespace.block_tokens if namespace else block_tokens)
        default = CHUNK_TOKENS_CPU if self.device.type == "cpu" else CHUNK_TOKENS_CUDA
        self.chunk_tokens = _checked_chunk(chunk_tokens, default, self.layout.block_tokens)
        if kept not in list(SavedBlocks):
            raise BadInput(f"kept={kept!r}; allowed: {', '.join(SavedBlocks)}")
        self.kept = SavedBlocks(kept)
        self._deadline_ms = deadline_ms
        self._config: Any = model.config
        self._free = FreeList(self.layout, self.device)
        self._watch = ModelWatch(model, self.layout, self.chunk_tokens)
        self._identity = self._watch.identity()
        self._store, self._codec, self._given = store, codec, namespace
        self._opened: dict[ModelIdentity, NamespaceHandle | None] = {}
        self._is_unopened = False
        self._open_again_at = 0.0
        self.namespace = self._namespace_of(self._identity)
        self._news = CacheNews()
        self._pool_bytes = parse_size(hbm, "hbm")
        self.pool = self._new_pool()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy` and `pickle`. Raises `TypeError`."""
        raise TypeError(
            "a PrefixCache cannot be copied, deep-copied or pickled, since it belongs to its model and to an open "
            "store of this process; make another one, PrefixCache(model, store), with the same store or one that is "
            "opened on the same directory or socket: it finds all prompts that were kept"
        )

    @property
    def _settings(self) -> Any:
        return self.model.generation_config

    @property
    def call(self) -> ModelCall:
        """Forward passes of the model as it is now."""
        return self._watch.call

    @names_its_words
    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        attention_mask: Any = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_token: Callable[[Token], None] | None = None,
        ticket: str = "",
    ) -> Generation:
        """Answer one prompt: token ids as a list, array, numpy array or tensor, or what a tokenizer or
        `apply_chat_template` returned.

        attention_mask: 1 for tokens of the prompt, 0 for padding before or behind it. sampling: the most likely token
        each time if not given. stop_tokens: those of the model's generation config if not given; its other settings
        that change tokens are applied, or refused by name (`engine_adapter.hf.settings` lists them). extra_keys: what
        else KV depends on, as in `NamespaceHandle.match`. on_token: called with each token. ticket: of `prefill` in
        another process, whose blocks are waited for as long as they keep coming.
        """
        tokens = prompt_of(prompt, attention_mask, self._config, self._settings)
        stream = self._stream(tokens, max_new_tokens, sampling, stop_tokens, extra_keys, ticket)
        (answer,) = _drained(stream, on_token)
        return answer

    @names_its_words
    def prefill(
        self,
        prompt: Any,
        *,
        attention_mask: Any = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_ticket: Callable[[str], None] | None = None,
    ) -> str:
        """Compute a prompt and store it chunk by chunk, for `generate(prompt, ticket=...)` in another process with the
        same model and the same store. Returns the ticket; "" where nothing can be stored. on_ticket: called with it
        before the first chunk is computed, so that the other process can load while this one computes."""
        (tokens,) = prompt_of(prompt, attention_mask, self._config, self._settings)
        self._check_prompt(tokens, 1)
        self._look_at_model()
        report = Report(len(tokens), self.chunk_tokens, request=self._news.new_request())
        extra = as_extra_keys(extra_keys)
        more: dict[str, Any] = dict(pool=self.pool, deadline_ms=self._deadline_ms, extra_keys=extra, ttl=TICKET_SECONDS)
        request = StoreRequest(self.namespace, report, **more)
        chooser = chooser_of(self.model, tokens, 1, None, frozenset())
        row = _PromptRow(0, tokens, request, chooser, self._watch.generation)
        ticket = request.sealed(tokens[: self._kept_tokens(len(tokens))], TICKET_SECONDS)
        if on_ticket is not None:
            on_ticket(ticket)
        buffers = self._free.take(1, len(tokens) + 1)
        try:
            self._prefill(row, buffers, saves=True)
        finally:
            self._save(row, buffers, row.with_kv)
            request.release()
            self._free.give(buffers)
            self._news.requests_end(self.namespace, [report])
        return ticket

    @names_its_words
    def generate_batch(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        attention_mask: Any = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_token: Callable[[Token], None] | None = None,
    ) -> list[Generation]:
        """Answer several prompts of any lengths, decoding them together; see `generate`.

        prompts: a sequence of prompts, a padded matrix with its attention_mask, or what a tokenizer returned.
        """
        tokens = prompts_of(prompts, attention_mask, self._config, self._settings)
        return _drained(self._stream(tokens, max_new_tokens, sampling, stop_tokens, extra_keys), on_token)

    @names_its_words
    def stream(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        attention_mask: Any = None,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
    ) -> TokenStream:
        """As `generate_batch`, token by token. To stop early, call `close`: what was computed is kept."""
        tokens = prompts_of(prompts, attention_mask, self._config, self._settings)
        return self._stream(tokens, max_new_tokens, sampling, stop_tokens, extra_keys)

    def _stream(
        self,
        prompts: list[array[int]],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop_tokens: Any,
        extra_keys: Sequence[ExtraKey | bytes | str],
        ticket: str = "",
    ) -> TokenStream:
        max_new_tokens = checked_new_tokens(max_new_tokens)
        if stop_tokens is None:
            stop_tokens = self._settings.eos_token_id
        stops = checked_stop_tokens(stop_tokens)
        for tokens in prompts:
            self._check_prompt(tokens, max_new_tokens)
        choosers = [chooser_of(self.model, tokens, max_new_tokens, sampling, stops) for tokens in prompts]
        extra_keys = as_extra_keys(extra_keys)
        self._look_at_model()
        rows = []
        for number, (tokens, chooser) in enumerate(zip(prompts, choosers, strict=True)):
            report = Report(len(tokens), self.chunk_tokens, request=self._news.new_request())
            more: dict[str, Any] = dict(pool=self.pool, deadline_ms=self._deadline_ms, extra_keys=extra_keys)
            request = StoreRequest(self.namespace, report, ticket=ticket, **more)
            rows.append(_PromptRow(number, tokens, request, chooser, self._watch.generation))
        return TokenStream(rows, self._run(rows, max_new_tokens, stops))

    # A run ---------------------------------------------------------------------------------------------------------

    def _run(self, rows: list[_PromptRow], max_new_tokens: int, stop_tokens: frozenset[int]) -> Iterator[Token]:
        watch = _Watch()
        buffers = self._free.take(len(rows), max(len(row.tokens) for row in rows) + max_new_tokens)
        try:
            for row in rows:
                self._save_what_is_shared(row, rows[: row.number], buffers)
                first = _next_tokens([row], self._prefill(row, buffers))[0]
                self._news.pass_ends(time.perf_counter())
                token = row.accept(first, stop_tokens, watch.now())
                yield from watch.hand_out([token])
            decoder = _Decoder(self, rows, buffers)
            for _ in range(max_new_tokens - 1):
                if all(row.is_stopped for row in rows):
                    break
                self._save_next(rows, buffers)
                chosen = _next_tokens(rows, decoder.step())
                now = watch.now()
                going = [pair for pair in zip(rows, chosen, strict=True) if not pair[0].is_stopped]
                accepted = [row.accept(token_id, stop_tokens, now) for row, token_id in going]
                yield from watch.hand_out(accepted)
                if not (self._identity.is_plain or self._watch.is_opaque):
                    for row in rows:  # adapters may be switched and back before a block is full
                        self._withdraw_if_changed(row)
        finally:
            for row in rows:
                self._save(row, buffers, row.with_kv)
                row.request.release()
            self._free.give(buffers)
            self._news.requests_end(self.namespace, [row.request.report for row in rows])

    def _prefill(self, row: _PromptRow, buffers: BufferSet, *, saves: bool = False) -> torch.Tensor:
        """Restore what the store has, compute the rest; returns the logits of the last token, [1, vocabulary]. saves:
        whether each chunk is saved before the next one is computed."""
        self._withdraw_if_changed(row)
        matched = row.request.matched_tokens(row.tokens)
        start = row.request.load(buffers.pages(row.number, matched)) if matched else 0
        row.with_kv = row.offered = start
        cache = even_cache(buffers.of_rows(row.number, row.number + 1), start)
        token_ids = torch.from_numpy(np.asarray(row.tokens).astype(np.int64)).to(self.device)[None]
        logits = token_ids
        for begin, end in grid_chunks(start, len(row.tokens), self.chunk_tokens):
            mask = self._watch.mask.of(end - begin, end) if self._watch.mask is not None else None
            self._news.pass_begins(begin, end, time.perf_counter())
            logits = self.call(token_ids[:, begin:end], cache, mask)
            if self.device.type == "cpu":  # elsewhere it is not computed yet
                self._news.pass_ends(time.perf_counter())
            row.with_kv = end
            if saves:
                self._save(row, buffers, end)
        return logits

    def _save_what_is_shared(self, row: _PromptRow, earlier: Sequence[_PromptRow], buffers: BufferSet) -> None:
        """Save what an earlier row of the batch computed and this one begins with, so that the look-up finds it."""
        for other in earlier:
            if _common(row.tokens, other.tokens[: other.prompt_tokens]) >= self.layout.block_tokens:
                self._save(other, buffers, other.with_kv)

    def _save_next(self, rows: Sequence[_PromptRow], buffers: BufferSet) -> None:
        """Save one chunk of one prompt, so that no token waits long. Rows whose store is away are left out: the save
        behind the last token offers everything."""
        for row in rows:
            if row.request.is_away:
                continue
            if row.offered < row.prompt_tokens // self.layout.block_tokens * self.layout.block_tokens:
                stop = min((row.offered // self.chunk_tokens + 1) * self.chunk_tokens, row.prompt_tokens)
                self._save(row, buffers, stop)
                if row.offered >= stop // self.layout.block_tokens * self.layout.block_tokens:
                    return

    def _save(self, row: _PromptRow, buffers: BufferSet, stop: int) -> None:
        if self.kept is SavedBlocks.WHOLE_CHUNKS:
            stop = self._kept_tokens(min(stop, row.prompt_tokens))
        if self._watch.is_opaque:  # a hook may have changed it between two tokens, and back
            stop = min(stop, row.prompt_tokens)
        stop = stop // self.layout.block_tokens * self.layout.block_tokens
        if stop > row.offered:
            row.offered = stop
            self._withdraw_if_changed(row)
            row.request.save(row.tokens[:stop], buffers.pages(row.number, stop))

    def _kept_tokens(self, prompt_tokens: int) -> int:
        whole_chunks = self.kept is SavedBlocks.WHOLE_CHUNKS
        return prompt_tokens // self.chunk_tokens * self.chunk_tokens if whole_chunks else prompt_tokens

    def _withdraw_if_changed(self, row: _PromptRow) -> None:
        if row.request.is_open and not self._watch.is_still(row.generation):
            row.request.withdraw(CHANGED)

    # Checks --------------------------------------------------------------------------------------------------------

    def _look_at_model(self) -> None:
        """If the model computes other KV than before, switch to that KV's namespace. If the store does not open it, go
        on without one, and ask again after a pause. Raises `BadInput`."""
        identity = self._watch.identity()
        if identity == self._identity and not self._is_unopened:
            return
        asked_at = time.monotonic()
        if identity == self._identity and asked_at < self._open_again_at:
            return
        try:
            self.namespace = self._namespace_of(identity)
            self._is_unopened = False
        except BadInput:
            raise
        except StoreError as error:  # the answer needs no store
            now = time.monotonic()
            self._open_again_at = now + min(MAX_PAUSE_SECONDS, max(1.0, 5 * (now - asked_at)))
            self.namespace, self._is_unopened = None, True
            _log.warning("nothing is kept or found of the model as it is now: %s", error)
        self._identity = identity
        self.pool = self._new_pool()  # a pool's keys do not name the namespace

    def _new_pool(self) -> HbmBlocks | None:
        if self._pool_bytes <= 0 or self.namespace is None:
            return None
        return HbmBlocks(self.layout, self.device, self._pool_bytes)

    def _namespace_of(self, identity: ModelIdentity) -> NamespaceHandle | None:
        if self._given is not None:
            return self._checked(self._given, identity)
        if self._store is None:
            return None
        if identity not in self._opened:
            codec, config = chosen_codec(self._codec, self.layout), self._namespace_config(identity)
            name = str(getattr(self._config, "_name_or_path", "") or type(self.model).__name__)
            try:
                opened = self._store.namespace(
                    model=identity.weights, layout=self.layout, codec=codec, config=config, name=name
                )
            except StoreClosed:
                return None
            while len(self._opened) >= MAX_NAMESPACES:
                self._opened.pop(next(iter(self._opened)))
            opened.is_told = True
            self._opened[identity] = opened
        return self._opened[identity]

    def _checked(self, given: NamespaceHandle, identity: ModelIdentity) -> NamespaceHandle:
        """The caller's namespace, which must be this model's. Config fields that it leaves out are the caller's
        responsibility, as long as the model stays what it was and computes by its weights and configuration alone."""
        theirs = given.namespace
        config = {**theirs.config, **{k: v for k, v in self._namespace_config(identity).items() if k in theirs.config}}
        mine = Namespace(identity.weights, self.layout, theirs.codec, theirs.weights_epoch, config)
        difference = theirs.difference(mine)
        if not difference and "computes" not in theirs.config:
            if not identity.is_plain:
                difference = "it does not say what the model computes with its adapters, hooks or patches"
            elif identity != self._identity:
                difference = "the model computes other KV than when this cache was made"
        if difference:
            raise LayoutMismatch(
                f"the namespace is not this model's: {difference} (here: the namespace, there: the model); "
                "pass store= to have one made for the model"
            )
        given.is_told = True  # the caller's own look-ups, which name no request, count by themselves
        return given

    def _namespace_config(self, identity: ModelIdentity) -> dict[str, str]:
        return {
            **dict(identity.config),
            "prefill_chunk_tokens": str(self.chunk_tokens),
            "kept": str(self.kept),
        }

    def _check_prompt(self, tokens: array[int], max_new_tokens: int) -> None:
        if not tokens:
            raise BadInput("a prompt is empty; give at least one token")
        if max(tokens) >= self._config.vocab_size:
            raise BadInput(f"a prompt has token id {max(tokens)}; the model knows 0 to {self._config.vocab_size - 1}")
        limit = getattr(self._config, "max_position_embeddings", None)
        if limit and len(tokens) + max_new_tokens > limit:
            raise BadInput(
                f"{len(tokens)} prompt tokens and max_new_tokens={max_new_tokens} are more than the model's "
                f"{limit} positions; shorten the prompt or ask for fewer tokens"
            )


class TokenStream:
    """Tokens as they are generated. `results` holds every answer so far, complete once the iterator is exhausted."""

    def __init__(self, rows: list[_PromptRow], tokens: Iterator[Token]) -> None:
        self._rows = rows
        self._tokens = tokens

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End the request here, keeping what was computed. Safe to call again."""
        getattr(self._tokens, "close", lambda: None)()

    @property
    def results(self) -> list[Generation]:
        return [
            Generation(row.tokens[row.prompt_tokens :].tolist(), row.is_stopped, row.request.report)
            for row in self._rows
        ]


class _PromptRow:
    """One prompt being answered. tokens: prompt and answer. with_kv: leading tokens whose KV the buffer holds."""

    def __init__(
        self, number: int, prompt: array[int], request: StoreRequest, chooser: Chooser, generation: int
    ) -> None:
        self.number = number
        self.chooser = chooser
        self.generation = generation
        self.tokens = prompt
        self.prompt_tokens = len(prompt)
        self.request = request
        self.with_kv = 0
        self.offered = 0
        self.is_stopped = False
        self._last_seconds = 0.0

    def accept(self, token_id: int, stop_tokens: frozenset[int], now_seconds: float) -> Token:
        """Take the next token. The KV of every token before it is in the buffer."""
        report = self.request.report
        self.with_kv = len(self.tokens)
        self.tokens.append(token_id)
        self.is_stopped = token_id in stop_tokens
        if report.new_tokens:
            report.itl_ms.append(1e3 * (now_seconds - self._last_seconds))
        else:
            report.ttft_ms = 1e3 * now_seconds
        self._last_seconds = now_seconds
        report.new_tokens += 1
        return Token(self.number, report.new_tokens - 1, token_id)


class _Decoder:
    """Decodes all rows together, one token of each per step. A row that has stopped is computed and ignored."""

    def __init__(self, owner: PrefixCache, rows: list[_PromptRow], buffers: BufferSet) -> None:
        self._owner = owner
        self._rows = rows
        lengths = [row.prompt_tokens for row in rows]
        self._length = max(lengths)
        self._positions: torch.Tensor | None = None
        planes = buffers.of_rows(0, len(rows))
        if len(set(lengths)) == 1:
            self._cache = even_cache(planes, self._length)
            return
        self._positions = torch.tensor(lengths, device=owner.device)
        self._columns = torch.arange(buffers.capacity, device=owner.device)
        for row, length in enumerate(lengths):
            buffers.clear(row, length)
        self._cache = ragged_cache(planes, self._length, self._positions)

    def step(self) -> torch.Tensor:
        """Feed each row's newest token; returns the logits of the next ones, [rows, vocabulary]."""
        newest = torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._owner.device)
        positions = self._positions
        if positions is None:
            return self._owner.call(newest, self._cache)
        self._length += 1
        mask = self._columns[: self._length] <= positions[:, None]
        if self._owner.call.takes_masks:
            mask = mask[:, None, None]
        logits = self._owner.call(newest, self._cache, mask, positions[:, None])
        positions += 1
        return logits


class _Watch:
    """Seconds since it was made, without the time that the consumer of the tokens took."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def hand_out(self, tokens: list[Token]) -> Iterator[Token]:
        paused = time.perf_counter()
        yield from tokens
        self._start += time.perf_counter() - paused


def _next_tokens(rows: Sequence[_PromptRow], logits: torch.Tensor) -> list[int]:
    """Of each row, from logits, [rows, vocabulary]. All rows have one sampling."""
    sampling = rows[0].chooser.sampling
    if all(row.chooser.processors is None for row in rows):
        chosen: list[int] = choose(logits, sampling).tolist()
        return chosen
    scores = torch.stack(
        [
            score if row.is_stopped else row.chooser.processed(row.tokens, score)
            for row, score in zip(rows, logits.float(), strict=True)
        ]
    )
    chosen = scores.argmax(dim=-1).tolist() if sampling is None else draw(scores, sampling.generator).tolist()
    return chosen


def _common(one: array[int], other: array[int]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differs[0]) if differs.size else length


def _checked_chunk(given: int | None, default: int, block_tokens: int) -> int:
    chunk = -(-default // block_tokens) * block_tokens if given is None else given
    if chunk < 1 or chunk % block_tokens:
        raise BadInput(
            f"chunk_tokens={chunk} is not a multiple of block_tokens={block_tokens}; "
            f"use {max(1, chunk // block_tokens) * block_tokens}"
        )
    return chunk


def _drained(stream: TokenStream, on_token: Callable[[Token], None] | None) -> list[Generation]:
    try:
        for token in stream:
            if on_token is not None:
                on_token(token)
    finally:
        stream.close()
    return stream.results
