"""What operators' commands do with a running sidecar: ask, drop, purge, record, warm.

Each call uses a connection of its own. Every fault is raised as one line that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import msgspec

from kvstore.block.errors import BadInput, Rejected, StoreError, Unreachable
from kvstore.block.identity import ExtraKey, Namespace, PrefixHasher, as_extra_keys, token_bytes
from kvstore.cli.report import WarmReport, record_report
from kvstore.cli.terminal import Shown
from kvstore.client.connection import check_numbers, checked_facts
from kvstore.client.framing import HANGS, FramedSocket, Silent, TimedOut
from kvstore.client.warming import Warming
from kvstore.protocol import messages as m
from kvstore.protocol.requests import MAX_REQUEST_CHARACTERS
from kvstore.protocol.told import PrefixFigures
from kvstore.protocol.words import checked_seconds, pick, printable
from kvstore.status.tree import SidecarStatus
from tiering.clock import Clock

A = TypeVar("A")
CALL_SECONDS = 5.0
MARGIN_SECONDS = 5.0
"""Time for the answer, beyond the sidecar's own deadline."""
TO_THE_OPERATOR = "give --admin-socket or --data"
"""What to do where no operator's socket answers."""

Progress = Callable[[str, int, int], None]


def stat(socket: str, clock: Clock) -> SidecarStatus:
    """A sidecar's status. Raises `Unreachable`, and `StoreError` for an impossible answer."""
    return _asked(socket, clock, m.Stat(), m.StatReply).facts


def ping(socket: str, clock: Clock) -> None:
    """Raises `Unreachable` if no sidecar answers there."""
    _asked(socket, clock, m.Ping(), m.Done)


def why(socket: str, clock: Clock, request: str) -> m.WhyReply:
    """What a sidecar knows of requests whose names begin so. Raises `BadInput` if it knows none."""
    if not request or len(request) > MAX_REQUEST_CHARACTERS:
        raise BadInput(f"a request's name of {len(request)} characters; give 1 to {MAX_REQUEST_CHARACTERS}")
    reply = _asked(socket, clock, m.Why(request), m.WhyReply)
    if not reply.found:
        raise BadInput(
            f"nothing is known of a request {printable(request)!r}; the sidecar remembers the last ones of each tenant "
            f"({reply.kept:,} now) by the names that engines have for them: vLLM's begin with cmpl- or chatcmpl-"
        )
    return reply


def prefixes(socket: str, clock: Clock, tenant: str) -> PrefixFigures:
    """A sidecar's hottest prefixes; of one tenant or of all. Raises `StoreError`."""
    _check_names(tenant)
    return _asked(socket, clock, m.Prefixes(tenant), m.PrefixesReply).figures


def drop(socket: str, clock: Clock, namespace: str, tenant: str, seconds: float) -> m.Counted:
    """Evict a namespace from every tier; returns how many blocks it had, and what other nodes may still have of it."""
    checked_seconds(seconds)
    _check_names(tenant, namespace)
    return _asked(socket, clock, m.DropAny(namespace, tenant, seconds), m.Counted, seconds + MARGIN_SECONDS)


def purge(socket: str, clock: Clock, tenant: str, seconds: float) -> m.Counted:
    """Void all blocks of a tenant and retire its key; returns how many it had, and what other nodes may still have."""
    checked_seconds(seconds)
    _check_names(tenant)
    return _asked(socket, clock, m.Purge(tenant, seconds), m.Counted, seconds + 3 * MARGIN_SECONDS)


def _asked(socket: str, clock: Clock, verb: m.Verb, kind: type[A], seconds: float = CALL_SECONDS) -> A:
    with _connection(socket, clock, TO_THE_OPERATOR) as ask:
        return ask(verb, kind, seconds)


def _check_names(tenant: str, namespace: str = "") -> None:
    """The protocol's limit. Raises `BadInput`."""
    for what, given in (("a namespace's id", namespace), ("a tenant's name", tenant)):
        if len(given) > m.MAX_NAME:
            raise BadInput(f"{what} of {len(given)} characters; see kvstore namespaces for what there is")


# Recording ------------------------------------------------------------------------------------------------------------

TAKEN_EVERY_SECONDS = 0.5
"""Interval between fetches of a sidecar's notes."""


