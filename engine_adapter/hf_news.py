"""The outcomes of a cache's requests, and the time that hits saved, reported to the sidecar for `kvstore why` and the
console.

    a prompt is computed > its speed is learned > a prompt is loaded > what that saved > reported behind its last token

Nothing waits for it, and without a sidecar nothing is reported. Must never import an engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import count

from engine_adapter.adapter import Report
from engine_adapter.cost.speeds import PrefillSpeed
from kvstore.client.handle import NamespaceHandle
from kvstore.protocol.told import MAX_TOLD_REQUESTS, MAX_TOLD_TEXT, RequestTold, SavingsTold


class CacheNews:
    """The news of one cache. Used by one thread."""

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        self._name = f"hf-{secrets.token_hex(4)}"
        self._numbers = count(1)
        self._passes: list[tuple[int, int, float]] = []

    def new_request(self) -> str:
        """A name for the next request, unlike those of other caches."""
        return f"{self._name}-{next(self._numbers)}"

    def pass_begins(self, start: int, stop: int, now: float) -> None:
        self._passes.append((start, stop, now))

    def pass_ends(self, now: float) -> None:
        """All begun passes are computed. Of several at once it is not known what each took."""
        if len(self._passes) == 1:
            start, stop, began = self._passes[0]
            self.speed.observe([(start, stop - start)], 0, now - began)
        self._passes.clear()

    def requests_end(self, namespace: NamespaceHandle | None, reports: Sequence[Report]) -> None:
        """Requests are over. One that was not begun has no account, and is not reported."""
        asked = [one for one in reports if one.account.asked]
        if namespace is None or not asked:
            return
        gains = [self._gain(one) for one in asked]
        savings = None
        if self.speed.is_learned:
            savings = SavingsTold(sum(max(0.0, gain) for gain in gains), sum(max(0.0, -gain) for gain in gains))
        for first in range(0, len(asked), MAX_TOLD_REQUESTS):
            namespace.tell([_told(one) for one in asked[first : first + MAX_TOLD_REQUESTS]], savings)
            savings = None

    def _gain(self, report: Report) -> float:
        computing = self.speed.more_seconds(0, report.account.hit_tokens)
        return computing - _load_seconds(report) if computing is not None and report.account.hit_tokens else 0.0


def _load_seconds(report: Report) -> float:
    return (report.lookup_ms + report.restored_ms) / 1000


def _told(report: Report) -> RequestTold:
    account = report.account
    return RequestTold(
        report.request,
        account.asked,
        {str(tier): tokens for tier, tokens in account.hits.items()},
        {str(reason): tokens for reason, tokens in account.misses.items()},
        (report.detail or report.fault)[:MAX_TOLD_TEXT],
        1000 * _load_seconds(report) if account.hit_tokens else 0.0,
        report.saved_blocks,
        {str(reason): times for reason, times in report.put_reasons.items()},
        counts=True,
    )
