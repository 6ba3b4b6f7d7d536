"""A real vLLM engine on the CPU with the store as its secondary tier, and its sidecar as another process."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.client.socket_door import CallLimits
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
SECONDS = 60
_OWN = ROOT / ".venv" / "bin" / "python"
PYTHON = str(_OWN) if _OWN.exists() else sys.executable
"""What runs the sidecar: an engine's environment need not have what only a sidecar needs."""


class SidecarProcess:
    """`kvstore serve` that can be killed, ended in order, and started again on the same directory and socket."""

    def __init__(self, directory: Path) -> None:
        self.data, self.socket = directory / "kv", directory / "kvstore.sock"
        self._process: subprocess.Popen[str] | None = None
        self._said: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        assert self._process is None
        sizes = ["--dram", "32MiB", "--nvme", "64MiB"]
        command = [PYTHON, "-m", "kvstore", "serve", "--json", "--data", str(self.data), *sizes]
        self._process = subprocess.Popen(
            [*command, "--socket", str(self.socket)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **PATHS},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the sidecar did not start"
        self._said = json.loads(line)

    def kill(self) -> None:
        """It and its keeper, and neither gets to do anything about it. What is not on disk is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGSTOP)  # else it starts another one
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._said["pid"], signal.SIGKILL)
            process.kill()
            process.communicate()

    def end(self) -> None:
        """In order: what memory holds is written down."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


class Engine:
    """One `LLM` in this process."""

    def __init__(self, model: Path, tiers: Sequence[Mapping[str, Any]] | None, **options: Any) -> None:
        """tiers: secondary tiers; None for an engine without any connector."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**offloading(tiers or ()))
        with _out_of_sight("llvmlite.binding.ffi"):
            self.llm = LLM(
                model=str(model),
                enforce_eager=True,
                max_model_len=2048,
                dtype="float32",
                block_size=BLOCK_TOKENS,
                skip_tokenizer_init=True,
                disable_log_stats=False,
                kv_transfer_config=transfer if tiers is not None else None,
                **options,
            )
        self._core: Any = self.llm.llm_engine.engine_core
        self.tier: Any = None
        if tiers:
            connector = self._core.engine_core.scheduler.connector.connector_scheduler
            self.manager = connector.manager
            (self.tier,) = self.manager.secondary_tiers
            be_patient(self.tier)

    def generate(self, prompt: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens that were not computed, and eight tokens."""
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        (answer,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], wanted, use_tqdm=False)
        return answer.num_cached_tokens or 0, tuple(answer.outputs[0].token_ids)

    def reset(self) -> None:
        """Nothing is left in the engine's own cache, nor in the primary tier."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def opened(self) -> None:
        """Return when the tier has its namespaces."""
        opened(self.tier)

    def close(self) -> None:
        self._core.shutdown()


@contextmanager
def _out_of_sight(module: str) -> Iterator[None]:
    """On a CPU vLLM 0.32 looks into every module that is loaded, and stumbles over one of those behind numba, which
    this process may have imported before."""
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


@contextmanager
def engine(model: Path, tiers: Sequence[Mapping[str, Any]] | None, **options: Any) -> Iterator[Engine]:
    """An engine that leaves nothing behind, the memory of its primary tier included."""
    before = set(Path("/dev/shm").glob("vllm_offload_*.mmap"))
    running: Engine | None = None
    try:
        running = Engine(model, tiers, **options)
        yield running
    finally:
        if running is not None:
            running.close()
        for left in set(Path("/dev/shm").glob("vllm_offload_*.mmap")) - before:
            if left.stat().st_uid == os.getuid():
                left.unlink(missing_ok=True)


def tier_of(url: str, **parameters: Any) -> dict[str, Any]:
    """The JSON of the recorded tier."""
    return {"type": "RecordedTier", "module_path": "engines.cpu_tiering", "url": url, **parameters}


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Token ids that nothing ends at. Of one seed all begin alike."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(tokens)]


def offloading(tiers: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """How vLLM is told to offload: these secondary tiers below a worker that runs on a CPU."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "engines.cpu_tiering",
        "cpu_bytes_to_use": 16 << 20,
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "secondary_tiers": [dict(tier) for tier in tiers],
        **more,
    }
    given = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**given, "kv_connector_extra_config": extra}


def opened(tier: Any) -> None:
    """Return when the tier has its namespaces."""
    wait_until(lambda: all(space.handle is not None for space in tier._chunks._spaces))


def be_patient(tier: Any) -> None:
    """Answers may be as late as a busy machine makes them: a late one would be a miss, which is not what is tested."""
    for store in tier._stores:
        store._door._limits = CallLimits(match=10.0, lease=10.0)
    tier._chunks._answer_seconds = 30.0


def takes(function: Any) -> set[str]:
    """Names of a function's parameters, but self."""
    return set(inspect.signature(function).parameters) - {"self"}
