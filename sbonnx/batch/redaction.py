"""Environment variables in job files: ${NAME} is substituted only where it is used, and redacted in all outputs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.jobs.job import Job, Outcome
from sbonnx.errors import RecipeError
from sbonnx.system.terminal import map_strings

SHORTEST: Final = 4
"""Minimum length of a value. Shorter values would match unrelated text when they are redacted."""

_NAME: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def names_in(value: Any) -> Iterator[str]:
    """Yield the names of the environment variables in all strings of a dataclass, mapping or list."""
    if isinstance(value, str):
        yield from _NAME.findall(value)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from names_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from names_in(key)
            yield from names_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from names_in(inner)


def revealed(text: str) -> str:
    """Return `text` with ${NAME} replaced by the values of environment variables.

    Raises:
        RecipeError: a variable is not set, or shorter than `SHORTEST` characters.
    """

    def value_of(match: re.Match[str]) -> str:
        name, value = match[1], os.environ.get(match[1])
        if value is None:
            raise RecipeError(f"the job file refers to ${{{name}}}, and the environment has no {name}: set it")
        if len(value) < SHORTEST:
            raise RecipeError(
                f"the value of ${{{name}}} has fewer than {SHORTEST} characters and could not be redacted in logs and "
                "reports: write it out in the job file"
            )
        return value

    return _NAME.sub(value_of, text)


class Redactor:
    """Redacts the values of environment variables: replaces them by ${NAME}.

    Args:
        names: names of the variables; unset variables are ignored.
    """

    def __init__(self, names: Iterable[str]) -> None:
        values = {name: os.environ.get(name, "") for name in dict.fromkeys(names)}
        secrets = [(value, f"${{{name}}}") for name, value in values.items() if len(value) >= SHORTEST]
        self._pairs = sorted(secrets, key=lambda pair: -len(pair[0]))

    @classmethod
    def of(cls, jobs: Iterable[Job]) -> Redactor:
        """Create a redactor for all variables that these jobs refer to."""
        return cls(names_in(list(jobs)))

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def text(self, text: str) -> str:
        for value, name in self._pairs:
            text = text.replace(value, name)
        return text

    def values(self, value: Any) -> Any:
        """Redact JSON values, including keys."""
        return map_strings(self.text, value) if self._pairs else value

    def outcome(self, outcome: Outcome) -> Outcome:
        """Redact the reason and the report of an outcome."""
        return replace(outcome, reason=self.text(outcome.reason), report=self.values(outcome.report))

    def log(self, path: Path) -> None:
        """Redact a log, for the output of libraries."""
        sys.stderr.flush()
        if not self or not path.is_file():
            return
        content = path.read_bytes()
        clean = self.text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if clean != content:
            path.write_bytes(clean)


def reveal_job(job: Job) -> Job:
    """Substitute the variables of a job. Only for the process that runs it; the result must not be stored or shown.

    Raises: see `revealed`.
    """

    def of(text: str | None) -> str | None:
        return None if text is None else revealed(text)

    return replace(
        job,
        model=revealed(job.model),
        data=of(job.data),
        preprocess=of(job.preprocess),
        recipe=of(job.recipe),
        ort_libraries=tuple(map(revealed, job.ort_libraries)),
        output=revealed(job.output),
        overrides=tuple((key, revealed(value)) for key, value in job.overrides),
        accept=replace(job.accept, metric=of(job.accept.metric)),
        evaluation=None if job.evaluation is None else job.evaluation.with_paths(revealed),
    )
