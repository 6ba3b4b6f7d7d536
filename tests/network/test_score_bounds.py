"""What a router's question asks of the directory: nothing where there is no time or no need, and never for longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")

from kvstore.block.account import HeldElsewhere, HitTier, Holder
from kvstore.block.identity import PrefixHasher
from kvstore.edge.tokens import Caller
from kvstore.edge.watch import StatusWatch
from kvstore.network.links import CallTime, OpenSpace, TenantLink
from kvstore.network.services import (
    ELSEWHERE_SECONDS,
    MOST_NODES,
    DoorCall,
    Scorer,
    ScoreService,
)
from kvstore.protocol.messages import MatchReply
from kvstore.wire import score_pb2, store_pb2
from waiting import FakeClock

OWN, OTHER = "0" * 32, "f" * 32
SPACE = OpenSpace(cast(Any, None), "ab" * 32, 1, 64, PrefixHasher(bytes(32), 64))
KEYS = [index.to_bytes(32, "big") for index in range(20)]


class OwnBlocks:
    """A tenant's link to a node that has so many blocks of any prompt."""

    tenant = "team"

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def again(self, work: Callable[[], Any]) -> Any:
        return work()

    def node(self, time: CallTime) -> str:
        return OWN

    def space(self, wanted: str, time: CallTime) -> OpenSpace:
        return SPACE

    def match(self, space: OpenSpace, keys: Sequence[bytes], time: CallTime) -> MatchReply:
        blocks = min(self._blocks, len(keys))
        return MatchReply(blocks, tiers=((HitTier.DRAM, blocks),) if blocks else ())


class OneRate:
    def load_rates(self, tenant: str, namespace: str) -> Mapping[str, float]:
        return {"dram": 640.0}


class Elsewhere:
    """`Others`: says the same of every prompt."""

    def __init__(self, holding: dict[str, tuple[int, str]], left_out: str = "") -> None:
        tiers = {str(tier): tier for tier in HitTier}
        holders = [Holder(bytes.fromhex(node), bytes(8), *of, tiers[tier]) for node, (*of, tier) in holding.items()]
        self.answer = HeldElsewhere(holders, left_out)
        self.asked: list[tuple[str, str, int, float, bool]] = []

    def holding(
        self, tenant: str, namespace: str, keys: Sequence[bytes], seconds: float, *, are_own: bool
    ) -> HeldElsewhere:
        self.asked.append((tenant, namespace, len(keys), seconds, are_own))
        return self.answer


def scored(others: Elsewhere | None, seconds: float = 1.0, nodes: Sequence[str] = ()) -> Any:
    clock = FakeClock()
    time = CallTime(clock, clock.monotonic_seconds() + seconds)
    call = DoorCall(Caller("team"), time, cast(TenantLink, OwnBlocks(3)))
    prompt = store_pb2.Prompt(keys=b"".join(KEYS))
    watch = cast(StatusWatch, OneRate())
    service = ScoreService(Scorer(watch, others.holding if others is not None else None), watch)
    return service.Score(score_pb2.ScoreRequest(namespace="ab", prompt=prompt, nodes=nodes), call)


def test_the_directory_has_one_deadline_and_is_told_whose_keys_they_are() -> None:
    others = Elsewhere({OTHER: (16, "nvme")}, "some reason")
    answer = scored(others)
    assert others.asked == [("team", SPACE.id, len(KEYS), ELSEWHERE_SECONDS, False)]
    assert [(one.node, dict(one.hit_tokens)) for one in answer.nodes] == [
        (OTHER, {"nvme": 16 * 64}), (OWN, {"dram": 3 * 64}),
    ]  # fmt: skip
    assert not answer.nodes[0].HasField("load_seconds"), "how fast NVMe is here is not known"
    assert answer.nodes[1].load_seconds == 3 * 64 / 640
    assert (answer.is_partial, answer.partial_detail) == (True, "some reason")


@pytest.mark.parametrize("seconds", [1.9 * ELSEWHERE_SECONDS, ELSEWHERE_SECONDS / 2])
def test_a_call_with_little_time_left_does_not_ask_it(seconds: float) -> None:
    """Three look-ups that are cut short would stop all tenants from asking."""
    others = Elsewhere({OTHER: (16, "dram")})
    answer = scored(others, seconds)
    assert not others.asked and answer.is_partial and "deadline" in answer.partial_detail
    assert [one.node for one in answer.nodes] == [OWN]


@pytest.mark.parametrize(("nodes", "is_partial"), [([], False), ([OWN], False), ([OTHER], True), ([OWN, OTHER], True)])
def test_where_no_other_node_is_known_only_a_question_that_names_one_is_partial(
    nodes: list[str], is_partial: bool
) -> None:
    answer = scored(None, nodes=nodes)
    assert (answer.is_partial, bool(answer.partial_detail)) == (is_partial, is_partial)
    assert {one.node: dict(one.hit_tokens) for one in answer.nodes}.get(OWN, {}) in ({}, {"dram": 192})


def test_a_prompt_is_scored_for_so_many_nodes_and_for_the_asked_one() -> None:
    many = {f"{number:032x}": (16 * number, "dram") for number in range(1, 2 * MOST_NODES)}
    clock = FakeClock()
    call = DoorCall(Caller("team"), CallTime(clock, clock.monotonic_seconds() + 1), cast(TenantLink, OwnBlocks(0)))
    scorer = Scorer(cast(StatusWatch, OneRate()), Elsewhere(many).holding)
    found = scorer.of(call, SPACE, list(KEYS), False, [])
    assert list(found.nodes) == [f"{number:032x}" for number in range(2 * MOST_NODES - 1, MOST_NODES - 1, -1)] + [OWN]
    named = scorer.of(call, SPACE, list(KEYS), False, [OTHER, f"{3:032x}"])
    assert {node: its.matched for node, its in named.nodes.items()} == {f"{3:032x}": 3 * 16 * 64}
