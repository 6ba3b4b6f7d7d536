"""The table of kinds of tests agrees with the tree, and what it calls pure is."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import kinds

ROOT = kinds.TESTS.parent
HEAVY = {"torch", "triton", "transformers"}
STARTS_PROCESSES = {"subprocess", "multiprocessing"}


def files_of_tests() -> list[str]:
    return sorted(path.relative_to(kinds.TESTS).as_posix() for path in kinds.TESTS.rglob("test_*.py"))


@cache
def source_of(module: str) -> Path | None:
    for folder in (ROOT, ROOT / "kernels", kinds.TESTS):
        path = folder.joinpath(*module.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.exists():
                return found
    return None


@cache
def imported_by(path: Path) -> frozenset[str]:
    """What a file imports when it is imported itself, first-party modules and others."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(path.read_bytes()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Try):
            waiting += node.body
    return frozenset(found)


def brought_along(path: Path) -> set[str]:
    """The top-level packages that importing a file brings along, by whatever way."""
    seen, waiting, packages = set[Path](), [path], set[str]()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        for module in imported_by(one):
            packages.add(module.partition(".")[0])
            parts = module.split(".")
            sources = [source_of(".".join(parts[:count])) for count in range(1, len(parts) + 1)]
            waiting += [source for source in sources if source is not None]
    return packages


@pytest.mark.parametrize("path", sorted(kinds.PURE_FILES))
def test_a_pure_file_imports_no_heavy_package(path: str) -> None:
    assert brought_along(kinds.TESTS / path) & HEAVY == set()
    assert not imported_by(kinds.TESTS / path) & STARTS_PROCESSES


def test_the_table_names_what_is_there() -> None:
    there = files_of_tests()
    assert sorted(kinds.PURE_FILES - set(there)) == []
    for table in (kinds.DRAWN_FILES, kinds.SLOW_FILES, kinds.ALONE_FILES):
        assert [one for one in table if not any(path.startswith(one) for path in there)] == []


def test_each_file_is_of_one_kind() -> None:
    both = [path for path in kinds.PURE_FILES if path.startswith(kinds.DRAWN_FILES)]
    assert both == [], "a file is pure or drawn"
