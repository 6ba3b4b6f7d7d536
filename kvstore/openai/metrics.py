"""A page of an engine's or a sidecar's metrics, read as far as counters go. What is not understood is left out."""

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
    """Of a page of metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples_of(page: str) -> Iterator[CounterSample]:
    """All that a page of Prometheus's text format has."""
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            name, labels, value = found.groups()
            try:
                yield CounterSample(name, dict(_LABEL.findall(labels or "")), float(value))
            except ValueError:
                pass


async def page_of(client: EngineClient, path: str = "/metrics") -> str:
    """Empty where there is none."""
    try:
        answer = await client.ask("GET", path, seconds=METRICS_SECONDS, most_bytes=MOST_METRICS_BYTES)
    except EngineFault:
        return ""
    return answer.body.decode(errors="replace") if answer.status == 200 else ""
