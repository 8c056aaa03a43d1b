"""``sbonnx inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

if TYPE_CHECKING:
    from sbonnx.graph import Graph

HELP: Final = "Show the contents of a model. Interface, operators, parameters, Q/DQ pairs, blocks, branches."


OPTIONS: Final = (options.MODEL, *options.COMMON)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.progress import size_text
    from sbonnx.verify import file_bytes

    printer, model = given.printer(), given[options.MODEL]
    graph = graphs.load(model, opset=1)  # opset 1: no conversion to a newer opset
    facts = _facts(graph) | {"file": model, "bytes": file_bytes(model)}
    printer.value("inspect", facts)
    printer.facts(
        str(model),
        {
            "size": size_text(facts["bytes"]),
            "opset": facts["opset"],
            "other domains": ", ".join(f"{name} {version}" for name, version in facts["domains"].items()) or None,
            "IR version": facts["ir_version"],
            "producer": facts["producer"] or None,
            "nodes": facts["nodes"],
            "parameters": f"{facts['parameters']:,} ({size_text(facts['parameter_bytes'])})",
        },
    )
    for side in ("inputs", "outputs"):
        rows = []
        for tensor in facts[side]:
            shape = "unknown" if tensor["shape"] is None else f"({', '.join(map(str, tensor['shape']))})"
            rows.append((tensor["name"], tensor["type"], shape))
        printer.table(side, ("name", "type", "shape"), rows)
    printer.table("operators", ("op", "nodes"), facts["ops"].items())
    printer.table(
        "Q/DQ pairs", ("type", "of", "pairs"), [(row["type"], row["of"], row["pairs"]) for row in facts["qdq"]]
    )
    printer.table(
        "blocks", ("kind", "count", "first at"), [(row["kind"], row["count"], row["first"]) for row in facts["blocks"]]
    )
    printer.table("branches", ("body", "nodes"), facts["branches"].items())
    for note in facts["notes"]:
        printer.note(note)
    return 0


def _facts(graph: Graph) -> dict[str, Any]:
    from sbonnx import qdq
    from sbonnx.graph import Constant, query
    from sbonnx.patterns import find_blocks

    info = graph.info
    nodes = list(query.all_nodes(graph))
    ops = Counter(f"{node.domain}:{node.op}" if node.domain else node.op for node in nodes)
    domains = {
        entry.domain: entry.version for entry in graph.import_domains or () if entry.domain not in ("", "ai.onnx")
    }
    constants = [tensor for tensor in query.all_tensors(graph) if isinstance(tensor, Constant)]
    sizes = [(math.prod(one.shape), dtype.itemsize) for one in constants if (dtype := query.dtype(one)) is not None]
    pairs = Counter(
        (pair.qparams.spec.label(), "constants" if pair.constant else "activations") for pair in qdq.read(graph)
    )
    blocks = find_blocks(graph)
    kinds = Counter(block.kind for block in blocks)
    first = {block.kind: block.nodes[0] for block in reversed(blocks)}
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
        "parameters": sum(count for count, _ in sizes),
        "parameter_bytes": sum(count * itemsize for count, itemsize in sizes),
        "qdq": [{"type": label, "of": what, "pairs": count} for (label, what), count in pairs.most_common()],
        "blocks": [{"kind": kind, "count": count, "first": first[kind]} for kind, count in kinds.most_common()],
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
