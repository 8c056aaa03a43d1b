"""The names of `import sbonnx`, and what happens where onnxruntime is missing."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sbonnx
from sbonnx import errors
from sbonnx.assets import digits

ROOT = Path(__file__).resolve().parents[1]

HIDDEN = 'import sys; sys.modules["onnxruntime"] = None\n'


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", sbonnx.__all__)
def test_public_names(name: str) -> None:
    assert getattr(sbonnx, name) is getattr(sbonnx, name)
    assert name in dir(sbonnx)


def test_only_public_names_are_listed() -> None:
    assert dir(sbonnx) == sorted(sbonnx.__all__)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="'sbonnx' has no attribute 'quantise'"):
        _ = sbonnx.quantise  # type: ignore[attr-defined]


def test_importing_is_light() -> None:
    done = python(
        "import sys, sbonnx; print(len({'numpy', 'onnx', 'pydantic', 'onnxruntime', 'typer'} & sys.modules.keys()))"
    )
    assert done.stdout.strip() == "0"


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Loading a submodule sets an attribute of its name on the package."""
    for name in sbonnx.__all__:
        assert name == "__version__" or importlib.util.find_spec(f"sbonnx.{name}") is None


def test_without_onnxruntime() -> None:
    """What needs it says which to install; the rest works."""
    done = python(
        HIDDEN + "import sbonnx\nsbonnx.parse_qconfig\n"
        "try:\n    from sbonnx import quantize\nexcept ImportError as error:\n    print(error.name, error)"
    )
    said = "onnxruntime is not installed: pip install 'sbonnx[cpu]' (or 'sbonnx[gpu]' for NVIDIA)"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"onnxruntime {said}\n", "")


@pytest.mark.slow
def test_the_command_line_without_onnxruntime(tmp_path: Path) -> None:
    """One line and exit code 2."""
    model, data = digits().model, digits().calib
    flags = ["quantize", str(model), "--data", str(data), "-o", str(tmp_path / "q.onnx")]
    done = python(HIDDEN + f"from sbonnx.cli import main\nraise SystemExit(main({flags}))")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "DeviceError: onnxruntime is not installed: pip install 'sbonnx[cpu]' (or 'sbonnx[gpu]' for NVIDIA)"
    ]


BUILT_IN: dict[type[errors.SbonnxError], type[Exception]] = {
    errors.ModelError: ValueError,
    errors.UnknownOperatorError: ValueError,
    errors.DataError: ValueError,
    errors.RecipeError: ValueError,
    errors.NumericError: ArithmeticError,
    errors.OutputError: OSError,
    errors.DeviceError: RuntimeError,
    errors.LifeCycleError: RuntimeError,
    errors.MissingModelError: FileNotFoundError,
    errors.MissingDataError: FileNotFoundError,
    errors.MissingRecipeError: FileNotFoundError,
    errors.MissingPackageError: ImportError,
    errors.MissingReaderError: ImportError,
}


def test_errors_are_built_in_ones_too() -> None:
    classes = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert classes - {errors.SbonnxError} == BUILT_IN.keys()
    for kind, built_in in BUILT_IN.items():
        assert issubclass(kind, built_in)
        assert type(kind.__new__(kind)) is kind, "the base whose layout is the larger one comes first"
        if kind is not errors.UnknownOperatorError:
            assert str(pickle.loads(pickle.dumps(kind("a, b")))) == str(kind("a, b")) == "a, b"


@pytest.mark.parametrize(
    ("call", "builtin", "kind"),
    [
        (lambda: sbonnx.quantize("none.onnx", None, mode="dynamic"), FileNotFoundError, "ModelError"),
        (lambda: sbonnx.quantize(digits().model, "none.npz"), FileNotFoundError, "DataError"),
        (lambda: sbonnx.quantize(digits().model, None, recipe="none.yaml"), FileNotFoundError, "RecipeError"),
        (lambda: sbonnx.quantize(digits().model, None, bits="w99"), ValueError, "RecipeError"),
        (lambda: sbonnx.quantize(digits().model, digits().calib, "no/where.onnx"), OSError, "OutputError"),
    ],
)
def test_callers_catch_what_they_expect(call: Callable[[], object], builtin: type[Exception], kind: str) -> None:
    with pytest.raises(builtin) as caught:
        call()
    assert isinstance(caught.value, errors.SbonnxError) and caught.value.kind == kind
