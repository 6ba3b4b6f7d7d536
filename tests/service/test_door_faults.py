"""What one client sends, or makes the sidecar answer, costs that client alone: others are served on."""

from __future__ import annotations

import json
import logging
import os
import threading
import tracemalloc
import zlib
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.block import identity
from kvstore.block.identity import Namespace
from kvstore.protocol import messages as m
from kvstore.service.connections import LARGE_BYTES
from kvstore.service.dispatch import Response
from service.sidecar import Sidecar, asked
from tiering.nvme.lmdb_index import LmdbMaker
from torture.peer import Peer, come_in, packed_namespace, reply_in
from workbench import ids, one_line, random_pages, small_layout

VALID: list[Any] = json.loads(zlib.decompress(packed_namespace()))
"""version, model, epoch, codec, config, groups (name, layers, heads, widths, dtype, attention), cut (block tokens, head
shards, layer shards, packing)"""


def packed(**changes: object) -> bytes:
    """A packed namespace with other fields, by their place: `at_5_0_2` is the number of heads of the first group."""
    fields = json.loads(json.dumps(VALID))
    for name, value in changes.items():
        within, (*path, last) = fields, map(int, name.removeprefix("at_").split("_"))
        for step in path:
            within = within[step]
        within[last] = value
    return deflated(json.dumps(fields))


def deflated(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 9)


def facts_of(sidecar: Sidecar) -> m.StatReply:
    (answer,) = asked(sidecar.admin_path, m.Stat())
    assert isinstance(answer, m.StatReply), answer
    return answer


