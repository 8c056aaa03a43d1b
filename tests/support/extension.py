"""Parts of a third party: an observer, a rounding, a pattern, a lint rule and a backend, one table line each.

Supported: Abs of a Relu.
Refused: any other Abs.
Equations: |max(x, 0)| = max(x, 0).

`register` adds them; ``pytest -p tests.support.extension`` runs the contract suites on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

import numpy as np

from sbonnx import backends, lint, patterns
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.calib.observers import OBSERVERS, Observer, Percentile
from sbonnx.calib.observers.base import Needs
from sbonnx.calib.sketches import Sketch
from sbonnx.lint.findings import LintRule
from sbonnx.lint.view import View
from sbonnx.moments import Moments
from sbonnx.patterns import Edit, Match, Op, Pattern, Var
from sbonnx.patterns.example_model import sample
from sbonnx.rounding import ROUNDERS, Grid, Rounder
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule

OBSERVER: Final = "trimmed"
ROUNDING: Final = "half_up"
PATTERN: Final = "abs_of_relu"
RULE: Final = "X1"
BACKEND: Final = "third_party"


@final
@dataclass(frozen=True)
class Trimmed(Observer):
    """Percentile at a fixed share.

    Attributes:
        share: of the values that are left out at each end.
    """

    share: float = 0.005
    needs: ClassVar[Needs] = "histogram"

    def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
        """Compute the range; see `Observer.bounds`."""
        return Percentile(self.share).bounds(sketch, spec, rule)


@final
class HalfUp(Rounder):
    """Rounds to nearest, halves upwards."""

    needs_moments = False

    def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
        """Round every weight; see `Rounder.solve`."""
        return np.clip(np.floor(grid.ratio() + 0.5), grid.qmin, grid.qmax), qparams


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


def _long_names(view: View) -> Iterator[tuple[str, str, str]]:
    for node in view.graph.nodes:
        if len(node.name) > 3:
            yield node.name, "", "its name is longer than 3 characters"


NAMES: Final = LintRule(RULE, "names are short", "info", "shorten the name", _long_names)


def register() -> None:
    """Add the parts: one line each."""
    OBSERVERS[OBSERVER] = Trimmed
    ROUNDERS[ROUNDING] = HalfUp
    patterns.FUSE = (*patterns.FUSE, ABS_OF_RELU)
    lint.RULES["onnxruntime"] = (*lint.RULES["onnxruntime"], NAMES)
    backends.BACKENDS[BACKEND] = replace(VIRTUAL, name=BACKEND)


def pytest_configure() -> None:
    """Hook of pytest: before the contract suites read the tables."""
    register()
