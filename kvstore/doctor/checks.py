"""Which checks there are for a sidecar's settings, and for an engine's configuration."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.config import AUTO, DEFAULT_POLICY, OFF, DramConfig, NvmeConfig
from kvstore.doctor import directory, machine, sidecar
from kvstore.doctor.engine import configuration, model_served, tried
from kvstore.doctor.findings import Check, Finding, refused
from kvstore.insight.models import ModelKv
from kvstore.service.daemon import DRAM_SHARE, NVME_SHARE
from kvstore.service.settings import Settings, socket_key
from tiering.nvme.slab_files import disk_room


def checks_of(
    settings: Settings, named_socket: bool, engine: Mapping[str, Any] | None, model: ModelKv | None = None
) -> list[Check]:
    """The checks, in the order in which findings are shown. named_socket: the caller named the socket, so it must
    exist. model: whether it is served."""
    data = Path(settings.store.data)
    checks = [Check("kernel", machine.kernel)]
    limit = machine.memory_bytes()
    try:
        dram = _dram(settings, limit)
    except BadInput as error:
        found = refused("memory", error)
        checks.append(Check("memory", lambda: [found]))
    else:
        checks += [
            Check("shared memory", partial(machine.shared_memory, dram.extent_bytes)),
            Check("memory", lambda: machine.memory(dram, directory.holder_of(data) is not None)),
            Check("open files", lambda: _descriptors(settings, dram)),
        ]
    checks += [
        Check("locked memory", partial(machine.locked_memory, settings.network.transport == "ucx")),
        Check("packages", partial(machine.packages, _wanted(settings, engine is not None))),
        Check("gpu", partial(machine.gpu, engine is not None), machine.GPU_SECONDS + 10),
        Check("directory", partial(directory.directory_rights, data)),
        Check("keys", partial(directory.keys, data, settings.keys.directory)),
        Check("disk", lambda: directory.room(data, _nvme(settings))),
        Check("direct I/O", lambda: directory.direct_io(data) if settings.store.nvme != OFF else ()),
        Check("sidecar", partial(_sidecar, settings)),
    ]
    for name, one in settings.sockets().items():
        is_needed = named_socket and socket_key(name) == "door.socket"
        checks.append(Check("socket", partial(sidecar.engines_socket, "socket", one.socket, is_needed)))
    if engine is not None:
        checks.append(Check("engine", lambda: (*tried(machine.installed), *configuration(engine))))
    if model is not None:
        checks.append(Check("model", partial(model_served, model, machine.installed)))
    return checks


def _dram(settings: Settings, limit: int) -> DramConfig:
    given = settings.store.dram
    return DramConfig.of(int(DRAM_SHARE * limit) if given == AUTO else given, settings.store.extent, limit)


def _nvme(settings: Settings) -> NvmeConfig | str | None:
    """The sizes of the NVMe tier, or why it cannot have them; None where it is off. Makes no directory."""
    given, data = settings.store.nvme, Path(settings.store.data)
    if given is None or given == OFF:
        return None
    try:
        free = disk_room(directory.existing(data / "nvme"))
        return NvmeConfig.of(int(NVME_SHARE * free) if given == AUTO else given, settings.store.slab, free)
    except BadInput as error:
        return str(error)


def _descriptors(settings: Settings, dram: DramConfig) -> Iterator[Finding]:
    nvme = _nvme(settings)
    has_nvme = nvme if isinstance(nvme, NvmeConfig) else None
    yield from machine.descriptors(dram, has_nvme, settings.door.connections)


def _sidecar(settings: Settings) -> Iterator[Finding]:
    path, data = settings.observe_socket, Path(settings.store.data)
    told = sidecar.status_of(path)
    yield from directory.use(data, told.pid if told is not None else None)
    yield from sidecar.state(path, told, time.time())


def _wanted(settings: Settings, has_engine: bool) -> dict[str, str]:
    found = dict.fromkeys(("msgspec", "xxhash", "numpy", "typer", "rich"), "kvstore serve")
    if settings.store.nvme != OFF:
        found["lmdb"] = "store.nvme"
    if settings.store.policy != DEFAULT_POLICY:
        found["numba"] = "store.policy"
    if settings.console.listen is not None:
        found |= dict.fromkeys(("fastapi", "h11", "markdown-it-py"), "console.listen")
    if settings.network.listen is not None or settings.remote.url is not None:
        network = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "h11")
        found |= dict.fromkeys(network, "the network process")
    if settings.network.seals:
        found["cryptography"] = "sealing what other nodes pull"
    return found | ({"torch": "an engine"} if has_engine else {})
