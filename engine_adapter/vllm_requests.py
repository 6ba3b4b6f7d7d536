"""What a request of vLLM's says about the identity of its KV, and what its user wants of the store.

Reads attributes of vLLM's objects and imports nothing of vLLM. Whatever a request's KV depends on besides its tokens is
an extra key here, or the request is refused: what is not understood is not cached.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any

import torch
from msgspec import Meta

from engine_adapter.model_files import AdapterDigests
from engine_adapter.paged.requests import RequestSpec
from engine_adapter.paged.settings import Priority, Ttl
from kvstore.block.account import MissReason
from kvstore.block.errors import BadInput
from kvstore.block.identity import ExtraKey
from kvstore.client.edge import contained
from kvstore.client.spans import NO_TRACE, SpanQueue
from kvstore.config import checked

CONVERSATION_PRIORITY = 100
"""Of a turn of a conversation without other hints."""
HINTS: dict[str, tuple[Any, Any]] = {
    "store": (bool, True),
    "ttl": (Ttl, None),
    "priority": (Priority, None),
    "conversation": (str, ""),
    "ticket": (Annotated[str, Meta(description="the text that the prefilling engine told")], ""),
    "await": (bool, False),
}
"""In `kv_transfer_params`, under "kvstore": the kind of each, and what it is where it is not given."""
ACCOUNT = frozenset(
    ("asked", "hits", "misses", "detail", "load_ms", "saved_blocks", "put_reasons", "ignored", "block_tokens")
)
"""What an engine reports there about a request that is over. A proxy may pass it on to the next engine, which ignores
it."""
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


class RequestReader:
    def __init__(
        self, adapters: AdapterDigests, role: str = "kv_both", traced: Any = None, *, is_encoded_here: bool = True
    ) -> None:
        """role: vLLM's `kv_role`. A producer hands all of its prompts over and waits for none; a consumer hands none
        over; one that is both hands over the requests that ask for it. traced: the engine's model, if requests that
        bring a `traceparent` are to be traced. is_encoded_here: whether images are encoded in this engine, from the
        bytes that its requests have."""
        self._adapters = adapters
        self._contents = ContentDigests() if is_encoded_here else None
        self._role = role
        self._spans = SpanQueue(str(traced.served_model_name), time.time_ns) if traced is not None else None

    def reading(self, request: Any) -> Future[list[bytes]] | None:
        """Reads, in a thread, the digests of images and the like that a request has; None where it has none."""
        features = getattr(request, "mm_features", None)
        return self._contents.submit(features) if features and self._contents is not None else None

    def is_in_doubt(self, request: Any) -> bool:
        """Whether the engine may have taken other content for an image of a running request."""
        return self._contents is not None and self._contents.have_other_content(request.mm_features)

    def close(self) -> None:
        if self._contents is not None:
            self._contents.close()

    def facts(self, request: Any, read: Future[list[bytes]] | None = None) -> RequestSpec:
        """The spec of a new request. One that this version cannot read is refused. read: as `reading` returned it."""
        found: list[RequestSpec] = []
        with contained(lambda error: found.append(_refused(f"{type(error).__name__}: {error}"[:200]))):
            found.append(self._facts(request, read))
        return found[0]

    def _facts(self, request: Any, read: Future[list[bytes]] | None) -> RequestSpec:
        if request.prompt_embeds is not None:
            return _refused("a prompt of embeddings has no token ids")
        if getattr(request, "resumable", False):
            return _refused("a prompt that is streamed in may still change")
        if request.sampling_params is None:
            return _refused("it generates nothing")
        extra: list[ExtraKey] = []
        lora = request.lora_request
        if lora is not None:
            anew = bool(getattr(lora, "load_inplace", False))
            digest, detail = self._adapters.of(lora.lora_int_id, lora.lora_path, reads_anew=anew)
            if not digest:
                return _refused(detail)
            extra.append(ExtraKey(b"adapter:" + digest.encode()))
        if request.cache_salt:
            salt = blake2b(request.cache_salt.encode(), digest_size=32).digest()
            extra.append(ExtraKey(b"salt:" + salt))
        contents: Sequence[bytes] = ()
        if request.mm_features:
            if self._contents is None:
                return _refused(
                    "images and the like are encoded in another engine, by their names (ec_transfer_config)"
                )
            if read is None or not read.done():
                return _refused("an image or the like was not read in time")
            try:
                contents = read.result()
            except BadInput as error:
                return _refused(str(error))
        for feature, content in zip(request.mm_features, contents, strict=True):
            position = feature.mm_position
            extra.append(ExtraKey(b"content:%d:%s" % (position.length, content), position.offset))
        reads = not getattr(request, "skip_reading_prefix_cache", False)
        trace = self._spans.trace(getattr(request, "trace_headers", None)) if self._spans is not None else NO_TRACE
        facts = hinted(RequestSpec(tuple(extra), reads=reads, trace=trace), request.kv_transfer_params)
        return self._handed(facts, request)

    def _handed(self, facts: RequestSpec, request: Any) -> RequestSpec:
        params = request.kv_transfer_params
        is_asked = isinstance(params, dict) and params.get("do_remote_decode") is True
        hands_over = facts.saves and (self._role == PRODUCER or (is_asked and self._role != CONSUMER))
        if hands_over or self._role == PRODUCER:  # this engine computes it
            return replace(facts, hands_over=hands_over, ticket="", awaits=False)
        return facts


def hinted(facts: RequestSpec, params: Any) -> RequestSpec:
    """The spec with the hints of the request's user; unknown hints are named in the answer and have no effect."""
    given = params.get("kvstore") if isinstance(params, dict) else None
    if given is None:
        return facts
    if not isinstance(given, dict):
        return replace(facts, ignored=(f"kvstore={given!r}; give an object with {', '.join(HINTS)}",))
    ignored = [f"{name}; allowed: {', '.join(HINTS)}" for name in given if name not in HINTS and name not in ACCOUNT]
    hints = {}
    for name, (kind, unset) in HINTS.items():
        hints[name] = unset
        if given.get(name, unset) is not unset:
            try:
                hints[name] = checked(name, given[name], kind)
            except BadInput as error:
                ignored.append(str(error))
    ttl, priority = hints["ttl"], hints["priority"]
    if hints["conversation"] and ttl is None and priority is None:  # its next turn begins with what this one brings
        priority = CONVERSATION_PRIORITY
    facts = replace(facts, saves=hints["store"], ttl=ttl, priority=priority, ignored=tuple(ignored))
    return replace(facts, ticket=hints["ticket"], awaits=hints["await"])


