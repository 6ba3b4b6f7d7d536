"""Messages to the sidecar as they should not be: valid ones of every verb, changed by seeded chance.

A valid message is changed at one of three depths: as values (wrong types, wrong counts, numbers out of range, numbers
of others), as MessagePack (bits, cuts, lengths within, invalid text, nesting), as a frame (a length that lies, a cut).
`expected` says from the bytes alone what a sidecar has to do about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from kvstore.block.account import HitTier
from kvstore.protocol import messages as m
from kvstore.protocol.courier import QuestionAnswered
from torture.mutate import mutated, places
from torture.peer import packed_namespace

HUGE = (0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31) - 1, -(2**63))
ODD_FLOATS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324, -1.0)
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class Booty:
    """What an attacker knows: numbers and keys of its own, and of another tenant, who must not notice."""

    namespace: int = 0
    lease: int = 0
    reservation: int = 0
    extent: int = 0
    keys: list[bytes] = field(default_factory=list)
    namespaces_of_others: list[int] = field(default_factory=list)
    leases_of_others: list[int] = field(default_factory=list)
    reservations_of_others: list[int] = field(default_factory=list)
    extents_of_others: list[int] = field(default_factory=list)
    keys_of_others: list[bytes] = field(default_factory=list)
    sessions_of_others: list[bytes] = field(default_factory=list)

    def numbers_of_others(self) -> list[int]:
        """Whatever they name."""
        return self.namespaces_of_others + self.leases_of_others + self.reservations_of_others + self.extents_of_others


def some_keys(random: Random, booty: Booty) -> list[bytes]:
    """Of its own, of others, of nobody."""
    pool = random.choice([booty.keys, booty.keys, booty.keys_of_others, []])
    return pool[: random.randint(0, 6)] + [random.randbytes(32) for _ in range(random.choice([0, 0, 1, 3]))]


def _some(random: Random, mine: int, others: Sequence[int]) -> int:
    return random.choice([mine, mine, *others, mine + 1, 0])


VALID: dict[str, Callable[[Random, Booty], m.Verb]] = {
    "hello": lambda r, b: m.Hello(1, 1, "attacker", r.choice([b"", r.randbytes(16), *b.sessions_of_others])),
    "namespace": lambda r, b: m.OpenNamespace(packed_namespace(), [8192]),
    "match": lambda r, b: m.MatchPrefix(_some(r, b.namespace, b.namespaces_of_others), some_keys(r, b)),
    "lease": lambda r, b: m.LeasePrefix(
        _some(r, b.namespace, b.namespaces_of_others), some_keys(r, b), 0, r.choice([0.0, 5.0]), "request"
    ),
    "attach": lambda r, b: m.Attach([b.lease, *b.leases_of_others]),
    "release": lambda r, b: m.Release([_some(r, b.lease, b.leases_of_others), *b.leases_of_others]),
    "release_request": lambda r, b: m.ReleaseRequest(r.choice(["request", "", "victim"])),
    "report": lambda r, b: m.ReportFrame(_some(r, b.lease, b.leases_of_others), r.randint(0, 3), 0),
    "reserve": lambda r, b: m.Reserve(
        _some(r, b.namespace, b.namespaces_of_others),
        some_keys(r, b),
        0,
        0,
        None,
        r.choice(["", "", "joint", "victim"]),
        r.choice([[], [0], [0, 1], [7]]),
    ),
    "commit": lambda r, b: m.Commit(
        _some(r, b.reservation, b.reservations_of_others),
        0,
        r.choice([0, 0, 1]),
        [[r.randbytes(16)] * 2] * r.randint(0, 2),
    ),
    "abort": lambda r, b: m.Abort(_some(r, b.reservation, b.reservations_of_others)),
    "persist": lambda r, b: m.Persist(_some(r, b.namespace, b.namespaces_of_others), some_keys(r, b), 0.01),
    "extents": lambda r, b: m.Extents([b.extent, *b.extents_of_others], r.random() < 0.5),
    "ping": lambda r, b: m.Ping(r.random() < 0.5),
    "drop": lambda r, b: m.Drop(_some(r, b.namespace, b.namespaces_of_others), 1.0),
    "namespaces": lambda r, b: m.Namespaces(r.choice([0, 0, 1, 1000])),
    "stat": lambda r, b: m.Stat(),
    "drop_any": lambda r, b: m.DropAny("zz-no-digest", r.choice(["", "other", "nobody"]), 0.1),
    "await": lambda r, b: m.Await(
        _some(r, b.namespace, b.namespaces_of_others), some_keys(r, b) or [r.randbytes(32)], 0.01, r.choice([0, 1, 7])
    ),
    "which": lambda r, b: m.Which(_some(r, b.namespace, b.namespaces_of_others), some_keys(r, b)),
    "locate": lambda r, b: m.Locate(_some(r, b.namespace, b.namespaces_of_others), some_keys(r, b)),
    "adopt": lambda r, b: m.Adopt(
        _some(r, b.reservation, b.reservations_of_others), 0, 0, [r.randbytes(4096)], HitTier.PEER
    ),
    "questions": lambda r, b: m.Questions([QuestionAnswered(r.randint(0, 9), 3, HitTier.PEER, 1.0)]),
    "holdings": lambda r, b: m.Holdings(_some(r, b.namespace, b.namespaces_of_others), r.choice([0, 1 << 40])),
    "purge": lambda r, b: m.Purge(r.choice(["", "nobody", "Other", "other ", "no\0body"]), 0.1),
}
"""By verb. Those of the admin socket name nothing that there is: who may ask there may also drop."""

ADMIN = ("hello", "stat", "drop_any", "purge", "ping", "match")
REPLY_TAGS = ("welcome", "granted", "matched", "leased", "done", "failed", "counted", "nonsense", "", "PING")


# Values ---------------------------------------------------------------------------------------------------------------


def _change_value(random: Random, booty: Booty, message: list[Any]) -> None:
    """A number, a verb, an argument, or something within one, for what it should not be."""
    message[:] = mutated(random, message, wire=True)


def _change_alike(random: Random, booty: Booty, message: list[Any]) -> None:
    """A value for another one of its type: what is a message still, and reaches whoever serves it."""
    within, last = random.choice(places(message))
    old = within[last]
    if isinstance(old, bool):
        within[last] = not old
    elif isinstance(old, int):
        within[last] = random.choice(
            [*HUGE, *booty.numbers_of_others(), *booty.numbers_of_others(), random.randrange(9)]
        )
    elif isinstance(old, float):
        within[last] = random.choice([*ODD_FLOATS, 0.0, 0.5, 1e-9])
    elif isinstance(old, str):
        within[last] = random.choice(["", "victim", "x" * 128, "\x00\x1b[2J\u202e", "\U0001f5dd" * 128])
    elif isinstance(old, bytes):
        flipped = bytes([old[0] ^ 1]) + old[1:] if old else b"x"
        within[last] = random.choice([b"", flipped, old[:-1], random.randbytes(len(old)), *booty.keys_of_others[:1]])
    elif isinstance(old, list) and within is not message:
        within[last] = random.choice([[], old[:1], old * 2, old[::-1], old * 50])


def _change_tag(random: Random, booty: Booty, message: list[Any]) -> None:
    message[1][0] = random.choice([*REPLY_TAGS, *VALID])


# MessagePack ----------------------------------------------------------------------------------------------------------


def _flip(random: Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(random.choice([1, 1, 1, 4, 16])):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _lying(random: Random, body: bytes) -> bytes:
    """A count or a length within that says more than there is."""
    at = random.randrange(len(body) + 1)
    lie = random.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + random.choice(
        [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\0\x10\0\0"]
    )
    return body[:at] + lie + body[at + random.choice([0, 1]) :]


def _bad_text(random: Random, body: bytes) -> bytes:
    """Text that is none: continuation bytes alone, a surrogate, an overlong form, cut short."""
    text = random.choice([b"\x80\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x97", b"\xff" * 20])
    return b"\x92\x01\x94\xa5hello\x01\x01" + bytes([0xA0 | len(text)]) + text


def _nested(random: Random, body: bytes) -> bytes:
    """As deep as a message may be long."""
    depth = random.choice([10, 1000, 100_000, m.MAX_BODY_BYTES - 64])
    opened = random.choice([b"\x91", b"\x81\xa1a", b"\xdc\0\x01"])
    return random.choice([b"\x93\x01\x91\xa4ping", b"\x92\x01", b""]) + opened * (depth // len(opened)) + b"\x01"


def _twice(random: Random, body: bytes) -> bytes:
    """A map where an array should be, with a key that is there twice."""
    return random.choice(
        [b"\x83\xa6number\x01\xa6number\x02\xa4verb\x91\xa4ping", b"\x92\x01\x82\xa4type\xa4ping\xa4type\xa5match"]
    )


def _large(random: Random, body: bytes) -> bytes:
    """As long as may be, and not worth it."""
    keys = random.choice([m.MAX_KEYS, m.MAX_KEYS + 1, 66_000])
    return random.choice(
        [
            lambda: _encode([1, ["match", 0, [random.randbytes(32)] * min(keys, 30_000)]]),
            lambda: _encode([1, ["match", 0, [b""] * keys]]),
            lambda: _encode([1, ["commit", 1, 0, [[b""] * 60] * 8192]]),
            lambda: _encode([1, ["commit", 1, 0, [[bytes(16)] * 1024] * 55]]),
            lambda: _encode([1, ["release", list(range(2**40, 2**40 + 4096))]]),
            lambda: _encode([1, ["attach", [0] * 4097]]),
            lambda: _encode([1, ["ping", bytes(m.MAX_BODY_BYTES - 32)]]),
            lambda: _encode([1, ["namespace", b"[" * (m.MAX_BODY_BYTES - 64), [1]]]),
            lambda: _encode([1, ["release_request", "x" * (m.MAX_BODY_BYTES - 64)]]),
        ]
    )()


# Frames ---------------------------------------------------------------------------------------------------------------


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(m.LENGTH_BYTES, "little") + body


def _lying_frame(random: Random, body: bytes) -> bytes:
    size = random.choice(
        [0, len(body) - 1, len(body) + 1, m.MAX_BODY_BYTES, m.MAX_BODY_BYTES + 1, 2**31, 2**32 - 1, len(body) + 1000]
    )
    return max(0, size).to_bytes(m.LENGTH_BYTES, "little") + body


def _cut_frame(random: Random, body: bytes) -> bytes:
    frame = _framed(body)
    return frame[: random.choice([0, 1, 2, 3, 4, 5, len(frame) - 1, random.randrange(len(frame))])]


_VALUES: dict[str, Callable[[Random, Booty, list[Any]], None]] = {
    "values": _change_value,
    "alike": _change_alike,
    "verbs": _change_tag,
    "as they are": lambda random, booty, message: None,
}
_BODIES: dict[str, Callable[[Random, bytes], bytes]] = {
    "bits": _flip,
    "cuts": lambda random, body: body[: random.randrange(len(body) + 1)],
    "more": lambda random, body: body + random.choice([b"\0", random.randbytes(9), body, b"\xc1"]),
    "lengths within": _lying,
    "text": _bad_text,
    "nesting": _nested,
    "twice": _twice,
    "large": _large,
    "noise": lambda random, body: random.randbytes(random.choice([0, 1, 7, 64, 4000])),
}
_FRAMES: dict[str, Callable[[Random, bytes], bytes]] = {"lengths": _lying_frame, "cut frames": _cut_frame}
KINDS = (*_VALUES, *_BODIES, *_FRAMES)
OFTEN = (*KINDS, *["alike"] * 10, *["as they are"] * 4)
"""What is no message ends its connection; so that others are served as well, most are messages."""


def attack(random: Random, booty: Booty, kind: str, verbs: Sequence[str]) -> bytes:
    """One message of that kind, as it goes out."""
    verb = VALID[random.choice(verbs)](random, booty)
    message = [random.randint(1, 1 << 30), msgspec.to_builtins(verb, builtin_types=(bytes,))]
    if kind in _VALUES:
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            _VALUES[kind](random, booty, message)
            if len(message) < 2 or not isinstance(message[1], list) or not message[1]:  # no verb is left
                break
    body = _encode(message)
    if kind in _BODIES:
        body = _BODIES[kind](random, body)
    return _FRAMES[kind](random, body) if kind in _FRAMES else _framed(body)


# What has to come of it -----------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """numbers: of requests that are answered, in any order. ends, refused: whether the connection is ended after them,
    for what is no message, or for a hello that cannot be served."""

    numbers: list[int] = field(default_factory=list)
    ends: bool = False
    refused: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nothing that comes after it is read."""
        return self.ends or self.refused


def expected(stream: bytes, is_greeted: bool) -> Expected:
    """From the bytes that a connection sends, by the rules of `messages`."""
    done, at = Expected(), 0
    while len(stream) - at >= m.LENGTH_BYTES:
        length = int.from_bytes(stream[at : at + m.LENGTH_BYTES], "little")
        if length > m.MAX_BODY_BYTES:
            done.ends = True
            return done
        at += m.LENGTH_BYTES
        if len(stream) - at < length:
            return done
        try:
            request = m.unpack_request(stream[at : at + length])
        except ValueError:
            done.ends = True
            return done
        at += length
        verb = request.verb
        if isinstance(verb, m.Hello) is is_greeted:
            done.ends = True
            return done
        done.numbers.append(request.number)
        if isinstance(verb, m.Hello):
            is_in_range = verb.oldest <= m.NEWEST_VERSION and verb.newest >= m.OLDEST_VERSION
            is_in_range = is_in_range and verb.oldest <= verb.newest
            if not is_in_range or (verb.session and not 16 <= len(verb.session) <= 64):
                done.refused = True
                return done
            is_greeted = True
    return done
