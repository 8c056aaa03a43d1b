"""Fake quantization inside a piece of the graph: Q/DQ pairs for activations, dequantized constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import onnx

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import dtype, producer, rank, scopes, shape
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.ops import CONTRIB
from sbonnx.planning.types import Reader, Site
from sbonnx.spec import Array, QParams

Uses = Mapping[Reader, Site]
"""The site that each use is quantized by."""

FLOAT: Final = int(onnx.TensorProto.FLOAT)


class QuantView(Protocol):
    """Scales and quantized constants of a network: a `Solution`, or the state of a stream."""

    @property
    def constants(self) -> Mapping[str, Array]:
        """New values of float constants by tensor name, such as corrected biases."""

    def dequantized(self, site: Site, kind: Any) -> Array | None:
        """Return the dequantized weight or bias as dtype `kind`; None if it stays float."""

    def params(self, site: Site) -> QParams | None:
        """Return scale and zero point of an activation; None if it stays float."""


def quantize_reads(piece: Graph, uses: Uses, view: QuantView) -> None:
    """Quantize the tensors that `uses` read in `piece`, branches included, in place.

    Constants are replaced by their dequantized values, or else by the new values in `view.constants`. An activation
    passes Clip (if its type holds more than its quantized values), QuantizeLinear and DequantizeLinear, once for all
    readers in `uses`; other readers get the float tensor. In a session that does not fuse such pairs the results are
    those of `QParams.fake_quant`, in a tenth of numpy's time.

    Raises:
        ModelError: a scale per channel for a tensor of unknown rank.
    """
    names = Names(piece)
    constants: dict[str, Tensor | None] = {}
    corrected: dict[str, Tensor] = {}
    pairs: dict[int | None, list[Node]] = {}  # by the id of the node that they follow; None: at the front
    for _, body in scopes(piece):
        for node in body.nodes:
            for index, tensor in enumerate(list(node.inputs)):
                site = uses.get(Reader(node.name, index))
                if site is not None and site.key not in constants:
                    if isinstance(tensor, Constant):
                        values = view.dequantized(site, dtype(tensor))
                        stem = f"{site.key}/dequantized"
                        constants[site.key] = None if values is None else add_constant(piece, stem, values, names)
                    else:
                        qparams, maker = view.params(site), producer(tensor)
                        pair = [] if qparams is None else _pair(site, tensor, qparams, names)
                        pairs.setdefault(None if maker is None else id(maker), []).extend(pair)
                        constants[site.key] = pair[-1].outputs[0] if pair else None
                after = None if site is None else constants[site.key]
                if after is None and isinstance(tensor, Constant) and tensor.name in view.constants:
                    if tensor.name not in corrected:
                        stem, values = f"{tensor.name}/corrected", view.constants[tensor.name]
                        corrected[tensor.name] = add_constant(piece, stem, values, names)
                    after = corrected[tensor.name]
                if after is not None:
                    replace_input(node, index, after)
    front = pairs.pop(None, [])
    for _, body in scopes(piece):
        body.nodes[:] = [replaced for node in body.nodes for replaced in (node, *pairs.get(id(node), ()))]
    piece.nodes[:0] = front


def _pair(site: Site, tensor: Tensor, qparams: QParams, names: Names) -> list[Node]:
    """Build the nodes from an activation to its dequantized value, in its original type."""
    spec, kind = qparams.spec, dtype(tensor)
    nodes: list[Node] = []

    def add(op: str, *inputs: Tensor, kind: Any = np.float32, domain: str | None = None, **attributes: Any) -> None:
        name = names.fresh(f"{site.key}/{op}")
        out = Variable(names.fresh(f"{name}_out"), kind, shape(tensor))
        source = nodes[-1].outputs[0] if nodes else tensor
        nodes.append(Node(op, name, attributes, [source, *inputs], [out], domain=domain))

    def constant(values: Array) -> Constant:
        return Constant(names.fresh(f"{site.key}/number"), np.asarray(values))

    if kind != np.float32:  # quantization is computed in float32 whatever the type of the model
        add("Cast", to=FLOAT)
    if spec.is_float or not (spec.fills_dtype and spec.native_dtype == spec.dtype):
        limits = qparams.limits
        low, high = (constant(_along(end, site, tensor)) for end in (limits.lo, limits.hi))
        if (
            spec.axis is None and not spec.is_float
        ):  # onnxruntime rewrites a Clip before fp8 to nodes that it cannot run
            add("Clip", low, high)
        else:
            add("Max", low)
            add("Min", high)
    axis = {} if spec.axis is None else {"axis": spec.axis}
    numbers = constant(qparams.scale), constant(qparams.zero_point)
    # onnxruntime has 16-bit QuantizeLinear there at every opset; the graph has an opset with fp8 if the plan needs it
    domain = None if spec.is_float else CONTRIB
    add("QuantizeLinear", *numbers, kind=spec.dtype, domain=domain, **axis)
    add("DequantizeLinear", *numbers, domain=domain, **axis)
    if kind != np.float32:
        add("Cast", kind=kind, to=onnx_dtype(np.dtype(kind)))
    return nodes


def _along(values: Array, site: Site, tensor: Tensor) -> Array:
    """Reshape `values` (C,) to broadcast along the channel axis; () is returned unchanged."""
    if site.spec.axis is None:
        return values
    dims = rank(tensor)
    if dims is None:
        raise ModelError(f"'{site.tensor}' has no known rank, so it cannot be clipped per channel")
    return values.reshape([-1 if i == site.spec.axis else 1 for i in range(dims)])
