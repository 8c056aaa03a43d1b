"""Where the ancestor puts no Q/DQ: between a producer and the activation after it, in the exported file.

Its net rule is ours: an activation straight after conv, linear, batch norm or add has no pair between. Its table holds
fewer activations and fewer producers than its rule says; ours holds them all, so these chains are free of pairs here
and were not there, on purpose, because a runtime that fuses an activation fuses any of them the same way:

* Conv, BatchNorm or Add, then GELU; Add, then anything but ReLU and ReLU6; anything, then Tanh;
* ConvTranspose or a product of two activations, then an activation;
* x + constant, then ReLU: in ONNX that is how the bias of a linear layer on three axes is written.

Everything else that the ancestor quantizes is quantized: activations after LayerNorm, Mul, Concat and pools, and the
inputs of pools, LayerNorms and softmaxes. Attention is the exception: its scale, mask and softmax stay float.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.ancestor.qconfigs import Placed, exported, placed, virtual
from tests.support.models import batchnorm, model

FIRST = {
    "Conv": ("float[2,4,6,6]", "t = Conv (x, w4)"),
    "ConvTranspose": ("float[2,4,6,6]", "t = ConvTranspose (x, w4)"),
    "Gemm": ("float[3,4]", "t = Gemm <transB = 1> (x, w2, b)"),
    "MatMul": ("float[2,4,4]", "t = MatMul (x, w2)"),
    "MatMul+bias": ("float[2,4,4]", "p = MatMul (x, w2)  t = Add (b, p)"),
    "BatchNormalization": ("float[2,4,6,6]", "t = BatchNormalization (x, bn_gamma, bn_beta, bn_mean, bn_var)"),
    "Add": ("float[2,4,6,6]", "a = Conv (x, w4)  t = Add (a, x)"),
    "Add of a constant": ("float[2,4,6,6]", "n = Cos (x)  t = Add (n, b4)"),
    "product of activations": ("float[2,4,4]", "s = MatMul (x, w2)  t = MatMul (s, x)"),
    "LayerNormalization": ("float[2,4,4]", "t = LayerNormalization <axis = -1> (x, gamma, beta)"),
    "unrolled LayerNorm": (
        "float[2,4,4]",
        """m = ReduceMean <axes = [-1]> (x)  d = Sub (x, m)  q = Pow (d, two)  v = ReduceMean <axes = [-1]> (q)
           e = Add (v, tiny)  r = Sqrt (e)  n = Div (d, r)  g = Mul (n, gamma)  t = Add (g, beta)""",
    ),
    "Mul": ("float[2,4,6,6]", "a = Conv (x, w4)  t = Mul (a, x)"),
    "Concat": ("float[2,4,6,6]", "a = Conv (x, w4)  t = Concat <axis = 1> (a, x)"),
    "GlobalAveragePool": ("float[2,4,6,6]", "t = GlobalAveragePool (x)"),
    "graph input": ("float[2,4,6,6]", "t = Identity (x)"),
}
"""Type of `x`, and the nodes that make `t` of it."""

SECOND = {
    "BatchNormalization": "y = BatchNormalization (t, bn_gamma, bn_beta, bn_mean, bn_var)",
    "ReLU": "y = Relu (t)",
    "ReLU6": "y = Clip (t, zero, six)",
    "Sigmoid": "y = Sigmoid (t)",
    "LeakyReLU": "y = LeakyRelu <alpha = 0.1> (t)",
    "Mish": "sp = Softplus (t)  th = Tanh (sp)  y = Mul (t, th)",
    "SiLU": "sg = Sigmoid (t)  y = Mul (t, sg)",
    "Hardsigmoid": "y = HardSigmoid <alpha = 0.16666667, beta = 0.5> (t)",
    "GELU": "di = Div (t, root)  er = Erf (di)  on = Add (er, one)  pr = Mul (t, on)  y = Mul (pr, half)",
    "Tanh": "y = Tanh (t)",
    "Hardswish": "y = HardSwish (t)",
}
"""The nodes that make `y` of `t`."""

ACTIVATIONS = [name for name in SECOND if name != "BatchNormalization"]
COVERED = ("ReLU", "ReLU6", "Sigmoid", "LeakyReLU", "Mish", "SiLU", "Hardsigmoid")
LINEAR = ("Gemm", "MatMul", "MatMul+bias")

ANCESTOR = [
    *(("Conv", second) for second in ("BatchNormalization", *COVERED)),
    *((first, second) for first in LINEAR for second in ("BatchNormalization", *COVERED, "GELU")),
    *(("BatchNormalization", second) for second in COVERED),
    *(("Add", second) for second in ("ReLU", "ReLU6")),
]
"""The rows of the ancestor's table."""

