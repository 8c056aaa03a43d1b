"""Base class of recipe sections: documented keys, mappings with fixed keys, and the problems of their validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.config import JsonDict

from sbonnx.recipe.names import REMOVED
from sbonnx.recipe.problem import ManyWrong, Path, Wrong, short, suggestion
from sbonnx.system.runtime import best_device


def key(default: Any, meaning: str, allowed: str, *, shown: str | None = None, maker: str = "ancestor") -> Any:
    """Define a key that Sparsebit has: its default, and its text in docs/recipe.md, the annotated default and editors.

    Args:
        default: the value if the key is absent; None if it is decided elsewhere.
        meaning: one clause, lower case, no full stop.
        allowed: the accepted values, for people.
        shown: the default as text, if the bare value is not informative.
        maker: "ancestor" (Sparsebit) or "new".
    """
    extra: JsonDict = {"x-allowed": allowed, "x-maker": maker}
    if shown is not None:
        extra["x-default"] = shown
    return Field(default, description=meaning, json_schema_extra=extra)


def new_key(default: Any, meaning: str, allowed: str, *, shown: str | None = None) -> Any:
    """Define a key that Sparsebit does not have."""
    return key(default, meaning, allowed, shown=shown, maker="new")


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively; `above` wins."""
    out = dict(below)
    for name, value in above.items():
        before = out.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        out[name] = overlay(before, value) if both else value  # type: ignore[arg-type]
    return out


def nested_value(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return nested mappings with `value` at `path` and nothing else."""
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def nested(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Normalize `data`: keys in upper case, ``A.B: c`` as ``A: {B: c}``, without empty values.

    Raises:
        Wrong: a key is not text, or occurs twice (in two spellings).
    """
    out: dict[str, Any] = {}
    whole: set[str] = set()  # keys that were written without a dot
    for name, value in data.items():
        if not isinstance(name, str):
            raise Wrong(f"has the key {short(name)}: keys are text")
        if value is None:
            continue
        head, dot, rest = name.partition(".")
        head = head.upper()
        if dot:
            value = {rest: value}
        before = out.get(head)
        if before is None:
            out[head] = value
        elif (
            isinstance(before, Mapping)
            and isinstance(value, Mapping)
            and (dot or head not in whole)
            and not before.keys() & value.keys()
        ):
            out[head] = {**before, **value}
        else:
            raise Wrong("is given twice, in two spellings", path=(head,))
        if not dot:
            whole.add(head)
    return out


def from_pairs(data: Any) -> Any:
    """Convert an entry of SPECIFIC to a mapping. Sparsebit's form is a list: key, value, key, value, ..."""
    if isinstance(data, Mapping):
        return data
    if not isinstance(data, list | tuple):
        raise Wrong("must be [key, value, key, value, ...] or a mapping", value=data)
    if len(data) % 2:
        raise Wrong("must be [key, value, key, value, ...]: a key or a value is missing", value=data)
    pairs: dict[str, Any] = {}
    for name, value in zip(data[::2], data[1::2], strict=True):
        if not isinstance(name, str):
            raise Wrong(f"must be [key, value, ...]: {short(name)} is in the place of a key")
        if name in pairs:
            raise Wrong(f"sets {short(name)} twice")
        pairs[name] = value
    return pairs


class Section(BaseModel):
    """A mapping with fixed keys. A key left empty (or null) keeps its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=str.upper)

    short_form: ClassVar[str] = ""
    """Key that a value in place of the mapping sets."""

    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Expand a short form of the whole section to a mapping, or return `data` unchanged."""
        is_short = cls.short_form and data is not None and not isinstance(data, Mapping)
        return {cls.short_form: data} if is_short else data

    @classmethod
    def _rename(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Replace Sparsebit's names of keys, in normalized `data`."""
        return data

    @model_validator(mode="before")
    @classmethod
    def _spell(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        data = cls._expand(data)
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            raise Wrong("must be a mapping of keys to values", value=data)
        return cls._rename(nested(data))

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a key in Sparsebit's spelling: ``qconfig.SCHEDULE.BN_TUNING``. For DEVICE, "auto" is resolved."""
            if not name.isupper() or name.lower() not in type(self).model_fields:
                return super().__getattr__(name)
            value = getattr(self, name.lower())
            return best_device() if (name, value) == ("DEVICE", "auto") else value


def _as_section(annotation: Any) -> type[Section] | None:
    """Return the section class that an annotation is, or None. In Python 3.10 ``tuple[int, ...]`` is a `type`, too."""
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, Section):
        return annotation
    return None


def children(section: type[Section]) -> dict[str, type[Section]]:
    """Return the keys of `section` whose value is a section, with its class."""
    found = {}
    for name, info in section.model_fields.items():
        if (child := _as_section(info.annotation)) is not None:
            found[name.upper()] = child
    return found


def canonical(section: type[Section], data: Any) -> dict[str, Any]:
    """Normalize every fixed key of `data` to upper case and nested form, recursively. Values are not checked.

    Raises:
        Wrong: `data` is not a mapping, or a key is not text or occurs twice.
    """
    data = section._expand(data)
    if not isinstance(data, Mapping):
        raise Wrong("must be a mapping of keys to values", value=data)
    out = section._rename(nested(data))
    for name, child in children(section).items():
        if name in out:
            try:
                out[name] = canonical(child, out[name])
            except Wrong as problem:
                raise problem.under(name) from problem
    return out


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section class that an annotation contains, at any depth of tuples and dicts."""
    if (section := _as_section(annotation)) is not None:
        return section
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
    gone = REMOVED.get(".".join(map(str, path[-2:])))
    if gone is not None:
        return Wrong("was removed", gone, path=path)
    known = [name.upper() for name in section.model_fields]
    hint = suggestion(str(path[-1]), known, cutoff=0.6) or f"Keys here: {', '.join(known)}"
    return Wrong("is not a key of the recipe", hint, path=path)


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
