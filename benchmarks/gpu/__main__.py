"""Tests, calibration and TensorRT engines on a machine with an NVIDIA GPU, in at most nine minutes.

    python -m benchmarks.gpu [--model resnet18] [--environment FOLDER] [--here] [--engines tensorrt-rtx]
                             [--output FOLDER] [--dry-run]

Needs Python, pip and the driver; everything else is installed as wheels into an environment of its own. With `--here`
nothing is installed: the running interpreter has what is measured. Every step is a process with a limit of time. One
that fails is a row with its reason, and the next ones run. Writes results.json, page.md and a log of each step.
ModelOpt is run where `make peers` has installed it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from benchmarks.gpu import ENGINES
from benchmarks.results import ROOT, arguments, table

LIMIT_S: Final = 540.0
"""Maximum duration of the whole command in seconds."""

KINDS: Final = ("float32", "fp16", "int8", "fp8", "int4-weights", "modelopt-int8")
"""Files of which engines are built."""

BUILDERS: Final = {"tensorrt": "tensorrt-cu13>=10.13,<11", "tensorrt-rtx": "tensorrt-rtx-cu13>=1.7"}
"""Packages that build engines, with CUDA 13 as onnxruntime-gpu has it."""

TESTING: Final = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "jsonschema>=4.18")
PACKAGES: Final = ("onnxruntime-gpu[cuda,cudnn]>=1.31", *TESTING)
GPU_TESTS: Final = (
    *("tests/benchmarks/test_gpu_targets.py", "tests/calib/engine/test_cuda.py"),
    *("tests/calib/engine/test_runner.py", "tests/moments/test_sums.py"),
)
"""Files with tests marked `gpu` that do not need torch alone."""

HEADER: Final = ("step", "state", "s", "result")


@dataclass(frozen=True)
class Step:
    """A process with a limit.

    Attributes:
        name: name in the table and of its files.
        command: program and arguments.
        limit_s: maximum duration in seconds.
        result: file that it writes: JSON, or JUnit XML of tests; None: only its exit code counts.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    result: Path | None = None


