"""The book of questions: each is asked once at a time, answered or over, and no table grows without bound."""

from __future__ import annotations

import random
import secrets
from itertools import count
from math import inf, nan

import pytest

from kvstore.block.account import HitTier, MissReason
from kvstore.elsewhere.questions import (
    MOST_KEY_BYTES,
    MOST_PLACES,
    MOST_QUESTIONS,
    PLACE_SECONDS,
    REPLY_BYTES,
    OpenQuestion,
    TenantQuestions,
)
from kvstore.protocol import courier as c
from kvstore.protocol.messages import MAX_KEYS

KEYS = [secrets.token_bytes(32) for _ in range(8)]


def locate(book: TenantQuestions, keys: list[bytes] = KEYS, present: int = 0, until: float = inf) -> OpenQuestion:
    one = OpenQuestion(c.LocateQuestion(book.number(), 0, keys, present), None, until)
    assert book.add(one)
    return one


def fetch(book: TenantQuestions) -> OpenQuestion:
    one = OpenQuestion(c.FetchQuestion(book.number(), 1, 0, KEYS, 0, 1.0), None)
    assert book.add(one)
    return one


def with_courier(*couriers: str) -> TenantQuestions:
    book = TenantQuestions(count(1))
    for one in couriers:
        assert book.take(one) == c.QuestionsReply()
    return book


def test_questions_and_their_keys_are_bounded() -> None:
    book = with_courier("a")
    for _ in range(MOST_QUESTIONS):
        locate(book)
    assert not book.add(OpenQuestion(c.Forget(book.number(), b""), None))
    book.check()
    book, many = with_courier("a"), [secrets.token_bytes(32)] * MAX_KEYS
    for _ in range(MOST_KEY_BYTES // (32 * MAX_KEYS)):
        locate(book, many)
    assert not book.add(OpenQuestion(c.LocateQuestion(book.number(), 0, KEYS, 0), None))
    handed = 0
    while True:
        reply = book.take("a")
        handed += len(reply.locates)
        assert 32 * sum(len(one.keys) for one in reply.locates) < REPLY_BYTES + 32 * MAX_KEYS
        if not reply.more:
            break
    assert handed == MOST_KEY_BYTES // (32 * MAX_KEYS)
    book.check()


def test_places_are_kept_for_some_seconds_and_bounded() -> None:
    book = with_courier("a")
    numbers = []
    for _ in range(MOST_PLACES + 5):
        one = locate(book)
        answer = c.QuestionAnswered(one.ask.number, 6, HitTier.PEER, 2.0, "node-b")
        located = book.locate(one.ask, answer, 100.0)  # type: ignore[arg-type]
        assert (located.number, located.blocks, located.tier, located.where) == (
            one.ask.number,
            6,
            HitTier.PEER,
            "node-b",
        )
        numbers.append(located.number)
        book.take("a")
        book.answered("a", answer)
    book.check()
    assert book.place(numbers[4], 0, 100.0) is None and book.place(numbers[5], 0, 100.0) is not None
    assert book.place(numbers[-1], 1, 100.0) is None, "of another namespace"
    assert book.place(numbers[-1], 0, 100.0 + PLACE_SECONDS) is None
    book.forget()
    assert book.place(numbers[-1], 0, 100.0) is None


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        (c.QuestionAnswered(1, 1 << 62, HitTier.REMOTE, 1.0), len(KEYS)),  # more than there are
        (c.QuestionAnswered(1, 6, HitTier.DRAM, 1.0), 2),  # no tier of a courier's
        (c.QuestionAnswered(1, 6), 2),
        (c.QuestionAnswered(1, 2, HitTier.PEER), 2),  # no more than there are here
        (c.QuestionAnswered(1, 0, reason=MissReason.STALE_HINT), 2),
        (None, 2),
    ],
)
def test_what_a_courier_says_is_bounded(answer: c.QuestionAnswered | None, blocks: int) -> None:
    located = with_courier("a").locate(c.LocateQuestion(1, 0, KEYS, 2), answer, 0.0)
    assert located.blocks == blocks and bool(located.number) == (blocks > 2)


@pytest.mark.parametrize("milliseconds", [nan, -1.0, inf, -inf])
def test_times_that_are_none_are_not_known(milliseconds: float) -> None:
    answer = c.QuestionAnswered(1, 4, HitTier.PEER, milliseconds)
    assert with_courier("a").locate(c.LocateQuestion(1, 0, KEYS, 2), answer, 0.0).milliseconds == inf


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_tables_agree(seed: int) -> None:
    print(f"seed {seed}")
    chance, book = random.Random(seed), TenantQuestions(count(1))
    book.take("a")
    ended: set[int] = set()
    added: dict[int, OpenQuestion] = {}
    now = 0.0
    for _ in range(600):
        what, courier = chance.randrange(8), chance.choice("abc")
        if what < 3 and book.courier is not None:
            one = locate(book, until=now + 5) if what == 0 else fetch(book)
            added[one.ask.number] = one
        elif what == 3:
            book.take(courier)
        elif what == 4 and added:
            one = book.answered(courier, c.QuestionAnswered(chance.choice(list(added)), chance.randrange(9)))
            assert one is None or one.ask.number not in ended, "each ends once"
            ended |= {one.ask.number} if one is not None else set()
        elif what == 5 and added:
            one = chance.choice(list(added.values()))
            book.no_more(one)
        elif what == 6:
            now += chance.choice([1.0, 3.0])
            ended |= {one.ask.number for one in book.expire(now)}
        elif what == 7 and chance.random() < 0.2:
            gone = {one.ask.number for one in book.left(courier)}
            assert not gone & ended
            ended |= gone
        book.check()
