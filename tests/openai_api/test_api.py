"""Bodies and events, without a wire: what goes on is what came, and what came is bounded first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvstore.openai import api
from kvstore.openai.api import ApiRefusal, EventSplitter, Legs

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=6), VALUES, max_size=6).filter(lambda one: "kv_transfer_params" not in one)


@given(BODIES, st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_what_no_leg_says_goes_on_as_it_came(given_body: dict[str, Any], told: dict[str, Any]) -> None:
    body = api.read_body(json.dumps(given_body).encode())
    params = Raw(json.dumps(told).encode())
    decode = json.loads(api.decode_body(body, Legs.NIXLV2, params, "id"))
    assert decode == {**given_body, "kv_transfer_params": told}
    assert json.loads(api.decode_body(body, Legs.SHARED_STORAGE, params, "id")) == given_body
    prefill = json.loads(api.prefill_body(body, Legs.NIXLV2, "id"))
    for name, value in given_body.items():
        if name not in ("max_tokens", "max_completion_tokens", "stream", *api._NOT_PREFILLED):
            assert prefill[name] == value
    assert prefill["max_tokens"] == 1 and prefill["stream"] is False
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True


def test_numbers_and_texts_are_not_written_anew() -> None:
    body = api.read_body(b'{"temperature": 1.0e-2, "prompt": "\\u00e9\\/", "seed": 123456789012345678901234567890}')
    sent = api.decode_body(body, Legs.SHARED_STORAGE, None, "id")
    assert b"1.0e-2" in sent and b'"\\u00e9\\/"' in sent and b"123456789012345678901234567890" in sent


@pytest.mark.parametrize(
    ("content", "status", "hint"),
    [
        (b"", 400, "JSON"),
        (b"[1]", 400, "object"),
        (b'{"prompt": "a"', 400, "JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "JSON"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(api.MOST_FIELDS + 1)) + b"}", 400, "fields"),
        (b'{"prompt": [' + b'"",' * (api.MOST_STRINGS + 1) + b'""]}', 413, "strings"),
    ],
)
def test_a_body_is_bounded_before_it_is_taken_apart(content: bytes, status: int, hint: str) -> None:
    with pytest.raises(ApiRefusal, match=hint) as refused:
        api.read_body(content)
    assert refused.value.status == status


def test_a_long_text_full_of_quotes_is_no_many_strings() -> None:
    text = '"' * 4 * api.MOST_STRINGS
    assert json.loads(bytes(api.read_body(json.dumps({"prompt": text}).encode())["prompt"])) == text


@given(st.lists(st.tuples(st.binary(max_size=20), st.sampled_from([b"\n\n", b"\r\n\r\n"])), max_size=8), st.data())
def test_events_are_whole_however_they_are_cut(events: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    events = [(b"data: " + said.replace(b"\n", b"").replace(b"\r", b""), end) for said, end in events]
    stream, rest = b"".join(said + end for said, end in events), b"data: unfinished"
    splitter, found = EventSplitter(), []
    left = stream + rest
    while left:
        size = data.draw(st.integers(1, len(left)))
        found += splitter.fed(left[:size])
        left = left[size:]
    assert found == [said + end for said, end in events]
    assert [api.event_data(one) for one in found] == [said[6:] for said, _ in events]


def test_an_event_without_an_end_is_bounded() -> None:
    splitter = EventSplitter()
    with pytest.raises(ValueError, match="bytes"):
        for _ in range(api.MOST_EVENT_BYTES // 1024 + 2):
            splitter.fed(b"x" * 1024)
