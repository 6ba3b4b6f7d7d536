"""The benches of `kvstore bench`: scripts of a checkout, never installed.

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
from kvstore.cli.bench import Check, judge, report, traffic_command
from kvstore.cli.terminal import Json, Show, bench, option, path_option, print_result, shown_progress, typer


def _number(about: str) -> Any:
    return option("N", about, min=1)


BenchData = Annotated[
    str | None, path_option("DIR", "Measure the disk of this directory. That of temporary files if left out.")
]
BenchDevice = Annotated[str | None, option("NAME", "cuda or cpu. A GPU where there is one if left out.")]
Laps = Annotated[int | None, _number("Turns that each median is of.")]


bench.registered_commands.clear()


def _judged(find: Callable[[Show], Any], as_json: bool, check: bool) -> int:
    with shown_progress() as show:
        show("loading torch")
        try:
            result = find(show)
        except ModuleNotFoundError as error:
            raise BadInput(f"this bench needs the package {error.name}; run it in a checkout after make env") from None
    return judge([result], as_json, check)


@bench.command("tiers")
def bench_tiers(
    only: Annotated[
        str | None, option("TIER", "This alone: dram, door (DRAM of a sidecar) or nvme. All if left out.")
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
    return _judged(lambda show: _tiers(show, data, only), as_json, check)


def _tiers(show: Show, data: str | None, only: str | None = None) -> Any:
    from kv_bench import nvme, tiers

    disk = nvme.NvmeOptions(data=data, fio=shutil.which("fio"))
    return tiers.run(tiers.TiersOptions(nvme=disk), show, only)


@bench.command("lookup")
def bench_lookup(check: Check = False, as_json: Json = False) -> int:
    """How long it takes to find a prompt's longest stored prefix: in this process, through a sidecar's socket, and for
    eight clients of a sidecar at once."""
    return _judged(_lookup, as_json, check)


def _lookup(show: Show) -> Any:
    from kv_bench import lookup

    return lookup.run(lookup.LookupOptions(), show)


@bench.command("restart")
def bench_restart(
    blocks: Annotated[int, option("N", "Blocks in the directory that is opened.")] = 1_000_000,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How long it takes until everything on disk can be found again, after a clean end and after a kill, and until a
    sidecar takes connections."""
    return _judged(lambda show: _restart(show, data, blocks), as_json, check)


def _restart(show: Show, data: str | None, blocks: int = 1_000_000) -> Any:
    from kv_bench import restart

    return restart.run(restart.RestartOptions(blocks=blocks, data=data), show)


@bench.command("codec")
def bench_codec(
    quality: Annotated[
        bool, typer.Option("--quality", help="Let a small trained model answer from KV that went through the codecs.")
    ] = False,
    speed: Annotated[bool, typer.Option("--speed", help="Encode and decode on this CPU, beside memcpy.")] = False,
    windows: Annotated[int | None, option("N", "Pieces of text for --quality, 1 to 64; 32 if left out.")] = None,
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
    return _judged(lambda show: _codec(show, speed, quality, 32 if windows is None else windows), as_json, check)


def _codec(show: Show, speed: bool = True, quality: bool = True, windows: int = 32) -> Any:
    from kv_bench import codec

    modes = [codec.speed(show)] if speed else []
    if quality:
        show("loading transformers")
        from kv_bench import codec_quality

        modes.append(codec_quality.run(codec_quality.QualityOptions(windows), show))
    return codec.result_of(*modes)


@bench.command("kernels")
def bench_kernels(
    device: BenchDevice = None,
    stage: Annotated[
        list[str] | None, option("NAME", "This alone: plan, kernels, ways, transfers or decode. May be given again.")
    ] = None,
    laps: Laps = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How fast KV goes off a GPU and back: what putting a load into the streams costs, the kernels beside a copy on the
    device, whole loads and saves beside a copy of pinned memory, and what eight running streams notice of them.

    On a CPU it runs on small shapes, to show that it runs; its figures say nothing then.
    """

    def find(show: Show) -> Any:
        from kv_bench import kernels

        return kernels.run(kernels.options_for(device, laps), show, device, stage or ())

    return _judged(find, as_json, check)


@bench.command("ttft")
def bench_ttft(
    engine: Annotated[str, option("NAME", "Through which adapter: hf (transformers) or vllm.")] = "hf",
    shape: Annotated[
        str | None, option("NAME", "Of the model. hf: tiny, 1b, 8b; 8b on a GPU. vllm: tiny, mid, 1b; 1b on a GPU.")
    ] = None,
    context: Annotated[str | None, option("TOKENS,..", "Lengths of the prefix, such as 8k,32k,128k.")] = None,
    device: BenchDevice = None,
    laps: Laps = None,
    seconds: Annotated[float | None, option("N", "Begin nothing more after so long; half an hour.", min=0)] = None,
    only: Annotated[
        list[str] | None,
        option("PART", "vllm: this alone: ttft, itl, hooks, overhead or hand-over. May be given again."),
    ] = None,
    turns: Annotated[int | None, _number("vllm: turns of each TTFT; 7, of hand-overs 12.")] = None,
    arrivals: Annotated[int | None, _number("vllm: hits of each kind among running streams; 24.")] = None,
    pairs: Annotated[int | None, _number("vllm: turns with and without a store; 40.")] = None,
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
    of_hf = {"--laps": laps, "--seconds": seconds}
    of_vllm = {"--only": only, "--turns": turns, "--arrivals": arrivals, "--pairs": pairs}
    is_vllm = engine == "vllm"
    foreign = [name for name, value in (of_hf if is_vllm else of_vllm).items() if value is not None]
    if foreign:
        belongs = "hf" if is_vllm else "vllm"
        raise typer.BadParameter(f"{', '.join(foreign)} belongs to --engine {belongs}; leave it out with {engine}")

    def find(show: Show) -> Any:
        if is_vllm:
            from kv_bench import ttft_vllm
            from kv_bench.llamas import parse_tokens

            given = {"turns": turns, "hand_overs": turns, "arrivals": arrivals, "pairs": pairs}
            given["prefix_tokens"] = None if context is None else parse_tokens(context)
            return ttft_vllm.run(ttft_vllm.options_for(only or (), shape, device, **given), show)
        from kv_bench import ttft

        options = ttft.options_for(device, context, shape=shape, laps=laps, seconds=seconds)
        return ttft.run(options, show, device, engine)

    return _judged(find, as_json, check)


def _engines(kinds: list[str], shape: str | None, own_share: float) -> Any:
    from kv_bench.traffic_engines import starter_of

    return starter_of(kinds, shape, own_share)


bench.command("traffic")(traffic_command(_engines))


@bench.command("all")
def bench_all(data: BenchData = None, check: Check = False, as_json: Json = False) -> int:
    """Every bench that needs no GPU, one after the other: tiers, lookup, restart, codec."""
    with shown_progress() as show:
        show("loading torch")
        results: list[Any] = [_tiers(show, data), _lookup(show), _restart(show, data), _codec(show)]
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
