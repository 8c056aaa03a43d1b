"""Modules of a reimported graph: one small, picklable module for each node."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from sbonnx.torchnet import Call, Unfit, compute, function_of
from sbonnx.torchnet.onnx_to_torch.shape_arith import SIZES


class NodeModule(nn.Module):  # type: ignore[misc]
    """One node, computed by the function of its op (`sbonnx.torchnet.function_of`).

    The inputs are those of the node, in order: tensors, None for an omitted input, or Python numbers (and tuples of
    them) for sizes, axes and limits. The result is a tensor, or a tuple if the node has several outputs.

    Attributes:
        call: name, op, attributes and opset of the node.
        single: only the first output is used, even if the function returns more.

    Raises:
        ModelError: in `forward`: the function does not support the attributes or inputs of the node.
    """

    def __init__(self, call: Call, *, single: bool = True) -> None:
        super().__init__()
        self.call = call
        self.single = single

    def forward(self, *inputs: Any) -> Any:
        function = function_of(self.call.op, self.call.domain)
        assert function is not None  # `reimport` refuses other ops
        result = compute(function, self.call, inputs)
        return result[0] if self.single and isinstance(result, tuple) else result

    def extra_repr(self) -> str:
        shown = [f"{self.call.op} '{self.call.name}'"]
        shown += [f"{key}={value}" for key, value in self.call.attributes.items() if not hasattr(value, "nbytes")]
        return ", ".join(shown)


class BatchNorm(NodeModule):
    """ONNX BatchNormalization with the train and eval modes of torch's BatchNorm.

        train():  y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias,  moments over all axes except channels,
                  running = momentum * running + (1 - momentum) * moment
        eval():   the same formula with the running mean and variance

    The running variance is updated with the unbiased variance of the batch, as in torch's BatchNorm. Statistics that
    are not constants of the graph are used in eval mode, and not updated.

    Attributes:
        frozen: use the running statistics in train mode too, without updating them.

    Args:
        call: the node.
        kept: mean and variance are buffers of the parent module, to be updated in train mode.
    """

    def __init__(self, call: Call, *, kept: bool) -> None:
        super().__init__(call)
        self.kept = kept
        self.frozen = False

    def forward(self, *inputs: Any) -> Any:
        """Normalize x, given (x, scale, bias, mean, variance); the shape (N, C, ...) is preserved."""
        return compute(self._normalize, self.call, inputs)

    def _normalize(
        self,
        call: Call,
        x: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
    ) -> torch.Tensor:
        if call.outputs > 1:
            raise Unfit("the batch statistics are outputs that other nodes read")
        batch = self.training and not self.frozen
        if batch and x.numel() == x.shape[1]:
            raise Unfit("it needs more than one value per channel in train mode: use larger batches, or call eval()")
        if batch and not self.kept:
            mean = variance = None
        share = 1.0 - call.number("momentum", 0.9)
        return functional.batch_norm(x, mean, variance, scale, bias, batch, share, call.number("epsilon", 1e-5))


class TensorCreation(NodeModule):
    """A node that creates tensors from numbers, or has a type as attribute.

    The outputs are on the device of the module. A float32 output has the module's dtype if the module was converted
    (`module.double()`). A scalar buffer tracks the device and the dtype.
    """

    place: torch.Tensor

    def __init__(self, call: Call, *, single: bool = True) -> None:
        super().__init__(call, single=single)
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, *inputs: Any) -> Any:
        result = super().forward(*inputs)
        return tuple(self._moved(output) for output in result) if isinstance(result, tuple) else self._moved(result)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.place.device, self.place.dtype if value.dtype == torch.float32 else value.dtype)


class ShapeArithmetic(NodeModule):
    """A node of shape arithmetic, on Python integers, so that shapes stay symbolic under torch.compile."""

    def forward(self, *inputs: Any) -> Any:
        """Compute an integer, or a tuple of integers for a vector."""
        return compute(SIZES[self.call.op], self.call, inputs)


class SizesToTensor(nn.Module):  # type: ignore[misc]
    """Conversion of sizes to a tensor, on the device of the module.

    Args:
        kind: name of the torch dtype.
    """

    place: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, sizes: Any) -> torch.Tensor:
        """Convert an integer to a tensor of shape (), or a tuple to shape (N,)."""
        return cast("torch.Tensor", torch.tensor(sizes, dtype=getattr(torch, self.kind), device=self.place.device))

    def extra_repr(self) -> str:
        return str(self.kind)
