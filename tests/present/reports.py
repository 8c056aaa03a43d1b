"""Reports for the tests of pages."""

from __future__ import annotations

from typing import Any

from sbonnx.batch.jobs.job import BatchReport
from sbonnx.present import html, junit
from sbonnx.present.html import overview
from sbonnx.report import Report
from sbonnx.values import json_values
from tests.support.values import built


def single_page(values: dict[str, Any]) -> str:
    """The page of a report of which some values are given."""
    return html.single_page(built(Report, values))


def batch_page(values: dict[str, Any]) -> str:
    """The page of a batch of which some values are given."""
    return html.batch_page(built(BatchReport, values))


def overview_of(values: dict[str, Any]) -> overview.Overview:
    """The overview of such a batch."""
    return overview.overview_of(built(BatchReport, values))


def junit_of(values: dict[str, Any]) -> str:
    """The XML of such a batch."""
    return junit.junit(built(BatchReport, values))


EVIL = (
    "</script><script>document.title='taken'</script>",
    '"><img src=x onerror="document.title=\'taken\'">',
    "'onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</style></svg></title><b>bold</b>",
    "a&amp;b <i>&lt;",
    "\x00\x07\x1b[31m\ud800\ufffe",
    "名前/ÄÖ/🙂",
    "a" * 300,
)
"""Names of nodes that must be escaped, replaced or shortened."""


def layer(name: str, alone: Any = 40.0, gathered: Any = 30.0) -> dict[str, Any]:
    return {
        "node": name,
        "tensor": f"{name}_output_0",
        "label": "uint8",
        "alone_db": alone,
        "sqnr_db": gathered,
        "scale": 0.0125,
    }


def sites_of(layers: list[dict[str, Any]], label: str = "int4 axis 0") -> list[dict[str, Any]]:
    """Sites of one activation and one weight per layer, in the given order."""
    found = []
    for row in layers:
        found.append(
            {"tensor": row["tensor"], "role": "activation", "label": row["label"], "bits": 8, "node": row["node"]}
        )
        weight = {"tensor": f"{row['node']}.weight", "role": "weight", "label": label, "bits": 4, "node": row["node"]}
        found.append(weight)
    return found


def node(name: str, *inputs: str, op: str = "Conv", scope: str = "", **more: Any) -> dict[str, Any]:
    """A row of `sbonnx.profiling.NodeRow`."""
    reads = [{"tensor": f"{name}_in", "role": "activation", "label": "uint8", "bits": 8, "low": 0.0, "high": 6.0}]
    row = {"name": name, "op": op, "scope": scope, "inputs": inputs, "shape": ("N", 8), "reads": reads, "refusals": ()}
    return {**row, **more}


def profiled(name: str, weights: Any, activations: Any, alone: Any = 20.0, gathered: Any = 15.0) -> dict[str, Any]:
    """A row of `sbonnx.profiling.LayerLoss`."""
    figures = {"alone": alone, "weights": weights, "activations": activations, "gathered": gathered}
    return {"node": name, "op": "Conv", "tensor": f"{name}_out", "scope": "", "label": "uint8", **figures, "feeds": 4}


