"""Every sync of the NVMe tier is there for a reason: without it a disk that loses power breaks a promise.

The sources of the tier and its parts are taken as they are, one call of `sync` is left out, and what is left lives on
the simulated disk until it is found out. The same for the order of its steps. With nothing left out the same lives find
nothing.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tiering.nvme.group_commit
import tiering.nvme.index_records
import tiering.nvme.slab_recovery
import tiering.nvme.tier
from simulation.power import PowerLoss
from simulation.test_nvme_power import Life
from tiering.nvme.tier import NvmeTier

SOURCES = {
    module.__name__: Path(module.__file__).read_text()
    for module in (
        tiering.nvme.index_records,
        tiering.nvme.group_commit,
        tiering.nvme.slab_recovery,
        tiering.nvme.tier,
    )
}
"""By module, each behind those that it imports."""
MOST_LIVES = 400
"""A fault that none of so many lives of each kind finds is not found."""

ORDERS = {
    "the index is synced before the batch is in it": (
        "self._apply(changes)\n            self._index.sync()",
        "self._index.sync()\n            self._apply(changes)",
    ),
    "a frame is written where nothing says so": ("self.join(BatchRequest(doubts=doubts))", "pass"),
    "a place that is given up is not in doubt": ("for place in (*doubts, *forgotten)]", "for place in doubts]"),
    "a doubt goes before the zeros are durable": ("for place in (*committed, *voided)})", "for place in committed})"),
    "the end is stamped before it is there": (
        "self._commits.finish()\n            self.session.end(clean=",
        "self.session.end(clean=True)\n            self._commits.settle()\n            bool(",
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
                self.work(4)
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


def made_of(trees: Mapping[str, ast.Module]) -> Callable[..., NvmeTier]:
    """The tier of other sources: each module imports those made before it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, tree in trees.items():
            module: Any = types.ModuleType(name)
            patch.setitem(sys.modules, name, module)  # for those that import it; dataclasses look there too
            exec(compile(ast.fix_missing_locations(tree), f"{name} with a fault", "exec"), module.__dict__)
    tier: Callable[..., NvmeTier] = module.NvmeTier
    return tier


def parsed(sources: Mapping[str, str] = SOURCES) -> dict[str, ast.Module]:
    return {name: ast.parse(source) for name, source in sources.items()}


def without(name: str, number: int) -> Callable[..., NvmeTier]:
    """The tier without the `number`-th sync of a module."""
    trees = parsed()
    left_out = syncs(trees[name])[number]

    class LeaveOut(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            return ast.copy_location(ast.Pass(), node) if node is left_out else node

    return made_of({**trees, name: LeaveOut().visit(trees[name])})


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
    names = []
    for name, tree in parsed().items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for number, statement in enumerate(syncs(tree)):
            around = [one.name for one in functions if one.lineno <= statement.lineno <= (one.end_lineno or 0)]
            names.append(pytest.param(name, number, id=f"{ast.unparse(statement)} in {around[-1]}"))
    return names


@pytest.mark.slow
def test_with_nothing_left_out_nothing_is_found() -> None:
    make = made_of(parsed())
    for seed in range(200):
        EarlyLife(seed, make).run()
    for seed in range(10):
        Life(seed, make).run()


@pytest.mark.parametrize(("name", "number"), names_of_syncs())
def test_without_this_sync_a_promise_is_broken(name: str, number: int) -> None:
    lives, found = lives_until_found(without(name, number))
    print(f"seed {lives - 1}: {found}")


@pytest.mark.parametrize("order", ORDERS)
def test_in_another_order_a_promise_is_broken(order: str) -> None:
    before, after = ORDERS[order]
    places = [name for name, source in SOURCES.items() for _ in range(source.count(before))]
    assert len(places) == 1, f"the sources have changed, and {before!r} with them: say here what stands there now"
    changed = {name: source.replace(before, after) for name, source in SOURCES.items()}
    lives, found = lives_until_found(made_of(parsed(changed)))
    print(f"seed {lives - 1}: {found}")
