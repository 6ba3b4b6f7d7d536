"""This machine: its kernel, shared memory, limits of this process, packages, and GPUs. Asks, and changes nothing."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from math import inf
from pathlib import Path

from kvstore.config import DramConfig, NvmeConfig, format_size, memory_limit, memory_limit_files
from kvstore.doctor.findings import Finding, lacks, note, ok
from tiering.dram.extents import HUGE_PAGE_BYTES, Extent
from tiering.files import read_text_files

MADV_POPULATE_WRITE = 23
PAGE_BYTES = 4096
BESIDE_BYTES = 600 << 20
"""What a sidecar takes besides blocks and its page tables: the program, its tables, some requests."""
PAGE_TABLE_SHARE = 512
SPARE_DESCRIPTORS = 128
GPU_SECONDS = 90.0
"""How long torch is waited for: on a busy machine its import alone takes long."""
DISTRIBUTION = "prefix-kvstore"
PACKAGES = (
    *("msgspec", "xxhash", "numpy", "lmdb", "numba", "typer", "rich"),
    *("fastapi", "markdown-it-py", "h11", "httpx2"),
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "cryptography"),
    *("torch", "triton", "transformers"),
)
"""Distributions that are looked at, in this order."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([<>=!~0-9.,* ]*)(?:;(.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_ASK_TORCH = """
import json, sys
try:
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = {"version": torch.__version__, "built_for": torch.version.cuda or torch.version.hip or "",
            "gpus": [torch.cuda.get_device_name(one) for one in range(min(count, 16))]}
except Exception as error:
    said = {"failed": f"{type(error).__name__}: {error}"[:500]}
