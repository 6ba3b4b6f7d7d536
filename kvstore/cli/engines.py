"""Commands that speak to engines over OpenAI's API: a proxy in front of them, and prompts computed ahead."""

import json
import os
import secrets
import sys
from typing import Annotated

from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import OK, Json, app, typer

PROXY_LISTEN = "127.0.0.1:8200"


@app.command("pd-proxy")
def pd_proxy(
    prefill: Annotated[str, typer.Option(metavar="URL", help="The engine that computes prompts.")],
    decode: Annotated[list[str], typer.Option(metavar="URL", help="An engine that generates. May be given again.")],
    score: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Where the sidecar beside a decode engine answers POST /query: once for each --decode, in that order. "
            "They are asked in turn if left out.",
        ),
    ] = None,
    legs: Annotated[
        str, typer.Option(metavar="NAME", help="What the two are told of each other: nixlv2, shared-storage, at-once.")
    ] = "nixlv2",
    prefiller: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With at-once and vLLM's tier of peers: where prefill is reached."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients come; port 0 is any free one.")
    ] = PROXY_LISTEN,
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="Under way at a time.")] = 256,
    prefill_seconds: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=3600, help="After so long decode computes the prompt itself.")
    ] = 120.0,
    decode_seconds: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=86400, help="An answer may take so long in all.")
    ] = 3600.0,
    as_json: Json = False,
) -> int:
    """Serve OpenAI's completions and chat from one prefill engine and some decode engines, until SIGTERM.

    Each prompt is sent to both; what prefill says of its blocks goes to decode as it is. Where prefill is down, late or
    fails, decode computes the prompt. GET /health says which engines are up.
    """
    from kvstore.openai.api import Legs
    from kvstore.openai.client import checked_url
    from kvstore.openai.proxy import ProxyLimits
    from kvstore.openai.serve import ProxyOptions, serve_proxy
    from kvstore.service.settings import host_and_port

    if legs not in [*Legs]:
        raise typer.BadParameter(f"--legs {legs[:40]!r}; allowed: {', '.join(Legs)}")
    if score and len(score) != len(decode):
        raise typer.BadParameter(f"--score {len(score)} times and --decode {len(decode)}; give one for each, or none")
    if prefiller is not None and legs != Legs.AT_ONCE:
        raise typer.BadParameter("--prefiller belongs to --legs at-once; leave it out")
    options = ProxyOptions(
        checked_url(prefill, "--prefill"),
        [checked_url(one, "--decode") for one in decode],
        [checked_url(one, "--score") for one in score or ()],
        Legs(legs),
        host_and_port(prefiller, "--prefiller") if prefiller is not None else None,
        ProxyLimits(requests=requests, prefill_seconds=prefill_seconds, decode_seconds=decode_seconds),
    )
    address = host_and_port(listen, "--listen")

    def started(port: int) -> None:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"http://{host}:{port}"
        say(json.dumps({"pd_proxy": url, "pid": os.getpid()}) if as_json else f"pd-proxy on {url}", sys.stdout)

    def told(line: str) -> None:
        say(f"kvstore: {line}", sys.stderr)

    serve_proxy(options, address, lambda: secrets.token_hex(16), started, told)
    return OK
