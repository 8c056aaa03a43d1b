"""LayerRunner: numbers are onnxruntime's, mistakes are one line, sessions have an end."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.engine.runner import CUDA_OPTIONS, LayerRunner, providers
from sbonnx.errors import DataError, DeviceError, ModelError
from sbonnx.graph import load
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, CUDA
from sbonnx.system.runtime import onnxruntime, reason
from tests.support.models import model, residual, run

FEED = {"x": np.random.default_rng(3).standard_normal((2, 3, 8, 8)).astype(np.float32)}


@pytest.mark.parametrize("optimisation", ["off", "basic", "extended", "all"])
def test_outputs_are_onnxruntimes(optimisation: Any) -> None:
    with LayerRunner(load(residual()), optimisation=optimisation) as session:
        assert session.output_names == ("y",)
        np.testing.assert_allclose(session.run(FEED)["y"], run(residual(), FEED)["y"], rtol=1e-4, atol=1e-4)


def test_input_specs() -> None:
    text = "agraph (float[N,3] x, int64[2] n, float16[?] h, double d, bool[1] b) => (float[N,3] y) { y = Relu (x) }"
    with LayerRunner(load(model(text))) as session:
        kinds = {spec.name: spec.dtype for spec in session.input_specs}
        assert {name: str(kind) for name, kind in kinds.items()} == {
            "x": "float32",
            "n": "int64",
            "h": "float16",
            "d": "float64",
            "b": "bool",
        }
        assert session.input_specs[0].shape == ("N", 3)


def test_large_weights_are_beside_the_model() -> None:
    text = "agraph (float[N,300] x) => (float[N,300] y) { y = MatMul (x, w) }"
    proto = model(text, w=(300, 300))
    x = np.ones((2, 300), np.float32)
    with LayerRunner(load(proto), optimisation="off") as session:
        assert list(session._weights) == ["w"]
        np.testing.assert_allclose(session.run({"x": x})["y"], run(proto, {"x": x})["y"], rtol=1e-3, atol=1e-4)


IF = """
agraph (float[N,300] x, bool c) => (float[N,300] y) {
    y = If (c) <
        then_branch = yes () => (float[N,300] t) { t = MatMul (x, w) },
        else_branch = no () => (float[N,300] e) { e = Neg (x) }
    >
}"""


def with_inner_weight() -> Any:
    """An If whose branch holds a large weight itself."""
    proto = model(IF, w=(300, 300))
    branch = proto.graph.node[0].attribute[0].g
    branch.initializer.append(proto.graph.initializer.pop())
    return proto


def test_large_weights_inside_branches() -> None:
    """onnxruntime finds no external initializers there."""
    x = np.ones((2, 300), np.float32)
    with LayerRunner(load(with_inner_weight()), optimisation="off") as session:
        for picked in (True, False):
            feeds = {"x": x, "c": np.array(picked)}
            wanted = run(with_inner_weight(), feeds)["y"]
            np.testing.assert_allclose(session.run(feeds)["y"], wanted, rtol=1e-3, atol=1e-4)


def test_one_session_from_several_threads_gives_the_same() -> None:
    from concurrent.futures import ThreadPoolExecutor

    feeds = [{"x": FEED["x"] * i} for i in range(20)]
    with LayerRunner(load(residual()), threads=1) as session, ThreadPoolExecutor(4) as pool:
        alone = [session.run(feed)["y"] for feed in feeds]
        for one, other in zip(alone, pool.map(lambda feed: session.run(feed)["y"], feeds), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({"x": np.zeros((2, 3, 8), np.float32)}, r"the net cannot run on sample 7: Invalid rank for input: x"),
        ({"x": np.zeros((2, 5, 8, 8), np.float32)}, r"Got invalid dimensions for input: x"),
        ({"x": np.zeros((2, 3, 8, 8), np.float64)}, r"Unexpected input data type"),
        ({}, r"x"),
    ],
)
def test_feeds_that_do_not_run(feeds: dict[str, Array], says: str) -> None:
    with (
        LayerRunner(load(residual()), name="the net") as session,
        pytest.raises(DataError, match=says) as caught,
    ):
        session.run(feeds, where="sample 7")
    assert "\n" not in str(caught.value)


def test_models_that_do_not_load() -> None:
    proto = model("agraph (float[N,3] x) => (float[N,3] y) { y = Relu (x) }")
    proto.graph.node[0].op_type = "Nonsense"
    proto.graph.node[0].domain = "org.nobody"
    proto.opset_import.add(domain="org.nobody", version=1)
    with pytest.raises(ModelError, match=r"onnxruntime cannot load the model: .*Nonsense") as caught:
        LayerRunner(load(proto))
    assert "\n" not in str(caught.value)


def test_reason_is_the_first_useful_line() -> None:
    text = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x\n index: 1 Got: 5"
    assert reason(RuntimeError(text)) == "Got invalid dimensions for input: x"
    assert reason(RuntimeError()) == "RuntimeError"


def test_closed_is_closed() -> None:
    session = LayerRunner(load(residual()))
    session.close()
    session.close()
    with pytest.raises(ValueError, match="the runner of the model is closed"):
        session.run(FEED)


class FakeRuntime(ModuleType):
    """onnxruntime with other providers than it has."""

    def __init__(self, *available: str) -> None:
        super().__init__("onnxruntime")
        self.available = list(available)

    def get_available_providers(self) -> list[str]:
        return self.available


def test_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(runtime: FakeRuntime, gpus: int) -> None:
        for place in ("sbonnx.calib.engine.runner", "sbonnx.system.runtime"):
            monkeypatch.setattr(f"{place}.onnxruntime", lambda: runtime)
        monkeypatch.setattr("sbonnx.system.runtime.gpu_count", lambda: gpus)

    installed(FakeRuntime(CPU), 1)
    assert providers("cpu") == providers("auto") == [CPU]
    with pytest.raises(DeviceError, match=r"'cuda' needs CUDAExecutionProvider.*sbonnx\[gpu\]"):
        providers("cuda")
    with pytest.raises(DeviceError, match="there is no device 'tpu'; there are cpu, cuda, cuda:N, auto"):
        providers("tpu")
    installed(FakeRuntime(CUDA, CPU), 0)
    assert providers("cpu") == providers("auto") == [CPU]
    installed(FakeRuntime(CUDA, CPU), 1)
    assert providers("cpu") == [CPU]
    monkeypatch.setattr("sbonnx.calib.engine.runner.load_cuda_libraries", lambda: None)
    assert providers("cuda:2")[0] == (CUDA, {**CUDA_OPTIONS, "device_id": "2"})
    for device in ("cuda", "auto"):
        assert [first if isinstance(first, str) else first[0] for first in providers(device)] == [CUDA, CPU]


def test_a_silent_fall_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime drops a provider whose libraries do not load and goes on."""
    monkeypatch.setattr("sbonnx.calib.engine.runner.providers", lambda _: [CPU])
    with pytest.raises(DeviceError, match=r"fell back to CPUExecutionProvider.*libraries do not load"):
        LayerRunner(load(residual()), device="cuda")


def test_without_onnxruntime_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"not installed: pip install 'sbonnx\[cpu\]' \(or 'sbonnx\[gpu\]'"):
        onnxruntime()


def test_half_an_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    with pytest.raises(DeviceError, match="only half installed"):
        onnxruntime()


@pytest.mark.gpu
def test_on_cuda() -> None:
    with LayerRunner(load(residual()), device="cuda") as session:
        np.testing.assert_allclose(session.run(FEED)["y"], run(residual(), FEED)["y"], rtol=1e-3, atol=1e-3)
