"""onnxruntime's rules: each finds the mistake that was seeded for it, and says nothing of the clean twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.assets import digits
from sbonnx.errors import DeviceError
from sbonnx.linting import Finding, View, lint
from sbonnx.linting import model_view as views
from sbonnx.linting.ort import ORT_RULES, kernel_choice
from sbonnx.system import cpu
from tests.support.models import model as written
from tests.support.qdq_models import CHANNELS, Net

Made = Callable[[], onnx.ModelProto]


def found(model: Any) -> list[Finding]:
    return lint(model, "onnxruntime")


def rules(model: Any) -> set[str]:
    return {one.rule for one in found(model)}


# --- models: one argument makes the mistake ---------------------------------------------------------------------------


def conv(scale: Any = 0.05, w: Any = None, bias: Any = None, behind: Any = None, **pair: Any) -> onnx.ModelProto:
    """Pair, convolution, pair. `w`, `bias`: what makes the weight and the bias of a net."""
    net = Net()
    x = net.pair("x", scale, behind=behind, **pair)
    weight = [] if w is None else [w(net)]
    extra = [] if bias is None else [bias(net)]
    y = net.conv(x, weight[0] if weight else "", *extra)
    return net.done(net.pair(y))


def weight(scale: Any = 0.01, zero: Any = 0, kind: str = "int8", axis: int = 0, most: int = 60) -> Callable[[Net], str]:
    return lambda net: net.codes(net.weight(CHANNELS, CHANNELS, 1, 1, most=most), scale, zero, kind, axis)


def after(kind: str, *, conv_pair: bool = True, scale: float = 0.05, zero: int = 0, **attrs: Any) -> onnx.ModelProto:
    """Convolution, [pair,] op, pair."""
    net = Net()
    y = net.conv(net.pair("x"))
    y = net.op(kind, net.pair(y) if conv_pair else y, **attrs)
    return net.done(net.pair(y, scale, zero))


def add(right: bool) -> onnx.ModelProto:
    """Convolution plus input; the input quantized or not."""
    net = Net()
    x = net.pair("x")
    y = net.op("Add", net.pair(net.conv(x)), x if right else net.op("Abs", "x"))
    return net.done(net.pair(y))


def where(right: bool) -> onnx.ModelProto:
    """Convolution or input, by the sign of the input; the input quantized or not."""
    net = Net()
    x = net.pair("x")
    condition = net.op("Greater", "x", net.keep(0.0))
    y = net.op("Where", condition, net.pair(net.conv(x)), x if right else net.op("Abs", "x"))
    return net.done(net.pair(y))


def clip(top: float) -> onnx.ModelProto:
    """Convolution, Clip to [0, 6], a pair that ends at `top`."""
    net = Net()
    y = net.op("Clip", net.conv(net.pair("x")), net.keep(0.0), net.keep(6.0))
    return net.done(net.pair(y, top / 255))


def half() -> onnx.ModelProto:
    net = Net(half=True)
    return net.done(net.pair(net.conv(net.pair("x"))))


def gemm(bias: float) -> onnx.ModelProto:
    net = Net(("N", CHANNELS))
    w = net.codes(net.weight(CHANNELS, CHANNELS))
    return net.done(net.op("Gemm", net.pair("x"), w, net.bias(bias)))


def computed() -> onnx.ModelProto:
    net = Net()
    scale = net.op("ReduceMax", net.op("Abs", "x"), keepdims=0)
    codes = net.op("QuantizeLinear", "x", scale, net.keep(0, "uint8"))
    y = net.conv(net.op("DequantizeLinear", codes, scale, net.keep(0, "uint8")))
    return net.done(net.pair(y))


def weight_only(pair: bool) -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.pair("x") if pair else "x")
    return net.done(net.pair(y) if pair else y)


def float_weight() -> onnx.ModelProto:
    net = Net()
    w = net.keep(net.rng.standard_normal((CHANNELS, CHANNELS, 1, 1)))
    return net.done(net.conv(net.pair("x"), w))


def leaves(pair: bool) -> onnx.ModelProto:
    net = Net()
    y = net.conv(net.pair("x"))
    return net.done(net.pair(y) if pair else y)


def matmul(pair: bool = False, rows: int = CHANNELS, most: int = 60) -> onnx.ModelProto:
    net = Net(("N", rows))
    w = net.codes(net.weight(rows, CHANNELS, most=most) if most < 100 else np.full((rows, CHANNELS), most))
    y = net.op("MatMul", net.pair("x"), w)
    return net.done(net.pair(y) if pair else y)


def batch_of_weights(columns: bool) -> onnx.ModelProto:
    """A product with a batch of matrices; one zero point for each column breaks onnxruntime's MatMulIntegerToFloat."""
    net = Net(("N", 3, 4, CHANNELS))
    scale = np.full(CHANNELS, 0.01) if columns else 0.01
    zero = np.zeros(CHANNELS) if columns else 0
    return net.done(
        net.op(
            "Tanh", net.op("MatMul", net.pair("x"), net.codes(net.weight(3, CHANNELS, CHANNELS), scale, zero, axis=2))
        )
    )


