"""The adaptive policy: what it is worth on the public traces, that it never costs much, and what it remembers."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.insight.replay import Replay
from kvstore.insight.trace import Trace
from recorded import made_of, recorded
from tiering.policies import adaptive
from tiering.policies import adaptive_loops as loops
from tiering.policies.adaptive import Adaptive
from tiering.policies.lru import LeafFirstLru

SEEDS = (1, 2, 3)
WARMUP = 0.05

# How many more hits than LRU has, and how many seeds are tried.
MORE = {
    ("mooncake_conversation", 1_000): (0.60, 3),
    ("mooncake_conversation", 2_000): (0.80, 1),
    ("mooncake_conversation", 3_000): (0.80, 1),
    ("mooncake_conversation", 5_000): (0.40, 1),
    ("mooncake_conversation", 10_000): (0.05, 3),
    ("mooncake_conversation", 30_000): (0.01, 1),
    ("mooncake_synthetic", 10_000): (0.03, 3),
}


@cache
def hits(name: str, policy: type, blocks: int, seed: int) -> int:
    trace = recorded(name)
    done = Replay(policy, blocks, seed).run(trace)
    return int(done.dram_hits[int(WARMUP * trace.requests) :].sum())


@pytest.mark.parametrize(("name", "blocks"), MORE)
def test_on_recorded_requests_it_finds_more_than_lru(name: str, blocks: int) -> None:
    recorded(name)
    lru = hits(name, LeafFirstLru, blocks, 0)
    more, seeds = MORE[name, blocks]
    own = [hits(name, Adaptive, blocks, seed) for seed in SEEDS[:seeds]]
    print(f"{name}, {blocks} blocks: LRU {lru}, adaptive {own}, {min(own) / lru - 1:+.3f} at least")
    assert min(own) >= (1 + more) * lru


@pytest.mark.parametrize("blocks", [1_000, 5_000, 30_000])
def test_on_other_recorded_requests_it_is_never_far_below_lru(blocks: int) -> None:
    trace = recorded("mooncake_synthetic")
    asked = int(np.diff(trace.starts)[int(WARMUP * trace.requests) :].sum())
    lru = hits("mooncake_synthetic", LeafFirstLru, blocks, 0) / asked
    own = min(hits("mooncake_synthetic", Adaptive, blocks, seed) for seed in SEEDS) / asked
    assert own >= lru - max(0.01 * lru, 0.002), (own, lru)


# Loads that nobody tuned it for --------------------------------------------------------------------------------------


def rag(random: Random, requests: int) -> Trace:
    """Documents by Zipf's law behind one system prompt, and a question of its own each."""
    weights = [1 / (rank + 1) for rank in range(400)]
    lengths = [random.randrange(4, 30) for _ in weights]
    fresh = iter(range(10**9))
    prompts = []
    for document in random.choices(range(400), weights, k=requests):
        body = [document * 100 + part for part in range(lengths[document])]
        prompts.append([-1, -2, *(10**9 + one for one in body), *(2 * 10**9 + next(fresh) for _ in range(2))])
    return made_of(*prompts)


def agents(random: Random, requests: int) -> Trace:
    """Agents that call tools: each turn repeats all before it and adds some; many at once, and they end at any time."""
    running: list[list[int]] = []
    fresh = iter(range(10**9))
    prompts = []
    while len(prompts) < requests:
        if len(running) < 30:
            running.append([-1 - random.randrange(5)])
        one = random.randrange(len(running))
        running[one] = running[one] + [next(fresh) for _ in range(random.randrange(1, 6))]
        prompts.append(running[one])
        if random.random() < 0.08 or len(running[one]) > 200:
            running.pop(one)
    return made_of(*prompts)


