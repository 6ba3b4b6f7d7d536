"""The table of kinds of tests agrees with the tree, and what it calls pure is."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentTypeError
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_single_test_is_marked_slow_and_nothing_else() -> None:
    """By its other kinds a file is read or left: a test that differs from its file in one of them would run never."""
    marks = re.compile(
        rf"^ *@pytest\.mark\.({'|'.join((kinds.PURE, kinds.DRAWN, kinds.PROCESS, kinds.ALONE))})\b", re.MULTILINE
    )
    texts = {path: (kinds.TESTS / path).read_text() for path in files_of_tests()}
    assert {path: found for path, text in texts.items() if (found := marks.findall(text))} == {}


def test_the_parts_of_all_tests_have_no_test_in_common() -> None:
    """Those of files that are read alone come in a part of their own (`test-rest` of the Makefile)."""
    kernels = re.search(r"^KERNEL_TESTS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert kernels is not None
    folders = [path.removeprefix("tests/") for path in kernels[1].replace("\\\n", " ").split()]
    assert len(folders) > 3 and all((kinds.TESTS / folder).exists() for folder in folders)
    alone = [path for path in files_of_tests() if path.startswith(kinds.ALONE_FILES)]
    assert [path for path in alone if kinds.PROCESS not in kinds.marks_of(path)] == []
    assert [path for path in alone if path.startswith(tuple(folders))] == []


@pytest.mark.parametrize(
    ("expression", "read", "unread"),
    [
        ("not slow and not alone", "kvstore/test_store.py test_house.py", "model/test_room.py test_files_passed.py"),
        ("alone and not slow", "test_files_passed.py", "test_house.py kvstore/test_store.py demo/test_demo.py"),
        ("pure", "test_house.py tiering/test_slab.py", "kvstore/test_store.py contract/test_tier.py"),
        ("drawn", "contract/test_tier.py model/test_room.py", "test_house.py test_files_passed.py"),
        ("slow", "model/test_room.py kvstore/test_store.py", ""),
        ("process", "kvstore/test_store.py engines/test_vllm.py", "test_house.py"),
    ],
)
def test_files_of_which_no_test_is_wanted_are_not_read(expression: str, read: str, unread: str) -> None:
    """A single test may be slow in any file."""
    wanted = Expression.compile(expression).evaluate
    assert [path for path in read.split() if not kinds.may_want(path, wanted)] == []
    assert [path for path in unread.split() if kinds.may_want(path, wanted)] == []
    assert set(read.split() + unread.split()) <= set(files_of_tests())


@given(st.lists(st.text(), unique=True), st.integers(1, 9))
def test_shares_have_each_test_once(names: list[str], shares: int) -> None:
    parts = [[name for name in names if kinds.Share(number + 1, shares).has(name)] for number in range(shares)]
    assert sorted(name for part in parts for name in part) == sorted(names)


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/", "/4", "-1/4", "a/b", "1/4/4"])
def test_a_share_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="K/N"):
        kinds.Share.read(text)
