"""The demo's text: a system prompt, the pages in `documents/`, and twenty requests that share them.

    system prompt | page | question                          several questions on one page
    system prompt | question                                 only the system prompt is shared
    system prompt | page | question | answer | question ...  a chat: every turn repeats all former turns

A prompt is bytes, one token each. As in a busy service, pages and the chat take turns. The chat's answers are those of
the first pass, so that all passes see the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from kvstore.demo.options import MAX_ANSWER_TOKENS

MAX_PROMPT_TOKENS = 4096 - MAX_ANSWER_TOKENS
"""The model was trained for up to 4,096 positions, answer included."""

SYSTEM_PROMPT = """You are the guide of a key-value cache store for language models. People who run inference engines
ask you how the store works, what it promises and how to operate it. Answer from the page that is given to you, and from
nothing else. Keep to these rules:

1. Answer in one or two sentences, in plain words, without praise and without excuses.
2. When the page does not say it, answer: the page does not say.
3. Quote the names of options, tiers and reasons exactly as the page writes them.
4. Never guess a number. If a number depends on the machine, say what to measure.
5. Do not repeat the question.
"""

PAGE_BYTES = 3000
"""Pages are cut to whole lines within this length."""

CHAT_PAGE = "operating"

QUESTIONS_ON_PAGES: dict[str, tuple[str, str, str]] = {
    "blocks": (
        "Why is only a full block stored?",
        "What does a block's name stand for, besides its own tokens?",
        "Which block goes first when room is needed, and why not its parent?",
    ),
    "tiers": (
        "What happens to a budget that is larger than the machine's memory?",
        "To whom does an extent belong, and for how long?",
        "What is the difference between the reasons evicted and absent?",
    ),
    "promises": (
        "Who compares the digests, and when?",
        "Can a tenant find out what another tenant has asked?",
        "What does a request cost when the store is broken?",
    ),
    "misses": (
        "Which reason points to a broken memory module?",
        "What should I look at when many tokens are called diverged?",
        "What does the engine compute when 3,584 of 3,700 tokens are found?",
    ),
}
QUESTIONS_WITHOUT_PAGE = ("Which pages can you answer from?", "How long may an answer be?")
CHAT_TURNS = (
    "What do I need before I can open a store?",
    "And where are the secrets kept?",
    "What if somebody else can read that file?",
    "How much memory should I give it for my two long documents?",
    "Is there a way to see what it holds right now?",
    "Thank you. How do I close it, and what happens to those who still read?",
)
ORDER = "none blocks tiers chat promises misses chat blocks tiers chat promises misses chat none blocks tiers chat \
promises misses chat".split()


class Kind(StrEnum):
    """What a request shares with others."""

    SYSTEM_PROMPT = "system_prompt"
    PAGE = "page"
    CHAT = "chat"


@dataclass(frozen=True)
class DemoRequest:
    """`text` is the whole prompt or, with `follows`, what is appended to that earlier request's prompt and answer."""

    kind: Kind
    topic: str
    text: bytes
    follows: int | None = None


def read_page(name: str) -> str:
    """A page of the product, as shipped in the package."""
    return resources.files("kvstore.demo").joinpath("documents", f"{name}.md").read_text("utf-8")


def twenty_requests(answer_tokens: int, page_bytes: int = PAGE_BYTES) -> list[DemoRequest]:
    """All requests in order. With answers of `answer_tokens` in the chat, each prompt fits `MAX_PROMPT_TOKENS`."""
    pages = {name: cut_to_lines(read_page(name), page_bytes) for name in QUESTIONS_ON_PAGES}
    turns = [_turn(question) for question in CHAT_TURNS]
    growth = len("".join(turns).encode()) + answer_tokens * (len(turns) - 1) + len(_opening("").encode())
    chat_page = cut_to_lines(read_page(CHAT_PAGE), min(page_bytes, MAX_PROMPT_TOKENS - growth))
    asked = dict.fromkeys(ORDER, 0)
    last_turn: int | None = None
    requests: list[DemoRequest] = []
    for topic in ORDER:
        number, asked[topic] = asked[topic], asked[topic] + 1
        if topic == "none":
            text = SYSTEM_PROMPT + _turn(QUESTIONS_WITHOUT_PAGE[number])
            requests.append(DemoRequest(Kind.SYSTEM_PROMPT, topic, text.encode()))
        elif topic == "chat":
            text = turns[number] if number else _opening(chat_page) + turns[number]
            requests.append(DemoRequest(Kind.CHAT, CHAT_PAGE, text.encode(), last_turn))
            last_turn = len(requests) - 1
        else:
            text = _opening(pages[topic]) + _turn(QUESTIONS_ON_PAGES[topic][number])
            requests.append(DemoRequest(Kind.PAGE, topic, text.encode()))
    return requests


def prompt_of(
    number: int, requests: Sequence[DemoRequest], prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[int]:
    """A prompt's token ids; `prompts` and `answers` hold those of all earlier requests."""
    request = requests[number]
    tokens = list(request.text)
    if request.follows is not None:
        tokens = prompts[request.follows] + answers[request.follows] + tokens
    assert len(tokens) <= MAX_PROMPT_TOKENS, "the demo's prompts fit its model"
    return tokens


def cut_to_lines(text: str, limit_bytes: int) -> str:
    """The longest run of whole lines from the start within so many bytes."""
    kept = text.encode()[:limit_bytes]
    if len(kept) < len(text.encode()):
        kept = kept[: kept.rfind(b"\n") + 1]
    return kept.decode()


def _opening(page: str) -> str:
    return f"{SYSTEM_PROMPT}\nThe page:\n\n{page}"


def _turn(question: str) -> str:
    return f"\nQuestion: {question}\nAnswer: "
