"""A copy of a model's directory with other weights: one tensor's signs are turned, so every layer's KV is another."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from pathlib import Path

from kvstore.block.errors import BadInput

FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
MOST_HEADER_BYTES = 100 << 20
"""The format's own limit."""


def with_other_weights(model: Path, into: Path) -> bool:
    """Copy by links, but for the one file that has the first layer's norm. False where no file of safetensors has it.
    Raises `BadInput` for one that is none."""
    for file in sorted(model.glob("*.safetensors")):
        place = _norm_of(file)
        if place is None:
            continue
        into.mkdir()
        for other in model.iterdir():
            if other.is_file() and other != file:
                os.symlink(other.resolve(), into / other.name)
        shutil.copyfile(file, into / file.name)
        start, stop, size = place
        with open(into / file.name, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            for at in range(start + size - 1, stop, size):  # the byte with the sign
                mapped[at] ^= 0x80
        return True
    return False


def _norm_of(file: Path) -> tuple[int, int, int] | None:
    """Where the tensor begins and ends in the file, and the bytes of its numbers."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MOST_HEADER_BYTES:
            raise BadInput(f"{file} is no file of safetensors; give the model's directory")
        header = json.loads(opened.read(size))
    for name, told in sorted(header.items()):
        parts = name.lower().split(".")
        is_norm = (
            "0" in parts and any("norm" in part or part.startswith("ln") for part in parts) and parts[-1] == "weight"
        )
        if is_norm and told.get("dtype") in FLOATS:
            start, stop = told["data_offsets"]
            return 8 + size + start, 8 + size + stop, FLOATS[told["dtype"]]
    return None
