"""Lints a file of prompts: what an unlimited prefix cache would find, and where prompts part that need not.

    line > tokens (given, by a tokenizer, or bytes as a stand-in) > chain of blocks > found so far? counted
    missed > of all runs of 32 tokens one in 64, chosen by its hash > the earlier prompt that shares most of them
           > the tokens of both > where they stop being equal, and how many tokens replace how many until they are again
           > alike ones together > a sentence that says what to do

A chain of block keys cannot tell where prompts are equal again: every key behind the first difference differs. Prompts
are taken in the file's order. Everything is bounded; an unreadable line is named. Pure: lines come in, text goes to a
tokenizer that was handed in, and none of it is kept.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from kvstore.block.errors import BadInput, shown
from kvstore.block.identity import ExtraKey, PrefixHasher, token_bytes
from kvstore.insight.trace import Column

MOST_LINE_CHARACTERS = 1 << 24
MOST_PROMPT_TOKENS = 1 << 20
MOST_TOKENS = 1 << 26
"""Of all prompts together: 256 MiB."""
MOST_PROMPTS = 1 << 20
MOST_SKETCHES = 1 << 16
"""Later prompts are compared with the last so many."""
SHOWN_GROUPS = 10
_BEFORE_CHARACTERS = 24
"""How much text before the place is shown."""

SHINGLE_TOKENS = 32
"""Length of a hashed run; two prompts count as equal again where this many tokens are equal."""
SKETCH_EVERY = 64
"""Of a prompt's hashes one in this many is kept, its sketch; a power of two."""
LEAST_EQUAL_TOKENS = 256
"""Fewer equal tokens behind the difference are not reported."""
LEAST_SHARED = 4
"""In hashes: about what LEAST_EQUAL_TOKENS leave in a sketch."""
LEAST_START_TOKENS = 16
"""A shared start of fewer tokens is chance, or a begin-of-text token."""
NEAR_TOKENS = 512
"""A place where two prompts are equal again within this many tokens is preferred."""
SAME_PLACE_TOKENS = 32
"""Prompts that part within this many tokens of each other count as parting at one place of their template."""
MOST_PAIRS = 4096
"""Order is compared for at most this many runs; of more, for every n-th."""
MOST_OWNERS = 8
"""The newest prompts are listed per hash and start, so that a phrase which all share does not list them all."""

_U64 = np.uint64
_DIGEST = blake2b(digest_size=32, key=b"kvstore lint", person=b"kv-shingles-v1").digest()
_TOKEN, _XOR, _BASE, _FINAL = np.frombuffer(_DIGEST, "<u8") | np.array([1, 0, 5, 1], _U64)
_POWERS = [(length, _U64(pow(int(_BASE), length, 1 << 64))) for length in (1, 2, 4, 8, 16)]
"""By the length of a run, that of the base."""

_FORMS = (
    'give a list of token ids, a text, or an object with "token_ids", "prompt" (either) or "messages", and perhaps '
    '"cache_salt" and "namespace"'
)


class Tokenised(NamedTuple):
    """Token ids, and the character at which each begins."""

    ids: Sequence[int]
    starts: Sequence[int]


Tokenise = Callable[[str], Tokenised]
Progress = Callable[[str, int, int], object]


