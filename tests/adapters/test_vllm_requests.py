"""What a request's KV depends on besides its tokens, read off objects that look like vLLM's."""

from __future__ import annotations

from collections import UserDict
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.test_paged_scheduler import state_of
from engine_adapter.model_files import AdapterDigests
from engine_adapter.paged.requests import RequestSpec
from engine_adapter.vllm_requests import HINTS, EngineView, RequestReader, hinted
from kvstore.block.account import MissReason
from kvstore.block.identity import ExtraKey
from openai_api.small_openai import FOR_PREFILL
from waiting import wait_until

READER = RequestReader(AdapterDigests(lambda path: f"digest of {path.name}"))


def request(**given: Any) -> SimpleNamespace:
    usual: dict[str, Any] = {
        "request_id": "r",
        "prompt_embeds": None,
        "sampling_params": SimpleNamespace(),
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**{**usual, **given})


class Item(UserDict[str, Any]):
    """As vLLM has the fields of a picture."""


def item(**values: Any) -> Item:
    return Item({name: SimpleNamespace(data=value) for name, value in values.items()})


def feature(shown: Any, offset: int, length: int, name: str = "", modality: str = "image") -> SimpleNamespace:
    """shown: a picture's only number, or all its fields."""
    data = item(pixels=torch.tensor([shown], dtype=torch.float32)) if isinstance(shown, int) else shown
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=name or f"name of {shown}", data=data, modality=modality, mm_position=position)


def lora(folder: Path, number: int = 1, **given: Any) -> SimpleNamespace:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text("w")
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), lora_name="name", **given)


def read(reader: RequestReader, one: Any) -> RequestSpec:
    reading = reader.reading(one)
    if reading is not None:
        wait([reading], 20)
    return reader.facts(one, reading)


def keys(**given: Any) -> tuple[ExtraKey, ...]:
    facts = read(READER, request(**given))
    assert facts.refused is None, facts
    return facts.extra_keys


def test_text_depends_on_nothing_else() -> None:
    assert READER.facts(request()) == RequestSpec()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"prompt_embeds": object()}, "embeddings"),
        ({"resumable": True}, "streamed"),
        ({"sampling_params": None}, "generates nothing"),
        ({"mm_features": [feature(None, 3, 4)]}, "mm_processor_cache_type"),
        ({"mm_features": [feature(item(address=1, monotonic_id=2, signature=()), 3, 4)]}, "mm_processor_cache_type"),
        ({"mm_features": [feature(item(pixels=object()), 3, 4)]}, "type object"),
        ({"mm_features": [feature(item(pixels=torch.empty(1, device="meta")), 3, 4)]}, "on a device"),
    ],
)
def test_what_is_not_understood_is_not_cached(given: dict[str, Any], word: str) -> None:
    facts = read(READER, request(**given))
    assert facts.refused is MissReason.UNSUPPORTED and word in facts.detail


def test_a_salt_is_kept_as_a_digest_and_other_salts_are_others() -> None:
    one, other, none = keys(cache_salt="secret"), keys(cache_salt="Secret"), keys(cache_salt="")
    assert len({one, other, none}) == 3 and none == ()
    assert b"secret" not in repr(one).encode()


def test_an_image_is_its_content_at_its_place() -> None:
    found = {
        keys(mm_features=[feature(1, 3, 4)]),
        keys(mm_features=[feature(2, 3, 4)]),
        keys(mm_features=[feature(1, 4, 4)]),
        keys(mm_features=[feature(1, 3, 5)]),
        keys(mm_features=[feature(1, 3, 4), feature(2, 9, 4)]),
        keys(mm_features=[feature(2, 9, 4), feature(1, 3, 4)]),
        keys(mm_features=[feature(2, 3, 4), feature(1, 9, 4)]),
    }
    assert len(found) == 7
    (key,) = keys(mm_features=[feature(1, 3, 4)])
    assert key.first_token == 3, "what lies before it does not depend on it"


ZEROS = torch.zeros(2, 3)
FIELDS = [
    item(pixels=ZEROS),
    item(pixels=ZEROS, grid=torch.tensor([1, 2])),
    item(pixels=ZEROS, grid=[torch.tensor([1]), torch.tensor([2])]),
    item(pixels=ZEROS, grid=[torch.tensor([1]), [torch.tensor([2])]]),
    item(pixels=ZEROS, grid=[[torch.tensor([1]), torch.tensor([2])]]),
    item(grid=ZEROS, pixels=torch.tensor([1, 2])),
    item(pixels=ZEROS.reshape(3, 2)),
    item(pixels=ZEROS.to(torch.float64)),
    item(pixels=ZEROS.to(torch.int32)),
    item(pixels=ZEROS - torch.zeros(()), more=None),
    item(pixels=-ZEROS),
    item(pixels=torch.zeros(2, 3, dtype=torch.bfloat16)),
    item(pixels=torch.zeros(0, 3)),
    item(pixels=torch.zeros(3, 0)),
    item(pixels="1"),
    item(pixels=1),
    item(pixels=1.0),
    item(pixels=True),
    item(pixels=["1", "1"]),
    item(pixels=["11", ""]),
]


