"""Expansion of job file entries to jobs: globs, the matrix of all combinations, names and outputs."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.batch.jobs.job import Acceptance, Job, JobEvaluation, Places, StepLimits
from sbonnx.batch.jobs.outputs import Inputs, refusal
from sbonnx.batch.redaction import Redactor, names_in, revealed
from sbonnx.batch.remote import fetch, is_url
from sbonnx.calib.data.readers.preprocess_values import PRESETS
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.metrics import task_metric
from sbonnx.recipe.defaults import BACKEND
from sbonnx.recipe.loading import AUTO, backend_of
from sbonnx.recipe.problem import Wrong, most_similar, nearest, one_of
from sbonnx.system.python_files import names_function

if TYPE_CHECKING:
    from sbonnx.batch.jobs.jobfile import DefaultKeys, ExcludeKeys, JobFile, JobKeys

FIELDS: Final = ("model", "folder", "backend", "bits", "recipe")
"""Fields of templates."""

MOST_MODELS: Final = 10_000
"""Maximum number of files that a glob may match."""

MOST_JOBS: Final = 100_000
"""Maximum number of jobs of a job file."""

_FIELD: Final = re.compile(r"(?<!\$)\{([^{}]*)\}")


def expand(file: JobFile, path: Path) -> tuple[Path, tuple[Job, ...]]:
    """Return the output folder and the jobs of the job file at `path`.

    Raises:
        Wrong: an invalid entry, or duplicate names or outputs.
    """
    for key in ("output", "naming"):
        _plain(getattr(file, key) or "", (key,))
    if is_url(file.output):
        raise Wrong("must be a folder: use URLs as the output of jobs", path=("output",), value=file.output)
    base = path.parent
    output = Path(os.path.abspath(base / file.output))
    jobs: list[Job] = []
    places: list[tuple[Any, ...]] = []
    for number, entry in enumerate(file.jobs):
        of_entry = list(islice(_of_entry(file, entry, base, output, number), MOST_JOBS + 1 - len(jobs)))
        if not of_entry:
            raise Wrong("creates no job: exclude removes all of them", path=("jobs", number))
        jobs += of_entry
        if len(jobs) > MOST_JOBS:
            raise Wrong(f"creates more than {MOST_JOBS} jobs: use several job files", path=("jobs", number))
        places += [("jobs", number)] * len(of_entry)
    _distinct(jobs, places, Places(output), path)
    return output, tuple(jobs)


def selected(jobs: Sequence[Job], only: str | None) -> tuple[Job, ...]:
    """Select jobs whose name matches a glob; all for None.

    Raises:
        RecipeError: no job matches.
    """
    if only is None:
        return tuple(jobs)
    matching = tuple(job for job in jobs if fnmatch.fnmatchcase(job.name, only))
    if not matching:
        near = ", ".join(most_similar(only, [job.name for job in jobs], count=3))
        raise RecipeError(f"no job's name matches '{only}'; near it: {near}; --dry-run shows all of them")
    return matching


def _of_entry(file: JobFile, entry: JobKeys, base: Path, output: Path, number: int) -> Iterator[Job]:
    here = ("jobs", number)
    for key in ("name", "output"):
        _plain(getattr(entry, key) or "", (*here, key)) if not is_url(entry.output or "") else None
    lists = [getattr(entry, key) or getattr(file.matrix, key) or getattr(file.defaults, key) for key in FIELDS[2:]]
    backends, bits, recipes = lists
    named = cache(lambda source, rows: _backend(source, rows, Places(output).state / "remote"))
    for model in _models(entry.model, base, here):
        for given, width, recipe in product(backends or (None,), bits or (None,), recipes or (None,)):
            source, overrides = _recipe(recipe, base, here), _overrides(width, file.defaults.set, entry.set)
            backend = given or named(source, overrides)
            values = _values(model, backend, width, recipe)
            if any(_matches(pattern, values) for pattern in (*file.exclude, *entry.exclude)):
                continue
            name = _name(entry, file.naming, values, here)
            yield Job(
                name=name,
                model=model,
                data=_data(entry, file.defaults, base, values, here),
                backend=backend,
                output=_output(entry.output, name, output, values, here),
                split=entry.split if entry.split is not None else file.defaults.split,
                preprocess=_preprocess(entry, file.defaults, base),
                ort_libraries=_libraries(entry, file.defaults, base),
                recipe=source,
                overrides=overrides,
                accept=_accept(file.defaults, entry, base),
                limits=_limits(file.defaults, entry),
                evaluation=_evaluation(file.defaults, entry, base, values, here),
                outside_output=bool(
                    file.defaults.outside_output if entry.outside_output is None else entry.outside_output
                ),
            )


def _plain(text: str, path: tuple[Any, ...]) -> None:
    """Check that a text contains no ${...}, because names are shown in reports."""
    if any(names_in(text)):
        raise Wrong("is shown everywhere and cannot contain ${...}: write the value", path=path)


def _models(text: str, base: Path, here: tuple[Any, ...]) -> list[str]:
    """Return the absolute paths of models, sorted; a URL or a path without wildcards is returned unchanged."""
    redactor = Redactor(names_in(text))
    wanted = revealed(text)
    if is_url(wanted):
        return [text]
    place = os.path.abspath(base / wanted)
    if os.path.exists(place) or not glob.has_magic(wanted):  # the job itself reports a missing file
        return [redactor.text(place)]
    where = redactor.text(os.path.abspath(base))
    files = sorted(islice(glob_files(wanted, base), MOST_MODELS + 1))
    if len(files) > MOST_MODELS:
        raise Wrong(f"matches more than {MOST_MODELS} files in '{where}'", path=(*here, "model"), value=text)
    if not files:
        raise Wrong(f"matches no file in '{where}'", path=(*here, "model"), value=text)
    return [redactor.text(file) for file in files]


def _values(model: str, backend: str, bits: str | None, recipe: str | None) -> dict[str, str | None]:
    bare = re.split(r"[?#]", model)[0] if is_url(model) else model
    parts = bare.replace(os.sep, "/").rstrip("/").split("/")
    stem = parts[-1].removesuffix(".onnx") or parts[-1]
    return {
        "model": stem,
        "folder": parts[-2] if len(parts) > 1 else "",
        "backend": backend,
        "bits": bits,
        "recipe": None if recipe is None else Path(recipe).stem,
    }


def _matches(rule: ExcludeKeys, values: Mapping[str, str | None]) -> bool:
    """Return whether all keys of a rule match. A rule without keys matches nothing."""
    wanted = {key: text for key in ("model", "backend", "bits", "recipe") if (text := getattr(rule, key)) is not None}
    return bool(wanted) and all(fnmatch.fnmatchcase(values[key] or "", text) for key, text in wanted.items())


def _filled(template: str, values: Mapping[str, str | None], path: tuple[Any, ...]) -> str:
    """Fill in the fields of a template."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in FIELDS:
            close = nearest(name, FIELDS)
            hint = f"Did you mean {{{close[0]}}}? " if close else ""
            raise Wrong(f"has the field {{{name}}}", f"{hint}There are {one_of(FIELDS)}", path=path)
        filling = values[name]
        if filling is None:
            raise Wrong(f"has the field {{{name}}}, and the job has no {name}", path=path)
        return filling

    return _FIELD.sub(value, template)


