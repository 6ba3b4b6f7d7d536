"""A program: compiles every kernel for GPUs that are not here, and prints what came out as JSON.

Run by test_ahead_of_time.py in a process of its own, because triton either interprets or compiles, and decides at its
first import. A launcher is called as it is in use, with a stand-in for its kernel that keeps the arguments; from these
the signature is made as `triton.jit` makes it: an argument of 1 is a constant, one that 16 divides is known to be so.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_kernels import triton_digest, triton_pools
from kv_kernels.int8_form import KC64, slice_form
from kv_kernels.plain import PoolTable

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}


class Kept:
    """Stands where a kernel stands and keeps what it would have been launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = self.kernel.arg_names
            self.arguments = dict(zip(names, args, strict=False))
            self.arguments |= {name: value for name, value in kwargs.items() if name in names}
            self.options = {name: value for name, value in kwargs.items() if name not in names}

        return launch

    def source(self) -> ASTSource:
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[index,] = value
            elif isinstance(value, tuple):
                of = [_argument(one, (index, place), constants, attributes) for place, one in enumerate(value)]
                signature[parameter.name] = tuple(of)
            elif parameter.do_not_specialize:
                signature[parameter.name] = "i32"
            else:
                signature[parameter.name] = _argument(value, (index,), constants, attributes)
                if parameter.do_not_specialize_on_alignment:
                    attributes.pop((index,), None)
        return ASTSource(self.kernel, signature, constants, attributes)


def _argument(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> str:
    if isinstance(value, torch.Tensor):
        if value.data_ptr() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if value == 1:
        constants[path] = 1
        return "constexpr"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def kept(is_save: bool, codec: str, pools: PoolTable, reaches: bool = False) -> Kept:
    """The kernel, with the arguments of a launch over two blocks of 128 tokens."""
    table = torch.zeros(2, 128 // pools.page_tokens, dtype=torch.int64)
    payloads = torch.zeros(2, pools.layers * 128 * pools.heads * sum(pools.widths) * 5, dtype=torch.uint8)
    form = None if codec == "raw" else slice_form(pools.heads, 128, pools.widths, pools.dtype.itemsize)
    stand_in = triton_pools._move = Kept(triton_pools._move)
    numbers, reached = torch.zeros(64, dtype=torch.int64), None
    if reaches:
        reached = triton_pools.Reached(numbers[:2, None], 4096, numbers[:8].view(2, 2, 2), numbers[:56])
    how = pools, form, table, payloads.view(-1) if reaches else payloads
    triton_pools.save(*how, numbers[:2], reached) if is_save else triton_pools.load(*how, reached)
    triton_pools._move = stand_in.kernel
    return stand_in


def kept_digest() -> Kept:
    """The digest kernel, with the arguments of a launch over two blocks of four slices."""
    stand_in = triton_digest._digest_slice = Kept(triton_digest._digest_slice)
    payload = torch.zeros(2, 4 * 139264, dtype=torch.uint8)
    keys = triton_digest.digest_keys(payload.device)
    triton_digest.digest_slices(payload, 139264, torch.zeros(2, 4, 2, dtype=torch.int64), keys)
    triton_digest._digest_slice = stand_in.kernel
    return stand_in


def compiled(kernel: Kept, target: str, **options: Any) -> dict[str, Any]:
    """What the artefacts for one GPU hold."""
    made = triton.compile(kernel.source(), target=TARGETS[target], options={**kernel.options, **options}).asm
    if target.startswith("gfx"):
        text = made["amdgcn"]
        return {
            "bytes": [len(text), len(made["hsaco"])],
            "target": re.findall(r"amdgcn-amd-amdhsa--(\w+)", text)[:1],
            "fused": len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)\w*_f32", text)),
            "divisions": len(re.findall(r"\bv_div_fixup_f32", text)),
            "keeps_subnormals": ".amdhsa_float_denorm_mode_32 3" in text,
            "widest_load": "global_load_dwordx4" in text,
            "widest_store": "global_store_dwordx4" in text,
        }
    text = made["ptx"]
    return {
        "bytes": [len(text), len(made["cubin"])],
        "target": re.findall(r"\.target (sm_\d+)", text),
        "fused": len(re.findall(r"\b(?:fma|mad)\.\S*f32", text)),
        "divisions": len(re.findall(r"\bdiv\.rn\.f32", text)),
        # `floor` comes with .ftz, but of y + 0.5, which is 0 or at least 2**-26.
        "keeps_subnormals": not set(re.findall(r"[\w.]*\.ftz[\w.]*", text)) - {"cvt.rmi.ftz.f32.f32"},
        "widest_load": "ld.global.v4.b32" in text or "ld.global.v2.b64" in text,
        "widest_store": "st.global.v4.b32" in text,
    }


def pools_of(dtype: torch.dtype, layout: str = "token-major") -> PoolTable:
    """Two layers of pages of 16 tokens."""
    if layout == "latent":
        return PoolTable.of([[torch.zeros(4, 16, 1, 576, dtype=dtype)]] * 2)
    value = torch.zeros(4, 16, 8, 128, dtype=dtype)
    key = torch.zeros(4, 8, 128, 16, dtype=dtype).permute(0, 3, 1, 2) if layout == "transposed" else value
    return PoolTable.of([[key, value]] * 2)


def main() -> None:
    everywhere, here = list(TARGETS), ["sm_90"]
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    jobs: list[tuple[str, Kept, str, dict[str, Any]]] = []
    for is_save in (True, False):
        for codec in ("raw", KC64):
            name = f"{'save' if is_save else 'load'} {codec}"
            wanted = [(bf16, "token-major", everywhere), (bf16, "transposed", here), (bf16, "latent", here)]
            wanted += [(dtype, "token-major", ["sm_90", "gfx942"]) for dtype in (fp16, fp32)]
            for dtype, layout, targets in wanted:
                kernel = kept(is_save, codec, pools_of(dtype, layout))
                label = f"{name} {str(dtype).removeprefix('torch.')} {layout}"
                jobs += [(label, kernel, target, {}) for target in targets]
            kernel = kept(is_save, codec, pools_of(bf16), reaches=True)
            jobs += [(f"{name} reached", kernel, target, {}) for target in everywhere]
            if codec == KC64:  # what would be fused if it were allowed
                kernel, allowed = kept(is_save, codec, pools_of(bf16)), {"enable_fp_fusion": True}
                jobs += [(f"{name} allowed", kernel, target, allowed) for target in ("sm_90", "sm_100", "gfx942")]
    jobs += [("digest_slices", kept_digest(), target, {}) for target in everywhere]
    found: dict[str, dict[str, Any]] = {}
    for (label, _, target, _), one in zip(jobs, made_by_two(jobs), strict=True):
        found.setdefault(label, {})[target] = one
    json.dump(found, sys.stdout)


def made_by_two(jobs: list[tuple[str, Kept, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compile in two processes: kernels cannot be sent to another one, so each is a fork of this and has them all."""

    def share(first: int, into: Any) -> None:
        into.send([compiled(kernel, target, **options) for _, kernel, target, options in jobs[first::2]])

    forking = multiprocessing.get_context("fork")
    ends = [forking.Pipe(duplex=False) for _ in range(2)]
    workers = [forking.Process(target=share, args=(first, send)) for first, (_, send) in enumerate(ends)]
    for worker in workers:
        worker.start()
    for _, send in ends:
        send.close()
    shares = [receive.recv() for receive, _ in ends]
    for worker in workers:
        worker.join()
    return [shares[index % 2][index // 2] for index in range(len(jobs))]


if __name__ == "__main__":
    main()
