"""Names of blocks: the keyed chain, what it depends on, and what it takes as token ids."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore.block.errors import BadInput
from kvstore.block.identity import (
    NOWHERE,
    ExtraKey,
    Identity,
    KeyRing,
    Namespace,
    PrefixHasher,
    TenantKeys,
    as_extra_keys,
    key_difference,
    root_key,
    token_bytes,
)
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.protocol.messages import Grant
from workbench import MODEL, OTHER_SECRET, SECRET, refused, small_layout

KEY = bytes(range(100, 132))


def chain_by_the_formula(
    identity_key: bytes, block_tokens: int, token_ids: Sequence[int], extras: Sequence[ExtraKey] = ()
) -> list[bytes]:
    """The file's formula, written out: nothing shared with the code under test but the standard library."""
    text = f"kvstore prefix chain, version 1, {block_tokens} tokens per block"
    parent = blake2b(text.encode(), digest_size=32).digest()
    keys = []
    for block in range(len(token_ids) // block_tokens):
        message = parent
        for token in token_ids[block * block_tokens : (block + 1) * block_tokens]:
            message += struct.pack("<I", token)
        for extra in extras:
            if extra.first_token // block_tokens == block:
                message += struct.pack("<II", extra.first_token % block_tokens, len(extra.value)) + extra.value
        parent = blake2b(message, digest_size=32, key=identity_key, person=b"kv-prefix-key-v1").digest()
        keys.append(parent)
    return keys


def keys_of(token_ids: Any, extras: Sequence[ExtraKey | bytes | str] = (), block_tokens: int = 64) -> list[bytes]:
    return PrefixHasher(KEY, block_tokens).keys(token_bytes(token_ids), as_extra_keys(extras))


token_lists = st.builds(
    lambda tokens, seed: Random(seed).choices(range(2**32), k=tokens), st.integers(0, 300), st.integers()
)
extra_lists = st.lists(
    st.builds(ExtraKey, st.binary(max_size=40), st.integers(0, 400)), max_size=4
)  # some lie behind the last full block


# The chain ------------------------------------------------------------------------------------------------------------


@given(token_lists, extra_lists, st.sampled_from([64, 128, 192]), st.binary(min_size=32, max_size=32))
@settings(max_examples=60)
def test_the_chain_is_the_formula(
    token_ids: list[int], extras: list[ExtraKey], block_tokens: int, identity_key: bytes
) -> None:
    hasher = PrefixHasher(identity_key, block_tokens)
    assert hasher.keys(token_bytes(token_ids), extras) == chain_by_the_formula(
        identity_key, block_tokens, token_ids, extras
    )


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("extras", [(), (ExtraKey(b"salt"), ExtraKey(b"image", 70), ExtraKey(b"image", 200))])
def test_a_prompt_that_grows_has_the_keys_that_it_has_at_once(first: int, extras: tuple[ExtraKey, ...]) -> None:
    """known: of the leading blocks, whose tokens are not given again."""
    hasher, prompt = PrefixHasher(KEY, 64), list(range(5 * 64 + 10))
    whole = hasher.keys(token_bytes(prompt), extras)
    assert len(whole) == 5
    assert hasher.keys(token_bytes(prompt[64 * first :]), extras, whole[:first]) == whole


def test_another_tenant_and_another_block_size_share_no_key() -> None:
    mine = PrefixHasher(TenantKeys.derive(SECRET).identity, 64).keys(token_bytes(range(256)))
    theirs = PrefixHasher(TenantKeys.derive(OTHER_SECRET).identity, 64).keys(token_bytes(range(256)))
    larger = PrefixHasher(TenantKeys.derive(SECRET).identity, 128).keys(token_bytes(range(256)))
    assert not set(mine) & set(theirs) and not set(mine) & set(larger)
    assert root_key(64) != root_key(128)


# Token ids ------------------------------------------------------------------------------------------------------------

NUMPY_TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", ">u4", ">i8", ">u2"]
TORCH_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]


