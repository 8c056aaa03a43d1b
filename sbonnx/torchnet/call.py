"""`Call`: what a function that computes a node is told beside the values that the node reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sbonnx.errors import DeviceError

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
        raise DeviceError("torch is not installed: pip install 'sbonnx[qat]', or learn from moments only") from error
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
    """

    torch: Any
    name: str
    op: str
    attributes: Mapping[str, Any]
    opset: int
    outputs: int = 1

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


Function = Callable[..., Any]
"""(call, each input or None) → a tensor, or a tuple of them for a node of several outputs."""


def ints(x: Tensor) -> list[int]:
    """The values of a small integer tensor."""
    return [int(value) for value in x.reshape(-1).tolist()]


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis
