"""The commands `kvstore bench ...`: each measures a path of the store beside its physical limit.

What measures the store itself is a script of the repository, which its word starts; `traffic` measures engines over
HTTP, wherever they run.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import kvstore
from kvstore.block.errors import BadInput
from kvstore.cli.engines import api_key_header
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Json,
    bench,
    lines_of,
    listed,
    option,
    path_argument,
    path_option,
    print_result,
    real,
    shown_progress,
    typer,
)

Check = Annotated[bool, typer.Option("--check", help="Status 1 where a target is missed; it is named.")]
EngineChoice = Callable[[list[str], str | None, float], Any]
"""Of kinds of engines, their model's shape and their share of the workload: an `EngineStarter`. Raises `BadInput`."""

SCRIPTS = {
    "tiers": "How near put and get come to a plain memory copy, and on NVMe to what fio reaches.",
    "lookup": "How long it takes to find a prompt's longest stored prefix.",
    "restart": "How long until everything on disk can be found again.",
    "codec": "What the codecs make of KV and of a model's answers.",
    "kernels": "How fast KV goes off a GPU and back.",
    "ttft": "Time to the first token of a model with random weights.",
    "all": "Every bench that needs no GPU.",
}
"""Benches that are scripts of a checkout, which the word starts."""


def start_script(word: str, arguments: list[str], what: str = "") -> NoReturn:
    """Run a bench of this checkout in place of this program. what: needs it. Raises `BadInput` where it is none."""
    checkout = Path(kvstore.__file__).resolve().parents[1]
    script = checkout / "benchmarks" / "benches.py"
    if not script.is_file() or not (checkout / "pyproject.toml").is_file():
        raise BadInput(
            f"{what or f'kvstore bench {word}'} is not installed with the product: it is a script of its repository; "
            f"run in a checkout: python benchmarks/benches.py {word}"
        )
    os.execv(sys.executable, [sys.executable, str(script), word, *arguments])


def _script(word: str, about: str) -> None:
    @bench.command(
        word,
        help=f"{about} In a checkout alone: python benchmarks/benches.py {word} --help",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )
    def _(context: typer.Context) -> None:
        start_script(word, context.args)


for _word, _about in SCRIPTS.items():
    _script(_word, _about)


