"""The figures of a comparison, for tables."""

from __future__ import annotations

from typing import Any, Final

from sbonnx.cli.show import megabytes

OUTPUT_COLUMNS: Final = ("output", "mse", "max error", "SQNR dB", "cosine", "agreement")


def output_rows(outputs: Any) -> list[tuple[object, ...]]:
    """Rows of `OUTPUT_COLUMNS` from a comparison's plain values."""
    keys = ("name", "mse", "max_abs", "sqnr_db", "cosine")
    return [(*(row[key] for key in keys), percent(row["agreement"])) for row in outputs]


def percent(share: float | None) -> str | None:
    """A share as text, or None."""
    return None if share is None else f"{100 * share:.2f} %"


def measured(metrics: dict[str, Any]) -> dict[str, object]:
    """Size and latency of a comparison's plain values, for people."""
    if not metrics:
        return {}
    facts: dict[str, object] = {}
    if metrics["size_ratio"] is not None:
        before, after = megabytes(metrics["bytes_float"]), megabytes(metrics["bytes_quantized"])
        facts["size"] = f"{before} -> {after} ({metrics['size_ratio']:.2f} of float)"
    if metrics["latency_ratio"] is not None:
        times = f"{metrics['ms_float']:.3g} ms -> {metrics['ms_quantized']:.3g} ms"
        facts["latency"] = f"{times} ({metrics['latency_ratio']:.2f} of float, side by side)"
    facts["compared on"] = f"{metrics['feeds']} feeds"
    return facts
