"""Configuration: `StoreOptions`, one tree of frozen dataclasses, checked when they are built.

`kvstore.open` builds the tree from keywords, a sidecar from its settings, of which [store] and [limits] are branches.
Sizes are given as people write them ("2GiB", "512MB", a number of bytes). What the machine allows is read once, when a
store is opened, and judged by `memory_limit`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from math import ceil, inf, nan
from numbers import Real
from types import MappingProxyType

from kvstore.block.errors import BadInput
from tiering.policies.shares import Share
from tiering.slab_header import SlabSizes

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KB": 1000,
    "KIB": 1 << 10,
    "M": 1 << 20,
    "MB": 1000**2,
    "MIB": 1 << 20,
    "G": 1 << 30,
    "GB": 1000**3,
    "GIB": 1 << 30,
    "T": 1 << 40,
    "TB": 1000**4,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")
_PAGE_BYTES = 4096

Size = str | int
"""As people write one: "2GiB", or a number of bytes. In a settings file it is text."""

POLICIES = ("lru", "adaptive")
"""Eviction policies of DRAM."""
REMOVED_POLICY, SUCCESSOR = "s3-fifo", "adaptive"
"""A name that stays valid, and what it means."""
DEFAULT_POLICY = "lru"
AUTO, OFF = "auto", "off"
"""In a sidecar's settings: a budget chosen from what the machine has; and no NVMe."""
DEFAULT_WRITES, LEARNED_WRITES = "all", "learned"
"""Which of the blocks that leave DRAM are written to NVMe."""
LEAST_WRITES, MOST_WRITES = 0.001, 10_000.0
"""Times the size of NVMe a day."""
MAX_NAMESPACES = (1 << 15) - 1
MIN_DRAM_BYTES = 1 << 20
MIN_EXTENT_BYTES = 64 << 10
DEFAULT_EXTENT_BYTES = 64 << 20
MAX_EXTENT_BYTES = 1 << 30
EXTENTS_PER_BUDGET = 16
"""A small budget is cut into about this many extents, so that several namespaces can share it."""
MIN_NVME_BYTES = 1 << 20
MIN_SLAB_BYTES = 64 << 10
MAX_SLAB_BYTES = 1 << 30
SLABS_PER_BUDGET = 16
MIN_RATE_BYTES = 64 << 10
AUDIT_FILE = "console-audit.jsonl"
DEFAULT_TENANT = "default"
DEFAULT_DRAM = "1GiB"
MAX_SOCKET_BYTES = 107
"""The kernel's limit for a socket's path (unix(7))."""
DEFAULT_SCRUB = "8MiB/s"
"""Seven hours for 200 GiB, and less than a hundredth of what an NVMe disk can read."""
MOST_EXTENTS = 512
"""A large budget is cut into at most so many, as long as extents can be larger: each holds a descriptor."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can connect there."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def parse_size(given: str | int, name: str) -> int:
    """Bytes from "2GiB", "512 MB", "64k" or a number. `name` is the option, for the message."""
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise BadInput(f"{name}={given!r} is not a size; write e.g. {name}=2GiB")
    if isinstance(given, int):
        if given < 0:
            raise BadInput(f"{name}={given} is negative; write e.g. {name}=2GiB")
        return given
    found = _SIZE.fullmatch(given.strip())
    if found is None or found.group(2).upper() not in _UNITS:
        raise BadInput(
            f"{name}={given!r} is not a size; write a number with B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB), "
            f"e.g. {name}=2GiB"
        )
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def parse_rate(given: str | int, name: str) -> int:
    """Bytes per second from "8MiB/s", "8MiB" or a number; 0 for "off". `name` is the option, for the message."""
    if isinstance(given, str) and given.strip().lower() == "off":
        return 0
    written = re.sub(r"\s*/\s*[sS]$", "", given.strip()) if isinstance(given, str) else given
    try:
        rate = parse_size(written, name)
    except BadInput:
        raise BadInput(f"{name}={given!r} is not a rate; write bytes per second, e.g. {name}=8MiB/s, or off") from None
    if 0 < rate < MIN_RATE_BYTES:
        raise BadInput(f"{name}={given!r} is too slow; give at least {format_size(MIN_RATE_BYTES)}/s, or off")
    return rate


def format_size(size_bytes: float) -> str:
    """Bytes as people read them: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def parse_writes(given: str | float, name: str) -> float | None:
    """Which of the blocks that leave DRAM are written to NVMe: None for all, inf for those likely to come back, or a
    number to bound these to so many times the size of NVMe a day. Raises `BadInput`. name: the option."""
    if given == DEFAULT_WRITES:
        return None
    if given == LEARNED_WRITES:
        return inf
    try:
        written = float(given) if not isinstance(given, bool) else nan
    except (TypeError, ValueError):
        written = nan
    if not LEAST_WRITES <= written <= MOST_WRITES:
        raise BadInput(
            f"{name}={given!r}; give {DEFAULT_WRITES}, {LEARNED_WRITES}, or how many times the size of nvme may be "
            f"written a day, {LEAST_WRITES} to {MOST_WRITES:.0f}"
        )
    return written


