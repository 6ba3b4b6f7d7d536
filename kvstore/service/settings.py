"""The operator's settings: one TOML file, overridden by environment variables, and these by the flags of `kvstore
serve`.

Every key except `tenants.NAME.socket` has a default, and none has two names. Errors are reported at the start, with the
key's full name, what was given and what is allowed. The environment is handed in.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field, inspect

from kvstore.block.errors import BadInput, shown
from kvstore.config import (
    AUDIT_FILE,
    AUTO,
    DEFAULT_TENANT,
    LIVE,
    LONGEST_KEY,
    MAX_SOCKET_BYTES,
    OFF,
    KeysOptions,
    Limits,
    NetworkSettings,
    Part,
    PathText,
    RemoteSettings,
    SettingsSection,
    Size,
    TierOptions,
    Weight,
    allowed_size,
    check_network,
    checked_shares,
    host_and_port,
    is_loopback,
    is_section,
    kinds_of,
    one_of,
    read,
)
from kvstore.service.connections import DoorLimits
from tiering.files import Unfit, read_file
from tiering.policies.shares import Share

TENANT_SOCKET, ADMIN_SOCKET, OBSERVE_SOCKET = "kvstore.sock", "admin.sock", "observe.sock"
COURIER_SOCKET = "courier.sock"
VARIABLE = "KVSTORE_"
SHORT = {"KVSTORE_DATA": ("store", "data"), "KVSTORE_DRAM": ("store", "dram"), "KVSTORE_NVME": ("store", "nvme")}
"""Shorter names, which other commands read too; the long ones take precedence."""
MAX_USER = (1 << 32) - 2
"""The highest user id; the one above it means none."""
MOST_LINE = 1000
"""Characters of an error line."""
MOST_CONFIGURATION_BYTES = 1 << 20
LEAST_TOKEN, MOST_TOKEN = 16, 1024
"""Characters of a scraper's token."""


def has_share(tenant: DoorSettings | TenantSettings) -> bool:
    """Whether a tenant has a share of its own, which may change; a tenant gets one, or loses it, at a start."""
    return (tenant.share, tenant.weight) != (None, None)


Mode = Annotated[str, Meta(pattern=r"^\s*(0[oO])?0*[0-7]{1,3}\s*\Z", description="octal digits, such as '660'")]
User = Annotated[int, Meta(ge=0, le=MAX_USER, description=f"user ids, 0 to {MAX_USER}")]
Address = Annotated[str, Meta(description="HOST:PORT as text", extra={"check": host_and_port})]
SHARED = Meta(extra={"live": has_share})


class StoreSettings(TierOptions, frozen=True):
    """A sidecar's tiers. dram, nvme: "auto" is half of the memory that this process may have, and four fifths of the
    disk's free space; "off" is no NVMe. data: the directory of keys and slabs. prefault: fault in all of DRAM at the
    start, in the background. keeper: a parent process holds the memory, and restarts the sidecar after a crash."""

    dram: Annotated[Size, allowed_size(AUTO)] = AUTO
    nvme: Annotated[Size | None, allowed_size(AUTO, OFF)] = AUTO
    data: PathText = "./kv"
    prefault: bool = True
    keeper: bool = True


class DoorSettings(DoorLimits, frozen=True):
    """socket: of the default tenant; beside the data if not given. mode: of every tenant's socket, in octal. users:
    user ids that may connect; if not given, every user who can open the socket; an empty list admits none. share,
    weight: as a tenant's."""

    socket: PathText | None = None
    mode: Mode = "660"
    users: list[User] | None = None
    share: Annotated[Part | None, SHARED] = None
    weight: Annotated[Weight | None, SHARED] = None


class TenantSettings(SettingsSection, frozen=True):
    """socket: the tenant's. users: as the door's. share: its guaranteed part of each tier. weight: its part of the
    rest, relative to others'."""

    socket: PathText
    users: list[User] | None = None
    share: Annotated[Part | None, SHARED] = None
    weight: Annotated[Weight | None, SHARED] = None


class AdminSettings(SettingsSection, frozen=True):
    """socket: the operator's; beside the data if not given."""

    socket: PathText | None = None


