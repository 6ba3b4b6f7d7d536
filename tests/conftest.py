"""What holds for every test: no deadline per example, a failing example comes with the line that repeats it, and each
test has its kind (see `kinds`).

Without a GPU the kernels run in triton's interpreter. Triton decides that when it is first imported, and transformers
imports it, so the variable is set here: pytest reads this file before any test. What needs triton's compiler takes it
out of the environment of a process of its own (kernels/test_ahead_of_time.py).
"""

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

import kinds
import patience

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process for each core: torch and its like take no more than that core.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# In a new checkout pytest rewrites thousands of assertions, in every worker, and would look for garbage among the nodes
# of their syntax trees all the while.
gc.disable()

settings.register_profile(
    "kvstore",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.differing_executors],  # a contract's tests are run by every implementation
)
settings.load_profile("kvstore")

patience.wait_for_leases()

if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch: for small tensors, and where there are few cores, its threads wait for each other longer than they
    compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`kvstore` with these arguments, in this process."""
    from test_cli import run_here

    return partial(run_here, monkeypatch, capsys)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=kinds.Share.read,
        help="K/N: of tests that are slow only the Kth of N shares, by their names; with all N, each test ran once",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    share = config.option.share
    return share and f"of the slow tests: share {share.number} of {share.shares}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test is wanted are not read: some import engines and compilers."""
    if not config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    if kinds.TESTS not in collection_path.parents:
        return None
    path = collection_path.relative_to(kinds.TESTS).as_posix()
    return None if kinds.may_want(path, Expression.compile(config.option.markexpr).evaluate) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test is marked with its kind, and those of files that are slow, or look at a clock, as that; of the slow
    ones a share is left where one is asked for."""
    for item in items:
        for mark in kinds.marks_of(item.path.relative_to(kinds.TESTS).as_posix()):
            item.add_marker(mark)
    share = config.option.share
    if share is not None:
        left = [item for item in items if item.get_closest_marker(kinds.SLOW) and not share.has(item.nodeid)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish() -> None:
    """The tests stay to the end. A look through all of them for garbage would take tenths of a second, and make a test
    that looks at a clock late."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def kept_pure(request: pytest.FixtureRequest) -> None:
    """A pure test starts no process and does not sleep."""
    if request.node.get_closest_marker(kinds.PURE) is None:
        return

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{request.node.nodeid} is called pure in tests/kinds.py, and sleeps or starts a process")

    monkeypatch = request.getfixturevalue("monkeypatch")
    for owner, name in ((time, "sleep"), (subprocess, "Popen"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, refuse)
