"""The command line: docs/reference.md lists its commands.

Results go to stdout, with `--json` as one object and nothing else. An error is one line on stderr that says what was
given, what is allowed and how to mend it. Long work shows its progress on a terminal only.

    status 0    all is well            2    wrong input, or something that is needed is missing
    status 1    a check has failed     71   the machine has no memory, threads, descriptors or disk space for it
                                       130  interrupted

Only this room reads the environment. Each command imports its own module only, so that help is quick and a command does
not need another one's packages. Must never show a traceback, unless KVSTORE_TRACEBACK is set.
"""

import json
import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Annotated, Any

import kvstore
import kvstore.cli.bench
import kvstore.cli.edge
import kvstore.cli.engines
import kvstore.cli.insight
import kvstore.cli.keys
import kvstore.cli.operate
import kvstore.cli.prove
import kvstore.cli.run
from kvstore.block.errors import OutOfResources, StoreError
from kvstore.cli.edge import agent_makes, check_edge, edge_makes
from kvstore.cli.operate import SERVE_FLAGS
from kvstore.cli.plain import sidecar_settings
from kvstore.cli.standard_streams import (
    flush_output,
    hold_standard_descriptors,
    let_go,
    quiet_optional_libraries,
    say,
    show_any_text,
)
from kvstore.cli.terminal import (
    BAD_INPUT,
    CHECK_FAILED,
    EXTRA_OF,
    INTERRUPTED,
    OK,
    OUT_OF_RESOURCES,
    Json,
    UsageError,
    app,
    fail,
    needs,
    option,
    path_argument,
    path_option,
    print_result,
    shown_progress,
    typer,
    with_settings,
)
from kvstore.config import host_and_port
from tiering.errors import TierError

_TRACEBACK = "KVSTORE_TRACEBACK"
_PROGRAM = [sys.executable, "-P", "-m", "kvstore"]


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
    dram: Annotated[str, option("SIZE", "Memory for blocks, such as 512MiB.", envvar="KVSTORE_DRAM")] = "512MiB",
    nvme: Annotated[str, option("SIZE", "Disk space for blocks, such as 1GiB.", envvar="KVSTORE_NVME")] = "1GiB",
    data: Annotated[
        str | None, path_option("DIR", "Directory of the store. A temporary one if left out.", envvar="KVSTORE_DATA")
    ] = None,
    requests: Annotated[int, option("N", "Ask only the first so many of the twenty questions.")] = 20,
    tokens: Annotated[int, option("N", "Length of every answer, in tokens.")] = 32,
    threads: Annotated[
        int | None, option("N", "Threads that compute. One if left out; with --seed, all cores.")
    ] = None,
    seed: Annotated[
        int | None, option("N", "Draw random weights from this instead of taking the trained ones.")
    ] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="Ask a model with recurrent layers, whose weights are random.")
    ] = False,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard",
            help="Answer through a sidecar, and keep a dashboard of it open in your browser until Ctrl-C.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Answer twenty questions on the store's own pages: without a store, filling one, from a full one, and from disk
    after a restart.

    A small transformer over bytes answers them on this machine, in about a minute. You see how many tokens were found
    and why the others were not, how much sooner the first token came, and that all answers are the same.
    """
    from kvstore.demo.questions import DemoOptions

    options = DemoOptions(dram, data, requests, tokens, threads, seed, nvme, hybrid)
    with ExitStack() as stack:
        with shown_progress() as show:
            show("loading torch and transformers")
            from kvstore.demo import passes
        sidecar = None
        if dashboard:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # both processes end with the demo
            directory = Path(options.data or stack.enter_context(TemporaryDirectory(prefix="kvstore-demo-")))
            sidecar = stack.enter_context(passes.DemoSidecar(directory, options.dram, options.nvme))
            say(f"the dashboard is on {sidecar.url}", sys.stderr)
        with shown_progress() as show:
            result = passes.run(options, show, sidecar=sidecar)
        print_result(result, as_json)
        for failure in result.failures:
            print(f"kvstore: {failure}", file=sys.stderr)
        if sidecar is not None:
            say(f"the dashboard stays on {sidecar.url} until you press Ctrl-C", sys.stderr)
            with suppress(KeyboardInterrupt):
                sidecar.wait()
    return CHECK_FAILED if result.failures else OK


@app.command()
def fsck(
    directory: Annotated[str, path_argument("DIR", "A store's directory that no process uses.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Give up what is damaged, and build the index again from the headers.")
    ] = False,
    keys: Annotated[
        str | None,
        path_option(
            "DIR", "Directory of its tenants' keys, where these are a pool's.", envvar="KVSTORE_KEYS_DIRECTORY"
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Verify every stored block of a data directory, offline: MACs, payload digests, and the index's entry of each
    slot.

    Nothing is written without --repair. Status 0: all is well, or is again. Status 1: something is damaged.
    """
    from kvstore import fsck as checks

    with shown_progress() as show:
        work = checks.repair if repair else checks.check
        result = work(directory, show, pool=keys)
    print_result(result, as_json)
    return OK if result.is_well else CHECK_FAILED


