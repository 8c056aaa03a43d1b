"""Linear layers of every layout, as text, for the tests of fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        op, attributes: as in ONNX text.
        x, w: shapes of input and weight.
        inputs, outputs: channels.
        bias: shape of the bias, None for none.
    """

    op: str
    attributes: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    inputs: int
    outputs: int
    bias: tuple[int, ...] | None = None

    def call(self, x: str = "x") -> str:
        """The right-hand side of its line."""
        operands = [x, "w", *(["b"] if self.bias is not None else [])]
        attributes = f" <{self.attributes}>" if self.attributes else ""
        return f"{self.op}{attributes} ({', '.join(operands)})"

    def weights(self) -> dict[str, Any]:
        """Shapes by name, for `tests.support.models.model`."""
        return {"w": self.w} if self.bias is None else {"w": self.w, "b": self.bias}

    def along(self, channels: int) -> tuple[int, ...]:
        """The shape in which a constant a channel broadcasts: (C, 1, 1) for images, (C,) for matrices."""
        return (channels, *(1 for _ in self.x[2:])) if self.op.startswith("Conv") else (channels,)

    def dims(self, shape: tuple[int, ...]) -> str:
        return ",".join(map(str, shape))

    @property
    def rank(self) -> int:
        return len(self.x)


LAYERS = {
    "conv1d": Layer("Conv", "strides=[2]", (2, 3, 9), (4, 3, 3), 3, 4, (4,)),
    "conv2d": Layer("Conv", "", (2, 3, 6, 7), (4, 3, 3, 3), 3, 4),
    "conv2d_group2": Layer("Conv", "group=2", (1, 4, 6, 6), (6, 2, 3, 3), 4, 6, (6,)),
    "conv2d_depthwise": Layer("Conv", "group=4", (1, 4, 6, 6), (8, 1, 3, 3), 4, 8),
    "conv2d_dilated": Layer("Conv", "dilations=[2,2]", (1, 3, 8, 8), (5, 3, 3, 3), 3, 5, (5,)),
    "conv3d": Layer("Conv", "", (1, 2, 4, 5, 4), (3, 2, 2, 2, 2), 2, 3, (3,)),
    "transpose1d": Layer("ConvTranspose", "", (1, 3, 5), (3, 4, 1), 3, 4),
    "transpose2d": Layer("ConvTranspose", "strides=[2,2]", (1, 3, 4, 4), (3, 5, 3, 3), 3, 5, (5,)),
    "transpose2d_group2": Layer(
        "ConvTranspose", "group=2, output_padding=[1,1], strides=[2,2]", (1, 4, 4, 4), (4, 3, 2, 2), 4, 6
    ),
    "transpose2d_pointwise_group2": Layer("ConvTranspose", "group=2", (1, 4, 4, 4), (4, 3, 1, 1), 4, 6, (6,)),
    "gemm": Layer("Gemm", "", (3, 5), (5, 4), 5, 4),
    "gemm_transposed": Layer("Gemm", "transB=1", (3, 5), (4, 5), 5, 4, (4,)),
    "gemm_factors": Layer("Gemm", "alpha=0.5, beta=3.0", (3, 5), (5, 4), 5, 4, (4,)),
    "gemm_scalar_bias": Layer("Gemm", "beta=-2.0, transB=1", (3, 5), (4, 5), 5, 4, ()),
    "gemm_full_bias": Layer("Gemm", "beta=0.5", (3, 5), (5, 4), 5, 4, (3, 4)),
    "gemm_row_bias": Layer("Gemm", "", (3, 5), (5, 4), 5, 4, (3, 1)),
    "matmul": Layer("MatMul", "", (3, 5), (5, 4), 5, 4),
}
"""By name. Convolutions are not padded."""

BN = ("gamma", "beta", "mean", "variance")


def batchnorm(channels: int, seed: int = 3) -> dict[str, Any]:
    """Parameters of a BatchNormalization; some gammas are negative, one is 0."""
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=channels) for name in BN}
    values["variance"] = rng.uniform(0.1, 2.0, channels)
    values["gamma"][0] = 0.0
    return {name: value.astype(np.float32) for name, value in values.items()}
