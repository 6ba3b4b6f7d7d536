"""One suite for every way that frames take between hosts: what is right arrives, and what is wrong stops there."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.block.errors import BadInput
from kvstore.peers import tokens
from kvstore.peers import transport as t
from peers.frames import SECRET, Source
from peers.media import FURTHER_MEDIA, LIED_AT, MEDIA, Lie
from tiering.frame import HEADER_BYTES
from waiting import wait_until

SLACK_SECONDS = 0.1


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


EVERY_MEDIUM = [*MEDIA, *[pytest.param(one, marks=pytest.mark.slow) for one in FURTHER_MEDIA]]

ONE_MEDIUM = [MEDIA[0], *[pytest.param(one, marks=pytest.mark.slow) for one in (*MEDIA[1:], *FURTHER_MEDIA)]]
in_one_medium = pytest.mark.parametrize("medium", ONE_MEDIUM, ids=lambda medium: medium.name, indirect=True)
"""For what takes seconds by its nature: the others are slow."""


@pytest.fixture(params=EVERY_MEDIUM, ids=lambda medium: medium.name)
def medium(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def door(medium: Any) -> Iterator[Any]:
    door = medium.door()
    yield door
    door.close()
    assert door.pinned() == 0


def test_frames_arrive_and_pins_go_with_the_last_of_them(medium: Any, door: Any) -> None:
    source = Source(20)
    offer = door.offer(source.offered(), SECRET)
    assert (offer.blocks, offer.frame_bytes, offer.is_sealed) == (20, source.frame_bytes, medium.seal == "always")
    reader = medium.transport().connect(offer, SECRET, soon())
    slots = source.slots()
    assert reader.pull(slots, source.check(), soon()) == 40
    assert source.has(slots) and not reader.is_refused and reader.free_slots(lambda: None)
    assert source.is_released.wait(5)
    reader.close()
    wait_until(lambda: door.pinned() == 0)
    assert source.releases == 1


def test_a_connection_is_read_in_windows_and_no_further_than_its_offer(medium: Any, door: Any) -> None:
    source = Source(15)
    reader = medium.transport().connect(door.offer(source.offered(), SECRET), SECRET, soon())
    for first, frames in ((0, 2), (2, 20), (22, 6)):
        slots = source.slots(first, frames)
        assert reader.pull(slots, source.check(first // 2), soon()) == frames
        assert source.has(slots, first)
    slots = [*source.slots(28), *source.slots(0, 4)]
    assert reader.pull(slots, source.check(14), soon()) == 2
    assert source.has(slots[:2], 28)
    assert reader.pull(slots[2:], source.check(), soon()) == 0
    reader.close()


def test_pulls_beside_each_other_do_not_mix(medium: Any, door: Any) -> None:
    sources = [Source(12, seed) for seed in range(6)]
    offers = [door.offer(source.offered(), bytes([at]) * 32) for at, source in enumerate(sources)]
    wrong: list[int] = []

    def pull(at: int) -> None:
        reader = medium.transport().connect(offers[at], bytes([at]) * 32, soon())
        slots = sources[at].slots()
        if reader.pull(slots, sources[at].check(), soon()) != 24 or not sources[at].has(slots):
            wrong.append(at)
        reader.close()

    threads = [threading.Thread(target=pull, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    wait_until(lambda: all(source.releases == 1 for source in sources))
    assert all(source.sent == [span.nbytes for span in source.spans] for source in sources)


@in_one_medium
@pytest.mark.parametrize("lie", Lie, ids=lambda lie: lie.name.lower())
def test_what_came_before_a_fault_is_kept_and_no_deadline_is_missed(medium: Any, lie: Lie) -> None:
    source, seconds = Source(2), medium.late_seconds
    with medium.lying_holder(source, lie) as offer:
        reader = medium.transport().connect(offer, SECRET, soon())
        assert reader.pull([], source.check(), soon()) == 0  # nothing was asked for
        slots, began = source.slots(), time.monotonic()
        if lie is Lie.NONE:
            verified = reader.pull(slots, source.check(), soon())
        else:
            is_late = lie in (Lie.STALL, Lie.DRIP)
            with pytest.raises(t.TimedOutPull if is_late else t.PeerFault) as found:
                reader.pull(slots, source.check(), began + seconds if is_late else soon())
            if is_late:
                assert seconds <= time.monotonic() - began <= seconds + SLACK_SECONDS
            verified = found.value.verified
        if lie is Lie.RESET:  # a reset takes with it what the kernel has received and the reader has not read yet
            assert verified <= LIED_AT
        else:
            assert verified == (4 if lie is Lie.NONE else LIED_AT)
        assert source.has(slots[:verified])
        if lie is not Lie.NONE:
            with pytest.raises(t.PeerFault):  # it is over
                reader.pull(slots, source.check(), soon())
        freed = threading.Event()
        assert reader.free_slots(freed.set) or freed.wait(10)
        reader.close()


def test_frames_of_other_blocks_and_parts_are_not_taken(medium: Any, door: Any) -> None:
    source, other = Source(3), Source(3, seed=1)
    for want, check, frames in ((0, other.check(), source), (2, _swapped(source), source)):
        reader = medium.transport().connect(door.offer(frames.offered(), SECRET), SECRET, soon())
        with pytest.raises(t.PeerFault) as found:
            reader.pull(source.slots(), check, soon())
        assert found.value.verified == want
        reader.close()


def _swapped(source: Source) -> Any:
    check = source.check()
    check._keys = [source.keys[0], source.keys[2], source.keys[1]]
    return check


def refused(medium: Any, offer: t.PullOffer, secret: bytes) -> bool:
    source = Source(1)
    reader = medium.transport().connect(offer, secret, soon())
    try:
        return reader.pull(source.slots(), source.check(), soon()) == 0 and reader.is_refused
    except t.PeerFault:
        return True
    finally:
        reader.close()


def test_a_token_is_good_once_for_those_who_have_its_secret(medium: Any, door: Any) -> None:
    source = Source(1)
    offer = door.offer(source.offered(), SECRET)
    assert refused(medium, offer, b"x" * 32), "another tenant's, node's or keys' secret"
    assert refused(medium, dataclasses.replace(offer, token=bytes(32)), SECRET), "no token"
    assert not source.is_released.is_set(), "they have used nothing up"
    reader = medium.transport().connect(offer, SECRET, soon())
    slots = source.slots()
    assert reader.pull(slots, source.check(), soon()) == 2 and source.has(slots)
    assert refused(medium, offer, SECRET), "used up while it is being pulled"
    reader.close()
    assert refused(medium, offer, SECRET), "used up"


def test_an_offer_that_no_puller_comes_for_ends(medium: Any, door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "OFFER_SECONDS", 0.2)
    source, began = Source(1), time.monotonic()
    offer = door.offer(source.offered(), SECRET)
    assert source.is_released.wait(5)
    assert 0.2 <= time.monotonic() - began <= 0.2 + SLACK_SECONDS + 0.2
    assert refused(medium, offer, SECRET)
    assert source.releases == 1


@pytest.mark.slow
@in_one_medium
def test_a_puller_that_dies_or_stalls_holds_no_pins(medium: Any, door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(64, slice_bytes=(1 << 18, 5000))  # more than a connection's buffers take
    reader = medium.transport().connect(door.offer(source.offered(), SECRET), SECRET, soon())
    assert reader.pull(source.slots(0, 2), source.check(), soon()) == 2
    assert not source.is_released.is_set()
    reader.close()
    assert source.is_released.wait(2), "at once"
    monkeypatch.setattr(t, "OFFER_SECONDS", 2.0)  # a busy machine connects in less
    source = Source(64, slice_bytes=(1 << 18, 5000))
    reader = medium.transport().connect(door.offer(source.offered(), SECRET), SECRET, soon())
    assert reader.pull(source.slots(0, 2), source.check(), soon()) == 2
    assert source.is_released.wait(5), "after its time, whatever the puller does"
    with pytest.raises(t.PullFault) as found:
        reader.pull(source.slots(2, 2), source.check(1), soon())
    assert found.value.verified == 0
    reader.close()


def test_offers_are_bounded_and_what_is_turned_away_stays_the_callers(medium: Any, door: Any) -> None:
    sources = [Source(1) for _ in range(tokens.MOST_OFFERS)]
    for source in sources:
        door.offer(source.offered(), SECRET)
    more = Source(1)
    with pytest.raises(t.PullBusy):
        door.offer(more.offered(), SECRET)
    assert more.releases == 0
    door.close()
    assert all(source.releases == 1 for source in sources)


def test_what_cannot_be_is_refused_before_a_byte_is_sent(medium: Any, door: Any) -> None:
    source = Source(1)
    offer = door.offer(source.offered(), SECRET)
    reader = medium.transport().connect(offer, SECRET, soon())
    with pytest.raises(BadInput, match="a slot of 4096 bytes for a frame of"):
        reader.pull([memoryview(bytearray(HEADER_BYTES))], source.check(), soon())
    with pytest.raises(t.TimedOutPull) as found:
        reader.pull(source.slots(), source.check(), time.monotonic() - 1)
    assert found.value.verified == 0
    for changed in (
        {"token": b"short"},
        {"blocks": -1},
        {"blocks": t.MOST_BLOCKS + 1},
        {"frame_bytes": ()},
        {"frame_bytes": (4096,)},
        {"frame_bytes": (1 << 40,)},
        {"frame_bytes": (8193,)},
        {"address": "example.org:80"},
        {"address": "127.0.0.1"},
        {"address": "127.0.0.1:99999"},
        {"address": "[::1:80"},
        {"address": "1" * 100 + ":80"},
    ):
        with pytest.raises(t.PeerFault):
            dataclasses.replace(offer, **changed)


def test_doors_that_are_dead_or_say_nothing_cost_no_more_than_the_deadline(medium: Any, door: Any) -> None:
    source = Source(1)
    offer = door.offer(source.offered(), SECRET)
    door.close()
    began = time.monotonic()
    with pytest.raises(t.PullFault):
        reader = medium.transport().connect(offer, SECRET, began + 0.3)
        reader.pull(source.slots(), source.check(), began + 0.3)
    assert time.monotonic() - began <= 0.3 + SLACK_SECONDS


def test_a_sealed_offer_beyond_loopback_or_none(medium: Any) -> None:
    offer = t.PullOffer(bytes(32), "192.0.2.1:7472", "sockets", 1, (8192,), False)
    with pytest.raises(t.PeerFault, match=r"in clear at 192\.0\.2\.1:7472; they are sealed beyond loopback"):
        medium.transport().connect(offer, SECRET, soon())
