"""EQUALIZE: changes of the float graph before planning that keep its function."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import BeforeValidator, WithJsonSchema

from sbonnx.recipe import values
from sbonnx.recipe.problem import Wrong
from sbonnx.recipe.sections.keys import Section, key

ClipName = Literal["keep", "channels", "relu"]
CLIPS = ("keep", "channels", "relu")


def _smooth(value: object) -> float | bool:
    if isinstance(value, bool):
        return value
    found = values.number(value)
    if found is not None and 0 <= found <= 1:
        return found
    try:
        return values.flag(value)
    except Wrong as problem:
        raise Wrong("must be true, false or a number from 0 to 1", value=value) from problem


def _share(value: object) -> float:
    found = values.number(value)
    if found is None or not 0 <= found < 1:
        raise Wrong("must be a share of the channels, from 0 to below 1", value=value)
    return found


Smooth = Annotated[
    float | bool,
    BeforeValidator(_smooth),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": 1}]}),
]
Share = Annotated[
    float, BeforeValidator(_share), WithJsonSchema({"type": "number", "minimum": 0, "exclusiveMaximum": 1})
]
Clip = Annotated[ClipName, BeforeValidator(values.choice(CLIPS)), values.schema(CLIPS)]


@final
class Equalize(Section):
    """EQUALIZE: cross-layer equalization, SmoothQuant, AWQ, channel splitting."""

    cross_layer: values.Flag = key(
        False,
        "equal ranges of channels in neighbouring layers, by scales that cancel (Nagel 2019); for per-tensor weights",
        "true, false",
        "new",
    )
    absorb_bias: values.Flag = key(
        False,
        "what lies always above 0 before a Relu moved into the next layers' biases",
        "true, false; wants data",
        "new",
    )
    smooth_quant: Smooth = key(
        False,
        "ranges of channels moved from inputs of layers into their weights (Xiao 2023); the number is the strength",
        "false, true (0.5 for matrix products, 0.3 for convolutions), 0 to 1; wants data",
        "new",
    )
    split_channels: Share = key(
        0.0, "outlier channels cut in two, at most this share of a layer's (Zhao 2019)", "0 to below 1", "new"
    )
    awq: values.Flag = key(
        False,
        "inputs of matrix products scaled by what they meet, so that weights that matter are rounded less (Lin 2023); "
        "with weight_only by a Mul where nothing before takes the scale up",
        "true, false; wants data",
        "new",
    )
    clip: Clip = key(
        "channels",
        "a Clip at a number between two layers, such as ReLU6: it keeps their scales as they are, is given a bound a "
        "channel (Relu and Min), or becomes a Relu, which changes what the model computes",
        "keep, channels, relu",
        "new",
    )
