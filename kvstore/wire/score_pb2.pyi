from kvstore.wire import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("namespace", "model", "prompt", "nodes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    model: str
    prompt: _store_pb2.Prompt
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[_Union[_store_pb2.Prompt, _Mapping]] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("namespace", "block_tokens", "asked_tokens", "nodes", "is_partial", "partial_detail")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_DETAIL_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    block_tokens: int
    asked_tokens: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeScore]
    is_partial: bool
    partial_detail: str
    def __init__(self, namespace: _Optional[str] = ..., block_tokens: _Optional[int] = ..., asked_tokens: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeScore, _Mapping]]] = ..., is_partial: _Optional[bool] = ..., partial_detail: _Optional[str] = ...) -> None: ...

class NodeScore(_message.Message):
    __slots__ = ("node", "hit_tokens", "load_seconds")
    class HitTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    hit_tokens: _containers.ScalarMap[str, int]
    load_seconds: float
    def __init__(self, node: _Optional[str] = ..., hit_tokens: _Optional[_Mapping[str, int]] = ..., load_seconds: _Optional[float] = ...) -> None: ...
