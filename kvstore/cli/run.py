"""`kvstore run -- ENGINE ...`: an engine with the store beside it, by one command.

    the engine's words > which engine, which Python, which model > a sidecar that answers, or one of its own
                       > the engine, with one flag more > each minute what was saved > the engine's exit status

The engine has this process's standard streams and its signals. All lines of this command go to standard error.
"""

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from kvstore.block.errors import BadInput, StoreError
from kvstore.cli.insight import given_model
from kvstore.cli.plain import sidecar_settings
from kvstore.cli.standard_streams import say
from kvstore.cli.terminal import OK, Json, app, argument, option, path_option, typer
from kvstore.config import MIN_DRAM_BYTES, MIN_NVME_BYTES, OFF, format_size

RUN_SOCKET = "/run/kvstore/kvstore.sock"
"""Of a host's sidecar, as README starts it."""
LOG = "run.log"
CONSOLE, CONSOLE_PORT = "KVSTORE_CONSOLE_LISTEN", 9798
SHARE = 4
"""Of the free memory and disk space a fourth is taken: the engine, whose host this is, wants some too."""
ANSWER_SECONDS, START_SECONDS, STOP_SECONDS, POLL_SECONDS = 2.0, 120.0, 60.0, 0.05
EVERY_SECONDS = 60.0
LEAST_PAGE_TOKENS = 64
TRANSFORMERS = "transformers"
MODULES = {"vllm.entrypoints.openai.api_server": "vllm", "sglang.launch_server": "sglang"}
FROM_THE_KERNEL = 128
"""SI_KERNEL: a terminal sent the signal, to all processes in its foreground."""
PARENT_DEATH = 1
"""PR_SET_PDEATHSIG."""
HANDED_ON = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
_ASK = """
import importlib.metadata, importlib.util, json, sys
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""
engine = sys.argv[1]
print(json.dumps([importlib.util.find_spec("engine_adapter") is not None, importlib.util.find_spec(engine) is not None,
                  version(engine, engine + "-cpu")]))
"""


