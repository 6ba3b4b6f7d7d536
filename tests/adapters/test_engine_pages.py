"""How an engine lays its pages is found out by its own writing, and whatever is not proven is bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine_adapter.paged.pages import EnginePages, RegisteredGroup, layout_of, opaque_dtype, register
from engine_adapter.paged.step_plan import PageRun
from kvstore.block.errors import BadInput
from kvstore.block.layout import Attention
from paged_engine import FORMS, packing_of
from workbench import one_line

PAGES, TOKENS, HEADS, WIDTH = 8, 32, 2, 16
Write = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Pool:
    """Layers of one form, and the engine's way to write them."""

    def __init__(
        self, form: str, *, layers: int = 2, split: int = 1, dtype: torch.dtype = torch.float32, pages: int = PAGES
    ) -> None:
        self.form = FORMS[form]
        self.tokens = TOKENS // split
        size = self.form.shape(pages * split, self.tokens, HEADS, WIDTH)
        torch.manual_seed(1)
        drawn = (torch.randn(size).to(dtype) for _ in range(layers))
        self.layers = {f"layer.{number}": self.form.turned(tensor) for number, tensor in enumerate(drawn)}
        self.writes = 0

    def group(self, **given: Any) -> RegisteredGroup:
        return replace(RegisteredGroup("a", self.layers, HEADS, (WIDTH, WIDTH), TOKENS, PAGES), **given)

    def write(self, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.writes += 1
        for plane, part in zip(self.form.planes(self.layers[name]), (key, value), strict=True):
            plane[slots // self.tokens, slots % self.tokens] = part

    def registered(self, write: Write | None = None, **given: Any) -> EnginePages:
        """With what is in the pages as it was before."""
        before = {name: tensor.clone() for name, tensor in self.layers.items()}
        pages = register([self.group(**given)], 0, "", write or self.write)
        for name, tensor in self.layers.items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), "pages are as they were"
        return pages


def no_write(*given: Any) -> None:
    raise NotImplementedError("this engine's kernel cannot be called\nfrom here")


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_found_by_its_writing(form: str, dtype: torch.dtype, split: int) -> None:
    pool = Pool(form, dtype=dtype, split=split)
    pages = pool.registered()
    assert pages.facts.packing == packing_of(form), "how it lies in memory is no part of a payload"
    assert not pages.facts.refused and pool.writes >= 2
    (group,) = pages.facts.groups
    assert (group.layers, group.kv_heads, group.widths) == ((0, 1), HEADS, (WIDTH, WIDTH))
    assert group.dtype == str(dtype).removeprefix("torch.") and pages.numbers == {"layer.0": 0, "layer.1": 1}
    layout = layout_of([pages.facts], HEADS, 0)
    given = pages.pages([PageRun(1, [3, 5])], layout, TOKENS, is_exact=False)
    assert given.page_tokens == TOKENS // split and list(given.table) == [
        page * split + piece for page in (3, 5) for piece in range(split)
    ]
    for plane, wanted in zip(given.planes[1], pool.form.planes(pool.layers["layer.1"]), strict=True):
        assert torch.equal(plane.float(), wanted.float())


LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders in memory of vLLM's pages (0.32, v1/kv_cache_layout.py): layers, blocks, heads, tokens, K and V of each."""


def lying(layout: str, split: int = 1) -> Pool:
    """A pool of three layers in one allocation."""
    pool = Pool("heads-first", layers=3, split=split)
    order = ["LBHNC".index(axis) for axis in layout]
    memory = torch.stack(list(pool.layers.values())).permute(order).contiguous()
    whole = memory.permute([order.index(axis) for axis in range(5)])
    pool.layers = {name: whole[number] for number, name in enumerate(pool.layers)}
    return pool


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_found_in_every_order_of_memory(layout: str, split: int) -> None:
    """Also where a layer's next page, or a page's next head, lies behind those of the other layers."""
    facts = lying(layout, split).registered().facts
    assert not facts.refused and facts.packing == "heads-first", "how it lies in memory is no part of a payload"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_which_nothing_is_known_are_bytes_where_each_is_one_run(layout: str) -> None:
    facts = lying(layout).registered(no_write).facts
    if layout[:2] in ("LB", "BL"):
        assert not facts.refused and facts.packing.startswith("opaque:")
    else:
        assert "cannot be made out" in facts.refused and "\n" not in facts.refused


