"""Detection of nodes at which onnxruntime's CPU kernels crash the process instead of raising an error.

Found by running every operator on degenerate constants in a child process (onnxruntime 1.32). Crashes that depend on
the data of a run cannot be predicted.
"""

from __future__ import annotations

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.graph.model import Constant, Graph, Node, Tensor
from sbonnx.graph.query import Array, all_nodes, constant, dtype

DIVIDES = frozenset({"Div", "Mod"})

OVERFLOWS = 4
"""From this many bytes on, dividing the lowest integer by -1 is a hardware fault; smaller types wrap around."""


def require_no_traps(graph: Graph) -> None:
    """Check that no node crashes the process because of its constants.

    Raises:
        ModelError: a node does.
    """
    for node in all_nodes(graph):
        why = trap(node)
        if why is not None:
            raise ModelError(f"node '{node.name}' ({node.op}) {why}: onnxruntime would end the process there")


def trap(node: Node) -> str | None:
    """Return why the kernel of a node crashes the process, as far as constants and shapes show; else None."""
    if node.domain not in (None, "", "ai.onnx"):
        return None
    if node.op in DIVIDES and len(node.inputs) == 2:
        return _division(node)
    if node.op == "SplitToSequence" and len(node.inputs) > 1:
        size = constant(node.inputs[1])
        return "splits into parts of 0 elements" if size is not None and size.ndim == 0 and size == 0 else None
    if node.op == "InstanceNormalization" and 0 in (node.inputs[0].shape or ())[2:]:
        return "normalizes over no elements"
    return None


def may_trap(node: Node) -> bool:
    """Whether a node that reads computed tensors can crash the process for some of their values."""
    if node.op not in DIVIDES or len(node.inputs) != 2 or not _is_integer(node.inputs[0]):
        return False
    if all(isinstance(tensor, Constant) for tensor in node.inputs):
        return False  # `trap` decides
    divisor = constant(node.inputs[1])
    return divisor is None or bool((divisor == 0).any()) or (divisor.dtype.kind == "i" and bool((divisor == -1).any()))


def _is_integer(tensor: Tensor) -> bool:
    kind = dtype(tensor)
    return kind is not None and kind.kind in "iu"


def _division(node: Node) -> str | None:
    dividend, divisor = (constant(tensor) for tensor in node.inputs)
    if divisor is None or divisor.dtype.kind not in "iu" or 0 in (node.inputs[0].shape or ()):
        return None
    if (divisor == 0).any():
        return f"divides integers by a constant that holds 0 ('{node.inputs[1].name}')"
    if dividend is None or dividend.dtype.kind != "i" or dividend.dtype.itemsize < OVERFLOWS or node.attrs.get("fmod"):
        return None
    return f"divides {np.iinfo(dividend.dtype).min} by -1, which overflows" if _overflow(dividend, divisor) else None


def _overflow(dividend: Array, divisor: Array) -> bool:
    lowest, minus = dividend == np.iinfo(dividend.dtype).min, divisor == -1
    if not lowest.any() or not minus.any():
        return False
    try:
        return bool((lowest & minus).any())
    except ValueError:  # shapes that do not broadcast: never computed
        return False
