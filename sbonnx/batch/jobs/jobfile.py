"""Job file: parsing and validation of YAML into jobs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from sbonnx.backends import BACKENDS
from sbonnx.batch.jobs.job import Job, encodable
from sbonnx.errors import RecipeError
from sbonnx.recipe import yaml_text
from sbonnx.recipe.loading import WHOLE, similar_backend
from sbonnx.recipe.names import VERSIONED, full_backend
from sbonnx.recipe.problem import BITS, KeyOrigin, Wrong, nearest, one_of, short
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
from sbonnx.recipe.value_types import bits_by_side, share_or_percent

UNITS: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
TIMES: Final = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
FP8: Final = "fp8"

_TEXTS: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}


def _texts(value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, list | tuple) else [value]
    if not texts or not all(isinstance(item, str) and item for item in texts):
        raise Wrong("must be a text, or a list of texts", value=value)
    for item in texts:
        _as_name(str(item))
    twice = next((item for item in texts if texts.count(item) > 1), None)
    if twice is not None:
        raise Wrong(f"has {short(twice)} twice")
    return tuple(texts)


def _backends(value: object) -> tuple[str, ...]:
    names = tuple(full_backend(text) for text in _texts(value))
    for name in names:
        if name not in BACKENDS and name not in VERSIONED:
            raise Wrong(f"must be {one_of(BACKENDS)}", similar_backend(name), value=name)
    return names


def _bits(value: object) -> tuple[str, ...]:
    widths = _texts(value)
    for width in widths:
        if width.lower() != FP8:
            bits_by_side(width)
    return widths


def _path(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Wrong("must be a path or a URL", value=value)
    return _as_name(value)


def _as_name(value: str) -> str:
    """Check that a string is valid in a file name."""
    try:
        if "\0" not in value and os.fsencode(value):
            return value
    except UnicodeEncodeError:
        pass
    raise Wrong("has a character that file names cannot have", value=encodable(value))


def _bytes(value: object) -> int:
    """Parse bytes, such as 2000000000 or "2 GiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = float(value)
    else:
        size = _with_unit(value, UNITS, "a size such as 4 GiB")
    if size < 1 << 20:
        raise Wrong("must be at least 1 MiB", value=value)
    return int(size)


def _seconds(value: object) -> float:
    """Parse seconds, such as 90 or "30 min"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        seconds = _with_unit(value, TIMES, "seconds, or a time such as 30 min or 2 h")
    if not 0 < seconds < float("inf"):
        raise Wrong("must be above 0", value=value)
    return seconds


def _with_unit(value: object, units: Mapping[str, float], wanted: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        raise Wrong(f"must be {wanted}", value=value)
    return float(match[1]) * units[match[2].lower()]


def _number(low: float, high: float, wanted: str) -> BeforeValidator:
    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Wrong(f"must be {wanted}", value=value)
        return float(value)

    return BeforeValidator(check)


def _settings(value: object) -> tuple[tuple[str, str], ...]:
    """Validate recipe settings and convert the values to text, by key."""
    if not isinstance(value, Mapping):
        raise Wrong("must be a mapping of keys of the recipe to values", value=value)
    keys = {*KEYS, *(name.upper() for name in SHORT_FORMS), BITS.upper()}
    rows: dict[str, str] = {}
    for name, given in _flat(value, ""):
        full = SHORT_FORMS.get(name.lower(), name).upper()
        if full not in keys:
            close = nearest(name, [BITS, *SHORT_FORMS, *keys], count=3)
            hint = f"Did you mean {one_of(close)}?" if close else "docs/recipe.md has all of them"
            raise Wrong("is not a key of the recipe", hint, path=(name,))
        if given is None:
            raise Wrong("has no value", path=(name,))
        rows[name] = as_text(given)
    return tuple(rows.items())


def _flat(value: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    """Flatten nested sections to dotted keys; mappings with user-defined names are not flattened."""
    rows: list[tuple[str, Any]] = []
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if isinstance(inner, Mapping) and path.upper() not in WHOLE:
            rows += _flat(inner, f"{path}.")
        else:
            rows.append((path, inner))
    return rows


def as_text(value: Any) -> str:
    """Convert a value to the text of KEY=VALUE, which parses back to it as YAML."""
    if isinstance(value, str):
        try:
            if yaml_text.parse(value, "")[0] == value:
                return value
        except RecipeError:  # the plain text is not valid YAML: quote it
            pass
    return json.dumps(value, ensure_ascii=False)  # JSON is valid YAML


Names = Annotated[tuple[str, ...], BeforeValidator(_texts), WithJsonSchema(_TEXTS)]
BackendNames = Annotated[tuple[str, ...], BeforeValidator(_backends), WithJsonSchema(_TEXTS)]
BitNames = Annotated[tuple[str, ...], BeforeValidator(_bits), WithJsonSchema(_TEXTS)]
Settings = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_settings), WithJsonSchema({"type": "object"})]
PathText = Annotated[str, BeforeValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]
SizeText = {"anyOf": [{"type": "integer", "minimum": 1 << 20}, {"type": "string"}]}
TimeText = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}
PercentText = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "string"}]}
Size = Annotated[int, BeforeValidator(_bytes), WithJsonSchema(SizeText)]
Seconds = Annotated[float, BeforeValidator(_seconds), WithJsonSchema(TimeText)]
Decibel = Annotated[float, _number(-1000, 1000, "a number of decibel")]
Share = Annotated[float, _number(0, 1, "a share, 0 to 1")]
Ratio = Annotated[float, _number(1e-9, 1e9, "a number above 0")]
Percent = Annotated[float, BeforeValidator(share_or_percent), WithJsonSchema(PercentText)]
Figure = Annotated[float, _number(-1e300, 1e300, "a number")]


class Keys(BaseModel):
    """A mapping with fixed keys, all lower case."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class AcceptKeys(Keys):
    """accept: thresholds that a result must meet."""

    min_sqnr: Decibel | None = Field(None, description="least signal to noise of any output against float, dB")
    min_agreement: Share | None = Field(None, description="least share of samples whose best class stays the same")
    max_size_ratio: Ratio | None = Field(None, description="most size over that of the float file")
    max_latency_ratio: Ratio | None = Field(None, description="most time of a run over that of the float model")
    metric: PathText | None = Field(None, description='"file.py:function": (path of a model) to {name: value}')
    min_metric: dict[str, Figure] = Field({}, description="least value of metrics, by name")
    max_loss: Percent | None = Field(None, description="most loss in the metric of eval, such as 0.5%")


