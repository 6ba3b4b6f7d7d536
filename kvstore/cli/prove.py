"""`kvstore prove -- ENGINE ...`: asks an engine with and without its store the same, and says who breaks what.

    the engine's words without a connector > cold, again, many at once, from its own cache
    the same with it                       > cold, own cache, store, every page boundary, at once, after an abort,
                                             after eviction, after a restart of both, with other weights
    what broke                             > once more with raw blocks, or without drafts, until one party is left

It speaks the engine's API and flags alone, so it works for other connectors too. Progress goes to standard error, and
the engine's own output to a file.
"""

import asyncio
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

from kvstore.block.errors import BadInput
from kvstore.cli import run as with_sidecar
from kvstore.cli.engines import api_key_header
from kvstore.cli.run import EngineCommand, engine_of, look_at
from kvstore.cli.terminal import (
    CHECK_FAILED,
    OK,
    Json,
    app,
    argument,
    check_folder,
    option,
    path_option,
    print_result,
    shown_progress,
    typer,
)

CODECS = ("raw", "auto", "int8-kc64")
RAW, ADMIN_SOCKET, TENANT_SOCKET = "raw", "admin.sock", "kvstore.sock"
DROP_SECONDS = 30.0
MOST_LOG_BYTES, MOST_FAULT = 64 << 10, 300
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 3600.0, 60.0, 0.2
"""Large weights take long."""
PAGE_TOKENS = 16
"""vLLM's, where --block-size says nothing else."""
VOCABULARY = 256
PLAIN = {"audit": 0, "cost_model": False, "match_deadline_ms": 10_000, "lease_deadline_ms": 10_000}
"""Settings of this store's connector, so that whatever is stored is loaded."""
CONNECTOR_FLAGS = {
    "vllm": ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend"),
    "sglang": ("--hicache-storage-backend", "--hicache-storage-backend-extra-config"),
}
DRAFT_FLAGS = ("--speculative-config",)
REPORT_FLAGS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command without these flags and their values."""
    found: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value and not word.startswith("--"):
            is_value = False
            continue
        is_value = name.replace("_", "-") in flags and not equals
        if name.replace("_", "-") not in flags:
            found.append(word)
    return found


def has_flag(words: Sequence[str], flags: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in flags for word in words)


class Sides(NamedTuple):
    """What the trials need. scratch: of this proof. tell: progress."""

    engine: EngineCommand
    scratch: Path
    tell: Callable[[str], None]

    @asynccontextmanager
    async def running(self, name: str, words: Sequence[str]) -> AsyncIterator[Any]:
        """The engine from its health on to its end. Raises `BadInput` with its last line if it does not come up."""
        from kvstore.prove.asking import RESET, RESETS, AskedEngine, answers_health

        report = REPORT_FLAGS.get(self.engine.engine)
        more = [report] if report is not None and not has_flag(words, [report]) else []
        port = with_sidecar.free_port(0)
        log = self.scratch / f"{name}.log"
        self.tell(f"{name}: starting the engine")
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [*without(words, ["--port"]), "--port", str(port), *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
                preexec_fn=_ends_with_this,
            )
        try:
            host = with_sidecar.value_of(words, "--host") or "127.0.0.1"
            url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
            ends_at = time.monotonic() + START_SECONDS
            while not await answers_health(url):
                if process.poll() is not None or time.monotonic() > ends_at:
                    ended = f"ended with status {process.poll()}" if process.poll() is not None else "did not come up"
                    raise BadInput(f"the engine, {name}, {ended}: {_fault_in(log)}")
                await asyncio.sleep(POLL_SECONDS)
            async with AskedEngine(url, reset=RESETS.get(self.engine.engine, RESET)) as asked:
                yield asked
        finally:
            _end_group(process)


def _fault_in(log: Path) -> str:
    """The first error in its last lines, which what follows comes from; or its last line."""
    lines = log.read_bytes()[-MOST_LOG_BYTES:].decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if re.search(r"\w(Error|Exception): ", line)), lines[-1])[-MOST_FAULT:]


def _ends_with_this() -> None:
    ctypes.CDLL(None).prctl(with_sidecar.PARENT_DEATH, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The engine, and what it has started."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


class ProvenStore:
    """A sidecar of this proof's own. A context manager, which ends it."""

    def __init__(self, data: Path, words: Sequence[str]) -> None:
        """words: of `kvstore serve`."""
        self._data, self._words = data, words
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix:{self._data / TENANT_SOCKET}"

    def __enter__(self) -> "ProvenStore":
        console = f"127.0.0.1:{with_sidecar.free_port(0)}"
        socket = str(self._data / TENANT_SOCKET)
        self._process = with_sidecar.started(self._words, console, socket, _ends_with_this).process
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with_sidecar.ended(self._process)

    def restart(self) -> None:
        """In order: what it has then is what was on NVMe."""
        self.__exit__()
        self.__enter__()

    def evict_all(self) -> None:
        """Drop every namespace."""
        from kvstore.cli import ask
        from tiering.clock import SystemClock

        clock, socket = SystemClock(), str(self._data / ADMIN_SOCKET)
        for one in ask.stat(socket, clock).namespaces:
            ask.drop(socket, clock, one.digest, one.tenant, DROP_SECONDS)


async def of_words(sides: Sides, trials: Any, store: ProvenStore | None, codec: str) -> Any:
    """All trials of an engine that is started here. store: of this proof's own; None for another connector's."""
    from kvstore.prove.judge import FROM_THE_STORE, Reference, Way
    from kvstore.prove.proof import Proof
    from kvstore.prove.weights import with_other_weights

    engine, words = sides.engine, sides.engine.words
    model = Path(engine.model)
    link = sides.scratch / "model"

    def point(to: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(to)

    if model.is_dir():  # always by one name, behind which the weights can be changed
        point(model.resolve())
        words = [str(link) if word == engine.model else word for word in words]
        words = [f"--model={link}" if word == f"--model={engine.model}" else word for word in words]
    alone = without(words, CONNECTOR_FLAGS.get(engine.engine, ()))

    def stored(words: Sequence[str], codec: str) -> list[str]:
        if store is None:
            return list(words)
        return engine._replace(words=list(words)).with_store(store.url, **PLAIN, codec=codec)

    async with sides.running("the engine alone", alone) as asked:
        await trials.prepare(asked)
        answers, drafts = await trials.alone(asked)
    reference = Reference(answers, trials.lengths)
    async with sides.running("with the store", stored(words, codec)) as asked:
        ways, shares = await trials.stored(asked)
        if store is not None:
            store.evict_all()
            ways[Way.EVICTED] = await trials.again(asked, Way.EVICTED)
            await trials.from_store(asked, Way.STORE)  # so that there is something to find after a restart
    if store is not None:
        store.restart()
    async with sides.running("after a restart", stored(words, codec)) as asked:
        ways[Way.RESTARTED] = await trials.again(asked, Way.RESTARTED)
    if model.is_dir() and with_other_weights(model, sides.scratch / "other"):
        point(sides.scratch / "other")
        async with sides.running("with other weights", stored(words, codec)) as asked:
            ways[Way.OTHER_WEIGHTS] = await trials.again(asked, Way.OTHER_WEIGHTS)
        point(model.resolve())
    if any([reference.compared(ways[way]).broken for way in FROM_THE_STORE if way in ways]):
        narrower = {}
        if store is not None and codec != RAW:
            narrower[Way.RAW] = stored(words, RAW)
        if has_flag(words, DRAFT_FLAGS):
            narrower[Way.WITHOUT_DRAFTS] = stored(without(words, DRAFT_FLAGS), codec)
        for way, changed in narrower.items():
            async with sides.running(str(way), changed) as asked:
                await trials.again(asked, way)
                ways[way] = await trials.from_store(asked, way)
    return Proof.of(reference, ways, codec if store is not None else "", shares, drafts)


async def of_url(asked: Any, trials: Any) -> Any:
    """All trials of an engine that runs, which is neither ended nor restarted."""
    from kvstore.prove.judge import Reference
    from kvstore.prove.proof import Proof

    await trials.prepare(asked)
    reference = Reference(await trials.salted(asked), trials.lengths)
    ways, shares = await trials.stored(asked)
    return Proof.of(reference, ways, "", shares, None)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def prove(
    command: Annotated[
        list[str] | None, argument("-- ENGINE...", "vllm serve MODEL ..., with a connector of its own or none")
    ] = None,
    url: Annotated[str | None, option("URL", "An engine that runs, with its store, in place of a command.")] = None,
    transformers: Annotated[str | None, path_option("DIR", "A model for transformers, in place of a command.")] = None,
    reset: Annotated[str, option("PATH", "The route of --url that empties the engine's own cache.")] = "",
    api_key_file: Annotated[str | None, path_option("FILE", "Its first line is sent to --url as its key.")] = None,
    prompts: Annotated[int, option("N", "Asked in each way.", min=2, max=1000)] = 20,
    longest: Annotated[int, option("TOKENS", "The longest prompt.", min=64, max=1 << 20)] = 1024,
    codec: Annotated[str, option("CODEC", "Of this store: raw keeps every bit; auto is what run takes.")] = RAW,
    dram: Annotated[str | None, option("SIZE", "Memory of this store. A fourth of what is free if left out.")] = None,
    nvme: Annotated[str | None, option("SIZE", "Its disk space, or off. A fourth of what is free.")] = None,
    page: Annotated[str | None, path_option("FILE", "Also write the report as one page of HTML.", "--html")] = None,
    as_json: Json = False,
) -> int:
    """Prove that an engine answers the same with its store as without: kvstore prove -- vllm serve MODEL.

    It asks cold, from the engine's own cache, from the store, at every page boundary, at once, after aborts, eviction
    and a restart, and with other weights, compares tokens and log probabilities with the engine alone, and says who
    broke what. Without a connector in the command it proves this store. Status 1: the store or a connector broke one.
    """
    from kvstore.openai.client import checked_url
    from kvstore.prove.asking import RESET, AskedEngine
    from kvstore.prove.trials import Trials

    if sum([bool(one) for one in (command, url, transformers)]) != 1:
        raise typer.BadParameter("give one of: -- and the engine's command, --url URL, --transformers DIR")
    if reset and url is None:
        raise typer.BadParameter("--reset belongs to --url; leave it out")
    if codec not in CODECS:
        raise typer.BadParameter(f"--codec {codec[:40]!r}; allowed: {', '.join(CODECS)}")
    if page is not None:
        check_folder("--html", page)
    with shown_progress() as show, TemporaryDirectory(prefix="kv-") as scratch:
        if url is not None:
            trials = Trials(prompts, longest, PAGE_TOKENS, VOCABULARY, show)
            engine = AskedEngine(checked_url(url, "--url"), api_key_header(api_key_file), reset or RESET)
            proof = asyncio.run(_of_url(engine, trials))
        else:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends too
            words = of_transformers(transformers) if transformers else engine_of(command or [], allows_store=True)
            look_at(words)
            trials = Trials(prompts, longest, page_tokens_of(words), vocabulary_of(words), show)
            sides = Sides(words, Path(scratch), show)
            data = Path(scratch) / "kv"
            is_ours = not has_flag(words.words, CONNECTOR_FLAGS.get(words.engine, ()))
            store = ProvenStore(data, with_sidecar.serve_words(str(data), dram, nvme)) if is_ours else None
            with store or nullcontext():
                proof = asyncio.run(of_words(sides, trials, store, codec))
    proof = replace(proof, words=url or transformers or shlex.join(command or []))
    print_result(proof, as_json)
    if page is not None:
        Path(page).write_text(proof.page(), "utf-8")
    return OK if proof.is_held else CHECK_FAILED


async def _of_url(engine: Any, trials: Any) -> Any:
    async with engine as asked:
        return await of_url(asked, trials)


def of_transformers(model: str) -> EngineCommand:
    """Raises `BadInput`."""
    if not (Path(model) / "config.json").is_file():
        raise BadInput(f"--transformers {model}: no config.json is there; give the directory of a model")
    words = [sys.executable, "-P", "-m", "kvstore.demo.completions", "--model", model]
    return EngineCommand(with_sidecar.TRANSFORMERS, sys.executable, model, words)


def page_tokens_of(engine: EngineCommand) -> int:
    given = with_sidecar.value_of(engine.words, "--block-size") or with_sidecar.value_of(engine.words, "--page-size")
    return int(given) if given and given.isascii() and given.isdigit() and 0 < int(given) <= 256 else PAGE_TOKENS


def vocabulary_of(engine: EngineCommand) -> int:
    """Token ids that a model surely has."""
    try:
        told = json.loads((Path(engine.model) / "config.json").read_text("utf-8"))
        return max(VOCABULARY, int(told.get("text_config", told)["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError):
        return VOCABULARY
