"""One engine computes a prompt and another one goes on with it, over one store: numbers are checked at every step, so
whatever a stale, forged or foreign ticket leads to would show. Engines are `PagedEngine`s with a real store.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from engine_adapter import handoff
from engine_adapter.handoff import BlockWait, WaitPolicy
from engine_adapter.paged.requests import TICKET_SECONDS, RequestSpec
from kvstore.block.identity import Identity, Prompt
from kvstore.client.edge import contained
from kvstore.node import EmbeddedStore
from kvstore.protocol.hand_off_ticket import HandOff
from paged_engine import PagedEngine, Shape, SharedStore, check_nothing_is_held
from service.sidecar import Sidecar
from tiering.counts.awaits import AwaitEnd
from waiting import FakeClock, wait_until

SEED = 20261126
HANDS_OVER = RequestSpec(hands_over=True)


class Pair:
    """A prefilling engine and a decoding one, over one store."""

    def __init__(
        self, store: EmbeddedStore, open_store: Callable[[str], Any], patience_ms: float, **options: Any
    ) -> None:
        self.store = store
        self.random = Random(SEED)
        self.prefill, self.decode = (
            PagedEngine(Shape(**options), open_store, Random(at), session=letter * 32, lease_deadline_ms=patience_ms)
            for at, letter in enumerate("ad")
        )

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(tokens)]

    def prefilled(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """What the first engine tells of it, which is what proxies pass on."""
        request = self.prefill.add(name, prompt, 1, HANDS_OVER)
        sealing = self.prefill.half._states[name].sealing
        wait_until(lambda: sealing is None or sealing.poll() is not None)  # these engines compute in no time
        self.prefill.run()
        return request.account

    def decoded(self, name: str, prompt: list[int], ticket: str = "", **hints: Any) -> dict[str, Any]:
        """What the second one tells, whose own cache has nothing."""
        self.decode.forget()
        return self.decode.ask(name, prompt, 4, RequestSpec(ticket=ticket, **hints)).account


@contextmanager
def pair(
    path: Path, dram: str = "16MiB", patience_ms: float = 5000, *, is_apart: bool = False, **options: Any
) -> Iterator[Pair]:
    """patience_ms: for which a first block is waited for at least. is_apart: the engines ask through a socket."""
    with Sidecar(path, dram=dram) as sidecar:
        shared = SharedStore(sidecar.store)
        made = Pair(sidecar.store, sidecar.client if is_apart else lambda _: shared, patience_ms, **options)
        with made.prefill, made.decode:
            yield made
            check_nothing_is_held(made.store, made.prefill, made.decode)


def full(tokens: int) -> int:
    """Tokens of the full blocks that can be loaded of so many."""
    return (tokens - 1) // 64 * 64


# The main job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_one_engine_prefilled_the_other_one_loads(tmp_path: Path, is_apart: bool) -> None:
    with pair(tmp_path, is_apart=is_apart) as both:
        for at in range(15):
            tokens = both.random.choice([63, 64, 65, 128, *[both.random.randrange(70, 700) for _ in range(4)]])
            prompt = both.prompt(tokens)
            told = both.prefilled(f"p{at}", prompt)
            assert ("ticket" in told) is (tokens >= 64)
            decoded = both.decoded(f"d{at}", prompt, told.get("ticket", ""))
            assert decoded["hits"].get("dram", 0) == full(tokens), decoded
            assert "ignored" not in decoded


def test_a_ticket_is_waited_for_where_its_blocks_are_still_being_stored(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        both.prefill.gate.shut()
        prompt = both.prompt(600)
        ticket = both.prefilled("p", prompt)["ticket"]
        request = both.decode.add("d", prompt, 4, RequestSpec(ticket=ticket))
        for _ in range(20):
            both.decode.step()
        assert request.computed == 0 and both.store.core.awaits.counts().parked == 1
        both.prefill.gate.open()
        both.decode.run()
        assert request.account["hits"] == {"dram": full(600)}


def test_chunk_by_chunk_while_the_other_one_computes(tmp_path: Path) -> None:
    """Both legs at once: no ticket, and the wait is for the prompt's own blocks."""
    with pair(tmp_path, budget=128) as both:
        prompt = both.prompt(900)
        waiting = both.decode.add("d", prompt, 4, RequestSpec(awaits=True))
        both.decode.step()
        prefilled = both.prefill.add("p", prompt, 1, HANDS_OVER)
        seen: Counter[int] = Counter()
        while prefilled.told is None:
            both.prefill.step()
            wait_until(lambda: not both.prefill.is_saving)
            both.decode.step()
            seen[both.decode.handle.match(prompt).blocks] += 1
        both.decode.run()
        assert len(seen) > 2, "it came in pieces"
        assert waiting.account["hits"] == {"dram": full(900)}


def test_nothing_comes_and_it_computes_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.05)
    with pair(tmp_path, patience_ms=50) as both:
        prompt = both.prompt(400)
        began = time.monotonic()
        told = both.decoded("d", prompt, awaits=True)
        assert told["misses"]["absent"] == 384 and told["hits"] == {}
        assert "deadline" in told["detail"] and 0.05 <= time.monotonic() - began < 5.0


