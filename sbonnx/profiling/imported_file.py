"""Import of a quantized file of any tool as float graph, plan and solution, with the weights of its float model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import patterns, qdq
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor, edit, query
from sbonnx.graph.constant_edits import ConstantEdit, Edits, added_bias
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import ADDS, LINEAR, QDQ
from sbonnx.planning.types import Plan, Reader, Role, Site, Solution
from sbonnx.report.codes import Note
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

SCALED: Final = 0.25
"""Maximum share of the squared difference of two weights that remains after channels are scaled, if they were scaled.

Fitted scales also follow rounding errors, by about the inverse of the number of weights that share one.
"""

SHARED: Final = 8
"""Minimum number of weights that share a fitted scale: a scale of a single weight would explain any rounding."""

SWEEPS: Final = 4
"""Iterations of the fit of scales for input and output channels."""


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
    notes: tuple[Note, ...]


def subject_of(float_model: Source, quantized: Source) -> Subject:
    """Import `quantized` as graph, plan and solution, with the weights and biases of `float_model`.

    Integer operators are read as pairs around float ones. A float weight is found by its name, or as the same input of
    the node of the same name, in the float model as stored or simplified and fused; it must have the shape of the
    quantized weight and be close to it. A weight that is not found counts as not rounded, which a note reports.

    If the weights were equalized (SmoothQuant, AWQ, cross-layer scales, split channels), the float weight gets the same
    changes: those that the file's metadata record, else, for files of other tools, scales of its channels fitted to the
    quantized weight.

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
    importer = _Made(graph, _Floats(float_model, graph.info.edits))
    for reader, qparams in reads.items():
        importer.add(reader, qparams)
    importer.find_biases()
    return Subject(
        graph,
        Plan(tuple(importer.sites())),
        importer.solution(),
        (*importer.notes(), *(Note(refusal.code, str(refusal)) for refusal in refusals)),
    )


def _reads(graph: Graph) -> dict[Reader, QParams]:
    """Return every use of a dequantized tensor, except by other pairs, with the parameters of its pair."""
    nodes = query.node_by_name(graph)
    qparams_by_reader: dict[Reader, QParams] = {}
    for pair in qdq.read(graph):
        for node, index in query.readers(nodes[pair.node].outputs[0]):
            if node.op not in QDQ:
                qparams_by_reader[Reader(node.name, index)] = pair.qparams
    return qparams_by_reader


class _Floats:
    """Constants of the float model, as stored and after simplification and fusion, with the changes of equalization."""

    def __init__(self, model: Source, edits: Edits) -> None:
        plain, fused = graphs.load(model), graphs.load(model)
        patterns.apply(fused, patterns.SIMPLIFY)
        patterns.apply(fused, patterns.FUSE)
        self._edits = edits
        self._graphs = (fused, plain)
        self._tensors = [query.tensors_by_name(graph) for graph in self._graphs]
        self._nodes = [query.node_by_name(graph) for graph in self._graphs]

    def has(self, node: str) -> bool:
        """Return whether the float model, simplified and fused, has a node of that name."""
        return node in self._nodes[0]

    def near(self, name: str, reader: Reader, op: Node, rounded: Array) -> _FloatWeight | None:
        """Return the float constant that was rounded to `rounded`; None if no such constant is found.

        Args:
            name: of the constant in the file.
            reader, op: the node of the file that reads it.
        """
        edits = self._edits_of(name, reader)
        for tensor, stored in self._candidates(name, reader):
            edited = _edited(stored, edits, op, reader.index)
            if edited is None or edited.shape != rounded.shape or edited.dtype.kind != "f":
                continue
            value, scales = (edited, None) if edits else _fitted_to(edited, rounded, op, reader.index)
            if _is_near(value, rounded):
                uses = query.readers(tensor)
                return _FloatWeight(value, uses[0][0] if len(uses) == 1 else None, scales)
        return None

    def bias(
        self, name: str, reader: Reader, op: Node, shape: tuple[int, ...], weight: _FloatWeight | None
    ) -> Array | None:
        """Return the bias of a node whose weight was found, zeros if it has none; None if that is unknown.

        A corrected bias may differ by any amount, so it is matched by name and position only, and by the reader of the
        weight in the float model: an integer operator has another name.
        """
        edits = self._edits_of(name, reader) or self._edits.get(added_bias(reader.node), ())
        if edits and edits[0].kind == "is":
            edited = _edited(np.zeros(shape, np.float32), edits, op, reader.index)
            return edited if edited is not None and edited.shape == shape else None
        layer = None if weight is None else weight.reader
        own = [] if layer is None else list(layer.inputs)[reader.index : reader.index + 1]
        there = [value for tensor in own if (value := query.constant(tensor)) is not None]
        for stored in (*there, *(value for _, value in self._candidates(name, reader))):
            value = _edited(stored, edits, op, reader.index)
            if value is not None and value.shape == shape and value.dtype.kind == "f":
                scales = None if weight is None else weight.scales
                return value if scales is None or scales.shape != shape[-1:] else np.asarray(value * scales)
        readers = [nodes[reader.node] for nodes in self._nodes if reader.node in nodes]
        readers += [] if layer is None else [layer]
        bare = any(len(node.inputs) <= reader.index or not node.inputs[reader.index].name for node in readers)
        return np.zeros(shape, np.float32) if bare else None

    def _edits_of(self, name: str, reader: Reader) -> tuple[ConstantEdit, ...]:
        """Return the changes of a constant by its name in the file, or by that of the same input in the float model."""
        there = [tensor.name for tensor, _ in self._candidates(name, reader)]
        return next((self._edits[candidate] for candidate in (*_names(name), *there) if candidate in self._edits), ())

    def _candidates(self, name: str, reader: Reader) -> Iterator[tuple[Tensor, Array]]:
        """Yield constants of the same name, and the same input of the node of the same name."""
        for tensors, nodes in zip(self._tensors, self._nodes, strict=True):
            node = nodes.get(reader.node)
            same = [] if node is None else list(node.inputs)[reader.index : reader.index + 1]
            for tensor in (*same, *(tensors.get(candidate) for candidate in _names(name))):
                value = query.constant(tensor)
                if value is not None:
                    yield tensor, value


