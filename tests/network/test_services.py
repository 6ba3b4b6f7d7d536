"""Store, Score, Admin and health through a real network process, beside a real sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.block.identity import ExtraKey
from kvstore.client.handle import NamespaceHandle
from kvstore.protocol import messages as m
from kvstore.protocol.told import RequestTold
from kvstore.status.tree import SidecarStatus
from kvstore.wire import admin_pb2, score_pb2, store_pb2
from network.running import RunningNetwork, beside, grpc, network, refused, token_file
from service.sidecar import Sidecar
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
BLOCKS = 10


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("sidecar"), nvme="16MiB", indexes=LmdbMaker) as running:
        yield running


@pytest.fixture(scope="module")
def handle(sidecar: Sidecar) -> Iterator[NamespaceHandle]:
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")
        assert handle.put(ids(640), random_pages(LAYOUT, BLOCKS)).stored == BLOCKS
        yield handle


@pytest.fixture(scope="module")
def running(
    sidecar: Sidecar, handle: NamespaceHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningNetwork]:
    tokens = token_file(tmp_path_factory.mktemp("tokens"))
    with network(*beside(sidecar.path.parent, tokens)) as process:
        yield process


def own_id(sidecar: Sidecar) -> str:
    return sidecar.admin.facts().namespaces[0].digest


def test_a_match_by_tokens_and_by_keys_is_what_the_local_door_says(
    running: RunningNetwork, sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    caller, space = running.of_tenant(), own_id(sidecar)
    longer = ids(700)
    found = caller.match(space, token_ids=longer)
    assert (found.blocks, found.reason, [(one.tier, one.blocks) for one in found.tiers]) == (10, "", [("dram", 10)])
    other = [*ids(320), *ids(320, 5_000)]
    local = handle.match(other)
    found = caller.match(space[:8], token_ids=other)
    assert (found.blocks, found.reason) == (local.blocks, str(local.reason)) == (5, "diverged")
    by_keys = caller.match(space, keys=b"".join(handle.hashed(other).keys))
    assert by_keys == found
    salted = caller.match(space, token_ids=longer, extra_keys=[store_pb2.ExtraKey(value=b"x", first_token=0)])
    assert salted.blocks == 0 and handle.hashed(ids(640), [ExtraKey(b"x")]).keys != handle.hashed(ids(640)).keys
    assert caller.match(space) == store_pb2.MatchResponse()


def test_what_cannot_be_right_is_named(running: RunningNetwork, sidecar: Sidecar) -> None:
    caller, space = running.of_tenant(), own_id(sidecar)
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for prompt, words in (
        ({"keys": b"x" * 33}, "33 bytes of keys"),
        ({"keys": b"x" * 32, "token_ids": [1]}, "give the keys alone"),
        ({"extra_keys": [store_pb2.ExtraKey(value=b"x")]}, "without token_ids"),
        ({"token_ids": [1] * 64, "extra_keys": [store_pb2.ExtraKey(value=b"x" * 4097)]}, "4096"),
        ({"token_ids": [1] * 64, "extra_keys": [store_pb2.ExtraKey(value=b"x")] * 1025}, "1025 extra keys"),
        ({"keys": b"x" * 32 * ((1 << 16) + 1)}, "at most 65536"),
    ):
        code, text = refused(caller.match, space, **prompt)
        assert code is invalid and words in text, text
    for wanted in ("", "zz", "f" * 129, space + "0"):
        code, text = refused(caller.match, wanted, token_ids=[1] * 64)
        assert code is invalid and "namespace" in text
    for message in (score_pb2.ScoreRequest(), score_pb2.ScoreRequest(model="other"),
                    score_pb2.ScoreRequest(namespace=space, nodes=["x"])):  # fmt: skip
        assert refused(caller.ask, caller.score.Score, message)[0] is invalid


def test_namespaces_are_listed_as_they_are(running: RunningNetwork, sidecar: Sidecar, handle: NamespaceHandle) -> None:
    (one,) = running.of_tenant().namespaces()
    fact = sidecar.admin.facts().namespaces[0]
    assert (one.id, one.model, one.codec, one.layout, one.block_tokens, one.blocks) == (
        fact.digest, fact.model, fact.codec, fact.layout, fact.block_tokens, BLOCKS,
    )  # fmt: skip
    assert list(one.payload_bytes) == [8192]


def test_score_counts_nothing_and_knows_tiers_and_time(
    running: RunningNetwork, sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    caller, space = running.of_tenant(), own_id(sidecar)
    before = sidecar.admin.facts()
    node = before.node
    assert len(node) == 32 and node != before.run
    for given in ({"namespace": space}, {"model": MODEL}, {"model": "small model"}):
        request = score_pb2.ScoreRequest(prompt=store_pb2.Prompt(token_ids=ids(700)), **given)
        answer = caller.ask(caller.score.Score, request)
        assert (answer.namespace, answer.block_tokens, answer.asked_tokens) == (space, 64, 640)
        (one,) = answer.nodes
        assert (one.node, dict(one.hit_tokens), one.HasField("load_seconds")) == (node, {"dram": 640}, False)
    other = "0" * 32
    request = score_pb2.ScoreRequest(
        namespace=space, prompt=store_pb2.Prompt(token_ids=ids(640)), nodes=[other, node, other]
    )
    answer = caller.ask(caller.score.Score, request)
    assert [(one.node, dict(one.hit_tokens)) for one in answer.nodes] == [
        (other, {}),
        (node, {"dram": 640}),
        (other, {}),
    ]
    nothing = caller.ask(caller.score.Score, score_pb2.ScoreRequest(namespace=space))
    assert not nothing.nodes and not nothing.asked_tokens
    after = sidecar.admin.facts()
    assert (after.looked, after.leases, after.pinned_bytes) == (before.looked, before.leases, before.pinned_bytes)
    assert after.namespaces[0].looked == before.namespaces[0].looked


def test_engines_loads_say_how_long_one_takes(
    running: RunningNetwork, sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    with handle.lease(handle.match(ids(640)), request="cmpl-1"):
        pass
    told = RequestTold("cmpl-1", 700, {"dram": 640}, {"partial_block": 60}, load_ms=64.0)
    handle.door.submit(m.Tell([told]), m.Done, 1.0)
    wait_until(lambda: bool(sidecar.admin.facts().namespaces[0].load_tokens_per_second))
    assert sidecar.admin.facts().namespaces[0].load_tokens_per_second == {"dram": 10_000.0}
    caller = running.of_tenant()
    request = score_pb2.ScoreRequest(namespace=own_id(sidecar), prompt=store_pb2.Prompt(token_ids=ids(320)))

    def expected() -> float:
        return float(caller.ask(caller.score.Score, request).nodes[0].load_seconds)

    wait_until(lambda: expected() > 0)
    assert expected() == pytest.approx(0.032)


def test_warm_and_drop_do_what_the_command_line_does(
    running: RunningNetwork, sidecar: Sidecar, handle: NamespaceHandle
) -> None:
    caller = running.of_tenant()
    with sidecar.client() as store:
        other = store.namespace(model="another", layout=LAYOUT)
        assert other.put(ids(640), random_pages(LAYOUT, BLOCKS), durability="disk").stored == BLOCKS
        (space,) = [one for one in sidecar.admin.facts().namespaces if one.model == "another"]
        wait_until(lambda: len(caller.namespaces()) == 2)
        prompts = [store_pb2.Prompt(token_ids=ids(640)), store_pb2.Prompt(token_ids=ids(128, 9_000))]
        before = sidecar.admin.facts().looked
        warmed = caller.ask(caller.store.Warm, store_pb2.WarmRequest(namespace=space.digest, prompts=prompts))
        assert (warmed.namespace, warmed.prompts, warmed.asked) == (space.digest, 2, 12)
        assert warmed.warm + warmed.promoted == 10 and dict(warmed.absent) == {"absent": 2} and not warmed.left
        assert sidecar.admin.facts().looked == before and not sidecar.admin.facts().leases
        many = [store_pb2.Prompt(keys=b"k" * 32 * 40_000)] * 2
        request = store_pb2.WarmRequest(namespace=space.digest, prompts=many)
        assert refused(caller.ask, caller.store.Warm, request)[0] is grpc.StatusCode.INVALID_ARGUMENT
        for seconds in (-1.0, 3601.0, float("nan")):
            request = store_pb2.DropRequest(namespace=space.digest, seconds=seconds)
            code, _ = refused(caller.ask, caller.store.Drop, request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert caller.ask(caller.store.Drop, store_pb2.DropRequest(namespace=space.digest)).blocks == 10
        assert caller.match(space.digest, token_ids=ids(640)).blocks == 0
        assert other.put(ids(640), random_pages(LAYOUT, BLOCKS)).stored == BLOCKS
        operator = running.operator()
        request = admin_pb2.DropAnyRequest(id=space.digest, tenant="default")
        assert operator.ask(operator.admin.DropAny, request).blocks == 10
        request = admin_pb2.DropAnyRequest(id="zz")
        assert refused(operator.ask, operator.admin.DropAny, request)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_the_operator_sees_all_and_a_tenant_does_not(running: RunningNetwork, sidecar: Sidecar) -> None:
    operator, tenant = running.operator(), running.of_tenant()
    facts = sidecar.admin.facts()

    def stat() -> admin_pb2.StatResponse:
        return operator.ask(operator.admin.Stat, admin_pb2.StatRequest())

    slots = facts.tiers[0].slots
    wait_until(lambda: stat().facts.tiers[0].slots["used"] == slots["used"])  # observers' answers may be older
    answer = stat()
    typed, told = answer.facts, msgspec.json.decode(answer.json, type=SidecarStatus)
    assert (typed.run, typed.blocks, typed.state, answer.version) == (facts.run, facts.blocks, "ready", 1)
    assert (told.run, told.policy, told.nvme_writes) == (facts.run, facts.policy, facts.nvme_writes)
    assert [one.digest for one in told.namespaces] == [one.digest for one in facts.namespaces]
    assert told.looked.asked_tokens == facts.looked.asked_tokens
    health = operator.ask(operator.admin.Health, admin_pb2.HealthRequest())
    assert health.alive and health.ready and health.state == "ready" and not health.reasons
    denied = grpc.StatusCode.PERMISSION_DENIED
    for call in (
        lambda: tenant.ask(tenant.admin.Stat, admin_pb2.StatRequest()),
        lambda: tenant.ask(tenant.admin.DropAny, admin_pb2.DropAnyRequest(id="0")),
        lambda: operator.namespaces(),
        lambda: operator.ask(operator.score.Score, score_pb2.ScoreRequest()),
    ):
        assert refused(call)[0] is denied
    assert not hasattr(operator.admin, "Purge")


def test_health_needs_no_credential_and_follows_the_sidecar(running: RunningNetwork) -> None:
    anybody = running.caller(None)
    for service in ("", "kvstore.v1.Store", "kvstore.v1.Admin", "kvstore.v1.Score"):
        wait_until(lambda service=service: anybody.is_serving(service))
    assert refused(anybody.is_serving, "kvstore.v1.Peer")[0] is grpc.StatusCode.NOT_FOUND


def test_a_late_question_of_an_operator_says_nothing_of_the_sidecar(running: RunningNetwork) -> None:
    operator, anybody = running.operator(), running.caller(None)
    wait_until(anybody.is_serving)
    for _ in range(50):
        try:
            operator.ask(operator.admin.Stat, admin_pb2.StatRequest(), timeout=0.002)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert anybody.is_serving()


def test_a_page_behind_the_last_one_is_empty(running: RunningNetwork) -> None:
    caller = running.of_tenant()
    answer = caller.ask(caller.store.Namespaces, store_pb2.NamespacesRequest(first=(1 << 32) - 1))
    assert not answer.namespaces and not answer.next


def test_a_sidecar_that_begins_again_is_found_again(tmp_path: Path) -> None:
    flags = beside(tmp_path, token_file(tmp_path))
    with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
        store.namespace(model=MODEL, layout=LAYOUT).put(ids(640), random_pages(LAYOUT, BLOCKS))
    with network(*flags) as running:
        caller, anybody = running.of_tenant(), running.caller(None)
        code, text = refused(caller.namespaces)
        assert code is grpc.StatusCode.UNAVAILABLE and "sidecar" in text and str(tmp_path) not in text
        assert not anybody.is_serving()
        nodes, runs = set(), set()
        for _ in range(2):
            with Sidecar(tmp_path) as sidecar, sidecar.client() as store:
                handle = store.namespace(model=MODEL, layout=LAYOUT)
                handle.put(ids(640), random_pages(LAYOUT, BLOCKS))
                wait_until(anybody.is_serving)
                space = own_id(sidecar)
                assert caller.match(space, token_ids=ids(640)).blocks == BLOCKS
                request = score_pb2.ScoreRequest(namespace=space, prompt=store_pb2.Prompt(token_ids=ids(640)))
                nodes |= {one.node for one in caller.ask(caller.score.Score, request).nodes}
                runs.add(sidecar.admin.facts().run)
            assert refused(caller.match, space, token_ids=ids(640))[0] is grpc.StatusCode.UNAVAILABLE
            wait_until(lambda: not anybody.is_serving())
        assert (len(nodes), len(runs)) == (1, 2)
