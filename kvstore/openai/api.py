"""The parts of OpenAI's API that the proxy and the client need: bodies, stream events, errors. Does no I/O.

    bytes > bounds > one level of JSON > the prefill leg's body, and the decode leg's

A body is parsed one level deep; fields that neither leg changes are passed on byte for byte. Those that say where KV is
are dropped: by them a client could name a host that engines dial, or another client's blocks. The engines' protocol
decides what each leg is told:

    nixlv2           prefill first, with do_remote_decode; decode gets prefill's kv_transfer_params unchanged
                     (vLLM's toy proxy, llm-d's nixlv2, and the tickets of this store)
    shared-storage   prefill first, decode gets the client's body
    at-once          both at the same moment: decode is told to await what prefill publishes
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

MOST_BODY_BYTES = 16 << 20
MOST_STRINGS = 1 << 16
"""Keys and texts together, checked before parsing: a short body could become a dict of a million fields."""
MOST_FIELDS = 256
MOST_EVENT_BYTES = 4 << 20
"""Of one stream event: log probabilities of many tokens make it long."""
DONE = b"data: [DONE]"

Body = dict[str, Raw]
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

REMOTE_NULLS: dict[str, Any] = dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
)
TRANSFER = "kv_transfer_params"
OF_THE_PROXY = frozenset(
    f"{TRANSFER} ec_transfer_params request_id "  # vLLM's
    "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank routed_dp_rank data_parallel_rank "  # SGLang's
    "rid disaggregated_params nvext".split()  # the last two: TensorRT-LLM's, Dynamo's
)
"""Fields of a body, and of its `vllm_xargs`, that a client may not set."""
HINTS = "kvstore"
"""The one key of a client's `kv_transfer_params` that is passed on."""
_HINTS_OF_THE_PROXY = frozenset(("ticket", "await"))
_NOT_PREFILLED = (
    "stream stream_options min_tokens n best_of echo logprobs top_logprobs prompt_logprobs use_beam_search "
    "cache_hit_threshold"
).split()
"""Left out of the prefill leg: fields that concern the answer, of which prefill computes one token."""


class Legs(StrEnum):
    """How prefill and decode learn of each other."""

    NIXLV2 = "nixlv2"
    SHARED_STORAGE = "shared-storage"
    AT_ONCE = "at-once"


class ApiRefusal(Exception):
    """An error answer in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def read_body(content: bytes, passed: Collection[str] = ()) -> Body:
    """The body's fields, each as its original bytes, without `OF_THE_PROXY`. passed: names that are passed on although
    they are the proxy's. Raises `ApiRefusal`."""
    if content.count(b'"') - content.count(b'\\"') > 2 * MOST_STRINGS:
        raise ApiRefusal(413, f"the body has more than {MOST_STRINGS} strings; send fewer messages")
    try:
        body = msgspec.json.decode(content, type=Body)
    except msgspec.ValidationError:
        raise ApiRefusal(400, "the body is no JSON object; send one with model and prompt or messages") from None
    except _UNREADABLE as error:
        raise ApiRefusal(400, f"the body cannot be read as JSON: {' '.join(str(error).split())}") from None
    if len(body) > MOST_FIELDS:
        raise ApiRefusal(400, f"the body has {len(body)} fields; at most {MOST_FIELDS} are taken")
    told = {name: value for name, value in transfer_parameters(body).items() if name == HINTS or name in passed}
    if HINTS in told:
        told[HINTS] = _without(told[HINTS], _HINTS_OF_THE_PROXY.difference(passed), TRANSFER)
    refused = OF_THE_PROXY.difference(passed)
    body = {name: value for name, value in body.items() if name not in refused}
    if "vllm_xargs" in body:
        body["vllm_xargs"] = _without(body["vllm_xargs"], refused, "vllm_xargs")
    body.pop(TRANSFER, None)
    return body | ({TRANSFER: Raw(msgspec.json.encode(told))} if told else {})


def _without(value: Raw, names: Collection[str], param: str) -> Raw:
    """An object without these keys; unchanged if it has none of them, or is none. Raises `ApiRefusal` if it cannot be
    read: an engine might."""
    if not bytes(value).lstrip().startswith(b"{"):
        return value
    try:
        fields = msgspec.json.decode(value, type=Body)
    except _UNREADABLE as error:
        raise ApiRefusal(400, f"{param} cannot be read: {' '.join(str(error).split())}", param=param) from None
    kept = {name: one for name, one in fields.items() if name not in names}
    return value if len(kept) == len(fields) else Raw(msgspec.json.encode(kept))


