"""Table of the arguments and options of the command line.

One row says everything about an option: flags, type, help, help group, and the recipe key that it sets. The signatures
for typer, the help groups and the overrides of the recipe are generated from the rows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

import typer

from sbonnx.cli.output.printer import Printer
from sbonnx.errors import DataError, OutputError, RecipeError

if TYPE_CHECKING:
    from sbonnx.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CommandOption(Generic[T]):
    """One row: an option of the command line, or an argument (without flags). T is the type of its value.

    Attributes:
        name: name of the parameter.
        flags: ``--output``, then short forms; none for an argument.
        type: annotation of the value for typer; bool is a switch.
        help: help text.
        metavar: placeholder of the value in the help; None: by type.
        default: value without the option; `inspect.Parameter.empty`: required.
        group: panel of the help on a terminal; "": the first one.
        key: recipe key that the option sets; "": none.
        convert: value of the recipe key from the value of the option; None: the same.
    """

    name: str
    flags: tuple[str, ...]
    type: Any
    help: str
    metavar: str | None = None
    default: Any = None
    group: str = ""
    key: str = ""
    convert: Callable[[Any], object] | None = None

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that declares this option to typer."""
        show_default = self.default is not None and self.default is not inspect.Parameter.empty
        info = (
            typer.Option(
                *self.flags,
                metavar=self.metavar,
                help=self.help,
                show_default=show_default,
                rich_help_panel=self.group or None,
            )
            if self.flags
            else typer.Argument(metavar=self.metavar, help=self.help, show_default=show_default)
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=Annotated[self.type, info])


def _row(flags: str, kind: Any, help: str, metavar: str | None, **more: Any) -> CommandOption[Any]:
    names = tuple(flags.split())
    return CommandOption(names[0].removeprefix("--").replace("-", "_"), names, kind, help, metavar, **more)


def option(flags: str, kind: type[T], metavar: str | None, help: str, **more: Any) -> CommandOption[T | None]:
    """Declare an option without a default. `more`: further fields of `CommandOption`."""
    return _row(flags, kind | None, help, metavar, **more)


def setting(flags: str, default: T, metavar: str, help: str, **more: Any) -> CommandOption[T]:
    """Declare an option with a default, which the help shows."""
    kind = Path if isinstance(default, Path) else type(default)
    return _row(flags, kind, help, metavar, default=default, **more)


def switch(flags: str, help: str, **more: Any) -> CommandOption[bool]:
    """Declare an option without a value."""
    return _row(flags, bool, help, None, default=False, **more)


def repeated(flags: str, metavar: str, help: str, **more: Any) -> CommandOption[list[str] | None]:
    """Declare an option that can be given several times."""
    return _row(flags, list[str] | None, f"{help}; can be repeated.", metavar, **more)


def argument(name: str, metavar: str | None, help: str) -> CommandOption[Path]:
    """Declare a required argument: a path."""
    return CommandOption(name, (), Path, help, metavar, inspect.Parameter.empty)


def optional_argument(name: str, metavar: str | None, help: str) -> CommandOption[Path | None]:
    """Declare an argument that can be left out: a path."""
    return CommandOption(name, (), Path | None, help, metavar)


DATA_FORMATS: Final = (
    "a folder of .npz files (one feed each: arrays named as the model's inputs, batch axis included), one .npz or "
    ".npy file (--split N cuts it into batches), a folder of .npy files, a folder of ONNX test_data_set_* folders, "
    "or Polygraphy's .json"
)


def feedback_pairs(feedback: Sequence[str]) -> dict[str, str]:
    """Parse ``OUT=IN`` into inputs by output.

    Raises:
        RecipeError: text that is not OUT=IN, or a duplicate output.
    """
    inputs: dict[str, str] = {}
    for text in feedback:
        output, equals, name = text.partition("=")
        if not equals or not output or not name:
            raise RecipeError(f"--feedback is OUT=IN, an output and the input that takes it, got '{text}'")
        if output in inputs:
            raise RecipeError(f"--feedback maps output '{output}' to two inputs, '{inputs[output]}' and '{name}'")
        inputs[output] = name
    return inputs


def decibel(text: str) -> str:
    """Strip the unit from a number of decibel: ``20dB`` -> ``20``."""
    return text.strip().lower().removesuffix("db").strip() or text


QUANTIZATION: Final = "Quantization"
SAMPLING: Final = "Samples"
CALIBRATION: Final = "Calibration"
QUALITY: Final = "Quality"
FILES: Final = "Further files"
"""Help groups."""