def scan(random: Random, requests: int) -> Trace:
    """A hot set, and one long run of prompts in the middle that never come again."""
    fresh = iter(range(10**9))
    prompts = []
    for at in range(requests):
        if requests // 3 < at < requests // 2:
            prompts.append([10**9 + next(fresh) for _ in range(20)])
        else:
            chat = random.randrange(60)
            prompts.append([chat * 50 + part for part in range(random.randrange(4, 24))])
    return made_of(*prompts)


def shifting(random: Random, requests: int) -> Trace:
    """What is hot changes altogether, eight times."""
    prompts = []
    for at in range(requests):
        era = at * 8 // requests
        chat = int(random.paretovariate(0.7)) % 300
        prompts.append([(era * 300 + chat) * 40 + part for part in range(1 + chat % 30)])
    return made_of(*prompts)


def bursts(random: Random, requests: int) -> Trace:
    """Each prompt comes some times in a row, and perhaps once more, much later."""
    fresh = iter(range(10**9))
    gone: list[list[int]] = []
    prompts: list[list[int]] = []
    while len(prompts) < requests:
        if gone and random.random() < 0.25:
            prompt = random.choice(gone)
        else:
            prompt = [next(fresh) for _ in range(random.randrange(3, 30))]
            gone.append(prompt)
        prompts.extend([prompt] * random.randrange(1, 6))
    return made_of(*prompts[:requests])


LOADS = {"rag": rag, "agents": agents, "scan": scan, "shifting": shifting, "bursts": bursts}


@cache
def load(name: str, number: int) -> Trace:
    return LOADS[name](Random(f"{name} {number}"), 4_000)


@pytest.mark.parametrize("blocks", [250, 500, 1_000, 2_000, 4_000])
@pytest.mark.parametrize("name", LOADS)
def test_on_loads_that_nobody_tuned_it_for_it_is_as_good_as_lru(name: str, blocks: int) -> None:
    for number in (1, 2) if blocks <= 500 else (1,):  # the smaller, the more is chance
        trace = load(name, number)
        lru = Replay(LeafFirstLru, blocks).run(trace).dram_hits.sum()
        own = [Replay(Adaptive, blocks, seed).run(trace).dram_hits.sum() for seed in SEEDS]
        worst = float(min(own) / lru)
        print(
            f"{name} {number}, {blocks} blocks: LRU {lru}, adaptive {[int(hits) for hits in own]}, {worst:.3f} at least"
        )
        assert worst >= 0.99


# What it keeps -------------------------------------------------------------------------------------------------------


def test_ghosts_and_history_take_few_bytes_for_each_block() -> None:
    blocks = 64_000
    arrays = Adaptive(array("q"), 0)
    arrays.expect(blocks)
    tiers_own = (arrays._events, arrays._order, arrays._leaf_records.array)
    held = sum(one.nbytes for one in arrays._arrays) - sum(len(one) * one.itemsize for one in tiers_own)
    print(f"{held / blocks:.0f} bytes for each block of {blocks}")
    assert held / blocks <= 500
    tracemalloc.start()
    try:
        Adaptive(array("q"), 0).expect(blocks)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most / blocks <= 500


class Ghosts:
    """An `Adaptive` and, beside it, LRU by hand over the same uses: the ghost has to be the same."""

    def __init__(self, room: int) -> None:
        self.names = array("q")
        self.policy = Adaptive(self.names, 1)
        self.policy.expect(room)
        self.rows: dict[tuple[int, ...], int] = {}

    def use(self, chain: Sequence[tuple[int, ...]], count: int) -> None:
        for block in chain:
            if block not in self.rows:
                self.rows[block] = len(self.names)
                self.names.append(hash(block))
        self.policy.used([self.rows[block] for block in chain], count)

    def names_in(self, ghost: int) -> set[int]:
        ring = self.policy._ghosts[0 if ghost == loops.LRU else 2]
        node, found = ring["newer"][0], []
        while node:
            found.append(int(ring["name"][node]))
            node = ring["newer"][node]
        assert len(found) == self.policy._numbers[ghost + loops.COUNT]
        return set(found)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=60),
    room=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_both_ghosts_hold_whole_prefixes_and_no_more_than_they_may(prompts: list[list[int]], room: int) -> None:
    ghosts = Ghosts(room)
    parents: dict[int, int | None] = {}
    for ids in prompts:
        chain = [tuple(ids[: depth + 1]) for depth in range(len(ids))][::-1]
        parents.update((hash(block), hash(block[:-1]) if len(block) > 1 else None) for block in chain)
        ghosts.use(chain, len(chain))
        for ghost in (loops.LRU, loops.OWN):
            held = ghosts.names_in(ghost)
            assert len(held) <= room and all(parents[one] is None or parents[one] in held for one in held)
            assert held >= {hash(block) for block in chain[::-1][:room]}, "what was asked for last is there"


