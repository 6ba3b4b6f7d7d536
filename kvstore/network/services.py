"""The services: they answer a tenant through its own socket, and the operator through the observers'. Below them, how
prompts become keys and replies become messages.

Messages come in and go out; the caller and its deadline are in a `DoorCall`, which the gRPC server made from the
credential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import Message
from msgspec.structs import replace

from kvstore.block.account import HeldElsewhere, Holder
from kvstore.block.errors import BadInput
from kvstore.block.identity import ExtraKey, PrefixHasher, as_extra_keys, token_bytes
from kvstore.edge.tokens import Caller
from kvstore.edge.watch import READY, StatusWatch
from kvstore.network.links import ANSWER_SECONDS, CallTime, ListedSpace, OpenSpace, TenantLink, described
from kvstore.protocol import messages as m
from kvstore.protocol.messages import MatchReply
from kvstore.protocol.words import checked_seconds, layout_in_words, pick, printable
from kvstore.status.tree import SidecarStatus
from kvstore.wire import admin_pb2, score_pb2, store_pb2
from tiering.frame import KEY_BYTES

MOST_NODES = 256
NODE_DIGITS = 32
ELSEWHERE_SECONDS = 0.005
"""For the directory. A call with less than twice that left does not ask it: a look-up that is cut short would count as
the directory's failure, for all tenants."""
MOST_ANSWER_BYTES = 3 << 20
"""Longer answers are cut, since clients accept 4 MiB."""
MOST_LISTED = 64
STAT_VERSION = 1
"""Of the form of a status in JSON."""
_TOKENS_AT_ONCE = 1 << 14
"""So that other calls get the interpreter in between."""


@dataclass(frozen=True, slots=True)
class DoorCall:
    """A call: its caller, and its time limit. link: to the caller's tenant; None for the operator."""

    caller: Caller
    time: CallTime
    link: TenantLink | None

    @property
    def tenant(self) -> TenantLink:
        """The link to its own socket."""
        assert self.link is not None, "the door lets tenants in here"
        return self.link


