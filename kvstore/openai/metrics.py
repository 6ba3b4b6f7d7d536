"""Reads samples from a page of Prometheus metrics; lines that it does not understand are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvstore.openai.client import EngineClient, EngineFault

METRICS_SECONDS = 10.0
MOST_METRICS_BYTES = 8 << 20
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class CounterSample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def samples_of(page: str) -> Iterator[CounterSample]:
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            name, labels, value = found.groups()
            try:
                yield CounterSample(name, dict(_LABEL.findall(labels or "")), float(value))
            except ValueError:
                pass


async def page_of(client: EngineClient, path: str = "/metrics") -> str:
    """The metrics page; empty if there is none."""
    try:
        answer = await client.ask("GET", path, seconds=METRICS_SECONDS, most_bytes=MOST_METRICS_BYTES)
    except EngineFault:
        return ""
    return answer.body.decode(errors="replace") if answer.status == 200 else ""
