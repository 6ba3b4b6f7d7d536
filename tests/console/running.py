"""A sidecar that served hits, misses and an eviction, and a console beside it, as processes and in this one."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote

from programs import PATHS, serving_program
from service.sidecar import Sidecar
from tiering.nvme.lmdb_index import LmdbMaker
from waiting import wait_until
from workbench import MODEL, blank_pages, ids, random_pages, small_layout

LAYOUT = small_layout()


def serve_traffic(sidecar: Sidecar, prompts: int = 60) -> None:
    """More than a small store holds, each prompt asked for before it is put and some of them again; then, with many
    prompts, on until a look-up has missed something that was evicted."""
    with sidecar.client() as store:
        handle = store.namespace(model=MODEL, layout=LAYOUT, name="small model")

        def ask_for(number: int) -> None:
            prompt = ids(640, 100_000 * number)
            match = handle.match(prompt)
            if match.blocks:
                with handle.lease(match, deadline_ms=5000) as lease:
                    handle.get(lease, blank_pages(LAYOUT, match.blocks))
            else:
                handle.put(prompt, random_pages(LAYOUT, 10, seed=number))

        for number in [*range(prompts), *range(prompts - 4, prompts), *range(8)]:
            ask_for(number)
        for number in range(prompts, 1000 if prompts >= 60 else prompts):
            if sidecar.admin.facts().looked.miss_tokens.get("evicted"):
                break
            ask_for(number)
            ask_for(number - 55)
        else:
            assert prompts < 60, "nothing was evicted"
    while sidecar.whatif.step() or sidecar.prefixes.step():  # no thread does it here
        pass


@dataclass
class Answered:
    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass
class RunningConsole:
    """token: with which it is asked, where a test gives no other credential."""

    url: str
    process: subprocess.Popen[str]
    token: str = ""

    def ask(self, path: str, method: str = "GET", data: bytes | None = None, **headers: str) -> Answered:
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        if self.token and not named.keys() & {"authorization", "cookie"}:
            named["authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url.rstrip("/") + path, data, named, method=method)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=20) as answer:
                return Answered(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as answer:
            return Answered(answer.code, answer.headers, answer.read())

    def ticket(self) -> str:
        return str(self.ask("/api/operator").json["ticket"])

    def act(self, what: str, order: dict[str, Any], **headers: str) -> Answered:
        """Have the operator's action done. order: without a ticket, one is taken."""
        sent = json.dumps(order if "ticket" in order else {**order, "ticket": self.ticket()}).encode()
        return self.ask(f"/api/operator/{what}", "POST", sent, **{"content_type": "application/json", **headers})

    def log_in(self, token: str) -> str:
        """The cookie of a form's login."""
        origin = self.url.rstrip("/")
        answer = self.ask("/login", "POST", f"token={quote(token)}".encode(), Origin=origin)
        assert answer.status == 303
        return str(answer.headers["set-cookie"]).partition(";")[0]

    def until(self, path: str, holds: Any) -> Any:
        answers: list[Answered] = []

        def is_there() -> bool:
            answers.append(self.ask(path))
            return answers[-1].status == 200 and bool(holds(answers[-1].json))

        wait_until(is_there)
        return answers[-1].json


@contextmanager
def console(
    socket: Path, *flags: str, tokens: str = "", listen: str = "127.0.0.1:0", python: str = sys.executable
) -> Iterator[RunningConsole]:
    """tokens: of a file that it is given beside the socket; it is asked with the first."""
    if tokens:
        file = socket.with_name("console-tokens")
        file.write_text(tokens)
        flags = (*flags, "--token-file", str(file))
    command = [python, "-m", "kvstore", "console", "--json", "--socket", str(socket), "--listen", listen, *flags]
    with serving_program(command, {"PATH": "/usr/bin:/bin", **PATHS}) as (process, said):
        yield RunningConsole(said["console"], process, tokens.partition("\n")[0])


@contextmanager
def busy_console(
    directory: Path, *flags: str, prompts: int = 60, tokens: str = "", **options: Any
) -> Iterator[tuple[Sidecar, RunningConsole]]:
    """A sidecar that served traffic, and a console that has seen all of it."""
    with Sidecar(directory, **{"dram": "2MiB", "nvme": "4MiB", "indexes": LmdbMaker, **options}) as sidecar:
        assert sidecar.store.warmed(20)
        with console(sidecar.observe_path, *flags, tokens=tokens) as shown:
            shown.until("/api/status", lambda one: one["looked"] is not None)
            serve_traffic(sidecar, prompts)
            asked = sidecar.admin.facts().looked.asked_tokens
            shown.until("/api/series?window=15m", lambda one: one["sums"].get("asked") == asked)
            yield sidecar, shown
