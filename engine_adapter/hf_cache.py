"""Prefix caching for models of Hugging Face transformers (floor 3).

    cache = PrefixCache(model, kvstore.open("embedded:./kv", dram="2GiB"))
    answer = cache.generate(token_ids, max_new_tokens=64)
    print(answer.token_ids, answer.report.to_dict())

A request: 1. match and lease. 2. restore into a preallocated buffer. 3. prefill the rest chunk by chunk. 4. the first
token. 5. decode; between two tokens one chunk of a prompt is saved. 6. save the rest, and generated blocks. So nothing
is saved before a first token, but in a batch where the next prompt begins as one before it does.
Must never change the user's model for longer than one forward pass, nor let a fault of the store reach the user.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_adapter.adapter import OpenStore, Report, StoreRequest, chosen_codec, grid_chunks
from engine_adapter.hbm_blocks import HbmBlocks
from engine_adapter.hf_attention import ChunkMask
from engine_adapter.hf_buffers import BufferSet, FreeList
from engine_adapter.hf_layers import ModelCall, even_cache, ragged_cache
from engine_adapter.hf_model import check_model, fingerprint, layout_of, namespace_config, refusal
from engine_adapter.sampling import Sampling, choose
from kvstore.config import parse_size
from kvstore.errors import BadInput, LayoutMismatch, StoreClosed
from kvstore.handle import NamespaceHandle
from kvstore.identity import ExtraKey, Namespace, as_extra_keys, token_bytes

CHUNK_TOKENS_CPU = 384
"""Smaller chunks waste some of the cores' work, a coarser grid loses more of a prefix to cutting. `kvstore demo` prints
what becomes of both: the time to a cold first token beside plain `generate`, and to a warm one."""

CHUNK_TOKENS_CUDA = 2048
"""Enough rows to keep a large GPU busy; smaller chunks read the weights more often."""


class Kept(StrEnum):
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
    last whole chunk, once a longer prompt continues it. `Kept.EVERYTHING`, the default, keeps such blocks, so that a
    chat's next turn need not compute the last answer again; that turn's answer can leave the cold one where two tokens
    are closer than rounding (of 60 turns with random weights: none in float32, a quarter in bfloat16).
    `Kept.WHOLE_CHUNKS` never keeps them, and warm is bit-identical to cold (none of 60 in either). The two, and
    different chunk sizes, are namespaces of their own and never mix.

    Batches. Each prompt is looked up and prefilled by itself, in its own row of the buffers: what is stored does not
    depend on neighbours, and a prefix that prompts of one batch share is computed once. Then all rows decode together,
    one forward pass per token; rows begin at index 0 and write at their own positions, and where their lengths differ a
    mask hides what lies behind them.

    Not thread-safe; nobody else may use the model during a call. Weights that change in place need a new PrefixCache.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: OpenStore | None = None,
        *,
        namespace: NamespaceHandle | None = None,
        codec: str | None = None,
        block_tokens: int = 0,
        chunk_tokens: int | None = None,
        kept: Kept | str = Kept.EVERYTHING,
        hbm: str | int = 0,
        deadline_ms: float = 50,
    ) -> None:
        """store: without one, or with a closed one, the same code computes everything. namespace: to use instead of the
        one that is made for this model in `store`. codec: any of `kvstore.codec.CODECS`; left out, "int8-kc64",
        or "raw" for KV that 8 bits cannot hold. chunk_tokens: the prefill grid, a multiple of the block. hbm: the size
        of a pool of decoded blocks on the model's device, asked before the store. deadline_ms: how long a lookup may
        wait for blocks. Raises `BadInput` or `LayoutMismatch`, with one line.
        """
        check_model(model)
        self.call = ModelCall(model)
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.layout = layout_of(model, namespace.block_tokens if namespace else block_tokens)
        default = CHUNK_TOKENS_CPU if self.device.type == "cpu" else CHUNK_TOKENS_CUDA
        self.chunk_tokens = _checked_chunk(chunk_tokens, default, self.layout.block_tokens)
        if kept not in list(Kept):
            raise BadInput(f"kept={kept!r}; allowed: {', '.join(Kept)}")
        self.kept = Kept(kept)
        self._deadline_ms = deadline_ms
        self._config: Any = model.config
        dtype = getattr(torch, self.layout.groups[0].dtype)
        # Only the CPU's kernels need a mask behind a prefix; a model with an attention of its own makes one itself.
        is_masked = self.call.takes_masks and self.device.type == "cpu"
        self._mask = ChunkMask(self.chunk_tokens, dtype) if is_masked else None
        self._free = FreeList(self.layout, self.device)
        self._check_by_running()
        self.namespace = self._opened(store, codec) if namespace is None else self._checked(namespace)
        pool_bytes = parse_size(hbm, "hbm")
        is_pooled = pool_bytes > 0 and self.namespace is not None
        self.pool = HbmBlocks(self.layout, self.device, pool_bytes) if is_pooled else None

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_token: Callable[[Token], None] | None = None,
    ) -> Generation:
        """Answer one prompt: token ids as a list, array, numpy array or tensor of one dimension.

        sampling: the most likely token each time if not given. stop_tokens: those of the model's generation config if
        not given. extra_keys: what else KV depends on, as in `NamespaceHandle.match`. on_token: called with each token.
        """
        (answer,) = self.generate_batch(
            [prompt],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            extra_keys=extra_keys,
            on_token=on_token,
        )
        return answer

    def generate_batch(
        self,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
        on_token: Callable[[Token], None] | None = None,
    ) -> list[Generation]:
        """Answer several prompts of any lengths, decoding them together; see `generate`."""
        stream = self.stream(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stop_tokens, extra_keys=extra_keys
        )
        try:
            for token in stream:
                if on_token is not None:
                    on_token(token)
        finally:
            stream.close()
        return stream.results

    def stream(
        self,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
        extra_keys: Sequence[ExtraKey | bytes | str] = (),
    ) -> Stream:
        """As `generate_batch`, token by token. Leaving early keeps what was computed; call `close` then."""
        if max_new_tokens < 1:
            raise BadInput(f"max_new_tokens={max_new_tokens}; give 1 or more")
        if stop_tokens is None:
            stop_tokens = _stop_tokens(self.model)
        rows = []
        extra_keys = as_extra_keys(extra_keys)
        for number, prompt in enumerate(prompts):
            tokens = self._checked_prompt(prompt, max_new_tokens)
            report = Report(len(tokens), self.chunk_tokens)
            request = StoreRequest(
                self.namespace, report, pool=self.pool, deadline_ms=self._deadline_ms, extra_keys=extra_keys
            )
            rows.append(_Row(number, tokens, request))
        if not rows:
            raise BadInput("there are no prompts; give one or more")
        return Stream(rows, self._run(rows, max_new_tokens, sampling, frozenset(stop_tokens)))

    # A run ---------------------------------------------------------------------------------------------------------

    def _run(
        self, rows: list[_Row], max_new_tokens: int, sampling: Sampling | None, stop_tokens: frozenset[int]
    ) -> Iterator[Token]:
        watch = _Watch()
        buffers = self._free.take(len(rows), max(len(row.tokens) for row in rows) + max_new_tokens)
        try:
            for row in rows:
                self._save_what_is_shared(row, rows[: row.number], buffers)
                logits = self._prefill(row, buffers)
                token = row.accept(int(choose(logits, sampling)), stop_tokens, watch.now())
                yield from watch.hand_out([token])
            decoder = _Decoder(self, rows, buffers)
            for _ in range(max_new_tokens - 1):
                if all(row.is_stopped for row in rows):
                    break
                self._save_next(rows, buffers)
                chosen = choose(decoder.step(), sampling).tolist()
                now = watch.now()
                accepted = [
                    row.accept(token_id, stop_tokens, now)
                    for row, token_id in zip(rows, chosen, strict=True)
                    if not row.is_stopped
                ]
                yield from watch.hand_out(accepted)
        finally:
            for row in rows:
                self._save(row, buffers, row.with_kv)
                row.request.release()
            self._free.give(buffers)

    def _prefill(self, row: _Row, buffers: BufferSet) -> torch.Tensor:
        """Restore what the store has, compute the rest; returns the logits of the last token, [1, vocabulary]."""
        matched = row.request.matched_tokens(row.tokens)
        start = row.request.load(buffers.pages(row.number, matched)) if matched else 0
        row.with_kv = row.offered = start
        cache = even_cache(buffers.of_rows(row.number, row.number + 1), start)
        token_ids = torch.from_numpy(np.asarray(row.tokens).astype(np.int64)).to(self.device)[None]
        logits = token_ids
        for begin, end in grid_chunks(start, len(row.tokens), self.chunk_tokens):
            mask = self._mask.of(end - begin, end) if self._mask is not None else None
            logits = self.call(token_ids[:, begin:end], cache, mask)
            row.with_kv = end
        return logits

    def _save_what_is_shared(self, row: _Row, earlier: Sequence[_Row], buffers: BufferSet) -> None:
        """What others of the batch computed, and this one begins with: it is looked up like everything else."""
        for other in earlier:
            if _common(row.tokens, other.tokens[: other.prompt_tokens]) >= self.layout.block_tokens:
                self._save(other, buffers, other.with_kv)

    def _save_next(self, rows: Sequence[_Row], buffers: BufferSet) -> None:
        """One chunk of one prompt, so that no token waits long for what is saved. Where the store is away none is: the
        save behind the last token offers all of it."""
        for row in rows:
            if row.request.is_away:
                continue
            if row.offered < row.prompt_tokens // self.layout.block_tokens * self.layout.block_tokens:
                stop = min((row.offered // self.chunk_tokens + 1) * self.chunk_tokens, row.prompt_tokens)
                self._save(row, buffers, stop)
                if row.offered >= stop // self.layout.block_tokens * self.layout.block_tokens:
                    return

    def _save(self, row: _Row, buffers: BufferSet, stop: int) -> None:
        """Offer a row's full blocks up to that token, if there are more of them than were offered before."""
        if self.kept is Kept.WHOLE_CHUNKS:
            stop = min(stop, row.prompt_tokens) // self.chunk_tokens * self.chunk_tokens
        stop = stop // self.layout.block_tokens * self.layout.block_tokens
        if stop > row.offered:
            row.offered = stop
            row.request.save(row.tokens[:stop], buffers.pages(row.number, stop))

    # Checks --------------------------------------------------------------------------------------------------------

    def _check_by_running(self) -> None:
        """Two chunks of two tokens, twice: the model must fill the buffers as its configuration says, and a token's KV
        must not depend on the tokens behind it. What a configuration does not tell shows here, and not in an answer."""
        planes = BufferSet(self.layout, 1, self.layout.block_tokens, self.device).of_rows(0, 1)
        name = str(self._config.model_type)
        firsts = []
        for second in (0, 1):
            cache = even_cache(planes, 0)
            try:
                for begin, tokens in ((0, [0, second]), (2, [0, 0])):
                    mask = self._mask.of(2, begin + 2) if self._mask is not None else None
                    self.call(torch.tensor([tokens], device=self.device), cache, mask)
            except Exception as error:
                raise refusal(name, f"a trial run failed: {str(error).splitlines()[0]}") from error
            if any(cache.get_seq_length(layer) != 4 for layer in range(len(planes))):
                raise refusal(name, "it does not keep its KV in the cache that it is given")
            firsts.append([plane[:, :, 0].to(torch.float32, copy=True) for plane in planes[-1]])
        for one, other in zip(*firsts, strict=True):
            if not torch.allclose(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max()), equal_nan=True):
                raise refusal(name, "the KV of a token depends on the tokens behind it")

    def _opened(self, store: OpenStore | None, given: str | None) -> NamespaceHandle | None:
        if store is None:
            return None
        model, codec = fingerprint(self.model), chosen_codec(given, self.layout)
        try:
            return store.namespace(model=model, layout=self.layout, codec=codec, config=self._namespace_config())
        except StoreClosed:
            return None

    def _checked(self, given: NamespaceHandle) -> NamespaceHandle:
        """A namespace of the caller's must be this model's. Fields of config that it leaves out are the caller's."""
        theirs = given.namespace
        config = {**theirs.config, **{k: v for k, v in self._namespace_config().items() if k in theirs.config}}
        mine = Namespace(fingerprint(self.model), self.layout, theirs.codec, theirs.weights_epoch, config)
        difference = theirs.difference(mine)
        if difference:
            raise LayoutMismatch(
                f"the namespace is not this model's: {difference} (here: the namespace, there: the model); "
                "pass store= to have one made for the model"
            )
        return given

    def _namespace_config(self) -> dict[str, str]:
        return {
            **namespace_config(self.model),
            "prefill_chunk_tokens": str(self.chunk_tokens),
            "kept": str(self.kept),
        }

    def _checked_prompt(self, prompt: Any, max_new_tokens: int) -> array[int]:
        tokens = array("I", token_bytes(prompt.cpu() if isinstance(prompt, torch.Tensor) else prompt))
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
        return tokens


class Stream:
    """Tokens as they are generated. `results` holds every answer so far, complete once the iterator is exhausted."""

    def __init__(self, rows: list[_Row], tokens: Iterator[Token]) -> None:
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
        """One answer per prompt, in their order."""
        return [
            Generation(row.tokens[row.prompt_tokens :].tolist(), row.is_stopped, row.request.report)
            for row in self._rows
        ]


class _Row:
    """One prompt on its way. tokens: prompt and answer. with_kv: leading tokens whose KV the buffer holds."""

    def __init__(self, number: int, prompt: array[int], request: StoreRequest) -> None:
        self.number = number
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

    def __init__(self, owner: PrefixCache, rows: list[_Row], buffers: BufferSet) -> None:
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


def _common(one: array[int], other: array[int]) -> int:
    """How many leading tokens are the same."""
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


def _stop_tokens(model: Any) -> list[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)
