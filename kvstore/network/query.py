"""A router's queries over HTTP: POST /query and POST /query_by_hash, in the form of Mooncake's conductor and Dynamo's
indexer, for the caller's tenant alone.

    {"model": ..., "token_ids": [...]}  >  {TENANT: {INSTANCE: {"longest_matched": tokens, "GPU", "CPU", "DISK", "DP"}}}

An instance is a node's sidecar, which the engines of its host share: the asked one's, and those of its pool that have
some of the prompt. A query pins and counts nothing. Callers and their lanes are those of gRPC; a request without a
credential is refused before its body is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvstore.block.errors import BadInput, StoreError, shown
from kvstore.block.identity import ExtraKey
from kvstore.client.framing import TimedOut
from kvstore.edge.tokens import Caller, Tokens
from kvstore.edge.watch import StatusWatch
from kvstore.listeners.http_server import (
    CERTIFICATE,
    HttpLimits,
    HttpRefused,
    Message,
    Receive,
    Send,
    answer,
    introduce,
    whole_body,
)
from kvstore.network.credentials import Rotated, caller_of_uris
from kvstore.network.lanes import CallerLanes
from kvstore.network.links import CallTime, OpenSpace, SidecarBusy, TenantLink
from kvstore.network.services import DoorCall, Scored, Scorer, check_blocks, hashed, spaces_of_model
from tiering.frame import KEY_BYTES

MOST_BODY_BYTES = 4 << 20
MOST_CONNECTIONS, MOST_BODIES = 256, 8
"""At a time; and bodies of one caller that are being read."""
IDLE_SECONDS, REQUEST_SECONDS, ANSWER_SECONDS = 60.0, 10.0, 5.0
LIMITS = HttpLimits(MOST_CONNECTIONS, REQUEST_SECONDS, REQUEST_SECONDS, IDLE_SECONDS, REQUEST_SECONDS)
RETRY = ("retry-after", "1")
MOST_SPACES = 8
"""Namespaces of one model that are looked up: one for each codec and layout."""
PATHS = ("/query", "/query_by_hash")
_CPU, _DISK = "dram", "nvme"


class HttpQuery(msgspec.Struct):
    """block_size: the router's; the answer is in tokens in any case. block_hashes: prefix keys in hexadecimal, for
    clients that hold their tenant's identity key."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    token_ids: list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]] = []
    block_hashes: list[Annotated[str, Meta(max_length=2 * KEY_BYTES)]] = []
    block_size: int | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None


_queries = msgspec.json.Decoder(HttpQuery)


