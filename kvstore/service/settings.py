"""The operator's settings: one TOML file, overridden by environment variables, and these by the flags of `kvstore
serve`.

    [store]    dram nvme extent slab scrub policy        [limits]  see `kvstore.config.Limits`
               nvme_writes data prefault keeper
    [door]     socket mode users share weight, and see `DoorLimits`
    [tenants.NAME]  socket users share weight
    [admin]    socket                                    [http]    listen token_file
    [observe]  socket mode users                         [log]     level format
    [console]  listen token_file operator audit_file     [keys]    directory cold_start
    [network]  listen http token_file certificate key client_ca reflection
               peers directory directory_password_file pull transport seal
    [remote]   url password_file writes ttl

Every key except `tenants.NAME.socket` has a default, and none has two names. Errors are reported at the start, with the
key's full name, what was given and what is allowed. The environment is handed in.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kvstore.block.errors import BadInput, shown
from kvstore.config import (
    AUDIT_FILE,
    AUTO,
    DEFAULT_TENANT,
    DEFAULT_WRITES,
    FILES_OF_NETWORK,
    LEARNED_WRITES,
    MAX_SECONDS,
    MAX_SOCKET_BYTES,
    OFF,
    POLICIES,
    KeysOptions,
    Limits,
    NetworkSettings,
    RemoteSettings,
    Size,
    TierOptions,
    check_network,
    checked_share,
    checked_shares,
    expanded,
    is_loopback,
)
from kvstore.config import host_and_port as host_and_port
from kvstore.service.connections import DoorLimits
from tiering.files import Unfit, read_file
from tiering.frame import KEY_ID_BYTES
from tiering.policies.shares import Share

T = TypeVar("T")
TENANT_SOCKET, ADMIN_SOCKET, OBSERVE_SOCKET = "kvstore.sock", "admin.sock", "observe.sock"
COURIER_SOCKET = "courier.sock"
VARIABLE = "KVSTORE_"
SHORT = {"KVSTORE_DATA": ("store", "data"), "KVSTORE_DRAM": ("store", "dram"), "KVSTORE_NVME": ("store", "nvme")}
"""Shorter names, which other commands read too; the long ones take precedence."""
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("json", "text")
WORDS = {
    "store.policy": f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}, in quotes",
    "store.nvme_writes": f"{DEFAULT_WRITES} or {LEARNED_WRITES}, in quotes, or a number",
    "log.level": f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}, in quotes",
    "log.format": f"{' or '.join(FORMATS)}, in quotes",
}
"""Allowed values of settings that are a word or two."""
MAX_SWEEP_SECONDS = 10.0
"""Memory of disconnected clients is freed no sooner than a sweep finds it."""
MAX_USER = (1 << 32) - 2
"""The highest user id; the one above it means none."""
FINGERPRINT_DIGITS = 2 * KEY_ID_BYTES
_FINGERPRINT = re.compile(f"[0-9a-fA-F]{{{FINGERPRINT_DIGITS}}}")
MOST_LINE, LONGEST_KEY = 1000, 100
"""Characters of an error line, and of a key for which a similar one is looked for."""
MOST_CONFIGURATION_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreSettings(TierOptions):
    """A sidecar's tiers. dram, nvme: "auto" is half of the memory that this process may have, and four fifths of the
    disk's free space; "off" is no NVMe. data: the directory of keys and slabs. prefault: fault in all of DRAM at the
    start, in the background. keeper: a parent process holds the memory, and restarts the sidecar after a crash."""

    dram: Size = AUTO
    nvme: Size | None = AUTO
    data: str = "./kv"
    prefault: bool = True
    keeper: bool = True


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """socket: of the default tenant; beside the data if not given. mode: of every tenant's socket, in octal. users:
    user ids that may connect; if not given, every user who can open the socket; an empty list admits none. share,
    weight: as a tenant's."""

    socket: str | None = None
    mode: str = "660"
    users: list[int] | None = None
    share: float | None = None
    weight: float | None = None
    limits: DoorLimits = field(default_factory=DoorLimits)

    @property
    def mode_bits(self) -> int:
        return int(self.mode, 8)


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """socket: the tenant's. users: as the door's. share: its guaranteed part of each tier. weight: its part of the
    rest, relative to others'."""

    socket: str
    users: list[int] | None = None
    share: float | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """socket: the operator's; beside the data if not given."""

    socket: str | None = None


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """socket: of observers, who see what the operator sees and can change nothing; beside the data if not given. mode,
    users: as the door's."""

    socket: str | None = None
    mode: str = "660"
    users: list[int] | None = None

    @property
    def mode_bits(self) -> int:
        return int(self.mode, 8)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """listen: HOST:PORT of liveness, readiness and metrics; none if not given. token_file: holds the token that a
    scraper must send for the metrics; without it they are served only if there is a single tenant."""

    listen: str | None = None
    token_file: str | None = None


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """listen: HOST:PORT of the console, a process that the supervisor runs beside the sidecar; none if not given.
    token_file: of one line; needed if other hosts can connect. operator: whether the console gets the operator's
    socket, so that holders of the token may drop, purge and warm there. audit_file: where it records what was done;
    beside the data if not given."""

    listen: str | None = None
    token_file: str | None = None
    operator: bool = False
    audit_file: str | None = None


