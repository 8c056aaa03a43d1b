"""`Call`: what a function that computes a node is told beside the values that the node reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sbonnx.errors import DeviceError, ModelError

Tensor = Any
"""A `torch.Tensor`; torch is loaded when something is computed, and has no types here."""


class Unfit(Exception):
    """A node that cannot be computed: its attributes ask for what no function here does. The reason is one clause."""


def torch_module() -> ModuleType:
    """torch.

    Raises:
        DeviceError: it is not installed, or does not load on this machine.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise DeviceError(
            "torch is not installed: pip install 'sbonnx[qat]' (rounding by moments needs none)"
        ) from error
    except (ImportError, OSError) as error:  # OSError: its libraries do not load
        raise DeviceError(f"torch is installed but does not load: {str(error).splitlines()[0]}") from error
    module: ModuleType = torch
    return module


@dataclass(frozen=True)
class Call:
    """One node.

    Attributes:
        torch: the module.
        name, op: of the node.
        attributes: its attributes by name, tensors as numpy arrays.
        opset: of the graph.
        outputs: how many outputs it has.

    A call can be copied and pickled; torch is found again where it is unpacked.
    """

    torch: Any
    name: str
    op: str
    attributes: Mapping[str, Any]
    opset: int
    outputs: int = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.name, self.op, dict(self.attributes), self.opset, self.outputs)

    def number(self, key: str, default: float) -> float:
        """An attribute that is a number."""
        return float(self.attributes.get(key, default))

    def integer(self, key: str, default: int) -> int:
        """An attribute that is an integer."""
        return int(self.attributes.get(key, default))

    def integers(self, key: str, default: Sequence[int] | None = None) -> list[int] | None:
        """An attribute that is a list of integers, or `default`."""
        found = self.attributes.get(key, default)
        return None if found is None else [int(value) for value in found]

    def text(self, key: str, default: str) -> str:
        """An attribute that is a text."""
        found = self.attributes.get(key, default)
        return found.decode() if isinstance(found, bytes) else str(found)

    def listed(self, key: str, given: Tensor | None) -> list[int] | None:
        """A list of integers that was an attribute in older opsets and is an input now; None where there is neither."""
        return self.integers(key) if given is None else ints(given)


def _unpacked(name: str, op: str, attributes: Mapping[str, Any], opset: int, outputs: int) -> Call:
    """A call from what was pickled of it."""
    return Call(torch_module(), name, op, attributes, opset, outputs)


Function = Callable[..., Any]
"""(call, each input or None) → a tensor, or a tuple of them for a node of several outputs.

Inputs that say sizes, axes, counts and limits (`table.NUMBERS`) may come as Python numbers and tuples of them."""


def compute(function: Function, call: Call, given: Sequence[Any]) -> Any:
    """What a function gives for one node.

    Raises:
        ModelError: the node asks for what its function does not do, or does not fit its inputs; named.
    """
    try:
        return function(call, *given)
    except Unfit as error:
        raise ModelError(f"torch cannot evaluate node '{call.name}' ({call.op}): {error}") from error
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, call.torch.OutOfMemoryError):
            raise  # says nothing about the node, and is caught by who knows smaller batches
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"torch fails at node '{call.name}' ({call.op}): {reason}") from error


def numbers(x: Any) -> list[Any]:
    """The values of a small tensor, of a tuple of numbers, or a single number as a list."""
    if isinstance(x, (tuple, list)):
        return list(x)
    return list(x.reshape(-1).tolist()) if hasattr(x, "tolist") else [x]


def ints(x: Any) -> list[int]:
    """Integers, likewise. Those of a tuple are left as they are: torch.compile brings sizes that it does not know."""
    return numbers(x)


def number(x: Any) -> Any:
    """The one value of a tensor, of a tuple of one, or the number itself."""
    return numbers(x)[0]


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis
