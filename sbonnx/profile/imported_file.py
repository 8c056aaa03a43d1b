"""Import of a quantized file of any tool as float graph, plan and solution, with the weights of its float model."""

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
"""Minimum cosine similarity and norm ratio between a weight and its rounded form: below, they are different weights.

Rounding that minimizes the layer's output error changes weights most where the input activations do not vary: by half
of their energy at 4 bits.
"""

CORRECTED: Final = "_corrected"
"""Suffix of the name of a constant that calibration changed."""

STORED: Final = ("_float", CORRECTED, "_quantized", "_rounded")
"""Suffixes of the names of stored constants, last one first."""

SAME_MODEL_DB: Final = 50.0
"""Minimum signal-to-noise ratio in dB between the float model and the quantized one with its pairs removed."""


@dataclass(frozen=True)
class Subject:
    """A quantized file in the form that profiling needs.

    Attributes:
        graph: the file without its pairs, with the weights of the float model where they were found.
        plan, solution: its pairs, in the form of a plan and its solution.
        notes: messages about the import, one sentence each.
    """

    graph: Graph
    plan: Plan
    solution: Solution
    notes: tuple[str, ...]


def subject_of(float_model: Source, quantized: Source) -> Subject:
    """Import `quantized` as graph, plan and solution, with the weights and biases of `float_model`.

    Integer operators are read as pairs around float ones. A float weight is found by its name, or as the same input of
    the node of the same name, in the float model as stored or simplified and fused; it must have the shape of the
    quantized weight and be close to it. A weight that is not found counts as not rounded, which a note reports.

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
    """Return notes if the file without its pairs differs from the float model, by the outputs of the first feed."""
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
    """Return every use of a dequantized tensor, except by other pairs, with the parameters of its pair."""
    nodes = query.node_by_name(graph)
    found: dict[Reader, QParams] = {}
    for pair in qdq.read(graph):
        for node, index in query.readers(nodes[pair.node].outputs[0]):
            if node.op not in QDQ:
                found[Reader(node.name, index)] = pair.qparams
    return found


class _Floats:
    """Constants of the float model, as stored and after simplification and fusion."""

    def __init__(self, model: Source) -> None:
        plain, fused = graphs.load(model), graphs.load(model)
        patterns.apply(fused, patterns.SIMPLIFY)
        patterns.apply(fused, patterns.FUSE)
        self._graphs = (fused, plain)
        self._tensors = [query.tensors_by_name(graph) for graph in self._graphs]
        self._nodes = [query.node_by_name(graph) for graph in self._graphs]

    def has(self, node: str) -> bool:
        """Return whether the float model, simplified and fused, has a node of that name."""
        return node in self._nodes[0]

    def near(self, name: str, reader: Reader, rounded: Array) -> tuple[Array, Node | None] | None:
        """Return the float constant that was rounded to `rounded`, and its only reader if there is just one.

        Return None if no such constant is found.
        """
        for tensor, value in self._candidates(name, reader):
            if _is_near(value, rounded):
                uses = query.readers(tensor)
                return value, uses[0][0] if len(uses) == 1 else None
        return None

    def bias(self, name: str, reader: Reader, shape: tuple[int, ...], layer: Node | None) -> Array | None:
        """Return the bias of a node whose weight was found, zeros if it has none; None if that is unknown.

        A corrected bias may differ by any amount, so it is matched by name and position only, and by `layer`, the
        reader of the weight in the float model: an integer operator has another name.
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
        """Yield constants of the same name, and the same input of the node of the same name."""
        for tensors, nodes in zip(self._tensors, self._nodes, strict=True):
            node = nodes.get(reader.node)
            same = [] if node is None else list(node.inputs)[reader.index : reader.index + 1]
            for tensor in (*same, *(tensors.get(each) for each in _names(name))):
                value = query.constant(tensor)
                if value is not None:
                    yield tensor, value


def _names(name: str) -> tuple[str, ...]:
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
        self._layers: dict[str, Node | None] = {}  # nodes of the float model, by name of the node in the quantized one

    def add(self, reader: Reader, qparams: QParams) -> None:
        """Add one quantized use."""
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
        """Find the float biases of layers whose weights were found; their values in the file count as corrected."""
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
        """Yield the bias inputs of layers whose weights were found, and inputs marked as corrected by their name."""
        for node in list(self._nodes.values()):
            linear = LINEAR.get(node.op)
            if linear is not None and linear.bias is not None and Reader(node.name, linear.weight) in self._matched:
                yield Reader(node.name, linear.bias)
            elif node.op in ADDS:
                for index, tensor in enumerate(node.inputs):
                    if isinstance(tensor, Constant) and tensor.name.endswith(CORRECTED):
                        yield Reader(node.name, index)

    def _input(self, reader: Reader) -> Tensor | None:
        """Return the current input of a reader; None, recorded, if it was removed together with the pairs."""
        node: Node | None = self._nodes.get(reader.node)
        if node is None or reader.index >= len(node.inputs):
            self._gone.append(reader.node)
            return None
        tensor: Tensor = node.inputs[reader.index]
        return tensor

    def _weight(self, tensor: Constant, reader: Reader) -> Constant:
        """Return the float weight, or the rounded one if none is found."""
        found = self._floats.near(tensor.name, reader, _value(tensor))
        if found is None:
            self._unknown.append(reader.node)
            return tensor
        value, self._layers[reader.node] = found
        return self._constant(tensor, value)

    def _constant(self, tensor: Constant, value: Array) -> Constant:
        """Create a constant to replace `tensor`, with its type."""
        return edit.add_constant(self.graph, f"{tensor.name}/float", value.astype(_value(tensor).dtype), self._names)

    def sites(self) -> list[Site]:
        return [replace(site, readers=tuple(readers)) for site, _, readers in self._sites.values()]

    def solution(self) -> Solution:
        return Solution(self._qparams, self._codes, {}, constants=self._constants)

    def notes(self) -> list[str]:
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
    """Return the parameters of a weight's remaining channels, without those that padded it at the end."""
    axis, scale, zero = qparams.spec.axis, qparams.scale, qparams.zero_point
    if axis is None or qparams.spec.block_size is not None or scale.size == shape[axis]:
        return qparams
    return QParams(scale[: shape[axis]], zero[: shape[axis]], qparams.spec)


def _value(tensor: Constant) -> Array:
    value = query.constant(tensor)
    assert value is not None  # constants have values
    return value
