"""Identifies callers, by their credential and never by the message: a bearer token, or the SAN URI of a client's
certificate.

    kvstore:tenant:NAME       calls Store and Score for that tenant
    kvstore:operator          calls Admin
    kvstore:node:ID           calls Peer for that node

Both kinds of files are read again when they change, so that credentials can be exchanged without losing a call. An
unusable file leaves the last good one in place, and is logged.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote

from kvstore.block.errors import BadInput
from kvstore.edge.tokens import Caller, read_credential
from kvstore.protocol.words import printable
from tiering.clock import Clock

T = TypeVar("T")
TENANT_URI, OPERATOR_URI, NODE_URI = "kvstore:tenant:", "kvstore:operator", "kvstore:node:"
LOOK_SECONDS = 0.5
"""How often files are checked for changes."""
_NODE = re.compile("[0-9a-f]{32}")

_log = logging.getLogger(__name__)


class Rotated(Generic[T]):
    """The joint contents of some files: the present ones, or the last usable ones. Thread-safe."""

    def __init__(self, files: Sequence[str], made_of: Callable[[list[bytes]], T], clock: Clock) -> None:
        """made_of: builds the value from their contents, or raises `BadInput`. Raises that, and `OSError`."""
        self._files, self._made_of, self._clock = files, made_of, clock
        self._lock = threading.Lock()
        self._looked_at = clock.monotonic_seconds()
        contents = [read_credential(one) for one in files]
        self._seen: object = contents
        self._value = made_of(contents)

    def now(self) -> T:
        now = self._clock.monotonic_seconds()
        if now - self._looked_at >= LOOK_SECONDS:
            with self._lock:
                self._looked_at = now
                self._look()
        return self._value

    def _look(self) -> None:
        contents = None
        try:
            contents = [read_credential(one) for one in self._files]
            if contents != self._seen:
                self._seen = contents
                self._value = self._made_of(contents)
                _log.info("credentials were exchanged", extra={"files": self._files})
        except (OSError, BadInput) as error:
            if contents is not None or str(error) != self._seen:
                self._seen = contents or str(error)
                _log.warning("new credentials cannot be used, the last good ones stay: %s", error)


def caller_of_uris(uris: Iterable[str | bytes]) -> Caller | None:
    """The caller of a certificate with these SAN URIs; None unless exactly one is known."""
    texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in uris]
    ours = {one for one in texts if one == OPERATOR_URI or one.startswith(TENANT_URI)}
    if len(ours) != 1:
        return None
    (uri,) = ours
    name = unquote(uri.removeprefix(TENANT_URI)) if uri != OPERATOR_URI else None
    return Caller(name) if name != "" else None


def node_of_uris(uris: Iterable[str | bytes]) -> bytes | None:
    """The node of a certificate with these SAN URIs; None unless there is exactly one."""
    texts = [one.decode("utf-8", "replace") if isinstance(one, bytes) else one for one in uris]
    nodes = {one.removeprefix(NODE_URI) for one in texts if one.startswith(NODE_URI)}
    found = nodes.pop() if len(nodes) == 1 else ""
    return bytes.fromhex(found) if _NODE.fullmatch(found) else None


def server_context(certificate: str, key: str, client_ca: str) -> ssl.SSLContext:
    """For a server whose clients all need a certificate; of files in PEM: its certificate with the chain, its key, and
    the CA of its clients. Raises `BadInput` if they do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
        context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError, ValueError) as error:
        given = f"{printable(certificate)}, {printable(key)} and {printable(client_ca)}"
        raise BadInput(
            f"{given} cannot be used together ({error}); give a certificate in PEM, its key without a passphrase, and "
            "the CA that signs clients"
        ) from None
    return context