def test_the_history_forgets_what_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "HISTORY_LEAST", 8)
    ghosts = Ghosts(2)
    for block in range(20):
        ghosts.use([(block,)], 1)
    ghosts.use([(15,)], 1)
    ghosts.use([(99,)], 1)
    history, _ = ghosts.policy._history
    known = {int(name) for name in history["name"][1:]}
    assert known == {hash((block,)) for block in (14, 15, 16, 17, 18, 19, 99, 13)}
    uses = {int(one["name"]): int(one["uses"]) for one in history[1:]}
    assert uses[hash((15,))] == 2 and uses[hash((99,))] == 1


def test_it_follows_the_ghost_that_finds_more_and_leaves_it_when_it_finds_less() -> None:
    """Among many prompts that never come again some do: LRU holds the former, and what was learned the latter."""
    random = Random(5)
    prompts = [[1, random.randrange(20)] if at % 4 == 0 else [2, 100 + at] for at in range(6_000)]
    replay = Replay(Adaptive, 30, 1)
    hits = replay.run(made_of(*prompts)).dram_hits[::4]
    policy = replay._blocks.residency.policy
    assert isinstance(policy, Adaptive) and policy.goes_by_worth
    assert hits[-500:].mean() > 1.8 and hits[:100].mean() < 1.6, "of two blocks, in the end and at first"
    scores = policy._scores
    lru, by_chance = (
        scores[loops.LRU_SCORE],
        (scores[loops.SPREAD] * scores[loops.WEIGHT]) ** 0.5,
    )
    least = adaptive.LEAD * by_chance + adaptive.FLOOR * scores[loops.SCORE_USES]
    for lead, is_followed in ((0.1, True), (-0.1, False), (0.9, False), (1.1, True)):
        scores[loops.OWN_SCORE] = lru + lead * least
        policy.used([0], 1)
        assert policy.goes_by_worth == is_followed, lead


