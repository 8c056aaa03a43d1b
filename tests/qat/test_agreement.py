"""The comparison of a written file with the module that it was written from: what it takes, and what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")

from sbonnx import qat  # noqa: E402
from sbonnx.assets import digits  # noqa: E402
from sbonnx.qat.agreement import disagreements  # noqa: E402
from sbonnx.qat.module import origin_of  # noqa: E402
from sbonnx.report.codes import Problem  # noqa: E402
from tests.support.models import model, run  # noqa: E402

MODEL = str(digits().model)
IMAGES = np.load(digits().calib)["image"][:32]
FEEDS = [{"image": IMAGES[:16]}, {"image": IMAGES[16:]}]


@pytest.fixture(scope="module", params=["virtual", "onnxruntime"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A trained module, and its file."""
    module = qat.prepare(MODEL, FEEDS, backend=request.param, bits="w4a4")
    qat.train(module, FEEDS, epochs=1)
    path = tmp_path_factory.mktemp("written") / "q.onnx"
    qat.export(module, path, verify=False)
    return module, path


def told(module: Any, path: Path) -> list[Problem]:
    with torch.no_grad():
        return disagreements(module, origin_of(module), origin_of(module).solution, path, FEEDS)


@pytest.mark.slow
def test_the_file_of_a_module_agrees(written: tuple[Any, Path]) -> None:
    assert told(*written) == []


def scale_of_an_activation(proto: onnx.ModelProto) -> None:
    """A hundredth more."""
    name = next(node for node in proto.graph.node if node.op_type == "QuantizeLinear").input[1]
    stored = next(one for one in proto.graph.initializer if one.name == name)
    stored.CopyFrom(numpy_helper.from_array(np.float32(1.01) * numpy_helper.to_array(stored), name))


def bias(proto: onnx.ModelProto) -> None:
    """Added to: a tenth of the largest."""
    stored = {one.name: one for one in proto.graph.initializer}
    made = {node.output[0]: node for node in proto.graph.node}
    name = next(node for node in proto.graph.node if node.op_type == "Conv" and len(node.input) > 2).input[2]
    tensor = stored[name if name in stored else made[name].input[0]]
    values = numpy_helper.to_array(tensor)
    values = values + np.asarray(0.1 * np.abs(values).max()).astype(values.dtype)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def code_of_a_weight(proto: onnx.ModelProto) -> None:
    """One code of one weight, to the next."""
    kinds = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    tensor = next(one for one in proto.graph.initializer if one.data_type in kinds and len(one.dims) == 4)
    values = numpy_helper.to_array(tensor).copy()
    flat = values.reshape(-1)
    flat[0] = flat[0] - 1 if int(flat[0]) > 0 else flat[0] + 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


@pytest.mark.parametrize("damage", [scale_of_an_activation, bias, code_of_a_weight])
def test_each_kind_of_difference_is_found(written: tuple[Any, Path], damage: Any, tmp_path: Path) -> None:
    module, path = written
    proto = onnx.load(path)
    damage(proto)
    onnx.save(proto, tmp_path / "damaged.onnx")
    assert told(module, tmp_path / "damaged.onnx")


def test_values_at_the_boundary_of_two_codes_are_no_difference(tmp_path: Path) -> None:
    """Sums that are odd multiples of half a step: in float64, as in another order of adding, they become other codes.

    The next layer makes a hundred steps of each: end to end the outputs are far apart, layer by layer they agree.
    """
    rng = np.random.default_rng(0)
    w, v = (0.1 * rng.integers(-1, 2, size).astype(np.float32) for size in ((96, 32), (32, 8)))
    w[0, 0] = v[0, 0] = 12.7
    proto = model("agraph (float[N,96] x) => (float[N,8] y) { h = MatMul (x, w)\n y = MatMul (h, v) }", w=w, v=100 * v)
    feeds = [{"x": 0.1 * rng.integers(-1, 2, (64, 96)).astype(np.float32)}]
    schemes: dict[str, Any] = {"w_qscheme": "per-tensor-symmetric", "a_qscheme": "per-tensor-symmetric"}
    ranges = {"tensor:x": [-12.7, 12.7], "tensor:h": [-2.54, 2.54]}
    module = qat.prepare(proto, feeds, backend="virtual", bits="w8a8", ranges=ranges, rounding="nearest", **schemes)
    path = tmp_path / "q.onnx"
    qat.export(module, path, verify=False)
    module.double()
    found = run(onnx.load(path), feeds[0])["y"]
    with torch.no_grad():
        assert disagreements(module, origin_of(module), origin_of(module).solution, path, feeds) == []
        assert np.abs(module(torch.from_numpy(feeds[0]["x"]).double())["y"].numpy() - found).max() > 0.1


@pytest.mark.slow
def test_a_deep_network_at_4_bits_agrees(pack: Path, tmp_path: Path) -> None:
    images = np.load(pack / "data" / "cifar_calib.npz")["X"][:64].astype(np.float32).transpose(0, 3, 1, 2) / 255
    feeds = [{"input": images[at : at + 32]} for at in range(0, 64, 32)]
    module = qat.prepare(str(pack / "models" / "cifar_resnet20.onnx"), feeds, backend="virtual", bits="w4a4")
    qat.train(module, feeds, epochs=1)
    report = qat.export(module, tmp_path / "q.onnx", feeds)
    assert not [one for one in report.problems if "module" in one], report.problems
