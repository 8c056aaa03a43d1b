"""Automatic fixes of lint findings, in one table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from onnx import ModelProto

from sbonnx import graph as graphs
from sbonnx.graph import Graph, edit
from sbonnx.lint.fix import integer, joins, numbers, opset, ort, pairs, recentre
from sbonnx.lint.fix.bench import Bench
from sbonnx.lint.fix.types import Fix, Fixed

ROUNDS: Final = 16
"""Maximum number of passes over the table: one fix can make another possible."""

FIXES: Final[dict[str, tuple[Fix, ...]]] = {
    "tensorrt": (
        Fix(("T14",), "converted to the opset that has the types and forms in use", opset.before),
        Fix(("T01",), "integer operators to float operators between pairs", integer.unfolded),
        Fix(("T04",), "a zero point for codes without a type", numbers.explicit_zero),
        Fix(("T09",), "the default axis written out", numbers.explicit_axis),
        Fix(("T15",), "scales in the type of the tensor", numbers.typed_scales),
        Fix(("T19",), "Cast nodes after a pair taken into it", numbers.float_islands),
        Fix(("T17",), "biases to floats", numbers.float_biases),
        Fix(("T03",), "other int32 constants to floats", numbers.float_constants),
        Fix(("T13",), "pairs on scalars taken away", pairs.scalars),
        Fix(("P05",), "equal pairs merged", pairs.duplicates),
        # Removed pairs need no re-centring, so fixes that remove pairs come first.
        Fix(("P10",), "pairs on outputs taken away", pairs.interface),
        Fix(("P02",), "pairs inside a fusion taken away", pairs.splitting),
        Fix(("P04",), "pairs of a residual Add's conv branch taken away", pairs.residual),
        Fix(("P03",), "pairs that nothing gains by taken away", pairs.needless),
        Fix(("P07", "P09"), "the earlier of two pairs in a row taken away", pairs.rescaled),
        Fix(("P11",), "pairs before softmax, norms and masks taken away", pairs.delicate),
        Fix(("P08",), "pairs before half-fused ops taken away", pairs.half_fused),
        Fix(("P12",), "ops too small for integer kernels back to float", pairs.tiny),
        Fix(("P01",), "one-sided ops back to float", pairs.one_sided),
        Fix(("T02", "T03"), "zero points to 0, codes to signed ones", recentre.symmetric),
        Fix(("P06",), "the largest of the scales around a Concat for all", joins.concats),
        Fix(("T05",), "scales of stored tensors raised", numbers.scale_floors),
        Fix(("T18",), "told, not mended", numbers.rescaled),
    ),
    "onnxruntime": (
        Fix(("O11",), "activations from int8 to uint8", recentre.unsigned_activations),
        Fix(("O12", "O13"), "weights to int8 with the zero point 0", recentre.signed_weights),
        Fix(("O15",), "weights without a quantized activation back to float", ort.weights_alone),
        Fix(("O16",), "activations without a quantized weight back to float", ort.activations_alone),
        Fix(("O23", "O24"), "pairs that serve no kernel taken away", ort.useless),
        Fix(("O05", "O06"), "biases to the scale of the product", ort.biases),
        Fix(("O25",), "told, not mended", ort.rescaled),
    ),
}
"""Fixes by family of the target, in the order of application. `tests/lint/test_fix.py` checks every row."""


@dataclass(frozen=True)
class Mended:
    """Result of fixing a model.

    Attributes:
        graph: the fixed graph.
        rows: applied fixes, in order, then those that were not possible.
    """

    graph: Graph
    rows: tuple[Fixed, ...]

    @property
    def done(self) -> tuple[Fixed, ...]:
        """Applied fixes."""
        return tuple(row for row in self.rows if row.done)


def fixes_for(target: str) -> tuple[Fix, ...]:
    """Return the fixes for a target, in the order of application."""
    return FIXES[target.partition("@")[0]]


def fix(model: str | os.PathLike[str] | ModelProto | Graph, target: str) -> Mended:
    """Apply all automatic fixes. The model is not changed: the result is a new graph.

    No fix needs data: scales that require calibration are reported, not invented. Removing a pair restores the float
    values, and the Relu or Clip that its zero point replaced.

    Args:
        model: path, ModelProto or graph, quantized by any tool.
        target: one of `sbonnx.lint.TARGETS`.

    Raises:
        ModelError: the file cannot be read, or is not valid ONNX.
    """
    graph = graphs.copy(model) if isinstance(model, Graph) else graphs.load(model, opset=1)
    graph, first = opset.lifted(graph, target)
    done = [row for row in first if row.done]
    for _ in range(ROUNDS):
        rows = [row for one in fixes_for(target) for row in _apply(graph, target, one)]
        done += [row for row in rows if row.done]
        if not any(row.done for row in rows):
            break
    return Mended(graph, (*done, *(row for row in (*first, *rows) if not row.done)))


def _apply(graph: Graph, target: str, one: Fix) -> list[Fixed]:
    """Apply one row of the table to the current graph, and remove nodes without use. In place."""
    rows = list(one.apply(Bench(graph, target)))
    if any(row.done for row in rows):
        edit.sweep(graph)
        edit.sort(graph)
    return rows


__all__ = ["FIXES", "Fix", "Fixed", "Mended", "fix", "fixes_for"]
