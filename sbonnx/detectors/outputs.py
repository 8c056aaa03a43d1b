"""Outputs of one feed of a detector, and the number of cells of its scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sbonnx.graph import Graph, Tensor
from sbonnx.metrics.arrays import shown
from sbonnx.spec import Array

STRIDES: Final = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))
"""Strides of the scales of YOLO: usual ones, P6, P2, tiny."""

ANCHORS: Final = 3
"""Anchors of a cell of YOLOv5."""


@dataclass(frozen=True)
class DetectorOutputs:
    """Outputs of one feed of a detector.

    Attributes:
        graph: the model.
        arrays: outputs by name.
        size: height and width of the input, pixels.
        images: number of images of the feed.
    """

    graph: Graph
    arrays: Mapping[str, Array]
    size: tuple[int, int]
    images: int = 1

    def tensor(self, name: str) -> Tensor:
        """Return an output as a tensor of the graph."""
        return next(tensor for tensor in self.graph.outputs if tensor.name == name)

    @property
    def listed(self) -> str:
        """Names, types and shapes, for messages."""
        return ", ".join(f"'{name}' {shown(value)}" for name, value in self.arrays.items())

    @property
    def mask_coefficients(self) -> int:
        """Number of columns of masks, which weight the maps (images, columns, h, w) of the only output of rank 4."""
        maps = list(self.of_rank(4).values())
        return int(maps[0].shape[1]) if len(maps) == 1 else 0

    def rows(self) -> dict[str, Array]:
        """Return the float outputs as rows of cells, (images, rows, columns): maps and rows of one image as well."""
        rows = {name: value[None] for name, value in self.of_rank(2).items()} if self.images == 1 else {}
        for name, value in self.of_rank(4).items():
            rows[name] = value.reshape(*value.shape[:2], -1).transpose(0, 2, 1)
        return {**rows, **self.of_rank(3)}

    def of_rank(self, rank: int) -> dict[str, Array]:
        """Return the float outputs with this many axes that no other output is computed from."""
        return {
            name: value
            for name, value in self.arrays.items()
            if value.ndim == rank and value.dtype.kind == "f" and not self.tensor(name).outputs
        }


def cells(size: tuple[int, int], strides: tuple[int, ...]) -> int:
    """Return the number of cells of all scales."""
    return sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in strides)


def fitting_strides(count: int, size: tuple[int, int], anchors: int) -> tuple[int, ...] | None:
    """Return the strides whose cells, times the anchors, are this many; None: none."""
    return next((strides for strides in STRIDES if count == anchors * cells(size, strides)), None)
