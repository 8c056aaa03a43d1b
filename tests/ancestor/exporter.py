"""Writes graphs the way torch's exporter does: names by module path, `Constant` nodes, shapes computed at run time.

What it writes on purpose, because files in the wild have it: a Linear on more than two axes is a MatMul with a
transposed weight of a made-up name, and an Add with the bias first; sizes are taken with Shape and Gather and put
together with Concat; batch norms stand unfused; LayerNorm and GELU below opset 17 and 20 are many nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array

IR_VERSION = 8

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Exporter:
    """A graph that grows node by node; weights are seeded normal numbers.

    Args:
        opset: version of the standard domain.
        seed: of the weights.
    """

    def __init__(self, opset: int, seed: int = 0) -> None:
        self.opset = opset
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._taken: dict[str, int] = {}
        self._number = 100
        self._ones: dict[int, str] = {}

    def node(self, op: str, *inputs: str, at: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """A node in the module `at` ("/blocks.0/attn"), called after its op. The name of its output, or of each."""
        stem = f"{at}/{op}"
        count = self._taken[stem] = self._taken.get(stem, -1) + 1
        name = f"{stem}_{count}" if count else stem
        made = [f"{name}_output_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(op, list(inputs), made, name=name, **attributes))
        return made[0] if outputs == 1 else tuple(made)

    def constant(self, value: Any, at: str = "", dtype: Any = np.int64) -> str:
        """A `Constant` node."""
        tensor = numpy_helper.from_array(np.asarray(value, dtype))
        return str(self.node("Constant", at=at, value=tensor))

    def weight(self, name: str, values: Array) -> str:
        """An initializer."""
        self._weights.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def normal(self, name: str, *shape: int, std: float = 0.02) -> str:
        """An initializer of seeded normal numbers."""
        return self.weight(name, self._rng.standard_normal(shape) * std)

    def unnamed(self, op: str, values: Array) -> str:
        """An initializer that the exporter made itself, called ``onnx::MatMul_117``."""
        self._number += 1
        return self.weight(f"onnx::{op}_{self._number}", values)

    def shape(self, x: str, *axes: int, at: str = "") -> list[str]:
        """``x.shape[i]`` of each axis as scalars: a Shape and a Gather each, as the exporter writes them."""
        return [
            self.node("Gather", self.node("Shape", x, at=at), self.constant(axis, at), at=at, axis=0) for axis in axes
        ]

    def reshape(self, x: str, sizes: Sequence[str | int], at: str = "") -> str:
        """``x.reshape(sizes)``: numbers are Constants, scalars are unsqueezed, and a Concat joins them."""
        axis = self.constant([0], at)
        parts = [
            self.constant([size], at) if isinstance(size, int) else self.node("Unsqueeze", size, axis, at=at)
            for size in sizes
        ]
        return str(self.node("Reshape", x, self.node("Concat", *parts, at=at, axis=0), at=at))

    # --- modules ------------------------------------------------------------------------------------

    def conv(self, x: str, module: str, at: str, c_in: int, c_out: int, kernel: int, **attributes: Any) -> str:
        """Conv2d; `bias` and `stride` as in torch, padding `pad` on all sides."""
        bias, stride, pad = attributes.get("bias", False), attributes.get("stride", 1), attributes.get("pad", 0)
        std = float(np.sqrt(2 / (c_in * kernel * kernel)))
        inputs = [x, self.normal(f"{module}.weight", c_out, c_in, kernel, kernel, std=std)]
        if bias:
            inputs.append(self.normal(f"{module}.bias", c_out, std=0.1))
        return str(
            self.node(
                "Conv",
                *inputs,
                at=at,
                dilations=[1, 1],
                group=1,
                kernel_shape=[kernel, kernel],
                pads=[pad] * 4,
                strides=[stride, stride],
            )
        )

    def batchnorm(self, x: str, module: str, at: str, channels: int) -> str:
        """BatchNorm2d in evaluation mode, left beside its convolution.

        Its factors are those of an untrained network, ones: the exporter keeps one of equal initializers and hands it
        to the others through Identity nodes.
        """
        ones = self._ones.get(channels)
        gamma = f"{module}.weight"
        if ones is None:
            self._ones[channels] = self.weight(gamma, np.ones(channels))
        else:
            self._nodes.append(helper.make_node("Identity", [ones], [gamma], name=f"Identity_{len(self._nodes)}"))
        mean, beta = (self.normal(f"{module}.{name}", channels, std=0.2) for name in ("running_mean", "bias"))
        variance = self.weight(f"{module}.running_var", self._rng.uniform(0.5, 2.0, channels))
        parameters = [gamma, beta, mean, variance]
        return str(self.node("BatchNormalization", x, *parameters, at=at, epsilon=1e-5, momentum=0.9))

    def linear(self, x: str, module: str, at: str, features: tuple[int, int], std: float = 0.02) -> str:
        """Linear on a tensor of three axes: MatMul with a transposed weight, then Add with the bias first."""
        weight = self.unnamed("MatMul", self._rng.standard_normal(features) * std)
        product = self.node("MatMul", x, weight, at=at)
        return str(self.node("Add", self.normal(f"{module}.bias", features[1]), product, at=at))

    def gemm(self, x: str, module: str, at: str, features: tuple[int, int], std: float = 0.02) -> str:
        """Linear on a matrix."""
        weight = self.normal(f"{module}.weight", features[1], features[0], std=std)
        bias = self.normal(f"{module}.bias", features[1])
        return str(self.node("Gemm", x, weight, bias, at=at, alpha=1.0, beta=1.0, transB=1))

    def layernorm(self, x: str, module: str, at: str, width: int, epsilon: float = 1e-6) -> str:
        """LayerNorm over the last axis: one node from opset 17 on, nine before."""
        gamma = self.weight(f"{module}.weight", self._rng.uniform(0.5, 1.5, width))
        beta = self.normal(f"{module}.bias", width, std=0.1)
        if self.opset >= 17:
            return str(self.node("LayerNormalization", x, gamma, beta, at=at, axis=-1, epsilon=epsilon))
        centred = self.node("Sub", x, self.node("ReduceMean", x, at=at, axes=[-1]), at=at)
        squared = self.node("Pow", centred, self.constant(2.0, at, np.float32), at=at)
        variance = self.node("ReduceMean", squared, at=at, axes=[-1])
        shifted = self.node("Add", variance, self.constant(epsilon, at, np.float32), at=at)
        normal = self.node("Div", centred, self.node("Sqrt", shifted, at=at), at=at)
        return str(self.node("Add", self.node("Mul", normal, gamma, at=at), beta, at=at))

    def gelu(self, x: str, at: str) -> str:
        """GELU, five nodes below opset 20."""
        erf = self.node("Erf", self.node("Div", x, self.constant(np.sqrt(2), at, np.float32), at=at), at=at)
        grown = self.node("Add", erf, self.constant(1.0, at, np.float32), at=at)
        product = self.node("Mul", x, grown, at=at)
        return str(self.node("Mul", product, self.constant(0.5, at, np.float32), at=at))

    # --- the file -----------------------------------------------------------------------------------

    def model(
        self,
        inputs: dict[str, tuple[str | int, ...]],
        outputs: dict[str, tuple[str | int, ...]],
        *,
        kind: int = FLOAT,
    ) -> onnx.ModelProto:
        """The model.

        Args:
            inputs, outputs: shapes by name; text is a dynamic axis.
            kind: type of the inputs; outputs are float.
        """
        graph = helper.make_graph(
            self._nodes,
            "main_graph",
            [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
            self._weights,
        )
        made = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=IR_VERSION,
            producer_name="pytorch",
        )
        onnx.checker.check_model(made, full_check=True)
        return made

    def named(self, tensor: str, name: str) -> str:
        """Call the output `tensor` of the last node `name`, as the exporter does with graph outputs."""
        last = self._nodes[-1]
        index = list(last.output).index(tensor)
        last.output[index] = name
        return name
