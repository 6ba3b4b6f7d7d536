"""Prefix diagnostics through a sidecar's sockets: what engines send, what is shown, to whom, and what cannot
break it."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import pytest

from kvstore.cli import ask
from kvstore.client.handle import NamespaceHandle
from kvstore.node import SystemClock
from kvstore.protocol import messages as m
from service.sidecar import Sidecar, asked
from service.test_operate import run, told
from torture.peer import Peer, opened_by
from workbench import ids, random_pages, small_layout

LAYOUT = small_layout()
SEED = secrets.randbits(32)
print(f"seed {SEED}")


def observed(sidecar: Sidecar, tenant: str = "") -> m.PrefixFigures:
    (reply,) = asked(sidecar.observe_path, m.Prefixes(tenant))
    assert isinstance(reply, m.PrefixesReply)
    return reply.figures


def time_over(sidecar: Sidecar) -> None:
    """What was shown is not fresh any more."""
    sidecar.prefixes._shown.clear()


def observed_anew(sidecar: Sidecar) -> m.PrefixFigures:
    time_over(sidecar)
    return observed(sidecar)


def test_the_hottest_prefix_is_shown_as_it_is_stored(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    handle.put(ids(640), random_pages(LAYOUT, 10), ttl=600)
    for number in range(10):
        prompt = ids(640) + ids(64, 1_000_000 * (number + 1))
        handle.lease(handle.match(prompt), first_token=128, deadline_ms=5000).release()
    sidecar.prefixes.step()
    (row,) = observed(sidecar).hottest
    assert (row.tokens, row.stored_tokens, row.tiers, row.tenant) == (640, 640, {"dram": 10}, "default")
    assert row.id == handle.match(ids(640)).keys[-1].hex()[:8]
    assert row.saved_tokens_per_hour == pytest.approx(row.requests_per_hour * 512)
    now = SystemClock().wall_seconds()
    assert row.retained_until is not None and 500 < row.retained_until - now <= 600
    assert row.bytes == 10 * sum(sidecar.core.namespaces()[0].payload_bytes) + 10 * 4096 * len(LAYOUT.parts)
    assert abs(row.used_at - now) < 60
    assert handle.door.call(m.Drop(handle.number), m.Counted).blocks == 10
    (row,) = observed_anew(sidecar).hottest
    assert (row.stored_tokens, row.tiers, row.retained_until) == (0, {}, None)


@pytest.mark.slow
def test_the_command_prints_sentences_and_an_object(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    command = "prefixes", "--admin-socket", str(sidecar.observe_path)
    assert "No prefix that was found stands out" in run(*command).stdout
    handle.put(ids(640), random_pages(LAYOUT, 10))
    handle.lease(handle.match(ids(700)), deadline_ms=5000).release()
    sidecar.prefixes.step()
    time_over(sidecar)
    assert "small model" in run(*command).stdout
    assert told(*command)["hottest"][0]["tokens"] == 640


def test_look_ups_of_an_operator_are_none(sidecar: Sidecar, handle: NamespaceHandle) -> None:
    """Those that a client says do not count."""
    handle.door.call(m.MatchPrefix(handle.number, handle.hashed(ids(640)).keys, counts=False), m.Matched)
    assert observed(sidecar).lookups == 0


def test_to_a_tenants_socket_and_under_another_name_nothing_is_shown(
    sidecar: Sidecar, handle: NamespaceHandle, peer: Peer
) -> None:
    handle.match(ids(64))
    assert isinstance(peer.ask(m.Prefixes()), m.Failed)
    other = observed(sidecar, "other")
    assert (other.hottest, other.lookups) == ([], 0)
    assert observed(sidecar, "default").lookups == 1


def test_a_purge_forgets_it(sidecar: Sidecar) -> None:
    with sidecar.opened() as handle:
        handle.match(ids(64))
    ask.purge(str(sidecar.admin_path), SystemClock(), "default", 30.0)
    assert observed(sidecar).lookups == 0 and sidecar.prefixes._tenants == {}


# Versions --------------------------------------------------------------------------------------------------------


OLDER = msgspec.defstruct("Tell", [("requests", list), ("savings", Any, None)], array_like=True, tag="tell")


def test_an_engine_of_the_version_before_tells_as_it_did(peer: Peer) -> None:
    body = msgspec.msgpack.encode([7, OLDER([])])
    peer.socket.sendall(len(body).to_bytes(m.LENGTH_BYTES, "little") + body)
    reply = peer.reply()
    assert reply is not None and (reply.number, reply.answer) == (7, m.Done())


def test_sketches_of_an_engine_of_before_are_passed_over(sidecar: Sidecar, peer: Peer) -> None:
    """It sends prompts that missed much; its requests count as they did."""
    number = opened_by(peer)
    sketch = [number, 100, 1000, 0, b"abcd" * 15, b"12345678" * 10, b"1234" * 10, b"", b"", b"", None]
    assert isinstance(peer.ask(m.Tell([], None, [sketch])), m.Done)
    figures = observed(sidecar)
    assert (figures.partings, figures.prompts, figures.sketches) == ([], 0, None)
