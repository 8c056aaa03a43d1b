"""Export of a quantized graph with the requested input and output names, dynamic axes and opset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph import Graph, Tensor, query
from sbonnx.graph.edit import Names
from sbonnx.graph.exporter import read_type, skeleton
from sbonnx.graph.protos import ONNX_ERRORS
from sbonnx.ops import QDQ
from sbonnx.patterns.simplify.infer import infer_shapes
from sbonnx.qdq import BITS
from sbonnx.spec import Array

EXTRA_SUFFIX: Final = "_extra"
"""Suffix of the name of the file that carries the ancestor's literal ``bits`` attribute."""

DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]


@dataclass(frozen=True)
class OnnxExport:
    """Arguments of `QuantModel.export_onnx`; `target` is the path."""

    target: Path
    feeds: Mapping[str, Array] | None = None
    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    dynamic_axes: DynamicAxes = field(default_factory=dict)
    opset: int | None = None
    verbose: bool = False
    extra_info: bool = False
    force: bool = False


def write_onnx(graph: Graph, export: OnnxExport) -> Path | None:
    """Write a quantized graph, see `QuantModel.export_onnx`. The graph is modified in place.

    Returns:
        The path of the second file, or None.
    """
    target, feeds, extra_info, opset = export.target, export.feeds, export.extra_info, export.opset
    extra = target.with_name(f"{target.stem}{EXTRA_SUFFIX}{target.suffix}")
    for path in (target, *([extra] if extra_info else [])):
        graphs.check_target(path, inputs=graph.info.files, force=export.force, model=True)
    if opset is not None:
        graph = _in_opset(graph, opset)
    fed = [(feeds or {}).get(tensor.name) for tensor in graph.inputs]
    _rename(graph, graph.inputs, export.input_names, "input")
    _rename(graph, graph.outputs, export.output_names, "output")
    renamed = {tensor.name: value for tensor, value in zip(graph.inputs, fed, strict=True) if value is not None}
    _set_axes(graph, renamed, export.dynamic_axes)
    if export.verbose:
        print(onnx.printer.to_text(skeleton(graph).model))
    graphs.save(graph, target, force=export.force)
    if not extra_info:
        return None
    for _, body in query.scopes(graph):
        for node in body.nodes:
            if node.op in QDQ and BITS in node.attrs:
                node.attrs["bits"] = node.attrs[BITS]
    graphs.save(graph, extra, force=export.force)
    return extra


def _in_opset(graph: Graph, opset: int) -> Graph:
    """Convert the graph to a newer opset.

    Raises:
        ModelError: the graph has a newer opset, or an operator cannot be converted.
    """
    if opset < graph.opset:
        raise ModelError(
            f"opset_version={opset}: the quantized model needs opset {graph.opset}, by the float model or by the types "
            "of its codes, and operators are not lowered: export the float model with an older opset"
        )
    if opset == graph.opset:
        return graph
    return graphs.at_opset(graph, opset)


def _rename(graph: Graph, tensors: Sequence[Tensor], names: Sequence[str], what: str) -> None:
    """Rename the first `len(names)` tensors in place. An inner tensor with one of these names is renamed.

    Raises:
        RecipeError: more names than tensors, or duplicate names.
    """
    if len(names) > len(tensors):
        raise RecipeError(f"{what}_names has {len(names)} names, and the model {len(tensors)} {what}s")
    final = [*names, *(tensor.name for tensor in tensors[len(names) :])]
    twice = sorted({name for name in final if final.count(name) > 1})
    if twice or "" in names:
        raise RecipeError(f"{what}_names must be different names that are not empty, got {', '.join(map(repr, final))}")
    interface = {id(tensor) for tensor in (*graph.inputs, *graph.outputs)}
    fresh = Names(graph)
    for name in names:
        for tensor in query.all_tensors(graph):
            if tensor.name == name and id(tensor) not in {id(renamed) for renamed in tensors}:
                if id(tensor) in interface:
                    raise RecipeError(f"{what}_names: '{name}' is the name of another input or output")
                tensor.name = fresh.fresh(f"{name}_inner")
    for tensor, name in zip(tensors, names, strict=False):
        for carriers in (graph.info.values, graph.info.tensors):
            if tensor.name in carriers and tensor.name != name:
                carriers[name] = carriers.pop(tensor.name)
                carriers[name].name = name
        tensor.name = name


