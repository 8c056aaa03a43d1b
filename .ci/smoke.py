"""Tests an installed sbonnx outside the checkout: `PYTHON .ci/smoke.py [--loops yes|no]`.

Runs by the interpreter of the environment in which the wheel and the packages of TOOLS are installed. The tests are
copied to a temporary folder, so that nothing is imported from the checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

TESTS: Final = (
    "tests/test_spec.py",
    "tests/test_ops.py",
    "tests/test_assets.py",
    "tests/test_public.py",
    "tests/system/test_isolation.py",
    "tests/cli/test_main.py",
    "tests/cli/test_quantize.py",
    "tests/calib/sketches",
    "tests/qdq",
)
"""Arithmetic against onnxruntime, compiled loops against numpy, public names, command line, Q/DQ in files."""

TOOLS: Final = ("hypothesis", "jsonschema", "pytest", "pytest-timeout")
"""Packages that the tests need; cibuildwheel and the Makefile install them."""

LOOPS: Final = """
import pathlib, sys, sbonnx
from sbonnx.system.native import missing
place = pathlib.Path(sbonnx.__file__).resolve()
sys.exit(f"{place} is the checkout" if pathlib.Path(sys.argv[1]) == place.parents[1] else " ".join(missing()) or 0)
"""
"""Program that fails with a message: where sbonnx is imported from, or the compiled loops that are missing."""


def main() -> int:
    """Run the demo and the tests; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", choices=("yes", "no"), default="yes", help="yes: fail without the compiled loops")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tests", Path(folder) / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        commands = (
            ["-c", LOOPS, str(ROOT)],
            ["-m", "sbonnx", "demo", "--out", "demo"],
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", "-m", "not slow", *TESTS],
        )
        for command in commands[1:] if given.loops == "no" else commands:
            done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=False)
            if done.returncode:
                return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