def checked_policy(given: str, name: str) -> str:
    """One of `POLICIES`: the given one, or the successor of one that was removed. Raises `BadInput`. `name` is the
    option, for the message."""
    if given == REMOVED_POLICY:
        return SUCCESSOR
    if given not in POLICIES:
        raise BadInput(f"{name}={given!r}; allowed: {', '.join(POLICIES)}")
    return given


LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0


def checked_share(given: Share, names: tuple[str, str]) -> Share:
    """One tenant's share of each tier. Raises `BadInput`. names: of the two options, for the message."""
    for name, value in zip(names, (given.guaranteed, given.weight), strict=True):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadInput(f"{name}={value!r} is not a number")
    if not 0 <= given.guaranteed <= 1:
        raise BadInput(f"{names[0]}={given.guaranteed!r}; give the part of each tier that is guaranteed to it, 0 to 1")
    if not LEAST_WEIGHT <= given.weight <= MOST_WEIGHT:
        raise BadInput(f"{names[1]}={given.weight!r}; give a number from {LEAST_WEIGHT} to {MOST_WEIGHT:.0f}")
    return given


def checked_shares(shares: Mapping[str, Share]) -> Mapping[str, Share]:
    """All tenants' shares, which must not exceed the whole. Raises `BadInput`."""
    if not isinstance(shares, Mapping) or not all(isinstance(share, Share) for share in shares.values()):
        raise BadInput(
            f"shares={shares!r}; give a kvstore.Share for each tenant's name, such as "
            'shares={"default": kvstore.Share(guaranteed=0.5)}'
        )
    for name, share in shares.items():
        checked_share(share, (f"shares: {name}: guaranteed", f"shares: {name}: weight"))
    total = sum(share.guaranteed for share in shares.values())
    if total > 1 + 1e-9:
        given = ", ".join(f"{name} {share.guaranteed}" for name, share in shares.items() if share.guaranteed)
        raise BadInput(f"the shares of tenants come to {total:.3g} of each tier ({given}); give 1 or less in all")
    return shares


def check_pieces(shares: Mapping[str, Share], pieces: int, piece_bytes: int, tier: str) -> None:
    """Guarantees are rounded down to whole pieces of a tier. Raises `BadInput` if one comes to none."""
    key, least_bytes = {"dram": ("extent", MIN_EXTENT_BYTES), "nvme": ("slab", MIN_SLAB_BYTES)}[tier]
    for name, share in shares.items():
        if share.guaranteed and share.guaranteed * pieces < 1 - 1e-9:
            enough = ceil(10_000 / pieces) / 10_000  # rounded up, so that it is not refused again
            smaller = f"smaller pieces ({key}, in a sidecar's file store.{key}: {format_size(least_bytes)} or more)"
            raise BadInput(
                f"share={share.guaranteed} of tenant {name} is less than one piece of {tier}, which is taken in "
                f"{format_size(piece_bytes)}; give {enough:g} or more, or "
                + (smaller if piece_bytes > least_bytes else f"more {tier}")
            )


