"""The table type, and the groups of entry points."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar

from sbonnx.errors import RecipeError, foreign_code

OBSERVERS: Final = "sbonnx.observers"
"""Subclasses of `sbonnx.calib.observers.Observer`."""

ROUNDINGS: Final = "sbonnx.roundings"
"""Subclasses of `sbonnx.rounding.Rounder`."""

BACKENDS: Final = "sbonnx.backends"
"""Objects of `sbonnx.backends.Backend` whose `name` is that of the entry point."""

LINT_RULES: Final = "sbonnx.lint_rules"
"""Objects of `sbonnx.linting.LintRule`; the name of the entry point is ``FAMILY.ID``, such as ``onnxruntime.X1``."""

METRICS: Final = "sbonnx.metrics"
"""Objects of `sbonnx.metrics.MetricDefinition`."""

READERS: Final = "sbonnx.readers"
"""Functions `sbonnx.calib.data.Reader`; the name of the entry point is the suffix of the files, such as ``h5``."""

ENGINES: Final = "sbonnx.engines"
"""Functions that return a `sbonnx.batch.engine.Engine` for a cluster or the address of its scheduler."""

MODEL_FOLDERS: Final = "sbonnx.model_folders"
"""Modules with `ModelFolder` and `quantize_folder`, for the folders of another library."""

OPTIONAL: Final = (
    EntryPoint("dask", "sbonnx.batch.dask.cluster:DaskEngine", ENGINES),
    EntryPoint("optimum", "sbonnx.integrations.optimum", MODEL_FOLDERS),
    EntryPoint("browser_folder", "sbonnx.integrations.browser_folder", MODEL_FOLDERS),
)
"""Parts that are in sbonnx's own distribution and need another library: the core imports them on first use only."""

Part = TypeVar("Part")


def optional_part(group: str, name: str) -> Any:
    """Import a part of `OPTIONAL`, or the one of an installed package that takes its place.

    Raises:
        RecipeError: as `load`.
    """
    point = _installed(group).get(name)
    if point is None:
        point = next(point for point in OPTIONAL if (point.group, point.name) == (group, name))
    return load(point, lambda _: None)


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def load(point: EntryPoint, check: Callable[[object], str | None]) -> object:
    """Import the object of an entry point.

    Args:
        point: of an installed package.
        check: returns why an object is no such part, or None.

    Raises:
        RecipeError: it cannot be imported, or is no such part; the message names package, entry point and reason.
    """
    owner = "sbonnx" if point in OPTIONAL else point.dist.name if point.dist is not None else "an installed package"
    named = f"plug-in '{point.name}' of {owner} ({point.group})"
    with foreign_code(lambda reason: RecipeError(f"{named} cannot be imported: {reason}")):
        part: object = point.load()
    wrong = check(part)
    if wrong is not None:
        raise RecipeError(f"{named}: {point.value} {wrong}")
    return part


def plugins_of(group: str, check: Callable[[object], str | None]) -> Iterator[tuple[str, object]]:
    """Yield name and object of every installed entry point of a group, by name.

    Raises:
        RecipeError: as `load`.
    """
    for name in sorted(_installed(group)):
        yield name, load(_installed(group)[name], check)


class Registry(MutableMapping[str, Part], Generic[Part]):
    """Table of built-in parts, then those of installed packages, which are imported on first use.

    A name that is built in stays so: an installed package that defines it as well is an error where it is looked up.
    """

    def __init__(
        self,
        group: str,
        check: Callable[[object], str | None],
        builtin: Mapping[str, Part],
        reserved: Collection[str] = (),
    ) -> None:
        """Create the table.

        Args:
            group: of the entry points.
            check: returns why a loaded object is no such part, or None.
            builtin: parts of sbonnx by name.
            reserved: names of built-in parts that are not in the table.
        """
        self.group = group
        self._check = check
        self._parts: dict[str, Part] = dict(builtin)
        self._builtin = frozenset(builtin).union(reserved)

    def __getitem__(self, name: str) -> Part:
        """Return a part; import it if it is one of an installed package.

        Raises:
            KeyError: there is none of this name.
            RecipeError: as `load`, or two packages define the name.
        """
        point = _installed(self.group).get(name)
        if point is not None and name in self._builtin:
            owner = point.dist.name if point.dist is not None else "an installed package"
            raise RecipeError(f"plug-in '{name}' of {owner} ({self.group}) has the name of a built-in one: rename it")
        if point is not None and name not in self._parts:
            self._parts[name] = load(point, self._check)  # type: ignore[assignment]  # `check` has seen it
        return self._parts[name]

    def usable(self) -> dict[str, Part]:
        """Return all parts by name, without plug-ins that cannot be imported: only their use is an error."""
        parts = {}
        for name in self:
            with suppress(RecipeError):
                parts[name] = self[name]
        return parts

    def __setitem__(self, name: str, part: Part) -> None:
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in _installed(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield from (name for name in sorted(_installed(self.group)) if name not in self._parts)

    def __len__(self) -> int:
        return len(self._parts.keys() | _installed(self.group).keys())


def subclass_of(base: type, name: str) -> Callable[[object], str | None]:
    """Return a check for concrete subclasses of a base class; `name` is the base's public name."""

    def check(part: object) -> str | None:
        if not (isinstance(part, type) and issubclass(part, base)):
            return f"is no subclass of {name}"
        missing = sorted(getattr(part, "__abstractmethods__", ()))
        return f"does not define {', '.join(missing)}" if missing else None

    return check


def instance_of(kind: type, name: str) -> Callable[[object], str | None]:
    """Return a check for objects of a class; `name` is its public name."""

    def check(part: object) -> str | None:
        return None if isinstance(part, kind) else f"is no {name}"

    return check


def function(part: object) -> str | None:
    """Check for functions."""
    return None if callable(part) and not isinstance(part, type) else "is no function"