class EngineCommand(NamedTuple):
    """What starts an engine. python: the interpreter that runs it. model: a directory or a name of the Hub; empty where
    none is named."""

    engine: str
    python: str
    model: str
    words: list[str]

    def with_store(self, url: str, **settings: Any) -> list[str]:
        """The same with the store at `url`. settings: more, of vLLM's connector."""
        if self.engine == "vllm":
            return [*self.words, "--kv-transfer-config", json.dumps(transfer_config(url, **settings))]
        if self.engine == TRANSFORMERS:
            return [*self.words, "--store", url, "--codec", settings["codec"]]
        backend = {"backend_name": "kvstore", "module_path": "engine_adapter.sglang_storage"}
        backend |= {"class_name": "KvStoreHiCache", "url": url}
        more = {"interface_v1": 1, "hicache_storage_pass_prefix_keys": True}
        words = [*self.words, "--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
        if value_of(self.words, "--page-size") is None:
            words += ["--page-size", str(LEAST_PAGE_TOKENS)]
        return [*words, "--hicache-storage-backend-extra-config", json.dumps({**backend, **more})]


def transfer_config(url: str, **settings: Any) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config`."""
    return {
        "kv_connector": "KvStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, **settings},
    }


def engine_of(words: Sequence[str], *, allows_store: bool = False) -> EngineCommand:
    """Raises `BadInput` for what starts no engine that is known, or, unless that is allowed, has a store already."""
    program = Path(words[0]).name if words else ""
    found = shutil.which(words[0]) if words else None
    at = words.index("-m") if program.startswith("python") and "-m" in words else None
    module = "".join(words[at + 1 : at + 2]) if at is not None else ""
    if module in MODULES:
        engine = MODULES[module]
    elif program in MODULES.values() and words[1:2] == ["serve"]:
        engine = program
    else:
        raise BadInput(
            f"{shlex.join(words)[:80] or 'no command'}: this starts no engine that is known; give vllm serve MODEL "
            f"..., or python -m MODULE with {' or '.join(MODULES)}"
        )
    if found is None:
        raise BadInput(f"{words[0]} is not found; give the path of the engine's program")
    taken = "--kv-transfer-config" if engine == "vllm" else "--hicache-storage-backend"
    if not allows_store and any(word.replace("_", "-").startswith(taken) for word in words):
        raise BadInput(f"{taken} is given: the engine has a store already; leave it out, or start the engine by itself")
    rest = list(words[at + 2 if at is not None else 2 :])
    model = value_of(rest, "--model-path") or value_of(rest, "--model")
    if model is None and at is None and rest and not rest[0].startswith("-"):
        model = rest[0]
    python = _interpreter_of(Path(found)) if at is None else found
    return EngineCommand(engine, python, model or "", list(words))


def value_of(words: Sequence[str], flag: str) -> str | None:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else "".join(words[at + 1 : at + 2])
    return None


def _interpreter_of(script: Path) -> str:
    """Of an installed program: the one that its first line names, or that lies beside it."""
    with open(script, "rb") as opened:
        first = opened.readline(4096)
    named = os.fsdecode(first[2:].strip().split(b" ")[0]) if first.startswith(b"#!") else ""
    if Path(named).name.startswith("python") and os.access(named, os.X_OK):
        return named
    return str(script.resolve().parent / "python3")


def look_at(engine: EngineCommand) -> str:
    """The version of the engine that its Python has. Raises `BadInput` where it lacks that, or this package."""
    name, python = engine.engine, engine.python
    try:
        asked = subprocess.run([python, "-P", "-c", _ASK, name], capture_output=True, timeout=START_SECONDS)
        has_store, has_engine, version = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{python} does not run ({' '.join(str(error).split())[:200]}); give the engine's own") from None
    if not has_engine:
        raise BadInput(f"{python} has no {name}; give the Python of an environment that has it")
    if not has_store:
        raise BadInput(f"{python} has {name} and not this store's adapter; run: {python} -m pip install prefix-kvstore")
    return str(version)


def model_of(engine: EngineCommand, version: str) -> Any:
    """What is known of its model's KV, or None. Raises `BadInput` for one that the adapter refuses."""
    from kvstore.insight.served import Engine, Verdict, served

    folder = engine.model
    if not Path(folder).is_dir():
        cache = os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME', '~/.cache/huggingface')}/hub"
        named = Path(cache).expanduser() / f"models--{folder.replace('/', '--')}" / "snapshots"
        folder = str(next(iter(sorted(named.glob("*/config.json"))), ""))
    try:
        model = given_model(folder) if folder else None
    except (BadInput, OSError):
        return None
    if model is not None:
        answer = served(model, Engine.VLLM if engine.engine == "vllm" else Engine.SGLANG, version)
        if answer.verdict is Verdict.REFUSED:
            raise BadInput(f"{engine.engine} with {engine.model} is refused: {answer.line}")
    return model


# A sidecar -----------------------------------------------------------------------------------------------------------


def answers(path: str) -> bool:
    """Whether a sidecar listens there."""
    from kvstore.client.framing import FramedSocket
    from tiering.clock import SystemClock

    with suppress(StoreError, OSError):
        FramedSocket(path, "kvstore run", b"", SystemClock(), ANSWER_SECONDS).close()
        return True
    return False


def serve_words(data: str, dram: str | None, nvme: str | None) -> list[str]:
    """Of `kvstore serve`. Sizes that are not given are a fourth of what is free now."""
    from kvstore.doctor import existing, free_bytes
    from kvstore.node import memory_here
    from tiering.nvme.slab_files import disk_room

    if dram is None and "KVSTORE_STORE_DRAM" not in os.environ:
        dram = str(max(MIN_DRAM_BYTES, free_bytes(memory_here()) // SHARE))
    if nvme is None and "KVSTORE_STORE_NVME" not in os.environ:
        room = disk_room(existing(Path(data))) // SHARE
        nvme = str(room) if room >= MIN_NVME_BYTES else OFF
    sizes = {"--dram": dram, "--nvme": nvme}
    return ["serve", "--data", data, *(word for flag, one in sizes.items() if one is not None for word in (flag, one))]


def lacking(words: Sequence[str], url: str, engine: EngineCommand) -> list[str]:
    """What `kvstore doctor` finds missing, a line each. words: of a sidecar that is to start; empty: of the engine."""
    from kvstore.doctor import Check, Health, checks_of, configuration, examine

    checks = []
    if words:
        given = {"store": dict(zip([one[2:] for one in words[1::2]], words[2::2], strict=True))}
        beside = ("gpu", "sidecar", "socket")  # the engine looks at its GPU itself
        checks = [one for one in checks_of(sidecar_settings(None, given), False, None) if one.name not in beside]
    elif engine.engine == "vllm":
        checks = [Check("engine", partial(configuration, transfer_config(url)))]
    found = examine(checks).findings
    return [f"{one.check}: {one.text}; {one.remedy}" for one in found if one.health is Health.LACKS]


class Sidecar(NamedTuple):
    """The store's process, which an engine opens at `socket`. process: None for one that another has started."""

    socket: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    def status(self) -> Any:
        """What it says of itself to its observers; None where it says nothing to us."""
        from kvstore.doctor import status_of
        from kvstore.service.settings import OBSERVE_SOCKET

        return status_of(str(Path(self.socket).parent / OBSERVE_SOCKET))


def started(words: Sequence[str], console: str, socket: str, before: Callable[[], object] | None = None) -> Sidecar:
    """A sidecar that serves; or another one, which began with this directory in the same moment. before: called in its
    process, before it is the sidecar. Raises `BadInput` with the line that it ended with."""
    from kvstore.doctor import holder_of

    data = Path(words[2])
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = os.open(data / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}; give --data DIR that this user may write to") from None
    environment = {**os.environ, CONSOLE: console}
    try:
        command, alone = [sys.executable, "-P", "-m", "kvstore", *words], subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=alone,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=before,
        )
    finally:
        os.close(log)
    own, ends_at = Sidecar(socket, process), time.monotonic() + START_SECONDS
    try:
        while (told := own.status()) is None:
            # Of two that begin at once, the other one may have the directory's lock, and serve in a moment.
            if process.poll() is not None and holder_of(data) is None:
                last = (data / LOG).read_bytes()[-4096:].decode(errors="replace").strip().rpartition("\n")[2]
                raise BadInput(f"the sidecar ended with status {process.returncode}: {last}")
            if time.monotonic() > ends_at:
                raise BadInput(f"the sidecar did not answer within {START_SECONDS:.0f} s; see {data / LOG}")
            time.sleep(POLL_SECONDS)
        with suppress(ProcessLookupError):
            if os.getsid(told.pid) == process.pid:
                return own
    except BaseException:
        ended(process)
        raise
    ended(process)
    return Sidecar(socket)


def ended(process: subprocess.Popen[bytes]) -> None:
    """In order, or else killed."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# What is reported ----------------------------------------------------------------------------------------------------


class Reports:
    """Lines on standard error, each as JSON if that is asked for."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, text: str, **facts: object) -> None:
        say(json.dumps({"kvstore": text, **facts}) if self._as_json else f"kvstore: {text}", sys.stderr)


class Savings:
    """What the store saved since the last line, of all engines that it serves."""

    def __init__(self, sidecar: Sidecar, report: Reports) -> None:
        self._sidecar, self._report = sidecar, report
        self._before = sidecar.status()
        self._is_away = False

    def say(self) -> None:
        """A line, if prompts were asked for; or that the store does not answer, once."""
        now, before = self._sidecar.status(), self._before
        if now is None:
            if before is not None and not self._is_away:
                self._report("the sidecar does not answer, so the engine computes everything", asked=None)
            self._is_away = True
            return
        self._before, self._is_away = now, False
        if before is None or now.incarnation != before.incarnation:  # its counts began anew
            return
        asked = now.looked.asked_tokens - before.looked.asked_tokens
        if not asked:
            return
        found = {tier: count - before.looked.granted.get(tier, 0) for tier, count in now.looked.granted.items()}
        own = found.pop("engine", 0)
        stored = sum(found.values())
        seconds = (
            now.savings.saved_seconds - (before.savings.saved_seconds if before.savings else 0) if now.savings else 0
        )
        tiers = ", ".join(f"{tier} {count:,}" for tier, count in found.items() if count)
        text = f"{stored:,} of {asked:,} prompt tokens ({100 * stored / asked:.0f} %) came from the store"
        text += f" ({tiers})" * bool(tiers) + f", {own:,} from the engine's own cache" * bool(own)
        text += f"; {seconds:.1f} s of prefill saved" * (seconds > 0)
        self._report(text, asked=asked, hits={**found, "engine": own}, saved_seconds=seconds)


# The engine ----------------------------------------------------------------------------------------------------------


def run_engine(words: Sequence[str], each_minute: Callable[[], object]) -> int:
    """Run it until it ends; signals that come here go to it. Returns its status, as a shell has it."""
    heard = {*HANDED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        engine = subprocess.Popen(words, preexec_fn=partial(_begin, before))
        minute_at = time.monotonic() + EVERY_SECONDS
        while engine.poll() is None:
            came = signal.sigtimedwait(heard, max(0.0, minute_at - time.monotonic()))
            if came is None:
                each_minute()
                minute_at = time.monotonic() + EVERY_SECONDS
            elif came.si_signo != signal.SIGCHLD and came.si_code != FROM_THE_KERNEL:
                engine.send_signal(came.si_signo)
        while signal.sigtimedwait(heard, 0) is not None:  # they were for the engine
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def _begin(signals: set[int | signal.Signals]) -> None:
    """In the engine's process, before it is the engine: it is not to outlive this one."""
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], argument("-- ENGINE...", "vllm serve MODEL ..., or python -m MODULE ...")],
    data: Annotated[
        str | None,
        path_option(
            "DIR",
            "Of the sidecar.  [default: /var/lib/kvstore for root, else ~/.local/share/kvstore]",
            envvar="KVSTORE_DATA",
        ),
    ] = None,
    dram: Annotated[str | None, option("SIZE", "Memory for blocks. A fourth of what is free if left out.")] = None,
    nvme: Annotated[str | None, option("SIZE", "Disk space for blocks, or off. A fourth of what is free.")] = None,
    socket: Annotated[str | None, path_option("PATH", "Of a sidecar that runs. None is started then.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sidecar running when the engine ends.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Show what it would run, and leave.")] = False,
    as_json: Json = False,
) -> int:
    """Start vLLM or SGLang with the store beside it: kvstore run -- vllm serve MODEL.

    It uses this host's sidecar, or starts one with sizes that fit the machine, adds the engine's flag, and says each
    minute what was saved. Signals go to the engine, and its exit status is this command's. With --json, its lines on
    standard error are JSON.
    """
    from kvstore.service.settings import TENANT_SOCKET

    report = Reports(as_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the engine begins: the sidecar ends too
    engine = engine_of(command)
    version = look_at(engine)
    model = model_of(engine, version)
    if data is None:
        base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
        data = "/var/lib/kvstore" if os.geteuid() == 0 else f"{base}/kvstore"
    if socket is not None and not answers(socket):
        raise BadInput(f"--socket {socket}: no sidecar answers there; start it, or leave --socket out")
    places = [socket] if socket is not None else [str(Path(data) / TENANT_SOCKET), RUN_SOCKET]
    there = next((one for one in places if answers(one)), None)
    words = [] if there is not None else serve_words(data, dram, nvme)
    sidecar, console = Sidecar(there or places[0]), os.environ.get(CONSOLE) or f"127.0.0.1:{free_port(CONSOLE_PORT)}"
    if only_print:
        _print(words, engine.with_store(sidecar.url), as_json)
        return OK
    if words:
        for line in lacking(words, sidecar.url, engine):
            report(line)
        sidecar = started(words, console, sidecar.socket)
    try:
        if sidecar.process is not None:
            report(f"a sidecar serves {data}{_sizes(words, model)}; its console is http://{console}/", data=data)
        else:
            unused = "; --dram and --nvme are for one that is started here" * (dram is not None or nvme is not None)
            report(f"the sidecar at {sidecar.url} is used{unused}")
        for line in lacking([], sidecar.url, engine):
            report(line)
        savings = Savings(sidecar, report)
        status = run_engine(engine.with_store(sidecar.url), savings.say)
        savings.say()
    finally:
        if sidecar.process is not None:
            _leave(sidecar, sidecar.process, keep, report)
    return status


def _leave(sidecar: Sidecar, process: subprocess.Popen[bytes], keep: bool, report: Reports) -> None:
    """End the sidecar, unless it is to be kept or another engine uses it."""
    ends_at = time.monotonic() + ANSWER_SECONDS
    while (told := sidecar.status()) is not None and told.sessions and time.monotonic() < ends_at:
        time.sleep(POLL_SECONDS)  # the engine's own is over in a moment
    if keep or (told is not None and told.sessions):
        why = "as --keep says" if keep else "since another engine uses it"
        report(f"the sidecar stays, {why}; kill {process.pid} ends it", pid=process.pid)
    else:
        ended(process)


def _print(sidecar: Sequence[str], engine: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sidecar": ["kvstore", *sidecar] if sidecar else None, "engine": engine}))
    else:
        print("\n".join(shlex.join(one) for one in (["kvstore", *sidecar], engine) if len(one) > 1))


def free_port(wanted: int) -> int:
    """That one of this host, or any where it is taken."""
    with sockets.socket() as probe:
        probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sizes(words: Sequence[str], model: Any) -> str:
    """What the tiers hold, in words. words: of `kvstore serve`."""
    from kvstore.block.layout import default_block_tokens
    from kvstore.config import parse_size
    from kvstore.insight.plan import PlanRequest, stored_bytes_per_token
    from kvstore.insight.served import vllm_page_tokens

    text = ""
    for flag, size in zip(words[3::2], words[4::2], strict=True):
        size_bytes = parse_size(size, flag) if size != OFF else 0
        text += f", {flag[2:]} {format_size(size_bytes) if size_bytes else OFF}"
        if model is not None and size_bytes:
            request = PlanRequest(model, block_tokens=default_block_tokens(vllm_page_tokens(model)))
            text += f" for {size_bytes / stored_bytes_per_token(request):,.0f} tokens"
    return text
