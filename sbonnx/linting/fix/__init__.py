"""Automatic fixes of lint findings, in one table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from onnx import ModelProto

from sbonnx import graph as graphs
from sbonnx.graph import Graph, edit
from sbonnx.linting.fix import pair_removal, parameters, recentre
from sbonnx.linting.fix.edit_context import Bench, Fix, Fixed

ROUNDS: Final = 16
"""Maximum number of passes over the table: one fix can make another possible."""

FIXES: Final[dict[str, tuple[Fix, ...]]] = {
    "tensorrt": (
        Fix(("T14",), "converted to the opset that has the types and forms in use", parameters.before),
        Fix(("T01",), "integer operators to float operators between pairs", parameters.unfolded),
        Fix(("T04",), "a zero point for codes without a type", parameters.explicit_zero),
        Fix(("T09",), "the default axis written out", parameters.explicit_axis),
        Fix(("T15",), "scales in the type of the tensor", parameters.typed_scales),
        Fix(("T19",), "Cast nodes after a pair merged into it", parameters.float_islands),
        Fix(("T17",), "biases to floats", parameters.float_biases),
        Fix(("T03",), "other int32 constants to floats", parameters.float_constants),
        Fix(("T13",), "pairs on scalars removed", pair_removal.scalars),
        Fix(("P05",), "equal pairs merged", pair_removal.duplicates),
        # Removed pairs need no re-centring, so fixes that remove pairs come first.
        Fix(("P10",), "pairs on outputs removed", pair_removal.interface),
        Fix(("P02",), "pairs inside a fusion removed", pair_removal.splitting),
        Fix(("P04",), "pairs of a residual Add's conv branch removed", pair_removal.residual),
        Fix(("P03",), "pairs without benefit removed", pair_removal.needless),
        Fix(("P07", "P09"), "the earlier of two consecutive pairs removed", pair_removal.rescaled),
        Fix(("P11",), "pairs before softmax, norms and masks removed", pair_removal.delicate),
        Fix(("P08",), "pairs before half-fused ops removed", pair_removal.half_fused),
        Fix(("P12",), "ops too small for integer kernels back to float", pair_removal.tiny),
        Fix(("P01",), "one-sided ops back to float", pair_removal.one_sided),
        Fix(("T02", "T03"), "zero points to 0, codes to signed ones", recentre.symmetric),
        Fix(("P06",), "the largest of the scales around a Concat for all", recentre.concats),
        Fix(("T05",), "scales of stored tensors raised", parameters.scale_floors),
        Fix(("T18",), "reported only", parameters.report_mismatch),
    ),
    "onnxruntime": (
        Fix(("O11",), "activations from int8 to uint8", recentre.unsigned_activations),
        Fix(("O12", "O13"), "weights to int8 with the zero point 0", recentre.signed_weights),
        Fix(("O15",), "weights without a quantized activation back to float", pair_removal.weights_alone),
        Fix(("O16",), "activations without a quantized weight back to float", pair_removal.activations_alone),
        Fix(("O23", "O24"), "pairs that serve no kernel removed", pair_removal.useless),
        Fix(("O05", "O06"), "biases to the scale of the product", parameters.biases),
        Fix(("O25",), "reported only", parameters.report_rescaling),
    ),
    "openvino": (),
    "qnn": (),
    "web": (),
}
"""Fixes by family of the target, in the order of application. `tests/lint/test_fix.py` checks every row."""


@dataclass(frozen=True)
class FixedModel:
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


def fix(model: str | os.PathLike[str] | ModelProto | Graph, target: str, *, cpu: str = "") -> FixedModel:
    """Apply all automatic fixes. The model is not changed: the result is a new graph.

    No fix needs data: scales that require calibration are reported, not invented. Removing a pair restores the float
    values, and the Relu or Clip that its zero point replaced.

    Args:
        model: path, ModelProto or graph, quantized by any tool.
        target: one of `sbonnx.linting.TARGETS`.
        cpu: see `sbonnx.linting.lint`.

    Raises:
        ModelError: the file cannot be read, or is not valid ONNX.
    """
    graph = graphs.copy(model) if isinstance(model, Graph) else graphs.load(model, opset=1)
    graph, first = parameters.lifted(graph, target)
    done = [row for row in first if row.done]
    for _ in range(ROUNDS):
        rows: list[Fixed] = []
        for rule in fixes_for(target):
            fixed = list(rule.apply(Bench(graph, target, cpu)))
            if any(row.done for row in fixed):  # remove nodes without use
                edit.sweep(graph)
                edit.sort(graph)
            rows += fixed
        done += [row for row in rows if row.done]
        if not any(row.done for row in rows):
            break
    return FixedModel(graph, (*done, *(row for row in (*first, *rows) if not row.done)))


__all__ = ["FIXES", "Fix", "Fixed", "FixedModel", "fix", "fixes_for"]
