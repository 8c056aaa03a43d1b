"""The modules that a reimported graph is made of: one a node, all small, all picklable."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sbonnx.qat.onnx_to_torch.shape_arith import SIZES
from sbonnx.torchnet import FUNCTIONS, Call, compute


class Op(nn.Module):  # type: ignore[misc]
    """One node, computed by the function that the table of `sbonnx.torchnet` has for its op.

    Its inputs are those of the node, in order: tensors, None where one is left out, Python numbers (and tuples of
    them) where the function takes sizes, axes or limits. It gives a tensor, or a tuple where the node has several
    outputs.

    Attributes:
        call: name, op, attributes and opset of the node.
        single: only the first output is read, though the function may give more.

    Raises:
        ModelError: when it runs: the node asks for what the function does not do, or its inputs do not fit.
    """

    def __init__(self, call: Call, *, single: bool = True) -> None:
        super().__init__()
        self.call = call
        self.single = single

    def forward(self, *inputs: Any) -> Any:
        """The node's output, or a tuple of its outputs."""
        made = compute(FUNCTIONS[self.call.op], self.call, inputs)
        return made[0] if self.single and isinstance(made, tuple) else made

    def extra_repr(self) -> str:
        """Op, name and attributes."""
        shown = [f"{self.call.op} '{self.call.name}'"]
        shown += [f"{key}={value}" for key, value in self.call.attributes.items() if not hasattr(value, "nbytes")]
        return ", ".join(shown)


class Placed(Op):
    """A node that makes tensors out of numbers, or names a type.

    What it gives lies on the device of the module; where the graph says float32 and the module was converted
    (`module.double()`), it has the module's type. A scalar that travels with the module says both.
    """

    place: torch.Tensor

    def __init__(self, call: Call, *, single: bool = True) -> None:
        super().__init__(call, single=single)
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, *inputs: Any) -> Any:
        """The node's output, on the device of the module."""
        made = super().forward(*inputs)
        return tuple(self._settled(one) for one in made) if isinstance(made, tuple) else self._settled(made)

    def _settled(self, made: torch.Tensor) -> torch.Tensor:
        return made.to(self.place.device, self.place.dtype if made.dtype == torch.float32 else made.dtype)


class Sizes(Op):
    """A node that computes with sizes: of Python integers, so that shapes stay symbols for torch.compile."""

    def forward(self, *inputs: Any) -> Any:
        """An integer, or a tuple of integers for a vector."""
        return compute(SIZES[self.call.op], self.call, inputs)


class AsTensor(nn.Module):  # type: ignore[misc]
    """Sizes as a tensor, on the device of the module.

    Args:
        kind: torch's name of the type.
    """

    place: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, sizes: Any) -> torch.Tensor:
        """() for an integer, (N,) for a tuple."""
        return cast("torch.Tensor", torch.tensor(sizes, dtype=getattr(torch, self.kind), device=self.place.device))

    def extra_repr(self) -> str:
        """The type."""
        return str(self.kind)