@dataclass(frozen=True, slots=True)
class LogSettings:
    """level: the lowest that is logged. format: one JSON object per line, or text."""

    level: str = "info"
    format: str = "json"


@dataclass(frozen=True, slots=True)
class Settings:
    store: StoreSettings = field(default_factory=StoreSettings)
    limits: Limits = field(default_factory=Limits)
    door: DoorSettings = field(default_factory=DoorSettings)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    admin: AdminSettings = field(default_factory=AdminSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    keys: KeysOptions = field(default_factory=KeysOptions)
    log: LogSettings = field(default_factory=LogSettings)

    @property
    def admin_socket(self) -> str:
        return self.admin.socket or default_socket(self.store.data, ADMIN_SOCKET)

    @property
    def audit_file(self) -> str:
        """The audit log of operators' actions at the console."""
        return self.console.audit_file or default_socket(self.store.data, AUDIT_FILE)

    @property
    def observe_socket(self) -> str:
        return self.observe.socket or default_socket(self.store.data, OBSERVE_SOCKET)

    @property
    def wants_courier(self) -> bool:
        """Whether blocks are fetched from other nodes or a remote engine."""
        return self.network.wants_peers or self.remote.url is not None

    @property
    def courier_socket(self) -> str:
        return default_socket(self.store.data, COURIER_SOCKET)

    @property
    def peers_door(self) -> str:
        """Where other nodes reach this one, as in tickets; empty if they do not."""
        return self.network.listen or "" if self.network.wants_peers else ""

    def sockets(self) -> dict[str, TenantSettings]:
        """Every tenant's socket. Raises `BadInput` if two have the same, or if a path is too long."""
        default = self.door.socket or default_socket(self.store.data, TENANT_SOCKET)
        door = TenantSettings(default, self.door.users, self.door.share, self.door.weight)
        found = {DEFAULT_TENANT: door, **self.tenants}
        taken: dict[str, str] = {}
        for name, one in found.items():
            _check_socket(socket_key(name), one.socket)
            if one.socket in taken:
                raise BadInput(
                    f"tenants {taken[one.socket]} and {name} have one socket, {one.socket}; the socket says whose "
                    "blocks they are, so give each its own"
                )
            taken[one.socket] = name
        admin = self.admin_socket
        _check_socket("admin.socket", admin)
        if admin in taken:
            raise BadInput(f"admin.socket={admin} is tenant {taken[admin]}'s socket too; give the operator his own")
        observe = self.observe_socket
        _check_socket("observe.socket", observe)
        if observe in taken or observe == admin:
            whose = f"tenant {taken[observe]}'s" if observe in taken else "the operator's"
            raise BadInput(f"observe.socket={observe} is {whose} socket too; give observers their own")
        if self.wants_courier and self.courier_socket in {*taken, admin, observe}:
            raise BadInput(f"{self.courier_socket} is the couriers' socket; give the other one of that path its own")
        return found


def shares_of(settings: Settings) -> Mapping[str, Share]:
    """The shares of tenants that have settings. Raises `BadInput`."""
    found = {}
    for name, one in settings.sockets().items():
        if one.share is None and one.weight is None:
            continue
        section = "door" if name == DEFAULT_TENANT else f"tenants.{name}"
        given = Share(one.share or 0.0, 1.0 if one.weight is None else one.weight)
        found[name] = checked_share(given, (f"{section}.share", f"{section}.weight"))
    return checked_shares(found)


def read_configuration(path: Path) -> bytes:
    """A settings file; never a pipe, since both the supervisor and the sidecar read it. Raises `BadInput`, and
    `OSError`."""
    try:
        return read_file(path, MOST_CONFIGURATION_BYTES)
    except Unfit as error:
        raise BadInput(f"{path} is no configuration: {error}; give a TOML file") from None


def read_settings(
    text: str | bytes,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    name: str = "the configuration",
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from TOML (in UTF-8), overridden by variables of the environment, and these by flags. flags: section ->
    key -> value, None where a flag was not given. name: of the file, for messages.

    Raises `BadInput`.
    """
    try:
        return _read_settings(text, flags, name, environment or {})
    except BadInput as error:
        line = str(error)
        if len(line) <= MOST_LINE:
            raise
        raise BadInput(f"{line[:MOST_LINE]}...") from None


def _read_settings(
    text: str | bytes, flags: Mapping[str, Mapping[str, Any]] | None, name: str, environment: Mapping[str, str]
) -> Settings:
    try:
        given = tomllib.loads(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:  # ValueError: numbers of too many digits
        raise BadInput(f"{name} is not TOML: {str(error) or type(error).__name__}") from None
    for above in (from_environment(environment), flags or {}):
        for section, values in above.items():
            chosen = {key: value for key, value in values.items() if value is not None}
            if chosen:
                given[section] = {**_table(given, section), **chosen}
    _refuse_unknown(given, [one.name for one in fields(Settings)], "")
    _expand_paths(given)
    door = dict(_table(given, "door"))
    limits = {one.name: door.pop(one.name) for one in fields(DoorLimits) if one.name in door}
    _refuse_unknown(door, [*_keys(DoorSettings), *_keys(DoorLimits)], "door.", without=("limits",))
    tenants = _table(given, "tenants")
    settings = Settings(
        store=_section(StoreSettings, _table(given, "store"), "store."),
        limits=_section(Limits, _table(given, "limits"), "limits."),
        door=DoorSettings(**_checked(DoorSettings, door, "door."), limits=_section(DoorLimits, limits, "door.")),
        tenants={name: _section(TenantSettings, _tenant(tenants, name), f"tenants.{name}.") for name in tenants},
        admin=_section(AdminSettings, _table(given, "admin"), "admin."),
        observe=_section(ObserveSettings, _table(given, "observe"), "observe."),
        http=_section(HttpSettings, _table(given, "http"), "http."),
        console=_section(ConsoleSettings, _table(given, "console"), "console."),
        network=_section(NetworkSettings, _table(given, "network"), "network."),
        remote=_section(RemoteSettings, _table(given, "remote"), "remote."),
        keys=_section(KeysOptions, _table(given, "keys"), "keys."),
        log=_section(LogSettings, _table(given, "log"), "log."),
    )
    _check(settings)
    return settings


def from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Settings by section from variables: `KVSTORE_STORE_DRAM` is `store.dram`. Values that are not text are written as
    in TOML. `SHORT` names are for the operators' commands too. Raises `BadInput` for one that names no setting."""
    known = {f"{VARIABLE}{section}_{key}".upper(): (section, key, kind) for section, key, kind in _all_settings()}
    given: dict[str, dict[str, Any]] = {}
    for name, (section, key) in SHORT.items():
        if environment.get(name):
            given.setdefault(section, {})[key] = environment[name]
    sections = tuple(f"{VARIABLE}{one.name}_".upper() for one in fields(Settings))
    for name, value in sorted(environment.items()):
        if not name.startswith(sections):
            continue
        if name.startswith(f"{VARIABLE}TENANTS_"):
            raise BadInput(
                f"{name}: tenants are sections of the configuration file, [tenants.NAME]; give --config FILE"
            )
        if name not in known:
            near = difflib.get_close_matches(name[:LONGEST_KEY], known, 1)
            hint = f"did you mean {near[0]}?" if near else "docs/sidecar.md has all settings"
            raise BadInput(f"{name[:LONGEST_KEY]} names no setting; {hint}")
        section, key, kind = known[name]
        is_text = kind.removesuffix(" | None") in ("str", "Size")
        given.setdefault(section, {})[key] = value if is_text else _value(value)
    return given


def _all_settings() -> Iterator[tuple[str, str, str]]:
    """Section, key, and the key's type as it is written; without tenants', which have no names yet."""
    for section, kind in get_type_hints(Settings).items():
        for part in (DoorSettings, DoorLimits) if kind is DoorSettings else (kind,) if is_dataclass(kind) else ():
            for one in fields(part):
                if one.type != DoorLimits.__name__:
                    yield section, one.name, str(one.type)


def _value(text: str) -> Any:
    """A variable's value, parsed as TOML; other text stays text, and is refused later under the key's name."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    return read["value"] if set(read) == {"value"} else text


def _expand_paths(given: dict[str, Any]) -> None:
    """Expand ~ in every path. Values of the wrong type are refused later."""
    tables = [(given, "store", "data"), (given, "http", "token_file"), (given, "console", "token_file")]
    tables += [(given, "console", "audit_file")]
    tables += [(given, section, "socket") for section in ("door", "admin", "observe")]
    tables += [(given, "network", key) for key in FILES_OF_NETWORK]
    tables += [(given, "keys", "directory"), (given, "remote", "password_file")]
    tenants = given.get("tenants")
    if isinstance(tenants, dict):
        given["tenants"] = tenants = dict(tenants)
        tables += [(tenants, name, "socket") for name in tenants]
    for parent, section, key in tables:
        table = parent.get(section)
        given_path = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(given_path, str) and given_path.startswith("~"):
            name = f"{section}.{key}" if parent is given else f"tenants.{section}.{key}"
            parent[section] = {**table, key: expanded(given_path, name)}


def _check(settings: Settings) -> None:
    modes: tuple[tuple[str, DoorSettings | ObserveSettings], ...]
    modes = ("door", settings.door), ("observe", settings.observe)
    for section, one in modes:
        try:
            assert 0 <= one.mode_bits <= 0o777
        except (ValueError, AssertionError):
            raise BadInput(f"{section}.mode={one.mode!r}; give up to three octal digits, such as 660") from None
    for key, value, allowed in (("level", settings.log.level, LEVELS), ("format", settings.log.format, FORMATS)):
        if value not in allowed:
            raise BadInput(f"log.{key}={value!r}; allowed: {', '.join(allowed)}")
    if settings.http.listen is not None:
        host_and_port(settings.http.listen)
    _check_console(settings)
    check_network(settings.network, settings.remote, settings.store.keeper)
    if settings.keys.cold_start is not None and not _FINGERPRINT.fullmatch(settings.keys.cold_start):
        raise BadInput(
            f"keys.cold_start={shown(settings.keys.cold_start)}; give the fingerprint of the identity to begin anew "
            f"with, {FINGERPRINT_DIGITS} hexadecimal digits that kvstore keys show prints"
        )
    settings.store.check("store.", {"dram": (AUTO,), "nvme": (AUTO, OFF)})
    for limit in fields(DoorLimits):
        value = getattr(settings.door.limits, limit.name)
        most = {"sweep_seconds": MAX_SWEEP_SECONDS, "silence_seconds": MAX_SECONDS}.get(limit.name, math.inf)
        if not 0 < value <= most or value == math.inf:
            more = "" if most == math.inf else f", at most {most:.0f}"
            raise BadInput(f"door.{limit.name}={value}; give more than 0{more}")
    if DEFAULT_TENANT in settings.tenants:
        raise BadInput(f"tenants.{DEFAULT_TENANT} is the tenant of [door]; give door.socket and door.users instead")
    users = {"door": settings.door.users, "observe": settings.observe.users}
    users |= {f"tenants.{name}": one.users for name, one in settings.tenants.items()}
    for section, ids in users.items():
        wrong = [one for one in ids or () if not 0 <= one <= MAX_USER]
        if wrong:
            raise BadInput(f"{section}.users={ids!r}: {wrong[0]} is no user id; give numbers from 0 to {MAX_USER}")
    settings.sockets()
    shares_of(settings)


def _check_console(settings: Settings) -> None:
    listen, token_file, operator = settings.console.listen, settings.console.token_file, settings.console.operator
    if operator and (listen is None or token_file is None):
        missing = "listen" if listen is None else "token_file"
        raise BadInput(f"console.operator = true lets who has its token drop and purge; give console.{missing} too")
    if settings.console.audit_file is not None and not operator:
        raise BadInput("console.audit_file is of what an operator does there; give console.operator = true too")
    if listen is None:
        return
    host, _ = host_and_port(listen, "console.listen")
    if token_file is None and not is_loopback(host):
        raise BadInput(
            f"console.listen={listen!r} can be reached by other hosts; give console.token_file, or listen on 127.0.0.1"
        )
    if not settings.store.keeper:
        raise BadInput("console.listen needs store.keeper = true, which starts it; or run kvstore console by itself")


def _check_socket(key: str, path: str) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise BadInput(f"{key}={path} is longer than {MAX_SOCKET_BYTES} bytes; give a shorter path")


def socket_key(tenant: str) -> str:
    """The setting that names a tenant's socket."""
    return "door.socket" if tenant == DEFAULT_TENANT else f"tenants.{tenant}.socket"


def default_socket(data: str, name: str) -> str:
    """A socket's path where no setting names one."""
    return str(Path(data) / name)


def _table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = given.get(name, {})
    if not isinstance(table, Mapping):
        section = "tenants.NAME" if name == "tenants" else name
        raise BadInput(f"{name}={table!r} is a section of the configuration; write [{section}] and keys below it")
    return table


def _tenant(tenants: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tenants[name]
    if isinstance(table, Mapping):
        return table
    section, keys = "NAME" if name in _keys(TenantSettings) else name, ", ".join(_keys(TenantSettings))
    raise BadInput(
        f"tenants.{name}={table!r}: each tenant is a section of its own; write [tenants.{section}] and its keys below "
        f"it ({keys})"
    )


def _keys(kind: type[Any]) -> list[str]:
    return [one.name for one in fields(kind)]


def _section(kind: type[T], given: Mapping[str, Any], prefix: str) -> T:
    checked = _checked(kind, given, prefix)
    missing = [
        one.name
        for one in fields(kind)  # type: ignore[arg-type]
        if one.default is MISSING and one.default_factory is MISSING and one.name not in checked
    ]
    if missing:
        raise BadInput(f"{prefix}{missing[0]} is missing in the configuration; give it")
    try:
        return kind(**checked)
    except BadInput as error:
        raise BadInput(f"{prefix}{error}") from None


def _checked(kind: type[Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    _refuse_unknown(given, _keys(kind), prefix)
    for one in fields(kind):
        if one.name in given:
            _check_type(given[one.name], str(one.type), prefix + one.name)
    return dict(given)


def _check_type(value: Any, wanted: str, name: str) -> None:
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "str": ((str,), "text in quotes, not empty and without NUL"),
        "Size": ((str,), "text in quotes, not empty and without NUL"),
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "str | float": ((str, int, float), "a word in quotes, or a number"),
        "list[int]": ((list,), "a list of whole numbers"),
        "list[str]": ((list,), "a list of texts in quotes"),
        "bool": ((bool,), "true or false"),
    }
    allowed, described = kinds[wanted.removesuffix(" | None")]
    is_right = isinstance(value, allowed) and isinstance(value, bool) == (bool in allowed)
    if isinstance(value, str):
        is_right = is_right and bool(value) and "\0" not in value
    if isinstance(value, list):
        kind = str if "str" in wanted else int
        is_right = is_right and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)
    if not is_right:
        raise BadInput(f"{name}={value!r}; give {WORDS.get(name, described)}")


def _refuse_unknown(given: Mapping[str, Any], known: list[str], prefix: str, without: tuple[str, ...] = ()) -> None:
    allowed = [one for one in known if one not in without]
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(key[:LONGEST_KEY], allowed, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(allowed)}"
            raise BadInput(f"{prefix}{key} is not a setting; {hint}")
