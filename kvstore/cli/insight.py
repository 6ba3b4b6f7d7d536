"""`kvstore replay`, `whatif`: recorded requests through the store's tables, or what comes of that, estimated. `lint`:
where the prompts of a file part needlessly. `plan`: the size of a model's KV and what loading it saves, each number
with its formula. `models`: which engines serve which models."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.text import Text

import kvstore
from kvstore.block.errors import BadInput
from kvstore.block.layout import MAX_KV_HEADS, MAX_LAYERS, MAX_PLANE_WIDTH, default_block_tokens
from kvstore.block.pages import codec_meant, default_codec
from kvstore.block.states import DEFAULT_SHARE
from kvstore.cli.terminal import (
    CHECK_FAILED,
    Json,
    Shown,
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
from kvstore.config import DEFAULT_POLICY, POLICIES, REMOVED_POLICY, checked_policy, expanded, parse_rate, parse_size
from tiering.clock import SystemClock

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
    draw = _plotter("draw_replay", "--plot", plot, ".png", ".svg", ".pdf")
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
    draw = _plotter("draw_whatif", "--svg", svg, ".svg")
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


def _plotter(name: str, flag: str, file: str | None, *kinds: str) -> Callable[[Any], None] | None:
    """Draws a result with that function of `plots`. Raises now for what would fail after the work."""
    if file is None:
        return None
    if Path(file).suffix.lower() not in kinds:
        allowed = f"{', '.join(kinds[:-1])} or {kinds[-1]}" if kinds[1:] else kinds[0]
        raise typer.BadParameter(f"{flag} {file}: give a name that ends in {allowed}")
    check_folder(f"{flag} {file}", file)
    is_new = not os.path.lexists(file)
    with open(file, "ab"):  # fails now, before any work, if it cannot be written
        pass
    if is_new:
        os.unlink(file)
    from kvstore.insight import plots

    draw = getattr(plots, name)
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


# `kvstore plan`, `kvstore models` -----------------------------------------------------------------------------------

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-z]*)\s*")


@app.command()
def plan(
    model: Annotated[str | None, argument("[MODEL]", "A model of the table (--models), or a directory of one.")] = None,
    config: Annotated[str | None, path_option("FILE", "Or the config.json of a model of Hugging Face.")] = None,
    layers: Annotated[str | None, option("N", "Or a model as described: its layers,")] = None,
    kv_heads: Annotated[str | None, option("N", "the KV heads of a layer,")] = None,
    head_dim: Annotated[str | None, option("N", "and the numbers of a head.")] = None,
    dtype: Annotated[str, option("NAME", "Of the engine's KV pool. The model's own if left out.")] = "",
    codec: Annotated[str, option("NAME", "Of the store: int8-kc64 or raw. int8-kc64 where it can be.")] = "",
    block: Annotated[str, option("N", "Tokens of a block.")] = "64",
    tensor_parallel: Annotated[str, option("N", "GPUs that share the model.")] = "1",
    context: Annotated[str, option("N", "Tokens of a user's prompt and answer.")] = "8192",
    gpu_memory: Annotated[str, option("SIZE", "Of one GPU: how many users fit beside the weights.")] = "0",
    weights: Annotated[str, option("SIZE", "Of the whole model, such as 16GB.")] = "0",
    activations: Annotated[str, option("SIZE", "What else the engine takes of each GPU.")] = "1GiB",
    utilisation: Annotated[str, option("SHARE", "Of the GPU's memory that the engine may take.")] = "0.9",
    users: Annotated[str, option("N", "For the longest context that so many can have.")] = "1",
    window: Annotated[str, option("TIME", "How long KV is to be reused, such as 15m, 24h or 7d.")] = "15m",
    new_tokens_per_second: Annotated[
        str | None, option("N", "Tokens that no cache has yet: sizes of DRAM and NVMe.")
    ] = None,
    dram: Annotated[str, option("SIZE", "What there is of DRAM.")] = "0",
    nvme: Annotated[str, option("SIZE", "What there is of NVMe.")] = "0",
    prefill_rate: Annotated[str, option("N", "Tokens per second of a short prompt in your engine.")] = "10000",
    dram_speed: Annotated[str | None, option("RATE", "From DRAM to one GPU, or off. 12GB/s if left out.")] = None,
    dram_overhead: Annotated[str | None, option("MS", "Of each load from it. 2 if left out.")] = None,
    nvme_speed: Annotated[str | None, option("RATE", "From NVMe to all GPUs, or off. 3GB/s if left out.")] = None,
    nvme_overhead: Annotated[str | None, option("MS", "Of each load from it. 5 if left out.")] = None,
    state_share: Annotated[
        str, option("SHARE", "Bytes of recurrent states between the ends of prompts, of the KV's.")
    ] = str(DEFAULT_SHARE),
    trace: Annotated[
        str | None, path_option("FILE", "Take rates and hit rates from a recording (kvstore record).")
    ] = None,
    block_tokens: Annotated[str | None, option("N", "Of the recording's blocks. Found out if left out.")] = None,
    models: Annotated[bool, typer.Option("--models", help="List the models of the table, and leave.")] = False,
    as_json: Json = False,
) -> int:
    """How much memory a model's KV takes in an engine and in this store, what fits, and from which prefix on loading is
    faster than computing. Each number comes with its formula.

    Nothing is measured here: speeds are those that you give, or assumed ones, and the output says which.
    """
    from kvstore.insight import models as known
    from kvstore.insight import plan as plans

    if models:
        from kvstore.console.planning import models_of_table

        told = {"models": msgspec.to_builtins(models_of_table())}
        return print_result(Shown(told, [plans.models_table(known.MODELS.values())]), as_json)
    described = [one for one in (layers, kv_heads, head_dim) if one is not None]
    if (model is not None) + (config is not None) + bool(described) != 1:
        raise typer.BadParameter(
            "give a model, such as kvstore plan llama-3.1-8b, or --config FILE, or --layers, --kv-heads and "
            "--head-dim; one of the three"
        )
    if model is not None:
        chosen = given_model(model)
    elif config is not None:
        chosen = model_of_file(Path(config))
    else:
        if layers is None or kv_heads is None or head_dim is None:
            raise typer.BadParameter("a described model needs all of --layers, --kv-heads and --head-dim")
        chosen = known.described(
            whole(layers, "--layers", 1, MAX_LAYERS),
            whole(kv_heads, "--kv-heads", 1, MAX_KV_HEADS),
            whole(head_dim, "--head-dim", 1, MAX_PLANE_WIDTH),
        )
    if trace is not None and new_tokens_per_second is not None:
        raise typer.BadParameter("--trace says how many new tokens come; leave --new-tokens-per-second out")
    positive = "give a number, 0 or more"
    tiers = [
        _tier(plans.ASSUMED_TIERS[0], dram_speed, dram_overhead),
        _tier(plans.ASSUMED_TIERS[1], nvme_speed, nvme_overhead),
    ]
    options: dict[str, Any] = {
        "model": chosen,
        "dtype": dtype,
        "codec": codec_meant(codec),
        "block_tokens": whole(block, "--block", 1, 4096),
        "tensor_parallel": whole(tensor_parallel, "--tensor-parallel", 1, 4096),
        "context_tokens": whole(context, "--context", 1, (1 << 31) - 1),
        "gpu_memory_bytes": parse_size(gpu_memory, "--gpu-memory"),
        "weights_bytes": parse_size(weights, "--weights"),
        "activation_bytes": parse_size(activations, "--activations"),
        "utilisation": real(utilisation, "--utilisation", "give a share of the GPU's memory, above 0 to 1"),
        "users": whole(users, "--users", 1, (1 << 31) - 1),
        "window_seconds": _seconds(window),
        "new_tokens_per_second": real(new_tokens_per_second or "0", "--new-tokens-per-second", positive),
        "dram_bytes": parse_size(dram, "--dram"),
        "nvme_bytes": parse_size(nvme, "--nvme"),
        "prefill_rate": real(prefill_rate, "--prefill-rate", "give tokens per second, 0.001 or more"),
        "state_share": real(state_share, "--state-share", "give the bytes of states for each byte of KV, 0 or more"),
        "tiers": tuple(one for one in tiers if one is not None),
    }
    request = plans.PlanRequest(**options)
    if trace is not None:
        path = Path(trace)
        if path.is_dir():
            raise typer.BadParameter(f"--trace {path} is a folder; give a file in it")
        with shown_progress() as show:
            read = read_recorded(path, path.name, block_tokens, show)
            request = plans.PlanRequest(**options, trace=plans.measure(request, read, show))
    return print_result(plans.plan(request), as_json)


def _tier(assumed: Any, speed: str | None, overhead_ms: str | None) -> Any:
    name = assumed.name
    rate = assumed.bytes_per_second if speed is None else parse_rate(speed, f"--{name}-speed")
    seconds = assumed.overhead_seconds
    if overhead_ms is not None:
        seconds = real(overhead_ms, f"--{name}-overhead", "give milliseconds, 0 or more") / 1000
    if not rate:
        return None
    return type(assumed)(name, rate, seconds, assumed.is_per_gpu, speed is None)


def _seconds(given: str) -> float:
    found = _SPAN.fullmatch(given.lower())
    if found is None or found.group(2) not in _UNITS:
        raise typer.BadParameter(f"--window {given[:40]!r}; give a time, such as 900s, 15m, 24h or 7d")
    return float(found.group(1)) * _UNITS[found.group(2)]


@app.command()
def models(
    model: Annotated[
        str | None, argument("[MODEL]", "A model of the table, a directory with a config.json, or such a file.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write the page docs/models.md.")] = False,
    as_json: Json = False,
) -> int:
    """Which models each engine's adapter serves, and why not; of one model, or of the whole table.

    The adapters ask the same function when an engine starts. It knows a model's kinds of KV, and takes an engine's
    settings as they are by themselves.
    """
    from kvstore.insight.models import MODELS

    rows = [row_of(given_model(model))] if model is not None else [row_of(one) for one in MODELS.values()]
    if markdown:
        print(page(rows), end="")
        return 0
    return print_result(Shown({"models": msgspec.to_builtins(rows)}, _served_lines(rows)), as_json)


def given_model(given: str) -> Any:
    """By its name, or by the place of its config.json. Raises `BadInput`."""
    from kvstore.insight.models import model_named

    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "config.json"
    return model_of_file(path) if path.is_file() else model_named(given)


def model_of_file(path: Path) -> Any:
    """Raises `BadInput`, `OSError`."""
    from kvstore.insight.models import MOST_CONFIG_BYTES, model_of_config

    with open(path, "rb") as opened:
        raw = opened.read(MOST_CONFIG_BYTES + 1)
    if len(raw) > MOST_CONFIG_BYTES:
        raise typer.BadParameter(f"{path}: more than {MOST_CONFIG_BYTES} bytes; give the config.json of a model")
    return model_of_config(str(path), raw.decode("utf-8", "replace"))


@dataclass(frozen=True)
class ServedRow:
    """block_tokens, codec: vLLM's, with as few ranks as serve the model."""

    model: str
    kinds: tuple[str, ...]
    bytes_per_token: int
    state_bytes: int
    block_tokens: int
    codec: str
    engines: dict[str, Any]


