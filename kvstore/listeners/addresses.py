"""Where a program listens: at every address of a name, or nowhere.

A name may have several addresses (`localhost` has 127.0.0.1 and ::1). A program that listened only where it could would
say that it serves a name which clients find at another process.
"""

from __future__ import annotations

import errno
import socket
from contextlib import closing

from kvstore.block.errors import BadInput

BACKLOG = 512
_PORTS_TRIED = 16
"""Port 0: how often a port that is free at one address of a name is looked for at the others."""


def numeric_hosts(host: str, port: int, setting: str) -> list[str]:
    """The addresses of a host name. setting: what to give in its place, for the error. Raises `BadInput`."""
    try:
        infos = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = error.strerror or "no such host"
        raise BadInput(f"{host}:{port} cannot be listened on: {why}; give another {setting}") from None
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    without = [one for one in found if ":" not in one]
    return without if without and len(without) < len(found) and not _has_ipv6() else found


def listening_sockets(host: str, port: int, setting: str) -> list[socket.socket]:
    """A socket at each address of a host name, all at one port. port: 0 for any that is free at all of them. Raises
    `BadInput`, and then listens at none."""
    hosts = numeric_hosts(host, port, setting)
    for left in reversed(range(_PORTS_TRIED)):
        made: list[socket.socket] = []
        for one in hosts:
            family = socket.AF_INET6 if ":" in one else socket.AF_INET
            try:
                chosen = made[0].getsockname()[1] if made else port
                made.append(socket.create_server((one, chosen), family=family, backlog=BACKLOG))
            except OSError as error:
                for sock in made:
                    sock.close()
                if port == 0 and made and left and error.errno == errno.EADDRINUSE:
                    break
                named = host if one == host else f"{host} ({one})"
                text = f"{named}:{port} cannot be listened on: {error.strerror}; give another {setting}"
                raise BadInput(text) from None
        else:
            return made
    raise AssertionError("the last try returns or raises")


def _has_ipv6() -> bool:
    try:
        with closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as sock:
            sock.bind(("::1", 0))
        return True
    except OSError:
        return False