class ObserveSettings(SettingsSection, frozen=True):
    """socket: of observers, who see what the operator sees and can change nothing; beside the data if not given. mode,
    users: as the door's."""

    socket: PathText | None = None
    mode: Mode = "660"
    users: list[User] | None = None


class HttpSettings(SettingsSection, frozen=True):
    """listen: HOST:PORT of liveness, readiness and metrics; none if not given. token_file: holds the token that a
    scraper must send for the metrics; without it they are served only if there is a single tenant."""

    listen: Address | None = None
    token_file: Annotated[PathText | None, LIVE] = None


class ConsoleSettings(SettingsSection, frozen=True):
    """listen: HOST:PORT of the console, which the edge serves; none if not given.
    token_file: of one line; needed if other hosts can connect. operator: whether the console gets the operator's
    socket, so that holders of the token may drop, purge and warm there. audit_file: where it records what was done;
    beside the data if not given."""

    listen: Address | None = None
    token_file: PathText | None = None
    operator: bool = False
    audit_file: PathText | None = None


class LogSettings(SettingsSection, frozen=True):
    """level: the lowest that is logged. format: one JSON object per line, or text."""

    level: Annotated[str, LIVE, one_of("debug", "info", "warning", "error")] = "info"
    format: Annotated[str, one_of("json", "text")] = "json"


class Settings(SettingsSection, frozen=True):
    """All of it. Settings of several sections are checked here, against each other."""

    store: StoreSettings = StoreSettings()
    limits: Limits = Limits()
    door: DoorSettings = DoorSettings()
    tenants: dict[str, TenantSettings] = field(default_factory=dict)
    admin: AdminSettings = AdminSettings()
    observe: ObserveSettings = ObserveSettings()
    http: HttpSettings = HttpSettings()
    console: ConsoleSettings = ConsoleSettings()
    network: NetworkSettings = NetworkSettings()
    remote: RemoteSettings = RemoteSettings()
    keys: KeysOptions = KeysOptions()
    log: LogSettings = LogSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_console(self)
        check_network(self.network, self.remote, self.store.keeper)
        if DEFAULT_TENANT in self.tenants:
            raise BadInput(f"tenants.{DEFAULT_TENANT} is the tenant of [door]; give door.socket and door.users instead")
        self.sockets()
        shares_of(self)

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
        """Every tenant's socket. Raises `BadInput` if two of all sockets are the same, or if a path is too long."""
        default = self.door.socket or default_socket(self.store.data, TENANT_SOCKET)
        door = TenantSettings(default, self.door.users, self.door.share, self.door.weight)
        found = {DEFAULT_TENANT: door, **self.tenants}
        named = {socket_key(name): one.socket for name, one in found.items()}
        taken: dict[str, str] = {}
        for key, path in (*named.items(), ("admin.socket", self.admin_socket), ("observe.socket", self.observe_socket)):
            if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
                raise BadInput(f"{key}={path} is longer than {MAX_SOCKET_BYTES} bytes; give a shorter path")
            if path in taken:
                raise BadInput(
                    f"{key}={path} is {taken[path]} too; a socket says who comes there, so give each its own"
                )
            taken[path] = key
        if self.wants_courier and self.courier_socket in taken:
            raise BadInput(f"{self.courier_socket} is the couriers' socket; give the other one of that path its own")
        return found


def shares_of(settings: Settings) -> Mapping[str, Share]:
    """The shares of tenants that have settings. Raises `BadInput`."""
    return checked_shares(
        {
            name: Share(one.share or 0.0, 1.0 if one.weight is None else one.weight)
            for name, one in settings.sockets().items()
            if has_share(one)
        }
    )


def read_configuration(path: Path) -> bytes:
    """A settings file; never a pipe, since both the supervisor and the sidecar read it. Raises `BadInput`, and
    `OSError`."""
    try:
        return read_file(path, MOST_CONFIGURATION_BYTES)
    except Unfit as error:
        raise BadInput(f"{path} is no configuration: {error}; give a TOML file") from None


