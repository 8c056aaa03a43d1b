"""Run a fuzz case in a folder of its own and judge how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 60.0
"""A case that takes longer hangs."""

MEMORY: Final = 1 << 30
"""Bytes that a command may take beyond the program itself and the size of its input files."""

LINE: Final = 500
"""Characters of the one line that names a mistake."""

CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OUTPUT: Final = "out"
"""The folder in which a case writes its files."""

STATE: Final = f"{OUTPUT}/.sbonnx"
"""The state folder of a batch."""

REPORTS: Final = (".json", ".sarif", ".html", ".xml")
"""Endings of documents that must be readable whatever names they hold."""

CLASSES: Final = {0: "done", 1: "below quality, reported", 2: "refused in one line"}


@dataclass(frozen=True)
class Case:
    """One command line over the files of one folder.

    Attributes:
        files: content by path relative to the folder.
        argv: the command line, without the program's name. Everything that it writes goes to the folder `out`.
        same: two paths, model and result, that onnxruntime must find to compute the same where the exit code is 0.
        fifos: paths that are FIFOs; links: targets by path of a symlink.
    """

    files: Mapping[str, bytes]
    argv: tuple[str, ...]
    same: tuple[str, str] | None = None
    fifos: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    def lay(self, folder: Path) -> None:
        """Write the files into `folder`."""
        (folder / OUTPUT).mkdir()
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for name in self.fifos:
            os.mkfifo(folder / name)
        for name, target in self.links.items():
            (folder / name).symlink_to(target)


@dataclass(frozen=True)
class Verdict:
    """Result of a case: its class, and every rule that it broke."""

    name: str
    faults: tuple[str, ...]
    code: int
    seconds: float
    peak: int
    out: str
    err: str


class Zygote:
    """The server of `tests.fuzz.zygote`: starts on the first case, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ready = 0

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None

    def run(self, case: Case) -> Verdict:
        """Run `case` in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder, logs = Path(place, "case"), Path(place, "logs")
            folder.mkdir()
            (logs / "tmp").mkdir(parents=True)
            case.lay(folder)
            before = state(folder)
            reply = self.ask(folder, logs, case.argv, same=case.same)
            out, err = (_text(logs / name) for name in ("out", "err"))
            left = [str(path.relative_to(logs)) for path in sorted((logs / "tmp").rglob("*"))]
            reports = {path.name: _text(path) for path in sorted((folder / OUTPUT).iterdir()) if path.suffix in REPORTS}
            verdict = self._judge(case, reply, out, err, before, state(folder), left, reports)
            shutil.rmtree(logs / "tmp", ignore_errors=True)
        return verdict

    def ask(
        self,
        folder: Path,
        logs: Path,
        argv: Sequence[str],
        *,
        seconds: float = SECONDS,
        file_size: int | None = None,
        same: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Run a command line in `folder`; stdout and stderr go to `logs`, temporary files to `logs/tmp`.

        Args:
            seconds: after that long it is killed, and everything it has started.
            file_size: bytes past which a write fails, as on a full disk.
        """
        request = {
            "argv": list(argv),
            "folder": str(folder),
            "logs": str(logs),
            "seconds": seconds,
            "file_size": file_size,
            "same": list(same) if same else None,
        }
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.zygote"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            self._ready = int(json.loads(self._process.stdout.readline())["ready"])
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply

    def _judge(
        self,
        case: Case,
        reply: Mapping[str, Any],
        out: str,
        err: str,
        before: Mapping[str, str],
        after: Mapping[str, str],
        left: Sequence[str],
        reports: Mapping[str, str],
    ) -> Verdict:
        code = int(reply["code"])
        faults = []
        if reply["hung"]:
            faults.append(f"no end after {SECONDS:g} s")
        elif code < 0 and not reply["ended"]:
            faults.append(f"ended by signal {-code}")
        elif code not in CLASSES and not reply["ended"]:
            faults.append(f"exit code {code}")
        if "Traceback" in err or "Traceback" in out:
            faults.append("a traceback")
        if "internal error" in err:
            faults.append("an internal error")
        size = sum(len(content) for content in case.files.values())
        if reply["peak"] > self._ready + size + MEMORY:
            faults.append(f"{reply['peak'] >> 20} MiB of memory for {size} bytes of input")
        if code == 2:
            faults += _wrong_line(err)
        if CONTROLS.search(err) or CONTROLS.search(out):
            faults.append("control characters on the terminal")
        changed = sorted(name for name, digest in before.items() if after.get(name) != digest)
        if changed:
            faults.append(f"changed its input: {changed}")
        leftovers = left_behind(set(after) - set(before), refused=code == 2)
        if leftovers:
            faults.append(f"left behind: {leftovers}")
        if left:
            faults.append(f"left in the temporary folder: {list(left)}")
        if reply["proof"]:
            faults.append(f"another result: {reply['proof']}")
        if code in (0, 1):
            faults += unreadable(reports, out if "--json" in case.argv else None)
        name = "fault" if faults else CLASSES.get(code, "onnxruntime itself crashes on the original")
        return Verdict(name, tuple(faults), code, float(reply["seconds"]), int(reply["peak"]), out, err)


