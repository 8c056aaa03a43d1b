"""Table of the arguments and options of the command line.

One row says everything about an option: flags, type, help, help group, and the recipe key that it sets. The signatures
for typer, the help groups and the overrides of the recipe are generated from the rows.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

import typer

from sbonnx.errors import DataError, OutputError, RecipeError
from sbonnx.present.text.printer import Printer
from sbonnx.recipe.problem import TypedOption
from sbonnx.recipe.sections import flags
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths

if TYPE_CHECKING:
    from sbonnx.calib.data import DataPath
    from sbonnx.cli.configuration import Configuration
    from sbonnx.progress import Progress
    from sbonnx.recipe import Recipe

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
        shown: default in the help, of options whose default is decided elsewhere, such as in the recipe.
        choices: values that the shell completes, by what is typed already; None: those of the metavar.
        writes: the value is the path of something that is written; other paths are inputs.
        is_word: whether a value is a word, such as ``auto``, and not the path of a file; None: all are, or `is_path`.
        typed: the option is never taken from a configuration file.
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
    shown: str = ""
    choices: Callable[[str], Iterable[str]] | None = None
    writes: bool = False
    is_word: Callable[[str], bool] | None = None
    typed: bool = False

    @property
    def is_path(self) -> bool:
        """Whether every value is a path."""
        return "Path" in str(self.type)

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that declares this option to typer."""
        has_default = self.default is not None and self.default is not inspect.Parameter.empty
        show_default: bool | str = self.shown or has_default
        completed: dict[str, Any] = {}
        if self.choices is not None or _words_of(self.metavar):
            completed = {"autocompletion": self._completed}
        info = (
            typer.Option(
                *self.flags,
                metavar=self.metavar,
                help=self.help,
                show_default=show_default,
                rich_help_panel=self.group or None,
                **completed,
            )
            if self.flags
            else typer.Argument(metavar=self.metavar, help=self.help, show_default=show_default, **completed)
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=Annotated[self.type, info])

    def _completed(self, incomplete: str) -> list[str]:
        words = self.choices(incomplete) if self.choices is not None else _words_of(self.metavar)
        return [word for word in words if word.startswith(incomplete)]


def _words_of(metavar: str | None) -> list[str]:
    """Return the literal values of a placeholder: ``auto|whole`` -> auto, whole; none of ``FILE|auto[@VERSION]``."""
    return [word for word in (metavar or "").split("|") if re.fullmatch(r"[a-z][a-z0-9_@.+-]*", word)]


def option(usage: str, kind: type[T], help: str, group: str = "", **more: Any) -> CommandOption[T | None]:
    """Declare an option without a default.

    Args:
        usage: flags, then the placeholder of the value if it has one: ``--output -o``, ``--bits w8a8|fp8``.
        more: further fields of `CommandOption`.
    """
    return _row(usage, kind | None, help, group, **more)


def output_option(usage: str, help: str, group: str = "") -> CommandOption[Path | None]:
    """Declare an option for a path that is written."""
    return _row(usage, Path | None, help, group, writes=True, typed=True)


def key_option(path: str, kind: type[T], **more: Any) -> CommandOption[T | None]:
    """Declare the option of a recipe key, as the key's `Flag` says.

    Args:
        path: of the key.
        more: fields of `CommandOption` in place of those of the flag.
    """
    return _key_row(path, kind | None, **more)


def key_switch(path: str, **more: Any) -> CommandOption[bool]:
    """Declare the option of a recipe key that has no value, see `key_option`."""
    return _key_row(path, bool, default=False, **more)


def key_options(path: str, **more: Any) -> CommandOption[list[str] | None]:
    """Declare the option of a recipe key that can be given several times, see `key_option`."""
    row = _key_row(path, list[str] | None, **more)
    return replace(row, help=f"{row.help}; can be repeated.")


def _key_row(path: str, kind: Any, **more: Any) -> CommandOption[Any]:
    flag = KEYS[path].flag
    assert flag is not None
    name = _name(flag.usage)
    key = name if SHORT_FORMS.get(name, name).upper() == path else path
    fields = {"key": key, "shown": flag.shown, "help": flag.help, **more}
    return _row(flag.usage, kind, fields.pop("help"), flag.group, **fields)


