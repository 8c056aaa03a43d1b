"""Base classes of recipe sections: documented keys, mappings with fixed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from sbonnx.recipe.problem import Wrong, short
from sbonnx.runtime import best_device

Maker = Literal["ancestor", "new"]


def key(default: Any, meaning: str, allowed: str, maker: Maker = "ancestor", *, shown: str | None = None) -> Any:
    """Define a key of the recipe: its default, and its text in docs/recipe.md, the annotated default and editors.

    Args:
        default: the value if the key is absent; None if it is decided elsewhere.
        meaning: one clause, lower case, no full stop.
        allowed: the accepted values, for people.
        maker: whether Sparsebit has the key.
        shown: the default as text, if the bare value is not informative.
    """
    extra: JsonDict = {"x-allowed": allowed, "x-maker": maker}
    if shown is not None:
        extra["x-default"] = shown
    return Field(default, description=meaning, json_schema_extra=extra)


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


class Section(BaseModel):
    """A mapping with fixed keys. A key left empty (or null) keeps its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=str.upper)

    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Expand a short form of the whole section to a mapping, or return `data` unchanged."""
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
        return nested(data)

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a key in Sparsebit's spelling: ``qconfig.SCHEDULE.BN_TUNING``. For DEVICE, "auto" is resolved."""
            if not name.isupper() or name.lower() not in type(self).model_fields:
                return super().__getattr__(name)
            value = getattr(self, name.lower())
            return best_device() if (name, value) == ("DEVICE", "auto") else value


def children(section: type[Section]) -> dict[str, type[Section]]:
    """Return the keys of `section` whose value is a section, with its class."""
    found = {}
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            found[name.upper()] = info.annotation
    return found


def canonical(section: type[Section], data: Any) -> dict[str, Any]:
    """Normalize every fixed key of `data` to upper case and nested form, recursively. Values are not checked.

    Raises:
        Wrong: `data` is not a mapping, or a key is not text or occurs twice.
    """
    data = section._expand(data)
    if not isinstance(data, Mapping):
        raise Wrong("must be a mapping of keys to values", value=data)
    out = nested(data)
    for name, child in children(section).items():
        if name in out:
            try:
                out[name] = canonical(child, out[name])
            except Wrong as problem:
                raise problem.under(name) from problem
    return out
