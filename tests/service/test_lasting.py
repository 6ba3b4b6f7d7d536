"""How many objects a search for cycles walks while a client opens one wide namespace after the other."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvstore.service.accounting import SET_ASIDE_PARTS, Lasting


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


class Part:
    """Stands for what is made of one."""


def test_parts_that_were_opened_are_walked_once() -> None:
    lasting = Lasting()
    gc.collect()
    gc.freeze()
    kept, walked = [], []
    for _ in range(20):
        kept += [Part() for _ in range(SET_ASIDE_PARTS // 4)]
        lasting.opened(SET_ASIDE_PARTS // 4)
        walked.append(sum(isinstance(one, Part) for one in gc.get_objects()))
    assert max(walked) < SET_ASIDE_PARTS and walked[3] == walked[-1] == 0
    assert len(kept) == 5 * SET_ASIDE_PARTS


def test_what_nobody_needs_goes_before_the_rest_is_set_aside() -> None:
    gone: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.append(1)

    gc.disable()
    try:
        Cycle()
        Lasting().opened(SET_ASIDE_PARTS)
    finally:
        gc.enable()
    assert gone == [1]
