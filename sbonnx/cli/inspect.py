"""``sbonnx inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.cli.output.show import megabytes

if TYPE_CHECKING:
    from sbonnx.graph import Graph

HELP: Final = "Show what a model is made of. Interface, operators, parameters, Q/DQ pairs, blocks, branches."


OPTIONS: Final = (options.MODEL, *options.COMMON)


def run(given: Arguments) -> int:
    """Run ``sbonnx inspect`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx.verify import file_bytes

    show, model = given.show(), given[options.MODEL]
    graph = graphs.load(model, opset=1)  # opset 1: no conversion to a newer opset
    found = _facts(graph) | {"file": model, "bytes": file_bytes(model)}
    show.value(found)
    show.facts(
        str(model),
        {
            "size": megabytes(found["bytes"]),
            "opset": found["opset"],
            "other domains": ", ".join(f"{name} {version}" for name, version in found["domains"].items()) or None,
            "IR version": found["ir_version"],
            "producer": found["producer"] or None,
            "nodes": found["nodes"],
            "parameters": f"{found['parameters']:,} ({megabytes(found['parameter_bytes'])})",
        },
    )
    for side in ("inputs", "outputs"):
        rows = [(one["name"], one["type"], _dims(one["shape"])) for one in found[side]]
        show.table(side, ("name", "type", "shape"), rows)
    show.table("operators", ("op", "nodes"), found["ops"].items())
    show.table("Q/DQ pairs", ("type", "of", "pairs"), [(one["type"], one["of"], one["pairs"]) for one in found["qdq"]])
    show.table("blocks", ("kind", "found", "first at"), [(b["kind"], b["count"], b["first"]) for b in found["blocks"]])
    show.table("branches", ("body", "nodes"), found["branches"].items())
    for note in found["notes"]:
        show.note(note)
    return 0


def _facts(graph: Graph) -> dict[str, Any]:
    from sbonnx.graph import query

    info = graph.info
    nodes = list(query.all_nodes(graph))
    ops = Counter(f"{node.domain}:{node.op}" if node.domain else node.op for node in nodes)
    domains = {
        entry.domain: entry.version for entry in graph.import_domains or () if entry.domain not in ("", "ai.onnx")
    }
    parameters, size = _parameters(graph)
    producer = f"{info.model.producer_name} {info.model.producer_version}".strip()
    return {
        "opset": info.original_opset,
        "domains": domains,
        "ir_version": info.ir_version,
        "producer": producer,
        "inputs": [_interface(tensor) for tensor in graph.inputs],
        "outputs": [_interface(tensor) for tensor in graph.outputs],
        "nodes": len(nodes),
        "ops": dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        "parameters": parameters,
        "parameter_bytes": size,
        "qdq": _pairs(graph),
        "blocks": _blocks(graph),
        "branches": {path: len(body.nodes) for path, body in query.scopes(graph) if path},
        "notes": list(info.notes),
    }


def _interface(tensor: Any) -> dict[str, Any]:
    from sbonnx.graph import query

    shape, dtype = query.shape(tensor), query.dtype(tensor)
    return {
        "name": tensor.name,
        "type": "string" if str(dtype) == "object" else "not a tensor" if dtype is None else str(dtype),
        "shape": None if shape is None else ["?" if dim is None else dim for dim in shape],
    }


def _dims(shape: list[Any] | None) -> str:
    return "unknown" if shape is None else f"({', '.join(map(str, shape))})"


def _parameters(graph: Graph) -> tuple[int, int]:
    """Return the number of values in all constants, and their bytes in memory."""
    from sbonnx.graph import Constant, query

    count = size = 0
    for tensor in query.all_tensors(graph):
        dtype = query.dtype(tensor)
        if isinstance(tensor, Constant) and dtype is not None:
            values = 1
            for dim in tensor.shape:
                values *= dim
            count += values
            size += values * dtype.itemsize
    return count, size


def _pairs(graph: Graph) -> list[dict[str, Any]]:
    """Count Q/DQ pairs by type and by what they quantize."""
    from sbonnx import qdq

    kinds = Counter(
        (pair.qparams.spec.label(), "constants" if pair.constant else "activations") for pair in qdq.read(graph)
    )
    return [{"type": label, "of": what, "pairs": count} for (label, what), count in kinds.most_common()]


def _blocks(graph: Graph) -> list[dict[str, Any]]:
    """Count recognised blocks by kind."""
    from sbonnx.patterns import find_blocks

    blocks = find_blocks(graph)
    kinds = Counter(block.kind for block in blocks)
    first = {block.kind: block.nodes[0] for block in reversed(blocks)}
    return [{"kind": kind, "count": count, "first": first[kind]} for kind, count in kinds.most_common()]