MODEL: Final = argument("model", "MODEL", "The float ONNX model.")
DATA: Final = option("--data", Path, None, f"{DATA_FORMATS[0].upper()}{DATA_FORMATS[1:]}.")
OUTPUT: Final = option("--output -o", Path, None, "The quantized model to write.")
BACKEND: Final = option(
    "--backend",
    str,
    "onnxruntime|tensorrt[@VERSION]|virtual",
    "Target runtime, such as tensorrt@10; default: the recipe's, or onnxruntime.",
)
RECIPE: Final = option("--recipe", str, "FILE|auto", "The recipe, YAML: what to quantize and how.")
BITS: Final = option("--bits", str, "w8a8|fp8", "Bit widths of weights and activations, or fp8 for both.", key="bits")
BLOCK_SIZE: Final = option(
    "--block-size",
    int,
    "N",
    "Number of values along the summed axis of a MatMul weight that share a scale.",
    key="block_size",
    group=QUANTIZATION,
)
MODE: Final = option(
    "--mode",
    str,
    "static|dynamic|weight_only",
    "Scales of activations: from data, computed at run time (onnxruntime), or none; only static needs --data.",
    key="mode",
    group=QUANTIZATION,
)
FORMAT: Final = option(
    "--format",
    str,
    "qdq|qoperator",
    "Float ops between Q/DQ pairs, or integer ops (onnxruntime).",
    key="format",
    group=QUANTIZATION,
)
SET: Final = repeated("--set", "KEY=VALUE", "Set one key of the recipe", group=QUANTIZATION)
SPLIT: Final = option("--split", int, "N", "Split the leading axis into batches of N.", group=SAMPLING)
SAMPLES: Final = option("--samples", int, "N", "Use at most N feeds (batches).", key="samples", group=SAMPLING)
DEVICE: Final = option("--device", str, "cpu|cuda|auto", "Device that runs the model.", key="device")
MEMORY: Final = option(
    "--memory",
    str,
    "SIZE",
    "Memory limit of activations; the rest is written to disk.",
    key="memory",
    group=CALIBRATION,
)
GRANULARITY: Final = option(
    "--granularity",
    str,
    "auto|whole|budget|layer",
    "How much of the model runs at a time.",
    key="granularity",
    group=CALIBRATION,
)
WORKERS: Final = option(
    "--workers", int, "N", "Calibrate in N processes, with the same result.", key="workers", group=CALIBRATION
)
CACHE: Final = option(
    "--cache",
    Path,
    "FOLDER",
    "Cache of calibration statistics: for runs with other settings, and to resume interrupted runs.",
    key="cache",
    group=CALIBRATION,
)
ASYM: Final = switch(
    "--asym",
    "Measure each layer with quantized inputs: everything before it is quantized.",
    key="asym",
    group=CALIBRATION,
)
FEEDBACK: Final = repeated(
    "--feedback",
    "OUT=IN",
    "Recurrent models: input IN takes the value of output OUT of the previous step",
    key="feedback",
    convert=feedback_pairs,
    group=SAMPLING,
)
CROSS_LAYER: Final = switch(
    "--cross-layer",
    "Cross-layer equalization: equal channel ranges in consecutive layers, for per-tensor weights.",
    key="cross_layer",
    group=QUANTIZATION,
)
SMOOTH_QUANT: Final = option(
    "--smooth-quant",
    str,
    "true|0-1",
    "SmoothQuant: move channel ranges from layer inputs into weights, with this strength.",
    key="smooth_quant",
    group=QUANTIZATION,
)
MAX_LOSS: Final = option(
    "--max-loss",
    str,
    "SHARE",
    "Maximum loss on held-out samples, such as 0.5%; layers get more bits until it is met.",
    key="max_loss",
    group=QUALITY,
)
TARGET_SQNR: Final = option(
    "--min-sqnr",
    str,
    "DB",
    "Exit 1 if the SQNR of an output is lower; with --recipe auto, layers get more bits first.",
    key="min_sqnr",
    convert=decibel,
    group=QUALITY,
)
AVERAGE_BITS: Final = option(
    "--average-bits",
    float,
    "N",
    "Choose the weight width of each layer, N bits on average.",
    key="average_bits",
    convert=str,
    group=QUANTIZATION,
)
SAVE_RECIPE: Final = option(
    "--save-recipe",
    Path,
    "FILE",
    "Write the resolved recipe, including the results of searches, for further runs.",
    group=FILES,
)
TRT_CACHE: Final = option(
    "--trt-cache", Path, "FILE", "Also write the ranges as a calibration cache of TensorRT.", group=FILES
)
REQUANTIZE: Final = switch(
    "--requantize",
    "Remove the Q/DQ pairs of an already quantized model first.",
    key="requantize",
    group=QUANTIZATION,
)
HIGH_PRECISION: Final = option(
    "--high-precision",
    str,
    "fp32|fp16|bf16",
    "Type of tensors that are not quantized, strongly typed; not for onnxruntime.",
    key="high_precision",
    group=QUANTIZATION,
)
NO_KEEP_IO: Final = switch(
    "--no-keep-io",
    "With --high-precision: convert the inputs and outputs of the model too.",
    key="keep_io",
    convert=lambda _: "false",
    group=QUANTIZATION,
)
NO_VERIFY: Final = switch("--no-verify", "Do not compare the result with the float model.", group=QUALITY)
MIN_SQNR: Final = option(
    "--min-sqnr", float, "DB", "Exit 1 if the SQNR of an output is lower.", key="VERIFY.MIN_SQNR_DB", group=QUALITY
)
MIN_COSINE: Final = option(
    "--min-cosine",
    float,
    "C",
    "Exit 1 if the cosine similarity of an output is lower.",
    key="VERIFY.MIN_COSINE",
    group=QUALITY,
)
MAX_SIZE: Final = option(
    "--max-size",
    float,
    "RATIO",
    "Exit 1 if the file is larger, relative to float.",
    key="VERIFY.MAX_SIZE_RATIO",
    group=QUALITY,
)
MAX_LATENCY: Final = option(
    "--max-latency",
    float,
    "RATIO",
    "Exit 1 if the latency is higher, relative to float.",
    key="VERIFY.MAX_LATENCY_RATIO",
    group=QUALITY,
)
MIN_INTEGER: Final = option(
    "--min-integer",
    float,
    "SHARE",
    "Exit 1 if fewer of the planned ops run in integer kernels.",
    key="VERIFY.MIN_INTEGER",
    group=QUALITY,
)
REPORT: Final = option(
    "--report",
    Path,
    "FILE.json|FILE.html",
    "Write the whole report, as JSON or as an HTML page.",
    group=FILES,
)
FORCE: Final = switch("--force", "Overwrite existing files.")
JSON: Final = switch("--json", "One JSON value on stdout instead of tables.")
JSON_PROGRESS: Final = switch("--json-progress", "Progress as JSON lines on stderr, for scripts.")
QUIET: Final = switch("--quiet -q", "No tables and no progress, only problems and errors.")
DEBUG: Final = switch("--debug", "Show the traceback of an error.")
"""Read by `error_lines.guard`, which runs every command."""

