"""A console of a sidecar that a bench has started: its command, and one whose page is open."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 60.0
"""For whatever is waited for."""


def console_command(observe_socket: str) -> list[str]:
    """Starts a console at a port of the system's choice, which it says in one line of JSON."""
    where = ["--socket", observe_socket, "--listen", "127.0.0.1:0", "--json"]
    return [sys.executable, "-P", "-m", "kvstore", "console", *where]


@contextmanager
def viewed(observe_socket: str) -> Iterator[tuple[int, str]]:
    """A console shows the sidecar, and a page's stream is read; yields the console's process and its address."""
    with subprocess.Popen(console_command(observe_socket), stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            url = json.loads(console.stdout.readline())["console"]
            with urllib.request.urlopen(f"{url}api/stream", timeout=SECONDS) as stream:
                reading = [sys.executable, "-P", "-c", "import sys\nwhile sys.stdin.buffer.read1(1 << 16): pass"]
                with subprocess.Popen(reading, stdin=stream.fileno()) as page:
                    yield console.pid, url
                    page.kill()
        finally:
            console.terminate()
            console.send_signal(signal.SIGCONT)
