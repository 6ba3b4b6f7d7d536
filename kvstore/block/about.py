"""The namespace record that is kept beside blocks, on NVMe and by a keeper, and which namespaces can have one.

    about    number of parts, 2 bytes > payload bytes of each part, 8 bytes each > `Namespace.pack`

The record must fit into a slab's header, and each part's payload into a frame. If they do not, the store refuses the
namespace when a client opens it, and skips it when recovery finds it on a disk, written by another version.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from kvstore.block.errors import BadInput, shown
from kvstore.block.identity import Namespace, TenantKeys
from kvstore.block.layout import is_whole
from tiering.frame import MAX_SLICES, Sealer, Stamp
from tiering.slab_header import MAX_ABOUT_BYTES

MOST_PAYLOAD, LEAST_PAYLOAD = 2, 64
"""Bounds of a payload, relative to the bytes of its numbers: at most MOST_PAYLOAD times as many, at least
1/LEAST_PAYLOAD."""
SLICE_PARAMETER_BYTES = 4096
"""Room for a codec's parameters, beside the codes of a layer slice."""


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
