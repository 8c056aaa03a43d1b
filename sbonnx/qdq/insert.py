"""Insertion of Q/DQ pairs into a graph.

Both nodes of a pair carry the true bit width in ``__bits``: attributes whose name starts with two
underscores are legal on any node and ignored by runtimes, while a plain ``bits`` makes the file
invalid. The node metadata ``sbonnx.bits`` holds the same width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from sbonnx.backends import BACKENDS
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable, edit, query, set_node_metadata
from sbonnx.graph.digests import array_digests
from sbonnx.graph.storage.weights import onnx_dtype, release_pages
from sbonnx.ops import QDQ, QUANTIZE
from sbonnx.planning import BITS, Plan, Role, Site, Solution
from sbonnx.small_floats import E8M0, SmallFloat, tensor_scale
from sbonnx.spec import BLOCKS_SINCE, CHANNELS_SINCE, CODES_SINCE, HALF_SCALES_SINCE, Array, QParams, QuantSpec

BYTES: Final = (np.dtype(np.int8), np.dtype(np.uint8))


def stored_type(role: Role, spec: QuantSpec, opset: int = BLOCKS_SINCE) -> Any:
    """Return the NumPy type of the codes in a file: weights use the narrowest of the opset, activations 8 bits or more.

    Activations are never int4: onnxruntime moves pairs past ops that have no kernel for it.
    """
    return spec.native_dtype(opset) if role == "weight" else spec.dtype


def opset_needed(sites: Iterable[tuple[Role, QuantSpec]], *, half: bool = False) -> int:
    """Return the lowest opset whose Q/DQ support these weights and activations; `half`: with half-precision scales."""
    needed = [CHANNELS_SINCE, HALF_SCALES_SINCE if half else 0]
    for role, spec in sites:
        needed += [CODES_SINCE[str(stored_type(role, spec))], BLOCKS_SINCE if spec.block_size else 0]
        needed += [] if spec.float_kind is None else [spec.float_kind.opset]
    return max(needed)


def insert(graph: Graph, plan: Plan, solution: Solution) -> int:
    """Insert the pairs of a solved plan. In place; return the number of inserted pairs.

    An activation becomes ``x -> [Clip ->] QuantizeLinear -> DequantizeLinear`` for the readers of its
    site; every other reader keeps the float tensor. The Clip is inserted if the integer type is wider
    than the requested bits. A weight becomes its codes followed by a DequantizeLinear (``plan.weights ==
    "codes"``) or its rounded float values followed by a pair.

    Raises:
        ModelError: the graph's opset has no type for a bit width of the plan.
    """
    writer = _PairWriter(graph, plan, solution)
    count = sum(writer.write(site) for site in plan.sites)
    writer.place()
    writer.set_constants()
    edit.sweep(graph)
    return count


def _along(spec: QuantSpec) -> dict[str, int | None]:
    """Return the Q/DQ attributes for the axis of the scales and the block size."""
    return {"axis": spec.axis, "block_size": spec.block_size}


def _metadata(site: Site) -> dict[str, str]:
    """Return the metadata of the DequantizeLinear of a site; a QuantizeLinear has the width alone."""
    named = {"bits": str(site.spec.bits), "tensor": site.tensor}
    if site.role == "bias":
        return named
    granularity = "per-tensor" if site.spec.axis is None else "per-channel"
    return {
        **named,
        "observer": site.observer.name,
        "granularity": f"blocks of {site.spec.block_size}" if site.spec.block_size is not None else granularity,
        "scheme": "symmetric" if site.spec.symmetric else "affine",
        **({"sums": "pair-safe"} if site.spec.pairs else {}),
    }


LONGEST_STEM: Final = 64
"""Characters of a tensor's name in those of its pair, which repeat it up to 16 times.

TensorFlow's exporters join the names of fused layers to 300 and more: basic_pitch's file was larger than float.
"""


def _stem(site: Site) -> str:
    """Return the end of the tensor's name, from which the names of its pair are built; the metadata has the whole."""
    return site.tensor[-LONGEST_STEM:]


