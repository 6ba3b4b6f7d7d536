"""The demo's options, and its text: a system prompt, the pages in `documents/`, and twenty requests that share them.

    system prompt | page | question                          several questions on one page
    system prompt | question                                 only the system prompt is shared
    system prompt | page | question | answer | question ...  a chat: every turn repeats all former turns

A prompt is bytes, one token each. As in a busy service, pages and the chat take turns. The chat's answers are those of
the first pass, so that all passes see the same prompts. Imports no torch: mistakes in options are reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from kvstore.block.errors import BadInput
from kvstore.config import SettingsSection, allowed_size

REQUESTS = 20
MAX_ANSWER_TOKENS = 128
MAX_SEED = 2**63 - 1
_PROCESSOR_QUOTA = Path("/sys/fs/cgroup/cpu.max")
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


class DemoOptions(SettingsSection, frozen=True):
    """dram, nvme: the store's budgets. data: its directory, None for a temporary one. requests: how many of the twenty.
    tokens: of each answer. threads: of torch; None for one with the trained model, whose operations are too small to
    divide, and for all cores with a random one. seed: of random weights, None for the trained ones. hybrid: a model
    with recurrent layers, whose weights are random."""

    dram: Annotated[str, allowed_size()] = "512MiB"
    data: str | None = None
    requests: Annotated[int, Meta(ge=1, le=REQUESTS)] = REQUESTS
    tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] = 32
    threads: int | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    nvme: Annotated[str, allowed_size()] = "1GiB"
    hybrid: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and not 1 <= self.threads <= usable_cores():
            raise BadInput(f"threads={self.threads}; give 1 to {usable_cores()}, the cores that may be used here")
        if self.hybrid and self.seed is None:
            structs.force_setattr(self, "seed", 0)
        if self.seed is None and not resources.files("kvstore.demo").joinpath("trained", "model.safetensors").is_file():
            raise BadInput(
                "the demo's trained model is a package of its own and not installed; run: pip install "
                "'prefix-kvstore[demo]' (in a checkout: pip install ./demo-model), or give --seed 1 for random weights"
            )


def usable_cores() -> int:
    """Cores that this process may use. Torch counts the machine's, regardless of the control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _PROCESSOR_QUOTA.read_text().split()
        return min(cores, max(1, ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


class Kind(StrEnum):
    """What a request shares with others."""

    SYSTEM_PROMPT = "system_prompt"
    PAGE = "page"
    CHAT = "chat"


@dataclass(frozen=True)
class DemoRequest:
    """`text` is the whole prompt or, with `follows`, what is appended to that earlier request's prompt and answer."""

    kind: Kind
    text: bytes
    follows: int | None = None


def read_page(name: str) -> str:
    """A page of the product, as shipped in the package."""
    return resources.files("kvstore.demo").joinpath("documents", f"{name}.md").read_text("utf-8")


def twenty_requests(answer_tokens: int, page_bytes: int = PAGE_BYTES) -> list[DemoRequest]:
    """All requests in order. With answers of `answer_tokens` in the chat, each prompt fits `MAX_PROMPT_TOKENS`."""
    turns = "".join(_turn(question) for question in CHAT_TURNS)
    growth = len(turns.encode()) + answer_tokens * (len(CHAT_TURNS) - 1) + len(_opening("").encode())
    starts = {name: _opening(cut_to_lines(read_page(name), page_bytes)) for name in QUESTIONS_ON_PAGES}
    starts["none"] = SYSTEM_PROMPT
    starts["chat"] = _opening(cut_to_lines(read_page(CHAT_PAGE), min(page_bytes, MAX_PROMPT_TOKENS - growth)))
    asked = {"none": QUESTIONS_WITHOUT_PAGE, "chat": CHAT_TURNS, **QUESTIONS_ON_PAGES}
    questions = {topic: iter(some) for topic, some in asked.items()}
    kinds = {"none": Kind.SYSTEM_PROMPT, "chat": Kind.CHAT}
    last_turn: int | None = None
    requests: list[DemoRequest] = []
    for topic in ORDER:
        turn, follows = _turn(next(questions[topic])), last_turn if topic == "chat" else None
        if topic == "chat":
            last_turn = len(requests)
        text = turn if follows is not None else starts[topic] + turn
        requests.append(DemoRequest(kinds.get(topic, Kind.PAGE), text.encode(), follows))
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
