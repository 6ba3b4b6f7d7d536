"""`kvstore prime`: has an engine compute prompts once, ahead of their use, so that its store keeps them.

    JSON lines, texts > one request of one token each > accounts of the connector > its saves, until no more come

The engine tokenizes and applies its chat template, so what is stored is what later requests look up. Requests go over
OpenAI's API; retention wishes travel in `kv_transfer_params`, as in any request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from rich.table import Table

from kvstore.block.errors import BadInput
from kvstore.openai.client import JSON_HEADERS, EngineClient, EngineFault, model_of, page_of, samples_of

MOST_PROMPTS = 100_000
MOST_PROMPT_BYTES = 8 << 20
"""Of a text, or of a line."""
LOOK_SECONDS = 0.5
QUIET_LOOKS = 5
"""After so many polls without a newly saved block, saving counts as finished. Each save waits a second."""
SAVES_SECONDS = 60.0
MOST_REASON = 200
_SAVED = "kvstore_vllm_saved_blocks_total"
_EXAMPLE = '{"messages": [{"role": "system", "content": "..."}]}, {"prompt": "..."} or {"prompt": [1, 2, 3]}'
_FIELDS = ("prompt", "messages", "ttl", "priority", "add_generation_prompt", "tools", "chat_template_kwargs")


class TextRole(StrEnum):
    SYSTEM = "system"
    USER = "user"
    PROMPT = "prompt"  # without a chat template


@dataclass(frozen=True, slots=True)
class PrimePrompt:
    """where: names it in messages. body: the request's, without the fields common to all."""

    where: str
    path: str
    body: dict[str, Any]
    wish: dict[str, Any] = field(default_factory=dict)


def text_prompt(where: str, text: str, role: TextRole) -> PrimePrompt:
    """Raises `BadInput`."""
    if not text.strip():
        raise BadInput(f"{where} is empty; give a text, or leave it out")
    if role is TextRole.PROMPT:
        return PrimePrompt(where, "/v1/completions", {"prompt": text})
    body = {"messages": [{"role": str(role), "content": text}], "add_generation_prompt": False}
    return PrimePrompt(where, "/v1/chat/completions", body)


def line_prompts(name: str, lines: Iterable[str]) -> Iterator[PrimePrompt]:
    """Read JSON lines. Raises `BadInput` with the line's number."""
    for at, line in enumerate(lines, 1):
        if line.strip():
            yield _line_prompt(f"{name}, line {at}", line)


def _line_prompt(where: str, line: str) -> PrimePrompt:
    if len(line) > MOST_PROMPT_BYTES:
        raise BadInput(f"{where} has {len(line):,} characters; at most {MOST_PROMPT_BYTES:,} are taken")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise BadInput(f"{where}: no JSON; give {_EXAMPLE}") from None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise BadInput(f"{where}: give {_EXAMPLE}")
    if unknown := sorted(found.keys() - set(_FIELDS)):
        raise BadInput(f"{where} has {unknown[0][:40]!r}; allowed: {', '.join(_FIELDS)}")
    prompt, messages = found.get("prompt"), found.get("messages")
    is_tokens = isinstance(prompt, list) and prompt and all(type(one) is int and 0 <= one < 1 << 31 for one in prompt)
    is_chat = isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
    if not (is_chat or is_tokens or (isinstance(prompt, str) and prompt)):
        raise BadInput(f"{where}: a prompt is a text or token ids, messages are objects; give {_EXAMPLE}")
    wish = {name: found.pop(name) for name in ("ttl", "priority") if name in found}
    check_wish(where, wish.get("ttl"), wish.get("priority"))
    if is_chat:
        return PrimePrompt(where, "/v1/chat/completions", {"add_generation_prompt": False, **found}, wish)
    return PrimePrompt(where, "/v1/completions", found, wish)


def check_wish(where: str, ttl: object, priority: object) -> None:
    """The connector's own limits. Raises `BadInput`."""
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < 1 << 40):
        raise BadInput(f"{where}: ttl={ttl!r}; give seconds above 0 and below 2**40")
    is_whole = isinstance(priority, int) and not isinstance(priority, bool) and 0 < priority <= 100
    if priority is not None and not is_whole:
        raise BadInput(f"{where}: priority={priority!r}; give a whole number from 1 to 100")


