"""The names of `import sbonnx`, and what happens where onnxruntime is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import sbonnx

ROOT = Path(__file__).resolve().parents[1]

HIDDEN = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "onnxruntime" else find(name, package)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", sbonnx.__all__)
def test_public_names(name: str) -> None:
    assert getattr(sbonnx, name) is getattr(sbonnx, name)
    assert name in dir(sbonnx)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="'sbonnx' has no attribute 'quantise'"):
        _ = sbonnx.quantise  # type: ignore[attr-defined]


def test_importing_is_light() -> None:
    done = python(
        "import sys, sbonnx; print(len({'numpy', 'onnx', 'pydantic', 'onnxruntime', 'typer'} & sys.modules.keys()))"
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize(
    "code",
    [
        "import sbonnx",
        "import sbonnx.quantize",
        "import sbonnx.model, sbonnx",
        "from sbonnx.quantize import quantize as q; import sbonnx; assert sbonnx.quantize is q",
    ],
)
def test_quantize_is_the_function(code: str) -> None:
    """Whatever was imported before: the module of the same name does not take its place."""
    done = python(
        f"{code}\nfrom sbonnx import quantize\nassert sbonnx.quantize is quantize\nprint(quantize.__module__)"
    )
    assert done.stdout.strip() == "sbonnx.quantize", done.stderr


def test_the_module_of_that_name_is_still_there() -> None:
    module = importlib.import_module("sbonnx.quantize")
    assert module.quantize is sbonnx.quantize


@pytest.mark.parametrize("code", ["import sbonnx", "from sbonnx.cli import main", "from sbonnx import quantize"])
def test_without_onnxruntime(code: str) -> None:
    """One line that says which to install; the command line ends with 2."""
    done = python(HIDDEN + code)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "ImportError: onnxruntime is not installed: pip install 'sbonnx[cpu]' (or 'sbonnx[gpu]' for NVIDIA)"
    ]


def test_without_onnxruntime_it_can_be_caught() -> None:
    done = python(HIDDEN + "try:\n    import sbonnx\nexcept ImportError as error:\n    print(error.name)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "onnxruntime\n", "")


def test_other_errors_keep_their_traceback() -> None:
    done = python(HIDDEN + "try:\n    import sbonnx\nexcept ImportError:\n    pass\n1 / 0")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
