"""Which inputs of which op the ancestor quantizes: its verified residual block, and its table of operators.

One tensor has one pair here, whoever reads it; the ancestor made one a reader. An interpolating resize has the width of
the recipe, where the ancestor forced 8 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ancestor.networks import residual_block
from tests.ancestor.qconfigs import exported, placed, virtual
from tests.support.models import model

BLOCK = {
    "x": ["/conv1/Conv", "/skip/Conv"],
    "/relu1/Relu_output_0": ["/conv2/Conv"],
    "/relu2/Relu_output_0": ["/gap/GlobalAveragePool"],
    "/Flatten_output_0": ["/fc/Gemm"],
}


def test_residual_block(tmp_path: Path) -> None:
    """Both main convolutions, the one beside them, the input of the pool and the classifier; no ReLU, no add."""
    found = placed(exported(residual_block(), virtual(), tmp_path))
    assert found.activations == BLOCK
    assert sorted(found.weights.values()) == [["/conv1/Conv"], ["/conv2/Conv"], ["/fc/Gemm"], ["/skip/Conv"]]
    assert found.bits == {"QuantizeLinear": {8}, "DequantizeLinear": {8}}


def test_residual_block_with_quantized_add(tmp_path: Path) -> None:
    """The same, and two pairs on the inputs of the add."""
    found = placed(exported(residual_block(), virtual(qadd=True), tmp_path))
    assert found.activations == BLOCK | {
        "/bn2/BatchNormalization_output_0": ["/Add"],
        "/skip/Conv_output_0": ["/Add"],
    }


def test_residual_block_with_batch_norms(tmp_path: Path) -> None:
    """Batch norms that stay have no pair before them and none after: the same placement."""
    made = exported(residual_block(), virtual(fuse=False), tmp_path)
    assert [node.op_type for node in made.graph.node].count("BatchNormalization") == 2
    assert placed(made).activations == BLOCK


IMAGE, ROWS = "float[2,4,6,6]", "float[2,4,4]"

TABLE = {
    "Conv": (IMAGE, "y = Conv (t, w4)", True, True),
    "ConvTranspose": (IMAGE, "y = ConvTranspose (t, w4)", True, True),
    "Linear": ("float[3,4]", "y = Gemm (t, w2, b)", True, True),
    "Linear on three axes": (ROWS, "y = MatMul (t, w2)", True, True),
    "ReLU": (IMAGE, "y = Relu (t)", True, False),
    "ReLU6": (IMAGE, "y = Clip (t, zero, six)", True, False),
    "LeakyReLU": (IMAGE, "y = LeakyRelu (t)", True, False),
    "SiLU": (IMAGE, "s = Sigmoid (t)  y = Mul (t, s)", True, False),
    "Mish": (IMAGE, "s = Softplus (t)  h = Tanh (s)  y = Mul (t, h)", True, False),
    "Hardsigmoid": (IMAGE, "y = HardSigmoid (t)", True, False),
    "Sigmoid": (IMAGE, "y = Sigmoid (t)", True, False),
    "Tanh": (IMAGE, "y = Tanh (t)", True, False),
    "LayerNorm": (ROWS, "y = LayerNormalization (t, b, b)", True, False),
    "BatchNorm": (IMAGE, "y = BatchNormalization (t, b, b, b, one)", False, False),
    "AvgPool": (IMAGE, "y = AveragePool <kernel_shape = [2,2]> (t)", True, False),
    "AdaptiveAvgPool": (IMAGE, "y = GlobalAveragePool (t)", True, False),
    "MaxPool": (IMAGE, "y = MaxPool <kernel_shape = [2,2]> (t)", False, False),
    "mean": (ROWS, "y = ReduceMean <axes = [1]> (t)", True, False),
    "softmax": (ROWS, "y = Softmax <axis = -1> (t)", True, False),
    "interpolate, linear": (IMAGE, "y = Resize <mode = \"linear\"> (t, , scales)", True, False),
    "interpolate, nearest": (IMAGE, "y = Resize <mode = \"nearest\"> (t, , scales)", False, False),
    "matmul": (ROWS, "u = Relu (x)  y = MatMul (t, u)", True, False),
    "matmul with itself": ("float[4,4]", "y = MatMul (t, t)", False, False),
    "add": (IMAGE, "u = Relu (x)  y = Add (t, u)", False, False),
    "add of a constant": (IMAGE, "y = Add (t, six)", False, False),
    "sub": (IMAGE, "u = Relu (x)  y = Sub (t, u)", False, False),
    "mul": (IMAGE, "u = Relu (x)  y = Mul (t, u)", False, False),
    "div": (IMAGE, "y = Div (t, six)", False, False),
    "flatten": (IMAGE, "y = Flatten (t)", False, False),
    "transpose": (IMAGE, "y = Transpose (t)", False, False),
    "cat": (IMAGE, "u = Relu (x)  y = Concat <axis = 1> (t, u)", False, False),
}  # fmt: skip
"""Type of the input, the nodes, whether the ancestor quantizes the input, whether it quantizes a weight."""


@pytest.mark.parametrize("name", TABLE)
def test_table_of_operators(name: str, tmp_path: Path) -> None:
    """`t` is the output of an op that stays float and starts no chain."""
    kind, nodes, activation, weight = TABLE[name]
    numbers = {"zero": 0.0, "six": 6.0}
    values: dict[str, Any] = {"w4": (4, 4, 1, 1), "w2": (4, 4), "b": 4, "one": np.ones(4, np.float32)}
    values |= {key: np.asarray(value, np.float32) for key, value in numbers.items()}
    values |= {"scales": np.asarray([1, 1, 2, 2], np.float32)}
    rank = {"Linear": 2, "matmul with itself": 2, "flatten": 2, "mean": 3}.get(name, kind.count(",") + 1)
    text = f"agraph ({kind} x) => (float[{','.join('abcd'[:rank])}] y) {{ t = Cos (x)  {nodes} }}"
    words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    made = model(text, **{key: value for key, value in values.items() if key in words})
    found = placed(exported(made, virtual(fuse=False), tmp_path))
    assert ("t" in found.activations) == activation
    assert bool(found.weights) == weight
    assert "y" not in found.activations, "graph outputs stay float"


@pytest.mark.parametrize(("nodes", "tensors"), [
    ("y = Add (t, u)", {"t", "u"}),
    ("y = Add (t, t)", set()),
    ("y = Add (t, six)", set()),
    ("y = MatMul (t, u)", {"t", "u"}),
])  # fmt: skip
def test_two_inputs_are_quantized_when_they_are_two(nodes: str, tensors: set[str], tmp_path: Path) -> None:
    """x + x and x + constant stay float, also with QADD on."""
    text = f"agraph (float[4,4] x) => (float[4,4] y, float[4,4] v) {{ t = Cos (x)  u = Sin (x)  v = Neg (u)  {nodes} }}"
    made = model(text, six=np.full(1, 6, np.float32)) if "six" in nodes else model(text)
    assert placed(exported(made, virtual(qadd=True), tmp_path)).activations.keys() == tensors
