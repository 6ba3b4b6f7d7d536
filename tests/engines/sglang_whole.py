"""A whole SGLang engine on a CPU: its scheduler, radix tree, write-through and prefetch are its own.

SGLang asks for packages that are builds for CUDA. Stand-ins take their places: every name in them is there, and raises
when it is called. Of what copies between the GPU and the host pools there are four functions in torch, and a stream and
a registration of host memory that have nothing to wait for. SGLang's package is not changed.

A process that has imported all this forks one for each engine, since importing takes longer than everything else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Self

SECONDS = 120
"""That one call may take."""
OPTIONS: dict[str, Any] = dict(
    device="cpu",
    attention_backend="torch_native",
    sampling_backend="pytorch",
    grammar_backend="none",
    disable_overlap_schedule=True,
    disable_cuda_graph=True,
    page_size=64,
    dtype="float32",
    max_total_tokens=8192,
    mem_fraction_static=0.3,
    skip_tokenizer_init=True,
    log_level="warning",
)
STORED = dict(
    enable_hierarchical_cache=True,
    hicache_storage_backend="dynamic",
    hicache_io_backend="direct",
    hicache_storage_prefetch_policy="wait_complete",
)


class _Absent(type):
    """A name of a package that is not there, and all names below it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __call__(cls, *given: Any, **more: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} is of a package that is not there")


class _AbsentModule(ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


class StandIns:
    """Finds these packages, and whatever is asked for below them. A context."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._names else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] in self._names]:
            del sys.modules[name]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _copy_layers(k_list: Any, v_list: Any, tgt: Any, src: Any) -> None:
    for layer in (*k_list, *v_list):
        layer[tgt] = layer[src]


def _direct(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _to_device(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def _to_host(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


def _prepare() -> None:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    StandIns("sgl_kernel", "cutlass", "quack", "torchaudio", "torchvision").__enter__()
    import_module("sgl_kernel").copy_all_layer_kv_cache_cpu = _copy_layers  # type: ignore[attr-defined]
    for name in ("entrypoints.engine", "managers.scheduler", "managers.detokenizer_manager", "models.registry"):
        import_module(f"sglang.srt.{name}")
    pools: Any = [import_module(f"sglang.srt.mem_cache.pool_host.{name}") for name in ("base", "mha")]
    pools[0].HostKVCache.pin_memory = property(lambda _: False, _nothing)
    pools[1].transfer_kv_direct = _direct
    pools[1].transfer_kv_per_layer_direct_pf_lf, pools[1].transfer_kv_all_layer_direct_lf_pf = _to_device, _to_host
    for name in ("synchronize", "wait_stream", "wait_event", "record_event"):
        setattr(import_module("torch").cpu.Stream, name, _nothing)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = _nothing  # type: ignore[assignment]  # SGLang's own processes are forked, too


def _serve(calls: Connection) -> None:
    """In a process of its own: an engine after the other, each in a process that is forked from this one."""
    os.setpgid(0, 0)
    _prepare()
    while options := calls.recv():
        if os.fork():
            os.wait()
            calls.send(None)  # it has ended
            continue
        try:
            engine = import_module("sglang.srt.entrypoints.engine").Engine(**options)
            calls.send(True)
            for given in iter(calls.recv, None):
                calls.send(engine.generate(**given))
            engine.shutdown()
        finally:
            os._exit(1)


class WholeEngines:
    """Engines of a model, of which one runs at a time. A context."""

    def __init__(self, model: Path) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._calls, theirs = spawning.Pipe()
        self._process, self._model = spawning.Process(target=_serve, args=(theirs,)), model
        self._process.start()

    @contextmanager
    def started(
        self, url: str = "", layout: str = "layer_first", v1: int = 1, **options: Any
    ) -> Iterator[WholeEngines]:
        """url: of its store; without it there is no HiCache either. What SGLang logs is this process's own."""
        named = {"backend_name": "kvstore", "module_path": "engine_adapter.sglang_storage", "url": url}
        named |= {"class_name": "KvStoreHiCache", "deadline_ms": 10_000, "save_deadline_ms": 10_000}
        named |= {"interface_v1": v1, "hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 64}
        options |= {**STORED, "hicache_mem_layout": layout} if url else {}
        options |= {"hicache_storage_backend_extra_config": json.dumps(named)} if url else {}
        assert self._call({"model_path": str(self._model), **OPTIONS, **options}), "it does not start"
        yield self
        self._call(None)

    def answer(self, prompts: list[list[int]], tokens: int = 8) -> list[tuple[list[int], dict[str, int]]]:
        """Of each prompt the tokens, and how many of its own came from which cache. Those of one call run together."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        told = self._call({"input_ids": prompts, "sampling_params": sampling})
        return [(one["output_ids"], one["meta_info"]["cached_tokens_details"] or {}) for one in told]

    def _call(self, given: Any) -> Any:
        self._calls.send(given)
        assert self._calls.poll(SECONDS), "no answer"
        return self._calls.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