def pool(scale: float) -> onnx.ModelProto:
    return after("MaxPool", scale=scale, kernel_shape=[2, 2])


def useless(pair: bool) -> onnx.ModelProto:
    net = Net()
    return net.done(net.op("Tanh", net.pair("x") if pair else "x"))


def twice(scale: float) -> onnx.ModelProto:
    net = Net()
    return net.done(net.pair(net.conv(net.pair(net.pair("x"), scale))))


def grouped(groups: int) -> onnx.ModelProto:
    net = Net()
    w = net.codes(net.weight(CHANNELS, CHANNELS // groups, 1, 1), np.full(CHANNELS, 0.01))
    return net.done(net.pair(net.conv(net.pair("x"), w, group=groups)))


def sigmoid(top: float) -> onnx.ModelProto:
    return after("Sigmoid", scale=top / 256)


def in_blocks(level: int, bits: int = 8, block: int = 32, zero: Any = None) -> onnx.ModelProto:
    """A product of a weight in blocks at an accuracy level, with zero points of the type `zero`."""
    sizes: dict[str, Any] = {"K": block, "N": 4, "bits": bits, "block_size": block, "accuracy_level": level}
    stored: dict[str, Any] = {
        "b": np.full((4, 1, block * bits // 8), 130, np.uint8),
        "s": np.full((4, 1), 0.01, np.float32),
    }
    if zero is not None:
        stored["z"] = np.full((4, 1), 8, zero)
    node = onnx.helper.make_node("MatMulNBits", ["x", *stored], ["y"], "product", domain="com.microsoft", **sizes)
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", size])
        for name, size in (("x", block), ("y", 4))
    ]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], constants)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def refused() -> onnx.ModelProto:
    """An op that onnxruntime does not know."""
    model = weight_only(True)
    model.graph.node.append(onnx.helper.make_node("Nowhere", ["x"], ["z"], "nowhere", domain="nobody"))
    model.opset_import.append(onnx.helper.make_opsetid("nobody", 1))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None))
    return model


def floats(channels: int) -> onnx.ModelProto:
    """A float convolution that reads so many channels."""
    text = f"agraph (float[1,{channels},8,8] x) => (float[1,16,8,8] y) {{ y = Conv (x, w) }}"
    return written(text, w=(16, channels, 1, 1))


CHANNEL_SCALES = np.full(CHANNELS, 0.01)

