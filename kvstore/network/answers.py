"""Translates between wire messages and the sidecar's: prompts to keys, replies to messages. Sends no query."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.message import Message
from msgspec.structs import replace

from kvstore.block.errors import BadInput
from kvstore.block.identity import ExtraKey, PrefixHasher, as_extra_keys, token_bytes
from kvstore.network.links import ListedSpace, OpenSpace
from kvstore.protocol import messages as m
from kvstore.protocol.messages import MatchReply
from kvstore.protocol.words import checked_seconds, layout_in_words
from kvstore.status.tree import SidecarStatus
from kvstore.wire import admin_pb2, store_pb2
from tiering.frame import KEY_BYTES

MOST_ANSWER_BYTES = 3 << 20
"""Longer answers are cut, since clients accept 4 MiB."""
MOST_LISTED = 64
STAT_VERSION = 1
"""Of the form of a status in JSON."""
_TOKENS_AT_ONCE = 1 << 14
"""So that other calls get the interpreter in between."""


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


def match_response(reply: MatchReply) -> store_pb2.MatchResponse:
    tiers = [store_pb2.TierRun(tier=str(tier), blocks=blocks) for tier, blocks in reply.tiers]
    return store_pb2.MatchResponse(
        blocks=reply.blocks, tiers=tiers, reason=str(reply.reason or ""), detail=reply.detail
    )


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
