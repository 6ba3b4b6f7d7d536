"""`kvstore plan`: the size of a model's KV and what loading it saves, each number with its formula; `kvstore models`:
which engines serve which models."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvstore.block.states import DEFAULT_SHARE
from kvstore.cli.insight import read_recorded
from kvstore.cli.terminal import (
    Json,
    Shown,
    app,
    argument,
    option,
    path_option,
    print_result,
    real,
    shown_progress,
    typer,
    whole,
)
from kvstore.config import parse_rate, parse_size

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
    from kvstore.block.layout import MAX_KV_HEADS, MAX_LAYERS, MAX_PLANE_WIDTH
    from kvstore.block.pages import codec_meant
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
    from kvstore.block.layout import default_block_tokens
    from kvstore.block.pages import default_codec
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
    from rich.text import Text

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
