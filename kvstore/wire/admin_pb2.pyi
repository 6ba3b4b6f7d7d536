from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("facts", "json", "version")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    facts: SidecarStatus
    json: str
    version: int
    def __init__(self, facts: _Optional[_Union[SidecarStatus, _Mapping]] = ..., json: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("alive", "ready", "state", "reasons", "warnings", "node", "incarnation")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    ready: bool
    state: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    node: str
    incarnation: str
    def __init__(self, alive: _Optional[bool] = ..., ready: _Optional[bool] = ..., state: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class DropAnyRequest(_message.Message):
    __slots__ = ("id", "tenant", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    seconds: float
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class DropAnyResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class SidecarStatus(_message.Message):
    __slots__ = ("run", "state", "at", "up_seconds", "tiers", "blocks", "leases", "reservations", "pinned_bytes", "health", "node", "incarnation", "warnings")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    run: str
    state: str
    at: float
    up_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    blocks: int
    leases: int
    reservations: int
    pinned_bytes: int
    health: str
    node: str
    incarnation: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., state: _Optional[str] = ..., at: _Optional[float] = ..., up_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., blocks: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., health: _Optional[str] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "budget_bytes", "taken_bytes", "slots")
    class SlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    budget_bytes: int
    taken_bytes: int
    slots: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., taken_bytes: _Optional[int] = ..., slots: _Optional[_Mapping[str, int]] = ...) -> None: ...
