"""States of recurrent layers: found at the boundaries where they were put; evicted, kept and lost apart from the KV
that they go with; and never one state in the place of another.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore
from kvstore.block.account import Account, HitTier, MissReason
from kvstore.block.identity import TenantKeys
from kvstore.block.layout import Attention, KvGroup, Layout
from kvstore.block.pages import Pages
from kvstore.client.handle import Match, NamespaceHandle, PutResult
from kvstore.client.states import MOST_PART_BYTES, PrefixStates, config_of_states, layout_of_states
from kvstore.node import EmbeddedStore
from kvstore.service.dispatch import UNKNOWN
from service.sidecar import Sidecar
from tiering.frame import HEADER_BYTES
from waiting import wait_until
from workbench import MODEL, Bench, bench, ids, open_at, random_pages, small_layout

WIDTHS = (900, 24)
STATE = Layout((KvGroup("state0", (0, 1), 1, WIDTHS, "uint8", Attention.STATE, row_tokens=64),), 64)
PROMPT = ids(64 * 4 + 10)


def state(seed: int) -> Pages:
    """Random bytes as the state of two layers."""
    generator = torch.Generator().manual_seed(seed)

    def plane(width: int) -> torch.Tensor:
        return torch.randint(0, 256, (1, 1, 1, width), dtype=torch.uint8, generator=generator)

    return Pages({layer: [plane(width) for width in WIDTHS] for layer in (0, 1)}, [0], 64)


@pytest.mark.parametrize(("ranks", "layers_a_part"), [(1, 1), (2, 2), (8, 8)])
def test_a_state_is_cut_into_parts_that_fit_an_extent(ranks: int, layers_a_part: int) -> None:
    """Of Qwen3.5-27B: 48 layers of 3 MiB, in three groups of vLLM's."""
    groups = [
        KvGroup(f"state{at}", range(16 * at, 16 * at + 16), ranks, (3 << 20,), "uint8", Attention.STATE, row_tokens=784)
        for at in range(3)
    ]
    layout = layout_of_states([replace(one, plane_widths=((3 << 20) // ranks,)) for one in groups], ranks)
    assert {len(part.layers) for part in layout.parts} == {layers_a_part}
    assert max(part.raw_bytes for part in layout.parts) <= MOST_PART_BYTES
    assert sum(part.raw_bytes for part in layout.parts) == 48 * 3 << 20


@dataclass
class Model:
    """What an engine has of a model with full attention and recurrent layers."""

    kv: NamespaceHandle
    states: PrefixStates

    @staticmethod
    def of(store: Any, **who: Any) -> Model:
        """In a store, or a bench."""
        if isinstance(store, Bench):
            kv, made = store.namespace(**who), store.namespace(STATE, **who)
            return Model(kv, PrefixStates(made))
        kv = store.namespace(model=MODEL, layout=small_layout())
        made = store.namespace(model=MODEL, layout=STATE, config=config_of_states(kv.namespace, "float32"))
        return Model(kv, PrefixStates(made))

    def put(self, blocks: list[int], tokens: list[int] = PROMPT, **options: Any) -> list[bytes]:
        """A prompt's KV, and its states behind these blocks: of the first block that is 1."""
        keys = self.kv.hashed(tokens).keys
        assert self.kv.put(tokens[: 64 * len(keys)], random_pages(small_layout(), len(keys)), **options).reason is None
        for block in blocks:
            put = self.states.handle.put(self.states.prompt_of(keys[block - 1]), state(block), **options)
            assert put == PutResult(0, 1, None, None)
        return keys

    def read(self, key: bytes, seed: int) -> MissReason | None:
        """The state behind the block of this key, which is right if it comes at all; or why it does not."""
        into = state(seed + 1000)
        with self.states.handle.lease(self.states.match_of(key), deadline_ms=20_000) as lease:
            loaded = self.states.handle.get(lease, into)
        if loaded.tokens:
            wanted = state(seed)
            for layer, planes in wanted.planes.items():
                assert all(map(torch.equal, planes, into.planes[layer]))
        return None if loaded.tokens else loaded.reason or lease.reason


@pytest.fixture(params=["embedded", "sidecar"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[EmbeddedStore, Any]]:
    """The store, and what its client has."""
    with Sidecar(tmp_path) as sidecar, sidecar.client() as client:
        yield sidecar.store, sidecar.store if request.param == "embedded" else client


def test_a_match_is_cut_to_where_a_state_is(opened: tuple[EmbeddedStore, Any]) -> None:
    core, store = opened
    model = Model.of(store)
    prompt = model.kv.hashed(PROMPT)
    assert model.states.ends(prompt) == [False] * 4
    keys = model.put([1, 3])
    before = core.usage()
    ends = model.states.ends(prompt)
    assert ends == [True, False, True, False] and core.usage() == before, "it counts and pins nothing"
    assert wait_until(model.states.submit(prompt, 20_000).poll) == ends
    match = model.kv.match(PROMPT)
    cut = model.states.cut(match, ends, 4)
    assert (cut.blocks, cut.tokens, cut.found, cut.reason) == (3, 192, 4, MissReason.NO_STATE)
    assert cut.account == Account.of([(HitTier.DRAM, 192), (MissReason.NO_STATE, 64), (MissReason.PARTIAL_BLOCK, 10)])
    assert model.states.cut(match, ends, 2).blocks == model.states.cut(match.cut(2, match.account), ends, 4).blocks == 1
    with model.kv.lease(cut) as lease:
        assert lease.account == cut.account
    assert [model.read(key, block) for block, key in enumerate(keys, 1)] == [
        None,
        MissReason.ABSENT,
        None,
        MissReason.ABSENT,
    ]
    assert model.states.handle.which([]) == []


def test_an_earlier_sidecar_knows_no_state(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar, sidecar.client() as client:
        model = Model.of(client)
        model.put([1, 3])
        sidecar.handlers._verbs = {
            verb: handler if verb.__name__ != "Which" else lambda caller, request: UNKNOWN
            for verb, handler in sidecar.handlers._verbs.items()
        }
        assert model.states.ends(model.kv.hashed(PROMPT)) == [False] * 4
        sidecar.door.close(10)
        assert model.states.ends(model.kv.hashed(PROMPT)) == [False] * 4


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_keeps_the_longest_prefix_with_a_state_and_accounts_for_the_rest(seed: int) -> None:
    draw = random.Random(seed)
    states = Model.of(bench()).states
    blocks = draw.randint(0, 6)
    whole = states.whole(states.prompt_of(b"k" * 32))
    assert (whole.blocks, whole.account) == (1, Account.of([(HitTier.DRAM, 64)])) == (1, states.match_of(b"").account)
    found = draw.randint(0, blocks)
    parts = [(HitTier.NVME, 64 * found), (MissReason.EVICTED, 64 * (blocks - found)), (MissReason.PARTIAL_BLOCK, 7)]
    match = Match([b"k"] * blocks, found, 64 * found, ((HitTier.NVME, found),), Account.of(parts), None, "")
    ends, last = [draw.random() < 0.4 for _ in range(blocks)], draw.randint(0, blocks)
    cut = states.cut(match, ends, last)
    right = [end for end in range(1, min(found, last) + 1) if ends[end - 1]]
    assert cut.blocks == max(right, default=0) and cut.tokens == cut.account.hit_tokens == 64 * cut.blocks
    assert cut.account.asked == match.account.asked
    assert cut.account.misses.get(MissReason.NO_STATE, 0) == 64 * (found - cut.blocks)


def test_each_key_is_answered_by_itself(opened: tuple[EmbeddedStore, Any]) -> None:
    """Also behind more keys than are looked up in one go, twice, or beside a key that no block can have."""
    model = Model.of(opened[1])
    keys = model.put([2])
    asked = [*(number.to_bytes(32, "big") for number in range(5000)), *keys, b"short", keys[1]]
    assert model.states.handle.which(asked) == [key == keys[1] for key in asked]


def test_no_look_up_of_states_holds_up_other_requests() -> None:
    """A message may name 65,536 of them, none of which need be stored: it is answered beside the store's lock."""
    a = bench()
    model, answers = Model.of(a), list[list[bool]]()
    keys = model.put([2])
    with a.store.lock:
        asking = threading.Thread(target=lambda: answers.append(model.states.handle.which(keys)), daemon=True)
        asking.start()
        asking.join(10)
        assert answers == [[False, True, False, False]]


def test_no_tenant_is_told_of_anothers_states() -> None:
    """Nor is a namespace told of one that was opened before it: the key alone says nothing."""
    a = bench()
    mine, theirs = Model.of(a), Model.of(a, keys=TenantKeys.derive(b"o" * 32))
    keys = mine.put([1, 2, 3, 4])
    assert mine.states.handle.which(keys) == [True] * 4 == mine.kv.which(keys)
    assert theirs.states.handle.which(keys) == [False] * 4 == theirs.kv.which(keys)
    other = a.namespace(STATE, model="other")
    assert other.which(keys) == [False] * 4


def test_states_and_kv_are_evicted_apart() -> None:
    a = bench()
    model = Model.of(a)
    keys = model.put([1, 2, 3, 4])
    a.clock.advance(10)
    model.kv.lease(model.kv.match(PROMPT)).release()
    a.store.evict(4)
    match = model.kv.match(PROMPT)
    cut = model.states.cut(match, model.states.ends(model.kv.hashed(PROMPT)), 4)
    assert match.blocks == 4 and cut.blocks == 0 and cut.account.misses[MissReason.NO_STATE] == 256
    assert [model.read(key, 0) for key in keys] == [MissReason.EVICTED] * 4
    a.clock.advance(10)
    for block, key in enumerate(keys, 1):
        model.states.handle.put(model.states.prompt_of(key), state(block))
    a.store.evict(4)
    assert model.kv.match(PROMPT).blocks == 0
    assert [model.read(key, block) for block, key in enumerate(keys, 1)] == [None] * 4
    a.store.check()


def test_a_state_is_no_other_namespace_of_its_prompt(tmp_path: Path) -> None:
    """KV that was never stored is absent, whatever states there are; and the other way about."""
    with open_at(tmp_path, dram="1MiB") as store:
        model = Model.of(store)
        first, second = (model.kv.hashed(ids(64, start)).keys[0] for start in (0, 5000))
        model.states.handle.put(model.states.prompt_of(first), state(1))
        assert model.kv.match(ids(64)).reason is MissReason.ABSENT
        model.kv.put(ids(64, 5000), random_pages(small_layout(), 1))
        assert model.read(second, 1) is MissReason.ABSENT


def test_a_damaged_state_is_a_miss() -> None:
    a = bench()
    model = Model.of(a)
    keys = model.put([2, 3])
    with model.states.handle.lease(model.states.match_of(keys[1])) as lease:
        a.store.spans(lease.reply.places[0])[0].view[HEADER_BYTES + 1700] ^= 4
    assert model.read(keys[1], 2) is MissReason.CORRUPT
    assert model.states.handle.which(keys) == [False, False, True, False]
    assert model.read(keys[2], 3) is None


def test_states_are_there_after_a_restart_from_nvme(tmp_path: Path) -> None:
    sizes = {"dram": "1MiB", "nvme": "16MiB"}
    with kvstore.open(f"embedded:{tmp_path}", **sizes) as store:
        keys = Model.of(store).put([2, 4], durability="disk")
    with kvstore.open(f"embedded:{tmp_path}", **sizes) as store:
        model = Model.of(store)
        wait_until(lambda: model.states.handle.which(keys) == [False, True, False, True])
        assert [model.read(keys[block - 1], block) for block in (2, 4)] == [None, None]
        store.check()


def test_what_was_there_and_goes_meanwhile_is_a_miss_and_never_another_state(tmp_path: Path) -> None:
    """`which` beside puts and evictions: the lease decides, and each state that comes is the right one."""
    with open_at(tmp_path, dram="1MiB") as store:
        model = Model.of(store)
        keys = [number.to_bytes(2, "big") * 16 for number in range(200)]
        over = threading.Event()

        def others() -> None:
            draw = random.Random(1)
            while not over.is_set():
                number = draw.randrange(len(keys))
                model.states.handle.put(model.states.prompt_of(keys[number]), state(number))
                if draw.random() < 0.2:
                    store.evict(draw.randrange(4))

        thread = threading.Thread(target=others)
        thread.start()
        came: dict[MissReason | None, int] = {}
        try:
            while thread.is_alive() and came.get(None, 0) < 500:
                for number, there in enumerate(model.states.handle.which(keys)):
                    if there:
                        reason = model.read(keys[number], number)
                        came[reason] = came.get(reason, 0) + 1
        finally:
            over.set()
            thread.join(20)
        assert came.get(None, 0) >= 500 and came.keys() <= {None, MissReason.EVICTED, MissReason.IN_FLIGHT}
        store.check()