@dataclass(frozen=True, slots=True)
class PrimeOptions:
    """wish: ttl or priority, for prompts that give none. at_once: concurrent requests. request_seconds: of each."""

    wish: dict[str, Any]
    model: str | None = None
    at_once: int = 1
    request_seconds: float = 600.0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class PrimeResult:
    """In tokens, from the connector's accounts. there: in the store before. engine: in the engine's own cache, so
    computed and stored earlier. computed: all others. blocks: newly stored, of block_tokens each. failed: prompts that
    were not computed, and why; notes: messages of the store."""

    prompts: int = 0
    tokens: int = 0
    there: int = 0
    engine: int = 0
    computed: int = 0
    blocks: int | None = None
    block_tokens: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def stored_tokens(self) -> int | None:
        """Newly stored; None if the engine has no counter."""
        return self.blocks * self.block_tokens if self.blocks is not None else None

    def to_dict(self) -> dict[str, object]:
        told = {"stored_blocks" if name == "blocks" else name: value for name, value in asdict(self).items()}
        return told | {"stored_tokens": self.stored_tokens}

    def render(self, console: Any) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        stored = (
            "unknown: the engine has no counter" if self.stored_tokens is None else f"{self.stored_tokens:,} tokens"
        )
        for name, value in (
            ("prompts", f"{self.prompts:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("  stored before", f"{self.there:,}"),
            ("  in the engine's own cache", f"{self.engine:,}"),
            ("  computed", f"{self.computed:,}"),
            ("newly stored", f"{stored} in {self.blocks:,} blocks" if self.blocks else stored),
            ("seconds", f"{self.seconds:.1f}"),
        ):
            table.add_row(name, value)
        console.print(table)
        for note, count in self.notes.items():
            console.print(f"{note} ({count} prompts)", markup=False)

    def add(self, where: str, account: dict[str, Any] | None) -> None:
        self.prompts += 1
        if account is None:
            self.failed.append(f"{where}: the engine says nothing of a store; start it with KvStoreConnector")
            return
        hits, misses = account.get("hits", {}), account.get("misses", {})
        engine, found = hits.get("engine", 0), sum(hits.values())
        self.tokens += account.get("asked", 0)
        self.engine += engine
        self.there += found - engine
        self.computed += sum(misses.values())
        self.block_tokens = account.get("block_tokens") or self.block_tokens
        notes = [f"not understood by the engine's connector: {one}" for one in account.get("ignored", ())]
        notes += [f"not stored: {reason}" for reason in account.get("put_reasons", {})]
        notes += [
            f"the store did not answer: {one}" for one in ("unreachable", "disabled", "unsupported") if one in misses
        ]
        for note in notes:
            self.notes[note[:MOST_REASON]] = self.notes.get(note[:MOST_REASON], 0) + 1


class _TransferParams(msgspec.Struct):
    kvstore: dict[str, Any] | None = None


class _PrimeAnswer(msgspec.Struct):
    kv_transfer_params: _TransferParams | None = None


async def prime(
    engine: str, prompts: Sequence[PrimePrompt], options: PrimeOptions, progress: Callable[[str, int, int], None]
) -> PrimeResult:
    """Compute each prompt once, then wait for the engine's saves. Raises `EngineFault` if it cannot be reached."""
    loop, result = asyncio.get_running_loop(), PrimeResult()
    began, waiting = loop.time(), iter(enumerate(prompts, 1))
    async with EngineClient(engine) as client:
        model = options.model or (await model_of(client, options.headers, None)).id
        before = await _saved_blocks(client)

        async def worker() -> None:
            for number, prompt in waiting:
                progress(f"computing {prompt.where}", number - 1, len(prompts))
                try:
                    result.add(prompt.where, await _computed(client, model, prompt, options))
                except EngineFault as fault:
                    if not fault.has_begun:
                        raise
                    result.failed.append(f"{prompt.where}: {fault}"[:MOST_REASON])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.at_once, len(prompts))):
                group.create_task(worker())
        if before is not None and result.prompts:
            progress("waiting for what is saved", len(prompts), len(prompts))
            after = await _settled(client, model, options)
            result.blocks = after - before if after is not None else None
    result.seconds = loop.time() - began
    return result


async def _computed(
    client: EngineClient, model: str, prompt: PrimePrompt, options: PrimeOptions
) -> dict[str, Any] | None:
    wish = prompt.wish or options.wish
    body = {**prompt.body, "model": model, "max_tokens": 1, "temperature": 0, "stream": False}
    body["kv_transfer_params"] = {"kvstore": wish}
    headers = {**JSON_HEADERS, **options.headers}
    answer = await client.ask(
        "POST", prompt.path, msgspec.json.encode(body), headers, seconds=options.request_seconds, most_bytes=8 << 20
    )
    if answer.status != 200:
        said = " ".join(answer.body.decode(errors="replace").split())
        raise EngineFault(f"{answer.status}: {said}", has_begun=True)
    try:
        params = msgspec.json.decode(answer.body, type=_PrimeAnswer).kv_transfer_params
    except (msgspec.DecodeError, RecursionError):
        raise EngineFault("an answer that is none", has_begun=True) from None
    return params.kvstore if params is not None else None


async def _saved_blocks(client: EngineClient) -> int | None:
    found = [one.value for one in samples_of(await page_of(client)) if one.name == _SAVED]
    return round(sum(found)) if found else None


async def _settled(client: EngineClient, model: str, options: PrimeOptions) -> int | None:
    """Saved blocks once the counter stands still. The engine updates it only while computing, so it is given single
    tokens to compute."""
    last, quiet = await _saved_blocks(client), 0
    nudge = PrimePrompt("", "/v1/completions", {"prompt": [0]}, {"store": False})
    try:
        async with asyncio.timeout(SAVES_SECONDS):
            while quiet < QUIET_LOOKS:
                await asyncio.sleep(LOOK_SECONDS)
                await _computed(client, model, nudge, options)
                now = await _saved_blocks(client)
                quiet = quiet + 1 if now == last else 0
                last = now
    except (TimeoutError, EngineFault):
        pass  # report what was counted so far
    return last
