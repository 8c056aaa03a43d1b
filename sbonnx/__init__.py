"""sbonnx: ONNX-native post-training quantization. A float ONNX model in, a verified Q/DQ model out.

    report = sbonnx.quantize("m.onnx", "calib/", backend="tensorrt", output="m_int8.onnx")

The public names are loaded when they are first used: importing the package costs next to nothing.
"""

import os
import sys

# `python -m sbonnx` puts the working folder, which may hold downloaded files, first on the search path; it is removed
# before anything is imported from there (as `from __future__` would), unless it is where sbonnx itself lies.
if sys.argv[:1] == ["-m"] and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # the argument before those of the program: sbonnx, -msbonnx, or the module that imports it
    _run = next(iter(sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :]), "")
    if (_run.partition("m")[2] if _run.startswith("-") else _run).partition(".")[0] == "sbonnx":
        _folder = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
        sys.path[:1] = [_place for _place in sys.path[:1] if os.path.realpath(_place) == _folder]

import importlib
import importlib.util
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from sbonnx.errors import NO_RUNTIME
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.model import QuantModel
    from sbonnx.quantize import quantize
    from sbonnx.recipe import parse_qconfig
    from sbonnx.report import Report

__all__ = ["QuantModel", "Report", "__version__", "parse_qconfig", "quantize"]

_HOMES: Final = {
    "QuantModel": "sbonnx.model",
    "Report": "sbonnx.report",
    "parse_qconfig": "sbonnx.recipe",
}
"""Where the public names live, but for `quantize`: see `_Package`."""


class MissingRuntime(ImportError):
    """Neither of the two builds of onnxruntime is installed."""


class _Package(ModuleType):
    """This package. `sbonnx.quantize` is the function, whoever imported the module of that name before.

    Loading the module sbonnx.quantize sets an attribute of that name on the package; a property stands in its way.
    """

    @property
    def quantize(self) -> Any:
        return importlib.import_module("sbonnx.quantize").quantize

    @quantize.setter
    def quantize(self, module: ModuleType) -> None:
        """Called by the import system with the module, which `sys.modules` holds anyhow."""


if not TYPE_CHECKING:  # else any name would be right for type checkers

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'sbonnx' has no attribute '{name}'")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _require_runtime() -> None:
    """onnxruntime is an extra, because its two builds exclude each other, and nothing can be proved without it.

    Where the exception ends the program, it does so as one line, not as a traceback, and with the exit code of a
    mistake that the user can mend.
    """
    if "onnxruntime" in sys.modules or importlib.util.find_spec("onnxruntime") is not None:
        return
    before = sys.excepthook

    def in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, MissingRuntime):
            before(kind, error, trace)
            return
        print(f"ImportError: {error}", file=sys.stderr)
        if not hasattr(sys, "ps1"):  # an interactive interpreter goes on
            sys.exit(2)

    sys.excepthook = in_one_line
    raise MissingRuntime(NO_RUNTIME, name="onnxruntime")


_require_runtime()
sys.modules[__name__].__class__ = _Package