MAX_SECONDS = 10**9
"""Longer than any wait."""
MOST_RETAINED = 0.9
"""Retained blocks must leave room for new ones."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Named upper bounds of a store.

    lease_seconds: how long a lease pins. pinned_fraction: of the DRAM budget, what may be pinned at once. room_steps:
    evictions, new extents and moves one put may cause before it takes what it has. forgotten: evicted keys of one
    tenant that are remembered so that a miss can be called evicted. close_seconds: how long closing writes down what
    DRAM alone holds; with a disk that hangs it waits as long again for each of three things besides. tenant_leases,
    tenant_namespaces: of these, how many one tenant may have; all, or what `shared_by` says, if not given.
    joint_seconds: how long the processes of a collective put have, from the first one's reservation until all have
    committed. retained_fraction: of each tier, what may be kept because a ttl or a priority asks for it.
    """

    lease_seconds: float = 60.0
    pinned_fraction: float = 0.8
    leases: int = 65536
    namespaces: int = 1024
    room_steps: int = 1 << 20
    forgotten: int = 65536
    close_seconds: float = 30.0
    tenant_leases: int | None = None
    tenant_namespaces: int | None = None
    joint_seconds: float = 30.0
    retained_fraction: float = 0.25

    @property
    def most_leases(self) -> int:
        return self.leases if self.tenant_leases is None else self.tenant_leases

    @property
    def most_namespaces(self) -> int:
        return self.namespaces if self.tenant_namespaces is None else self.tenant_namespaces

    def shared_by(self, tenants: int) -> Limits:
        """The same limits for so many tenants: without a given share, each has an equal one, for itself alone."""
        return replace(
            self,
            forgotten=self.forgotten // tenants,
            tenant_leases=self.tenant_leases or max(1, self.leases // tenants),
            tenant_namespaces=self.tenant_namespaces or max(1, self.namespaces // tenants),
        )

    def __post_init__(self) -> None:
        for name in ("leases", "namespaces", "room_steps", "forgotten"):
            if not isinstance(getattr(self, name), int):
                raise BadInput(f"{name}={getattr(self, name)!r} is not a whole number")
        for name in ("lease_seconds", "joint_seconds", "pinned_fraction", "retained_fraction", "close_seconds"):
            if not isinstance(getattr(self, name), int | float):
                raise BadInput(f"{name}={getattr(self, name)!r} is not a number")
        for name in ("lease_seconds", "joint_seconds"):
            if not 0 < getattr(self, name) <= MAX_SECONDS:
                raise BadInput(f"{name}={getattr(self, name)}; give more than 0, at most {MAX_SECONDS}")
        if min(self.leases, self.namespaces, self.room_steps) < 1 or self.forgotten < 0:
            raise BadInput(
                f"leases={self.leases}, namespaces={self.namespaces}, room_steps={self.room_steps} and "
                f"forgotten={self.forgotten}: give 1 or more of the first three, 0 or more of the last"
            )
        for name in ("tenant_leases", "tenant_namespaces"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise BadInput(f"{name}={given!r}; give 1 or more, or nothing for an equal share of each tenant")
        if self.namespaces > MAX_NAMESPACES:
            raise BadInput(f"namespaces={self.namespaces}; give at most {MAX_NAMESPACES}")
        if not 0 <= self.close_seconds <= MAX_SECONDS:
            raise BadInput(f"close_seconds={self.close_seconds}; give seconds from 0 to {MAX_SECONDS}")
        if not 0 < self.pinned_fraction <= 1:
            raise BadInput(f"pinned_fraction={self.pinned_fraction}; give a number above 0, at most 1")
        if not 0 <= self.retained_fraction <= MOST_RETAINED:
            raise BadInput(f"retained_fraction={self.retained_fraction}; give a number from 0 to {MOST_RETAINED}")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The budgets and rates of a store's tiers, in bytes and bytes per second, and what goes where; `kvstore.open`
    explains each."""

    dram: Size = DEFAULT_DRAM
    nvme: Size | None = None
    extent: Size | None = None
    slab: Size | None = None
    scrub: Size = DEFAULT_SCRUB
    policy: str = DEFAULT_POLICY
    nvme_writes: str | float = DEFAULT_WRITES

    def check(self, section: str = "", words: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
        """What can be checked without the machine. section: prefix of options' names, for messages. words: allowed in
        place of a size, by option. Raises `BadInput`."""
        for key in ("dram", "nvme", "extent", "slab"):
            size, others = getattr(self, key), words.get(key, ())
            if size is None or size in others:
                continue
            try:
                parse_size(size, section + key)
            except BadInput as error:
                raise BadInput(str(error) + "".join(f", or {word}" for word in others)) from None
        parse_rate(self.scrub, f"{section}scrub")
        checked_policy(self.policy, f"{section}policy")
        name = f"{section}nvme_writes"
        if parse_writes(self.nvme_writes, name) is not None and self.nvme in (None, OFF):
            raise BadInput(
                f"{name}={self.nvme_writes!r} is about what is written to NVMe, and there is none; give {section}nvme "
                f"a size, or leave {name} out"
            )


@dataclass(frozen=True, slots=True)
class KeysOptions:
    """directory: of tenants' secrets that the nodes of a pool share; the store's own, DATA/keys, if not given.
    cold_start: the fingerprint of an identity there that may take the place of another one, under which a tenant's
    blocks were stored: they are not found any more."""

    directory: str | None = None
    cold_start: str | None = None


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """listen: HOST:PORT or unix:PATH of gRPC, in a process that the keeper runs beside the sidecar; none if not given.
    http: HOST:PORT of a router's queries, in the same process. token_file: of the operator's token, and a line NAME
    TOKEN for each tenant, for callers on this host. certificate, key, client_ca: files in PEM, for callers with
    certificates, and for the other nodes. reflection: whether gRPC's server reflection is served.

    peers: HOST:PORT of other nodes' gRPC. directory: valkey://[USER@]HOST:PORT or valkey+unix:/PATH, where nodes tell
    each other what they have. directory_password_file: of its user. pull: HOST:PORT from which other nodes pull blocks;
    any port of `listen`'s host if not given. transport: sockets, or ucx before them. seal: auto, which seals blocks on
    their way beyond loopback, or always.
    """

    listen: str | None = None
    http: str | None = None
    token_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    reflection: bool = False
    peers: list[str] | None = None
    directory: str | None = None
    directory_password_file: str | None = None
    pull: str | None = None
    transport: str = "sockets"
    seal: str = "auto"

    @property
    def wants_peers(self) -> bool:
        """Whether there are other nodes."""
        return bool(self.peers) or self.directory is not None

    @property
    def seals(self) -> bool:
        """Whether blocks that other nodes pull are sealed."""
        if not self.wants_peers or self.listen is None:
            return False
        return self.seal == "always" or not is_loopback(host_and_port(self.pull or self.listen)[0])


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """A remote engine. url: valkey://[USER@]HOST[:PORT], valkeys://... for TLS, or valkey+unix:/PATH; none if not
    given. password_file: of its user. writes: which blocks are written there: all, learned (those that are asked for
    again), or none. ttl: seconds for which they are kept there; 0 for as long as it has room."""

    url: str | None = None
    password_file: str | None = None
    writes: str = "all"
    ttl: float = 86400.0


FILES_OF_NETWORK = ("token_file", "certificate", "key", "client_ca", "directory_password_file")
TRANSPORTS, SEALS, REMOTE_WRITES = ("sockets", "ucx"), ("auto", "always"), ("all", "learned", "none")
MOST_PEERS = 64
MOST_TTL_SECONDS = 10 * 366 * 86400.0


def check_network(network: NetworkSettings, remote: RemoteSettings, has_keeper: bool = True) -> None:
    """Raises `BadInput`. has_keeper: whether a keeper starts the network process."""
    _check_remote(remote)
    if network.listen is None:
        if network != NetworkSettings():
            raise BadInput("network.listen is missing, and other keys of [network] are there; give HOST:PORT of gRPC")
        return
    pems = (network.certificate, network.key, network.client_ca)
    if None in pems and any(pems):
        raise BadInput(
            "network.certificate, network.key and network.client_ca belong together; give all three, or none"
        )
    for key, address in (("listen", network.listen), ("http", network.http), ("pull", network.pull)):
        if address is None or (key == "listen" and address.startswith("unix:")):
            continue
        host, _ = host_and_port(address, f"network.{key}")
        if not is_loopback(host) and None in pems:
            raise BadInput(
                f"network.{key}={address!r} can be reached by other hosts; give network.certificate, network.key and "
                "network.client_ca, or listen on 127.0.0.1"
            )
    if network.token_file is None and (None in pems or network.listen.startswith("unix:")):
        raise BadInput("network.listen needs network.token_file, or network.certificate, network.key and client_ca")
    if not has_keeper and not network.wants_peers:  # else it is run by itself, and the sidecar has to know of it
        raise BadInput("network.listen needs store.keeper = true, which starts it; or run kvstore network by itself")
    _check_peers(network, None in pems)


def _check_peers(network: NetworkSettings, is_bare: bool) -> None:
    for key, given, allowed in (("transport", network.transport, TRANSPORTS), ("seal", network.seal, SEALS)):
        if given not in allowed:
            raise BadInput(f"network.{key}={given!r}; allowed: {', '.join(allowed)}")
    if not network.wants_peers:
        if network.pull is not None or network.directory_password_file is not None:
            key = "pull" if network.pull is not None else "directory_password_file"
            raise BadInput(f"network.{key} is for other nodes; give network.peers or network.directory too")
        return
    assert network.listen is not None
    if network.listen.startswith("unix:"):
        raise BadInput("other nodes dial network.listen; give HOST:PORT of this host, and no UNIX socket")
    for key, address in (("listen", network.listen), ("pull", network.pull)):
        if address is not None and host_and_port(address)[0] in ("", "0.0.0.0", "::"):
            raise BadInput(
                f"network.{key}={address!r} is no address that other nodes can dial; give the one of this host"
            )
    peers = network.peers or []
    if len(peers) > MOST_PEERS:
        raise BadInput(f"network.peers names {len(peers)} nodes; give at most {MOST_PEERS}, or network.directory")
    for one in peers:
        host, port = host_and_port(one, "network.peers")
        if not port:
            raise BadInput(f"network.peers={one!r}; give the port that the other node listens at")
        if is_bare and not is_loopback(host):
            raise BadInput(
                f"network.peers={one!r} is another host; give network.certificate, network.key and network.client_ca, "
                "by which nodes know each other"
            )


def _check_remote(remote: RemoteSettings) -> None:
    if remote.writes not in REMOTE_WRITES:
        raise BadInput(f"remote.writes={remote.writes!r}; allowed: {', '.join(REMOTE_WRITES)}")
    if not 0 <= remote.ttl <= MOST_TTL_SECONDS:
        raise BadInput(f"remote.ttl={remote.ttl}; give seconds, at most {MOST_TTL_SECONDS:.0f}, or 0 for no end")
    if remote.url is None and remote != RemoteSettings():
        raise BadInput("remote.url is missing, and other keys of [remote] are there; give valkey://HOST:PORT")


def host_and_port(listen: str, key: str = "http.listen") -> tuple[str, int]:
    """Parse HOST:PORT. key: the setting, for messages. Raises `BadInput`."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise BadInput(
            f"{key}={listen!r}; give HOST:PORT, e.g. 127.0.0.1:9797, with a port up to 65535 (0: any free one)"
        )
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """All that is chosen of a store, as `kvstore.open` explains it. Raises `BadInput`."""

    tiers: TierOptions = TierOptions()
    tenant: str = DEFAULT_TENANT
    limits: Limits = Limits()
    shares: Mapping[str, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tiers.check()
        checked_shares(self.shares)
        if self.tiers.nvme is None and self.tiers.slab is not None:
            raise BadInput(
                f"slab={self.tiers.slab} is a size on NVMe, and there is no nvme=; give both, or leave slab= out"
            )
        if not isinstance(self.limits, Limits):
            raise BadInput(f"limits={self.limits!r}; give kvstore.Limits(...), or leave limits= out")


@dataclass(frozen=True, slots=True)
class DramConfig:
    """The DRAM tier's budget and the size of its extents, both in bytes, both whole pages."""

    budget_bytes: int
    extent_bytes: int

    @staticmethod
    def of(dram: Size, extent: Size | None, available_bytes: int) -> DramConfig:
        """From what the user wrote; `available_bytes`: what the cgroup and the machine allow."""
        budget = _budget(dram, "dram", MIN_DRAM_BYTES)
        if budget > available_bytes:
            raise BadInput(
                f"dram={dram} is more than the {format_size(available_bytes)} of memory that this machine or its "
                "cgroup allows; give less, or raise the memory limit"
            )
        if extent is None:
            share = max(MIN_EXTENT_BYTES, budget // EXTENTS_PER_BUDGET)
            size = min(DEFAULT_EXTENT_BYTES, 1 << share.bit_length() - 1)
            while budget // size > MOST_EXTENTS and size < MAX_EXTENT_BYTES:
                size *= 2
        else:
            size = _piece(extent, "extent", MIN_EXTENT_BYTES, min(MAX_EXTENT_BYTES, budget))
        return DramConfig(budget // _PAGE_BYTES * _PAGE_BYTES, size)


@dataclass(frozen=True, slots=True)
class NvmeConfig(SlabSizes):
    """The NVMe tier's sizes, from what the user wrote."""

    @staticmethod
    def of(nvme: Size, slab: Size | None, available_bytes: int | None) -> NvmeConfig:
        """available_bytes: free on the disk, for a new directory; an existing one grows up to
        its budget as the disk has room."""
        budget = _budget(nvme, "nvme", MIN_NVME_BYTES)
        if available_bytes is not None and budget > available_bytes:
            raise BadInput(
                f"nvme={nvme} is more than the {format_size(available_bytes)} that the disk has for it; give less, or "
                "free some"
            )
        if slab is None:
            share = max(MIN_NVME_BYTES // 4, budget // SLABS_PER_BUDGET)
            size = min(MAX_SLAB_BYTES, 1 << share.bit_length() - 1)
        else:
            size = _piece(slab, "slab", MIN_SLAB_BYTES, budget)
        return NvmeConfig(budget // _PAGE_BYTES * _PAGE_BYTES, size)


def _budget(given: Size, name: str, least_bytes: int) -> int:
    budget = parse_size(given, name)
    if budget < least_bytes:
        raise BadInput(f"{name}={given} is too small; give at least {format_size(least_bytes)}")
    return budget


def _piece(given: Size, name: str, least_bytes: int, most_bytes: int) -> int:
    size = parse_size(given, name)
    if not least_bytes <= size <= most_bytes or size % _PAGE_BYTES:
        raise BadInput(
            f"{name}={given} is not possible: give a multiple of 4 KiB between {format_size(least_bytes)} and "
            f"{format_size(most_bytes)}"
        )
    return size


def memory_limit_files(cgroups: str) -> list[str]:
    """The files that may say how much memory this process may have; `cgroups`: the contents of /proc/self/cgroup.

    A limit may stand at any level between the process's own group and the root, in either version's hierarchy.
    """
    files = ["/proc/meminfo"]
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("/sys/fs/cgroup", "memory.max")
        )
        levels = [level for level in path.split("/") if level]
        files.extend("/".join([root, *levels[:depth], name]) for depth in range(len(levels), -1, -1))
    return files


def memory_limit(files: dict[str, str]) -> int:
    """The tightest of the machine's memory and its cgroup's limits, in bytes, from the contents of these files:
    /proc/meminfo, and the cgroup's memory.max (version 2) or memory.limit_in_bytes (version 1)."""
    limits = []
    for name, text in files.items():
        if name.endswith("meminfo"):
            found = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
            if found:
                limits.append(int(found.group(1)) * 1024)
        elif text.strip().isdigit():
            limits.append(int(text))
    return min(limits, default=1 << 62)


# ---------------------------------------------------------------------------------------------------------------------
# Paths as people give them: in an address, a setting, a flag.


def expanded(path: str | bytes | os.PathLike[str], name: str = "") -> str:
    """The path, with ~ and ~user as homes, as in a shell. name: of the option, for messages. Raises `BadInput`."""
    given = os.fsdecode(path)
    said = f"{name}={given!r}" if name else repr(given)
    if not given or "\0" in given:
        raise BadInput(f"{said} is no path; give one that is not empty and has no NUL in it")
    found = os.path.expanduser(given)
    if found.startswith("~"):
        raise BadInput(f"{said}: {given.split('/')[0]} is no user's home here; give the whole path, or ./{given}")
    return found


def check_deadline(deadline_ms: float) -> None:
    """Raise `BadInput` unless that is a possible number of milliseconds to wait."""
    if not isinstance(deadline_ms, Real) or not deadline_ms >= 0:
        raise BadInput(f"deadline_ms={deadline_ms!r}; give milliseconds, 0 or more")
