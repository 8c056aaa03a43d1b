"""Loading of recipes: a file, a dict or nothing, with a backend and overrides, becomes a `Recipe`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic import ValidationError

from sbonnx.errors import RecipeError
from sbonnx.recipe import limits, names, text
from sbonnx.recipe.explain import problems
from sbonnx.recipe.overrides import Overrides, lay_over
from sbonnx.recipe.problem import Origin, Wrong, nearest, one_of, short
from sbonnx.recipe.schema import Recipe
from sbonnx.recipe.sections.keys import canonical

AUTO: Final = "auto"
"""Source for the backend's defaults with recipe search (AUTO) enabled."""

Source = str | os.PathLike[str] | Mapping[str, Any] | Recipe | None


def _plain(value: Any, depth: int = 0) -> Any:
    """Copy `value` with mappings as dicts; refuse excessive nesting and invalid text.

    Raises:
        RecipeError: nested too deeply (or in itself), or a text that is too long or not valid Unicode.
    """
    if depth > text.MAX_DEPTH:
        raise RecipeError("the recipe is nested too deeply, or refers to itself")
    if isinstance(value, Mapping):
        return {
            _plain(name) if isinstance(name, str) else name: _plain(inner, depth + 1) for name, inner in value.items()
        }

    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        if len(value) > text.MAX_TEXT:
            raise RecipeError(f"the recipe holds a text of {len(value)} characters, {short(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RecipeError(f"the recipe holds {short(value)}, which is not valid Unicode") from error
        return str(value)
    return value


def _from_file(path: str | os.PathLike[str]) -> tuple[Any, Origin]:
    data, lines = text.read(path)
    name = text.shown(path)
    if data is None:
        raise RecipeError(f"{name} is empty; 'auto' instead of a file gives the defaults of the backend")
    if not isinstance(data, dict):
        raise RecipeError(f"{name} must be a mapping of keys to values, got {short(data)}")
    return data, Origin(name, lines)


def _source(source: Source, backend: str | None) -> tuple[dict[str, Any], Origin]:
    """Return the keys that `source` sets, in canonical form, and their origin."""
    if source is None or (isinstance(source, str) and source.lower() == AUTO):
        found = limits.defaults(backend) if backend is not None else limits.defaults("virtual")
        return ({**found, "AUTO": {"ENABLE": True}} if source is not None else found), Origin()
    if isinstance(source, Recipe):
        return source.to_dict(), source.origin
    if isinstance(source, Mapping):
        data, origin = source, Origin()
    elif isinstance(source, str | os.PathLike) and os.fspath(source):
        data, origin = _from_file(source)
    else:
        raise RecipeError(f"a recipe is a file, a dict, 'auto' or None, got {short(source)}")
    try:
        return canonical(Recipe, _plain(data)), origin
    except Wrong as problem:
        raise origin.error(problem) from problem


def _backend_name(backend: object) -> str:
    """Return the name in lower case, with an optional version: ``tensorrt@10``."""
    name = backend.lower() if isinstance(backend, str) else ""
    if name in names.BACKENDS or name in names.VERSIONED:
        return name
    close = nearest(str(backend), (*names.BACKENDS, *names.VERSIONED)) if isinstance(backend, str) else []
    hint = f". Did you mean {close[0]}?" if close else ""
    raise RecipeError(f"the backend must be {one_of(names.BACKENDS)}, got {short(backend)}{hint}")


def _settle_backend(
    data: dict[str, Any], origin: Origin, backend: str | None, overridden: frozenset[str]
) -> dict[str, Any]:
    """Set the requested backend in `data` unless `data` contradicts it."""
    stated = data.get("BACKEND")
    if backend is None or "backend" in overridden:
        return data
    if isinstance(stated, str) and stated.lower().startswith(f"{backend}@"):
        return data
    if stated is None or stated == backend.partition("@")[0]:
        return {**data, "BACKEND": backend}
    if isinstance(stated, str) and stated.lower() in (*names.BACKENDS, *names.VERSIONED) and stated.lower() != backend:
        where = origin.where(("BACKEND",))
        raise RecipeError(
            f"'BACKEND' {where} is {stated.lower()}, but the backend {backend} was asked for. "
            f"Drop one of them, or override BACKEND={backend}"
        )
    return data


def load(source: Source = None, *, backend: str | None = None, overrides: Overrides = ()) -> Recipe:
    """Load a complete recipe: defaults, then `source`, then `overrides`.

    Args:
        source: a YAML file, a dict in the YAML's keys (any case, nested or dotted), a `Recipe`, None for
            the defaults of the backend, or "auto" for those with AUTO enabled.
        backend: virtual, onnxruntime or tensorrt, the last also as tensorrt@10. None: that of the source, else
            virtual.
        overrides: a mapping from key paths ("W.QUANTIZER.BIT", any case) or short forms ("w_bit", "bits") to
            values, or texts "KEY=VALUE" whose values are parsed as YAML. They take precedence.

    Raises:
        RecipeError: invalid keys or values, with the file, line, key path, value and allowed values; or a
            `backend` that contradicts the source.
    """
    wanted = None if backend is None else _backend_name(backend)
    data, origin = _source(source, wanted)
    try:
        pairs = _plain(overrides) if isinstance(overrides, Mapping) else overrides
        data, overridden = lay_over(data, pairs)
    except RecursionError as error:
        raise RecipeError("the overrides are nested too deeply") from error
    origin = Origin(origin.name, origin.lines, overridden | origin.overridden)
    data = _settle_backend(data, origin, wanted, overridden)
    try:
        recipe = Recipe.model_validate(_plain(data))
    except ValidationError as error:
        found = problems(error, Recipe)
        raise origin.error(found[0], len(found) - 1) from error
    return recipe.written_in(origin)


def parse_qconfig(path: str | os.PathLike[str]) -> Recipe:
    """Load the recipe of a YAML file; the name is that of Sparsebit's function.

    Raises:
        RecipeError: as in `load`.
    """
    if not isinstance(path, str | os.PathLike):
        raise RecipeError(f"parse_qconfig wants the path of a YAML file, got {short(path)}")
    return load(FilePath(path))  # a Path is always a file, even one called "auto"


def update_config(config: Recipe, key: str, value: Any) -> Recipe:
    """Return a copy of the recipe with another value at a key path, such as "SCHEDULE.FUSE_BN".

    Raises:
        RecipeError: as in `load`.
    """
    return load(config, overrides={key: value})
