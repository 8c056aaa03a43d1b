"""Logs reports to MLflow: the recipe as parameters, figures as metrics, the report and the model as artifacts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from sbonnx.errors import OutputError
from sbonnx.present.html import single_page
from sbonnx.report import Report
from sbonnx.report.reading import read
from sbonnx.values import json_values

FOLDER: Final = "sbonnx"
"""Artifact folder."""

LONGEST: Final = 500
"""Characters of a parameter's value that are logged; stores of MLflow limit them (250 to 6,000)."""

ROW_NAMES: Final = ("name", "output")
"""Keys that name a row of figures, by preference; other rows have their position."""


def log_report(report: Report | Mapping[str, Any], *, prefix: str = "", model: bool = True) -> str:
    """Log a report to the active run of MLflow; without one, a run is started and ended.

    Parameters: model, backend and the keys of the recipe (``W.QUANTIZER.BIT``). Metrics: counts of nodes and quantized
    tensors, figures of the comparison by output (``outputs.logits.sqnr_db``), sizes, latency, the metric on labelled
    data. Tags: ``sbonnx.ok``, ``sbonnx.verdict``. Artifacts in ``sbonnx/``: report.json, report.html, recipe.yaml and
    the quantized model.

    Args:
        report: a report, or its values (`Report.to_dict`, or a JSON file of ``--report`` or of a batch job).
        prefix: of the names of parameters, metrics and the artifact folder, if one run logs several reports.
        model: log the quantized model, too, with its external data.

    Returns:
        The id of the run.

    Raises:
        OutputError: mlflow is not installed, or the model of the report no longer exists.
    """
    try:
        import mlflow
    except ImportError as error:
        raise OutputError("reports are logged with MLflow: pip install mlflow (or mlflow-skinny)") from error
    values: dict[str, Any] = json_values(report.to_dict() if isinstance(report, Report) else dict(report))
    output = values.get("output")
    if model and output and not Path(output).is_file():
        raise OutputError(f"the model '{output}' of the report no longer exists: give model=False")
    active = mlflow.active_run()
    run = active if active is not None else mlflow.start_run()
    try:
        params = {"model": values["model"], "backend": values["backend"], **dict(_flat(values["settings"]))}
        mlflow.log_params({f"{prefix}{key}": str(value)[:LONGEST] for key, value in params.items()})
        mlflow.log_metrics({f"{prefix}{name}": value for name, value in _figures(values).items()})
        mlflow.set_tags(
            {f"{prefix}sbonnx.ok": str(values["ok"]), f"{prefix}sbonnx.verdict": values["verdict"]["text"][:LONGEST]}
        )
        folder = f"{prefix}{FOLDER}"
        mlflow.log_text(json.dumps(values, indent=2, ensure_ascii=False), f"{folder}/report.json")
        mlflow.log_text(single_page(read(Report, values)), f"{folder}/report.html")
        mlflow.log_text(yaml.safe_dump(values["settings"], sort_keys=False), f"{folder}/recipe.yaml")
        if model and output:
            for path in _model_files(Path(output)):
                mlflow.log_artifact(str(path), folder)
    finally:
        if active is None:
            mlflow.end_run()
    return str(run.info.run_id)


def _model_files(path: Path) -> Iterator[Path]:
    from sbonnx.graph.storage.model_file import external_names

    yield path
    for name in external_names(path):
        yield path.parent / name


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by dotted key."""
    for key, value in values.items():
        name = _name(f"{above}{key}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of counts and metrics by dotted name; rows of outputs and models by their name."""
    figures = {f"counts.{_name(key)}": value for key, value in values["counts"].items()}
    figures |= dict(_numbers(values["metrics"]))
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def _numbers(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{above}.{_name(str(key))}" if above else _name(str(key)))
    elif isinstance(value, list):
        for number, row in enumerate(value):
            named = [row[key] for key in ROW_NAMES if isinstance(row, Mapping) and isinstance(row.get(key), str)]
            yield from _numbers(row, f"{above}.{_name(named[0]) if named else number}")
    else:
        yield above, value


def _name(text: str) -> str:
    """Return a text with the characters that names in MLflow may have."""
    return "".join(char if char.isalnum() or char in "_-./ " else "_" for char in text).replace("..", "_").strip("/")
