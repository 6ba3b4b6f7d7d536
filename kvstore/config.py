"""Settings: one tree of `SettingsSection`s. A field is a setting, and its type says what it may be: `Meta` has the
bounds, the words for another value, and marks. A section checks its fields when it is built: by `kvstore.open` from
keywords (`StoreOptions`), by a sidecar from a file, variables and flags (`kvstore.service.settings`), by an adapter
from its engine's configuration. `read` builds one from a table, and names what is wrong by its full name.

Sizes are given as people write them ("2GiB", "512MB", a number of bytes). What the machine allows is read once, when a
store is opened, and judged by `memory_limit`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from math import ceil, inf, nan
from numbers import Real
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from msgspec import Meta, Struct, ValidationError, convert, field, inspect, structs

from kvstore.block.errors import BadInput, shown
from tiering.frame import KEY_ID_BYTES
from tiering.policies.shares import Share
from tiering.slab_header import SlabSizes

S = TypeVar("S", bound=Struct)

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("", 1024), ("IB", 1024), ("B", 1000))
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
WRITES = (
    f"{DEFAULT_WRITES}, {LEARNED_WRITES}, or how many times the size of nvme may be written a day, {LEAST_WRITES} to "
    f"{MOST_WRITES:.0f}"
)
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
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000
MAX_SECONDS = 10**9
"""Longer than any wait."""
MOST_RETAINED = 0.9
"""Retained blocks must leave room for new ones."""
MOST_PEERS = 64
MOST_TTL_SECONDS = 10 * 366 * 86400
LONGEST_KEY = 100
"""Characters of an unknown key for which a similar one is looked for."""
AUDIT_FILE = "console-audit.jsonl"
DEFAULT_TENANT = "default"
DEFAULT_DRAM = "1GiB"
MAX_SOCKET_BYTES = 107
"""The kernel's limit for a socket's path (unix(7))."""
DEFAULT_SCRUB = "8MiB/s"
"""Seven hours for 200 GiB, and less than a hundredth of what an NVMe disk can read."""
MOST_EXTENTS = 512
"""A large budget is cut into at most so many, as long as extents can be larger: each holds a descriptor."""


class SettingsSection(Struct, frozen=True):
    """Settings that belong together. Raises `BadInput`, one line that begins with the field's name, when one is built
    of a value that its field does not allow."""

    is_lax: ClassVar[bool] = False
    """Whether a number may be given as text."""

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            structs.force_setattr(self, name, checked(name, getattr(self, name), kind, self.is_lax))


@cache
def kinds_of(section: type[Struct]) -> dict[str, Any]:
    """The settings of a section: their names, and their types with what these say of them."""
    return {one.name: one.type for one in structs.fields(section)}


@cache
def marks(kind: Any) -> dict[str, Any]:
    """What a setting's type says of it besides bounds. check: a function of the value and its name, which raises
    `BadInput`. path: that a ~ in it is a home. live: whether a sidecar applies it while it serves; a function of its
    section, before and after the change."""
    found: dict[str, Any] = {}
    for one in get_args(kind):
        found |= (one.extra or {}) if isinstance(one, Meta) else marks(one)
    return found


def checked(name: str, value: Any, kind: Any, is_lax: bool = False) -> Any:
    """The value as its kind has it: a number as float, a word as enum, a path with its home. Raises `BadInput` with
    what the kind allows."""
    if isinstance(value, Real) and not isinstance(value, int):
        value = float(value)  # of numpy, or a fraction
    try:
        value = convert(value, kind, strict=not is_lax)
    except ValidationError:
        raise BadInput(f"{name}={shown(value)}; give {allowed(inspect.type_info(kind))}") from None
    found = marks(kind)
    if value is not None and "check" in found:
        found["check"](value, name)
    return expanded(value, name) if value is not None and "path" in found else value


def allowed(kind: inspect.Type) -> str:
    """What a setting may be, in words: those of its type, or made from its bounds."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case inspect.Metadata(type=inner):
            return allowed(inner)
        case inspect.UnionType(types=kinds):
            return " or ".join(allowed(one) for one in kinds if not isinstance(one, inspect.NoneType))
        case inspect.ListType(item_type=item, max_length=most):
            return f"a list of {allowed(item)}" + (f", at most {most}" if most is not None else "")
        case inspect.EnumType(cls=words):
            return f"one of {', '.join(str(one.value) for one in words)}"
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            if kind.ge is not None and kind.le is not None:
                return f"{noun} from {kind.ge} to {kind.le}"
            bounds = (("above", kind.gt), ("of at least", kind.ge), ("below", kind.lt), ("at most", kind.le))
            return " ".join([noun, " and ".join(f"{word} {one}" for word, one in bounds if one is not None)])
    return "true or false" if isinstance(kind, inspect.BoolType) else "text"


