"""Logs on standard error: one JSON object per line, or text (floor 2). Never with keys, token ids or payload."""

from __future__ import annotations

import json
import logging
import sys

_KNOWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """time (seconds since 1970), level, logger, message, and what a call gave as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _extra(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Time, level, logger, message, and what a call gave as `extra` as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line; an exception comes below it."""
        return super().formatMessage(record) + "".join(f" {key}={value}" for key, value in _extra(record).items())


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _KNOWN}


OURS = ("kvstore", "tiering", "kv_kernels", "engine_adapter")
"""Loggers that the level is for. What others say is written from warnings on: a compiler has tens of thousands of lines
for whoever mends it."""


def log_to_stderr(level: str, style: str) -> None:
    """For the whole process. style: "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(number)
