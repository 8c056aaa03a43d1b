"""Overrides of a recipe: keywords and ``KEY=VALUE`` flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from sbonnx.errors import RecipeError
from sbonnx.recipe import text
from sbonnx.recipe.names import SHORT_FORMS
from sbonnx.recipe.problem import Origin, Wrong, nearest, one_of, short
from sbonnx.recipe.resolve import overlay
from sbonnx.recipe.schema import Recipe
from sbonnx.recipe.sections.keys import Section, canonical, children
from sbonnx.recipe.sections.verification import BY_OUTPUT
from sbonnx.recipe.spellings import TWINS, planted
from sbonnx.recipe.values import both_bits
from sbonnx.spec import FP8_BITS

Overrides = Mapping[str, Any] | Iterable[str]

BITS: Final = "bits"
"""Short form that sets both widths, ``w8a8``, or both types, ``fp8``."""

FP8: Final = "fp8"

WHOLE: Final = ("RANGES", "W.SPECIFIC", "A.SPECIFIC", "CALIBRATION.FEEDBACK", *BY_OUTPUT)
"""Keys whose inner names are chosen by the user."""


def all_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every key path, with dots."""
    inner = children(section)
    for name in (field.upper() for field in section.model_fields):
        yield prefix + name
        if name in inner:
            yield from all_keys(inner[name], f"{prefix}{name}.")


def _pairs(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each override, in order."""
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for item in overrides:
        if not isinstance(item, str):
            raise RecipeError(f"an override is KEY=VALUE, got {short(item)}")
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise RecipeError(f"an override is KEY=VALUE, got {short(item)}")
        parsed, _ = text.parse(value, f"the value of {name.strip()}")
        if parsed is None:
            raise RecipeError(f"the override {name.strip()} has no value")
        yield name.strip(), parsed


def _path(name: Any) -> tuple[str, ...]:
    """Resolve `name`, a path in any case or a short form, to a key path."""
    if not isinstance(name, str):
        raise RecipeError(f"the name of an override is text, got {short(name)}")
    full = SHORT_FORMS.get(name.lower(), name)
    known = set(all_keys())
    if full.upper() in known:
        return tuple(full.upper().split("."))
    fixed = next((key for key in WHOLE if full.upper().startswith(f"{key}.")), None)
    if fixed is not None:
        raise RecipeError(f"{short(name)} cannot be set alone: names have dots of their own. Set {fixed} as a whole")
    close = nearest(name, [BITS, *SHORT_FORMS, *known], count=3)
    hint = f"Did you mean {one_of(close)}? " if close else ""
    forms = ", ".join([BITS, *SHORT_FORMS])
    raise RecipeError(f"{short(name)} is not a key of the recipe. {hint}Write a key path, or one of {forms}")


def _cut(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return `data` without the value at `path`."""
    inner = data.get(path[0])
    if len(path) == 1 or not isinstance(inner, dict):
        return {name: value for name, value in data.items() if len(path) > 1 or name != path[0]}
    return {**data, path[0]: _cut(inner, path[1:])}


def _leaves(section: type[Section], path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys below `path` that a mapping `value` for `section` sets."""
    inner = children(section)
    for name, below in canonical(section, value).items():
        if name in inner:
            yield from _leaves(inner[name], (*path, name), below)
        else:
            yield (*path, name), below


def _assignments(name: Any, value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the key paths and values that one override sets."""
    if isinstance(name, str) and name.lower() == BITS:
        fp8 = isinstance(value, str) and value.lower() == FP8
        for side, width in ({"W": FP8_BITS, "A": FP8_BITS} if fp8 else both_bits(value)).items():
            yield (side, "QUANTIZER", "BIT"), width
            if fp8:
                yield (side, "QUANTIZER", "DTYPE"), FP8
        return
    path = _path(name)
    section: type[Section] | None = Recipe
    for part in path:
        section = None if section is None else children(section).get(part)
    if section is None or value is None:
        yield path, value
        return
    try:
        yield from _leaves(section, path, value)
    except Wrong as problem:
        raise problem.under(*path) from problem


def lay_over(data: dict[str, Any], overrides: Overrides) -> tuple[dict[str, Any], frozenset[str]]:
    """Apply `overrides` to `data` (canonical keys); also return the key paths that were set (dots, lower case).

    A mapping for a section is merged into it; lists and mappings of patterns replace the old value.
    None resets a key to its default.

    Raises:
        RecipeError: an unknown key, a key that is set twice, or text that is not KEY=VALUE.
    """
    paths: set[tuple[str, ...]] = set()
    for name, value in _pairs(overrides):
        try:
            found = list(_assignments(name, value))
        except Wrong as problem:
            origin = Origin(overridden=frozenset({".".join(map(str, problem.path)).lower()}))
            raise (origin.error(problem) if problem.path else _bare(name, problem)) from problem
        for path, leaf in found:
            if path in paths:
                raise RecipeError(f"'{'.'.join(path)}' is set twice in the overrides")
            paths.add(path)
            for gone in (path, *(twin for twin in TWINS if path in TWINS)):
                data = _cut(data, gone)
            if leaf is not None:
                data = overlay(data, planted(path, leaf))
    return data, frozenset(".".join(path).lower() for path in paths)


def _bare(name: Any, problem: Wrong) -> RecipeError:
    return Origin(overridden=frozenset({str(name).lower()})).error(problem.under(str(name)))
