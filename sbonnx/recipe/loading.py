"""Loading of recipes: a file, a dict or nothing, with a backend and overrides, becomes a `Recipe`.

Overrides are keywords and ``KEY=VALUE`` flags.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, Final

from sbonnx.backends import BACKENDS
from sbonnx.errors import RecipeError
from sbonnx.recipe import names, yaml_text
from sbonnx.recipe.defaults import TWINS, complete
from sbonnx.recipe.problem import BITS, KeyOrigin, ManyWrong, TypedOption, Wrong, one_of, short, suggestion
from sbonnx.recipe.schema import Recipe
from sbonnx.recipe.sections.base import Section, canonical, children, nested_value, overlay
from sbonnx.recipe.sections.other_tools import counterpart
from sbonnx.recipe.sections.sparsity import modern_key
from sbonnx.recipe.sections.stages import BY_OUTPUT
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
from sbonnx.recipe.value_types import bits_by_side
from sbonnx.small_floats import FLOATS, IN_BLOCKS

AUTO: Final = "auto"
"""Source for the defaults with recipe search (AUTO) enabled."""

Source = str | os.PathLike[str] | Mapping[str, Any] | Recipe | None
Overrides = Mapping[str, Any] | Iterable[str]


REGEX: Final = "re:"
"""An override that begins so is a regular expression, taken as it is: its characters mean other things in YAML."""

WHOLE: Final = ("RANGES", "W.SPECIFIC", "A.SPECIFIC", "SPARSE.SPECIFIC", "CALIBRATION.FEEDBACK", *BY_OUTPUT)
"""Keys whose inner names are chosen by the user."""


MEANT: Final = {"BIT": "QUANTIZER.BIT", "BITS": "QUANTIZER.BIT", "SCHEME": "QSCHEME"}
"""Ends of key paths that are often written for others."""


def _pairs(overrides: Overrides) -> Iterator[tuple[str, str, Any]]:
    """Yield name, name as typed, and value."""
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            is_keyword = isinstance(name, str) and name.isidentifier() and name.islower()
            yield name, f"{name}=" if is_keyword else str(name), value
        return
    for item in overrides:
        name, equals, value = item.partition("=") if isinstance(item, str) else ("", "", "")
        name = name.strip()
        if not equals or not name:
            raise RecipeError(f"an override is KEY=VALUE, got {short(item)}")
        parsed = value if value.startswith(REGEX) else yaml_text.parse(value, f"the value of {name}")[0]
        if parsed is None:
            raise RecipeError(f"the override {name} has no value")
        yield name, item.option if isinstance(item, TypedOption) else name, parsed


def _path(name: Any) -> tuple[str, ...]:
    """Resolve `name`, a path in any case or a short form, to a key path."""
    if not isinstance(name, str):
        raise RecipeError(f"the name of an override is text, got {short(name)}")
    full = modern_key(SHORT_FORMS.get(name.lower(), names.REMOVED_FORMS.get(name.lower(), name)))
    keys = KEYS.keys()
    if full.upper() in keys:
        return tuple(full.upper().split("."))
    gone = names.REMOVED.get(".".join(full.upper().split(".")[-2:]))
    if gone is not None:
        raise RecipeError(f"the key {short(name)} was removed. {gone}")
    fixed = next((key for key in WHOLE if full.upper().startswith(f"{key}.")), None)
    if fixed is not None:
        raise RecipeError(f"{short(name)} cannot be set alone: names inside it contain dots. Set {fixed} as a whole")
    other = counterpart(name)
    if other:
        raise RecipeError(other)
    last = full.upper().rpartition(".")
    meant = MEANT.get(last[2])
    if meant is not None and f"{last[0]}.{meant}" in keys:
        raise RecipeError(f"{short(name)} is not a key of the recipe. Did you mean {last[0]}.{meant}?")
    hint = suggestion(name, [BITS, *SHORT_FORMS, *keys], count=3, cutoff=0.6) or "docs/recipe.md has all keys"
    raise RecipeError(f"{short(name)} is not a key of the recipe. {hint}")


def _with_full_backend(data: dict[str, Any]) -> dict[str, Any]:
    """Replace a short name of a backend by the full name."""
    given = data.get("BACKEND")
    short_name = isinstance(given, str) and given.lower().partition("@")[0] in names.BACKEND_ALIASES
    return {**data, "BACKEND": names.full_backend(str(given))} if short_name else data


def _without(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    inner = data.get(path[0])
    if len(path) == 1 or not isinstance(inner, dict):
        return {name: value for name, value in data.items() if len(path) > 1 or name != path[0]}
    return {**data, path[0]: _without(inner, path[1:])}


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
        kind: Any = value.lower() if isinstance(value, str) else None
        if kind not in FLOATS:
            for side, width in bits_by_side(value).items():
                yield (side, "QUANTIZER", "BIT"), width
            return
        for side in "W" if kind in IN_BLOCKS else "WA":
            yield (side, "QUANTIZER", "BIT"), FLOATS[kind].bits
            yield (side, "QUANTIZER", "DTYPE"), kind
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


def apply_overrides(data: dict[str, Any], overrides: Overrides) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply `overrides` to `data` (canonical keys); also return the names as typed by key path (dots, lower case).

    A mapping for a section is merged into it; lists and mappings of patterns replace the old value.
    None resets a key to its default.

    Raises:
        RecipeError: an unknown key, a key that is set twice, or text that is not KEY=VALUE.
    """
    paths: dict[tuple[str, ...], str] = {}
    for name, typed, value in _pairs(overrides):
        try:
            assignments = list(_assignments(name, value))
        except Wrong as problem:
            named = problem if problem.path else problem.under(str(name))
            origin = KeyOrigin(overridden={".".join(map(str, named.path)).lower(): typed})
            raise origin.error(named) from problem
        for path, leaf in assignments:
            if path in paths:
                raise RecipeError(f"'{'.'.join(path)}' is set twice in the overrides")
            paths[path] = typed
            for spelling in TWINS if path in TWINS else (path,):
                data = _without(data, spelling)
            if leaf is not None:
                data = overlay(data, nested_value(path, leaf))
    return _with_full_backend(data), {".".join(path).lower(): name for path, name in paths.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    """Copy `value` with mappings as dicts; refuse excessive nesting and invalid text.

    Raises:
        RecipeError: nested too deeply (or in itself), or a text that is too long or not valid Unicode.
    """
    if depth > yaml_text.MAX_DEPTH:
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
        if len(value) > yaml_text.MAX_TEXT:
            raise RecipeError(f"the recipe contains a text of {len(value)} characters, {short(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RecipeError(f"the recipe contains {short(value)}, which is not valid Unicode") from error
        return str(value)
    return value


def _without_removed(data: Any, parent: str = "") -> Any:
    """Leave out keys of earlier versions with values that ask for nothing: saved recipes have every key."""
    if isinstance(data, list):
        return [_without_removed(value, parent) for value in data]
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        key = f"{parent}.{name}"
        if key not in names.REMOVED or value != names.REMOVED_DEFAULTS.get(key, value):
            kept[name] = _without_removed(value, str(name))
    return kept


def _source(source: Source) -> tuple[dict[str, Any], KeyOrigin]:
    """Return the keys that `source` sets, in canonical form, and their origin."""
    if isinstance(source, Recipe):
        return source.given, source.origin
    data: Any = source
    origin = KeyOrigin()
    if source is None:
        data = {}
    elif isinstance(source, str) and source.lower() == AUTO:
        data = {"AUTO": {"ENABLE": True}}
    elif isinstance(source, str | os.PathLike) and os.fspath(source):
        data, lines = yaml_text.read(source)
        origin = KeyOrigin(yaml_text.shown(source), {modern_key(key).lower(): line for key, line in lines.items()})
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise RecipeError(f"{origin.name} must be a mapping of keys to values, got {short(data)}")
    elif not isinstance(source, Mapping):
        raise RecipeError(f"a recipe is a file, a dict, 'auto' or None, got {short(source)}")
    try:
        return _without_removed(canonical(Recipe, _plain(data))), origin
    except Wrong as problem:
        raise origin.error(problem) from problem


def similar_backend(name: str) -> str:
    """Return a hint: the backend, or the short form of one, that is most similar to a name; or ""."""
    if "," in name:
        return "One backend a run: sbonnx batch quantizes for several"
    return suggestion(name, (*BACKENDS, *names.VERSIONED, *names.BACKEND_ALIASES))


def backend_name(backend: object) -> str:
    """Return the name in lower case, with an optional version: ``tensorrt@10``."""
    name = names.full_backend(backend) if isinstance(backend, str) else ""
    if name in BACKENDS or name in names.VERSIONED:
        return name
    hint = similar_backend(name)
    own, _, version = name.partition("@")
    versions = [versioned.partition("@")[2] for versioned in names.VERSIONED if versioned.startswith(f"{own}@")]
    if version and versions:
        raise RecipeError(
            f"{own} has no version {short(version)}: write {one_of(f'{own}@{release}' for release in versions)}"
        )
    raise RecipeError(f"the backend must be {one_of(BACKENDS)}, got {short(backend)}{hint and f'. {hint}'}")


def _with_backend(data: dict[str, Any], origin: KeyOrigin, backend: str) -> dict[str, Any]:
    """Set the requested backend in `data` unless `data` contradicts it."""
    given = data.get("BACKEND")
    if given is None or given == backend.partition("@")[0]:
        return {**data, "BACKEND": backend}
    name = given.lower() if isinstance(given, str) else ""
    if name in (*BACKENDS, *names.VERSIONED) and name != backend and not name.startswith(f"{backend}@"):
        raise RecipeError(
            f"'BACKEND' {origin.where(('BACKEND',))} is {name}, but the backend {backend} was requested. "
            f"Drop one of them, or override BACKEND={backend}"
        )
    return data


def backend_of(source: Source, overrides: Overrides = ()) -> str:
    """Return the backend that `load` would choose without `backend`, with a version if one is written with it.

    Other keys may be invalid.

    Raises:
        RecipeError: the source or the overrides cannot be read, or the name of the backend is invalid.
    """
    data, _ = apply_overrides(_source(source)[0], overrides)
    given = data.get("BACKEND")
    return backend_name(complete({"DEFAULTS": data.get("DEFAULTS")})["BACKEND"] if given is None else given)


def load(source: Source = None, *, backend: str | None = None, overrides: Overrides = ()) -> Recipe:
    """Load a complete recipe: the keys of `source`, then `overrides`; all other keys have their defaults.

    Args:
        source: a YAML file, a dict in the YAML's keys (any case, nested or dotted), a `Recipe` (the keys that its
            source set), None for the defaults, or "auto" for those with AUTO enabled.
        backend: a name of `BACKENDS`, or one with a version: tensorrt@10. None: that of the source, else
            onnxruntime.
        overrides: a mapping from key paths ("W.QUANTIZER.BIT", any case) or short forms ("w_bit", "bits") to
            values, or texts "KEY=VALUE" whose values are parsed as YAML. They take precedence.

    Raises:
        RecipeError: invalid keys or values, with the file, line, key path, value and allowed values; or a
            `backend` that contradicts the source.
    """
    backend = None if backend is None else backend_name(backend)
    data, origin = _source(source)
    try:
        pairs = _plain(overrides) if isinstance(overrides, Mapping) else overrides
        data, overridden = apply_overrides(data, pairs)
    except RecursionError as error:
        raise RecipeError("the overrides are nested too deeply") from error
    origin = KeyOrigin(origin.name, origin.lines, {**origin.overridden, **overridden})
    if backend is not None and "backend" not in overridden:
        data = _with_backend(data, origin, backend)
    try:
        recipe = Recipe.read(_plain(data))
    except ManyWrong as error:
        raise origin.error(*error.items) from error
    except Wrong as problem:
        raise origin.error(problem) from problem
    return recipe.written_in(origin)


def parse_qconfig(path: str | os.PathLike[str]) -> Recipe:
    """Load the recipe of a YAML file; the name is that of Sparsebit's function.

    Raises:
        RecipeError: as in `load`.
    """
    if not isinstance(path, str | os.PathLike):
        raise RecipeError(f"parse_qconfig and parse_sconfig require the path of a YAML file, got {short(path)}")
    return load(FilePath(path))  # a Path is always a file, even one called "auto"


def parse_sconfig(path: str | os.PathLike[str]) -> Recipe:
    """Load the recipe of a YAML file with SPARSE or SPARSER; the name is that of Sparsebit's function.

    Raises:
        RecipeError: as in `load`, or nothing is to be pruned.
    """
    recipe = parse_qconfig(path)
    if not recipe.sparse.wanted:
        raise RecipeError(f"{os.fspath(path)} prunes nothing: set SPARSE.RATIO, a budget, or Sparsebit's SPARSER")
    return recipe


def update_config(config: Recipe, key: str, value: Any) -> Recipe:
    """Return a copy of the recipe with another value at a key path, such as "SCHEDULE.FUSE_BN".

    Raises:
        RecipeError: as in `load`.
    """
    return load(config, overrides={key: value})
