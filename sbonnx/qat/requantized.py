"""Low-rank adapters that change stored quantized values: the file keeps its nodes, types and size.

    W = s * (clip(round(q + D / s)) - z),   D = alpha / rank * m * (B A)

q, z and s are the stored values, zero points and scales. With D = 0 nothing changes. Rounding has the straight-through
gradient, which also reaches the scales.

Source: Bondarenko et al. 2024, "Low-Rank Quantization-Aware Training for LLMs", section 3, starting from quantized
values instead of float weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import functional

from sbonnx.export.nbits import pack
from sbonnx.graph import Constant, Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.qat.lora import LowRank
from sbonnx.torchnet import Call, compute
from sbonnx.torchnet.onnx_to_torch.reimport import CALL_MODULE
from sbonnx.torchnet.onnx_to_torch.write_back import set_values
from sbonnx.torchnet.ops.decoders import matmul_nbits, nbits_parts
from sbonnx.torchnet.ops.quantized import dequantize_parts

PACKED: Final = "MatMulNBits"

INSIDE: Final = 0.45
"""Largest initial distance of an update from its quantized value, in steps: half a step changes the value."""


@final
class Requantized(LowRank):
    """Adapter inside the rounding of stored values; takes the place of their MatMulNBits or DequantizeLinear.

    Args:
        weight, initializer, options: see `LowRank`; the initializer has the quantized values.
        call: the node.
        limits: smallest and largest quantized value.
    """

    def __init__(
        self, weight: Tensor, initializer: str, *, call: Call, limits: tuple[int, int], **options: Any
    ) -> None:
        super().__init__(weight, initializer, **options)
        self.call = call
        self.limits = limits

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Compute the output of the node from its inputs, with the changed values."""
        function = partial(_packed_product, adapter=self) if self.call.op == PACKED else self._weight
        output: Tensor = compute(function, self.call, inputs)
        return output

    def _weight(self, call: Call, *stored: Tensor | None) -> Tensor:
        del call
        values, shift, scales = self.rounded(*stored)
        return (values - shift) * scales

    def rounded(self, codes: Tensor, scales: Tensor, zero_points: Tensor | None = None) -> tuple[Tensor, Any, Tensor]:
        """Return changed quantized values, with straight-through gradient, zero points and scales.

        They have the shape of the stored values, or (N, K in whole blocks) if these are packed.
        """
        values, shift, spread = self._parts(codes, scales, zero_points)
        if self.call.op == PACKED:
            update = self.product(values.narrow(-1, 0, self.call.integer("K", values.shape[-1])))
            update = functional.pad(update, (0, values.shape[-1] - update.shape[-1]))
        else:
            update = self.product(values)
        wanted = (values.to(spread.dtype) + update / spread).clamp(*self.limits)
        return wanted + (wanted.round() - wanted).detach(), shift, spread

    def _parts(self, codes: Tensor, scales: Tensor, zero_points: Tensor | None = None) -> tuple[Tensor, Any, Tensor]:
        if self.call.op == PACKED:
            return nbits_parts(self.call, codes, scales, zero_points)
        values = codes.to(scales.device)
        return values, *dequantize_parts(self.call, values, scales, zero_points)

    def start_near(self, weight: Tensor, *stored: Tensor) -> None:
        """Initialize an update without a rank: as near to a float weight as the quantized values stay the same.

        Values that are not the nearest, and those halfway between two, change first in training.

        Args:
            weight: in the layout of the stored values, (N, K) if these are packed.
            stored: quantized values, scales and zero points.
        """
        values, shift, spread = (
            part if isinstance(part, float) else part[..., : weight.shape[-1]] for part in self._parts(*stored)
        )
        inner = (weight / spread + shift - values).clamp(-INSIDE, INSIDE)
        with torch.no_grad():
            self.B.copy_(self.matrix(inner * spread) / self.unit.clamp_min(torch.finfo(torch.float32).tiny))


def _packed_product(call: Call, *inputs: Tensor | None, adapter: Requantized) -> Tensor:
    def matrix(*stored: Tensor | None) -> Tensor:
        values, shift, scales = adapter.rounded(*stored)
        whole = (values - shift) * scales
        return whole.narrow(-1, 0, call.integer("K", whole.shape[-1]))

    return matmul_nbits(call, *inputs, matrix=matrix)


def requantized_nodes(module: fx.GraphModule) -> Iterator[tuple[Requantized, fx.Node, list[fx.Node]]]:
    """Yield the adapters of a module with their fx nodes and their stored inputs: values, scales, zero points."""
    for node in module.graph.nodes:
        part = module.get_submodule(str(node.target)) if node.op == CALL_MODULE else None
        if isinstance(part, Requantized):
            first = 1 if part.call.op == PACKED else 0
            yield part, node, [argument for argument in node.args[first : first + 3] if isinstance(argument, fx.Node)]


def write_values(graph: Graph, module: fx.GraphModule) -> dict[str, float]:
    """Write the changed quantized values into the graph that a module was made from, in place.

    Returns:
        Share of the values that changed, by name of the constant.
    """
    tensors = tensors_by_name(graph)
    changed: dict[str, float] = {}
    for adapter, _, stored in requantized_nodes(module):
        tensor = tensors[adapter.initializer]
        assert isinstance(tensor, Constant)
        with torch.no_grad():
            inputs = [getattr(module, str(source.target)) for source in stored]
            values = adapter.rounded(*inputs)[0].round().cpu().numpy()
            before = inputs[0] if adapter.call.op != PACKED else nbits_parts(adapter.call, *inputs)[0]
        changed[adapter.initializer] = float(np.mean(values != before.cpu().numpy()))
        if adapter.call.op == PACKED:
            values = pack(values.astype(np.uint8), adapter.call.integer("bits", 4))
        set_values(tensor, values)
    return changed