SEEDED: dict[str, tuple[Made, Made]] = {
    "O01": (lambda: conv(0.0), conv),
    "O02": (lambda: conv(w=weight([1e-39, 0.01, 0.01, 0.01])), lambda: conv(w=weight(CHANNEL_SCALES))),
    "O03": (lambda: conv(w=weight([0.01] * 3)), lambda: conv(w=weight(CHANNEL_SCALES))),
    "O04": (lambda: conv(w=weight(CHANNEL_SCALES, axis=1)), lambda: conv(w=weight(CHANNEL_SCALES))),
    "O05": (lambda: gemm(0.001), lambda: gemm(0.0005)),
    "O06": (lambda: conv(bias=lambda net: net.bias(0.001)), lambda: conv(bias=Net.bias)),
    "O07": (lambda: conv(bias=lambda net: net.bias(code=(1 << 31) - 1)), lambda: conv(bias=Net.bias)),
    "O08": (lambda: conv(bias=lambda net: net.bias(code=(1 << 31) - 9)), lambda: conv(bias=Net.bias)),
    "O09": (computed, conv),
    "O10": (half, conv),
    "O11": (lambda: conv(kind="int8", zero=-128), conv),
    "O12": (lambda: conv(w=weight(kind="uint8", zero=128)), conv),
    "O13": (lambda: conv(w=weight(zero=3)), lambda: conv(w=weight(zero=0))),
    "O14": (lambda: conv(kind="uint16"), conv),
    "O15": (lambda: weight_only(False), lambda: weight_only(True)),
    "O16": (float_weight, conv),
    "O17": (lambda: leaves(False), lambda: leaves(True)),
    "O18": (lambda: clip(8.0), lambda: clip(6.0)),
    "O19": (lambda: after("Tanh"), lambda: after("LeakyRelu")),
    "O20": (lambda: after("Softmax", scale=1 / 256), lambda: after("Sigmoid", scale=1 / 256)),
    "O21": (lambda: add(False), lambda: add(True)),
    "O22": (lambda: pool(0.04), lambda: pool(0.05)),
    "O23": (lambda: useless(True), lambda: useless(False)),
    "O24": (lambda: matmul(True), matmul),
    "O25": (lambda: conv(behind=0.06), conv),
    "O26": (lambda: twice(0.04), lambda: twice(0.05)),
    "O27": (lambda: grouped(2), lambda: grouped(CHANNELS)),
    "O28": (lambda: sigmoid(4.0), lambda: sigmoid(1.0)),
    "O31": (refused, lambda: weight_only(True)),
    "O34": (lambda: in_blocks(0), lambda: in_blocks(4)),
    "O35": (lambda: floats(63), lambda: floats(64)),
    "O37": (lambda: batch_of_weights(True), lambda: batch_of_weights(False)),
}
"""By rule: the mistake and the clean twin."""


@pytest.mark.parametrize("rule", SEEDED)
def test_a_seeded_mistake_is_found_by_its_rule_alone(rule: str) -> None:
    bad, good = SEEDED[rule]
    assert rules(bad()) == {rule}
    assert rules(good()) == set()


def test_every_rule_is_tested() -> None:
    ids = [rule.id for rule in ORT_RULES]
    assert ids == sorted(set(ids))
    assert set(ids) - set(SEEDED) == {"O29", "O30", "O32", "O33", "O36"}  # below


def test_findings_name_their_place() -> None:
    (one,) = found(leaves(False))
    assert one.node.startswith("conv")
    assert one.tensor == f"{one.node}_out"
    assert one.severity == "warning"
    assert "float" in one.why
    assert "pair" in one.mend


@pytest.mark.parametrize(
    ("bits", "block", "level", "zero", "factor"),
    [
        *((8, 32, level, None, "20 to 45") for level in (0, 1, 2, 3)),
        (8, 128, 0, None, "20 to 45"),
        (2, 64, 0, None, "28 to 42"),
        (2, 16, 4, None, "28 to 42"),
        (2, 256, 4, None, "28 to 42"),
        (4, 32, 4, np.float32, "21"),
        *((4, block, level, None, "") for block in (32, 128) for level in (0, 1, 4)),
        *((8, block, 4, np.uint8, "") for block in (32, 128)),
        *((2, block, 4, None, "") for block in (32, 64, 128)),
    ],
)
def test_slow_kernels_are_named_with_their_factor(bits: int, block: int, level: int, zero: Any, factor: str) -> None:
    """The table of measured kernels: lint names each slow combination, and no other."""
    whys = [one.why for one in found(in_blocks(level, bits, block, zero)) if one.rule == "O34"]
    assert len(whys) == bool(factor)
    assert all(f"{factor} times the time of the float MatMul" in why for why in whys)


def test_blocks_that_onnxruntime_does_not_load_are_refused() -> None:
    (one,) = [each for each in found(in_blocks(4, 3, 32)) if each.rule == "O31"]
    assert one.severity == "error"


def test_a_rewrite_that_breaks_the_model_is_named_with_the_node_and_the_way_out() -> None:
    (one,) = [each for each in found(batch_of_weights(True)) if each.rule == "O37"]
    assert one.severity == "error"
    assert one.node.startswith("matmul")
    assert "'QDQSelectorActionTransformer'" in one.why
    assert "disabled_optimizers=['QDQSelectorActionTransformer']" in one.why


