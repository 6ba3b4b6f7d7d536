"""Adoption: what a courier brings is believed field by field, or not at all; a courier that lies loses bytes alone."""

from __future__ import annotations

import random
import secrets
from contextlib import closing
from pathlib import Path

import pytest

from elsewhere.courier import PAYLOAD, SPACE, OtherNode, RawCourier, chain, sidecar_with_couriers
from kvstore.block.account import HitTier
from kvstore.block.identity import Namespace, TenantKeys
from kvstore.block.layout import Layout
from kvstore.protocol import messages as m
from service.sidecar import Sidecar
from tiering.frame import HEADER_BYTES
from torture.peer import come_in, opened_by
from waiting import wait_until

sidecar = sidecar_with_couriers


def tenant(sidecar: Sidecar) -> TenantKeys:
    return sidecar.store.tenant_keys("default")


def refused(sidecar: Sidecar) -> dict[str, int]:
    assert sidecar.desk is not None
    return {why: count for why, count in sidecar.desk.status().refused.items() if count}


def test_what_a_peer_sealed_is_read_here_under_a_header_of_our_own(sidecar: Sidecar) -> None:
    keys, payloads = chain(3), [secrets.token_bytes(PAYLOAD[0]) for _ in range(3)]
    other = OtherNode(tenant(sidecar), SPACE, PAYLOAD)
    with closing(RawCourier(sidecar.courier_path)) as courier, closing(come_in(sidecar.path)) as engine:
        space = courier.open(SPACE, PAYLOAD)
        reply = courier.reserve(space, keys)
        assert reply.blocks == [0, 1, 2]
        courier.fill(reply.places[0], payloads)
        headers = [other.header(0, keys, at, payload) for at, payload in enumerate(payloads)]
        assert courier.adopt(reply.reservation, 0, 0, headers[:2], HitTier.REMOTE) == m.Counted(2)
        assert courier.adopt(reply.reservation, 0, 2, headers[2:]) == m.Counted(3)
        number = opened_by(engine)
        found = engine.ask(m.MatchPrefix(number, keys))
        assert isinstance(found, m.Matched)
        assert found.reply.tiers == ((HitTier.REMOTE, 2), (HitTier.PEER, 1))
        leased = engine.ask(m.LeasePrefix(number, keys, 0, 1000.0))
        assert isinstance(leased, m.Leased)
        assert leased.reply.tiers == ((HitTier.REMOTE, 2), (HitTier.PEER, 1)), "the first lease counts them so"
        spans = sidecar.core.spans(leased.reply.places[0])
        assert [bytes(one.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD[0]]) for one in spans] == payloads
        assert all(bytes(one.view[:HEADER_BYTES]) != header for one, header in zip(spans, headers, strict=True))
        assert 77 not in leased.reply.generations, "nothing foreign is kept but digests"
        again = engine.ask(m.MatchPrefix(number, keys))
        assert isinstance(again, m.Matched) and again.reply.tiers == ((HitTier.DRAM, 3),)
        counts = sidecar.admin.facts().looked.granted
        assert counts[HitTier.REMOTE] == 2 * counts[HitTier.PEER] > 0
    assert not refused(sidecar)


