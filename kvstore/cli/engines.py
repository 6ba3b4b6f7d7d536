"""Commands that talk to engines over OpenAI's API: `kvstore pd-proxy` and `kvstore prime`."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from kvstore.block.errors import BadInput
from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Json,
    app,
    argument,
    lines_of,
    option,
    path_option,
    print_result,
    shown_progress,
    typer,
)
from kvstore.config import expanded, host_and_port
from tiering.clock import SystemClock

PROXY_LISTEN = "127.0.0.1:8200"
DAY_SECONDS = 86_400.0
MOST_SHOWN_FAILURES = 10


@app.command("pd-proxy")
def pd_proxy(
    prefill: Annotated[str, option("URL", "The engine that computes prompts.")],
    decode: Annotated[list[str], option("URL", "An engine that generates. May be given again.")],
    score: Annotated[
        list[str] | None,
        option(
            "URL",
            "Where the sidecar beside a decode engine answers POST /query: once for each --decode, in that order. "
            "They are asked in turn if left out.",
        ),
    ] = None,
    score_token_file: Annotated[
        str | None, path_option("FILE", "Its first line is the tenant's token for --score.")
    ] = None,
    score_model: Annotated[
        str | None, option("NAME", "What sidecars call the model. As requests call it if left out.")
    ] = None,
    legs: Annotated[
        str, option("NAME", "What the two are told of each other: nixlv2, shared-storage, at-once.")
    ] = "nixlv2",
    prefiller: Annotated[
        str | None, option("HOST:PORT", "With at-once and vLLM's tier of peers: where prefill is reached.")
    ] = None,
    listen: Annotated[str, option("HOST:PORT", "Where clients come; port 0 is any free one.")] = PROXY_LISTEN,
    pass_on: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A field, or a key of kv_transfer_params, that clients may set although engines follow it to other "
            "hosts' or clients' KV. May be given again.",
        ),
    ] = None,
    requests: Annotated[int, option("N", "Under way at a time.", min=1, max=4096)] = 256,
    prefill_seconds: Annotated[
        float, option("N", "After so long decode computes the prompt itself.", min=0.1, max=3600)
    ] = 120.0,
    decode_seconds: Annotated[float, option("N", "An answer may take so long in all.", min=0.1, max=86400)] = 3600.0,
    as_json: Json = False,
) -> int:
    """Serve OpenAI's completions and chat from one prefill engine and several decode engines, until SIGTERM.

    Both get each prompt; prefill's transfer parameters go to decode unchanged. If prefill is down, late or fails,
    decode computes the prompt. GET /health says which engines are up.
    """
    from kvstore.openai.api import Legs
    from kvstore.openai.client import checked_url
    from kvstore.openai.fleet import Fleet, ProxiedEngine
    from kvstore.openai.proxy import PdProxy, ProxyLimits, serve_proxy

    if legs not in [*Legs]:
        raise typer.BadParameter(f"--legs {legs[:40]!r}; allowed: {', '.join(Legs)}")
    if score and len(score) != len(decode):
        raise typer.BadParameter(f"--score {len(score)} times and --decode {len(decode)}; give one for each, or none")
    if prefiller is not None and legs != Legs.AT_ONCE:
        raise typer.BadParameter("--prefiller belongs to --legs at-once; leave it out")
    if not score and (score_token_file is not None or score_model is not None):
        raise typer.BadParameter("--score-token-file and --score-model belong to --score; leave them out")
    host, listened = host_and_port(listen, "--listen")

    def started(port: int) -> None:
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        say(json.dumps({"pd_proxy": url, "pid": os.getpid()}) if as_json else f"pd-proxy on {url}", sys.stdout)

    def told(line: str) -> None:
        say(f"kvstore: {line}", sys.stderr)

    scores = [checked_url(one, "--score") for one in score] if score else [None] * len(decode)
    decodes = [
        ProxiedEngine(f"decode-{number}", checked_url(url, "--decode"), scorer, told)
        for number, (url, scorer) in enumerate(zip(decode, scores, strict=True))
    ]
    prefills = ProxiedEngine("prefill", checked_url(prefill, "--prefill"), None, told)
    fleet = Fleet(prefills, decodes, first_line(score_token_file), score_model or "")
    proxy = PdProxy(
        fleet,
        Legs(legs),
        lambda: secrets.token_hex(16),
        prefiller=host_and_port(prefiller, "--prefiller") if prefiller is not None else None,
        limits=ProxyLimits(requests=requests, prefill_seconds=prefill_seconds, decode_seconds=decode_seconds),
        passed=pass_on or (),
    )
    serve_proxy(fleet, proxy, (host, listened), SystemClock(), started)
    return OK


@app.command()
def prime(
    files: Annotated[
        list[str],
        argument(
            "FILE..", "JSON lines (.jsonl, also packed), each with messages or a prompt; any other file is one text."
        ),
    ],
    engine: Annotated[str, option("URL", "An engine that has the connector of this store.")],
    ttl: Annotated[
        float | None, option("SECONDS", "Kept so long; a day if neither this nor --priority is given.")
    ] = None,
    priority: Annotated[
        int | None, option("N", "1 to 100: kept for as many times nine seconds since the last use.")
    ] = None,
    role: Annotated[
        str, option("ROLE", "What a text is: system, user, or prompt (without a template).", "--as")
    ] = "system",
    model: Annotated[str | None, option("NAME", "The first one that the engine has.")] = None,
    at_once: Annotated[int, option("N", "Prompts under way at a time.", min=1, max=64)] = 1,
    request_seconds: Annotated[float, option("N", "After so long a prompt has failed.", min=0.1, max=86400)] = 600.0,
    api_key_file: Annotated[str | None, path_option("FILE", "Its first line is sent to the engine as its key.")] = None,
    as_json: Json = False,
) -> int:
    """Have an engine compute system prompts and documents once, ahead of use, and its store retain them.

    The engine tokenizes them and applies its chat template. Status 1: a prompt was not computed, or no store keeps it.
    """
    from kvstore.openai import prime as priming
    from kvstore.openai.client import checked_url

    if role not in [*priming.TextRole]:
        raise typer.BadParameter(f"--as {role[:40]!r}; allowed: {', '.join(priming.TextRole)}")
    priming.check_wish("--ttl, --priority", ttl, priority)
    wish = {name: value for name, value in (("ttl", ttl), ("priority", priority)) if value is not None}
    options = priming.PrimeOptions(
        wish or {"ttl": DAY_SECONDS}, model, at_once, request_seconds, api_key_header(api_key_file)
    )
    url = checked_url(engine, "--engine")
    with shown_progress() as show:
        prompts = _prompts(files, priming.TextRole(role))
        try:
            result = asyncio.run(priming.prime(url, prompts, options, show))
        except* priming.EngineFault as faults:
            raise faults.exceptions[0] from None
    print_result(result, as_json)
    for line in result.failed[:MOST_SHOWN_FAILURES]:
        say(f"kvstore: {line}", sys.stderr)
    if len(result.failed) > MOST_SHOWN_FAILURES:
        say(f"kvstore: {len(result.failed) - MOST_SHOWN_FAILURES} more failed; see --json", sys.stderr)
    return CHECK_FAILED if result.failed else OK


def _prompts(files: list[str], role: Any) -> list[Any]:
    from kvstore.openai.prime import MOST_PROMPTS

    found = list(islice(_each_prompt(files, role), MOST_PROMPTS + 1))
    if len(found) > MOST_PROMPTS:
        raise BadInput(f"there are more than {MOST_PROMPTS:,} prompts; prime them in several runs")
    if not found:
        raise BadInput(f"{', '.join(files)}: there is no prompt in it")
    return found


def _each_prompt(files: list[str], role: Any) -> Iterator[Any]:
    from kvstore.openai import prime as priming

    for name in files:
        file = Path(expanded(name))
        if file.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
            with lines_of(file) as lines:
                yield from priming.line_prompts(file.name, lines)
        else:
            with open(file, encoding="utf-8-sig", errors="replace") as text:
                said = text.read(priming.MOST_PROMPT_BYTES + 1)
            if len(said) > priming.MOST_PROMPT_BYTES:
                raise BadInput(f"{file}: at most {priming.MOST_PROMPT_BYTES:,} characters are taken; cut it in pieces")
            yield priming.text_prompt(file.name, said, role)


def api_key_header(file: str | None) -> dict[str, str]:
    """An engine's API key, from the first line of a file."""
    key = first_line(file)
    return {"authorization": f"Bearer {key}"} if key else {}


def first_line(file: str | None) -> str:
    """The secret in a file's first line; empty without a file. Raises `BadInput`, which does not repeat the secret."""
    if file is None:
        return ""
    with open(file, encoding="utf-8", errors="replace") as lines:
        key = lines.readline(4096).strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{file}: its first line is no key; give one line of printable characters")
    return key
