"""onnxruntime's MoE as a loop over its experts of standard operators, whose weights are rounded one by one.

The loop is for rounding only: the codes of the experts are joined to those of the three-dimensional weights of MoE.
Every expert is computed for every row, and multiplied by its gate: 0 for rows that are not routed to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sbonnx.calib.quantized.stream import plainly
from sbonnx.calib.quantized.stream_state import QuantState, StreamResult
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable, edit
from sbonnx.graph.extract import copy
from sbonnx.graph.query import constant, dtype, optional_input
from sbonnx.ops import EXPERTS
from sbonnx.planning.types import Gain, Plan, Reader, Site
from sbonnx.reconstruct.layer_inputs import WHAT, looks_at_inputs
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array, QParams

PROJECTIONS: Final = 2

SIMPLE: Final = frozenset({"identity", "relu", "silu", "gelu"})
"""Element-wise functions of MoE."""

GELU: Final = (float(np.sqrt(2 / np.pi)), 0.044715 * float(np.sqrt(2 / np.pi)))
"""Coefficients of x and its cube in the hyperbolic tangent of Gelu, which the kernel approximates in this way."""

NO_LOOP: Final = Reason(
    "state-inside", "the inputs of its experts are computed inside, in a way that has no loop: to the nearest codes"
)


@dataclass(frozen=True)
class UnrolledExperts:
    """A graph and plan with loops in place of MoE nodes.

    Attributes:
        graph, plan: of the loops; the given ones if there is no MoE whose weights are rounded by inputs.
        parts: sites of the experts by key of the site of a whole weight.
        biases: names of the biases of the experts by name of the whole bias.
        refusals: nodes without a loop.
    """

    graph: Graph
    plan: Plan
    parts: Mapping[str, tuple[Site, ...]] = field(default_factory=dict)
    biases: Mapping[str, tuple[Constant, ...]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    def joined(self, walked: StreamResult, plan: Plan) -> StreamResult:
        """Return the result for the sites of `plan`, whose weights hold all experts."""
        if not self.parts:
            return replace(walked, refusals=(*walked.refusals, *self.refusals))
        state = QuantState(self.graph, self.plan, walked.bounds, plainly(None))
        codes, scales, bounds = dict(walked.codes), dict(walked.scales), dict(walked.bounds)
        chosen, gains, constants = dict(walked.qparams), dict(walked.gains), dict(walked.constants)
        for key, sites in self.parts.items():
            params = [chosen.get(site.key) or state.params(site) for site in sites]
            solved = [some for some in params if some is not None]
            if len(solved) < len(sites):
                continue
            rounded = [codes[site.key] if site.key in codes else state.codes_of(site) for site in sites]
            scale, zero = (_stacked([getattr(some, name) for some in solved]) for name in ("scale", "zero_point"))
            joined = QParams(scale, zero, plan.by_key()[key].spec)
            codes[key] = _stacked([np.asarray(some) for some in rounded])
            scales[key], chosen[key], bounds[key] = scale, joined, joined.limits
            parts = [gains[site.key] for site in sites if site.key in gains]
            if parts:
                gains[key] = Gain(
                    parts[0].rounding, sum(gain.loss for gain in parts), sum(gain.nearest for gain in parts)
                )
        for name, biases in self.biases.items():
            if any(bias.name in constants for bias in biases):
                constants[name] = np.stack([constants.get(bias.name, bias.values) for bias in biases])
        return replace(
            walked,
            bounds=bounds,
            codes=codes,
            scales=scales,
            qparams=chosen,
            gains=gains,
            constants=constants,
            refusals=(*walked.refusals, *self.refusals),
        )


def _stacked(parts: Sequence[Array]) -> Array:
    """Join matrices (inputs, outputs) to (experts, outputs, inputs)."""
    return np.ascontiguousarray(np.stack([part.T for part in parts]))


def unroll(graph: Graph, plan: Plan) -> UnrolledExperts:
    """Return a graph in which each MoE whose weights are rounded by inputs is a loop over its experts.

    `graph` is not changed. Nodes that cannot be unrolled keep weights that are rounded to nearest.
    """
    sites = {reader: site for site in plan.of_role("weight") if looks_at_inputs(site) for reader in site.readers}
    nodes = [node for node in graph.nodes if node.op in EXPERTS and Reader(node.name, EXPERTS[node.op][0]) in sites]
    if not nodes:
        return UnrolledExperts(graph, plan)
    loops, refusals = copy(graph), []
    names = edit.Names(loops)
    parts: dict[str, tuple[Site, ...]] = {}
    biases: dict[str, tuple[Constant, ...]] = {}
    chosen = {node.name for node in nodes}
    for node in [node for node in loops.nodes if node.name in chosen]:
        weights = [sites.get(Reader(node.name, index)) for index in EXPERTS[node.op][:PROJECTIONS]]
        loop = _Loop.of(node, loops, names)
        if loop is None or any(site is None or len(site.readers) > 1 for site in weights):
            refusals.append(Refusal(WHAT, node.name, NO_LOOP))
            continue
        readers = loop.write()
        for site, own in zip(weights, readers, strict=True):
            assert site is not None
            parts[site.key] = tuple(_part(site, reader) for reader in own)
        biases |= loop.biases
    edit.sweep(loops)
    edit.sort(loops)
    own_sites = [some for site in plan.sites for some in parts.get(site.key, (site,))]
    return UnrolledExperts(loops, replace(plan, sites=tuple(own_sites)), parts, biases, tuple(refusals))


def _part(site: Site, product: Node) -> Site:
    """Return the site of one expert's weight, (inputs, outputs)."""
    name = product.inputs[1].name
    spec = replace(site.spec, axis=0)
    return replace(site, key=name, tensor=name, spec=spec, readers=(Reader(product.name, 1),), group=name)