def _set_axes(graph: Graph, feeds: Mapping[str, Array], wanted: DynamicAxes) -> None:
    """Fix the open axes of fed inputs to the feed's sizes and make the requested axes dynamic, in place."""
    interface = {tensor.name: tensor for tensor in (*graph.inputs, *graph.outputs)}
    axes = {name: _axes_of(interface, name, chosen) for name, chosen in wanted.items()}
    sizes: dict[str, int] = {}
    freed: dict[str, dict[int, str]] = {}
    changed = False
    for tensor in graph.inputs:
        before = query.shape(tensor)
        if before is None:
            continue
        after: list[Any] = list(before)
        for axis, size in enumerate(before):
            new = axes.get(tensor.name, {}).get(axis)
            if new is not None:
                after[axis] = new
                if isinstance(size, int):
                    freed.setdefault(tensor.name, {})[axis] = new
            elif not isinstance(size, int) and tensor.name in feeds:
                after[axis] = feeds[tensor.name].shape[axis]
                if isinstance(size, str):
                    sizes[size] = after[axis]
        changed = changed or after != list(before)
        tensor.shape = tuple(after)
    if changed:
        _infer_again(graph)
    for tensor in graph.outputs:
        shape = query.shape(tensor)
        if shape is not None:
            named = axes.get(tensor.name, {})
            tensor.shape = tuple(
                named.get(axis, sizes.get(size, size) if isinstance(size, str) else size)
                for axis, size in enumerate(shape)
            )
    if freed:
        _prove(graph, freed, feeds)


def _axes_of(interface: Mapping[str, Tensor], name: str, chosen: Mapping[int, str] | Sequence[int]) -> dict[int, str]:
    """Return the axes of one input or output that become dynamic, with their names.

    Raises:
        RecipeError: there is no such input, output or axis.
    """
    if name not in interface:
        raise RecipeError(f"dynamic_axes: the model has no input or output '{name}'; it has {', '.join(interface)}")
    rank = query.rank(interface[name])
    named = dict(chosen) if isinstance(chosen, Mapping) else {axis: f"{name}_dynamic_axes_{axis}" for axis in chosen}
    names_by_axis: dict[int, str] = {}
    for axis, text in named.items():
        if not isinstance(axis, int) or (rank is not None and not -rank <= axis < rank):
            raise RecipeError(f"dynamic_axes: '{name}' has {rank} axes, and there is no axis {axis}")
        names_by_axis[axis % rank if rank else axis] = str(text)
    return names_by_axis


def _infer_again(graph: Graph) -> None:
    infer_shapes(graph)
    model = skeleton(graph).model
    for value in model.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except ONNX_ERRORS as error:
        raise ModelError(f"the sizes of the inputs contradict the model: {' '.join(str(error).split())}") from None
    shapes = {value.name: read_type(value.type)[1] for value in inferred.graph.output}
    for tensor in graph.outputs:
        rank = query.rank(tensor)
        inferred_shape = shapes.get(tensor.name)
        if inferred_shape is not None or rank is not None:
            tensor.shape = inferred_shape if inferred_shape is not None else (None,) * (rank or 0)


def _prove(graph: Graph, freed: Mapping[str, Mapping[int, str]], feeds: Mapping[str, Array]) -> None:
    """Check that the graph runs with other sizes along axes that were fixed before.

    Raises:
        ModelError: it does not run.
    """
    values: dict[str, Array] = {}
    for tensor in graph.inputs:
        shape = query.shape(tensor) or ()
        fed = feeds.get(tensor.name)
        sizes = [
            size if isinstance(size, int) else 1 if fed is None else fed.shape[axis] for axis, size in enumerate(shape)
        ]
        for axis in freed.get(tensor.name, {}):
            sizes[axis] = 2 if fed is None else fed.shape[axis] + 1
        values[tensor.name] = np.zeros(sizes, query.dtype(tensor) or np.float32)
    said = ", ".join(f"{name} {sorted(axes)}" for name, axes in freed.items())
    try:
        with LayerRunner(graph) as run:
            run(values)
    except (DataError, ModelError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"dynamic_axes: the model does not run at other sizes of {said}: {reason}") from None
