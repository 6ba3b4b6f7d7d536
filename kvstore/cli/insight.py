"""The command `kvstore replay`: recorded requests through tables without memory."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import kvstore
from kvstore.cli.terminal import Json, app, check_folder, expanded_path, lines_of, print_result, shown_progress, typer
from kvstore.cli.terminal import listed as _listed
from kvstore.cli.terminal import real as _real
from kvstore.cli.terminal import whole as _whole
from kvstore.config import DEFAULT_POLICY, POLICIES, expanded


@app.command()
def replay(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE...", help="JSON lines in Mooncake's form, gzip or not.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,..", help="lru, s3-fifo or adaptive. May be given again; lru if left out."),
    ] = None,
    blocks: Annotated[
        list[str] | None, typer.Option(metavar="N,..", help="Blocks that DRAM has room for. May be given again.")
    ] = None,
    dram_blocks: Annotated[
        list[str] | None, typer.Option(metavar="N,..", help="The same, for use beside --nvme-blocks.")
    ] = None,
    nvme_blocks: Annotated[
        str, typer.Option(metavar="N", help="Blocks that a tier below has room for. None if left out.")
    ] = "0",
    admission: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,..", help="To it, beside all: learned, random, oracle. learned if left out."),
    ] = None,
    write_share: Annotated[
        list[str] | None,
        typer.Option(metavar="SHARE,..", help="Budgets of learned and random, of the bytes that all writes."),
    ] = None,
    count_partial: Annotated[
        bool, typer.Option("--count-partial", help="Store and count a prompt's last block also if it is not full.")
    ] = False,
    block_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Of the traces' blocks. Found out if left out.")
    ] = None,
    warmup: Annotated[
        str, typer.Option(metavar="SHARE", help="Of the requests: these fill the store and are not counted.")
    ] = "0",
    seed: Annotated[str, typer.Option(metavar="N", help="Of what a policy draws.")] = "0",
    prefill_rate: Annotated[
        str, typer.Option(metavar="N", help="Tokens per second of a short prompt, for the seconds that hits save.")
    ] = "10000",
    kv_bytes_per_token: Annotated[
        str, typer.Option(metavar="N", help="For the bytes that are written. Those of an 8B model if left out.")
    ] = str(128 << 10),
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", callback=expanded_path, help="Draw the curves there: .png, .svg or .pdf."),
    ] = None,
    as_json: Json = False,
) -> int:
    """What policies would have found of recorded requests, through the store's own tables, beside the offline optimum.

    No KV is stored, so any size up to 4,194,304 blocks can be tried on any machine. Equal traces, seeds and sizes give
    equal figures.
    """
    from kvstore.insight import replays
    from kvstore.insight.trace import MOST_TOKENS, read_trace
    from kvstore.node import build_replay

    paths = [Path(expanded(one)) for one in traces]
    for path in paths:
        if not path.exists():
            raise typer.BadParameter(f"{path}: No such file; give a trace, as kvstore record writes one")
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; give the files in it")
    most = replays.MOST_BLOCKS
    allowed = f"give {', '.join(POLICIES)}, or several with commas between them"
    for name in (names := _listed(policy or [DEFAULT_POLICY], "--policy", allowed)):
        if name not in POLICIES:
            raise typer.BadParameter(f"--policy {name[:40]!r}; {allowed}")
    chosen = {name: kvstore.policy_named(name) for name in names}
    below = _whole(nvme_blocks, "--nvme-blocks", 0, most)
    if admission and not below:
        raise typer.BadParameter("--admission is to NVMe; give --nvme-blocks, too")
    sizes = []
    for given, flag in ((blocks, "--blocks"), (dram_blocks, "--dram-blocks")):
        several = f"give whole numbers from 1 to {most}, with commas between them and not in them, as 1000,10000"
        sizes += [_whole(size, flag, 1, most, several) for size in _listed(given or [], flag, several)]
    allowed = f"give {', '.join(replays.ADMISSIONS)}, or several with commas between them"
    admitting = _listed(admission or [replays.LEARNED], "--admission", allowed)
    of_writes = "give shares of what is written without a choice, 0.01 to 1, as 0.5,0.8"
    shares = [
        _real(share, "--write-share", of_writes) for share in _listed(write_share or [], "--write-share", of_writes)
    ]
    block_size = _whole(block_tokens, "--block-tokens", 1, MOST_TOKENS - 1) if block_tokens is not None else None
    options = replays.ReplayOptions(
        sizes,
        count_partial,
        _real(warmup, "--warmup", "give the share of requests that is not counted, 0 to below 1, as 0.05"),
        _whole(seed, "--seed", 0, (1 << 31) - 1),
        _real(prefill_rate, "--prefill-rate", "give tokens per second, 0.001 or more"),
        _whole(kv_bytes_per_token, "--kv-bytes-per-token", 1, (1 << 40) - 1),
        below,
        admitting,
        shares,
    )
    draw = _plotter(plot) if plot is not None else None
    is_short = len({path.name for path in paths}) == len(paths)
    with shown_progress() as show:
        read = []
        for path in paths:
            show(f"reading {path}")
            with lines_of(path) as lines:
                read.append(read_trace(path.name if is_short else str(path), lines, block_size))
        result = replays.run(read, chosen, options, build_replay, show)
    status = print_result(result, as_json)
    if draw is not None:
        sys.stdout.flush()
        draw(result)
    return status


def _plotter(file: str) -> Callable[[Any], None]:
    """Draws a result there. What is missing for it is said before any work."""
    from kvstore.insight.replay_plot import draw

    kind = Path(file).suffix.lower()
    if kind not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"--plot {file}: give a name that ends in .png, .svg or .pdf")
    check_folder(f"--plot {file}", file)
    is_new = not os.path.lexists(file)
    with open(file, "ab"):  # else it would be said behind all the work that it cannot be written
        pass
    if is_new:
        os.unlink(file)
    return lambda result: draw(result).savefig(file, dpi=150, format=kind[1:])