def transfer_parameters(body: Body) -> Body:
    """The client's own `kv_transfer_params`. Raises `ApiRefusal`."""
    given = body.get(TRANSFER)
    if given is None or bytes(given) == b"null":
        return {}
    try:
        return msgspec.json.decode(given, type=Body)
    except _UNREADABLE:
        raise ApiRefusal(400, "kv_transfer_params has to be an object", param=TRANSFER) from None


def prefill_body(body: Body, legs: Legs, kv_request_id: str, is_bound: bool = False) -> bytes:
    """The prefill leg's body: same prompt, one token, no stream. is_bound: with `at-once`, add the id that joins the
    legs for vLLM's tier of peers. Raises `ApiRefusal`."""
    fields: dict[str, Any] = {name: value for name, value in body.items() if name not in _NOT_PREFILLED}
    fields["max_tokens"] = 1
    if "max_completion_tokens" in body:
        fields["max_completion_tokens"] = 1
    told: dict[str, Any] = dict(transfer_parameters(body))
    if legs is Legs.NIXLV2:
        told |= {"do_remote_decode": True, "do_remote_prefill": False, **REMOTE_NULLS}
    elif legs is Legs.SHARED_STORAGE:
        fields["cache_hit_threshold"] = 0
    elif is_bound:
        told["remote_decoder"] = {"kv_request_id": kv_request_id}
    if told:
        fields[TRANSFER] = told
    return msgspec.json.encode({**fields, "stream": False})


def decode_body(
    body: Body, legs: Legs, prefilled: Raw | None, kv_request_id: str, prefiller: tuple[str, int] | None = None
) -> bytes:
    """The decode leg's body. prefilled: `kv_transfer_params` of prefill's answer, passed on unchanged. prefiller: with
    `at-once`, the address of vLLM's tier of peers. Raises `ApiRefusal`."""
    if legs is Legs.NIXLV2 and prefilled is not None:
        return msgspec.json.encode({**body, TRANSFER: prefilled})
    if legs is not Legs.AT_ONCE:
        return msgspec.json.encode(body)
    told: dict[str, Any] = dict(transfer_parameters(body))
    told[HINTS] = {**_object(told.get(HINTS)), "await": True}
    if prefiller is not None:
        host, port = prefiller
        told["remote_prefiller"] = {"kv_request_id": kv_request_id, "remote_host": host, "remote_port": port}
    return msgspec.json.encode({**body, TRANSFER: told})


def _object(value: Raw | None) -> Body:
    try:
        return msgspec.json.decode(value, type=Body) if value is not None else {}
    except _UNREADABLE:
        return {}


class _Prefilled(msgspec.Struct):
    kv_transfer_params: Raw | UnsetType = UNSET


def prefilled_parameters(content: bytes) -> Raw | None:
    """`kv_transfer_params` of a prefill answer, None if absent. Raises `ValueError` if it is not a JSON object."""
    try:
        found = msgspec.json.decode(content, type=_Prefilled).kv_transfer_params
    except _UNREADABLE:
        raise ValueError("an answer that is no JSON object") from None
    return None if isinstance(found, UnsetType) or bytes(found) == b"null" else found


class _TokenPrompt(msgspec.Struct):
    prompt: list[int]


def prompt_tokens(content: bytes) -> list[int] | None:
    """The token ids, if the prompt is given as such."""
    try:
        return msgspec.json.decode(content, type=_TokenPrompt).prompt
    except _UNREADABLE:
        return None


_EVENT_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Cuts a stream's bytes into whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def fed(self, data: bytes) -> list[bytes]:
        """The events complete so far, each with the blank line behind it. Raises `ValueError` if an event is too
        long."""
        found = []
        start = max(0, len(self._rest) - 3)
        self._rest += data
        while end := _EVENT_END.search(self._rest, start):
            found.append(bytes(self._rest[: end.end()]))
            del self._rest[: end.end()]
            start = 0
        if len(self._rest) > MOST_EVENT_BYTES:
            raise ValueError(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return found


def event_data(event: bytes) -> bytes:
    """An event's data; empty for a comment."""
    lines = (line.rstrip(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
