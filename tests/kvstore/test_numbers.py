"""Numbers that cross to tenants: each once, none of them 0, and how far two are apart says nothing of their counts."""

from __future__ import annotations

from threading import Thread

import pytest

from kvstore.block.identity import NUMBER_KEY_BYTES, Numbers

KEY = bytes(range(NUMBER_KEY_BYTES))


@pytest.mark.parametrize("bits", [2, 4, 8, 12, 16])
def test_each_count_has_a_number_of_its_own(bits: int) -> None:
    numbers = Numbers(KEY, bits)
    assert sorted(numbers.of(count) for count in range(1 << bits)) == list(range(1 << bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_further_ones_are_above_the_first(bits: int) -> None:
    numbers = Numbers(KEY, bits)
    further = [numbers.of(count) for count in range(1 << bits, 3 << bits)]
    assert sorted(further) == list(range(1 << bits, 3 << bits))
    assert all(number >> bits == count >> bits for count, number in enumerate(further, 1 << bits))


@pytest.mark.parametrize("seed", range(16))
def test_none_is_left_out_but_0(seed: int) -> None:
    numbers = Numbers(bytes([seed] * NUMBER_KEY_BYTES), 6)
    assert sorted(numbers() for _ in range(63)) == list(range(1, 64))
    assert numbers() > 63


@pytest.mark.parametrize("bits", [24, 38, 64])
def test_they_are_of_as_many_bits(bits: int) -> None:
    numbers = Numbers(KEY, bits)
    drawn = [numbers() for _ in range(1000)]
    assert len(set(drawn)) == 1000 and 1 << bits - 2 < max(drawn) < 1 << bits


def test_another_key_makes_others() -> None:
    for at in range(NUMBER_KEY_BYTES):
        other = bytearray(KEY)
        other[at] ^= 1
        here, there = Numbers(KEY, 64), Numbers(bytes(other), 64)
        assert not {here() for _ in range(100)} & {there() for _ in range(100)}


def test_the_same_key_makes_the_same() -> None:
    assert [Numbers(KEY, 38).of(count) for count in range(9)] == [Numbers(KEY, 38).of(count) for count in range(9)]


@pytest.mark.parametrize("bits", [24, 38, 64])
def test_how_far_two_are_apart_says_nothing_of_what_lies_between(bits: int) -> None:
    """The sign and the size of a difference are the same whether 0, 1, 10 or 100 others came in between. 4,000 samples
    each: a share of a half is off by more than 0.04 once in 10**6 times, and the keys are given."""
    numbers = Numbers(KEY, bits)
    for others in (0, 1, 10, 100):
        pairs = [(numbers.of(at), numbers.of(at + 1 + others)) for at in range(0, 4000 * 128, 128)]
        rises = sum(two > one for one, two in pairs)
        # |x - y| of two that are drawn at random is below 1 - sqrt(1/2) of the range half of the time.
        near = sum(abs(two - one) < (1 - 0.5**0.5) * (1 << bits) for one, two in pairs)
        odd = sum((one ^ two) & 1 for one, two in pairs)
        high = sum((one ^ two) >> bits - 1 for one, two in pairs)
        assert all(abs(share / len(pairs) - 0.5) < 0.04 for share in (rises, near, odd, high)), (others, rises, near)


def test_threads_never_draw_the_same() -> None:
    numbers = Numbers(KEY, 64)
    drawn: list[list[int]] = [[] for _ in range(4)]
    threads = [Thread(target=lambda mine=mine: mine.extend(numbers() for _ in range(2000))) for mine in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number for mine in drawn for number in mine}) == 8000
