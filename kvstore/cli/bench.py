"""The commands `kvstore bench ...`: each measures a path of the store beside its physical limit."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from kvstore.block.errors import BadInput
from kvstore.cli.engines import api_key_header
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Json,
    Result,
    Show,
    bench,
    expanded_path,
    lines_of,
    listed,
    print_result,
    real,
    shown_progress,
    typer,
)

BenchData = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        callback=expanded_path,
        help="Measure the disk of this directory. That of temporary files if left out.",
    ),
]


Check = Annotated[bool, typer.Option("--check", help="Status 1 where a target is missed; it is named.")]


@bench.command("tiers")
def bench_tiers(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TIER", help="Measure this alone: dram, door (DRAM of a sidecar) or nvme. All if left out."
        ),
    ] = None,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How near put and get come to a plain memory copy, in this process and through a sidecar's socket, and on NVMe to
    what fio reaches.

    A plain loop of direct I/O runs beside fio, or alone if fio is not on the path. The disk's part takes 1.5 GiB of it
    and about a minute; the others up to half of the free memory and three minutes each.
    """
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import nvme, tiers

        options = tiers.TiersOptions(nvme=nvme.NvmeOptions(data=data, fio=shutil.which("fio")))
        result = tiers.run(options, show, only)
    return judge([result], [], as_json, check)


@bench.command("lookup")
def bench_lookup(check: Check = False, as_json: Json = False) -> int:
    """How long it takes to find a prompt's longest stored prefix: in this process, through a sidecar's socket, and for
    eight clients of a sidecar at once."""
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import lookup

        result = lookup.run(progress=show)
    return judge([result], [], as_json, check)


@bench.command("network")
def bench_network(
    seconds: Annotated[
        float, typer.Option(metavar="N", min=0.1, help="Of each quiet and each flooded turn of the local door.")
    ] = 3.0,
    only: Annotated[
        str | None, typer.Option(metavar="ROWS", help="These alone: grpc, peers or valkey. All if left out.")
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How long a match of 512 keys takes through gRPC, beside an empty call and a match through the API socket; how
    much an engine on the API socket slows down while another tenant floods gRPC with 256 calls at a time from one core,
    and while another one waits for as many blocks as it may. Then stored blocks from node to node by each transport,
    and to and from a Valkey, beside a raw stream."""
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench.network import pull_rows, rows, valkey_rows

        ways: dict[str, Callable[[], Result]] = {
            "grpc": lambda: rows.run(rows.NetworkBenchOptions(seconds=seconds), show),
            "peers": lambda: pull_rows.run(pull_rows.PullBenchOptions(), show),
            "valkey": lambda: valkey_rows.run(valkey_rows.ValkeyBenchOptions(), show),
        }
        if only is not None and only not in ways:
            raise BadInput(f"--only {only}: the rows are {', '.join(ways)}")
        results = [run() for name, run in ways.items() if only in (None, name)]
    return judge(results, [], as_json, check)


@bench.command("restart")
def bench_restart(
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks in the directory that is opened.")] = 1_000_000,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How long a start takes until all blocks on disk can be found, after a clean end and after a kill, and until a
    sidecar takes connections."""
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import restart

        result = restart.run(restart.RestartOptions(blocks=blocks, data=data), show)
    return judge([result], [], as_json, check)


@bench.command("codec")
def bench_codec(
    quality: Annotated[
        bool, typer.Option("--quality", help="Let a small trained model answer from KV that went through the codecs.")
    ] = False,
    speed: Annotated[bool, typer.Option("--speed", help="Encode and decode on this CPU, beside memcpy.")] = False,
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Pieces of text for --quality, 1 to 64: 32 if left out, fewer for a quick look."
        ),
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How small the codecs make KV and how large their error is; with --speed how fast they run on this CPU; with
    --quality what they do to attention and to the next byte, also with outliers and biases in K as large models have
    them.

    --quality takes one to four minutes, --speed half of one. Status 1: a variant of the model does not compute what the
    model does.
    """
    if windows is not None and not quality:
        raise typer.BadParameter("--windows belongs to --quality; add --quality, or leave --windows out")
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import codec

        rates = _codec_speed(show) if speed else None
        result = codec.CodecResult(codec.size_rows(), rates, _codec_quality(windows, show) if quality else None)
    return judge([result], result.failures, as_json, check)


def _codec_speed(show: Show) -> Any:
    from kvstore.bench import codec_speed

    return codec_speed.run(progress=show)


def _codec_quality(windows: int | None, show: Show) -> Any:
    show("loading transformers")
    from kvstore.demo import codec_quality

    options = codec_quality.QualityOptions() if windows is None else codec_quality.QualityOptions(windows)
    return codec_quality.run(options, show)


BenchDevice = Annotated[
    str | None, typer.Option(metavar="NAME", help="cuda or cpu. A GPU where there is one if left out.")
]


Laps = Annotated[int | None, typer.Option(metavar="N", min=1, help="Turns that each median is of.")]


@bench.command("kernels")
def bench_kernels(
    device: BenchDevice = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure this alone: kernels, transfers or decode. May be given again."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="KV that is moved at once, such as 1GiB. May be given again."),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a block; 32 on a GPU.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a layer; 8 on a GPU.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a head; 128 on a GPU.")] = None,
    page_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a page; 16.")] = None,
    laps: Laps = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How fast KV moves between a GPU and memory: the kernels beside a copy on the device, whole loads and saves beside
    a copy of pinned memory, and how much eight running streams slow down.

    On a CPU it uses small shapes, only to show that it runs; its figures mean nothing there.
    """
    with shown_progress() as show:
        show("loading torch and transformers")
        from kvstore.bench.engines import kernels

        given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        options = kernels.options_for(device, given, page_tokens=page_tokens, sizes=size or (), laps=laps)
        result = kernels.run(options, show, device, stage or ())
    return judge([result], result.faults, as_json, check)


@bench.command("ttft")
def bench_ttft(
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Through which adapter: hf (transformers) or vllm.")
    ] = "hf",
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the model: tiny, 1b or 8b; 8b on a GPU, tiny on a CPU. With vllm: tiny or mid, which is usual.",
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS,..", help="Lengths of the prefix, such as 8k,32k,128k.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(metavar="TOKENS", min=1, help="Of the prefill grid.")] = None,
    device: BenchDevice = None,
    laps: Laps = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Begin nothing more after so long; half an hour.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="vllm: this alone: ttft, itl, hooks, overhead or hand-over. May be given again. All if left out.",
        ),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: turns of each TTFT; 7, of hand-overs 12.")
    ] = None,
    arrivals: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: hits of each kind among running streams; 24.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: turns with and without a store; 40.")
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """The time to first token of a Llama with random weights: cold, from DRAM (raw and in 8 bits), and from the pool on
    the device, each beside the time that its bytes need at the copy rate of this run.

    Each speed-up is shown with the cold run's share of the device's matrix rate (MFU).

    With --engine vllm, a real vLLM on this machine's CPU: TTFT cold, from its own cache and from a sidecar in another
    process; how much a load slows running streams; the connector's share of a step; what the store costs when it has
    nothing; and decode's first token after another engine's prefill. Run it with the Python that has vLLM.
    """
    of_hf = {"--chunk": chunk, "--device": device, "--laps": laps, "--seconds": seconds}
    of_vllm = {"--only": only, "--turns": turns, "--arrivals": arrivals, "--pairs": pairs}
    is_vllm = engine == "vllm"
    foreign = [name for name, value in (of_hf if is_vllm else of_vllm).items() if value is not None]
    if foreign:
        belongs = "hf" if is_vllm else "vllm"
        raise typer.BadParameter(f"{', '.join(foreign)} belongs to --engine {belongs}; leave it out with {engine}")
    if is_vllm:
        return _ttft_vllm(
            {"shape": shape, "context": context, "turns": turns, "arrivals": arrivals, "pairs": pairs},
            only or [],
            as_json,
            check,
        )
    with shown_progress() as show:
        show("loading torch and transformers")
        from kvstore.bench.engines import ttft

        options = ttft.options_for(
            device, shape=shape, contexts=context, chunk_tokens=chunk, laps=laps, seconds=seconds
        )
        result = ttft.run(options, show, device, engine)
    return judge([result], result.faults, as_json, check)