class EvalKeys(Keys):
    """eval: a metric on labelled data, of the float and the quantized model."""

    data: PathText | None = Field(None, description="labelled data; {model} is replaced by the model's name")
    metric: str | None = Field(None, description='top1, miou, map50, ..., or "file.py:function"')
    labels: str | None = Field(None, description="array that holds the labels; default: label, labels, y, target")
    decode: PathText | None = Field(None, description='"file.py:function" that converts outputs')
    split: Annotated[int, Field(ge=1)] | None = Field(None, description="batches of this many samples; default: split")
    vocabulary: PathText | None = Field(
        None, description="tokens of the outputs: tokens.txt, vocab.json, tokenizer.json"
    )
    blank: Annotated[int, Field(ge=0)] | None = Field(None, description="number of the blank of CTC")
    head: str | None = Field(None, description="head of a detector, such as yolov8; default: by the structure")


class LimitKeys(Keys):
    """limits: resource limits of a step."""

    memory: Size | None = Field(None, description="resident memory with child processes, such as 4 GiB")
    seconds: Seconds | None = Field(None, description="wall time, seconds or a text such as 30 min")
    retries: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="further attempts after a crash")


class ShapeKeys(Keys):
    """matrix: lists of values; a job is created for each combination."""

    backend: BackendNames | None = Field(None, description="such as onnxruntime, tensorrt, tensorrt@10")
    bits: BitNames | None = Field(None, description="such as w8a8")
    recipe: Names | None = Field(None, description='paths of recipes, or "auto"')


class DefaultKeys(ShapeKeys):
    """defaults: values for jobs that do not set them."""

    data: PathText | None = Field(None, description="calibration data; {model} is replaced by the model's name")
    preprocess: PathText | None = Field(
        None, description="how images, audio and texts become inputs: a preset such as imagenet, or a YAML or JSON file"
    )
    split: Annotated[int, Field(ge=1)] | None = Field(None, description="split feeds into batches of this many samples")
    ort_libraries: Names | None = Field(None, description="libraries of custom operators that onnxruntime loads")
    set: Settings = Field((), description="values of the recipe by key")
    eval: EvalKeys = EvalKeys()
    accept: AcceptKeys = AcceptKeys()
    limits: LimitKeys = LimitKeys()
    outside_output: bool | None = Field(None, description="outputs may lie outside the output folder")


