"""A wing of a third party in one stage: the GELUs of a quantized network become tables of 256 values.

Supported: 0.5 (x (1 + erf(x / sqrt(2)))), as torch exports it.
Refused: a GELU whose input no sample reaches.
Equations: y = T[round((min(max(x, lo), hi) - lo) / step)], T[i] = GELU(lo + i step), step = (hi - lo) / 255, where
lo and hi are the least and the largest x in the calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import onnx

from sbonnx.options import RunOptions
from sbonnx.patterns import Const, Edit, Match, Pattern, Var, apply
from sbonnx.patterns.blocks.decompositions import ERF, any_order, near
from sbonnx.patterns.example_model import sample
from sbonnx.planning.magnitudes import Magnitudes
from sbonnx.precision.tensor_magnitudes import magnitudes
from sbonnx.report import Note, Reason
from sbonnx.stages.contract import stage
from sbonnx.stages.state import PipelineState

NAME: Final = "gelu_table"
ENTRIES: Final = 256
EXAMPLE: Final = """g (float[N,4] x) => (float[N,4] y) {
    r = Constant<value_float=1.4142135>()
    one = Constant<value_float=1.0>()
    half = Constant<value_float=0.5>()
    a = Div(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)
}"""


@stage(needs=("graph", "data", "quantized"), sets=("quantized",))
def tabulate_gelus(state: PipelineState, options: RunOptions) -> PipelineState:
    """Replace the GELUs of the quantized graph by tables over the ranges that their inputs have in the data."""
    if state.data is None:
        return state
    ranges = magnitudes(state.prepared.graph, state.data.fit)
    applied = apply(state.quantized, (_pattern(ranges),))
    if applied.fired:
        text = f"tables of {ENTRIES} values in place of {len(applied.fired)} GELU, over their ranges in the data"
        state.quantized.info.notes.append(Note("gelu-tables", text))
    prepared = replace(state.prepared, applied=(*state.prepared.applied, *applied.fired))
    return replace(state, prepared=prepared, unwritten=(*state.unwritten, *applied.refusals))


def _pattern(ranges: Mapping[str, Magnitudes]) -> Pattern:
    """Return the rewrite of a GELU for measured ranges of its input, by tensor."""

    def check(match: Match) -> Reason | None:
        measured = ranges.get(match["x"].name)
        if measured is None or not measured.lo < measured.hi:
            return Reason("gelu-without-range", "no sample of the data reaches it")
        return None

    def rewrite(match: Match, edit: Edit) -> None:
        x, name, bounds = match["x"], match.root.name, ranges[match["x"].name]
        grid = np.linspace(bounds.lo, bounds.hi, ENTRIES)
        lo, hi, step = (
            edit.constant(f"{name}_{part}", np.array(value, np.float32))
            for part, value in (("lo", grid[0]), ("hi", grid[-1]), ("step", grid[1] - grid[0]))
        )
        gelu = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in grid]
        table = edit.constant(f"{name}_table", np.array(gelu, np.float32))
        inside = edit.node("Clip", [x, lo, hi], name=f"{name}_clip")
        above = edit.node("Sub", [inside, lo], name=f"{name}_sub")
        steps = edit.node("Round", [edit.node("Div", [above, step], name=f"{name}_div")], name=f"{name}_round")
        index = edit.node("Cast", [steps], {"to": onnx.TensorProto.INT32}, name=f"{name}_cast")
        edit.replace(match.root.outputs[0], edit.node("Gather", [table, index], {"axis": 0}, name=name))

    return Pattern(
        NAME,
        tree=any_order("Mul", any_order("Mul", Var("x"), ERF), Const("half", near(0.5))),
        rewrite=rewrite,
        source="interpolation of order 0 on 256 points: the error is at most step / 2 times the largest slope, 1.13",
        example=lambda: sample(EXAMPLE),
        counter_example=lambda: sample(EXAMPLE.replace("Erf", "Tanh")),
        check=check,
    )
