"""Every kernel compiles for the GPUs it is meant for, without any of them, and into what its promises rest on.

The compiling is done by ahead_of_time.py in a process of its own: this one has triton in its interpreter, where there
are no kernels to compile (see tests/conftest.py). What is asserted is in the artefacts, not in what triton was asked:
no fused multiplication and addition, IEEE division, subnormal numbers kept, and accesses of 16 bytes.

The text that triton makes is not the end of it: ptxas of CUDA 12.9 (triton 3.6) fuses what stands paired in the text
for Blackwell (`mul.rn.f32x2`, `add.rn.f32x2`), whatever it is told. So there are tests that no result depends on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("ahead_of_time.py")
ROOT = PROGRAM.parents[2]
FUSED_PER_DIVISION = 5
"""On AMD a division in float32 is a sequence in the text, five of whose operations are fused ones."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By kernel, codec, dtype and layout, and by target."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), *sys.path])
    done = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def kernels(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    every = [(label, target, one) for label, targets in found.items() for target, one in targets.items()]
    return [one for one in every if not one[0].endswith("allowed")]


def test_each_is_there_for_each_target(found: dict[str, dict[str, Any]]) -> None:
    for name in ("save raw", "load raw", "save int8-kc64", "load int8-kc64"):
        assert set(found[f"{name} bfloat16 token-major"]) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert set(found["digest_slices"]) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    for label, target, one in kernels(found):
        assert min(one["bytes"]) > 1000, (label, target)
        assert [str(name).rstrip("a") for name in one["target"]] == [target], label


def test_nothing_is_fused_and_division_is_exact(found: dict[str, dict[str, Any]]) -> None:
    for label, target, one in kernels(found):
        assert (one["divisions"] > 0) == label.startswith("save int8"), (label, target)
        expected = FUSED_PER_DIVISION * one["divisions"] if target == "gfx942" else 0
        assert one["fused"] == expected, (label, target)
        assert one["keeps_subnormals"], (label, target)


def test_quantizing_holds_nothing_that_could_be_fused(found: dict[str, dict[str, Any]]) -> None:
    for target, allowed in found["save int8-kc64 allowed"].items():
        not_allowed = found["save int8-kc64 bfloat16 token-major"][target]
        assert allowed["fused"] == not_allowed["fused"], target


def test_dequantizing_may_be_fused(found: dict[str, dict[str, Any]]) -> None:
    """It is, where it is allowed, which also shows that the count sees it. The product is exact, so nothing changes."""
    assert all(one["fused"] > 0 for one in found["load int8-kc64 allowed"].values())
    scales = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    for code in range(256):
        product = np.float32(code) * scales.astype(np.float32)
        assert bool((product.astype(np.float64) == code * scales.astype(np.float64)).all())


def test_accesses_are_as_wide_as_they_come(found: dict[str, dict[str, Any]]) -> None:
    """Along the width, and along the tokens of a transposed K."""
    assert any("transposed" in label for label in found) and any("latent" in label for label in found)
    for label, target, one in kernels(found):
        assert one["widest_load"], (label, target)
        assert one["widest_store"] or label == "digest_slices", (label, target)  # which stores 16 bytes per slice
