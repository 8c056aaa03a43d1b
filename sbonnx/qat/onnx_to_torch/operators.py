"""Modules of a reimported graph: one small, picklable module for each node."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sbonnx.qat.onnx_to_torch.shape_arith import SIZES
from sbonnx.torchnet import FUNCTIONS, Call, compute


class Op(nn.Module):  # type: ignore[misc]
    """One node, computed by the function of its op in `sbonnx.torchnet.FUNCTIONS`.

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
        """Compute the output of the node, or a tuple of its outputs."""
        made = compute(FUNCTIONS[self.call.op], self.call, inputs)
        return made[0] if self.single and isinstance(made, tuple) else made

    def extra_repr(self) -> str:
        """Return the text for `print(model)`: op, name and attributes."""
        shown = [f"{self.call.op} '{self.call.name}'"]
        shown += [f"{key}={value}" for key, value in self.call.attributes.items() if not hasattr(value, "nbytes")]
        return ", ".join(shown)


class Placed(Op):
    """A node that creates tensors from numbers, or has a type as attribute.

    The outputs are on the device of the module. A float32 output has the module's dtype if the module was converted
    (`module.double()`). A scalar buffer tracks the device and the dtype.
    """

    place: torch.Tensor

    def __init__(self, call: Call, *, single: bool = True) -> None:
        super().__init__(call, single=single)
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, *inputs: Any) -> Any:
        """Compute the output of the node, on the device of the module."""
        made = super().forward(*inputs)
        return tuple(self._settled(one) for one in made) if isinstance(made, tuple) else self._settled(made)

    def _settled(self, made: torch.Tensor) -> torch.Tensor:
        return made.to(self.place.device, self.place.dtype if made.dtype == torch.float32 else made.dtype)


class Sizes(Op):
    """A node of shape arithmetic, on Python integers, so that shapes stay symbolic under torch.compile."""

    def forward(self, *inputs: Any) -> Any:
        """Compute an integer, or a tuple of integers for a vector."""
        return compute(SIZES[self.call.op], self.call, inputs)


class AsTensor(nn.Module):  # type: ignore[misc]
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
        """Return the text for `print(model)`: the dtype."""
        return str(self.kind)
