"""Writes Resize and Pad without `axes`, for all axes of their input, and AveragePool without dilations of 1.

onnxruntime moves operators between quantized convolutions to a layout with the channels last. For a Resize or a Pad
with `axes` it does not permute them, and for an AveragePool in integers it has no attribute `dilations`: the quantized
model then fails at its default optimization level, although the float model runs.

Supported: Resize with scales or sizes and Pad with pads, constant or computed, if the rank of the input is known;
AveragePool whose dilations are all 1.
Refused: Resize with a region of interest that is not constant; Resize whose sizes keep_aspect_ratio_policy rounds up or
computes, with antialias, exclude_outside, or coordinates that depend on sizes; Pad with computed axes.
Equations: the other axes have scale 1, the size of the input, pads 0, and the region from 0 to 1. With
keep_aspect_ratio_policy, sizes = floor(scale * in + 1/2), of an input whose edges are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from sbonnx.graph import Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Maybe, Op, Var
from .infer import integers, sizes

INT64 = np.int64


def _on_all_axes(given: Tensor, rest: Tensor, order: list[int], name: str, edit: Edit) -> Tensor:
    """Gather elements of `given` followed by `rest`, both vectors, in `order`; a constant if both are."""
    first, second = constant(given), constant(rest)
    if first is not None and second is not None:
        return edit.constant(given.name, np.concatenate([first, second.astype(first.dtype)])[order])
    joined = edit.node("Concat", [given, rest], {"axis": 0}, name=f"{name}_joined")
    return edit.node(
        "Gather", [joined, edit.constant(f"{name}_order", np.array(order, INT64))], name=f"{name}_all_axes"
    )


def _resized_axes(match: Match) -> list[int]:
    """Return the axes of the Resize, counted from the front; empty if there are none or the rank is unknown."""
    axes, dims = match.attribute("resize", "axes"), rank(match["x"])
    if not axes or dims is None or any(not -dims <= axis < dims for axis in axes):
        return []
    return [axis % dims for axis in axes]


def _has_policy(match: Match) -> bool:
    return "sizes" in match and match.attribute("resize", "keep_aspect_ratio_policy") != "stretch"


def _policy_scale(match: Match, axes: list[int]) -> np.float32 | None:
    """Return the scale of `axes` under keep_aspect_ratio_policy if it is known and alone gives the sizes, else None.

    Source: ONNX Resize: scale = min (not_larger) or max (not_smaller) of sizes / in; sizes = round(scale * in). With
    scales as input, the sizes are floor(scale * in).
    """
    wanted, own = constant(match["sizes"]), sizes(match["x"])
    own_sizes = [size for axis in axes if own is not None and (size := own[axis])]
    if wanted is None or len(own_sizes) < len(axes):
        return None
    pick = min if match.attribute("resize", "keep_aspect_ratio_policy") == "not_larger" else max
    scale = pick(np.float32(want) / np.float32(size) for want, size in zip(integers(wanted), own_sizes, strict=True))
    scaled = [scale * np.float32(size) for size in own_sizes]
    return None if any(size - np.floor(size) >= 0.5 for size in scaled) else np.float32(scale)


def _why_not_policy(match: Match) -> Reason | None:
    """Return why sizes that keep_aspect_ratio_policy rounds up, or that are computed, cannot be written as scales."""
    mode = match.attribute("resize", "coordinate_transformation_mode")
    if mode not in ("half_pixel", "asymmetric"):
        return Reason(
            "sizes-are-rounded", f"its coordinates ({mode}) depend on sizes that keep_aspect_ratio_policy rounds"
        )
    for name in ("antialias", "exclude_outside"):
        if match.attribute("resize", name):
            return Reason(
                "sizes-are-rounded",
                f"{name} is by the edge of its input, and keep_aspect_ratio_policy rounds its sizes",
            )
    return None


def _resize_by_policy(match: Match, axes: list[int], attrs: dict[str, Any], edit: Edit) -> Tensor:
    """Return the Resize by a computed scale, of an input with repeated edges, cut to the rounded sizes.

    The edge is repeated ceil(1 / scale) times, so that floor(scale * in) has at least the rounded size. Coordinates
    beyond the edge read the edge in a Resize.
    """
    stem, x, dims = match["resize"].name, match["x"], rank(match["x"])
    assert dims is not None

    def node(op: str, *inputs: Tensor | None, **attributes: Any) -> Tensor:
        return edit.node(op, list(inputs), attributes, name=f"{stem}_{op}")

    def vector(values: Sequence[float], kind: Any = INT64) -> Tensor:
        return edit.constant(f"{stem}_constant", np.array(values, kind))

    single = int(onnx.TensorProto.FLOAT)
    pick = "ReduceMin" if attrs.pop("keep_aspect_ratio_policy") == "not_larger" else "ReduceMax"
    own = node("Cast", node("Gather", node("Shape", x), vector(axes)), to=single)
    scale = node(pick, node("Div", node("Cast", match["sizes"], to=single), own), keepdims=1)
    ends = node("Cast", node("Floor", node("Add", node("Mul", scale, own), vector([0.5], np.float32))), to=7)
    more = node("Cast", node("Ceil", node("Reciprocal", scale)), to=7)
    rest, resized = range(dims), [axes.index(axis) if axis in axes else -1 for axis in range(dims)]
    none, unit = vector([0]), vector([1.0], np.float32)
    pads = node("Concat", *([none] * dims), *(more if resized[axis] >= 0 else none for axis in rest), axis=0)
    scales = node("Concat", *(scale if resized[axis] >= 0 else unit for axis in rest), axis=0)
    resize = node("Resize", node("Pad", x, pads, mode="edge"), None, scales, **attrs)
    return node("Slice", resize, vector([0] * len(axes)), ends, vector(axes))


def _check_resize(match: Match) -> Reason | None:
    axes = _resized_axes(match)
    if len(set(axes)) < len(axes):
        return Reason("axes-repeat", f"its axes {match.attribute('resize', 'axes')} repeat one")
    if "roi" in match and match.attribute("resize", "coordinate_transformation_mode") == "tf_crop_and_resize":
        region = constant(match["roi"])
        if region is None or region.size != 2 * len(axes):
            return Reason("region-not-constant", f"'{match['roi'].name}' is no constant region of {len(axes)} axes")
    given = constant(match["scales"] if "sizes" not in match else match["sizes"])
    if given is not None and given.size != len(axes):
        return Reason("numbers-do-not-fit-axes", f"it has {given.size} numbers for {len(axes)} axes")
    return _why_not_policy(match) if _has_policy(match) and _policy_scale(match, axes) is None else None


def _resize_all(match: Match, edit: Edit) -> None:
    node, x, axes, dims = match["resize"], match["x"], _resized_axes(match), rank(match["x"])
    assert dims is not None
    scale = _policy_scale(match, axes) if _has_policy(match) else None
    if scale is None and _has_policy(match):
        attrs = {key: value for key, value in node.attrs.items() if key != "axes"}
        edit.replace(node.outputs[0], _resize_by_policy(match, axes, attrs, edit))
        return
    order = [axes.index(axis) if axis in axes else len(axes) + axis for axis in range(dims)]
    kept = ("axes", "keep_aspect_ratio_policy")
    attrs = {key: value for key, value in node.attrs.items() if key not in kept}
    roi, scales, lengths = match["roi"], match["scales"], match["sizes"]
    if roi is not None and match.attribute("resize", "coordinate_transformation_mode") == "tf_crop_and_resize":
        begins, ends = match.array("roi").reshape(2, -1)
        region = [np.concatenate([ends_of, np.full(dims, rest, ends_of.dtype)])[order] for ends_of, rest in
                  ((begins, 0), (ends, 1))]  # fmt: skip
        roi = edit.constant(roi.name, np.concatenate(region), instead=roi)
    ones = np.ones(dims, np.float32)
    if lengths is None:
        scales = _on_all_axes(scales, edit.constant(f"{node.name}_ones", ones), order, node.name, edit)
    elif scale is not None:
        ones[axes] = scale
        scales, lengths = edit.constant(f"{node.name}_scales", ones), None
    else:
        own = sizes(x)
        if own is not None and all(own[axis] is not None for axis in range(dims) if axis not in axes):
            rest: Tensor = edit.constant(f"{node.name}_own", np.array([size or 0 for size in own], INT64))
        else:
            rest = edit.node("Shape", [x], name=f"{node.name}_own")
        lengths = _on_all_axes(lengths, rest, order, node.name, edit)
    edit.replace(node.outputs[0], edit.node("Resize", [x, roi, scales, lengths], attrs, name=node.name))


def _resize_example() -> onnx.ModelProto:
    return sample(
        """g (float[N,2,4,4] x) => (float[N,2,6,8] y) {
            a = Relu(x)
            b = Resize <mode="linear", axes=[-1,2]> (a, , , s)
            y = Sigmoid(b)
        }""",
        opset=19,
        s=np.array([8, 6], INT64),
    )


def _resize_counter_example() -> onnx.ModelProto:
    return sample(
        """g (float[1,2,4,6] x) => (float[1,2,H,W] y) {
            a = Relu(x)
            b = Resize <mode="linear", axes=[2,3], antialias=1, keep_aspect_ratio_policy="not_larger"> (a, , , s)
            y = Sigmoid(b)
        }""",
        opset=19,
        s=np.array([5, 9], INT64),
    )


RESIZE_ALL_AXES = Pattern(
    "resize_all_axes",
    tree=Op("Resize", Var("x"), Maybe(Var("roi")), Maybe(Var("scales")), Maybe(Var("sizes")), name="resize"),
    where=lambda match: bool(_resized_axes(match)) and ("sizes" in match or "scales" in match),
    check=_check_resize,
    rewrite=_resize_all,
    source="an axis that is not resized has scale 1",
    example=_resize_example,
    counter_example=_resize_counter_example,
)


def _padded_axes(match: Match) -> list[int] | None:
    """Return the axes of the Pad, counted from the front, or None if they are computed or do not fit the rank."""
    axes, dims = constant(match["axes"]), rank(match["x"])
    if axes is None or dims is None or any(not -dims <= axis < dims for axis in integers(axes)):
        return None
    return [axis % dims for axis in integers(axes)]


def _check_pad(match: Match) -> Reason | None:
    axes = _padded_axes(match)
    if axes is None:
        return Reason(
            "not-constant", f"'{match['axes'].name}' is not a constant, or the rank of '{match['x'].name}' is unknown"
        )
    pads = constant(match["pads"])
    if len(set(axes)) < len(axes) or (pads is not None and pads.size != 2 * len(axes)):
        return Reason("pads-do-not-fit-axes", f"its pads do not fit its axes {axes}")
    return None


def _pad_all(match: Match, edit: Edit) -> None:
    node, axes, dims = match["pad"], _padded_axes(match), rank(match["x"])
    assert axes is not None and dims is not None
    count = len(axes)
    order = [half * count + axes.index(axis) if axis in axes else 2 * count for half in (0, 1) for axis in range(dims)]
    zero = edit.constant(f"{node.name}_none", np.zeros(1, INT64))
    pads = _on_all_axes(match["pads"], zero, order, node.name, edit)
    edit.replace(node.outputs[0], edit.node("Pad", [match["x"], pads, match["value"]], node.attrs, name=node.name))


PAD_ALL_AXES = Pattern(
    "pad_all_axes",
    tree=Op("Pad", Var("x"), Var("pads"), Maybe(Var("value")), Var("axes"), name="pad"),
    check=_check_pad,
    rewrite=_pad_all,
    source="an axis that is not padded has pads of 0",
    example=lambda: sample(
        """g (float[N,2,4,5] x, int64[2] pads) => (float[A,B,C,D] y) {
            a = Relu(x)
            b = Pad <mode="edge"> (a, some, , axes)
            c = Pad (b, pads, , one)
            y = Sigmoid(c)
        }""",
        opset=19,
        some=np.array([1, 2, 0, -1], INT64),
        axes=np.array([-1, 2], INT64),
        one=np.array([1], INT64),
    ),
    counter_example=lambda: sample(
        "g (float[N,2,4] x, int64[1] axes) => (float[A,B,C] y) { a = Relu(x) b = Pad(a, some, , axes) y = Sigmoid(b) }",
        opset=19,
        some=np.array([1, 2], INT64),
    ),
)


def _plain_pool(match: Match, edit: Edit) -> None:
    node = match["pool"]
    attrs = {key: value for key, value in node.attrs.items() if key != "dilations"}
    edit.replace(node.outputs[0], edit.node("AveragePool", [match["x"]], attrs, name=node.name))


def _pool(dilation: int) -> onnx.ModelProto:
    return sample(
        f"""g (float[N,2,6,6] x) => (float[N,2,H,W] y) {{
            a = AveragePool <kernel_shape=[2,2], dilations=[1,{dilation}]> (x)
            y = Sigmoid(a)
        }}""",
        opset=19,
    )


POOL_WITHOUT_DILATIONS = Pattern(
    "pool_without_dilations",
    tree=Op("AveragePool", Var("x"), name="pool"),
    where=lambda match: "dilations" in match["pool"].attrs and set(match["pool"].attrs["dilations"]) == {1},
    rewrite=_plain_pool,
    source="dilations of 1 are the default",
    example=lambda: _pool(1),
    counter_example=lambda: _pool(2),
)

ALL_AXES = (RESIZE_ALL_AXES, PAD_ALL_AXES, POOL_WITHOUT_DILATIONS)
