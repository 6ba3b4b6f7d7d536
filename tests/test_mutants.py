"""The mutants' places and tests are where their entries say; `make mutants` shows that the tests find them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mutants.__main__ import share
from mutants.mutation import TREE, DoesNotFit, Mutant, load, missing_test, mutated

MUTANTS = load()
LEAST_MUTANTS = 40


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_fits_one_place_and_its_tests_are_there(mutant: Mutant) -> None:
    source = (TREE / mutant.path).read_text()
    text = mutated(mutant, source)
    compile(text, mutant.path, "exec")
    assert [missing for test in mutant.tests if (missing := missing_test(test))] == []
    assert mutant.why.endswith(".") and len(mutant.why.split()) >= 5, "say what goes wrong"


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len(MUTANTS) >= LEAST_MUTANTS
    assert [name for name, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1] == []


def test_shares_have_each_mutant_once() -> None:
    shares = [share(MUTANTS, f"{number}/7") for number in range(1, 8)]
    assert sorted(mutant.id for one in shares for mutant in one) == sorted(mutant.id for mutant in MUTANTS)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for said in ("0/7", "8/7", "1", "1/2/3", "a/b", ""):
        with pytest.raises(ValueError):
            share(MUTANTS, said)


SOURCE = '''
class Shop:
    """Sells."""

    def price(self, count: int) -> int:  # ünïcode
        total = self.one * count + self.fee("é")
        if count > 10 and self.is_kind:
            total -= self.one
            self.log(total)
        return total if total else self.one


def other():
    return total if total else one
'''


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("count > 10", "count > 11", "if count > 11 and self.is_kind:"),
        ("self.one   *\n count", "1 + 1", "total = 1 + 1 + self.fee("),
        ("self.fee('é')", "0", "total = self.one * count + 0\n"),
        ("count > 10", "count or count", "if (count or count) and self.is_kind:"),
        ("total -= self.one\nself.log(total)", "pass", "self.is_kind:\n            pass\n        return"),
        ("if count > 10 and self.is_kind:\n  total -= self.one\n  self.log(total)", "total = 1\ntotal = 2",
         "\n        total = 1\n        total = 2\n        return"),
        ("total if total else self.one", "total", "return total\n"),
        ("self.log(total)", "None", "            None\n"),
    ],
)  # fmt: skip
def test_syntax_is_compared_and_the_rest_stays(old: str, new: str, want: str) -> None:
    text = mutated(made(old=old, new=new), SOURCE)
    assert want in text
    assert text.startswith('class Shop:\n    """Sells."""\n')
    assert text.endswith(SOURCE[SOURCE.index("\ndef other") :].rstrip())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"old": "total"}, "old stands 3 times"),
        ({"old": "self.two"}, "old stands 0 times"),
        ({"function": "shop:Shop.sell"}, "0 definitions of sell"),
        ({"function": "shop:price"}, "0 definitions of price"),
        ({"old": "count >"}, "neither an expression nor statements"),
        ({"new": "return 1"}, "new is none"),
        ({"new": "count  >10"}, "the same as old"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(changed: dict[str, str], said: str) -> None:
    with pytest.raises(DoesNotFit, match=said):
        mutated(made(**changed), SOURCE)


def test_a_test_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = "class TestB:\n    def test_c(self): ...\n\nclass TestF(TestB): ...\n\nTestD = Machine.TestCase\n"
    (tmp_path / "test_a.py").write_text(text)
    for there in ("", "::TestB", "::TestB::test_c[1]", "::TestF::test_c", "::TestD::runTest"):
        assert missing_test(f"test_a.py{there}", tmp_path) is None
    assert missing_test("test_b.py", tmp_path) == "no file test_b.py"
    assert missing_test("test_a.py::test_c", tmp_path) == "no test_c in test_a.py"
    assert missing_test("test_a.py::TestB::test_e", tmp_path) == "no test_e in test_a.py"


def made(function: str = "shop:Shop.price", old: str = "count > 10", new: str = "count > 11") -> Mutant:
    return Mutant("one", "It sells for less.", function, old, new, ("tests/test_mutants.py",), "main", "shop")
