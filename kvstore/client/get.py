"""Gets: leased blocks into pages, decoded and verified.

    column   what of a part goes through one coder: all of its layers, or one
    piece    some blocks of some columns: first the headers of all, then the copies

              first_token                 end - window + 1      end
    full      |##################################################|      of each block all layers
    sliding   |          nothing is touched      |###############|      the window before the end, in whole pages
    chunked   |             nothing is touched          |########|      the chunk that the end lies in, likewise
    state     |                nothing is touched             |##|      the last block, which has the state behind it

What it reports as loaded holds in every group: all that a prefix of so many tokens needs of it
(`KvGroup.needed_from`). If a block fails, the end moves back to that block, or further if pages lack what such an end
needs; and what was not read of that is read. If that fails too, or no end has its pages, the end is where the get
began. Must never count a token whose copy was not compared, nor write outside the pages that are its to fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kv_kernels.copies import BlockCopy, Digest
from kvstore.block.account import Account, MissReason
from kvstore.block.errors import LayoutMismatch, StoreClosed, Unreachable
from kvstore.block.layout import Attention, KvGroup, Layout, Part
from kvstore.block.pages import Codec, Pages
from kvstore.client.lease import Lease
from kvstore.protocol import messages as m
from kvstore.protocol.door import Door
from kvstore.protocol.messages import Grant
from tiering.frame import HEADER_BYTES, digest, names_block, split_digests
from tiering.tier import FrameSpan

PIECE_BLOCKS = 128
"""Blocks read in one piece; a release is noticed between two. Within a piece, the small steps are done for all blocks
first, then the copies: a copy of megabytes evicts the interpreter's state from the caches, and each change between them
costs."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of `get`: pages hold the prompt's tokens up to `tokens`, verified; anything behind is not valid.

    Of a group without full attention they hold what a prefix of so many tokens needs, rounded down to a page; earlier
    pages are unchanged. account: as in the lease, with failures turned into misses. reason: why it is less than
    leased, else None.
    """

    tokens: int
    account: Account
    reason: MissReason | None


class GetSource(NamedTuple):
    """What all gets of a namespace share. parts: those that this shard reads."""

    door: Door
    grant: Grant
    codec: Codec
    digest: Digest
    layout: Layout
    parts: Sequence[Part]


@dataclass(slots=True)
class _Column:
    """coder: bound to the part's layers in `layers`; it decodes `size` bytes of a payload from `at` on. base: the
    prompt's token that the coder's pages begin with. known: by block, the digests in checked headers; None if each is
    looked at only once. first, stop: the first token, and the block before which reading stops."""

    part: Part
    layers: slice
    coder: BlockCopy
    base: int
    at: int
    size: int
    known: dict[int, tuple[bytes, ...]] | None = None
    first: int = 0
    stop: int = 0


class _OpenedFrames(NamedTuple):
    """A column's frames of some blocks, from `first` on: the payloads, and the digests of their layer slices."""

    column: _Column
    first: int
    payloads: list[FrameSpan]
    digests: list[tuple[bytes, ...]]