@pytest.mark.parametrize("opset", [13, 16, 17])
def test_a_layer_norm_that_onnxruntime_fuses_has_findings(opset: int) -> None:
    """Below opset 17 its optimized graph has an operator that the opset does not have."""
    text = """agraph (float[N,6,8] x) => (float[N,6,4] y) {
        q = QuantizeLinear (x, s, z)
        l = DequantizeLinear (q, s, z)
        d = Sigmoid (l)
        m = ReduceMean <axes = [-1]> (d)
        c = Sub (d, m)
        p = Pow (c, two)
        v = ReduceMean <axes = [-1]> (p)
        e = Add (v, eps)
        r = Sqrt (e)
        n = Div (c, r)
        g = Mul (n, gamma)
        b = Add (g, beta)
        y = MatMul (b, w)
    }"""
    scalars = {"s": np.float32(0.03), "z": np.uint8(128), "two": np.float32(2), "eps": np.float32(1e-5)}
    proto = written(text, opset=opset, gamma=8, beta=8, w=(8, 4), **scalars)
    assert "O23" in rules(proto)
    counted = kernel_choice.counted(View(graphs.load(proto, opset=1), "onnxruntime"))
    assert counted.model is not None
    assert "LayerNormalization" in {node.op_type for node in counted.model.graph.node}


# --- rules that depend on the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("has", "rule", "severity"), [(False, "O29", "warning"), (True, "O30", "info")])
def test_saturation_is_as_grave_as_the_cpu(
    has: bool, rule: str, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "target_cpu", lambda *_: cpu.CPUS["vnni" if has else "avx2"])
    (one,) = found(conv(w=weight(most=127)))
    assert (one.rule, one.severity) == (rule, severity)
    assert "reduce_range" in one.mend
    assert rules(conv(w=weight(most=64))) == set()


@pytest.mark.parametrize(("name", "errors"), [("avx2", 1), ("avx512", 1), ("vnni", 0), ("arm64", 0)])
def test_saturation_on_the_cpu_that_a_file_is_for_is_an_error(name: str, errors: int) -> None:
    """By request, and by the file's metadata, on any machine."""
    model = conv(w=weight(most=127))
    by_request = lint(model, "onnxruntime", cpu=name)
    onnx.helper.set_model_props(model, {cpu.RECORDED_CPU: name})
    for rows in (by_request, lint(model, "onnxruntime")):
        assert [(one.rule, one.severity) for one in rows] == [("O36", "error")] * errors
    assert not lint(conv(w=weight(most=64)), "onnxruntime", cpu=name)


@pytest.mark.parametrize(
    ("codes", "zero", "saturates"),
    [
        ((100, 28, -100, -28), 0, False),
        ((100, 29, 0, 0), 0, True),
        ((0, 0, -100, -29), 0, True),
        ((127, -127, -127, 127), 0, False),
        ((0, 100, 100, 0), 0, False),  # inputs 1 and 2 are not added in 16 bits
        ((65, 65, 0, 0), 60, True),  # codes are multiplied, not their distances from a zero point
        ((60, 60, 60, 60), -60, False),
    ],
)
def test_sums_are_those_of_two_neighbours(codes: tuple[int, ...], zero: int, saturates: bool) -> None:
    """As onnxruntime's kernels add them, see tests/backends/onnxruntime/test_paired_sums.py."""
    rows = np.broadcast_to(np.array(codes)[:, None, None], (CHANNELS, CHANNELS, 1, 1))
    assert bool(rules(conv(w=lambda net: net.codes(rows, 0.01, zero))) & {"O29", "O30"}) == saturates


@pytest.mark.parametrize(("outputs", "saturates"), [(CHANNELS, False), (2 * CHANNELS, True)])
def test_depthwise_kernels_do_not_saturate(outputs: int, saturates: bool) -> None:
    """Those with several outputs per channel are not depthwise kernel_choice."""
    net = Net()
    w = net.codes(np.full((outputs, 1, 3, 3), 127))
    found_rules = rules(net.done(net.pair(net.conv(net.pair("x"), w, group=CHANNELS))))
    assert bool(found_rules & {"O29", "O30"}) == saturates


