"""Transcripts of the command line at 80 columns: the help of every command, and the output of `quantize`."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from sbonnx.assets import digits
from sbonnx.cli.app import GROUPS, VERBS

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


def run(lines: list[str], folder: Path, *, terminal: bool = False) -> str:
    """Run command lines in one process and return its stdout, of a pipe or terminal of 80 columns."""
    variables = {"COLUMNS": "80", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", TERMINAL, "\n".join(lines)]
    reader, writer = pty.openpty() if terminal else os.pipe()
    with os.fdopen(writer, "wb") as stdout:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **variables}, stdout=stdout, stderr=subprocess.PIPE
        )
    parts = []
    with suppress(OSError):  # of a terminal whose other end is closed
        while part := os.read(reader, 4096):
            parts.append(part)
    os.close(reader)
    errors = process.communicate()[1].decode()
    if process.returncode or errors:
        raise AssertionError(f"exit code {process.returncode}: {errors}")
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


def quantize_output() -> str:
    """Return the output of `quantize`, without latencies; figures, which depend on the machine, are 0."""
    words = "quantize digits.onnx --data calib.npz -o digits.int8.onnx --set VERIFY.LATENCY=false"
    with TemporaryDirectory() as folder:
        (Path(folder) / "digits.onnx").write_bytes(digits().model.read_bytes())
        (Path(folder) / "calib.npz").write_bytes(digits().calib.read_bytes())
        text = run([words], Path(folder), terminal=True)
    text = re.sub(r"(?<![\w.])\d+(\.\d+)?(e[-+]?\d+)?(?![\w])", "0", text)
    return re.sub(r" +$", "", re.sub(r"(?<=\S) {2,}", "  ", re.sub("─+", "──", text)), flags=re.MULTILINE)


TRANSCRIPTS: Final = {"help.txt": help_texts, "quantize.txt": quantize_output}
