"""Error at the outputs of a network with a plan and solution, on a few samples, in simulated quantization."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized.fake_quant import quantize_reads
from sbonnx.graph import Constant, Graph, query
from sbonnx.graph.extract import extract
from sbonnx.metrics import ErrorSum, errors_by_feed, ratio_db
from sbonnx.planning.types import Plan, Solution
from sbonnx.spec import Array

Values = Mapping[str, Array]


@dataclass(frozen=True)
class EndError:
    """Error of the judged tensors.

    Attributes:
        by_sample: float64 (samples,): energy of the error relative to the mean energy of the tensor over the samples,
            mean over tensors. inf if a value is not finite.
    """

    by_sample: Array

    @property
    def mean(self) -> float:
        """Mean over the samples."""
        return float(self.by_sample.mean())

    @property
    def sqnr_db(self) -> float:
        """The mean in dB."""
        return ratio_db(1.0, self.mean)

    def gain_db(self, other: EndError) -> float:
        """Return by how much `other` is better, in dB; 0 if one is not finite."""
        gain = other.sqnr_db - self.sqnr_db
        return gain if math.isfinite(gain) else 0.0


@dataclass(frozen=True)
class Quantized:
    """A network with a plan and its solution."""

    plan: Plan
    solution: Solution


class RegionTrials:
    """Runs of a network on a few samples, in float and quantized.

    Args:
        graph: simplified and fused; not changed.
        ends: tensors to judge by.
        feeds: the samples.
        device: device to run on.

    Attributes:
        floats: the judged tensors in float, by sample.
    """

    def __init__(self, graph: Graph, ends: Sequence[str], feeds: Sequence[Values], device: str) -> None:
        self._graph, self._ends, self._feeds, self._device = graph, tuple(ends), feeds, device
        self._index = query.tensors_by_name(graph)
        self._inputs = [tensor.name for tensor in graph.inputs]
        self._nodes = {node.name: node for node in graph.nodes}
        self.floats = self._run(extract(graph, self._inputs, self._ends, index=self._index), feeds, self._ends)

    def entries(self, nodes: Collection[str]) -> list[str]:
        """Return the tensors that `nodes` read and do not compute, in the order of the graph; no constants."""
        members = [node for node in self._graph.nodes if node.name in nodes]
        computed = {tensor.name for node in members for tensor in node.outputs}
        read = {
            tensor.name
            for node in members
            for tensor in query.dependencies(node)
            if not isinstance(tensor, Constant) and tensor.name
        }
        return sorted(read - computed)

    def can_enter(self, nodes: Collection[str]) -> bool:
        """Return whether `nodes` can run as a model: the types of all tensors that they read are known."""
        return all(query.dtype(self._index[name]) is not None for name in self.entries(nodes))

    @property
    def nodes(self) -> frozenset[str]:
        """Names of the nodes of the main graph."""
        return frozenset(self._nodes)

    def run(self, network: Quantized, tensors: Sequence[str] = ()) -> list[Values]:
        """Return the judged tensors and `tensors` of the quantized network, by sample."""
        wanted = list(dict.fromkeys([*self._ends, *(name for name in tensors if name not in self._inputs)]))
        results = self._run(self._piece(network, self._inputs, wanted), self._feeds, wanted)
        return [{**feed, **values} for feed, values in zip(self._feeds, results, strict=True)]

    def run_after(self, network: Quantized, nodes: Collection[str], known: Sequence[Values]) -> list[Values]:
        """Return the judged tensors of a quantized network that differs from a known one in `nodes` only.

        Args:
            nodes: the nodes that differ, with all nodes after them.
            known: of the known network: the judged tensors and the entries of `nodes`, by sample.
        """
        computed = {tensor.name for name in nodes for tensor in self._nodes[name].outputs}
        ends = [name for name in self._ends if name in computed]
        entries = self.entries(nodes)
        piece = self._piece(network, entries, ends)
        results = self._run(piece, [{name: values[name] for name in entries} for values in known], ends)
        return [{**before, **values} for before, values in zip(known, results, strict=True)]

    def error(self, quantized: Sequence[Values]) -> EndError:
        """Compare the judged tensors with float."""
        sums = {name: ErrorSum() for name in self._ends}
        for floats, values in zip(self.floats, quantized, strict=True):
            for name, errors in sums.items():
                errors.add(floats[name], values[name])
        by_sample = errors_by_feed(tuple(sums.values()))
        return EndError(np.zeros(len(self._feeds)) if by_sample is None else by_sample)

    def _piece(self, network: Quantized, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
        plan, solution = network.plan, network.solution
        piece = extract(self._graph, inputs, outputs, index=self._index)
        uses = {reader: site for site in plan.sites for reader in site.readers if reader not in solution.unread}
        quantize_reads(piece, uses, solution)
        return piece

    def _run(self, piece: Graph, feeds: Sequence[Values], outputs: Sequence[str]) -> list[Values]:
        with LayerRunner(piece, device=self._device, threads=1, name="the network up to its outputs") as run:
            return [run.run(feed, outputs) for feed in feeds]
