"""Real engines: a sidecar, models, and runs in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from select import select
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("ENGINE_PATH")])]
PRODUCT = {"PYTHONPATH": os.pathsep.join(PATHS)}
"""The environment of commands that are run as users run them."""
SECONDS = 500 + 2 * int(os.environ.get("ENGINE_PROMPTS", "20"))
"""That one run may take."""


WAITS_ASLEEP = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
"""Of an engine's threads that wait for each other. Small models meet after each few operations: threads that spin
meanwhile take the cores from the sidecar, and from each other where a core has more than one, and a prompt takes ten
times as long."""


class WithoutEngine(pytest.Module):
    """A file of tests whose engine is missing. It is not read."""

    def collect(self) -> list[Any]:
        pytest.skip(f"{engine_of(self.path)} is not installed here: make test-engines has an environment of its own")


def engine_of(path: Path) -> str:
    return next((name for name in ("sglang", "lmcache") if name in path.name), "vllm")


@cache
def is_installed(engine: str) -> bool:
    return find_spec(engine) is not None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if is_installed(engine_of(module_path)):
        return None
    missing: pytest.Module = WithoutEngine.from_parent(parent, path=module_path)
    return missing


def sidecar_python() -> str:
    """The Python that has the sidecar's packages: another one than the engine's, as in production."""
    given = os.environ.get("KVSTORE_PYTHON") or str(ROOT / ".venv/bin/python")
    return given if Path(given).exists() else sys.executable


class Sidecar:
    """`kvstore serve` on a directory; whatever ended it, it can be started again. url: of its tenant's socket."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.url = f"unix:{directory}/kvstore.sock"
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """And wait until it serves."""
        command = [sidecar_python(), "-m", "kvstore", "serve", "--data", str(self.directory), "--dram", "512MiB"]
        self._process = subprocess.Popen(
            [*command, *self._options, "--json"], stdout=subprocess.PIPE, text=True, env={**os.environ, **PRODUCT}
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.said = json.loads(line)

    def kill(self) -> None:
        """SIGKILL to the daemon; its keeper starts it again."""
        os.kill(self.said["pid"], signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL to the daemon and its keeper: what is not on disk is lost."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # else it starts another one
        with suppress(ProcessLookupError):
            self.kill()
        process.kill()
        process.communicate()

    def stop(self) -> None:
        """An orderly end: what memory holds is written down."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            assert process.wait(60) == 0


@contextmanager
def started(name: str, *options: str) -> Iterator[Sidecar]:
    """One that has nothing yet. In a folder with a short name, since sockets' names are short."""
    directory = Path("/tmp") / f"kv-{os.getpid()}-{name[-12:]}"
    made = Sidecar(directory, *options)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with started(tmp_path.name) as made:
        yield made


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Random models, each made once."""
    made: dict[str, str] = {}

    def save(kind: str = "llama", **shape: Any) -> str:
        name = json.dumps([kind, shape], sort_keys=True, default=str)
        if name not in made:
            from engines import models

            make = {
                "llama": models.save_llama,
                "blip": models.save_blip,
                "windowed": models.save_windowed,
                "deepseek": models.save_deepseek,
                "neox": models.save_neox,
                "mistral": partial(models.save_llama, window=192),
                "trained": models.save_trained,
            }[kind]
            made[name] = str(make(tmp_path_factory.mktemp("model"), **shape))
        return made[name]

    return save


Run = Callable[[dict[str, Any]], dict[str, Any]]


class Nursery:
    """Runs of engines, one after the other. An engine of which a plan says that it is `kept` follows the next plan that
    names the same model, connector and options, too."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._runs = 0
        self._process: subprocess.Popen[str] | None = None

    def run(self, plan: dict[str, Any]) -> dict[str, Any]:
        """What the steps that have names told."""
        if (
            plan.get("alone")
            or plan.get("multiprocessing")
            or {"tensor_parallel_size", "pipeline_parallel_size"} & plan.get("options", {}).keys()
        ):
            return self._alone(plan)
        self._runs += 1
        given, outcome, log = (self._scratch / f"{self._runs}.{kind}" for kind in ("plan", "outcome", "log"))
        given.write_text(json.dumps(plan))
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engines.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_environment(),
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{_engine_of(plan)} {given} {outcome} {log}\n")
        self._process.stdin.flush()
        ended, _, _ = select([self._process.stdout], [], [], SECONDS)
        status = self._process.stdout.readline().strip() if ended else f"still there after {SECONDS} s"
        if status != "0":
            self.end()
            raise AssertionError(f"{status}: {log.read_text()[-6000:] if log.exists() else 'nothing logged'}")
        return dict(json.loads(outcome.read_text()))

    def _alone(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Of engines with processes of their own: vLLM is told at its import which processors each of them has, and a
        process that has used a GPU cannot be forked."""
        done = subprocess.run(
            [sys.executable, "-m", "engines.session"],
            input=json.dumps(plan),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=_environment(),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return dict(json.loads(done.stdout))

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            import psutil  # vLLM brings it: without vLLM every test here is skipped

            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def _engine_of(plan: dict[str, Any]) -> str:
    if not plan.get("kept"):
        return "-"
    told = [plan["model"], plan.get("transfer"), plan.get("options")]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


def _environment() -> dict[str, str]:
    return {**os.environ, **WAITS_ASLEEP, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *PATHS])}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("runs"))
    yield made
    made.end()


@pytest.fixture(scope="session")
def run(nursery: Nursery) -> Run:
    return nursery.run


class Pair:
    """Two engines that agree in everything but the store, and are asked by all tests that need no others. With each
    plan they begin anew; the one with the store does wrong what a test wants it to (`ChangingConnector`)."""

    OPTIONS: ClassVar[dict[str, Any]] = dict(
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=100,
        max_num_batched_tokens=1024,
        enable_lora=True,
        max_lora_rank=8,
        enable_prompt_embeds=True,
    )

    def __init__(self, model: str, sidecar: Sidecar, run: Run) -> None:
        self._model = model
        self._sidecar = sidecar
        self._run = run
        self.admin = f"{sidecar.directory}/admin.sock"
        self.observe = sidecar.directory / "observe.sock"
        self.http_port = sidecar.said["http_port"]
        self.events = f"ipc://{sidecar.directory}/events"
        """Where the engine with the store publishes KV events."""

    def alone(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """What the engine without a store answers."""
        return self._run({"model": self._model, "options": self.OPTIONS, "kept": True, "steps": steps})

    def with_store(self, steps: list[dict[str, Any]], options: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the other one answers. options: an engine of that kind which has these instead, and is kept likewise."""
        from engines import models

        transfer = models.connector(self._sidecar.url) | models.CHANGING
        events = dict(enable_kv_cache_events=True, publisher="zmq", endpoint=self.events)
        options = options or {**self.OPTIONS, "kv_events_config": events}
        return self._run({"model": self._model, "transfer": transfer, "options": options, "kept": True, "steps": steps})


@pytest.fixture(scope="session")
def pair(saved: Callable[..., str], nursery: Nursery) -> Iterator[Pair]:
    with started("pair", "--http", "127.0.0.1:0") as sidecar:
        yield Pair(saved(), sidecar, nursery.run)
        nursery.end()  # its engines hang up before their sidecar ends
