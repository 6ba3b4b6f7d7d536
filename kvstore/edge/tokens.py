"""Files of credentials, and in token files of the console and of gRPC who comes with which token. No error repeats a
token."""

from __future__ import annotations

from dataclasses import dataclass

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