@dataclass(frozen=True)
class _FloatWeight:
    """A weight of the float model, with the changes of equalization.

    Attributes:
        value: its values.
        reader: its only reader in the float model; None: it has several.
        scales: fitted factors of its output channels, (channels,); None: none were fitted.
    """

    value: Array
    reader: Node | None
    scales: Array | None


def _edited(value: Array, edits: Sequence[ConstantEdit], op: Node, index: int) -> Array | None:
    """Return a float constant after the recorded changes; None if they do not fit it."""
    for change in edits:
        if change.kind == "channels":
            layer = LinearLayer.of_shape(op.op, op.attrs, value.shape, index)
            sizes = (np.size(change.inputs), np.size(change.outputs))
            if not isinstance(layer, LinearLayer):
                return None
            if sizes[0] not in (0, layer.in_channels) or sizes[1] not in (0, layer.out_channels):
                return None
            value = layer.scale_inputs(value, change.inputs) if sizes[0] else value
            value = layer.scale_outputs(value, 1 / change.outputs.astype(np.float64)) if sizes[1] else value
        elif change.kind == "repeat":
            if change.axis >= value.ndim or np.max(change.values, initial=0) >= value.shape[change.axis]:
                return None
            value = np.take(value, change.values, change.axis)
        elif change.kind == "times":
            try:
                value = (value * change.values).reshape(value.shape).astype(value.dtype)
            except ValueError:
                return None
        else:
            value = np.asarray(change.values)
    return value


def _fitted_to(value: Array, rounded: Array, op: Node, index: int) -> tuple[Array, Array | None]:
    """Scale the channels of a weight to fit its rounded form, if scales explain most of the difference.

        rounded_oi = r_o s_i value_oi,      r, s: alternating least squares, first for the input channels

    Returns:
        the weight and r; the weight as it is and None if it was not scaled.
    """
    layer = LinearLayer.of_shape(op.op, op.attrs, value.shape, index)
    before = float(((value.astype(np.float64) - rounded) ** 2).sum())
    if not isinstance(layer, LinearLayer) or not before:
        return value, None
    w, target = (layer.by_channel(array.astype(np.float64)) for array in (value, rounded))
    r, s = np.ones(layer.out_shape), np.ones(layer.in_shape)
    for _ in range(SWEEPS):
        s = _least_squares(w * r, target, (1, 3), s)
        r = _least_squares(w * s, target, (2, 3), r)
    if not float(((w * r * s - target) ** 2).sum()) <= SCALED * before:
        return value, None
    return layer.scale_outputs(layer.scale_inputs(value, s.reshape(-1)), r.reshape(-1)), r.reshape(-1)


