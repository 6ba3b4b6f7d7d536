"""The names of frames in a remote engine."""

from __future__ import annotations

from itertools import combinations

import pytest

from remote.frames import SALT, STAMP, key_of, prefix_key, stamp_of
from tiering.remote import writes
from tiering.remote.driver import PREFIX, PROBE_KEY, remote_key, salt_key
from tiering.remote.writes import RemoteWrites, WriteQueue


def test_whatever_differs_has_another_name() -> None:
    other_salt = bytes(32)
    names = [
        key_of(1),
        key_of(2),
        key_of(1, stamp_of(part=1)),
        key_of(1, stamp_of(tenant=b"another-tenant--")),
        key_of(1, stamp_of(payload_bytes=32 << 10)),
        remote_key(other_salt, STAMP.pack(), prefix_key(1), 0),
        remote_key(SALT[:16] + other_salt[16:], STAMP.pack(), prefix_key(1), 0),
        salt_key(STAMP.tenant),
        salt_key(STAMP.tenant, STAMP.namespace),
        salt_key(STAMP.namespace[:16]),
        PROBE_KEY,
    ]
    assert all(one != other for one, other in combinations(names, 2))
    assert all(name.startswith(PREFIX) and len(name) < 256 and b" " not in name and name.isascii() for name in names)


def test_nodes_that_sign_in_different_epochs_share_names() -> None:
    assert key_of(1) == key_of(1, stamp_of(epoch=7))


def test_the_parts_of_a_block_lie_together_in_a_cluster() -> None:
    tags = {name[name.index(b"{") : name.index(b"}")] for name in (key_of(1), key_of(1, stamp_of(part=1)))}
    assert len(tags) == 1 and tags != {key_of(2)[len(PREFIX) + 2 : key_of(2).index(b"}")]}


@pytest.mark.parametrize(("policy", "wanted"), [("all", [1, 2]), ("learned", [2]), ("none", [])])
def test_what_is_wanted(policy: str, wanted: list[int]) -> None:
    assert [uses for uses in (1, 2) if RemoteWrites(policy).wants(uses)] == wanted


def test_a_full_queue_loses_its_oldest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MOST_QUEUED", 3)
    queue = WriteQueue[int]()
    for block in (1, 2, 3, 3, 4, 5):
        queue.offer(block)
    assert queue.dropped == 2 and [queue.take(0.0) for _ in range(4)] == [3, 4, 5, None]


def test_what_is_forgotten_is_not_written() -> None:
    queue = WriteQueue[int]()
    queue.offer(1)
    queue.offer(2)
    queue.forget(1)
    queue.forget(9)
    assert len(queue) == 1 and queue.take(0.0) == 2 and not queue.has_one(0.0)