def details(nodes: list[dict[str, Any]], layers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Details in the form of `sbonnx.profiling.Details.to_dict`, with a histogram for each layer."""
    histogram = {
        "role": "activation",
        "label": "uint8",
        "unit": "value",
        "low": -1.0,
        "high": 3.0,
        "counts": (1, 20, 3, 0),
        "covered": (0.0, 2.0),
        "step": 0.5,
        "clipped": 0.25,
    }
    rows = layers or []
    return {
        "nodes": nodes,
        "profile": {"measure": "sqnr", "layers": rows},
        "histograms": [{"tensor": row["tensor"], **histogram} for row in rows],
        "notes": (),
    }


def network(layers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A report in the form of `Report.to_dict`."""
    figures = {"mse": 1e-4, "max_abs": 0.1, "sqnr_db": 31.25, "cosine": 0.9999, "agreement": 0.975, "compared": 1}
    output = {"name": "y", **figures}
    metrics = {
        "outputs": [{**output, "low": -2.0, "high": 5.0}],
        "feeds": 1,
        "bytes_float": 1_000_000,
        "bytes_quantized": 260_000,
        "size_ratio": 0.26,
        "ms_float": 2.0,
        "ms_quantized": 1.0,
        "median_ms_float": 2.5,
        "median_ms_quantized": 1.5,
        "latency_ratio": 0.6,
        "levels": [{"level": "all", "output": "y", "sqnr_db": 31.25, "off_db": float("inf"), "max_abs": 0.0}],
        "kernels": None,
    }
    report: dict[str, Any] = {
        "ok": True,
        "problems": (),
        "model": "m.onnx",
        "output": "q.onnx",
        "backend": "onnxruntime",
        "counts": {"nodes_before": 9, "nodes_quantized": 20, "activations": 3, "weights": 2, "biases": 1, "samples": 8},
        "metrics": metrics,
        "layers": tuple(layers),
        "applied": ({"pattern": "fuse_bn", "node": "bn_0"}, {"pattern": "fuse_bn", "node": "bn_1"}),
        "refusals": ({"what": "quantize weight", "where": "/gather", "why": "it is shared"},),
        "settings": {"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 8}}},
        "notes": ("opset lifted from 17 to 21",),
        "search": {},
    }
    return {**report, **more}


def job(name: str, status: str = "done", *, up_to_date: bool = False, **outcome: Any) -> dict[str, Any]:
    """A row of a batch: a job with its outcome."""
    if outcome.get("report"):
        outcome["report"] = json_values(built(Report, outcome["report"]))
    made = {
        "key": f"key of {name}",
        "status": status,
        "reason": "",
        "seconds": 2.5,
        "peak_bytes": 300_000_000,
        "attempts": 1,
        "report": None,
        "accepted": (),
        "counters": {},
        "finished": "2026-11-21T02:10:00+00:00",
        **outcome,
    }
    asked = {
        "name": name,
        "model": "models/mobilenet.v2.onnx",
        "data": "data/net.npz",
        "backend": "tensorrt@10",
        "output": f"out/{name}.onnx",
        "split": None,
        "recipe": None,
        "overrides": (("bits", "w8a8"),),
        "limits": {"memory": 2_000_000_000, "seconds": 600.0, "retries": 1},
    }
    return {"job": asked, "outcome": made, "up_to_date": up_to_date}


def batch(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A report in the form of `asdict` of a `BatchReport`; the steps are those of the rows."""
    steps = {row["outcome"]["key"]: row["outcome"] for row in rows}
    return {
        "title": "nightly",
        "version": "1.2.3",
        "started": "2026-11-21T02:00:00.125+00:00",
        "finished": "2026-11-21T03:05:09+00:00",
        "rows": rows,
        "steps": steps,
        "titles": {key: f"quantize {key}" for key in steps},
        **more,
    }


def one_of_each() -> dict[str, Any]:
    """A batch with a job of every status."""
    layers = [layer("conv1", 50.0, float("inf")), layer("conv2", 40.0, 25.5)]
    accepted = (
        ("min_sqnr", 31.25, 20.0, True),
        ("min_agreement", 0.975, 0.98, False),
        ("min_metric.size of faces", 0.71, 0.7, True),
    )
    rows = [
        job("a-done", report=network(layers)),
        job("b-fresh", up_to_date=True, report=network(layers)),
        job(
            "c-below", "unaccepted", reason="agreement 97.5 % is below 98 %", accepted=accepted, report=network(layers)
        ),
        job("d-refused", "refused", reason="TensorRT has no such kernels"),
        job("e-failed", "failed", reason="ValueError: no"),
        job("f-crashed", "crashed", reason="it died by SIGSEGV", attempts=2),
        job("g-memory", "out of memory", reason="it held 3 GB of 2 GB"),
        job("h-time", "timed out", reason="it took longer than 600 s"),
        job("i-skipped", "skipped", reason="its calibration failed"),
    ]
    whole = batch(rows)
    calibrated = job("calibrated", seconds=60.0, counters={"runs": 512})["outcome"]
    whole["steps"]["c"] = calibrated
    whole["titles"]["c"] = "calibrate net"
    return whole
