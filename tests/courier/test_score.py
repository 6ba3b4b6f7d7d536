"""A router asks one node of a pool where a prompt is: each node's blocks and tier, of the caller's tenant alone, and in
a few milliseconds whatever the directory does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra: server)")
pytest.importorskip("valkey", reason="valkey is not installed (extra: test)")

from courier.nodes import BLOCK_TOKENS, LAYOUT, SOON, Node, ending, pool, prompt, wait_for_peers
from kvstore.wire import score_pb2, store_pb2
from network.running import Stubs, beside, grpc, network, token_of
from programs import fetched
from valkey_server import ValkeyServer, server_of_module
from waiting import wait_until
from workbench import MODEL

TENANTS = ("default", "second")
BLOCKS = 40
HINTED = 32
"""Of those, as whole chunks."""
QUICK_SECONDS = 1.0
"""For an answer on a busy machine that waits for no directory."""

directory = server_of_module


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, directory: ValkeyServer) -> Iterator[list[Node]]:
    network = {"directory": f"valkey+unix:{directory.socket_path}", "http": "127.0.0.1:0"}
    with pool(tmp_path_factory.mktemp("pool"), 3, network, tenants=("second",)) as nodes, ExitStack() as stack:
        for one in nodes:  # each tenant has the namespace on each node
            for tenant in TENANTS:
                stack.enter_context(one.open(tenant)).namespace(model=MODEL, layout=LAYOUT)
        wait_for_peers(nodes, 2)
        yield nodes


def ids_of(nodes: list[Node]) -> list[str]:
    return [one.stat()["node"] for one in nodes]


def ask(
    node: Node, timeout: float = SOON, tenant: str = "default", nodes: list[str] | None = None, **given: Any
) -> Any:
    caller = Stubs(node.address, token_of(tenant))
    try:
        request = score_pb2.ScoreRequest(model=MODEL, prompt=store_pb2.Prompt(**given), nodes=nodes or ())
        return caller.ask(caller.score.Score, request, timeout)
    finally:
        caller.close()


def query(node: Node, body: dict[str, Any], path: str = "/query", tenant: str = "default") -> dict[str, Any]:
    """The same over HTTP; what it says of each node."""
    data = json.dumps({"model": MODEL, **body}).encode()
    _, text = fetched(node.said["network"]["http_port"], path, data, token_of(tenant))
    found = json.loads(text)
    assert list(found) == [tenant]
    return dict(found[tenant])


def whole_query(node: Node, body: dict[str, Any], path: str) -> dict[str, Any]:
    """Asked until the directory answered in time."""
    found: list[dict[str, Any]] = []

    def is_whole() -> bool:
        found.append(query(node, body, path))
        return not any(its["partial_detail"] for its in found[-1].values())

    wait_until(is_whole)
    return found[-1]


def told(answer: Any) -> list[tuple[str, dict[str, int]]]:
    return [(one.node, dict(one.hit_tokens)) for one in answer.nodes]


def wait_for_score(node: Node, wanted: list[tuple[str, dict[str, int]]], **given: Any) -> Any:
    """Until it says that, of all nodes: hints are told a moment after a block is stored."""

    def found() -> Any:
        answer = ask(node, **given)
        return answer if not answer.is_partial and told(answer) == wanted else None

    return wait_until(found)


def keys_of(node: Node, number: int, tenant: str = "default") -> bytes:
    with node.open(tenant) as store:
        return b"".join(store.namespace(model=MODEL, layout=LAYOUT).hashed(prompt(number, BLOCKS)).keys)


def test_each_node_is_scored_by_what_it_has(three: list[Node]) -> None:
    three[0].put(1, BLOCKS)
    three[1].put(1, 24)
    first, second, third = ids_of(three)
    of_first = (first, {"dram": HINTED * BLOCK_TOKENS})
    of_second = (second, {"dram": 16 * BLOCK_TOKENS})
    answer = wait_for_score(three[2], [of_first, of_second], token_ids=prompt(1, BLOCKS))
    assert answer.asked_tokens == BLOCKS * BLOCK_TOKENS and not answer.partial_detail
    assert not any(one.HasField("load_seconds") for one in answer.nodes)
    wait_for_score(three[2], [of_first, of_second], keys=keys_of(three[2], 1))
    three[2].put(1, BLOCKS)
    of_third = (third, {"dram": BLOCKS * BLOCK_TOKENS})
    wait_for_score(three[2], [of_third, of_first, of_second], token_ids=prompt(1, BLOCKS))
    unknown = "f" * 32
    named = [second, unknown, third, first]
    wanted = [of_second, (unknown, {}), of_third, of_first]
    wait_for_score(three[2], wanted, token_ids=prompt(1, BLOCKS), nodes=named)
    alone = ask(three[2], token_ids=prompt(1, BLOCKS), nodes=[third])
    assert told(alone) == [of_third] and not alone.is_partial, "the directory is not asked for this node"


def test_over_http_each_node_is_told_too(three: list[Node]) -> None:
    number = 5
    three[0].put(number, BLOCKS)
    three[2].put(number, 24)
    first, _, third = ids_of(three)
    of_first, of_third = (first, {"dram": HINTED * BLOCK_TOKENS}), (third, {"dram": 24 * BLOCK_TOKENS})
    wait_for_score(three[2], [of_first, of_third], token_ids=prompt(number, BLOCKS))
    by_ids = {"token_ids": prompt(number, BLOCKS)}
    keys = keys_of(three[2], number)
    by_hash = {"block_hashes": [keys[at : at + 32].hex() for at in range(0, len(keys), 32)]}
    for asked, path in ((by_ids, "/query"), (by_hash, "/query_by_hash")):
        found = whole_query(three[2], asked, path)
        matched = {node: (its["longest_matched"], its["CPU"], its["is_asked"]) for node, its in found.items()}
        assert matched == {
            first: (HINTED * BLOCK_TOKENS, HINTED * BLOCK_TOKENS, False),
            third: (24 * BLOCK_TOKENS, 24 * BLOCK_TOKENS, True),
        }
    wait_until(lambda: list(query(three[2], {**by_ids, "instance_id": first})) == [first])
    for asked, path in ((by_ids, "/query"), (by_hash, "/query_by_hash")):
        of_second = query(three[2], asked, path, "second")
        assert {node: its["longest_matched"] for node, its in of_second.items()} == {third: 0}


def test_a_prompt_that_no_node_has_is_scored_for_none(three: list[Node]) -> None:
    wait_for_score(three[0], [], token_ids=prompt(2, BLOCKS))
    three[1].put(2, 7)  # less than a chunk: there are no hints of it
    wait_for_score(three[0], [], token_ids=prompt(2, 7))


@pytest.mark.parametrize("given", ["token_ids", "keys"])
def test_a_tenant_is_told_of_its_own_blocks_alone(three: list[Node], given: str) -> None:
    """Also one that has another one's prefix keys: its answer is that of a prompt that no node has."""
    number = 10 + ["token_ids", "keys"].index(given)
    three[0].put(number, BLOCKS)
    first = ids_of(three)[0]
    asked: dict[str, Any] = {"token_ids": prompt(number, BLOCKS)}
    if given == "keys":
        asked = {"keys": keys_of(three[0], number)}
    wait_for_score(three[2], [(first, {"dram": HINTED * BLOCK_TOKENS})], **asked)
    for _ in range(20):
        answer = ask(three[2], tenant="second", **asked)
        assert told(answer) == []
    wait_for_score(three[2], [], tenant="second", **asked)
    three[1].put(number, 16, tenant="second")
    second = ids_of(three)[1]
    own = asked if given == "token_ids" else {"keys": keys_of(three[1], number, "second")}
    wait_for_score(three[2], [(second, {"dram": 16 * BLOCK_TOKENS})], tenant="second", **own)
    wait_for_score(three[2], [(first, {"dram": HINTED * BLOCK_TOKENS})], **asked)


