"""Base class of recipe sections: documented keys, mappings with fixed keys, and the problems of their validation.

A section is a frozen value. The annotation of an attribute says how its value is read (`ValueReader`), the `RecipeKey`
in place of its default what the documentation says about it. The command line reads the keys for its help: classes are
cheap to create, and annotations are evaluated when a value is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from types import NoneType, SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from sbonnx.recipe.names import REMOVED
from sbonnx.recipe.problem import ManyWrong, Path, Wrong, short, suggestion
from sbonnx.recipe.sections.flags import Flag
from sbonnx.recipe.sections.other_tools import counterpart

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Return a decorator for type checkers."""
        return lambda kind: kind


S = TypeVar("S", bound="Section")

LISTED: Final = 12
"""Keys of a section that an error lists."""


class RecipeKey(SimpleNamespace):
    """One key of a section: its default, and its text in docs/recipe.md, the annotated default and editors.

    Attributes:
        default: the value if the key is absent; None if it is decided elsewhere.
        meaning: one clause, lower case, no full stop; "" for a section.
        allowed: the accepted values, for people.
        shown: the default as text, if the bare value is not informative.
        maker: "ancestor" (Sparsebit) or "new".
        forms: short forms of the key path, for keywords and ``--set``, separated by spaces.
        prune_forms: further ones for `sbonnx.prune`.
        example: value as YAML, for keys whose default is empty.
        flag: option of the command line.
    """

    default: Any
    meaning: str = ""
    allowed: str = ""
    shown: str | None = None
    maker: str = "ancestor"
    forms: str = ""
    prune_forms: str = ""
    example: str | None = None
    flag: Flag | None = None


def key(default: Any, meaning: str, allowed: str, **more: Any) -> Any:
    """Define a key that Sparsebit has, see `RecipeKey`."""
    return RecipeKey(default=default, meaning=meaning, allowed=allowed, **more)


def new_key(default: Any, meaning: str, allowed: str, **more: Any) -> Any:
    """Define a key that Sparsebit does not have."""
    return RecipeKey(default=default, meaning=meaning, allowed=allowed, maker="new", **more)


def parameter(default: Any) -> Any:
    """Define a parameter of an algorithm: another default than that of its key in recipes, or no key of recipes."""
    return RecipeKey(default=default)


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


