"""`kvstore pd-proxy` before small servers: what both legs are told, and what becomes of faults on every side."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openai_api.running import RunningProxy, events_of
from openai_api.small_openai import FOR_PREFILL, SECONDS, Answer, Asked, SmallOpenAi, text_chunk
from waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "6a1f",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 2,
    "remote_num_tokens": 48,
    "remote_blocks_expiry_time": 1.5e2,
    "kvstore": {"ticket": "kv1.AAAA", "asked": 48, "hits": {}, "misses": {"absent": 48}},
}
PROMPT = {"model": "m", "prompt": "a long prompt", "max_tokens": 7, "temperature": 0}


async def prefills(asked: Asked) -> None:
    """As an engine whose connector hands over: it says where its blocks are."""
    await asked.json({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": NIXL})


async def decodes(asked: Asked) -> None:
    if asked.body.get("stream"):
        await asked.events([text_chunk("one"), text_chunk("two")])
    else:
        await asked.json({"id": "d", "choices": [{"text": "one two"}]})


async def hangs(asked: Asked) -> None:
    await asked.until_gone()


@pytest.fixture
def small() -> Iterator[Callable[..., SmallOpenAi]]:
    made: list[SmallOpenAi] = []

    def make(answer: Answer, **more: Answer) -> SmallOpenAi:
        others = {f"/{name}": one for name, one in more.items()}
        made.append(SmallOpenAi({COMPLETIONS: answer, CHAT: answer, **others}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def before(prefill: SmallOpenAi, *decodes: SmallOpenAi, more: tuple[str, ...] = (), **given: Any) -> RunningProxy:
    flags = [word for one in decodes for word in ("--decode", one.url)]
    return RunningProxy("--prefill", prefill.url, *flags, *more, **given)


# What the legs are told ----------------------------------------------------------------------------------------------


def test_the_legs_of_vllms_toy_proxy_and_llm_d(small: Callable[..., SmallOpenAi]) -> None:
    """nixlv2: P with one token and no stream; D with what P said, word for word."""
    prefill, decode = small(prefills), small(decodes)
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "min_tokens": 5, "odd": [1.5]}
    body["kv_transfer_params"] = {"kvstore": {"ttl": 60}}
    with before(prefill, decode) as proxy:
        status, said, _ = proxy.ask(COMPLETIONS, body, authorization="Bearer secret", x_request_id="name-1")
    assert status == 200 and events_of(said) == [text_chunk("one"), text_chunk("two"), "[DONE]"]
    (p,), (d,) = prefill.of(COMPLETIONS), decode.of(COMPLETIONS)
    assert p.body == {
        "model": "m",
        "prompt": "a long prompt",
        "temperature": 0,
        "odd": [1.5],
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"kvstore": {"ttl": 60}, **FOR_PREFILL},
    }
    assert d.body == {**body, "kv_transfer_params": NIXL}
    assert json.dumps(NIXL).encode() in d.content, "as it was written"
    for one in (p, d):
        assert one.headers["authorization"] == "Bearer secret" and one.headers["x-request-id"] == "name-1"


def test_chat_goes_the_same_way(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    with before(prefill, decode) as proxy:
        answer = proxy.ask(CHAT, body)
    assert json.loads(answer.body)["choices"] == [{"text": "one two"}] and answer.legs == ("done", "decode-0")
    (p,), (d,) = prefill.of(CHAT), decode.of(CHAT)
    assert p.body["max_completion_tokens"] == p.body["max_tokens"] == 1 and p.body["messages"] == body["messages"]
    assert d.body == {**body, "kv_transfer_params": NIXL}
    assert p.headers["x-request-id"] == d.headers["x-request-id"] != ""


def test_prefill_that_says_nothing_leaves_the_body_as_it_is(small: Callable[..., SmallOpenAi]) -> None:
    async def plain(asked: Asked) -> None:
        await asked.json({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": None})

    prefill, decode = small(plain), small(decodes)
    with before(prefill, decode) as proxy:
        assert proxy.ask(COMPLETIONS, PROMPT)[0] == 200
    assert decode.of(COMPLETIONS)[0].body == PROMPT


def test_shared_storage_has_no_parameters(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    with before(prefill, decode, more=("--legs", "shared-storage")) as proxy:
        assert proxy.ask(COMPLETIONS, PROMPT)[0] == 200
    assert prefill.of(COMPLETIONS)[0].body == {**PROMPT, "max_tokens": 1, "cache_hit_threshold": 0, "stream": False}
    assert decode.of(COMPLETIONS)[0].body == PROMPT


@pytest.mark.parametrize("is_bound", [False, True])
def test_both_legs_at_once(small: Callable[..., SmallOpenAi], is_bound: bool) -> None:
    """Neither answers before the other one was asked."""
    asked = threading.Barrier(2)

    def met(answer: Answer) -> Answer:
        async def wait(one: Asked) -> None:
            await asyncio.to_thread(asked.wait, SECONDS)
            await answer(one)

        return wait

    prefill, decode = small(met(prefills)), small(met(decodes))
    more = ("--legs", "at-once", *(("--prefiller", "10.0.0.7:5600") if is_bound else ()))
    body = {**PROMPT, "kv_transfer_params": {"kvstore": {"ttl": 5}, "own": 1}}
    with before(prefill, decode, more=more) as proxy:
        answer = proxy.ask(COMPLETIONS, body, x_request_id="pair-1")
    assert (answer.status, answer.legs[0]) == (200, "at once")
    told = [one.of(COMPLETIONS)[0].body["kv_transfer_params"] for one in (prefill, decode)]
    p, d = {"kvstore": {"ttl": 5}}, {"kvstore": {"ttl": 5, "await": True}}
    if is_bound:
        pair = told[0]["remote_decoder"]["kv_request_id"]
        assert len(pair) == 32 and pair != "pair-1", "a client cannot name the pair"
        p |= {"remote_decoder": {"kv_request_id": pair}}
        place = {"kv_request_id": pair, "remote_host": "10.0.0.7", "remote_port": 5600}
        d |= {"remote_prefiller": place}
    assert told == [p, d]


EVIL = "evil.example"
TRANSFER = {
    **NIXL,
    "remote_host": EVIL,
    "remote_engine_id": EVIL,
    "remote_prefiller": {"remote_host": EVIL},
    "remote_decoder": {"kv_request_id": EVIL},
    "transfer_id": EVIL,
    "odd": [EVIL],
    "kvstore": {"ttl": 60, "ticket": EVIL, "await": EVIL},
}
OF_ENGINES: dict[str, Any] = {
    "kv_transfer_params": TRANSFER,
    "ec_transfer_params": {"peer_host": EVIL},
    "bootstrap_host": [EVIL],
    "bootstrap_port": [EVIL],
    "bootstrap_room": EVIL,
    "disagg_prefill_dp_rank": EVIL,
    "routed_dp_rank": EVIL,
    "data_parallel_rank": EVIL,
    "disaggregated_params": {"ctx_request_id": EVIL},
    "nvext": {"backend_instance_id": EVIL},
    "request_id": EVIL,
    "rid": EVIL,
    "vllm_xargs": {"kv_transfer_params": [EVIL], "ec_transfer_params": EVIL, "session_id": "s"},
}
"""Fields by which vLLM, SGLang, TensorRT-LLM and Dynamo are told where KV is, and whose."""
HEADERS = {"X_data_parallel_rank": EVIL, "X_kv_transfer_params": EVIL, "X_session_id": EVIL, "X_Forwarded_Host": EVIL}
ODD_FORMS = [
    json.dumps({**PROMPT, **OF_ENGINES}).encode().replace(b"_params", b"\\u005fparams"),
    json.dumps(PROMPT).encode()[:-1]
    + b', "kv_transfer_params": {}, "kv_transfer_params": {"remote_host": "evil.example"}}',
    json.dumps({**PROMPT, "kv_transfer_params": {"remote_host": EVIL, "kvstore": EVIL[:0]}}).encode(),
]


@pytest.mark.parametrize("legs", ["nixlv2", "shared-storage", "at-once"])
@pytest.mark.parametrize("with_prefill", [True, False])
def test_a_client_cannot_say_where_kv_is(small: Callable[..., SmallOpenAi], legs: str, with_prefill: bool) -> None:
    """Neither leg has anything of it, by whatever field, form, header and path; its hints to the store stay."""
    prefill, decode = small(prefills), small(decodes)
    if not with_prefill:
        prefill.close()
    with before(prefill, decode, more=("--legs", legs)) as proxy:
        if not with_prefill:
            wait_until(lambda: proxy.health()["status"] == "degraded")
        for path in (COMPLETIONS, CHAT):
            assert proxy.ask(path, {**PROMPT, **OF_ENGINES}, **HEADERS)[0] == 200
            for body in ODD_FORMS:
                assert proxy.ask(path, body, **HEADERS)[0] == 200
        assert proxy.ask(f"{COMPLETIONS}?data_parallel_rank={EVIL}", PROMPT)[0] == 200
    for engine in (prefill, decode):
        asked = [one for one in engine.asked if one.path != "/health"]
        assert len(asked) == (9 if with_prefill or engine is decode else 0)
        for one in asked:
            assert EVIL.encode() not in one.content and EVIL not in f"{one.path} {one.headers}"
    first = decode.of(COMPLETIONS)[0].body
    assert first["vllm_xargs"] == {"session_id": "s"} and not {*OF_ENGINES} & {*first} - {
        "vllm_xargs",
        "kv_transfer_params",
    }
    awaits = {"await": True} if legs == "at-once" and with_prefill else {}
    by_prefill = NIXL if legs == "nixlv2" and with_prefill else {"kvstore": {"ttl": 60, **awaits}}
    assert first["kv_transfer_params"] == by_prefill
    if with_prefill:
        assert prefill.of(COMPLETIONS)[0].body["kv_transfer_params"]["kvstore"] == {"ttl": 60}


@pytest.mark.parametrize("name", ["vllm_xargs", "kv_transfer_params"])
def test_an_object_that_only_an_engine_could_read_is_refused(small: Callable[..., SmallOpenAi], name: str) -> None:
    prefill, decode = small(prefills), small(decodes)
    inner = b'{"\xff": 1, "kv_transfer_params": ["evil.example"], "ticket": "evil.example"}'
    told = inner if name == "vllm_xargs" else b'{"kvstore": %b}' % inner
    with before(prefill, decode) as proxy:
        status, error = proxy.error(
            COMPLETIONS, json.dumps(PROMPT).encode()[:-1] + b', "%b": %b}' % (name.encode(), told)
        )
        assert (status, error["param"]) == (400, name)
    assert not prefill.of(COMPLETIONS) and not decode.of(COMPLETIONS)


def test_an_operator_lets_clients_set_more(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    more = [word for name in ("odd", "ticket", "bootstrap_room") for word in ("--pass-on", name)]
    with before(prefill, decode, more=("--legs", "shared-storage", *more)) as proxy:
        assert proxy.ask(COMPLETIONS, {**PROMPT, **OF_ENGINES})[0] == 200
    body = decode.of(COMPLETIONS)[0].body
    assert body["kv_transfer_params"] == {"odd": [EVIL], "kvstore": {"ttl": 60, "ticket": EVIL}}
    assert body["bootstrap_room"] == EVIL and "bootstrap_host" not in body


def test_nothing_is_awaited_of_a_prefill_engine_that_is_down(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    prefill.close()
    with before(prefill, decode, more=("--legs", "at-once")) as proxy:
        wait_until(lambda: proxy.health()["status"] == "degraded")
        answer = proxy.ask(COMPLETIONS, PROMPT)
    assert (answer.status, answer.legs[0]) == (200, "down")
    assert [one.body for one in decode.of(COMPLETIONS)] == [PROMPT]


def test_events_are_passed_on_when_they_come(small: Callable[..., SmallOpenAi]) -> None:
    """Each is read before the engine makes the next; what is not whole waits for its end."""
    go_on = [threading.Event() for _ in range(3)]

    async def step_by_step(asked: Asked) -> None:
        await asked.begin_events()
        for number, may in enumerate(go_on):
            await asked.event(text_chunk(str(number)))
            await asyncio.to_thread(may.wait, SECONDS)
        await asked.chunk(b"data: [DO")
        await asked.chunk(b"NE]\n\n")
        await asked.end_chunks()

    prefill, decode = small(prefills), small(step_by_step)
    with before(prefill, decode) as proxy:
        connection, answer = proxy.asked(COMPLETIONS, {**PROMPT, "stream": True})
        for number, may in enumerate(go_on):
            assert json.loads(answer.readline()[6:]) == text_chunk(str(number)) and answer.readline() == b"\n"
            may.set()
        assert answer.read() == b"data: [DONE]\n\n"
        connection.close()


# A client that leaves ------------------------------------------------------------------------------------------------


def request_of(body: Any) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream", "both"])
def test_a_client_that_hangs_up_ends_the_legs(small: Callable[..., SmallOpenAi], leg: str) -> None:
    async def streams_and_hangs(asked: Asked) -> None:
        await asked.begin_events()
        await asked.event(text_chunk("one"))
        await asked.until_gone()

    prefill = small(prefills if leg in ("decode", "stream") else hangs)
    decode = small(streams_and_hangs if leg == "stream" else hangs)
    with before(prefill, decode, more=("--legs", "at-once") if leg == "both" else ()) as proxy:
        wire = proxy.wire(request_of({**PROMPT, "stream": leg == "stream"}))
        ends = {"prefill": (prefill,), "both": (prefill, decode)}.get(leg, (decode,))
        asked = [one.wait(COMPLETIONS) for one in ends]
        if leg == "stream":
            assert wire.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert not any(one.hung_up.is_set() for one in asked)
        wire.close()
        assert all(one.hung_up.wait(SECONDS) for one in asked)
        assert leg != "prefill" or not decode.of(COMPLETIONS)
        assert proxy.health()["under_way"] == 0


def test_a_client_that_reads_nothing_holds_nothing(small: Callable[..., SmallOpenAi]) -> None:
    async def floods(asked: Asked) -> None:
        await asked.begin_events()
        for _ in range(4000):
            await asked.event(text_chunk("x" * 16384))

    prefill, decode = small(prefills), small(floods)
    with before(prefill, decode, server={"unread_seconds": 0.5}) as proxy:
        wire = proxy.wire(request_of({**PROMPT, "stream": True}))
        assert decode.wait(COMPLETIONS).hung_up.wait(SECONDS)
        wire.close()


# Prefill at fault ----------------------------------------------------------------------------------------------------


async def fails(asked: Asked) -> None:
    await asked.json({"error": {"message": "broken"}}, 500)


async def is_full(asked: Asked) -> None:
    await asked.json({"error": {"message": "full"}}, 503)


async def says_nonsense(asked: Asked) -> None:
    await asked.json(b"<html>")


async def says_too_much(asked: Asked) -> None:
    await asked.json({"pad": "x" * (9 << 20)})


async def drips(asked: Asked) -> None:
    await asked.head(content_length="1000000")
    while True:
        await asked.raw(b" ")
        await asyncio.sleep(0.01)


async def breaks_off(asked: Asked) -> None:
    await asked.head(content_length="1000")
    await asked.raw(b'{"id": ')


def test_without_prefill_decode_computes(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(fails), small(decodes)
    with before(prefill, decode, more=("--prefill-seconds", "1")) as proxy:
        for fault in (fails, is_full, says_nonsense, says_too_much, drips, hangs, breaks_off):
            prefill.answers[COMPLETIONS] = fault
            answer = proxy.ask(COMPLETIONS, PROMPT)
            assert answer.status == 200 and json.loads(answer.body)["id"] == "d", fault
            assert answer.legs[0] == "failed", fault
    assert [one.body for one in decode.of(COMPLETIONS)] == [PROMPT] * 7


def test_a_prefill_engine_that_is_gone_is_not_waited_for(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    prefill.close()
    with before(prefill, decode) as proxy:
        for _ in range(2):
            answer = proxy.ask(COMPLETIONS, PROMPT)
            assert answer.status == 200 and answer.legs[0] in ("failed", "down")
        told = proxy.health()
        assert told["status"] == "degraded" and not told["prefill"]["up"] and told["decode"][0]["up"]
    assert proxy.said.count("prefill is down") == 1


def test_what_prefill_refuses_the_client_is_told(small: Callable[..., SmallOpenAi]) -> None:
    async def refuses(asked: Asked) -> None:
        await asked.json({"error": {"message": "too long", "type": "X", "param": None, "code": 400}}, 400)

    prefill, decode = small(refuses), small(decodes)
    with before(prefill, decode) as proxy:
        assert proxy.error(COMPLETIONS, PROMPT) == (
            400,
            {"message": "too long", "type": "X", "param": None, "code": 400},
        )
    assert not decode.of(COMPLETIONS)


# Decode at fault -----------------------------------------------------------------------------------------------------


def test_another_engine_decodes_where_the_first_cannot(small: Callable[..., SmallOpenAi]) -> None:
    prefill, gone, full, good = small(prefills), small(decodes), small(is_full), small(decodes)
    gone.close()
    with before(prefill, gone, full, good) as proxy:
        for _ in range(4):
            answer = proxy.ask(COMPLETIONS, PROMPT)
            assert (answer.status, answer.legs[1]) == (200, "decode-2")
    assert len(good.of(COMPLETIONS)) == 4


def test_a_request_that_ends_an_engine_ends_one(small: Callable[..., SmallOpenAi]) -> None:
    async def dies(asked: Asked) -> None:
        asked.writer.transport.abort()

    prefill, first, second = small(prefills), small(dies), small(dies)
    with before(prefill, first, second) as proxy:
        status, error = proxy.error(COMPLETIONS, PROMPT)
    assert status == 502 and error["type"] == "server_error"
    assert len(first.of(COMPLETIONS)) + len(second.of(COMPLETIONS)) == 1


def test_where_all_are_full_or_gone_that_is_said(small: Callable[..., SmallOpenAi]) -> None:
    prefill, full = small(prefills), small(is_full)
    with before(prefill, full) as proxy:
        assert proxy.ask(COMPLETIONS, PROMPT)[:2] == (503, b'{"error": {"message": "full"}}')
        full.close()
        status, error = proxy.error(COMPLETIONS, PROMPT)
        assert status == 503 and "cannot be reached" in error["message"]
        assert proxy.ask("/health", method="GET")[0] == 503


async def ends_early(asked: Asked) -> None:
    await asked.begin_events()
    await asked.event(text_chunk("one"))
    await asked.end_chunks()


async def breaks_in_an_event(asked: Asked) -> None:
    await asked.begin_events()
    await asked.event(text_chunk("one"))
    await asked.chunk(b'data: {"id"')


async def goes_silent(asked: Asked) -> None:
    await asked.begin_events()
    await asked.event(text_chunk("one"))
    await asked.until_gone()


async def drips_an_event(asked: Asked) -> None:
    await asked.begin_events()
    await asked.event(text_chunk("one"))
    while True:
        await asked.chunk(b"x")
        await asyncio.sleep(0.01)


async def has_no_end(asked: Asked) -> None:
    await asked.begin_events()
    await asked.event(text_chunk("one"))
    while True:
        await asked.chunk(b"x" * 65536)


def test_a_stream_that_fails_says_so_in_its_last_event(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(ends_early)
    faults = [ends_early, breaks_in_an_event, goes_silent, drips_an_event, has_no_end]
    with before(prefill, decode, limits={"silent_seconds": 1.0}) as proxy:
        for number, fault in enumerate(faults, 1):
            decode.answers[COMPLETIONS] = fault
            status, said, _ = proxy.ask(COMPLETIONS, {**PROMPT, "stream": True})
            first, last = events_of(said)
            assert status == 200 and first == text_chunk("one"), fault
            assert last["error"]["type"] == "server_error", fault
            assert number <= 2 or decode.wait(COMPLETIONS, number).hung_up.wait(SECONDS), fault


def test_an_answer_that_never_ends_is_ended(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(drips)
    with before(prefill, decode, more=("--decode-seconds", "1")) as proxy:
        assert proxy.error(COMPLETIONS, PROMPT)[0] == 504
        assert decode.wait(COMPLETIONS).hung_up.wait(SECONDS)


# A client at fault ---------------------------------------------------------------------------------------------------


def test_wrong_requests_are_refused_in_openais_shape(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    with before(prefill, decode, limits={"body_bytes": 4096}, server={"body_seconds": 1.0}) as proxy:
        wrong_params = {**PROMPT, "kv_transfer_params": [1]}
        for body, status, param in ((b"{", 400, None), (b"[]", 400, None), (wrong_params, 400, "kv_transfer_params")):
            found, error = proxy.error(COMPLETIONS, body)
            assert (found, error["type"], error["param"]) == (status, "invalid_request_error", param)
        assert proxy.error(COMPLETIONS, b"x" * 5000)[0] == 413
        assert proxy.error(COMPLETIONS, None, "GET")[0] == 405
        assert proxy.error("/v1/embeddings", PROMPT)[0] == 404
        chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        for odd in (b'{"\\ud800": 1}', b'{"\xff": 1}', b'{"kv_transfer_params": {"\\udfff": 1}}'):
            assert proxy.error(COMPLETIONS, odd)[0] == 400
        for sent, status in (
            (chunked + b"1000\r\n" + b"x" * 4096 + b"\r\n1\r\nx\r\n0\r\n\r\n", b"413"),
            (chunked, b"408"),
            (b"\x16\x03\x01 no HTTP at all\r\n\r\n", b"400"),
        ):
            with proxy.wire(sent) as wire:
                assert wire.recv(1 << 16).startswith(b"HTTP/1.1 " + status)
        odd = {"authorization": "Bearer \xe9", "x_request_id": "\xe9" * 9}
        assert proxy.ask(COMPLETIONS, PROMPT, **odd)[0] == 200
    (asked,), (same,) = prefill.of(COMPLETIONS), decode.of(COMPLETIONS)
    assert "authorization" not in asked.headers and asked.headers["x-request-id"].isascii()
    assert same.headers["x-request-id"] == asked.headers["x-request-id"]


def test_more_requests_than_it_takes_are_told_to_come_again(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(hangs)
    with before(prefill, decode, more=("--requests", "1")) as proxy:
        with proxy.wire(request_of({})):
            decode.wait(COMPLETIONS)
            answer = proxy.ask(COMPLETIONS, PROMPT)
        assert answer.status == 503 and answer.headers["retry-after"] == "1" and b"under way" in answer.body


def test_who_says_nothing_is_shown_out(small: Callable[..., SmallOpenAi]) -> None:
    prefill, decode = small(prefills), small(decodes)
    with before(prefill, decode, server={"head_seconds": 1.0, "connections": 4}) as proxy:
        silent = [proxy.wire() for _ in range(4)]
        silent[0].sendall(b"POST /v1/completions HT")
        with proxy.wire() as one_too_many:
            assert one_too_many.recv(1) == b""
        assert silent[0].recv(12) in (b"", b"HTTP/1.1 408"), "it made room, or was told that its head is late"
        assert [one.recv(1) for one in silent[1:]] == [b""] * 3
        for one in silent:
            one.close()
        assert proxy.ask(COMPLETIONS, PROMPT)[0] == 200


# Who decodes ---------------------------------------------------------------------------------------------------------


def knows(tokens: int) -> Answer:
    async def answer(asked: Asked) -> None:
        its = {"longest_matched": tokens, "GPU": 0, "CPU": tokens, "DISK": 0, "DP": {}, "is_asked": True}
        of_another = {"longest_matched": 4096, "GPU": 0, "CPU": 4096, "DISK": 0, "DP": {}, "is_asked": False}
        await asked.json({"default": {"node": its, "another": of_another}})

    return answer


def test_the_engine_whose_sidecar_knows_most_decodes(small: Callable[..., SmallOpenAi], tmp_path: Path) -> None:
    async def tokenizes(asked: Asked) -> None:
        await asked.json({"count": 3, "tokens": [7, 8, 9], "max_model_len": 100})

    prefill = small(prefills)
    decodes_ = [small(decodes, query=knows(tokens), tokenize=tokenizes) for tokens in (64, 256, 128)]
    scores = tuple(word for one in decodes_ for word in ("--score", one.url))
    token = tmp_path / "token"
    token.write_text("of-the-tenant\n")
    with before(prefill, *decodes_, more=(*scores, "--score-token-file", str(token))) as proxy:
        for body in ({**PROMPT, "prompt": [7, 8, 9]}, PROMPT, {"model": "m", "messages": [{"role": "user"}]}):
            path = CHAT if "messages" in body else COMPLETIONS
            answer = proxy.ask(path, body, authorization="Bearer mine")
            assert (answer.status, answer.legs[1]) == (200, "decode-1")
    asked = decodes_[0].of("/query")
    assert [one.body for one in asked] == [{"model": "m", "token_ids": [7, 8, 9]}] * 3
    assert all(one.headers["authorization"] == "Bearer of-the-tenant" for one in asked), "and no engine's key"
    of_chat = [one.body for one in decodes_[0].of("/tokenize")][-1]
    assert of_chat == {"model": "m", "messages": [{"role": "user"}]}


@pytest.mark.parametrize("score", [says_nonsense, hangs, fails])
def test_without_an_answer_they_decode_in_turn(small: Callable[..., SmallOpenAi], score: Answer) -> None:
    prefill = small(prefills)
    decodes_ = [small(decodes, query=score) for _ in range(2)]
    scores = tuple(word for one in decodes_ for word in ("--score", one.url))
    with before(prefill, *decodes_, more=scores) as proxy:
        for _ in range(4):
            assert proxy.ask(COMPLETIONS, {**PROMPT, "prompt": [7, 8, 9]})[0] == 200
    assert [len(one.of(COMPLETIONS)) for one in decodes_] == [2, 2]


# The process ---------------------------------------------------------------------------------------------------------


def test_health_follows_the_engines_and_models_are_decodes(small: Callable[..., SmallOpenAi]) -> None:
    async def models(asked: Asked) -> None:
        await asked.json({"object": "list", "data": [{"id": "m"}]})

    prefill, decode = small(prefills), small(decodes)
    decode.answers["/v1/models"] = models
    with before(prefill, decode, http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9") as proxy:
        assert json.loads(proxy.ask("/v1/models", method="GET")[1])["data"] == [{"id": "m"}]
        decode.answers["/health"] = is_full
        wait_until(lambda: proxy.ask("/health", method="GET")[0] == 503)
        told = proxy.health()
        assert told["status"] == "down" and told["decode"][0]["up"] is False
    assert "decode-0 is down: its health is 503" in proxy.said


def test_sigterm_lets_what_is_under_way_end(small: Callable[..., SmallOpenAi]) -> None:
    go_on = threading.Event()

    async def waits(asked: Asked) -> None:
        await asyncio.to_thread(go_on.wait, SECONDS)
        await decodes(asked)

    prefill, decode = small(prefills), small(waits)
    with before(prefill, decode) as proxy:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(proxy.ask(COMPLETIONS, PROMPT)))
        asking.start()
        decode.wait(COMPLETIONS)
        ending = threading.Thread(target=proxy.end)
        ending.start()
        go_on.set()
        asking.join(SECONDS)
        ending.join(SECONDS)
        assert found[0][0] == 200