def read_token(path: str) -> str:
    """A token file's content, stripped. Raises `BadInput`."""
    mend = f"give a file of {LEAST_TOKEN} to {MOST_TOKEN} printable ASCII characters without blanks"
    try:
        raw = read_file(Path(path), 2 * MOST_TOKEN)
    except (OSError, Unfit) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"http.token_file={path} cannot be read: {why}; {mend}") from None
    token = raw.decode("latin-1").strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not all("!" <= one <= "~" for one in token):
        raise BadInput(f"http.token_file={path} holds no token; {mend}")
    return token


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
        given = tomllib.loads(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:  # ValueError: numbers of too many digits
        raise BadInput(f"{name} is not TOML: {str(error) or type(error).__name__}") from None
    for above in (from_environment(environment or {}), flags or {}):
        for section, values in above.items():
            chosen = {key: value for key, value in values.items() if value is not None}
            table = given.get(section, {})
            if chosen and isinstance(table, Mapping):
                given[section] = {**table, **chosen}
    return settings_of(given)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Settings from a table of tables. Raises `BadInput`."""
    try:
        tenants = given.get("tenants", {})
        if not isinstance(tenants, Mapping):
            raise BadInput(f"tenants={shown(tenants)} are sections of the configuration; write [tenants.NAME] for each")
        found = {name: read(TenantSettings, table, f"tenants.{name}.") for name, table in tenants.items()}
        return read(Settings, {**given, "tenants": found})
    except BadInput as error:
        if len(line := str(error)) <= MOST_LINE:
            raise
        raise BadInput(f"{line[:MOST_LINE]}...") from None


def from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Settings by section from variables: `KVSTORE_STORE_DRAM` is `store.dram`. Values that are not text are written as
    in TOML. `SHORT` names are for the operators' commands too. Raises `BadInput` for one that names no setting."""
    known = {
        f"{VARIABLE}{section}_{key}".upper(): (section, key, kind)
        for section, inner in kinds_of(Settings).items()
        if is_section(inner)
        for key, kind in kinds_of(inner).items()
    }
    given: dict[str, dict[str, Any]] = {}
    for name, (section, key) in SHORT.items():
        if environment.get(name):
            given.setdefault(section, {})[key] = environment[name]
    sections = tuple(f"{VARIABLE}{one}_".upper() for one in kinds_of(Settings))
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
        given.setdefault(section, {})[key] = value if _is_text(inspect.type_info(kind)) else _value(value)
    return given


def _is_text(kind: inspect.Type) -> bool:
    """Whether a variable's value is the setting as it stands: text, or a size."""
    if isinstance(kind, inspect.Metadata):
        return _is_text(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(map(_is_text, kind.types)) and not any(isinstance(one, inspect.FloatType) for one in kind.types)
    return isinstance(kind, inspect.StrType)


def _value(text: str) -> Any:
    """A variable's value, parsed as TOML; other text stays text, and is refused later under the key's name."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    return found["value"] if set(found) == {"value"} else text


def _check_console(settings: Settings) -> None:
    listen, token_file, operator = settings.console.listen, settings.console.token_file, settings.console.operator
    if operator and (listen is None or token_file is None):
        missing = "listen" if listen is None else "token_file"
        raise BadInput(f"console.operator = true lets who has its token drop and purge; give console.{missing} too")
    if settings.console.audit_file is not None and not operator:
        raise BadInput("console.audit_file is of what an operator does there; give console.operator = true too")
    if listen is None:
        return
    if token_file is None and not is_loopback(host_and_port(listen)[0]):
        raise BadInput(
            f"console.listen={listen!r} can be reached by other hosts; give console.token_file, or listen on 127.0.0.1"
        )
    if not settings.store.keeper:
        raise BadInput("console.listen needs store.keeper = true, which starts it; or run kvstore console by itself")


def socket_key(tenant: str) -> str:
    """The setting that names a tenant's socket."""
    return "door.socket" if tenant == DEFAULT_TENANT else f"tenants.{tenant}.socket"


def default_socket(data: str, name: str) -> str:
    """A socket's path where no setting names one."""
    return str(Path(data) / name)
