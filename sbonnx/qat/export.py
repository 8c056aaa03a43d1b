"""Write the trained values of a module back into its ONNX graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from torch import fx, nn

from sbonnx import graph as graphs
from sbonnx.correct.corrected import with_corrections
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import constant, node_by_name, readers, tensors_by_name
from sbonnx.plan import Solution
from sbonnx.qat.adapters.lora import Outside, low_ranks, weight_as_read
from sbonnx.qat.fakequant import FakeQuant
from sbonnx.qat.module import KEPT, Origin, origin_of, set_values, unwrapped, weight_parameter
from sbonnx.spec import Array, QParams
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
    _require_merged(inner)
    graph = graphs.copy(origin.prepared.graph)
    prepared = replace(origin.prepared, graph=graph)
    tensors = tensors_by_name(graph)
    for name, values in _values(inner):
        tensor = tensors.get(name)
        if isinstance(tensor, Constant) and _differ(np.asarray(constant(tensor)), values):
            set_values(tensor, values)
    qparams, codes = dict(origin.solution.qparams), dict(origin.solution.codes)
    _write_statistics(graph, inner)
    for site_key, numbers, found, value in _quantized(inner, origin):
        qparams[site_key] = numbers
        if found is not None and value is not None:
            codes[site_key] = found
            set_values(tensors[origin.prepared.plan.by_key()[site_key].tensor], value)
    solution = replace(origin.solution, qparams=qparams, codes=codes, constants={})
    return prepared, with_corrections(prepared.plan, tensors, solution, {})


def _require_merged(module: fx.GraphModule) -> None:
    """Raise ModelError if the module has adapters outside the rounding."""
    outside = [name for name, one in low_ranks(module).items() if isinstance(one, Outside)]
    if outside:
        raise ModelError(
            f"{len(outside)} adapters stand outside the rounding, the first at '{outside[0]}', and a file has no such "
            f"branches: fold them into the weights with sbonnx.qat.merge(module)"
        )


def _values(module: fx.GraphModule) -> Iterator[tuple[str, Array]]:
    """Yield (initializer name, values) of all parameters."""
    state = module.state_dict()
    for parameter, initializer in module.meta[KEPT]["parameters"].items():
        if parameter in state:
            yield initializer, state[parameter].detach().float().cpu().numpy()


def _write_statistics(graph: Graph, module: fx.GraphModule) -> None:
    """Write mean and variance of batch norms into the graph, in place; a changed shared constant is copied per node."""
    state, nodes, names = module.state_dict(), node_by_name(graph), Names(graph)
    for node_name, buffers in module.meta[KEPT]["statistics"].items():
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


def _quantized(module: fx.GraphModule, origin: Origin) -> Iterator[tuple[str, QParams, Array | None, Array | None]]:
    """Yield (site key, qparams, codes, float values) of fake-quantized sites; the last two are None for activations."""
    for name, sites in origin.sites.items():
        fake_quant = module.get_submodule(name)
        assert isinstance(fake_quant, FakeQuant)
        numbers = fake_quant.qparams()
        for site in sites:
            if site.role == "weight":
                weight = weight_as_read(module, site.tensor, weight_parameter(module, site))
                yield site.key, numbers, fake_quant.codes(weight), fake_quant.export_weight(weight)
            else:
                yield site.key, numbers, None, None
