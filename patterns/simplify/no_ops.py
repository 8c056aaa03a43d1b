"""Removes no-op nodes, whose output equals their input: Cast, Reshape, Transpose, Slice, Pad, Identity, Dropout, ...

Supported: Cast to the type of the input, Reshape and Expand to its shape, Transpose by the identity, Slice of
everything, Pad by 0, Concat of one tensor, Flatten of a matrix, Tile by 1, Resize by 1, Identity, Dropout at inference.
Refused: an output that no other node can provide under its name; Dropout whose training_mode is computed or on.
Equations: y = x in type, shape and value.
"""

from __future__ import annotations

import numpy as np
import onnx

from sbonnx.graph.query import constant, dtype, rank
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Const, Maybe, Op, Or, Var, X
from .infer import integers, sizes, static

INT64 = np.int64

ALL = 2**31 - 1
"""A Slice with this end or a larger one has no upper limit: exporters write INT32_MAX or INT64_MAX."""


def drop(match: Match, edit: Edit) -> None:
    """Replace the root's first output by "x"."""
    edit.replace(match.root.outputs[0], match["x"])


def why_not_drop(match: Match) -> Reason | None:
    """Return why "x" cannot replace the root's first output, or None."""
    return match.why_not_replace(match.root.outputs[0], match["x"])


def _casts_nothing(match: Match) -> bool:
    own = dtype(match["x"])
    return own is not None and onnx.helper.np_dtype_to_tensor_dtype(own) == match.attribute("cast", "to")


CAST = Pattern(
    "cast_to_own_type",
    tree=Op("Cast", Var("x"), name="cast"),
    where=_casts_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="a Cast to the type that the input has changes no value",
    example=lambda: sample("g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Cast<to=1>(a) y = Sigmoid(b) }"),
    counter_example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Cast<to=10>(a) c = Cast<to=1>(b) y = Sigmoid(c) }"
    ),
)


def reshapes_nothing(own: tuple[int | None, ...], target: list[int], allowzero: bool) -> bool:
    """Return whether a Reshape of a tensor with dimensions `own` (None: unknown) to `target` is a no-op.

    All entries except at most one must equal the known dimension; the last one then follows from the number of
    elements. This requires a nonzero divisor, so -1 is not accepted next to a dimension of size 0.
    """
    if len(own) != len(target):
        return False
    same = [(want == 0 and not allowzero) or (want >= 0 and want == dim) for dim, want in zip(own, target, strict=True)]
    if all(same):
        return True
    return target.count(-1) == 1 and all(fits for fits, want in zip(same, target, strict=True) if want != -1)


def _reshapes_nothing(match: Match) -> bool:
    x = match["x"]
    if match["shape"] is None:  # Reshape(x, Shape(x))
        return match.attribute("measure", "start") in (0, None) and match.attribute("measure", "end") is None
    value = constant(match["shape"])
    own = sizes(x)
    if value is None or own is None:
        return False
    return reshapes_nothing(own, integers(value), bool(match.attribute("reshape", "allowzero")))


RESHAPE = Pattern(
    "reshape_to_own_shape",
    tree=Op(
        "Reshape", Var("x"), Or(Op("Shape", Var("x"), name="measure", shared=True), Const("shape")), name="reshape"
    ),
    where=_reshapes_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="a Reshape to the shape that the input has moves nothing",
    example=lambda: sample(
        "g (float[N,3,4] x) => (float[N,3,4] y) { a = Relu(x) b = Reshape(a, s) y = Sigmoid(b) }",
        s=np.array([-1, 3, 4], INT64),
    ),
    counter_example=lambda: sample(
        "g (float[N,3,4] x) => (float[N,4,3] y) { a = Relu(x) b = Reshape(a, s) y = Sigmoid(b) }",
        s=np.array([0, 4, 3], INT64),
    ),
)


def _transposes_nothing(match: Match) -> bool:
    perm, own = match.attribute("transpose", "perm"), rank(match["x"])
    return list(perm) == list(range(len(perm))) if perm else own is not None and own < 2


TRANSPOSE = Pattern(
    "transpose_to_own_order",
    tree=Op("Transpose", Var("x"), name="transpose"),
    where=_transposes_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="the identity permutation",
    example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Transpose<perm=[0,1]>(a) y = Sigmoid(b) }"
    ),
    counter_example=lambda: sample(
        "g (float[2,2] x) => (float[2,2] y) { a = Relu(x) b = Transpose(a) y = Sigmoid(b) }"
    ),
)


def _slices_nothing(match: Match) -> bool:
    own = sizes(match["x"])
    starts, ends = integers(match.array("starts")), integers(match.array("ends"))
    axes = list(range(len(starts))) if match["axes"] is None else integers(match.array("axes"))
    steps = [1] * len(starts) if match["steps"] is None else integers(match.array("steps"))
    if len({len(starts), len(ends), len(axes), len(steps)}) > 1:
        return False  # invalid model, reported elsewhere
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = None if own is None or not -len(own) <= axis < len(own) else own[axis]
        if start != 0 or step != 1 or not (end >= ALL or (size is not None and end >= size)):
            return False
    return True


SLICE = Pattern(
    "slice_of_everything",
    tree=Op("Slice", Var("x"), Const("starts"), Const("ends"), Maybe(Const("axes")), Maybe(Const("steps"))),
    where=_slices_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="from 0 to the end (or past it) in steps of 1",
    example=lambda: sample(
        "g (float[N,3] x) => (float[N,3] y) { a = Relu(x) b = Slice(a, start, end) y = Sigmoid(b) }",
        start=np.array([0, 0], INT64),
        end=np.array([2**63 - 1, 3], INT64),
    ),
    counter_example=lambda: sample(
        "g (float[N,3] x) => (float[M,3] y) { a = Relu(x) b = Slice(a, start, end) y = Sigmoid(b) }",
        start=np.array([0], INT64),
        end=np.array([3], INT64),
    ),
)

