"""What the machine refuses, and signals: one line, exit code 2, and nothing left behind or lost."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.cli import main
from tests.support.bad_place import check_line, good_place, line, state

ROOT = Path(__file__).resolve().parents[2]

Fault = Callable[[pytest.MonkeyPatch, Path], None]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_place(tmp_path, monkeypatch)


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error` whatever it is called with."""

    def function(*args: Any, **keywords: Any) -> Any:
        raise error

    return function


def in_calibration(error: BaseException) -> Fault:
    """`error` in the middle of calibration: when the third sample runs."""
    runner = importlib.import_module("sbonnx.calib.engine.runner").LayerRunner
    run, count = runner.run, itertools.count()

    def third(*args: Any, **keywords: Any) -> Any:
        if next(count) >= 2:
            raise error
        return run(*args, **keywords)

    return lambda patch, folder: patch.setattr(runner, "run", third)


def in_verification(error: BaseException) -> Fault:
    """`error` once the file is written and is being proved."""
    verify = importlib.import_module("sbonnx.verify.file_check")
    return lambda patch, folder: patch.setattr(verify, "compare", raising(error))


def full_disk(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A write that stops half-way."""
    files = importlib.import_module("sbonnx.graph.storage.output_files")

    def write(path: Path, contents: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    patch.setattr(files, "_write", write)


def no_rename(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "replace", raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES))))


def read_only_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """root may write anywhere, so the system call is made to refuse."""
    mkdir = os.mkdir

    def refuse(path: Any, *args: Any, **keywords: Any) -> None:
        if str(folder / "out") in os.path.abspath(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **keywords)

    patch.setattr(os, "mkdir", refuse)


FAULTS = (
    ("full disk", full_disk, ("OutputError", "q.onnx", "No space left")),
    ("rename refused", no_rename, ("OutputError", "q.onnx", "Permission denied")),
    ("read-only folder", read_only_folder, ("OutputError", "out/q.onnx", "Read-only")),
    ("interrupt", in_calibration(KeyboardInterrupt()), ("interrupted; nothing was written",)),
    ("interrupt in the proof", in_verification(KeyboardInterrupt()), ("interrupted; nothing was written",)),
    ("memory", in_calibration(MemoryError()), ("MemoryError", "memory", "--split")),
    ("disk of temporary files", in_calibration(OSError(errno.ENOSPC, "x", "/tmp/a")), ("/tmp/a", "the disk is full")),
    ("no permission", in_calibration(OSError(errno.EACCES, "x", "f.bin")), ("f.bin", "permission denied")),
)


@pytest.mark.parametrize(("fault", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_what_the_machine_refuses(
    fault: Fault,
    words: tuple[str, ...],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An older output stays as it was, too."""
    (place / "out" / "q.onnx").write_text("older")
    before = state(place)
    fault(monkeypatch, place)
    code = main(line("--force"))
    check_line(code, *capfd.readouterr(), words)
    monkeypatch.undo()
    assert state(place) == before


def test_our_own_fault_says_so(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    in_calibration(KeyError("x"))(monkeypatch, place)
    before = state(place)
    assert main(line()) == 2
    _, err = capfd.readouterr()
    assert err.startswith("internal error: KeyError: 'x' (")
    assert len(err.splitlines()) == 1
    assert "--debug" in err
    assert main(line("--debug")) == 2
    _, err = capfd.readouterr()
    assert "Traceback" in err
    assert state(place) == before


# --- whole processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def command(place: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``sbonnx`` in the folder, with its temporary files in `tmp`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place / "tmp")}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sbonnx", *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_process_ends_with_the_line(place: Path, command: Callable[..., subprocess.Popen[str]]) -> None:
    before = state(place)
    process = command(*line(feeds="e.npz"))
    out, err = process.communicate(timeout=60)
    check_line(process.returncode, out, err, ("DataError", "e.npz"))
    assert state(place) == before


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals(sent: signal.Signals, place: Path, command: Callable[..., subprocess.Popen[str]]) -> None:
    """Sent while it reads data that take much longer than the test."""
    np.savez_compressed(place / "f.npz", x=np.zeros((200_000, 3, 8, 8), np.float32))
    before = {path.name for path in place.rglob("*")}
    process = command(*line("--split", "1", feeds="f.npz"))
    wait_until_open(place / "f.npz", process.pid)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    check_line(process.returncode, out, err, ("interrupted; nothing was written",))
    assert {path.name for path in place.rglob("*")} == before


SWALLOWED = """
import signal, sys, weakref
from sbonnx import cli
from sbonnx.cli.create import quantize

class Thing: pass

def run(given):
    thing = Thing()
    watch = weakref.ref(thing, lambda _: [signal.raise_signal(getattr(signal, sys.argv[1])) for _ in range(3)])
    del thing
    for _ in range(10**9):
        pass

quantize.run = run
sys.exit(cli.main(["quantize", "m.onnx", "--data", "d.npz", "-o", "out/q.onnx"]))
"""


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_a_signal_in_a_callback(sent: str, place: Path) -> None:
    """Python discards an exception of a weak reference's callback."""
    command = [sys.executable, "-c", SWALLOWED, sent]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False)
    check_line(done.returncode, done.stdout, done.stderr, ("interrupted; nothing was written",))


def wait_until_open(path: Path, pid: int) -> None:
    """Until a process has a file open; a minute at most."""
    for _ in range(6000):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(descriptor) == str(path):
                    return
        time.sleep(0.01)
    raise AssertionError("the data was never read")
