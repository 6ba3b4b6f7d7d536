"""Values as they should not be, in structures that are right around them: what a parser behind a checksum gets to see.

A structure of plain values (numbers, text, bytes, lists, maps) is changed at one to three places, at any depth: for a
value of the same type at the edges of what may be, for one of another type, cut, repeated, left out, nested.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

EDGES = (0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 1 << 15, 1 << 16, (1 << 22), 1 << 24, 1 << 31)
WIDE = (
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    1 << 53,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 64) - 1,
)
HUGE = (1 << 64, 1 << 70, -(1 << 64), 10**300, 10**3999)
FLOATS = (0.0, -0.0, 0.5, -1.0, 1e-300, 5e-324, 1e18, 1e308, float("inf"), -float("inf"), float("nan"))
TEXTS = ("", "x", "\0", "\ud800", "\udfff\ud800", "\x1b[2J", "\u202e", "\U0001f5dd", "../../x", "~", "NaN", "é" * 70)
BYTES = (b"", b"\0", b"\xff", bytes(16), bytes(31), bytes(32), bytes(33), bytes(100), b"\xed\xa0\x80")
MOST_AT_ONCE = 3


def mutated(random: Random, value: Any, wire: bool = False) -> Any:
    """A copy with changes. wire: integers have 64 bits and text is UTF-8, so that MessagePack can hold it."""
    copy = _copy(value)
    for _ in range(random.choice((1, 1, 1, 2, MOST_AT_ONCE))):
        found = places(copy)
        if not found:  # nothing is left within
            return copy
        within, key = random.choice(found)
        if (isinstance(within, list) and key >= len(within)) or (isinstance(within, dict) and key not in within):
            continue  # an earlier change took it away
        _change(random, within, key, wire)
    return copy


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list | tuple) else value


def places(value: Any, most: int = 400) -> list[tuple[Any, Any]]:
    """Every value within, as its container and its key there."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left and len(found) < most:
        one = left.pop()
        if isinstance(one, list | dict):
            keys = range(len(one)) if isinstance(one, list) else list(one)
            found += [(one, key) for key in keys]
            left += [one[key] for key in keys]
    return found


def _change(random: Random, within: Any, key: Any, wire: bool) -> None:
    what = random.random()
    if what < 0.06:
        del within[key]
    elif what < 0.12 and isinstance(within, list):
        within.insert(key, odd(random, within[key], wire))
    elif what < 0.18 and isinstance(within, dict):
        within[_text(random, wire)] = within[key] if what < 0.15 else within.pop(key)
    elif what < 0.24 and isinstance(within[key], list):
        within[key] = within[key] * random.choice((0, 2, 3, 50, 1000 // max(1, len(within[key]))))
    elif what < 0.28 and isinstance(within, list):
        random.shuffle(within)
    else:
        within[key] = odd(random, within[key], wire)


def odd(random: Random, old: Any, wire: bool) -> Any:
    """In place of another value: mostly of its type, so that it gets as far as that."""
    if random.random() < 0.3:
        old = random.choice((0, 0.0, "", b"", True, None, [], {}))
    if old is None or isinstance(old, bool):
        return random.choice((None, True, False))
    if isinstance(old, int):
        near = old + random.choice((-1, 1)) if abs(old) < 1 << 62 else old // 2
        return random.choice((near, old * 2 if abs(old) < 1 << 62 else 0, *EDGES, *WIDE, *(() if wire else HUGE)))
    if isinstance(old, float):
        return random.choice((old * 2, -old, *FLOATS))
    if isinstance(old, str):
        return random.choice((old + old, old[:-1], old.upper(), _text(random, wire), _text(random, wire)))
    if isinstance(old, bytes):
        flipped = bytes([old[0] ^ 1 << random.randrange(8)]) + old[1:] if old else b"x"
        return random.choice((flipped, old[:-1], old + b"\0", random.randbytes(len(old)), *BYTES))
    return nested(random) if random.random() < 0.2 else random.choice(([], {}, [old], [0] * 300, {"a": old}))


def _text(random: Random, wire: bool) -> str:
    text = random.choice(TEXTS)
    if random.random() < 0.1:
        text = (text or "x") * random.choice((100, 257, 5000))
    return text.encode("utf-8", "replace").decode() if wire else text


def nested(random: Random) -> list[Any]:
    """A list in a list, and so on."""
    value: list[Any] = []
    for _ in range(random.choice((3, 30, 60))):
        value = [value]
    return value


def as_json(random: Random, value: Any) -> str:
    """The text of it, which now and then is no JSON."""
    text = json.dumps(_without_bytes(value), ensure_ascii=random.random() < 0.7)
    if random.random() < 0.05:
        text = random.choice(_SPOILED)(random, text)
    return text


def _without_bytes(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _without_bytes(one) for key, one in value.items()}
    return [_without_bytes(one) for one in value] if isinstance(value, list) else value


_SPOILED: tuple[Callable[[Random, str], str], ...] = (
    lambda random, text: text[: random.randrange(len(text) + 1)],
    lambda random, text: text + random.choice("]}x0 \0"),
    lambda random, text: random.choice("[{") * random.choice((10, 2000, 60_000)),
    lambda random, text: text.replace("1", random.choice(("1e999", "1" * 5000, "-", "NaN", "01")), 1),
    lambda random, text: text.replace('"', random.choice(("'", '"\\ud800', '"\\x', "")), 1),
)


def invalid_pages(random: Random, raw: bytes) -> bytes:
    """Bytes with a flip, a cut, or something behind them."""
    how = random.randrange(4)
    if how == 0 and raw:
        at = random.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << random.randrange(8)]) + raw[at + 1 :]
    if how == 1:
        return raw[: random.randrange(len(raw) + 1)]
    return (
        raw + random.choice((b"\0", raw, random.randbytes(9))) if how == 2 else random.randbytes(random.randrange(60))
    )
