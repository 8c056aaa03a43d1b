"""Models that onnxruntime runs though they say less, or something else, than onnx's tools want."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import sbonnx
from sbonnx.cli import main
from tests.support.models import model, run

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def plain() -> ModelProto:
    return model(
        "g (float[N,3] x) => (float[N,4] y) { m = MatMul(x, w) r = Relu(m) y = MatMul(r, v) }", w=(3, 4), v=(4, 4)
    )


def changed(change: Callable[[ModelProto], object]) -> ModelProto:
    made = plain()
    change(made)
    return made


def negative_sizes(made: ModelProto) -> None:
    made.graph.value_info.append(helper.make_tensor_value_info("m", TensorProto.FLOAT, [-1, 4]))
    for value in (made.graph.input[0], made.graph.output[0], made.graph.value_info[0]):
        value.type.tensor_type.shape.dim[0].dim_value = -1


def unnamed_sizes(made: ModelProto) -> None:
    for value in (made.graph.input[0], made.graph.output[0]):
        value.type.tensor_type.shape.dim[0].Clear()


def shape_of_output(*sizes: int) -> Callable[[ModelProto], None]:
    return lambda made: made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes))


def without_shapes(made: ModelProto) -> None:
    for value in (made.graph.input[0], made.graph.output[0]):
        value.type.tensor_type.ClearField("shape")


def old() -> ModelProto:
    """Opset 7, IR version 3, its initializers not among the inputs."""
    made = changed(lambda made: setattr(made, "ir_version", 3))
    made.opset_import[0].version = 7
    return made


def shape_by_input() -> ModelProto:
    """The rank of the output is that of nothing known."""
    text = """g (float[N,3] x) => (float y) {
        m = MatMul(x, w) r = Relu(m) q = MatMul(r, v) s = Shape(q) p = Shape(s)
        one = ConstantOfShape <value = int64[1] {1}> (p) all = Concat <axis = 0> (one, s) y = Expand(q, all) }"""
    made: ModelProto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    made.graph.initializer.extend(plain().graph.initializer)
    made.graph.output[0].type.tensor_type.ClearField("shape")
    return made


def empty() -> ModelProto:
    """Joins an empty tensor, and gives one."""
    text = """g (float[N,3] x) => (float[N,4] y, float[M,4] e) {
        c = Concat <axis = 0> (x, k) m = MatMul(c, w) r = Relu(m) y = MatMul(r, v) e = Slice(y, o, o, o) }"""
    return model(text, w=(3, 4), v=(4, 4), k=np.zeros((0, 3), np.float32), o=np.array([0]))


MODELS: dict[str, Callable[[], ModelProto]] = {
    "no name": lambda: changed(lambda made: made.graph.ClearField("name")),
    "sizes of -1": lambda: changed(negative_sizes),
    "sizes without a name": lambda: changed(unnamed_sizes),
    "output without a type": lambda: changed(lambda made: made.graph.output[0].ClearField("type")),
    "no shapes": lambda: changed(without_shapes),
    "a shape that is not inferred": shape_by_input,
    "a size that is wrong": lambda: changed(shape_of_output(8, 7)),
    "a rank that is wrong": lambda: changed(shape_of_output(8, 4, 1)),
    "an output twice": lambda: changed(lambda made: made.graph.output.append(made.graph.output[0])),
    "opset 7 and IR version 3": old,
    "empty tensors": empty,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_what_runs_is_accepted(name: str, tmp_path: Path) -> None:
    source, simple, quantized = (tmp_path / f"{stem}.onnx" for stem in "msq")
    made = MODELS[name]()
    source.write_bytes(made.SerializeToString())
    np.savez(tmp_path / "d.npz", x=X)
    wanted = run(made, {"x": X})
    data = ("--data", str(tmp_path / "d.npz"))
    assert main(["simplify", str(source), "-o", str(simple), *data]) == 0
    for given, value in run(str(simple), {"x": X}).items():
        np.testing.assert_allclose(value, wanted[given], atol=1e-5)
    report = sbonnx.quantize(source, tmp_path / "d.npz", output=quantized)
    assert report.ok, report.problems
    for given, value in run(str(quantized), {"x": X}).items():
        assert value.shape == wanted[given].shape
        np.testing.assert_allclose(value, wanted[given], atol=0.3)
    for verb in ("plan", "inspect"):
        assert main([verb, str(source)]) == 0
