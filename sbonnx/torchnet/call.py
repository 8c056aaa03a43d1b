"""`Call`: attributes and context of a node, passed to its torch function together with the input values."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Final

from sbonnx.errors import DeviceError, MissingPackageError, ModelError, SbonnxError

Tensor = Any
"""A `torch.Tensor`; untyped, because torch is imported lazily."""


COMPILE_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable with torch's folder of compiled code, which torch sets where it creates the folder."""


class Unfit(Exception):
    """Raised if the attributes or inputs of a node are not supported. The message is one clause."""


def torch_module(hint: str = "") -> ModuleType:
    """Import torch and return the module.

    Args:
        hint: end of the message if torch is not installed: what works without it.

    Raises:
        DeviceError: torch is not installed, or does not load on this machine.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(f"torch is not installed: pip install 'sbonnx[qat]'{hint}") from error
    except (ImportError, OSError) as error:  # OSError: its shared libraries do not load
        raise DeviceError(f"torch is installed but does not load: {str(error).splitlines()[0]}") from error
    _remove_compile_cache_at_exit()
    module: ModuleType = torch
    return module


@cache
def _remove_compile_cache_at_exit() -> None:
    """Remove an empty folder of compiled code when the process ends: importing optimizers creates it in TMPDIR."""

    def remove() -> None:
        with contextlib.suppress(KeyError, OSError):  # it was not created, or is in use
            os.rmdir(os.environ[COMPILE_CACHE])

    if COMPILE_CACHE not in os.environ:
        atexit.register(remove)


@dataclass(frozen=True)
class Call:
    """Name, op, attributes, opset and number of outputs of a node.

    Attributes:
        torch: the torch module.
        name, op: name and op of the node.
        attributes: attributes by name, tensors as numpy arrays.
        opset: opset of the graph.
        outputs: number of outputs of the node.
        domain: domain of the op, "" for that of ONNX.

    A call can be copied and pickled; torch is imported again when it is unpickled.
    """

    torch: Any
    name: str
    op: str
    attributes: Mapping[str, Any]
    opset: int
    outputs: int = 1
    domain: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.name, self.op, dict(self.attributes), self.opset, self.outputs, self.domain)

    def number(self, key: str, default: float) -> float:
        """Return an attribute as a float."""
        return float(self.attributes.get(key, default))

    def integer(self, key: str, default: int) -> int:
        """Return an attribute as an integer."""
        return int(self.attributes.get(key, default))

    def integers(self, key: str, default: Sequence[int] | None = None) -> list[int] | None:
        """Return an attribute as a list of integers, or `default`."""
        numbers = self.attributes.get(key, default)
        return None if numbers is None else [int(value) for value in numbers]

    def text(self, key: str, default: str) -> str:
        """Return an attribute as a string."""
        value = self.attributes.get(key, default)
        return value.decode() if isinstance(value, bytes) else str(value)

    def listed(self, key: str, given: Tensor | None) -> list[int] | None:
        """Return integers that are an attribute in older opsets and an input in newer ones; None if missing."""
        return self.integers(key) if given is None else numbers(given)


def _unpacked(*values: Any) -> Call:
    return Call(torch_module(), *values)


Function = Callable[..., Any]
"""(call, each input or None) → a tensor, or a tuple of tensors for a node with several outputs.

Inputs that are sizes, axes, counts or limits (`ops.NUMBERS`) may be Python numbers or tuples of numbers."""


def compute(function: Function, call: Call, given: Sequence[Any]) -> Any:
    """Call the function of a node and convert its errors.

    Raises:
        ModelError: the function does not support the node, or fails on its inputs; the message names the node.
    """
    try:
        return function(call, *given)
    except Unfit as error:
        raise ModelError(f"torch cannot evaluate node '{call.name}' ({call.op}): {error}") from error
    except SbonnxError:  # of a node in a body
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, call.torch.OutOfMemoryError):
            raise  # not an error of the node; callers catch it and reduce the batch
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"torch fails at node '{call.name}' ({call.op}): {reason}") from error


def numbers(x: Any) -> list[Any]:
    """Return the values of a small tensor, a tuple of numbers or a single number as a list.

    No conversion to int: under torch.compile, sizes may be symbolic.
    """
    if isinstance(x, (tuple, list)):
        return list(x)
    return list(x.reshape(-1).tolist()) if hasattr(x, "tolist") else [x]


def number(x: Any) -> Any:
    """Return the first value of a tensor or tuple, or the number itself."""
    return numbers(x)[0]


def axis_of(axis: int, rank: int) -> int:
    """Return the axis as a non-negative index."""
    return axis + rank if axis < 0 else axis