def bytes_as_tokens(text: str) -> Tokenised:
    """A stand-in for a tokenizer: each byte of UTF-8 is a token."""
    raw = text.encode()
    starts = np.cumsum((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80) - 1
    return Tokenised(list(raw), starts.tolist())


class TextPiece(NamedTuple):
    """Where a message (or tools) begins in a prompt's text."""

    start: int
    label: str


@dataclass(frozen=True, slots=True, repr=False)
class FilePrompt:
    """tokens: uint32. salt: prompts with different salts share nothing. fields: those of its namespace. text: empty if
    the file gave token ids. pieces: of chats."""

    tokens: Column
    salt: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    line: int = 0
    text: str = ""
    pieces: tuple[TextPiece, ...] = ()

    def shares_keys(self, other: FilePrompt) -> bool:
        """Whether equal tokens are equal blocks."""
        return self.salt == other.salt and self.fields == other.fields


class PromptChange(StrEnum):
    """How a prompt differs from an earlier one. INSERTED: one prompt has tokens that the other lacks. SHORT: the shared
    start is shorter than one block."""

    CHANGED = "changed"
    INSERTED = "inserted"
    REORDERED = "reordered"
    SHORT = "shorter than a block"
    SALTED = "other salt"
    NAMESPACE = "other namespace"


@dataclass(frozen=True, slots=True)
class Divergence:
    """How a prompt differs from an earlier one. In tokens.

    place: the first token that differs. earlier_tokens, tokens: how many
    tokens lie between there and where both are equal again, in the earlier prompt and in this one; None if there is no
    single such place. equal_tokens: tokens of this prompt behind the difference that the earlier one has too. what: the
    namespace field that differs.
    """

    kind: PromptChange
    place: int
    earlier_tokens: int | None
    tokens: int | None
    equal_tokens: int
    what: str = ""


# Reading ---------------------------------------------------------------------------------------------------------


def read_file_prompts(
    name: str, lines: Iterable[str], tokenise: Tokenise | None, progress: Progress = lambda doing, done, steps: None
) -> list[FilePrompt]:
    """Read JSON lines: a list of token ids, a text, or an object with "token_ids", "prompt", "text" or "messages".

    "cache_salt" and "namespace" (an object of texts; "model" is one of them) keep prompts apart; "body" is looked into,
    as in batch requests; other fields are ignored. Messages are written one after another, each behind its role: not
    your model's own template, but the same places. Empty lines are skipped. Raises `BadInput` that names the line.
    """
    found: list[FilePrompt] = []
    total = 0
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_LINE_CHARACTERS:
            raise BadInput(f"{name} line {number}: more than {MOST_LINE_CHARACTERS} characters; give shorter prompts")
        if not line.strip():
            continue
        try:
            prompt = _prompt_of(number, line, tokenise)
        except BadInput as error:
            raise BadInput(f"{name} line {number}: {error}") from None
        total += len(prompt.tokens)
        if total > MOST_TOKENS or len(found) >= MOST_PROMPTS:
            raise BadInput(
                f"{name} line {number}: more than {MOST_TOKENS} tokens or {MOST_PROMPTS} prompts up to here; "
                "give a part of the file"
            )
        found.append(prompt)
        if len(found) % 100 == 1:
            progress(f"reading line {number:,}", 0, 0)
    if not found:
        raise BadInput(f"{name} has no prompt in it; on each line {_FORMS}")
    return found


def _prompt_of(number: int, line: str, tokenise: Tokenise | None) -> FilePrompt:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise BadInput(f"no JSON; {_FORMS}") from None
    if isinstance(given, dict) and isinstance(given.get("body"), dict):
        given = given["body"]
    if not isinstance(given, dict):
        given = {"prompt": given}
    salt = given.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise BadInput(f"cache_salt={shown(salt)}; give text")
    content = next((given[one] for one in ("token_ids", "prompt", "text") if given.get(one) is not None), None)
    pieces: tuple[TextPiece, ...] = ()
    if content is None and isinstance(given.get("messages"), list):
        content, pieces = _chat(given["messages"], given.get("tools"))
    fields = _fields(given)
    if isinstance(content, list):
        if any(isinstance(one, bool) for one in content):
            raise BadInput("token ids must be integers from 0 to 4294967295, and one is true or false")
        tokens = np.frombuffer(token_bytes(content), np.uint32)
        return FilePrompt(_bounded(tokens), salt, fields, number)
    if not isinstance(content, str):
        raise BadInput(f"{shown(content)[:60]} is no prompt; {_FORMS}")
    if tokenise is None:
        raise BadInput(
            "it has text, and no tokenizer was given; give --tokenizer with a model's folder or its tokenizer.json, or "
            "--bytes to take bytes for tokens"
        )
    if any("\ud800" <= one <= "\udfff" for one in content):
        raise BadInput("half of a surrogate pair, which is no text; mend it")
    tokens = np.array(tokenise(content).ids, np.uint32)
    return FilePrompt(_bounded(tokens), salt, fields, number, content, pieces)


def _bounded(tokens: Column) -> Column:
    if len(tokens) > MOST_PROMPT_TOKENS:
        raise BadInput(f"{len(tokens)} tokens; give at most {MOST_PROMPT_TOKENS} in one prompt")
    return tokens


def _fields(given: Mapping[str, Any]) -> dict[str, str]:
    namespace = given.get("namespace") or {}
    if isinstance(namespace, str):
        namespace = {"namespace": namespace}
    if not isinstance(namespace, dict):
        raise BadInput(f"namespace={shown(namespace)}; give text, or an object of texts")
    fields = {str(name)[:64]: str(value)[:64] for name, value in namespace.items()}
    if isinstance(given.get("model"), str):
        fields.setdefault("model", given["model"][:64])
    return fields


def _chat(messages: Sequence[Any], tools: Any) -> tuple[str, tuple[TextPiece, ...]]:
    parts, pieces = [], []
    at = 0
    written = [("tools", json.dumps(tools))] if tools else []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise BadInput(f"message {number} is {shown(message)[:60]}; give an object with role and content")
        written.append((f"message {number} ({str(message.get('role', '-'))[:20]})", _content(message)))
    for label, content in written:
        head = f"<|{label.partition('(')[2].rstrip(')') or label}|>\n"
        parts.append(f"{head}{content}\n")
        pieces.append(TextPiece(at + len(head), label))
        at += len(parts[-1])
    return "".join(parts), tuple(pieces)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    else:
        text = "".join(
            one["text"] if isinstance(one, dict) and isinstance(one.get("text"), str) else json.dumps(one)
            for one in content
        )
    calls = message.get("tool_calls")
    return text + json.dumps(calls) if calls else text


# Comparing -------------------------------------------------------------------------------------------------------


def run_hashes(tokens: Column) -> Column:
    """Hash every run. tokens: uint32. Returns uint64, one for each first token: len(tokens) - 31 of them. Equal runs
    have equal hashes, wherever they stand, and others have not.

    With t_i = a mixed number of token i, B odd and all modulo 2**64, the run at i has sum(t_(i+k) * B**(31-k)); one of
    2n tokens is made of two of n. R. M. Karp and M. O. Rabin, IBM J. Res. Dev. 31 (2), 1987.
    """
    found: Column = np.multiply(tokens, _TOKEN, dtype=_U64) ^ _XOR
    spare = np.empty_like(found)
    for length, power in _POWERS:
        longer: Column = np.multiply(found[:-length], power, out=spare[: max(0, len(found) - length)])
        longer += found[length:]
        found, spare = longer, found
    found *= _FINAL
    return found


def sketch(tokens: Column) -> tuple[Column, Column]:
    """One hash in 64, chosen by its value: the first tokens of these runs, in order, and their hashes. Takes 0.1 ms for
    32,768 tokens. Sampling by value: U. Manber, USENIX Winter 1994."""
    found = run_hashes(tokens)
    places = np.flatnonzero(found < _U64((1 << 64) // SKETCH_EVERY))
    return places, found[places]


def compare_prompts(
    earlier: FilePrompt, prompt: FilePrompt, block_tokens: int, stored_tokens: int = 0
) -> Divergence | None:
    """Compare a prompt with an earlier one by the tokens of both.

    None if they share too little, if nothing is lost (one continues the other), or if they part for good behind a
    shared block. stored_tokens: leading tokens of the prompt that are found anyway; equal_tokens counts only those
    behind them.
    """
    place = shared_start(earlier.tokens, prompt.tokens)
    if not prompt.shares_keys(earlier):
        lost = place // block_tokens * block_tokens - stored_tokens
        if lost <= 0:
            return None
        what = _other_field(earlier.fields, prompt.fields)
        kind = PromptChange.NAMESPACE if what else PromptChange.SALTED
        return Divergence(kind, 0, None, None, lost, what=what)
    if place == min(len(earlier.tokens), len(prompt.tokens)):
        return None
    found = _behind(earlier.tokens, prompt.tokens, place, stored_tokens)
    if found is None and LEAST_START_TOKENS <= place < block_tokens and not stored_tokens:
        return Divergence(PromptChange.SHORT, place, None, None, 0)
    return found


def shared_start(one: Column, other: Column) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    at = int(differs.argmax()) if count else 0
    return at if count and differs[at] else count


def _other_field(earlier: Mapping[str, str], fields: Mapping[str, str]) -> str:
    for name in sorted(earlier.keys() | fields.keys()):
        if earlier.get(name) != fields.get(name):
            return f"{name} is {earlier.get(name, 'not set')} in one and {fields.get(name, 'not set')} in the other"
    return ""


def _behind(old: Column, new: Column, place: int, stored_tokens: int) -> Divergence | None:
    old_hashes, new_hashes = run_hashes(old[place:]), run_hashes(new[place:])
    equal = _covered(np.isin(new_hashes, old_hashes), len(new) - place, stored_tokens - place)
    if equal < LEAST_EQUAL_TOKENS:
        return None
    pairs = _unique_pairs(old_hashes, new_hashes)
    if _out_of_order(pairs[:, 0], SHINGLE_TOKENS):
        return Divergence(PromptChange.REORDERED, place, None, None, equal)
    near = NEAR_TOKENS + 1
    first = _first_again(old_hashes[:near], new_hashes[:near]) or _first_again(old_hashes, new_hashes)
    assert first is not None  # some run is equal, or `equal` were 0
    kind = PromptChange.CHANGED if min(first) else PromptChange.INSERTED
    return Divergence(kind, place, *first, equal)


def _covered(is_equal: Any, tokens: int, skipped: int) -> int:
    edges = np.zeros(tokens + 1, np.int64)
    edges[: len(is_equal)] += is_equal
    edges[SHINGLE_TOKENS : SHINGLE_TOKENS + len(is_equal)] -= is_equal
    return int((np.cumsum(edges)[max(skipped, 0) : tokens] > 0).sum())


def _unique_pairs(old: Column, new: Column) -> Column:
    """Places of hashes that occur exactly once on each side: [pairs, 2], ordered by the second column."""
    old_values, old_at, old_counts = np.unique(old, return_index=True, return_counts=True)
    new_values, new_at, new_counts = np.unique(new, return_index=True, return_counts=True)
    once = old_values[old_counts == 1], new_values[new_counts == 1]
    _, first, second = np.intersect1d(*once, assume_unique=True, return_indices=True)
    pairs = np.stack([old_at[old_counts == 1][first], new_at[new_counts == 1][second]], 1)
    ordered: Column = pairs[np.argsort(pairs[:, 1])]
    return ordered


def _out_of_order(places: Column, least: int) -> bool:
    if (places[1:] >= places[:-1]).all():
        return False
    step = -(-len(places) // MOST_PAIRS)
    tails: list[int] = []  # for each length, the smallest last place of a rising sequence
    looked = places[::step].tolist()
    for one in looked:
        at = bisect_right(tails, one)
        tails[at : at + 1] = [one]
    return (len(looked) - len(tails)) * step >= least


def _first_again(old: Column, new: Column) -> tuple[int, int] | None:
    _, was, stands = np.intersect1d(old, new, return_indices=True)
    if not len(was):
        return None
    at = int(np.argmin((was + stands) * (NEAR_TOKENS * 4) + np.abs(was - stands)))
    return int(was[at]), int(stands[at])


# Judging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LintGroup:
    """Prompts that part in the same way at the same place. Token counts are medians. lines: an earlier prompt, and one
    that parts from it. where: the latter's text at that place, if there is text. lost_tokens: of all prompts, computed
    although they had been stored."""

    kind: PromptChange
    prompts: int
    first_place: int
    last_place: int
    earlier_tokens: int | None
    tokens: int | None
    equal_tokens: int
    lost_tokens: int
    lines: tuple[int, int]
    where: str
    what: str
    block_tokens: int

    @property
    def sentence(self) -> str:
        """What is wrong, and what to do."""
        count, s, have, are = f"{self.prompts:,} prompts", "", "have", "are"
        if self.prompts == 1:
            count, s, have, are = "1 prompt", "s", "has", "is"
        place, equal = f"token {self.first_place:,}", f"{self.equal_tokens:,}"
        if self.last_place != self.first_place:
            place = f"tokens {self.first_place:,} to {self.last_place:,}"
        lost = f"{_in_words(self.lost_tokens)} tokens computed that were stored"
        again = f"and {are} the same again for {equal}: {lost}"
        earlier, tokens = self.earlier_tokens, self.tokens
        match self.kind:
            case PromptChange.CHANGED:
                differ = "some tokens" if tokens is None else f"{tokens:,} token{'s' * (tokens != 1)}"
                if tokens != earlier and earlier is not None:
                    differ += f" (where an earlier one has {earlier:,})"
                return f"{count} part{s} at {place}, differ{s} for {differ}, {again}. Move what changes to the end."
            case PromptChange.INSERTED:
                there = "tokens more or fewer"
                if tokens is not None and earlier is not None:
                    number, word = (tokens, "more") if tokens else (earlier, "fewer")
                    there = f"{number:,} token{'s' * (number != 1)} {word}"
                return (
                    f"{count} part{s} at {place}, {have} {there} there, {again}. "
                    "Put what only some prompts have behind what all share."
                )
            case PromptChange.REORDERED:
                return (
                    f"{count} part{s} at {place}, and {have} {equal} equal tokens behind it in another order: "
                    f"{lost}. Write these parts in one order, such as by name."
                )
            case PromptChange.SHORT:
                return (
                    f"{count} share{s} {self.first_place:,} tokens at the start, which fill no block of "
                    f"{self.block_tokens}: none of them is found. Begin with at least {self.block_tokens} tokens that "
                    "all share, or take smaller blocks."
                )
            case PromptChange.SALTED:
                return (
                    f"{count} begin{s} with {equal} tokens of an earlier one under another cache_salt: "
                    f"{lost}. Give prompts that may share one salt, or none."
                )
        return (
            f"{count} begin{s} with {equal} tokens of an earlier one in another namespace ({self.what}): "
            f"{lost}. KV of one is no KV of the other: send what shares a start to one of them."
        )

    def to_dict(self) -> dict[str, object]:
        told = asdict(self)
        del told["block_tokens"]
        return told | {"sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class LintResult:
    """What an unlimited cache finds of a file; groups with the largest loss first. block_tokens: the cache's.
    min_hit_rate: the check fails below it; None for no check. unit: what counts as a token."""

    file: str
    block_tokens: int
    min_hit_rate: float | None
    unit: str
    prompts: int
    tokens: int
    hit_tokens: int
    groups: tuple[LintGroup, ...]

    @property
    def hit_rate(self) -> float:
        """Share of all tokens that lie in full blocks which an earlier prompt had behind the same start."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def possible_hit_rate(self) -> float:
        """The hit rate if no group lost anything."""
        lost = sum(one.lost_tokens for one in self.groups)
        return min(1.0, (self.hit_tokens + lost) / self.tokens) if self.tokens else 0.0

    @property
    def is_below(self) -> bool:
        return self.min_hit_rate is not None and self.hit_rate < self.min_hit_rate

    def to_dict(self) -> dict[str, object]:
        rates = {name: getattr(self, name) for name in ("hit_rate", "possible_hit_rate", "is_below")}
        return asdict(self) | rates | {"groups": [one.to_dict() for one in self.groups]}

    def render(self, console: Any) -> None:

        def say(text: str) -> None:
            console.print(Text(text), soft_wrap=True)

        say(
            f"{self.file}: {self.prompts:,} prompts, {self.tokens:,} {self.unit}; of these a prefix cache without an "
            f"end finds {100 * self.hit_rate:.1f} % (blocks of {self.block_tokens})"
        )
        for number, group in enumerate(self.groups[:SHOWN_GROUPS], 1):
            say(f"{number}. {group.sentence}")
            where = f" {group.where}." if group.where else ""
            say(f"   Compare lines {group.lines[0]} and {group.lines[1]}.{where}")
        if len(self.groups) > SHOWN_GROUPS:
            rest = sum(one.lost_tokens for one in self.groups[SHOWN_GROUPS:])
            say(f"and {len(self.groups) - SHOWN_GROUPS:,} more places, {rest:,} tokens; see --json")
        if self.groups:
            say(f"Without these, up to {100 * self.possible_hit_rate:.1f} % would be found.")
        else:
            say("No prompts were found that part and are the same again.")
        if self.is_below:
            say(f"Below --min-hit-rate {self.min_hit_rate:g}.")


def lint(
    name: str,
    prompts: Sequence[FilePrompt],
    block_tokens: int = 64,
    min_hit_rate: float | None = None,
    tokenise: Tokenise | None = None,
    unit: str = "tokens",
    progress: Progress = lambda doing, done, steps: None,
) -> LintResult:
    """Judge the prompts in order. tokenise: what they were read with, to find places in their text."""
    judge = _Judge(prompts, block_tokens)
    for number in range(len(prompts)):
        if number % 20 == 0:
            progress(f"comparing {name}", number, len(prompts))
        judge.take(number)
    progress(f"comparing {name}", len(prompts), len(prompts))
    groups = sorted(
        (_group(prompts, together, block_tokens, tokenise) for together in _together(prompts, judge.found)),
        key=lambda one: (-one.lost_tokens, -one.prompts, one.lines),
    )
    tokens = sum(len(one.tokens) for one in prompts)
    return LintResult(name, block_tokens, min_hit_rate, unit, len(prompts), tokens, judge.hit_tokens, tuple(groups))


class _Parting(NamedTuple):
    number: int
    earlier: int
    divergence: Divergence


class _Judge:
    def __init__(self, prompts: Sequence[FilePrompt], block_tokens: int) -> None:
        self.hit_tokens = 0
        self.found: list[_Parting] = []
        self._prompts = prompts
        self._block_tokens = block_tokens
        self._stored: set[bytes] = set()
        self._owners: defaultdict[int | bytes, list[int]] = defaultdict(list)
        """Prompts by the hashes in their sketch, and by their start."""
        self._hashers: dict[str, PrefixHasher] = {}

    def take(self, number: int) -> None:
        prompt = self._prompts[number]
        keys = self._keys(prompt)
        blocks = next((at for at, key in enumerate(keys) if key not in self._stored), len(keys))
        hit = blocks * self._block_tokens
        self.hit_tokens += hit
        self._stored.update(keys[blocks:])
        places, hashes = sketch(prompt.tokens)
        start = prompt.tokens[:LEAST_START_TOKENS].tobytes()
        missed = len(prompt.tokens) - hit
        if missed >= min(LEAST_EQUAL_TOKENS, self._block_tokens):
            near = self.nearest(number, hashes[places >= hit]) if missed >= LEAST_EQUAL_TOKENS else []
            alike = self._owners[start] if not hit else []
            self._compare(number, hit, list(dict.fromkeys((*near, *alike))))
        for one in [start, *np.unique(hashes).tolist()] if len(prompt.tokens) >= LEAST_START_TOKENS else []:
            owners = self._owners[one]
            owners.append(number)
            del owners[:-MOST_OWNERS]

    def nearest(self, number: int, hashes: Column) -> list[int]:
        """The four prompts before this one that share most of these hashes, best first. Leaves out those that share
        less than half as much as the best, or fewer than `LEAST_SHARED`."""
        votes: Counter[int] = Counter()
        for one in hashes.tolist():
            votes.update(owner for owner in self._owners.get(one, ()) if owner >= number - MOST_SKETCHES)
        least = max(LEAST_SHARED, (max(votes.values(), default=0) + 1) // 2)
        return [owner for owner, count in votes.most_common(4) if count >= least]

    def _compare(self, number: int, hit: int, candidates: list[int]) -> None:
        prompts = self._prompts
        candidates.sort(key=lambda one: -shared_start(prompts[one].tokens, prompts[number].tokens))
        for earlier in candidates:
            found = compare_prompts(prompts[earlier], prompts[number], self._block_tokens, hit)
            if found is not None:
                self.found.append(_Parting(number, earlier, found))
                return

    def _keys(self, prompt: FilePrompt) -> list[bytes]:
        fields = json.dumps(sorted(prompt.fields.items()))
        if fields not in self._hashers:
            identity = blake2b(fields.encode("utf-8", "replace"), digest_size=32).digest()
            self._hashers[fields] = PrefixHasher(identity, self._block_tokens)
        extra = [ExtraKey(prompt.salt.encode("utf-8", "replace"))] if prompt.salt else []
        return self._hashers[fields].keys(prompt.tokens.tobytes(), extra)


def _together(prompts: Sequence[FilePrompt], found: Sequence[_Parting]) -> list[list[_Parting]]:
    alike: defaultdict[tuple[str, str, bytes], list[_Parting]] = defaultdict(list)
    for one in found:
        head = prompts[one.number].tokens[: min(LEAST_START_TOKENS, one.divergence.place)]
        is_deep = len(head) == LEAST_START_TOKENS
        alike[one.divergence.kind, one.divergence.what, head.tobytes() if is_deep else b""].append(one)
    groups = []
    for members in alike.values():
        members.sort(key=lambda one: (one.divergence.place, one.number))
        group = [members[0]]
        for one in members[1:]:
            if one.divergence.place - group[-1].divergence.place > SAME_PLACE_TOKENS:
                groups.append(group)
                group = []
            group.append(one)
        groups.append(group)
    return groups


def _group(
    prompts: Sequence[FilePrompt], together: Sequence[_Parting], block_tokens: int, tokenise: Tokenise | None
) -> LintGroup:
    divergences = [one.divergence for one in together]
    example = min(together, key=lambda one: one.number)
    lengths = [(one.earlier_tokens, one.tokens) for one in divergences if one.tokens is not None]
    middle = sorted(lengths, key=lambda one: ((one[1] or 0), (one[0] or 0)))[len(lengths) // 2] if lengths else None
    places = [one.place for one in divergences]
    earlier, tokens = middle or (None, None)
    return LintGroup(
        divergences[0].kind,
        len(together),
        min(places),
        max(places),
        earlier,
        tokens,
        sorted(one.equal_tokens for one in divergences)[len(divergences) // 2],
        sum(one.equal_tokens for one in divergences),
        (prompts[example.earlier].line, prompts[example.number].line),
        _where(prompts[example.number], example.divergence, tokenise),
        divergences[0].what,
        block_tokens,
    )


def _where(prompt: FilePrompt, divergence: Divergence, tokenise: Tokenise | None) -> str:
    if not prompt.text or tokenise is None or divergence.kind in (PromptChange.SALTED, PromptChange.NAMESPACE):
        return ""
    starts = tokenise(prompt.text).starts
    at = starts[divergence.place] if divergence.place < len(starts) else len(prompt.text)
    begins, label = 0, ""
    if prompt.pieces:
        piece = prompt.pieces[max(0, bisect_right([one.start for one in prompt.pieces], at) - 1)]
        begins, label = piece.start, f"{piece.label}, "
    text = prompt.text[begins : max(at, begins)]
    line = text.count("\n") + 1
    before = text.rpartition("\n")[2][-_BEFORE_CHARACTERS:]
    behind = f", behind {before!r}" if before.strip() else ", at its start"
    return f"They part in {label}line {line} of the text{behind}"


def _in_words(tokens: float) -> str:
    for size, unit in ((10**9, " G"), (10**6, " M")):
        if tokens >= size:
            return f"{tokens / size:.1f}{unit}"
    return f"{tokens:,.0f}"
