"""Node units of a plan whose activations can have another width, and the activations between them.

Integer operations read and write one width. A unit is a set of nodes that has one width: nodes without a pair between
them, nodes whose outputs share a scale, and nodes that share a float constant in the type of activations. An activation
between two units is exact in the wide type only if both are wide: else one of them converts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sbonnx.graph import Constant, Graph, Tensor, query
from sbonnx.planning.override_file import TensorOverride
from sbonnx.planning.survey import FLOATS, weighted
from sbonnx.planning.types import Plan, Reader, Site

OPERAND = "operand"
"""Rule of the sites of float constants in the type of activations."""


@dataclass(frozen=True)
class UnitEdge:
    """An activation that a unit reads from another one, or a constant that it reads.

    Attributes:
        site: key of its pair.
        units: the units that have to be wide.
        uses: inputs of the reading unit.
    """

    site: str
    units: frozenset[str]
    uses: tuple[Reader, ...]


class NodeUnits:
    """Units of a plan without pairs in branches.

    Args:
        graph, plan: the quantized activations of a graph.
        mixed: ops whose inputs may have other widths than their output.

    Attributes:
        edges: activations between units, and constants.
        written: number of quantized activations that each unit writes; an input of the graph is a unit too.
    """

    def __init__(self, graph: Graph, plan: Plan, mixed: Collection[str] = ()) -> None:
        self._mixed = frozenset(mixed)
        self._tensors = query.tensors_by_name(graph)
        self._nodes = query.node_by_name(graph)
        self._sites = [site for site in plan.sites if site.role == "activation" or site.rule == OPERAND]
        self._weights = plan.of_role("weight")
        self._parents: dict[str, str] = {}
        self._inner: set[str] = set()  # nodes with a float tensor without a pair to another one
        self._join_all(graph)
        self.written = Counter(self._writer(site) for site in self._activations())
        self.edges = tuple(self._edges())

    def overrides(self, wide: Collection[str], bits: int) -> dict[str, TensorOverride]:
        """Return the overrides by tensor that give units the width `bits`, with conversions at their borders."""
        overrides: dict[str, TensorOverride] = {}
        for site in self._sites:
            readers = {reader.node for reader in site.readers if self._has_width(reader)}
            inside = {name for name in readers if self._root(name) in wide}
            if site.role == "weight":
                if any(self._root(reader.node) in wide for reader in site.readers):
                    overrides[site.tensor] = TensorOverride(bits=bits)
            elif self._writer(site) in wide:
                others = frozenset(readers - inside)
                narrow = TensorOverride(bits=site.spec.bits)
                overrides[site.tensor] = TensorOverride(
                    bits, convert=narrow if others else None, readers=others or None
                )
            elif inside:
                overrides[site.tensor] = TensorOverride(convert=TensorOverride(bits), readers=frozenset(inside))
        return overrides

    def channel_scales(self, ops: Collection[str]) -> dict[str, TensorOverride]:
        """Return the overrides by tensor that give the weights of some ops a scale for each output channel."""
        overrides: dict[str, TensorOverride] = {}
        for site in self._weights:
            node = self._nodes.get(site.readers[0].node) if site.readers else None
            at = None if node is None or node.op not in ops else weighted(node)
            if at is not None and at.axis is not None and site.rule != OPERAND and site.spec.axis is None:
                overrides[site.tensor] = TensorOverride(axis=at.axis, signed=True, symmetric=True)
        return overrides

    def _activations(self) -> list[Site]:
        return [site for site in self._sites if site.role == "activation"]

    def _writer(self, site: Site) -> str:
        """Return the unit that writes the tensor of an activation."""
        maker = query.producer(self._tensors[site.tensor])
        return self._root(site.tensor if maker is None else maker.name)

    def _computes(self, reader: Reader) -> bool:
        """Return whether a reader computes with the values: not with the shape alone."""
        return any(query.dtype(tensor) in FLOATS for tensor in self._nodes[reader.node].outputs)

    def _has_width(self, reader: Reader) -> bool:
        """Return whether a reader of the activation must have inputs and output of one width."""
        free = self._nodes[reader.node].op in self._mixed and reader.node not in self._inner
        return self._computes(reader) and not free

    def _root(self, name: str) -> str:
        while self._parents.get(name, name) != name:
            name = self._parents[name]
        return name

    def _join(self, one: str, other: str) -> None:
        self._parents[self._root(other)] = self._root(one)

    def _join_all(self, graph: Graph) -> None:
        groups: dict[str, str] = {}
        for site in self._sites:
            if site.role == "activation":
                self._join(groups.setdefault(site.group, self._writer(site)), self._writer(site))
            else:
                for reader in site.readers[1:]:
                    self._join(site.readers[0].node, reader.node)
        uses = {reader for site in self._sites for reader in site.readers}
        for node in graph.nodes:
            for index, tensor in enumerate(node.inputs):
                if Reader(node.name, index) not in uses and self._is_float(tensor):
                    maker = query.producer(tensor)
                    names = (tensor.name if maker is None else maker.name, node.name)
                    self._join(*names)
                    self._inner.update(names)

    @staticmethod
    def _is_float(tensor: Tensor) -> bool:
        return not isinstance(tensor, Constant) and bool(tensor.name) and query.dtype(tensor) in FLOATS

    def _edges(self) -> Iterator[UnitEdge]:
        for site in self._sites:
            uses: dict[frozenset[str], list[Reader]] = {}
            for reader in site.readers:
                if not self._computes(reader):
                    continue
                own = self._root(reader.node)
                if site.role == "weight":
                    uses.setdefault(frozenset({own}), []).append(reader)
                elif own != self._writer(site):
                    units = {self._writer(site), own} if self._has_width(reader) else {self._writer(site)}
                    uses.setdefault(frozenset(units), []).append(reader)
            yield from (UnitEdge(site.key, units, tuple(readers)) for units, readers in uses.items())