def one_of(*words: str) -> Meta:
    """Of a setting that is one of these words."""
    return Meta(pattern=rf"^({'|'.join(words)})\Z", description=f"{', '.join(words[:-1])} or {words[-1]}, in quotes")


def read(section: type[S], given: Any, prefix: str = "") -> S:
    """A section, and those in it, from a table. prefix: of its settings' names, for messages. Raises `BadInput`, one
    line, for the first name or value that cannot be."""
    kinds = kinds_of(section)
    known = ", ".join(kinds)
    if not isinstance(given, Mapping):
        name = prefix.removesuffix(".")
        raise BadInput(f"{name}={shown(given)} is a section; write [{name}] and its keys below it ({known})")
    for name in given:
        if name not in kinds:
            near = difflib.get_close_matches(str(name)[:LONGEST_KEY], kinds, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {known}"
            raise BadInput(f"{prefix}{name} is not a setting; {hint}")
    for one in structs.fields(section):
        if one.required and one.name not in given:
            raise BadInput(f"{prefix}{one.name} is missing; give {allowed(inspect.type_info(one.type))}")
    values = {
        name: read(kinds[name], value, f"{prefix}{name}.") if is_section(kinds[name]) else value
        for name, value in given.items()
    }
    try:
        return section(**values)
    except BadInput as error:
        raise BadInput(f"{prefix}{error}") from None


def is_section(kind: Any) -> bool:
    """Whether a setting of that type is a section of its own."""
    return isinstance(kind, type) and issubclass(kind, SettingsSection)


# ---------------------------------------------------------------------------------------------------------------------
# Values as people write them.


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
    found = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is not None and found.group(2).upper() in _UNITS:
        return int(float(found.group(1)) * _UNITS[found.group(2).upper()])
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    raise BadInput(
        f"{name}={given!r} is not a size; write a number with B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB), "
        f"e.g. {name}=2GiB"
    )


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
        raise BadInput(f"{name}={given!r}; give {WRITES}")
    return written


def checked_policy(given: str, name: str) -> str:
    """One of `POLICIES`: the given one, or the successor of one that was removed. Raises `BadInput`. `name` is the
    option, for the message."""
    if given == REMOVED_POLICY:
        return SUCCESSOR
    if given not in POLICIES:
        raise BadInput(f"{name}={given!r}; allowed: {', '.join(POLICIES)}")
    return given


def checked_shares(shares: Mapping[str, Share]) -> Mapping[str, Share]:
    """All tenants' shares, which must not exceed the whole. Raises `BadInput`."""
    if not isinstance(shares, Mapping) or not all(isinstance(share, Share) for share in shares.values()):
        raise BadInput(
            f"shares={shares!r}; give a kvstore.Share for each tenant's name, such as "
            'shares={"default": kvstore.Share(guaranteed=0.5)}'
        )
    for name, share in shares.items():
        checked(f"shares: {name}: guaranteed", share.guaranteed, Part)
        checked(f"shares: {name}: weight", share.weight, Weight)
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


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of settings.


def allowed_size(*words: str) -> Meta:
    """Of a size, or one of the words."""

    def check(value: Size, name: str) -> None:
        try:
            _ = value in words or parse_size(value, name)
        except BadInput as error:
            raise BadInput(str(error) + "".join(f", or {word}" for word in words)) from None

    return Meta(description=f"a size, e.g. '2GiB'{''.join(f', or {one}' for one in words)}", extra={"check": check})


def is_scrubbing(tiers: TierOptions) -> bool:
    """Whether there is a scrub, whose rate may change: one that is off has no thread."""
    return parse_rate(tiers.scrub, "scrub") > 0


Text = Annotated[str, Meta(pattern="^[^\0]+\\Z", description="text in quotes, not empty and without NUL")]
PathText = Annotated[Text, Meta(extra={"path": True})]
LIVE = Meta(extra={"live": lambda section: True})
"""Of a setting that a sidecar applies while it serves."""
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS, description=f"seconds above 0, at most {MAX_SECONDS}")]
Part = Annotated[float, Meta(ge=0, le=1, description="the part of each tier that is guaranteed to it, 0 to 1")]
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
Rate = Annotated[Size, Meta(description="bytes per second, e.g. scrub=8MiB/s, or off", extra={"check": parse_rate})]
Policy = Annotated[str, Meta(description=f"{' or '.join(POLICIES)}, in quotes", extra={"check": checked_policy})]
Writes = Annotated[str | float, Meta(description=WRITES, extra={"check": parse_writes})]
Fingerprint = Annotated[
    str,
    Meta(
        pattern=rf"^[0-9a-fA-F]{{{2 * KEY_ID_BYTES}}}\Z",
        description=f"the fingerprint of the identity to begin anew with, {2 * KEY_ID_BYTES} hexadecimal digits that "
        "kvstore keys show prints",
    ),
]

