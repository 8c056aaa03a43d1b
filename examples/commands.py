"""Command lines of sbonnx in the examples: printed as a user types them, and run in the same process."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sbonnx import cli

Figures = dict[str, float]


def command(line: str) -> int:
    """Print and run a command line that begins with `sbonnx`; return its exit code, 0 or 1.

    Raises:
        SystemExit: the command ended with an error (exit code 2).
    """
    print(f"\n$ {line}", flush=True)
    code = cli.main(shlex.split(line)[1:])
    if code > 1:
        raise SystemExit(code)
    return code


def evaluation(report: str) -> tuple[float, float]:
    """Return the metric of the float and of the quantized model from a file that `--report` wrote."""
    rows = json.loads(Path(report).read_text())["metrics"]["evaluation"]["rows"]
    before, after = (row["metric"]["value"] for row in rows)
    return before, after


def measured(line: str) -> dict[str, Any]:
    """Print a command line that begins with `sbonnx`, run it with `--json`, and return the JSON value.

    Raises:
        SystemExit: the exit code is not 0.
    """
    print(f"\n$ {line}", flush=True)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = cli.main([*shlex.split(line)[1:], "--json"])
    if code:
        raise SystemExit(code)
    found = json.loads(shown.getvalue())
    assert isinstance(found, dict)
    return found


def evaluated(line: str) -> Figures:
    """Run a command line that begins with `sbonnx eval`; print and return the metric by model."""
    found = measured(line)
    values = {f"{found['metric']} {row['model']}": float(row["metric"]["value"]) for row in found["rows"]}
    for name, value in values.items():
        print(f"{name:32} {value:.4f}")
    return values


def checked(line: str, runtime: str) -> Figures:
    """Run a command line that begins with `sbonnx compare`; return the figures of a file in a runtime.

    Raises:
        SystemExit: the runtime refuses the file, or its outputs differ.
    """
    portability = measured(line)["portability"]
    print(portability["text"])
    (row,) = portability["rows"]
    metric = {row["model"]: float(row["metric"]["value"]) for row in portability["evaluation"]["rows"]}
    return {
        "top-1 float": metric["float"],
        f"top-1 in {runtime}": metric[runtime],
        "nodes on another processor": len(row["fallback"]),
    }


def size(path: str) -> float:
    """Return the size of a file in kB."""
    return Path(path).stat().st_size / 1000


def main(run: Callable[[], Figures], description: str | None) -> None:
    """Run an example in the folder that the command line names, and print its figures."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for models and data; created if it does not exist")
    folder = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    figures = run()
    print("\nFigures:")
    for name, value in figures.items():
        print(f"  {name:32} {value:.4g}")
