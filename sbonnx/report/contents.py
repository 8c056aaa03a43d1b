"""`ModelContents`: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sbonnx.report.notebook import Result


@dataclass(frozen=True)
class ModelInterface:
    """Input or output of a model.

    Attributes:
        name: its name.
        type: data type.
        shape: sizes, names of dynamic axes, or "?"; null if unknown.
    """

    name: str
    type: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class PairCount:
    """Q/DQ pairs of one type.

    Attributes:
        type: quantized type.
        of: activations or constants.
        pairs: number of pairs.
    """

    type: str
    of: Literal["activations", "constants"]
    pairs: int


@dataclass(frozen=True)
class BlockCount:
    """Recognized blocks of one kind.

    Attributes:
        kind: such as "gelu".
        count: number of blocks.
        first: first node of the first block.
    """

    kind: str
    count: int
    first: str


@dataclass(frozen=True, repr=False)
class ModelContents(Result):
    """Contents of a model.

    Attributes:
        file: the model.
        bytes: its size with external data.
        opset: opset of the standard operators.
        domains: versions of other domains.
        ir_version: version of the file format.
        producer: program that wrote it, or "".
        inputs, outputs: interface.
        nodes: number of nodes, in branches too.
        ops: number of nodes by operator.
        parameters, parameter_bytes: number of values of all constants, and their bytes.
        qdq: Q/DQ pairs by type.
        blocks: recognized blocks.
        branches: number of nodes by path of the branch.
        notes: what loading changed.
    """

    frame_of: ClassVar = "ops"

    file: str
    bytes: int
    opset: int
    domains: dict[str, int]
    ir_version: int
    producer: str
    inputs: tuple[ModelInterface, ...]
    outputs: tuple[ModelInterface, ...]
    nodes: int
    ops: dict[str, int]
    parameters: int
    parameter_bytes: int
    qdq: tuple[PairCount, ...]
    blocks: tuple[BlockCount, ...]
    branches: dict[str, int]
    notes: tuple[str, ...]
