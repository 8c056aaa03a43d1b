"""Write the trained values of a module back into its ONNX graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx.correct.biases import with_corrections
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import constant, node_by_name, readers, tensors_by_name
from sbonnx.plan import Solution
from sbonnx.qat.fakequant import FakeQuant
from sbonnx.qat.lora import Outside, low_ranks, weight_as_read
from sbonnx.qat.module import origin_of, set_values, unwrapped, weight_parameter
from sbonnx.qat.onnx_to_torch.reimport import META
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared

MEAN_INPUT: Final = 3
"""Index of the mean among the inputs of BatchNormalization; the variance is the next input."""


def learned(module: nn.Module) -> tuple[Prepared, Solution]:
    """Return the trained module as graph, plan and solution, ready for the insertion of Q/DQ pairs.

    The graph is a copy of the calibrated one. Weights, biases, norms and statistics have the module's current values
    and their old names.

    Raises:
        ModelError: the module was not made by `sbonnx.qat`, or has adapters outside the rounding, which cannot be
            exported.
        NumericError: training made a scale or a weight NaN or infinite; the message names it.
    """
    origin, inner = origin_of(module), unwrapped(module)
    outside = [name for name, adapter in low_ranks(inner).items() if isinstance(adapter, Outside)]
    if outside:
        raise ModelError(
            f"{len(outside)} adapters are outside the rounding, the first of '{outside[0]}', and cannot be exported: "
            f"fold them into the weights with sbonnx.qat.merge(module)"
        )
    graph = graphs.copy(origin.prepared.graph)
    prepared = replace(origin.prepared, graph=graph)
    tensors = tensors_by_name(graph)
    state = inner.state_dict()
    for parameter, initializer in inner.meta[META]["parameters"].items():
        tensor = tensors.get(initializer)
        if parameter in state and isinstance(tensor, Constant):
            values = state[parameter].detach().float().cpu().numpy()
            if _differ(np.asarray(constant(tensor)), values):
                set_values(tensor, values)
    qparams, codes = dict(origin.solution.qparams), dict(origin.solution.codes)
    _write_statistics(graph, inner)
    for name, sites in origin.sites.items():
        fake_quant = inner.get_submodule(name)
        assert isinstance(fake_quant, FakeQuant)
        learned_qparams = fake_quant.qparams()
        for site in sites:
            qparams[site.key] = learned_qparams
            if site.role == "weight":
                weight = weight_as_read(inner, site.tensor, weight_parameter(inner, site))
                codes[site.key] = fake_quant.codes(weight)
                set_values(tensors[site.tensor], fake_quant.export_weight(weight))
    solution = replace(origin.solution, qparams=qparams, codes=codes, constants={})
    return prepared, with_corrections(prepared.plan, tensors, solution, {})


def _write_statistics(graph: Graph, module: fx.GraphModule) -> None:
    """Write mean and variance of batch norms into the graph, in place; a changed shared constant is copied per node."""
    state, nodes, names = module.state_dict(), node_by_name(graph), Names(graph)
    for node_name, buffers in module.meta[META]["statistics"].items():
        node = nodes[node_name]
        for index, buffer in enumerate(buffers, MEAN_INPUT):
            values, tensor = state[buffer].float().cpu().numpy(), node.inputs[index]
            known = np.asarray(constant(tensor))
            if not _differ(known, values):
                continue
            if len(readers(tensor)) == 1:
                set_values(tensor, values)
            else:
                own = add_constant(graph, f"{tensor.name}_{node_name}", values.astype(known.dtype), names)
                replace_input(node, index, own)


def _differ(known: Array, values: Array) -> bool:
    return known.shape != values.shape or not np.array_equal(known.astype(np.float32), values)
