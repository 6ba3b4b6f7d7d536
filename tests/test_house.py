"""The house's proportions: each figure is today's, may fall and must not rise. `-s` prints the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from house import House
from wrong_values import every_setting

ROOT = Path(__file__).resolve().parent.parent

MOST_FLOORS = 13
MOST_LINES = dict(line.split() for line in (ROOT / "tests" / "lines.txt").read_text().splitlines())
"""Of the product, and of the tests. A change may lower both numbers; it raises neither."""
MOST_FILES, MOST_KERNEL_FILES, MOST_FLAT_FILES = 15, 24, 6
MOST_LINES_A_FILE = 900
MOST_PARAMETERS = 7
MOST_WIDE_CONSTRUCTORS = 0
"""Constructors that take more."""
MOST_BROAD_HANDLERS = 12
"""Each at a boundary: an adapter's, a thread's that serves others, foreign code's; or it hands the error on to the
thread that waits for it."""
MOST_SETTINGS = 73


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def test_rooms_stand_on_floors_and_import_down(house: House) -> None:
    assert house.circle() == [], "these import each other in a circle"
    print("\n" + house.drawn())
    assert max(house.floors.values()) <= MOST_FLOORS


def test_the_house_does_not_grow(house: House) -> None:
    product = house.lines()
    tests = [len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")]
    print(f"product {sum(product.values())}, tests {sum(tests)}")
    assert sum(product.values()) <= int(MOST_LINES["product"])
    assert sum(tests) <= int(MOST_LINES["tests"])


def test_no_folder_is_crowded(house: House) -> None:
    folders = house.folders()
    assert folders.pop("kernels/kv_kernels") <= MOST_KERNEL_FILES
    assert folders.pop("kvstore") <= MOST_FLAT_FILES
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_no_file_grows_too_long(house: House) -> None:
    assert {path: count for path, count in house.lines().items() if count > MOST_LINES_A_FILE} == {}, "split them"


def test_constructors_take_few_parameters(house: House) -> None:
    found = house.wide_constructors(MOST_PARAMETERS)
    assert len(found) <= MOST_WIDE_CONSTRUCTORS, found


def test_a_protocol_has_two_implementers(house: House) -> None:
    assert house.lone_protocols() == {}


def test_an_implementer_counts_whoever_else_has_its_name(tmp_path: Path) -> None:
    one = "class A:\n    def f(self): ..."
    _write(tmp_path, f"class P(Protocol):\n    def f(self): ...\n{one}")
    assert House(tmp_path).lone_protocols() == {"P": ["A"]}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one.py").write_text(one)
    assert House(tmp_path).lone_protocols() == {}


def test_each_class_has_a_name_of_its_own(house: House) -> None:
    assert {name: modules for name, modules in house.classes().items() if len(modules) > 1} == {}


def test_faults_are_caught_by_name(house: House) -> None:
    counts = house.broad_handlers()
    assert sum(counts.values()) <= MOST_BROAD_HANDLERS, counts


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (KeyError, builtins.Exception): raise",
        "try: f()\nexcept: pass",
        "try: f()\nexcept BaseException: g()",
        "with suppress(KeyError, Exception): f()",
        "with contextlib.suppress(BaseException): f()",
        "class A:\n    def __exit__(self, *_):\n        return True",
    ],
)
def test_each_way_to_catch_everything_is_counted(code: str, tmp_path: Path) -> None:
    _write(tmp_path, code)
    assert House(tmp_path).broad_handlers() == {"tiering.one": 1}


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept (KeyError, OSError): pass",
        "try: f()\nexcept BaseException:\n    g()\n    raise",
        "with suppress(KeyError): f()",
        "class A:\n    def __exit__(self, *_): f()",
    ],
)
def test_what_is_caught_by_name_or_goes_on_is_not(code: str, tmp_path: Path) -> None:
    _write(tmp_path, code)
    assert House(tmp_path).broad_handlers() == {}


def _write(root: Path, code: str) -> None:
    (root / "tiering").mkdir()
    (root / "tiering" / "one.py").write_text(code)


def test_settings_stay_few() -> None:
    assert len(list(every_setting())) <= MOST_SETTINGS


def test_actors_are_named(house: House) -> None:
    assert house.words(r"\b(?:nobody|Nobody|whoever|Whoever)\b") == 0
