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
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: SidecarStatus
    def __init__(self, facts: _Optional[_Union[SidecarStatus, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("run", "pid", "state", "at", "up_seconds", "tiers", "blocks", "leases", "reservations", "pinned_bytes", "looked", "namespaces", "moves", "sessions", "departed", "counters", "door", "loading", "scrub", "hidden_namespaces", "hidden_sessions", "guarded_bytes", "tenants", "dram_retained_bytes", "nvme_retained_bytes", "policy", "nvme_writes", "write_budget", "retained_fraction", "dram_retained_budget_bytes", "nvme_retained_budget_bytes", "health", "faults", "fault_counts", "policy_note", "whatif", "savings", "node", "incarnation", "keys", "warnings")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FaultCountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    UP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GUARDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    DRAM_RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NVME_WRITES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    DRAM_RETAINED_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_RETAINED_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    FAULT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    POLICY_NOTE_FIELD_NUMBER: _ClassVar[int]
    WHATIF_FIELD_NUMBER: _ClassVar[int]
    SAVINGS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    run: str
    pid: int
    state: str
    at: float
    up_seconds: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    blocks: int
    leases: int
    reservations: int
    pinned_bytes: int
    looked: LookupCounts
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    moves: _containers.RepeatedCompositeFieldContainer[MoveStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    departed: int
    counters: _containers.ScalarMap[str, int]
    door: DoorStatus
    loading: RecoveryStatus
    scrub: ScrubStatus
    hidden_namespaces: int
    hidden_sessions: int
    guarded_bytes: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    dram_retained_bytes: int
    nvme_retained_bytes: int
    policy: str
    nvme_writes: str
    write_budget: WriteBudgetStatus
    retained_fraction: float
    dram_retained_budget_bytes: int
    nvme_retained_budget_bytes: int
    health: str
    faults: _containers.RepeatedCompositeFieldContainer[FaultStatus]
    fault_counts: _containers.ScalarMap[str, int]
    policy_note: str
    whatif: WhatIfStatus
    savings: SavingsStatus
    node: str
    incarnation: str
    keys: _containers.RepeatedCompositeFieldContainer[KeyStatus]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., at: _Optional[float] = ..., up_seconds: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., blocks: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., looked: _Optional[_Union[LookupCounts, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[MoveStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., departed: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., door: _Optional[_Union[DoorStatus, _Mapping]] = ..., loading: _Optional[_Union[RecoveryStatus, _Mapping]] = ..., scrub: _Optional[_Union[ScrubStatus, _Mapping]] = ..., hidden_namespaces: _Optional[int] = ..., hidden_sessions: _Optional[int] = ..., guarded_bytes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., dram_retained_bytes: _Optional[int] = ..., nvme_retained_bytes: _Optional[int] = ..., policy: _Optional[str] = ..., nvme_writes: _Optional[str] = ..., write_budget: _Optional[_Union[WriteBudgetStatus, _Mapping]] = ..., retained_fraction: _Optional[float] = ..., dram_retained_budget_bytes: _Optional[int] = ..., nvme_retained_budget_bytes: _Optional[int] = ..., health: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[FaultStatus, _Mapping]]] = ..., fault_counts: _Optional[_Mapping[str, int]] = ..., policy_note: _Optional[str] = ..., whatif: _Optional[_Union[WhatIfStatus, _Mapping]] = ..., savings: _Optional[_Union[SavingsStatus, _Mapping]] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[KeyStatus, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class KeyStatus(_message.Message):
    __slots__ = ("tenant", "fingerprint", "epoch", "accepted")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    fingerprint: str
    epoch: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., fingerprint: _Optional[str] = ..., epoch: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ...) -> None: ...

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

class SavingsStatus(_message.Message):
    __slots__ = ("saved_seconds", "regret_seconds", "engines", "ttft_saved_ms", "ttft_saved_error_ms")
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REGRET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TTFT_SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SAVED_ERROR_MS_FIELD_NUMBER: _ClassVar[int]
    saved_seconds: float
    regret_seconds: float
    engines: int
    ttft_saved_ms: float
    ttft_saved_error_ms: float
    def __init__(self, saved_seconds: _Optional[float] = ..., regret_seconds: _Optional[float] = ..., engines: _Optional[int] = ..., ttft_saved_ms: _Optional[float] = ..., ttft_saved_error_ms: _Optional[float] = ...) -> None: ...

class WhatIfPoint(_message.Message):
    __slots__ = ("size_bytes", "scale", "token_hit_rate")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    scale: float
    token_hit_rate: float
    def __init__(self, size_bytes: _Optional[int] = ..., scale: _Optional[float] = ..., token_hit_rate: _Optional[float] = ...) -> None: ...

class WhatIfStatus(_message.Message):
    __slots__ = ("budget_bytes", "points", "curve", "asked_tokens", "tokens_per_second", "sample_ratio", "sampled_names", "seconds", "lookups", "dropped_lookups", "words")
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATIO_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_NAMES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    budget_bytes: int
    points: _containers.RepeatedCompositeFieldContainer[WhatIfPoint]
    curve: _containers.RepeatedCompositeFieldContainer[WhatIfPoint]
    asked_tokens: int
    tokens_per_second: float
    sample_ratio: float
    sampled_names: int
    seconds: float
    lookups: int
    dropped_lookups: int
    words: str
    def __init__(self, budget_bytes: _Optional[int] = ..., points: _Optional[_Iterable[_Union[WhatIfPoint, _Mapping]]] = ..., curve: _Optional[_Iterable[_Union[WhatIfPoint, _Mapping]]] = ..., asked_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., sample_ratio: _Optional[float] = ..., sampled_names: _Optional[int] = ..., seconds: _Optional[float] = ..., lookups: _Optional[int] = ..., dropped_lookups: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "share", "weight", "dram_bytes", "dram_guaranteed_bytes", "nvme_bytes", "nvme_guaranteed_bytes", "dram_retained_bytes", "dram_retained_budget_bytes", "nvme_retained_bytes", "nvme_retained_budget_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_RETAINED_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_RETAINED_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    share: float
    weight: float
    dram_bytes: int
    dram_guaranteed_bytes: int
    nvme_bytes: int
    nvme_guaranteed_bytes: int
    dram_retained_bytes: int
    dram_retained_budget_bytes: int
    nvme_retained_bytes: int
    nvme_retained_budget_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., share: _Optional[float] = ..., weight: _Optional[float] = ..., dram_bytes: _Optional[int] = ..., dram_guaranteed_bytes: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., nvme_guaranteed_bytes: _Optional[int] = ..., dram_retained_bytes: _Optional[int] = ..., dram_retained_budget_bytes: _Optional[int] = ..., nvme_retained_bytes: _Optional[int] = ..., nvme_retained_budget_bytes: _Optional[int] = ...) -> None: ...

class WriteBudgetStatus(_message.Message):
    __slots__ = ("bytes_per_second", "left_bytes", "most_bytes")
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: float
    left_bytes: float
    most_bytes: float
    def __init__(self, bytes_per_second: _Optional[float] = ..., left_bytes: _Optional[float] = ..., most_bytes: _Optional[float] = ...) -> None: ...

class LookupCounts(_message.Message):
    __slots__ = ("asked_tokens", "hit_tokens", "miss_tokens", "found_tokens", "asked_blocks", "hit_blocks", "miss_blocks", "found_blocks", "lookups", "leases", "reports", "granted_tokens", "hit_rate")
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HitBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MissBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FOUND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    asked_tokens: int
    hit_tokens: _containers.ScalarMap[str, int]
    miss_tokens: _containers.ScalarMap[str, int]
    found_tokens: int
    asked_blocks: int
    hit_blocks: _containers.ScalarMap[str, int]
    miss_blocks: _containers.ScalarMap[str, int]
    found_blocks: int
    lookups: int
    leases: int
    reports: int
    granted_tokens: int
    hit_rate: float
    def __init__(self, asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., miss_tokens: _Optional[_Mapping[str, int]] = ..., found_tokens: _Optional[int] = ..., asked_blocks: _Optional[int] = ..., hit_blocks: _Optional[_Mapping[str, int]] = ..., miss_blocks: _Optional[_Mapping[str, int]] = ..., found_blocks: _Optional[int] = ..., lookups: _Optional[int] = ..., leases: _Optional[int] = ..., reports: _Optional[int] = ..., granted_tokens: _Optional[int] = ..., hit_rate: _Optional[float] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("id", "digest", "tenant", "model", "layout", "codec", "weights_epoch", "block_tokens", "blocks", "dram_blocks", "dram_bytes", "nvme_blocks", "nvme_bytes", "used_at", "looked", "name", "load_tokens_per_second")
    class LoadTokensPerSecondEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NVME_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NVME_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_AT_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    id: str
    digest: str
    tenant: str
    model: str
    layout: str
    codec: str
    weights_epoch: int
    block_tokens: int
    blocks: int
    dram_blocks: int
    dram_bytes: int
    nvme_blocks: int
    nvme_bytes: int
    used_at: float
    looked: LookupCounts
    name: str
    load_tokens_per_second: _containers.ScalarMap[str, float]
    def __init__(self, id: _Optional[str] = ..., digest: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[str] = ..., codec: _Optional[str] = ..., weights_epoch: _Optional[int] = ..., block_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., dram_blocks: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., nvme_blocks: _Optional[int] = ..., nvme_bytes: _Optional[int] = ..., used_at: _Optional[float] = ..., looked: _Optional[_Union[LookupCounts, _Mapping]] = ..., name: _Optional[str] = ..., load_tokens_per_second: _Optional[_Mapping[str, float]] = ...) -> None: ...

class MoveStatus(_message.Message):
    __slots__ = ("kind", "priority", "waiting", "running", "done", "failed")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    kind: str
    priority: str
    waiting: int
    running: int
    done: int
    failed: int
    def __init__(self, kind: _Optional[str] = ..., priority: _Optional[str] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("engine", "tenant", "connections", "leases", "leased_blocks", "reservations", "since", "wait_ms_p50", "wait_ms_p99")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_P50_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_P99_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tenant: str
    connections: int
    leases: int
    leased_blocks: int
    reservations: int
    since: float
    wait_ms_p50: float
    wait_ms_p99: float
    def __init__(self, engine: _Optional[str] = ..., tenant: _Optional[str] = ..., connections: _Optional[int] = ..., leases: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., reservations: _Optional[int] = ..., since: _Optional[float] = ..., wait_ms_p50: _Optional[float] = ..., wait_ms_p99: _Optional[float] = ...) -> None: ...

class DoorStatus(_message.Message):
    __slots__ = ("connections", "admin_connections", "refused", "malformed", "served", "wait_ms_p50", "wait_ms_p99")
    class ServedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    ADMIN_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_P50_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_P99_FIELD_NUMBER: _ClassVar[int]
    connections: int
    admin_connections: int
    refused: int
    malformed: int
    served: _containers.ScalarMap[str, int]
    wait_ms_p50: float
    wait_ms_p99: float
    def __init__(self, connections: _Optional[int] = ..., admin_connections: _Optional[int] = ..., refused: _Optional[int] = ..., malformed: _Optional[int] = ..., served: _Optional[_Mapping[str, int]] = ..., wait_ms_p50: _Optional[float] = ..., wait_ms_p99: _Optional[float] = ...) -> None: ...

class RecoveryStatus(_message.Message):
    __slots__ = ("slots", "all_slots", "blocks", "verified_bytes", "to_verify_bytes")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ALL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TO_VERIFY_BYTES_FIELD_NUMBER: _ClassVar[int]
    slots: int
    all_slots: int
    blocks: int
    verified_bytes: int
    to_verify_bytes: int
    def __init__(self, slots: _Optional[int] = ..., all_slots: _Optional[int] = ..., blocks: _Optional[int] = ..., verified_bytes: _Optional[int] = ..., to_verify_bytes: _Optional[int] = ...) -> None: ...

class ScrubStatus(_message.Message):
    __slots__ = ("bytes_per_second", "passes", "frames", "bytes", "damaged", "unreadable", "mended", "in_pass", "last_pass_seconds", "last_pass_ended", "last_pass_frames")
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    MENDED_FIELD_NUMBER: _ClassVar[int]
    IN_PASS_FIELD_NUMBER: _ClassVar[int]
    LAST_PASS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_PASS_ENDED_FIELD_NUMBER: _ClassVar[int]
    LAST_PASS_FRAMES_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: int
    passes: int
    frames: int
    bytes: int
    damaged: int
    unreadable: int
    mended: int
    in_pass: bool
    last_pass_seconds: float
    last_pass_ended: float
    last_pass_frames: int
    def __init__(self, bytes_per_second: _Optional[int] = ..., passes: _Optional[int] = ..., frames: _Optional[int] = ..., bytes: _Optional[int] = ..., damaged: _Optional[int] = ..., unreadable: _Optional[int] = ..., mended: _Optional[int] = ..., in_pass: _Optional[bool] = ..., last_pass_seconds: _Optional[float] = ..., last_pass_ended: _Optional[float] = ..., last_pass_frames: _Optional[int] = ...) -> None: ...

class FaultStatus(_message.Message):
    __slots__ = ("what", "kind", "count", "since_seconds_ago", "last_seconds_ago", "detail")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    LAST_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    what: str
    kind: str
    count: int
    since_seconds_ago: float
    last_seconds_ago: float
    detail: str
    def __init__(self, what: _Optional[str] = ..., kind: _Optional[str] = ..., count: _Optional[int] = ..., since_seconds_ago: _Optional[float] = ..., last_seconds_ago: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...