def row_of(model: Any) -> ServedRow:
    from kvstore.insight.models import KvKind
    from kvstore.insight.plan import PlanRequest, layout_of
    from kvstore.insight.served import Engine, served, vllm_page_tokens

    block = default_block_tokens(vllm_page_tokens(model))
    return ServedRow(
        model.name,
        tuple(str(kind) for kind in KvKind if kind in model.kinds),
        model.bytes_per_token(model.dtype),
        model.state_bytes,
        block,
        default_codec(layout_of(PlanRequest(model, block_tokens=block))),
        {engine: served(model, engine) for engine in Engine},
    )


def _served_lines(rows: Sequence[ServedRow]) -> list[Any]:
    from kvstore.insight.replay import headed

    engines = list(rows[0].engines)
    table = headed(f"model|kinds|*B per token|*state|*block|codec|{'|'.join(engines)}")
    for row in rows:
        table.add_row(*map(Text, (*_figures(row), *(str(one.verdict) for one in row.engines.values()))))
    lines: list[Any] = [table]
    for engine in engines:
        for line, names in reasons(rows, engine).items():
            who = "" if len(rows) == 1 else f" ({', '.join(names)})"
            lines.append(f"{engine}: {line}{who}.")
    return lines


def reasons(rows: Sequence[ServedRow], engine: str) -> dict[str, list[str]]:
    """Of all that is not wholly served, by what is said of it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if line := row.engines[engine].line:
            found.setdefault(f"{row.engines[engine].verdict.words}: {line}", []).append(row.model)
    return found


def _figures(row: ServedRow) -> tuple[str, ...]:
    from kvstore.config import format_size

    state = format_size(row.state_bytes) if row.state_bytes else "-"
    return row.model, ", ".join(row.kinds), f"{row.bytes_per_token:,}", state, f"{row.block_tokens:,}", row.codec


# docs/models.md --------------------------------------------------------------------------------------------------

_HEAD = """# Which models are served

