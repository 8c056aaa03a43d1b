"""The sparsity stage: from a float graph to one of the same shapes, with zeros in its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.correct import give_biases
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph, Node
from sbonnx.graph.edit import Names, set_constant, sort, sweep
from sbonnx.graph.query import constant, node_by_name
from sbonnx.linear.zero_patterns import SparsityPattern
from sbonnx.ops import LINEAR
from sbonnx.pruning.fit_layers import fit_layers
from sbonnx.pruning.groups.dimensions import dependencies
from sbonnx.pruning.settings import LayerPruning, Pruning
from sbonnx.pruning.sparsity.choice import SparseChoice, choose_sparse, dense_refusals
from sbonnx.pruning.sparsity.solver import STRATEGIES, SparseSolver
from sbonnx.pruning.two_streams import Remains, refit_pruned
from sbonnx.report import Refusal
from sbonnx.report.pruned import LayerRefit, SparseLayer
from sbonnx.spec import Array


@dataclass(frozen=True)
class SparsifiedGraph:
    """Result of the stage.

    Attributes:
        graph: of unchanged shapes, with zeros.
        sparse: one row per layer that became sparse.
        layers: one row per refitted layer.
        refusals: layers that stay dense, or were not refitted.
    """

    graph: Graph
    sparse: tuple[SparseLayer, ...]
    layers: tuple[LayerRefit, ...]
    refusals: tuple[Refusal, ...]


def sparsify(
    graph: Graph,
    samples: Samples | None,
    pattern: SparsityPattern,
    settings: Pruning,
) -> SparsifiedGraph:
    """Set weights of a float graph to zero, and fit the others to the outputs of the float network layer by layer.

    Args:
        graph: simplified and fused; biases are added to layers without one, and unused nodes are removed, in place.
        samples: of the graph; None: zeros by magnitude, no refit.
        pattern: of the zeros.
        settings: `strategy` ("auto" and "obs": by the error after refit; "output": by the error without; norms: by
            magnitude), `refit` (without it, zeros are by magnitude), and `layers`, see `Pruning`.

    Raises:
        RecipeError: no layer can become sparse, or a strategy is not known here.
        DataError: a strategy needs data. ModelError, DeviceError: see `LayerRunner`.
    """
    sweep(graph)
    sort(graph)
    give_biases(graph)
    traced = dependencies(graph)
    chosen = choose_sparse(traced, pattern, settings.layers)
    wanted = {choice.layer: choice for choice in chosen if choice.pattern is not None}
    if not wanted:
        reasons = "; ".join(f"{choice.layer}: {choice.why}" for choice in chosen[:3]) or "it has no linear layers"
        raise RecipeError(f"pruning: no weight of the model can be {pattern}: {reasons}")
    listed, refusals = fit_layers(graph, traced, samples, two_streams=True)
    sparse = graphs.copy(graph)
    solvers = {name: _solver(choice, settings, samples) for name, choice in wanted.items()}
    _by_magnitude(sparse, solvers)
    rows: list[LayerRefit] = []
    if samples is not None and settings.refit:
        own = settings.layers
        fitted = [layer for layer in listed if not own.get(layer.name, LayerPruning()).skip]
        kept = {layer.name: Remains.all_of(layer, solvers.get(layer.name)) for layer in fitted}
        with samples.canonical() as units:
            rows, more = refit_pruned(graph, sparse, fitted, kept, units)
        refusals = [*refusals, *more]
    nodes = node_by_name(sparse)
    outcome = tuple(
        SparseLayer(name, str(choice.pattern), choice.values, int((_weight(nodes[name]) == 0).sum()), choice.tensorrt)
        for name, choice in wanted.items()
    )
    every = dict.fromkeys([*dense_refusals(chosen), *refusals])
    return SparsifiedGraph(sparse, outcome, tuple(rows), tuple(every))


def _solver(choice: SparseChoice, settings: Pruning, samples: Samples | None) -> SparseSolver:
    """Return the solver of a layer.

    Raises:
        RecipeError: its strategy orders channels only, or needs a refit.
        DataError: its strategy needs data.
    """
    own = settings.layers.get(choice.layer)
    name = (own.strategy if own is not None else None) or settings.strategy
    if name not in STRATEGIES:
        raise RecipeError(f"pruning: strategy {name} is for channels; sparse weights have {', '.join(STRATEGIES)}")
    if samples is None and name in ("obs", "output"):
        raise DataError(f"the pruning strategy '{name}' reads activations: give calibration data, or take l1norm")
    if not settings.refit and name in ("obs", "output"):
        raise RecipeError(f"pruning: strategy {name} finds zeros in the refit, and REFIT is none: take l1norm")
    assert choice.pattern is not None
    return SparseSolver(choice.pattern, choice.layout, STRATEGIES[name])


def _by_magnitude(graph: Graph, solvers: Mapping[str, SparseSolver]) -> None:
    """Set the weights of smallest magnitude to zero, in place."""
    names, nodes = Names(graph), node_by_name(graph)
    for name, solver in solvers.items():
        node = nodes[name]
        weight = _weight(node)
        matrices = solver.masked(solver.layer.matrices(weight))
        set_constant(node, LINEAR[node.op].weight, solver.layer.from_matrices(matrices).astype(weight.dtype), names)


def _weight(node: Node) -> Array:
    values = constant(node.inputs[LINEAR[node.op].weight])
    assert values is not None
    return np.asarray(values)
