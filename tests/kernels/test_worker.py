"""The thread behind an engine's thread: order, bounds, waiting, and jobs that fail."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from kv_kernels import worker
from kv_kernels.worker import Worker


def test_jobs_run_in_order_on_one_thread_and_all_of_them_before_it_ends() -> None:
    thread = Worker("a worker")
    seen: list[tuple[int, str]] = []
    for at in range(100):
        assert thread.submit(lambda at=at: seen.append((at, threading.current_thread().name)))
    assert thread.close(30.0)
    assert seen == [(at, "a worker") for at in range(100)]
    assert not thread.submit(lambda: None)


def test_a_wait_ends_when_it_is_so_or_time_is_over() -> None:
    thread = Worker("a worker")
    go, done = threading.Event(), []
    thread.submit(lambda: (go.wait(30.0), done.append(1)))
    assert not thread.wait(lambda: bool(done), 0.0)
    assert not thread.wait(lambda: bool(done), 0.05)
    go.set()
    assert thread.wait(lambda: bool(done), 30.0)
    assert thread.close(30.0)


def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_JOBS", 3)
    thread = Worker("a worker")
    go, begun = threading.Event(), threading.Event()
    thread.submit(lambda: (begun.set(), go.wait(30.0)))
    assert begun.wait(30.0)
    assert [thread.submit(lambda: None) for _ in range(4)] == [True, True, True, False]
    assert not thread.close(0.0), "it is still at it"
    go.set()
    assert thread.close(30.0)


def test_a_job_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    thread = Worker("a worker")
    seen: list[int] = []
    with caplog.at_level(logging.INFO, "kv_kernels"):
        thread.submit(lambda: 1 // 0)
        thread.submit(lambda: seen.append(1))
        assert thread.close(30.0)
    assert seen == [1] and "a job of the thread a worker failed" in caplog.text


def test_it_runs_where_it_is_told() -> None:
    one = frozenset([min(os.sched_getaffinity(0))])
    thread = Worker("a worker", one)
    seen: list[set[int]] = []
    thread.submit(lambda: seen.append(os.sched_getaffinity(0)))
    assert thread.close(30.0)
    assert seen == [set(one)]


def test_cpus_that_are_not_there_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_kernels"):
        thread = Worker("a worker", frozenset([4095]))
        assert thread.close(30.0)
    assert "the thread a worker stays on any CPU" in caplog.text