def _refused(detail: str) -> RequestSpec:
    return RequestSpec(refused=MissReason.UNSUPPORTED, detail=detail)


class EngineView:
    """`EngineRequest` over one of vLLM's. extra_keys: what its KV depends on besides tokens, read when it was added.
    unread_since: when its images and the like began to be read; 0 where none are."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.due = 0
        self.read: Future[list[bytes]] | None = None
        self.unread_since = 0.0
        self.extra_keys: tuple[ExtraKey, ...] = ()

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def num_tokens(self) -> int:
        """The prompt's and the accepted ones: drafts count once they are accepted."""
        return int(self.request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.request.num_prompt_tokens)

    def token_ids(self, first: int, stop: int) -> list[int]:
        return list(self.request.all_token_ids[first:stop])

    def final(self, computed: int, *, has_drafts: bool) -> int:
        """Tokens whose KV is final once so many are computed. With draft tokens, those of the prompt only: later KV may
        be of a draft that is rejected, and is written again."""
        return min(computed, self.num_prompt_tokens if has_drafts else self.num_tokens)


# Digests of pictures and sound, of the bytes that an engine computes from ---------


MOST_NAMES = 1 << 16
"""More than an engine's KV has room for: each item takes tokens there."""


@dataclass(slots=True)
class _Named:
    digest: bytes
    item: weakref.ref[Any]
    has_other_content: bool = False


class ContentDigests:
    """Digests of one engine's items. A thread of its own reads them: an item may have tens of megabytes."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, _Named] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "kv-content")

    def submit(self, features: Sequence[Any]) -> Future[list[bytes]]:
        """The digest of each of vLLM's `MultiModalFeatureSpec`. `BadInput`, in the future, says why one has none."""
        return self._reader.submit(lambda: [self._of(feature) for feature in features])

    def have_other_content(self, features: Sequence[Any]) -> bool:
        """Whether any of these names has stood for other content, too, since its digest was read."""
        named = [self._named.get(str(feature.identifier)) for feature in features]
        return any(one is not None and one.has_other_content for one in named)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _of(self, feature: Any) -> bytes:
        name, item = str(feature.identifier), feature.data
        known = self._named.get(name)
        if known is None or known.item() is not item:
            digest = content_digest(str(feature.modality), item)
            if known is None:
                known = self._named[name] = _Named(digest, weakref.ref(item))
            known.has_other_content |= known.digest != digest
            known.item = weakref.ref(item)
        self._named.move_to_end(name)
        if len(self._named) > MOST_NAMES:
            self._named.popitem(last=False)
        if known.has_other_content:
            raise BadInput("this engine has seen other content under the same name (uuid) of an image or the like")
        return known.digest


def content_digest(modality: str, item: Any) -> bytes:
    """BLAKE2b-256 of an item's fields as the model gets them: names, types, shapes and bytes, each with its length.
    Raises `BadInput` for an item whose bytes are not here."""
    if item is None or {"address", "monotonic_id"} <= set(item):
        raise BadInput("the bytes of an image or the like are not in the engine's scheduler (mm_processor_cache_type)")
    hashed = blake2b(digest_size=32, person=b"kv-content-v1")
    for piece in _pieces(modality):
        hashed.update(piece)
    for name in sorted(item):
        for piece in (*_pieces(name), *_pieces(item[name].data)):
            hashed.update(piece)
    return hashed.digest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """A value's kind, its size, and what it holds: so that no two values have the same pieces."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise BadInput("the bytes of an image or the like are on a device")
        yield b"tensor %s %s;" % (str(value.dtype).encode(), str(tuple(value.shape)).encode())
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().data
    elif isinstance(value, list | tuple):
        yield b"list %d;" % len(value)
        for one in value:
            yield from _pieces(one)
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        text = value if isinstance(value, bytes) else str(value).encode()
        yield b"%s %d;" % (type(value).__name__.encode(), len(text))
        yield text
    else:
        raise BadInput(f"an image or the like has a field of type {type(value).__name__}, which is not known")
