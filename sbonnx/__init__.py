"""sbonnx: ONNX-native post-training quantization. A float ONNX model in, a verified Q/DQ model out.

    report = sbonnx.quantize("m.onnx", "calib/", backend="tensorrt", output="m_int8.onnx")

The public names are loaded on first use, so that importing the package is fast.
"""

import os
import sys

# `python -m sbonnx` puts the working folder, which may hold downloaded files, first on the search path. It is removed
# before anything is imported from there (as `from __future__` would), unless it is the folder that contains sbonnx.
if sys.argv[:1] == ["-m"] and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # the argument before those of the program: sbonnx, -msbonnx, or a module that imports sbonnx
    _run = next(iter(sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :]), "")
    if (_run.partition("m")[2] if _run.startswith("-") else _run).partition(".")[0] == "sbonnx":
        _folder = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
        sys.path[:1] = [_place for _place in sys.path[:1] if os.path.realpath(_place) == _folder]

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

from sbonnx.errors import NO_RUNTIME
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.api import prune, quantize, simplify
    from sbonnx.calib.data import DataPath, DataRows
    from sbonnx.progress import Progress, Silent
    from sbonnx.quant_model import QuantModel
    from sbonnx.recipe import parse_qconfig, parse_sconfig
    from sbonnx.report import Report
    from sbonnx.report.pruned import PruningReport
    from sbonnx.report.simplified import SimplifyReport
    from sbonnx.sparse_model import SparseModel
    from sbonnx.verify.labelled import EvaluationData, evaluate

__all__ = [
    "DataPath",
    "DataRows",
    "EvaluationData",
    "Progress",
    "PruningReport",
    "QuantModel",
    "Report",
    "Silent",
    "SimplifyReport",
    "SparseModel",
    "__version__",
    "evaluate",
    "parse_qconfig",
    "parse_sconfig",
    "prune",
    "quantize",
    "simplify",
]

_HOMES: Final = {
    "DataPath": "sbonnx.calib.data",
    "DataRows": "sbonnx.calib.data",
    "EvaluationData": "sbonnx.verify.labelled",
    "Progress": "sbonnx.progress",
    "PruningReport": "sbonnx.pruning.result",
    "QuantModel": "sbonnx.quant_model",
    "Report": "sbonnx.report",
    "Silent": "sbonnx.progress",
    "SimplifyReport": "sbonnx.report.simplified",
    "SparseModel": "sbonnx.sparse_model",
    "evaluate": "sbonnx.verify.labelled",
    "parse_qconfig": "sbonnx.recipe",
    "parse_sconfig": "sbonnx.recipe",
    "prune": "sbonnx.api",
    "quantize": "sbonnx.api",
    "simplify": "sbonnx.api",
}
"""Modules of the public names."""

_RUN: Final = frozenset({"evaluate", "QuantModel", "SparseModel", "prune", "quantize", "simplify"})
"""Public names that need onnxruntime."""


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'sbonnx' has no attribute '{name}'")
        if name in _RUN and importlib.util.find_spec("onnxruntime") is None:
            raise ImportError(NO_RUNTIME, name="onnxruntime")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
