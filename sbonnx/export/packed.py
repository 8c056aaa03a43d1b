"""Compact storage of low-bit weights: int4 (int2 if the opset has it) followed by a Cast to 8 bits.

Codes whose zero point per channel was subtracted (`sbonnx.backends.onnxruntime.rewrites`) span as few values, but
around a different centre in each channel. This centre is subtracted before packing and restored by a Sub after the
Cast.

onnxruntime has no integer kernel for int4 weights: it computes in float after them. It folds a Cast of a constant once,
when it loads the file, before it selects integer kernels; so the file is small and the kernels are those for 8 bits.
Measured on onnxruntime 1.31 (Conv 64x64x3x3 at 56x56, one thread): 0.44 ms, the same as with int8 codes in the file,
against 2.0 ms with int4 codes; 1.23 does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import DEQUANTIZE, INTEGER_CONVOLUTIONS, INTEGER_OPS
from sbonnx.spec import CODES_SINCE, Array

WORTH: Final = 512
"""Minimum number of codes for which packing saves more of the file than the Cast adds."""

SUB_BYTES: Final = 256
"""Bytes in the file of a Sub, a second Cast and their tensors."""

NARROW: Final[dict[str, tuple[Any, ...]]] = {
    "int8": (ml_dtypes.int2, ml_dtypes.int4),
    "uint8": (ml_dtypes.uint2, ml_dtypes.uint4),
}
"""Types that 8-bit codes may be stored in, narrowest first."""


def pack(graph: Graph) -> int:
    """Store constant 8-bit codes in the narrowest type that holds them all. In place; return the number of tensors.

    Args:
        graph: as it will be saved; unchanged if its opset has no such types.
    """
    casts: dict[tuple[int, int], Tensor] = {}
    names = edit.Names(graph)
    for _, body in list(query.scopes(graph)):
        for node in list(body.nodes):
            for index in _codes_of(node):
                stored = node.inputs[index]
                key = (id(body), id(stored))
                if key not in casts:
                    axis = 0 if node.op in INTEGER_CONVOLUTIONS else -1  # with one zero point per channel
                    if node.op in DEQUANTIZE:
                        axis = int(node.attrs.get("axis", 1))
                    narrowed = _narrow(np.asarray(query.constant(stored)), axis, graph.opset)
                    if narrowed is None:
                        continue
                    casts[key] = _wide(body, stored, narrowed, names)
                edit.replace_input(node, index, casts[key])
    if casts:
        edit.sort(graph)
    return len(casts)


def _codes_of(node: Node) -> Iterator[int]:
    """Yield the inputs of a node that are constant codes."""
    if node.op in DEQUANTIZE:
        places: Any = (0,)
    else:
        places = range(len(node.inputs)) if node.op in INTEGER_OPS else ()
    for index in places:
        tensor = node.inputs[index]
        if isinstance(tensor, Constant) and str(query.dtype(tensor)) in NARROW and np.prod(tensor.shape) >= WORTH:
            yield index


@dataclass(frozen=True)
class PackedCodes:
    """Codes packed in few bits.

    Attributes:
        codes: of a type with several values per byte.
        middles: int32 values to subtract after the Cast, broadcast against the codes; or None.
    """

    codes: Array
    middles: Array | None = None


def _narrow(codes: Array, axis: int, opset: int) -> PackedCodes | None:
    """Return `codes` in the narrowest type of the opset that holds them, after centring each channel if that helps."""
    kind = _narrowest(codes, opset)
    others = tuple(at for at in range(codes.ndim) if at != axis % codes.ndim)
    low, high = (end(codes, axis=others, keepdims=True).astype(np.int32) for end in (np.min, np.max))
    middles = -((low + high + 1) // 2) if codes.dtype == np.int8 else -low
    moved = (codes + middles).astype(codes.dtype)
    centred = _narrowest(moved, opset)
    if centred is not None and (kind is None or _saves(codes.size, kind, centred) > middles.nbytes + SUB_BYTES):
        return PackedCodes(moved.astype(centred), middles)
    return None if kind is None else PackedCodes(codes.astype(kind))


def _saves(count: int, kind: Any, narrower: Any) -> int:
    """Return the bytes that `count` codes save in another packed type."""
    bits = [int(ml_dtypes.iinfo(dtype).bits) for dtype in (kind, narrower)]  # type: ignore[no-untyped-call]
    return count * (bits[0] - bits[1]) // 8


def _narrowest(codes: Array, opset: int) -> Any:
    """Return the narrowest type of the opset that holds all of `codes`, or None if that has 8 bits."""
    low, high = int(codes.min()), int(codes.max())
    for kind in NARROW[str(codes.dtype)]:
        limits = ml_dtypes.iinfo(kind)  # type: ignore[no-untyped-call]
        if opset >= CODES_SINCE[str(np.dtype(kind))] and limits.min <= low and high <= limits.max:
            return kind
    return None


def _wide(body: Body, stored: Tensor, narrow: PackedCodes, names: edit.Names) -> Tensor:
    """Add a Cast of packed codes to 8 bits, and return its output."""
    packed = edit.add_constant(body, f"{stored.name}_packed", narrow.codes, names)
    kind = query.dtype(stored)
    if narrow.middles is None:
        return _cast(body, stored, packed, f"{stored.name}_bytes", kind, names)
    # onnxruntime has no Sub for 8-bit integers
    wide = _cast(body, stored, packed, f"{stored.name}_wide", np.dtype(np.int32), names)
    middles = edit.add_constant(body, f"{stored.name}_middles", narrow.middles, names)
    moved = Variable(names.fresh(f"{stored.name}_moved"), np.dtype(np.int32), list(narrow.codes.shape))
    edit.add_node(body, "Sub", [wide, middles], names=names, stem=f"{stored.name}_Sub", outputs=[moved])
    return _cast(body, stored, moved, f"{stored.name}_bytes", kind, names)


def _cast(body: Body, stored: Tensor, source: Tensor, stem: str, kind: Any, names: edit.Names) -> Tensor:
    wide = Variable(names.fresh(stem), kind, list(stored.shape))
    to = int(onnx.helper.np_dtype_to_tensor_dtype(kind))
    edit.add_node(body, "Cast", [source], names=names, stem=f"{stored.name}_Cast", attrs={"to": to}, outputs=[wide])
    return wide
