"""What identifies a block: tenants' keys, prefix keys and namespaces; and the numbers that tenants see.

A block is (tenant, namespace, prefix key). The prefix key is a chain of keyed BLAKE2b-256 over the prompt, so it can be
neither guessed nor computed without the tenant's identity key; the namespace is everything else that must be equal for
KV to be interchangeable. xxHash is a checksum, and is not used here. Token ids are hashed and never kept.

    key[i] = BLAKE2b-256(identity key; key[i-1] | token ids of block i, uint32 little-endian | framed extra keys)
    key[-1] = a constant of this format and the block size
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvstore.block.errors import BadInput, shown
from kvstore.block.layout import MAX_BLOCK_TOKENS, MAX_GROUPS, MAX_LAYERS, KvGroup, Layout, is_whole
from tiering.frame import KEY_BYTES, KEY_ID_BYTES, MAX_SLICES, NAMESPACE_BYTES, TENANT_BYTES, Sealer, Stamp
from tiering.slab_header import MAX_ABOUT_BYTES

CHAIN_VERSION = 1
NAMESPACE_VERSION = 1
SECRET_BYTES = 32
NODE_BYTES, INCARNATION_BYTES = 16, 8
MAX_EXTRA_KEY_BYTES = 4096
MAX_EXTRA_KEYS = 1024
MAX_WEIGHTS_EPOCH = (1 << 63) - 1
MAX_MODEL_CHARACTERS, MAX_CODEC_CHARACTERS = 256, 16
MAX_CONFIG_FIELDS, MAX_FIELD_CHARACTERS, MAX_VALUE_CHARACTERS = 64, 128, 4096
"""Of a namespace's config: how many fields, and the characters of a name and of a value."""
MAX_PACKED_BYTES = MAX_ABOUT_BYTES
"""Of a packed namespace: what a slab's header, which is kept beside its blocks, has room for."""
MAX_UNPACKED_BYTES = 64 << 10
"""Of its text once inflated: deflate can make a thousand bytes of one."""
MOST_PAYLOAD, LEAST_PAYLOAD = 2, 64
"""Bounds of a payload, relative to the bytes of its numbers: at most MOST_PAYLOAD times as many, at least
1/LEAST_PAYLOAD."""
SLICE_PARAMETER_BYTES = 4096
"""Room for a codec's parameters, beside the codes of a layer slice."""
NUMBER_KEY_BYTES = 16
NUMBER_ROUNDS = 6
_WORD_BYTES = 8
_TOKEN_BYTES = 4
_TOKEN = np.dtype("<u4")
_CHAIN_PERSON = b"kv-prefix-key-v1"
_DIGESTS = frozenset({"config.computes", "config.state"})


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that a block's KV depends on, from `first_token` on: an adapter's digest, an image's
    content hash at its placeholder, a salt."""

    value: bytes = field(repr=False)  # a salt must not reach a log
    first_token: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Prompt:
    """A prompt that was hashed before: verbs take it in place of token ids. `NamespaceHandle.hashed` makes it.

    tokens: how many it has, enough for len(keys) blocks or more. keys: the prefix key of every full block, so that
    another process of the same tenant can name the blocks without the tokens.
    """

    tokens: int
    keys: list[bytes]

    def __repr__(self) -> str:
        return f"Prompt(tokens={self.tokens}, blocks={len(self.keys)})"  # keys must not reach a log


@dataclass(frozen=True, slots=True, repr=False)
class TenantKeys:
    """A tenant's keys, one per use, derived from secrets of 32 bytes. Never logged; only `identity` is ever sent.

    Derived from the first secret, and never changed: tenant, an opaque id; identity, which names blocks and goes to the
    tenant's own clients; fingerprint and first_epoch, that secret's key id and epoch, which tell identities apart and
    reveal nothing about them; slab_mac, which signs slab headers and index records. Derived from an epoch's secret:
    key_id, epoch, and mac, which signs frame headers. Neither MAC key leaves the daemon.
    """

    tenant: bytes
    key_id: bytes
    epoch: int
    identity: bytes
    mac: bytes
    fingerprint: bytes
    first_epoch: int
    slab_mac: bytes

    @staticmethod
    def derive(secret: bytes, epoch: int = 1) -> TenantKeys:
        """All keys of a tenant's first secret and epoch."""
        assert len(secret) == SECRET_BYTES
        key_id, mac = _derived(secret, "key-id", epoch)[:KEY_ID_BYTES], _derived(secret, "header-mac", epoch)
        tenant, identity = _derived(secret, "tenant", 0)[:TENANT_BYTES], _derived(secret, "identity", epoch)
        return TenantKeys(tenant, key_id, epoch, identity, mac, key_id, epoch, mac)

    def in_epoch(self, secret: bytes, epoch: int) -> TenantKeys:
        """The same identity in another epoch, whose secret signs its frames."""
        assert len(secret) == SECRET_BYTES
        key_id, mac = _derived(secret, "key-id", epoch)[:KEY_ID_BYTES], _derived(secret, "header-mac", epoch)
        return replace(self, key_id=key_id, epoch=epoch, mac=mac)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Which node of a pool a store is: `node`, 16 random bytes that its directory keeps, and `incarnation`, 8 that are
    drawn for each run. Neither is a secret."""

    node: bytes = bytes(NODE_BYTES)
    incarnation: bytes = bytes(INCARNATION_BYTES)


NOWHERE = NodeIdentity()
"""The identity of a store without a directory."""


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """What a ticket for a hand-off of a tenant's blocks names, and is sealed with. Never leaves the sidecar.

    key_id: 8 bytes, the tenant's fingerprint, the same on all nodes of a pool and in all epochs. key: 32 bytes, the
    tenant's identity key, likewise. node, incarnation: of this store, as in `NodeIdentity`.
    """

    key_id: bytes
    key: bytes
    node: bytes
    incarnation: bytes

    @staticmethod
    def of(keys: TenantKeys, here: NodeIdentity) -> Identity:
        """A tenant's, in the store whose `node` that is."""
        return Identity(keys.fingerprint, keys.identity, here.node, here.incarnation)


