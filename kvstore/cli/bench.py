"""The commands `kvstore bench ...`: a path of the store beside its physical limit."""

import json
import shutil
import sys
from typing import Annotated, Any

from kvstore.block.errors import BadInput
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Json,
    Result,
    Show,
    bench,
    expanded_path,
    print_result,
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
    """How near put and get come to a plain memory copy, in this process and through a sidecar's socket, and to what fio
    gets out of the disk.

    A plain loop of direct I/O is measured beside fio, and alone where fio is not on the path. The disk's part takes 1.5
    GiB of it and about a minute; the others up to half of the free memory and three minutes each.
    """
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench import nvme, tiers

        options = tiers.TiersOptions(nvme=nvme.NvmeOptions(data=data, fio=shutil.which("fio")))
        result = tiers.run(options, show, only)
    return judge([result], [], as_json, check)


@bench.command("lookup")
def bench_lookup(check: Check = False, as_json: Json = False) -> int:
    """How long it takes to find the longest stored prefix of a prompt: in this process, through a sidecar's socket, and
    by eight clients of a sidecar together."""
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
    check: Check = False,
    as_json: Json = False,
) -> int:
    """What a match of 512 keys takes through gRPC beside an empty call and the local match, and what an engine at the
    local door notices while another tenant floods gRPC with 256 calls at a time, from one core."""
    with shown_progress() as show:
        show("loading torch")
        from kvstore.bench.network import rows

        result = rows.run(rows.NetworkBenchOptions(seconds=seconds), show)
    return judge([result], [], as_json, check)


@bench.command("restart")
def bench_restart(
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks in the directory that is opened.")] = 1_000_000,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How long it takes until everything on disk can be found again, after a clean end and after a kill, and until a
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
    """How small the codecs make KV and how far a number may be off; with --speed how fast they run on this CPU; with
    --quality what they do to attention and to the next byte, also where K has outliers and biases as in large models.

    With --quality it takes one to four minutes, with --speed half of one. Status 1: a variant of the model does not
    compute what the model does.
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
    from kvstore.bench.engines import codec_quality

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
    """How fast KV goes off a GPU and back: the kernels beside a copy on the device, whole loads and saves beside a copy
    of pinned memory, and what eight running streams notice of them.

    On a CPU it runs on small shapes, to show that it runs; its figures say nothing then.
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
            metavar="PART", help="vllm: this alone: ttft, itl, hooks or overhead. May be given again. All if left out."
        ),
    ] = None,
    turns: Annotated[int | None, typer.Option(metavar="N", min=1, help="vllm: turns of each TTFT; 7.")] = None,
    arrivals: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: hits of each kind among running streams; 24.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: turns with and without a store; 40.")
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """The time to the first token of a Llama with random weights: cold, from DRAM as it is and in 8 bits, and from the
    pool on the device, each beside what its bytes need at the rate of this run's copies.

    The cold run's share of the device's matrix rate (MFU) stands beside each speed-up.

    With --engine vllm a real vLLM on this machine's CPU: TTFT cold, from its own cache and from a sidecar in another
    process; what running streams notice of a load; what the connector's hooks take of a step; and what the store costs
    where it has nothing. It runs with the Python that has vLLM.
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


@bench.command("all")
def bench_all(data: BenchData = None, check: Check = False, as_json: Json = False) -> int:
    """Every bench that needs no GPU, one after the other: tiers, lookup, restart, codec."""
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
    """Print, and say what is wrong with it."""
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
    """Each on standard error; the status that follows."""
    for line in lines:
        print(f"kvstore: {line}", file=sys.stderr)
    return CHECK_FAILED if lines else OK