def left_behind(new: Iterable[str], *, refused: bool) -> list[str]:
    """Return the new paths that a case must not leave: none outside of its output, none hidden, none if it was refused.

    Digests in the state folder of a batch are allowed; they are written if the inputs are older than 2 s.
    """
    return sorted(
        name for name in new if refused or not name.startswith(f"{OUTPUT}/") or "/." in name.removeprefix(STATE)
    )


def _wrong_line(err: str) -> list[str]:
    lines = err.splitlines()
    if len(lines) != 1:
        return [f"{len(lines)} lines for one mistake"]
    return [f"a line of {len(err)} characters"] if len(err) > LINE + 1 else []


OWN_SCRIPTS = frozenset(path.read_text("utf-8").strip() for path in (ROOT / "sbonnx" / "present" / "html").glob("*.js"))
"""Programs that pages contain."""


class Page(HTMLParser):
    """Collects what a name could smuggle into a page: programs that are not ours, frames, handlers, addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self._runs = False

    def handle_data(self, data: str) -> None:
        if self._runs and data.strip() not in OWN_SCRIPTS:
            self.foreign.append(f"script {data[:80]}")

    def handle_endtag(self, tag: str) -> None:
        self._runs = self._runs and tag != "script"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._runs = tag == "script" and dict(attrs).get("type") != "application/json"
        if tag in ("iframe", "object", "embed", "base"):
            self.foreign.append(tag)
        self.foreign += [name for name, _ in attrs if name.startswith("on") or name in ("src", "srcdoc")]


def unreadable(reports: Mapping[str, str], printed: str | None) -> list[str]:
    """Defects in the documents of a run: broken syntax, or markup from a name."""
    faults = []
    for name, text in {**reports, **({"stdout.json": printed} if printed is not None else {})}.items():
        try:
            if name.endswith((".json", ".sarif")):
                json.loads(text)
            elif name.endswith(".xml"):
                ElementTree.fromstring(text)
            else:
                page = Page()
                page.feed(text)
                if page.foreign:
                    faults.append(f"{name}: {page.foreign}")
        except (ValueError, ElementTree.ParseError) as error:
            faults.append(f"{name}: {error}")
    return faults


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace") if path.exists() else ""


def state(folder: Path) -> dict[str, str]:
    """Digest of every file below `folder` by relative path; the kind where it is none.

    Files that another process removes meanwhile are absent.
    """
    found = {}
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):
                found[str(path.relative_to(folder))] = _kind(path)
    return dict(sorted(found.items()))


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"mode {path.lstat().st_mode:o}"


def describe(case: Case, verdict: Verdict) -> str:
    """Text with which a person can reproduce a fault."""
    return (
        f"{'; '.join(verdict.faults)}\n  sbonnx {' '.join(map(repr, case.argv))}\n"
        f"  exit code {verdict.code}, {verdict.seconds:.1f} s\n  {verdict.err[-3000:]}"
    )