@given(st.lists(st.integers(0, 127), max_size=140))
@settings(max_examples=25)
def test_every_way_to_write_the_same_ids_gives_the_same_keys(token_ids: list[int]) -> None:
    want = b"".join(struct.pack("<I", token) for token in token_ids)
    ways: list[Any] = [token_ids, tuple(token_ids), want, bytearray(want), memoryview(want)]
    ways += [array(code, token_ids) for code in "BbHhIiLlQq"]
    ways += [memoryview(array("q", token_ids)), [np.int64(token) for token in token_ids]]
    ways += [np.array(token_ids, dtype=name) for name in NUMPY_TYPES]
    ways += [np.array([(token, 0) for token in token_ids], dtype=np.int64).reshape(-1, 2)[:, 0]]  # with a stride
    ways += [torch.tensor(token_ids, dtype=dtype) for dtype in TORCH_TYPES]
    for way in ways:
        assert token_bytes(way) == want, type(way)


def test_a_range_is_a_prompt_too() -> None:
    assert token_bytes(range(0)) == token_bytes(np.array([])) == b""
    assert token_bytes(range(3)) == bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])


@pytest.mark.parametrize("largest", [[2**32 - 1], np.array([2**32 - 1], dtype=np.int64), torch.tensor([2**32 - 1])])
def test_the_largest_id(largest: Any) -> None:
    assert token_bytes(largest) == b"\xff" * 4