def _ttft_vllm(given: dict[str, Any], parts: list[str], as_json: bool, check: bool) -> int:
    with shown_progress() as show:
        show("loading the bench")
        from kvstore.bench.engines import ttft_vllm

        result = ttft_vllm.run(ttft_vllm.options_for(parts=parts, **given), show)
    return judge([result], result.faults, as_json, check)


@bench.command("traffic")
def bench_traffic(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            callback=expanded_path,
            help="JSON lines of Mooncake's form, or of kvstore record; gzip is unpacked.",
        ),
    ],
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="An engine with OpenAI's API. May be given again: they take turns."),
    ] = None,
    sidecar: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="Where the sidecar of that endpoint has its /metrics."),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,..",
            help="Start these here in place of --endpoint, a vLLM each: none (no prefix cache), own (its own alone), "
            "kvstore (with a sidecar), pd (prefill and decode apart).",
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the model that --engines have: tiny or mid.")
    ] = None,
    own_share: Annotated[
        float,
        typer.Option(metavar="X", min=0, max=10, help="Of the workload, what a cache of --engines holds itself."),
    ] = 0.1,
    seconds: Annotated[float, typer.Option(metavar="N", min=0.1, max=86400, help="Of arrivals, in each turn.")] = 60.0,
    requests: Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="In each turn, at most.")] = 1000,
    turns: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Each endpoint's, in another order.")] = 2,
    speed: Annotated[
        float, typer.Option(metavar="X", min=0.001, max=1000, help="Arrivals come so many times as fast.")
    ] = 1.0,
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0001,
            max=1,
            help="Tokens for one of the trace; the longest request just fits if left out.",
        ),
    ] = None,
    form: Annotated[
        str, typer.Option(metavar="NAME", help="How prompts are sent: tokens, text or chat (words of w5 w6 ..).")
    ] = "tokens",
    vocabulary: Annotated[
        int, typer.Option(metavar="N", min=16, max=1 << 24, help="Token ids are drawn from 5 up to here.")
    ] = 1000,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The first one that an endpoint has.")] = None,
    ttft_slo: Annotated[str, typer.Option(metavar="MS,..", help="First tokens that count as good.")] = "200,500",
    itl_slo: Annotated[str, typer.Option(metavar="MS,..", help="Mean gaps that count as good.")] = "100",
    request_seconds: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=86400, help="After so long an answer has failed.")
    ] = 120.0,
    block_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of a block of the trace, where its lengths do not say.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=1 << 31, help="Tokens are drawn from it.")] = 0,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", callback=expanded_path, help="Its first line is sent to endpoints as their key."),
    ] = None,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="Endpoints may be on other hosts: it is load for them.")
    ] = False,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """Replay recorded requests against engines at their recorded times: TTFT, ITL, tokens per second, goodput, and hits
    by tier.

    Arrivals, lengths and shared prefixes are the trace's; the tokens are made up. In a turn each endpoint gets the same
    requests; each turn has new tokens, so figures have a spread. Status 1: all requests of a turn failed; with --check:
    one failed.
    """
    from kvstore.bench.traffic import engines as starts
    from kvstore.bench.traffic import run as traffic
    from kvstore.bench.traffic.replay import PromptForm
    from kvstore.bench.traffic.result import Slo
    from kvstore.insight.trace import read_trace

    if bool(endpoint) == bool(engines):
        raise typer.BadParameter("give --endpoint NAME=URL, or --engines NAME,.. to start some")
    if engines is None and shape is not None:
        raise typer.BadParameter("--shape belongs to --engines; leave it out")
    if form not in [*PromptForm]:
        raise typer.BadParameter(f"--form {form[:40]!r}; allowed: {', '.join(PromptForm)}")
    slos = tuple(
        Slo(real(ttft, "--ttft-slo", _MS), real(itl, "--itl-slo", _MS))
        for ttft in listed([ttft_slo], "--ttft-slo", _MS)
        for itl in listed([itl_slo], "--itl-slo", _MS)
    )
    options = traffic.TrafficOptions(
        seconds,
        requests,
        turns,
        speed,
        scale,
        PromptForm(form),
        vocabulary,
        model,
        request_seconds,
        slos,
        seed,
        api_key_header(api_key_file),
        starts.EngineOptions.of(listed([engines], "--engines", "give some"), shape, own_share) if engines else None,
    )
    endpoints = _endpoints(endpoint or [], sidecar or [], anywhere)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines end with the bench
    with shown_progress() as show:
        show("reading the trace")
        with lines_of(Path(trace)) as lines:
            read = read_trace(Path(trace).name, lines, block_tokens)
        result = traffic.run(read, endpoints, options, show)
    return judge([result], result.faults, as_json, check)


