"""Acceptance of results: thresholds of a job on the report's metrics and on user-defined metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import Acceptance, Places
from sbonnx.batch.metric import Rows, digest_of, loaded, sources_of
from sbonnx.batch.process.cleanup import used
from sbonnx.batch.redaction import Redactor, revealed
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph.digests import combined, text
from sbonnx.graph.storage.output_files import write_text
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import OwnMetric

Row = tuple[str, float, float, bool]
"""(what, found, wanted, met)"""

READS: Final = "reads-"
"""Prefix of the file names of `Rows` lists."""

UNKNOWN: Final = math.nan
"""Value that could not be measured; the reason explains it."""

MISSING: Final = {
    "min_sqnr": "the outputs were not compared with float, which requires calibration data",
    "min_agreement": "no output holds class scores, or nothing was compared with float",
    "max_loss": "the metric of eval has no value",
    "max_size_ratio": "there is no size to compare with",
    "max_latency_ratio": "the latency was not measured, which requires calibration data and VERIFY.LATENCY",
}
"""Reasons for missing values; other names are those of the job's metric."""


@dataclass(frozen=True)
class AcceptanceResult:
    """Result of the acceptance check.

    Attributes:
        rows: values compared with their thresholds.
        reasons: one sentence for each threshold that is not met; empty if all are met.
        metrics: values by name, of the float and the quantized model, if the job has a metric.
    """

    rows: tuple[Row, ...] = ()
    reasons: tuple[str, ...] = ()
    metrics: tuple[OwnMetric, ...] = ()


def judge(
    accept: Acceptance, comparison: Comparison, own: Mapping[str, Mapping[str, float]] | None = None
) -> AcceptanceResult:
    """Check a result against the acceptance thresholds of its job.

    Args:
        comparison: that of the report.
        own: values of the job's metric by name: {"float": value, "quantized": value}.
    """
    outputs, own, evaluation = comparison.outputs, own or {}, comparison.evaluation
    figures = [
        ("min_sqnr", _least(output.sqnr_db for output in outputs), accept.min_sqnr),
        ("min_agreement", _least(output.agreement for output in outputs), accept.min_agreement),
        ("max_size_ratio", comparison.size_ratio or None, accept.max_size_ratio),
        ("max_latency_ratio", comparison.latency_ratio or None, accept.max_latency_ratio),
        ("max_loss", None if evaluation is None else evaluation.rows[1].loss, accept.max_loss),
        *((f"min_metric.{name}", own.get(name, {}).get("quantized"), least) for name, least in accept.min_metric),
    ]
    rows: list[Row] = []
    reasons: list[str] = []
    for what, figure, wanted in figures:
        if wanted is None:
            continue
        if figure is None or math.isnan(figure):
            rows.append((what, UNKNOWN, wanted, False))
            why = MISSING.get(what, "the metric returns no value of that name")
            reasons.append(f"accept.{what} cannot be judged: {why}")
            continue
        least = what.startswith("min_")
        met = figure >= wanted if least else figure <= wanted
        rows.append((what, figure, wanted, met))
        if not met:
            sure = _agreement_interval(comparison) if what == "min_agreement" else ""
            reasons.append(
                f"{what}: {figure:.6g}{sure}, and {'at least' if least else 'at most'} {wanted:.6g} is accepted"
            )
    named = tuple(OwnMetric(name, values["float"], values["quantized"]) for name, values in own.items())
    return AcceptanceResult(tuple(rows), tuple(reasons), named)


def _least(figures: Iterable[float | None]) -> float | None:
    """Return the lowest value over all outputs; NaN counts as lowest."""
    values = [figure for figure in figures if figure is not None]
    return next((value for value in values if math.isnan(value)), min(values)) if values else None


def _agreement_interval(comparison: Comparison) -> str:
    """Return the interval of the lowest agreement and its number of samples, as text; "" if it is unknown."""
    rows = [
        (figure.value, f" ({figure.low:.3g} to {figure.high:.3g}, {output.samples} samples)")
        for output in comparison.quality
        for figure in output.figures
        if figure.name == "agreement"
    ]
    return min(rows)[1] if rows else ""


def metric_values(
    named: str, model: Path, quantized: Path, places: Places, redactor: Redactor | None = None
) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """Compute the metric for the float and the quantized model: {name: {"float": value, "quantized": value}}.

    The values of the float model are computed once and cached in the state folder.

    Args:
        redactor: replaces secret values of environment variables in what is written.

    Returns:
        The values, and the names of the lists of files that they depend on (see `unchanged`).

    Raises: see `metric.loaded` and `Metric.values`.
    """
    if not model.is_file():
        raise ModelError(f"'{model}' is not a file")
    digests = Digests(places.state)
    with loaded(named, places.state) as metric:
        ours = metric.values(quantized)
        key = text(combined("float metric", digests.of_model(model).encode(), code_digest(named, digests).encode()))
        file = places.metrics / f"{key}.json"
        cached = _cached_metric(file, places, digests)
        theirs = metric.values(model) if cached is None else cached[0]
        own = _write_reads(metric.reads(digests), places, redactor or Redactor(()))
    if cached is None:
        _write(file, json.dumps({"values": theirs, "reads": own}))
    digests.save()
    both = {name: {"float": theirs[name], "quantized": value} for name, value in ours.items() if name in theirs}
    if not both:
        raise DataError(f"accept.metric: '{named}' returns no name for both the float and the quantized model")
    return both, tuple(sorted({own, own if cached is None else cached[1]}))


def unchanged(reads: str, places: Places, digests: Digests) -> bool:
    """Return whether the files of a list of `metric_values` are unchanged since a metric read them."""
    try:
        file = places.metrics / f"{READS}{reads}.json"
        rows = json.loads(file.read_bytes())
        used(file)
        return all(digest_of(revealed(str(path)), digests) == digest for path, digest in rows)
    except (OSError, ValueError, TypeError, RecipeError):  # deleted, damaged, or an unset environment variable
        return False


def code_digest(named: str, digests: Digests) -> str:
    """Return the digest of a metric's source, including the modules of its folder that it imports."""
    file, _, function = named.rpartition(":")
    folder = Path(file).parent
    rows = [f"{os.path.relpath(path, folder)} {digests.of(path)}" for path in sources_of(Path(file))]
    return text(combined("metric", function.encode(), *(os.fsencode(row) for row in rows)))


def _cached_metric(file: Path, places: Places, digests: Digests) -> tuple[dict[str, float], str] | None:
    """Return the cached metric of the float model and its list of read files; None if not cached or outdated."""
    try:
        stored = json.loads(file.read_bytes())
        used(file)
        values, reads = {str(name): float(value) for name, value in stored["values"].items()}, str(stored["reads"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):  # not there yet
        return None
    return (values, reads) if unchanged(reads, places, digests) else None


def _write_reads(rows: Rows, places: Places, redactor: Redactor) -> str:
    content = json.dumps(redactor.values(rows))
    name = text(combined("reads", content.encode()))
    _write(places.metrics / f"{READS}{name}.json", content)
    return name


def _write(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, content)