COMMON: Final = (JSON, QUIET, DEBUG)
COMMON_WITH_PROGRESS: Final = (JSON, JSON_PROGRESS, QUIET, DEBUG)
"""Last options of every verb."""

LIMITS: Final = (MIN_SQNR, MIN_COSINE, MAX_SIZE, MAX_LATENCY, MIN_INTEGER)
"""Thresholds of a comparison."""


@dataclass(frozen=True)
class Arguments:
    """Values of one command line, by row of the table."""

    values: Mapping[CommandOption[Any], Any]

    def __getitem__(self, option: CommandOption[T]) -> T:
        value: T = self.values[option]
        return value

    def overrides(self, *, without: Collection[CommandOption[Any]] = ()) -> list[str]:
        """Format the options that set recipe keys, then ``--set``, as ``KEY=VALUE``."""
        texts = []
        for row, value in self.values.items():
            absent = value is None or value is False or value == []
            if row.key and not absent and row not in without:
                texts.append(f"{row.key}={_yaml(row.convert(value) if row.convert else value)}")
        return [*texts, *(self.values.get(SET) or ())]

    def required_data(self) -> Path:
        """Return the path of the data.

        Raises:
            DataError: ``--data`` is missing; the error lists the accepted formats.
        """
        data = self[DATA]
        if data is None:
            raise DataError(f"--data is missing: DATA is {DATA_FORMATS}")
        return data

    def printer(self) -> Printer:
        """Return the printer of results."""
        return Printer(as_json=self[JSON], quiet=self[QUIET])

    def progress(self) -> Progress:
        """Start the display of progress on stderr."""
        from sbonnx.progress import make_progress

        return make_progress(quiet=self[QUIET], as_json=self.values.get(JSON_PROGRESS, False))


def _yaml(value: object) -> object:
    """Format an option's value as YAML that parses back to it: JSON for paths and mappings, else unchanged."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def required_output(output: Path | None) -> Path:
    """Return the output path, or raise an error that says how to give it.

    Raises:
        OutputError: ``-o`` is missing.
    """
    if output is None:
        raise OutputError("-o is missing: name the file to write, such as -o model.int8.onnx")
    return output


def command(options: Sequence[CommandOption[Any]], run: Callable[[Arguments], int]) -> Callable[..., int]:
    """Wrap `run` in a function whose signature declares `options` to typer."""

    def verb(**values: Any) -> int:
        return run(Arguments({row: values[row.name] for row in options}))

    verb.__dict__["__signature__"] = inspect.Signature([row.parameter() for row in options])
    verb.__annotations__ = {}
    return verb
