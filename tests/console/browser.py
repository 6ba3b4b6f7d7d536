"""Debian's chromium, driven over its own protocol through a pair of pipes: what a page shows, logs and asks for."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run".split()
READY = "document.body && document.body.dataset.ready === '1'"
LEFT = "Inspected target navigated or closed"
"""What is asked of a page that is being left has no value."""
PIECES = (
    "Object.fromEntries([...document.querySelectorAll('[data-piece]')]"
    ".map(one => [one.dataset.piece, Number(one.dataset.tokens)]))"
)
"""Tokens by the name of each piece of a page's bar."""


class Browser:
    """One tab. Close it, or use it as a context."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()

        def as_three_and_four() -> None:
            first, second = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (its_in, its_out))  # above both
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_three_and_four,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.asked: list[str] = []
        """URLs that pages asked for."""
        self.logged: list[str] = []
        """What pages wrote to the browser's console, and what the browser wrote there."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30)
            if answer.get("id") == self._number:
                if answer.get("error", {}).get("message") == LEFT:
                    return {"result": {}}
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        body, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(body)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif message.get("method") == "Log.entryAdded":
            self.logged.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.logged.append(str(params["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.logged.append(str(params["exceptionDetails"]))
        return message

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def looks(self, width: int, height: int, theme: str) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && {READY}")

    def log_in(self, url: str, token: str, then: str = f"location.pathname !== '/login' && {READY}") -> None:
        """By the form, which a page leads to."""
        self.call("Page.navigate", url=url)
        self.until("location.pathname === '/login' && document.getElementById('token')")
        self.value(f"document.getElementById('token').value = '{token}'; document.forms[0].submit()")
        self.until(then)
        self.logged.clear()  # of the form: that it has no field for a user's name

    def until(self, expression: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (expression, self.logged)
            time.sleep(0.05)

    def picture(self, path: Path) -> None:
        """All of the page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 4000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
