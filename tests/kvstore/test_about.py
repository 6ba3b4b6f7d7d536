"""What is kept of a namespace beside its blocks: it fits, or the namespace is refused; and what is read is checked."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import pytest

from kvstore.block.errors import BadInput
from kvstore.block.identity import Namespace, check_can_be_kept, pack_about, unpack_about
from kvstore.block.layout import Layout
from tiering.frame import MAX_SLICES
from tiering.slab_header import MAX_ABOUT_BYTES
from workbench import MODEL, one_line, refused, small_layout


def sizes_of(namespace: Namespace) -> list[int]:
    return [part.raw_bytes for part in namespace.layout.parts]


def many_parts(count: int) -> Namespace:
    return Namespace(MODEL, Layout.gqa(layers=count, kv_heads=1, head_dim=8, dtype="int8", layer_shards=count), "raw")


def test_what_is_packed_is_read_again() -> None:
    for namespace in (
        Namespace(MODEL, small_layout(head_shards=2, layer_shards=2), "raw", 3, {"rope": "1"}),
        many_parts(300),
    ):
        payloads, again = unpack_about(pack_about(namespace, sizes_of(namespace)))
        assert payloads == sizes_of(namespace) and again.digest() == namespace.digest()


def test_it_fits_into_a_slabs_header_or_is_refused() -> None:
    fitting = 0
    for fields in range(64):
        config = {str(n): blake2b(b"%d" % n).hexdigest() for n in range(fields)}
        namespace = Namespace(MODEL, small_layout(), "raw", 0, config)
        about = pack_about(namespace, sizes_of(namespace))
        if len(about) <= MAX_ABOUT_BYTES:
            check_can_be_kept(namespace, sizes_of(namespace))
            fitting += 1
        else:
            with refused(BadInput, str(len(about)), str(MAX_ABOUT_BYTES)):
                check_can_be_kept(namespace, sizes_of(namespace))
    assert 20 < fitting < 64
    with pytest.raises(BadInput, match="fewer shards"):
        check_can_be_kept(many_parts(490), sizes_of(many_parts(490)))


def test_a_part_of_more_layers_than_a_frame_has_digests_for_is_refused() -> None:
    for layers, is_right in ((MAX_SLICES, True), (MAX_SLICES + 1, False)):
        namespace = Namespace(MODEL, small_layout(layers=layers), "raw")
        if is_right:
            check_can_be_kept(namespace, sizes_of(namespace))
        else:
            with pytest.raises(BadInput, match="layer_shards"):
                check_can_be_kept(namespace, sizes_of(namespace))


@pytest.mark.parametrize(
    "sizes", [[], [8192] * 2, [0], [-8192], [8191], [126], [1 << 63], [True], ["8192"], [8192.0], [None]]
)
def test_payloads_that_no_codec_makes_are_refused(sizes: list[Any]) -> None:
    namespace = Namespace(MODEL, small_layout(), "raw")
    assert sizes_of(namespace) == [8192]
    with refused(BadInput, "payload"):
        check_can_be_kept(namespace, sizes)


@pytest.mark.parametrize("count", [0, 2, 500, 65_535])
def test_a_count_of_parts_that_is_wrong_is_refused(count: int) -> None:
    namespace = Namespace(MODEL, small_layout(), "raw")
    about = pack_about(namespace, sizes_of(namespace))
    with pytest.raises(ValueError):
        unpack_about(struct.pack("<H", count) + about[2:])
    for length in range(0, len(about), 7):
        with pytest.raises(ValueError):
            unpack_about(about[:length])


@pytest.mark.parametrize("config", [
    {f"field{n}": "a" * 4096 for n in range(20)},  # little once it is packed, and more text than is unpacked
    {f"field{n}": "a" * 300 for n in range(20)},
], ids=["too much", "enough"])  # fmt: skip
def test_what_is_accepted_can_be_read_again(config: dict[str, str]) -> None:
    namespace = Namespace(MODEL, small_layout(), "raw", 0, config)
    try:
        check_can_be_kept(namespace, sizes_of(namespace))
    except BadInput as error:
        assert len(config["field0"]) > 300 and one_line(error, "65536", "digests")
    else:
        assert unpack_about(pack_about(namespace, sizes_of(namespace)))[1].digest() == namespace.digest()