def directory_told(node: Node) -> list[dict[str, Any]]:
    """As each tenant's courier tells it."""
    return [one for one in node.stat()["elsewhere"]["sources"] if one["kind"] == "directory"]


def directory_states(node: Node, look_up: Callable[[], object]) -> list[tuple[str, int]]:
    """As it is told now. The courier tells its figures all at once, now and then: what is told after a look-up that
    began when an earlier one had been told has everything before these two."""
    for _ in range(2):
        before = min(one["lookups"] for one in directory_told(node))
        look_up()
        wait_until(lambda before=before: min(one["lookups"] for one in directory_told(node)) > before)  # type: ignore[misc]
    return [(one["state"], one["failures"]) for one in directory_told(node)]


def test_calls_without_time_do_not_spoil_the_directory_for_others(three: list[Node]) -> None:
    three[0].put(20, BLOCKS)
    wait_for_score(three[2], [(ids_of(three)[0], {"dram": HINTED * BLOCK_TOKENS})], token_ids=prompt(20, BLOCKS))
    caller = Stubs(three[2].address, token_of("default"))
    request = score_pb2.ScoreRequest(model=MODEL, prompt=store_pb2.Prompt(token_ids=prompt(20, BLOCKS)))
    before = directory_states(three[2], lambda: caller.ask(caller.score.Score, request, SOON))
    assert before and all(state == "up" for state, _ in before)
    late = 0
    for at in range(200):
        try:
            answer = caller.ask(caller.score.Score, request, SOON if not at else 0.001 + 0.006 * (at % 20) / 20)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            late += 1
            continue
        assert answer.is_partial is (at > 0)
    print("calls without an answer", late)
    assert directory_states(three[2], lambda: caller.ask(caller.score.Score, request, SOON)) == before
    caller.close()


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_without_a_directory_the_own_node_is_scored_and_the_answer_says_that_it_is_partial(
    three: list[Node], directory: ValkeyServer, way: str
) -> None:
    number = 30 + ["killed", "stopped"].index(way)
    three[0].put(number, BLOCKS)
    three[2].put(number, 24)
    first, _, third = ids_of(three)
    of_third, of_first = (third, {"dram": 24 * BLOCK_TOKENS}), (first, {"dram": HINTED * BLOCK_TOKENS})
    wait_for_score(three[2], [of_first, of_third], token_ids=prompt(number, BLOCKS))
    (directory.kill if way == "killed" else directory.stop)()
    try:
        for given in ({}, {"nodes": [third, first]}):
            began_at = time.monotonic()
            answer = ask(three[2], token_ids=prompt(number, BLOCKS), **given)
            assert time.monotonic() - began_at < QUICK_SECONDS
            assert answer.is_partial and "directory" in answer.partial_detail
            assert str(directory.port) not in answer.partial_detail, "where it is does not concern a tenant"
            assert told(answer) == [of_third, *([(first, {})] if given else [])]
        alone = ask(three[2], token_ids=prompt(number, BLOCKS), nodes=[third])
        assert told(alone) == [of_third] and not alone.is_partial
    finally:
        (directory.start if way == "killed" else directory.go_on)()
    wait_for_score(three[2], [of_first, of_third], token_ids=prompt(number, BLOCKS))


def test_where_other_nodes_are_not_known_only_a_question_that_names_some_is_partial(tmp_path: Path) -> None:
    alone = Node(tmp_path / "alone", None, {}, {})
    with ending(alone):
        alone.start_sidecar()
        alone.put(1, BLOCKS)
        with network(*beside(alone.folder / "kv", alone.tokens, alone.address)):
            of_own = (alone.stat()["node"], {"dram": BLOCKS * BLOCK_TOKENS})
            answer = ask(alone, token_ids=prompt(1, BLOCKS))
            assert told(answer) == [of_own] and not answer.is_partial and not answer.partial_detail
            assert alone.stat()["elsewhere"] is None
            answer = ask(alone, token_ids=prompt(1, BLOCKS), nodes=["0" * 32, of_own[0]])
            assert told(answer) == [("0" * 32, {}), of_own] and answer.is_partial and answer.partial_detail
