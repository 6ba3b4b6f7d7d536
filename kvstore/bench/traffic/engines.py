"""The engines that `kvstore bench traffic` starts: vLLMs on this machine's CPUs, and sidecars.

    none      without prefix caching
    own       with its own, which holds a tenth of the workload
    kvstore   the same, and our connector with a sidecar
    pd        a prefill and a decode engine on one sidecar, behind kvstore pd-proxy

Each has the same random model and the same number of pages. Nothing of vLLM is imported here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

from kvstore.bench.measure import available_bytes
from kvstore.bench.sidecar import Sidecar
from kvstore.bench.traffic.random_llama import SHAPES, TINY, kv_bytes_per_token, save_model
from kvstore.bench.traffic.workload import Workload
from kvstore.block.errors import BadInput, StoreError

NONE, OWN, KVSTORE, PD = KINDS = ("none", "own", "kvstore", "pd")
PARTS = {PD: {f"{PD}-prefill": "kv_producer", f"{PD}-decode": "kv_consumer"}}
"""Kinds that consist of several engines, with their roles."""
MODEL = "random"
PAGE_TOKENS = 128
"""Of vLLM's pages on a CPU."""
SPARE_PAGES = 2
OWN_SHARE = 0.1
"""Share of the workload's blocks that an engine's own cache holds."""
SPARE_BYTES = 256 << 20
START_SECONDS = 300.0
LOOK_SECONDS = 0.25
END_SECONDS = 30.0
HOST = "127.0.0.1"
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several engines run at once, and a small model's threads synchronise often: spinning threads would take the
    # others' CPU.
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "0",
    # By itself vLLM keeps cores free, one more where it has a connector: on two cores that halves those of an engine
    # without one, which then looks half as fast.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """metrics: engines whose counters are read; `url` if empty. sidecar: likewise."""

    name: str
    url: str
    metrics: tuple[str, ...] = ()
    sidecar: str | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """kinds: of `KINDS`. shape: the model's. own_share: see `OWN_SHARE`."""

    kinds: tuple[str, ...]
    shape: str = TINY
    own_share: float = OWN_SHARE

    @staticmethod
    def of(kinds: Sequence[str], shape: str | None, own_share: float) -> EngineOptions:
        """Raises `BadInput`, also without vLLM."""
        for one in kinds:
            if one not in KINDS:
                raise BadInput(f"--engines {one[:40]!r}; allowed: {', '.join(KINDS)}")
        if len(set(kinds)) < len(kinds):
            raise BadInput("--engines names one twice; give each once, and --turns for how often they are asked")
        if shape is not None and shape not in SHAPES:
            raise BadInput(f"--shape {shape[:40]!r}; allowed: {', '.join(SHAPES)}")
        if find_spec("vllm") is None:
            raise BadInput(
                f"--engines needs vLLM, which {sys.executable} does not have; make engines makes .venv-engines, which "
                "has it: .venv-engines/bin/python -m kvstore bench traffic ... (or give --endpoint)"
            )
        return EngineOptions(tuple(kinds), shape or TINY, own_share)

    def pages(self, workload: Workload) -> int:
        """Per engine: its share of the workload, but at least one request."""
        share = int(self.own_share * workload.working_set_tokens)
        return max(-(-share // PAGE_TOKENS), -(-workload.longest_tokens // PAGE_TOKENS)) + SPARE_PAGES

    def flags(self, kind: str, workload: Workload) -> list[str]:
        """Of an engine of that kind."""
        caches = "--no-enable-prefix-caching" if kind == NONE else "--enable-prefix-caching"
        pages, longest = str(self.pages(workload)), str(workload.longest_tokens)
        return ["--num-gpu-blocks-override", pages, "--max-model-len", longest, caches]

    def to_dict(self) -> dict[str, object]:
        return {"engines": list(self.kinds), "shape": self.shape, "own_share": self.own_share}


def started(
    options: EngineOptions, workload: Workload, turns: int, scratch: Path, stack: ExitStack, tell: Tell
) -> list[Endpoint]:
    """Start all engines; returns once they answer. They end with `stack`. Raises `StoreError`."""
    tell(f"making a random {options.shape} Llama", 0, 0)
    model = scratch / "model"
    save_model(options.shape, model)
    sidecars: dict[str, Sidecar] = {}
    for kind in options.kinds:
        if kind in (KVSTORE, PD):
            tell(f"starting a sidecar for {kind}", 0, 0)
            sidecars[kind] = _sidecar(kv_bytes_per_token(options.shape), workload, turns, stack)
    servers: dict[str, ServerProcess] = {}
    for kind in options.kinds:
        for name, role in PARTS.get(kind, {kind: "kv_both"}).items():
            tell(f"starting an engine: {name}", 0, 0)
            transfer = connector(sidecars[kind].socket, role) if kind in sidecars else None
            flags = options.flags(kind, workload)
            servers[name] = stack.enter_context(vllm_server(name, model, scratch, flags, transfer))
            servers[name].wait()  # one at a time: each takes all cores to start
    return [_endpoint(kind, servers, sidecars.get(kind), scratch, stack) for kind in options.kinds]


def _endpoint(
    kind: str, servers: Mapping[str, ServerProcess], sidecar: Sidecar | None, scratch: Path, stack: ExitStack
) -> Endpoint:
    told = None if sidecar is None else f"http://{HOST}:{sidecar.http_port}"
    if kind != PD:
        return Endpoint(kind, servers[kind].url, (), told)
    prefill, decode = servers[f"{PD}-prefill"], servers[f"{PD}-decode"]
    proxy = stack.enter_context(proxy_server(prefill.url, [decode.url], scratch))
    proxy.wait()
    return Endpoint(kind, proxy.url, (decode.url,), told)


def _sidecar(token_bytes: int, workload: Workload, turns: int, stack: ExitStack) -> Sidecar:
    """Room for all turns, but at most half of the free memory."""
    wanted = int(1.25 * (turns + 1) * workload.working_set_tokens) * token_bytes + SPARE_BYTES
    dram = min(wanted, available_bytes() // 2)
    sidecar = stack.enter_context(Sidecar({"dram": dram, "nvme": "off"}, has_health=True))
    sidecar.greeted()
    sidecar.ready()
    return sidecar


def connector(socket_path: str, role: str = "kv_both", **settings: object) -> dict[str, object]:
    """Configuration of our connector: its defaults, and these settings."""
    return {
        "kv_connector": "KvStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": f"unix:{socket_path}", **settings},
    }


class ServerProcess:
    """An HTTP server in its own process group. A context manager: ends it, or kills it after a failure."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, scratch: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        """command: must listen at that port. settings: of its environment."""
        self.name = name
        self.url = f"http://{HOST}:{port}"
        self._port = port
        self._log = scratch / f"{name}.log"
        told = [f"{key}={value}" for key, value in (settings or {}).items()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["env", *told, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it is healthy. Raises `StoreError`."""
        give_up_at = monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise self._failure(f"ended with {self._process.returncode}")
            if monotonic() > give_up_at:
                raise self._failure(f"was not there after {START_SECONDS:.0f} s")
            sleep(LOOK_SECONDS)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)  # includes its child processes
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _is_healthy(self) -> bool:
        connection = HTTPConnection(HOST, self._port, timeout=LOOK_SECONDS * 8)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> StoreError:
        """One line: the last of its log that names an error."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line] or lines
        said = named[-1].strip()[-300:] if named else "no log"
        return StoreError(f"the engine '{self.name}' {what}: {said}")


def vllm_server(
    name: str,
    model: Path,
    scratch: Path,
    flags: Sequence[str] = (),
    transfer: Mapping[str, object] | None = None,
    python: str = sys.executable,
) -> ServerProcess:
    """vLLM's own server with a model from `save_model`. transfer: its `--kv-transfer-config`. python: has vLLM."""
    port = free_port()
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--seed", "0", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    command += flags
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return ServerProcess(name, command, port, scratch, SETTINGS)


def proxy_server(prefill: str, decodes: Sequence[str], scratch: Path) -> ServerProcess:
    """`kvstore pd-proxy` in front of these engines."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "kvstore", "pd-proxy", "--prefill", prefill, "--listen", f"{HOST}:{port}"]
    command += [word for one in decodes for word in ("--decode", one)]
    return ServerProcess("pd-proxy", command, port, scratch)


def free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
        return port
