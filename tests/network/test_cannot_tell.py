"""Tenants cannot tell what others have: absent and foreign are the same in answer and in time, whatever is asked.

Three tenants of one sidecar put, drop and ask the same prompts through gRPC and HTTP, beside an oracle that is a table.
Pairs of probes, one for a prompt that a neighbour has and one for a prompt that no tenant has, are told apart no better
than by chance.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client.handle import NamespaceHandle
from kvstore.wire import score_pb2, store_pb2
from network.running import RunningNetwork, Stubs, beside, grpc, network, refused, token_file, token_of
from programs import fetched
from service.sidecar import patient
from service.test_serve import serving
from waiting import wait_until
from workbench import MODEL, ids, random_pages, small_layout

LAYOUT = small_layout()
TENANTS = ("default", "second", "third")
PROMPTS, BLOCKS = 24, 4
PAIRS, MOST_PAIRS = 400, 2000
LARGEST_AUC = 0.55


@dataclass
class Place:
    """A sidecar of three tenants, an engine of each, and a network process."""

    sockets: dict[str, Path]
    running: RunningNetwork
    handles: dict[str, NamespaceHandle]
    spaces: dict[str, str]
    callers: dict[str, Stubs]

    def query(self, tenant: str, prompt: Sequence[int]) -> int:
        data = json.dumps({"model": MODEL, "token_ids": list(prompt)}).encode()
        assert self.running.http_port is not None
        _, text = fetched(self.running.http_port, "/query", data, token_of(tenant))
        (found,) = json.loads(text)[tenant].values()
        return int(found["longest_matched"])

    def score(self, tenant: str, prompt: Sequence[int]) -> int:
        caller = self.callers[tenant]
        request = score_pb2.ScoreRequest(model=MODEL, prompt=store_pb2.Prompt(token_ids=prompt))
        nodes = caller.ask(caller.score.Score, request).nodes
        return sum(sum(one.hit_tokens.values()) for one in nodes)

    def match(self, tenant: str, prompt: Sequence[int]) -> int:
        return int(self.callers[tenant].match(self.spaces[tenant], token_ids=prompt).blocks) * 64


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tenants")
    config = folder / "c.toml"
    sockets = {name: folder / f"{name}.sock" for name in TENANTS}
    config.write_text(
        f"[door]\nsocket = '{sockets['default']}'\n"
        + "".join(f"[tenants.{name}]\nsocket = '{sockets[name]}'\n" for name in TENANTS[1:])
        + f"[observe]\nsocket = '{folder / 'observe.sock'}'\n"
    )
    with ExitStack() as stack:
        stack.enter_context(serving(folder, "--config", str(config), "--nvme", "off", "--dram", "64MiB"))
        flags = beside(folder, token_file(folder, TENANTS), **sockets)
        running = stack.enter_context(network(*flags, "--http", "127.0.0.1:0"))
        handles = {}
        for name in TENANTS:
            store = stack.enter_context(patient(kvstore.open(f"unix:{sockets[name]}")))
            handles[name] = store.namespace(model=MODEL, layout=LAYOUT)
        callers = {name: running.of_tenant(name) for name in TENANTS}
        spaces = {name: callers[name].namespaces()[0].id for name in TENANTS}
        yield Place(sockets, running, handles, spaces, callers)


def prompt_of(number: int) -> list[int]:
    return ids(64 * BLOCKS, 1_000_000 * (number + 1))


def operations(place: Place, count: int, seed: int) -> None:
    rng = random.Random(seed)
    held: dict[str, dict[int, int]] = {name: {} for name in TENANTS}
    for name in TENANTS:
        place.callers[name].ask(place.callers[name].store.Drop, store_pb2.DropRequest(namespace=place.spaces[name]))
    for step in range(count):
        tenant, number = rng.choice(TENANTS), rng.randrange(PROMPTS)
        what = rng.choices(("put", "drop", "match", "score", "query"), (30, 1, 40, 15, 14))[0]
        mine, prompt = held[tenant], prompt_of(number)
        if what == "put":
            blocks = rng.randint(1, BLOCKS)
            pages = random_pages(LAYOUT, blocks, seed=number)
            assert place.handles[tenant].put(prompt[: 64 * blocks], pages).reason is None
            mine[number] = max(mine.get(number, 0), blocks)
        elif what == "drop":
            request = store_pb2.DropRequest(namespace=place.spaces[tenant])
            dropped = place.callers[tenant].ask(place.callers[tenant].store.Drop, request).blocks
            assert dropped == sum(mine.values()), (seed, step)
            mine.clear()
        else:
            found = {"match": place.match, "score": place.score, "query": place.query}[what](tenant, prompt)
            assert found == 64 * mine.get(number, 0), (seed, step, tenant, number, what)


@pytest.mark.parametrize("count", [250, pytest.param(5000, marks=pytest.mark.slow)])
def test_three_tenants_find_what_they_put_and_nothing_else(place: Place, count: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    operations(place, count, seed)


def auc(first: list[float], second: list[float]) -> float:
    """How well a threshold on time tells the two apart: .5 by chance, 1 always; whichever way round."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, whose) in enumerate(ranked, 1) if whose)
    area = (ranks - len(second) * (len(second) + 1) / 2) / (len(first) * len(second))
    return max(area, 1 - area)


