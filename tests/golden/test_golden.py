"""Output files stay the same, byte for byte: `python -m tests.golden --write` records those of a wanted change."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PACK, ROOT
from tests.golden.cases import CASES
from tests.golden.digests import digest, environment, recorded

RECORDED = recorded()

REPEATING = ("digits, auto", "digits, mixed", "digits, batch")
"""Cases that quantize the same model many times, which takes minutes in numpy."""


@pytest.fixture(scope="module", autouse=True)
def same_environment() -> None:
    """Skip elsewhere: other processors and versions differ in the last bits of float sums."""
    found = environment()
    other = [f"{name} {found.get(name)}" for name, value in RECORDED.environment.items() if found.get(name) != value]
    if other:
        pytest.skip(f"the digests were recorded with another environment than {', '.join(other)}")


def test_every_case_is_recorded() -> None:
    assert list(RECORDED.digests) == list(CASES)


LONG = {"digits, auto", "digits, batch", "mobilenetv2_tin200, w8a8", "fastestdet, w8a8", "cifar_resnet20, w4a4"}
"""Cases of seconds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
def test_the_files_are_the_same(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.packed and not (PACK / "manifest.json").is_file():
        pytest.skip("the real models are neither in ../shared/data nor where SBONNX_PACK points")
    if case.torch and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert digest(case, tmp_path) == RECORDED.digests[name]


@pytest.mark.slow
def test_without_compiled_loops() -> None:
    """In another process with another hash seed and more threads of BLAS. Searches and batches only repeat the rest.

    Every other case: `tests/e2e/test_same_bytes.py` compares all techniques so.
    """
    names = [name for name, case in CASES.items() if not (case.packed or case.torch or name in REPEATING)][::2]
    environment = os.environ | {"SBONNX_COMPILED": "0", "OPENBLAS_NUM_THREADS": "3", "PYTHONHASHSEED": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", *names],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
