"""Transcripts of the command line at 80 columns: the help of every command, and the output of `quantize`."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from sbonnx import quantize
from sbonnx.assets import digits
from sbonnx.cli.app import GROUPS, VERBS
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.summary import facts_of, show_summary

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]

TERMINAL: Final = """
import sys
from sbonnx.cli import main
for words in sys.argv[1].splitlines():
    print("$ sbonnx", words, flush=True)
    main(words.split())
    print(flush=True)
"""


def run(lines: list[str], folder: Path, *, terminal: bool = False, errors: bool = False) -> str:
    """Run command lines in one process and return its stdout, of a pipe or terminal of 80 columns.

    Args:
        errors: return its stderr too; else there must be nothing in it.
    """
    variables = {"COLUMNS": "80", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", TERMINAL, "\n".join(lines)]
    reader, writer = pty.openpty() if terminal else os.pipe()
    with os.fdopen(writer, "wb") as stdout:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdout=stdout,
            stderr=subprocess.STDOUT if errors else subprocess.PIPE,
        )
    parts = []
    with suppress(OSError):  # of a terminal whose other end is closed
        while part := os.read(reader, 4096):
            parts.append(part)
    os.close(reader)
    told = (process.communicate()[1] or b"").decode()
    if process.returncode or told:
        raise AssertionError(f"exit code {process.returncode}: {told}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def commands() -> Iterator[str]:
    """Yield the words of every command."""
    yield from (verb.__name__.rpartition(".")[2] for verb in VERBS)
    for group in GROUPS:
        name = group.__name__.rpartition(".")[2]
        yield name
        yield from (f"{name} {each.name}" for each in group.COMMANDS)
    yield "help"


def help_texts() -> str:
    """Return the help of the program and of every command, below the version of typer that formatted it."""
    with TemporaryDirectory() as folder:
        text = run(["--help", *(f"{words} --help" for words in commands())], Path(folder))
    return f"typer {version('typer')}\n\n{text}"


CASES: Final = {
    "good": "",
    "lost": "--bits w2a2 --set rounding=nearest --set heads=none",
    "doubtful": "--data bytes.npz",
    "TensorRT": "--backend tensorrt",
}
"""Results of each kind, by options that lead to them."""


def quantize_output() -> str:
    """Return the output of `quantize` for results of each kind, without latencies; figures are 0.

    Figures depend on the machine. A slow result has a latency that is set by hand.
    """
    words = "quantize digits.onnx -o digits.int8.onnx --force --cpu vnni --set VERIFY.LATENCY=false"
    lines = [f"{words} {'' if '--data' in more else '--data calib.npz'} {more}" for more in CASES.values()]
    with TemporaryDirectory() as folder:
        images = np.load(digits().calib)["image"]
        (Path(folder) / "digits.onnx").write_bytes(digits().model.read_bytes())
        (Path(folder) / "calib.npz").write_bytes(digits().calib.read_bytes())
        np.savez(Path(folder) / "bytes.npz", image=255 * images)
        text = run([" ".join(line.split()) for line in lines], Path(folder), terminal=True, errors=True)
    text = re.sub(r"(?<![\w.])\d+(\.\d+)?(e[-+]?\d+)?(?![\w])", "0", f"{text}{slow_output()}")
    return re.sub(r" +$", "", re.sub(r"(?<=\S) {2,}", "  ", re.sub("─+", "──", text)), flags=re.MULTILINE)


def slow_output() -> str:
    """Return the summary of a result that is slower than float."""
    settings: dict[str, Any] = {"verify.latency": False, "cpu": "vnni", "samples": 64}
    report = quantize(digits().model, digits().calib, **settings)
    assert report.metrics is not None
    slow = replace(report.metrics, latency_ratio=1.8, latency_interval=(1.6, 1.9), busy=False)
    report = replace(report, model="digits.onnx", output="digits.int8.onnx", metrics=slow)
    with redirect_stdout(io.StringIO()) as shown:
        show_summary(Printer(), report, facts_of(report))
    return f"$ # a file that is slower than float\n{shown.getvalue()}\n"


TRANSCRIPTS: Final = {"help.txt": help_texts, "quantize.txt": quantize_output}