class GetOperation:
    """One get into these pages. Not thread-safe; the lease may be released by any thread."""

    def __init__(self, source: GetSource, lease: Lease, pages: Pages, first_token: int) -> None:
        """first_token: a page boundary at or after the lease's first block. Raises `LayoutMismatch` for pages that do
        not fit the layout and the length of this load."""
        self._source = source
        self._lease = lease
        self._pages = pages
        self._first_token = first_token
        self._block_tokens = source.layout.block_tokens
        self._start = first_token // self._block_tokens
        self._stop = min(lease.blocks, (first_token + pages.tokens) // self._block_tokens)
        self._end = max(self._start, self._stop)
        self._account = lease.account
        self._reason: MissReason | None = None
        self._columns: list[_Column] = []
        self._given = pages.first_tokens(source.layout, first_token)
        self._check_windows()

    def whole(self) -> Loaded:
        """Load everything at once."""
        sizes = self._source.grant.payload_bytes
        columns = [
            _Column(part, slice(None), *self._bound(part), at=0, size=sizes[part.index]) for part in self._source.parts
        ]
        self._check_pages()
        self._read(columns)
        return self._loaded()

    def by_layer(self) -> Iterator[Loaded]:
        """Load layer by layer, in order of their numbers; each report holds for all earlier layers too."""
        layers: dict[int, list[_Column]] = {}
        for part in self._source.parts:
            size = self._source.grant.payload_bytes[part.index] // len(part.layers)
            known: dict[int, tuple[bytes, ...]] = {}
            for at, layer in enumerate(part.layers):
                bound = self._bound(replace(part, layers=(layer,)))
                column = _Column(part, slice(at, at + 1), *bound, at=at * size, size=size, known=known)
                layers.setdefault(layer, []).append(column)
        self._check_pages()
        return self._layers([layers[layer] for layer in sorted(layers)])

    # Inside --------------------------------------------------------------------------------------------------------

    def _layers(self, layers: Sequence[list[_Column]]) -> Iterator[Loaded]:
        for columns in layers:
            self._read(columns)
            yield self._loaded()

    def _loaded(self) -> Loaded:
        has_work = self._stop > self._start
        tokens = self._end * self._block_tokens if has_work else min(self._lease.tokens, self._first_token)
        return Loaded(tokens, self._account, self._reason)

    def _bound(self, share: Part) -> tuple[BlockCopy, int]:
        """A coder for some layers of a part, and the prompt's token that its pages begin with."""
        coder = self._source.codec.bind(self._pages, self._source.layout, share)
        return coder, self._given[share.group.name]

    def _read(self, columns: Sequence[_Column]) -> None:
        """Load these columns up to the end, or move the end back to where they and all earlier ones are complete.

        The lease is held only while this runs: an abandoned get by layers pins nothing.
        """
        if not self._lease.begin_read():
            self._cut(self._start, MissReason.DISABLED)
            return
        try:
            self._columns += columns
            for column in columns:
                column.first, column.stop = self._needed(column.part.group, self._end), self._end
            if not self._load(columns):
                self._mend()
        finally:
            self._lease.end_read()

    def _mend(self) -> None:
        """After the end moved back: windows before it begin earlier."""
        if all(group.attention is Attention.FULL for group in self._source.layout.groups):
            return
        self._cut(self._covered(self._end), self._reason)
        lacking = []
        for column in self._columns:
            needed = self._needed(column.part.group, self._end)
            if needed < min(column.first, self._end * self._block_tokens):
                column.stop = min(-(-column.first // self._block_tokens), self._end)
                column.first = needed
                lacking.append(column)
        if not self._load(lacking):
            self._cut(self._start, self._reason)

    def _load(self, columns: Sequence[_Column]) -> bool:
        """Read these columns up to the end; returns whether the end stayed."""
        lease, end = self._lease, self._end
        first = min([column.first // self._block_tokens for column in columns], default=end)
        last = max([column.stop for column in columns], default=end)
        while first < min(last, self._end):
            if lease.released:  # meanwhile, by another thread
                self._cut(first, MissReason.DISABLED)
                break
            stop = min(first + PIECE_BLOCKS, self._end)
            self._decode([self._open(column, range(first, stop)) for column in columns])
            first = stop
        return self._end == end

    def _decode(self, opened: Sequence[_OpenedFrames]) -> None:
        """Decode into the pages. The end moves back to the first block that fails."""
        for column, first, payloads, expected in opened:
            count = min(len(payloads), self._end - first)
            if count <= 0:
                continue
            row = column.part.group.row_tokens
            rows = [(block * self._block_tokens - column.base) // row for block in range(first, first + count)]
            skip = max(0, column.first - first * self._block_tokens) // row
            good = column.coder.decode(payloads[:count], rows, skip, expected[:count], self._source.digest)
            if good < count:
                self._report(first + good, column.part)
                self._cut(first + good, MissReason.CORRUPT)

    def _within(self, column: _Column, blocks: range) -> range:
        first = max(blocks.start, column.first // self._block_tokens)
        return range(first, max(first, min(blocks.stop, column.stop, self._end)))

    def _open(self, column: _Column, blocks: range) -> _OpenedFrames:
        """The column's frames up to the first whose header fails, to which the end moves back.

        A header is checked in a private copy, against the lease's digest of it and the block's name.
        """
        mine = self._within(column, blocks)
        opened = _OpenedFrames(column, mine.start, [], [])
        if not mine:
            return opened
        reply, keys = self._lease.reply, self._lease.keys
        part, known = column.part, column.known
        pinned = slice(mine.start - reply.first_block, mine.stop - reply.first_block)
        wanted, stamp = reply.header_digests[part.index][pinned], self._source.grant.stamps[part.index]
        at, size = HEADER_BYTES + column.at, column.size
        try:
            spans = self._source.door.memory(reply.lease, reply.places[part.index][pinned])
        except (StoreClosed, Unreachable) as error:
            gone = MissReason.UNREACHABLE if isinstance(error, Unreachable) else MissReason.DISABLED
            self._cut(mine.start, gone)
            return opened
        for block, (address, view, memory), want in zip(mine, spans, wanted, strict=False):
            found = known.get(block) if known is not None else None
            if found is None:
                raw = bytes(view[:HEADER_BYTES])
                if digest(raw) != want or not names_block(raw, stamp, keys[block]):
                    self._report(block, part)
                    self._cut(block, MissReason.CORRUPT)
                    return opened
                found = split_digests(raw, len(part.layers))
                if known is not None:
                    known[block] = found
            opened.payloads.append(FrameSpan(address + at, view[at : at + size], memory))
            opened.digests.append(found[column.layers])
        if len(spans) < len(mine):  # quarantined meanwhile, and its extent given back
            self._cut(mine.start + len(spans), MissReason.CORRUPT)
        return opened

    def _report(self, block: int, part: Part) -> None:
        """Have the store check its own copy of a frame that failed here."""
        request = m.ReportFrame(self._lease.reply.lease, block, part.index)
        self._source.door.call(request, m.Done)

    # The end, and what it needs ------------------------------------------------------------------------------------

    def _cut(self, block: int, reason: MissReason | None) -> None:
        assert block <= self._end, "the end moves back only"
        assert reason is not None, "what is not loaded has a reason"
        self._end, self._reason = block, reason
        self._account = self._account.cut(block * self._block_tokens, reason)

    def _needed(self, group: KvGroup, end: int) -> int:
        """The first token that a load up to this block needs of a group."""
        needed = group.needed_from(end * self._block_tokens)
        return max(self._first_token, needed - needed % self._pages.of_group(group.name).page_tokens)

    def _lacks(self, group: KvGroup, end: int) -> bool:
        """Whether a load up to this block needs pages of a group that are not there."""
        needed = self._needed(group, end)
        return needed < min(self._given[group.name], end * self._block_tokens)

    def _covered(self, end: int) -> int:
        """The last end, not behind this one, that a load can have. A shorter load may need earlier pages; at a chunk's
        beginning it needs none of that group."""
        groups = self._source.layout.groups
        while end > self._start and any(self._lacks(group, end) for group in groups):
            end -= 1
        return end

    def _check_pages(self) -> None:
        """Check that no page is loaded twice. Runs after all codecs were bound to the pages."""
        self._pages.check_once(self._source.layout)
        self._pages.check_apart(self._source.layout)

    def _check_windows(self) -> None:
        for group in self._source.layout.groups:
            given, page = self._given[group.name], self._pages.of_group(group.name).page_tokens
            lacks = self._stop > self._start and self._lacks(group, self._end)
            if lacks or (given > self._first_token and group.attention is Attention.FULL):
                needed = self._needed(group, self._end)
                window = f" (window={group.window})" if group.window else ""
                raise LayoutMismatch(
                    f"page {(needed - self._first_token) // page} of group {group.name!r} is missing: its pages begin "
                    f"at page {(given - self._first_token) // page}, and with {group.attention} attention{window} a "
                    f"load up to token {self._end * self._block_tokens} needs them from that one on"
                )
