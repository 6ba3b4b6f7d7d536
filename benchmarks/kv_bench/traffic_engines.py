"""The engines that `kvstore bench traffic --engines` starts: vLLMs with one random model, and sidecars.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kv_bench.llamas import MID, TINY, kv_bytes_per_token, save_model
from kv_bench.measure import available_bytes
from kv_bench.process import HOST, Server, Sidecar, free_port
from kv_bench.script import one_of
from kv_bench.ttft_vllm import VLLM_SETTINGS, connector
from kvstore.block.errors import BadInput
from kvstore.traffic.run import Endpoint, EngineStarter, Progress, Workload

NONE, OWN, KVSTORE, PD = KINDS = ("none", "own", "kvstore", "pd")
PARTS = {PD: {f"{PD}-prefill": "kv_producer", f"{PD}-decode": "kv_consumer"}}
"""Kinds that consist of several engines, with their roles."""
SHAPES = (TINY, MID)
MODEL = "random"
PAGE_TOKENS = 128
"""Of vLLM's pages on a CPU."""
SPARE_PAGES, SPARE_BYTES = 2, 256 << 20
OWN_SHARE = 0.1
"""Share of the workload's blocks that an engine's own cache holds."""
SETTINGS = {
    **VLLM_SETTINGS,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several engines run at once, and a small model's threads synchronise often: spinning threads would take the
    # others' CPU.
    "OMP_WAIT_POLICY": "passive",
    "KMP_BLOCKTIME": "0",
    # By itself vLLM keeps cores free, one more where it has a connector: on two cores that halves those of an engine
    # without one, which then looks half as fast.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
}


def starter_of(kinds: Sequence[str], shape: str | None, own_share: float) -> EngineStarter:
    """kinds: of `KINDS`. shape: the model's. own_share: see `OWN_SHARE`. Raises `BadInput`, also without vLLM."""
    for one in kinds:
        one_of("--engines", one, KINDS)
    if len(set(kinds)) < len(kinds):
        raise BadInput("--engines names one twice; give each once, and --turns for how often they are asked")
    one_of("--shape", shape, SHAPES)
    if find_spec("vllm") is None:
        raise BadInput(
            f"--engines needs vLLM, which {sys.executable} does not have; make engines makes .venv-engines, which "
            "has it: .venv-engines/bin/python -m kvstore bench traffic ... (or give --endpoint)"
        )
    return Engines(tuple(kinds), shape or TINY, own_share).started


@dataclass(frozen=True, slots=True)
class Engines:
    """Of some kinds, with a model of a shape, and so much of the workload in each engine's own cache."""

    kinds: tuple[str, ...]
    shape: str = TINY
    own_share: float = OWN_SHARE

    def started(
        self, workload: Workload, turns: int, stack: ExitStack, tell: Progress
    ) -> tuple[list[Endpoint], dict[str, object]]:
        """An `EngineStarter`: returns once all answer. Raises `StoreError`."""
        tell(f"making a random {self.shape} Llama", 0, 0)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        save_model(self.shape, scratch / "model")
        endpoints = [self._endpoint(kind, workload, turns, scratch, stack, tell) for kind in self.kinds]
        facts = {"engines": list(self.kinds), "shape": self.shape, "own_share": self.own_share}
        return endpoints, facts | {"findable_tokens": findable_tokens(workload, PAGE_TOKENS)}

    def flags(self, kind: str, workload: Workload) -> list[str]:
        share, longest = int(self.own_share * workload.working_set_tokens), workload.longest_tokens
        pages = max(-(-share // PAGE_TOKENS), -(-longest // PAGE_TOKENS)) + SPARE_PAGES
        caches = "--no-enable-prefix-caching" if kind == NONE else "--enable-prefix-caching"
        return ["--num-gpu-blocks-override", str(pages), "--max-model-len", str(longest), caches]

    def _endpoint(
        self, kind: str, workload: Workload, turns: int, scratch: Path, stack: ExitStack, tell: Progress
    ) -> Endpoint:
        sidecar, told, urls = None, None, []
        if kind in (KVSTORE, PD):
            tell(f"starting a sidecar for {kind}", 0, 0)
            # Room for all turns, but at most half of the free memory.
            tokens = int(1.25 * (turns + 1) * workload.working_set_tokens)
            dram = min(tokens * kv_bytes_per_token(self.shape) + SPARE_BYTES, available_bytes() // 2)
            sidecar = stack.enter_context(Sidecar({"dram": dram, "nvme": "off"}, has_health=True))
            sidecar.ready()
            told = sidecar.http
        for name, role in PARTS.get(kind, {kind: "kv_both"}).items():
            tell(f"starting an engine: {name}", 0, 0)
            transfer = None if sidecar is None else connector(sidecar.socket) | {"kv_role": role}
            server = vllm_server(name, scratch / "model", scratch, self.flags(kind, workload), transfer)
            urls.append(stack.enter_context(server).url)
            server.wait()  # one at a time: each takes all cores to start
        if kind != PD:
            return Endpoint(kind, urls[0], (), told)
        prefill, decode = urls
        proxy = stack.enter_context(proxy_server(prefill, [decode], scratch))
        proxy.wait()
        return Endpoint(kind, proxy.url, (decode,), told)


def findable_tokens(workload: Workload, page_tokens: int) -> int:
    """In whole pages that an unlimited cache finds; an engine computes the last token of each prompt itself."""
    seen: set[tuple[int, int]] = set()
    found = 0
    for one in workload.requests:
        tokens = workload.tokens_of(one)
        # A page is named by the block in which it ends: that block's number stands for all before it.
        ends = range(page_tokens, tokens + 1, page_tokens)
        pages = [(one.chain[(end - 1) // workload.block_tokens], end) for end in ends]
        wanted = pages[: (tokens - 1) // page_tokens]
        found += page_tokens * next((at for at, page in enumerate(wanted) if page not in seen), len(wanted))
        seen.update(pages)
    return found


def vllm_server(
    name: str,
    model: Path,
    scratch: Path,
    flags: Sequence[str] = (),
    transfer: Mapping[str, object] | None = None,
    python: str = sys.executable,
) -> Server:
    port = free_port()
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--enforce-eager", "--seed", "0", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    command += flags
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(name, command, port, scratch, SETTINGS)


def proxy_server(prefill: str, decodes: Sequence[str], scratch: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-P", "-m", "kvstore", "pd-proxy", "--prefill", prefill, "--listen", f"{HOST}:{port}"]
    command += [word for one in decodes for word in ("--decode", one)]
    return Server("pd-proxy", command, port, scratch)
