"""Eviction policies by name (floor 2).

Importing this imports numba, which takes half a second, and which vLLM on a CPU must not find imported: only entrances
do, where somebody asks for another policy than LRU.
"""

from __future__ import annotations

from kvstore.config import checked_policy
from kvstore.errors import BadInput
from tiering.policies.adaptive import Adaptive
from tiering.policies.adaptive_loops import is_usable
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker
from tiering.policies.s3_fifo import S3Fifo

MAKERS: dict[str, PolicyMaker] = {"lru": LeafFirstLru, "s3-fifo": S3Fifo, "adaptive": Adaptive}


def policy_named(name: str, option: str = "policy") -> PolicyMaker:
    """Raises `BadInput`, with the option's name."""
    maker = MAKERS[checked_policy(name, option)]
    if maker is Adaptive and not is_usable():
        raise BadInput(
            f"{option}={name!r} is compiled by numba, which NUMBA_DISABLE_JIT forbids; unset it, or take lru"
        )
    return maker
