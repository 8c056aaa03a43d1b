"""Replaces a Clip with only a lower bound of 0 by Relu, which runtimes and plans support better."""

from __future__ import annotations

import numpy as np
import onnx

from ..edit import Edit
from ..engine import Pattern
from ..match import Match
from ..sample import sample
from ..tree import Const, Maybe, Op, Var
from .linear import is_float


def _is_zero(values: np.ndarray) -> bool:
    return values.size == 1 and is_float(values) and float(values.reshape(())) == 0.0


def _is_no_bound(values: np.ndarray) -> bool:
    return values.size == 1 and float(values.reshape(())) == np.inf


def _rewrite(match: Match, edit: Edit) -> None:
    edit.replace(match.root.outputs[0], edit.node("Relu", [match["x"]], name=match.root.name))


def _clip(high: float) -> onnx.ModelProto:
    return sample(
        "g (float[2,3] x) => (float[2,3] y) { y = Clip (x, low, high) }",
        low=np.array(0.0, np.float32),
        high=np.array(high, np.float32),
    )


CLIP_TO_RELU = Pattern(
    name="clip_to_relu",
    tree=Op("Clip", Var("x"), Const("low", _is_zero), Maybe(Const("high", _is_no_bound))),
    rewrite=_rewrite,
    source="Relu is max(x, 0)",
    example=lambda: _clip(np.inf),
    counter_example=lambda: _clip(6.0),
)