class _PairWriter:
    """State and lookup tables of one insertion."""

    def __init__(self, graph: Graph, plan: Plan, solution: Solution) -> None:
        self.graph, self.plan, self.solution = graph, plan, solution
        self.backend = BACKENDS[plan.backend]
        self.names = edit.Names(graph)
        self.nodes = query.node_by_name(graph)
        self.tensors = query.tensors_by_name(graph)
        self.bodies = dict(query.scopes(graph))
        self.beside_pairs = {reader.node for site in plan.of_role("activation") for reader in site.readers}
        self.new: dict[str, dict[str | None, list[Node]]] = {}
        self.dequantized: dict[str, Tensor] = {}
        self.constants: dict[tuple[str, str, bytes], Constant] = {}

    def write(self, site: Site) -> bool:
        """Insert the pair of one site. Return False if calibration could not solve it."""
        if site.role == "bias":
            return self._bias(site)
        qparams = self.solution.qparams.get(site.key)
        if qparams is None:
            return False
        tensor = self.tensors[site.tensor]
        needed = opset_needed([(site.role, site.spec)])
        if self.graph.opset < needed:
            raise ModelError(
                f"'{site.tensor}' as {site.spec.label()} needs opset {needed}, the graph has {self.graph.opset}; "
                f"load it with opset={needed}"
            )
        if site.role == "weight":
            after = self._weight(site, tensor, qparams, self.solution.codes[site.key])
        else:
            after = self._activation(site, tensor, qparams)
        self._rewire(site, after)
        if site.leaves:
            self._leave(tensor, after)
        release_pages()
        return True

    def _rewire(self, site: Site, after: Tensor) -> None:
        for reader in site.readers:
            if reader in self.solution.unread:
                continue
            edit.replace_input(self.nodes[reader.node], reader.index, after)

    def _leave(self, tensor: Tensor, after: Tensor) -> None:
        """Let the outputs of the graph that are `tensor` be `after`, under the name of `tensor`."""
        self.graph.outputs[:] = [after if output is tensor else output for output in self.graph.outputs]
        tensor.name, after.name = self.names.fresh(f"{tensor.name}_float"), tensor.name

    def _add(self, site: Site, anchor: Node | None, nodes: list[Node]) -> None:
        """Record nodes to insert after `anchor` (None: at the front) in the scope of the site."""
        name = None if anchor is None else anchor.name
        self.new.setdefault(site.scope, {}).setdefault(name, []).extend(nodes)
        for node in nodes:
            node.attrs[BITS] = site.spec.bits
            if node.op not in QDQ:
                continue
            metadata = {"bits": str(site.spec.bits)} if node.op in QUANTIZE else _metadata(site)
            for key, value in metadata.items():
                set_node_metadata(self.graph, node.name, f"sbonnx.{key}", value)

    def place(self) -> None:
        """Insert the new nodes into their bodies, each after the node that feeds it. One pass per body."""
        for scope, waiting in self.new.items():
            body = self.bodies[scope]
            order = list(waiting.pop(None, ()))
            for node in list(body.nodes):
                order.append(node)
                order.extend(waiting.pop(node.name, ()))
            body.nodes[:] = order

    def set_constants(self) -> None:
        """Replace float constants that calibration changed, such as corrected biases."""
        for name, values in self.solution.constants.items():
            uses = query.readers(self.tensors[name])
            corrected = edit.add_constant(self.graph, f"{name}_corrected", values, self.names) if uses else None
            for node, index in uses if corrected is not None else ():
                edit.replace_input(node, index, corrected)

    def _constant(self, scope: str, stem: str, values: Array) -> Constant:
        """Return a constant of the scope; equal scales and zero points of one tensor share one constant."""
        values = np.asarray(values)
        key = (scope, stem, next(array_digests([values])))
        if key not in self.constants:
            self.constants[key] = edit.add_constant(self.graph, stem, values, self.names)
        return self.constants[key]

    def _node(self, op: str, name: str, inputs: list[Tensor], dtype: Any, shape: Any, **numbers: int | None) -> Node:
        out = Variable(self.names.fresh(f"{name}_{op}_output"), dtype=dtype, shape=shape)
        attrs = {key: value for key, value in numbers.items() if value is not None}
        return Node(op=op, name=self.names.fresh(f"{name}_{op}"), attrs=attrs, inputs=inputs, outputs=[out])

    def _numbers(self, site: Site, qparams: QParams, float_dtype: Any, native: Any) -> list[Tensor]:
        scale = self._constant(site.scope, f"{_stem(site)}_scale", qparams.scale.astype(float_dtype))
        zero = self._constant(site.scope, f"{_stem(site)}_zero_point", qparams.zero_point.astype(native))
        return [scale, zero]

    def _activation(self, site: Site, tensor: Tensor, qparams: QParams) -> Tensor:
        kind = query.dtype(tensor)
        shape = query.shape(tensor)
        native = stored_type("activation", site.spec)
        exact = site.spec.fills_dtype and site.spec.native_dtype() == native
        exact = exact and not (site.spec.is_float and self.backend.numbers.fp8 != "kernels")
        numbers = self._numbers(site, qparams, kind, native)
        nodes = [] if exact else self._clip(site, tensor, qparams, kind)
        floats = tensor if site.after is None else self.dequantized[site.after]
        source = nodes[-1].outputs[0] if nodes else floats
        quantize = self._node("QuantizeLinear", _stem(site), [source, *numbers], native, shape, **_along(site.spec))
        codes = quantize.outputs[0]
        dequantize = self._node("DequantizeLinear", _stem(site), [codes, *numbers], kind, shape, **_along(site.spec))
        self._add(site, query.producer(tensor), [*nodes, quantize, dequantize])
        self.dequantized[site.key] = dequantize.outputs[0]
        return dequantize.outputs[0]

    def _clip(self, site: Site, tensor: Tensor, qparams: QParams, kind: Any) -> list[Node]:
        """Clip to the values of the lowest and highest code before rounding: Clip for one scale, else Max and Min.

        fp8 needs no clipping, but gets Max and Min if onnxruntime runs the file: they prevent onnxruntime from fusing
        the pairs into QLinearConv and similar ops, which do not support fp8 (it would remove a Clip).
        """
        limits = qparams.limits
        shape = query.shape(tensor)
        if site.spec.axis is None and not site.spec.is_float:
            low = self._constant(site.scope, f"{_stem(site)}_low", limits.lo.astype(kind))
            high = self._constant(site.scope, f"{_stem(site)}_high", limits.hi.astype(kind))
            return [self._node("Clip", _stem(site), [tensor, low, high], kind, shape)]
        rank = query.rank(tensor)
        if rank is None:
            raise ModelError(f"'{site.tensor}' has no known rank, so it cannot be clipped per channel")
        along = [-1 if i == site.spec.axis else 1 for i in range(rank)] if site.spec.axis is not None else []
        low = self._constant(site.scope, f"{_stem(site)}_low", limits.lo.astype(kind).reshape(along))
        high = self._constant(site.scope, f"{_stem(site)}_high", limits.hi.astype(kind).reshape(along))
        first = self._node("Max", _stem(site), [tensor, low], kind, shape)
        return [first, self._node("Min", _stem(site), [first.outputs[0], high], kind, shape)]

    def _weight(self, site: Site, tensor: Tensor, qparams: QParams, codes: Array) -> Tensor:
        kind = query.dtype(tensor)
        native = self._stored_weight(site)
        shape = tuple(codes.shape)
        form = site.spec.float_kind
        if form is not None and form.scales is not None:
            return self._blocks(site, qparams, codes, form, kind)
        numbers = self._numbers(site, qparams, kind, native)
        if self.plan.weights == "codes":
            stored: Tensor = edit.add_constant(
                self.graph, f"{_stem(site)}_quantized", codes.astype(native, copy=False), self.names
            )
            nodes: list[Node] = []
        else:
            values = qparams.dequantize(codes).astype(kind)
            rounded = edit.add_constant(self.graph, f"{_stem(site)}_rounded", values, self.names)
            quantize = self._node(
                "QuantizeLinear", _stem(site), [rounded, *numbers], native, shape, **_along(site.spec)
            )
            nodes, stored = [quantize], quantize.outputs[0]
        dequantize = self._node("DequantizeLinear", _stem(site), [stored, *numbers], kind, shape, **_along(site.spec))
        self._add(site, None, [*nodes, dequantize])
        return dequantize.outputs[0]

    def _blocks(self, site: Site, qparams: QParams, codes: Array, form: SmallFloat, kind: Any) -> Tensor:
        """Write codes of small floats in blocks: with E8M0 scales, or with E4M3 scales times a scale of the tensor.

        Without zero points, which these types do not need, as NVIDIA's exporter writes them.
        """
        stored = edit.add_constant(self.graph, f"{_stem(site)}_quantized", codes, self.names)
        numbers, nodes = dict(_along(site.spec)), []
        if form.scales == E8M0:
            scale: Tensor = self._constant(site.scope, f"{_stem(site)}_scale", qparams.scale.astype(form.scale_dtype))
            numbers["output_dtype"] = onnx_dtype(kind)
        else:
            unit = tensor_scale(qparams.scale)
            eighths = self._constant(
                site.scope, f"{_stem(site)}_scale_quantized", (qparams.scale / unit).astype(form.scale_dtype)
            )
            whole = self._constant(site.scope, f"{_stem(site)}_scale_scale", np.asarray(unit, kind))
            shape = tuple(qparams.scale.shape)
            nodes.append(self._node("DequantizeLinear", f"{_stem(site)}_scale", [eighths, whole], kind, shape))
            scale = nodes[0].outputs[0]
        dequantize = self._node("DequantizeLinear", _stem(site), [stored, scale], kind, tuple(codes.shape), **numbers)
        self._add(site, None, [*nodes, dequantize])
        return dequantize.outputs[0]

    def _stored_weight(self, site: Site) -> Any:
        """Return the NumPy type of a weight's codes; 16 bits for blocks of 8 bits if the data input is quantized.

        In that case onnxruntime 1.31 treats int8 blocks as one scale per channel, fuses them into QLinearMatMul and
        fails at run time; it does not fuse 16-bit codes. It also gives int2 codes to MatMulIntegerToFloat, which does
        not take them: they are int4 there. It has no integer kernels for 4 bits with per-channel scales:
        such weights are int8 here and packed in the file (`sbonnx.export.packed`).
        """
        if self.backend.files.packs_weights and site.spec.block_size is None:
            return site.spec.dtype
        beside = any(reader.node in self.beside_pairs for reader in site.readers)
        native = stored_type("weight", site.spec, BLOCKS_SINCE if beside else self.graph.opset)
        if site.spec.block_size is None or not beside or np.dtype(native) not in BYTES:
            return native
        return np.dtype(np.int16 if site.spec.signed else np.uint16)

    def _bias(self, site: Site) -> bool:
        codes = self.solution.codes.get(site.key)
        scale = self.solution.bias_scales.get(site.key)
        if codes is None or scale is None:
            return False
        tensor = self.tensors[site.tensor]
        kind = query.dtype(tensor)
        zero = np.zeros(scale.shape, np.int32)
        numbers: list[Tensor] = [
            self._constant(site.scope, f"{_stem(site)}_scale", scale.astype(kind)),
            self._constant(site.scope, f"{_stem(site)}_zero_point", zero),
        ]
        stored = edit.add_constant(self.graph, f"{_stem(site)}_quantized", codes, self.names)
        axis = 0 if scale.ndim else None
        dequantize = self._node(
            "DequantizeLinear", _stem(site), [stored, *numbers], kind, tuple(codes.shape), axis=axis
        )
        self._add(site, None, [dequantize])
        dequantize.attrs[BITS] = 32
        set_node_metadata(self.graph, dequantize.name, "sbonnx.bits", "32")
        self._rewire(site, dequantize.outputs[0])
        return True
