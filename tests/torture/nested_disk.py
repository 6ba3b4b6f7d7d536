"""Fuzzing within, on a disk: a directory whose contents were changed under MACs and checksums that are right.

A small directory with two namespaces is copied, one of its headers, records, stamps or its key file is changed, and a
store is opened on it. It opens and serves, or says in one typed line why not; what it loads is what was stored.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

from kvstore.block.errors import StoreError
from kvstore.block.identity import TenantKeys
from kvstore.node import EmbeddedStore
from tiering.errors import IndexDoubtful, TierError
from tiering.frame import HEADER_BYTES, MAC_BYTES, parse_header
from tiering.nvme.lmdb_index import LmdbMaker
from tiering.nvme.slab import (
    ENTRY,
    RECORDS,
    STAMP_PAGES,
    StoreStamp,
    latest_stamp,
    open_record,
    pack_record,
    split_record_key,
)
from tiering.slab_header import PAGE_BYTES, SlabHeader, parse_slab_header
from torture import Report, quiet
from torture.mutate import as_json, mutated
from torture.nested import SLAB
from workbench import blank_pages, ids, open_at, random_pages, same_tokens, small_layout

LAYOUT = small_layout()
BLOCKS = 3
MODELS = ("a" * 40, "b" * 40)
SIZES: dict[str, Any] = {"dram": "1MiB", "nvme": "1MiB", "slab": "64KiB", "extent": "64KiB"}
WARM_SECONDS = 60.0
STAMP_FIELDS = struct.Struct("<8sHH8sI16s32s16sHHIIQ")
IDENTITY_FIELDS = struct.Struct("<32s32sIiQQ")


def opened(path: Path) -> EmbeddedStore:
    return open_at(path, indexes=LmdbMaker, scrub="off", **SIZES)


def stock(path: Path) -> None:
    """Two namespaces, with a prompt of three blocks in each, on disk."""
    with opened(path) as store:
        for number, model in enumerate(MODELS):
            handle = store.namespace(model=model, layout=LAYOUT)
            put = handle.put(ids(64 * BLOCKS), random_pages(LAYOUT, BLOCKS, seed=number), durability="disk")
            assert put.stored == BLOCKS and put.reason is None, put


@contextmanager
def no_thread_fails() -> Iterator[None]:
    """Or this does: what a thread in the background raises is seen by nobody."""
    failed: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failed.append
    try:
        yield
    finally:
        threading.excepthook = before
    assert not failed, f"a thread ended with {failed[0].exc_type.__name__}: {failed[0].exc_value}"


def served(path: Path) -> str:
    """What opening comes to, and everything after it: right bytes, or a miss."""
    with no_thread_fails():
        try:
            store = opened(path)
        except StoreError as error:
            assert str(error) and len(str(error)) < 2000
            return "refused"
        with store:
            return _served(store)


def _served(store: EmbeddedStore) -> str:
    loaded = 0
    store.warmed(WARM_SECONDS)
    for number, model in enumerate(MODELS):
        handle, blank = store.namespace(model=model, layout=LAYOUT), blank_pages(LAYOUT, BLOCKS)
        with handle.lease(handle.match(ids(64 * BLOCKS)), deadline_ms=10_000) as lease:
            got = handle.get(lease, blank)
        wanted = random_pages(LAYOUT, BLOCKS, seed=number)
        assert same_tokens(wanted, blank, range(got.tokens)), "other bytes than were stored"
        loaded += got.tokens
        put = handle.put(ids(64, 5000), random_pages(LAYOUT, 1, seed=9), durability="disk")
        assert put.present + put.stored <= 1
    store.usage()
    store.check()
    return "whole" if loaded == 2 * 64 * BLOCKS else "in part"


# Changes --------------------------------------------------------------------------------------------------------------


class Directory:
    """A copy of the stocked one, to be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entry = json.loads((path / "keys").read_text())["tenants"]["default"]
        self.keys = TenantKeys.derive(bytes.fromhex(entry["secret"]), entry["epoch"])
        self.slabs = sorted(one for one in (path / "nvme").glob("*.slab") if int(one.stem, 16))

    def header(self, slab: Path) -> SlabHeader:
        return parse_slab_header(slab.read_bytes()[:PAGE_BYTES])

    def write(self, slab: Path, at: int, raw: bytes) -> None:
        with slab.open("r+b") as file:
            file.seek(at)
            file.write(raw)

    def index_is_lost(self) -> None:
        shutil.rmtree(self.path / "nvme" / "index")


def _number(random: Random, old: int, bits: int, *, signed: bool = False) -> int:
    edges = (0, 1, 2, old + 1, old ^ 1, (1 << bits - 1) - 1, random.getrandbits(bits - 1))
    return random.choice(edges if signed else (*edges, (1 << bits) - 1, 1 << bits - 1)) & (1 << bits) - 1