class QueryApp:
    """The ASGI application of the two pages. For one event loop; what it answers is made in callers' lanes."""

    def __init__(
        self,
        links: Mapping[str, TenantLink],
        scorer: Scorer,
        watch: StatusWatch,
        lanes: CallerLanes,
        tokens: Rotated[Tokens] | None,
    ) -> None:
        """tokens: None if callers have certificates."""
        self._links, self._scorer, self._watch, self._clock = links, scorer, watch, watch.clock
        self._lanes, self._tokens = lanes, tokens
        self._bodies: Counter[Caller] = Counter()

    def _answer(self, path: str, body: bytes, caller: Caller) -> dict[str, Any]:
        """Raises `HttpRefused`."""
        assert caller.tenant is not None, "tenants are let in alone"
        link = self._links[caller.tenant]
        call = DoorCall(caller, CallTime(self._clock, self._clock.monotonic_seconds() + ANSWER_SECONDS), link)
        try:
            query = _queries.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpRefused(400, f"not a query: {error}") from None
        try:
            return {caller.tenant: link.again(lambda: self._instances(path, query, call))}
        except BadInput as error:
            raise HttpRefused(400, str(error)) from None
        except TimedOut:
            raise HttpRefused(504, "the sidecar did not answer in time") from None
        except SidecarBusy as error:
            raise HttpRefused(429, str(error), RETRY) from None
        except StoreError as error:
            raise HttpRefused(503, str(error)) from None

    def _instances(self, path: str, query: HttpQuery, call: DoorCall) -> dict[str, Any]:
        if query.tenant_id not in (None, "", call.caller.tenant):
            raise HttpRefused(403, "tenant_id is another one than the credential's; leave it out")
        if query.lora_name or (query.lora_id or -1) >= 0:
            raise BadInput("adapters are known here by their digests; ask gRPC's Score with extra_keys")
        by_hash = path == "/query_by_hash"
        if by_hash and query.cache_salt:
            raise BadInput("cache_salt beside block_hashes, which cover it; leave it out")
        try:
            spaces = spaces_of_model(call, query.model, self._watch)
        except BadInput:
            return {}  # no engine has served it here
        named = [query.instance_id] if query.instance_id else []
        best, left_out = dict[str, Scored](), ""
        for one in spaces[:MOST_SPACES]:
            space = call.tenant.open(one, call.time)
            keys = _keys(query, space) if by_hash else _hashed(query, space)
            found = self._scorer.of(call, space, keys, not by_hash, named)
            left_out = left_out or found.left_out
            for node, its in found.nodes.items():
                if node not in best or its.matched > best[node].matched:
                    best[node] = its
        own = call.tenant.node(call.time)
        return {n: _instance(its) | {"is_asked": n == own, "partial_detail": left_out} for n, its in best.items()}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        path = scope["path"]
        if path not in PATHS:
            raise HttpRefused(404, f"there is nothing here; there are {' and '.join(PATHS)}")
        if scope["method"] != "POST":
            raise HttpRefused(405, "only POST is served", ("allow", "POST"))
        if self._tokens is None:
            caller = caller_of_uris(scope[CERTIFICATE])
        else:
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
            caller = self._tokens.now().bearer(given[0]) if len(given) == 1 else None
        if caller is None:
            text = "unknown credential; send Authorization: Bearer TOKEN, or a client's certificate"
            raise HttpRefused(401, text, ("www-authenticate", "Bearer"))
        if caller.tenant not in self._links:
            raise HttpRefused(403, "that credential is of no tenant that has a socket here")
        introduce(scope, caller)
        body = await self._body(scope, receive, caller)
        made = self._lanes.of(caller).submit(partial(self._answer, path, body, caller))
        if made is None:
            raise HttpRefused(429, "too many calls are in flight; ask again later", RETRY)
        await answer(send, 200, msgspec.json.encode(await asyncio.wrap_future(made)))

    async def _body(self, scope: Message, receive: Receive, caller: Caller) -> bytes:
        if self._bodies[caller] >= MOST_BODIES:
            raise HttpRefused(429, "too many requests are being read; ask again later", RETRY)
        self._bodies[caller] += 1
        try:
            return await whole_body(scope, receive, MOST_BODY_BYTES)
        finally:
            self._bodies[caller] -= 1
            if not self._bodies[caller]:
                del self._bodies[caller]


def _hashed(query: HttpQuery, space: OpenSpace) -> list[bytes]:
    check_blocks(len(query.token_ids) // space.block_tokens)
    extra = []
    if query.cache_salt:  # like the adapter for vLLM
        salt = blake2b(query.cache_salt.encode("utf-8", "replace"), digest_size=32).digest()
        extra = [ExtraKey(b"salt:" + salt)]
    return hashed(query.token_ids, extra, space.hasher)


def _keys(query: HttpQuery, space: OpenSpace) -> list[bytes]:
    check_blocks(len(query.block_hashes))
    keys = []
    for one in query.block_hashes:
        try:
            keys.append(bytes.fromhex(one))
        except ValueError:
            keys.append(b"")
        if len(keys[-1]) != KEY_BYTES:
            raise BadInput(f"a block hash {shown(one)}; give prefix keys, {2 * KEY_BYTES} hexadecimal digits each")
    return keys


def _instance(found: Scored) -> dict[str, Any]:
    seconds = found.load_seconds
    return {
        "longest_matched": found.matched,
        "GPU": 0,
        "CPU": found.tokens.get(_CPU, 0),
        "DISK": found.tokens.get(_DISK, 0),
        "DP": {},
        "load_ms": round(1000 * seconds, 3) if seconds is not None else None,
    }
