"""Data-free bias correction: the mean output shift by weight rounding, from batch-norm statistics of the inputs.

    E[V x] - E[W x]  =  (V - W) E[x]

is subtracted from the bias. Source: Nagel et al., Data-free quantization through weight equalization and bias
correction,
ICCV 2019, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.correct.biases import biases_of
from sbonnx.correct.corrected import with_corrections
from sbonnx.correct.expected import Expected, expected_rows, spreads, through
from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import constant, node_by_name, tensors_by_name
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.plan.types import Plan, Site, Solution
from sbonnx.report import Refusal
from sbonnx.spec import Array

WHAT: Final = "correct bias"


def correct_analytically(graph: Graph, plan: Plan, solution: Solution) -> Solution:
    """Return `solution` with biases that compensate the mean output shift by weight rounding.

    Layers whose input means are not known from batch norms keep their biases and are listed in the refusals.

    Args:
        graph: prepared, with `record_normals` and `give_biases`.
        plan, solution: as given to and by `calibrate` or `weights_alone`.
    """
    known, biases, nodes = spreads(graph), biases_of(graph), node_by_name(graph)
    constants: dict[str, Array] = {}
    refusals: list[Refusal] = []
    for site in plan.of_role("weight"):
        if site.key not in solution.codes:
            continue
        for reader in site.readers:
            node = nodes[reader.node]
            if reader in solution.unread or node.op not in LINEAR or LINEAR[node.op].weight != reader.index:
                continue
            bias = biases.get(node.name)
            found = _shift(node, site, solution, known) if bias is not None else "it has no bias of its own"
            if bias is None or isinstance(found, str):
                refusals.append(Refusal(WHAT, node.name, str(found)))
            else:
                constants[bias.name] = _moved(bias, solution, -found)
    made = with_corrections(plan, tensors_by_name(graph), solution, constants)
    note = f"{len(constants)} biases were corrected by what batch norms say of the inputs of their layers"
    return replace(made, refusals=(*made.refusals, *refusals), notes=(*made.notes, note))


def _shift(node: Node, site: Site, solution: Solution, known: Mapping[str, Expected]) -> Array | str:
    """Return the mean output shift of a layer by rounding its weight, float64 (O,), or why it is unknown."""
    weight, layer = constant(node.inputs[LINEAR[node.op].weight]), LinearLayer.of_rows(node)
    rows = expected_rows(node, known)
    if weight is None or layer is None or rows is None:
        return "no batch norm says what its input is on average"
    rounded = solution.qparams[site.key].dequantize(solution.codes[site.key])
    return through(layer.matrices(rounded.astype(np.float64) - weight.astype(np.float64)), rows)


def _moved(bias: Constant, solution: Solution, by: Array) -> Array:
    """Return the values of a bias with `by` added, in its type and shape."""
    values = solution.constants.get(bias.name)
    values = constant(bias) if values is None else values
    assert values is not None
    return np.asarray((values.astype(np.float64).reshape(-1) + by).reshape(values.shape).astype(values.dtype))


__all__ = ["correct_analytically"]
