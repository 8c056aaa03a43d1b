"""Arguments and options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from sbonnx.errors import DataError, OutputError, RecipeError

DATA: Final = (
    "a folder of .npz files (one feed each: arrays named as the model's inputs, batch axis included), one .npz or "
    ".npy file (--split N cuts it into batches), a folder of .npy files, a folder of ONNX test_data_set_* folders, "
    "or Polygraphy's .json"
)

Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress, only what is wrong.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
"""Read by `errors.guard`, which runs every command."""

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The float ONNX model.", show_default=False)]
Data = Annotated[Path | None, typer.Option("--data", help=f"{DATA[0].upper()}{DATA[1:]}.", show_default=False)]
Split = Annotated[
    int | None, typer.Option("--split", metavar="N", help="Cut the leading axis into batches of N.", show_default=False)
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="Use at most N feeds (batches).", show_default=False)
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda|auto", help="Where the model runs.", show_default=False)
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="onnxruntime|tensorrt[@VERSION]|virtual",
        help="The runtime to quantize for, such as tensorrt@10; the recipe's, or onnxruntime.",
        show_default=False,
    ),
]
RecipePath = Annotated[
    str | None,
    typer.Option("--recipe", metavar="FILE|auto", help="What to quantize and how: YAML.", show_default=False),
]
Bits = Annotated[
    str | None,
    typer.Option(
        "--bits", metavar="w8a8|fp8", help="Widths of weights and activations, or fp8 for both.", show_default=False
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="static|dynamic|weight_only",
        help="Scales of activations from data, as the model runs (onnxruntime), or none; only the first needs --data.",
        show_default=False,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="qdq|qoperator",
        help="Float ops between Q/DQ pairs, or integer ops (onnxruntime).",
        show_default=False,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        metavar="N",
        help="Values along the summed axis of a MatMul's weight that share a scale.",
        show_default=False,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One key of the recipe; can be repeated.", show_default=False),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory for activations; past it they go to disk.", show_default=False
    ),
]
Granularity = Annotated[
    str | None,
    typer.Option("--granularity", metavar="auto|whole|budget|layer", help="What runs at a time.", show_default=False),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="Calibrate in N processes, to the same result.", show_default=False),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        help="Keep what was measured here: for other settings, and to go on after a stop.",
        show_default=False,
    ),
]
Asym = Annotated[bool, typer.Option("--asym", help="Measure with everything upstream quantized already.")]
Feedback = Annotated[
    list[str] | None,
    typer.Option(
        "--feedback",
        metavar="OUT=IN",
        help="Recurrent models: input IN takes what output OUT gave at the step before; can be repeated.",
        show_default=False,
    ),
]
CrossLayer = Annotated[
    bool, typer.Option("--cross-layer", help="Equal ranges of channels in neighbouring layers, for per-tensor weights.")
]
SmoothQuant = Annotated[
    str | None,
    typer.Option(
        "--smooth-quant",
        metavar="true|0-1",
        help="Move ranges of channels from inputs of layers into weights, by this strength.",
        show_default=False,
    ),
]
JsonProgress = Annotated[bool, typer.Option("--json-progress", help="Progress as JSON lines on stderr, for scripts.")]
TrtCache = Annotated[
    Path | None,
    typer.Option(
        "--trt-cache",
        metavar="FILE",
        help="Write the ranges as TensorRT's calibration cache too.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The quantized model to write.", show_default=False)
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare the result with float.")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE.json|FILE.html",
        help="Write the whole report: for programs, or as a page for people.",
        show_default=False,
    ),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Take the pairs of a model that is quantized already out first.")
]
HighPrecision = Annotated[
    str | None,
    typer.Option(
        "--high-precision",
        metavar="fp32|fp16|bf16",
        help="Type of what stays float, strongly typed; not for onnxruntime.",
        show_default=False,
    ),
]
NoKeepIo = Annotated[
    bool, typer.Option("--no-keep-io", help="With --high-precision: inputs and outputs change type too.")
]
MinSqnr = Annotated[
    float | None,
    typer.Option("--min-sqnr", metavar="DB", help="Exit 1 if an output is nearer to noise.", show_default=False),
]
MaxLoss = Annotated[
    str | None,
    typer.Option(
        "--max-loss",
        metavar="SHARE",
        help="What may be lost on samples held out, such as 0.5%: more bits for some layers until it is kept.",
        show_default=False,
    ),
]
LeastSqnr = Annotated[
    str | None,
    typer.Option(
        "--min-sqnr",
        metavar="DB",
        help="Exit 1 if an output is nearer to noise; with --recipe auto layers get more bits before.",
        show_default=False,
    ),
]
AverageBits = Annotated[
    float | None,
    typer.Option(
        "--average-bits", metavar="N", help="Choose a width for each layer's weights, N on average.", show_default=False
    ),
]
SaveRecipe = Annotated[
    Path | None,
    typer.Option(
        "--save-recipe",
        metavar="FILE",
        help="Write the recipe that was run: what was found out, to be run again.",
        show_default=False,
    ),
]
MinCosine = Annotated[
    float | None,
    typer.Option("--min-cosine", metavar="C", help="Exit 1 if an output's cosine is below.", show_default=False),
]
MaxSize = Annotated[
    float | None,
    typer.Option(
        "--max-size", metavar="RATIO", help="Exit 1 if the file is larger, against float.", show_default=False
    ),
]
MaxLatency = Annotated[
    float | None,
    typer.Option(
        "--max-latency", metavar="RATIO", help="Exit 1 if a run is slower, against float.", show_default=False
    ),
]
MinInteger = Annotated[
    float | None,
    typer.Option(
        "--min-integer",
        metavar="SHARE",
        help="Exit 1 if fewer of the ops between pairs run in integers.",
        show_default=False,
    ),
]
LIMITS: Final = {
    "MIN_SQNR_DB": "--min-sqnr",
    "MIN_COSINE": "--min-cosine",
    "MAX_SIZE_RATIO": "--max-size",
    "MAX_LATENCY_RATIO": "--max-latency",
    "MIN_INTEGER": "--min-integer",
}
"""Command line options by recipe key."""

Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def overrides(sets: list[str] | None, **flags: object) -> list[str]:
    """Merge options and ``--set`` into ``KEY=VALUE`` strings. None and False mean that an option was not given."""
    given = {key: value for key, value in flags.items() if value is not None and value is not False}
    return [*(f"{key}={_yaml(value)}" for key, value in given.items()), *(sets or ())]


def _yaml(value: object) -> object:
    """Format an option's value as YAML that parses back to it: JSON for paths and mappings, else unchanged."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def pairs(feedback: list[str] | None) -> dict[str, str] | None:
    """Parse ``--feedback OUT=IN`` into inputs by output, or None without the option.

    Raises:
        RecipeError: text that is not OUT=IN, or a duplicate output.
    """
    found: dict[str, str] = {}
    for text in feedback or ():
        output, equals, name = text.partition("=")
        if not equals or not output or not name:
            raise RecipeError(f"--feedback is OUT=IN, an output and the input that takes it, got '{text}'")
        if output in found:
            raise RecipeError(f"--feedback leads output '{output}' to two inputs, '{found[output]}' and '{name}'")
        found[output] = name
    return found or None


def required(data: Path | None) -> Path:
    """Return the data, or raise an error that lists the accepted formats.

    Raises:
        DataError: ``--data`` is missing.
    """
    if data is None:
        raise DataError(f"--data is missing: DATA is {DATA}")
    return data


def output_of(output: Path | None) -> Path:
    """Return the output path, or raise an error that says how to give it.

    Raises:
        OutputError: ``-o`` is missing.
    """
    if output is None:
        raise OutputError("-o is missing: name the file to write, such as -o model.int8.onnx")
    return output


def decibel(text: str | None) -> str | None:
    """Strip the unit from a number of decibel: ``20dB`` -> ``20``."""
    return None if text is None else text.strip().lower().removesuffix("db").strip() or text
