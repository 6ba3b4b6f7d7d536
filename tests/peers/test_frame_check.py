"""A frame is checked while it arrives: by the bytes that are there, and with the same verdict as all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.frames import SLICES, Source
from tiering import frame as frames
from tiering.frame import DIGEST_BYTES, HEADER_BYTES, KEY_BYTES, digest

SOURCE = Source(2)
FRAMES = range(len(SOURCE.spans))
CUTS = st.lists(st.integers(0, max(map(len, SOURCE.spans))), max_size=6)


def verdict(number: int, sent: bytes, cuts: list[int]) -> bool:
    """The bytes up to each cut are written just before they are told; before that the slot has others."""
    slot = memoryview(bytearray(b"\xee" * len(sent)))
    check, there = SOURCE.check().of(number, slot), 0
    whole = HEADER_BYTES + SOURCE.stamps[number % 2].payload_bytes
    for count in [*sorted(min(cut, len(sent)) for cut in cuts), len(sent)]:
        assert not check.is_right or there >= whole
        slot[there:count] = sent[there:count]
        there = count
        check.arrived(count)
    return check.is_right


@given(st.sampled_from(FRAMES), CUTS)
def test_a_right_frame_is_right_however_it_comes(number: int, cuts: list[int]) -> None:
    assert verdict(number, bytes(SOURCE.spans[number]), cuts)


@given(st.sampled_from(FRAMES), CUTS, st.data())
def test_a_flipped_bit_is_found_however_it_comes(number: int, cuts: list[int], data: st.DataObject) -> None:
    """In what names the frame, in a digest, or in what a digest covers; the sidecar has the key for the rest."""
    stamp, sent = SOURCE.stamps[number % 2], bytearray(SOURCE.spans[number])
    named = sent.index(SOURCE.keys[number // 2])
    first = sent.index(digest(SOURCE.spans[number][HEADER_BYTES:][: stamp.slice_bytes]))
    at = data.draw(
        st.integers(0, 3)
        | st.integers(named, named + KEY_BYTES - 1)
        | st.integers(first, first + stamp.slices * DIGEST_BYTES - 1)
        | st.integers(HEADER_BYTES, HEADER_BYTES + stamp.payload_bytes - 1)
    )
    sent[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not verdict(number, bytes(sent), cuts)


@given(st.sampled_from(FRAMES), st.sampled_from(FRAMES), CUTS)
def test_another_frame_is_wrong_however_it_comes(number: int, other: int, cuts: list[int]) -> None:
    if len(SOURCE.spans[number]) == len(SOURCE.spans[other]):
        assert verdict(number, bytes(SOURCE.spans[other]), cuts) == (number == other)


@given(st.sampled_from(FRAMES), st.integers(0, 1 << 20))
def test_a_part_of_a_frame_is_not_right(number: int, count: int) -> None:
    frame = SOURCE.spans[number]
    check = SOURCE.check().of(number, frame)
    check.arrived(min(count, HEADER_BYTES + SOURCE.stamps[number % 2].payload_bytes - 1))
    assert not check.is_right


def test_each_slice_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something arrives, and nothing behind one that differs."""
    digested: list[int] = []
    plain = frames.digest
    monkeypatch.setattr(frames, "digest", lambda buffer: digested.append(len(buffer)) or plain(buffer))
    whole, size = SOURCE.spans[0], SOURCE.stamps[0].slice_bytes
    check = SOURCE.check().of(0, whole)
    for count in (*range(0, len(whole), 1000), len(whole), len(whole)):
        check.arrived(count)
    assert digested == [size] * SLICES[0] and check.is_right
    digested.clear()
    wrong = bytearray(whole)
    wrong[HEADER_BYTES + 2 * size - 1] ^= 1
    assert not verdict(0, bytes(wrong), list(range(0, len(whole), 1000)))
    assert digested == [size] * 2