class KeyRing:
    """The MAC keys of all tenants of this store, in every epoch that is accepted: `MacKeys` for the floor below."""

    def __init__(self, tenants: Iterable[TenantKeys] = ()) -> None:
        self._mac: dict[tuple[bytes, bytes, int], bytes] = {}
        self._slab: dict[tuple[bytes, bytes, int], bytes] = {}
        for keys in tenants:
            self.add(keys)

    def add(self, keys: TenantKeys) -> None:
        """Add a tenant, or another epoch of a tenant."""
        self._mac[keys.tenant, keys.key_id, keys.epoch] = keys.mac
        self._slab[keys.tenant, keys.fingerprint, keys.first_epoch] = keys.slab_mac

    def retire(self, tenant: bytes, key_id: bytes, epoch: int) -> None:
        """Retire an epoch: frames that it signed are not believed from now on."""
        self._mac[tenant, key_id, epoch] = b""

    def forget(self, tenant: bytes) -> None:
        for known in (self._mac, self._slab):
            for one in [one for one in list(known) if one[0] == tenant]:
                known.pop(one, None)

    def mac_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        """The key, or None where this store does not hold it; empty where its epoch was retired."""
        return self._mac.get((tenant, key_id, epoch))

    def slab_key(self, tenant: bytes, key_id: bytes, epoch: int) -> bytes | None:
        """The same for slab headers and index records; it stays valid once the first epoch is retired for frames."""
        return self._slab.get((tenant, key_id, epoch))


def key_difference(here: bytes, there: bytes) -> str:
    """The message for two sides whose fingerprints differ; empty if they do not. For every handshake."""
    return f"keys {here.hex()} here and {there.hex()} there" if here != there else ""