def probe(place: Place, door: str, pairs: int, seed: int) -> float:
    """The AUC of `second`, who asks for prompts that `default` has and for prompts that no tenant has, in turn."""
    rng, ask = random.Random(seed), getattr(place, door)
    handle, times = place.handles["default"], ([], [])  # type: tuple[list[float], list[float]]
    foreign = [prompt_of(1000 + number) for number in range(40)]
    for number, prompt in enumerate(foreign):
        assert handle.put(prompt, random_pages(LAYOUT, BLOCKS, seed=number)).reason is None
    assert place.match("default", foreign[0]) == 64 * BLOCKS
    for pair in range(pairs + 20):
        both = [(0, foreign[pair % len(foreign)]), (1, prompt_of(2000 + pair % len(foreign)))]
        rng.shuffle(both)
        for whose, prompt in both:
            began = time.perf_counter()
            assert ask("second", prompt) == 0
            if pair >= 20:
                times[whose].append(time.perf_counter() - began)
    return auc(*times)


def chance(pairs: int) -> float:
    """What an AUC of as many pairs that are alike stays below, but for one in many thousands."""
    return 0.5 + 4 * (1 / (6 * pairs)) ** 0.5


@pytest.mark.parametrize("door", ["match", "score", "query"])
@pytest.mark.parametrize("pairs", [PAIRS, pytest.param(MOST_PAIRS, marks=pytest.mark.slow)])
def test_a_neighbours_prompt_takes_as_long_as_one_that_no_tenant_has(place: Place, pairs: int, door: str) -> None:
    seed = random.randrange(1 << 30)
    found = probe(place, door, pairs, seed)
    print("seed", seed, "AUC", found)
    assert found <= max(LARGEST_AUC, chance(pairs))


def test_a_neighbours_namespace_is_as_one_that_is_not_there(place: Place) -> None:
    """In the words of the answer too, but for the id that was asked for."""
    with patient(kvstore.open(f"unix:{place.sockets['default']}")) as store:
        foreign = store.namespace(model="only here", layout=LAYOUT)
        assert foreign.put(prompt_of(0), random_pages(LAYOUT, BLOCKS)).reason is None
        (space,) = [one.id for one in place.callers["default"].namespaces() if one.model == "only here"]
    nowhere = os.urandom(32).hex()
    second = place.callers["second"]
    wait_until(lambda: len(second.namespaces()) == 1)

    def words(wanted: str) -> list[tuple[Any, str]]:
        prompt = store_pb2.Prompt(token_ids=prompt_of(0))
        calls = [
            (second.store.Match, store_pb2.MatchRequest(namespace=wanted, prompt=prompt)),
            (second.store.Drop, store_pb2.DropRequest(namespace=wanted)),
            (second.store.Warm, store_pb2.WarmRequest(namespace=wanted, prompts=[prompt])),
            (second.score.Score, score_pb2.ScoreRequest(namespace=wanted, prompt=prompt)),
            (second.score.Score, score_pb2.ScoreRequest(model={space: "only here"}.get(wanted, wanted), prompt=prompt)),
        ]
        found = [refused(second.ask, one, request) for one, request in calls]
        return [(code, text.replace(wanted, "ID").replace("only here", "ID")) for code, text in found]

    assert words(space) == words(nowhere)
    assert all(code is grpc.StatusCode.INVALID_ARGUMENT for code, _ in words(space))
