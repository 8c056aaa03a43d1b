"""Parts of a third party: those of examples/plugin and a pattern, one table line each.

Supported: Abs of a Relu.
Refused: any other Abs.
Equations: |max(x, 0)| = max(x, 0).

`register` adds them; ``pytest -p tests.support.extension`` runs the contract suites on them.
"""

from __future__ import annotations

from typing import Final

from examples.plugin.src.sbonnx_example_plugin.backend import CONVOLVER
from examples.plugin.src.sbonnx_example_plugin.lint_rule import NAMED_NODES
from examples.plugin.src.sbonnx_example_plugin.observer import Trimmed
from examples.plugin.src.sbonnx_example_plugin.rounding import HalfUp
from sbonnx import backends, linting, patterns
from sbonnx.calib.observers import OBSERVERS
from sbonnx.patterns import Edit, Match, Op, Pattern, Var
from sbonnx.patterns.example_model import sample
from sbonnx.rounding import ROUNDERS

OBSERVER: Final = "trimmed"
ROUNDING: Final = "half_up"
PATTERN: Final = "abs_of_relu"
RULE: Final = NAMED_NODES.id
BACKEND: Final = CONVOLVER.name


def _drop_abs(match: Match, edit: Edit) -> None:
    outer = match["outer"]
    edit.replace(outer.outputs[0], edit.node("Relu", [match["x"]], name=outer.name))


ABS_OF_RELU: Final = Pattern(
    PATTERN,
    tree=Op("Abs", Op("Relu", Var("x"), name="inner", shared=True), name="outer"),
    rewrite=_drop_abs,
    source="|max(x, 0)| = max(x, 0)",
    example=lambda: sample("g (float[N,4] x) => (float[N,4] y) { a = Relu(x) b = Abs(a) y = Sigmoid(b) }"),
    counter_example=lambda: sample("g (float[N,4] x) => (float[N,4] y) { a = Sigmoid(x) b = Abs(a) y = Relu(b) }"),
)


def register() -> None:
    """Add the parts: one line each."""
    OBSERVERS[OBSERVER] = Trimmed
    ROUNDERS[ROUNDING] = HalfUp
    patterns.FUSE = (*patterns.FUSE, ABS_OF_RELU)
    linting.RULES["onnxruntime"] = (*linting.RULES["onnxruntime"], NAMED_NODES)
    backends.BACKENDS[BACKEND] = CONVOLVER


def pytest_configure() -> None:
    """Hook of pytest: before the contract suites read the tables."""
    register()
