"""What a recipe says of one tensor; patterns that match, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.recipe import TensorSettings, load
from sbonnx.recipe.torch_modules import NodeInfo

NODES = [
    NodeInfo(name, op)
    for name, op in (
        ("/conv1/Conv", "Conv"),
        ("/layer1/layer1.0/conv1/Conv", "Conv"),
        ("/head/Gemm", "Gemm"),
        ("n[0]", "Relu"),
    )
]
TENSORS = ["image", "/conv1/Conv_output_0", "logits", "123"]


def on(source: dict[str, Any], side: Any = "a", **use: Any) -> TensorSettings:
    return load(source).settings(side, **{"node": "/conv1/Conv", "op": "Conv", "tensor": "image"} | use)


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("/conv1/Conv", True),
        ("/conv1/*", True),
        ("node:/conv1/*", True),
        ("/CONV1/*", False),
        ("op:Conv", True),
        ("OP:Conv*", True),
        ("op:Gemm", False),
        ("re:.*conv[0-9]/.*", True),
        ("re:conv", False),
        ("tensor:image", True),
        ("tensor:im*", True),
        ("im*", False),
        ("tensor:logits", False),
    ],
)
def test_patterns(pattern: str, hit: bool) -> None:
    """The same language in EXCLUDE, INCLUDE and SPECIFIC."""
    assert on({"EXCLUDE": [pattern]}).enabled is not hit
    assert on({"INCLUDE": ["op:Nothing", pattern]}).enabled is hit
    assert on({"A": {"SPECIFIC": [{pattern: ["QUANTIZER.BIT", 4]}]}}).bits == (4 if hit else 8)
    assert on({"SKIP_TRACE_MODULES": pattern}).why == ("SKIP_TRACE_MODULES[0]" if hit else "A")


def test_a_bare_tensor_name_will_do_in_specific() -> None:
    assert on({"A": {"SPECIFIC": [{"image": ["QUANTIZER.BIT", 4]}]}}).bits == 4
    assert on({"EXCLUDE": ["image"]}).enabled


def test_names_with_brackets_match_themselves() -> None:
    assert not on({"EXCLUDE": ["n[0]"]}, node="n[0]", op="Relu").enabled


def test_first_match_wins_and_leaves_the_rest() -> None:
    source = {
        "W": {
            "QUANTIZER": {"TYPE": "adaround", "BIT": 4},
            "OBSERVER": {"TYPE": "mse"},
            "SPECIFIC": [
                {"/conv1/*": {"QUANTIZER": {"BIT": 8}}},
                {"*": ["QUANTIZER.BIT", 2, "QSCHEME", "per-tensor-affine"]},
            ],
        }
    }
    first = on(source, "w", tensor="w")
    assert (first.bits, first.quantizer, first.observer) == (8, "adaround", "mse")
    assert (first.symmetric, first.per_channel, first.why) == (True, True, "W.SPECIFIC[0]['/conv1/*']")
    second = on(source, "w", node="/head/Gemm", op="Gemm", tensor="w")
    assert (second.bits, second.symmetric, second.per_channel) == (2, False, False)


def test_specific_of_one_side_leaves_the_other() -> None:
    source = {"W": {"SPECIFIC": [{"*": ["QUANTIZER.BIT", 4]}]}}
    assert (on(source, "w").bits, on(source, "a").bits) == (4, 8)


def test_specific_wakes_a_side_that_is_float() -> None:
    source = {"A": {"QUANTIZER": {"DISABLE": True}, "SPECIFIC": [{"op:Conv": {"QUANTIZER.DISABLE": False}}]}}
    assert on(source).enabled and not on(source, op="Gemm", node="/head/Gemm").enabled


def test_first_and_last_bits() -> None:
    source = {"W": {"QUANTIZER": {"BIT": 4}}, "FIRST_BITS": 8, "LAST_BITS": {"W": 6}}
    first, last, middle = (on(source, "w", place=place) for place in ("first", "last", ""))
    assert [(s.bits, s.why) for s in (first, last, middle)] == [(8, "FIRST_BITS.W"), (6, "LAST_BITS.W"), (4, "W")]
    assert on(source, "a", place="last").why == "A"


def test_first_bits_are_weaker_than_specific_and_do_not_wake_a_float_side() -> None:
    source = {"A": {"QUANTIZER": {"BIT": 0}}, "W": {"SPECIFIC": [{"*": ["QUANTIZER.BIT", 3]}]}, "FIRST_BITS": 8}
    assert on(source, "w", place="first").bits == 3
    assert not on(source, "a", place="first").enabled
    assert not on({"FIRST_BITS": "w8a32"}, "a", place="first").enabled


def test_exclusion_wins_over_inclusion_and_specific() -> None:
    source = {"INCLUDE": ["op:Conv"], "EXCLUDE": ["x", "/conv1/*"], "A": {"SPECIFIC": [{"*": ["QUANTIZER.BIT", 4]}]}}
    assert on(source).why == "EXCLUDE[1]" and not on(source).enabled
    assert on(source, node="/head/Gemm", op="Gemm").why == "INCLUDE"


@pytest.mark.parametrize(
    ("observer", "arguments"),
    [
        ({"TYPE": "minmax"}, {}),
        ({"TYPE": "percentile", "PERCENTILE": {"ALPHA": 0.01}}, {"alpha": 0.01}),
        ({"TYPE": "aciq", "ACIQ": {"DISTRIBUTION": "LAPLACE"}}, {"distribution": "laplace"}),
        ({"TYPE": "moving_average"}, {"ema_ratio": 0.9}),
        ({"TYPE": "plugged_in"}, {}),
    ],
)
def test_observer_arguments(observer: dict[str, Any], arguments: dict[str, Any]) -> None:
    settings = on({"A": {"OBSERVER": observer | {"LAYOUT": "nlc"}}})
    assert settings.observer_arguments == arguments and settings.layout == "NLC"


def test_ranges_and_shared_scales() -> None:
    recipe = load({"RANGES": {"im*": [-1, 2], "*": [0, 1]}, "SHARED_SCALES": [["tensor:a*", "b"], "c"]})
    assert (recipe.fixed_range("image"), recipe.fixed_range("x")) == ((-1.0, 2.0), (0.0, 1.0))
    assert [recipe.shared_group(name) for name in ("a1", "b", "c", "d")] == [0, 0, 1, None]
    assert load({}).fixed_range("x") is None


MATCHED = [
    {"EXCLUDE": ["/conv1/*", "op:Gemm", "re:.*/layer1.*", "tensor:logits", "n[0]"]},
    {"A": {"SPECIFIC": [{"image": ["QUANTIZER.BIT", 4]}]}, "RANGES": {"lo*": [0, 1], "123": [0, 1]}},
    {"SKIP_TRACE_MODULES": ["/head/*"], "SHARED_SCALES": [["image", "tensor:logits"]], "INCLUDE": ["*"]},
]


@pytest.mark.parametrize("source", MATCHED)
def test_patterns_that_mean_something_pass(source: dict[str, Any]) -> None:
    load(source).for_model(NODES, TENSORS)
    with pytest.raises(RecipeError, match="matches no"):
        load(source).for_model([], [])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"EXCLUDE": ["/conv2/Conv"]},
            "'EXCLUDE[0]' in the recipe matches no node of the model, got '/conv2/Conv'. Nearest: '/conv1/Conv'",
        ),
        ({"INCLUDE": ["layer1_0_conv2"]}, "Nearest: '/layer1/layer1.0/conv1/Conv'"),
        ({"INCLUDE": ["op:conv"]}, "matches no operator type of the model, got 'op:conv'. Nearest: 'Conv'"),
        ({"INCLUDE": ["Conv"]}, "For an operator type write 'op:Conv'"),
        ({"EXCLUDE": ["/layer1/layer1.0"]}, "below it write '/layer1/layer1.0/*'"),
        ({"EXCLUDE": ["Conv_(19|20)"]}, "got 'Conv_(19|20)'. For a regular expression write 're:Conv_(19|20)'"),
        ({"EXCLUDE": ["logits"]}, "For tensors write 'tensor:logits'"),
        (
            {"SKIP_TRACE_MODULES": ["tensor:logit"]},
            "matches no tensor of the model, got 'tensor:logit'. Nearest: 'logits'",
        ),
        ({"RANGES": {"/conv1/Conv": [0, 1]}}, "'RANGES['/conv1/Conv']' in the recipe matches no tensor"),
        (
            {"W": {"SPECIFIC": [{}, {"gemm": ["QUANTIZER.BIT", 4]}]}},
            "'W.SPECIFIC[1]['gemm']' in the recipe matches no node",
        ),
        ({"SHARED_SCALES": [["image", "lgits"]]}, "'SHARED_SCALES[0][1]' in the recipe matches no tensor"),
        ({"EXCLUDE": ["a", "b", "op:Conv"]}, "2 problems: (1) 'EXCLUDE[0]' in the recipe matches no node"),
    ],
)
def test_patterns_that_mean_nothing(source: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(source).for_model(NODES, TENSORS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "rounding", "scale"),
    [
        ({"QUANTIZER": {"BIT": 8}}, "gptq", "observer"),
        ({"QUANTIZER": {"BIT": 8}, "ROUNDING": "nearest"}, "nearest", "observer"),
        ({"QUANTIZER": {"BIT": 8}, "ROUNDING": "gptq"}, "gptq", "observer"),
        ({"QUANTIZER": {"BIT": 4}}, "gptq", "search"),
        ({"QUANTIZER": {"BIT": 4}, "ROUNDING": "nearest"}, "nearest", "observer"),
        ({"QUANTIZER": {"BIT": 4}, "ROUNDING": {"SCALE": "observer"}}, "gptq", "observer"),
        ({"QUANTIZER": {"BIT": 4}, "ROUNDING": {"SCALE": "hqq"}}, "nearest", "hqq"),
        ({"QUANTIZER": {"BIT": 4}, "BLOCK_SIZE": 32}, "gptq", "observer"),
        ({"QUANTIZER": {"BIT": 4, "TYPE": "adaround"}}, "adaround", "search"),
    ],
)
def test_roundings_and_scales_by_width(weights: dict[str, Any], rounding: str, scale: str) -> None:
    found = on({"BACKEND": "virtual", "W": weights}, side="w")
    assert (found.rounding_name, found.scale_name) == (rounding, scale)
    assert found.rounds_by_inputs is (rounding != "nearest" or scale == "search")
