"""The bytes of a directory: what is packed is read, and anything else is refused, down to the single bit."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import BlockCorrupt
from tiering.frame import digest
from tiering.nvme.slab import (
    BAD,
    ENTRY,
    HELD,
    MAX_COUNT,
    SLOTS_PER_RECORD,
    STAMP_PAGES,
    OtherFormat,
    StoreStamp,
    doubt_key,
    entry_of,
    latest_stamp,
    open_meta,
    open_record,
    pack_meta,
    pack_record,
    record_key,
    split_doubt_key,
    split_entries,
    split_record_key,
)
from tiering.slab_header import (
    MAX_ABOUT_BYTES,
    MAX_SLOTS,
    PAGE_BYTES,
    KeyAbsent,
    SlabHeader,
    parse_slab_header,
    read_slab_header,
)
from tiering.tier import SlotClass

MAC_KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
TENANT, KEY_ID, EPOCH = b"t" * 16, b"key-id-0", 7
HEADER = SlabHeader(9, SlotClass(TENANT, b"n" * 32, 3, 12288), 40, KEY_ID, EPOCH, b"u" * 16, b"about this slab")
NOTHING = bytes(SLOTS_PER_RECORD * ENTRY.itemsize)


class Keys:
    """One key, for one tenant, id and epoch; `knows_all`: for whoever asks."""

    def __init__(self, key: bytes = MAC_KEY, *, knows_all: bool = False) -> None:
        self.key, self.knows_all = key, knows_all

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        return self.key if self.knows_all or (tenant, key_id, epoch) == (TENANT, KEY_ID, EPOCH) else None

    slab_key = mac_key


def every_flip(content: bytes) -> Iterator[bytes]:
    """The same with one bit turned round, for each of its bits."""
    damaged = bytearray(content)
    for bit in range(len(content) * 8):
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)
        damaged[bit // 8] ^= 1 << bit % 8


def refused(read: Callable[[], object]) -> None:
    with pytest.raises(BlockCorrupt):
        read()


# Slab headers ---------------------------------------------------------------------------------------------------------


@given(
    number=st.integers(0, 2**32 - 1),
    part=st.integers(0, 2**32 - 1),
    pages=st.integers(2, 2**52 - 1),
    slots=st.integers(1, MAX_SLOTS),
    uid=st.binary(min_size=16, max_size=16),
    about=st.binary(max_size=MAX_ABOUT_BYTES) | st.just(b"\xff" * MAX_ABOUT_BYTES),
)
def test_any_slab_header(number: int, part: int, pages: int, slots: int, uid: bytes, about: bytes) -> None:
    slot_class = SlotClass(TENANT, b"n" * 32, part, pages * PAGE_BYTES)
    header = SlabHeader(number, slot_class, slots, KEY_ID, EPOCH, uid, about)
    page = header.pack(MAC_KEY)
    assert len(page) == PAGE_BYTES and read_slab_header(page, Keys()) == header


@pytest.mark.parametrize(
    ("frame_bytes", "slots"), [(0, 40), (12_288, 0), (4096, 40), (12_289, 40), (12_288, MAX_SLOTS + 1), (2**63 + 1, 1)]
)
def test_a_slab_header_of_impossible_sizes_is_refused(frame_bytes: int, slots: int) -> None:
    """Though its MAC is right: whoever divides by them, or makes room for them, must not be asked to."""
    header = replace(HEADER, slot_class=HEADER.slot_class._replace(frame_bytes=frame_bytes), slots=slots)
    refused(lambda: read_slab_header(header.pack(MAC_KEY), Keys()))
    refused(lambda: parse_slab_header(header.pack(MAC_KEY)))


@pytest.mark.parametrize("size", [0, 8, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_a_page_of_another_size_is_no_slab_header(size: int) -> None:
    refused(lambda: parse_slab_header((HEADER.pack(MAC_KEY) + b"\0")[:size]))


@pytest.mark.parametrize("field", ["sequence", "session", "changes"])
def test_a_stamp_that_counted_too_far_is_none(field: str) -> None:
    """What comes after it could not be written."""
    stamp = replace(StoreStamp(2, 1, b"u" * 16, 3, True), **{field: 2**64 - 2})
    assert latest_stamp([stamp.pack(), bytes(PAGE_BYTES)]) is None


@pytest.mark.parametrize("knows_all", [False, True])
def test_every_bit_of_a_slab_header(knows_all: bool) -> None:
    keys = Keys(knows_all=knows_all)
    for page in every_flip(HEADER.pack(MAC_KEY)):
        try:
            read_slab_header(page, keys)
        except BlockCorrupt:
            continue
        raise AssertionError("a damaged header was believed")


def test_a_slab_header_under_another_key() -> None:
    page = HEADER.pack(MAC_KEY)
    refused(lambda: read_slab_header(page, Keys(OTHER_KEY)))
    refused(lambda: read_slab_header(HEADER.pack(OTHER_KEY), Keys()))


@pytest.mark.parametrize("other", [{"key_id": b"key-id-1"}, {"epoch": 8}])
def test_a_slab_header_whose_key_is_away(other: dict[str, object]) -> None:
    with pytest.raises(KeyAbsent):
        read_slab_header(replace(HEADER, **other).pack(MAC_KEY), Keys())  # type: ignore[arg-type]
    assert parse_slab_header(replace(HEADER, **other).pack(MAC_KEY)) == replace(HEADER, **other)  # type: ignore[arg-type]


# Records --------------------------------------------------------------------------------------------------------------


def entries() -> bytes:
    """A full record: one frame, one bad slot, free ones."""
    held = entry_of(b"k" * 32, b"p" * 32, 5, 2**63, -7, 2**40)
    bad = entry_of(b"b" * 32, b"q" * 32, 2**32 - 1, 1, 7, 0, BAD)
    return (held + bytes(ENTRY.itemsize) + bad).ljust(len(NOTHING), b"\x00")


@given(
    key=st.binary(min_size=32, max_size=32),
    index=st.integers(0, 2**32 - 1),
    generation=st.integers(0, 2**64 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
    expires_at=st.integers(0, 2**64 - 1),
)
def test_any_entry(key: bytes, index: int, generation: int, priority: int, expires_at: int) -> None:
    (entry,) = split_entries(entry_of(key, key[::-1], index, generation, priority, expires_at))
    assert entry["key"].tobytes() == key and entry["parent"].tobytes() == key[::-1]
    assert (entry["block_index"], entry["generation"]) == (index, generation)
    assert (entry["priority"], entry["expires_at"], entry["state"]) == (priority, expires_at, HELD)


def test_every_bit_of_a_record() -> None:
    for value in every_flip(pack_record(HEADER, 4, entries(), MAC_KEY)):
        try:
            open_record(HEADER, 4, value, MAC_KEY)
        except BlockCorrupt:
            continue
        raise AssertionError("a damaged record was believed")


def test_a_record_belongs_to_one_run_of_one_slab_under_one_key() -> None:
    value = pack_record(HEADER, 4, entries(), MAC_KEY)
    elsewhere = [
        (HEADER, 5, MAC_KEY),
        (HEADER, 0, MAC_KEY),
        (replace(HEADER, number=10), 4, MAC_KEY),
        (replace(HEADER, number=4), 9, MAC_KEY),
        (replace(HEADER, uid=b"v" * 16), 4, MAC_KEY),
        (HEADER, 4, OTHER_KEY),
    ]
    for header, record, key in elsewhere:
        with pytest.raises(BlockCorrupt):
            open_record(header, record, value, key)


# Keys of the index ----------------------------------------------------------------------------------------------------


@given(slab=st.integers(0, 2**32 - 1), record=st.integers(0, 2**32 - 1))
def test_record_keys(slab: int, record: int) -> None:
    assert split_record_key(record_key(slab, record)) == (slab, record)


def test_the_keys_of_a_slab_stand_together_and_in_order() -> None:
    keys = [record_key(slab, record) for slab in (0, 1, 255, 256, 65536) for record in (0, 1, 255, 256)]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    assert all(key.startswith(record_key(256, 0)[:5]) == (split_record_key(key)[0] == 256) for key in keys)


@pytest.mark.parametrize(
    ("split", "key"), [(split_record_key, record_key(1, 1)), (split_doubt_key, doubt_key(1))], ids=["record", "doubt"]
)
def test_keys_of_another_length(split: Callable[[bytes], object], key: bytes) -> None:
    for other in (b"", key[:1], key[:-1], key + b"\x00"):
        refused(partial(split, other))


# The stamp ------------------------------------------------------------------------------------------------------------

ODD = StoreStamp(5, 3, b"i" * 16, 77, clean=True)
EVEN = StoreStamp(6, 4, b"j" * 16, 78, clean=False)
EMPTY_PAGE = bytes(PAGE_BYTES)


def pages_of(*stamps: StoreStamp) -> list[bytes]:
    pages = [EMPTY_PAGE] * STAMP_PAGES
    for stamp in stamps:
        pages[stamp.page] = stamp.pack()
    return pages


def test_the_newest_stamp_counts() -> None:
    assert latest_stamp(pages_of(ODD, EVEN)) == EVEN
    assert latest_stamp(pages_of(EVEN, replace(ODD, sequence=7))) == replace(ODD, sequence=7)
    assert latest_stamp(pages_of(ODD, EVEN), besides=EVEN) == ODD
    assert latest_stamp([EMPTY_PAGE, EMPTY_PAGE]) is None


@pytest.mark.parametrize(
    ("uid", "changes", "if_clean", "if_not"),
    [
        (b"i" * 16, 77, True, True),
        (b"i" * 16, 78, False, True),  # batches of a session that has not ended
        (b"i" * 16, 76, False, False),
        (b"j" * 16, 77, False, False),
    ],
)
def test_which_index_a_stamp_knows(uid: bytes, changes: int, if_clean: bool, if_not: bool) -> None:
    assert ODD.knows(uid, changes) is if_clean
    assert replace(ODD, clean=False).knows(uid, changes) is if_not


def test_every_bit_of_a_stamp_page() -> None:
    """The padding too: a page that is not as it was written is no stamp."""
    for stamp, other in ((EVEN, ODD), (replace(ODD, sequence=7), EVEN)):
        pages = pages_of(other, stamp)
        for page in every_flip(stamp.pack()):
            pages[stamp.page] = page
            assert latest_stamp(pages) == other


@pytest.mark.parametrize("cut", range(0, PAGE_BYTES, 512))
def test_a_torn_stamp_leaves_the_one_before(cut: int) -> None:
    before = replace(EVEN, sequence=4, session=2)
    torn = EVEN.pack()[:cut] + before.pack()[cut:]
    whole = before if cut == 0 else EVEN
    assert latest_stamp([torn, ODD.pack()]) == max(whole, ODD, key=lambda stamp: stamp.sequence)
    for at in range(1, 80):  # where a sector is no unit either
        latest = latest_stamp([EVEN.pack()[:at] + before.pack()[at:], ODD.pack()])
        assert latest in (ODD, EVEN)


def test_a_stamp_on_the_page_of_the_other_one_is_none() -> None:
    assert latest_stamp([ODD.pack(), EVEN.pack()]) is None
    assert latest_stamp([ODD.pack(), ODD.pack()]) == ODD


def with_version(stamp: StoreStamp, version: int) -> bytes:
    page = bytearray(stamp.pack())
    page[8:12] = struct.pack("<I", version)
    size = page.index(digest(stamp.pack()[:53]), 0)
    page[size : size + 16] = digest(bytes(page[:size]))
    return bytes(page)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_a_stamp_of_another_version_is_refused(version: int) -> None:
    for pages in ([with_version(EVEN, version), EMPTY_PAGE], [with_version(EVEN, version), ODD.pack()]):
        with pytest.raises(OtherFormat, match=f"format {version}"):
            latest_stamp(pages)
    with pytest.raises(OtherFormat):
        latest_stamp([EVEN.pack(), with_version(ODD, version)])


# The index's own record -----------------------------------------------------------------------------------------------


@given(uid=st.binary(min_size=16, max_size=16), changes=st.integers(0, MAX_COUNT))
def test_meta_is_read_as_it_was_packed(uid: bytes, changes: int) -> None:
    assert open_meta(pack_meta(uid, changes)) == (uid, changes)


def test_every_bit_of_meta() -> None:
    for value in every_flip(pack_meta(b"u" * 16, 2**40)):
        assert open_meta(value) is None


@pytest.mark.parametrize(
    "value", [None, b"", bytes(40), pack_meta(b"u" * 16, 1)[:-1], pack_meta(b"u" * 16, 1) + b"\x00"]
)
def test_what_is_no_meta(value: bytes | None) -> None:
    assert open_meta(value) is None
