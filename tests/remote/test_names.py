"""The names of frames in a remote engine."""

from __future__ import annotations

from itertools import combinations

from remote.frames import SALT, STAMP, key_of, prefix_key, stamp_of
from tiering.remote.driver import PREFIX, PROBE_KEY, remote_key, salt_key


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
