"""Puts each mutant into a copy of the tree, one at a time, and runs its tests: every one must be found.

    make mutants
    make mutants ARGS="--only session-joins-across-tenants"
    make mutants ARGS="--share 2/4"

It ends with status 1 where a mutant survives, fits its place no more, or names tests that fail without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from mutants.mutation import DoesNotFit, Mutant, load
from mutants.trial import WITHOUT_LIMIT_SECONDS, Copy, Outcome, Verdict, judged, limit_of, python_of

Work = TypeVar("Work")
TestFile = tuple[str, str]
"""An environment, and a file of tests that is run in it."""


class Copies:
    """Of the tree as it is now, with what is not committed: as many as there are workers."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.all = [Copy(folder / str(number)) for number in range(workers)]
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for one in self.all:
            self._free.put(one)

    def each(self, works: Iterable[Work], do: Callable[[Copy, Work], Any]) -> Iterator[tuple[Work, Any]]:
        """What each work returned, as they end."""

        def lent(work: Work) -> Any:
            one = self._free.get()
            try:
                return do(one, work)
            finally:
                self._free.put(one)

        with ThreadPoolExecutor(len(self.all)) as pool:
            futures = {pool.submit(lent, work): work for work in works}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:  # interrupted
                pool.shutdown(wait=False, cancel_futures=True)
                for one in self.all:
                    one.end()
                raise


def say(line: str) -> None:
    """Of the progress, which is long."""
    print(line, file=sys.stderr, flush=True)


def files_of(mutant: Mutant) -> list[TestFile]:
    """In which its tests are."""
    return list(dict.fromkeys((mutant.environment, test.partition("::")[0]) for test in mutant.tests))


def trials(chosen: list[Mutant], trees: Copies) -> Iterator[dict[str, Any]]:
    """First all tests without a mutant, file by file, then all mutants."""
    wanted: dict[TestFile, set[str]] = {}
    for mutant in chosen:
        for test in mutant.tests:
            wanted.setdefault((mutant.environment, test.partition("::")[0]), set()).add(test)
    for environment in {environment for environment, _ in wanted}:
        for one in trees.all:
            one.check(environment)
    say(f"{len(chosen)} mutants; first their tests without them, in {len(wanted)} files")

    def run_without(tree: Copy, file: TestFile) -> Outcome:
        return tree.run(sorted(wanted[file]), file[0], WITHOUT_LIMIT_SECONDS, keep_compiled=True)

    without: dict[TestFile, Outcome] = {}
    for file, outcome in trees.each(wanted, run_without):
        without[file] = outcome
        if outcome.status:
            say(f"fails without a mutant: {file[1]}: {outcome.finding}")

    def run_with(tree: Copy, mutant: Mutant) -> tuple[Verdict, str, float]:
        bare = [without[file] for file in files_of(mutant)]
        failing = next((one for one in bare if one.status), None)
        if failing is not None:
            return Verdict.UNFIT, f"its tests fail without it: {failing.finding}", 0.0
        try:
            with tree.having(mutant):
                limit = limit_of(sum(one.seconds for one in bare))
                outcome = tree.run(mutant.tests, mutant.environment, limit, keep_compiled=False)
        except DoesNotFit as error:
            return Verdict.UNFIT, str(error), 0.0
        return *judged(outcome), outcome.seconds

    for done, (mutant, (verdict, finding, seconds)) in enumerate(trees.each(chosen, run_with), 1):
        why = "" if verdict is Verdict.FOUND else f": {finding}"
        say(f"{done:3} of {len(chosen)}  {verdict.value:8}  {mutant.id}  ({seconds:.1f} s){why}")
        yield {"id": mutant.id, "room": mutant.room, "verdict": verdict.value, "by": finding, "seconds": seconds}


def share(mutants: list[Mutant], said: str) -> list[Mutant]:
    """The Kth of N shares, as "K/N". Mutants with tests in the same files are in the same one. Raises `ValueError`."""
    number, of = (int(part) for part in said.split("/"))
    if not 1 <= number <= of:
        raise ValueError(said)
    together = sorted(mutants, key=files_of)
    first, end = (len(together) * part // of for part in (number - 1, number))
    chosen = {mutant.id for mutant in together[first:end]}
    return [mutant for mutant in mutants if mutant.id in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description="Small bugs that the tests must find.")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="this mutant alone; may be repeated")
    parser.add_argument("--share", metavar="K/N", help="the Kth of N shares, which have each mutant once")
    parser.add_argument("--workers", type=int, default=2, help="copies in which tests run at the same time")
    parser.add_argument("--json", action="store_true", help="print the results as JSON; the progress goes to stderr")
    options = parser.parse_args()
    known = load()
    if unknown := set(options.only) - {mutant.id for mutant in known}:
        parser.error(f"no mutant {', '.join(sorted(unknown))}; each `id` in tests/mutants/*.toml is one")
    if options.workers < 1:
        parser.error("--workers is 1 or more")
    chosen = [mutant for mutant in known if not options.only or mutant.id in options.only]
    if options.share is not None:
        try:
            chosen = share(chosen, options.share)
        except ValueError:
            parser.error(f"--share {options.share}: K/N is asked for, with K from 1 to N, as 2/4")
    able = [mutant for mutant in chosen if python_of(mutant.environment).exists()]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        results = list(trials(able, Copies(Path(folder).resolve(), min(options.workers, len(able) or 1))))
    results += [
        {"id": one.id, "room": one.room, "verdict": Verdict.LEFT_OUT.value, "by": "make engines first", "seconds": 0.0}
        for one in chosen
        if one not in able
    ]
    results.sort(key=lambda one: [mutant.id for mutant in chosen].index(one["id"]))
    seconds = round(time.monotonic() - begun, 1)
    counts = Counter(one["verdict"] for one in results)
    if options.json:
        print(json.dumps({"seconds": seconds, "counts": counts, "mutants": results}, indent=2))
    else:
        for one in results:
            print(f"{one['verdict']:12}  {one['room']:12}  {one['id']}\n{'':14}{one['by'][:160]}")
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        print(f"{len(results)} mutants in {seconds:.0f} s: {said}")
    return int(any(one["verdict"] in (Verdict.SURVIVED.value, Verdict.UNFIT.value) for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
