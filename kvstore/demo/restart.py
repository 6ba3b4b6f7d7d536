"""The demo's last run: a new process with empty memory; only the disk is left.

`run_restarted` starts it and reads its result; `python -m kvstore.demo.restart JOB.json` is that process. They exchange
files in the demo's scratch folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import kvstore
from engine_adapter.adapter import Report
from engine_adapter.hf_cache import PrefixCache
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.errors import StoreError
from kvstore.demo.model import model_of
from kvstore.demo.options import DemoOptions
from kvstore.demo.passes import PassResult, run_pass

NAME = "restart"
WARM_SECONDS = 60.0
LONGEST_SECONDS = 600.0


def run_restarted(
    model: torch.nn.Module, directory: str, options: DemoOptions, threads: int, prompts: list[list[int]], scratch: Path
) -> tuple[PassResult, int]:
    """The same prompts in a new process on the same directory; returns the pass, and the bytes read from disk."""
    config: Any = model.config
    job = {
        "directory": directory,
        "dram": options.dram,
        "nvme": options.nvme,
        "seed": options.seed,
        "answer_tokens": options.answer_tokens,
        "threads": threads,
        "positions": config.max_position_embeddings,
        "layers": config.num_hidden_layers,
        "prompts": prompts,
        "answer": str(scratch / "restarted.json"),
    }
    path = scratch / "restart.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.demo.restart", str(path)],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    if done.returncode:
        raise StoreError(f"the process after the restart ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found = json.loads(Path(job["answer"]).read_text())
    reports = [_report(one) for one in found["reports"]]
    return PassResult(NAME, prompts, found["answers"], reports), found["read_bytes"]


def main(path: str) -> None:
    """Answer a job's prompts and write the result."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    model = model_of(job["seed"], job["positions"], job["layers"])
    with kvstore.embedded(f"{job['directory']}-closed", dram="64MiB") as closed:
        first_use = PrefixCache(model, closed, codec="raw")
    first_use.generate(job["prompts"][0], max_new_tokens=2)  # pays for first-time work
    with kvstore.embedded(job["directory"], dram=job["dram"], nvme=job["nvme"]) as store:
        if not store.warmed(WARM_SECONDS):
            raise StoreError("what is on disk could not be taken in")
        cache = PrefixCache(model, store, codec="raw")
        result = run_pass(NAME, cache, job["prompts"], job["answer_tokens"], _silent)
        read_bytes = store.usage().counters.get("promoted_blocks", 0) * cache.layout.raw_bytes
    answer = {"answers": result.answers, "reports": [_plain(one) for one in result.reports], "read_bytes": read_bytes}
    Path(job["answer"]).write_text(json.dumps(answer))


def _plain(report: Report) -> dict[str, object]:
    fields = asdict(report)
    fields["account"] = [[str(part.origin), part.tokens] for part in report.account.segments]
    fields["put_reasons"] = {str(reason): count for reason, count in report.put_reasons.items()}
    return fields


def _report(fields: dict[str, Any]) -> Report:
    tiers = {str(tier): tier for tier in HitTier}
    account = Account.of((tiers.get(name) or MissReason(name), tokens) for name, tokens in fields["account"])
    reasons = {MissReason(reason): count for reason, count in fields["put_reasons"].items()}
    return Report(**{**fields, "account": account, "put_reasons": reasons})


def _silent(doing: str, done: int, steps: int) -> None:
    pass


if __name__ == "__main__":
    main(sys.argv[1])
