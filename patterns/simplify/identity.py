"""Removes Identity, and Dropout at inference."""

from __future__ import annotations

import numpy as np
import onnx

from sbonnx.graph.query import constant

from ..engine import Pattern
from ..match import Match
from ..sample import sample
from ..tree import Maybe, Op, Var, X
from .drop import drop, why_not_drop


def _identity_example() -> onnx.ModelProto:
    return sample("g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Identity(a) y = Sigmoid(b) }")


def _identity_counter_example() -> onnx.ModelProto:
    return sample("g (float[2,3] x) => (float[2,3] y) { y = Identity(x) }")


IDENTITY = Pattern(
    "identity",
    tree=Op("Identity", Var("x")),
    where=lambda match: why_not_drop(match) is None,
    rewrite=drop,
    source="Identity gives its input; one that the interface needs (from an input to an output) is not meant",
    example=_identity_example,
    counter_example=_identity_counter_example,
)


def _why_not_drop_dropout(match: Match) -> str | None:
    mode = match["mode"]
    if mode is not None:
        value = constant(mode)
        if value is None:
            return f"training_mode '{mode.name}' is computed"
        if value.any():
            return "training_mode is on: it drops values at random"
    return why_not_drop(match)


def _dropout_example() -> onnx.ModelProto:
    return sample("g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b, mask = Dropout(a) y = Sigmoid(b) }")


def _dropout_counter_example() -> onnx.ModelProto:
    return sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Dropout(a, ratio, mode) y = Sigmoid(b) }",
        ratio=np.array(0.0, np.float32),
        mode=np.array(True),
    )


DROPOUT = Pattern(
    "dropout",
    tree=Op("Dropout", Var("x"), Maybe(X), Maybe(Var("mode"))),
    check=_why_not_drop_dropout,
    rewrite=drop,
    source="Dropout without training_mode gives its input (and a mask: a mask that is used keeps the node)",
    example=_dropout_example,
    counter_example=_dropout_counter_example,
)
