"""ONNX graphs and model files. Only `io` converts between the two."""

from __future__ import annotations

from sbonnx.graph.extract import copy, extract
from sbonnx.graph.io import at_opset, digest, load, save, serialize, to_proto
from sbonnx.graph.model import (
    Body,
    Constant,
    Graph,
    ModelInfo,
    Node,
    Normal,
    Tensor,
    Variable,
    drop_debug_metadata,
    node_metadata,
    set_node_metadata,
)
from sbonnx.graph.opset_lowering import readable
from sbonnx.graph.storage.model_file import check_file, read_proto
from sbonnx.graph.storage.output_files import check_target, write_text
from sbonnx.graph.storage.type_lowering import without_small_floats
from sbonnx.system.lowerings import lowerings

lowerings.extend((without_small_floats, readable))

__all__ = [
    "Body",
    "Constant",
    "Graph",
    "ModelInfo",
    "Node",
    "Normal",
    "Tensor",
    "Variable",
    "at_opset",
    "check_file",
    "check_target",
    "copy",
    "digest",
    "drop_debug_metadata",
    "extract",
    "load",
    "node_metadata",
    "read_proto",
    "save",
    "serialize",
    "set_node_metadata",
    "to_proto",
    "write_text",
]