def _name(entry: JobKeys, naming: str | None, values: Mapping[str, str | None], here: tuple[Any, ...]) -> str:
    template = entry.name or naming
    if template is None:
        name = "-".join(field for key in ("model", "backend", "bits", "recipe") if (field := values[key]))
    else:
        name = _filled(template, values, (*here, "name") if entry.name else ("naming",))
    path = (*here, "name") if entry.name else ("naming",) if naming else here
    _plain(name, path)
    parts = name.split("/")
    if not all(part.strip() and part not in (".", "..") for part in parts) or "\\" in name or not name.isprintable():
        raise Wrong("must be a name of a file in the output folder", path=path, value=name)
    return name


def _output(
    template: str | None, name: str, output: Path, values: Mapping[str, str | None], here: tuple[Any, ...]
) -> str:
    """Return the output of a job: an absolute path or a URL."""
    if template is None:
        return str(output / f"{name}.onnx")
    path = (*here, "output")
    filled = _filled(template, values, path)
    if is_url(filled):
        return filled
    if filled.endswith(("/", os.sep)) or "\0" in filled:
        raise Wrong("must name a file", path=path, value=filled)
    return os.path.abspath(output / filled)


def _data(
    entry: JobKeys, defaults: DefaultKeys, base: Path, values: Mapping[str, str | None], here: tuple[Any, ...]
) -> str | None:
    """Return the absolute path or URL of the data."""
    text, path = (entry.data, (*here, "data")) if entry.data is not None else (defaults.data, ("defaults", "data"))
    if text is None:
        return None
    filled = _filled(text, values, path)
    wanted = revealed(filled)
    return filled if is_url(wanted) else Redactor(names_in(filled)).text(os.path.abspath(base / wanted))