LONG_CONFIG = {str(n): blake2b(b"%d" % n).hexdigest() for n in range(60)}
NONSENSE: dict[str, bytes] = {
    "heads and shards that make 4 million parts": packed(at_5_0_2=1 << 22, at_6_1=1 << 22),
    "layers x shards": packed(at_5_0_1=list(range(1024)), at_5_0_2=4096, at_6_1=4096, at_6_2=1024),
    "51 KB that inflate to 50 MB": zlib.compress(b"[" + b" " * (50 << 20) + b"1]", 9),
    "4 KB that inflate to 4 MB": zlib.compress(b"[" + b" " * (3_800_000) + b"1]", 9),
    "as many layers as fit into 64 KB of text": packed(at_5_0_1=list(range(11_000))),
    "groups without end": packed(at_5=[["g", [n], 1, [8], "int8", "full"] for n in range(1000)]),
    "a version that is a lone surrogate": packed(at_0="\udc80"),
    "a long version": packed(at_0="\udc80" * 10_000),
    "an epoch of 71 bits": packed(at_2=1 << 70),
    "an epoch below 0": packed(at_2=-1),
    "an epoch that is true": packed(at_2=True),
    "an epoch in floating point": packed(at_2=1.0),
    "a list as a name": packed(at_1=["model"]),
    "a lone surrogate as a name": packed(at_1="\ud800"),
    "a lone surrogate in the config": packed(at_4={"rope": "\udfff"}),
    "a number in the config": packed(at_4={"rope": 10_000}),
    "a config that is a list": packed(at_4=[["rope", "1"]]),
    "a lone surrogate as a group": packed(at_5_0_0="\ud83d"),
    "heads of 10**3999": packed(at_5_0_2=10**3999),
    "heads of 10**4999": deflated(
        json.dumps(VALID).replace('"group"', '"g"').replace(", 2, [8, 8]", f", {'9' * 4999}, [8, 8]")
    ),
    "heads that are infinite": deflated(json.dumps(VALID).replace(", 2, [8, 8]", ", Infinity, [8, 8]")),
    "a width of 2**62": packed(at_5_0_3=[1 << 62, 1 << 62]),
    "no width": packed(at_5_0_3=[]),
    "a layer of 2**40": packed(at_5_0_1=[1 << 40, 0]),
    "a codec that fits no frame": packed(at_3="x" * 17),
    "a codec with NUL": packed(at_3="raw\0"),
    "a dtype that is a list": packed(at_5_0_4=["int8"]),
    "an attention that is a list": packed(at_5_0_5=[]),
    "blocks of no tokens": packed(at_6_0=0),
    "blocks of 2**31 tokens": packed(at_6_0=1 << 31),
    "blocks of true tokens": packed(at_6_0=True),
    "a packing that is a number": packed(at_6_3=1),
    "nested as deep as fits": deflated("[" * 60_000),
    "nested within": packed(at_4=json.loads("[" * 400 + "]" * 400)),
    "cut short": packed_namespace()[:-1],
    "something behind it": packed_namespace() + b"x",
    "no UTF-8": zlib.compress(b'["\xff"]'),
    "nothing": b"",
    "config too long to be kept beside blocks": packed(at_4=LONG_CONFIG),
    "a megabyte": bytes(1 << 20)[: m.MAX_BODY_BYTES - 100],
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_namespace_that_makes_no_sense_is_refused_before_anything_is_built_of_it(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            Namespace.unpack(NONSENSE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert one_line(caught.value) and len(str(caught.value)) < 1000
    assert peak < 3 << 20, f"{peak} bytes of memory"


def test_what_makes_no_sense_is_answered_and_others_are_served(sidecar: Sidecar, peer: Peer) -> None:
    """All of it on one connection, which stays; another one of the tenant, the operator, and a store beside it too."""
    other = come_in(sidecar.path)
    handle = sidecar.client().namespace(model="m" * 40, layout=small_layout())
    assert handle.put(ids(128), random_pages(handle.layout, 2)).stored == 2
    for name, raw in NONSENSE.items():
        answer = peer.ask(m.OpenNamespace(raw, [8192]))
        assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT, f"{name}: {answer}"
        assert other.ask(m.Ping()) == m.Done(), name
    assert [one.model for one in facts_of(sidecar).facts.namespaces] == ["m" * 40]
    assert isinstance(peer.ask(m.OpenNamespace(packed_namespace(), [8192])), m.Granted)
    assert handle.match(ids(128)).blocks == 2
    other.close()


@pytest.mark.parametrize(
    "payloads",
    [[], [8192, 8192], [0], [-8192], [8191], [1], [2], [1 << 40], [(1 << 63) - 2], [1 << 63]],
)
def test_payloads_that_no_codec_makes_are_refused(peer: Peer, payloads: list[int]) -> None:
    answer = peer.ask(m.OpenNamespace(packed_namespace(), payloads))
    assert isinstance(answer, m.Failed) and answer.fault is m.RequestFault.BAD_INPUT and "payload" in answer.text


# Answers --------------------------------------------------------------------------------------------------------------

UNENCODABLE: dict[str, m.Answer] = {
    "a number of 71 bits": m.Counted(1 << 70),
    "a lone surrogate": m.Failed(m.RequestFault.BUSY, "\udc80"),
    "no message at all": object(),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", UNENCODABLE)
@pytest.mark.parametrize("verb", [m.Abort(1), m.ReportFrame(1, 0, 0), m.OpenNamespace(packed_namespace(), [8192])])
def test_an_answer_that_cannot_be_encoded_ends_its_connection_alone(
    sidecar: Sidecar, verb: m.Verb, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the door's own thread serves it, a pool's, or the one for what is heavy."""
    handlers = sidecar.handlers._verbs
    served, handlers[type(verb)] = handlers[type(verb)], lambda caller, verb: UNENCODABLE[name]
    other = come_in(sidecar.path)
    for _ in range(50):
        peer = come_in(sidecar.path)
        peer.socket.sendall(m.pack(m.Request(1, verb)))
        assert peer.reply() is None, "it was not hung up on"
        peer.close()
    handlers[type(verb)] = served
    assert other.ask(m.Ping()) == m.Done()
    told = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(told) == 1 and "could not be made" in told[0].getMessage(), "one client, one line"
    other.close()


def test_an_answer_with_descriptors_that_cannot_be_encoded_closes_them(sidecar: Sidecar, peer: Peer) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    sidecar.handlers._verbs[m.Extents] = lambda caller, verb: Response(m.Counted(1 << 70), [theirs])
    peer.socket.sendall(m.pack(m.Request(1, m.Extents([1], False))))
    assert peer.reply() is None
    assert os.read(ours, 1) == b"", "the other end of the pipe is open still"
    os.close(ours)


@pytest.mark.parametrize("verb", [m.Abort(1), m.ReportFrame(1, 0, 0), m.Release([1])])
def test_untyped_faults_of_one_client_are_one_line(
    sidecar: Sidecar, verb: m.Verb, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever thread serves it; a fault on the door's own also ends the connection, and no other."""

    def fail(caller: object, verb: object) -> m.Answer:
        raise KeyError("a fault of the sidecar")

    served, sidecar.handlers._verbs[type(verb)] = sidecar.handlers._verbs[type(verb)], fail
    other = come_in(sidecar.path)
    for _ in range(200):
        with closing(come_in(sidecar.path)) as peer:
            peer.socket.sendall(m.pack(m.Request(1, verb)))
            assert (peer.reply() is None) is isinstance(verb, m.Release)
    sidecar.handlers._verbs[type(verb)] = served
    assert other.ask(m.Ping()) == other.ask(verb) == m.Done()
    told = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].exc_info is not None, "with its traceback, once"
    other.close()


def test_a_fault_where_connections_are_looked_after_ends_nobody(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = come_in(sidecar.path)
    for name in ("sweep", "notify"):
        with monkeypatch.context() as patch:
            patch.setattr(sidecar.sessions, name, lambda: 1 // 0)
            peers = [come_in(sidecar.path) for _ in range(5)]
            for peer in peers:
                assert peer.ask(m.Ping()) == m.Done()
                peer.close()
            assert other.ask(m.Ping()) == m.Done()
    assert other.ask(m.Ping()) == m.Done()
    other.close()


# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, LARGE_BYTES])
def test_a_namespace_is_opened_off_the_doors_thread_and_in_order(sidecar: Sidecar, peer: Peer, padding: int) -> None:
    """What is sent behind it, unasked, finds it open: as if the door itself had opened it."""
    opened: list[str] = []
    served = sidecar.handlers._verbs[m.OpenNamespace]

    def noted(caller: Any, verb: Any) -> Any:
        opened.append(threading.current_thread().name)
        return served(caller, verb)

    sidecar.handlers._verbs[m.OpenNamespace] = noted
    number = len(sidecar.core.namespaces())
    many = [bytes([n % 256, n // 256]) * 16 for n in range(padding // 33)]
    requests: list[m.Verb] = [
        m.OpenNamespace(packed_namespace(), [8192]),
        m.MatchPrefix(number, many),
        m.Drop(number),
        m.Ping(),
    ]
    peer.socket.sendall(b"".join(m.pack(m.Request(n, verb)) for n, verb in enumerate(requests, 1)))
    replies = [peer.reply() for _ in requests]
    kinds = {one.number: type(one.answer) for one in replies if one is not None}
    assert kinds == {1: m.Granted, 2: m.Matched, 3: m.Counted, 4: m.Done}
    assert replies[0] is not None and replies[0].number == 1, "nothing overtook it"
    assert opened and not any(name == "kv-local-door" for name in opened)


def test_a_refusal_can_always_be_sent() -> None:
    """Whatever it repeats."""
    for text in ("\udc80" * 5000, "a\nb\x1b[2J", "\0", "\U0001f5dd" * 5000, ""):
        read = reply_in(m.pack(m.Reply(1, m.failed(m.RequestFault.BUSY, text))))
        assert isinstance(read.answer, m.Failed) and read.answer.text.isprintable()
        assert len(read.answer.text) <= m.MAX_TEXT


# What a directory holds -----------------------------------------------------------------------------------------------


def test_a_directory_with_a_namespace_beyond_the_limits_is_served_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As an earlier version granted it: the sidecar starts, says so in one line, and `kvstore stat` works."""
    with monkeypatch.context() as patch:
        patch.setattr(identity, "MAX_WEIGHTS_EPOCH", 1 << 80)
        with Sidecar(tmp_path, nvme="64MiB", indexes=LmdbMaker) as before:
            for epoch in (1 << 70, 3):
                handle = before.store.namespace(model="m" * 40, layout=small_layout(), weights_epoch=epoch)
                assert handle.put(ids(128), random_pages(handle.layout, 2), durability="disk").stored == 2
    with Sidecar(tmp_path, nvme="64MiB", indexes=LmdbMaker) as after:
        assert after.store.warmed(60)
        left_out = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
        assert (len(left_out) == 1 and "71 bits" not in left_out[0]) or "weights_epoch" in left_out[0]
        (space,) = facts_of(after).facts.namespaces
        assert space.weights_epoch == 3
        handle = after.client().namespace(model="m" * 40, layout=small_layout(), weights_epoch=3)
        assert handle.match(ids(128)).blocks == 2


def test_a_tenants_name_that_is_no_text_does_not_end_stat(sidecar: Sidecar) -> None:
    """A key file is written by people too."""
    (keys,) = sidecar.store.keys.by_name().values()
    sidecar.store.keys.by_name = lambda: {"\udc80\x1b[2J": keys}  # type: ignore[method-assign]
    client = sidecar.client()
    client.namespace(model="m" * 40, layout=small_layout())
    (space,) = facts_of(sidecar).facts.namespaces
    assert space.tenant == "[2J"
    msgspec.msgpack.encode(facts_of(sidecar))
