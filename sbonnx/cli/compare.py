"""``sbonnx compare``: compare a quantized model with its float model on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.metric_tables import OUTPUT_COLUMNS, measured, output_rows
from sbonnx.cli.output.show import Show

HELP: Final = "Compare a quantized model with its float one. Error of each output, size, latency, integer kernels."


def run(
    float_model: Annotated[Path, typer.Argument(metavar="FLOAT", help="The float model.", show_default=False)],
    quant_model: Annotated[Path, typer.Argument(metavar="QUANT", help="The quantized model.", show_default=False)],
    data: options.Data = None,
    split: options.Split = None,
    samples: options.Samples = None,
    device: options.Device = None,
    min_sqnr: options.MinSqnr = None,
    min_cosine: options.MinCosine = None,
    max_size: options.MaxSize = None,
    max_latency: options.MaxLatency = None,
    min_integer: options.MinInteger = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx compare`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data import dataset as datasets

    show = Show(as_json=as_json, quiet=quiet)
    limits = verify.Limits(
        min_sqnr_db=min_sqnr,
        min_cosine=min_cosine,
        max_size_ratio=max_size,
        max_latency_ratio=max_latency,
        min_integer=min_integer,
        names=options.LIMITS,
    )
    source = options.required(data)
    graphs.load(quant_model)  # validates the file, for a clear error message
    feeds = datasets.read(source, graphs.load(float_model), split=split, limit=samples)
    comparison = verify.compare(
        float_model, quant_model, feeds, device=device or "cpu", depth=verify.Depth(levels=True, kernels=True)
    )
    metrics = comparison.to_dict()
    problems = (*comparison.problems(), *limits.problems(comparison))
    code = show.problems(problems)
    show.value({"ok": not problems, "problems": problems, "float": float_model, "quantized": quant_model, **metrics})
    _tables(show, float_model, quant_model, comparison.kernels, metrics)
    return code


def _tables(show: Show, float_model: Path, quant_model: Path, kernels: Any, metrics: dict[str, Any]) -> None:
    show.facts(f"{quant_model} against {float_model}", measured(metrics))
    show.table("outputs against float", OUTPUT_COLUMNS, output_rows(metrics["outputs"]))
    left = () if kernels is None else kernels.left_float
    show.table("in float between pairs", ("node", "op", "why"), [(one.node, one.op, one.why) for one in left])