@dataclass
class _Loop:
    """Writer of the loop of one MoE.

    Source: onnxruntime, contrib operator MoE and its CPU kernel.
    """

    node: Node
    graph: Graph
    names: edit.Names
    kind: Any
    hidden: int
    biases: dict[str, tuple[Constant, ...]] = field(default_factory=dict)

    @staticmethod
    def of(node: Node, graph: Graph, names: edit.Names) -> _Loop | None:
        """Return the writer, or None for a node that has no loop of standard operators."""
        attrs = node.attrs
        activation = attrs.get("activation_type", "relu")
        fused = activation == "swiglu" and attrs.get("swiglu_fusion", 0) == 1
        inner = [optional_input(node, index + 1) for index in EXPERTS[node.op][:PROJECTIONS]]
        kind, weight = dtype(node.inputs[2]), node.inputs[2]
        if attrs.get("use_sparse_mixer", 0) or not (fused or activation in SIMPLE):
            return None
        if any(bias is not None and not isinstance(bias, Constant) for bias in inner) or kind is None:
            return None
        return _Loop(node, graph, names, kind, int(weight.shape[2]))

    def add(
        self, op: str, inputs: Sequence[Tensor], columns: int | None = None, at: str = "", **attrs: Any
    ) -> Variable:
        """Add a node of rows with some columns; None: of unknown shape."""
        stem = f"{self.node.name}/{at or op}"
        added = edit.add_node(self.graph, op, inputs, names=self.names, stem=stem, attrs=attrs)
        output = added.outputs[0]
        output.dtype, output.shape = self.kind, None if columns is None else (self.rows, columns)
        return output

    @property
    def rows(self) -> str:
        """Name of the number of rows."""
        return f"{self.node.name}/rows"

    def constant(self, name: str, values: Any) -> Constant:
        """Create a constant: a view, if it is a part of a large one."""
        return Constant(self.names.fresh(f"{self.node.name}/{name}"), np.asarray(values))

    def write(self) -> tuple[list[Node], list[Node]]:
        """Replace the node by the loop; return the products of both projections, by expert."""
        node = self.node
        whole = [constant(node.inputs[index]) for index in EXPERTS[node.op][:PROJECTIONS]]
        biases = [optional_input(node, index + 1) for index in EXPERTS[node.op][:PROJECTIONS]]
        count = len(np.asarray(whole[0]))
        parts = [self._experts(bias, count) for bias in biases]
        flat = self.constant("rows_shape", np.array([-1, self.hidden], np.int64))
        x = self.add("Reshape", [node.inputs[0], flat], self.hidden)
        gates = self._gates(count)
        products: tuple[list[Node], list[Node]] = ([], [])
        total: Variable | None = None
        for expert in range(count):
            y = x
            for number, (weight, bias) in enumerate(zip(whole, parts, strict=True)):
                at = f"expert{expert}/fc{number + 1}"
                matrix = np.asarray(weight)[expert].T
                width = matrix.shape[1]
                y = self.add("MatMul", [y, self.constant(f"{at}_weight", matrix)], width, at)
                products[number].append(y.inputs[0])
                if bias is not None:
                    y = self.add("Add", [y, bias[expert]], width)
                if number == 0:
                    y = self._activated(y, width)
            index = self.constant(f"expert{expert}", np.array([expert], np.int64))
            y = self.add("Mul", [y, self.add("Gather", [gates, index], 1, axis=1)], self.hidden)
            total = y if total is None else self.add("Add", [total, y], self.hidden)
        assert total is not None
        sizes = Variable(self.names.fresh(f"{node.name}/sizes"), np.dtype(np.int64))
        edit.add_node(
            self.graph, "Shape", [node.inputs[0]], names=self.names, stem=f"{node.name}/Shape", outputs=[sizes]
        )
        output = node.outputs[0]
        edit.replace_output(node, 0, Variable(self.names.fresh(f"{node.name}/unrolled"), output.dtype))
        if output.dtype is None:
            output.dtype = self.kind
        stem = f"{node.name}/whole"
        edit.add_node(self.graph, "Reshape", [total, sizes], names=self.names, stem=stem, outputs=[output])
        return products

    def _experts(self, bias: Tensor | None, count: int) -> tuple[Constant, ...] | None:
        """Return the biases of the experts, or None."""
        if bias is None:
            return None
        values = np.asarray(constant(bias))
        parts = tuple(self.constant(f"expert{expert}/{bias.name}", values[expert]) for expert in range(count))
        self.biases[bias.name] = parts
        return parts

    def _gates(self, count: int) -> Variable:
        """Return the factors of the experts, (rows, experts): a softmax of all scores, or of the largest ones."""
        scores, attrs = self.node.inputs[1], self.node.attrs
        alike = bool(attrs.get("normalize_routing_weights", 0))
        scores = scores if alike else self.add("Softmax", [scores], count, axis=-1)
        k = self.constant("k", np.array([attrs.get("k", 1)], np.int64))
        best = Variable(self.names.fresh(f"{self.node.name}/best"), self.kind)
        places = Variable(self.names.fresh(f"{self.node.name}/places"), np.dtype(np.int64))
        outputs, stem = [best, places], f"{self.node.name}/TopK"
        edit.add_node(self.graph, "TopK", [scores, k], names=self.names, stem=stem, attrs={"axis": -1}, outputs=outputs)
        factors = self.add("Softmax", [best], axis=-1) if alike else best
        none = self.add("Sub", [scores, scores], count)
        return self.add("ScatterElements", [none, places, factors], count, axis=1)

    def _activated(self, x: Variable, width: int) -> Variable:
        attrs = self.node.attrs
        activation = attrs.get("activation_type", "relu")
        if activation == "swiglu":
            half = width // 2
            gate, up = (self._every_second(x, first, half) for first in (0, 1))
            limit = attrs.get("swiglu_limit")
            if limit is not None and np.isfinite(limit):
                gate = self.add("Min", [gate, self._number(limit)], half)
                up = self.add("Max", [self.add("Min", [up, self._number(limit)], half), self._number(-limit)], half)
            scaled = self.add("Mul", [gate, self._number(attrs.get("activation_alpha", 1.0))], half)
            opened = self.add("Mul", [gate, self.add("Sigmoid", [scaled], half)], half)
            shifted = self.add("Add", [up, self._number(attrs.get("activation_beta", 0.0))], half)
            return self.add("Mul", [opened, shifted], half)
        if activation == "relu":
            return self.add("Relu", [x], width)
        if activation == "silu":
            return self.add("Mul", [x, self.add("Sigmoid", [x], width)], width)
        if activation == "gelu":
            square = self.add("Mul", [self.add("Mul", [x, x], width), self._number(GELU[1])], width)
            inner = self.add("Mul", [x, self.add("Add", [square, self._number(GELU[0])], width)], width)
            opened = self.add("Add", [self.add("Tanh", [inner], width), self._number(1.0)], width)
            return self.add("Mul", [self.add("Mul", [x, self._number(0.5)], width), opened], width)
        return x

    def _number(self, value: float) -> Constant:
        return self.constant("number", np.asarray(value, self.kind))

    def _every_second(self, x: Variable, first: int, columns: int) -> Variable:
        starts, ends, axes, steps = (np.array([value], np.int64) for value in (first, 2 * columns, 1, 2))
        numbers = [self.constant("slice", values) for values in (starts, ends, axes, steps)]
        return self.add("Slice", [x, *numbers], columns)
