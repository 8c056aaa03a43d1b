"""Fuses a Pad into the padding of a following convolution or pool, if both pad with the same value.

Supported: constant Pad of spatial axes before Conv (with 0), AveragePool (with 0, counted) and MaxPool (with -inf, or
with a number up to 0 after values that are never negative).
Refused: other modes, negative pads, pads of batch or channels, computed pads, auto_pad SAME, windows that could hold
nothing but padding, ceil_mode.
Equations: conv(pad(x, p), q) = conv(x, p + q); the mean over a window counts its zeros; max(x, v) = x for v <= min(x).
"""

from __future__ import annotations

import numpy as np
import onnx

from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.ops import MOVES_DATA, PICKS_MAX, POOLS
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Maybe, Op, Var, X

NOT_NEGATIVE = frozenset({"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Sqrt", "Exp", "Softplus", "ReduceL2"})
"""Ops whose output is never negative."""

PAD = Op("Pad", Var("x"), Var("pads"), Maybe(Var("value")), Maybe(Var("axes")), name="pad")


def _added(match: Match) -> tuple[int, ...] | Reason:
    """Return the padding of the Pad on spatial axes (all begins, then all ends), or why it cannot be fused."""
    pads = constant(match["pads"])
    if pads is None:
        return Reason("not-constant", f"'{match['pads'].name}' is not a constant")
    if match.attribute("pad", "mode") != "constant":
        return Reason("pads-mode", f"it pads in mode '{match.attribute('pad', 'mode')}'")
    dims = rank(match["x"])
    if dims is None and "axes" not in match:
        dims = pads.size // 2
    if dims is None or dims < 3:
        return Reason("rank-not-known", f"the rank of '{match['x'].name}' is not known")
    axes = constant(match["axes"]) if "axes" in match else np.arange(dims)
    if axes is None:
        return Reason("not-constant", f"'{match['axes'].name}' is not a constant")
    if pads.size != 2 * axes.size:
        return Reason("pads-do-not-fit-axes", f"it has {pads.size} pads for {axes.size} axes")
    if any(not -dims <= axis < dims for axis in axes.reshape(-1)):
        return Reason("axes-do-not-fit-rank", f"its axes {axes.tolist()} do not fit rank {dims}")
    both = np.zeros((2, dims), np.int64)
    both[:, np.asarray(axes, np.int64)] = pads.reshape(2, -1)
    if both[:, :2].any():
        return Reason("pads-batch-or-channels", "it pads the batch or the channels")
    if (both < 0).any():
        return Reason("negative-pads", "it has negative pads")
    return tuple(int(pad) for pad in both[:, 2:].reshape(-1))


def _value(match: Match) -> float | None:
    """Return the constant pad value; None if it is computed at run time or not a scalar."""
    if "value" not in match:
        return 0.0
    value = constant(match["value"])
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def _existing(match: Match, spatial: int) -> tuple[int, ...] | Reason:
    """Return the pads of the convolution or pool, or why they cannot be increased."""
    mode = match.attribute("window", "auto_pad")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return Reason(
            "auto-pad", f"auto_pad of '{match['window'].name}' is {mode}: its own padding follows from the padded size"
        )
    pads = match["window"].attrs.get("pads") if mode == "NOTSET" else None
    if pads and len(pads) != 2 * spatial:
        return Reason("pads-do-not-fit-axes", f"'{match['window'].name}' has {len(pads)} pads for {spatial} axes")
    return tuple(pads) if pads else (0,) * (2 * spatial)