class StoreService:
    """`kvstore.v1.Store`."""

    def Match(self, request: store_pb2.MatchRequest, call: DoorCall) -> store_pb2.MatchResponse:

        def answer() -> store_pb2.MatchResponse:
            space = call.tenant.space(request.namespace, call.time)
            reply = call.tenant.match(space, keys_of(request.prompt, space), call.time)
            tiers = [store_pb2.TierRun(tier=str(tier), blocks=blocks) for tier, blocks in reply.tiers]
            reason = str(reply.reason or "")
            return store_pb2.MatchResponse(blocks=reply.blocks, tiers=tiers, reason=reason, detail=reply.detail)

        return call.tenant.again(answer)

    def Namespaces(self, request: store_pb2.NamespacesRequest, call: DoorCall) -> store_pb2.NamespacesResponse:
        return namespaces_response(*call.tenant.again(lambda: call.tenant.page(request.first, call.time)))

    def Drop(self, request: store_pb2.DropRequest, call: DoorCall) -> store_pb2.DropResponse:
        blocks = call.tenant.drop(request.namespace, checked_drop_seconds(request), call.time)
        return store_pb2.DropResponse(blocks=blocks)

    def Warm(self, request: store_pb2.WarmRequest, call: DoorCall) -> store_pb2.WarmResponse:
        began_at = call.time.clock.monotonic_seconds()

        def chains(space: OpenSpace) -> list[list[bytes]]:
            found, blocks = [], 0
            for prompt in request.prompts:
                found.append(keys_of(prompt, space))
                blocks += len(found[-1])
                if blocks > m.MAX_KEYS:
                    raise BadInput(f"prompts of more than {m.MAX_KEYS} blocks in all; give fewer in a call")
            return found

        namespace, warming = call.tenant.warm(request.namespace, chains, call.time)
        return store_pb2.WarmResponse(
            namespace=namespace,
            prompts=len(request.prompts),
            asked=warming.asked,
            warm=warming.warm,
            promoted=warming.promoted,
            left=warming.left,
            absent=warming.absent,
            seconds=call.time.clock.monotonic_seconds() - began_at,
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """What a node has of a prompt. tokens: by tier. load_seconds: of all of them, None if that is not known."""

    tokens: dict[str, int]
    load_seconds: float | None

    @property
    def matched(self) -> int:
        return sum(self.tokens.values())


def spaces_of_model(call: DoorCall, model: str, watch: StatusWatch) -> list[ListedSpace]:
    """The caller's namespaces of a model, given by its fingerprint or its name in an engine. Raises `BadInput`."""
    link = call.tenant
    try:
        return link.spaces_of_model(model, watch.names(link.tenant), call.time)
    except BadInput:
        return link.spaces_of_model(model, watch.names(link.tenant, min(1.0, call.time.left())), call.time)


Holding = Callable[..., HeldElsewhere]
"""What other nodes hold of a tenant's prompt: `Courier.holding`."""


@dataclass(frozen=True, slots=True)
class NodesScored:
    """nodes: by id, those that were named, or else the best ones, at most `MOST_NODES`, and the asked one; what has
    nothing is left out but for the asked one. left_out: why more may have some; empty if none."""

    nodes: Mapping[str, Scored]
    left_out: str


class Scorer:
    """How much of a prompt each node has, the others by the directory. holding: None if there are no others."""

    def __init__(self, watch: StatusWatch, holding: Holding | None = None) -> None:
        self._watch, self._holding = watch, holding

    def of(self, call: DoorCall, space: OpenSpace, keys: list[bytes], are_own: bool, named: list[str]) -> NodesScored:
        """are_own: the keys were made here with the tenant's identity key. named: the nodes that are asked for; all if
        empty. Other nodes' loads are expected to take as long as those of the asked node's engines."""
        own = call.tenant.node(call.time)
        by_tier = {own: hit_tokens(call.tenant.match(space, keys, call.time), space.block_tokens)}
        holders, left_out = self._elsewhere(call, space, keys, are_own, {*named} - {own}, bool(named))
        by_tier |= {one.node.hex(): {str(one.tier): one.blocks * space.block_tokens} for one in holders}
        best = sorted(by_tier, key=lambda node: (-sum(by_tier[node].values()), node))[:MOST_NODES]
        rates = self._watch.load_rates(call.tenant.tenant, space.id)
        wanted = {node: by_tier[node] for node in named or (*best, own) if node in by_tier}
        nodes = {node: Scored(tokens, load_seconds(tokens, rates)) for node, tokens in wanted.items()}
        return NodesScored(nodes, left_out)

    def _elsewhere(
        self, call: DoorCall, space: OpenSpace, keys: list[bytes], are_own: bool, others: set[str], is_named: bool
    ) -> tuple[Sequence[Holder], str]:
        if not keys or (is_named and not others):
            return (), ""
        if self._holding is None:
            return (), "no other nodes are known here" if others else ""
        if call.time.left() < 2 * ELSEWHERE_SECONDS:
            return (), "the call's deadline left no time for the directory"
        held = self._holding(call.tenant.tenant, space.id, keys, ELSEWHERE_SECONDS, are_own=are_own)
        return held.holders, held.left_out


class ScoreService:
    """`kvstore.v1.Score`."""

    def __init__(self, scorer: Scorer, watch: StatusWatch) -> None:
        self._scorer = scorer
        self._watch = watch

    def Score(self, request: score_pb2.ScoreRequest, call: DoorCall) -> score_pb2.ScoreResponse:
        named = list(request.nodes)
        if len(named) > MOST_NODES:
            raise BadInput(f"{len(named)} nodes; give at most {MOST_NODES}")
        for node in named:
            if len(node) != NODE_DIGITS or set(node) - set("0123456789abcdef"):
                raise BadInput(f"a node {printable(node[:64])!r}; give its id of {NODE_DIGITS} hexadecimal digits")

        def answer() -> score_pb2.ScoreResponse:
            space = self._space(request, call)
            keys = keys_of(request.prompt, space)
            found = self._scorer.of(call, space, keys, not request.prompt.keys, named)
            best = [node for node, its in found.nodes.items() if its.matched][:MOST_NODES]
            scores = [(node, found.nodes.get(node, Scored({}, None))) for node in named or best]
            listed = [score_pb2.NodeScore(node=n, hit_tokens=s.tokens, load_seconds=s.load_seconds) for n, s in scores]
            return score_pb2.ScoreResponse(
                namespace=space.id,
                block_tokens=space.block_tokens,
                asked_tokens=len(keys) * space.block_tokens,
                nodes=listed,
                is_partial=bool(found.left_out),
                partial_detail=found.left_out,
            )

        return call.tenant.again(answer)

    def _space(self, request: score_pb2.ScoreRequest, call: DoorCall) -> OpenSpace:
        match request.WhichOneof("namespace_or_model"):
            case "namespace":
                return call.tenant.space(request.namespace, call.time)
            case "model":
                found = spaces_of_model(call, request.model, self._watch)
                if len(found) > 1:
                    there = ", ".join(map(described, found[:8]))
                    raise BadInput(f"{len(found)} namespaces are of that model: {there}; give namespace")
                return call.tenant.open(found[0], call.time)
            case _:
                raise BadInput("neither namespace nor model; give one of the two")


class AdminService:
    """`kvstore.v1.Admin`: the observers' status, and drops, through the tenants' own sockets. No purge."""

    def __init__(self, watch: StatusWatch, links: Mapping[str, TenantLink]) -> None:
        self._watch = watch
        self._links = links

    def Stat(self, request: admin_pb2.StatRequest, call: DoorCall) -> admin_pb2.StatResponse:
        return stat_response(self._watch.ask(min(call.time.left(), ANSWER_SECONDS)))

    def Health(self, request: admin_pb2.HealthRequest, call: DoorCall) -> admin_pb2.HealthResponse:
        facts = self._watch.facts()
        if facts is None:
            return admin_pb2.HealthResponse(state="", reasons=["the sidecar does not answer"])
        state = "degraded" if facts.reasons and facts.state == "ready" else facts.state
        answer = admin_pb2.HealthResponse()
        fill(answer, facts)
        answer.alive, answer.ready, answer.state = True, facts.state in READY, state
        answer.reasons.extend(facts.reasons if state == "degraded" else [])
        return answer

    def DropAny(self, request: admin_pb2.DropAnyRequest, call: DoorCall) -> admin_pb2.DropAnyResponse:
        """Forget a namespace of any tenant whose socket is known here."""
        seconds = checked_drop_seconds(request)
        if max(len(request.id), len(request.tenant)) > m.MAX_NAME:
            raise BadInput(f"an id or a tenant of more than {m.MAX_NAME} characters")
        found: list[tuple[TenantLink, ListedSpace]] = []
        for name, link in self._links.items():
            if request.tenant in ("", name):
                found += [(link, space) for space in link.again(partial(link.spaces, call.time))]
        words = [f"{link.tenant}, {printable(space.namespace.model)}" for link, space in found]
        ids = [space.id for _, space in found]
        is_shared = len({one for one in ids if one.startswith(request.id.lower())}) == 1
        more = "give the tenant" if is_shared else "give more digits"
        whose = f" of tenant {printable(request.tenant)!r}" if request.tenant else ""
        link, space = found[pick(request.id, ids, words, whose, more)]
        return admin_pb2.DropAnyResponse(blocks=link.drop(space.id, seconds, call.time))


# Prompts and answers ------------------------------------------------------------------------------------------------


def keys_of(prompt: store_pb2.Prompt, space: OpenSpace) -> list[bytes]:
    """The prefix keys of a prompt's full blocks. Raises `BadInput`."""
    if prompt.keys:
        if prompt.token_ids or prompt.extra_keys:
            raise BadInput("keys beside token_ids or extra_keys; keys cover both, so give the keys alone")
        if len(prompt.keys) % KEY_BYTES:
            raise BadInput(f"{len(prompt.keys)} bytes of keys; give {KEY_BYTES} for each block")
        check_blocks(len(prompt.keys) // KEY_BYTES)
        return [prompt.keys[at : at + KEY_BYTES] for at in range(0, len(prompt.keys), KEY_BYTES)]
    check_blocks(len(prompt.token_ids) // space.block_tokens)
    if not prompt.token_ids and prompt.extra_keys:
        raise BadInput("extra_keys without token_ids; give both, or the keys")
    extra = as_extra_keys([ExtraKey(one.value, one.first_token) for one in prompt.extra_keys])
    return hashed(prompt.token_ids, extra, space.hasher)


def check_blocks(blocks: int) -> None:
    """Raises `BadInput`."""
    if blocks > m.MAX_KEYS:
        raise BadInput(f"a prompt of {blocks} blocks; give at most {m.MAX_KEYS}")


def hashed(token_ids: Sequence[int], extra: Sequence[ExtraKey], hasher: PrefixHasher) -> list[bytes]:
    """Keys of token ids, each of which is known to be a uint32."""
    starts = range(0, len(token_ids), _TOKENS_AT_ONCE)
    packed = b"".join(token_bytes(list(token_ids[start : start + _TOKENS_AT_ONCE])) for start in starts)
    return hasher.keys(packed, extra)


def namespaces_response(spaces: Iterable[ListedSpace], following: int) -> store_pb2.NamespacesResponse:
    """As many as fit one answer. following: the position after these; 0 at the end."""
    answer, taken_bytes = store_pb2.NamespacesResponse(), 0
    for space in spaces:
        one = _namespace(space)
        taken_bytes += one.ByteSize()
        if len(answer.namespaces) == MOST_LISTED or (answer.namespaces and taken_bytes > MOST_ANSWER_BYTES):
            following = space.place
            break
        answer.namespaces.append(one)
    answer.next = following
    return answer


def _namespace(space: ListedSpace) -> store_pb2.Namespace:
    given = space.namespace
    return store_pb2.Namespace(
        id=space.id,
        model=given.model,
        weights_epoch=given.weights_epoch,
        codec=given.codec,
        layout=layout_in_words(given.layout)[:128],
        block_tokens=given.layout.block_tokens,
        config=given.config,
        payload_bytes=space.listed.payload_bytes,
        blocks=space.listed.blocks,
    )


def hit_tokens(reply: MatchReply, block_tokens: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for tier, blocks in reply.tiers:
        found[str(tier)] = found.get(str(tier), 0) + blocks * block_tokens
    return found


def load_seconds(tokens: Mapping[str, int], tokens_per_second: Mapping[str, float]) -> float | None:
    """How long engines take to load these tokens, at the rates they reported; None if one is unknown."""
    if any(tokens_per_second.get(tier, 0.0) <= 0 for tier in tokens):
        return None
    return sum(count / tokens_per_second[tier] for tier, count in tokens.items())


def checked_drop_seconds(message: Any) -> float:
    """The time limit of a request to drop. Raises `BadInput`."""
    return checked_seconds(message.seconds if message.HasField("seconds") else m.DROP_SECONDS)


def stat_response(facts: SidecarStatus) -> admin_pb2.StatResponse:
    """If it is too long, the last namespaces and sessions are only counted."""
    encoded = msgspec.json.encode(facts)
    while len(encoded) > MOST_ANSWER_BYTES and (facts.namespaces or facts.sessions):
        namespaces, sessions = len(facts.namespaces) // 2, len(facts.sessions) // 2
        facts = replace(
            facts,
            namespaces=facts.namespaces[:namespaces],
            sessions=facts.sessions[:sessions],
            hidden_namespaces=facts.hidden_namespaces + len(facts.namespaces) - namespaces,
            hidden_sessions=facts.hidden_sessions + len(facts.sessions) - sessions,
        )
        encoded = msgspec.json.encode(facts)
    response = admin_pb2.StatResponse(json=encoded.decode(), version=STAT_VERSION)
    fill(response.facts, facts)
    return response


def fill(message: Message, value: object) -> None:
    """Set each field from the attribute of its name; missing ones stay unset."""
    for descriptor in message.DESCRIPTOR.fields:
        given: Any = getattr(value, descriptor.name, None)
        field: Any = getattr(message, descriptor.name)
        if given is None:
            continue
        if isinstance(given, Mapping):
            field.update(given)
        elif descriptor.message_type is not None:
            for one in given:
                fill(field.add(), one)
        elif descriptor.is_repeated:
            field.extend(given)
        else:
            setattr(message, descriptor.name, given)