def _least_squares(basis: Array, target: Array, axes: tuple[int, int], known: Array) -> Array:
    """Return the factors of `basis`, one for each index of the other axes; `known` where it is 0, or not positive.

    Fewer than `SHARED` weights of one factor: all are `known`.
    """
    if basis.size < SHARED * known.size:
        return known
    energy = (basis**2).sum(axes, keepdims=True)
    factors = np.divide((basis * target).sum(axes, keepdims=True), energy, out=np.zeros_like(known), where=energy > 0)
    return np.where(factors > 0, factors, known)


def _names(name: str) -> tuple[str, ...]:
    names = [name]
    for ending in STORED:
        names.append(names[-1].removesuffix(ending))
    return tuple(dict.fromkeys(names))


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
        self._weights: dict[str, _FloatWeight] = {}  # by name of the node that reads them in the quantized model

    def add(self, reader: Reader, qparams: QParams) -> None:
        """Add one quantized use."""
        tensor = self._input(reader)
        if tensor is None:
            return
        if (tensor.name, id(qparams)) not in self._sites:
            tensor_of_site = self._weight(tensor, reader) if isinstance(tensor, Constant) else tensor
            role: Role = "weight" if isinstance(tensor, Constant) else "activation"
            key = (
                str(tensor_of_site.name)
                if tensor_of_site.name not in self._qparams
                else f"{tensor_of_site.name}/{len(self._sites)}"
            )
            why = "the file has it"
            site = Site(key, tensor_of_site.name, role, qparams.spec, (), why, key, scope=self._scopes[reader.node])
            self._sites[tensor.name, id(qparams)] = (site, tensor_of_site, [])
            self._qparams[key] = qparams
            if isinstance(tensor, Constant):
                self._qparams[key] = _fitted(qparams, tensor.shape)
                self._codes[key] = self._qparams[key].quantize(_value(tensor))
        _, tensor_of_site, readers = self._sites[tensor.name, id(qparams)]
        readers.append(reader)
        if tensor_of_site is not tensor:
            self._matched.add(reader)
            edit.replace_input(self._nodes[reader.node], reader.index, tensor_of_site)

    def find_biases(self) -> None:
        """Find the float biases of layers whose weights were found; their values in the file count as corrected."""
        for place in self._bias_places():
            node = self._nodes[place.node]
            tensor = node.inputs[place.index] if place.index < len(node.inputs) else None
            if isinstance(tensor, Constant) and len(query.readers(tensor)) == 1:
                rounded = _value(tensor)
                value = self._floats.bias(tensor.name, place, node, rounded.shape, self._weights.get(place.node))
                if value is not None and not np.array_equal(value, rounded):
                    constant = self._constant(tensor, value)
                    self._constants[constant.name] = rounded
                    edit.replace_input(node, place.index, constant)

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
        weight_info = self._floats.near(tensor.name, reader, self._nodes[reader.node], _value(tensor))
        if weight_info is None:
            self._unknown.append(reader.node)
            return tensor
        self._weights[reader.node] = weight_info
        return self._constant(tensor, weight_info.value)

    def _constant(self, tensor: Constant, value: Array) -> Constant:
        """Create a constant to replace `tensor`, with its type."""
        return edit.add_constant(self.graph, f"{tensor.name}/float", value.astype(_value(tensor).dtype), self._names)

    def sites(self) -> list[Site]:
        return [replace(site, readers=tuple(readers)) for site, _, readers in self._sites.values()]

    def solution(self) -> Solution:
        return Solution(self._qparams, self._codes, {}, constants=self._constants)

    def notes(self) -> list[Note]:
        notes = []
        if self._unknown:
            first = f"first that of '{self._unknown[0]}'"
            notes.append(
                Note(
                    "weights-not-of-float",
                    f"{len(self._unknown)} weights are not those of the float model, {first}: counted as not rounded",
                )
            )
        gone = [name for name in dict.fromkeys(self._gone) if self._floats.has(name)]
        if gone:
            notes.append(
                Note(
                    "nodes-without-pairs",
                    f"{len(gone)} nodes, first '{gone[0]}', went with the pairs and are not in the profile",
                )
            )
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
