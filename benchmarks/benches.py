"""Benches that decisions about the product rest on, and those of `kvstore bench`: of a checkout, and never installed.

    python benchmarks/benches.py kernels --device cpu      as `kvstore bench kernels` in a checkout
    python benchmarks/benches.py all                       tiers, lookup, restart and codec, which need no GPU

Options, `--json`, `--check` and the status are as those of `kvstore bench`. It needs what `kvstore` needs.
"""

import json
import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any

from kvstore.block.errors import BadInput
from kvstore.cli import main as command_line
from kvstore.cli.bench import MOVED, BenchData, Check, judge, report
from kvstore.cli.terminal import Json, Result, Show, bench, print_result, shown_progress, typer

bench.registered_commands[:] = [one for one in bench.registered_commands if one.name not in MOVED]


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
    """What a match of 512 keys takes through gRPC beside an empty call and the local match, and what an engine at the
    local door notices while another tenant floods gRPC with 256 calls at a time, from one core, and while another one
    waits for as many blocks as it may. Then frames from node to node, by each transport, and to and from a Valkey,
    beside a raw stream."""
    with shown_progress() as show:
        show("loading torch")
        from kv_bench.network import pull_rows, rows, valkey_rows

        ways: dict[str, Callable[[], Result]] = {
            "grpc": lambda: rows.run(rows.NetworkBenchOptions(seconds=seconds), show),
            "peers": lambda: pull_rows.run(pull_rows.PullBenchOptions(), show),
            "valkey": lambda: valkey_rows.run(valkey_rows.ValkeyBenchOptions(), show),
        }
        if only is not None and only not in ways:
            raise BadInput(f"--only {only}: the rows are {', '.join(ways)}")
        results = [run() for name, run in ways.items() if only in (None, name)]
    return judge(results, as_json, check)


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
        from kv_bench import restart

        result = restart.run(restart.RestartOptions(blocks=blocks, data=data), show)
    return judge([result], as_json, check)


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
        from kv_bench import codec

        modes = [_codec_speed(show)] if speed else []
        result = codec.result_of(*modes, *([_codec_quality(windows, show)] if quality else []))
    return judge([result], as_json, check)


def _codec_speed(show: Show) -> Any:
    from kv_bench import codec_speed

    return codec_speed.run(progress=show)


def _codec_quality(windows: int | None, show: Show) -> Any:
    show("loading transformers")
    from kv_bench import codec_quality

    options = codec_quality.QualityOptions() if windows is None else codec_quality.QualityOptions(windows)
    return codec_quality.run(options, show).found()


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
        from kv_bench.engines import kernels

        given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        options = kernels.options_for(device, given, page_tokens=page_tokens, sizes=size or (), laps=laps)
        result = kernels.run(options, show, device, stage or ()).found()
    return judge([result], as_json, check)


@bench.command("ttft")
def bench_ttft(
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Through which adapter: hf (transformers) or vllm.")
    ] = "hf",
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the model: tiny, 1b or 8b; 8b on a GPU, tiny on a CPU. With vllm: tiny, mid or 1b; 1b on a GPU.",
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
    """The time to the first token of a Llama with random weights: cold, from DRAM as it is and in 8 bits, and from the
    pool on the device, each beside what its bytes need at the rate of this run's copies.

    The cold run's share of the device's matrix rate (MFU) stands beside each speed-up.

    With --engine vllm a real vLLM on this machine's CPU: TTFT cold, from its own cache and from a sidecar in another
    process; what running streams notice of a load; what the connector's hooks take of a step; what the store costs
    where it has nothing; and decode's first token where another engine prefills. It runs with the Python that has vLLM,
    on a GPU with --device cuda, where it measures the first of these unless told --only.
    """
    of_hf = {"--chunk": chunk, "--laps": laps, "--seconds": seconds}
    of_vllm = {"--only": only, "--turns": turns, "--arrivals": arrivals, "--pairs": pairs}
    is_vllm = engine == "vllm"
    foreign = [name for name, value in (of_hf if is_vllm else of_vllm).items() if value is not None]
    if foreign:
        belongs = "hf" if is_vllm else "vllm"
        raise typer.BadParameter(f"{', '.join(foreign)} belongs to --engine {belongs}; leave it out with {engine}")
    if is_vllm:
        return _ttft_vllm(
            {
                "shape": shape,
                "context": context,
                "turns": turns,
                "arrivals": arrivals,
                "pairs": pairs,
                "device": device,
            },
            only or [],
            as_json,
            check,
        )
    with shown_progress() as show:
        show("loading torch and transformers")
        from kv_bench.engines import ttft

        options = ttft.options_for(
            device, shape=shape, contexts=context, chunk_tokens=chunk, laps=laps, seconds=seconds
        )
        result = ttft.run(options, show, device, engine).found()
    return judge([result], as_json, check)


def _ttft_vllm(given: dict[str, Any], parts: list[str], as_json: bool, check: bool) -> int:
    with shown_progress() as show:
        show("loading the bench")
        from kv_bench.engines import ttft_vllm

        result = ttft_vllm.run(ttft_vllm.options_for(parts=parts, **given), show).found()
    return judge([result], as_json, check)


@bench.command("all")
def bench_all(data: BenchData = None, check: Check = False, as_json: Json = False) -> int:
    """Every bench that needs no GPU, one after the other: tiers, lookup, restart, codec."""
    with shown_progress() as show:
        show("loading torch")
        from kv_bench import codec, restart
        from kvstore.bench import lookup, nvme, tiers

        results: list[Result] = [
            tiers.run(tiers.TiersOptions(nvme=nvme.NvmeOptions(data=data, fio=shutil.which("fio"))), show),
            lookup.run(progress=show),
            restart.run(restart.RestartOptions(data=data), show),
            codec.result_of(_codec_speed(show), _codec_quality(None, show)),
        ]
    if as_json:
        print(json.dumps({"bench": "all", "results": [result.to_dict() for result in results]}))
    else:
        for result in results:
            print_result(result, as_json)
    return report(results, check)


def main() -> None:
    """As `kvstore bench` with these words in front."""
    sys.argv[:] = ["kvstore", "bench", *sys.argv[1:]]
    command_line.main()


if __name__ == "__main__":
    main()