@app.command()
@with_settings(SERVE_FLAGS)
def serve(
    config: Annotated[str | None, path_option("FILE", "TOML; docs/sidecar.md says what may stand in it.")] = None,
    kept_at: Annotated[
        int | None, typer.Option(hidden=True, help="For the keeper alone: where it can be told.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(hidden=True, help="For the keeper alone: where its edge serves health.")
    ] = None,
    as_json: Json = False,
    given: Any = None,
) -> int:
    """Serve a store to this host's engines, through a UNIX socket and shared memory, until SIGTERM.

    A small parent process holds the memory and restarts the sidecar after a crash. SIGHUP to it reloads shares, rates,
    tokens and the log level; SIGUSR2 restarts the sidecar with the version then installed. Prints one line once it
    takes connections; logs go to standard error. Each setting may also be a variable, such as KVSTORE_STORE_DRAM for
    store.dram. Flags take precedence over variables, and variables over the file.
    """
    from kvstore.listeners.addresses import listening_sockets
    from kvstore.service import keeper
    from kvstore.service.serve import KeeperWire, Outside
    from kvstore.service.serve import serve as run
    from kvstore.service.sessions import CONNECTION_BITS
    from tiering.nvme.lmdb_index import LmdbMaker

    read = partial(sidecar_settings, config, given)
    settings = read()
    hold_standard_descriptors()
    # OpenBLAS threads are not used here; they would cost address space and start-up time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if kept_at is None:
        check_edge(settings)
    words, descriptors = [one for one in sys.argv[2:] if one != "--json"], []
    if settings.http.listen is not None and http_port is None:
        sockets = listening_sockets(*host_and_port(settings.http.listen), "http.listen (--http)")
        http_port, descriptors = sockets[0].getsockname()[1], [one.detach() for one in sockets]
    edge = [*_PROGRAM, "edge", *words, *(f"--http-at={one}" for one in descriptors)]
    if kept_at is None and settings.store.keeper:
        for one in descriptors:
            os.set_inheritable(one, True)
        children = {keeper.EDGE: edge} if descriptors or edge_makes(settings, None) else {}
        children |= {name: [*_PROGRAM, "agent", *words] for name in agent_makes(settings, None)}
        style = [str(2 * settings.limits.close_seconds), settings.log.format, json.dumps(children)]
        sidecar = [*_PROGRAM, *sys.argv[1:], *([f"--http-port={http_port}"] if descriptors else [])]
        command = [sys.executable, "-P", keeper.__file__, *style, json.dumps(descriptors), *sidecar]
        os.execv(sys.executable, command)
    couriers: Any = None
    if settings.wants_courier:
        from kvstore.elsewhere.desk import CourierDesk

        couriers = CourierDesk
    wire = KeeperWire(kept_at, secrets.token_bytes) if kept_at is not None else None
    # Connection numbers must exceed those of all earlier runs on this memory. Starts are more than 34 ms apart, and no
    # run has 2**24 connections per 34 ms, so the clock's number will do.
    first_number = time.time_ns() >> CONNECTION_BITS + 1 << CONNECTION_BITS
    outside = Outside(
        time.process_time,
        first_number,
        secrets.token_bytes,
        LmdbMaker,
        kvstore.policy_named,
        read,
        wire,
        couriers,
        ([*edge, "--pages"], descriptors) if descriptors else None,
    )
    keeper_pid = os.getppid() if wire is not None else None
    try:
        begins_again = run(settings, outside, lambda sockets: _say_serving(sockets, http_port, keeper_pid, as_json))
    except OutOfResources as error:
        say(f"kvstore: {' '.join(str(error).split())}", sys.stderr)
        os._exit(OUT_OF_RESOURCES)  # at once: without memory or threads, an orderly exit may hang
    return keeper.AGAIN if begins_again else OK


def _say_serving(sockets: list[str], port: int | None, keeper_pid: int | None, as_json: bool) -> None:
    if as_json:
        said = {"serving": sockets, "http_port": port, "pid": os.getpid(), "keeper_pid": keeper_pid}
        say(json.dumps(said), sys.stdout)
    else:
        say(f"serving {', '.join(sockets)}" + (f", health on port {port}" if port else ""), sys.stdout)


def main() -> None:
    """The entry point: run a command, turn errors into one line, and exit with its status."""
    # Torch's threads otherwise spin while waiting for each other: ten times slower on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # UCX otherwise warns on standard output, between our JSON.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    if not os.environ.get(_TRACEBACK):
        sys.excepthook = _report_bug
    show_any_text()
    quiet_optional_libraries()
    try:
        # app(...) itself would install typer's excepthook in place of ours.
        status = typer.main.get_command(app)(standalone_mode=False, prog_name="kvstore")
        flush_output()
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader closed the pipe; the flush at exit must not fail again.
        let_go(sys.stdout)
        raise SystemExit(OK) from None
    except UsageError as error:
        fail(f"{error.format_message()} (see: {error.ctx.command_path if error.ctx else 'kvstore'} --help)")
    except OutOfResources as error:
        fail(str(error), OUT_OF_RESOURCES)
    except (StoreError, TierError) as error:
        fail(str(error))
    except MemoryError:
        fail("there is no memory left for it; give it more, or less to do", OUT_OF_RESOURCES)
    except OSError as error:
        reason = error.strerror or str(error)
        fail(f"{error.filename}: {reason}" if error.filename else reason)
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name not in EXTRA_OF:
            raise
        print(needs(name), file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(status or OK)


def _report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = " ".join(f"{kind.__name__}: {error}".split())
    say(f"kvstore: internal error: {text} (set {_TRACEBACK}=1 to see where)", sys.stderr)