For those who ask whether their model is served before they install anything. `kvstore models --markdown` writes this
page; `kvstore models` prints the same of one model, by its name or by a directory with its config.json. Engines'
adapters ask the same function when they start, and refuse in the same words.

"""
_KEY = """
A block is vLLM's, with the fewest ranks that serve the model: 64 tokens, or with recurrent states as many as vLLM's
page has. *Partly* is some of its prompts, or with other settings of the engine; what to do is here:

"""


def page(rows: Sequence[ServedRow]) -> str:
    from kvstore.insight.models import KvKind
    from kvstore.insight.served import KIND_WORDS, SINCE, TRIED, Engine, shapes

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    def head(cells: Sequence[str]) -> str:
        return line(cells) + line(["---"] * len(cells)).replace(" ", "")

    text = _HEAD + "## By kind of KV\nFrom which version on, and what of the engine ran with it on a CPU.\n\n"
    text += head(["kind", *Engine])
    for kind in KvKind:
        cells = (
            f"{SINCE[engine][kind]}, {TRIED[engine][kind]}" if kind in SINCE[engine] else "refused" for engine in Engine
        )
        text += line([f"{kind}: {KIND_WORDS[kind]}", *cells])
    text += "\n## Models of the table\n"
    text += head(["model", "kinds", "KV bytes a token", "state of a sequence", "block", "codec", *Engine])
    for row in rows:
        text += line([*_figures(row), *(str(row.engines[engine].verdict) for engine in Engine)])
    text += _KEY
    for engine in Engine:
        for said, names in reasons(rows, engine).items():
            text += f"- {engine}, {said} ({len(names)}: {', '.join(names)})\n"
    text += "\n## Architectures in transformers\n" + head(["kinds", "architectures", "transformers"])
    by_kinds: dict[tuple[str, str], list[str]] = {}
    for name, kinds, answer in shapes():
        verdict = ": ".join(filter(None, (str(answer.verdict), answer.reason)))
        by_kinds.setdefault((", ".join(one for one in KvKind if one in kinds), verdict), []).append(name)
    for (found, verdict), names in by_kinds.items():
        text += line([found, "; ".join(names), verdict])
    return text