def traffic_command(choose: EngineChoice | None = None) -> Callable[..., int]:
    """The command; choose: what starts --engines, without which they are a checkout's script."""

    def bench_traffic(
        trace: Annotated[
            str, path_argument("TRACE", "JSON lines of Mooncake's form, or of kvstore record; gzip is unpacked.")
        ],
        endpoint: Annotated[
            list[str] | None, option("NAME=URL", "An engine with OpenAI's API. May be given again: they take turns.")
        ] = None,
        sidecar: Annotated[
            list[str] | None, option("NAME=URL", "Where the sidecar of that endpoint has its /metrics.")
        ] = None,
        engines: Annotated[
            str | None,
            option(
                "NAME,..",
                "In a checkout, start these in place of --endpoint, a vLLM each: none (no prefix cache), own (its "
                "own alone), kvstore (with a sidecar), pd (prefill and decode apart).",
            ),
        ] = None,
        shape: Annotated[str | None, option("NAME", "Of the model that --engines have: tiny or mid.")] = None,
        own_share: Annotated[
            float, option("X", "Of the workload, what a cache of --engines holds itself.", min=0, max=10)
        ] = 0.1,
        seconds: Annotated[float, option("N", "Of arrivals, in each turn.", min=0.1, max=86400)] = 60.0,
        requests: Annotated[int, option("N", "In each turn, at most.", min=1, max=1_000_000)] = 1000,
        turns: Annotated[int, option("N", "Each endpoint's, in another order.", min=1, max=1000)] = 2,
        speed: Annotated[float, option("X", "Arrivals come so many times as fast.", min=0.001, max=1000)] = 1.0,
        scale: Annotated[
            float | None,
            option("X", "Tokens for one of the trace; the longest request just fits if left out.", min=0.0001, max=1),
        ] = None,
        form: Annotated[
            str, option("NAME", "How prompts are sent: tokens, text or chat (words of w5 w6 ..).")
        ] = "tokens",
        vocabulary: Annotated[int, option("N", "Token ids are drawn from 5 up to here.", min=16, max=1 << 24)] = 1000,
        model: Annotated[str | None, option("NAME", "The first one that an endpoint has.")] = None,
        ttft_slo: Annotated[str, option("MS,..", "First tokens that count as good.")] = "200,500",
        itl_slo: Annotated[str, option("MS,..", "Mean gaps that count as good.")] = "100",
        request_seconds: Annotated[
            float, option("N", "After so long an answer has failed.", min=0.1, max=86400)
        ] = 120.0,
        block_tokens: Annotated[
            int | None, option("N", "Of a block of the trace, where its lengths do not say.")
        ] = None,
        seed: Annotated[int, option("N", "Tokens are drawn from it.", min=0, max=1 << 31)] = 0,
        api_key_file: Annotated[
            str | None, path_option("FILE", "Its first line is sent to endpoints as their key.")
        ] = None,
        anywhere: Annotated[
            bool, typer.Option("--anywhere", help="Endpoints may be on other hosts: it is load for them.")
        ] = False,
        check: Check = False,
        as_json: Json = False,
    ) -> int:
        """Replay recorded requests against engines at their recorded times: TTFT, ITL, tokens per second, goodput, and
        hits by tier.

        Arrivals, lengths and shared prefixes are the trace's; the tokens are made up. In a turn each endpoint gets the
        same requests; each turn has new tokens, so figures have a spread. Status 1: all requests of a turn failed; with
        --check: one failed.
        """
        from kvstore.insight.trace import read_trace
        from kvstore.traffic import run as traffic

        if bool(endpoint) == bool(engines):
            raise typer.BadParameter("give --endpoint NAME=URL, or --engines NAME,.. to start some")
        if engines is None and shape is not None:
            raise typer.BadParameter("--shape belongs to --engines; leave it out")
        if form not in [*traffic.PromptForm]:
            raise typer.BadParameter(f"--form {form[:40]!r}; allowed: {', '.join(traffic.PromptForm)}")
        slos = tuple(
            traffic.Slo(real(ttft, "--ttft-slo", _MS), real(itl, "--itl-slo", _MS))
            for ttft in listed([ttft_slo], "--ttft-slo", _MS)
            for itl in listed([itl_slo], "--itl-slo", _MS)
        )
        options = traffic.TrafficOptions(
            seconds=seconds,
            requests=requests,
            speed=speed,
            scale=scale,
            vocabulary=vocabulary,
            seed=seed,
            turns=turns,
            form=traffic.PromptForm(form),
            model=model,
            request_seconds=request_seconds,
            slos=slos,
            headers=api_key_header(api_key_file),
        )
        starter = None
        if engines is not None and choose is None:
            start_script("traffic", sys.argv[sys.argv.index("traffic") + 1 :], "kvstore bench traffic --engines")
        elif engines is not None and choose is not None:
            starter = choose(listed([engines], "--engines", "give some"), shape, own_share)
        endpoints = _endpoints(endpoint or [], sidecar or [], anywhere)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines end with the bench
        with shown_progress() as show:
            show("reading the trace")
            with lines_of(Path(trace)) as lines:
                read = read_trace(Path(trace).name, lines, block_tokens)
            result = traffic.run(read, endpoints, options, show, starter).found()
        return judge([result], as_json, check)

    return bench_traffic


_MS = "give milliseconds, such as 200,500"


def _endpoints(given: list[str], sidecars: list[str], anywhere: bool) -> list[Any]:
    from kvstore.openai.client import checked_url
    from kvstore.traffic.run import Endpoint

    def named(flag: str, given: list[str]) -> dict[str, str]:
        found = {}
        for one in given:
            name, _, url = one.partition("=")
            if not name or not url or name in found:
                raise typer.BadParameter(f"{flag} {one[:80]!r}; give NAME=URL, each name once")
            found[name] = checked_url(url, flag, is_anywhere=anywhere)
        return found

    urls, beside = named("--endpoint", given), named("--sidecar", sidecars)
    if unknown := sorted(beside.keys() - urls.keys()):
        raise typer.BadParameter(f"--sidecar {unknown[0]}=..: there is no --endpoint of that name")
    return [Endpoint(name, url, (), beside.get(name)) for name, url in urls.items()]


bench.command("traffic")(traffic_command())


def judge(results: list[Any], as_json: bool, check: bool) -> int:
    """Print each `BenchResult`, and say what is wrong with it."""
    if as_json and len(results) > 1:
        print(json.dumps({"results": [result.to_dict() for result in results]}))
    else:
        for result in results:
            print_result(result, as_json)
    return report(results, check)


def report(results: list[Any], check: bool) -> int:
    """Faults, and with --check each target that was missed, on standard error; the status that follows. Raises
    `BadInput` where there is no target to check."""
    if check and not any(result.is_judged() for result in results):
        raise BadInput("nothing that was measured has a target here, so that --check checks nothing; leave it out")
    lines = [line for result in results for line in [*result.faults, *(result.missed() if check else [])]]
    for line in lines:
        print(f"kvstore: {line}", file=sys.stderr)
    return CHECK_FAILED if lines else OK
