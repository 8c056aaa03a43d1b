"""Conversion of pydantic's validation errors to messages in terms of the recipe."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import ValidationError

from sbonnx.recipe.problem import ManyWrong, Path, Wrong, nearest
from sbonnx.recipe.sections.keys import Section


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section class that an annotation contains, at any depth of tuples and dicts."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in get_args(annotation):
        found = _section_in(inner)
        if found is not None:
            return found
    return None


def section_at(top: type[Section], path: Path) -> type[Section]:
    """Return the section class at `path`; positions and patterns in the path are skipped."""
    section = top
    for part in path:
        fields = {name.upper(): info for name, info in section.model_fields.items()}
        if part in fields:
            section = _section_in(fields[str(part)].annotation) or section
    return section


def unknown_key(section: type[Section], path: Path) -> Wrong:
    """Return the problem for a key that `section` does not have."""
    known = [name.upper() for name in section.model_fields]
    close = nearest(str(path[-1]), known, cutoff=0.6)
    hint = f"Did you mean {close[0]}? " if close else ""
    text = "is not a key of the recipe"
    return Wrong(text, f"{hint}Keys here: {', '.join(known)}", path=path)


def problems(error: ValidationError, top: type[Section]) -> list[Wrong]:
    """Return the problems of a failed validation, in the order of the keys."""
    found: list[Wrong] = []
    for item in error.errors(include_url=False):
        path: Path = tuple(part for part in item["loc"] if part != "[key]")
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, ManyWrong):
            found += [problem.under(*path) for problem in cause.items]
        elif isinstance(cause, Wrong):
            found.append(cause.under(*path))
        elif item["type"] == "extra_forbidden":
            found.append(unknown_key(section_at(top, path[:-1]), path))
        else:  # every value has its own reader: only for errors that pydantic adds
            found.append(Wrong(f"is not right: {item['msg']}", path=path, value=item["input"]))
    return found
