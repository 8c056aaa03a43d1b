"""``sbonnx inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

if TYPE_CHECKING:
    from sbonnx.graph import Graph

HELP: Final = "Show the contents of a model. Interface, operators, parameters, Q/DQ pairs, blocks, branches."


OPTIONS: Final = (options.MODEL, *options.COMMON)


@dataclass(frozen=True)
class ModelInterface:
    """Input or output of a model.

    Attributes:
        name: its name.
        type: data type.
        shape: sizes, names of dynamic axes, or "?"; null if unknown.
    """

    name: str
    type: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class PairCount:
    """Q/DQ pairs of one type.

    Attributes:
        type: quantized type.
        of: activations or constants.
        pairs: number of pairs.
    """

    type: str
    of: Literal["activations", "constants"]
    pairs: int


@dataclass(frozen=True)
class BlockCount:
    """Recognized blocks of one kind.

    Attributes:
        kind: such as "gelu".
        count: number of blocks.
        first: first node of the first block.
    """

    kind: str
    count: int
    first: str


@dataclass(frozen=True)
class InspectOutput:
    """Output of inspect.

    Attributes:
        file: the model.
        bytes: its size with external data.
        opset: opset of the standard operators.
        domains: versions of other domains.
        ir_version: version of the file format.
        producer: program that wrote it, or "".
        inputs, outputs: interface.
        nodes: number of nodes, in branches too.
        ops: number of nodes by operator.
        parameters, parameter_bytes: number of values of all constants, and their bytes.
        qdq: Q/DQ pairs by type.
        blocks: recognized blocks.
        branches: number of nodes by path of the branch.
        notes: what loading changed.
    """

    file: str
    bytes: int
    opset: int
    domains: dict[str, int]
    ir_version: int
    producer: str
    inputs: tuple[ModelInterface, ...]
    outputs: tuple[ModelInterface, ...]
    nodes: int
    ops: dict[str, int]
    parameters: int
    parameter_bytes: int
    qdq: tuple[PairCount, ...]
    blocks: tuple[BlockCount, ...]
    branches: dict[str, int]
    notes: tuple[str, ...]


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.progress import size_text

    printer, model = given.printer(), given[options.MODEL]
    graph = graphs.load(model, opset=1)  # opset 1: no conversion to a newer opset
    facts = _facts(graph, model)
    printer.value("inspect", facts)
    printer.facts(
        str(model),
        {
            "size": size_text(facts.bytes),
            "opset": facts.opset,
            "other domains": ", ".join(f"{name} {version}" for name, version in facts.domains.items()) or None,
            "IR version": facts.ir_version,
            "producer": facts.producer or None,
            "nodes": facts.nodes,
            "parameters": f"{facts.parameters:,} ({size_text(facts.parameter_bytes)})",
        },
    )
    for side, tensors in (("inputs", facts.inputs), ("outputs", facts.outputs)):
        rows = []
        for tensor in tensors:
            shape = "unknown" if tensor.shape is None else f"({', '.join(map(str, tensor.shape))})"
            rows.append((tensor.name, tensor.type, shape))
        printer.table(side, ("name", "type", "shape"), rows)
    printer.table("operators", ("op", "nodes"), facts.ops.items())
    printer.table("Q/DQ pairs", ("type", "of", "pairs"), [(row.type, row.of, row.pairs) for row in facts.qdq])
    printer.table("blocks", ("kind", "count", "first at"), [(row.kind, row.count, row.first) for row in facts.blocks])
    printer.table("branches", ("body", "nodes"), facts.branches.items())
    for note in facts.notes:
        printer.note(note)
    return 0


def _facts(graph: Graph, model: Path) -> InspectOutput:
    from sbonnx import qdq
    from sbonnx.graph import Constant, query
    from sbonnx.patterns import find_blocks
    from sbonnx.verify import file_bytes

    info = graph.info
    nodes = list(query.all_nodes(graph))
    ops = Counter(f"{node.domain}:{node.op}" if node.domain else node.op for node in nodes)
    domains = {
        entry.domain: entry.version for entry in graph.import_domains or () if entry.domain not in ("", "ai.onnx")
    }
    constants = [tensor for tensor in query.all_tensors(graph) if isinstance(tensor, Constant)]
    sizes = [
        (math.prod(stored.shape), dtype.itemsize) for stored in constants if (dtype := query.dtype(stored)) is not None
    ]
    pairs = Counter((pair.qparams.spec.label(), pair.constant) for pair in qdq.read(graph))
    blocks = find_blocks(graph)
    kinds = Counter(block.kind for block in blocks)
    first = {block.kind: block.nodes[0] for block in reversed(blocks)}
    producer = f"{info.model.producer_name} {info.model.producer_version}".strip()
    return InspectOutput(
        file=str(model),
        bytes=file_bytes(model),
        opset=info.original_opset,
        domains=domains,
        ir_version=info.ir_version,
        producer=producer,
        inputs=tuple(map(_interface, graph.inputs)),
        outputs=tuple(map(_interface, graph.outputs)),
        nodes=len(nodes),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        parameters=sum(count for count, _ in sizes),
        parameter_bytes=sum(count * itemsize for count, itemsize in sizes),
        qdq=tuple(
            PairCount(label, "constants" if constant else "activations", count)
            for (label, constant), count in pairs.most_common()
        ),
        blocks=tuple(BlockCount(kind, count, first[kind]) for kind, count in kinds.most_common()),
        branches={path: len(body.nodes) for path, body in query.scopes(graph) if path},
        notes=tuple(info.notes),
    )


def _interface(tensor: Any) -> ModelInterface:
    from sbonnx.graph import query

    shape, dtype = query.shape(tensor), query.dtype(tensor)
    return ModelInterface(
        name=tensor.name,
        type="string" if str(dtype) == "object" else "not a tensor" if dtype is None else str(dtype),
        shape=None if shape is None else tuple("?" if dim is None else dim for dim in shape),
    )
