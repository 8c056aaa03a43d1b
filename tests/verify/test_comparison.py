"""Thresholds: one sentence for each that is not kept, with output, figure, threshold and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.errors import RecipeError
from sbonnx.present.text.tables import comparison_facts
from sbonnx.report.codes import Reason
from sbonnx.report.comparison import LARGER, Comparison
from sbonnx.report.figures import FloatOp, Kernels, LevelDifference, OutputDifference
from sbonnx.verify import Limits

GOOD = OutputDifference("y", 0.1, 0.5, 18.0, 0.98, None, 0, 10, 0, False, False, -1.0, 1.0)
OTHER = replace(GOOD, name="z", sqnr_db=40.0, cosine=0.9999)
KERNELS = Kernels(
    planned=4, folded=1, float_weighted=(FloatOp("conv", "Conv", Reason("input-float", "its bias is float")),)
)
MEASURED = Comparison(
    (GOOD, OTHER), 4, 1000, 300, 1.0, 1.5, 1.0, 1.2, 9, latency_ratio=1.2, kernels=KERNELS
)  # 0.3 of the size, 1.2 of the time, 2 of 3 ops in integers


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"min_sqnr_db": 20.0}, "output 'y' has 18.00 dB SQNR, VERIFY.MIN_SQNR_DB asks for 20"),
        ({"min_sqnr_db": {"y": 18.5}}, "output 'y' has 18.00 dB SQNR, VERIFY.MIN_SQNR_DB asks for 18.5"),
        ({"min_cosine": 0.99}, "output 'y' has the cosine 0.980000 to the float one, VERIFY.MIN_COSINE asks for 0.99"),
        ({"max_size_ratio": 0.26}, "the file has 0.300 of the float size, VERIFY.MAX_SIZE_RATIO allows 0.26"),
        ({"max_latency_ratio": 1.0}, "a run takes 1.200 of the float time, VERIFY.MAX_LATENCY_RATIO allows 1"),
        (
            {"min_integer": 1.0},
            "2 of 3 planned ops (1 more folded away) run in integers, a share of 0.667, VERIFY.MIN_INTEGER asks for 1 "
            "(first: 'conv': its bias is float)",
        ),
    ],
)
def test_a_breach_is_one_sentence(limits: dict[str, Any], problem: str) -> None:
    assert Limits(**limits).problems(MEASURED) == (problem,)


def test_what_is_kept_says_nothing() -> None:
    limits = Limits({"y": 18.0, "z": 40.0}, {"z": 0.999}, 0.3, 1.2, 0.66)
    assert limits.problems(MEASURED) == ()
    assert Limits().problems(MEASURED) == ()


def test_a_file_that_is_larger_says_so_and_which_weights_are_float() -> None:
    assert not MEASURED.larger and not MEASURED.notes()
    kernels = Kernels(weights_in_integers=0.05, float_weights={"LSTM": 90, "GRU": 5})
    grown = replace(MEASURED, bytes_float=100_000, bytes_quantized=140_500, kernels=kernels)
    assert grown.to_dict()["larger"] is True
    assert grown.notes() == (
        f"{LARGER}: 1.41 times its size, 40,500 bytes more; 95% of the weights are read by float operators (LSTM, GRU)",
    )
    assert not replace(grown, bytes_float=140_000).notes()  # names and scales
    assert replace(grown, kernels=None).notes() == (f"{LARGER}: 1.41 times its size, 40,500 bytes more",)


def test_a_lost_output_is_named_once() -> None:
    lost = replace(MEASURED, outputs=(replace(GOOD, sqnr_db=1.0), OTHER))
    assert lost.problems() == ("output 'y' is lost in error: SQNR 1.0 dB, lost below 3 dB",)
    assert Limits(min_sqnr_db=20.0).problems(lost) == ()


def test_flags_are_named_as_flags() -> None:
    (problem,) = Limits(min_sqnr_db=20.0, names={"MIN_SQNR_DB": "--min-sqnr"}).problems(MEASURED)
    assert problem.endswith("--min-sqnr asks for 20")


def test_outputs_that_are_not_there() -> None:
    with pytest.raises(RecipeError, match=r"VERIFY.MIN_SQNR_DB: the model has no output 'q': there are 'y', 'z'"):
        Limits(min_sqnr_db={"q": 20.0}).check_outputs(["y", "z"])
    Limits(min_sqnr_db={"y": 20.0}, min_cosine=0.9).check_outputs(["y", "z"])
    (problem,) = Limits(min_cosine={"text": 0.9}).problems(MEASURED)
    assert problem == "output 'text' is not numeric; VERIFY.MIN_COSINE asks for 0.9"


def levels(off: float, all_: float, apart: float) -> Comparison:
    rows = (LevelDifference("off", "y", off, float("inf"), 0.0, 4), LevelDifference("all", "y", all_, apart, 1.0, 4))
    return replace(MEASURED, levels=rows)


def test_levels() -> None:
    """Apart by more than quantization explains, or by more than was asked."""
    assert Limits().problems(levels(30.0, 29.9, 45.0)) == ()
    assert Limits().problems(levels(8.6, 8.5, 8.6)) == (), "a coarse model whose roundings fall otherwise"
    (problem,) = Limits().problems(levels(30.0, 6.0, 6.1))
    assert "'all' it is 6.1 dB from that at 'off' (6.0 dB from float, at 'off' 30.0 dB)" in problem
    assert "VNNI" not in problem
    (problem,) = Limits().problems(replace(levels(30.0, 6.0, 6.1), dot_product=False))
    assert "8-bit products of this CPU saturate" in problem
    (problem,) = Limits(levels_db=50.0).problems(levels(30.0, 29.9, 45.0))
    assert "VERIFY.LEVELS_DB asks for 50" in problem


@given(st.floats(-200, 200), st.floats(-200, 200))
def test_the_threshold_is_the_border(figure: float, least: float) -> None:
    one = replace(MEASURED, outputs=(replace(GOOD, sqnr_db=figure),))
    problems = Limits(min_sqnr_db=least).problems(one)
    assert bool(problems) is (figure < least and not one.collapsed())


def test_operators_in_float_are_counted_by_type() -> None:
    """What has no integer kernel has no refusal each: the facts name the most frequent ones, the figures all."""
    counts = {"Add": 50, "Softmax": 12, "LayerNormalization": 25, "Erf": 12, "Tanh": 1, "Sub": 1, "Div": 1, "Sqrt": 1}
    kernels = Kernels(planned=4, floating=counts)
    figures = replace(MEASURED, kernels=kernels)
    expected = "Add 50, Softmax 12, LayerNormalization 25, Erf 12, Tanh 1, Sub 1, 2 more types"
    assert comparison_facts(figures)["float kernels"] == expected
    assert figures.to_dict()["kernels"]["floating"] == counts
    assert comparison_facts(replace(MEASURED, kernels=Kernels(planned=4)))["float kernels"] == "none"
    assert comparison_facts(replace(MEASURED, kernels=None))["float kernels"] is None