# Whatever goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_prefill_that_is_given_up_costs_no_more_than_computing(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and after its chunks."""
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.1)
    with pair(tmp_path, budget=128, patience_ms=100) as both:
        prompt = both.prompt(900)
        request = both.prefill.add("p", prompt, 1, HANDS_OVER)
        waiting = both.decode.add("d", prompt, 4, RequestSpec(awaits=True))
        for _ in range(steps):
            both.prefill.step()
            both.decode.step()
        both.prefill.abort(request)
        both.prefill.settle()
        there = both.decode.handle.match(prompt).blocks
        both.decode.run()
        assert waiting.account["hits"].get("dram", 0) <= 64 * there


def forged(both: Pair, prompt: list[int], **fields: Any) -> str:
    """A ticket for a prompt, with other fields, and rightly sealed."""
    namespace = both.decode.handle
    core, keys = both.store.core, both.store.tenant_keys(both.store.tenant)
    identity, hashed = Identity.of(keys, core.node), namespace.hashed(prompt)
    now = int(1000 * core.clock.wall_seconds())
    good = HandOff(
        identity.key_id,
        core.namespace_of(namespace.door.number_in_store(namespace.number)).digest()[:16],  # type: ignore[attr-defined]
        hashed.keys[-1],
        len(hashed.keys),
        64,
        identity.node,
        identity.incarnation,
        "",
        now + 60_000,
    )
    return msgspec.structs.replace(good, **fields).seal(identity)


