"""``sbonnx run``: run a model on data or on random inputs, and save its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import DataError

HELP: Final = "Run a model and save its outputs. On data, or on random inputs."

MODEL: Final = options.argument("model", "MODEL", "The ONNX model, float or quantized.")
DATA: Final = replace(options.DATA, help=f"{options.DATA.help} Without it, one feed is drawn at random.")
OUTPUT: Final = replace(
    options.OUTPUT,
    help="Where to write the outputs: FILE.npz (several feeds: joined along the leading axis), or a folder of one .npz "
    "per feed.",
)
SHAPE: Final = options.repeated(
    "--shape INPUT=DIMS", "Random inputs: shape of an input with dynamic axes, such as image=1x3x224x224"
)
BATCH: Final = options.setting("--batch N", 1, "Random inputs: size of dynamic leading axes.")
SEED: Final = options.setting("--seed N", 0, "Random inputs: seed of the values.")
RANDOM: Final = (SHAPE, BATCH, SEED)
"""Options of random inputs."""

OPTIONS: Final = (
    MODEL,
    DATA,
    OUTPUT,
    *options.FEEDS,
    *RANDOM,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx.api.model_run import run as run_model

    printer, result = given.printer(), given.call(run_model, shape=shapes_of(given[SHAPE] or ()))
    printer.value("run", result)
    printer.table(
        f"{result.model}: {result.feeds} {'feed' if result.feeds == 1 else 'feeds'}",
        ("output", "type", "shape", "min", "mean", "max", "not finite"),
        [
            (
                row.name,
                row.type,
                "varies" if row.shape is None else f"({', '.join(map(str, row.shape))})",
                *(row.min, row.mean, row.max),
                row.not_finite or None,
            )
            for row in result.outputs
        ],
    )
    printer.notes(result.notes)
    if result.output is not None:
        printer.line(f"written: {result.output}")
    return 0


def shapes_of(texts: Any) -> dict[str, tuple[int, ...]]:
    """Parse ``INPUT=1x3x224x224`` into shapes by input.

    Raises:
        DataError: text of another form, or an input twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        sizes = dims.replace(",", "x").split("x")
        if not equals or not name or not all(size.strip().isdecimal() for size in sizes):
            raise DataError(f"--shape is INPUT=DIMS, such as image=1x3x224x224, got '{text}'")
        if name in shapes:
            raise DataError(f"--shape gives input '{name}' two shapes")
        shapes[name] = tuple(int(size) for size in sizes)
    return shapes
