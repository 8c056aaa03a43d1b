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
    from sbonnx.api.create import prune, quantize, simplify
    from sbonnx.api.file_comparison import compare
    from sbonnx.api.file_difference import diff
    from sbonnx.api.kernel_tuning import tune
    from sbonnx.api.layer_profile import profile
    from sbonnx.api.model_contents import inspect
    from sbonnx.api.model_plan import plan
    from sbonnx.api.model_run import run
    from sbonnx.api.rule_check import lint
    from sbonnx.api.speed_comparison import bench
    from sbonnx.api.task_evaluation import eval
    from sbonnx.assets import digits
    from sbonnx.calib.data import DataPath, DataRows
    from sbonnx.linting.report import LintReport
    from sbonnx.metrics.output_statistics import RunOutput
    from sbonnx.planning.types import Plan
    from sbonnx.profiling.metric_losses import EvaluatedProfile
    from sbonnx.progress import Progress, Silent
    from sbonnx.qdq.difference import FileDifference
    from sbonnx.quant_model import QuantModel
    from sbonnx.recipe import parse_qconfig, parse_sconfig
    from sbonnx.report import Report
    from sbonnx.report.comparison import FileComparison
    from sbonnx.report.contents import ModelContents
    from sbonnx.report.notebook import Result
    from sbonnx.report.pruned import PruningReport
    from sbonnx.report.simplified import SimplifyReport
    from sbonnx.sparse_model import SparseModel
    from sbonnx.tuning.tuned_costs import KernelTuning
    from sbonnx.verify.benchmark import Benchmark
    from sbonnx.verify.labelled import EvaluationData, MetricTable, evaluate
    from sbonnx.viewing import WrittenPage, view

__all__ = [
    "Benchmark",
    "DataPath",
    "DataRows",
    "EvaluatedProfile",
    "EvaluationData",
    "FileComparison",
    "FileDifference",
    "KernelTuning",
    "LintReport",
    "MetricTable",
    "ModelContents",
    "Plan",
    "Progress",
    "PruningReport",
    "QuantModel",
    "Report",
    "Result",
    "RunOutput",
    "Silent",
    "SimplifyReport",
    "SparseModel",
    "WrittenPage",
    "__version__",
    "bench",
    "compare",
    "diff",
    "digits",
    "eval",
    "evaluate",
    "inspect",
    "lint",
    "parse_qconfig",
    "parse_sconfig",
    "plan",
    "profile",
    "prune",
    "quantize",
    "run",
    "simplify",
    "tune",
    "view",
]

_HOMES: Final = {
    "Benchmark": "sbonnx.verify.benchmark",
    "DataPath": "sbonnx.calib.data",
    "DataRows": "sbonnx.calib.data",
    "EvaluatedProfile": "sbonnx.profiling.metric_losses",
    "EvaluationData": "sbonnx.verify.labelled",
    "FileComparison": "sbonnx.report.comparison",
    "FileDifference": "sbonnx.qdq.difference",
    "KernelTuning": "sbonnx.tuning.tuned_costs",
    "LintReport": "sbonnx.linting.report",
    "MetricTable": "sbonnx.verify.labelled",
    "ModelContents": "sbonnx.report.contents",
    "Plan": "sbonnx.planning.types",
    "Progress": "sbonnx.progress",
    "PruningReport": "sbonnx.report.pruned",
    "QuantModel": "sbonnx.quant_model",
    "Report": "sbonnx.report",
    "Result": "sbonnx.report.notebook",
    "RunOutput": "sbonnx.metrics.output_statistics",
    "Silent": "sbonnx.progress",
    "SimplifyReport": "sbonnx.report.simplified",
    "SparseModel": "sbonnx.sparse_model",
    "WrittenPage": "sbonnx.viewing",
    "bench": "sbonnx.api.speed_comparison",
    "compare": "sbonnx.api.file_comparison",
    "diff": "sbonnx.api.file_difference",
    "digits": "sbonnx.assets",
    "eval": "sbonnx.api.task_evaluation",
    "evaluate": "sbonnx.verify.labelled",
    "inspect": "sbonnx.api.model_contents",
    "lint": "sbonnx.api.rule_check",
    "parse_qconfig": "sbonnx.recipe",
    "parse_sconfig": "sbonnx.recipe",
    "plan": "sbonnx.api.model_plan",
    "profile": "sbonnx.api.layer_profile",
    "prune": "sbonnx.api.create",
    "quantize": "sbonnx.api.create",
    "run": "sbonnx.api.model_run",
    "simplify": "sbonnx.api.create",
    "tune": "sbonnx.api.kernel_tuning",
    "view": "sbonnx.viewing",
}
"""Modules of the public names."""

_RUN: Final = frozenset(
    {
        *("QuantModel", "SparseModel", "bench", "compare", "eval", "evaluate", "profile", "prune", "quantize", "run"),
        *("simplify", "tune"),
    }
)
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
