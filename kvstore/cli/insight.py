"""`kvstore replay` and `kvstore whatif`: replay recorded requests through the store's tables, or estimate the
result."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import kvstore
from kvstore.block.errors import BadInput
from kvstore.block.states import DEFAULT_SHARE
from kvstore.cli.terminal import (
    CHECK_FAILED,
    Json,
    app,
    argument,
    check_folder,
    lines_of,
    listed,
    option,
    path_argument,
    path_option,
    print_result,
    real,
    shown_progress,
    typer,
    whole,
)
from kvstore.config import DEFAULT_POLICY, POLICIES, REMOVED_POLICY, checked_policy, expanded, parse_size

_8B = str(128 << 10)


@app.command()
def replay(
    traces: Annotated[list[str], argument("TRACE...", "JSON lines in Mooncake's form, gzip or not.")],
    policy: Annotated[
        list[str] | None, option("NAME,..", "lru or adaptive. May be given again; lru if left out.")
    ] = None,
    blocks: Annotated[list[str] | None, option("N,..", "Blocks that DRAM has room for. May be given again.")] = None,
    dram_blocks: Annotated[list[str] | None, option("N,..", "The same, for use beside --nvme-blocks.")] = None,
    nvme_blocks: Annotated[str, option("N", "Blocks that a tier below has room for. None if left out.")] = "0",
    admission: Annotated[
        list[str] | None, option("NAME,..", "To it, beside all: learned, random, oracle. learned if left out.")
    ] = None,
    write_share: Annotated[
        list[str] | None, option("SHARE,..", "Budgets of learned and random, of the bytes that all writes.")
    ] = None,
    count_partial: Annotated[
        bool, typer.Option("--count-partial", help="Store and count a prompt's last block also if it is not full.")
    ] = False,
    block_tokens: Annotated[str | None, option("N", "Of the traces' blocks. Found out if left out.")] = None,
    warmup: Annotated[str, option("SHARE", "Of the requests: these fill the store and are not counted.")] = "0",
    seed: Annotated[str, option("N", "Of what a policy draws.")] = "0",
    prefill_rate: Annotated[
        str, option("N", "Tokens per second of a short prompt, for the seconds that hits save.")
    ] = "10000",
    kv_bytes_per_token: Annotated[
        str | None, option("N", "For the bytes that are written. Those of an 8B model if left out.")
    ] = None,
    model: Annotated[
        str | None, option("NAME", "Its bytes, of kvstore plan --models; with recurrent states also what these find.")
    ] = None,
    state_share: Annotated[str, option("SHARE", "Bytes of states between the ends of prompts, of the KV's.")] = str(
        DEFAULT_SHARE
    ),
    plot: Annotated[str | None, path_option("FILE", "Draw the curves there: .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> int:
    """What policies would have found of recorded requests, through the store's own tables, beside the offline optimum.

    No KV is stored, so any size up to 4,194,304 blocks works on any machine. Equal traces, seeds and sizes give equal
    figures.
    """
    from kvstore.insight import replay as replays
    from kvstore.insight.models import model_named

    paths = [_trace_file(one) for one in traces]
    most = replays.MOST_BLOCKS
    allowed = f"give {', '.join(POLICIES)}, or several with commas between them"
    for name in (names := listed(policy or [DEFAULT_POLICY], "--policy", allowed)):
        if name not in (*POLICIES, REMOVED_POLICY):
            raise typer.BadParameter(f"--policy {name[:40]!r}; {allowed}")
    chosen = {checked_policy(name, "--policy"): kvstore.policy_named(name) for name in names}
    below = whole(nvme_blocks, "--nvme-blocks", 0, most)
    if admission and not below:
        raise typer.BadParameter("--admission is to NVMe; give --nvme-blocks, too")
    sizes = []
    for given, flag in ((blocks, "--blocks"), (dram_blocks, "--dram-blocks")):
        sizes += _sizes(given, flag, most)
    allowed = f"give {', '.join(replays.ADMISSIONS)}, or several with commas between them"
    admitting = listed(admission or [replays.LEARNED], "--admission", allowed)
    of_writes = "give shares of what is written without a choice, 0.01 to 1, as 0.5,0.8"
    shares = [
        real(share, "--write-share", of_writes) for share in listed(write_share or [], "--write-share", of_writes)
    ]
    if model is not None and kv_bytes_per_token is not None:
        raise typer.BadParameter("--model says how many bytes a token has; leave --kv-bytes-per-token out")
    token_bytes, state_bytes = whole(kv_bytes_per_token or _8B, "--kv-bytes-per-token", 1, (1 << 40) - 1), 0
    if model is not None:
        found = model_named(model)
        token_bytes, state_bytes = found.bytes_per_token(found.dtype), found.state_bytes
    options = replays.ReplayOptions(
        sizes,
        count_partial,
        real(warmup, "--warmup", "give the share of requests that is not counted, 0 to below 1, as 0.05"),
        whole(seed, "--seed", 0, (1 << 31) - 1),
        real(prefill_rate, "--prefill-rate", "give tokens per second, 0.001 or more"),
        token_bytes,
        below,
        admitting,
        shares,
        state_bytes,
        real(state_share, "--state-share", "give the bytes of states for each byte of KV, 0 or more"),
    )
    draw = None
    if plot is not None:
        file = _checked_picture("--plot", plot, ".png", ".svg", ".pdf")
        from kvstore.insight.plots import draw_replay

        draw = _plotter(draw_replay, file)
    is_short = len({path.name for path in paths}) == len(paths)
    with shown_progress() as show:
        read = [read_recorded(path, path.name if is_short else str(path), block_tokens, show) for path in paths]
        result = replays.run(read, chosen, options, show)
    return _shown(result, as_json, draw)


@app.command()
def whatif(
    trace: Annotated[str, argument("TRACE", "JSON lines in Mooncake's form, gzip or not.")],
    sizes: Annotated[
        list[str] | None, option("N,..", "Blocks that there is room for. Ten sizes that fit the trace if left out.")
    ] = None,
    dram: Annotated[list[str] | None, option("SIZE,..", "The same in bytes, such as 64GiB,128GiB.")] = None,
    policy: Annotated[str, option("NAME", "lru or adaptive.")] = DEFAULT_POLICY,
    names: Annotated[str, option("N", "Of the trace's blocks, that are followed at a time; more err less.")] = "4096",
    seed: Annotated[str, option("N", "Of which blocks are sampled.")] = "0",
    block_tokens: Annotated[str | None, option("N", "Of the trace's blocks. Found out if left out.")] = None,
    kv_bytes_per_token: Annotated[str, option("N", "For sizes in bytes. Those of an 8B model if left out.")] = _8B,
    exact: Annotated[
        bool, typer.Option("--exact", help="Replay each size in full as well, and print by how much the estimate errs.")
    ] = False,
    svg: Annotated[str | None, path_option("FILE", "Draw the curve there.")] = None,
    as_json: Json = False,
) -> int:
    """What other sizes would have found of recorded requests, estimated from a few thousand of their blocks.

    lru: one pass for all sizes, in a second for a hundred thousand blocks. adaptive: a tenth of the blocks or more goes
    through the store's own tables, once for each size. Only full blocks count. The ceiling is the limit over all sizes.
    """
    from kvstore.insight import whatif as estimates
    from kvstore.insight.curve import LEAST_NAMES
    from kvstore.node import SystemClock

    path = _trace_file(trace)
    if policy not in estimates.ESTIMATED:
        raise typer.BadParameter(f"--policy {policy[:40]!r}; give {' or '.join(estimates.ESTIMATED)}")
    most = estimates.MOST_BLOCKS
    several = "give sizes with commas between them, as 64GiB,128GiB"
    options = estimates.WhatIfOptions(
        _sizes(sizes, "--sizes", most),
        [parse_size(size, "--dram") for size in listed(dram or [], "--dram", several)],
        policy,
        whole(names, "--names", LEAST_NAMES, estimates.MOST_NAMES),
        whole(seed, "--seed", 0, (1 << 31) - 1),
        whole(kv_bytes_per_token, "--kv-bytes-per-token", 1, (1 << 40) - 1),
        exact,
    )
    draw = None
    if svg is not None:
        file = _checked_picture("--svg", svg, ".svg")
        from kvstore.insight.plots import draw_whatif

        draw = _plotter(draw_whatif, file)
    kvstore.policy_named(policy)  # raises now if its packages are missing
    with shown_progress() as show:
        read = read_recorded(path, path.name, block_tokens, show)
        result = estimates.run(read, options, lambda part: kvstore.policy_named(policy, part), SystemClock(), show)
    return _shown(result, as_json, draw)


def _shown(result: Any, as_json: bool, draw: Callable[[Any], None] | None) -> int:
    status = print_result(result, as_json)
    if draw is not None:
        sys.stdout.flush()
        draw(result)
    return status


def read_recorded(path: Path, name: str, block_tokens: str | None, show: Any) -> Any:
    """Read a trace. Raises `BadInput`, `OSError`."""
    from kvstore.insight.trace import MOST_TOKENS, read_trace

    size = whole(block_tokens, "--block-tokens", 1, MOST_TOKENS - 1) if block_tokens is not None else None
    show(f"reading {path}")
    with lines_of(path) as lines:
        return read_trace(name, lines, size)


def _trace_file(given: str) -> Path:
    path = Path(expanded(given))
    if not path.exists():
        raise typer.BadParameter(f"{path}: No such file; give a trace, as kvstore record writes one")
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give the files in it")
    return path


def _sizes(given: list[str] | None, flag: str, most: int) -> list[int]:
    several = f"give whole numbers from 1 to {most}, with commas between them and not in them, as 1000,10000"
    return [whole(size, flag, 1, most, several) for size in listed(given or [], flag, several)]


def _checked_picture(flag: str, file: str, *kinds: str) -> str:
    if Path(file).suffix.lower() not in kinds:
        allowed = f"{', '.join(kinds[:-1])} or {kinds[-1]}" if kinds[1:] else kinds[0]
        raise typer.BadParameter(f"{flag} {file}: give a name that ends in {allowed}")
    check_folder(f"{flag} {file}", file)
    is_new = not os.path.lexists(file)
    with open(file, "ab"):  # fails now, before any work, if it cannot be written
        pass
    if is_new:
        os.unlink(file)
    return file


def _plotter(draw: Callable[[Any], Any], file: str) -> Callable[[Any], None]:
    return lambda result: draw(result).savefig(file, dpi=150, format=Path(file).suffix.lower()[1:])


# `kvstore lint`: finds where the prompts of a file part needlessly -------------------------------------------------


_MOST_TOKENIZER_BYTES = 1 << 28


@app.command()
def lint(
    prompts: Annotated[str, path_argument("PROMPTS", "JSON lines, gzip or not: a prompt each.")],
    tokenizer: Annotated[
        str | None, path_option("PATH", "A model's folder, or its tokenizer.json, for prompts of text.")
    ] = None,
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="Take bytes of the text for tokens, where there is no tokenizer.")
    ] = False,
    block: Annotated[str, option("N", "Tokens of the cache's blocks.")] = "64",
    min_hit_rate: Annotated[
        str | None, option("SHARE", "Status 1 where a smaller share of the tokens is found.")
    ] = None,
    as_json: Json = False,
) -> int:
    """What an unlimited prefix cache would find of these prompts, in their order, and where some part although they are
    equal again later: a date in a system prompt, documents in another order, a salt.

    A line is a list of token ids, a text, or an object with token_ids, prompt or messages, and optionally cache_salt
    and namespace. Nothing is stored or sent.
    """
    from kvstore.insight import lint as linting

    block_tokens, least = whole(block, "--block", 1, 4096), None
    if min_hit_rate is not None:
        least = real(min_hit_rate, "--min-hit-rate", "give a share of the tokens, 0 to 1")
        if not 0 <= least <= 1:
            raise BadInput(f"--min-hit-rate {least:g}; give a share of the tokens, 0 to 1, such as 0.6")
    if tokenizer is not None and as_bytes:
        raise typer.BadParameter("--bytes is for prompts without a tokenizer; leave it out, or --tokenizer")
    path = Path(prompts)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give a file of JSON lines")
    with shown_progress() as show:
        tokenise = _tokenizer(tokenizer) if tokenizer is not None else linting.bytes_as_tokens if as_bytes else None
        with lines_of(path) as lines:
            read = linting.read_file_prompts(path.name, _bounded(lines, linting.MOST_LINE_CHARACTERS), tokenise, show)
        has_text = as_bytes and any(one.text for one in read)
        unit = "bytes, taken for tokens" if has_text else "tokens"
        result = linting.lint(path.name, read, block_tokens, least, tokenise, unit, show)
    print_result(result, as_json)
    sys.stdout.flush()
    return CHECK_FAILED if result.is_below else 0


def _bounded(lines: Any, most: int) -> Iterator[str]:
    while line := lines.readline(most + 1):
        yield line


def _tokenizer(given: str) -> Any:
    path = Path(given)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise typer.BadParameter(
            f"--tokenizer {given}: there is no {file}; give a folder with tokenizer.json in it, or that file"
        )
    with open(file, "rb") as opened:
        raw = opened.read(_MOST_TOKENIZER_BYTES + 1)
    try:
        model = json.loads(raw)["model"]
        is_one = len(raw) <= _MOST_TOKENIZER_BYTES and "vocab" in model
    except (ValueError, RecursionError, KeyError, TypeError):
        is_one = False
    if not is_one:
        raise typer.BadParameter(f"--tokenizer {file} is no tokenizer.json; give that of a model of Hugging Face")
    from tokenizers import Tokenizer

    from kvstore.insight.lint import Tokenised

    known = Tokenizer.from_buffer(raw)

    def tokenise(text: str) -> Tokenised:
        found = known.encode(text)
        return Tokenised(found.ids, [start for start, _ in found.offsets])

    return tokenise
