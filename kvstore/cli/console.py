"""The console's command: a page and an API for people, beside a sidecar that runs."""

import json
import os
import secrets
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import kvstore
from kvstore.cli.operate import Data
from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import OK, Json, app, expanded_path, typer

LISTEN = "127.0.0.1:9798"
_MOST_TOKEN_BYTES = 1 << 20


@app.command()
def console(
    data: Data = "./kv",
    socket: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", callback=expanded_path, help="The observers' socket.  [default: DIR/observe.sock]"
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where pages are served; port 0 is any free one.")
    ] = LISTEN,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=expanded_path,
            help="Who gives its first line may read all; a further line NAME TOKEN is for a tenant, which sees itself "
            "alone. Needed where other hosts can come in.",
        ),
    ] = None,
    keeper: Annotated[int | None, typer.Option(hidden=True, help="For the keeper alone: its process.")] = None,
    as_json: Json = False,
) -> int:
    """Show a running sidecar in a browser: hits, misses and why, tiers, tenants, engines, events; until SIGTERM.

    It asks at a socket where nothing can be changed, so it may crash or be flooded and no engine notices. It waits for
    a sidecar that is not there yet.
    """
    from kvstore.console.access import checked_tokens
    from kvstore.console.serve import ConsoleParts, serve_console
    from kvstore.service.settings import OBSERVE_SOCKET, default_socket, host_and_port
    from tiering.clock import SystemClock

    address = host_and_port(listen, "--listen")
    tokens = None
    if token_file is not None:
        with open(token_file, encoding="utf-8", errors="replace") as lines:
            tokens = checked_tokens(lines.read(_MOST_TOKEN_BYTES), token_file)

    def started(port: int) -> None:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"http://{host}:{port}/"
        say(json.dumps({"console": url, "pid": os.getpid()}) if as_json else f"console on {url}", sys.stdout)

    parts = ConsoleParts(
        SystemClock(),
        secrets.token_bytes,
        static_files(),
        kvstore.__version__,
        lambda: keeper is None or os.getppid() == keeper,
    )
    serve_console(socket or default_socket(data, OBSERVE_SOCKET), address, tokens, parts, started)
    return OK


def static_files() -> dict[str, bytes]:
    """The console's pages, by their names."""
    root = Path(str(resources.files("kvstore.console") / "static"))
    return {str(one.relative_to(root)): one.read_bytes() for one in sorted(root.rglob("*")) if one.is_file()}
