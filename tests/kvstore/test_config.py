"""Sizes and limits: what people may write, what becomes of it, and what they are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import kvstore
from kvstore.block.errors import BadInput
from kvstore.config import (
    DramConfig,
    StoreOptions,
    TierOptions,
    format_size,
    memory_limit,
    memory_limit_files,
    parse_size,
)
from workbench import one_line

MIB, GIB = 1 << 20, 1 << 30
PLENTY = 1 << 50


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1k", 1024),
        ("1K", 1024),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("64k", 65536),
        ("1M", MIB),
        ("1MB", 10**6),
        ("1MiB", MIB),
        ("512 MB", 512 * 10**6),
        ("  2GiB ", 2 * GIB),
        ("2gib", 2 * GIB),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5 M", MIB // 2),
        ("1T", 1 << 40),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        (12345, 12345),
        (0, 0),
    ],
)
def test_sizes_as_people_write_them(written: str | int, size_bytes: int) -> None:
    assert parse_size(written, "dram") == size_bytes


@given(st.text(max_size=8) | st.from_regex(r"[0-9.]{0,6} ?[kmgtKMGTiIbB]{0,4}", fullmatch=True))
@settings(max_examples=200)
def test_any_text_is_a_size_or_bad_input(written: str) -> None:
    try:
        assert parse_size(written, "dram") >= 0
    except BadInput as error:
        assert one_line(error, "dram=")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB, "1.0 MiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (2048 << 40, "2048.0 TiB"),
    ],
)
def test_sizes_as_people_read_them(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 1 << 60))
@settings(max_examples=100)
def test_what_is_printed_can_be_written(size_bytes: int) -> None:
    assert math.isclose(parse_size(format_size(size_bytes), "dram"), size_bytes, rel_tol=0.06)


@pytest.mark.parametrize(
    ("dram", "extent", "want"),
    [
        ("1MiB", None, DramConfig(MIB, 64 << 10)),
        ("16MiB", None, DramConfig(16 * MIB, MIB)),
        ("20MiB", None, DramConfig(20 * MIB, MIB)),
        ("1GiB", None, DramConfig(GIB, 64 * MIB)),
        ("32GiB", None, DramConfig(32 * GIB, 64 * MIB)),
        ("64GiB", None, DramConfig(64 * GIB, 128 * MIB)),  # each extent holds a descriptor: few large ones
        ("1TiB", None, DramConfig(1024 * GIB, GIB)),
        ("1MiB", "64KiB", DramConfig(MIB, 64 << 10)),
        ("1MiB", "1MiB", DramConfig(MIB, MIB)),
        ("4GiB", "1GiB", DramConfig(4 * GIB, GIB)),
        (MIB + 5, None, DramConfig(MIB, 64 << 10)),  # whole pages
    ],
)
def test_budgets_and_extents(dram: str | int, extent: str | None, want: DramConfig) -> None:
    assert DramConfig.of(dram, extent, PLENTY) == want


@given(st.integers(MIB, 1 << 45), st.none() | st.integers(0, 1 << 31))
@settings(max_examples=150)
def test_every_accepted_budget_holds_an_extent_of_whole_pages(dram: int, extent: int | None) -> None:
    try:
        config = DramConfig.of(dram, extent, PLENTY)
    except BadInput:
        assert extent is not None
        return
    assert 0 < config.extent_bytes <= config.budget_bytes <= dram
    assert config.extent_bytes % 4096 == config.budget_bytes % 4096 == 0


# What the machine allows ----------------------------------------------------------------------------------------------

MEMINFO = "MemTotal:       16384 kB\nMemFree:           1 kB\n"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"/proc/meminfo": MEMINFO}, 16 * MIB),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "max\n"}, 16 * MIB),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory.max": "8388608\n"}, 8 * MIB),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/a/memory.max": "max", "/sys/fs/cgroup/memory.max": "4096"}, 4096),
        ({"/proc/meminfo": MEMINFO, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 16 * MIB),
        ({"/proc/meminfo": "nothing of use"}, 1 << 62),
        ({}, 1 << 62),
    ],
)
def test_the_tightest_limit_counts(files: dict[str, str], limit: int) -> None:
    assert memory_limit(files) == limit


def test_limits_stand_at_every_level_of_a_group() -> None:
    assert memory_limit_files("0::/kube/pod7\n") == [
        "/proc/meminfo",
        "/sys/fs/cgroup/kube/pod7/memory.max",
        "/sys/fs/cgroup/kube/memory.max",
        "/sys/fs/cgroup/memory.max",
    ]
    assert memory_limit_files("5:cpu,cpuacct:/a\n4:memory:/a\n") == [
        "/proc/meminfo",
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
    assert memory_limit_files("") == ["/proc/meminfo"]


@pytest.mark.parametrize("opener", [kvstore.open, kvstore.embedded])
def test_whoever_opens_a_store_gives_the_options_of_the_tree(opener: Callable[..., Any]) -> None:
    defaults = {name: one.default for name, one in signature(opener).parameters.items()}
    assert structs.asdict(TierOptions()).items() <= defaults.items()
    assert {*StoreOptions.__struct_fields__} - {"tiers"} <= defaults.keys()
