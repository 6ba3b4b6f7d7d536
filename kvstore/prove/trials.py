"""The ways in which an engine is asked, one after the other. What starts and ends engines is handed in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvstore.block.errors import BadInput
from kvstore.prove.asking import ANSWER_TOKENS, AskedEngine, new_salt
from kvstore.prove.judge import Answers, Way
from kvstore.prove.questions import BOUNDARY_TOKENS, TAIL_TOKENS, Question, questions_of

SAVED_TRIES, TRY_SECONDS = 40, 0.25
"""A question is asked again until its blocks are there: an engine saves them after its answer."""
LEAST_TOKENS = 64
ABORT_SHARE = 0.4
"""Of the time of an answer, after which a client leaves."""

Tell = Callable[[str], None]


class Trials:
    """Of one engine's words. page_tokens: of the engine. answers: of the engine that runs now, by way."""

    def __init__(self, prompts: int, longest: int, page_tokens: int, vocabulary: int, tell: Tell) -> None:
        self._wanted = prompts, longest, page_tokens, vocabulary
        self._tell = tell
        self.prompts: list[Question] = []
        self.boundaries: list[Question] = []

    async def prepare(self, engine: AskedEngine) -> None:
        """Make the questions, of the engine's own tokens."""
        prompts, longest, page_tokens, vocabulary = self._wanted
        longest = min(longest, engine.longest - ANSWER_TOKENS - TAIL_TOKENS)
        if longest < LEAST_TOKENS:
            raise BadInput(f"{engine.url} takes {engine.longest} tokens; give an engine that takes {LEAST_TOKENS + 16}")
        texts = await engine.texts(prompts, longest, vocabulary)
        found = questions_of(texts, page_tokens, longest)
        document = Question("document", texts[0][: min(longest, BOUNDARY_TOKENS + page_tokens)])
        self.prompts = [document, *(one for one in found if not one.boundary)]
        self.boundaries = [one for one in found if one.boundary]

    @property
    def lengths(self) -> dict[str, int]:
        return {one.name: len(one.tokens) for one in (*self.prompts, *self.boundaries)}

    async def alone(self, engine: AskedEngine) -> tuple[dict[Way, Answers], float | None]:
        """Of an engine without a store; and the share of drafts that it accepts."""
        found: dict[Way, Answers] = {}
        found[Way.COLD] = await self._each(engine, (*self.prompts, *self.boundaries), Way.COLD, forget=True)
        found[Way.REPEATED] = await self._each(engine, self.prompts, Way.REPEATED, forget=True)
        await engine.forget()
        self._tell(str(Way.AT_ONCE))
        found[Way.AT_ONCE] = await engine.ask_all(self.prompts)
        before = await engine.drafts()
        found[Way.OWN] = await self._each(engine, self.prompts, Way.OWN)
        return found, _share(before, await engine.drafts())

    async def stored(self, engine: AskedEngine) -> tuple[dict[Way, Answers], dict[Way, float]]:
        """Of an engine with a store, from cold on; and the shares of accepted drafts."""
        found: dict[Way, Answers] = {Way.COLD: await self._each(engine, self.prompts, Way.COLD)}
        found[Way.OWN] = await self._each(engine, self.prompts, Way.OWN)
        before = await engine.drafts()
        found[Way.STORE] = await self.from_store(engine, Way.STORE)
        share = _share(before, await engine.drafts())
        found[Way.BOUNDARIES] = await self._each(engine, self.boundaries, Way.BOUNDARIES, forget=True)
        await engine.forget()
        self._tell(str(Way.AT_ONCE))
        found[Way.AT_ONCE] = await engine.ask_all(self.prompts)
        await engine.forget()
        self._tell(str(Way.ABORTED))
        await engine.abort(self.prompts, ABORT_SHARE * median([one.seconds for one in found[Way.COLD].values()]))
        found[Way.ABORTED] = await self._each(engine, self.prompts, Way.ABORTED, forget=True)
        return found, {} if share is None else {Way.STORE: share}

    async def from_store(self, engine: AskedEngine, way: Way) -> Answers:
        """Each of them again until some of it comes from the store, or it is not going to."""
        found, tries = {}, SAVED_TRIES
        for number, question in enumerate(self.prompts):
            self._tell(f"{way}: {number + 1} of {len(self.prompts)}")
            for _ in range(tries):
                await engine.forget()
                found[question.name] = await engine.ask(question)
                if found[question.name].cached:
                    break
                await asyncio.sleep(TRY_SECONDS)
            else:
                tries = 1  # nothing comes from this store
        return found

    async def again(self, engine: AskedEngine, way: Way) -> Answers:
        """Each prompt, of an engine whose own cache is empty."""
        return await self._each(engine, self.prompts, way, forget=True)

    async def salted(self, engine: AskedEngine) -> dict[Way, Answers]:
        """Of an engine that has a store already: under names that nothing was stored under."""
        found: dict[Way, dict[str, Any]] = {Way.COLD: {}, Way.REPEATED: {}, Way.OWN: {}}
        for question in (*self.prompts, *self.boundaries):
            self._tell(f"{Way.COLD}: {question.name}")
            found[Way.COLD][question.name] = await engine.ask(question, new_salt())
            if not question.boundary:
                salt = new_salt()
                found[Way.REPEATED][question.name] = await engine.ask(question, salt)
                found[Way.OWN][question.name] = await engine.ask(question, salt)
        return {way: answers for way, answers in found.items()}

    async def _each(
        self, engine: AskedEngine, questions: Sequence[Question], way: Way, *, forget: bool = False
    ) -> Answers:
        found = {}
        for number, question in enumerate(questions):
            self._tell(f"{way}: {number + 1} of {len(questions)}")
            if forget:
                await engine.forget()
            found[question.name] = await engine.ask(question)
        return found


def _share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    drafted = after[0] - before[0]
    return (after[1] - before[1]) / drafted if drafted else None
