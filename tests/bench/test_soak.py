"""What the soak judges: a line of growth in samples with noise, and descriptors that stay open."""

from __future__ import annotations

import gc
import os
from collections import Counter
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import numpy as np
import pytest

from kv_bench.measure import quiet_collector
from soak import MORE_DESCRIPTORS, SLOPE_MIB, Watched


def watched(slope_mib: float, descriptors: list[int]) -> Watched:
    """Samples of an hour, one every two seconds, with a start-up in its first quarter that is no growth."""
    noise = np.random.default_rng(7).normal(0.0, 0.5, 1800)
    one = Watched(os.getpid())
    for at, off in enumerate(noise.tolist()):
        hours = at / 1800
        one.at.append(3600 * hours)
        one.mib.append(80 + min(1.0, 4 * hours) * 40 + slope_mib * hours + off)
        one.descriptors.append(Counter({"a file": descriptors[at * len(descriptors) // 1800]}))
        one.slab_mib.append(at / 100)
    return one


@pytest.mark.parametrize("slope_mib", [-3.0, 0.0, 2.0, 6.0])
def test_a_slope_is_told_from_noise_and_from_the_start(slope_mib: float) -> None:
    told = watched(slope_mib, [20]).figures(900.0)
    assert told["slope_mib"] == pytest.approx(slope_mib, abs=4 * told["slope_error_mib"])
    assert told["slope_error_mib"] < 0.1 and (told["slope_mib"] < SLOPE_MIB) == (slope_mib < SLOPE_MIB)
    assert told["mib_at_the_end"] - told["mib_warm"] == pytest.approx(slope_mib * 0.675, abs=0.2)
    assert told["samples"] == 1350 and told["slab_mib"] == 17.99


def test_descriptors_that_stay_open_are_told_and_one_that_comes_and_goes_is_none() -> None:
    told = watched(0.0, [20, 20, 21, 23, 26]).figures(900.0)
    assert told["descriptors_more"] > MORE_DESCRIPTORS and told["more_by_kind"] == {"a file": 6}
    assert watched(0.0, [20, 21] * 300).figures(900.0)["descriptors_more"] <= 1


def test_a_process_is_sampled() -> None:
    """This one: with a descriptor more, and with memory of its own more. The memory is mapped anew: malloc may hand out
    what other tests gave back, which the process has already; and no garbage of theirs is freed meanwhile."""
    one = Watched(os.getpid())
    with quiet_collector():
        one.sample(0.0)
        held = np.frombuffer(mmap(-1, 32 << 20, MAP_PRIVATE | MAP_ANONYMOUS), np.uint8)
        held.fill(1)
        with open(os.devnull) as _:
            one.sample(1.0)
    assert one.descriptors[1] - one.descriptors[0] == Counter({Path(os.devnull).name: 1})
    huge_page = 2  # MiB: the kernel may give one for less at either end
    assert one.mib[1] - one.mib[0] == pytest.approx(held.nbytes / (1 << 20), abs=2 * huge_page)


def test_a_slab_file_counts_where_it_is_open_twice_or_removed(tmp_path: Path) -> None:
    """Others come and go with the blocks on disk."""
    gc.collect()  # other tests' files are closed now or never
    one, path = Watched(os.getpid()), tmp_path / "0000002a.slab"
    path.write_bytes(bytes(1 << 20))
    one.sample(0.0)
    with path.open():
        one.sample(1.0)
        with path.open():
            one.sample(2.0)
        path.unlink()
        one.sample(3.0)
    assert [now - one.slab_mib[0] for now in one.slab_mib] == [0, 1, 1, 0]
    assert [now - one.descriptors[0] for now in one.descriptors[1:]] == [
        Counter(),
        Counter({".slab": 1}),
        Counter({".slab (deleted)": 1}),
    ]
