"""``sbonnx compare``: a float model and a quantized one side by side on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.figures import OUTPUT_COLUMNS, measured, output_rows
from sbonnx.cli.show import Show

HELP: Final = "Compare a quantized model with its float one. Error of each output, size, latency."


def run(
    float_model: Annotated[Path, typer.Argument(metavar="FLOAT", help="The float model.", show_default=False)],
    quant_model: Annotated[Path, typer.Argument(metavar="QUANT", help="The quantized model.", show_default=False)],
    data: options.Data = None,
    split: options.Split = None,
    samples: options.Samples = None,
    device: options.Device = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """See `HELP`."""
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib import data as datasets

    show = Show(as_json=as_json, quiet=quiet)
    source = options.required(data)
    graphs.load(quant_model)  # for the message, if it is no model
    feeds = datasets.read(source, graphs.load(float_model), split=split, limit=samples)
    comparison = verify.compare(float_model, quant_model, feeds, device=device or "cpu")
    metrics = comparison.to_dict()
    problems = comparison.problems()
    show.value({"float": float_model, "quantized": quant_model, **metrics, "problems": problems, "ok": not problems})
    show.facts(f"{quant_model} against {float_model}", measured(metrics))
    show.table("outputs against float", OUTPUT_COLUMNS, output_rows(metrics["outputs"]))
    return show.problems(problems)
