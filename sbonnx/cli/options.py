"""Arguments and flags that more than one verb takes, in one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from sbonnx.errors import DataError, OutputError

DATA: Final = (
    "a folder of .npz files (one feed each: arrays named as the model's inputs, batch axis included), one .npz or "
    ".npy file (--split N cuts it into batches), a folder of .npy files, a folder of ONNX test_data_set_* folders, "
    "or Polygraphy's .json"
)

Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No tables and no progress, only what is wrong.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
"""Read by `faults.guard`, which runs every verb."""

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
        metavar="onnxruntime|tensorrt|virtual",
        help="The runtime to quantize for; the recipe's, or onnxruntime.",
        show_default=False,
    ),
]
RecipePath = Annotated[
    str | None,
    typer.Option("--recipe", metavar="FILE|auto", help="What to quantize and how: YAML.", show_default=False),
]
Bits = Annotated[
    str | None,
    typer.Option("--bits", metavar="w8a8", help="Widths of weights and activations.", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One key of the recipe; can be repeated.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


def overrides(sets: list[str] | None, **flags: object) -> list[str]:
    """What ``--set`` and the flags of its own ask for, as ``KEY=VALUE``."""
    return [*(f"{key}={value}" for key, value in flags.items() if value is not None), *(sets or ())]


def required(data: Path | None) -> Path:
    """The data, or the line that says what it can be.

    Raises:
        DataError: none was given.
    """
    if data is None:
        raise DataError(f"--data is missing: DATA is {DATA}")
    return data


def output_of(output: Path | None) -> Path:
    """The output, or the line that says how to name it.

    Raises:
        OutputError: none was given.
    """
    if output is None:
        raise OutputError("-o is missing: name the file to write, such as -o model.int8.onnx")
    return output
