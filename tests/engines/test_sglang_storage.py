"""SGLang's HiCache with the store behind it: its own storage factory, cache controllers and host pools, on a CPU.

test_sglang_engine.py has the scheduler with its radix tree. What runs on a GPU alone is in neither: copies between the
GPU and a host pool; nor are several ranks that agree over a network (`torch.distributed`).
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engines.sglang_cpu  # noqa: F401  prepares what the others import
from engine_adapter.sglang_storage import (
    WRITERS,
    KvStoreHiCache,
    engine_facts,
    is_replicated,
    rank_facts,
)
from engines.sglang_cpu import (
    LAYERS,
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    SGLANG,
    HiCache,
    device_pool,
    hashes_of,
    host_pool,
    page_of,
    prompt_of,
    same,
    save_weights,
)
from kvstore.block.errors import BadInput
from service.sidecar import Sidecar
from waiting import wait_until

HiCacheStorage = SGLANG["hicache_storage"].HiCacheStorage
PoolName, PoolTransfer = SGLANG["hicache_storage"].PoolName, SGLANG["hicache_storage"].PoolTransfer
PoolHitPolicy = SGLANG["hicache_storage"].PoolHitPolicy
BATCH = SGLANG["hicache_storage"].STORAGE_BATCH_SIZE

# --- the installed interface -----------------------------------------------------------------------------------------

CALLED = {
    "register_mem_pool_host": ["mem_pool_host"],
    "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
    "batch_exists": ["keys", "extra_info"],
    "batch_exists_v2": ["keys", "pool_transfers", "extra_info"],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_get_v2": ["transfers", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v2": ["transfers", "extra_info"],
    "get": ["key", "target_location", "target_sizes"],
    "batch_get": ["keys", "target_locations", "target_sizes"],
    "set": ["key", "value", "target_location", "target_sizes"],
    "batch_set": ["keys", "values", "target_locations", "target_sizes"],
    "exists": ["key"],
    "clear": [],
    "get_stats": [],
}
LEFT_ALONE = {"on_host_pools_registered"}  # each pool's namespace is opened when it is registered
CONFIG_FIELDS = {
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "dp_rank"),
    *("enable_storage_metrics", "is_page_first_layout", "model_name", "tp_lcm_size", "should_split_heads"),
    *("extra_config", "dcp_size", "dcp_rank", "logical_page_size"),
}
TRANSFER_FIELDS = {
    *("name", "host_indices", "device_indices", "keys", "hit_policy", "nodes_to_load", "indices_from_pool"),
    *("block_pages", "group_pages"),
}


def test_the_interface_is_the_one_that_is_known() -> None:
    """What is new or gone in the installed SGLang is named."""
    there = {
        name: [one for one in inspect.signature(method).parameters if one != "self"]
        for name, method in vars(HiCacheStorage).items()
        if not name.startswith("_") and callable(method)
    }
    new = {name: there[name] for name in there.keys() - CALLED.keys() - LEFT_ALONE}
    gone = {name: CALLED[name] for name in CALLED.keys() - there.keys()}
    changed = {name: there[name] for name in CALLED.keys() & there.keys() if there[name] != CALLED[name]}
    assert (new, gone, changed) == ({}, {}, {}), "SGLang asks storage backends for something else"
    assert HiCacheStorage.__abstractmethods__ <= CALLED.keys() and not KvStoreHiCache.__abstractmethods__
    ours = {name: [*inspect.signature(getattr(KvStoreHiCache, name)).parameters][1:] for name in CALLED}
    assert ours == CALLED
    hicache = SGLANG["hicache_storage"]
    assert {*hicache.HiCacheStorageConfig.__dataclass_fields__} == CONFIG_FIELDS, (
        "is there something that decides bytes?"
    )
    assert {*PoolTransfer.__dataclass_fields__} == TRANSFER_FIELDS
    assert {*hicache.HiCacheStorageExtraInfo.__dataclass_fields__} == {"prefix_keys", "extra_info"}
    assert {one.name for one in PoolHitPolicy} == {"ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"}


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path, dram="512MiB") as running:
        yield running


@pytest.fixture
def opened(sidecar: Sidecar, weights: Path) -> Callable[..., HiCache]:
    return lambda **more: HiCache(f"unix:{sidecar.path}", weights, **more)


LAYOUTS = [*(("mha", layout) for layout in MHA_LAYOUTS), *(("mla", layout) for layout in MLA_LAYOUTS)]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_come_back_bit_for_bit(kind: str, layout: str, opened: Callable[..., HiCache]) -> None:
    pages = BATCH + 22
    prompt = prompt_of(pages + 50, seed=1)
    with opened(kind=kind, layout=layout).opened() as engine:
        assert engine.read(prompt) == (0, [])
        stored, contents = engine.write(prompt[: pages * PAGE])
        assert stored == pages, "in a batch of 128 and one of 22"
        found, loaded = engine.read(prompt)
        assert found == pages and same(loaded, contents)
        assert engine.read(prompt_of(pages, seed=2)) == (0, [])
        counts = engine.backend.outcomes.take()
        assert (counts["stored"], counts["loaded"]) == (pages, pages) and not counts.keys() & {"faults", "failed_loads"}


def test_another_engine_reads_what_one_wrote_and_other_weights_do_not(
    opened: Callable[..., HiCache], sidecar: Sidecar, tmp_path: Path
) -> None:
    prompt = prompt_of(20, seed=1)
    with opened().opened() as engine:
        _, contents = engine.write(prompt)
    with opened(seed=7).opened() as other:
        found, loaded = other.read(prompt)
        assert found == 20 and same(loaded, contents)
    retrained = save_weights(tmp_path / "retrained", seed=1)
    for strange in (
        opened(layout="page_first_direct"),
        opened(weights_epoch=1),
        HiCache(f"unix:{sidecar.path}", retrained),
    ):
        with strange.opened() as other:
            assert other.read(prompt) == (0, [])


# --- faults ----------------------------------------------------------------------------------------------------------


def test_calls_that_make_no_sense_are_false(opened: Callable[..., HiCache]) -> None:
    prompt = prompt_of(4, seed=1)
    hashes = hashes_of(prompt)
    with opened().opened() as engine:
        backend, indices = engine.backend, engine.pool.alloc(4 * PAGE)
        assert backend.batch_set_v1(hashes, indices[:-1]) == backend.batch_get_v1(hashes, indices[1:]) == [False] * 4
        assert backend.batch_set_v1(hashes, indices + 1) == [False] * 4, "no page begins there"
        assert backend.batch_set_v1(hashes, indices + 400 * PAGE) == [False] * 4, "there are no such pages"
        assert backend.batch_get_v1([], indices[:0]) == [] == backend.batch_set_v1([], indices[:0])
        assert backend.batch_exists([]) == 0 == backend.batch_exists(["no hash"])
        assert backend.batch_set_v1([hashes[0], "no hash", hashes[2]], indices[: 3 * PAGE]) == [True, False, False]
        assert backend.batch_get_v2([PoolTransfer("strange", indices, keys=hashes)]) == {"strange": [False] * 4}
        assert backend.get(hashes[0], torch.zeros(3)) is None and backend.get(hashes[0]) is None
        assert backend.set(hashes[0]) is False


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_own_heads(opened: Callable[..., HiCache]) -> None:
    prompt = prompt_of(20, seed=1)
    with opened(rank=0, ranks=2, seed=1).opened() as first, opened(rank=1, ranks=2, seed=2).opened() as second:
        _, of_first = first.write(prompt)
        assert second.read(prompt) == (0, []), "the other half of the heads"
        _, of_second = second.write(prompt)
        assert same(first.read(prompt)[1], of_first) and same(second.read(prompt)[1], of_second)
        assert not same(of_first, of_second)


def test_latents_are_written_by_one_rank_and_read_by_all(opened: Callable[..., HiCache]) -> None:
    prompt = prompt_of(20, seed=1)
    with (
        opened(kind="mla", rank=0, ranks=2).opened() as first,
        opened(kind="mla", rank=1, ranks=2, seed=2).opened() as second,
    ):
        second.write(prompt)
        assert first.read(prompt) == (0, []), "SGLang's second rank stores nothing"
        pages = second.pool.alloc(20 * PAGE)
        assert all(second.backend.batch_set_v1(hashes_of(prompt), pages)) and first.read(prompt) == (0, [])
        _, contents = first.write(prompt)
        found, loaded = second.read(prompt)
        assert found == 20 and same(loaded, contents)


# --- several pools ---------------------------------------------------------------------------------------------------


def transfer(name: Any, keys: list[str], pool: Any, policy: Any = PoolHitPolicy.ALL_PAGES) -> Any:
    return PoolTransfer(name, pool.alloc(len(keys) * PAGE), keys=keys, hit_policy=policy)


def test_several_pools(opened: Callable[..., HiCache]) -> None:
    hashes = hashes_of(prompt_of(12, seed=1))
    with opened().opened() as engine:
        backend = engine.backend
        states, drafts = (host_pool(device_pool(kind), "page_first", 64, seed=3) for kind in ("mla", "mha"))
        backend.register_mem_host_pool_v2(states, PoolName.SWA)
        backend.register_mem_host_pool_v2(drafts, PoolName.DRAFT)
        wait_until(lambda: all(space.handle is not None for space in backend._spaces.values()))
        kv = transfer(PoolName.KV, hashes, engine.pool)
        draft = transfer(PoolName.DRAFT, hashes[:9], drafts)
        swa = [transfer(PoolName.SWA, hashes[at : at + 2], states, PoolHitPolicy.TRAILING_PAGES) for at in (2, 6)]
        info = SGLANG["hicache_storage"].HiCacheStorageExtraInfo(prefix_keys=[])
        for some in ([kv, draft, swa[0]], [swa[1]]):
            stored = backend.batch_set_v2(some, info)
            assert stored == {one.name: [True] * len(one.keys) for one in some}
        asked = [
            PoolTransfer(PoolName.DRAFT),
            PoolTransfer(PoolName.SWA, keys=hashes[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ]
        assert backend.batch_exists_v2(hashes).kv_hit_pages == 12
        result = backend.batch_exists_v2(hashes, asked)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [4, 8]), "as far as all have what they need"
        assert result.extra_pool_hit_pages == {"kv": 12, "draft": 9, "swa": 8}
        into = transfer(PoolName.SWA, hashes[6:8], states, PoolHitPolicy.TRAILING_PAGES)
        more = transfer(PoolName.DRAFT, hashes[7:11], drafts)
        assert backend.batch_get_v2([into, more]) == {"swa": [True] * 2, "draft": [True, True, False, False]}
        for one, other in zip(swa[1].host_indices[::PAGE], into.host_indices[::PAGE], strict=True):
            assert torch.equal(page_of(states, int(one) // PAGE), page_of(states, int(other) // PAGE))
        groups = PoolTransfer(PoolName.MAMBA, keys=hashes, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert backend.batch_exists_v2(hashes, [groups]).kv_hit_pages == 12, "they never shorten a prefix"
        assert backend.batch_exists_v2(hashes, [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 0, (
            "there is no such pool"
        )


# --- SGLang's other calls --------------------------------------------------------------------------------------------


def test_clearing_is_for_all_engines(opened: Callable[..., HiCache]) -> None:
    prompt = prompt_of(20, seed=1)
    with opened().opened() as engine, opened(seed=2).opened() as other:
        engine.write(prompt)
        assert engine.read(prompt)[0] == 20 and engine.backend.clear() is True
        assert engine.read(prompt) == other.read(prompt) == (0, [])
        assert engine.write(prompt)[0] == 20, "and it goes on"


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_pages_are_counted_once_in_either_interface(interface_v1: int, opened: Callable[..., HiCache]) -> None:
    prompt = prompt_of(6, seed=1)
    with opened(interface_v1=interface_v1).opened() as engine:
        engine.backend._config.enable_storage_metrics = True
        engine.write(prompt[: 4 * PAGE])
        assert engine.backend.get_stats().backup_pgs == [4]
        assert engine.write(prompt[: 4 * PAGE])[0] == 4 and engine.backend.get_stats().backup_pgs == [], "no new one"
        engine.write(prompt)
        assert engine.read(prompt)[0] == 6
        told = engine.backend.get_stats()
        assert (told.backup_pgs, sum(told.prefetch_pgs)) == ([2], 6) and min(told.prefetch_bandwidth) > 0
        assert len(told.backup_bandwidth) == 1 and engine.backend.get_stats().prefetch_pgs == []
        counts = engine.backend.outcomes.take()
        assert (counts["stored"], counts["present"]) == (6, 8)


def test_a_history_at_random_is_that_of_a_dictionary(opened: Callable[..., HiCache]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [prompt_of(30, seed=number) for number in range(4)]
    model: dict[str, torch.Tensor] = {}
    with opened(layout=rng.choice(MHA_LAYOUTS)).opened() as engine:
        for _ in range(60):
            hashes = hashes_of(rng.choice(prompts))
            first = rng.randrange(30)
            some = hashes[first : rng.randrange(first, 30) + 1]
            pages = engine.pool.alloc(len(some) * PAGE)
            if rng.random() < 0.5:
                info = SGLANG["hicache_storage"].HiCacheStorageExtraInfo(prefix_keys=rng.choice([None, hashes[:first]]))
                assert all(engine.backend.batch_set_v1(some, pages, info))
                for key, index in zip(some, pages[::PAGE], strict=True):
                    model.setdefault(key, page_of(engine.pool, int(index) // PAGE))
            else:
                known = next((at for at, key in enumerate(some) if key not in model), len(some))
                assert engine.backend.batch_exists(some) == known
                assert engine.backend.batch_get_v1(some, pages) == [True] * known + [False] * (len(some) - known)
                for key, index in zip(some[:known], pages[::PAGE], strict=False):
                    assert torch.equal(page_of(engine.pool, int(index) // PAGE), model[key])
            engine.pool.free(pages)


# --- what is refused, and what a namespace is of ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"url": ""}, "url=''; give the store's address"),
        ({"url": "tcp:x"}, "not a store's address"),
        ({"sise": 3}, "KvStoreHiCache: sise is not a setting"),
        ({"deadline_ms": "soon"}, "KvStoreHiCache: deadline_ms='soon'; give a number"),
        ({"weights_epoch": None}, "KvStoreHiCache: weights_epoch=None; give a whole number"),
        ({"model_dir": "/nowhere"}, "cannot be read"),
        ({"model_dir": None}, "give the weights as model_dir"),
    ],
)
def test_parameters_are_checked(extra: dict[str, Any], what: str, weights: Path) -> None:
    given = {"url": "unix:x", "model_dir": str(weights), **extra}
    config = SimpleNamespace(extra_config=given)
    with pytest.raises(BadInput, match=what) as raised:
        KvStoreHiCache(config, {})
    assert "\n" not in str(raised.value)


def test_pages_that_are_no_blocks_are_refused(weights: Path) -> None:
    backend = KvStoreHiCache(config_of(extra_config={"url": "unix:x", "model_dir": str(weights)}), {})
    pool = host_pool(device_pool("mha"), "page_first", 8)
    pool.page_size, pool.size = 32768, 3 * 32768
    with pytest.raises(BadInput, match=r"at most 16384.*smaller --page-size"):
        backend.register_mem_pool_host(pool)
    backend.close()


def config_of(**more: Any) -> Any:
    known = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
    rest = dict(enable_storage_metrics=False, is_page_first_layout=True, model_name="m")
    return SGLANG["hicache_storage"].HiCacheStorageConfig(**{**known, **rest, **more})


def test_ranks_and_layers_are_in_the_namespace() -> None:
    heads, latents = host_pool(device_pool("mha"), "page_first", 8), host_pool(device_pool("mla"), "page_first", 8)
    two = [config_of(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert rank_facts(two[0], heads, "kv") != rank_facts(two[1], heads, "kv")
    mla = [config_of(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)]
    assert rank_facts(mla[0], latents, "kv") == rank_facts(mla[1], latents, "kv")
    assert rank_facts(mla[0], latents, PoolName.MAMBA) != rank_facts(mla[1], latents, PoolName.MAMBA)
    assert rank_facts(mla[0], heads, "draft") != rank_facts(mla[1], heads, "draft"), "heads beside latents"
    assert not is_replicated(two[0], latents, "kv")
    second = config_of(pp_rank=1, pp_size=2)
    assert rank_facts(second, heads, "kv") != rank_facts(config_of(pp_rank=0, pp_size=2), heads, "kv")
    assert f"layers 0 to {LAYERS}" in rank_facts(second, heads, "kv")


ARGS = dict(model_path="", revision=None, download_dir=None, load_format="auto", enable_lora=None, lora_paths=None)


def test_arguments_that_decide_kv_are_in_the_namespace(weights: Path) -> None:
    def facts(**more: Any) -> tuple[str, dict[str, str]]:
        return engine_facts(SimpleNamespace(**{**ARGS, "model_path": str(weights), **more}), None)

    plain = facts()
    assert plain == facts(port=3) and plain[0] == engine_facts(None, str(weights))[0]
    for change in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope": 1}'},
    ):
        assert facts(**change) != plain
    drafted = facts(speculative_draft_model_path=str(weights), speculative_draft_model_revision=None)
    assert drafted[1]["draft"] and not plain[1]["draft"]
    for refused in ({"enable_lora": True}, {"lora_paths": ["x"]}, {"load_format": "dummy"}):
        with pytest.raises(BadInput) as raised:
            facts(**refused)
        assert "\n" not in str(raised.value)
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    with pytest.raises(BadInput, match="enable_multimodal=false"):
        facts()
    assert facts(enable_multimodal=False)
    (weights / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="model_dir"):
        facts(model_path="no-hub/has-this-model")


UPDATES = ["update_weights_from_disk", "update_weights_from_ipc", "begin_weight_update", "check_weights"]
"""Updates from tensors and by a group of processes come after `begin_weight_update`."""


@pytest.mark.parametrize("how", UPDATES)
def test_pages_of_weights_that_were_changed_in_place_are_neither_found_nor_stored(
    how: str, opened: Callable[..., HiCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by a backend that is attached later."""
    monkeypatch.setattr(KvStoreHiCache, "_is_off", False)
    prompts = prompt_of(4, seed=1), prompt_of(4, seed=2)
    with opened().opened() as engine:
        assert engine.write(prompts[0])[0] == 4 and engine.read(prompts[0])[0] == 4
        updater, checker = (object.__new__(getattr(sys.modules[module], kind)) for module, kind in WRITERS)
        runner = SimpleNamespace(weight_updater=updater, check_weights=lambda **given: checker.handle(**given))
        scheduler = object.__new__(SGLANG["weight_updater"].SchedulerWeightUpdaterManager)
        scheduler.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        scheduler.draft_worker = scheduler.metrics_collector = scheduler._session = None
        disk = {"model_path": "", "load_format": "auto", "recapture_cuda_graph": False}
        check = {"action": "reset_tensors", "allow_quant_error": False, "skip_tensor_list": None}
        with suppress(AttributeError, ValueError):  # there is no model here
            getattr(scheduler, how)(SimpleNamespace(selector="all", **disk, **check))
        assert engine.read(prompts[0])[0] == 0 and engine.write(prompts[1])[0] == 0
        engine.backend.register_mem_host_pool_v2(engine.pool, PoolName.DRAFT)
        assert engine.backend.batch_exists(hashes_of(prompts[0])) == 0
    with opened() as again:
        assert again.read(prompts[0])[0] == 0 and again.write(prompts[1])[0] == 0
    monkeypatch.setattr(KvStoreHiCache, "_is_off", False)  # of a process of its own
    with opened().opened() as restarted:
        assert restarted.read(prompts[0])[0] == 4 and restarted.read(prompts[1])[0] == 0
