"""The demo's options, checked before torch is loaded so that mistakes are reported at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from kvstore.block.errors import BadInput
from kvstore.config import parse_size

REQUESTS = 20
MAX_ANSWER_TOKENS = 128
MAX_SEED = 2**63 - 1
_PROCESSOR_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class DemoOptions:
    """dram, nvme: the store's budgets. data: its directory, None for a temporary one. requests: how many of the twenty.
    threads: of torch; None for one with the trained model, whose operations are too small to divide, and for all cores
    with a random one. seed: of random weights, None for the trained ones. hybrid: a model with recurrent layers, whose
    weights are random."""

    dram: str = "512MiB"
    data: str | None = None
    requests: int = REQUESTS
    answer_tokens: int = 32
    threads: int | None = None
    seed: int | None = None
    nvme: str = "1GiB"
    hybrid: bool = False

    def __post_init__(self) -> None:
        parse_size(self.dram, "dram")
        parse_size(self.nvme, "nvme")
        if not 1 <= self.requests <= REQUESTS:
            raise BadInput(f"requests={self.requests}; give 1 to {REQUESTS}")
        if not 1 <= self.answer_tokens <= MAX_ANSWER_TOKENS:
            raise BadInput(f"tokens={self.answer_tokens}; give an answer length from 1 to {MAX_ANSWER_TOKENS}")
        if self.threads is not None and not 1 <= self.threads <= usable_cores():
            raise BadInput(f"threads={self.threads}; give 1 to {usable_cores()}, the cores that may be used here")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise BadInput(f"seed={self.seed}; give a number from 0 to {MAX_SEED}")
        if self.hybrid and self.seed is None:
            object.__setattr__(self, "seed", 0)


def usable_cores() -> int:
    """Cores that this process may use. Torch counts the machine's, regardless of the control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _PROCESSOR_QUOTA.read_text().split()
        return min(cores, max(1, ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
