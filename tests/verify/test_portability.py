"""The first operator that differs between runtimes is found, and rounding is no difference."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import NodeProto, helper, numpy_helper

import sbonnx
from sbonnx.assets import digits
from sbonnx.backends import BACKENDS, Runtime
from sbonnx.cli import main
from sbonnx.errors import DeviceError, ModelError, RecipeError
from sbonnx.present.html.cards import portability_card
from sbonnx.report.comparison import Portability
from sbonnx.runtimes import GROUPS, RUNTIMES, chosen_runtimes, webgpu_plugin
from sbonnx.runtimes.child_session import ChildSession
from sbonnx.runtimes.cut_models import Piece
from sbonnx.runtimes.engine_process import OPENERS
from sbonnx.runtimes.first_difference import FLOAT32, HALVED
from sbonnx.runtimes.ort_variants import ORT_REFERENCE
from sbonnx.runtimes.portability import portability
from sbonnx.system.runtime import nodes_elsewhere
from sbonnx.verify import EvaluationData
from tests.support.values import some

Plant = Callable[[NodeProto, Callable[..., str]], list[NodeProto]]


@cache
def small(folder: Path) -> tuple[Path, Path, tuple[dict[str, Any], ...]]:
    """A network with an operator of each kind, its quantized file, and feeds."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> small (float[n,4,8,8] x) => (float[n,6] y) {
            c = Conv<pads=[1,1,1,1]>(x, w1)
            r = Relu(c)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            d = Conv<pads=[1,1,1,1]>(p, w2)
            a = Add(d, p)
            s = Sigmoid(a)
            m = Mul(a, s)
            g = GlobalAveragePool(m)
            f = Flatten(g)
            y = MatMul(f, w3)
        }"""
    )
    random = np.random.default_rng(5)
    for name, shape in {"w1": (8, 4, 3, 3), "w2": (8, 8, 3, 3), "w3": (8, 6)}.items():
        values = random.normal(scale=0.3, size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type.lower()}{number}"
    feeds = tuple({"x": random.normal(size=(2, 4, 8, 8)).astype(np.float32)} for _ in range(4))
    onnx.save(model, folder / "float.onnx")
    sbonnx.quantize(folder / "float.onnx", list(feeds), backend="virtual", output=folder / "q.onnx", verify=False)
    return folder / "float.onnx", folder / "q.onnx", feeds


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, tuple[dict[str, Any], ...]]:
    return small(tmp_path_factory.mktemp("portability"))


def after(op: str, *values: Any) -> Plant:
    """An error that an operator after the planted one computes."""

    def plant(node: NodeProto, constant: Callable[..., str]) -> list[NodeProto]:
        output = node.output[0]
        node.output[0] = f"{output}/right"
        return [node, helper.make_node(op, [node.output[0], *map(constant, values)], [output])]

    return plant


def shifted(node: NodeProto, constant: Callable[..., str]) -> list[NodeProto]:
    """Codes of a Q node are those of another zero point."""
    source = node.input[0]
    node.input[0] = f"{source}/shifted"
    return [helper.make_node("Add", [source, constant(0.05)], [node.input[0]]), node]


def wrong(op: str, plant: Plant) -> Runtime:
    """A runtime whose kernels of one operator compute something else."""

    def open(model: Path | bytes, threads: int | None) -> Any:
        proto = onnx.load(str(model)) if isinstance(model, Path) else onnx.load_from_string(model)
        nodes: list[NodeProto] = []

        def constant(value: float) -> str:
            name = f"planted{len(proto.graph.initializer)}"
            proto.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
            return name

        for node in proto.graph.node:
            nodes += plant(node, constant) if node.op_type == op else [node]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        return ORT_REFERENCE.open(proto.SerializeToString(), threads)

    return Runtime("wrong", lambda: None, open, name="wrong")


OPERATORS = ("Conv", "MaxPool", "Add", "Sigmoid", "Mul", "GlobalAveragePool", "MatMul")
ERRORS = {"scaled": after("Mul", 0.9), "saturated": after("Clip", -0.05, 0.05), "floored": after("Floor")}


@pytest.mark.parametrize(
    ("op", "plant"),
    [
        *(pytest.param(op, plant, id=f"{op}-{name}") for op in OPERATORS for name, plant in ERRORS.items()),
        pytest.param("QuantizeLinear", shifted, id="QuantizeLinear-shifted"),
    ],
)
def test_a_planted_error_is_found(op: str, plant: Plant, network: tuple[Path, Path, Any]) -> None:
    floats, file, feeds = network
    (row,) = portability(floats, file, feeds, [wrong(op, plant)]).rows
    assert row.state == "differs"
    assert row.differs is not None
    assert row.differs.op == op


def test_a_difference_has_its_cause(network: tuple[Path, Path, Any]) -> None:
    """Sums that saturate, float operators in fewer bits, and scales that a kernel flushes."""
    floats, file, feeds = network
    saturating = wrong("Conv", after("Clip", -3.8, 3.8))
    coarse = replace(wrong("Sigmoid", after("Mul", 0.9)), open_float32=ORT_REFERENCE.open)
    for runtime, cause in ((saturating, HALVED), (coarse, FLOAT32), (wrong("Conv", after("Mul", 0.9)), "")):
        (row,) = portability(floats, file, feeds, [runtime]).rows
        assert row.differs is not None
        assert row.differs.cause == cause
        assert str(row.differs).endswith(cause)


def test_the_feed_with_the_largest_difference_is_examined(network: tuple[Path, Path, Any]) -> None:
    floats, file, feeds = network
    zeros = {"x": np.zeros_like(feeds[0]["x"])}
    (row,) = portability(floats, file, [zeros, *feeds[:2]], [wrong("Conv", after("Mul", 0.9))]).rows
    assert row.differs is not None
    assert row.differs.op == "Conv"


def test_a_piece_is_named_by_its_product() -> None:
    nodes = [helper.make_node(op, ["a"], ["a"], name=op) for op in ("QuantizeLinear", "Pad", "Conv", "Relu")]
    assert Piece("a", tuple(nodes)).named.name == "Conv"
    assert Piece("a", tuple(nodes[:2])).named.name == "Pad"
    assert Piece("a", tuple(nodes[:1])).is_pair


def test_variants_of_onnxruntime_agree_up_to_rounding(network: tuple[Path, Path, Any]) -> None:
    floats, file, feeds = network
    result = portability(floats, file, feeds, chosen_runtimes("onnxruntime-basic,onnxruntime-exact"))
    assert result.portable, result.text
    assert min(row.sqnr_db or 0 for row in result.rows) > 15


def in_runtime(name: str, floats: Path, file: Path, feeds: Any) -> Portability:
    why = RUNTIMES[name].absent()
    if why is not None:
        pytest.skip(why)
    return portability(floats, file, feeds, [RUNTIMES[name]])


def quantized(network: tuple[Path, Path, Any], backend: Any) -> Path:
    floats, file, feeds = network
    output = file.with_name(f"{backend}.onnx")
    sbonnx.quantize(floats, list(feeds), backend=backend, output=output, verify=False, force=True)
    return output


@pytest.mark.parametrize(("name", "on_the_cpu"), [("wasm", ""), ("arm64", ""), ("webgpu", "QuantizeLinear")])
def test_a_runtime_runs_a_file(name: str, on_the_cpu: str, network: tuple[Path, Path, Any]) -> None:
    result = in_runtime(name, *network)
    assert result.portable, result.text
    (row,) = result.rows
    assert (row.sqnr_db or 0) > 15
    assert bool(row.fallback) == bool(on_the_cpu)
    assert all(on_the_cpu in node for node in row.fallback)


def test_qnn_runs_a_file_and_names_the_nodes_on_the_cpu(network: tuple[Path, Path, Any]) -> None:
    result = in_runtime("qnn", network[0], quantized(network, "qnn"), network[2])
    assert result.portable, result.text
    (row,) = result.rows
    assert (row.sqnr_db or 0) > 15
    assert row.fallback
    assert len(row.fallback) <= 2  # Q of the input and DQ of the output


def test_an_engine_of_a_child_process_exists_on_each_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        ChildSession, "__init__", lambda self, model, command, *more, **settings: commands.append(command)
    )
    for gpu in (True, False):
        monkeypatch.setattr("sbonnx.runtimes.rtx_builder.on_gpu", lambda gpu=gpu: gpu)
        RUNTIMES["tensorrt-rtx"].open(b"", None)
    assert {command[-1] for command in commands} <= set(OPENERS)
    assert commands[0] != commands[1]


def test_a_provider_that_computes_no_node_is_not_proved_by_the_cpu() -> None:
    """onnxruntime then computes all on the CPU, without an error: seen of WebGPU on a server's GPU."""

    def session_of(*providers: str) -> Any:
        nodes = [SimpleNamespace(name="n")]
        parts = [SimpleNamespace(ep_name=name, get_nodes=lambda: nodes) for name in providers]
        return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)

    assert nodes_elsewhere(session_of("CPUExecutionProvider", "Own"), "Own") == ("n",)
    with pytest.raises(DeviceError, match="Own computes none of the nodes"):
        nodes_elsewhere(session_of("CPUExecutionProvider"), "Own")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_gpu_of_calibration_does_not_judge_files_for_other_kernels(name: str) -> None:
    assert BACKENDS[name].judged_on_cpu == (name not in ("tensorrt", "virtual"))


