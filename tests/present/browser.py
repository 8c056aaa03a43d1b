"""A headless Chromium, controlled over its DevTools pipe with the standard library only."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
"""Timeout of an answer in s; a busy machine takes a few."""

# The browser reads commands from descriptor 3 and answers on 4.
_START = (
    "import os, sys\nos.dup2(int(sys.argv[1]), 3)\nos.dup2(int(sys.argv[2]), 4)\nos.execv(sys.argv[3], sys.argv[3:])"
)


def found() -> str | None:
    """Path of the browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a browser. `wrong` and `fetched` refer to the document that was opened last."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.wrong: list[str] = []
        self.fetched: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol; return the answer."""
        self._last += 1
        number = self._last
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda said: said.get("id") == number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def open(self, path: Path, *, dark: bool = False, scripts: bool = True, width: int = 1280) -> None:
        """Open a file, wait until it is loaded."""
        self.wrong, self.fetched = [], []
        self.show(dark=dark, width=width)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._until(lambda said: said.get("method") == "Page.loadEventFired")

    def show(self, *, dark: bool, width: int) -> None:
        """Set the colour scheme and the width of the window, of the open page as well."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page; return its JSON value. Log messages are read as well."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            head, end, rest = self._rest.partition(b"\0")
            if not end:
                ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
                piece = os.read(self._answers, 1 << 20) if ready else b""
                assert piece, "the browser does not answer"
                self._rest += piece
                continue
            self._rest = rest
            said = json.loads(head)
            self._note(said.get("method", ""), said.get("params", {}))
            if wanted(said):
                return dict(said)

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.wrong.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.wrong.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.wrong.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.fetched.append(params["request"]["url"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Start a browser with a temporary profile; end all its processes at the end."""
    with tempfile.TemporaryDirectory(prefix="sbonnx-browser-", ignore_cleanup_errors=True) as profile:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # High numbers, so that 3 and 4 are free in the child.
        passed = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (theirs_in, theirs_out)]
        flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--disable-extensions"]
        flags += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to start as root otherwise
        child = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, passed), program, *flags],
            pass_fds=passed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (theirs_in, theirs_out, *passed):
            os.close(one)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)  # it ends with its pipe
            os.close(ours_in)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