class ExcludeKeys(Keys):
    """exclude: combinations to skip; all keys of an entry must match, as globs."""

    model: str | None = Field(None, description="name of the model, without folder and suffix")
    backend: str | None = None
    bits: str | None = None
    recipe: str | None = Field(None, description="name of the recipe, without folder and suffix")


class JobKeys(DefaultKeys):
    """An entry of jobs."""

    model: PathText = Field(description="path, glob or URL of float models")
    name: PathText | None = Field(None, description="naming template of these jobs")
    output: PathText | None = Field(None, description="template of the file to write, in the output folder, or a URL")
    exclude: tuple[ExcludeKeys, ...] = Field((), strict=False)


class JobFile(Keys):
    """A job file."""

    title: str | None = Field(None, description="of the report; default: name of the file")
    output: PathText = Field(description="folder of outputs, reports and state")
    naming: PathText | None = Field(
        None, description="name of a job, of {model}, {folder}, {backend}, {bits}, {recipe}; its file is <name>.onnx"
    )
    defaults: DefaultKeys = DefaultKeys()
    matrix: ShapeKeys = ShapeKeys()
    exclude: tuple[ExcludeKeys, ...] = Field((), strict=False)
    jobs: tuple[JobKeys, ...] = Field(min_length=1, strict=False)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a job file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobFile.model_json_schema()}


def read_jobs(path: str | os.PathLike[str]) -> tuple[str, Path, tuple[Job, ...]]:
    """Parse a job file into (title, output folder, jobs). Relative paths refer to the file's folder.

    Raises:
        RecipeError: the job file is invalid; the message has file, line and key.
    """
    from sbonnx.batch.jobs.matrix import expand

    file = Path(path)
    shown = yaml_text.shown(file)
    try:
        data, lines = yaml_text.read(file)
    except RecipeError as error:
        raise RecipeError(
            str(error).replace("the recipe ", "the job file ").replace("a recipe", "a job file")
        ) from None
    if not isinstance(data, dict):
        raise RecipeError(f"the job file {shown} must be a mapping with output: and jobs:, got {short(data)}")
    origin = KeyOrigin(shown, lines)
    try:
        job_file = JobFile.model_validate(data)
        output, jobs = expand(job_file, file)
    except ValidationError as error:
        items = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
        problems = [_problem(item) for item in items]  # a misspelt key first: it explains a missing one
        raise _error(origin, problems[0], len(problems) - 1) from None
    except Wrong as problem:
        raise _error(origin, problem) from None
    return encodable(job_file.title or file.stem), output, jobs


def _problem(item: Any) -> Wrong:
    path = tuple(part for part in item["loc"] if part != "[key]")
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Wrong):
        return cause.under(*path)
    if item["type"] == "extra_forbidden":
        keys = _known(path[:-1])
        close = nearest(str(path[-1]), keys, cutoff=0.6)
        hint = f"Did you mean {close[0]}? " if close else ""
        return Wrong("is not a key of the job file", f"{hint}Keys here: {', '.join(keys)}", path=path)
    if item["type"] == "missing":
        return Wrong("is missing", path=path)
    if item["type"] in ("model_type", "dict_type", "tuple_type"):
        wanted = "a list" if item["type"] == "tuple_type" else "a mapping of keys to values"
        return Wrong(f"must be {wanted}", path=path, value=item["input"])
    told = str(item["msg"])
    return Wrong(f"is not right: {told[:1].lower()}{told[1:]}", path=path, value=item["input"])


def _known(path: tuple[Any, ...]) -> list[str]:
    """Return the allowed keys of the mapping at `path`."""
    section: type[Keys] = JobFile
    inner: dict[str, type[Keys]] = {
        "defaults": DefaultKeys,
        "matrix": ShapeKeys,
        "exclude": ExcludeKeys,
        "jobs": JobKeys,
        "accept": AcceptKeys,
        "eval": EvalKeys,
        "limits": LimitKeys,
    }
    for part in path:
        section = inner.get(str(part), section)
    return list(section.model_fields)


def _error(origin: KeyOrigin, problem: Wrong, others: int = 0) -> RecipeError:
    told = str(origin.error(problem))
    key = ".".join(str(part) for part in problem.path)
    if problem.path:  # job file keys are lower case: quote the whole path instead of each key, as recipes do
        told = f"'{key}'{told[told.index(origin.where(problem.path)) - 1 :]}"
    if others:
        told += f" ({others} more problem{'s' if others > 1 else ''} in this job file)"
    return RecipeError(told.replace("the recipe in", "the job file in"))
