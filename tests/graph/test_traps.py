"""Integer divisions and the like at which onnxruntime's kernels end the process: refused before one runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.errors import ModelError
from sbonnx.graph import load, to_proto
from sbonnx.patterns import SIMPLIFY, apply
from tests.patterns.checks import assert_same_outputs, random_feeds
from tests.patterns.simplified import ops
from tests.support.models import model

INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


def divided(op: str, kind: Any, a: list[int], b: list[int]) -> Any:
    text = f"g (float[2] x) => (float[2] y) {{ d = {op} (a, b) f = Cast <to = 1> (d) y = Add(x, f) }}"
    return model(text, a=np.array(a, kind), b=np.array(b, kind))


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("op", ["Div", "Mod", "Mod <fmod = 1>"])
def test_division_of_integers(op: str, kind: Any) -> None:
    """By zero always; the lowest by -1 from 32 bits on, where it is computed at all."""
    with pytest.raises(ModelError, match=r"divides integers by a constant that holds 0 \('b'\): onnxruntime would end"):
        load(divided(op, kind, [1, 2], [1, 0]))
    low = np.iinfo(kind).min
    if kind.kind == "i":
        made = divided(op, kind, [low, 2], [-1, 1])
        if kind.itemsize >= 4 and "fmod" not in op:
            with pytest.raises(ModelError, match=f"divides {low} by -1, which overflows"):
                load(made)
        else:
            load(made)
    fits = divided(op, kind, [low, 6], [1, np.iinfo(kind).max])
    graph = load(fits)
    apply(graph, SIMPLIFY)
    assert ops(graph) == ["Add"]
    assert_same_outputs(fits, to_proto(graph), random_feeds(fits))


def test_a_division_of_what_is_folded_first() -> None:
    text = """g (float[1] x) => (float[1] y) { b = Sub(one, two) a = Sub(low, zero) d = Div(a, b)
        f = Cast <to = 1> (d) y = Add(x, f) }"""
    parts: dict[str, Any] = {"one": np.array([1]), "two": np.array([2]), "zero": np.array([0])}
    graph = load(model(text, low=np.array([np.iinfo(np.int64).min]), **parts))
    with pytest.raises(ModelError, match=r"node 'Div_0' \(Div\) divides -9223372036854775808 by -1"):
        apply(graph, SIMPLIFY)
    graph = load(model(text, low=np.array([8]), **parts))
    apply(graph, SIMPLIFY)
    assert ops(graph) == ["Add"]


@pytest.mark.parametrize(
    ("text", "weights", "says"),
    [
        ("y = ConvTranspose <group = 0> (x, w)", {"w": (2, 2, 1, 1)}, "attribute 'group' is 0; it must be 1 or more"),
        ("y = DepthToSpace <blocksize = 0> (x)", {}, "attribute 'blocksize' is 0"),
        ("y = GatherND <batch_dims = -1> (x, i)", {"i": np.zeros((1, 1), np.int64)}, "'batch_dims' is -1"),
        ("s = SplitToSequence (x, k) y = ConcatFromSequence <axis = 0> (s)", {"k": np.array(0)}, "parts of 0 elements"),
        ("n = InstanceNormalization (e, s, s) y = Add(n, x)", {"e": (1, 2, 0), "s": 2}, "normalizes over no elements"),
    ],
)
def test_other_traps(text: str, weights: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(model(f"g (float[1,2,2,2] x) => (float[a,b,c,d] y) {{ {text} }}", **weights))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_a_range_without_a_length(place: int, value: float) -> None:
    bounds: dict[str, Any] = {name: np.array(float(count + 1), np.float32) for count, name in enumerate("abc")}
    bounds["abc"[place]] = np.array(value, np.float32)
    text = "g (float[1] x) => (float[M] y) { r = Range(a, b, c) y = Add(x, r) }"
    graph = load(model(text, **bounds))
    applied = apply(graph, SIMPLIFY)
    assert all("not known" in refusal.why for refusal in applied.refusals)
    assert applied.refusals or ops(graph) == ["Add"]
