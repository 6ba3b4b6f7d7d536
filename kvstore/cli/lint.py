"""`kvstore lint`: finds where the prompts of a file part needlessly."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from kvstore.block.errors import BadInput
from kvstore.cli.terminal import (
    CHECK_FAILED,
    Json,
    app,
    lines_of,
    option,
    path_argument,
    path_option,
    print_result,
    real,
    shown_progress,
    typer,
    whole,
)

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
