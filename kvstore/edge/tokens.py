"""Files of credentials, and in token files of the console and of gRPC who comes with which token. No error repeats a
token."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvstore.block.errors import BadInput
from kvstore.protocol.words import printable

LEAST_TOKEN, MOST_TOKEN = 16, 4096
MOST_TENANTS = 1024
MOST_FILE_BYTES = 1 << 20


def read_credential(path: str) -> bytes:
    """All of a file, which may be exchanged while it is in use. Raises `OSError`."""
    with open(path, "rb") as source:
        return source.read(MOST_FILE_BYTES)


def checked_token(text: str, where: str) -> str:
    """Check the text of a token file. Raises `BadInput`, which does not repeat the token."""
    token = text.strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not all("!" <= one <= "~" for one in token):
        raise BadInput(
            f"{where} has no token: give one line of {LEAST_TOKEN} to {MOST_TOKEN} printable characters, without "
            "spaces, e.g. of: openssl rand -hex 32"
        )
    return token


@dataclass(frozen=True, slots=True)
class Caller:
    """Who comes with a credential. tenant: the only one that it works for or sees; None for the operator."""

    tenant: str | None = None


def checked_tokens(text: str, where: str) -> dict[str, Caller]:
    """Readers by token, of a token file: the operator's token, then a line `NAME TOKEN` for each tenant that has one.
    Raises `BadInput`, which repeats no token."""
    if len(text.encode()) >= MOST_FILE_BYTES:  # no more of it was read, and its last token may be cut
        raise BadInput(f"{where} has {MOST_FILE_BYTES:,} bytes or more; give fewer tenants, or shorter tokens")
    first, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    readers = {checked_token(first, where): Caller()}
    if len(lines) > MOST_TENANTS:
        raise BadInput(f"{where} has {len(lines)} tenants; at most {MOST_TENANTS} have tokens")
    for number, line in enumerate(lines, 2):
        name, _, given = line.rpartition(" ")
        token = checked_token(given, f"{where}, line {number},")
        if not name.strip():
            raise BadInput(f"{where}, line {number}: give a tenant's name and its token, with a space between")
        if token in readers:
            raise BadInput(f"{where}, line {number}: that token is somebody else's too; draw one for each")
        readers[token] = Caller(printable(name.strip()))
    return readers


class Tokens:
    """Callers by their tokens, compared by digests under a key of this process, so that timing reveals nothing."""

    def __init__(self, file: bytes, name: str, key: bytes) -> None:
        """file: a token file's contents; name: for messages. Raises `BadInput`."""
        self._key = key
        callers = checked_tokens(file.decode("utf-8", "replace"), name)
        self._callers = {self._digest(token): caller for token, caller in callers.items()}

    def caller(self, token: str) -> Caller | None:
        """None for an unknown one."""
        return self._callers.get(self._digest(token.strip())) if len(token) <= MOST_TOKEN else None

    def bearer(self, authorization: str) -> Caller | None:
        """Likewise. authorization: the header."""
        kind, _, token = authorization.partition(" ")
        return self.caller(token) if kind.lower() == "bearer" else None

    def _digest(self, token: str) -> bytes:
        return blake2b(token.encode("utf-8", "replace"), key=self._key, digest_size=32).digest()
