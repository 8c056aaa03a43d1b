"""A quantized file of any tool, read as a float graph, a plan and a solution, beside its float model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import patterns, qdq
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor, edit, query
from sbonnx.metrics import sqnr_db
from sbonnx.ops import ADDS, LINEAR, QDQ
from sbonnx.plan.types import Plan, Reader, Role, Site, Solution
from sbonnx.spec import Array, QParams

Source = str | os.PathLike[str] | onnx.ModelProto

SAME_WEIGHT: Final = 0.5
"""Least cosine of a weight and its rounding, and least ratio of their norms: below, it is another weight.

Rounding by what a layer meets moves weights far where its inputs do not vary: by half of their energy at 4 bits.
"""

CORRECTED: Final = "_corrected"
"""Ending of the name of a constant that calibration gave another value."""

STORED: Final = ("_float", CORRECTED, "_quantized", "_rounded")
"""Endings of the names of stored constants, last one first."""

SAME_MODEL_DB: Final = 50.0
"""Least signal to noise between the float model and what is left of the quantized one without its pairs, decibel."""


@dataclass(frozen=True)
class Subject:
    """What a profile needs of a quantized file.

    Attributes:
        graph: the file without its pairs, with the weights of the float model where they were found.
        plan, solution: its pairs, as if they had been planned and solved.
        notes: what is to be known, one sentence each.
    """

    graph: Graph
    plan: Plan
    solution: Solution
    notes: tuple[str, ...]


def subject_of(float_model: Source, quantized: Source) -> Subject:
    """The pairs of `quantized` on its own graph, with the weights and biases of `float_model`.

    Integer operators are read as pairs around float ones. A float weight is found by its name, or as the same input of
    the node of the same name, in the float model as it is or simplified and fused; it must have the shape of the
    quantized one and be near it. A weight that is not found counts as not rounded, which a note says.

    Raises:
        ModelError: a file cannot be read, or the second has no pairs.
    """
    graph = graphs.load(quantized)
    _, refusals = qdq.unfold(graph)
    reads = _reads(graph)
    if not reads:
        where = f"'{graph.info.path}'" if graph.info.path is not None else "the second model"
        raise ModelError(
            f"{where} has no Q/DQ pairs and no integer operators with constant numbers: nothing to profile"
        )
    qdq.strip(graph)
    edit.sort(graph)
    made = _Made(graph, _Floats(float_model))
    for reader, qparams in reads.items():
        made.add(reader, qparams)
    made.find_biases()
    return Subject(
        graph, Plan(tuple(made.sites())), made.solution(), (*made.notes(), *(str(refusal) for refusal in refusals))
    )


def same_model(subject: Subject, float_model: Source, data: Iterable[Mapping[str, Array]]) -> tuple[str, ...]:
    """Notes where the file without its pairs is not the float model, by the outputs of the first feed."""
    feeds = next(islice(iter(data), 1), None)
    if feeds is None:
        return ()
    with LayerRunner(graphs.load(float_model), optimisation="off", name="the float model") as one:
        expected = one.run(feeds)
    with LayerRunner(subject.graph, optimisation="off", name="the quantized model without its pairs") as other:
        found = other.run(feeds)
    notes = []
    for name in sorted(expected.keys() & found.keys()):
        ref, value = expected[name], found[name]
        if getattr(ref, "dtype", None) is None or ref.dtype.kind != "f":
            continue
        alike = -np.inf if ref.shape != value.shape else sqnr_db(ref, value)
        if alike < SAME_MODEL_DB:
            why = "the losses are those of its pairs alone, against itself without them"
            notes.append(
                f"'{name}' of the quantized file without its pairs is {alike:.1f} dB from the float model: {why}"
            )
    return tuple(notes)


def _reads(graph: Graph) -> dict[Reader, QParams]:
    """Every use of a dequantized tensor, but by other pairs, with the numbers of its pair."""
    nodes = query.node_by_name(graph)
    found: dict[Reader, QParams] = {}
    for pair in qdq.read(graph):
        for node, index in query.readers(nodes[pair.node].outputs[0]):
            if node.op not in QDQ:
                found[Reader(node.name, index)] = pair.qparams
    return found


class _Floats:
    """The constants of the float model, as it is and simplified and fused."""

    def __init__(self, model: Source) -> None:
        plain, fused = graphs.load(model), graphs.load(model)
        patterns.apply(fused, patterns.SIMPLIFY)
        patterns.apply(fused, patterns.FUSE)
        self._graphs = (fused, plain)
        self._tensors = [query.tensors_by_name(graph) for graph in self._graphs]
        self._nodes = [query.node_by_name(graph) for graph in self._graphs]

    def has(self, node: str) -> bool:
        """Whether the float model, simplified and fused, has a node of that name."""
        return node in self._nodes[0]

    def near(self, name: str, reader: Reader, rounded: Array) -> tuple[Array, Node | None] | None:
        """The float constant that was rounded to `rounded`, and the node that alone reads it; None for no constant."""
        for tensor, value in self._candidates(name, reader):
            if _is_near(value, rounded):
                uses = query.readers(tensor)
                return value, uses[0][0] if len(uses) == 1 else None
        return None

    def bias(self, name: str, reader: Reader, shape: tuple[int, ...], layer: Node | None) -> Array | None:
        """The bias of a node whose weight was found, zeros where it has none; None where that is not known.

        How far it was moved when it was corrected says nothing: names and places do, and `layer`, which reads the
        weight in the float model: an integer operator has another name.
        """
        own = [] if layer is None else list(layer.inputs)[reader.index : reader.index + 1]
        there = [value for tensor in own if (value := query.constant(tensor)) is not None]
        for value in (*there, *(value for _, value in self._candidates(name, reader))):
            if value.shape == shape and value.dtype.kind == "f":
                return value
        known = [nodes[reader.node] for nodes in self._nodes if reader.node in nodes]
        known += [] if layer is None else [layer]
        bare = any(len(node.inputs) <= reader.index or not node.inputs[reader.index].name for node in known)
        return np.zeros(shape, np.float32) if bare else None

    def _candidates(self, name: str, reader: Reader) -> Iterator[tuple[Tensor, Array]]:
        """Constants of the same name, and the same input of the node of the same name."""
        for tensors, nodes in zip(self._tensors, self._nodes, strict=True):
            node = nodes.get(reader.node)
            same = [] if node is None else list(node.inputs)[reader.index : reader.index + 1]
            for tensor in (*same, *(tensors.get(each) for each in _names(name))):
                value = query.constant(tensor)
                if value is not None:
                    yield tensor, value


def _names(name: str) -> tuple[str, ...]:
    """What a stored constant may have been called in the float model."""
    found = [name]
    for ending in STORED:
        found.append(found[-1].removesuffix(ending))
    return tuple(dict.fromkeys(found))


def _is_near(value: Array, rounded: Array) -> bool:
    if value.shape != rounded.shape or value.dtype.kind != "f":
        return False
    wide, other = value.astype(np.float64), rounded.astype(np.float64)
    ours, theirs = float((wide**2).sum()), float((other**2).sum())
    alike = float((wide * other).sum()) >= SAME_WEIGHT * np.sqrt(ours * theirs)
    return alike and min(ours, theirs) >= SAME_WEIGHT**2 * max(ours, theirs)


class _Made:
    """The plan and solution, site by site."""

    def __init__(self, graph: Graph, floats: _Floats) -> None:
        self.graph, self._floats = graph, floats
        self._nodes = query.node_by_name(graph)
        self._scopes = {node.name: scope for scope, body in query.scopes(graph) for node in body.nodes}
        self._names = edit.Names(graph)
        self._sites: dict[tuple[str, int], tuple[Site, Tensor, list[Reader]]] = {}
        self._qparams: dict[str, QParams] = {}
        self._codes: dict[str, Array] = {}
        self._constants: dict[str, Array] = {}
        self._gone: list[str] = []
        self._unknown: list[str] = []
        self._matched: set[Reader] = set()
        self._layers: dict[str, Node | None] = {}  # of the float model, by name of the node here

    def add(self, reader: Reader, qparams: QParams) -> None:
        """One quantized read."""
        tensor = self._input(reader)
        if tensor is None:
            return
        if (tensor.name, id(qparams)) not in self._sites:
            made = self._weight(tensor, reader) if isinstance(tensor, Constant) else tensor
            role: Role = "weight" if isinstance(tensor, Constant) else "activation"
            key = str(made.name) if made.name not in self._qparams else f"{made.name}/{len(self._sites)}"
            why = "the file has it"
            site = Site(key, made.name, role, qparams.spec, (), why, key, scope=self._scopes[reader.node])
            self._sites[tensor.name, id(qparams)] = (site, made, [])
            self._qparams[key] = qparams
            if isinstance(tensor, Constant):
                self._qparams[key] = _fitted(qparams, tensor.shape)
                self._codes[key] = self._qparams[key].quantize(_value(tensor))
        _, made, readers = self._sites[tensor.name, id(qparams)]
        readers.append(reader)
        if made is not tensor:
            self._matched.add(reader)
            edit.replace_input(self._nodes[reader.node], reader.index, made)

    def find_biases(self) -> None:
        """The float biases of the layers whose weights were found; what they are in the file counts as corrected."""
        for place in self._bias_places():
            node = self._nodes[place.node]
            tensor = node.inputs[place.index] if place.index < len(node.inputs) else None
            if isinstance(tensor, Constant) and len(query.readers(tensor)) == 1:
                rounded = _value(tensor)
                value = self._floats.bias(tensor.name, place, rounded.shape, self._layers.get(place.node))
                if value is not None and not np.array_equal(value, rounded):
                    made = self._constant(tensor, value)
                    self._constants[made.name] = rounded
                    edit.replace_input(node, place.index, made)

    def _bias_places(self) -> Iterator[Reader]:
        """Where biases are read: by layers whose weights were found, and what was corrected by its name."""
        for node in list(self._nodes.values()):
            linear = LINEAR.get(node.op)
            if linear is not None and linear.bias is not None and Reader(node.name, linear.weight) in self._matched:
                yield Reader(node.name, linear.bias)
            elif node.op in ADDS:
                for index, tensor in enumerate(node.inputs):
                    if isinstance(tensor, Constant) and tensor.name.endswith(CORRECTED):
                        yield Reader(node.name, index)

    def _input(self, reader: Reader) -> Tensor | None:
        """What the node reads now; None, remembered, where taking the pairs out took it as well."""
        node: Node | None = self._nodes.get(reader.node)
        if node is None or reader.index >= len(node.inputs):
            self._gone.append(reader.node)
            return None
        tensor: Tensor = node.inputs[reader.index]
        return tensor

    def _weight(self, tensor: Constant, reader: Reader) -> Constant:
        """The float weight; the rounded one where there is none."""
        found = self._floats.near(tensor.name, reader, _value(tensor))
        if found is None:
            self._unknown.append(reader.node)
            return tensor
        value, self._layers[reader.node] = found
        return self._constant(tensor, value)

    def _constant(self, tensor: Constant, value: Array) -> Constant:
        """A constant in the place of `tensor`, of its type."""
        return edit.add_constant(self.graph, f"{tensor.name}/float", value.astype(_value(tensor).dtype), self._names)

    def sites(self) -> list[Site]:
        """The sites with their readers."""
        return [replace(site, readers=tuple(readers)) for site, _, readers in self._sites.values()]

    def solution(self) -> Solution:
        """Their numbers."""
        return Solution(self._qparams, self._codes, {}, constants=self._constants)

    def notes(self) -> list[str]:
        """What was not found."""
        notes = []
        if self._unknown:
            first = f"first that of '{self._unknown[0]}'"
            notes.append(
                f"{len(self._unknown)} weights are not those of the float model, {first}: counted as not rounded"
            )
        gone = [name for name in dict.fromkeys(self._gone) if self._floats.has(name)]
        if gone:
            notes.append(f"{len(gone)} nodes, first '{gone[0]}', went with the pairs and are not in the profile")
        return notes


def _fitted(qparams: QParams, shape: Sequence[int]) -> QParams:
    """The numbers of the channels that are left of a weight: those that pad it for a kernel, at its end, are gone."""
    axis, scale, zero = qparams.spec.axis, qparams.scale, qparams.zero_point
    if axis is None or qparams.spec.block_size is not None or scale.size == shape[axis]:
        return qparams
    return QParams(scale[: shape[axis]], zero[: shape[axis]], qparams.spec)


def _value(tensor: Constant) -> Array:
    value = query.constant(tensor)
    assert value is not None  # constants have values
    return value