def record(
    socket: str,
    clock: Clock,
    namespace: str,
    tenant: str,
    seconds: float | None,
    file: str,
    write: Callable[[str], object],
    progress: Progress,
    is_ended: Callable[[], bool] = lambda: False,
) -> Shown:
    """Write each request that clients look up from now on as a line of the form that `read_trace` reads.

    seconds: None until it is ended. file: named in the report. is_ended: polled; what was looked up until then is
    written. Raises `BadInput`, and `Unreachable` if the sidecar goes away, with how much was written.
    """
    _check_names(tenant, namespace)
    if seconds is not None and not isfinite(seconds):
        raise BadInput(f"--seconds {seconds}; give a number, 0 or more, or leave it out")
    began = clock.monotonic_seconds()
    requests = blocks = lost = 0
    with _connection(socket, clock, TO_THE_OPERATOR) as ask:
        begun = ask(m.Record(b"", namespace, tenant), m.Recorded, CALL_SECONDS)
        try:
            while True:
                passed = clock.monotonic_seconds() - began
                if is_ended() and (seconds is None or passed < seconds):
                    seconds = passed
                is_over = seconds is not None and passed >= seconds
                found = ask(m.Record(begun.recording), m.Recorded, CALL_SECONDS)
                lost = found.lost
                for at, ids in found.requests:
                    if seconds is not None and at > seconds:
                        break
                    line = {
                        "timestamp": round(1000 * at),
                        "input_length": len(ids) * begun.block_tokens,
                        "output_length": 0,
                        "hash_ids": ids,
                    }
                    write(json.dumps(line) + "\n")
                    requests += 1
                    blocks += len(ids)
                progress(f"{requests:,} requests, {blocks:,} blocks", int(passed), int(seconds or passed))
                if is_over and (not found.requests or found.requests[-1][0] > (seconds or 0)):
                    break
                if not found.requests:
                    clock.sleep(TAKEN_EVERY_SECONDS if seconds is None else min(TAKEN_EVERY_SECONDS, seconds))
        except StoreError as error:  # the sidecar is gone, and so is the recording
            saved = f"{requests:,} requests are in {file}, and then: " if requests else ""
            raise type(error)(f"{saved}{error}") from None
        except BaseException:
            ask(m.Record(begun.recording, ends=True), m.Recorded, CALL_SECONDS)
            raise
        ask(m.Record(begun.recording, ends=True), m.Recorded, CALL_SECONDS)
    return record_report(file, begun.block_tokens, requests, blocks, lost, clock.monotonic_seconds() - began)


# Warming --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A line of the file: token ids as little-endian uint32 bytes, and extra keys."""

    line: int
    token_ids: bytes
    extra_keys: tuple[ExtraKey, ...]


def read_prompts(name: str, lines: Iterable[str]) -> list[WarmPrompt]:
    """Read JSON lines: a list of token ids, or an object with "token_ids" and optionally "extra_keys". Empty lines are
    skipped.

    An extra key is text, or {"hex": ..., "first_token": ...}, the latter as in `ExtraKey`. Raises `BadInput`, which
    names the line.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(number, line))
        except BadInput as error:
            raise BadInput(f"{name} line {number}: {error}") from None
    return prompts


def _prompt(number: int, line: str) -> WarmPrompt:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON ({error}); give a list of token ids, or an object with token_ids") from None
    if isinstance(given, list):
        given = {"token_ids": given}
    if not isinstance(given, dict) or not isinstance(given.get("token_ids"), list):
        raise BadInput('give a list of token ids, or {"token_ids": [...], "extra_keys": [...]}')
    unknown = sorted(given.keys() - {"token_ids", "extra_keys"})
    if unknown:
        raise BadInput(f"{printable(unknown[0])!r} is not known; there are token_ids and extra_keys")
    if any(isinstance(one, bool) for one in given["token_ids"]):
        raise BadInput("token ids must be integers from 0 to 4294967295, and one is true or false")
    extra = given.get("extra_keys") or []
    if not isinstance(extra, list):
        raise BadInput("extra_keys must be a list")
    return WarmPrompt(number, token_bytes(given["token_ids"]), as_extra_keys([_extra_key(one) for one in extra]))


def _extra_key(given: Any) -> ExtraKey | bytes | str:
    if isinstance(given, str):
        return given
    try:
        value = bytes.fromhex(given["hex"])
        return ExtraKey(value, given["first_token"]) if "first_token" in given else value
    except (KeyError, TypeError, ValueError):
        raise BadInput('an extra key is text, or {"hex": "...", "first_token": N}') from None


def warm(
    socket: str, clock: Clock, namespace: str, name: str, prompts: Sequence[WarmPrompt], progress: Progress
) -> WarmReport:
    """Promote the stored prefix of each prompt to DRAM. name: the file's, for messages. Raises `BadInput`."""
    began = clock.monotonic_seconds()
    with _connection(socket, clock, "give --socket (a tenant's) or --data") as ask:
        chosen = _chosen_namespace(ask, namespace)
        block_tokens = _unpacked(chosen).layout.block_tokens
        grant = ask(m.OpenNamespace(chosen.packed, chosen.payload_bytes), m.Granted, CALL_SECONDS).grant
        hasher, warming = PrefixHasher(grant.identity_key, block_tokens), Warming(ask, grant.number, clock)
        for done, prompt in enumerate(prompts):
            progress(f"warming {prompt.line}", done, len(prompts))
            keys = hasher.keys(prompt.token_ids, prompt.extra_keys)
            if len(keys) > m.MAX_KEYS:
                most = f"{m.MAX_KEYS} ({m.MAX_KEYS * block_tokens} tokens)"
                raise BadInput(f"{name} line {prompt.line}: {len(keys)} blocks; give at most {most}")
            warming.take(keys)
    return WarmReport(
        chosen.id,
        len(prompts),
        warming.asked,
        warming.warm,
        warming.promoted,
        dict(warming.left),
        dict(warming.absent),
        clock.monotonic_seconds() - began,
    )