def setting(usage: str, default: T, help: str, group: str = "") -> CommandOption[T]:
    """Declare an option with a default, which the help shows."""
    return _row(usage, Path if isinstance(default, Path) else type(default), help, group, default=default)


def switch(usage: str, help: str, group: str = "", **more: Any) -> CommandOption[bool]:
    """Declare an option without a value."""
    return _row(usage, bool, help, group, default=False, **more)


def repeated(usage: str, help: str, group: str = "", **more: Any) -> CommandOption[list[str] | None]:
    """Declare an option that can be given several times."""
    return _row(usage, list[str] | None, f"{help}; can be repeated.", group, **more)


def _row(usage: str, kind: Any, help: str, group: str, **more: Any) -> CommandOption[Any]:
    words = usage.split()
    flags = tuple(word for word in words if word.startswith("-"))
    metavar = words[-1] if len(words) > len(flags) else None
    return CommandOption(_name(usage), flags, kind, help, metavar=metavar, group=group, **more)


def _name(usage: str) -> str:
    return usage.split()[0].removeprefix("--").replace("-", "_")


def argument(name: str, metavar: str | None, help: str) -> CommandOption[Path]:
    """Declare a required argument: a path."""
    return CommandOption(name, (), Path, help, metavar, inspect.Parameter.empty)


def optional_argument(name: str, metavar: str | None, help: str) -> CommandOption[Path | None]:
    """Declare an argument that can be left out: a path."""
    return CommandOption(name, (), Path | None, help, metavar)


