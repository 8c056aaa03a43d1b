"""Every value that a stage needs was set by a stage before it, in every tuple of stages."""

from __future__ import annotations

from typing import get_args

import pytest

from sbonnx import pipeline
from sbonnx.assets import digits
from sbonnx.llm.adapt import ADAPT
from sbonnx.llm.api import DECODER, EVALUATE
from sbonnx.llm.decoder_stages import read_texts
from sbonnx.options import RunOptions
from sbonnx.quant_model.pipeline_steps import CALC_QPARAMS
from sbonnx.stages.contract import Stage, Value, stage
from sbonnx.stages.prepare import load, plan
from sbonnx.stages.state import PipelineState, Request, read_recipe
from sbonnx.stages.write import check_targets, insert

PREPARED: frozenset[Value] = frozenset({"graph", "plan"})
SOLVED: frozenset[Value] = PREPARED | {"data", "solution"}

TUPLES: dict[str, tuple[frozenset[Value], tuple[Stage, ...]]] = {
    "quantize": (frozenset(), pipeline.STAGES),
    "prune": (frozenset(), (check_targets, *pipeline.PRUNE)),
    "measure for pruning": (frozenset(), pipeline.MEASURE_PRUNING),
    "simplify": (frozenset(), pipeline.SIMPLIFY),
    "prepare": (frozenset(), pipeline.PREPARE),
    "solve": (frozenset(), pipeline.SOLVE),
    "calc_qparams": (PREPARED | {"data", "ranges"}, CALC_QPARAMS),
    "quantized graph": (SOLVED, pipeline.INSERT),
    "write": (SOLVED, pipeline.WRITE),
    "texts of a decoder": (frozenset(), (read_texts,)),
    "decoder": (frozenset({"texts", "folder"}), DECODER),
    "adapters of a decoder": (frozenset({"texts", "folder"}), ADAPT),
    "evaluation of a decoder": (frozenset(), EVALUATE),
}
"""Tuples of stages, with the values that their callers set."""


@pytest.mark.parametrize("name", TUPLES)
def test_needs_are_set_by_earlier_stages(name: str) -> None:
    present, stages = TUPLES[name]
    for one in stages:
        assert one.needs <= present, f"{one} of {name} needs {set(one.needs - present)}"
        present |= one.sets


@pytest.mark.parametrize("name", TUPLES)
def test_values_have_names_of_the_state(name: str) -> None:
    for one in TUPLES[name][1]:
        assert one.needs | one.sets <= set(get_args(Value))


def begun() -> PipelineState:
    recipe, rules = read_recipe(None, None, {})
    return PipelineState.of(Request(digits().model, recipe, rules))


def test_a_stage_in_the_wrong_place_computes_nothing() -> None:
    with pytest.raises(RuntimeError, match="stage plan needs graph, which no stage before it has set"):
        plan(begun(), RunOptions())
    loaded = load(begun(), RunOptions())
    with pytest.raises(RuntimeError, match="stage insert needs plan, solution"):
        insert(loaded, RunOptions())


def test_a_stage_sets_what_it_declares() -> None:
    """By the run of a whole pipeline: what a stage adds to the state is in its `sets`."""
    state, options = begun(), RunOptions()
    for one in pipeline.PREPARE:
        before, state = state.present, one(state, options)
        assert state.present - before <= one.sets
    assert state.present == {"graph", "plan"}


def test_a_stage_keeps_its_name_and_documentation() -> None:
    @stage(needs=("graph",))
    def look(state: PipelineState, options: RunOptions) -> PipelineState:
        """Look."""
        return state

    assert (look.__name__, look.__doc__, repr(look)) == ("look", "Look.", "<stage look>")