def _preprocess(entry: JobKeys, defaults: DefaultKeys, base: Path) -> str | None:
    """Return the preset, or the absolute path or URL of the preprocessing."""
    text = entry.preprocess if entry.preprocess is not None else defaults.preprocess
    if text is None or text in PRESETS or is_url(wanted := revealed(text)):
        return text
    return Redactor(names_in(text)).text(os.path.abspath(base / wanted))


def _libraries(entry: JobKeys, defaults: DefaultKeys, base: Path) -> tuple[str, ...]:
    """Return the absolute paths of the libraries of custom operators."""
    names = entry.ort_libraries if entry.ort_libraries is not None else defaults.ort_libraries or ()
    return tuple(Redactor(names_in(name)).text(os.path.abspath(base / revealed(name))) for name in names)


def _recipe(text: str | None, base: Path, here: tuple[Any, ...]) -> str | None:
    """Return the absolute path or URL of a recipe, or "auto"."""
    if text is None or text.lower() == AUTO:
        return None if text is None else AUTO
    wanted = revealed(text)
    if is_url(wanted):
        return text
    place = os.path.abspath(base / wanted)
    if not os.path.isfile(place):
        raise Wrong("names a recipe that does not exist", path=(*here, "recipe"), value=text)
    return Redactor(names_in(text)).text(place)


def _backend(recipe: str | None, overrides: tuple[tuple[str, str], ...], downloads: Path) -> str:
    """Return the backend of a job that names none: that of its recipe, else the default.

    A recipe that cannot be read gives the default; the job itself reports the reason.
    """
    try:
        source = recipe if recipe in (None, AUTO) else fetch(revealed(str(recipe)), downloads, what="data").path
        return backend_of(source, [f"{key}={value}" for key, value in overrides])
    except SbonnxError:
        return BACKEND


