"""A store of two tiers against a dict: see `LevelsModel`. Hypothesis chooses the acts, or plain chance does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from learned_policy import by_worth
from model.levels_model import SPACES, LevelsModel
from model.store_model import Prompt
from tiering.policies.lru import LeafFirstLru
from tiering.policies.policy import PolicyMaker

SEED = 20261122
POLICIES: tuple[PolicyMaker, ...] = (LeafFirstLru, by_worth)
"""Lives by plain chance take them in turn."""

prompts = st.builds(
    Prompt,
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=6).map(tuple),
    st.sampled_from([0, 1, 63]),
    st.sampled_from([(), (), (), ("adapter",)]),
)
spaces = st.integers(0, len(SPACES) - 1)
durabilities = st.sampled_from(["volatile", "disk"])
times = st.sampled_from([None, None, 90.0])
numbers = st.integers(0, 1 << 16)


class LevelsMachine(RuleBasedStateMachine):
    """Every rule is one act of the model, which does all the checking."""

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__()
        self.totals = totals
        self.model = LevelsModel()

    @rule(space=spaces, prompt=prompts, durability=durabilities, ttl=times)
    def put(self, space: int, prompt: Prompt, durability: str, ttl: float | None) -> None:
        self.model.put(space, prompt, durability, ttl)

    @rule(space=spaces, first=st.integers(10, 200), count=st.integers(2, 8), durability=durabilities)
    def flood(self, space: int, first: int, count: int, durability: str) -> None:
        """Other people's prompts: both tiers have to make room."""
        for number in range(count):
            self.model.put(space, Prompt((first + number, 0, 1, 2)), durability)

    @rule(space=spaces, prompt=prompts, deadline_ms=st.sampled_from([30_000, 30_000, 30_000, 0]))
    def load(self, space: int, prompt: Prompt, deadline_ms: float) -> None:
        self.model.load(space, prompt, deadline_ms)

    @rule(space=spaces, prompt=prompts)
    def hold(self, space: int, prompt: Prompt) -> None:
        self.model.hold(space, prompt)

    @rule(which=numbers)
    def read_held(self, which: int) -> None:
        self.model.read_held(which)

    @rule(which=numbers)
    def let_go(self, which: int) -> None:
        self.model.let_go(which)

    @rule(blocks=st.sampled_from([1, 5, 1000]))
    def evict(self, blocks: int) -> None:
        self.model.evict(blocks)

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def tick(self, seconds: float) -> None:
        self.model.tick(seconds)

    @rule()
    def spill(self) -> None:
        self.model.spill()

    @rule()
    def settle(self) -> None:
        self.model.settle()

    @rule(space=spaces)
    def drop(self, space: int) -> None:
        self.model.drop(space)

    @rule(space=spaces, prompt=prompts, block=st.integers(0, 5), at=numbers)
    def flip_above(self, space: int, prompt: Prompt, block: int, at: int) -> None:
        self.model.flip_above(space, prompt, block, at)

    @rule(space=spaces, prompt=prompts, block=st.integers(0, 5), at=numbers)
    def flip_below(self, space: int, prompt: Prompt, block: int, at: int) -> None:
        self.model.flip_below(space, prompt, block, at)

    @rule(effects=st.integers(1, 60))
    def plan_cut(self, effects: int) -> None:
        self.model.plan_cut(effects)

    @rule(index_too=st.booleans())
    def restart(self, index_too: bool) -> None:
        self.model.restart(index_too=index_too)

    @rule(wanted=st.lists(st.tuples(spaces, prompts, st.sampled_from(["volatile", "disk", ""])), max_size=4))
    def restart_and_go_on(self, wanted: list[tuple[int, Prompt, str]]) -> None:
        self.model.restart_and_go_on([partial(_use, self.model, *one) for one in wanted])

    @rule(chance=numbers, index_too=st.booleans())
    def crash(self, chance: int, index_too: bool) -> None:
        self.model.crash(chance, index_too=index_too)

    def teardown(self) -> None:
        self.model.end()
        self.totals.update(self.model.counts)
        self.totals.update(self.model.opened.core.usage().counters)