def _sum(match: Match) -> tuple[int, ...] | Reason:
    """Return the summed pads of both nodes, or why they cannot be fused."""
    added = _added(match)
    if isinstance(added, str):
        return added
    existing = _existing(match, len(added) // 2)
    if isinstance(existing, str):
        return existing
    return tuple(outer + inner for outer, inner in zip(added, existing, strict=True))


def _check_conv(match: Match) -> Reason | None:
    pads = _sum(match)
    if isinstance(pads, str):
        return pads
    if _value(match) != 0.0:
        return Reason("pads-with-another-value", "it pads with another value than 0")
    return None


def _check_pool(match: Match) -> Reason | None:
    pads = _sum(match)
    if isinstance(pads, str):
        return pads
    node: Node = match["window"]
    kernel = node.attrs["kernel_shape"]
    if 2 * len(kernel) != len(pads):
        return Reason(
            "kernel-does-not-fit-pads",
            f"'{node.name}' has a kernel of {len(kernel)} axes, and the Pad is for {len(pads) // 2}",
        )
    if match.attribute("window", "ceil_mode"):
        return Reason("ceil-mode", "ceil_mode: windows past the end count differently")
    if any(dilation != 1 for dilation in node.attrs.get("dilations") or ()):
        return Reason("dilated-pool", "the pool is dilated: a window could hold nothing but padding")
    if any(pad >= size for pad, size in zip(pads, (*kernel, *kernel), strict=True)):
        return Reason("pads-not-smaller-than-kernel", f"pads {list(pads)} are not smaller than kernel {list(kernel)}")
    return _why_not_average(match) if node.op == "AveragePool" else _why_not_max(match)


def _why_not_average(match: Match) -> Reason | None:
    if _value(match) != 0.0:
        return Reason("pads-with-another-value", "it pads with another value than 0")
    counted = bool(match.attribute("window", "count_include_pad"))
    if not counted and any(match["window"].attrs.get("pads") or ()):
        return Reason("padding-not-counted", f"'{match['window'].name}' has padding that it does not count")
    return None


def _why_not_max(match: Match) -> Reason | None:
    value = _value(match)
    if value is None:
        return Reason("pad-value-not-known", "its pad value is not one known number")
    if value == -np.inf or (value <= 0.0 and _never_negative(match["x"])):
        return None
    return Reason(
        "pads-below-maximum",
        f"it pads with {value:g}, a maximum ignores its padding, and '{match['x'].name}' may be smaller",
    )


def _never_negative(tensor: Tensor) -> bool:
    while tensor.inputs:
        node: Node = tensor.inputs[0]
        if node.op in NOT_NEGATIVE:
            return True
        if node.op == "Clip":
            low = constant(node.inputs[1]) if len(node.inputs) > 1 else None
            return low is not None and bool((low >= 0).all())
        if node.op not in MOVES_DATA | PICKS_MAX | POOLS:
            return False
        tensor = node.inputs[0]
    return False


def _rewrite(match: Match, edit: Edit) -> None:
    node: Node = match["window"]
    pads = _sum(match)
    assert not isinstance(pads, str)
    attrs = {key: value for key, value in node.attrs.items() if key != "auto_pad"}
    attrs["pads"] = list(pads)
    if node.op == "AveragePool":
        attrs["count_include_pad"] = 1
    edit.replace(node.outputs[0], edit.node(node.op, [match["x"], *node.inputs[1:]], attrs, name=node.name))


def _conv(mode: str) -> onnx.ModelProto:
    return sample(
        f"""g (float[1,3,6,6] x) => (float[1,4,h,v] y) {{
            p = Pad <mode = "{mode}"> (x, pads)
            y = Conv <kernel_shape = [3,3], pads = [1,0,0,0]> (p, w)
        }}""",
        pads=np.array([0, 0, 1, 2, 0, 0, 0, 1], np.int64),
        w=(4, 3, 3, 3),
    )


def _average(own_pad: int) -> onnx.ModelProto:
    pads = [own_pad] * 4
    return sample(
        f"""g (float[1,3,6,6] x) => (float[1,3,h,v] y) {{
            p = Pad (x, pads)
            y = AveragePool <kernel_shape = [3,3], pads = {pads}> (p)
        }}""",
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    )


def _max(rectifier: str) -> onnx.ModelProto:
    return sample(
        f"""g (float[1,3,6,6] x) => (float[1,3,h,v] y) {{
            r = {rectifier} (x)
            p = Pad (r, pads)
            y = MaxPool <kernel_shape = [3,3]> (p)
        }}""",
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    )


FUSE_PAD_CONV = Pattern(
    name="fuse_pad_conv",
    tree=Op("Conv", PAD, X, Maybe(X), name="window"),
    check=_check_conv,
    rewrite=_rewrite,
    source="Conv pads with zeros itself",
    example=lambda: _conv("constant"),
    counter_example=lambda: _conv("reflect"),
)

FUSE_PAD_AVERAGE_POOL = Pattern(
    name="fuse_pad_average_pool",
    tree=Op("AveragePool", PAD, name="window"),
    check=_check_pool,
    rewrite=_rewrite,
    source="an average that counts the zeros of a Pad is one with count_include_pad",
    example=lambda: _average(0),
    counter_example=lambda: _average(1),
)

FUSE_PAD_MAX_POOL = Pattern(
    name="fuse_pad_max_pool",
    tree=Op("MaxPool", PAD, name="window"),
    check=_check_pool,
    rewrite=_rewrite,
    source="MaxPool ignores its padding: so does a maximum with what is never larger than the values beside it",
    example=lambda: _max("Relu"),
    counter_example=lambda: _max("Tanh"),
)