def _chosen_namespace(ask: _Ask, wanted: str) -> m.Opened:
    """The tenant's only namespace whose digest begins so. Raises `BadInput`."""
    found: list[m.Opened] = []
    first = 0
    while True:
        reply = ask(m.Namespaces(first), m.NamespacesReply, CALL_SECONDS)
        found += reply.namespaces
        first = reply.next
        if not first:
            break
    models = [printable(_unpacked(one).model) for one in found]
    return found[pick(wanted, [one.id for one in found], models, "", "give more digits")]


def _unpacked(opened: m.Opened) -> Namespace:
    try:
        return Namespace.unpack(opened.packed)
    except ValueError as error:
        raise StoreError(f"namespace {printable(opened.id)}: {error}; is the sidecar of another version?") from None


# A connection ---------------------------------------------------------------------------------------------------------


class _Ask:
    """Calls on one connection; raises refusals."""

    def __init__(self, wire: FramedSocket, socket: str) -> None:
        self._wire = wire
        self._socket = socket

    def __call__(self, verb: m.Verb, kind: type[A], seconds: float) -> A:
        try:
            answer = self._wire.call(verb, seconds).answer
        except TimedOut:
            raise Unreachable(f"{self._socket}: no answer within {seconds:g} s: {HANGS}") from None
        except Unreachable as error:
            raise Unreachable(f"{self._socket}: {error}; is the sidecar still running?") from None
        if isinstance(answer, kind):
            self._check(answer)
            return answer
        if not isinstance(answer, m.Failed):
            raise StoreError(f"{self._socket}: an answer of another kind; is the sidecar of another version?")
        raise BadInput(answer.text) if answer.fault is m.RequestFault.BAD_INPUT else StoreError(answer.text)

    def _check(self, answer: Any) -> None:
        try:
            if isinstance(answer, m.StatReply):
                checked_facts(answer.facts)
            elif isinstance(answer, m.WhyReply | m.PrefixesReply):
                check_numbers(msgspec.to_builtins(answer))
        except ValueError as error:
            raise StoreError(
                f"{self._socket}: an answer that cannot be right ({error}); see the sidecar's log"
            ) from None


@contextmanager
def _connection(socket: str, clock: Clock, hint: str) -> Iterator[_Ask]:
    try:
        wire = FramedSocket(socket, "kvstore command line", b"", clock, CALL_SECONDS)
    except Rejected:
        raise
    except Silent as error:
        raise Silent(f"{error}: {HANGS}") from None
    except Unreachable as error:
        raise Unreachable(f"no sidecar to talk to: {error}; start it (kvstore serve), or {hint}") from None
    try:
        yield _Ask(wire, socket)
    finally:
        wire.close()
