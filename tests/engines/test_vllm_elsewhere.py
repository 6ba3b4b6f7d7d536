"""A real vLLM computes on one host, and a real vLLM on another one has it fetched: two sidecars with the same keys, and
a courier between them. The tokens are those of one engine that computes all, and the blocks are counted as `peer`."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines has an environment of its own")

from engines import models
from engines.conftest import Nursery
from kvstore.protocol import courier
from service.sidecar import Sidecar
from small_courier import SmallCourier

SEED = int(os.environ.get("ENGINE_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
BLOCK, COUNT, MOST_TOKENS = 128, 4, 6
LEAD = 1e-4
"""Where two tokens are as likely but for less than this, rounding may decide (`test_vllm`)."""
OPTIONS: dict[str, Any] = dict(dtype="float32", max_model_len=4224, max_num_batched_tokens=512)


@pytest.fixture
def hosts() -> Iterator[tuple[Sidecar, Sidecar]]:
    """In folders with short names, since sockets' names are short."""
    root = Path("/tmp") / f"kv-{os.getpid()}-far"
    (root / "far" / "kv").mkdir(parents=True)
    (root / "near").mkdir()
    try:
        with Sidecar(root / "near", dram="512MiB", couriers=True) as near:
            shutil.copy(root / "near" / "kv" / "keys", root / "far" / "kv" / "keys")
            with Sidecar(root / "far", dram="512MiB") as far:
                yield near, far
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
def test_what_another_host_computed_is_fetched_and_the_tokens_are_the_same(
    hosts: tuple[Sidecar, Sidecar], saved: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "LOCATE_SECONDS", 5.0)  # nor does a busy machine answer in 5 ms
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    near, far = hosts
    prompts = [[draw.randrange(999) for _ in range(draw.randrange(300, 1500))] for _ in range(COUNT)]

    def ask(sidecar: Sidecar, steps: list[dict[str, Any]]) -> list[Any]:
        scratch = tmp_path / sidecar.path.parent.name
        scratch.mkdir()
        nursery = Nursery(scratch)
        transfer = models.connector(f"unix:{sidecar.path}", codec="raw", **models.PATIENT)
        plan = {"model": saved(), "transfer": transfer, "options": OPTIONS, "kept": True, "steps": steps}
        try:
            return nursery.run(plan)
        finally:
            nursery.end()

    generate = {"do": "generate", "prompts": prompts, "max_tokens": MOST_TOKENS, "leads": True}
    truth, _ = ask(far, [generate, {"do": "settle"}])
    with SmallCourier(near.courier_path, far.store) as bringing:
        told, again = ask(near, [generate, {**generate, "reset_before_each": True}])
    for ids, one, right, second in zip(prompts, told, truth, again, strict=True):
        account = one["kvstore"]
        assert one["tokens"] == right["tokens"] or right["lead"] < LEAD, (one, right)
        assert account["hits"] == {"peer": (len(ids) - 1) // BLOCK * BLOCK}, (account, bringing.brought)
        assert sum(account["hits"].values()) + sum(account["misses"].values()) == account["asked"] == len(ids)
        assert set(second["kvstore"]["hits"]) <= {"dram", "engine"}
    print(bringing.brought)
    assert bringing.brought["fetches"] == COUNT
    usage = near.store.usage()
    assert (usage.reservations, near.core.awaits.counts().parked) == (0, 0)
