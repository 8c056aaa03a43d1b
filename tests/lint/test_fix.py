"""Each row of the table of mends removes what its rules find, brings nothing new, and does nothing the second time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from sbonnx import graph as graphs
from sbonnx.linting import Finding, lint
from sbonnx.linting.fix import FIXES, FixedModel
from sbonnx.linting.fix import fix as fix_for
from sbonnx.spec import Array
from tests.lint.seeded import BLOCKS, CASES, CONCAT, CONV, F32, I8, MORE, RESIDUAL, Case, pair
from tests.lint.test_ort import SEEDED
from tests.support.models import model as written
from tests.support.models import run
from tests.support.qdq_models import CHANNELS, Net

ISLANDS = Case(
    "xf = Cast<to = 1>(x)\nd_c = QuantizeLinear(xf, s, z)\nd = DequantizeLinear(d_c, s, z)\nh = Cast<to = 10>(d)\n"
    "y = Relu(h)",
    inputs="float16[2,16,8,8] x",
    outputs="float16[2,16,8,8] y",
    opset=19,
)
TOLD = ("T18", "O25")
"""In the table so that the report says why nothing was done."""

EXTRA: dict[str, Case] = {
    "T05": CONV.but(sv=np.array([1e-9, 0.0, *[0.1] * 14], F32)),
    "T19": ISLANDS,
}
"""Cases for rules that the seeded model breaks where no file can be mended without data, or another rule hides it."""


def claims(family: str) -> list[str]:
    return [rule for one in FIXES[family] for rule in one.rules if rule not in TOLD]


def findings(model: Any, target: str) -> list[Finding]:
    return lint(model, target, cpu="vnni")


def fix(model: Any, target: str) -> FixedModel:
    """Of a file for kernels that are exact, whatever those of this machine are."""
    return fix_for(model, target, cpu="vnni")


def rules(model: Any, target: str) -> set[str]:
    return {one.rule for one in findings(model, target)}


def model_for(rule: str) -> tuple[onnx.ModelProto, str]:
    if rule in SEEDED:
        return SEEDED[rule][0](), "onnxruntime"
    case = EXTRA.get(rule, CASES[rule][0])
    return case.model(), case.target


ALL = [*dict.fromkeys([*claims("tensorrt"), *claims("onnxruntime")])]


@pytest.mark.parametrize("rule", ALL)
def test_a_claimed_finding_is_gone_and_none_is_new(rule: str) -> None:
    model, target = model_for(rule)
    before = model.SerializeToString(deterministic=True)
    found = findings(model, target)
    assert rule in {one.rule for one in found}
    mended = fix(model, target)
    assert rule in {row.rule for row in mended.done}
    left = findings(mended.graph, target)
    assert rule not in {one.rule for one in left}
    new = {one.rule for one in left if one.severity != "info"} - {one.rule for one in found}
    assert not new, left
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.sampled(20)
@pytest.mark.parametrize("rule", [*CASES, *SEEDED])
def test_the_second_time_nothing_is_done(rule: str) -> None:
    """Of the table, and of every rule: what is mended stays so, and the file is valid."""
    model, target = (CASES[rule][0].model(), CASES[rule][0].target) if rule in CASES else model_for(rule)
    first = fix(model, target)
    written = graphs.to_proto(first.graph)
    again = fix(written, target)
    assert not again.done
    assert again.rows == tuple(row for row in first.rows if not row.done)
    assert graphs.to_proto(again.graph) == graphs.to_proto(graphs.load(written, opset=1))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("rule", [*CASES, *SEEDED])
def test_a_clean_model_stays_as_it_is(rule: str) -> None:
    if rule in CASES:
        model, target = CASES[rule][1].model(), CASES[rule][1].target
    else:
        model, target = SEEDED[rule][1](), "onnxruntime"
    mended = fix(model, target)
    assert not mended.done, mended.done
    assert graphs.digest(mended.graph) == graphs.digest(graphs.load(model, opset=1))


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, cases in MORE.items() for case in cases])
def test_other_ways_to_break_a_rule_bring_nothing_new_either(rule: str, case: Case) -> None:
    model = case.model()
    mended = fix(model, case.target)
    left = [one for one in findings(mended.graph, case.target) if one.severity != "info"]
    assert {one.rule for one in left} <= rules(model, case.target)
    unsaid = {one.rule for one in left} & set(claims("tensorrt")) - {row.rule for row in mended.rows if not row.done}
    assert not unsaid, "a claimed rule is broken still, and no row says why"


@pytest.mark.parametrize("rule", TOLD)
def test_findings_that_need_calibration_are_listed_and_not_fixed(rule: str) -> None:
    model, target = (CASES[rule][0].model(), "tensorrt@11") if rule in CASES else model_for(rule)
    mended = fix(model, target)
    assert not mended.done
    assert rule in {row.rule for row in mended.rows}


# --- values -----------------------------------------------------------------------------------------------------------


def values(model: Any, top: float = 0.0) -> Array:
    """The first output for one seeded input, nothing optimised: of any sign, or between 0 and `top`."""
    proto = graphs.to_proto(model) if isinstance(model, graphs.Graph) else model
    rng = np.random.default_rng(0)
    feeds = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or 2 for dim in kind.shape.dim]
        drawn = rng.uniform(0, top, shape) if top else 4 * rng.standard_normal(shape)
        feeds[value.name] = drawn.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return next(iter(run(proto, feeds).values()))


def exact_cases() -> dict[str, tuple[onnx.ModelProto, str]]:
    cases = {rule: model_for(rule) for rule in ("T09", "P05", "O11", "O12", "O13", "O15")}
    bias = CASES["T17"][0].but(b8=np.arange(-8, 8, dtype=np.int32), s=np.array(0.01, F32), z=np.array(0, np.int32))
    bias = bias.but(
        ("QuantizeLinear(x, s, z)", "QuantizeLinear(x, s2, z8)"), ("(d_c, s, z)", "(d_c, s2, z8)"), z8=I8(0)
    )
    cases["T17"] = (bias.model(), "tensorrt@11")
    cases["T03"] = (CONV.but(z=np.array(128, np.uint8)).model(), "tensorrt@11")
    (cast,) = MORE["T02"]
    cases["T02"] = (cast.model(), "tensorrt@11")
    blocks = BLOCKS.but(("(b4, sb)", "(b8, sb, zb)"), b8=np.arange(4096).reshape(128, 32) % 16, zb=np.full((2, 32), 8))
    small = blocks.but(b8=blocks.constants["b8"].astype("uint8"), zb=np.full((2, 32), 8, np.uint8))
    cases["T02 in blocks"] = (small.model(), "tensorrt@11")
    return cases


@pytest.mark.parametrize("name", exact_cases())
def test_what_is_called_exact_is_so_to_the_last_bit(name: str) -> None:
    model, target = exact_cases()[name]
    mended = fix(model, target)
    assert mended.done
    assert all(row.exact for row in mended.done), mended.done
    np.testing.assert_array_equal(values(mended.graph), values(model))


INEXACT = ("T02", "T04", "T19", "P01", "P02", "P03", "P04", "P05", "P06", "P07", "P08", "P09", "P10", "P11", "P12")


@pytest.mark.parametrize("rule", [*INEXACT, "O05", "O06", "O16", "O23", "O24"])
def test_what_is_not_exact_differs_by_rounding_alone(rule: str) -> None:
    model, target = model_for(rule)
    top = 0.5 if rule in ("P03", "P10") else 4.0  # an Exp follows there
    reference, mended = (values(one, top).astype(np.float64) for one in (model, fix(model, target).graph))
    noise = np.square(mended - reference).sum()
    assert 10 * np.log10(np.square(reference).sum() / max(noise, 1e-30)) > 10


def one_pair(zero: Array, scale: float) -> onnx.ModelProto:
    text = "d_c = QuantizeLinear(x, s, z)\ny = DequantizeLinear(d_c, s, z)"
    case = Case(f"{text}", inputs="float[64] x", outputs="float[64] y").but(s=np.array(scale, F32), z=zero)
    case = case.but(("y = Deq", "d = Deq"))
    return Case(case.body + "\ny = Neg(d)", case.inputs, case.outputs, constants=case.constants).model()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["uint8", "int8"]),
    st.integers(0, 255),
    st.floats(2**-10, 2**10, width=32),
    st.integers(0, 1 << 30),
)
def test_recentred_pairs_represent_all_that_the_old_ones_did(kind: str, code: int, scale: float, seed: int) -> None:
    """At most one bit is lost: within the old range values come back within half a quantum of the new scale."""
    zero = np.array(code, np.uint8).view(kind)
    low, high = (np.iinfo(kind).min - int(zero)) * scale, (np.iinfo(kind).max - int(zero)) * scale
    x = np.random.default_rng(seed).uniform(low, high, 64).astype(np.float32)
    mended = fix(one_pair(zero, scale), "tensorrt@11").graph
    proto = graphs.to_proto(mended)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    (quantize,) = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    step = float(held[quantize.input[1]])
    assert held[quantize.input[2]].dtype == np.int8
    assert not held[quantize.input[2]].any()
    assert step <= scale * 255 / 127 * (1 + 1e-6)
    back = -run(proto, {"x": x})["y"]
    np.testing.assert_allclose(back, x, atol=step * 0.5001 + 1e-6 * abs(high - low))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["uint8", "int8"]), st.booleans(), st.integers(0, 1 << 30))
def test_recentred_weights_keep_their_values_where_they_fit(kind: str, channels: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (16,) if channels else ()
    ends = np.iinfo(kind)
    codes = rng.integers(ends.min, ends.max + 1, (16, 16, 3, 3)).astype(kind)
    zero = rng.integers(ends.min, ends.max + 1, shape).astype(kind)
    scale = rng.uniform(0.001, 1, shape).astype(np.float32)
    case = CONV.but(w=codes, zv=zero, sv=scale)
    case = case if channels else case.but(("<axis = 0>", ""))
    graph = fix(case.model(), "tensorrt@11").graph
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graphs.to_proto(graph).graph.initializer}
    (node,) = [node for node in graphs.to_proto(graph).graph.node if node.output[0] == "wd"]
    new_codes, new_scale, new_zero = (held[name] for name in node.input)
    assert new_codes.dtype == np.int8
    assert not new_zero.any()
    along = (-1, 1, 1, 1) if channels else ()
    old = (codes.astype(int) - zero.astype(int).reshape(along)) * scale.astype(np.float64).reshape(along)
    new = new_codes.astype(int) * new_scale.astype(np.float64).reshape(along)
    assert np.all(np.abs(old - new) <= 0.5001 * new_scale.reshape(along) * (new_scale != scale).reshape(along) + 1e-6)
    fits = np.abs(codes.astype(int) - zero.astype(int).reshape(along)).reshape(16, -1).max(axis=1) <= 127
    assert np.all(np.broadcast_to(new_scale == scale, fits.shape)[fits]) or not channels


# --- what goes with a pair --------------------------------------------------------------------------------------------


def clamped(top: float | None) -> onnx.ModelProto:
    """A convolution whose activation was deleted: the zero point at the lowest code does its work."""
    net = Net()
    scale = (4.0 if top is None else top) / 255
    y = net.op("Abs", net.pair(net.conv(net.pair("x", 0.05, 128)), scale, 0))
    return net.done(y)


@pytest.mark.parametrize(("top", "op"), [(None, "Relu"), (6.0, "Clip")])
def test_an_activation_that_saturation_did_is_written_back(top: float | None, op: str) -> None:
    model = clamped(top)
    graph = fix(model, "tensorrt@11").graph
    assert [node.op for node in graph.nodes].count(op) == 1
    reference, mended = values(model, 1.0), values(graph, 1.0)
    assert np.abs(reference - mended).max() <= 0.1 * np.abs(reference).max()
    assert (reference == 0).mean() > 0.2  # the sign of what the activation cut would show


def test_no_second_relu_is_inserted_after_a_relu() -> None:
    net = Net()
    y = net.op("Relu", net.conv(net.pair("x", 0.05, 128)))
    graph = fix(net.done(net.op("Abs", net.pair(y, 0.02, 0))), "tensorrt@11").graph
    assert [node.op for node in graph.nodes].count("Relu") == 1


def test_the_deeper_branch_of_a_residual_add_loses_its_pair() -> None:
    """Both branches end in convolutions: the skip is the one with the single convolution."""
    body = RESIDUAL.but(
        (
            "a = Add(v, d)\n",
            "u = Conv<pads = [1,1,1,1]>(d, wd)\n" + pair("u", "sk") + pair("v2", "mm") + "a = Add(sk, mm)\n",
        ),
        ("r = Relu(a)", "r = Relu(a)"),
    )
    case = body.but(("u = Conv", "t = Relu(v)\n" + pair("t", "td") + "v2 = Conv<pads = [1,1,1,1]>(td, wd)\nu = Conv"))
    graph = fix(case.model(), "tensorrt@11").graph
    (add,) = [node for node in graph.nodes if node.op == "Add"]
    assert [tensor.name for tensor in add.inputs] == ["sk", "v2"]


def test_pairs_that_cannot_be_mended_say_why() -> None:
    mended: FixedModel = fix(MORE["P04"][0].model(), "tensorrt@11")
    (row,) = [row for row in mended.rows if row.rule == "P04"]
    assert not row.done
    assert "calibration" in row.what
    assert row.to_dict()["done"] is False


def test_concats_take_the_largest_scale() -> None:
    graph = fix(CASES["P06"][0].model(), "tensorrt@11").graph
    scales = {float(graphs.query.constant(node.inputs[1])) for node in graph.nodes if node.op == "QuantizeLinear"}  # type: ignore[arg-type]
    assert scales == {float(np.float32(0.2))}
    assert CONCAT.body


def test_on_a_cpu_that_saturates_uint8_weights_stay() -> None:
    net = Net()
    w = net.codes(net.weight(CHANNELS, CHANNELS, 1, 1, most=100) + 128, 0.01, 128, "uint8")
    model = net.done(net.pair(net.conv(net.pair("x"), w)))
    (row,) = fix_for(model, "onnxruntime", cpu="avx2").rows
    assert (row.rule, row.done) == ("O12", False)
    assert "--cpu" in row.what
    assert fix(model, "onnxruntime").done


@pytest.mark.parametrize(
    ("kind", "codes", "zero", "done"),
    [
        ("uint8", (228, 156, 28, 100), 128, True),  # 100 and 28, -100 and -28
        ("uint8", (228, 157, 128, 128), 128, False),
        ("int8", (50, 50, 0, 0), -20, False),  # exact as it is, 70 and 70 would not be
        ("int8", (50, 40, 0, 0), -19, True),
        ("int8", (70, 70, 0, 0), 10, True),  # not exact as it is
    ],
)
def test_on_a_cpu_that_saturates_pairs_decide(kind: str, codes: tuple[int, ...], zero: int, done: bool) -> None:
    net = Net()
    rows = np.broadcast_to(np.array(codes)[:, None, None], (CHANNELS, CHANNELS, 1, 1))
    model = net.done(net.pair(net.conv(net.pair("x"), net.codes(rows, 0.01, zero, kind))))
    rows_of_rule = [row for row in fix_for(model, "onnxruntime", cpu="avx2").rows if row.rule in ("O12", "O13")]
    assert [row.done for row in rows_of_rule] == [done]


def test_an_opset_newer_than_the_parser_is_reported() -> None:
    """int4 needs opset 21, the parser of 8.6 reads 17."""
    case = MORE["T14"][0]
    (row,) = [row for row in fix(case.model(), "tensorrt@8.6").rows if row.rule == "T14"]
    assert not row.done
    assert "newer than tensorrt@8.6 reads" in row.what


def test_pairs_that_movers_part_share_the_scale_of_a_concat() -> None:
    """A side that comes out of a MaxPool between two pairs: both take the scale, or P07 would be broken next."""
    body = CONCAT.body.replace(
        "a = Concat<axis = 1>(d, d2)", "p = MaxPool<kernel_shape = [1,1]>(d)\n" + pair("p", "pd")
    )
    case = Case(
        body.replace(pair("p", "pd"), pair("p", "pd") + "a = Concat<axis = 1>(pd, d2)\n").replace(
            "(x2, s,", "(x2, s2,"
        ),
        CONCAT.inputs,
        constants=CONCAT.constants,
    ).but(("(d2_c, s,", "(d2_c, s2,"))
    assert rules(case.model(), "tensorrt@11") >= {"P06"}
    graph = fix(case.model(), "tensorrt@11").graph
    assert not rules(graph, "tensorrt@11") & {"P06", "P07"}
    assert [node.op for node in graph.nodes].count("QuantizeLinear") == 4


@pytest.mark.parametrize("level", ["off", "all"])
def test_scales_behind_output_types_become_half_precision_together(level: str) -> None:
    """From opset 23 on, onnxruntime has no kernel for a QuantizeLinear of float16 with a float32 scale."""
    text = """agraph (float16[4,32] x) => (float16[4,16] y) {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear <output_dtype = 10> (q, s, z)
        w = DequantizeLinear <output_dtype = 10, axis = 1> (codes, ws, wz)
        m = MatMul (d, w)
        y = Relu (m)
    }"""
    rng = np.random.default_rng(0)
    codes = rng.integers(-100, 100, (32, 16)).astype(np.int8)
    scales = {"s": F32(2**-5), "z": np.int8(0), "ws": np.full(16, 2**-7, F32), "wz": np.zeros(16, np.int8)}
    proto = written(text, opset=23, codes=codes, **scales)
    done = fix_for(proto, "tensorrt@11")
    assert [row.rule for row in done.rows] == ["T15", "T15", "T15"]
    assert all(row.done and row.exact for row in done.rows)
    assert not [one for one in lint(done.graph, "tensorrt@11") if one.severity == "error"]
    fixed = graphs.to_proto(done.graph)
    assert {tensor.data_type for tensor in fixed.graph.initializer} == {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8}
    x = rng.standard_normal((4, 32)).astype(np.float16)
    rounded = np.clip(np.rint(x.astype(F32) * 32), -128, 127) / 32
    wanted = np.maximum(rounded @ (codes / 128.0), 0)
    np.testing.assert_allclose(run(fixed, {"x": x}, level=level)["y"], wanted, rtol=2e-3, atol=2e-2)
