"""Which kind each file of tests is of, so that people can run what they have time for.

    pure      computes: no process, no sleep, no torch. On all cores at once, in a minute
    drawn     histories and shapes drawn at random, damage and kills at random places
    process   all others: stores with pages, sidecars, commands, kernels

    slow      takes long, or needs a model or a compiler first: `make test-all` has it, `make test` has not
    alone     looks at a clock, or counts what the whole process has: never beside other tests

A file has one of the first three, and may have the others; a single test may be marked slow where it stands.
`test_kinds.py` holds the table against the tree.
"""

from __future__ import annotations

import zlib
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

TESTS = Path(__file__).resolve().parent
PURE, DRAWN, PROCESS, SLOW, ALONE = "pure", "drawn", "process", "slow", "alone"

PURE_FILES = frozenset(
    """
    adapters/test_audit.py
    adapters/test_cost.py
    adapters/test_model_files.py
    traffic/test_workload.py
    console/test_answers.py
    console/test_figures.py
    elsewhere/test_questions.py
    insight/test_lint.py
    insight/test_models.py
    insight/test_plan.py
    insight/test_prefixes.py
    kvstore/test_catalogue.py
    kvstore/test_miss.py
    kvstore/test_numbers.py
    kvstore/test_prefix_index.py
    kvstore/test_state_policy.py
    kvstore/test_unmapped.py
    kvstore/test_unwritten.py
    openai_api/test_api.py
    pool/test_choice.py
    pool/test_directory.py
    peers/test_tokens.py
    remote/test_names.py
    service/test_breaker.py
    service/test_rate_limited.py
    test_house.py
    test_mutants.py
    tiering/test_admission.py
    tiering/test_frame.py
    tiering/test_further_parts.py
    tiering/test_slab_scan.py
    tiering/test_keeping.py
    tiering/test_lazy_memory.py
    tiering/test_retention.py
    tiering/test_shares.py
    tiering/test_slab.py
    tiering/test_tally.py
    """.split()
)
DRAWN_FILES = (
    "adapters/test_fetches.py",
    "attack/test_awaits.py",
    "attack/test_bit_flips.py",
    "attack/test_client_kills.py",
    "attack/test_copied_directory.py",
    "attack/test_couriers.py",
    "attack/test_index_damage.py",
    "attack/test_nested_fuzz.py",
    "attack/test_nvme_damage.py",
    "attack/test_sharing.py",
    "attack/test_store_kills.py",
    "contract/test_codec.py",
    "contract/test_eviction_policy.py",
    "contract/test_frame_index.py",
    "contract/test_tier.py",
    "elsewhere/test_adoption.py",
    "elsewhere/test_fetched.py",
    "insight/test_replay.py",
    "insight/test_replay_plot.py",
    "insight/test_trace.py",
    "keys/test_store_keys.py",
    "kvstore/test_awaits.py",
    "kvstore/test_getting.py",
    "kvstore/test_groups.py",
    "kvstore/test_joint.py",
    "model/",
    "pool/test_announcer.py",
    "remote/test_random_faults.py",
    "service/test_tensor_parallel.py",
    "simulation/",
    "tiering/test_adaptive.py",
)
"""Files, and folders with their slash."""

SLOW_FILES = (
    "adapters/test_audit_blocks.py",
    "adapters/test_hf_hand_over.py",
    "adapters/test_hf_matrix.py",
    "adapters/test_hf_state.py",
    "adapters/test_paged_engine.py",
    "attack/test_bit_flips.py",
    "attack/test_client_kills.py",
    "attack/test_hostile_pool.py",
    "attack/test_index_damage.py",
    "bench/test_benches.py",
    "bench/test_gpu_list.py",
    "traffic/test_replay.py",
    "console/test_browser.py",
    "console/test_cost.py",
    "console/test_engine_browser.py",
    "console/test_schema.py",
    "console/test_states.py",
    "console/test_states.py",
    "courier/test_compose.py",
    "courier/test_directory.py",
    "courier/test_earlier.py",
    "courier/test_events.py",
    "courier/test_far.py",
    "courier/test_leaving.py",
    "courier/test_pool.py",
    "courier/test_remote.py",
    "courier/test_score.py",
    "demo/",
    "insight/test_replay_plot.py",
    "keys/test_serve_keys.py",
    "kernels/test_ahead_of_time.py",
    "kernels/test_device_copy.py",
    "model/",
    "network/test_cannot_tell.py",
    "network/test_certificates.py",
    "network/test_page.py",
    "network/test_query.py",
    "network/test_reflection.py",
    "network/test_services.py",
    "network/test_traps.py",
    "openai_api/test_pd_proxy.py",
    "openai_api/test_pd_proxy_score.py",
    "openai_api/test_prime.py",
    "service/test_tensor_parallel.py",
    "tiering/test_adaptive.py",
    "listeners/test_stopping_callers_cost.py",
)
"""With all of their tests: `make test` does not even read them."""
ALONE_FILES = (
    "attack/test_door_attack.py",
    "console/test_cost.py",
    "kvstore/test_entries.py",
    "kvstore/test_slow_disk.py",
    "listeners/test_stopping_callers_cost.py",
    "peers/test_data_door.py",
    "peers/test_pull_contract.py",
    "peers/test_spoiled_links.py",
    "remote/test_deadlines.py",
    "service/test_long_prompts.py",
    "service/test_silent_sidecar.py",
    "service/test_slow_extents.py",
    "test_files_passed.py",
)
ENGINES = "engines/"
"""They have an environment of their own."""


def marks_of(path: str) -> list[str]:
    """Of a test's file, from the folder of all tests."""
    if path.startswith(ENGINES):
        return [PROCESS]
    kind = PURE if path in PURE_FILES else DRAWN if path.startswith(DRAWN_FILES) else PROCESS
    marks = [kind]
    if path.startswith(SLOW_FILES):
        marks.append(SLOW)
    if path.startswith(ALONE_FILES):
        marks.append(ALONE)
    return marks


def may_want(path: str, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether a test of this file may be wanted. is_wanted: a question about marks, as `-m` puts it. A single test may
    be slow where its file is not."""
    marks = marks_of(path)
    return any(is_wanted(having.__contains__) for having in (marks, [*marks, SLOW]))


@dataclass(frozen=True)
class Share:
    """One of several shares of tests, which have each test once; by names, so that it is the same everywhere."""

    number: int
    """From 1."""
    shares: int

    @classmethod
    def read(cls, text: str) -> Self:
        number, slash, shares = text.partition("/")
        if not (slash and number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
            raise ArgumentTypeError(f"a share is K/N with K from 1 to N, not {text!r}")
        return cls(int(number), int(shares))

    def has(self, name: str) -> bool:
        return zlib.crc32(name.encode()) % self.shares == self.number - 1
