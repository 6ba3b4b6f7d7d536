from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WhoAreYouRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    def __init__(self, node: _Optional[bytes] = ...) -> None: ...

class WhoAreYouResponse(_message.Message):
    __slots__ = ("node", "incarnation", "fingerprints", "versions", "transports")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    node: bytes
    incarnation: bytes
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    versions: _containers.RepeatedScalarFieldContainer[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., fingerprints: _Optional[_Iterable[bytes]] = ..., versions: _Optional[_Iterable[int]] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("fingerprint", "namespace", "first_block", "keys", "node", "nonce", "mac")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    namespace: bytes
    first_block: int
    keys: bytes
    node: bytes
    nonce: bytes
    mac: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., first_block: _Optional[int] = ..., keys: _Optional[bytes] = ..., node: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class HasResponse(_message.Message):
    __slots__ = ("blocks", "reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    reason: str
    def __init__(self, blocks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class OpenPullRequest(_message.Message):
    __slots__ = ("fingerprint", "namespace", "first_block", "keys", "node", "nonce", "mac", "wait_ms", "transports")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    namespace: bytes
    first_block: int
    keys: bytes
    node: bytes
    nonce: bytes
    mac: bytes
    wait_ms: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., first_block: _Optional[int] = ..., keys: _Optional[bytes] = ..., node: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ..., wait_ms: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenPullResponse(_message.Message):
    __slots__ = ("token", "address", "transport", "blocks", "frame_bytes", "is_sealed", "nonce", "reason")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SEALED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    address: str
    transport: str
    blocks: int
    frame_bytes: _containers.RepeatedScalarFieldContainer[int]
    is_sealed: bool
    nonce: bytes
    reason: str
    def __init__(self, token: _Optional[bytes] = ..., address: _Optional[str] = ..., transport: _Optional[str] = ..., blocks: _Optional[int] = ..., frame_bytes: _Optional[_Iterable[int]] = ..., is_sealed: _Optional[bool] = ..., nonce: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("fingerprint", "namespace", "first_block", "keys", "node", "nonce", "mac")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    namespace: bytes
    first_block: int
    keys: bytes
    node: bytes
    nonce: bytes
    mac: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., first_block: _Optional[int] = ..., keys: _Optional[bytes] = ..., node: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("blocks", "reason")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    reason: str
    def __init__(self, blocks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
