"""What a result is held against: thresholds of a job, and metrics that its own code computes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.digests import Digests
from sbonnx.batch.job import Acceptance, Places
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph.digests import combined, text

Row = tuple[str, float, float, bool]
"""(what, found, wanted, met)"""

UNKNOWN: Final = 0.0
"""What stands for a figure that could not be measured: the reason beside it says so."""


@dataclass(frozen=True)
class Judged:
    """The verdict.

    Attributes:
        rows: what was held against the acceptance.
        reasons: why it is not met, one sentence each; empty where it is.
        metrics: values by name, of the float model and of the quantized one, where a metric was named.
    """

    rows: tuple[Row, ...] = ()
    reasons: tuple[str, ...] = ()
    metrics: tuple[dict[str, Any], ...] = ()


def judge(
    accept: Acceptance, metrics: Mapping[str, Any], own: Mapping[str, Mapping[str, float]] | None = None
) -> Judged:
    """Hold a result against what its job accepts.

    Args:
        metrics: of the report, see `sbonnx.verify.Comparison.to_dict`.
        own: values of the job's metric by name: {"float": value, "quantized": value}.
    """
    rows: list[Row] = []
    reasons: list[str] = []
    for what, found, wanted, least in _figures(accept, metrics, own or {}):
        if found is None or math.isnan(found):
            rows.append((what, UNKNOWN, wanted, False))
            reasons.append(f"accept.{what} cannot be judged: {_absent(what)}")
            continue
        met = found >= wanted if least else found <= wanted
        rows.append((what, found, wanted, met))
        if not met:
            reasons.append(f"{what}: {found:.6g}, and {'at least' if least else 'at most'} {wanted:.6g} is accepted")
    named = tuple({"name": name, **values} for name, values in (own or {}).items())
    return Judged(tuple(rows), tuple(reasons), named)


def _figures(
    accept: Acceptance, metrics: Mapping[str, Any], own: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, float | None, float, bool]]:
    """(what, found, wanted, whether at least) of all that is asked for."""
    outputs = metrics.get("outputs") or ()
    if accept.min_sqnr is not None:
        yield "min_sqnr", _least(outputs, "sqnr_db"), accept.min_sqnr, True
    if accept.min_agreement is not None:
        yield "min_agreement", _least(outputs, "agreement"), accept.min_agreement, True
    if accept.max_size_ratio is not None:
        yield "max_size_ratio", _positive(metrics.get("size_ratio")), accept.max_size_ratio, False
    if accept.max_latency_ratio is not None:
        yield "max_latency_ratio", _positive(metrics.get("latency_ratio")), accept.max_latency_ratio, False
    for name, wanted in accept.min_metric:
        yield f"min_metric.{name}", own.get(name, {}).get("quantized"), wanted, True


def _least(outputs: Any, key: str) -> float | None:
    """The least figure of any output; one that is not a number is the least of all."""
    found = [float(row[key]) for row in outputs if row.get(key) is not None]
    return next((one for one in found if math.isnan(one)), min(found)) if found else None


def _positive(value: Any) -> float | None:
    return float(value) if value is not None and float(value) > 0 else None


def _absent(what: str) -> str:
    """Why there is no figure."""
    return {
        "min_sqnr": "the outputs were not compared with float, which wants calibration data",
        "min_agreement": "no output has two classes or more, or nothing was compared with float",
        "max_size_ratio": "there is no size to compare with",
        "max_latency_ratio": "the latency was not measured, which wants calibration data and VERIFY.LATENCY",
    }.get(what, "the metric gives no value of that name")


def run_metric(named: str, model: Path) -> dict[str, float]:
    """What "file.py:function" says of a model file.

    Raises:
        RecipeError: there is no such file or function, or it does not give numbers by name.
        Exception: whatever the function raises.
    """
    file, _, name = named.rpartition(":")
    function = getattr(_module(Path(file)), name, None)
    if not callable(function):
        raise RecipeError(f"accept.metric: '{file}' has no function '{name}'")
    found = function(str(model))
    if not isinstance(found, Mapping) or not found:
        raise RecipeError(f"accept.metric: {name} of '{file}' must give {{name: number}}, got {type(found).__name__}")
    values: dict[str, float] = {}
    for key, value in found.items():
        try:
            values[str(key)] = float(value)
        except (TypeError, ValueError):
            raise RecipeError(f"accept.metric: '{key}' of {name} in '{file}' is no number") from None
    return values


def _module(file: Path) -> Any:
    """The user's file as a module; what lies beside it can be imported."""
    if not file.is_file():
        raise RecipeError(f"accept.metric: there is no file '{file}'")
    spec = importlib.util.spec_from_file_location(f"sbonnx_metric_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"accept.metric: '{file}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise RecipeError(f"accept.metric: '{file}' cannot be loaded: {' '.join(str(error).split())}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def both(named: str, model: Path, quantized: Path, places: Places) -> dict[str, dict[str, float]]:
    """The metric of the float model and of the quantized one: {name: {"float": value, "quantized": value}}.

    The float model's is computed once and kept in the state folder.

    Raises: see `run_metric`.
    """
    if not model.is_file():
        raise ModelError(f"'{model}' is not a file")
    ours = run_metric(named, quantized)
    theirs = _kept(named, model, places)
    return {
        name: {"float": theirs[name], "quantized": value} for name, value in ours.items() if name in theirs
    } or _odd(named)


def _odd(named: str) -> dict[str, dict[str, float]]:
    raise DataError(f"accept.metric: '{named}' gives no name for both the float and the quantized model")


def _kept(named: str, model: Path, places: Places) -> dict[str, float]:
    """The metric of the float model."""
    digests = Digests(places.state)
    code = digests.of(Path(named.rpartition(":")[0]))
    key = text(combined("metric", digests.of_model(model).encode(), code.encode(), named.rpartition(":")[2].encode()))
    file = places.state / "metrics" / f"{key}.json"
    try:
        found = json.loads(file.read_bytes())
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # not there yet
        pass
    values = run_metric(named, model)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, file)
    return values


__all__ = ["Judged", "both", "judge", "run_metric"]
