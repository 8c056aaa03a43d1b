"""Reports in MLflow: parameters, metrics, tags and artifacts as MLflow returns them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import sbonnx
from sbonnx.errors import OutputError
from sbonnx.integrations.mlflow import _figures, log_report
from sbonnx.report import Report
from tests.support.models import model
from tests.support.values import some

NET = "g (float[N,4] x) => (float[N,8] y/out) { a = MatMul(x, w) b = Relu(a) y/out = MatMul(b, v) }"


def report(folder: Path) -> Report:
    feeds = [{"x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}] * 2
    proto = model(NET.replace("y/out", "y"), w=(4, 16), v=(16, 8))
    return sbonnx.quantize(proto, feeds, output=folder / "q.onnx", effort="fast")


def test_a_run_has_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    database = importlib.util.find_spec("sqlalchemy") is not None  # mlflow-skinny has no databases
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}" if database else (tmp_path / "runs").as_uri())
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("e", artifact_location=(tmp_path / "a").as_uri()))
    found = report(tmp_path)
    with mlflow.start_run() as active:
        assert log_report(found) == active.info.run_id
        log_report(json.loads(json.dumps(found.to_dict(), default=str)), prefix="again.", model=False)
    run = mlflow.get_run(active.info.run_id)
    assert run.data.params["W.QUANTIZER.BIT"] == run.data.params["again.W.QUANTIZER.BIT"] == "8"
    assert run.data.params["backend"] == "onnxruntime"
    assert run.data.metrics["outputs.y.sqnr_db"] == pytest.approx(some(found.metrics).outputs[0].sqnr_db)
    assert run.data.tags["sbonnx.ok"] == "True"
    files = {item.path for item in mlflow.MlflowClient().list_artifacts(active.info.run_id, "sbonnx")}
    assert files == {f"sbonnx/{name}" for name in ("report.json", "report.html", "recipe.yaml", "q.onnx")}
    saved = Path(mlflow.artifacts.download_artifacts(run_id=active.info.run_id, artifact_path="sbonnx/q.onnx"))
    assert saved.read_bytes() == (tmp_path / "q.onnx").read_bytes()
    assert mlflow.active_run() is None
    log_report(found, model=False)
    assert mlflow.active_run() is None, "a run that it started is ended"
    (tmp_path / "q.onnx").unlink()
    with pytest.raises(OutputError, match=r"q\.onnx' of the report no longer exists: give model=False"):
        log_report(found)


def test_figures_are_finite_numbers_by_name() -> None:
    rows = [{"output": "y:0", "sqnr_db": 30.0, "kind": "class"}, {"output": "z", "sqnr_db": "inf"}]
    values = {"counts": {"nodes before": 3}, "metrics": {"outputs": rows, "ms": [1.5, 2.5], "ok": True}}
    assert _figures(values) == {
        "counts.nodes before": 3.0,
        "outputs.y_0.sqnr_db": 30.0,
        "ms.0": 1.5,
        "ms.1": 2.5,
    }


def test_without_mlflow_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(OutputError, match="pip install mlflow"):
        log_report({})
