"""What a search for cycles walks while a client opens wide namespaces."""

from __future__ import annotations

import gc

import pytest

from kvstore.service import dispatch
from service.sidecar import Sidecar
from workbench import small_layout


class Cycle:
    """Garbage that only a search finds."""

    def __init__(self, gone: list[int]) -> None:
        self.itself, self.gone = self, gone

    def __del__(self) -> None:
        self.gone.append(1)


def test_what_is_there_when_many_parts_were_opened_is_walked_no_more_and_garbage_goes(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "SET_ASIDE_PARTS", 4)
    gone: list[int] = []
    lasting = [object()]
    gc.disable()
    try:
        Cycle(gone)
        for model, is_set_aside in (("a", False), ("b", True)):
            with sidecar.opened(model=model, layout=small_layout(head_shards=2)):
                assert any(one is lasting for one in gc.get_objects()) is not is_set_aside
                assert bool(gone) is is_set_aside
    finally:
        gc.enable()
        gc.unfreeze()
