"""The command line (floor 4).

    demo, bench             the main job, and its measurements
    serve                   a store for all engines of a host
    stat, namespaces, drop, purge, warm      an operator and a sidecar that runs
    fsck                    a directory that nobody uses
    record, replay          requests of a sidecar that runs, and recorded ones through tables without memory

Results go to stdout, with `--json` as one object and nothing else. An error is one line on stderr that says what was
given, what is allowed and how to mend it. Long work shows its progress on a terminal and nowhere else.

    status 0    all is well            2    wrong input, or something that is needed is missing
    status 1    a check has failed     71   the machine has no memory, threads, descriptors or disk space for it
                                       130  interrupted

The environment is read here and nowhere else. Each command imports its own module only, so that help is quick and one
command does not need another one's packages. Must never show a traceback, unless KVSTORE_TRACEBACK is set.
"""

import gzip
import io
import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn, Protocol

import kvstore
from kvstore.config import DEFAULT_POLICY, POLICIES
from kvstore.errors import BadInput, OutOfResources, StoreError
from kvstore.paths import expanded
from kvstore.standard_streams import flush_output, hold_standard_descriptors, let_go, say, show_any_text
from tiering.errors import TierError

_EXTRA_OF = dict.fromkeys(("typer", "rich", "lmdb", "fastapi", "uvicorn"), "server") | {
    "matplotlib": "plot",
    "torch": "hf",
    "transformers": "hf",
    "triton": "gpu",
}


def _needs(module: str) -> str:
    return f"kvstore: this needs the package {module}; run in a checkout: pip install '.[{_EXTRA_OF[module]}]'"


try:
    import typer
    import typer.core
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as absent:
    if absent.name not in _EXTRA_OF:
        raise
    print(_needs(absent.name), file=sys.stderr)
    raise SystemExit(2) from None

OK, CHECK_FAILED, BAD_INPUT, OUT_OF_RESOURCES, INTERRUPTED = 0, 1, 2, 71, 130
PLAIN_WIDTH = 120
WATCH_SECONDS = 2
_TRACEBACK = "KVSTORE_TRACEBACK"
# Typer brings a copy of click of its own, or uses the installed one, by version: this is either's usage error.
_UsageError: Any = typer.BadParameter.__base__

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on standard output.")]


def _at(path: str | None) -> str | None:
    """A path of an option or an argument: ~ is a home."""
    return expanded(path) if path else path


BenchData = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", callback=_at, help="Measure the disk of this directory. That of temporary files if left out."
    ),
]

Check = Annotated[bool, typer.Option("--check", help="Status 1 where a target is missed; it is named.")]

