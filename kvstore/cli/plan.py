"""`kvstore plan`: the size of a model's KV and what loading it saves, each number with its formula."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvstore.block.states import DEFAULT_SHARE
from kvstore.cli.models import model_of_file
from kvstore.cli.terminal import (
    Json,
    app,
    argument,
    lines_of,
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
    model: Annotated[str | None, argument("[MODEL]", "A model of the table (--models), such as llama-3.1-8b.")] = None,
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
    from kvstore.block.payload import codec_meant
    from kvstore.insight import models as known
    from kvstore.insight import plan as plans

    if models:
        from kvstore.console.planning import models_of_table

        return print_result(_ModelList(known.MODELS.values(), models_of_table(), plans.models_table), as_json)
    described = [one for one in (layers, kv_heads, head_dim) if one is not None]
    if (model is not None) + (config is not None) + bool(described) != 1:
        raise typer.BadParameter(
            "give a model, such as kvstore plan llama-3.1-8b, or --config FILE, or --layers, --kv-heads and "
            "--head-dim; one of the three"
        )
    if model is not None:
        chosen = known.model_named(model)
    elif config is not None:
        chosen = model_of_file(Path(config))
    else:
        if layers is None or kv_heads is None or head_dim is None:
            raise typer.BadParameter("a described model needs all of --layers, --kv-heads and --head-dim")
        most = 1 << 24
        chosen = known.described(
            whole(layers, "--layers", 1, most),
            whole(kv_heads, "--kv-heads", 1, most),
            whole(head_dim, "--head-dim", 1, most),
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
        from kvstore.insight.trace import MOST_TOKENS, read_trace
        from kvstore.node import build_replay

        path = Path(trace)
        if path.is_dir():
            raise typer.BadParameter(f"--trace {path} is a folder; give a file in it")
        size = whole(block_tokens, "--block-tokens", 1, MOST_TOKENS - 1) if block_tokens is not None else None
        with shown_progress() as show:
            show(f"reading {path}")
            with lines_of(path) as lines:
                read = read_trace(path.name, lines, size)
            request = plans.PlanRequest(**options, trace=plans.measure(request, read, build_replay, show))
    return print_result(plans.plan(request), as_json)


class _ModelList:
    """The models of the table, as the console lists them. table: makes the one for people."""

    def __init__(self, models: Collection[Any], listed: Sequence[Any], table: Any) -> None:
        self._models, self._listed, self._table = models, listed, table

    def to_dict(self) -> dict[str, object]:
        return {"models": msgspec.to_builtins(self._listed)}

    def render(self, console: Any) -> None:
        console.print(self._table(self._models))


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