class NotInThisMemory:
    """A tensor that numpy cannot reach, as one on another device is."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("cannot convert a tensor of that device")


BAD_IDS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("negative in a list", [1, -1], ("0 to 4294967295", "list")),
    ("too large in a list", [2**32], ("0 to 4294967295", "list")),
    ("a float in a list", [1, 2.0], ("integers", "list")),
    ("text in a list", ["1"], ("integers", "list")),
    ("None in a tuple", (None,), ("integers",)),
    ("a list of lists", [[1, 2], [3, 4]], ("flat list",)),
    ("negative in an array", np.array([-1]), ("0 and 4294967295",)),
    ("too large in an array", np.array([2**32]), ("0 and 4294967295",)),
    ("too large in a uint64 array", np.array([2**64 - 1], dtype=np.uint64), ("0 and 4294967295",)),
    ("negative in array.array", array("i", [-5]), ("0 and 4294967295",)),
    ("negative in a tensor", torch.tensor([-1]), ("0 and 4294967295",)),
    ("float array", np.array([1.0]), ("float64", "integers")),
    ("float tensor", torch.tensor([1.0]), ("float32", "integers")),
    ("booleans in an array", np.array([True]), ("bool", "integers")),
    ("booleans in a tensor", torch.tensor([True, False]), ("bool", "integers")),
    ("two dimensions", np.zeros((1, 4), dtype=np.int64), ("(1, 4)", "one dimension")),
    ("a batch of tensors", torch.zeros(2, 3, dtype=torch.int64), ("(2, 3)", "one prompt of a batch")),
    ("one number", 5, ("type int", "one dimension")),
    ("a scalar tensor", torch.tensor(5), ("type Tensor", "one dimension")),
    ("text", "hello", ("type str", "one dimension of integers")),
    ("nothing", None, ("type NoneType", "one dimension of integers")),
    ("a dictionary", {1: 2}, ("type dict", "one dimension of integers")),
    ("a generator", (token for token in (1, 2)), ("one dimension of integers",)),
    ("odd bytes", b"12345", ("5 bytes", "multiple of 4")),
    ("odd bytearray", bytearray(2), ("2 bytes", "multiple of 4")),
    ("out of reach", NotInThisMemory(), ("NotInThisMemory", "host memory")),
]


@pytest.mark.parametrize(("given_ids", "fragments"), [case[1:] for case in BAD_IDS], ids=[case[0] for case in BAD_IDS])
def test_bad_ids_are_one_clear_line(given_ids: Any, fragments: tuple[str, ...]) -> None:
    with refused(BadInput, *fragments):
        token_bytes(given_ids)


def test_a_message_never_repeats_the_prompt() -> None:
    with pytest.raises(BadInput) as caught:
        token_bytes([31337, -31338])
    assert "3133" not in str(caught.value)


# Extra keys -----------------------------------------------------------------------------------------------------------


def test_a_salt_is_not_printed() -> None:
    assert "hunter2" not in repr(ExtraKey(b"hunter2", 5)) and "5" in repr(ExtraKey(b"hunter2", 5))


# Tenants --------------------------------------------------------------------------------------------------------------


def test_each_use_has_a_key_of_its_own() -> None:
    keys = [TenantKeys.derive(secret, epoch) for secret in (SECRET, OTHER_SECRET) for epoch in (1, 2)]
    derived = [value for key in keys for value in (key.identity, key.mac, key.key_id)]
    assert len(set(derived)) == len(derived)
    assert not {SECRET, OTHER_SECRET} & set(derived)


def test_a_tenant_is_the_same_in_every_epoch() -> None:
    assert TenantKeys.derive(SECRET, 1).tenant == TenantKeys.derive(SECRET, 9).tenant
    assert TenantKeys.derive(SECRET).tenant != TenantKeys.derive(OTHER_SECRET).tenant


def test_keys_print_no_secret() -> None:
    keys = TenantKeys.derive(SECRET)
    shown = repr(keys) + str(keys) + f"{keys}"
    for secret in (SECRET, keys.identity, keys.mac):
        assert secret.hex() not in shown and repr(secret) not in shown
    assert "identity=" not in shown and "mac=" not in shown
    granted = Grant(3, keys.identity, (b"stamp",), (8192,))
    assert repr(keys.identity) not in repr(granted) + str(granted) and "3" in repr(granted)


def test_a_ring_knows_a_mac_key_by_tenant_key_and_epoch_together() -> None:
    first, second = TenantKeys.derive(SECRET, 1), TenantKeys.derive(SECRET, 2)
    ring = KeyRing([first, second])
    assert ring.mac_key(first.tenant, first.key_id, 1) == first.mac
    assert ring.mac_key(second.tenant, second.key_id, 2) == second.mac
    assert ring.mac_key(first.tenant, first.key_id, 2) is None
    assert ring.mac_key(b"x" * 16, first.key_id, 1) is None
    third = TenantKeys.derive(OTHER_SECRET)
    ring.add(third)
    ring.forget(first.tenant)
    ring.forget(first.tenant)
    for one in (first, second):
        assert ring.mac_key(one.tenant, one.key_id, one.epoch) is None, "what it signed is accepted no more"
        assert ring.slab_key(one.tenant, one.key_id, one.epoch) is None
    assert ring.mac_key(third.tenant, third.key_id, 1) == third.mac == ring.slab_key(third.tenant, third.key_id, 1)


def test_an_epoch_is_a_secret_for_macs_alone() -> None:
    first = TenantKeys.derive(SECRET)
    second = first.in_epoch(OTHER_SECRET, 2)
    kept = ("tenant", "identity", "fingerprint", "first_epoch", "slab_mac")
    assert [getattr(first, name) for name in kept] == [getattr(second, name) for name in kept]
    assert first.fingerprint == first.key_id != second.key_id and first.mac != second.mac
    assert Identity.of(first, NOWHERE) == Identity.of(second, NOWHERE)
    ring = KeyRing([first, second])
    ring.retire(first.tenant, first.key_id, 1)
    assert ring.mac_key(first.tenant, first.key_id, 1) == b"", "known, and accepted no more"
    assert ring.slab_key(first.tenant, first.key_id, 1) == first.mac, "where frames are is signed in the first epoch"
    assert ring.mac_key(first.tenant, second.key_id, 2) == second.mac


def test_a_difference_names_both_fingerprints() -> None:
    one, other = TenantKeys.derive(SECRET).fingerprint, TenantKeys.derive(OTHER_SECRET).fingerprint
    assert key_difference(one, one) == ""
    assert one.hex() in key_difference(one, other) and other.hex() in key_difference(one, other)


# Namespaces -----------------------------------------------------------------------------------------------------------

PLAIN = Namespace(MODEL, small_layout(), "raw", 3, {"rope": "10000"})

OTHERS: dict[str, Namespace] = {
    "model": Namespace("other", small_layout(), "raw", 3, {"rope": "10000"}),
    "weights_epoch": Namespace(MODEL, small_layout(), "raw", 4, {"rope": "10000"}),
    "codec": Namespace(MODEL, small_layout(), "int8", 3, {"rope": "10000"}),
    "block_tokens": Namespace(MODEL, small_layout(block_tokens=128), "raw", 3, {"rope": "10000"}),
    "config.rope": Namespace(MODEL, small_layout(), "raw", 3, {"rope": "10001"}),
    "config.scale": Namespace(MODEL, small_layout(), "raw", 3, {"rope": "10000", "scale": ""}),
    "layout.groups": Namespace(MODEL, small_layout(dtype="float16"), "raw", 3, {"rope": "10000"}),
    "layout.parts": Namespace(MODEL, small_layout(layer_shards=2), "raw", 3, {"rope": "10000"}),
    "layout.packing": Namespace(
        MODEL, Layout(small_layout().groups, packing="opaque"), "raw", 3, {"rope": "10000"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_changes_the_digest_and_is_named(name: str) -> None:
    other = OTHERS[name]
    assert other.digest() != PLAIN.digest()
    told = PLAIN.difference(other)
    assert told.startswith(f"{name} is {PLAIN.fields().get(name, 'not set')} here and ")
    assert told.endswith(f"{other.fields().get(name, 'not set')} there")


def test_every_shape_of_a_group_changes_the_digest() -> None:
    shapes = [
        small_layout(),
        small_layout(layers=3),
        small_layout(kv_heads=4),
        small_layout(head_dim=16),
        small_layout(dtype="float16"),
        small_layout(head_shards=2),
        Layout((KvGroup("other", (0, 1), 2, (8, 8), "bfloat16"),)),
        Layout((KvGroup("full", (1, 2), 2, (8, 8), "bfloat16"),)),
        Layout((KvGroup("full", (1, 0), 2, (8, 8), "bfloat16"),)),
        Layout((KvGroup("full", (0, 1), 2, (16,), "bfloat16"),)),
        Layout((KvGroup("full", (0,), 2, (8, 8), "bfloat16"), KvGroup("more", (1,), 2, (8, 8), "bfloat16"))),
        *[
            Layout((KvGroup("full", (0, 1), 2, (8, 8), "bfloat16", Attention.SLIDING, window),))
            for window in (1, 64, 65)
        ],
        Layout((KvGroup("full", (0, 1), 2, (8, 8), "bfloat16", Attention.CHUNKED, 64),)),
        Layout((KvGroup("full", (0, 1), 2, (8, 8), "bfloat16", Attention.STATE, row_tokens=64),)),
        *[Layout((KvGroup("full", (0, 1), 2, (8, 8), "bfloat16", row_tokens=row),)) for row in (2, 4, 64)],
    ]
    assert len({Namespace(MODEL, shape, "raw").digest() for shape in shapes}) == len(shapes)


def test_the_page_of_an_engine_is_not_part_of_a_namespace() -> None:
    small, large = small_layout(page_tokens=16), small_layout(page_tokens=64)
    assert Namespace(MODEL, small, "raw").digest() == Namespace(MODEL, large, "raw").digest()


def test_equal_namespaces_have_no_difference() -> None:
    twin = Namespace(MODEL, small_layout(), "raw", 3, {"rope": "10000"})
    assert PLAIN.difference(twin) == "" and PLAIN.digest() == twin.digest()


def test_digests_of_what_is_computed_are_named_where_nothing_else_differs() -> None:
    mine, theirs = (replace(PLAIN, config={"computes": value, "state": value}) for value in "ab")
    assert mine.difference(theirs) == "config.computes is a here and b there"
    assert mine.difference(replace(theirs, model="other")).startswith("model is ")


words = st.text("ab=:,.\x00 ", max_size=4)
namespaces = st.builds(
    Namespace,
    model=st.text("ab.\x00", min_size=1, max_size=3).filter(lambda text: not text.startswith((".", "~"))),
    layout=st.sampled_from([small_layout(), small_layout(layers=1)]),
    codec=st.text("ab=:,. ", min_size=1, max_size=4),
    weights_epoch=st.integers(0, 11),
    config=st.dictionaries(words, words, max_size=3),
)


@given(namespaces, namespaces)
@settings(max_examples=150)
def test_digests_are_equal_exactly_where_fields_are(mine: Namespace, theirs: Namespace) -> None:
    assert (mine.digest() == theirs.digest()) == (mine.fields() == theirs.fields())
    assert bool(mine.difference(theirs)) == (mine.fields() != theirs.fields())


@pytest.mark.slow
@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 6))
@settings(max_examples=60)
def test_moving_a_letter_from_a_name_to_its_value_is_seen(name: str, value: str, at: int) -> None:
    joined = name + value
    assume(at <= len(joined) and at != len(name))

    def digest(cut: int) -> bytes:
        return Namespace(MODEL, small_layout(), "raw", 0, {joined[:cut]: joined[cut:]}).digest()

    assert digest(at) != digest(len(name))


def test_the_order_of_the_configuration_does_not_matter() -> None:
    one = Namespace(MODEL, small_layout(), "raw", 0, {"a": "1", "b": "2"})
    two = Namespace(MODEL, small_layout(), "raw", 0, {"b": "2", "a": "1"})
    assert one.digest() == two.digest()


# Golden values: identity is a promise to what is stored already. When one of these changes, raise CHAIN_VERSION or
# NAMESPACE_VERSION: blocks that were stored before are then absent instead of wrong. ----------------------------------

SHARDED = Namespace(
    MODEL,
    Layout.gqa(layers=4, kv_heads=4, head_dim=16, dtype="float16", page_tokens=16, head_shards=2, layer_shards=2),
    "raw",
    3,
    {"rope": "1e6"},
)
SEVERAL_GROUPS = Namespace(
    MODEL,
    Layout((KvGroup("full", (0, 2), 2, (8, 8), "float16"), KvGroup("thin", (1,), 1, (16,), "float32"))),
    "raw",
    3,
    {"rope": "1e6"},
)
SLIDING = Namespace(
    MODEL,
    Layout((
        KvGroup("full", (0,), 2, (8, 8), "float16"),
        KvGroup("sliding", (1,), 2, (8, 8), "float16", Attention.SLIDING, 512),
    )),
    "raw",
)  # fmt: skip
KINDS = Namespace(
    MODEL,
    Layout((
        KvGroup("latent", (0,), 1, (16,), "float16", row_tokens=4),
        KvGroup("chunk", (1,), 2, (8, 8), "float16", Attention.CHUNKED, 512),
        KvGroup("state", (2,), 1, (40, 8), "uint8", Attention.STATE, row_tokens=784),
    ), 784),
    "raw",
)  # fmt: skip

GOLDEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "tenant": (lambda: TenantKeys.derive(SECRET).tenant, "f14e975e3762180f1e06f25037e272aa"),
    "key id": (lambda: TenantKeys.derive(SECRET).key_id, "63c6ccb878339adf"),
    "identity": (
        lambda: TenantKeys.derive(SECRET).identity,
        "ff481a8fb437b85af5cc48d0cd83fb0e6191538a5b43e45110e5c3995f2d0b70",
    ),
    "mac": (lambda: TenantKeys.derive(SECRET).mac, "4e435361ff2ee433e2d6a4d2d4ec2553545b9da44ca1bc46625676b034c57395"),
    "identity of epoch 2": (
        lambda: TenantKeys.derive(SECRET, 2).identity,
        "aae21b3015480c472e86fbe04b0475a7dde39c0b3f45ee1a30ad04195418cc19",
    ),
    "root of 64": (lambda: root_key(64), "1918c8d4df4f3df53f7b283f2b828c1f9d7034680e81c2fd2b43ec4cc2083552"),
    "first block": (lambda: keys_of(range(128))[0], "11e5666e3a68708708c51142963425be3f90b961d4a3bcc74226338ddac0bb35"),
    "second block": (
        lambda: keys_of(range(128))[1],
        "f712e854d8f71000deb0ffac4f6acdfce6b964823a5f8d77c87082238b2b8415",
    ),
    "with extra keys": (
        lambda: keys_of(range(64), (b"a", "b", ExtraKey(b"c", 9)))[0],
        "26be4bfd166d641bbe90fdf5db41bcab81aaf6f31aedd63931849d0ff2c613e9",
    ),
    "namespace of groups": (
        lambda: SEVERAL_GROUPS.digest(),
        "84a44810c0746fe4cf1677279b89c9f20794b3b9c61e0b9e2ad146850ea2ee97",
    ),
    "sharded namespace": (
        lambda: SHARDED.digest(),
        "f754e6e9dd210ca53baee416367e1aa52661bb93b2cb5977abfbd59befa71d14",
    ),
    "sliding namespace": (
        SLIDING.digest,
        "8fe1427e232387742f40db83e34832c918575cbe012897bf027a42f2c73e0cb7",
    ),
    "namespace": (PLAIN.digest, "c8062e17b6e3debe11d082b5dc03211ad07ea5cdb778e10bce3107105fbddf5d"),
    "latent namespace": (
        lambda: Namespace(MODEL, Layout.mla(layers=2, latent_dim=512, rope_dim=64, dtype="bfloat16"), "raw").digest(),
        "3d9a7c102367f3fcb762baacde2ca718db4bfa45c9b0733a85eb9eddf3e898b8",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_identity_is_what_it_always_was(name: str) -> None:
    compute, want = GOLDEN[name]
    assert compute().hex() == want


# On disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("namespace", "want"),
    [
        (
            SHARDED,
            '[1,"3f5e1c0d9a",3,"raw",{"rope":"1e6"},[["full",[0,1,2,3],4,[16,16],"float16","full"]],[64,2,2,"planes"]]',
        ),
        (
            SEVERAL_GROUPS,
            '[1,"3f5e1c0d9a",3,"raw",{"rope":"1e6"},[["full",[0,2],2,[8,8],"float16","full"],'
            '["thin",[1],1,[16],"float32","full"]],[64,1,1,"planes"]]',
        ),
        (
            SLIDING,
            '[1,"3f5e1c0d9a",0,"raw",{},[["full",[0],2,[8,8],"float16","full"],'
            '["sliding",[1],2,[8,8],"float16","sliding",512]],[64,1,1,"planes"]]',
        ),
    ],
    ids=["sharded", "several groups", "sliding"],
)
def test_a_namespace_is_packed_as_it_always_was(namespace: Namespace, want: str) -> None:
    assert zlib.decompress(namespace.pack()).decode() == want
    assert Namespace.unpack(namespace.pack()).layout == replace(namespace.layout, page_tokens=1)


@pytest.mark.parametrize("extra", [[0], [-5], [64, 7], [64, 1, 1], ["64"], [None], [64, "4"], [64, 0], [64, 8192]])
def test_a_packed_window_that_is_none_is_refused(extra: list[object]) -> None:
    fields = json.loads(zlib.decompress(SLIDING.pack()))
    fields[5][1][6:] = extra
    with pytest.raises(ValueError):
        Namespace.unpack(zlib.compress(json.dumps(fields).encode()))


@given(st.one_of(namespaces, st.sampled_from([PLAIN, SLIDING, KINDS, SEVERAL_GROUPS, *OTHERS.values()])))
@settings(max_examples=100)
def test_a_packed_namespace_is_the_same_one(namespace: Namespace) -> None:
    again = Namespace.unpack(namespace.pack())
    assert again.digest() == namespace.digest() and again.fields() == namespace.fields()
    assert again.layout.raw_bytes == namespace.layout.raw_bytes


def test_a_large_model_packs_into_a_page() -> None:
    layout = small_layout(layers=126, kv_heads=8, head_dim=128, head_shards=8, layer_shards=4)
    assert len(Namespace(MODEL, layout, "int8-kc64", 3, {"rope": "10000"}).pack()) < 1024


@given(st.binary(max_size=40), st.integers(0, 10_000))
@settings(max_examples=100)
def test_what_is_not_a_packed_namespace_is_refused(other: bytes, bit: int) -> None:
    damaged = bytearray(PLAIN.pack())
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    for raw in (other, PLAIN.pack()[:-1], zlib.compress(b"[1]"), zlib.compress(b"{}")):
        with pytest.raises(ValueError):
            Namespace.unpack(raw)
    with contextlib.suppress(ValueError):  # the last bits of a compressed stream may be unused
        assert Namespace.unpack(bytes(damaged)).digest() == PLAIN.digest()


def test_extra_keys_differ_by_value_position_order_and_kind() -> None:
    variants: list[Sequence[ExtraKey | bytes | str]] = [
        (),
        (b"one",),
        ("one",),
        (b"two",),
        (b"one", b"two"),
        (b"two", b"one"),
        (b"onetwo",),
        (ExtraKey(b"one"),),
        (ExtraKey(b"one", 1),),
        (ExtraKey(b"one", 63),),
        (ExtraKey(b""),),
        (ExtraKey(b""), ExtraKey(b"")),
    ]
    assert len({keys_of(range(64), extras)[0] for extras in variants}) == len(variants)