def test_k_that_lies_across_is_copied_as_it_lies_where_nobody_looks_into_it() -> None:
    pool = Pool("slabs-k-across")
    pages = pool.registered()
    layout = layout_of([pages.facts], HEADS, 0)
    turned, lying = (
        pages.pages([PageRun(0, [1])], layout, 0, is_exact=is_exact).planes[0] for is_exact in (False, True)
    )
    assert not torch.equal(turned[0].float(), lying[0].float()) and torch.equal(turned[1].float(), lying[1].float())
    slab = pool.layers["layer.0"][1].flatten(1)
    for head in range(HEADS):
        written = torch.cat([plane[1, :, head].flatten() for plane in lying])
        assert torch.equal(written, slab[head]), "a head's numbers, K before V, in the order of memory"


def test_a_latent_plane_is_found() -> None:
    layers = {"layer.0": torch.randn(PAGES, TOKENS, 24)}
    group = RegisteredGroup("mla", layers, 1, (24,), TOKENS, PAGES)

    def write(name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        layers[name][slots // TOKENS, slots % TOKENS] = key[:, 0]

    pages = register([group], 0, "", write)
    assert pages.facts.packing == "latent" and pages.facts.groups[0].widths == (24,)


def swapped(pool: Pool, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    pool.write(name, value, key, slots)


def scaled(pool: Pool, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    pool.write(name, key * 2, value, slots)


def second_layer_otherwise(pool: Pool, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    pool.write(name, *((key, value) if name == "layer.0" else (value, key)), slots)


def elsewhere(pool: Pool, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    pool.write(name, key, value, slots + pool.tokens)


@pytest.mark.parametrize("form", ["slabs", "heads-first, turned", "planes-0-tokens", "planes-1-heads"])
@pytest.mark.parametrize("wrong", [no_write, swapped, scaled, second_layer_otherwise])
def test_pages_that_are_written_in_another_way_are_bytes(form: str, wrong: Callable[..., None]) -> None:
    pool = Pool(form)
    pages = pool.registered(partial(wrong, pool))
    assert pages.facts.packing.startswith("opaque:torch.float32:") and not pages.facts.refused
    (group,) = pages.facts.groups
    assert (group.dtype, group.kv_heads) == ("uint8", 1)
    row = sum(tensor.nbytes for tensor in pool.layers.values()) // PAGES // TOKENS // 2
    assert sum(group.widths) == row, "all bytes of a page"


def test_a_write_somewhere_else_is_no_proof() -> None:
    """What it wrote there is left there: it is not known where that is."""
    pool = Pool("slabs")
    pages = register([pool.group()], 0, "", partial(elsewhere, pool))
    assert pages.facts.packing.startswith("opaque:")


def test_opaque_pages_of_unlike_shapes_are_different_namespaces() -> None:
    packings = {Pool(form).registered(no_write).facts.packing for form in ("slabs", "tokens-first", "planes-0-tokens")}
    packings.add(Pool("slabs", dtype=torch.bfloat16).registered(no_write).facts.packing)
    assert len(packings) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_bytes_are_numbers_of_is_known_from_the_form(dtype: torch.dtype) -> None:
    """Those of float64 are bytes also where the form is proven, since no codec knows them."""
    pool = Pool("slabs", dtype=dtype)
    packing = pool.registered(pool.write if dtype is torch.float64 else no_write).facts.packing
    assert opaque_dtype(packing) is dtype
    assert opaque_dtype(f"{packing}+slabs") is dtype
    assert opaque_dtype("slabs+latent") is None
    assert opaque_dtype(f"{packing}+opaque:torch.float16:[1]:[1]") is torch.uint8
    assert opaque_dtype("opaque") is torch.uint8


def test_a_layer_of_another_shape_is_refused() -> None:
    pool = Pool("slabs")
    pool.layers["layer.1"] = torch.zeros(PAGES, HEADS, TOKENS, WIDTH)
    assert "pages of different shapes" in pool.registered().facts.refused
    pool.layers["layer.1"] = pool.layers["layer.0"].bfloat16()
    assert "pages of different shapes" in pool.registered().facts.refused


def test_groups_without_layers_and_engines_with_few_pages_are_refused() -> None:
    pool = Pool("slabs")
    empty = RegisteredGroup("b", {}, HEADS, (WIDTH, WIDTH), TOKENS, PAGES)
    for groups in ([pool.group(), empty], [empty, pool.group()]):
        facts = register(groups, 3, "s", pool.write).facts
        assert facts.refused == "group 'b' has no pages here" and (facts.rank, facts.scales) == (3, "s")
    few = Pool("slabs", pages=2)
    assert "3 are needed" in few.registered(num_pages=2).facts.refused
    few = Pool("slabs", pages=4)
    assert few.registered(num_pages=4).facts.refused == "the engine has 4 pages; a block needs 2"


def test_groups_with_pages_of_different_sizes_are_served() -> None:
    """Those whose form is proven as K and V, and others as bytes; blocks are of whole pages of each."""
    one, small = Pool("heads-first", pages=12), {"x": torch.randn(12, HEADS, 16, 2 * WIDTH)}
    groups = [one.group(num_pages=12), one.group(name="b", layers=small, page_tokens=16, num_pages=12, table=1)]
    facts = (pages := register(groups, 0, "", one.write)).facts
    assert not facts.refused and facts.page_tokens == TOKENS and facts.packing.startswith("heads-first+opaque:")
    assert [(group.page_tokens, group.table) for group in facts.groups] == [(32, 0), (16, 1)]
    layout = layout_of([facts], HEADS, 64)
    assert layout is not None
    runs = [PageRun(2, [5, 6]), PageRun(6, [1, 7])]
    given = pages.pages(runs, layout, 64, is_exact=True)
    assert (given.page_tokens, list(given.table)) == (32, [5, 6])
    of_b = given.of_group("b")
    assert (list(of_b.table), of_b.first_page, of_b.page_tokens) == ([1, 7], 2, 16)
    assert pages.cut(runs, layout, 96, 128) == [PageRun(3, [6]), PageRun(6, [1, 7])]
    assert facts.page_bytes == 2 * (one.layers["layer.0"].nbytes + small["x"].nbytes) // 12


def test_rows_of_several_tokens_and_states_are_bytes() -> None:
    latents = RegisteredGroup("l", {"a": torch.randn(PAGES, 1, 2, 24)}, 1, (24,), 64, PAGES, row_tokens=32)
    memory = torch.randint(0, 127, (PAGES, 640), dtype=torch.int8)
    padded = memory[:, :600].view(PAGES, 1, 1, 600)
    state = RegisteredGroup(
        "s", {"b": padded}, 1, (600,), 128, PAGES, 0, Attention.STATE, 128, 1, "gdn", (("float32", 150),), "bfloat16"
    )
    pages = register([latents, state], 0, "", no_write)
    assert not pages.facts.refused and pages.facts.page_tokens == 128
    kv, states = layout_of([pages.facts], 1, 0), layout_of([pages.facts] * 2, 1, 0, states=True)
    assert kv is not None and kv.block_tokens == 128 and kv.groups[0].row_tokens == 32
    assert kv.groups[0].plane_widths == (96,) and kv.packing.startswith("opaque:torch.float32")
    assert states is not None and states.groups[0].plane_widths == (600,), "without what pads a page"
    assert (states.groups[0].kv_heads, states.head_shards, states.block_tokens) == (2, 2, 128), "each rank's own"
    given = pages.pages([PageRun(0, [3])], states, 0, is_exact=True)
    assert (given.page_tokens, list(given.table)) == (128, [3])
    assert torch.equal(given.planes[1][0][3].flatten(), padded[3].flatten().view(torch.uint8))
    assert layout_of([Pool("slabs").registered().facts], HEADS, 0, states=True) is None


def test_pages_that_cannot_be_made_out_are_refused() -> None:
    layers = {"layer.0": torch.zeros(PAGES * 3 + 1, 5)}
    facts = register([RegisteredGroup("a", layers, 2, (8, 8), TOKENS, PAGES)], 0, "", no_write).facts
    assert "cannot be made out" in facts.refused and "\n" not in facts.refused


def test_numbers_with_gaps_between_them_are_refused() -> None:
    pool = Pool("heads-first")
    pool.layers = {name: torch.randn(PAGES, HEADS, TOKENS, 4 * WIDTH)[..., ::2] for name in pool.layers}
    refused = register([pool.group()], 0, "", pool.write).facts.refused
    assert "cannot be compared" in refused and "\n" not in refused


def test_no_error_of_the_proof_ends_an_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nfurther lines")

    pool = Pool("slabs")
    monkeypatch.setattr("engine_adapter.paged.pages._copy_block", failing)
    facts = pool.registered().facts
    assert facts.refused == "its pages cannot be read: CUDA error: out of memory"


# Layouts of several ranks --------------------------------------------------------------------------------------------


def test_ranks_hold_their_own_heads_and_more_ranks_than_heads_the_same() -> None:
    facts = [Pool("slabs").registered().facts for _ in range(4)]
    assert layout_of(facts, 8, 0).groups[0].kv_heads == 8
    assert layout_of(facts, 4, 0).groups[0].kv_heads == 4
    assert layout_of(facts[:1], 0, 0).groups[0].kv_heads == 2
    opaque = [Pool("slabs").registered(no_write).facts for _ in range(4)]
    assert layout_of(opaque, 1, 0).groups[0].kv_heads == 4, "bytes of one rank are not those of another"


def test_ranks_that_disagree_are_told_apart() -> None:
    one, other = Pool("slabs").registered().facts, Pool("tokens-first").registered().facts
    with pytest.raises(BadInput) as caught:
        layout_of([one, other], 4, 0)
    assert one_line(caught.value, "ranks 0 and 0", "different kinds")