app = typer.Typer(
    help="A KV-cache store for language models: keep what prefill has computed, and never serve the wrong bytes.",
    epilog="Each command explains itself: kvstore COMMAND --help. Start with: kvstore demo",
    add_completion=False,
    rich_markup_mode="markdown",  # lets help flow to the terminal's width
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Measure a path of the store against its physical limit, in the same run.")
app.add_typer(bench, name="bench")


class Result(Protocol):
    """What a command has found out."""

    def to_dict(self) -> dict[str, object]:
        """One object for `--json`."""
        ...

    def render(self, console: Any) -> None:
        """The same for people."""
        ...


class Show(Protocol):
    """Told what is being done and, where that is known, how many steps of it are done and of how many."""

    def __call__(self, doing: str, done: int = 0, steps: int = 0) -> None: ...


@app.callback(invoke_without_command=True)
def _kvstore(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    if version:
        print(json.dumps({"version": kvstore.__version__}) if as_json else f"kvstore {kvstore.__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif as_json:
        raise typer.BadParameter("write --json behind the command")


@app.command()
def demo(
    dram: Annotated[
        str, typer.Option(metavar="SIZE", envvar="KVSTORE_DRAM", help="Memory for blocks, such as 512MiB.")
    ] = "512MiB",
    nvme: Annotated[
        str, typer.Option(metavar="SIZE", envvar="KVSTORE_NVME", help="Disk space for blocks, such as 1GiB.")
    ] = "1GiB",
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=_at,
            envvar="KVSTORE_DATA",
            help="Directory of the store. A temporary one if left out.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(metavar="N", help="Ask only the first so many of the twenty questions.")
    ] = 20,
    tokens: Annotated[int, typer.Option(metavar="N", help="Length of every answer, in tokens.")] = 32,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads that compute. One if left out; with --seed, all cores.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Draw random weights from this instead of taking the trained ones.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Answer twenty questions on the store's own pages: without a store, filling one, from a full one, and from disk
    after a restart.

    A small transformer over bytes answers them on this machine, in about a minute. You see how many tokens
    were found and why the others were not, how much sooner the first token came, and that all answers are the same.
    """
    from kvstore.demo.options import Options

    options = Options(dram, data, requests, tokens, threads, seed, nvme)
    with _progress() as show:
        show("loading torch and transformers")
        from kvstore.demo.run import run

        result = run(options, show)
    _print(result, as_json)
    for failure in result.failures:
        print(f"kvstore: {failure}", file=sys.stderr)
    return CHECK_FAILED if result.failures else OK


@app.command()
def fsck(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", callback=_at, help="A store's directory that no process uses.")
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Give up what is damaged, and build the index again from the headers.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Verify every frame of a data directory, offline: MACs, payload digests, and what the index says of each slot.

    Nothing is written without --repair. Status 0: all is well, or is again. Status 1: something is damaged.
    """
    from kvstore import fsck as checks

    with _progress() as show:
        result = checks.repair(directory, show) if repair else checks.check(directory, show)
    _print(result, as_json)
    return OK if result.is_well else CHECK_FAILED


@app.command()
def serve(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", callback=_at, help="TOML; docs/sidecar.md says what may stand in it.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", callback=_at, help="Directory of keys and slabs.  [default: ./kv]")
    ] = None,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for blocks. Half of what the cgroup allows if left out.")
    ] = None,
    nvme: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk space for blocks, or off. Four fifths of what is free if left out."),
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", callback=_at, help="UNIX socket of the default tenant.  [default: DIR/kvstore.sock]"
        ),
    ] = None,
    admin_socket: Annotated[
        str | None,
        typer.Option(metavar="PATH", callback=_at, help="UNIX socket of the operator.  [default: DIR/admin.sock]"),
    ] = None,
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve liveness and readiness there.")] = None,
    kept_at: Annotated[
        int | None, typer.Option(hidden=True, help="For the keeper alone: where it can be told.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Serve a store to the engines of this host, through a UNIX socket and shared memory, until SIGTERM.

    A small parent process holds the memory and starts the sidecar again after a crash. SIGHUP to it has the sidecar
    begin again with what is installed by then. Prints one line once connections are taken; logs go to standard error.
    """
    from kvstore.node import SystemClock
    from kvstore.service import keeper
    from kvstore.service.kept import KeeperWire
    from kvstore.service.serve import Outside
    from kvstore.service.serve import serve as run
    from kvstore.service.sessions import CONNECTION_BITS
    from kvstore.service.settings import read_configuration, read_settings
    from tiering.lmdb_index import LmdbMaker

    flags = {
        "store": {"data": data, "dram": dram, "nvme": nvme},
        "door": {"socket": socket},
        "admin": {"socket": admin_socket},
        "http": {"listen": http},
    }
    if config is not None:
        settings = read_settings(read_configuration(Path(config)), flags, config)
    else:
        settings = read_settings("", flags)
    hold_standard_descriptors()
    # It multiplies no matrices: threads for that would only take address space, and the start with it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if kept_at is None and settings.store.keeper:
        seconds = str(2 * settings.limits.close_seconds)
        sidecar = [sys.executable, "-m", "kvstore", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, "-P", keeper.__file__, seconds, settings.log.format, *sidecar])
    wire = KeeperWire(kept_at, secrets.token_bytes) if kept_at is not None else None
    # Two starts on the same memory are more than 34 ms apart, since a start takes longer, and no run has 2**24
    # connections for each 34 ms that it lasts: so this one's are numbered above those of all before it.
    first_number = time.time_ns() >> CONNECTION_BITS + 1 << CONNECTION_BITS
    outside = Outside(
        SystemClock(),
        first_number,
        secrets.token_bytes,
        LmdbMaker,
        _health_pages,
        kvstore.policy_named,
        wire,
    )
    keeper_pid = os.getppid() if wire is not None else None
    try:
        begins_again = run(settings, outside, lambda sockets, port: _say_serving(sockets, port, keeper_pid, as_json))
    except OutOfResources as error:
        say(f"kvstore: {' '.join(str(error).split())}", sys.stderr)
        os._exit(OUT_OF_RESOURCES)  # at once: without memory or threads no more may be relied on
    return keeper.AGAIN if begins_again else OK


Data = Annotated[
    str,
    typer.Option(
        "--data", metavar="DIR", callback=_at, envvar="KVSTORE_DATA", help="Directory that the sidecar serves."
    ),
]
AdminSocket = Annotated[
    str | None,
    typer.Option(
        "--admin-socket",
        "--socket",
        metavar="PATH",
        callback=_at,
        help="The operator's socket. --socket is its former name.  [default: DIR/admin.sock]",
    ),
]
Seconds = Annotated[float, typer.Option("--seconds", metavar="N", help="How long it may take.")]


class _Watchable(typer.core.TyperCommand):
    """A command whose --watch may be followed by a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, one in enumerate(args):
            if one == "--watch" and not "".join(args[at + 1 : at + 2]).replace(".", "", 1).isdigit():
                args[at] = f"--watch={WATCH_SECONDS}"
        return super().parse_args(ctx, args)


@app.command(cls=_Watchable)
def stat(
    data: Data = "./kv",
    socket: AdminSocket = None,
    watch: Annotated[
        float | None,
        typer.Option(metavar="[SECONDS]", help=f"Draw it again and again, every {WATCH_SECONDS} seconds if left out."),
    ] = None,
    as_json: Json = False,
) -> int:
    """What a running sidecar holds and has served: tiers, namespaces, hits and misses, moves, sessions.

    With --watch and --json it prints one object per line.
    """
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    if watch is not None and not 0.1 <= watch <= 86400:
        raise typer.BadParameter(f"--watch {watch:g}: give 0.1 to 86400 seconds")
    clock = SystemClock()

    def found() -> report.StatReport:
        return report.StatReport(operate.stat(socket or default_socket(data, ADMIN_SOCKET), clock))

    if watch is None:
        return _print(found(), as_json)
    if as_json:
        while True:
            print(json.dumps(found().to_dict()), flush=True)
            clock.sleep(watch)
    if not sys.stdout.isatty():  # nothing can be drawn again there: a page each time, with an empty line behind it
        while True:
            _print(found(), as_json)
            print(flush=True)
            clock.sleep(watch)
    first, console = found(), Console()
    with Live(first.group(), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            live.refresh()
            clock.sleep(watch)
            live.update(found().group())


@app.command()
def namespaces(data: Data = "./kv", socket: AdminSocket = None, as_json: Json = False) -> int:
    """The namespaces of a running sidecar: whose, of which model, layout and codec, and what they take up."""
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    facts = operate.stat(socket or default_socket(data, ADMIN_SOCKET), SystemClock())
    return _print(report.NamespacesReport(facts), as_json)


@app.command()
def drop(
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE_ID", help="Or its first digits.")],
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose, where several tenants have it.")] = "",
    data: Data = "./kv",
    socket: AdminSocket = None,
    seconds: Seconds = 30.0,
    as_json: Json = False,
) -> int:
    """Evict a namespace from every tier of a running sidecar."""
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    path = socket or default_socket(data, ADMIN_SOCKET)
    blocks = operate.drop(path, SystemClock(), namespace, tenant, seconds)
    return _print(report.GoneReport(f"Namespace {namespace} is gone", "namespace", namespace, blocks), as_json)


@app.command()
def purge(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: Data = "./kv",
    socket: AdminSocket = None,
    seconds: Seconds = 30.0,
    as_json: Json = False,
) -> int:
    """Void all of a tenant's blocks durably and retire its key. There is no way back.

    The tenant's connections end; when it comes again it gets a new key.
    """
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("a purge cannot be undone, and there is no terminal to ask at; give --yes")
        # Not typer's own question, which writes to standard output as well.
        print(f"Void all blocks of tenant {tenant} and retire its key? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Abort()
    blocks = operate.purge(socket or default_socket(data, ADMIN_SOCKET), SystemClock(), tenant, seconds)
    done = report.GoneReport(f"Tenant {tenant} is purged and its key retired", "tenant", tenant, blocks)
    return _print(done, as_json)


@app.command()
def warm(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", callback=_at, help='JSON lines: [1, 2, ...], or {"token_ids": [...], "extra_keys": [...]}.'
        ),
    ],
    namespace: Annotated[str, typer.Option(metavar="ID", help="Its id, or the first digits.")],
    data: Data = "./kv",
    socket: Annotated[
        str | None, typer.Option(metavar="PATH", callback=_at, help="The tenant's socket.  [default: DIR/kvstore.sock]")
    ] = None,
    as_json: Json = False,
) -> int:
    """Bring the stored prefixes of prompts up to DRAM, before engines ask for them."""
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import TENANT_SOCKET, default_socket

    with open(file, encoding="utf-8", errors="replace") as lines:
        prompts = operate.read_prompts(file, lines)
    with _progress() as show:
        path = socket or default_socket(data, TENANT_SOCKET)
        warmed = operate.warm(path, SystemClock(), namespace, file, prompts, show)
    return _print(report.WarmReport(warmed), as_json)


@app.command()
def record(
    file: Annotated[
        str, typer.Argument(metavar="FILE", callback=_at, help="What is written: JSON lines in Mooncake's form.")
    ],
    namespace: Annotated[
        str, typer.Option(metavar="ID", help="Of these blocks alone. Needed where blocks differ in size.")
    ] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose, where several tenants have it.")] = "",
    seconds: Annotated[
        float | None, typer.Option(metavar="N", min=0.0, help="For how long. Until SIGINT or SIGTERM, if left out.")
    ] = None,
    data: Data = "./kv",
    socket: AdminSocket = None,
    as_json: Json = False,
) -> int:
    """Write down what engines look up in a running sidecar, for kvstore replay: no token and no key, salted hashes.

    The salt is drawn anew for each recording and never leaves the sidecar. SIGINT and SIGTERM end it in order.
    """
    from kvstore.node import SystemClock
    from kvstore.service import operate, report
    from kvstore.service.settings import ADMIN_SOCKET, default_socket

    path = socket or default_socket(data, ADMIN_SOCKET)
    if os.path.exists(file):
        raise typer.BadParameter(f"{file} is there already; give another name")
    if Path(file).suffix.lower() == ".gz":
        raise typer.BadParameter(f"{file} is to be text, not gzip; give a name without .gz, and pack it afterwards")
    _check_folder(file, file)
    with open(file, "x", encoding="utf-8", buffering=1) as out:
        try:
            with _progress() as show, _ended() as is_ended:
                recorded = operate.record(
                    path, SystemClock(), namespace, tenant, seconds, file, out.write, show, is_ended
                )
        finally:
            if not os.path.getsize(file):
                os.remove(file)
    return _print(report.RecordReport(recorded), as_json)


@contextmanager
def _ended() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come; a second one does not wait. SIGINT that is ignored, as it is in the jobs that
    a shell runs in the background, stays so."""
    heard: list[int] = []
    ends: list[int] = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        ends.append(signal.SIGINT)

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        for one in ends:
            signal.signal(one, signal.default_int_handler)

    before = {number: signal.signal(number, hear) for number in ends}
    try:
        yield lambda: bool(heard)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        str | None, typer.Option(metavar="FILE", callback=_at, help="Draw the curves there: .png, .svg or .pdf.")
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
    options = replays.Options(
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
    with _progress() as show:
        read = []
        for path in paths:
            show(f"reading {path}")
            with _lines(path) as lines:
                read.append(read_trace(path.name if is_short else str(path), lines, block_size))
        result = replays.run(read, chosen, options, build_replay, show)
    status = _print(result, as_json)
    if draw is not None:
        sys.stdout.flush()
        draw(result)
    return status


def _listed(given: list[str], flag: str, allowed: str) -> list[str]:
    """What stands between commas, without spaces."""
    found = []
    for one in given:
        pieces = [piece.strip() for piece in one.split(",") if piece.strip()]
        if not pieces:
            raise typer.BadParameter(f"{flag} {one[:40]!r}; {allowed}")
        found += pieces
    return found


def _whole(given: str, flag: str, least: int, most: int, allowed: str = "") -> int:
    is_whole = re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", given) is not None
    if not is_whole or not least <= int(given) <= most:
        raise typer.BadParameter(f"{flag} {given[:40]!r}; {allowed or f'give a whole number from {least} to {most}'}")
    return int(given)


def _real(given: str, flag: str, allowed: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter(f"{flag} {given[:40]!r}; {allowed}") from None


@contextmanager
def _lines(file: Path) -> Iterator[Iterator[str]]:
    """Of a text file, unpacked if it was packed."""
    with open(file, "rb") as raw:
        is_packed = raw.peek(2)[:2] == b"\x1f\x8b"
        try:
            with io.TextIOWrapper(
                gzip.open(raw) if is_packed else raw, encoding="utf-8-sig", errors="replace"
            ) as lines:
                yield lines
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"{file} cannot be unpacked ({error}); it was cut off or damaged: fetch it again") from None


def _check_folder(given: str, file: str) -> None:
    """There is one to write the file to."""
    folder = Path(file).parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{given}: there is no folder {folder}; make it, or give another one")


def _plotter(file: str) -> Callable[[Any], None]:
    """Draws a result there. What is missing for it is said before any work."""
    from kvstore.insight.replay_plot import draw

    kind = Path(file).suffix.lower()
    if kind not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"--plot {file}: give a name that ends in .png, .svg or .pdf")
    _check_folder(f"--plot {file}", file)
    is_new = not os.path.lexists(file)
    with open(file, "ab"):  # else it would be said behind all the work that it cannot be written
        pass
    if is_new:
        os.unlink(file)
    return lambda result: draw(result).savefig(file, dpi=150, format=kind[1:])


def _health_pages(host: str, port: int, daemon: Any) -> Any:
    from kvstore.service.health import Health

    return Health(host, port, daemon.readiness, daemon.is_alive, daemon.reasons)


def _say_serving(sockets: list[str], port: int | None, keeper_pid: int | None, as_json: bool) -> None:
    if as_json:
        said = {"serving": sockets, "http_port": port, "pid": os.getpid(), "keeper_pid": keeper_pid}
        say(json.dumps(said), sys.stdout)
    else:
        say(f"serving {', '.join(sockets)}" + (f", health on port {port}" if port else ""), sys.stdout)


@bench.command("tiers")
def bench_tiers(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="TIER", help="Measure this alone: dram, door (DRAM of a sidecar) or nvme. All if left out."
        ),
    ] = None,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How near put and get come to a plain memory copy, in this process and through a sidecar's socket, and to what fio
    gets out of the disk.

    A plain loop of direct I/O is measured beside fio, and alone where fio is not on the path. The disk's part takes 1.5
    GiB of it and about a minute; the others up to half of the free memory and three minutes each.
    """
    with _progress() as show:
        show("loading torch")
        from kvstore.bench import nvme, tiers

        options = tiers.Options(nvme=nvme.Options(data=data, fio=shutil.which("fio")))
        result = tiers.run(options, show, only)
    return _judge([result], [], as_json, check)


@bench.command("lookup")
def bench_lookup(check: Check = False, as_json: Json = False) -> int:
    """How long it takes to find the longest stored prefix of a prompt: in this process, through a sidecar's socket, and
    by eight clients of a sidecar together."""
    with _progress() as show:
        show("loading torch")
        from kvstore.bench import lookup

        result = lookup.run(progress=show)
    return _judge([result], [], as_json, check)


@bench.command("restart")
def bench_restart(
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks in the directory that is opened.")] = 1_000_000,
    data: BenchData = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How long it takes until everything on disk can be found again, after a clean end and after a kill, and until a
    sidecar takes connections."""
    with _progress() as show:
        show("loading torch")
        from kvstore.bench import restart

        result = restart.run(restart.Options(blocks=blocks, data=data), show)
    return _judge([result], [], as_json, check)


@bench.command("codec")
def bench_codec(
    quality: Annotated[
        bool, typer.Option("--quality", help="Let a small trained model answer from KV that went through the codecs.")
    ] = False,
    speed: Annotated[bool, typer.Option("--speed", help="Encode and decode on this CPU, beside memcpy.")] = False,
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Pieces of text for --quality, 1 to 64: 32 if left out, fewer for a quick look."
        ),
    ] = None,
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
    with _progress() as show:
        show("loading torch")
        from kvstore.bench import codec

        rates = _codec_speed(show) if speed else None
        result = codec.CodecResult(codec.size_rows(), rates, _codec_quality(windows, show) if quality else None)
    return _judge([result], result.failures, as_json, check)


def _codec_speed(show: Show) -> Any:
    from kvstore.bench import codec_speed

    return codec_speed.run(progress=show)


def _codec_quality(windows: int | None, show: Show) -> Any:
    show("loading transformers")
    from kvstore.bench import codec_quality

    options = codec_quality.Options() if windows is None else codec_quality.Options(windows)
    return codec_quality.run(options, show)


BenchDevice = Annotated[
    str | None, typer.Option(metavar="NAME", help="cuda or cpu. A GPU where there is one if left out.")
]
Laps = Annotated[int | None, typer.Option(metavar="N", min=1, help="Turns that each median is of.")]


@bench.command("kernels")
def bench_kernels(
    device: BenchDevice = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure this alone: kernels, transfers or decode. May be given again."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="KV that is moved at once, such as 1GiB. May be given again."),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a block; 32 on a GPU.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a layer; 8 on a GPU.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a head; 128 on a GPU.")] = None,
    page_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of a page; 16.")] = None,
    laps: Laps = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """How fast KV goes off a GPU and back: the kernels beside a copy on the device, whole loads and saves beside a copy
    of pinned memory, and what eight running streams notice of them.

    On a CPU it runs on small shapes, to show that it runs; its figures say nothing then.
    """
    with _progress() as show:
        show("loading torch and transformers")
        from kvstore.bench import kernels

        given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        options = kernels.options_for(device, given, page_tokens=page_tokens, sizes=size or (), laps=laps)
        result = kernels.run(options, show, device, stage or ())
    return _judge([result], result.faults, as_json, check)


@bench.command("ttft")
def bench_ttft(
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Through which adapter: hf (transformers) or vllm.")
    ] = "hf",
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the model: tiny, 1b or 8b; 8b on a GPU, tiny on a CPU. With vllm: tiny or mid, which is usual.",
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS,..", help="Lengths of the prefix, such as 8k,32k,128k.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(metavar="TOKENS", min=1, help="Of the prefill grid.")] = None,
    device: BenchDevice = None,
    laps: Laps = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="Begin nothing more after so long; half an hour.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="vllm: this alone: ttft, itl, hooks or overhead. May be given again. All if left out."
        ),
    ] = None,
    turns: Annotated[int | None, typer.Option(metavar="N", min=1, help="vllm: turns of each TTFT; 7.")] = None,
    arrivals: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: hits of each kind among running streams; 24.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="vllm: turns with and without a store; 40.")
    ] = None,
    check: Check = False,
    as_json: Json = False,
) -> int:
    """The time to the first token of a Llama with random weights: cold, from DRAM as it is and in 8 bits, and from the
    pool on the device, each beside what its bytes need at the rate of this run's copies.

    The cold run's share of the device's matrix rate (MFU) stands beside each speed-up.

    With --engine vllm a real vLLM on this machine's CPU: TTFT cold, from its own cache and from a sidecar in another
    process; what running streams notice of a load; what the connector's hooks take of a step; and what the store costs
    where it has nothing. It runs with the Python that has vLLM.
    """
    of_hf = {"--chunk": chunk, "--device": device, "--laps": laps, "--seconds": seconds}
    of_vllm = {"--only": only, "--turns": turns, "--arrivals": arrivals, "--pairs": pairs}
    is_vllm = engine == "vllm"
    foreign = [name for name, value in (of_hf if is_vllm else of_vllm).items() if value is not None]
    if foreign:
        belongs = "hf" if is_vllm else "vllm"
        raise typer.BadParameter(f"{', '.join(foreign)} belongs to --engine {belongs}; leave it out with {engine}")
    if is_vllm:
        return _ttft_vllm(
            {"shape": shape, "context": context, "turns": turns, "arrivals": arrivals, "pairs": pairs},
            only or [],
            as_json,
            check,
        )
    with _progress() as show:
        show("loading torch and transformers")
        from kvstore.bench import ttft

        options = ttft.options_for(
            device, shape=shape, contexts=context, chunk_tokens=chunk, laps=laps, seconds=seconds
        )
        result = ttft.run(options, show, device, engine)
    return _judge([result], result.faults, as_json, check)


def _ttft_vllm(given: dict[str, Any], parts: list[str], as_json: bool, check: bool) -> int:
    with _progress() as show:
        show("loading the bench")
        from kvstore.bench import ttft_vllm

        result = ttft_vllm.run(ttft_vllm.options_for(parts=parts, **given), show)
    return _judge([result], result.faults, as_json, check)


@bench.command("all")
def bench_all(data: BenchData = None, check: Check = False, as_json: Json = False) -> int:
    """Every bench that needs no GPU, one after the other: tiers, lookup, restart, codec."""
    with _progress() as show:
        show("loading torch")
        from kvstore.bench import codec, lookup, nvme, restart, tiers

        results: list[Result] = [
            tiers.run(tiers.Options(nvme=nvme.Options(data=data, fio=shutil.which("fio"))), show),
            lookup.run(progress=show),
            restart.run(restart.Options(data=data), show),
            codec.CodecResult(codec.size_rows(), _codec_speed(show), _codec_quality(None, show)),
        ]
    if as_json:
        print(json.dumps({"bench": "all", "results": [result.to_dict() for result in results]}))
    else:
        for result in results:
            _print(result, as_json)
    return _faults(_missed(results)) if check else OK


def _judge(results: list[Result], faults: list[str], as_json: bool, check: bool) -> int:
    """Print, and say what is wrong with it."""
    for result in results:
        _print(result, as_json)
    return _faults([*faults, *(_missed(results) if check else [])])


def _missed(results: list[Result]) -> list[str]:
    from kvstore.bench import targets

    found = [result.to_dict() for result in results]
    if not any(targets.judged(one) for one in found):
        raise BadInput("nothing that was measured has a target here, so that --check checks nothing; leave it out")
    return [line for one in found for line in targets.missed(one)]


def _faults(lines: list[str]) -> int:
    """Each on standard error; the status that follows."""
    for line in lines:
        print(f"kvstore: {line}", file=sys.stderr)
    return CHECK_FAILED if lines else OK


def main() -> None:
    """The entry point: run a command, turn errors into one line, and leave with its status."""
    # Torch's threads otherwise spin while they wait for each other: ten times slower where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get(_TRACEBACK):
        sys.excepthook = _report_bug
    show_any_text()
    try:
        # Not app(...) itself, which would put an excepthook of typer's in place of ours.
        status = typer.main.get_command(app)(standalone_mode=False, prog_name="kvstore")
        flush_output()
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to tell, nor may the flush at exit try it again.
        let_go(sys.stdout)
        raise SystemExit(OK) from None
    except _UsageError as error:
        _fail(f"{error.format_message()} (see: {error.ctx.command_path if error.ctx else 'kvstore'} --help)")
    except OutOfResources as error:
        _fail(str(error), OUT_OF_RESOURCES)
    except (StoreError, TierError) as error:
        _fail(str(error))
    except MemoryError:
        _fail("there is no memory left for it; give it more, or less to do", OUT_OF_RESOURCES)
    except OSError as error:
        reason = error.strerror or str(error)
        _fail(f"{error.filename}: {reason}" if error.filename else reason)
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in _EXTRA_OF:
            raise
        print(_needs(name), file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(status or OK)


def _print(result: Result, as_json: bool) -> int:
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        result.render(Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    return OK


@contextmanager
def _progress() -> Iterator[Show]:
    """A line on the terminal that says what is going on; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda doing, done=0, steps=0: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("starting", total=None)
        yield lambda doing, done=0, steps=0: bar.update(line, description=doing, completed=done, total=steps or None)


def _fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    """One line, whatever the message was."""
    say(f"kvstore: {' '.join(message.split())}", sys.stderr)
    raise SystemExit(status) from None


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For what nobody expected."""
    text = " ".join(f"{kind.__name__}: {error}".split())
    say(f"kvstore: internal error: {text} (set {_TRACEBACK}=1 to see where)", sys.stderr)


if __name__ == "__main__":
    main()