def _overrides(
    bits: str | None, defaults: Iterable[tuple[str, str]], own: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Merge recipe values: the entry's override the defaults, and the bit width comes last."""
    rows = {key.lower(): (key, value) for key, value in (*defaults, *own)}
    if bits is not None:
        rows["bits"] = ("bits", bits)
    return tuple(rows.values())


def _accept(defaults: DefaultKeys, entry: JobKeys, base: Path) -> Acceptance:
    """Merge the acceptance thresholds by key: the entry's override the defaults."""
    given = {**defaults.accept.model_dump(exclude_unset=True), **entry.accept.model_dump(exclude_unset=True)}
    least = given.pop("min_metric", {})
    acceptance = Acceptance(**given, min_metric=tuple(sorted(least.items())))
    if least and acceptance.metric is None:
        raise Wrong("needs metric: a file.py:function that returns the values", path=("accept", "min_metric"))
    if acceptance.metric is None:
        return acceptance
    file, colon, function = acceptance.metric.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise Wrong("must be file.py:function", path=("accept", "metric"), value=acceptance.metric)
    place = Redactor(names_in(file)).text(os.path.abspath(base / revealed(file)))
    return replace(acceptance, metric=f"{place}:{function}")


def _evaluation(
    defaults: DefaultKeys, entry: JobKeys, base: Path, values: Mapping[str, str | None], here: tuple[Any, ...]
) -> JobEvaluation | None:
    """Merge the keys of eval: the entry's override the defaults. None without eval."""
    given = {**defaults.eval.model_dump(exclude_unset=True), **entry.eval.model_dump(exclude_unset=True)}
    limited = entry.accept.max_loss if "max_loss" in entry.accept.model_fields_set else defaults.accept.max_loss
    if not given:
        if limited is not None:
            raise Wrong("needs eval: labelled data and a metric", path=("accept", "max_loss"))
        return None
    path = (*here, "eval") if entry.eval.model_fields_set else ("defaults", "eval")
    for key in ("data", "metric"):
        if given.get(key) is None:
            raise Wrong(f"needs {key}: it is labelled data and a metric", path=path)
    if not names_function(given["metric"]):
        try:
            task_metric(given["metric"])
        except RecipeError as error:
            raise Wrong(f"names no metric: {error}", path=(*path, "metric")) from None
    given["data"] = _filled(given["data"], values, (*path, "data"))

    def absolute(name: str) -> str:
        wanted = revealed(name)
        return name if is_url(wanted) else Redactor(names_in(name)).text(os.path.abspath(base / wanted))

    return JobEvaluation(**given).with_paths(absolute)


def _limits(defaults: DefaultKeys, entry: JobKeys) -> StepLimits:
    """Merge the limits by key: the entry's override the defaults."""
    given = {**defaults.limits.model_dump(exclude_unset=True), **entry.limits.model_dump(exclude_unset=True)}
    return StepLimits(**{key: value for key, value in given.items() if key != "retries" or value is not None})


def _distinct(jobs: Sequence[Job], entries: Sequence[tuple[Any, ...]], places: Places, file: Path) -> None:
    """Check that names and outputs are unique, and that no output overwrites an input or leaves the output folder."""
    names: dict[str, str] = {}
    outputs: dict[str, str] = {}
    inputs = Inputs(jobs, [("the job file", file)])
    for job, entry in zip(jobs, entries, strict=True):
        more = f"; templates may contain {', '.join(f'{{{field}}}' for field in FIELDS)}"
        if job.name in names:
            raise Wrong(f"creates a second job named '{job.name}': use another name{more}", path=entry)
        real = job.output if is_url(job.output) else os.path.realpath(revealed(job.output))
        if real in outputs:
            raise Wrong(
                f"creates two jobs that write '{job.output}' ('{outputs[real]}', '{job.name}'){more}", path=entry
            )
        over = inputs.over(revealed(job.output))
        if over is not None:
            raise Wrong(f"would overwrite '{job.output}', {over}: use another output", path=entry)
        told = refusal(job, places)
        if told is not None:
            raise Wrong(f"creates an output that {told}", path=entry, value=job.output[:200])
        names[job.name] = outputs[real] = job.name


def glob_files(pattern: str, base: Path) -> Iterator[str]:
    """Yield the absolute paths of matching regular files, each once, in no particular order.

    Like `glob.glob(recursive=True)`, except that `**` does not follow links, so that every search terminates.

    `*`, `?` and `[...]` match within a name, `**` matches any folders. Hidden names only match a pattern that begins
    with a dot.

    Args:
        base: base folder of relative patterns.
    """
    parts = Path(pattern).parts
    start = Path(parts[0]) if Path(pattern).is_absolute() else Path(os.path.abspath(base))
    parts = parts[1:] if Path(pattern).is_absolute() else parts
    seen: set[tuple[str, int]] = set()
    left = [(str(start), 0)]
    while left:
        path, count = left.pop()
        place = (os.path.abspath(path), count)
        if place in seen:
            continue
        seen.add(place)
        if count < len(parts):
            left += _next_matches(path, parts, count)
        elif os.path.isfile(path):
            yield place[0]


def _next_matches(folder: str, parts: Sequence[str], count: int) -> Iterator[tuple[str, int]]:
    """Yield paths in a folder that match the next part of a pattern, with the number of parts matched so far."""
    head, last = parts[count], count + 1 == len(parts)
    if head == "**":
        yield folder, count + 1
        for entry in _folder_entries(folder):
            if not entry.name.startswith("."):
                if entry.is_dir(follow_symlinks=False):
                    yield entry.path, count
                elif last:
                    yield entry.path, count + 1
    elif not glob.has_magic(head):
        if os.path.lexists(os.path.join(folder, head)):
            yield os.path.join(folder, head), count + 1
    else:
        fits = re.compile(fnmatch.translate(os.path.normcase(head))).match
        for entry in _folder_entries(folder):
            hidden = entry.name.startswith(".") and not head.startswith(".")
            if not hidden and fits(os.path.normcase(entry.name)) and (last or entry.is_dir()):
                yield entry.path, count + 1


def _folder_entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; empty if it cannot be listed."""
    try:
        with os.scandir(folder) as rows:
            return list(rows)
    except OSError:
        return []
