"""Libraries of custom operators: loaded for every session, and asked for where one is missing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import sbonnx
from sbonnx.cli import main
from sbonnx.errors import DeviceError, ModelError
from sbonnx.spec import Array
from sbonnx.system.runtime import LIBRARIES
from sbonnx.verify import use_libraries
from tests.support.values import some

FLOATS = onnx.TensorProto.FLOAT


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored after each test, what it registered included."""
    monkeypatch.setenv(LIBRARIES, "")


def custom(domain: str, op: str) -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    """A custom operator with two outputs between two products."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node(op, ["a"], ["n", "p"], domain=domain, name="mine"),
        helper.make_node("MatMul", ["p", "w2"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    values = {name: helper.make_tensor_value_info(name, FLOATS, ["N", 32]) for name in "xnpy"}
    weights = [numpy_helper.from_array(rng.standard_normal((32, 32)).astype(np.float32), name) for name in ("w1", "w2")]
    graph = helper.make_graph(nodes, "custom", [values["x"]], [values["y"]], weights)
    graph.value_info.extend([values["n"], values["p"]])
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8), [
        {"x": rng.standard_normal((8, 32)).astype(np.float32)}
    ]


def test_an_unknown_operator_is_named_with_what_to_give(tmp_path: Path) -> None:
    proto, feeds = custom("com.acme", "MyOp")
    onnx.save(proto, tmp_path / "m.onnx")
    what = r"at node 'mine', .* operator com.acme:MyOp: .* \(--ort-library FILE.so"
    for model, name in ((proto, "the model"), (tmp_path / "m.onnx", r"the model '.*m\.onnx'")):
        with pytest.raises(ModelError, match=f"cannot load {name}: {what}"):
            sbonnx.quantize(model, feeds)


def test_libraries_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    proto, feeds = custom("com.acme", "MyOp")
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=feeds[0]["x"])
    rest = [str(tmp_path / "m.onnx"), "--data", str(tmp_path / "data.npz"), "--no-config"]
    for library, why in ((tmp_path / "absent.so", "does not exist"), (other, "cannot load custom operators")):
        for verb in ("quantize", "run", "bench"):
            assert main([verb, *rest, "--ort-library", str(library)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert str(library) in line and why in line
    with pytest.raises(DeviceError, match="does not exist"):
        sbonnx.quantize(proto, feeds, ort_libraries=[tmp_path / "absent.so"])


def test_a_library_of_operators(tmp_path: Path) -> None:
    """NegPos of onnxruntime-extensions: the negative and the positive part."""
    extensions = pytest.importorskip("onnxruntime_extensions", reason="its library has custom operators")
    library = extensions.get_library_path()
    proto, feeds = custom("ai.onnx.contrib", "NegPos")
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, feeds, output=path, ort_libraries=[library])
    assert report.ok and some(report.metrics).outputs[0].sqnr_db > 30
    assert os.environ[LIBRARIES] == library
    use_libraries([library])
    assert os.environ[LIBRARIES] == library
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=feeds[0]["x"])
    os.environ[LIBRARIES] = ""
    arguments = ["compare", str(tmp_path / "m.onnx"), str(path), "--data", str(tmp_path / "data.npz"), "--no-config"]
    assert main(arguments) == 2
    assert main([*arguments, "--ort-library", library]) in (0, 1)
