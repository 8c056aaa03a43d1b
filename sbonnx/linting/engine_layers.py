"""Layers of a TensorRT engine, joined with the quantized operators of the file that it was built from.

Reads the JSON of ``trtexec --exportLayerInfo`` (with ``--profilingVerbosity=detailed``) and ``--exportProfile``, in the
form of TensorRT's documentation and of exported files in public issues. It was tested with such files written by hand,
and with no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from sbonnx.errors import DataError
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import scopes
from sbonnx.system.input_files import read_json
from sbonnx.values import JsonValue

QUANTIZED: Final = re.compile(r"\b(int8|fp8|int4|fp4|e4m3)", re.IGNORECASE)
"""Quantized types in "Format/Datatype"."""

METADATA: Final = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
"""Node names in the metadata of a layer."""

PAIR_OPS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})

LARGEST: Final = 1 << 28
"""Maximum size in bytes of a file of layers or times."""

DETAILED: Final = "build the engine with --profilingVerbosity=detailed"

RunsIn = Literal["integers", "float", "unknown"]


@dataclass(frozen=True)
class EngineLayer:
    """One layer of the engine.

    Attributes:
        name, kind: its name and type.
        inputs, outputs: formats and types of its tensors, as TensorRT writes them.
        nodes: names of ONNX nodes that it computes.
        ms: mean time of a run in milliseconds; None without a profile.
    """

    json_keys: ClassVar = ("layer", "ms")

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: frozenset[str]
    ms: float | None = None

    @property
    def layer(self) -> str:
        """Its name."""
        return self.name

    @property
    def reformats(self) -> bool:
        """Whether it only copies a tensor to another format or type."""
        return self.kind == "Reformat" or self.name.startswith("Reformatting CopyNode")

    @property
    def quantized(self) -> bool:
        """Whether it reads a tensor of a quantized type."""
        return any(QUANTIZED.search(source) for source in self.inputs)


@dataclass(frozen=True)
class PlannedOp:
    """An operator with quantized inputs, and the layer of the engine that computes it.

    Attributes:
        node, op: name and type in the file.
        runs_in: "unknown" if no layer names the node.
        layer: name of the layer; "" if unknown.
        types: types of its inputs and outputs.
        ms: mean time of the layer in milliseconds, which other nodes may share; None if unknown.
    """

    node: str
    op: str
    runs_in: RunsIn
    layer: str = ""
    types: str = ""
    ms: float | None = None


@dataclass(frozen=True)
class EngineReport(JsonValue):
    """Quantized operators and reformats of an engine.

    Attributes:
        planned: operators with quantized inputs, in the order of the file.
        reformats: layers that only convert formats, those that take longest first.
        ms: mean time of all layers in milliseconds; None without a profile.
    """

    json_keys: ClassVar = (..., "reformat_ms")

    planned: tuple[PlannedOp, ...]
    reformats: tuple[EngineLayer, ...]
    ms: float | None

    @property
    def reformat_ms(self) -> float | None:
        """Mean time of all reformats in milliseconds; None without a profile."""
        return None if self.ms is None else sum(layer.ms or 0.0 for layer in self.reformats)


def engine_report(graph: Graph, layers: Path, profile: Path | None = None) -> EngineReport:
    """Join the layers of an engine with the operators of its file.

    Args:
        graph: the quantized file.
        layers, profile: files of ``--exportLayerInfo`` and ``--exportProfile``.

    Raises:
        DataError: a file cannot be read, or is not in that form.
    """
    times = {} if profile is None else _times(profile)
    read = [_layer(row, times) for row in _rows(layers)]
    by_node = {node: layer for layer in read if not layer.reformats for node in layer.nodes}
    planned = tuple(_planned(node, by_node.get(node.name)) for node in _quantized_ops(graph))
    if planned and not by_node.keys() & {row.node for row in planned}:
        raise DataError(f"'{layers}' names no operator of the model: is it of another engine? If not, {DETAILED}")
    reformats = sorted((layer for layer in read if layer.reformats), key=lambda layer: -(layer.ms or 0.0))
    total = sum(layer.ms or 0.0 for layer in read) if times else None
    return EngineReport(planned, tuple(reformats), total)


def _planned(node: Node, layer: EngineLayer | None) -> PlannedOp:
    if layer is None:
        return PlannedOp(node.name, node.op, "unknown")
    types = f"{', '.join(layer.inputs)} -> {', '.join(layer.outputs)}"
    return PlannedOp(node.name, node.op, "integers" if layer.quantized else "float", layer.name, types, layer.ms)


def _quantized_ops(graph: Graph) -> Iterator[Node]:
    """Yield the operators that read a DequantizeLinear, branches included."""
    for _, body in scopes(graph):
        for node in body.nodes:
            before = (source for tensor in node.inputs for source in tensor.inputs)
            if node.op not in PAIR_OPS and any(source.op == "DequantizeLinear" for source in before):
                yield node


def _layer(row: Mapping[str, Any], times: Mapping[str, float]) -> EngineLayer:
    name = str(row.get("Name", ""))
    named = {part.strip() for part in name.split(" + ")} | set(METADATA.findall(str(row.get("Metadata", ""))))
    return EngineLayer(
        name,
        str(row.get("LayerType", "")),
        tuple(_types(row.get("Inputs"))),
        tuple(_types(row.get("Outputs"))),
        frozenset(named),
        times.get(name),
    )


def _types(tensors: Any) -> Iterator[str]:
    for tensor in tensors or ():
        if isinstance(tensor, Mapping):
            yield str(tensor.get("Format/Datatype") or tensor.get("Datatype") or "unknown")


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    """Return the layers of ``--exportLayerInfo``."""
    value = _read(path)
    rows = value.get("Layers") if isinstance(value, Mapping) else None
    if not isinstance(rows, list):
        raise DataError(f"'{path}' has no list \"Layers\": give the file of trtexec --exportLayerInfo")
    if any(not isinstance(row, Mapping) for row in rows):
        raise DataError(f"'{path}' has only names of layers: {DETAILED}")
    return rows


def _times(path: Path) -> dict[str, float]:
    """Return the mean milliseconds of ``--exportProfile`` by layer; rows of equal names are added."""
    value = _read(path)
    rows = [row for row in value if isinstance(row, Mapping) and "name" in row] if isinstance(value, list) else []
    times: dict[str, float] = {}
    try:
        for row in rows:
            times[str(row["name"])] = times.get(str(row["name"]), 0.0) + float(row["averageMs"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"'{path}' has a layer without a number averageMs: {error}") from error
    if not times:
        raise DataError(f"'{path}' has no list of layers with times: give the file of trtexec --exportProfile")
    return times


def _read(path: Path) -> Any:
    try:
        return read_json(path, LARGEST)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON: {error}") from error
