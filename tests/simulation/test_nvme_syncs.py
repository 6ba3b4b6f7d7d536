"""Every sync of the NVMe tier is there for a reason: without it a disk that loses power breaks a promise.

The tier's source is taken as it is, one call of `sync` is left out, and what is left lives on the simulated disk until
it is found out. The same for the order of its steps. With nothing left out the same lives find nothing.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiering.nvme.tier
from simulation.power import PowerLoss
from simulation.test_nvme_power import Life
from tiering.nvme.tier import NvmeTier

SOURCE = Path(tiering.nvme.tier.__file__).read_text()
MOST_LIVES = 400
"""A fault that none of so many lives of each kind finds is not found."""

ORDERS = {
    "the index is synced before the batch is in it": (
        "self._apply(changes)\n                self._index.sync()",
        "self._index.sync()\n                self._apply(changes)",
    ),
    "a frame is written where nothing says so": ("self._settle(_Request(doubts=doubts))", "pass"),
    "a place that is given up is not in doubt": ("for place in (*doubts, *forgotten)]", "for place in doubts]"),
    "a doubt goes before the zeros are durable": ("for place in (*committed, *voided)})", "for place in committed})"),
    "the end is stamped before it is there": (
        "while self._is_unsettled():\n                self.settle()\n            self._write_stamp(clean=",
        "self._write_stamp(clean=True)\n            self.settle()\n            bool(",
    ),
}
"""What is done in another order, or not at all: a piece of the source, and what stands there instead."""


class EarlyLife(Life):
    """The power goes soon, again and again: at starts, and while slabs are made."""

    def run(self) -> None:
        for _ in range(3):
            self.start()
            self.machine.power.back(last=self.random.randrange(1, 25))
            try:
                for _ in range(4):
                    self.step()
                self.machine.stop()
                self.forget_what_settled()
            except PowerLoss:
                self.machine.lose_power(self.random)


def syncs(tree: ast.Module) -> list[ast.Expr]:
    """The statements that call `sync` and do nothing else, in the order of the source."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_sync(node.value)]
    calls = [node for node in ast.walk(tree) if _is_sync(node)]
    assert len(calls) == len(statements), "a sync whose result is used cannot be left out as a statement"
    return sorted(statements, key=lambda statement: statement.lineno)


def _is_sync(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sync"


def made_of(tree: ast.Module) -> Callable[..., NvmeTier]:
    """The tier of another source."""
    module: Any = types.ModuleType("tiering.nvme_with_a_fault")
    sys.modules[module.__name__] = module  # dataclasses look there
    try:
        exec(compile(ast.fix_missing_locations(tree), "nvme.py with a fault", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    tier: Callable[..., NvmeTier] = module.NvmeTier
    return tier


def without(number: int) -> Callable[..., NvmeTier]:
    """The tier without its `number`-th sync."""
    tree = ast.parse(SOURCE)
    left_out = syncs(tree)[number]

    class LeaveOut(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if node is left_out else node

    return made_of(LeaveOut().visit(tree))


def lives_until_found(make: Callable[..., NvmeTier]) -> tuple[int, str]:
    """How many lives of the longer kind it took, and what was found."""
    for seed in range(MOST_LIVES):
        try:
            for early in range(10 * seed, 10 * seed + 10):
                EarlyLife(early, make).run()
            Life(seed, make).run()
        except AssertionError as found:
            return seed + 1, str(found)
    raise AssertionError(f"{MOST_LIVES} lives found nothing")


def names_of_syncs() -> list[Any]:
    tree = ast.parse(SOURCE)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        pytest.param(
            number,
            id=f"{ast.unparse(statement)} in "
            + [one.name for one in functions if one.lineno <= statement.lineno <= (one.end_lineno or 0)][-1],
        )
        for number, statement in enumerate(syncs(tree))
    ]


@pytest.mark.slow
def test_with_nothing_left_out_nothing_is_found() -> None:
    make = made_of(ast.parse(SOURCE))
    for seed in range(200):
        EarlyLife(seed, make).run()
    for seed in range(10):
        Life(seed, make).run()


@pytest.mark.parametrize("number", names_of_syncs())
def test_without_this_sync_a_promise_is_broken(number: int) -> None:
    lives, found = lives_until_found(without(number))
    print(f"seed {lives - 1}: {found}")


@pytest.mark.parametrize("order", ORDERS)
def test_in_another_order_a_promise_is_broken(order: str) -> None:
    before, after = ORDERS[order]
    assert SOURCE.count(before) == 1, f"the source has changed, and {before!r} with it: say here what stands there now"
    lives, found = lives_until_found(made_of(ast.parse(SOURCE.replace(before, after))))
    print(f"seed {lives - 1}: {found}")