def slab_headers(random: Random, given: Directory) -> None:
    slab = random.choice(given.slabs)
    raw = slab.read_bytes()
    fields = list(SLAB.unpack_from(raw))
    about = raw[SLAB.size : SLAB.size + fields[11]]
    at = random.choice((2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 12))
    if at == 12:
        about = about[: random.randrange(len(about))] if random.random() < 0.5 else random.randbytes(len(about))
        if random.random() < 0.5:  # other payloads for the same namespace
            about = struct.pack("<HQ", 1, random.choice((0, 4096, 8190, 8192 * 2, 1 << 40))) + raw[SLAB.size + 10 :]
        fields[11] = len(about[: PAGE_BYTES - SLAB.size - MAC_BYTES])
        about = about[: fields[11]]
    elif isinstance(fields[at], bytes):
        fields[at] = random.randbytes(len(fields[at]))
    else:
        fields[at] = _number(random, fields[at], 64 if at == 7 else 32)
    used = SLAB.pack(*fields) + about
    page = used + blake2b(used, digest_size=MAC_BYTES, key=given.keys.mac, person=b"kv-slab").digest()
    for where in (0, len(raw) - PAGE_BYTES) if random.random() < 0.8 else (0,):
        given.write(slab, where, page.ljust(PAGE_BYTES, b"\0"))
    if random.random() < 0.5:
        given.index_is_lost()


def frame_headers(random: Random, given: Directory) -> None:
    """The index is lost, so that they are believed."""
    slab = random.choice(given.slabs)
    header = given.header(slab)
    raw = slab.read_bytes()
    for slot in range(random.choice((1, header.slots))):
        at = header.offset(slot)
        page = raw[at : at + HEADER_BYTES]
        if not page.strip(b"\0"):
            continue
        slices = parse_header(page).stamp.slices
        fields = [*STAMP_FIELDS.unpack_from(page), *IDENTITY_FIELDS.unpack_from(page, STAMP_FIELDS.size)]
        which = random.choice((8, 9, 10, 11, 12, 13, 14, 15, 15, 16, 17, 17, 18))
        if isinstance(fields[which], bytes):
            fields[which] = random.choice((random.randbytes(32), fields[13], fields[14]))
        else:
            bits = {8: 16, 9: 16, 12: 64, 17: 64, 18: 64}.get(which, 32)
            fields[which] = _number(random, fields[which], 31 if which == 16 else bits, signed=which == 16)
        digests = page[STAMP_FIELDS.size + IDENTITY_FIELDS.size :][: 16 * slices]
        used = STAMP_FIELDS.pack(*fields[:13]) + IDENTITY_FIELDS.pack(*fields[13:]) + digests
        used += blake2b(used, digest_size=MAC_BYTES, key=given.keys.mac).digest()
        given.write(slab, at, used.ljust(HEADER_BYTES, b"\0"))
    given.index_is_lost()


def index_entries(random: Random, given: Directory) -> None:
    try:
        index = LmdbMaker(given.path / "nvme" / "index").open(clean=True)
    except (IndexDoubtful, TierError):
        return
    headers = {header.number: header for header in map(given.header, given.slabs)}
    changes = []
    for key, value in list(index.iterate(RECORDS)):
        slab, record = split_record_key(key)
        entries = bytearray(open_record(headers[slab], record, value, given.keys.mac))
        for _ in range(random.choice((1, 2, 8))):
            at = random.randrange(5) * ENTRY.itemsize + random.randrange(ENTRY.itemsize)
            entries[at] = random.choice((0, 1, 2, 127, 128, 255))
        changes.append((key, pack_record(headers[slab], record, bytes(entries), given.keys.mac)))
    index.apply(changes)
    index.sync()
    index.close()


def store_stamps(random: Random, given: Directory) -> None:
    path = given.path / "nvme" / "00000000.slab"
    raw = path.read_bytes()
    last = latest_stamp([raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES] for at in range(STAMP_PAGES)])
    assert last is not None
    told = last.sequence, last.session, last.changes
    sequence, session, changes = (_number(random, one, 64) if random.random() < 0.5 else one for one in told)
    stamp = StoreStamp(sequence, session, last.index_uid, changes, random.random() < 0.5)
    given.write(path, stamp.page * PAGE_BYTES, stamp.pack())


def key_files(random: Random, given: Directory) -> None:
    path = given.path / "keys"
    path.write_bytes(as_json(random, mutated(random, json.loads(path.read_text()))).encode("utf-8", "surrogatepass"))


CHANGES: dict[str, Callable[[Random, Directory], None]] = {
    "slab headers": slab_headers,
    "frame headers": frame_headers,
    "index entries": index_entries,
    "stamps": store_stamps,
    "key files": key_files,
}


def directories(count: int, seed: int, report: Report = quiet) -> dict[str, int]:
    """That many changed directories, and what came of opening them."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kv-within-") as scratch:
        stocked = Path(scratch) / "stocked"
        stock(stocked)
        assert served(_copied(stocked)) == "whole"
        for number in range(count):
            random = Random(f"{seed} {number}")
            name = random.choice(tuple(CHANGES))
            path = _copied(stocked)
            try:
                CHANGES[name](random, Directory(path))
                counts[f"{name} {served(path)}"] += 1
            except Exception as error:
                what = f"{type(error).__name__}: {error!s:.300}"
                raise AssertionError(f"seed {seed}, directory {number}, {name}: {what}") from error
            report(number + 1)
    return dict(sorted(counts.items()))


def _copied(stocked: Path) -> Path:
    path = stocked.parent / "changed"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(stocked, path)
    return path
