"""`kvstore models`: which engines serve which models, from `kvstore.insight.served` alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from kvstore.cli.terminal import Json, app, argument, print_result, typer


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
    return print_result(ServedTable(rows), as_json)


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
    """block_tokens, codec: vLLM's, with as few ranks as serve the model. answers: by engine."""

    model: str
    kinds: tuple[str, ...]
    bytes_per_token: int
    state_bytes: int
    block_tokens: int
    codec: str
    answers: dict[str, Any]

    def to_dict(self) -> dict[str, object]:
        answers = {
            str(engine): {"verdict": str(one.verdict), "reason": one.reason, "remedy": one.remedy}
            for engine, one in self.answers.items()
        }
        own = ("model", "kinds", "bytes_per_token", "state_bytes", "block_tokens", "codec")
        return {**{name: getattr(self, name) for name in own}, "engines": answers}


def row_of(model: Any) -> ServedRow:
    from kvstore.block.layout import default_block_tokens
    from kvstore.block.payload import default_codec
    from kvstore.insight.models import KvKind
    from kvstore.insight.plan import PlanRequest, layout_of
    from kvstore.insight.served import Engine, ranks_that_fit, served, vllm_page_tokens

    block = default_block_tokens(vllm_page_tokens(model, ranks_that_fit(model) or 1))
    return ServedRow(
        model.name,
        tuple(str(kind) for kind in KvKind if kind in model.kinds),
        model.bytes_per_token(model.dtype),
        model.state_bytes,
        block,
        default_codec(layout_of(PlanRequest(model, block_tokens=block))),
        {engine: served(model, engine) for engine in Engine},
    )


class ServedTable:
    def __init__(self, rows: Sequence[ServedRow]) -> None:
        self._rows = rows

    def to_dict(self) -> dict[str, object]:
        return {"models": [row.to_dict() for row in self._rows]}

    def render(self, console: Any) -> None:
        from rich.text import Text

        from kvstore.insight.replays import headed

        engines = list(self._rows[0].answers)
        table = headed(f"model|kinds|*B per token|*state|*block|codec|{'|'.join(engines)}")
        for row in self._rows:
            verdicts = (str(one.verdict) for one in row.answers.values())
            table.add_row(*map(Text, (*_figures(row), *verdicts)))
        console.print(table)
        for engine in engines:
            for line, names in reasons(self._rows, engine).items():
                who = "" if len(self._rows) == 1 else f" ({', '.join(names)})"
                console.print(Text(f"{engine}: {line}{who}."), soft_wrap=True)


def reasons(rows: Sequence[ServedRow], engine: str) -> dict[str, list[str]]:
    """Of all that is not wholly served, by what is said of it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if line := row.answers[engine].line:
            found.setdefault(f"{row.answers[engine].verdict.words}: {line}", []).append(row.model)
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
        text += line([*_figures(row), *(str(row.answers[engine].verdict) for engine in Engine)])
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
