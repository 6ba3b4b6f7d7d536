"""Liveness and readiness over HTTP, for whoever starts and watches the sidecar.

    GET /livez     200 for as long as the process serves its door at all
    GET /readyz    200 once everything on disk can be found; 503 with `warming` before, with `stopping` at the end;
                   200 with `degraded` and the reasons while something does not work

Knows nothing of tenants and blocks.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from enum import StrEnum

from kvstore.block.errors import BadInput


class Readiness(StrEnum):
    """What a sidecar is up to."""

    READY = "ready"
    WARMING = "warming"  # it serves, and may call a miss warming
    DEGRADED = "degraded"  # it serves; something ran out or fails, or what is on disk could not all be taken in
    STOPPING = "stopping"


class Health:
    """The two pages, served by a thread. Close it at the end."""

    def __init__(
        self,
        host: str,
        port: int,
        readiness: Callable[[], Readiness],
        is_alive: Callable[[], bool],
        reasons: Callable[[], list[str]] = list,
    ) -> None:
        """port: 0 for any that is free. reasons: for `degraded`, a line each. Raises `BadInput` where the address
        cannot be had."""
        # Not at the top: a sidecar without these pages has no web framework in its process.
        import uvicorn
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse

        app = FastAPI(openapi_url=None)

        @app.get("/livez")
        def livez() -> JSONResponse:
            alive = is_alive()
            return JSONResponse({"alive": alive}, 200 if alive else 503)

        @app.get("/readyz")
        def readyz() -> JSONResponse:
            state = readiness()
            is_ready = state in (Readiness.READY, Readiness.DEGRADED)
            answer: dict[str, object] = {"ready": is_ready, "state": state.value}
            if state is Readiness.DEGRADED:
                answer["reasons"] = reasons()
            return JSONResponse(answer, 200 if is_ready else 503)

        config = uvicorn.Config(app, host, port, log_config=None, log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise BadInput(
                f"{host}:{port} cannot be listened on: {error.strerror}; give another http.listen (--http)"
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="kv-http", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Serve no more."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._socket.close()