@dataclass_transform(frozen_default=True)
class Section:
    """A mapping with fixed keys. A key left empty (or null) keeps its default."""

    short_form: ClassVar[str] = ""
    """Key that a value in place of the mapping sets."""

    _rows: ClassVar[Mapping[str, RecipeKey]] = {}
    """Keys by attribute."""

    _given: ClassVar[frozenset[str]] = frozenset()
    """Keys that were set, by attribute."""

    def __init_subclass__(cls) -> None:
        rows = {name: RecipeKey(default=row) if isinstance(row, Section) else row for name, row in vars(cls).items()}
        cls._rows = {**cls._rows, **{name: row for name, row in rows.items() if isinstance(row, RecipeKey)}}
        for name, row in cls._rows.items():
            setattr(cls, name, row.default)

    def __init__(self, *arguments: Any, **values: Any) -> None:
        if len(arguments) > len(self._rows):
            raise TypeError(f"{type(self).__name__} has {len(self._rows)} keys, got {len(arguments)} values")
        for name, value in zip(self._rows, arguments, strict=False):
            if values.setdefault(name, value) is not value:
                raise TypeError(f"{type(self).__name__} got two values for '{name}'")
        for name in values:
            if name not in self._rows:
                raise TypeError(f"{type(self).__name__} has no key '{name}'")
        self.__dict__.update({name: values.get(name, row.default) for name, row in self._rows.items()})
        self.__post_init__()

    @classmethod
    def of(cls: type[S], section: Section, **more: Any) -> S:
        """Create settings from a section that the class inherits.

        Args:
            more: values of `parameter`, or in place of those of the section.
        """
        return cls(**{name: getattr(section, name) for name in section._rows} | more)

    def __post_init__(self) -> None:
        """Check values that are not from a recipe."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field '{name}'")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field '{name}'")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in self._rows)

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in self._rows)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._rows)})"

    @classmethod
    def read(cls: type[S], data: Any) -> S:
        """Create the section from a mapping in the YAML's keys, or from its short form.

        Raises:
            ManyWrong: unknown keys or invalid values, in the order of the keys.
        """
        problems: list[Wrong] = []
        section = cls._read(data, (), problems)
        if problems:
            raise ManyWrong(tuple(problems))
        return section

    @classmethod
    def _read(cls: type[S], data: Any, path: Path, problems: list[Wrong]) -> S:
        """Return the section at `path`, the default one if there are problems, which are appended."""
        if isinstance(data, cls):
            return data
        rows, before = keys_of(cls), len(problems)
        try:
            data = cls._expand(data)
            if not isinstance(data, Mapping | None):
                raise Wrong("must be a mapping of keys to values", value=data)
            data = cls._rename(nested(data or {}))
            values = {
                name.lower(): _read_value(row.kind, data[name], (*path, name), problems)
                for name, row in rows.items()
                if name in data
            }
            problems += [unknown_key(cls, (*path, name)) for name in data if name not in rows]
            if len(problems) == before:
                section = cls(**values)
                section.__dict__["_given"] = frozenset(values)
                section._check()
                return section
        except (Wrong, ManyWrong) as problem:
            problems += [
                inner.under(*path) for inner in (problem.items if isinstance(problem, ManyWrong) else [problem])
            ]
        return cls()

    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Expand a short form of the whole section to a mapping, or return `data` unchanged."""
        is_short = cls.short_form and data is not None and not isinstance(data, Mapping)
        return {cls.short_form: data} if is_short else data

    @classmethod
    def _rename(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Replace Sparsebit's names of keys, in normalized `data`."""
        return data

    def _check(self) -> None:
        """Check values against each other.

        Raises:
            Wrong, ManyWrong: they contradict each other.
        """

    def to_keys(self, *, given: bool = False, empty: bool = True) -> dict[str, Any]:
        """Return plain values in the keys of the YAML.

        Args:
            given: only the keys that were set.
            empty: include keys without a value (None).
        """

        def plain(value: Any) -> Any:
            if isinstance(value, Section):
                return value.to_keys(given=given, empty=empty)
            if isinstance(value, Mapping):
                return {name: plain(inner) for name, inner in value.items()}
            return [plain(inner) for inner in value] if isinstance(value, tuple) else value

        rows = ((name, getattr(self, name.lower())) for name in rows_of(type(self)))
        return {
            name: plain(value)
            for name, value in rows
            if (empty or value is not None) and (not given or name.lower() in self._given)
        }

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a key in Sparsebit's spelling: ``qconfig.SCHEDULE.BN_TUNING``. For DEVICE, "auto" is resolved."""
            if not name.isupper() or name not in rows_of(type(self)):
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            value = getattr(self, name.lower())
            if (name, value) == ("DEVICE", "auto"):
                from sbonnx.system.runtime import best_device

                return best_device()
            return value


def rows_of(section: type[Section]) -> dict[str, RecipeKey]:
    """Return the keys of a section in order, by name in upper case."""
    return {name.upper(): row for name, row in section._rows.items()}


class KeyRow(SimpleNamespace):
    """One key of a section, with the annotation of its value."""

    kind: Any
    key: RecipeKey

    @property
    def is_section(self) -> bool:
        """Whether the value is a section."""
        return isinstance(self.key.default, Section)


_ROWS: Final[dict[type[Section], Mapping[str, KeyRow]]] = {}
"""Keys of the sections that were asked for; see `keys_of`."""


def keys_of(section: type[Section]) -> Mapping[str, KeyRow]:
    """Return the keys of a section with their types, by name in upper case."""
    if section not in _ROWS:
        from sbonnx.recipe import value_types

        hints = get_type_hints(section, localns={"value_types": value_types}, include_extras=True)
        _ROWS[section] = {name.upper(): KeyRow(kind=hints[name], key=row) for name, row in section._rows.items()}
    return _ROWS[section]


def children(section: type[Section]) -> dict[str, type[Section]]:
    """Return the keys of `section` whose value is a section, with its class."""
    return {name: row.kind for name, row in keys_of(section).items() if row.is_section}


def _read_value(kind: Any, value: Any, path: Path, problems: list[Wrong]) -> Any:
    """Convert a value to the type that an annotation says; problems are appended."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        try:
            for reader in inner[1:]:
                value = reader.reader(inner[0]).read(value)
        except Wrong as problem:
            problems.append(problem.under(*path))
            return None
        return _read_value(inner[0], value, path, problems)
    if origin is tuple:
        return tuple(_read_value(inner[0], item, (*path, index), problems) for index, item in enumerate(value))
    if origin is dict:
        return {
            _read_value(inner[0], name, (*path, name), problems): _read_value(inner[1], item, (*path, name), problems)
            for name, item in value.items()
        }
    if NoneType in inner and value is not None and len(inner) == 2:
        return _read_value(inner[0], value, path, problems)
    return kind._read(value, path, problems) if _is_section(kind) else value


def _is_section(kind: Any) -> bool:
    """Whether an annotation is a section class. In Python 3.10 ``tuple[int, ...]`` is a `type`, too."""
    return isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section)


def schema_of(section: type[Section]) -> dict[str, Any]:
    """Return a JSON schema of a section, with those of its sections under ``$defs``."""
    definitions: dict[str, Any] = {}
    schema = _section_schema(section, definitions)
    return {"$defs": dict(sorted(definitions.items())), **schema}


def _sorted(schema: Any) -> Any:
    """Return a schema with its keywords in alphabetical order."""
    if isinstance(schema, Mapping):
        return {name: _sorted(schema[name]) for name in sorted(schema)}
    return [_sorted(part) for part in schema] if isinstance(schema, list) else schema


def _section_schema(section: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    import inspect

    return {
        "additionalProperties": False,
        "description": inspect.cleandoc(section.__doc__ or ""),
        "properties": {name: _key_schema(row, definitions) for name, row in keys_of(section).items()},
        "title": _title(section),
        "type": "object",
    }


def _key_schema(row: KeyRow, definitions: dict[str, Any]) -> dict[str, Any]:
    schema = _value_schema(row.kind, definitions)
    if row.is_section:
        return schema
    default = {} if isinstance(row.key.default, tuple | dict) else {"default": row.key.default}
    texts = {"description": row.key.meaning, "x-allowed": row.key.allowed, "x-maker": row.key.maker}
    return dict(_sorted({**schema, **texts, **default}))


def _value_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        schema = inner[1].reader(inner[0]).schema
        return dict(schema) if schema is not None else _value_schema(inner[0], definitions)
    if origin is tuple:
        return {"items": _value_schema(inner[0], definitions), "type": "array"}
    if origin is dict:
        names, values = (_value_schema(part, definitions) for part in inner)
        names.pop("type")
        return {"additionalProperties": values, "propertyNames": names, "type": "object"}
    if NoneType in inner:
        schema = _value_schema(inner[0], definitions)
        return {"anyOf": [*_alternatives(schema), {"type": "null"}]}
    title = _title(kind)
    if title not in definitions:
        schema = _section_schema(kind, definitions)
        if kind.short_form:
            value = _value_schema(keys_of(kind)[kind.short_form].kind, definitions)
            schema = {"anyOf": [schema, *_alternatives(value)]}
        definitions[title] = schema
    return {"$ref": f"#/$defs/{title}"}


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema["anyOf"] if list(schema) == ["anyOf"] else [schema]


def _title(section: type[Section]) -> str:
    """Return the name of a section in the schema: for keys that an algorithm inherits, that of the algorithm."""
    return section.__name__.removesuffix("Keys")


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


def unknown_key(section: type[Section], path: Path) -> Wrong:
    """Return the problem for a key that `section` does not have."""
    gone = REMOVED.get(".".join(map(str, path[-2:])))
    if gone is not None:
        return Wrong("was removed", gone, path=path)
    names, name = list(rows_of(section)), str(path[-1])
    hint = (counterpart(name) if len(path) == 1 else "") or suggestion(name, names, cutoff=0.6)
    if not hint:
        hint = f"Keys here: {', '.join(names)}" if len(names) <= LISTED else "docs/recipe.md has all keys"
    return Wrong("is not a key of the recipe", hint, path=path)
