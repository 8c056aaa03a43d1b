"""``inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.api.arguments import known_keywords, model_files
from sbonnx.graph import Constant, query
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.patterns import find_blocks
from sbonnx.report.contents import BlockCount, ModelContents, ModelInterface, PairCount
from sbonnx.verify import file_bytes


@known_keywords
def inspect(model: ModelSource) -> ModelContents:
    """Return the contents of a model: interface, operators, parameters, Q/DQ pairs, blocks, branches.

    Args:
        model: path of an ONNX file, float or quantized, or a model in memory.

    Raises:
        ModelError: the file cannot be read.
    """
    with model_files(model) as ((file,), (name,)):
        return _contents(file, name)


def _contents(file: Path, name: str) -> ModelContents:
    graph = graphs.load(file, opset=1)  # opset 1: no conversion to a newer opset
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
    return ModelContents(
        file=name,
        bytes=file_bytes(file),
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
    shape, dtype = query.shape(tensor), query.dtype(tensor)
    return ModelInterface(
        name=tensor.name,
        type="string" if str(dtype) == "object" else "not a tensor" if dtype is None else str(dtype),
        shape=None if shape is None else tuple("?" if dim is None else dim for dim in shape),
    )