def test_what_one_ghost_leads_by_in_a_few_requests_may_be_chance() -> None:
    """The same hits in many requests are a lead, and in one are none."""
    numbers = np.zeros(loops.NUMBERS, np.int64)
    setting = np.array([1.0, 1e12, adaptive.LEAD, 0.0, 0.0, 0.0])
    for requests, is_lead in ((1, False), (100, True)):
        scores = np.zeros(loops.SCORES)
        scores[loops.WEIGHT] = 1.0
        numbers[loops.RULE] = 0
        for _ in range(requests):
            loops._guard(scores, setting, 10, 1000 // requests, 1100 // requests, numbers)
        assert bool(numbers[loops.RULE]) == is_lead
        assert scores[loops.OWN_SCORE] - scores[loops.LRU_SCORE] == pytest.approx(100)


@given(uses=st.integers(0, 1 << 40))
def test_an_age_has_a_step_of_an_eighth_of_its_octave(uses: int) -> None:
    """Up to 15 each has its own; above, eight to an octave; all that is older than the last step is that old."""
    octave = max(0, uses.bit_length() - 4)
    expected = min(octave * loops.STEPS + (uses >> octave), loops.AGES - 1)
    assert loops.age_of(uses) == expected


def test_a_guard_that_was_told_of_an_endless_request_goes_on() -> None:
    numbers, scores = np.zeros(loops.NUMBERS, np.int64), np.zeros(loops.SCORES)
    scores[loops.WEIGHT] = 1.0
    setting = np.array([1.0, 20_000.0, adaptive.LEAD, adaptive.FLOOR, 0.0, 0.0])
    for _ in range(10):
        loops._guard(scores, setting, 1 << 40, 0, 1 << 40, numbers)
    assert np.isfinite(scores).all() and numbers[loops.RULE] == 1


def test_what_was_learned_fades_by_uses_whether_requests_are_long_or_short() -> None:
    blocks = 4_000
    policy = Adaptive(array("q", range(1, 20_001)), 1)
    policy.expect(blocks)
    half_life = policy._settings[loops.HALF_LIFE]
    full = loops.SAMPLES * half_life / np.log(2)  # looks of which as many fade as come
    for at in range(800):
        first = 2_000 * (at % 10)
        policy.used(list(range(first, first + 2_000)), 2_000)
        policy._catch_up(1 << 40)
    uses = int(policy._numbers[loops.CLOCK])
    held = policy._learned[loops.LOOKS].sum()
    behind = loops.KINDS * 2_000  # uses since a kind was reckoned last, at most
    assert 0.999 < held / (full * (1 - 0.5 ** (uses / half_life))) < 2.0 ** (behind / half_life)
    for at in range(9_000):
        policy.used([at % 3_000], 1)
    assert policy._numbers[loops.DUE] >= policy._numbers[loops.CLOCK] - loops.RECKON_USES
    assert policy._learned[loops.LOOKS].sum() > 0.5 ** ((9_000 + behind) / half_life) * held


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_worth_is_the_best_chance_for_its_time_at_every_age(seed: int) -> None:
    """Against sums over ages, each from its own on, of loads where nearly all are used by some age."""
    rng = np.random.default_rng(seed)
    names = int(rng.integers(16, 100_000))
    learned = np.zeros((loops.TABLES, loops.KINDS, loops.AGES))
    learned[loops.USES, 0] = rng.choice([0.0, 1.0, 1e5], loops.AGES, p=[0.6, 0.3, 0.1])
    learned[loops.LOOKS, 0] = rng.choice([0.0, 10.0, 1e4], loops.AGES)
    ages = np.arange(loops.AGES)
    steps = loops.STEPS
    widths = np.where(ages < steps, 1.0, 2.0 ** (ages // steps - 1))
    looks = (learned[loops.LOOKS, 0] + loops.DOUBT) * names / loops.SAMPLES
    rates = learned[loops.USES, 0] / looks
    loops._reckon(learned, 0, names, 1_000, 1_000.0)
    for age in ages:
        passed = np.cumsum(rates[age:] * widths[age:])
        before = np.exp(-np.concatenate([[0.0], passed[:-1]]))
        spans = np.where(
            rates[age:] > 0, -np.expm1(-rates[age:] * widths[age:]) / np.maximum(rates[age:], 1e-300), widths[age:]
        )
        best = (-np.expm1(-passed) / np.cumsum(before * spans)).max()
        assert learned[loops.WORTH, 0, age] == pytest.approx(best, rel=1e-6, abs=1e-15)


def test_victims_of_the_learning_ghost_are_drawn_anew_each_time() -> None:
    """Each has the next number, and of all that is drawn from numbers nothing comes twice."""
    policy = Adaptive(array("q", range(1, 1_000)), 1)
    policy.expect(10)
    before = int(policy._numbers[loops.OWN_DRAWS])
    for row in range(210):
        policy.used([row], 1)
    assert policy._numbers[loops.OWN_DRAWS] == before + 200
    drawn = [loops.drawn_from(number) for number in range(before + 1, before + 201)]
    seen = set()
    for state in drawn:
        for _ in range(loops.CANDIDATES // 2):
            state = loops.next_state(np.uint64(state))
            seen.add(int(state))
    assert len(seen) == 200 * loops.CANDIDATES // 2


class Interrupted(Exception):
    """What a signal's handler may raise anywhere."""


@pytest.mark.parametrize("change", ["events", "told", "expect", "rows"])
def test_whoever_is_interrupted_while_an_array_is_replaced_is_refused_and_nothing_is_overwritten(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "HISTORY_LEAST", 16)
    policy = Adaptive(array("q", range(1, 20_001)), 1)
    policy.expect(100)
    for row in range(2_000):
        policy.inserted(row)
    policy.used([0], 1)
    rows = list(range(1_999, -1, -1))
    changes = {
        "events": lambda: policy.touched(rows),
        "told": lambda: policy.used(rows, len(rows)),
        "expect": lambda: policy.expect(10_000),
        "rows": lambda: policy.inserted(500_000),
    }

    def raise_it(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(policy, "_place", raise_it)
        with pytest.raises(Interrupted):
            changes[change]()
    assert policy._address is None
    with pytest.raises(TypeError):
        policy.used([1], 1)
    policy._place()
    policy.used(rows, len(rows))
    policy._catch_up(1 << 40)
    rings_are_whole(policy)


@pytest.mark.parametrize("fault", ["nowhere to keep it", "damaged"])
def test_code_that_cannot_be_kept_or_read_is_compiled_anew(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = loops._compile
    real = loops.njit
    tries: list[loops.AdaptiveLoops] = []

    def fail_once(made: loops.AdaptiveLoops) -> None:
        tries.append(made)
        if len(tries) == 1 and fault == "damaged":
            raise AttributeError(fault)
        kept(made)

    def njit(**options: Any) -> Any:
        if options.get("cache") and fault != "damaged":
            raise RuntimeError(fault)
        return real(**options)

    monkeypatch.setattr(loops, "_ready", None)
    monkeypatch.setattr(loops, "_compile", fail_once)
    monkeypatch.setattr(loops, "njit", njit)
    policy = Adaptive(array("q", range(10)), 1)
    assert len(tries) == (2 if fault == "damaged" else 1) and fault in caplog.text
    for row in range(3):
        policy.inserted(row)
    assert list(policy.victims()) == [0, 1, 2]


# What it is told may be anything --------------------------------------------------------------------------------------


def rings_are_whole(policy: Adaptive) -> None:
    """Rings, leaf lists, chains by hash and free nodes of both ghosts and of the history."""
    numbers = policy._numbers
    for nodes, heads, at in (
        (policy._ghosts[0], policy._ghosts[1], loops.LRU),
        (policy._ghosts[2], policy._ghosts[3], loops.OWN),
        (policy._history[0], policy._history[1], loops.NAMES),
    ):
        ring, before = [], 0
        node = int(nodes[0]["newer"])
        while node:
            assert nodes[node]["older"] == before and len(ring) < len(nodes)
            ring.append(node)
            before, node = node, int(nodes[node]["newer"])
        assert nodes[0]["older"] == before and len(ring) == len(set(ring)) == numbers[at + loops.COUNT]
        chained: list[int] = []
        for head in heads.tolist():
            while head:
                chained.append(head)
                head = int(nodes[head]["next"])
        assert sorted(chained) == sorted(ring)
        if at == loops.NAMES:
            continue
        children = {node: 0 for node in [0, *ring]}
        for node in ring:
            children[int(nodes[node]["parent"])] += 1
        assert all(nodes[node]["children"] == children[node] for node in ring)
        places = {node: place for place, node in enumerate([*ring, 0])}
        assert all(places[node] < places[int(nodes[node]["parent"])] for node in ring), "the oldest one is a leaf"
        if at == loops.OWN:
            leaves = policy._own_leaves[: numbers[at + loops.LEAF_COUNT]]
            assert sorted(leaves["node"].tolist()) == sorted(node for node in ring if not children[node])
            for place, leaf in enumerate(leaves):
                assert all(leaf[field] == nodes[leaf["node"]][field] for field in ("when", "kind"))
                assert nodes[leaf["node"]]["leaf_at"] == place + 1


@given(data=st.data(), names=st.sampled_from([6, 40, 10**6]))
@settings(max_examples=60, deadline=None)
def test_whatever_chains_it_is_told_its_tables_stay_whole(data: st.DataObject, names: int) -> None:
    """Names that collide, chains with rows of nobody, longer than the room, cut anywhere; room that changes."""
    random = Random(data.draw(st.integers(0, 10**6)))
    rows = array("q", (random.randrange(names) for _ in range(300)))
    policy = Adaptive(rows, 1)
    policy.expect(random.choice([1, 3, 16]))
    policy._learned[loops.WORTH] = np.random.default_rng(1).random((loops.KINDS, loops.AGES))
    for _ in range(60):
        chain = random.sample(range(300), random.randrange(1, 30))
        policy.used(chain, random.randrange(len(chain) + 1))
        if random.random() < 0.1:
            policy.expect(random.randrange(1, 40))
        if random.random() < 0.2:
            policy._numbers[loops.ROOM] = random.randrange(1, int(policy._numbers[loops.NODES]) + 1)
        rings_are_whole(policy)


@given(seed=st.integers(0, 10**6), room=st.sampled_from([3, 16, 200]))
@settings(max_examples=40, deadline=None)
def test_it_is_the_same_whether_a_request_is_learned_and_told_at_once_or_in_pieces(seed: int, room: int) -> None:
    """Pieces of any size, in any number before the next request, with many requests that wait or none."""
    random = Random(seed)
    rows = array("q", (random.randrange(1000) for _ in range(300)))
    at_once, in_pieces = Adaptive(rows, seed), Adaptive(rows, seed)
    for policy, told, learned in ((at_once, 1 << 30, 1 << 30), (in_pieces, 0, random.choice([1, 7, 40, 512]))):
        policy._at_once, policy._most_learned = told, learned
        policy.expect(room)
    for use in range(150):
        chain = random.sample(range(300), random.randrange(1, 120))
        count = random.randrange(len(chain) + 1)
        for policy in (at_once, in_pieces):
            policy.used(chain, count)
        for _ in range(random.randrange(3)):
            in_pieces._catch_up(random.randrange(1, 40))
            rings_are_whole(in_pieces)
        if use == 75:
            for policy in (at_once, in_pieces):
                policy.expect(300)
    in_pieces._catch_up(1 << 30)
    numbers = np.arange(loops.NUMBERS) != loops.FETCHED
    for mine, theirs in zip(
        (*in_pieces._ghosts, *in_pieces._history, in_pieces._scores, in_pieces._learned, in_pieces._numbers[numbers]),
        (*at_once._ghosts, *at_once._history, at_once._scores, at_once._learned, at_once._numbers[numbers]),
        strict=True,
    ):
        assert (mine == theirs).all()


def clock(policy: Adaptive) -> int:
    """Uses that were learned."""
    return int(policy._numbers[loops.CLOCK])


def test_whoever_asks_for_more_than_is_learned_meanwhile_is_not_learned_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long requests without a victim in between: as many as can wait, and the others only make their leaf young."""
    names = array("q", range(1, 40_000))
    policy = Adaptive(names, 1)
    policy.expect(40_000)
    for row in range(32_000):
        policy.inserted(row)
    for request in range(loops.REQUESTS + 6):
        before, chain = clock(policy), list(range(2000 * request, 2000 * (request + 1)))
        policy.used(chain, 2000)
        assert 0 < clock(policy) - before <= 2 * loops.STEP
        assert policy._numbers[loops.WAITING] <= loops.REQUESTS
        rings_are_whole(policy)
    assert policy._order["when"][chain[0] + 1] == clock(policy)
    learned = clock(policy)
    monkeypatch.setattr(adaptive, "LONGEST", 1999)
    policy.used(list(range(2000)), 2000)
    assert clock(policy) == learned, "there is no room for one that is longer"
    assert policy._order["when"][1] == clock(policy), "its leaf is young all the same"
    policy._catch_up(1 << 30)
    learned = clock(policy)
    assert policy._numbers[loops.WAITING] == 0
    assert loops.REQUESTS * 2000 <= learned < (loops.REQUESTS + 6) * 2000
    for ghost in (loops.LRU, loops.OWN):
        known = policy._numbers[loops.NAMES + loops.COUNT]
        assert policy._numbers[ghost + loops.COUNT] == known >= loops.REQUESTS * 2000
    rings_are_whole(policy)


def test_a_row_that_has_another_block_by_then_is_not_marked_with_what_was_learned() -> None:
    names = array("q", range(1, 2001))
    policy = Adaptive(names, 1)
    policy.expect(2000)
    for row in range(2000):
        policy.inserted(row)
    policy.used(list(range(2000)), 2000)
    policy.removed(1900)
    names[1900] = 10**6
    policy.inserted(1900)
    policy._flush()
    policy._catch_up(1 << 30)
    assert policy._order["when"][1900] == 1900 and policy._order["when"][1902] == 1902
    assert policy._order["when"][1901] == loops.STEP, "as it was when it came"


def test_an_event_that_cannot_be_leaves_what_waits_as_it_is() -> None:
    policy = Adaptive(array("q", range(1, 2001)), 1)
    policy.expect(2000)
    policy.used(list(range(2000)), 2000)
    for wrong in (lambda: policy.used([1], 1), lambda: policy._catch_up(1)):
        policy.removed(0)
        with pytest.raises(AssertionError, match="touched or removed where it is not"):
            wrong()
        assert policy._waiting == policy._numbers[loops.WAITING] == 1


def test_a_leaf_that_may_not_go_does_not_cost_the_young_ones() -> None:
    """The one that is worth least is pinned: the others go by worth or by age, and all of them can."""
    policy = Adaptive(array("q", range(1, 100)), 1)
    policy.expect(20)
    for row in range(10):
        policy.inserted(row)
    list(policy.victims())
    policy._numbers[loops.RULE] = 1
    policy._learned[loops.WORTH] = 1.0
    policy._learned[loops.WORTH, 3] = 0.0
    policy._order["kind"][10] = 3
    went = []
    for row in policy.victims():
        if row != 9:
            went.append(row)
            policy.removed(row)
    assert went == list(range(9))


def test_room_is_fitted_to_how_full_the_tier_was() -> None:
    """Blocks are larger than was expected: both ghosts come to have as little room as there is."""
    names = array("q", range(5000))
    policy = Adaptive(names, 1)
    policy.expect(1000)
    for row in range(200):
        policy.inserted(row)
    for turn in range(20):
        next(policy.victims())
        for row in range(0, 4000, 20):
            policy.used([row + turn], 1)
        for _ in range(loops.RECKON_USES // 200 + 1):
            policy.used(list(range(200)), 200)
    most = policy._numbers[loops.LRU + loops.MOST]
    assert 200 <= most <= 230 and most == policy._numbers[loops.OWN + loops.MOST]
    for row in range(200, 600):
        policy.inserted(row)
    next(policy.victims())
    policy.used(list(range(4000)), 4000)
    policy._catch_up(1 << 30)
    for _ in range(loops.RECKON_USES):  # one kind after the other, and with the first one room is looked at
        policy.used([0], 1)
    assert policy._numbers[loops.LRU + loops.MOST] == 600


def test_all_that_is_compiled_is_in_one_file() -> None:
    """Numba looks at an entrance's own file alone to tell whether what it kept is that of an earlier version."""
    called = [one.py_func.__module__ for one in vars(loops).values() if hasattr(one, "py_func")]
    assert len(called) > 20 and set(called) == {loops.__name__}
