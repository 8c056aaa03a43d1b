"""`sbonnx simplify` of models that onnxruntime cannot run, and of initializers that are inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sbonnx
from sbonnx.cli import main
from sbonnx.errors import OutputError
from tests.support.models import model, run


def saved(proto: onnx.ModelProto, folder: Path) -> str:
    onnx.save(proto, folder / "m.onnx")
    return str(folder / "m.onnx")


def custom() -> onnx.ModelProto:
    """An operator that nobody has, between no-ops."""
    nodes = [
        ("Identity", "x", "a", ""),
        ("Unheard", "a", "b", "elsewhere"),
        ("Identity", "b", "c", ""),
        ("Relu", "c", "y", ""),
    ]
    made = [helper.make_node(op, [x], [y], name=f"{op}_{y}", domain=domain) for op, x, y, domain in nodes]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(made, "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("elsewhere", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def bfloat() -> onnx.ModelProto:
    return model(
        "agraph (bfloat16[2,4] x) => (bfloat16[2,4] y) { a = Identity (x) b = Softplus (a) y = Relu (b) }", opset=22
    )


@pytest.mark.parametrize("make", [custom, bfloat])
def test_models_that_do_not_run_are_simplified_with_a_note(
    make: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(make)
    out = tmp_path / "s.onnx"
    assert main(["simplify", saved(make(), tmp_path), "-o", str(out)]) == 0
    assert "note: not verified by execution: onnxruntime cannot load the model" in " ".join(
        capsys.readouterr().out.split()
    )
    assert [node.op_type for node in onnx.load(out).graph.node if node.op_type == "Identity"] == []


def test_initializers_that_were_inputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto = model("agraph (float[2,4] x) => (float[2,4] y) { y = Add (x, shift) }", shift=np.ones(4, np.float32))
    proto.graph.input.append(helper.make_tensor_value_info("shift", TensorProto.FLOAT, [4]))
    assert numpy_helper.to_array(proto.graph.initializer[0]).all()
    assert main(["simplify", saved(proto, tmp_path), "-o", str(tmp_path / "s.onnx")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "those from which nothing else is computed stay inputs with a default ('shift')" in said
    assert [one.name for one in onnx.load(tmp_path / "s.onnx").graph.input] == ["x", "shift"]


def test_in_python(tmp_path: Path) -> None:
    proto = model(
        "agraph (float[2,3,8,8] x) => (float[2,4,8,8] y) { i = Identity (x) c = Conv <kernel_shape = [1,1]> (i, w)"
        " y = BatchNormalization (c, s, b, m, v) }",
        w=(4, 3, 1, 1),
        s=4,
        b=4,
        m=4,
        v=np.full(4, 2, np.float32),
    )
    path = saved(proto, tmp_path)
    report = sbonnx.simplify(path)
    assert report.ok and report.simplified is not None
    assert (report.nodes_before, report.nodes_after) == (3, 1)
    assert [node.op_type for node in report.simplified.graph.node] == ["Conv"]
    assert "3 to 1 nodes: equal outputs" in repr(report)
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(run(report.simplified, {"x": x})["y"], run(proto, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    plain = sbonnx.simplify(path, {"x": x}, output=tmp_path / "s.onnx", fuse=False)
    assert plain.nodes_after == 2 and plain.simplified is None
    assert plain.to_dict()["output"] == str(tmp_path / "s.onnx")
    with pytest.raises(OutputError, match="exists: give --force"):
        sbonnx.simplify(path, output=tmp_path / "s.onnx")