def _use(model: LevelsModel, space: int, prompt: Prompt, durability: str) -> None:
    """A put, or with no durability a load."""
    if durability:
        model.put(space, prompt, durability)
    else:
        model.load(space, prompt)


def run(examples: int, steps: int, number: int, phases: tuple[Phase, ...] = (Phase.generate,)) -> Counter[str]:
    """That many lives of that many acts; what happened in them. phases: with `Phase.shrink` a failure is made small,
    which takes minutes."""
    totals: Counter[str] = Counter()
    run_state_machine_as_test(
        seed(number)(lambda: LevelsMachine(totals)),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return totals


def wander(seeds: range, steps: int = 150) -> Counter[str]:
    """The same acts by plain chance: long lives, quickly."""
    totals: Counter[str] = Counter()
    for number in seeds:
        random, chance = Random(number), [None, 0.5, 0.1][number % 3]
        model = LevelsModel(policy=POLICIES[number % len(POLICIES)], chance=chance)
        try:
            for _ in range(steps):
                act(model, random)
            model.compare_all()
            model.end()
        except Exception as error:
            raise AssertionError(f"seed {number}: {type(error).__name__}: {error}") from error
        totals.update(model.counts)
        totals["declined"] += model.declined
    return totals


def act(model: LevelsModel, random: Random) -> None:
    """One act."""
    space = random.randrange(len(SPACES))
    prompt = _prompt(random)
    durability = random.choice(["volatile", "disk"])
    match random.choices(range(13), [30, 6, 30, 5, 6, 4, 3, 3, 2, 3, 3, 3, 4])[0]:
        case 0:
            model.put(space, prompt, durability, random.choice([None, None, 90.0]))
        case 1:
            first, ttl = random.randrange(10, 200), random.choice([None, None, 90.0])
            for number in range(random.randint(2, 8)):
                model.put(space, Prompt((first + number, 0, 1, 2)), durability, ttl)
        case 2:
            model.load(space, prompt, random.choice([30_000, 30_000, 30_000, 0]))
        case 3:
            model.hold(space, prompt)
        case 4:
            model.read_held(random.randrange(100))
        case 5:
            model.let_go(random.randrange(100))
        case 6:
            model.evict(random.choice([1, 5, 1000]))
        case 7:
            random.choice([model.spill, model.settle, lambda: model.tick(random.choice([1.0, 61.0]))])()
        case 8:
            model.drop(space)
        case 9:
            model.flip_above(space, prompt, random.randrange(6), random.randrange(1 << 16))
        case 10:
            model.flip_below(space, prompt, random.randrange(6), random.randrange(1 << 16))
        case 11:
            model.plan_cut(random.randrange(1, 60))
        case 12:
            index_too = random.random() < 0.5
            if random.random() < 0.2:
                uses = [(random.randrange(len(SPACES)), _prompt(random)) for _ in range(random.randrange(5))]
                how = random.choice(["volatile", "disk", ""])
                model.restart_and_go_on([partial(_use, model, *one, how) for one in uses])
            elif random.random() < 0.5:
                model.restart(index_too=index_too)
            else:
                model.crash(random.randrange(1 << 30), index_too=index_too)


def _prompt(random: Random) -> Prompt:
    letters = tuple(random.choice([0, 0, 1, 2]) for _ in range(random.randint(1, 6)))
    return Prompt(letters, random.choice([0, 1, 63]), random.choice([(), (), (), ("adapter",)]))


def test_two_tiers_against_a_dict() -> None:
    print(f"seed {SEED}")
    totals = run(30, 40, SEED)
    print(dict(totals))


def test_long_lives() -> None:
    totals = wander(range(SEED, SEED + 8))
    print(dict(totals))
    for count in (
        "restarts",
        "crashes",
        "cuts",
        "rebuilds",
        "from NVMe",
        "flipped on disk",
        "flipped in DRAM",
        "declined",
    ):
        assert totals[count], f"no {count} in the whole run"
