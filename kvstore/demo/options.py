"""The demo's options, checked before torch is loaded so that mistakes are reported at once."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from kvstore.block.errors import BadInput
from kvstore.config import SettingsSection, allowed_size

REQUESTS = 20
MAX_ANSWER_TOKENS = 128
MAX_SEED = 2**63 - 1
_PROCESSOR_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class DemoOptions(SettingsSection, frozen=True):
    """dram, nvme: the store's budgets. data: its directory, None for a temporary one. requests: how many of the twenty.
    tokens: of each answer. threads: of torch; None for one with the trained model, whose operations are too small to
    divide, and for all cores with a random one. seed: of random weights, None for the trained ones. hybrid: a model
    with recurrent layers, whose weights are random."""

    dram: Annotated[str, allowed_size()] = "512MiB"
    data: str | None = None
    requests: Annotated[int, Meta(ge=1, le=REQUESTS)] = REQUESTS
    tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] = 32
    threads: int | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    nvme: Annotated[str, allowed_size()] = "1GiB"
    hybrid: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and not 1 <= self.threads <= usable_cores():
            raise BadInput(f"threads={self.threads}; give 1 to {usable_cores()}, the cores that may be used here")
        if self.hybrid and self.seed is None:
            structs.force_setattr(self, "seed", 0)


def usable_cores() -> int:
    """Cores that this process may use. Torch counts the machine's, regardless of the control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _PROCESSOR_QUOTA.read_text().split()
        return min(cores, max(1, ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