def test_a_vulkan_driver_without_a_gpu_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mesa installs drivers of GPUs, and one for the CPU, which WebGPU refuses."""
    software = tmp_path / "vk_swiftshader_icd.json"
    software.touch()
    monkeypatch.setattr(webgpu_plugin, "SOFTWARE", (software,))
    for name in webgpu_plugin.DRIVERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(webgpu_plugin, "DEVICES", tmp_path)
    assert set((webgpu_plugin._driver() or {}).values()) == {str(software)}
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "card0").touch()
    assert webgpu_plugin._driver() == {}


def test_tensorrt_rtx_builds_a_file_and_names_the_node_that_it_refuses(network: tuple[Path, Path, Any]) -> None:
    (row,) = in_runtime("tensorrt-rtx", network[0], quantized(network, "tensorrt"), network[2]).rows
    assert row.state == "built", row.why
    (row,) = in_runtime("tensorrt-rtx", network[0], quantized(network, "qnn"), network[2]).rows
    assert row.state == "refused"
    assert "QuantizeLinear 'x_QuantizeLinear': " in row.why


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.abort()", "engine ended with SIGABRT while it opened the model"),
        ("import time; time.sleep(60)", "engine gave no answer in 0.5 s while it opened the model"),
    ],
)
def test_a_child_that_crashes_or_hangs_is_an_error(program: str, message: str, network: tuple[Path, Path, Any]) -> None:
    seconds = 0.5 if "sleep" in program else 30.0
    with pytest.raises(ModelError, match=message):
        ChildSession(network[1], [sys.executable, "-c", program], "engine", seconds)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SBONNX_QNN_PYTHON", str(tmp_path / "python"))
    assert "which does not start" in (RUNTIMES["qnn"].absent() or "")
    monkeypatch.setenv("SBONNX_ARM64", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert "python -m sbonnx.runtimes.arm64_folder FOLDER" in (RUNTIMES["arm64"].absent() or "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt install qemu-user" in (RUNTIMES["arm64"].absent() or "")


def test_opencv_runs_or_refuses(network: tuple[Path, Path, Any]) -> None:
    (row,) = in_runtime("opencv", *network).rows
    assert row.state in ("same", "rounding", "refused")
    assert "OpenCV" in row.why or (row.sqnr_db or 0) > 15
    assert ".cpp" not in row.why


def test_a_runtime_that_is_absent_is_named(
    network: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    floats, file, feeds = network
    monkeypatch.setenv("SBONNX_NODE_MODULES", os.fspath(file.parent))
    monkeypatch.setenv("PATH", "")
    np.savez(file.parent / "feeds.npz", **feeds[0])
    command = ["compare", str(floats), str(file), "--data", str(file.parent / "feeds.npz")]
    assert main([*command, "--runtimes", "wasm,onnxruntime-basic"]) == 2
    assert "--runtimes wasm: node is not on PATH: install Node.js" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setitem(GROUPS, "all", ("wasm", "onnxruntime-basic"))
    assert main([*command, "--runtimes", "all"]) == 0
    assert "absent: node is not on PATH" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RecipeError, match="'gpu' is not known: choose from all, onnxruntime, "):
        chosen_runtimes("gpu")
    with pytest.raises(RecipeError, match="'gpu' is not known"):
        sbonnx.compare(digits().model, file, digits().calib, runtimes=["gpu"])


def test_the_metric_is_computed_in_each_runtime(network: tuple[Path, Path, Any]) -> None:
    floats, file, feeds = network
    classes = ORT_REFERENCE.open(floats, None).run(None, feeds[0])[0].argmax(1)
    np.savez(file.parent / "labelled.npz", **feeds[0], labels=classes)
    evaluation = EvaluationData(file.parent / "labelled.npz", "top1")
    inverted = wrong("MatMul", after("Mul", -1.0))
    result = portability(floats, file, feeds, [RUNTIMES["onnxruntime-basic"], inverted], evaluation)
    assert result.evaluation is not None
    metrics = {row.model: row.metric for row in result.evaluation.rows}
    assert [metrics[name].value for name in ("float", "wrong")] == [1.0, 0.0]
    assert metrics["onnxruntime-basic"].value > 0.0
    page = portability_card(result)
    assert page.columns[3] == "top1"
    assert [row[0] for row in page.rows] == ["onnxruntime-basic", "wrong"]


def test_a_file_that_differs_in_a_runtime_of_the_recipe_is_a_problem(
    network: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    floats, file, feeds = network
    monkeypatch.setitem(RUNTIMES, "wrong", wrong("Conv", after("Mul", 0.9)))
    options: dict[str, Any] = {"backend": "virtual", "effort": "fast", "output": file.with_name("verified.onnx")}
    report = sbonnx.quantize(floats, list(feeds), runtimes="Onnxruntime-basic, wrong", **options)
    assert not report.ok
    assert report.settings["VERIFY"]["RUNTIMES"] == ["onnxruntime-basic", "wrong"]
    (problem,) = report.problems
    assert (problem.code, problem[:26]) == ("runtime-differs", "wrong differs at Conv 'con")
    assert "Runtimes" in report.to_html()
    assert report.to_html().count("<td>differs at Conv") == 1
    right = sbonnx.quantize(floats, list(feeds), runtimes=["onnxruntime-basic"], force=True, **options)
    assert right.ok
    assert some(right.portability).portable
    with pytest.raises(RecipeError, match=r"VERIFY\.RUNTIMES 'gpu' is not known"):
        sbonnx.quantize(floats, list(feeds), runtimes="gpu", force=True, **options)
    with pytest.raises(RecipeError, match=r"VERIFY\.RUNTIMES compares outputs: give data"):
        sbonnx.quantize(floats, None, mode="dynamic", backend="onnxruntime", runtimes="wrong")


def test_the_command_line_shows_the_metric_in_each_runtime(
    network: tuple[Path, Path, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    floats, file, feeds = network
    monkeypatch.setitem(RUNTIMES, "wrong", wrong("MatMul", after("Mul", -1.0)))
    labels = ORT_REFERENCE.open(floats, None).run(None, feeds[0])[0].argmax(1)
    np.savez(file.with_name("feeds.npz"), **feeds[0])
    np.savez(file.with_name("labels.npz"), **feeds[0], labels=labels)
    data = ["--data", str(file.with_name("feeds.npz")), "--eval", str(file.with_name("labels.npz")), "--metric", "top1"]
    assert main(["compare", str(floats), str(file), *data, "--runtimes", "onnxruntime-basic,wrong"]) == 1
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if " dB " in line and line.split()}
    assert " 1.0000" in rows["onnxruntime-basic"]
    assert " 0.0000" in rows["wrong"]