def test_each_field_is_looked_at(sidecar: Sidecar) -> None:
    """Each of two headers is wrong in one way; nothing of either is adopted, and then the right ones are."""
    mine, stranger = tenant(sidecar), TenantKeys.derive(secrets.token_bytes(32))
    keys = chain(2)
    payloads = [secrets.token_bytes(PAYLOAD[0]) for _ in range(2)]
    right = OtherNode(mine, SPACE, PAYLOAD)
    headers = [right.header(0, keys, at, payload) for at, payload in enumerate(payloads)]
    of_stranger = OtherNode(stranger, SPACE, PAYLOAD)
    of_space = OtherNode(mine, Namespace("another", SPACE.layout, "raw"), PAYLOAD)
    codec = OtherNode(mine, Namespace(SPACE.model, SPACE.layout, "int8"), PAYLOAD)
    longer = OtherNode(mine, SPACE, [2 * PAYLOAD[0]])
    newer = OtherNode(mine.in_epoch(secrets.token_bytes(32), 9), SPACE, PAYLOAD)
    others = chain(2)
    swapped = right.sealers[0].seal(keys[1], others[0], 1, 7, [bytes(16)] * right.stamps[0].slices)
    deeper = right.sealers[0].seal(keys[1], keys[0], 2, 7, [bytes(16)] * right.stamps[0].slices)
    damaged = bytearray(headers[1])
    damaged[200] ^= 1  # within the digests
    tail = bytearray(headers[1])
    tail[-1] = 1
    wrong = {
        "tenant": of_stranger.header(0, keys, 1, payloads[1]),
        "namespace": of_space.header(0, keys, 1, payloads[1]),
        "size": longer.header(0, keys, 1, 2 * payloads[1]),
        "block": right.header(0, others, 1, payloads[1]),
        "parent": swapped,
        "index": deeper,
        "key": newer.header(0, keys, 1, payloads[1]),
        "mac": bytes(damaged),
        "form": bytes(tail),
    }
    assert codec.stamps[0].namespace != right.stamps[0].namespace, "a codec is part of the namespace"
    with closing(RawCourier(sidecar.courier_path)) as courier:
        space = courier.open(SPACE, PAYLOAD)
        reply = courier.reserve(space, keys)
        courier.fill(reply.places[0], payloads)
        for why, header in wrong.items():
            answer = courier.adopt(reply.reservation, 0, 0, [headers[0], header])
            assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, why
            assert refused(sidecar)[why] == 1, (why, answer, refused(sidecar))
            assert sidecar.core.usage().blocks == 0, "all headers are looked at before any is used"
        for header in (b"", bytes(HEADER_BYTES), headers[1][:-1], headers[0]):
            assert isinstance(courier.adopt(reply.reservation, 0, 0, [headers[0], header]), m.Failed)
        assert courier.adopt(reply.reservation, 0, 0, headers) == m.Counted(2)


def test_order_counts_and_reservations(sidecar: Sidecar) -> None:
    keys = chain(3)
    other = OtherNode(tenant(sidecar), SPACE, PAYLOAD)
    headers = [other.header(0, keys, at, bytes(PAYLOAD[0])) for at in range(3)]
    with closing(RawCourier(sidecar.courier_path)) as courier, closing(RawCourier(sidecar.courier_path)) as second:
        space = courier.open(SPACE, PAYLOAD)
        assert second.open(SPACE, PAYLOAD) == space
        reply = courier.reserve(space, keys)
        number = reply.reservation
        courier.fill(reply.places[0], [bytes(PAYLOAD[0])] * 3)
        for answer in (
            courier.adopt(number, 0, 1, headers[1:2]),  # not the next one
            courier.adopt(number, 0, 0, [*headers, headers[2]]),  # more than reserved
            courier.adopt(number, 1, 0, headers[:1]),  # a part that there is not
            courier.adopt(number, -1, 0, headers[:1]),
            courier.adopt(number, 0, -1, headers[:1]),
        ):
            assert isinstance(answer, m.Failed)
        assert refused(sidecar) == {"order": 5}
        assert isinstance(second.adopt(number, 0, 0, headers), m.Failed), "another connection's"
        assert isinstance(courier.adopt(number + 1, 0, 0, headers), m.Failed)
        assert isinstance(courier.adopt(number, 0, 0, headers, HitTier.DRAM), m.Failed)
        assert refused(sidecar) == {"order": 5, "reservation": 2, "tier": 1}
        assert courier.adopt(number, 0, 0, headers[:1]) == m.Counted(1)
        assert isinstance(courier.adopt(number, 0, 0, headers[:1]), m.Failed), "once"
        assert courier.call(m.Abort(number)) == m.Done()
        assert isinstance(courier.adopt(number, 0, 1, headers[1:2]), m.Failed), "after abort"
        assert sidecar.core.usage().reservations == 0
    wait_until(lambda: len(sidecar.sessions.departed) == 0)