DATA_FORMATS: Final = (
    "a folder of .npz files (one feed each: arrays named as the model's inputs, batch axis included), one .npz or "
    ".npy file (--split N cuts it into batches), a folder of .npy files, a folder of ONNX test_data_set_* folders, "
    "Polygraphy's .json, a folder of images, audio or texts (with --preprocess), or data.py:FUNCTION (yields feeds)"
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


def output_tasks(tasks: Sequence[str]) -> str | dict[str, str]:
    """Parse ``TASK``, or ``OUTPUT=TASK`` into tasks by output.

    Raises:
        RecipeError: both are given, or an output twice.
    """
    if len(tasks) == 1 and "=" not in tasks[0]:
        return tasks[0]
    task_of: dict[str, str] = {}
    for text in tasks:
        output, equals, task = text.rpartition("=")
        if not equals or not output or not task or output in task_of:
            raise RecipeError(
                f"--task is one task of all outputs, or OUTPUT=TASK once for each, got '{' '.join(tasks)}'"
            )
        task_of[output] = task
    return task_of


def decibel(text: str) -> str:
    """Strip the unit from a number of decibel: ``20dB`` -> ``20``."""
    return text.strip().lower().removesuffix("db").strip() or text


def _backends(_: str) -> Iterable[str]:
    from sbonnx.recipe.names import VERSIONED

    return ("onnxruntime", "openvino", "qnn", "tensorrt", "virtual", "web", *VERSIONED)


def _recipe_keys(typed: str) -> Iterable[str]:
    """Return the keys of recipes as ``KEY=``, in the case that is typed."""
    names = (*KEYS, *(form.upper() for form in ("bits", *SHORT_FORMS)))
    return (f"{name.lower() if typed.islower() else name}=" for name in names)


def _is_preset(text: str) -> bool:
    from sbonnx.calib.data.readers.preprocess_values import PRESETS

    return text in PRESETS


def _observers(_: str) -> Iterable[str]:
    from sbonnx.recipe.names import OBSERVERS

    return OBSERVERS


def _output_tasks(_: str) -> Iterable[str]:
    from sbonnx.recipe.names import OUTPUT_TASKS

    return OUTPUT_TASKS


QUANTIZATION: Final = flags.QUANTIZATION
SAMPLING: Final = flags.SAMPLING
CALIBRATION: Final = flags.CALIBRATION
QUALITY: Final = flags.QUALITY
EVALUATION: Final = flags.EVALUATION
FILES: Final = "Further files"
TERMINAL: Final = "Output and errors"
"""Help groups."""

MODEL: Final = argument("model", "MODEL", "The float ONNX model.")
DATA: Final = option("--data", Path, f"{DATA_FORMATS[0].upper()}{DATA_FORMATS[1:]}.")
PREPROCESS: Final = option(
    "--preprocess PRESET|FILE",
    str,
    "How images, audio and texts become inputs: imagenet, inception, caffe, yolo, unit, raw; YAML or JSON; a Hugging "
    "Face preprocessor_config.json or tokenizer.json.",
    is_word=_is_preset,
)
OUTPUT: Final = output_option("--output -o", "The quantized model to write.")
BACKEND: Final = option(
    "--backend onnxruntime|openvino|qnn|tensorrt[@VERSION]|virtual|web",
    str,
    "Target runtime, such as tensorrt@10 (short: ort, ov, trt@10).",
    shown="the recipe's, or onnxruntime",
    choices=_backends,
)
RECIPE: Final = option(
    "--recipe FILE|auto",
    str,
    "The recipe, YAML: what to quantize and how.",
    is_word=lambda text: text.lower() == "auto",
)
BITS: Final = option(
    "--bits w8a8|fp8|nvfp4",
    str,
    "Bit widths of weights and activations, or a type of small floats: fp8 for both, nvfp4, mxfp4, mxfp8 for weights.",
    shown="w8a8",
    key="bits",
)
BLOCK_SIZE: Final = key_option("W.BLOCK_SIZE", int)
MODE: Final = key_option("MODE", str)
FORMAT: Final = key_option("FORMAT", str)
SET: Final = repeated("--set KEY=VALUE", "Set one key of the recipe", QUANTIZATION, choices=_recipe_keys)
OBSERVER: Final = key_option("A.OBSERVER.TYPE", str, choices=_observers)
INCLUDE: Final = key_options("INCLUDE")
EXCLUDE: Final = key_options("EXCLUDE")
NODES: Final = (OBSERVER, INCLUDE, EXCLUDE)
"""Options that select the nodes to quantize, and the observer of activations."""
SPLIT: Final = option("--split N", int, "Split the leading axis into batches of N.", SAMPLING)
SAMPLES: Final = key_option("SAMPLES", int)
DEVICE: Final = key_option("DEVICE", str)
ORT_LIBRARY: Final = repeated(
    "--ort-library FILE.so", "Library of custom operators that onnxruntime loads for every session", typed=True
)
"""Read by `command`, before the verb runs. Native code: never taken from a configuration file."""

RUNTIME: Final = option(
    "--runtime onnxruntime|openvino",
    str,
    "Runtime that executes the models.",
    shown="that of the file's backend, if installed",
)
RUNTIMES: Final = option(
    "--runtimes LIST|all",
    str,
    "Runtimes in which the quantized file runs as well: onnxruntime, openvino, wasm, webgpu, arm64, "
    "opencv, qnn, tensorrt-rtx (built, not run), separated by commas.",
    shown="none",
)
MEMORY: Final = key_option("CALIBRATION.MEMORY", str)
GRANULARITY: Final = key_option("CALIBRATION.GRANULARITY", str)
CACHE: Final = key_option("CALIBRATION.CACHE", Path, writes=True)
ASYM: Final = key_switch("CALIBRATION.ASYM")
FEEDBACK: Final = key_options("CALIBRATION.FEEDBACK", convert=feedback_pairs)
CROSS_LAYER: Final = key_switch("EQUALIZE.CROSS_LAYER")
SMOOTH_QUANT: Final = key_option("EQUALIZE.SMOOTH_QUANT", str)
EFFORT: Final = key_option("EFFORT", str)
MAX_LOSS: Final = key_option("MIXED.MAX_LOSS", str)
MINIMIZE: Final = key_option("MIXED.MINIMIZE", str)
TUNE: Final = key_option("TUNE.GOAL", str)
TUNE_TIME: Final = key_option("TUNE.SECONDS", float, convert=str)
TARGET_SQNR: Final = key_option("VERIFY.MIN_SQNR_DB", str, convert=decibel)
AVERAGE_BITS: Final = key_option("MIXED.BUDGET.BITS", float, convert=str)
EVAL: Final = option(
    "--eval DATA", Path, "Labelled data: compute --metric on it, for the float and the result side by side.", EVALUATION
)
METRIC: Final = option(
    "--metric NAME",
    str,
    "top1, top5, f1, auc, miou, map50, map75, map (map50-95), map-small, map-medium, map-large, wer, cer, exact, "
    "token_accuracy, ndcg@10, recall@10, mrr@10, sts, pearson, spearman, perplexity, mse, psnr, NAME:OUTPUT of several "
    "outputs, or script.py:function.",
    EVALUATION,
)
LABELS: Final = option(
    "--labels NAME", str, "The array of the data that holds the labels; default: label, labels, y, target.", EVALUATION
)
DECODE: Final = option(
    "--decode FILE.py:FUNCTION",
    str,
    "Function that converts the outputs of a feed, by name, to those that the metric takes.",
    EVALUATION,
)
HEAD: Final = key_option("VERIFY.HEAD", str)
VOCABULARY: Final = option(
    "--vocabulary FILE",
    Path,
    "Tokens of the outputs, for wer, cer and exact: tokens.txt, vocab.json or tokenizer.json.",
    EVALUATION,
    shown="the metadata of the model",
)
BLANK: Final = option(
    "--blank N", int, "Number of the blank of CTC.", EVALUATION, shown="that of the vocabulary or metadata"
)
MAX_METRIC_LOSS: Final = option(
    "--max-loss SHARE",
    str,
    "Exit 1 if the loss in --metric is higher, such as 0.5%; absolute for shares, else relative.",
    EVALUATION,
)
EVAL_SPLIT: Final = option("--eval-split N", int, "Split the leading axis of --eval into batches of N.", EVALUATION)
SAVE_RECIPE: Final = output_option(
    "--save-recipe FILE", "Write the resolved recipe, including the results of searches, for further runs.", FILES
)
OVERRIDES: Final = key_option("TENSOR_OVERRIDES", Path)
WRITE_OVERRIDES: Final = output_option(
    "--write-overrides FILE", "Also write types and scales as such JSON, for onnxruntime's quantizer.", FILES
)
TRT_CACHE: Final = output_option("--trt-cache FILE", "Also write the ranges as a calibration cache of TensorRT.", FILES)
REQUANTIZE: Final = key_switch("REQUANTIZE")
HIGH_PRECISION: Final = key_option("HIGH_PRECISION", str)
TARGET_CPU: Final = key_option("CPU", str)
FILE_CPU: Final = option(
    "--cpu this|avx2|avx512|vnni|amx|arm64|arm64-dot",
    str,
    "CPU that will run the file with onnxruntime.",
    shown="that of the file's metadata, else this",
)
NO_KEEP_IO: Final = key_switch("KEEP_IO", convert=lambda _: "false")
NO_VERIFY: Final = switch("--no-verify", "Do not compare the result with the float model.", QUALITY)
NO_ADVICE: Final = switch("--no-advice", "Below the quality line: do not look for a change that repairs it.", QUALITY)
TASK: Final = key_options("VERIFY.TASK", key="VERIFY.TASK", convert=output_tasks, choices=_output_tasks)
MIN_SQNR: Final = key_option(
    "VERIFY.MIN_SQNR_DB", float, key="VERIFY.MIN_SQNR_DB", help="Exit 1 if the SQNR of an output is lower."
)
MIN_COSINE: Final = key_option("VERIFY.MIN_COSINE", float, key="VERIFY.MIN_COSINE")
MAX_SIZE: Final = key_option("VERIFY.MAX_SIZE_RATIO", float, key="VERIFY.MAX_SIZE_RATIO")
MAX_LATENCY: Final = key_option("VERIFY.MAX_LATENCY_RATIO", float, key="VERIFY.MAX_LATENCY_RATIO")
MIN_INTEGER: Final = key_option("VERIFY.MIN_INTEGER", float, key="VERIFY.MIN_INTEGER")
REPORT: Final = output_option(
    "--report FILE.json|FILE.html", "Write the whole report, as JSON or as an HTML page.", FILES
)
FORCE: Final = switch("--force", "Overwrite existing files.", TERMINAL, typed=True)
JSON: Final = switch("--json", "One JSON value on stdout instead of tables.", TERMINAL)
JSON_PROGRESS: Final = switch("--json-progress", "Progress as JSON lines on stderr, for scripts.", TERMINAL)
QUIET: Final = switch("--quiet -q", "No tables and no progress, only problems and errors.", TERMINAL)
VERBOSE: Final = switch("--verbose -v", "Print all that was measured, every note and every reason.", TERMINAL)
MAX_DOWNLOAD: Final = option(
    "--max-download BYTES",
    int,
    "Select in config.json, for each model of a folder, the dtype with the least error of the files that are within "
    "this size together (web).",
    FILES,
)
TRTEXEC: Final = output_option(
    "--trtexec FILE", "Also write the trtexec command line that builds the engine (tensorrt).", FILES
)
DEBUG: Final = switch("--debug", "Show the traceback of an error.", TERMINAL)
"""Read by `error_lines.guard`, which runs every command."""

BASIC: Final = (BACKEND, RECIPE, BITS)
"""First options of a recipe."""

FEEDS: Final = (PREPROCESS, SPLIT, SAMPLES, DEVICE)
"""Preprocessing and batches of the data, and the device that runs them."""

NO_CONFIG: Final = switch("--no-config", "Ignore sbonnx.toml and pyproject.toml.", TERMINAL)
"""Read by `sbonnx.cli.main`, before options are parsed."""

COMMON: Final = (JSON, QUIET, NO_CONFIG, DEBUG)
COMMON_WITH_PROGRESS: Final = (JSON, JSON_PROGRESS, QUIET, NO_CONFIG, DEBUG)
"""Last options of every verb."""

READING: Final = (LABELS, HEAD, DECODE, VOCABULARY, BLANK)
"""Reading of labels and outputs for a metric."""

EVALUATING: Final = (EVAL, METRIC, *READING, EVAL_SPLIT)
"""Evaluation of a result on labelled data, beside the float model."""

LIMITS: Final = (MIN_SQNR, MIN_COSINE, MAX_SIZE, MAX_LATENCY, MIN_INTEGER)
"""Thresholds of a comparison."""


@dataclass(frozen=True)
class Arguments:
    """Values of one command line, by row of the table.

    Attributes:
        configured: recipe keys of the configuration file as ``KEY=VALUE``, which options and ``--set`` replace.
    """

    values: Mapping[CommandOption[Any], Any]
    configured: tuple[str, ...] = ()

    def __getitem__(self, option: CommandOption[T]) -> T:
        value: T = self.values[option]
        return value

    def inputs(self) -> list[str]:
        """Return the files and folders that the options name and that are read."""
        read = {row: value if isinstance(value, list) else [value] for row, value in self.values.items()}
        paths, words = (
            [path for row, values in read.items() if row.is_path is kind and not row.writes for path in values]
            for kind in (True, False)
        )
        return input_paths(paths, words)

    def overrides(self, *, without: Collection[CommandOption[Any]] = ()) -> list[str]:
        """Format the options that set recipe keys, then ``--set``, as ``KEY=VALUE``."""
        texts = []
        for row, value in self.values.items():
            absent = value is None or value is False or value == []
            if row.key and not absent and row not in without:
                texts.append(
                    TypedOption(f"{row.key}={_yaml(row.convert(value) if row.convert else value)}", row.flags[0])
                )
        given = [text for text in self.values.get(SET) or () if text not in self.configured]
        texts += [TypedOption(text, f"{SET.flags[0]} {text.partition('=')[0].strip()}") for text in given]
        typed = {key for text in texts for key in full_keys(text)}
        return [*(text for text in self.configured if not full_keys(text) & typed), *texts]

    def command(self, verb: str, overrides: Sequence[str]) -> str:
        """Return this command line, quoted for a shell, with other values of recipe keys, overwriting its output.

        Args:
            overrides: ``KEY=VALUE``, which replace the options and ``--set`` of the same keys.
        """
        words, changed = ["sbonnx", verb], {_key(text) for text in overrides}
        for row, value in self.values.items():
            if row is SET:
                words += [word for text in value or () if _key(text) not in changed for word in ("--set", text)]
            elif row is not FORCE and row.key.lower() not in changed:
                words += self._words(row)
        return shlex.join([*words, *(word for text in overrides for word in ("--set", text)), FORCE.flags[0]])

    def other_command(self, verb: str, rows: Iterable[CommandOption[Any]], files: Iterable[Path] = ()) -> str:
        """Return the command line of another verb with these options of this one, quoted for a shell.

        Args:
            files: arguments before the options.
        """
        given = [row for row in rows if row in self.values]
        return shlex.join(["sbonnx", verb, *map(str, files), *(word for row in given for word in self._words(row))])

    def _words(self, row: CommandOption[Any]) -> list[str]:
        """Return the words of an option as they are typed; none if it has its default."""
        value = self.values[row]
        if value in (None, False, [], row.default):
            return []
        if not row.flags:
            return [str(value)]
        values = value if isinstance(value, list) else [value]
        return [word for argument in values for word in (row.flags[0], *([] if argument is True else [str(argument)]))]

    def call(self, function: Callable[..., T], **more: Any) -> T:
        """Call the function of a verb: an option is the parameter of the same name, ``--no-x`` is ``x=False``.

        Options that are not given, and those that it has no parameter for, are left out.

        Args:
            more: arguments in place of those of the options; None: left out.
        """
        parameters = {
            name for name, row in inspect.signature(function).parameters.items() if row.kind is not row.VAR_KEYWORD
        }
        values = {row.name: value for row, value in self.values.items()}
        values |= {name.removeprefix("no_"): not value for name, value in values.items() if name.startswith("no_")}
        keywords = {name: value for name, value in values.items() if name in parameters} | more
        given = {name: value for name, value in keywords.items() if value is not None}
        if "progress" not in parameters:
            return function(**given)
        with closing(self.progress()) as progress:
            return function(**given, progress=progress)

    def recipe(self) -> Recipe:
        """Load the recipe with its options.

        Raises:
            RecipeError: see `sbonnx.recipe.load`.
        """
        from sbonnx import recipe as recipes

        return recipes.load(self[RECIPE], backend=self[BACKEND], overrides=self.overrides())

    def data(self, row: CommandOption[Path | None] = DATA) -> Path | DataPath | None:
        """Return the path of the data, with the preprocessing if one is given; None without data.

        Args:
            row: the option that names the data.
        """
        path, preprocess = self[row], self.values.get(PREPROCESS)
        if path is None or preprocess is None:
            return path
        from sbonnx.calib.data import DataPath

        return DataPath(path, preprocess)

    def required_data(self) -> Path | DataPath:
        """Return the path of the data, with its preprocessing.

        Raises:
            DataError: ``--data`` is missing.
        """
        data = self.data()
        if data is None:
            raise DataError("--data is missing: give --data FILE or FOLDER (docs/data.md)")
        return data

    def printer(self) -> Printer:
        return Printer(as_json=self[JSON], quiet=self[QUIET])

    def progress(self) -> Progress:
        """Start the display of progress on stderr."""
        from sbonnx.progress import make_progress

        return make_progress(quiet=self[QUIET], as_json=self.values.get(JSON_PROGRESS, False))


def full_keys(text: str) -> set[str]:
    """Return the full paths of the keys that ``KEY=VALUE`` sets, in upper case: two of ``bits``."""
    key = _key(text)
    return {"W.QUANTIZER.BIT", "A.QUANTIZER.BIT"} if key == "bits" else {SHORT_FORMS.get(key, key).upper()}


def _key(text: str) -> str:
    """Return the key of ``KEY=VALUE``, in lower case."""
    return text.partition("=")[0].strip().lower()


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


def command(
    options: Sequence[CommandOption[Any]], run: Callable[[Arguments], int], configuration: Configuration | None = None
) -> Callable[..., int]:
    """Wrap `run` in a function whose signature declares `options` to typer.

    Args:
        configuration: of the defaults that click takes from a map.
    """
    file = None if configuration is None else configuration.file

    def verb(ctx: typer.Context, **values: Any) -> int:
        configured = [row for row in options if _is_configured(ctx, row)]
        recipe_keys = (ctx.default_map or {}).get(SET.name) or () if SET in options else ()
        given = Arguments({row: values[row.name] for row in options}, tuple(recipe_keys))
        if configured:
            given.printer().line(f"configuration: {file} ({', '.join(row.name for row in configured)})")
        for note in () if configuration is None else configuration.notes:
            given.printer().note(note)
        libraries = given[ORT_LIBRARY] if ORT_LIBRARY in options else None
        if libraries:
            from sbonnx.verify import use_libraries

            use_libraries(libraries)
        with protecting((*given.inputs(), file)):
            return run(given)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    verb.__dict__["__signature__"] = inspect.Signature([context, *(row.parameter() for row in options)])
    verb.__annotations__ = {}
    return verb


def _is_configured(ctx: typer.Context, row: CommandOption[Any]) -> bool:
    """Whether the value of an option comes from a configuration file."""
    source = ctx.get_parameter_source(row.name)
    return source is not None and source.name == "DEFAULT_MAP"