@dataclass(frozen=True)
class Row:
    """Outcome of a step.

    Attributes:
        step: name of the step.
        ok: whether it ended with exit code 0 and a usable result.
        seconds: duration.
        reason: why it failed; "" otherwise.
        facts: content of its result.
    """

    step: str
    ok: bool
    seconds: float
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Return the table row; facts that are lists or objects are only in results.json."""
        shown = {name: value for name, value in self.facts.items() if not isinstance(value, (list, dict))}
        text = "; ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
        )
        said = (self.reason or text).replace("|", "\\|")
        return [self.step, "ok" if self.ok else "failed", f"{self.seconds:.0f}", said]


def steps(model: str, pack: Path, environment: Path | None, output: Path, engines: str = ENGINES[0]) -> list[Step]:
    """Return the steps in order; their limits add up to less than `LIMIT_S`.

    Args:
        environment: where packages are installed; None: nothing is installed.
        engines: one of `ENGINES`.
    """
    python = sys.executable if environment is None else str(environment / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    tests = output / "tests.xml"
    places = ("--pack", str(pack), "--output", str(output))
    child = (python, "-m", "benchmarks.gpu.child", "--model", model, "--engines", engines, *places)
    installations = [
        Step("environment", (sys.executable, "-m", "venv", str(environment)), 15),
        Step("install", (*pip, *PACKAGES, "-e", str(ROOT)), 120),
        Step("install engines", (*pip, BUILDERS[engines]), 75),
    ]
    return [
        *(installations if environment else ()),
        Step("tests", (python, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS, f"--junitxml={tests}"), 50, tests),
        Step("calibration", (*child, "calibration"), 40, output / "calibration.json"),
        *(Step(f"engine {kind}", (*child, kind), 38, output / f"{kind}.json") for kind in KINDS),
    ]


def run(step: Step, left_s: float, log: Path, environment: Path) -> Row:
    """Run a step within its limit and the seconds that are left.

    At the limit, its whole process group is ended, so that what it started does not run on.
    """
    limit = min(step.limit_s, left_s)
    if limit <= 0:
        return Row(step.name, False, 0.0, f"not started: the {LIMIT_S:.0f} s of the command are over")
    if step.result is not None:
        step.result.unlink(missing_ok=True)
    if not Path(step.command[0]).is_file():
        return Row(step.name, False, 0.0, f"not started: there is no {step.command[0]}")
    start = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command, stdout=file, stderr=file, cwd=ROOT, env=variables(environment), start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Row(step.name, False, time.monotonic() - start, f"not finished within {limit:.0f} s")
    seconds = time.monotonic() - start
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()] or [f"exit code {code}"]
        return Row(step.name, False, seconds, said[-1][:200])
    if step.result is None:
        return Row(step.name, True, seconds)
    if step.result.suffix == ".xml":
        return of_tests(step, seconds)
    return Row(step.name, True, seconds, facts=json.loads(step.result.read_text(encoding="utf-8")))


def of_tests(step: Step, seconds: float) -> Row:
    """Return the counts of tests that passed; if all were skipped, the first reason."""
    cases = list(ElementTree.parse(str(step.result)).getroot().iter("testcase"))
    skipped = [case[0].get("message", "") for case in cases if case.find("skipped") is not None]
    facts = {"passed": len(cases) - len(skipped), "skipped": len(skipped)}
    reason = "" if facts["passed"] else f"all are skipped: {next(iter(skipped), 'there are none')}"
    return Row(step.name, not reason, seconds, reason, facts)


def variables(environment: Path) -> dict[str, str]:
    """Return the environment variables by which onnxruntime and TensorRT find the libraries of the wheels."""
    packages = [*environment.glob("lib/python*/site-packages")]
    folders = [place for root in packages for part in ("nvidia/*/lib", "tensorrt_libs") for place in root.glob(part)]
    folders_searched = [*map(str, sorted(folders)), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders_searched)}


def page(rows: Sequence[Row], model: str) -> str:
    """Return the page: what the steps gave, and the slowest layers of each engine."""
    failed = sum(not row.ok for row in rows)
    layers = [
        [row.step.removeprefix("engine "), *map(str, layer.values())]
        for row in rows
        for layer in row.facts.get("slowest", ())
    ]
    total = sum(row.seconds for row in rows)
    parts = [
        f"# NVIDIA GPU, {model}",
        f"{len(rows) - failed} of {len(rows)} steps gave a result, in {total:.0f} s. "
        "An engine runs one sample. ms: mean of runs one after another (median of 5 rounds). SQNR against the float "
        "model on the CPU. Planned: operators with quantized inputs; integers: those whose layer reads integers.",
        table(HEADER, [row.cells() for row in rows]),
    ]
    if layers:
        parts += ["## Slowest planned operators", table(("file", "node", "runs in", "ms"), layers)]
    return "\n\n".join(parts) + "\n"


def measure(todo: Sequence[Step], output: Path, environment: Path, model: str) -> list[Row]:
    """Run the steps and write the results after each, so that an interrupted run has them too."""
    output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + LIMIT_S
    rows: list[Row] = []
    for step in todo:
        log = output / f"{step.name.replace(' ', '-')}.log"
        rows.append(run(step, end - time.monotonic(), log, environment))
        print(" | ".join(rows[-1].cells()), flush=True)
        content = {"model": model, "steps": [asdict(row) for row in rows]}
        (output / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (output / "page.md").write_text(page(rows, model), encoding="utf-8")
    return rows


def main() -> int:
    """Run all steps, or print their commands. Exit code 1 if one failed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="resnet18", help="resnet18, mobilenetv2 (random weights) or one of the pack")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "gpu" / "environment")
    parser.add_argument("--here", action="store_true", help="install nothing: use the running interpreter")
    parser.add_argument("--engines", choices=ENGINES, default=ENGINES[0], help="what builds the engines")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu" / "results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and their limits, run none")
    options: argparse.Namespace = parser.parse_args()
    environment, output = options.environment.absolute(), options.output.absolute()
    place = None if options.here else environment
    todo = steps(options.model, options.pack.absolute(), place, output, options.engines)
    if options.dry_run:
        for step in todo:
            print(f"# {step.name}: at most {step.limit_s:.0f} s\n{shlex.join(step.command)}")
        return 0
    return int(not all(row.ok for row in measure(todo, output, environment, options.model)))


if __name__ == "__main__":
    raise SystemExit(main())
