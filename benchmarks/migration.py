"""Scripts of the migration guide beside sbonnx, on the bundled model: `python -m benchmarks.migration [--write]`.

The scripts are the `py` blocks of docs/migration/others.md, whose first line names the peer. Each runs by the Python of
the peer's environment (`make peers`). The table has top-1 and SQNR on the bundled evaluation images, the size of the
file, and the CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime

from benchmarks.peers.environments import FOLDER, ROOT, absent, python_of
from sbonnx.assets import digits

PAGE: Final = ROOT / "docs" / "migration" / "others.md"
BLOCK: Final = re.compile(r"^```py\n# (\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TABLE: Final = re.compile(r"^\| tool \|.*?\n\n", re.MULTILINE | re.DOTALL)
TITLES: Final = {"nncf": "NNCF", "aimet": "AIMET", "quark": "Quark", "modelopt": "ModelOpt"}
COMMANDS: Final = {"sbonnx": (), "trt": ("--backend", "tensorrt")}
"""Options of sbonnx by the ending of the file's name."""

SECONDS: Final = 600
"""Time limit of a script."""


@dataclass(frozen=True)
class Measured:
    """Result of a script.

    Attributes:
        top1: share of evaluation images that are classified correctly.
        sqnr_db: SQNR of the scores against float, in dB.
        kilobytes: size of the file, in units of 1000 bytes.
        cpu: CPU seconds of the process.
    """

    top1: float
    sqnr_db: float
    kilobytes: float
    cpu: float


def scripts() -> dict[str, str]:
    """Return the scripts of the page by peer."""
    return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def run(command: list[str], output: str, folder: Path) -> Measured:
    """Run a command in a folder with the bundled files, and measure the file that it writes."""
    for path in (digits().model, digits().calib):
        shutil.copy(path, folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return measure(folder / output, cpu)


def measure(path: Path, cpu: float) -> Measured:
    """Measure a file on the evaluation images, by onnxruntime with all optimizations."""
    with np.load(digits().eval) as arrays:
        images, labels = arrays["image"], arrays["label"]
    scores = []
    for model in (digits().model, path):
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        scores.append(session.run(None, {session.get_inputs()[0].name: images})[0].astype(np.float64))
    sqnr = 10 * np.log10((scores[0] ** 2).sum() / ((scores[1] - scores[0]) ** 2).sum())
    top1 = float((scores[1].argmax(1) == labels).mean())
    return Measured(top1, float(sqnr), path.stat().st_size / 1000, cpu)


def run_peer(name: str, folder: Path, environments: Path = FOLDER) -> Measured:
    """Run the script of a peer by the Python of its environment."""
    script = folder / f"{name}_script.py"
    script.write_text(scripts()[name], encoding="utf-8")
    return run([str(python_of(environments, name)), script.name], f"digits_{name}.onnx", folder)


def run_sbonnx(ending: str, folder: Path) -> Measured:
    """Run the command of the page that writes digits_ENDING.onnx."""
    output = f"digits_{ending}.onnx"
    line = ["quantize", "digits.onnx", "--data", "digits_calib.npz", "--split", "32", *COMMANDS[ending], "-o", output]
    return run([sys.executable, "-m", "sbonnx", *line], output, folder)


def table(rows: dict[str, Measured]) -> str:
    """Return the rows as Markdown."""
    lines = ["| tool | top-1 | SQNR, dB | kB | CPU s |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {row.top1:.4f} | {row.sqnr_db:.1f} | {row.kilobytes:.0f} | {row.cpu:.1f} |"
        for name, row in rows.items()
    ]
    return "\n".join([*lines, "", ""])


def main() -> int:
    """Print the table, or write it into the page; exit code 1 if a peer is not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the environments")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    given = parser.parse_args()
    reasons = {name: why for name in scripts() if (why := absent(given.peers, name)) is not None}
    rows = {}
    for name in scripts():
        if name not in reasons:
            with tempfile.TemporaryDirectory() as folder:
                rows[TITLES[name]] = run_peer(name, Path(folder).resolve(), given.peers)
    for ending, options in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[" ".join(["sbonnx", *options])] = run_sbonnx(ending, Path(folder).resolve())
    text = table(rows)
    print(text)
    if given.write:
        PAGE.write_text(TABLE.sub(text, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    for name, why in reasons.items():
        print(f"{name}: {why}", file=sys.stderr)
    return int(bool(reasons))


if __name__ == "__main__":
    raise SystemExit(main())