PAD = Pattern(
    "pad_by_nothing",
    tree=Op("Pad", Var("x"), Const("pads", where=lambda pads: not pads.any()), Maybe(X), Maybe(X)),
    check=why_not_drop,
    rewrite=drop,
    source="all pads are 0",
    example=lambda: sample(
        "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Pad(a, pads) y = Sigmoid(b) }", pads=np.zeros(4, INT64)
    ),
    counter_example=lambda: sample(
        "g (float[2,3] x) => (float[2,4] y) { a = Relu(x) b = Pad(a, pads) y = Sigmoid(b) }",
        pads=np.array([0, 0, 0, 1], INT64),
    ),
)

CONCAT = Pattern(
    "concat_of_one",
    tree=Op("Concat", Var("x")),
    check=why_not_drop,
    rewrite=drop,
    source="nothing to concatenate with",
    example=lambda: sample("g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Concat<axis=1>(a) y = Sigmoid(b) }"),
    counter_example=lambda: sample(
        "g (float[2,3] x) => (float[2,6] y) { a = Relu(x) b = Concat<axis=1>(a, a) y = Sigmoid(b) }"
    ),
)


def _expands_nothing(match: Match) -> bool:
    own, target = sizes(match["x"]), integers(match.array("shape"))
    if not target:
        return True
    if own is None or len(target) > len(own):
        return False
    return all(want == 1 or want == dim for dim, want in zip(reversed(own), reversed(target), strict=False))


EXPAND = Pattern(
    "expand_to_own_shape",
    tree=Op("Expand", Var("x"), Const("shape")),
    where=_expands_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="every dimension asked for is 1 or the one that is there",
    example=lambda: sample(
        "g (float[N,3] x) => (float[N,3] y) { a = Relu(x) b = Expand(a, s) y = Sigmoid(b) }", s=np.array([1, 3], INT64)
    ),
    counter_example=lambda: sample(
        "g (float[N,3] x) => (float[1,N,3] y) { a = Relu(x) b = Expand(a, s) y = Sigmoid(b) }",
        s=np.array([1, 1, 3], INT64),
    ),
)


def _flattens_nothing(match: Match) -> bool:
    return rank(match["x"]) == 2 and match.attribute("flatten", "axis") in (1, -1)


FLATTEN = Pattern(
    "flatten_of_matrix",
    tree=Op("Flatten", Var("x"), name="flatten"),
    where=_flattens_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="a tensor of rank 2 is flat already",
    example=lambda: sample("g (float[N,3] x) => (float[N,3] y) { a = Relu(x) b = Flatten(a) y = Sigmoid(b) }"),
    counter_example=lambda: sample(
        "g (float[N,3,2] x) => (float[N,6] y) { a = Relu(x) b = Flatten(a) y = Sigmoid(b) }"
    ),
)


def _tiles_nothing(repeats: np.ndarray) -> bool:
    return bool((repeats == 1).all())


TILE = Pattern(
    "tile_once",
    tree=Op("Tile", Var("x"), Const("repeats", where=_tiles_nothing)),
    check=why_not_drop,
    rewrite=drop,
    source="every axis is repeated once",
    example=lambda: sample(
        "g (float[N,3] x) => (float[N,3] y) { a = Relu(x) b = Tile(a, r) y = Sigmoid(b) }", r=np.array([1, 1], INT64)
    ),
    counter_example=lambda: sample(
        "g (float[N,3] x) => (float[N,6] y) { a = Relu(x) b = Tile(a, r) y = Sigmoid(b) }", r=np.array([1, 2], INT64)
    ),
)


def _resizes_nothing(match: Match) -> bool:
    if match.attribute("resize", "coordinate_transformation_mode") == "tf_crop_and_resize":
        return False
    if match["sizes"] is not None and match.attribute("resize", "axes") is None:
        own, wanted = static(match["x"]), constant(match["sizes"])
        return own is not None and wanted is not None and list(own) == integers(wanted)
    scales = None if match["scales"] is None else constant(match["scales"])
    return match["sizes"] is None and scales is not None and bool(scales.size) and bool((scales == 1).all())


RESIZE = Pattern(
    "resize_to_own_size",
    tree=Op("Resize", Var("x"), Maybe(X), Maybe(Var("scales")), Maybe(Var("sizes")), name="resize"),
    where=_resizes_nothing,
    check=why_not_drop,
    rewrite=drop,
    source="scale 1 samples every point at its own place",
    example=lambda: sample(
        'g (float[1,2,4,4] x) => (float[1,2,4,4] y) { a = Relu(x) b = Resize<mode="linear">(a, , s) y = Sigmoid(b) }',
        s=np.ones(4, np.float32),
    ),
    counter_example=lambda: sample(
        'g (float[1,2,4,4] x) => (float[1,2,8,8] y) { a = Relu(x) b = Resize<mode="linear">(a, , s) y = Sigmoid(b) }',
        s=np.array([1, 1, 2, 2], np.float32),
    ),
)


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


def _why_not_drop_dropout(match: Match) -> Reason | None:
    mode = match["mode"]
    if mode is not None:
        value = constant(mode)
        if value is None:
            return Reason("training-mode-computed", f"training_mode '{mode.name}' is computed")
        if value.any():
            return Reason("training-mode-on", "training_mode is on: it drops values at random")
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

NO_OPS = (IDENTITY, DROPOUT, CAST, RESHAPE, TRANSPOSE, SLICE, PAD, CONCAT, EXPAND, FLATTEN, TILE, RESIZE)