_MS = "give milliseconds, such as 200,500"


def _endpoints(given: list[str], sidecars: list[str], anywhere: bool) -> list[Any]:
    """Endpoints by name. Raises `BadInput`."""
    from kvstore.bench.traffic.engines import Endpoint
    from kvstore.openai.client import checked_url

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


@bench.command("all")
def bench_all(data: BenchData = None, check: Check = False, as_json: Json = False) -> int:
    """Every bench that needs no GPU, in turn: tiers, lookup, restart, codec."""
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import codec, lookup, nvme, restart, tiers

        results: list[Result] = [
            tiers.run(tiers.TiersOptions(nvme=nvme.NvmeOptions(data=data, fio=shutil.which("fio"))), show),
            lookup.run(progress=show),
            restart.run(restart.RestartOptions(data=data), show),
            codec.CodecResult(codec.size_rows(), _codec_speed(show), _codec_quality(None, show)),
        ]
    if as_json:
        print(json.dumps({"bench": "all", "results": [result.to_dict() for result in results]}))
    else:
        for result in results:
            print_result(result, as_json)
    return _faults(_missed(results)) if check else OK


def judge(results: list[Result], faults: list[str], as_json: bool, check: bool) -> int:
    """Print the results, and report faults and missed targets."""
    if as_json and len(results) > 1:
        print(json.dumps({"results": [result.to_dict() for result in results]}))
    else:
        for result in results:
            print_result(result, as_json)
    return _faults([*faults, *(_missed(results) if check else [])])


def _missed(results: list[Result]) -> list[str]:
    from kvstore.bench import measure as targets

    found = [result.to_dict() for result in results]
    if not any(targets.judged(one) for one in found):
        raise BadInput("nothing that was measured has a target here, so that --check checks nothing; leave it out")
    return [line for one in found for line in targets.missed(one)]


def _faults(lines: list[str]) -> int:
    """Print each to standard error; returns the exit status."""
    for line in lines:
        print(f"kvstore: {line}", file=sys.stderr)
    return CHECK_FAILED if lines else OK
