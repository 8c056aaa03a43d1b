"""Advice for jobs that miss their quality: a command that repeats the job alone and tries changes.

A batch tries nothing itself: a trial takes as long as the job, and another worker could run a job in that time.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from sbonnx.batch.jobs.job import Job, Outcome
from sbonnx.batch.redaction import names_in, revealed
from sbonnx.batch.remote import is_url, local_path
from sbonnx.errors import RecipeError
from sbonnx.recipe import AUTO
from sbonnx.recipe.sections.whole import SHORT_FORMS
from sbonnx.report.comparison import CommandAdvice

TRIED: Final = ".tried.onnx"
"""Ending of the file that the command writes next to the output of the job, which stays as it is."""

SEARCHED: Final = ("min_agreement", "min_metric.", "max_loss")
"""Thresholds (beginnings of their keys) that are no keys of a recipe: a recipe search may reach them."""

_ACTIVE: Final = re.compile(r'[\\"`]|\$(?!\{[A-Za-z_][A-Za-z0-9_]*\})')
"""Characters that a shell interprets in double quotes, except ${NAME}."""


def advice_of(job: Job, outcome: Outcome) -> CommandAdvice | None:
    """Return a text and the command to try for a job whose outputs are below their lines or thresholds.

    Nothing runs here. `sbonnx quantize` alone tries the cheapest changes after it has repeated the result; thresholds
    that it does not know get a recipe search.

    Returns:
        None if quality is not what failed, or the model, the data or the recipe is at a URL, which the command cannot
        read. ${NAME} stays, for the shell to fill in.
    """
    if outcome.status != "unaccepted" or _reads_remote(job):
        return None
    missed = {what: wanted for what, _, wanted, met in outcome.accepted if not met}
    report = outcome.result
    searched = job.recipe == AUTO or (report is not None and report.search is not None)
    if "min_sqnr" in missed or (report is not None and report.problems):
        least = (f"VERIFY.MIN_SQNR_DB={missed['min_sqnr']:g}",) if "min_sqnr" in missed else ()
        return CommandAdvice("repeat the job alone, which tries the cheapest changes", _command(job, least))
    if any(what.startswith(SEARCHED) for what in missed) and not searched:
        return CommandAdvice("search for a recipe with less error", _command(job, ("AUTO.ENABLE=true",)))
    return None


def with_commands(job: Job, outcome: Outcome) -> Outcome:
    """Return the outcome whose report has the command that tries each remedy of its causes alone."""
    report = outcome.report
    if report is None or not report.get("causes") or _reads_remote(job):
        return outcome
    causes = [
        {**cause, "command": _command(job, tuple(cause["overrides"]))} if cause["overrides"] else cause
        for cause in report["causes"]
    ]
    return replace(outcome, report={**report, "causes": causes})


def _reads_remote(job: Job) -> bool:
    """Return whether the command cannot read the inputs of a job, as one is at a URL."""
    return any(map(_is_remote, (job.model, job.data, job.preprocess_file, job.recipe)))


def _command(job: Job, more: tuple[str, ...]) -> str:
    """Return the command line that runs a job alone, with `more` overrides, quoted for a shell."""
    return " ".join(_quoted(word) for word in _words(job, more))


def _words(job: Job, more: tuple[str, ...]) -> Iterator[str]:
    yield from ("sbonnx", "quantize", _local(job.model))
    if job.data is not None:
        yield from ("--data", _local(job.data))
    if job.preprocess is not None:
        yield from ("--preprocess", job.preprocess if job.preprocess_file is None else _local(job.preprocess))
    if job.split is not None:
        yield from ("--split", str(job.split))
    yield from ("--backend", job.backend)
    if job.recipe is not None:
        yield from ("--recipe", job.recipe if job.recipe == AUTO else _local(job.recipe))
    changed = {text.partition("=")[0] for text in more}
    for key, value in job.overrides:
        if SHORT_FORMS.get(key.lower(), key).upper() not in changed:
            yield from ("--set", f"{key}={value}")
    for text in more:
        yield from ("--set", text)
    if job.evaluation is not None:
        labelled = job.evaluation
        yield from ("--eval", _local(labelled.data), "--metric", labelled.metric)
        yield from () if labelled.labels is None else ("--labels", labelled.labels)
        yield from () if labelled.decode is None else ("--decode", _local(labelled.decode))
        yield from () if labelled.vocabulary is None else ("--vocabulary", _local(labelled.vocabulary))
        yield from () if labelled.blank is None else ("--blank", str(labelled.blank))
        yield from () if labelled.head is None else ("--head", labelled.head)
        yield from () if labelled.split is None else ("--eval-split", str(labelled.split))
    output = re.split(r"[?#]", job.output)[0].rpartition("/")[2] if is_url(job.output) else job.output
    yield from ("-o", f"{output.removesuffix('.onnx')}{TRIED}", "--force")


def _is_remote(name: str | None) -> bool:
    """Return whether a name is a URL that has to be downloaded, or unknown because a variable is not set."""
    try:
        return name is not None and local_path(revealed(name)) is None
    except RecipeError:
        return True


def _local(name: str) -> str:
    return str(local_path(name)) if is_url(name) else name


def _quoted(word: str) -> str:
    """Quote a word for a shell; ${NAME} is filled in by it."""
    if not any(names_in(word)):
        return shlex.quote(word)
    return '"' + _ACTIVE.sub(lambda match: f"\\{match[0]}", word) + '"'