@pytest.mark.parametrize(
    ("machine", "flags", "has"),
    [
        ("x86_64", "flags : fpu avx2 avx512_vnni", True),
        ("x86_64", "flags : fpu avx2 avx_vnni", True),
        ("x86_64", "flags : fpu avx2 amx_int8", True),
        ("x86_64", "flags : fpu avx2 avx512f", False),
        ("x86_64", "", False),
        ("aarch64", "", True),
    ],
)
def test_what_the_cpu_has(machine: str, flags: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sbonnx.system.cpu.CPU_FLAGS", tmp_path / "cpuinfo")
    if flags:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert cpu.target_cpu().exact is has


# --- rules on the optimised graph -------------------------------------------------------------------------------------


def test_what_no_other_rule_explains_is_counted() -> None:
    """The rule that names ops without a kernel is silenced: the optimised graph still shows them."""
    rule = next(rule for rule in ORT_RULES if rule.id == "O32")
    silent = kernel_choice.stays_float(())
    view = View(graphs.load(after("Tanh")), "onnxruntime")
    (one,) = silent(view)
    assert one[0].startswith("tanh")
    assert "Tanh in float, after a DequantizeLinear: onnxruntime has no integer kernel for Tanh on CPU" in one[2]
    assert list(rule.check(view)) == []


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda: after("Tanh"), "O19"),
        (lambda: after("GlobalMaxPool"), "O19"),
        (lambda: after("SpaceToDepth", blocksize=2), "O19"),
        (lambda: after("Relu", conv_pair=False, zero=128), "O18"),
        (lambda: after("LeakyRelu", conv_pair=False), "O17"),
        (lambda: after("Flatten", conv_pair=False), "O17"),
        (lambda: after("MaxPool", scale=0.04, kernel_shape=[2, 2]), "O22"),
        (lambda: after("Relu"), None),
        (lambda: after("Relu", zero=0, conv_pair=False), None),
        (lambda: after("MaxPool", conv_pair=False, kernel_shape=[2, 2]), None),
        (lambda: after("DepthToSpace", blocksize=2), None),
        (lambda: after("LeakyRelu"), None),
        (lambda: after("GlobalAveragePool"), None),
        (lambda: after("ReduceMax"), None),
        (lambda: after("ReduceMin", scale=0.04), "O22"),
        (lambda: where(True), None),
        (lambda: where(False), "O21"),
    ],
)
def test_what_is_said_to_stay_float_does(made: Made, rule: str | None) -> None:
    """The rules read the file, onnxruntime decides: nothing is left between pairs without a rule, and the reverse."""
    view = View(graphs.load(made()), "onnxruntime")
    left = list(kernel_choice.stays_float(())(view))
    assert bool(left) == (rule is not None)
    assert rules(made()) == ({rule} if rule else set())


def test_int8_pairs_are_named_where_the_types_split() -> None:
    """A sum whose sides onnxruntime gives different types."""
    net = Net()
    x = net.pair("x", kind="int8")
    y = net.op("Relu", net.op("Add", net.pair(net.conv(x), kind="int8"), x))
    whys = [one.why for one in found(net.done(net.pair(y, kind="int8", zero=-128)))]
    assert any("int8" in why for why in whys)


def test_without_onnxruntime_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(level: str) -> Any:
        raise DeviceError("onnxruntime is not installed")

    monkeypatch.setattr(kernel_choice, "session_options", missing)
    (one,) = found(conv())
    assert (one.rule, one.severity) == ("O33", "info")
    assert "not installed" in one.why


# --- whole models -----------------------------------------------------------------------------------------------------


def test_a_chain_with_everything_in_integers_is_clean() -> None:
    net = Net()
    first = net.pair(net.conv(net.pair("x"), "", net.bias()))
    skip = net.pair(net.op("Relu", net.conv(first)))
    joined = net.pair(net.op("Relu", net.op("Add", net.pair(net.conv(skip)), skip)))
    wide = net.pair(net.op("Concat", joined, first, axis=1))
    y = net.op("Flatten", net.op("GlobalAveragePool", wide))
    assert rules(net.done(y)) <= {"O23"}


def test_a_float_model_is_clean() -> None:
    assert found(str(digits().model)) == []


def test_our_own_output_has_no_errors(tmp_path: Path) -> None:
    target = tmp_path / "q.onnx"
    report = sbonnx.quantize(str(digits().model), str(digits().calib), output=target, backend="onnxruntime", split=32)
    assert report.ok
    assert not [one for one in found(target) if one.severity == "error"]