WIDER = [
    *((first, "GELU") for first in ("Conv", "BatchNormalization", "Add")),
    *(("Add", second) for second in COVERED if second not in ("ReLU", "ReLU6")),
    *((first, second) for first in ("Conv", *LINEAR, "BatchNormalization", "Add") for second in ("Tanh", "Hardswish")),
    *((first, second) for first in ("ConvTranspose", "product of activations") for second in ACTIVATIONS),
    *(("Add of a constant", second) for second in ACTIVATIONS),
]
"""Free of a pair here; quantized by the ancestor (or not known to it)."""

QUANTIZED = [
    (first, second)
    for first in ("LayerNormalization", "unrolled LayerNorm", "Mul", "Concat", "GlobalAveragePool", "graph input")
    for second in ACTIVATIONS
]
"""A pair stands between, as in the ancestor."""


def chain(first: str, second: str) -> onnx.ModelProto:
    """x, the first op, `t`, the second op, `y`, and a linear layer that reads it; nodes are named by what they make."""
    kind, nodes = FIRST[first]
    rank = kind.count(",") + 1
    channels = 8 if first == "Concat" else 4
    tail = "z = Conv (y, last)" if rank == 4 else "z = MatMul (y, last)"
    last = (4, channels, 1, 1) if rank == 4 else (4, 4)
    text = f"agraph ({kind} x) => (float[{','.join('abcd'[:rank])}] z) {{ {nodes}  {SECOND[second]}  {tail} }}"
    numbers: dict[str, Any] = {
        "zero": 0.0, "one": 1.0, "two": 2.0, "six": 6.0, "half": 0.5, "root": np.sqrt(2), "tiny": 1e-5,
    }  # fmt: skip
    scalars = {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    weights: dict[str, Any] = {"w4": (4, 4, 1, 1), "w2": (4, 4), "b": 4, "b4": (1, 4, 1, 1), "last": last}
    weights |= {"gamma": 4, "beta": 4, **batchnorm("bn", channels), **scalars}
    words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    made = model(text, **{name: value for name, value in weights.items() if name in words})
    for node in made.graph.node:
        node.name = f"make_{node.output[0]}"
    return made


def pairs(first: str, second: str, folder: Path, *, qadd: bool = False) -> Placed:
    return placed(exported(chain(first, second), virtual(fuse=False, qadd=qadd), folder))


@pytest.mark.sampled
@pytest.mark.parametrize("qadd", [False, True], ids=["", "qadd"])
@pytest.mark.parametrize(("first", "second"), ANCESTOR)
def test_no_pair_in_the_chains_of_the_ancestor(first: str, second: str, qadd: bool, tmp_path: Path) -> None:
    found = pairs(first, second, tmp_path, qadd=qadd)
    assert "t" not in found.activations
    assert found.activations["y"] == ["make_z"], "what follows the activation is quantized"
    assert (first == "Add" and qadd) == ("make_t" in found.activations.get("a", []))


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("first", "second"), WIDER)
def test_no_pair_in_more_chains_than_the_ancestor_knew(first: str, second: str, tmp_path: Path) -> None:
    found = pairs(first, second, tmp_path)
    assert "t" not in found.activations
    assert found.activations["y"] == ["make_z"]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("first", "second"), QUANTIZED)
def test_other_activations_have_a_pair_on_their_input(first: str, second: str, tmp_path: Path) -> None:
    found = pairs(first, second, tmp_path)
    tensor = "x" if first == "graph input" else "t"
    inside = {"Mish": ["make_sp", "make_y"], "SiLU": ["make_sg", "make_y"], "GELU": ["make_di", "make_pr"]}
    assert set(found.activations[tensor]) >= set(inside.get(second, ["make_y"]))
    assert not found.activations.keys() & {"sp", "th", "sg", "di", "er", "on", "pr"}, "inside the activation"


@pytest.mark.parametrize(("first", "second"), [pair for pair in ANCESTOR if pair[1] != "BatchNormalization"])
def test_the_pairs_come_back_when_unnecessary_ones_are_wanted(first: str, second: str, tmp_path: Path) -> None:
    text = virtual(fuse=False).replace("SCHEDULE:\n", "SCHEDULE:\n  DISABLE_UNNECESSARY_QUANT: False\n")
    assert "t" in placed(exported(chain(first, second), text, tmp_path)).activations
