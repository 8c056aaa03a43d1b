"""Outputs in onnxruntime's own layout, for those who do not mind the order of the elements.

On CPU onnxruntime computes convolutions on images cut into blocks of 8 or 16 channels (its operators of the domain
com.microsoft.nchwc) and puts a ReorderOutput before everyone else. A sketch of a whole tensor does not depend on the
order, and on nets of many wide images, such as MobileNets, putting it back costs more than the convolutions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

import onnx

REORDER: Final = "ReorderOutput"
DOMAIN: Final = "com.microsoft.nchwc"

BLOCK: Final = 16
"""Channels are filled up to whole blocks, of 16 at most; what is not filled up has the elements of the tensor."""


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