class PrefixHasher:
    """Cuts prompts into blocks and names them, for one tenant and block size. Thread-safe."""

    def __init__(self, identity_key: bytes, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = root_key(block_tokens)
        self._base = blake2b(digest_size=KEY_BYTES, key=identity_key, person=_CHAIN_PERSON)

    def keys(self, token_ids: bytes, extra_keys: Sequence[ExtraKey] = (), known: Sequence[bytes] = ()) -> list[bytes]:
        """The prefix key of every full block. `token_ids`: uint32 little-endian, as `token_bytes` makes them.

        known: the keys of the leading blocks, whose tokens are not given again; they stand first in the answer.
        """
        step = self.block_tokens * _TOKEN_BYTES
        stop = len(token_ids) - len(token_ids) % step
        extras = self._by_block(extra_keys)
        keys = list(known)
        append, copy, parent = keys.append, self._base.copy, known[-1] if known else self.root
        for at in range(0, stop, step):
            state = copy()
            state.update(parent + token_ids[at : at + step])
            if extras and (block := len(known) + at // step) in extras:
                state.update(extras[block])
            parent = state.digest()
            append(parent)
        return keys

    def _by_block(self, extra_keys: Sequence[ExtraKey]) -> dict[int, bytes]:
        framed: dict[int, bytes] = {}
        for extra in extra_keys:
            block = extra.first_token // self.block_tokens
            start = (extra.first_token % self.block_tokens).to_bytes(4, "little")
            frame = start + len(extra.value).to_bytes(4, "little") + extra.value
            framed[block] = framed.get(block, b"") + frame
        return framed


_CHECKED_AT_ONCE = 4096
"""Keys: other threads get the interpreter in between."""


def check_keys(keys: Sequence[bytes]) -> None:
    """Check the prefix keys of a chain, or of the end of one. Raises `BadInput`."""
    distinct: set[bytes] = set()
    for first in range(0, len(keys), _CHECKED_AT_ONCE):
        some = keys[first : first + _CHECKED_AT_ONCE]
        if not {KEY_BYTES}.issuperset(map(len, some)):
            raise BadInput(f"a prefix key of another length; each has {KEY_BYTES} bytes")
        distinct.update(some)
    if len(distinct) != len(keys):
        raise BadInput("a prefix key that is there twice; give the keys of one prompt, in their order")


def root_key(block_tokens: int) -> bytes:
    """The parent of every first block: a constant of the chain's version and the block size."""
    return blake2b(
        b"kvstore prefix chain, version %d, %d tokens per block" % (CHAIN_VERSION, block_tokens), digest_size=KEY_BYTES
    ).digest()


def token_bytes(token_ids: Any) -> bytes:
    """Token ids as uint32 little-endian bytes.

    Accepts a list or tuple of int, `array.array`, a numpy array or a torch tensor of integers (one dimension), or bytes
    that are in this form already. Raises `BadInput` for anything else and for ids outside 0 .. 2**32 - 1.
    """
    if isinstance(token_ids, bytes | bytearray) or (isinstance(token_ids, memoryview) and token_ids.format == "B"):
        raw = bytes(token_ids)
        if len(raw) % _TOKEN_BYTES:
            raise BadInput(f"token ids given as {len(raw)} bytes; uint32 little-endian needs a multiple of 4")
        return raw
    if isinstance(token_ids, list | tuple):
        try:
            return _little_endian(np.frombuffer(array("I", token_ids), dtype=np.uint32))
        except (OverflowError, TypeError, ValueError):
            raise BadInput(
                "token ids must be integers from 0 to 4294967295, in one flat list; this list holds something else"
            ) from None
    if isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 and token_ids.dtype == _TOKEN:
        return token_ids.tobytes()  # as it should be given: nothing to convert, nothing to check
    try:
        values = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(
            f"token ids of type {type(token_ids).__name__} that cannot be read here; give them in host memory, as a "
            "list, an array or a tensor of integers"
        ) from None
    if values.ndim == 1 and not values.size:
        return b""  # an empty array has no type to speak of
    if values.ndim != 1 or values.dtype.kind not in "iu":
        given = f"shape {values.shape} and type {values.dtype}" if values.ndim else f"type {type(token_ids).__name__}"
        raise BadInput(f"token ids of {given}; give one dimension of integers (take one prompt of a batch at a time)")
    if values.dtype != np.uint32 and values.size and (int(values.min()) < 0 or int(values.max()) > 0xFFFFFFFF):
        raise BadInput("token ids must lie between 0 and 4294967295")
    return _little_endian(values)


def as_extra_keys(extra_keys: Sequence[ExtraKey | bytes | str]) -> tuple[ExtraKey, ...]:
    """Extra keys as the user may write them: bytes and text hold from the first token on. Order matters."""
    if isinstance(extra_keys, str | bytes):
        raise BadInput("extra_keys is one string; give a sequence, e.g. extra_keys=(adapter_digest,)")
    if not isinstance(extra_keys, Sequence):
        raise BadInput(
            f"extra_keys of type {type(extra_keys).__name__}; give a sequence in an order that stays, e.g. "
            "extra_keys=(adapter_digest,), or () for none"
        )
    keys = []
    for given in extra_keys:
        key = given if isinstance(given, ExtraKey) else ExtraKey(_extra_value(given))
        if not isinstance(key.value, bytes) or not isinstance(key.first_token, int):
            raise BadInput(
                f"ExtraKey of {type(key.value).__name__} at {type(key.first_token).__name__}; give bytes and a token's "
                "position"
            )
        if key.first_token < 0 or len(key.value) > MAX_EXTRA_KEY_BYTES:
            raise BadInput(
                f"an extra key of {len(key.value)} bytes at token {key.first_token}; allowed: at most "
                f"{MAX_EXTRA_KEY_BYTES} bytes, from token 0 on (pass a digest instead of the content)"
            )
        keys.append(key)
    if len(keys) > MAX_EXTRA_KEYS:
        raise BadInput(f"{len(keys)} extra keys; allowed: at most {MAX_EXTRA_KEYS}")
    return tuple(keys)


class _PackedGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    layers: Annotated[list[int], Meta(min_length=1, max_length=MAX_LAYERS)]
    kv_heads: int
    plane_widths: Annotated[list[int], Meta(min_length=1, max_length=2)]
    dtype: str
    attention: str
    window: int = 0
    row_tokens: int = 1


class _Packed(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=NAMESPACE_VERSION, le=NAMESPACE_VERSION)]
    model: str
    weights_epoch: int
    codec: str
    config: dict[str, str]
    groups: Annotated[list[_PackedGroup], Meta(min_length=1, max_length=MAX_GROUPS)]
    cut: tuple[Annotated[int, Meta(ge=1, le=MAX_BLOCK_TOKENS)], int, int, str]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides prompt and tenant that must be equal for KV to be interchangeable.

    model: a fingerprint of the weights (a commit id, or a digest of their content), never a name or a path.
    weights_epoch: raised whenever weights are updated in place. config: what else decides the numbers, as text: rope,
    KV scales, attention variant. codec: its name; a namespace has exactly one.
    """

    model: str
    layout: Layout
    codec: str
    weights_epoch: int = 0
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not isinstance(self.weights_epoch, int):
            raise BadInput(
                f"model of {type(self.model).__name__}, weights_epoch of {type(self.weights_epoch).__name__}; give "
                "text and a whole number"
            )
        if not isinstance(self.layout, Layout):
            raise BadInput(f"layout of type {type(self.layout).__name__}; give a kvstore.Layout, e.g. Layout.gqa(...)")
        if (
            not self.model
            or not _is_text(self.model, MAX_MODEL_CHARACTERS)
            or self.model.startswith(("/", "./", "../", "~"))
        ):
            raise BadInput(
                f"model={shown(self.model)} is not a fingerprint of weights; give a commit id or a content digest "
                "(a path or a name says nothing about the weights behind it)"
            )
        if not is_whole(self.weights_epoch, 0, MAX_WEIGHTS_EPOCH):
            raise BadInput(f"weights_epoch={shown(self.weights_epoch)}; give 0 or more, below 2**63")
        codec = self.codec
        is_printable = isinstance(codec, str) and codec.isascii() and codec.isprintable()
        if not is_printable or not 0 < len(codec) <= MAX_CODEC_CHARACTERS:
            raise BadInput(
                f"codec={shown(codec)}; give the name of one, of 1 to {MAX_CODEC_CHARACTERS} ASCII characters"
            )
        if not isinstance(self.config, Mapping) or len(self.config) > MAX_CONFIG_FIELDS:
            raise BadInput(f"config={shown(self.config)}; give names and their values, at most {MAX_CONFIG_FIELDS}")
        for name, value in self.config.items():
            if not _is_text(name, MAX_FIELD_CHARACTERS) or not _is_text(value, MAX_VALUE_CHARACTERS):
                raise BadInput(
                    f"config {shown(name)}={shown(value)}: names and values must be text, of at most "
                    f"{MAX_FIELD_CHARACTERS} and {MAX_VALUE_CHARACTERS} characters"
                )

    @property
    def beside(self) -> str:
        """The digest, in hexadecimal, of the namespace whose prompts these blocks go with: for states that of the KV.
        Empty for a namespace of its own."""
        return self.config.get("beside", "")

    def fields(self) -> dict[str, str]:
        """Every field by name, as text: what the digest covers, and what two namespaces are compared by."""
        described = {
            "model": self.model,
            "weights_epoch": str(self.weights_epoch),
            "codec": self.codec,
            "block_tokens": str(self.layout.block_tokens),
        }
        for name, value in self.layout.describe().items():
            described[f"layout.{name}"] = json.dumps(value, sort_keys=True)
        for name, value in self.config.items():
            described[f"config.{name}"] = value
        return described

    def digest(self) -> bytes:
        """32 bytes: BLAKE2b-256 over the length-framed fields in the order of their names."""
        state = blake2b(b"kvstore namespace, version %d" % NAMESPACE_VERSION, digest_size=NAMESPACE_BYTES)
        for name, value in sorted(self.fields().items()):
            for text in (name.encode(), value.encode()):
                state.update(len(text).to_bytes(4, "little") + text)
        return state.digest()

    def pack(self) -> bytes:
        """As bytes that `unpack` reads: what a disk keeps beside blocks, so that a new process can name them."""
        layout = self.layout
        groups = [group.describe() for group in layout.groups]
        cut = [layout.block_tokens, layout.head_shards, layout.layer_shards, layout.packing]
        fields = [NAMESPACE_VERSION, self.model, self.weights_epoch, self.codec, dict(self.config), groups, cut]
        return zlib.compress(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())

    @staticmethod
    def unpack(packed: bytes) -> Namespace:
        """The mirror of `pack`. Raises `ValueError` for anything else; the caller compares the digest.

        The input comes from other processes, and off disks: everything is checked before anything is built.
        """
        try:
            found = msgspec.json.decode(_inflated(packed), type=_Packed)
            groups = tuple(KvGroup(*msgspec.structs.astuple(one)) for one in found.groups)
            block_tokens, head_shards, layer_shards, packing = found.cut
            layout = Layout(groups, block_tokens, 1, head_shards, layer_shards, packing)
            return Namespace(found.model, layout, found.codec, found.weights_epoch, found.config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a packed namespace ({error})") from None

    def difference(self, other: Namespace) -> str:
        """The first field that differs, with both values; empty where none does. Digests of what a model computes are
        named only if nothing else differs: they follow from the other fields, and mean nothing to people."""
        mine, theirs = self.fields(), other.fields()
        for name in sorted(mine.keys() | theirs.keys(), key=lambda name: (name in _DIGESTS, name)):
            if mine.get(name) != theirs.get(name):
                return f"{name} is {mine.get(name, 'not set')} here and {theirs.get(name, 'not set')} there"
        return ""


# The record that is kept beside blocks, on NVMe and by a keeper ------------------------------------------------------
#
#     about    number of parts, 2 bytes > payload bytes of each part, 8 bytes each > `Namespace.pack`
#
# It must fit into a slab's header, and each part's payload into a frame. If they do not, the store refuses the
# namespace when a client opens it, and skips it when recovery finds it on a disk, written by another version.


def pack_about(namespace: Namespace, payload_bytes: Sequence[int]) -> bytes:
    """The record of a namespace. payload_bytes: of each part."""
    return struct.pack(f"<H{len(payload_bytes)}Q", len(payload_bytes), *payload_bytes) + namespace.pack()


def unpack_about(about: bytes) -> tuple[list[int], Namespace]:
    """The mirror of `pack_about`, checked as an opened namespace is. Raises `ValueError`."""
    try:
        (parts,) = struct.unpack_from("<H", about)
        payloads = list(struct.unpack_from(f"<{parts}Q", about, 2))
    except struct.error as error:
        raise ValueError(f"not what a slab says of its namespace ({error})") from None
    namespace = Namespace.unpack(about[2 + 8 * parts :])
    check_can_be_kept(namespace, payloads)
    return payloads, namespace


def stamps_of(keys: TenantKeys, namespace: Namespace, payload_bytes: Sequence[int]) -> tuple[Stamp, ...]:
    """The stamp of each part, in the tenant's first epoch: clients and slab headers have this one in every epoch."""
    layout, digest = namespace.layout, namespace.digest()
    return tuple(
        Stamp(
            key_id=keys.fingerprint,
            epoch=keys.first_epoch,
            tenant=keys.tenant,
            namespace=digest,
            codec=namespace.codec,
            part=part.index,
            parts=len(layout.parts),
            block_tokens=layout.block_tokens,
            slices=len(part.layers),
            payload_bytes=payload,
        )
        for part, payload in zip(layout.parts, payload_bytes, strict=True)
    )


def sealers_of(keys: TenantKeys, stamps: Sequence[Stamp]) -> tuple[Sealer, ...]:
    """The sealer of each part, in the epoch of these keys."""
    return tuple(Sealer(replace(one, key_id=keys.key_id, epoch=keys.epoch), keys.mac) for one in stamps)


def check_can_be_kept(namespace: Namespace, payload_bytes: Sequence[int]) -> None:
    """Raises `BadInput` if blocks of a namespace, with these payloads, can be neither framed nor kept."""
    parts = namespace.layout.parts
    if len(payload_bytes) != len(parts):
        raise BadInput(f"{len(payload_bytes)} payload sizes; the layout has {len(parts)} parts, so give one for each")
    for part, size in zip(parts, payload_bytes, strict=True):
        slices = len(part.layers)
        if slices > MAX_SLICES:
            raise BadInput(
                f"a part of {slices} layers; a frame holds at most {MAX_SLICES}: set layer_shards in the layout"
            )
        most = MOST_PAYLOAD * part.raw_bytes + slices * SLICE_PARAMETER_BYTES
        if not is_whole(size, -(-part.raw_bytes // LEAST_PAYLOAD), most) or size % slices:
            raise BadInput(
                f"a payload of {shown(size)} bytes for {part.raw_bytes} bytes of numbers in {slices} layers; a codec "
                f"makes as many equal slices, of 1/{LEAST_PAYLOAD} to {MOST_PAYLOAD} times the numbers in all"
            )
    about_bytes = len(pack_about(namespace, payload_bytes))
    if about_bytes > MAX_ABOUT_BYTES:
        raise BadInput(
            f"what is kept of this namespace beside its blocks has {about_bytes} bytes, {len(parts)} parts and config "
            f"included, and there is room for {MAX_ABOUT_BYTES}: give fewer shards, or digests in place of long config "
            "values"
        )
    try:
        Namespace.unpack(namespace.pack())
    except ValueError as error:
        raise BadInput(f"this namespace cannot be kept: {error}; give digests in place of long config values") from None


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that cross to tenants: a count, permuted under a key.
#
# A tenant sees the numbers of its own leases, reservations, extents and connections. If they were the store's count,
# the gap between two of its own would tell it how much all others did meanwhile. Permuted, they are as unique as the
# count, and without the key they look random: the distance of two says nothing.
#
# count ---> upper and lower half of `bits` bits ---> NUMBER_ROUNDS x (upper, lower = lower, upper ^ F(round, lower))
#
# That is a Feistel network with keyed BLAKE2b for F (Luby and Rackoff, 1988), so no two counts have one number,
# whatever F is. The store never turns a number back into its count: its tables are keyed by the number. The key is
# handed in.


class Numbers:
    """Distinct numbers above 0 that do not reveal how many were drawn. Thread-safe."""

    def __init__(self, key: bytes, bits: int) -> None:
        """key: `NUMBER_KEY_BYTES` random bytes. bits: even. The first 2**bits numbers are below 2**bits, as many more
        are from there to 2 * 2**bits, and so on."""
        assert bits % 2 == 0 and 0 < bits <= 64 and len(key) == NUMBER_KEY_BYTES
        self._half = bits // 2
        self._bits = bits
        self._mask = (1 << self._half) - 1
        self._rounds = [blake2b(bytes([one]), key=key, digest_size=_WORD_BYTES) for one in range(NUMBER_ROUNDS)]
        self._counts = count()  # which threads may share

    def __call__(self) -> int:
        """The next one."""
        while True:
            number = self.of(next(self._counts))
            if number:  # 0 means none
                return number

    def of(self, counted: int) -> int:
        """The number of a count, which may be 0."""
        half, mask = self._half, self._mask
        upper, lower = counted >> half & mask, counted & mask
        for keyed in self._rounds:
            state = keyed.copy()
            state.update(lower.to_bytes(_WORD_BYTES, "little"))
            upper, lower = lower, upper ^ int.from_bytes(state.digest(), "little") & mask
        return counted >> self._bits << self._bits | upper << half | lower


def _is_text(given: object, most: int) -> bool:
    return isinstance(given, str) and len(given) <= most and not any("\ud800" <= one <= "\udfff" for one in given)


def _inflated(packed: bytes) -> bytes:
    if len(packed) > MAX_PACKED_BYTES:
        raise ValueError(f"{len(packed)} bytes; a packed namespace has at most {MAX_PACKED_BYTES}")
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(packed, MAX_UNPACKED_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(text) > MAX_UNPACKED_BYTES:
        raise ValueError(f"more than {MAX_UNPACKED_BYTES} bytes of text")
    if not inflating.eof or inflating.unused_data:
        raise ValueError("it is cut short, or something follows it")
    return text


def _derived(secret: bytes, label: str, epoch: int) -> bytes:
    return blake2b(b"%d" % epoch, digest_size=KEY_BYTES, key=secret, person=b"kv-" + label.encode()).digest()


def _extra_value(given: bytes | str) -> bytes:
    if isinstance(given, str):
        if not _is_text(given, len(given)):
            raise BadInput("an extra key with half of a surrogate pair in it, which is no text; give bytes, or mend it")
        return b"text:" + given.encode()
    if isinstance(given, bytes):
        return b"data:" + given
    raise BadInput(f"an extra key of type {type(given).__name__}; give bytes, text or ExtraKey")


def _little_endian(values: np.ndarray[Any, Any]) -> bytes:
    return values.astype("<u4", copy=False).tobytes()
