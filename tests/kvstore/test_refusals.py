"""What people give that cannot be: one line names it and says what to give instead, and nothing is changed by it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore import Share
from kvstore.block.codec import codec_named
from kvstore.block.errors import BadInput, LayoutMismatch
from kvstore.block.identity import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS, ExtraKey, Namespace, as_extra_keys
from kvstore.block.layout import Layout
from kvstore.block.pages import GroupPages, Pages
from kvstore.config import DramConfig, Limits, kinds_of, parse_size, read
from kvstore.service.settings import StoreSettings
from workbench import MODEL, Bench, bench, blank_pages, ids, one_line, random_pages, refused, small_layout
from wrong_values import wrong_values

MIB, GIB, PLENTY = 1 << 20, 1 << 30, 1 << 50
LAYOUT, TWO = small_layout(), small_layout(head_shards=2)
NAN, INF = math.nan, math.inf


@dataclass
class Place:
    """Where it is given: a namespace with two blocks, and a directory."""

    path: Path
    bench: Bench

    def __post_init__(self) -> None:
        self.ns = self.bench.namespace(LAYOUT)
        assert self.ns.put(ids(128), random_pages(LAYOUT, 2)).stored == 2

    def open(self, **options: Any) -> None:
        kvstore.open(f"embedded:{self.path}", **{"dram": "1MiB", **options}).close()

    def name(self, **options: Any) -> None:
        with kvstore.embedded(str(self.path), dram="1MiB") as store:
            store.namespace(**{"model": MODEL, "layout": LAYOUT, **options})

    def put(self, tokens: int = 192, pages: Any = None, **options: Any) -> None:
        self.ns.put(ids(tokens), pages or random_pages(LAYOUT, 3), **options)

    def lease(self, **options: Any) -> None:
        self.ns.lease(self.ns.match(ids(64)), **options)

    def get(self, into: Any = None, first: int = 0, leased: int = 0) -> None:
        given = into or self.pages([0, 1])
        with self.ns.lease(self.ns.match(ids(128)), leased) as lease:
            with pytest.raises((BadInput, LayoutMismatch)) as by_layer:
                self.ns.get_by_layer(lease, given, first)
            with pytest.raises(type(by_layer.value), match=f"^{re.escape(str(by_layer.value))}$"):
                self.ns.get(lease, given, first)
        raise by_layer.value

    def pages(self, table: Any) -> Pages:
        return Pages(blank_pages(LAYOUT, 2).planes, table, 64)


Row = tuple[Any, ...]
"""A call with it, and what the line says."""


def each(values: list[Any], call: Callable[[Place, Any], object], *said: str) -> Iterator[Row]:
    """{}: the value, as it was written."""
    for value in values:
        yield lambda at, value=value: call(at, value), *(words.replace("{}", repr(value)) for words in said)


URLS = ["", "kv", "./kv", "embedded:", "unix:", "http://host", "EMBEDDED:kv", ":kv", Path("kv"), None]
SIZES = ["", " ", "GiB", "two", "2 GiBs", "2GiB2", "-1", "-1GiB", "+1", "1,5GiB", ".5GiB", "1.GiB", "1e9", "0x10",
         "nan", "inf", "1 2", "٣GiB", "2Gi B", "9" * 400, "1PiB", None, 1.5, True, b"2GiB", -1, ["2GiB"]]  # fmt: skip
RATES = ["", "fast", "/s", "8MiB/h", "8MiB/s/s", "-1", -1, "on", None, True, 1.5, "1MiBs"]
TABLES = [np.array([[0, 1]]), [[0], [1]], torch.tensor([0.0, 1.0]), None, 5, iter([0, 1])]
NO_SEQUENCE = [None, 7, {b"one"}, {b"one": 1}, iter([b"one"]), b"one", "one"]
FINGERPRINTS = ["", "/models/llama", "./llama", "../llama", "~/llama", "m" * 257]
OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"dram": "lots"}, ("dram='lots'", "e.g. dram=2GiB")),
    ({"dram": "1KiB"}, ("dram=1KiB", "at least 1.0 MiB")),
    ({"dram": "900TiB"}, ("dram=900TiB", "cgroup", "give less")),
    ({"dram": None}, ("dram=None", "e.g. '2GiB'")),
    ({"extent": "1KiB"}, ("extent=1KiB", "64.0 KiB and 1.0 MiB")),
    ({"tenant": ""}, ("tenant=''", "1 to 64 printable")),
    ({"tenant": "a\nb"}, ("tenant='a\\nb'", "printable")),
    ({"tenant": "x" * 65}, ("1 to 64",)),
    ({"limits": {"leases": 5}}, ("limits={'leases': 5}", "kvstore.Limits")),
    ({"policy": "arc"}, ("policy='arc'", "allowed: lru, adaptive")),
    ({"nvme": "1KiB"}, ("too small",)),
    ({"nvme": "9000TiB"}, ("more than",)),
    ({"nvme": "64MiB", "slab": "1GiB"}, ("slab=1GiB",)),
    ({"nvme": "much"}, ("nvme='much'",)),
    ({"shares": {"a": Share(1.5)}}, ("shares: a: guaranteed=1.5", "guaranteed to it, 0 to 1")),
    ({"shares": {"a": Share(0.5, 0)}}, ("shares: a: weight=0", "from 0.001 to 1000")),
    ({"shares": {"a": Share(0.6), "b": Share(0.5)}}, ("come to 1.1 of each tier", "a 0.6, b 0.5", "1 or less")),
    ({"shares": {"a": Share(0.01)}}, ("share=0.01 of tenant a is less than one piece of dram", "more dram")),
    ({"shares": {"a": 0.7}}, ("shares={'a': 0.7}", "kvstore.Share(guaranteed=0.5)")),
    ({"shares": 0.5}, ("shares=0.5; give a kvstore.Share",)),
    ({"shares": {"a": Share("half")}}, ("shares: a: guaranteed='half'; give the part",)),  # type: ignore[arg-type]
    ({"shares": {"a": Share(0.5, True)}}, ("shares: a: weight=True; give a number",)),
]
BUDGETS: list[tuple[tuple[Any, Any, int], tuple[str, ...]]] = [
    (("1000KiB", None, PLENTY), ("dram=1000KiB", "at least 1.0 MiB")),
    ((0, None, PLENTY), ("dram=0", "at least 1.0 MiB")),
    (("2GiB", None, GIB), ("dram=2GiB", "1.0 GiB", "cgroup", "give less")),
    (("1MiB", "32KiB", PLENTY), ("extent=32KiB", "64.0 KiB and 1.0 MiB")),
    (("1MiB", "2MiB", PLENTY), ("extent=2MiB", "64.0 KiB and 1.0 MiB")),
    (("4GiB", "2GiB", PLENTY), ("extent=2GiB", "64.0 KiB and 1.0 GiB")),
    (("1MiB", 65537, PLENTY), ("extent=65537", "multiple of 4 KiB")),
    (("1MiB", "large", PLENTY), ("extent='large'", "e.g. extent=2GiB")),
]
LIMITS = [
    ({name: value}, (f"{name}={value!r}", "; give "))
    for name, kind in kinds_of(Limits).items()
    for value in wrong_values(kind)
]
FULL_NAMES: list[tuple[dict[str, Any], str]] = [
    ({"dram": "lots"}, "in.dram='lots' is not a size"),
    ({"dram": "auto", "nvme": "lots"}, "in.nvme='lots' is not a size"),
    ({"extent": "auto"}, "in.extent='auto' is not a size"),
    ({"scrub": "fast"}, "in.scrub='fast' is not a rate"),
    ({"policy": "fifo"}, "in.policy='fifo'"),
    ({"nvme_writes": 0}, "in.nvme_writes=0.0; give all, learned"),
    ({"nvme": "off", "nvme_writes": "learned"}, "in.nvme_writes='learned' is about what is written to NVMe"),
]
NAMESPACES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"codec": "zip"}, ("codec 'zip'", "allowed: int8-kc64, raw")),
    ({"model": "/models/llama"}, ("'/models/llama'", "commit id")),
    ({"model": ""}, ("model=''", "commit id")),
    ({"weights_epoch": -1}, ("weights_epoch=-1", "0 or more")),
    ({"config": {"rope": 10000}}, ("'rope'=10000", "text")),
    ({"config": {1: "x"}}, ("1='x'", "text")),
    ({"layout": small_layout(head_dim=256)}, ("266240 bytes", "extent has 65536", "smaller blocks or layer_shards")),
    ({"layout": small_layout(layers=17, layer_shards=17)}, ("17 parts", "1114112", "1048576", "smaller extent=")),
    ({"layout": small_layout(layers=300, head_dim=1)}, ("300 layers", "at most", "layer_shards")),
    ({"codec": "int8-kc64", "layout": small_layout(dtype="float8_e4m3fn")}, ("float8_e4m3fn", "codec='raw'")),
    ({"codec": "int8-kc64", "layout": small_layout(block_tokens=784)}, ("784 rows", "multiple of 64", "codec='raw'")),
]
PUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"durability": "forever"}, ("'forever'", "volatile, disk")),
    ({"durability": "disk"}, ("NVMe", "nvme=")),
    ({"first_token": -64}, ("first_token=-64", "multiple of 64")),
    ({"first_token": 63}, ("first_token=63", "multiple of 64")),
    *(({"ttl": ttl}, (f"ttl={ttl!r}", "seconds above 0")) for ttl in (0, -5.0, NAN, INF, "1h", True)),
    *(({"priority": priority}, (f"priority={priority}", "-100 to 100")) for priority in (101, -101)),
    *(({"priority": priority}, (f"priority={priority!r}", "whole number")) for priority in (0.5, True, "high")),
]
EXTRA_KEYS: list[tuple[Any, tuple[str, ...]]] = [
    ("salt", ("one string", "sequence")),
    (b"salt", ("one string", "sequence")),
    ((7,), ("int", "bytes, text or ExtraKey")),
    ((ExtraKey(b"x", -1),), ("token -1", "from token 0 on")),
    ((b"x" * (MAX_EXTRA_KEY_BYTES + 1),), (str(MAX_EXTRA_KEY_BYTES), "digest")),
    ((b"x",) * (MAX_EXTRA_KEYS + 1), (str(MAX_EXTRA_KEYS + 1), str(MAX_EXTRA_KEYS))),
    (("salt", "\ud800"), ("surrogate", "bytes")),
]

REFUSED: list[Row] = [
    # Where the store is, and how large.
    *each(URLS, lambda at, url: kvstore.open(url), "{}", "unix:PATH", "embedded:DIRECTORY", "e.g. embedded:./kv"),
    (lambda at: kvstore.open(f"unix:{'x' * 108}"), "longer than 107 bytes", "give"),
    (lambda at: kvstore.open("unix:a\0b"), "no NUL", "give"),
    *each(SIZES, lambda at, size: parse_size(size, "dram"), "dram=", "e.g. dram=2GiB"),
    *((lambda at, given=given: at.open(**given), *said) for given, said in OPTIONS),
    *((lambda at, given=given: DramConfig.of(*given), *said) for given, said in BUDGETS),
    *((lambda at, given=given: Limits(**given), *said) for given, said in LIMITS),
    *each(RATES, lambda at, rate: at.open(scrub=rate), "scrub={}", "e.g. scrub=8MiB/s", "off"),
    *each(
        [1, "63KiB/s", "10B/s"], lambda at, rate: at.open(nvme="8MiB", scrub=rate), "scrub={}", "at least 64.0 KiB/s"
    ),
    *each(
        ["some", "", -1, 0, NAN, True, 1e9],
        lambda at, writes: at.open(nvme="256MiB", nvme_writes=writes),
        "nvme_writes=",
        "give all, learned, or how many times",
    ),
    *each(
        ["learned", 1.0],
        lambda at, writes: at.open(nvme_writes=writes),
        "nvme_writes={}",
        "there is none; give nvme a size, or leave nvme_writes out",
    ),
    # What a sidecar alone may be told.
    *each(
        [
            {"dram": "2GiB"},
            {"nvme": "2GiB"},
            {"tenant": "me"},
            {"limits": Limits()},
            {"scrub": "off"},
            {"policy": "adaptive"},
        ],
        lambda at, given: kvstore.open("unix:/run/kv.sock", **given),
        "=",
        "kvstore serve",
    ),
    # Namespaces.
    *((lambda at, given=given: at.name(**given), *said) for given, said in NAMESPACES),
    *each([None, 5, b"bytes", ["a"]], lambda at, name: at.name(name=name), "name="),
    *each(FINGERPRINTS, lambda at, model: Namespace(model, LAYOUT, "raw"), "{}", "commit id or a content digest"),
    *each(
        ["int8", "INT8-KC64", "", None, 8, ["raw"]], lambda at, name: codec_named(name), "codec {}", "int8-kc64, raw"
    ),
    *each(
        [-1, 2, 99, 1.0, "0", True],
        lambda at, shard: at.bench.namespace(TWO, shard=shard),
        "shard={}",
        "0 to 1",
        "None",
    ),
    (
        lambda at: Layout.gqa(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64, page_tokens=48),
        "block_tokens=64",
        "48 tokens",
        "multiple of 48",
        "use 192",
    ),
    # Prompts.
    *each(NO_SEQUENCE, lambda at, keys: as_extra_keys(keys), "extra_keys "),
    *((lambda at, given=given: as_extra_keys(given), *said) for given, said in EXTRA_KEYS),
    # Verbs.
    *((lambda at, given=given: at.put(**given), *said) for given, said in PUTS),
    (lambda at: at.ns.put(ids(64), None), "pages of type NoneType", "; give "),
    (lambda at: at.put(192, random_pages(small_layout(page_tokens=48), 1, 48)), "48 tokens", "multiple of the page"),
    (lambda at: at.lease(first_token=-1), "first_token=-1", "0 or more"),
    (lambda at: at.lease(deadline_ms=-1), "deadline_ms=-1", "0 or more"),
    (lambda at: at.lease(deadline_ms=NAN), "deadline_ms=nan"),
    (lambda at: at.ns.lease(ids(64)), "match of type list", "; give "),
    *each(
        ["get", "get_by_layer"], lambda at, verb: getattr(at.ns, verb)("lease", at.pages([0, 1])), "lease of type str"
    ),
    (lambda at: at.get({1: 2}), "into of type dict", "; give "),
    (lambda at: at.get(first=63), "first_token=63", "multiple of 64"),
    (lambda at: at.get(leased=64), "first_token=0", "first token, 64"),
    (lambda at: at.get(first=-64), "-64"),
    *each([-5, "many", 0.5], lambda at, blocks: at.bench.store.evict(blocks), "blocks={}", "0 or more"),
    # Pages.
    *each(TABLES, lambda at, table: at.get(at.pages(table)), "page table", "one page number each"),
    *each([64.0, "64", None, 0], lambda at, size: Pages({}, [0, 1], size), "page_tokens={}"),
    (lambda at: GroupPages([1], -1), "first_page=-1", "from 0 up"),
    (lambda at: GroupPages([1], 0.5), "first_page=0.5", "whole number"),
    (lambda at: GroupPages(5), "page table of type int", "one page number each"),
    (lambda at: Pages({}, [1, 2], 16, [GroupPages([1])]), "groups of type list", "GroupPages"),
    (lambda at: Pages({}, [1, 2], 16, {"a": [1, 2]}), "type list", "'a'", "kvstore.GroupPages"),
    *each([-1, 0.5, "16", None], lambda at, size: GroupPages([1], 0, size), "page_tokens={}", "whole number"),
    (
        lambda at: Pages({}, [1, 2], 16, {"a": GroupPages([1])}),
        "'a'",
        "1 pages of 16 tokens from page 0 on",
        "token 32",
    ),
    (lambda at: Pages({}, [1, 2], 16, {"a": GroupPages([1], 2)}), "'a'", "from page 2 on", "ends at token 32"),
    (lambda at: Pages({}, [1, 2], 16, {"a": GroupPages([1], 0, 64)}), "'a'", "of 64 tokens", "ends at token 32"),
    (lambda at: Pages({}, [1, 2], 16, {"a": GroupPages([1], 0, 32)}).cut(0, 1), "to 16 splits", "'a'", "its 32 tokens"),
    (
        lambda at: at.get(Pages({}, range(8), 16, {"full": GroupPages([1], 0, 128)}), first=64),
        "first_token=64",
        "multiple of 128",
    ),
]

ONCE = [[1, 1], np.array([1, 1]), torch.tensor([1, 1]), torch.tensor([1, 1], dtype=torch.int8)]
"""Elements of a tensor are never equal to each other by their hashes."""
MISFITS: list[Row] = [
    *each(ONCE, lambda at, table: at.get(at.pages(table)), "names a page twice"),
    *(
        (
            lambda at, plane=plane: at.put(pages=Pages(dict.fromkeys(LAYOUT.layers, (plane, plane)), [0, 1, 2], 64)),
            type(plane).__name__,
            "give tensors",
        )
        for plane in ([1.0], None)
    ),
    (lambda at: at.put(256), "up to token 192", "up to 256", "more pages or fewer token ids"),
    (lambda at: at.put(pages=random_pages(small_layout(kv_heads=1), 3)), "wants"),
    (lambda at: at.get(random_pages(small_layout(kv_heads=1), 2)), "wants"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "kv", bench())
    yield place
    usage = place.bench.store.usage()
    assert (usage.blocks, usage.leases, usage.reservations, usage.dram.reserved) == (2, 0, 0, 0)
    place.bench.store.check()
    if place.path.exists():
        place.open()  # no process holds the directory


def id_of(row: Row) -> str:
    return ascii(row[1])[:40]


@pytest.mark.parametrize("row", REFUSED, ids=id_of)
def test_what_cannot_be_is_one_line_and_changes_nothing(place: Place, row: Row) -> None:
    call, *said = row
    with refused(BadInput, *said):
        call(place)


@pytest.mark.parametrize("row", MISFITS, ids=id_of)
def test_pages_that_do_not_fit_are_one_line_and_change_nothing(place: Place, row: Row) -> None:
    call, *said = row
    with refused(LayoutMismatch, *said):
        call(place)


@pytest.mark.parametrize(("given", "said"), FULL_NAMES)
def test_what_is_wrong_is_said_under_its_full_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(StoreSettings, given, "in.")
    assert one_line(caught.value, said)
    assert str(caught.value).endswith(", or auto, or off") == (given.get("nvme") == "lots")