print(json.dumps(said))
"""


def kernel() -> Iterator[Finding]:
    """Linux, and whether memory can be prefaulted in one call."""
    name, release = os.uname().sysname, os.uname().release
    if name != "Linux":
        yield lacks("kernel", f"{name} {release}", "run it on Linux")
        return
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        page.madvise(MADV_POPULATE_WRITE)
    except OSError:
        text = f"Linux {release} has no MADV_POPULATE_WRITE: memory is touched page by page, and starts are slower"
        yield lacks("kernel", text, "use Linux 5.14 or later")
        return
    yield ok("kernel", f"Linux {release}, with MADV_POPULATE_WRITE")


def shared_memory(extent_bytes: int) -> Iterator[Finding]:
    """Whether memfds can be made, sealed and given pages, huge ones too, and be as large as an extent."""
    most = _most(resource.RLIMIT_FSIZE)
    if most < extent_bytes:
        text = f"files may have {format_size(int(most))} (ulimit -f), and an extent has {format_size(extent_bytes)}"
        yield lacks("shared memory", text, "set ulimit -f unlimited (LimitFSIZE=infinity)")
        return
    try:
        extent = Extent(min(extent_bytes, HUGE_PAGE_BYTES))
        extent.close()
    except OSError as error:
        yield lacks(
            "shared memory",
            f"no memfd can be made and sealed here ({error.strerror})",
            "allow memfd_create and fcntl's seals in the container's seccomp profile, or raise the memory limit",
        )
        return
    if extent_bytes >= HUGE_PAGE_BYTES and not extent.is_huge:
        text = "the kernel gives memfds small pages: memory takes longer to make at the start, and to fill from a disk"
        remedy = "use Linux 6.1 or later, and no `deny` in /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield note("shared memory", text, remedy)
        return
    yield ok("shared memory", "memfds can be made and sealed; /dev/shm and its size play no part")


def memory(dram: DramConfig, is_running: bool) -> Iterator[Finding]:
    """DRAM's budget against what the cgroup, the machine and the address space allow, and what is free now.
    is_running: a sidecar of this directory holds its memory already."""
    limit = memory_bytes()
    wanted = dram.budget_bytes + dram.budget_bytes // PAGE_TABLE_SHARE + BESIDE_BYTES
    given = f"dram={format_size(dram.budget_bytes)}"
    if wanted > limit:
        text = f"{given} and {format_size(wanted - dram.budget_bytes)} beside it exceed the {format_size(limit)}"
        yield lacks("memory", f"{text} that this machine or its cgroup allows", "give less dram, or raise the limit")
        return
    space = _most(resource.RLIMIT_AS)
    if space < wanted:
        text = f"{given}, and the address space is limited to {format_size(int(space))} (ulimit -v)"
        yield lacks("memory", text, "set ulimit -v unlimited (LimitAS=infinity)")
        return
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    free = int(found.group(1)) << 10 if found else limit
    if not is_running and free < wanted:
        text = f"{given}, and {format_size(free)} are free now: others have the rest"
        yield lacks("memory", text, "end what takes it, or give less dram")
        return
    yield ok("memory", f"{given} fits the {format_size(limit)} that this machine or its cgroup allows")


def memory_bytes() -> int:
    """That this process may have, by machine and cgroup."""
    return memory_limit(read_text_files(memory_limit_files(_text("/proc/self/cgroup"))))


def descriptors(dram: DramConfig, nvme: NvmeConfig | None, connections: int) -> Iterator[Finding]:
    """The limit of open files against what the tiers and clients need."""
    slabs = nvme.budget_bytes // nvme.slab_bytes if nvme is not None else 0
    wanted = 2 * -(-dram.budget_bytes // dram.extent_bytes) + slabs + connections + SPARE_DESCRIPTORS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    has = inf if most == resource.RLIM_INFINITY else most
    if has < 2 * wanted:  # half of the limit is for descriptors on their way to engines
        text = f"{has:.0f} files may be open (hard limit), and these tiers want {2 * wanted}"
        yield lacks("open files", text, f"raise it: ulimit -Hn {max(2 * wanted, 65536)} (LimitNOFILE)")
    else:
        yield ok("open files", f"{'any number' if has == inf else f'{has:.0f}'} may be open, {2 * wanted} are ample")


def locked_memory(wants_rdma: bool) -> Iterator[Finding]:
    """The limit of locked memory, which only RDMA uses."""
    most = _most(resource.RLIMIT_MEMLOCK)
    has = "any amount" if most == inf else format_size(int(most))
    if wants_rdma and most < 1 << 30:
        yield lacks(
            "locked memory",
            f"{has} may be locked, and network.transport=ucx registers memory",
            "set ulimit -l unlimited",
        )
    else:
        yield ok("locked memory", f"{has} may be locked; the sidecar locks none")


def packages(wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Compare installed versions with the lowest that this distribution allows. wanted: distributions that the settings
    need, and what for."""
    try:
        floors = floors_of(metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        yield note("packages", f"{DISTRIBUTION} is not installed, so no floors are known", "run: pip install .")
        floors = {}
    well, absent = [], []
    for name in PACKAGES:
        floor, extra = floors.get(name, ("", ""))
        install = f"run: pip install '{DISTRIBUTION}[{extra}]'" if extra else f"run: pip install {DISTRIBUTION}"
        if not (version := installed(name)):
            if name in wanted:
                yield lacks("packages", f"{name} is not installed, and {wanted[name]} needs it", install)
            else:
                absent.append(name)
            continue
        if floor and _numbers(version) < _numbers(floor):
            yield lacks("packages", f"{name} {version} is older than {floor}", f"run: pip install '{name}>={floor}'")
        else:
            well.append(f"{name} {version}")
    yield ok("packages", ", ".join(well))
    if absent:
        yield note("packages", f"not installed, and not needed by these settings: {', '.join(absent)}")


def installed(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def floors_of(requirements: Collection[str]) -> dict[str, tuple[str, str]]:
    """Of each distribution the lowest version, "" for any, and the first extra that asks for it, "" for none."""
    floors: dict[str, tuple[str, str]] = {}
    for one in requirements:
        found = _REQUIREMENT.fullmatch(one.strip())
        if found is None:
            continue
        floor = re.search(r">=\s*([0-9][0-9.]*)", found.group(2))
        extra = _EXTRA.search(found.group(3) or "")
        floors.setdefault(found.group(1).lower(), (floor.group(1) if floor else "", extra.group(1) if extra else ""))
    return floors


def _numbers(version: str) -> list[int]:
    """The release's numbers: what is behind them (rc1, +cpu) does not count. 2.11 and 2.11.0 are one."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(one) for one in found.group().split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def gpu(is_wanted: bool) -> Iterator[Finding]:
    """What torch sees, asked in a process of its own. is_wanted: an engine's configuration was given."""
    drivers = "/proc/driver/nvidia/gpus"
    there = len(list(Path(drivers).iterdir())) if Path(drivers).is_dir() else 0
    if find_spec("torch") is None:
        said = f"torch is not installed here{f', and {there} NVIDIA GPUs are there' if there else ''}"
        remedy = "look at it in the engine's environment, which is another one" if is_wanted or there else ""
        yield note("gpu", f"{said}; the sidecar needs neither", remedy)
        return
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GPU_SECONDS,
        )
        said_by_torch = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        said_by_torch = {"failed": f"it did not end within {GPU_SECONDS:g} s"}
    except (ValueError, IndexError):
        said_by_torch = {"failed": f"it ended with status {asked.returncode}"}
    if "failed" in said_by_torch:
        yield lacks("gpu", f"torch cannot be imported ({said_by_torch['failed']})", "install it anew")
        return
    version, gpus = said_by_torch["version"], said_by_torch["gpus"]
    if gpus:
        yield ok("gpu", f"torch {version} sees {len(gpus)}: {', '.join(sorted(set(gpus)))}")
    elif there and not said_by_torch["built_for"]:
        text = f"{there} NVIDIA GPUs are there, and torch {version} is built for CPUs"
        yield lacks("gpu", text, "install a torch that is built for CUDA")
    elif there:
        yield lacks(
            "gpu", f"{there} NVIDIA GPUs are there, and torch {version} sees none", "look at driver and devices"
        )
    else:
        yield note("gpu", f"torch {version} sees none: engines here compute on the CPU")


def _most(limit: int) -> float:
    soft, _ = resource.getrlimit(limit)
    return inf if soft == resource.RLIM_INFINITY else soft


def _text(path: str) -> str:
    return "".join(read_text_files([path]).values())