def test_no_two_items_have_one_digest() -> None:
    found = {keys(mm_features=[feature(one, 0, 4, f"n{at}")]) for at, one in enumerate(FIELDS)}
    found |= {keys(mm_features=[feature(one, 0, 4, f"v{at}", "video")]) for at, one in enumerate(FIELDS)}
    assert len(found) == 2 * len(FIELDS)


def test_what_an_image_is_called_says_nothing() -> None:
    """Neither of equal content nor of other content, also by strides."""
    spread = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    one = keys(mm_features=[feature(item(pixels=spread.T), 0, 4, "a")])
    assert one == keys(mm_features=[feature(item(pixels=spread.T.contiguous()), 0, 4, "b")])
    assert one != keys(mm_features=[feature(item(pixels=spread.reshape(4, 3)), 0, 4, "c")])
    other_engine = RequestReader(AdapterDigests(lambda _: None))
    again = read(other_engine, request(mm_features=[feature(item(pixels=spread.reshape(4, 3)), 0, 4, "a")]))
    assert again.extra_keys == keys(mm_features=[feature(item(pixels=spread.reshape(4, 3)), 0, 4, "c")])


def test_a_name_of_two_images_is_neither_from_then_on() -> None:
    """The engine's own caches go by the name: whose KV it computed under it is not known."""
    reader = RequestReader(AdapterDigests(lambda _: None))
    first = feature(1, 0, 4, "x")
    running, other = request(mm_features=[feature(3, 0, 4, "z"), first]), request(mm_features=[feature(3, 0, 4, "z")])
    assert read(reader, running).refused is None and not reader.is_in_doubt(running)
    assert read(reader, request(mm_features=[feature(1, 0, 4, "x")])).refused is None, "the same once more"
    for shown in (feature(2, 0, 4, "x"), first, feature(1, 0, 4, "x")):
        facts = read(reader, request(mm_features=[shown]))
        assert facts.refused is MissReason.UNSUPPORTED and "same name" in facts.detail
    assert reader.is_in_doubt(running) and not reader.is_in_doubt(other), "what runs is not stored from then on"
    assert read(reader, request(mm_features=[feature(1, 0, 4, "y")])).refused is None


def test_images_that_another_engine_encodes_go_by_their_names_and_are_not_cached() -> None:
    reader = RequestReader(AdapterDigests(lambda _: None), is_encoded_here=False)
    facts = read(reader, request(mm_features=[feature(1, 0, 4)]))
    assert facts.refused is MissReason.UNSUPPORTED and "ec_transfer_config" in facts.detail
    assert read(reader, request()).refused is None


def test_an_image_that_is_not_read_yet_is_not_looked_up() -> None:
    facts = READER.facts(request(mm_features=[feature(1, 0, 4)]), Future())
    assert facts.refused is MissReason.UNSUPPORTED and "in time" in facts.detail


def test_an_adapter_is_its_content_and_not_its_name(tmp_path: Path) -> None:
    loaded = lora(tmp_path / "a")
    first = READER.facts(request(lora_request=loaded))
    if first.refused:
        assert first.refused is MissReason.UNSUPPORTED and "being read" in first.detail
    wait_until(lambda: not READER.facts(request(lora_request=loaded)).refused)
    assert keys(lora_request=loaded) == (ExtraKey(b"adapter:digest of a"),)
    assert keys(lora_request=loaded, cache_salt="s") != keys(lora_request=loaded)
    missing = SimpleNamespace(lora_int_id=9, lora_path=str(tmp_path / "none"), lora_name="name")
    assert "cannot be read" in READER.facts(request(lora_request=missing)).detail


def test_a_request_that_must_not_read_the_cache_does_not() -> None:
    facts = READER.facts(request(skip_reading_prefix_cache=True))
    assert not facts.reads and facts.saves


