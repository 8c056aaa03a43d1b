"""Outputs in onnxruntime's own layout, for those who do not mind the order of the elements.

On CPU onnxruntime computes convolutions on images cut into blocks of 8 or 16 channels (its operators of the domain
com.microsoft.nchwc) and puts a ReorderOutput before everyone else. A sketch of a whole tensor does not depend on the
order, and on nets of many wide images, such as MobileNets, putting it back costs more than the convolutions.
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
"""Channels are filled up to whole blocks, of 16 at most; what is not filled up has the elements of the tensor."""


def weights_beside(model: onnx.ModelProto, path: Path) -> dict[str, Array]:
    """The weights of a model that lie in the file at `path`, by name, in memory that begins at a page."""
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
    """An optimised model that gives `outputs` in its own layout where their elements are the same.

    Args:
        model: as onnxruntime wrote it after optimising; is changed.
        outputs: those whose elements may come in any order.

    Returns:
        The serialized model, and for each output that changed its name there.
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
