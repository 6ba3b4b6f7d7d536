"""Prefix diagnostics through a sidecar's sockets: what engines send, what is shown, to whom, and what cannot
break it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.block.account import Account, MissReason
from kvstore.cli import ask
from kvstore.client.connection import check_numbers
from kvstore.client.handle import NamespaceHandle
from kvstore.node import SystemClock
from kvstore.prefixes.sampler import PromptSampler
from kvstore.protocol import messages as m
from kvstore.protocol.told import MAX_FINGERPRINTS, MAX_TOLD_PROMPTS, PromptParted, PromptTold
from service.sidecar import Sidecar
from service.test_serve import PATHS
from torture.peer import Peer
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
SEED = secrets.randbits(32)
print(f"seed {SEED}")


def opened(store: Any, **more: Any) -> NamespaceHandle:
    handle: NamespaceHandle = store.namespace(model=MODEL, layout=LAYOUT, name="small model", **more)
    return handle


def observed(sidecar: Sidecar, tenant: str = "") -> m.PrefixFigures:
    watching = Peer(str(sidecar.observe_path))
    assert isinstance(watching.ask(m.Hello(1, 2, "test")), m.Welcome)
    reply = watching.ask(m.Prefixes(tenant))
    watching.close()
    assert isinstance(reply, m.PrefixesReply)
    return reply.figures


def settled(sidecar: Sidecar, prompts: int) -> None:
    """Until so many sketches have come and are worked through."""
    (mine,) = sidecar.prefixes._tenants.values()
    wait_until(lambda: mine.prompts >= prompts)
    sidecar.prefixes.step()
    sidecar.prefixes.check()


def offer(handle: NamespaceHandle, *prompts: list[int]) -> None:
    sampler = PromptSampler(1, lambda: 0.0)
    for tokens in prompts:
        sampler.offer(handle, Account.missed(MissReason.ABSENT, len(tokens), 64), (), partial(list, tokens))
        sampler.settle()
    sampler.close()


def timed(number: int, tokens: int = 3000) -> list[int]:
    drawn = np.random.default_rng(1).integers(0, 30_000, tokens).tolist()
    return [*drawn[:40], *range(60_000 + 6 * number, 60_006 + 6 * number), *drawn[46:]]


def raw_prompt(**more: Any) -> PromptTold:
    places = np.arange(10, dtype="<u4") * 64
    return msgspec.structs.replace(
        PromptTold(0, 100, 1000, 0, b"abcd" * 15, b"12345678" * 10, places.tobytes()), **more
    )


@pytest.fixture
def peers(tmp_path: Path) -> Any:
    """A sidecar, and what makes a client of raw messages with an open namespace of its own number 0."""
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = opened(store)
        made: list[Peer] = []

        def peer() -> Peer:
            made.append(Peer(str(sidecar.path)))
            assert isinstance(made[-1].ask(m.Hello(1, 2, "test")), m.Welcome)
            payload_bytes = [handle._codec.payload_bytes(part) for part in LAYOUT.parts]
            granted = made[-1].ask(m.OpenNamespace(handle.namespace.pack(), payload_bytes))
            assert isinstance(granted, m.Granted)
            made[-1].number = granted.grant.number  # type: ignore[attr-defined]
            return made[-1]

        yield sidecar, handle, peer
        for one in made:
            one.close()


def test_prompts_that_part_are_shown_with_what_to_do(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        offer(opened(store), *(timed(number) for number in range(5)))
        settled(sidecar, 5)
        (one,) = observed(sidecar).partings
        assert (one.kind, one.place, one.earlier_tokens, one.tokens) == ("changed", 40, 6, 6)
        assert one.equal_tokens == 2954 and one.is_exact and one.prompts == 4
        assert one.tenant == "default" and one.model == "small model"
        assert one.sentence.endswith("tokens/h computed that were stored. Move what changes to the end.")


def test_engines_that_know_nothing_of_each_other_are_compared(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as one, sidecar.client() as two:
        offer(opened(one), timed(1))
        offer(opened(two), timed(2))
        settled(sidecar, 2)
        (parting,) = observed(sidecar).partings
        assert (parting.kind, parting.place, parting.is_exact) == ("changed", 0, False)
        offer(opened(one, weights_epoch=3), timed(1))
        settled(sidecar, 3)
        kinds = {one.kind: one for one in observed_anew(sidecar).partings}
        assert kinds["other namespace"].what == "weights_epoch is 3 here and 0 there"


def time_over(sidecar: Sidecar) -> None:
    """What was shown is not fresh any more."""
    sidecar.prefixes._shown.clear()


def observed_anew(sidecar: Sidecar) -> m.PrefixFigures:
    time_over(sidecar)
    return observed(sidecar)


def test_the_hottest_prefix_is_shown_as_it_is_stored(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = opened(store)
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
def test_the_command_prints_sentences_and_an_object(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = opened(store)
        command = [sys.executable, "-m", "kvstore", "prefixes", "--admin-socket", str(sidecar.observe_path)]
        environment = {**os.environ, **PATHS}
        nothing = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert nothing.returncode == 0 and "No prompts were seen that part" in nothing.stdout, nothing.stderr
        handle.put(ids(640), random_pages(LAYOUT, 10))
        handle.lease(handle.match(ids(700)), deadline_ms=5000).release()
        offer(handle, timed(1), timed(2))
        settled(sidecar, 2)
        time_over(sidecar)
        shown = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
        assert "part at token 40, differ for 6 tokens" in shown and "small model" in shown
        read = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment).stdout
        assert json.loads(read)["hottest"][0]["tokens"] == 640 and json.loads(read)["partings"][0]["place"] == 40


def test_look_ups_of_an_operator_are_none(tmp_path: Path) -> None:
    """Those that a client says do not count."""
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        handle = opened(store)
        handle.door.call(m.MatchPrefix(handle.number, handle.hashed(ids(640)).keys, counts=False), m.Matched)
        assert observed(sidecar).lookups == 0


def test_to_a_tenants_socket_and_under_another_name_nothing_is_shown(peers: Any) -> None:
    sidecar, handle, peer = peers
    offer(handle, timed(1), timed(2))
    settled(sidecar, 2)
    assert isinstance(peer().ask(m.Prefixes()), m.Failed)
    other = observed(sidecar, "other")
    assert (other.hottest, other.partings, other.lookups, other.prompts, other.sketches) == ([], [], 0, 0, None)
    own = observed(sidecar, "default")
    assert own.prompts == 2 and len(own.partings) == 1 and own.sketches is None


def test_a_purge_forgets_it(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        with sidecar.client() as store:
            offer(opened(store), timed(1), timed(2))
            settled(sidecar, 2)
        ask.purge(str(sidecar.admin_path), SystemClock(), "default", 30.0)
        assert observed(sidecar).prompts == 0 and sidecar.prefixes._tenants == {}


# A raw client ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        raw_prompt(places=b"1234" * 9),
        raw_prompt(fingerprints=b"1234567" * 10),
        raw_prompt(chain=b"abc"),
        raw_prompt(chain=b"abcd" * 16),
        raw_prompt(places=b"\xff" * 40),
        raw_prompt(stored_tokens=1001),
        raw_prompt(parted=PromptParted("moved", 0, 1, 1, 1)),
        raw_prompt(parted=PromptParted("\x1b[31m", 0, 1, 1, 1)),
        raw_prompt(parted=PromptParted("changed", 5000, 1, 1, 1)),
        raw_prompt(namespace=77),
        raw_prompt(namespace=-1),
    ],
    ids=lambda one: repr(one)[:70],
)
def test_a_sketch_that_cannot_be_is_refused_and_the_connection_goes_on(peers: Any, broken: PromptTold) -> None:
    sidecar, handle, peer = peers
    one = peer()
    good = raw_prompt(namespace=one.number)
    if broken.namespace == 0:
        broken = msgspec.structs.replace(broken, namespace=one.number)
    answer = one.ask(m.Tell([], None, [good, broken]))
    assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT and "\x1b" not in answer.text
    assert isinstance(one.ask(m.Ping()), m.Done)
    assert observed(sidecar).prompts == 0, "nor is the good one beside it"
    assert handle.match(ids(64)).blocks == 0


@pytest.mark.parametrize(
    "prompts",
    [
        [raw_prompt()] * (MAX_TOLD_PROMPTS + 1),
        [raw_prompt(fingerprints=b"1" * 8 * (MAX_FINGERPRINTS + 1))],
        [raw_prompt(places=b"1" * 4 * (MAX_FINGERPRINTS + 1))],
        [raw_prompt(chain=b"1" * (1 << 20))],
        [raw_prompt(tokens=(1 << 17) + 1)],
        [raw_prompt(every=0)],
        [raw_prompt(every=1 << 40)],
        [raw_prompt(start=b"123456789")],
        [raw_prompt(parted=PromptParted("x" * 33, 0, 1, 1, 1))],
        [raw_prompt(parted=PromptParted("changed", 0, -1, 1, 1))],
        [raw_prompt(parted=PromptParted("changed", 0, 1, 1, 1, "x" * 257))],
    ],
    ids=lambda one: f"{len(one)} {one[0]!r}"[:70],
)
def test_what_is_too_large_ends_its_connection_alone(peers: Any, prompts: list[PromptTold]) -> None:
    sidecar, handle, peer = peers
    one = peer()
    assert isinstance(one.ask(m.Tell([], None, prompts)), m.Failed)
    assert handle.match(ids(64)).blocks == 0 and observed(sidecar).prompts == 0


def test_a_flood_of_odd_sketches_stays_within_bounds(peers: Any) -> None:
    sidecar, handle, peer = peers
    one, draw = peer(), np.random.default_rng(SEED)
    sent = 0
    for _ in range(60):
        prompts = []
        for _ in range(MAX_TOLD_PROMPTS):
            count, tokens = int(draw.integers(0, MAX_FINGERPRINTS + 1)), 1 << 17
            places = np.sort(draw.choice(tokens - 32, count, replace=False)).astype("<u4").tobytes()
            kinds: list[Callable[[], bytes]] = [
                lambda count=count: draw.bytes(8 * count),  # type: ignore[misc]
                lambda count=count: b"samesame" * count,  # type: ignore[misc]
                lambda count=count: draw.integers(0, 5, count).astype("<u8").tobytes(),  # type: ignore[misc]
            ]
            fingerprints = kinds[int(draw.integers(3))]()
            chain = draw.bytes(4 * int(draw.integers(0, 2048)))
            prompts.append(
                raw_prompt(
                    namespace=one.number,
                    every=int(draw.integers(1, 100_001)),
                    tokens=tokens,
                    stored_tokens=int(draw.integers(0, tokens)),
                    chain=chain,
                    fingerprints=fingerprints,
                    places=places,
                    start=draw.bytes(int(draw.integers(0, 9))),
                    salt=draw.bytes(int(draw.integers(0, 2))),
                )
            )
        assert isinstance(one.ask(m.Tell([], None, prompts)), m.Done)
        sent += len(prompts)
        sidecar.prefixes.step()
        sidecar.prefixes.check()
    figures = observed(sidecar)
    assert figures.prompts == sent and figures.sketches is not None and figures.sketches < sent
    assert handle.match(ids(64)).blocks == 0
    check_shown(figures)


def check_shown(figures: m.PrefixFigures) -> None:
    """As the console checks it."""
    check_numbers(msgspec.to_builtins(figures))


def test_the_largest_numbers_that_can_be_told_are_shown(peers: Any) -> None:
    sidecar, _, peer = peers
    one = peer()
    worst = PromptParted("changed", 0, 1 << 17, 1 << 17, 1 << 17, "x" * 256)
    told = raw_prompt(namespace=one.number, every=100_000, tokens=1 << 17, parted=worst)
    for _ in range(8):
        assert isinstance(one.ask(m.Tell([], None, [told] * MAX_TOLD_PROMPTS)), m.Done)
    sidecar.prefixes.step()
    figures = observed(sidecar)
    assert figures.partings[0].prompts == 32
    check_shown(figures)


# Versions --------------------------------------------------------------------------------------------------------


OLDER = msgspec.defstruct("Tell", [("requests", list), ("savings", Any, None)], array_like=True, tag="tell")


def test_an_engine_of_the_version_before_tells_as_it_did(peers: Any) -> None:
    _, _, peer = peers
    one = peer()
    body = msgspec.msgpack.encode([7, OLDER([])])
    one.socket.sendall(len(body).to_bytes(m.LENGTH_BYTES, "little") + body)
    reply = one.reply()
    assert reply is not None and (reply.number, reply.answer) == (7, m.Done())


def test_a_sidecar_of_the_version_before_passes_over_sketches() -> None:
    body = m.pack(m.Request(1, m.Tell([], None, [raw_prompt()])))[m.LENGTH_BYTES :]
    number, verb = msgspec.msgpack.decode(body, type=tuple[int, OLDER])
    assert number == 1 and verb.requests == []