# Hints ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text", 7, {"kvstore": None}])
def test_without_hints_nothing_is_wanted(params: Any) -> None:
    assert hinted(RequestSpec(), params) == RequestSpec()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"store": False}, {"saves": False}),
        ({"store": True}, {}),
        ({"ttl": 60}, {"ttl": 60}),
        ({"ttl": 0.5, "priority": -100}, {"ttl": 0.5, "priority": -100}),
        ({"conversation": "c", "priority": 7}, {"priority": 7}),
        ({"conversation": "c", "ttl": 5}, {"ttl": 5}),
        ({"conversation": "c"}, {"priority": 100}),
        ({"conversation": ""}, {}),
        ({"ticket": "kv1.x"}, {"ticket": "kv1.x"}),
        ({"await": True}, {"awaits": True}),
    ],
)
def test_what_a_user_wants_is_taken(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    facts = RequestSpec((ExtraKey(b"k"),), reads=False)
    found = hinted(facts, {"kvstore": given})
    assert found == RequestSpec((ExtraKey(b"k"),), reads=False, **wanted) and found.ignored == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"store": "no"}, "store='no'; give true or false"),
        ({"store": 0}, "store=0; give true or false"),
        ({"ttl": 0}, "ttl=0; give seconds above 0 and below 2**40"),
        ({"ttl": True}, "ttl=True; give seconds above 0 and below 2**40"),
        ({"ttl": float("nan")}, "ttl=nan; give seconds above 0 and below 2**40"),
        ({"ttl": "60"}, "ttl='60'; give seconds above 0 and below 2**40"),
        ({"priority": 101}, "priority=101; give a whole number from -100 to 100"),
        ({"priority": 1.5}, "priority=1.5; give a whole number from -100 to 100"),
        ({"priority": False}, "priority=False; give a whole number from -100 to 100"),
        ({"conversation": 5}, "conversation=5; give text"),
        ({"ticket": 7}, "ticket=7; give the text that the prefilling engine told"),
        ({"await": "yes"}, "await='yes'; give true or false"),
        ({"stores": True}, f"stores; allowed: {', '.join(HINTS)}"),
        ([1], f"kvstore=[1]; give an object with {', '.join(HINTS)}"),
        (False, f"kvstore=False; give an object with {', '.join(HINTS)}"),
    ],
)
def test_what_is_not_understood_is_told_and_has_no_effect(given: Any, told: str) -> None:
    found = hinted(RequestSpec(), {"kvstore": given})
    assert found == RequestSpec(ignored=(told,))


def test_what_is_right_beside_what_is_wrong_has_its_effect() -> None:
    found = hinted(RequestSpec(), {"kvstore": {"store": False, "ttl": -1, "x": 1}})
    assert not found.saves and found.ttl is None and len(found.ignored) == 2


# Hand-overs ----------------------------------------------------------------------------------------------------------

TOLD = {**state_of("r").told(), "ignored": [], "block_tokens": 64, "ticket": "kv1.x"}
"""What a prefilling engine tells."""


def facts_of(role: str, params: dict[str, Any] | None) -> RequestSpec:
    reader = RequestReader(AdapterDigests(lambda path: f"digest of {path.name}"), role)
    return reader.facts(request(kv_transfer_params=params))


@pytest.mark.parametrize(
    ("role", "params", "hands_over"),
    [
        ("kv_producer", None, True),
        ("kv_producer", FOR_PREFILL, True),
        ("kv_producer", {"kvstore": {"store": False}}, False),
        ("kv_both", None, False),
        ("kv_both", FOR_PREFILL, True),
        ("kv_both", {"do_remote_decode": "yes"}, False),
        ("kv_consumer", FOR_PREFILL, False),
    ],
)
def test_who_hands_a_prompt_over(role: str, params: dict[str, Any] | None, hands_over: bool) -> None:
    facts = facts_of(role, params)
    assert facts.hands_over is hands_over and facts.ignored == ()


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
@pytest.mark.parametrize(
    "more", [{}, {"remote_host": "10.0.0.1"}, {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}]
)
def test_what_proxies_pass_on_to_the_decoding_engine_is_taken_as_it_is(role: str, more: dict[str, Any]) -> None:
    facts = facts_of(role, {"kvstore": TOLD, **more})
    assert facts.ticket == "kv1.x" and facts.ignored == () and not facts.hands_over


def test_a_producer_waits_for_no_one() -> None:
    facts = facts_of("kv_producer", {"kvstore": {"ticket": "kv1.x", "await": True}})
    assert not facts.ticket and not facts.awaits and facts.ignored == ()


# A request as the scheduler's half sees it ---------------------------------------------------------------------------


def test_a_view_shows_the_request_as_it_is_now() -> None:
    engines = SimpleNamespace(request_id="r", num_tokens=5, num_prompt_tokens=3, all_token_ids=[1, 2, 3, 4, 5])
    view = EngineView(engines)
    assert (view.request_id, view.num_tokens, view.num_prompt_tokens, view.due) == ("r", 5, 3, 0)
    assert view.token_ids(1, 4) == [2, 3, 4]
    engines.num_tokens, engines.all_token_ids = 6, [*range(6)]
    assert (view.num_tokens, view.token_ids(4, 6)) == (6, [4, 5])


@pytest.mark.parametrize(
    ("computed", "has_drafts", "final"), [(4, False, 4), (9, False, 5), (2, True, 2), (4, True, 3), (9, True, 3)]
)
def test_only_what_is_accepted_is_final(computed: int, has_drafts: bool, final: int) -> None:
    engines = SimpleNamespace(request_id="r", num_tokens=5, num_prompt_tokens=3, all_token_ids=[1, 2, 3, 4, 5])
    assert EngineView(engines).final(computed, has_drafts=has_drafts) == final
