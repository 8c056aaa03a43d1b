"""The network in simulated quantization, with inputs of nodes that can be switched between quantized and float."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized.fake_quant import quantize_reads
from sbonnx.graph import Graph, Variable, edit, query
from sbonnx.graph.extract import extract
from sbonnx.metrics import ErrorSum, ratio_db
from sbonnx.planning.types import Plan, Reader, Solution
from sbonnx.spec import Array

K = TypeVar("K", bound=Hashable)


class SwitchedNetwork(Generic[K]):
    """The network with inputs of nodes that can be quantized one by one, in one session. Close it after use.

    Args:
        graph, plan, solution: a network, its scales and codes.
        switches: the inputs that each switch quantizes; all others stay float.
        outputs: names of the tensors to judge by.
        feeds: the samples to run.
        device: see `LayerRunner`.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        solution: Solution,
        switches: Mapping[K, Collection[Reader]],
        outputs: Sequence[str],
        feeds: Sequence[Mapping[str, Array]],
        device: str,
    ) -> None:
        self._feeds, self._outputs = feeds, list(outputs)
        self._switches = {key: f"switch_{number}" for number, key in enumerate(switches)}
        piece = extract(graph, [tensor.name for tensor in graph.inputs], self._outputs)
        sites = {reader: site for site in plan.sites for reader in site.readers if reader not in solution.unread}
        uses = {use: sites[use] for readers in switches.values() for use in readers if use in sites}
        inputs = {(node.name, index): tensor for node in piece.nodes for index, tensor in enumerate(node.inputs)}
        quantize_reads(piece, uses, solution)
        names, nodes = edit.Names(piece), query.node_by_name(piece)
        for key, name in self._switches.items():
            switch = Variable(name, np.dtype(bool), [])
            piece.inputs.append(switch)
            for use in switches[key]:
                node, plain = nodes.get(use.node), inputs.get((use.node, use.index))
                if node is None or plain is None or node.inputs[use.index] is plain:
                    continue
                choice = [switch, node.inputs[use.index], plain]
                added = edit.add_node(piece, "Where", choice, names=names, stem=f"{name}_where", attrs={})
                added.outputs[0].dtype, added.outputs[0].shape = query.dtype(plain), plain.shape
                edit.replace_input(node, use.index, added.outputs[0])
        edit.sort(piece)
        self._run = LayerRunner(piece, device=device, threads=1, name="the network with switched inputs")
        self._floats = [self._outputs_of(feed, ()) for feed in feeds]

    def error(self, on: Collection[K]) -> float:
        """Return the SQNR in dB of the worst output with some inputs quantized."""
        sums = {name: ErrorSum() for name in self._outputs}
        for feed, floats in zip(self._feeds, self._floats, strict=True):
            results = self._outputs_of(feed, on)
            for name, errors in sums.items():
                errors.add(floats[name], results[name])
        return ratio_db(1.0, max((errors.relative for errors in sums.values()), default=0.0))

    def _outputs_of(self, feed: Mapping[str, Array], on: Collection[K]) -> Mapping[str, Array]:
        active = {self._switches[key] for key in on}
        switches = {name: np.array(name in active) for name in self._switches.values()}
        return self._run.run({**feed, **switches}, self._outputs)

    def __enter__(self) -> SwitchedNetwork[K]:
        return self

    def __exit__(self, *exception: object) -> None:
        self._run.close()
