"""Outputs in onnxruntime's native NCHWc layout, for readers that do not depend on the order of the elements.

On CPU onnxruntime computes convolutions on images in blocks of 8 or 16 channels (its operators of the domain
com.microsoft.nchwc) and inserts a ReorderOutput before every other reader. A sketch of a whole tensor does not depend
on the order, and on networks with many wide images, such as MobileNets, reordering costs more than the convolutions.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from sbonnx.spec import Array

REORDER: Final = "ReorderOutput"
DOMAIN: Final = "com.microsoft.nchwc"

BLOCK: Final = 16
"""Largest block. Channels are padded to whole blocks; without padding the elements are those of the tensor."""


def weights_beside(model: onnx.ModelProto, path: Path) -> dict[str, Array]:
    """Read the weights of a model from the external file at `path`, by name, into page-aligned memory."""
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return {}
    memory = mmap.mmap(-1, size)
    with path.open("rb") as file:
        file.readinto(memory)  # type: ignore[attr-defined, unused-ignore]
    content = np.frombuffer(memory, np.uint8)
    found: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            start, length = int(place.get("offset", 0)), int(place["length"])
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            found[tensor.name] = content[start : start + length].view(kind).reshape(tuple(tensor.dims))
    return found


def unblocked(model: onnx.ModelProto, outputs: Collection[str]) -> tuple[bytes, dict[str, str]]:
    """Change an optimised model to return `outputs` in the native layout if their elements are the same.

    Args:
        model: as onnxruntime wrote it after optimising; is changed.
        outputs: those whose elements may be in any order.

    Returns:
        The serialized model, and the name there of each renamed output.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    read = Counter(name for node in graph.node for name in node.input)
    aliases: dict[str, str] = {}
    idle = []
    for value in graph.output:
        node = makers.get(value.name)
        if value.name not in outputs or node is None or (node.op_type, node.domain) != (REORDER, DOMAIN):
            continue
        channels = next(attribute.i for attribute in node.attribute if attribute.name == "channels")
        source = node.input[0]
        if channels % BLOCK or source in aliases.values():
            continue
        aliases[value.name] = source
        if not read[value.name]:
            idle.append(node)
        value.name = source
        value.type.tensor_type.ClearField("shape")
    for node in idle:
        graph.node.remove(node)
    return model.SerializeToString(), aliases
