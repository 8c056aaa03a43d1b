"""Values that backends exchange with runtimes: files that they execute on this machine, inputs of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Entry:
    """Input or output of a model, with the attributes of onnxruntime's `NodeArg`.

    Attributes:
        name: as in the ONNX file.
        type: ``tensor(float)``.
        shape: sizes; None where a size is dynamic.
    """

    name: str
    type: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class ExecutedLayer:
    """Kernel that a runtime executes.

    Attributes:
        kind: its name in the runtime, such as "Convolution".
        names: names of the nodes and tensors of the file that it computes.
        integer: it computes on 8-bit integers.
    """

    kind: str
    names: frozenset[str]
    integer: bool


class RuntimeSession(Protocol):
    """Opened model, with the methods of onnxruntime's `InferenceSession` that verification calls."""

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model on arrays by input name, and return the named outputs; None: all, in the order of the file."""

    def layers(self) -> list[ExecutedLayer]:
        """Return the kernels that it executes; none if the runtime does not name them."""

    def fallback(self) -> tuple[str, ...]:
        """Return the names of the nodes that it leaves to another processor than its own."""


@dataclass(frozen=True)
class Runtime:
    """Runtime that executes files on this machine, or builds what another machine executes.

    Attributes:
        title: its name, for people.
        absent: returns why it cannot run here and how to install it, or None.
        open: opens a file or a serialized model for a number of threads (None: its default); raises ModelError.
        name: its name in lists of runtimes.
        executes: returns whether sessions run; else opening proves that the file is parsed and built.
        fixed_shapes: needs a size for each axis of the inputs: `open` gets a model with the shapes of the feeds.
        open_float32: opens a model like `open`, with float operators in float32; None: `open` computes no other way.
    """

    title: str
    absent: Callable[[], str | None]
    open: Callable[[Path | bytes, int | None], RuntimeSession]
    name: str = ""
    executes: Callable[[], bool] = lambda: True
    fixed_shapes: bool = False
    open_float32: Callable[[Path | bytes, int | None], RuntimeSession] | None = None


@dataclass(frozen=True)
class EngineInput:
    """Shape of one input of the network.

    Attributes:
        name: as in the file.
        shape: dimensions; None where the size is dynamic.
        seen: dimensions of the calibration data, for the optimization profile; None without data.
    """

    name: str
    shape: tuple[int | None, ...]
    seen: tuple[int, ...] | None = None


def layers_by_name(layers: Iterable[ExecutedLayer]) -> dict[str, ExecutedLayer]:
    """Return the kernel that computes each node or tensor, by name."""
    return {name: layer for layer in layers for name in layer.names}


__all__ = ["EngineInput", "Entry", "ExecutedLayer", "Runtime", "RuntimeSession", "layers_by_name"]
