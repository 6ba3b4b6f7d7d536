"""The pages that the sidecar serves over HTTP, and who may read them.

    GET /livez     200 for as long as the process serves its door at all
    GET /readyz    200 once everything on disk can be found; 503 with `warming` before, with `stopping` at the end;
                   200 with `degraded` and the reasons while something does not work; with `warnings` for the operator
    GET /metrics   Prometheus's text format. It takes a token where one is set, and where several tenants are
                   configured, since sums over all tenants tell one tenant of another

`livez` and `readyz` tell nothing of tenants and blocks, and take no token.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.block.errors import BadInput
from kvstore.block.identity import NOWHERE, NodeIdentity
from kvstore.status.tree import Readiness
from tiering.files import Unfit, read_file

LIVEZ, READYZ, METRICS_PATH = "/livez", "/readyz", "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LEAST_TOKEN, MOST_TOKEN = 16, 1024
"""Characters of a token."""
_REALM = ("WWW-Authenticate", 'Bearer realm="kvstore"')


class HttpAnswer(NamedTuple):
    """headers: beyond type and length."""

    status: HTTPStatus
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


Page = Callable[[Mapping[str, str]], HttpAnswer]
"""Makes an answer from a request's headers, by name in lower case."""


def _as_json(status: HTTPStatus, value: object) -> HttpAnswer:
    return HttpAnswer(status, msgspec.json.encode(value), "application/json")


def _unauthorized(text: str) -> HttpAnswer:
    return HttpAnswer(HTTPStatus.UNAUTHORIZED, f"{text}\n".encode(), "text/plain; charset=utf-8", (_REALM,))


class MetricsAccess:
    """The right to read metrics. token: the one required, or None. is_shared: several tenants are configured."""

    def __init__(self, token: str | None, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self.change_token(token)

    def change_token(self, token: str | None) -> None:
        """Require another token from now on; None: no token is set."""
        self._token = token.encode() if token is not None else None

    @property
    def is_closed(self) -> bool:
        """Whether no client may read metrics: several tenants are configured, and no token is set."""
        return self._token is None and self._is_shared

    def refusal(self, headers: Mapping[str, str]) -> HttpAnswer | None:
        """The answer to a client that may not; None for one that may."""
        if self._token is None:
            if not self._is_shared:
                return None
            text = "several tenants are configured, and the metrics tell one of another: set http.token_file"
            return _unauthorized(text)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token)
        if scheme.lower() == "bearer" and is_right:
            return None
        text = "the metrics take a token: send the header Authorization: Bearer TOKEN, with what is in http.token_file"
        return _unauthorized(text)


def read_token(path: str) -> str:
    """A token file's content, stripped. Raises `BadInput`."""
    mend = f"give a file of {LEAST_TOKEN} to {MOST_TOKEN} printable ASCII characters without blanks"
    try:
        raw = read_file(Path(path), 2 * MOST_TOKEN)
    except (OSError, Unfit) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"http.token_file={path} cannot be read: {why}; {mend}") from None
    token = raw.decode("latin-1").strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not all("!" <= one <= "~" for one in token):
        raise BadInput(f"http.token_file={path} holds no token; {mend}")
    return token


def sidecar_pages(
    readiness: Callable[[], Readiness],
    is_alive: Callable[[], bool],
    reasons: Callable[[], list[str]],
    metrics: Callable[[], bytes],
    access: MetricsAccess,
    warnings: Callable[[], list[str]] = lambda: [],
    here: NodeIdentity = NOWHERE,
) -> Mapping[str, Page]:
    """The pages by path. reasons: for `degraded`, a line each. metrics: makes that page. warnings: for the operator, a
    line each, without anything of tenants. here: which node this is."""

    def livez(headers: Mapping[str, str]) -> HttpAnswer:
        alive = is_alive()
        return _as_json(HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE, {"alive": alive})

    def readyz(headers: Mapping[str, str]) -> HttpAnswer:
        state = readiness()
        is_ready = state in (Readiness.READY, Readiness.DEGRADED)
        answer: dict[str, object] = {"ready": is_ready, "state": state.value}
        if state is Readiness.DEGRADED:
            answer["reasons"] = reasons()
        if told := warnings():
            answer["warnings"] = told
        if here is not NOWHERE:
            answer |= {"node": here.node.hex(), "incarnation": here.incarnation.hex()}
        return _as_json(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, answer)

    def scraped(headers: Mapping[str, str]) -> HttpAnswer:
        return access.refusal(headers) or HttpAnswer(HTTPStatus.OK, metrics(), CONTENT_TYPE)

    return {LIVEZ: livez, READYZ: readyz, METRICS_PATH: scraped}
