from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Prompt(_message.Message):
    __slots__ = ("keys", "token_ids", "extra_keys")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    def __init__(self, keys: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class ExtraKey(_message.Message):
    __slots__ = ("value", "first_token")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    first_token: int
    def __init__(self, value: _Optional[bytes] = ..., first_token: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "prompt")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    prompt: Prompt
    def __init__(self, namespace: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("blocks", "tiers", "reason", "detail")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierRun]
    reason: str
    detail: str
    def __init__(self, blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ("first",)
    FIRST_FIELD_NUMBER: _ClassVar[int]
    first: int
    def __init__(self, first: _Optional[int] = ...) -> None: ...

class NamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    next: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("id", "model", "weights_epoch", "codec", "layout", "block_tokens", "config", "payload_bytes", "blocks")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    weights_epoch: int
    codec: str
    layout: str
    block_tokens: int
    config: _containers.ScalarMap[str, str]
    payload_bytes: _containers.RepeatedScalarFieldContainer[int]
    blocks: int
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., weights_epoch: _Optional[int] = ..., codec: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., config: _Optional[_Mapping[str, str]] = ..., payload_bytes: _Optional[_Iterable[int]] = ..., blocks: _Optional[int] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("namespace", "seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    seconds: float
    def __init__(self, namespace: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("namespace", "prompts")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, namespace: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("namespace", "prompts", "asked", "warm", "promoted", "left", "absent", "seconds")
    class LeftEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AbsentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    prompts: int
    asked: int
    warm: int
    promoted: int
    left: _containers.ScalarMap[str, int]
    absent: _containers.ScalarMap[str, int]
    seconds: float
    def __init__(self, namespace: _Optional[str] = ..., prompts: _Optional[int] = ..., asked: _Optional[int] = ..., warm: _Optional[int] = ..., promoted: _Optional[int] = ..., left: _Optional[_Mapping[str, int]] = ..., absent: _Optional[_Mapping[str, int]] = ..., seconds: _Optional[float] = ...) -> None: ...