def test_the_five_ways_in_which_a_stale_reference_serves_another_prompts_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown reference, one out of range, one that was used already, one whose blocks were given to others, and one
    whose time is over (vLLM #52234): all are computed, or are right. `PagedEngine` looks at every number."""
    monkeypatch.setattr(handoff, "UNLEARNED_SECONDS", 0.1)
    with pair(tmp_path, dram="1MiB", patience_ms=100) as both:
        first, second = both.prompt(500), both.prompt(500)
        unknown = both.decoded("unknown", second, forged(both, second))
        assert unknown["hits"] == {} and unknown["misses"]["absent"] == 448
        for at, fields in enumerate(({"blocks": 60_000}, {"blocks": 1}, {"blocks": 0}, {"head": bytes(32)})):
            prompt = both.prompt(450)
            told = both.decoded(f"range{at}", prompt, forged(both, prompt, **fields))
            reason = "key_mismatch" if fields == {"blocks": 0} else "stale_hint"
            assert told["hits"] == {} and told["misses"][reason] == 448, told
        ticket = both.prefilled("p", first)["ticket"]
        both.prefill.settle()  # all of it is stored: a busy machine takes longer than the patience here
        assert both.decoded("used", first, ticket)["hits"] == {"dram": 448}
        assert both.decoded("again", first, ticket)["hits"] == {"dram": 448}
        other = both.prompt(500)
        stale = both.decoded("for another prompt", other, ticket)
        assert stale["hits"] == {} and stale["misses"]["stale_hint"] == 448
        assert "another prompt" in stale["detail"]
        both.store.evict(1 << 20)
        for at in range(12):  # its memory is others' now
            both.prefilled(f"q{at}", both.prompt(500))
        both.prefill.settle()
        both.decode.settle()
        both.store.evict(1 << 20)
        reused = both.decoded("reused", first, ticket)
        assert reused["hits"] == {} and reused["misses"]["evicted"] == 448
        for at in range(3):
            both.prefilled(f"r{at}", both.prompt(500))
        late = forged(both, other, until_ms=1)
        told = both.decoded("over", both.prompt(500), late)
        assert told["hits"] == {} and told["misses"]["stale_hint"] == 448 and "time is over" in told["detail"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"namespace": bytes(16)}, "other_namespace"),
        ({"block_tokens": 128}, "other_namespace"),
        ({"owner": b"o" * 16}, "stale_hint"),
        ({"incarnation": b"i" * 8}, "stale_hint"),
        ({"key_id": b"k" * 8, "blocks": 0}, "key_mismatch"),
    ],
)
def test_a_ticket_of_elsewhere_is_told_and_waits_for_nothing(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pair(tmp_path) as both:
        prompt = both.prompt(300)
        began = time.monotonic()
        told = both.decoded("d", prompt, forged(both, prompt, **fields))
        assert told["misses"][reason] == 256 and time.monotonic() - began < handoff.UNLEARNED_SECONDS
        both.decode.settle()
        both.prefilled("p", prompt)
        both.prefill.settle()
        told = both.decoded("again", prompt, forged(both, prompt, **fields))
        assert told["hits"] == {"dram": 256}, "what is there is taken all the same: the keys are the prompt's own"


def test_what_a_producer_has_itself_is_stored_again_before_it_is_handed_over(tmp_path: Path) -> None:
    with pair(tmp_path) as both:
        prompt = both.prompt(400)
        both.prefilled("p", prompt)
        both.prefill.settle()
        both.store.evict(1 << 20)
        again = both.prefilled("again", prompt)
        assert again["hits"].get("engine"), "its own cache has it"
        assert both.decoded("d", prompt, again["ticket"])["hits"]["dram"] >= full(400) - 64


def test_a_chain_that_was_handed_over_is_kept_while_others_have_to_go(tmp_path: Path) -> None:
    with pair(tmp_path, dram="1MiB") as both:
        prompt = both.prompt(400)
        ticket = both.prefilled("p", prompt)["ticket"]
        both.prefill.settle()
        for at in range(25):
            assert "ticket" not in both.prefill.ask(f"o{at}", both.prompt(600)).account
        both.prefill.settle()
        assert both.decoded("d", prompt, ticket)["hits"] == {"dram": full(400)}


def test_users_say_for_how_long_and_a_ticket_says_at_least() -> None:
    assert RequestSpec(ttl=5.0).kept_seconds(9.0, TICKET_SECONDS) == 5.0
    assert RequestSpec().kept_seconds(9.0, TICKET_SECONDS) == 9.0
    assert RequestSpec(hands_over=True).kept_seconds(None, TICKET_SECONDS) == TICKET_SECONDS
    assert RequestSpec(ttl=900.0, hands_over=True).kept_seconds(None, TICKET_SECONDS) == 900.0


# How long it waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_wait_costs_a_quarter_of_what_is_missing_beyond_what_came(seed: int) -> None:
    """Whatever comes when: what it took is at most what the blocks that came save, and a quarter of the prompt."""
    print(f"seed {seed}")
    draw, clock = Random(seed), FakeClock()
    blocks, least, is_learned = draw.randrange(1, 60), draw.choice([0.0, 0.05]), draw.random() < 0.8
    rate = draw.choice([1e-5, 1e-3, 5e-2])
    prompt = Prompt(64 * blocks + 1, [bytes([at]) * 32 for at in range(blocks)])
    policy = WaitPolicy(
        prompt,
        64,
        lambda first, stop: rate * (stop - first) if is_learned else None,
        clock.monotonic_seconds,
        least,
    )
    began, there, stalls = clock.monotonic_seconds(), draw.randrange(blocks), 0
    first = there
    while left := policy.seconds_left(there):
        if draw.random() < 0.7:
            clock.advance(left * draw.random())
            there = min(blocks, there + draw.randrange(1, 20))
            policy.ended(AwaitEnd.READABLE)
        else:
            clock.advance(left)
            policy.ended(AwaitEnd.DEADLINE)
            stalls += 1
    assert policy.is_over and stalls <= 1, "a deadline that passed is the last one"
    taken, saved = clock.monotonic_seconds() - began, 64 * rate * (there - first)
    most = max(least, 64 * rate * (blocks - first) / 4) + saved if is_learned else 2.0 * (1 + there - first)
    assert taken <= min(most, 30.0) + 1e-6


def test_a_put_that_ends_short_ends_the_wait() -> None:
    policy = WaitPolicy(Prompt(640, [bytes(32)] * 10), 64, lambda *_: None, FakeClock().monotonic_seconds, 0.0)
    assert policy.seconds_left(0) == handoff.UNLEARNED_SECONDS
    policy.ended(AwaitEnd.SHORT)
    assert policy.seconds_left(3) == 0 and "short" in policy.detail


# The scheduler never waits ------------------------------------------------------------------------------------------


WAITING = 200


def test_asking_two_hundred_waiting_requests_touches_no_socket_lock_or_hash(tmp_path: Path) -> None:
    with (
        Sidecar(tmp_path, dram="16MiB") as sidecar,
        PagedEngine(Shape(), sidecar.client, Random(1), session="a" * 32) as engine,
    ):
        random = Random(SEED)
        for at in range(WAITING):
            engine.add(f"r{at}", [random.randrange(1000) for _ in range(300)], 1, RequestSpec(awaits=True))
        wait_until(lambda: sidecar.core.awaits.counts().parked >= WAITING, engine.step)
        engine.half._idle_seconds = 0.0  # as while others run
        called: Counter[str] = Counter()

        def note(frame: Any, event: str, arg: Any) -> None:
            if event == "c_call":
                called[f"{type(getattr(arg, '__self__', None)).__name__}.{arg.__name__}"] += 1
            elif event == "call":
                called[frame.f_code.co_qualname.rpartition("<locals>.")[2]] += 1

        sys.setprofile(note)
        try:
            answers = [engine.half.matched(f"r{at}", 0) for at in range(WAITING)]
        finally:
            sys.setprofile(None)
        assert answers == [(None, False)] * WAITING
        words = ("socket", "recv", "send", "acquire", "Lock", "Condition", "blake", "update", "digest", "__enter__")
        names = called.keys() - {f"{contained.__name__}.__enter__"}  # the guard against errors: it holds nothing
        touched = {name for name in names if any(word in name for word in words) or name.endswith(".poll")}
        assert called[BlockWait.may_look.__qualname__] >= WAITING, "they are asked"
        assert touched == set(), touched
        for at in range(WAITING):
            engine.abort(engine.requests[f"r{at}"])
        wait_until(lambda: sidecar.core.awaits.counts().parked == 0)
