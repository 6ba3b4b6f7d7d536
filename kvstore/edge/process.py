"""The edge and the transfer agent as processes: parts in one asyncio thread, and a heartbeat to the supervisor.

A part is built, which reads its credentials, and started, which binds its addresses. Where either fails in a child of
the supervisor, that part is tried again every `AGAIN_SECONDS` and costs no other; the heartbeat says what it lacks.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvstore.block.errors import BadInput, StoreError
from kvstore.listeners.http_server import HttpListener
from kvstore.service.settings import Settings

SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while others want it: a flooding tenant's threads must not delay others."""
LOOK_SECONDS, CROWDED_SECONDS, AGAIN_SECONDS = 1.0, 0.1, 10.0
END_SECONDS = 2.0
"""For running calls at the end: less than the supervisor allows."""

_log = logging.getLogger(__name__)

Soon = Callable[[Callable[[], object]], object]
"""Runs a function in the thread of the event loop."""


class EdgePart:
    """What an edge serves. said: what it adds to the line of `--json`; line: the same for people, empty if it says
    nothing."""

    said: Mapping[str, object] = {}
    line = ""

    def start(self, soon: Soon) -> Sequence[HttpListener]:
        """Bind its addresses; returns what the event loop is to serve. Raises `BadInput`."""
        raise NotImplementedError

    def look(self) -> bool:
        """Called every second, in a thread of its own; returns whether to look again much sooner."""
        return False

    def read_again(self, settings: Settings | None) -> Callable[[], None]:
        """Read its credentials again; the returned function applies them. settings: as they are now, None for a
        program without a configuration. Raises `BadInput`, `OSError`."""
        return lambda: None

    def close(self) -> None:
        """It may have been built alone, and not started."""


class EdgeProcess:
    """Serves until SIGTERM or SIGINT; SIGHUP reads credentials again."""

    def __init__(
        self,
        makes: Mapping[str, Callable[[], EdgePart]],
        started: Callable[[Sequence[EdgePart]], None],
        settings: Callable[[], Settings] | None,
    ) -> None:
        """makes: builds each part, by name. started: called with the parts that have started. settings: reads them
        again, in a child of the supervisor: a part that cannot start there is tried again, and ends any other
        program."""
        self._makes, self._started, self._settings = makes, started, settings
        self._parts: dict[str, EdgePart] = {}
        self._wrong: dict[str, str] = {}
        self._served: list[tuple[HttpListener, asyncio.Task[None]]] = []
        self._over = asyncio.Event()

    def serve(self, beat: Callable[[str], None], is_wanted: Callable[[], bool]) -> None:
        """beat: tells the supervisor that the process runs, and what its parts lack. is_wanted: whether the parent
        process still runs. Raises `BadInput`, `OSError`."""
        sys.setswitchinterval(SWITCH_SECONDS)
        asyncio.run(self._run(beat, is_wanted))

    async def _run(self, beat: Callable[[str], None], is_wanted: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        loop.add_signal_handler(signal.SIGHUP, self._read_again)
        again_at, starting = loop.time(), asyncio.create_task(self._start(loop))
        try:
            if self._settings is None:
                await starting
            while not self._over.is_set() and is_wanted():
                if starting.done() and len(self._parts) < len(self._makes) and loop.time() >= again_at + AGAIN_SECONDS:
                    again_at, starting = loop.time(), asyncio.create_task(self._start(loop))
                looks = await loop.run_in_executor(None, lambda: [one.look() for one in list(self._parts.values())])
                beat("; ".join(self._wrong.values()))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), CROWDED_SECONDS if any(looks) else LOOK_SECONDS)
        finally:
            await asyncio.gather(starting, return_exceptions=True)
            for listener, _ in self._served:
                listener.end()
            await asyncio.gather(*(task for _, task in self._served), return_exceptions=True)
            for part in self._parts.values():
                part.close()

    async def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: a name of a host may take long to be looked up, and the other parts serve meanwhile."""
        began: list[EdgePart] = []
        for name, make in self._makes.items():
            if name in self._parts:
                continue
            part = None
            try:
                part = await loop.run_in_executor(None, make)
                listeners = await loop.run_in_executor(None, part.start, loop.call_soon_threadsafe)
            except (BadInput, StoreError, OSError) as error:
                if part is not None:
                    part.close()
                if self._settings is None:
                    raise
                file = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
                wrong = f"the {name}: {' '.join(file.split())}"
                if self._wrong.get(name) != wrong:
                    _log.error("%s; it is tried again every %g s", wrong, AGAIN_SECONDS)
                self._wrong[name] = wrong
                continue
            self._wrong.pop(name, None)
            self._parts[name] = part
            self._served += [(one, loop.create_task(one.serve())) for one in listeners]
            began.append(part)
        self._started(began)

    def _read_again(self) -> None:
        try:
            settings = self._settings() if self._settings is not None else None
            for apply in [part.read_again(settings) for part in self._parts.values()]:
                apply()
        except (BadInput, OSError) as error:
            _log.error("credentials could not be read again, and those before count: %s", error)