# ---------------------------------------------------------------------------------------------------------------------
# Sections.


class Limits(SettingsSection, frozen=True):
    """Named upper bounds of a store.

    lease_seconds: how long a lease pins. pinned_fraction: of the DRAM budget, what may be pinned at once. room_steps:
    evictions, new extents and moves one put may cause before it takes what it has. forgotten: evicted keys of one
    tenant that are remembered so that a miss can be called evicted. close_seconds: how long closing writes down what
    DRAM alone holds; with a disk that hangs it waits as long again for each of three things besides. tenant_leases,
    tenant_namespaces: of these, how many one tenant may have; all, or what `shared_by` says, if not given.
    joint_seconds: how long the processes of a collective put have, from the first one's reservation until all have
    committed. retained_fraction: of each tier, what may be kept because a ttl or a priority asks for it.
    """

    lease_seconds: Seconds = 60.0
    pinned_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8
    leases: Count = 65536
    namespaces: Annotated[int, Meta(ge=1, le=MAX_NAMESPACES)] = 1024
    room_steps: Count = 1 << 20
    forgotten: Annotated[int, Meta(ge=0)] = 65536
    close_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 30.0
    tenant_leases: Count | None = None
    tenant_namespaces: Count | None = None
    joint_seconds: Seconds = 30.0
    retained_fraction: Annotated[float, Meta(ge=0, le=MOST_RETAINED)] = 0.25

    @property
    def most_namespaces(self) -> int:
        return self.namespaces if self.tenant_namespaces is None else self.tenant_namespaces

    def shared_by(self, tenants: int) -> Limits:
        """The same limits for so many tenants: without a given share, each has an equal one, for itself alone."""
        return structs.replace(
            self,
            forgotten=self.forgotten // tenants,
            tenant_leases=self.tenant_leases or max(1, self.leases // tenants),
            tenant_namespaces=self.tenant_namespaces or max(1, self.namespaces // tenants),
        )


class TierOptions(SettingsSection, frozen=True):
    """The budgets and rates of a store's tiers, in bytes and bytes per second, and what goes where; `kvstore.open`
    explains each."""

    dram: Annotated[Size, allowed_size()] = DEFAULT_DRAM
    nvme: Annotated[Size | None, allowed_size()] = None
    extent: Annotated[Size | None, allowed_size()] = None
    slab: Annotated[Size | None, allowed_size()] = None
    scrub: Annotated[Rate, Meta(extra={"live": is_scrubbing})] = DEFAULT_SCRUB
    policy: Policy = DEFAULT_POLICY
    nvme_writes: Writes = DEFAULT_WRITES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nvme in (None, OFF) and parse_writes(self.nvme_writes, "nvme_writes") is not None:
            raise BadInput(
                f"nvme_writes={self.nvme_writes!r} is about what is written to NVMe, and there is none; give nvme a "
                "size, or leave nvme_writes out"
            )


class KeysOptions(SettingsSection, frozen=True):
    """directory: of tenants' secrets that the nodes of a pool share; the store's own, DATA/keys, if not given.
    cold_start: the fingerprint of an identity there that may take the place of another one, under which a tenant's
    blocks were stored: they are not found any more."""

    directory: PathText | None = None
    cold_start: Fingerprint | None = None


class NetworkSettings(SettingsSection, frozen=True):
    """listen: HOST:PORT or unix:PATH of gRPC, which the edge serves, or the transfer agent; none if not given. http:
    HOST:PORT of a router's queries. token_file: of the operator's token, and a line NAME
    TOKEN for each tenant, for callers on this host. certificate, key, client_ca: files in PEM, for callers with
    certificates, and for the other nodes. reflection: whether gRPC's server reflection is served.

    peers: HOST:PORT of other nodes' gRPC. directory: valkey://[USER@]HOST:PORT or valkey+unix:/PATH, where nodes tell
    each other what they have. directory_password_file: of its user. pull: HOST:PORT from which other nodes pull blocks;
    any port of `listen`'s host if not given. transport: sockets, or ucx before them. seal: auto, which seals blocks on
    their way beyond loopback, or always.
    """

    listen: Text | None = None
    http: Text | None = None
    token_file: PathText | None = None
    certificate: PathText | None = None
    key: PathText | None = None
    client_ca: PathText | None = None
    reflection: bool = False
    peers: Annotated[list[Text], Meta(max_length=MOST_PEERS)] | None = None
    directory: Text | None = None
    directory_password_file: PathText | None = None
    pull: Text | None = None
    transport: Annotated[str, one_of("sockets", "ucx")] = "sockets"
    seal: Annotated[str, one_of("auto", "always")] = "auto"

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


class RemoteSettings(SettingsSection, frozen=True):
    """A remote engine. url: valkey://[USER@]HOST[:PORT], valkeys://... for TLS, or valkey+unix:/PATH; none if not
    given. password_file: of its user. writes: which blocks are written there: all, learned (those that are asked for
    again), or none. ttl: seconds for which they are kept there; 0 for as long as it has room."""

    url: Text | None = None
    password_file: PathText | None = None
    writes: Annotated[str, one_of("all", "learned", "none")] = "all"
    ttl: Annotated[float, Meta(ge=0, le=MOST_TTL_SECONDS)] = 86400.0


def check_network(network: NetworkSettings, remote: RemoteSettings, has_keeper: bool = True) -> None:
    """Raises `BadInput`. has_keeper: whether a keeper starts what serves it."""
    if remote.url is None and remote != RemoteSettings():
        raise BadInput("remote.url is missing, and other keys of [remote] are there; give valkey://HOST:PORT")
    if network.listen is None:
        if network != NetworkSettings():
            raise BadInput("network.listen is missing, and other keys of [network] are there; give HOST:PORT of gRPC")
        return
    pems = (network.certificate, network.key, network.client_ca)
    is_bare, is_local = None in pems, network.listen.startswith("unix:")
    if is_bare and any(pems):
        raise BadInput(
            "network.certificate, network.key and network.client_ca belong together; give all three, or none"
        )
    given = {"listen": None if is_local else network.listen, "http": network.http, "pull": network.pull}
    hosts = {key: host_and_port(one, f"network.{key}")[0] for key, one in given.items() if one is not None}
    for key, host in hosts.items():
        if is_bare and not is_loopback(host):
            raise BadInput(
                f"network.{key}={given[key]!r} can be reached by other hosts; give network.certificate, network.key "
                "and network.client_ca, or listen on 127.0.0.1"
            )
    if network.token_file is None and (is_bare or is_local):
        raise BadInput("network.listen needs network.token_file, or network.certificate, network.key and client_ca")
    if not has_keeper and not network.wants_peers:  # else it is run by itself, and the sidecar has to know of it
        raise BadInput("network.listen needs store.keeper = true, which starts it; or run kvstore network by itself")
    if not network.wants_peers:
        for key in ("pull", "directory_password_file"):
            if getattr(network, key) is not None:
                raise BadInput(f"network.{key} is for other nodes; give network.peers or network.directory too")
        return
    if is_local:
        raise BadInput("other nodes dial network.listen; give HOST:PORT of this host, and no UNIX socket")
    for key in hosts.keys() - {"http"}:
        if hosts[key] in ("", "0.0.0.0", "::"):
            raise BadInput(
                f"network.{key}={given[key]!r} is no address that other nodes can dial; give the one of this host"
            )
    for peer in network.peers or ():
        host, port = host_and_port(peer, "network.peers")
        if not port:
            raise BadInput(f"network.peers={peer!r}; give the port that the other node listens at")
        if is_bare and not is_loopback(host):
            raise BadInput(
                f"network.peers={peer!r} is another host; give network.certificate, network.key and network.client_ca, "
                "by which nodes know each other"
            )


def host_and_port(listen: str, key: str = "http.listen") -> tuple[str, int]:
    """Parse HOST:PORT. key: the setting, for messages. Raises `BadInput`."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise BadInput(
            f"{key}={listen!r}; give HOST:PORT, e.g. 127.0.0.1:9797, with a port up to 65535 (0: any free one)"
        )
    return host.strip("[]"), int(port)


class StoreOptions(Struct, frozen=True):
    """All that is chosen of a store, as `kvstore.open` explains it. Raises `BadInput`."""

    tiers: TierOptions = TierOptions()
    tenant: str = DEFAULT_TENANT
    limits: Limits = Limits()
    shares: Mapping[str, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
