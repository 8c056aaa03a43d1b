"""The command for machines with a GPU: steps and limits, rows of failures, jobs with a stand-in for TensorRT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import child
from benchmarks.gpu.__main__ import GPU_TESTS, LIMIT_S, Step
from benchmarks.results import ROOT
from benchmarks.targets.models import Subject
from sbonnx.assets import digits

JUNIT = '<testsuites><testsuite><testcase name="a">{}</testcase></testsuite></testsuites>'


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The digits with 8 samples."""
    singles = [{"image": image[None]} for image in np.load(digits().calib)["image"][:8]]
    return Subject("digits", digits().model, singles, singles)


def stand_in(code: str, *arguments: object, name: str = "a", limit: float = 20, result: Path | None = None) -> Step:
    return Step(name, (sys.executable, "-c", code, *map(str, arguments)), limit, result)


def test_the_limits_fit_and_a_dry_run_prints_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = gpu.steps("resnet18", tmp_path, tmp_path / "e", tmp_path / "o")
    assert sum(step.limit_s for step in todo) <= LIMIT_S == 540
    assert all("pytest.mark.gpu" in (ROOT / file).read_text() for file in GPU_TESTS)
    folders = ["--environment", str(tmp_path / "e"), "--output", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", *folders])
    assert gpu.main() == 0 and not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    assert all(f"# {step.name}: at most {step.limit_s:.0f} s\n" in printed for step in todo)


def test_a_failed_step_is_a_row_and_the_next_ones_run(tmp_path: Path) -> None:
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    slow = [{"node": "c1", "runs_in": "integers", "ms": 0.5}]
    facts = json.dumps({"ms": 1.25, "slowest": slow})
    xml = tmp_path / "t.xml"
    todo = [
        stand_in("import sys; print('first'); sys.exit('no | GPU')", name="bad"),
        stand_in("import time; time.sleep(60)", name="slow", limit=0.3),
        stand_in(write, xml, JUNIT.format('<skipped message="no GPU"/>'), name="skipped", result=xml),
        stand_in(write, xml, JUNIT.format(""), name="tests", result=xml),
        stand_in(write, tmp_path / "f.json", facts, name="engine int8", result=tmp_path / "f.json"),
    ]
    rows = gpu.measure(todo, tmp_path / "o", tmp_path, "digits")
    assert [row.ok for row in rows] == [False, False, False, True, True]
    assert rows[0].reason == "no | GPU" and rows[1].reason == "not finished within 0 s"
    assert rows[2].reason == "all are skipped: no GPU" and rows[3].facts == {"passed": 1, "skipped": 0}
    page = (tmp_path / "o" / "page.md").read_text()
    assert "| bad | failed | 0 | no \\| GPU |" in page and "2 of 5 steps" in page
    assert "ms 1.25 |" in page and "| int8 | c1 | integers | 0.5 |" in page
    assert json.loads((tmp_path / "o" / "results.json").read_text())["steps"][4]["facts"]["ms"] == 1.25
    absent = Step("absent", (str(tmp_path / "python"),), 1)
    assert "there is no" in gpu.run(absent, 1, tmp_path / "log", tmp_path).reason
    assert "are over" in gpu.run(todo[0], 0, tmp_path / "log", tmp_path).reason


def test_calibration_beside_float_passes(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PASSES", 1)
    monkeypatch.setattr(child, "ROUNDS", 2)
    facts = child.calibration(subject, "cpu")
    assert facts["samples"] == 8 and facts["ratio"] == facts["calibration s"] / facts["float s"] > 0
    with pytest.raises(RuntimeError, match="did not load CUDA"):
        child.calibration(subject, "cuda")


class Engine:
    """Stand-in for TensorRT's engine and its context: computes by onnxruntime, one layer a node."""

    def __init__(self, plan: bytes) -> None:
        self.model = onnx.load_from_string(plan)
        self.names = [self.model.graph.output[0].name, self.model.graph.input[0].name]
        self.profiler: Any = None
        self.num_io_tensors, self.shapes = 2, {self.names[0]: (1, 10)}
        self.get_tensor_name = self.names.__getitem__
        self.get_tensor_mode = self.names.index
        self.get_tensor_dtype = self.get_tensor_shape = self.shapes.get
        self.set_input_shape = self.shapes.__setitem__
        self.create_execution_context = self.create_engine_inspector = lambda: self

    def get_engine_information(self, form: str) -> str:
        kinds = {node.name: "Int8" if node.op_type == "Conv" else "FP16" for node in self.model.graph.node}
        rows = [{"Name": name, "Inputs": [{"Format/Datatype": kind}]} for name, kind in kinds.items()]
        return json.dumps({"Layers": rows})

    def set_tensor_address(self, name: str, address: int) -> None:
        assert address and name in self.shapes

    def execute_async_v3(self, stream: int) -> None:
        for node in self.model.graph.node:
            if self.profiler is not None:
                self.profiler.report_layer_time(node.name, 0.5)


def test_an_engine_is_joined_with_its_file(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "built", lambda trt, path, feed: path.read_bytes())
    monkeypatch.setattr("benchmarks.peers.environments.absent", lambda *_: "not built: make peers")
    trt: Any = SimpleNamespace(
        __version__="10.13.0",
        Logger=type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None}),
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=Engine),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
        TensorIOMode=SimpleNamespace(INPUT=1),
        nptype=lambda dtype: np.float32,
        IProfiler=type("IProfiler", (), {}),
    )
    facts = child.engine("int8", subject, tmp_path, trt, "cpu")
    nodes = onnx.load(tmp_path / "int8.onnx").graph.node
    assert facts["layers ms"] == len({node.name for node in nodes}) * 0.5 and facts["ms"] >= 0
    convolutions = [row for row in facts["engine"]["planned"] if row["op"] == "Conv"]
    assert convolutions and {row["runs_in"] for row in convolutions} == {"integers"}
    assert facts["integers"] == len(convolutions) and facts["slowest"][0]["ms"] == 0.5
    with pytest.raises(RuntimeError, match="make peers"):
        child.engine("modelopt-int8", subject, tmp_path, trt, "cpu")