def test_a_retired_epoch_is_not_believed(sidecar: Sidecar) -> None:
    mine, keys = tenant(sidecar), chain(1)
    older = mine.in_epoch(secrets.token_bytes(32), 5)
    sidecar.store._ring.add(older)
    header = OtherNode(older, SPACE, PAYLOAD).header(0, keys, 0, bytes(PAYLOAD[0]))
    with closing(RawCourier(sidecar.courier_path)) as courier:
        space = courier.open(SPACE, PAYLOAD)
        reply = courier.reserve(space, keys)
        courier.fill(reply.places[0], [bytes(PAYLOAD[0])])
        sidecar.store._ring.retire(older.tenant, older.key_id, 5)
        assert isinstance(courier.adopt(reply.reservation, 0, 0, [header]), m.Failed)
        assert refused(sidecar) == {"epoch": 1}


@pytest.mark.parametrize("seed", range(4))
def test_a_courier_that_lies_at_random_loses_its_own_bytes(sidecar: Sidecar, seed: int) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}")
    other = OtherNode(tenant(sidecar), SPACE, PAYLOAD)
    with closing(RawCourier(sidecar.courier_path)) as courier:
        space = courier.open(SPACE, PAYLOAD)
        stored = 0
        for _ in range(30):
            keys = [chance.randbytes(32) for _ in range(chance.randint(1, 4))]
            reply = courier.reserve(space, keys)
            if not reply.reservation:
                wait_until(lambda: sidecar.core.usage().pinned_bytes == 0)
                continue
            blocks = len(reply.blocks)
            courier.fill(reply.places[0], [bytes(PAYLOAD[0])] * blocks)
            headers = [other.header(0, keys, at, bytes(PAYLOAD[0])) for at in range(blocks)]
            is_right = chance.random() < 0.3
            if not is_right:
                at = chance.randrange(blocks)
                bent = bytearray(headers[at])
                bent[chance.randrange(HEADER_BYTES)] ^= 1 << chance.randrange(8)
                headers[at] = bytes(bent)
            answer = courier.adopt(reply.reservation, 0, 0, headers)
            assert isinstance(answer, m.Counted) == is_right, answer
            stored += blocks if is_right else 0
            courier.call(m.Abort(reply.reservation))
            sidecar.store.check()
        assert sidecar.core.usage().counters.get("fetched_blocks", 0) == stored
        assert sidecar.core.usage().reservations == 0 and sidecar.core.usage().dram.reserved == 0
    assert sum(refused(sidecar).values()) > 0


def test_parts_of_a_family_are_adopted_each_in_its_slots(tmp_path: Path) -> None:
    layout = Layout.gqa(layers=4, kv_heads=4, head_dim=8, dtype="bfloat16", head_shards=2)
    space = Namespace("sharded", layout, "raw")
    payload = [16384, 16384]
    with Sidecar(tmp_path, couriers=True) as sidecar, closing(RawCourier(sidecar.courier_path)) as courier:
        assert len(layout.parts) == 2
        other, keys = OtherNode(tenant(sidecar), space, payload), chain(2)
        reply = courier.reserve(courier.open(space, payload), keys)
        for part in range(2):
            courier.fill(reply.places[part], [bytes(16384)] * 2)
        headers = [[other.header(part, keys, at, bytes(16384)) for at in range(2)] for part in range(2)]
        assert isinstance(courier.adopt(reply.reservation, 0, 0, headers[1]), m.Failed)
        assert refused(sidecar) == {"part": 1}
        assert courier.adopt(reply.reservation, 1, 0, headers[1]) == m.Counted(0)
        assert courier.adopt(reply.reservation, 0, 0, headers[0]) == m.Counted(2)
