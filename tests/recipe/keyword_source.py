"""Source of `sbonnx.recipe.keywords`, from the sections of the recipe: ``python -m tests.recipe.keyword_source``.

Type checkers and editors read types from source text alone. The type of a keyword is that of its key in the JSON schema
of recipes, its docstring the documentation of the key.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sbonnx.backends import BACKENDS
from sbonnx.recipe import json_schema, key_facts, keywords
from sbonnx.recipe.names import BACKEND_ALIASES, FILE_KEYS, VERSIONED
from sbonnx.recipe.schema import Recipe
from sbonnx.recipe.sections.base import children
from sbonnx.recipe.sections.whole import KEYS, PRUNING_FORMS, READ_BY_PRUNE
from sbonnx.recipe.value_types import pattern_of
from sbonnx.schemes import VERSIONS

WIDTH: Final = 120

HEAD: Final = '''\
"""Types of the keywords of `sbonnx.quantize`, `sbonnx.prune` and `QuantModel`: recipe keys, for editors.

Written by ``python -m tests.recipe.keyword_source`` from `sbonnx.recipe.sections`. Names are those that come with
sbonnx, in lower case; those of plug-ins go into a recipe: ``recipe={"A": {"OBSERVER": {"TYPE": "mine"}}}``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from sbonnx.recipe.loading import Source

'''

Field = tuple[str, list[str], str]
"""Name, types and documentation of a keyword."""

BITS: Final[Field] = (
    "bits",
    ["str", "int"],
    "Bit widths of weights and activations, or a type of small floats.\n"
    "Keys: W.QUANTIZER.BIT, A.QUANTIZER.BIT. Values: w8a8, w4 (weights alone), int8 or 8 (both), fp8 (both), nvfp4, "
    "mxfp4 or mxfp8 (weights). Default: w8a8.",
)
BACKEND: Final[Field] = ("backend", ["BackendForm", "None"], "The runtime that the model is made for.")
RECIPE: Final[Field] = ("recipe", ["Source"], "A path, a nested dict, or auto; None: the backend's defaults.")

OWN: Final = ("BACKEND", "VERIFY")
"""Top-level keys that are parameters of `sbonnx.quantize`."""

LOWER: Final = ("sbonnx", *BACKENDS)
"""Words that a sentence does not capitalize."""


def source() -> str:
    """Return the text of the module."""
    forms = {form: path for path, row in KEYS.items() for form in row.forms.split()}
    forms |= {path.lower(): path for path in KEYS if "." not in path and path not in OWN}
    common = {form: path for form, path in forms.items() if path.startswith(READ_BY_PRUNE)}
    own = {form: path for form, path in forms.items() if form not in common}
    classes = (
        _class("CommonKeywords(TypedDict", "Keys that pruning reads as well.", _fields(common)),
        _class("RecipeKeywords(CommonKeywords", "Short forms of keys, and top-level keys.", [BITS, *_fields(own)]),
        _class("QuantizeKeywords(RecipeKeywords", "Keywords of `sbonnx.quantize` for the recipe.", [BACKEND, RECIPE]),
        _class("PruneKeywords(CommonKeywords", "Keywords of `sbonnx.prune`.", [BACKEND, *_fields(PRUNING_FORMS)]),
    )
    return HEAD + _backends() + "\n\n".join(map("".join, classes))


def _backends() -> str:
    runtimes = ", ".join(f'"{name}"' for name in (*sorted(BACKENDS), *VERSIONED))
    aliases = ", ".join(f'"{name}"' for name in (*BACKEND_ALIASES, *(f"trt@{version}" for version in VERSIONS)))
    return (
        f'BackendName = Literal[\n    {runtimes}\n]\n"""Runtimes, with a version where it matters."""\n\n'
        f'BackendForm = Literal[BackendName, {aliases}]\n"""Runtimes and their short forms."""\n\n\n'
    )


def _class(head: str, text: str, fields: Iterable[Field]) -> Iterator[str]:
    yield f'class {head}, total=False):\n    """{text}"""\n\n'
    for name, kinds, documentation in fields:
        yield _declaration(name, kinds)
        first, *others = (line for part in documentation.split("\n") for line in _wrapped(part))
        yield f'    """{first}"""\n' if not others else "\n".join((f'    """{first}\n', *others, '    """\n'))


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - len('    """"""'), break_long_words=False, break_on_hyphens=False)
    return [lines[0], *(f"    {line}" for line in lines[1:])]


def _declaration(name: str, kinds: list[str]) -> str:
    text = f"    {name}: {' | '.join(kinds)}\n"
    if len(text) <= WIDTH + 1:
        return text
    if len(kinds) == 1:
        return text.replace("[", "[\n        ").replace("]", "\n    ]")
    return f"    {name}: (\n        {kinds[0]}\n{''.join(f'        | {kind}{chr(10)}' for kind in kinds[1:])}    )\n"


def _fields(forms: Mapping[str, str]) -> Iterator[Field]:
    schema = json_schema()
    for name, path in forms.items():
        kinds = _kinds(_of_path(schema, path), schema["$defs"])
        kinds += ["os.PathLike[str]"] if path in FILE_KEYS else []
        kinds += ["None"] if KEYS[path].default is None else []
        yield name, _merged(kinds), _documentation(path)


def _documentation(path: str) -> str:
    facts = key_facts(path) or {}
    if "keys" in facts:
        section: Any = Recipe
        for part in path.split("."):
            section = children(section)[part]
        inner = [key.removeprefix(f"{path}.") for key in facts["keys"]]
        return f"{' '.join(section.__doc__.split())}\n    Keys: {', '.join(name for name in inner if '.' not in name)}."
    meaning = facts["description"]
    if not meaning.startswith(LOWER):
        meaning = meaning[0].upper() + meaning[1:]
    return f"{meaning}.\n    Key: {path}. Values: {facts['values']}. Default: {facts['default']}."


def _of_path(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the schema of a key."""
    part = schema
    for name in path.split("."):
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        part = next(form for form in part.get("anyOf", [part]) if "properties" in form)["properties"][name]
    return part


TYPES: Final = {"boolean": "bool", "integer": "int", "number": "float", "string": "str", "null": "None"}


def _kinds(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """Return the types of the values that a schema accepts, as source text."""
    if "$ref" in schema:
        return _kinds(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return [kind for form in _without_spellings(schema["anyOf"]) for kind in _kinds(form, definitions)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) for value in values):
        words = ", ".join(f'"{value}"' for value in values)
        return [f"Literal[{words}]"]
    kind = schema.get("type", "integer" if values else "string")  # numbers are computed: any int
    if kind == "array":
        return [f"Sequence[{_union(schema['items'], definitions)}]" if "items" in schema else "Sequence[object]"]
    if kind == "object":
        inner = schema["additionalProperties"]
        return [f"Mapping[str, {_union(inner, definitions) if inner else 'object'}]"]
    return [TYPES[name] for name in ([kind] if isinstance(kind, str) else kind)]


def _union(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    return " | ".join(_merged(_kinds(schema, definitions)))


def _without_spellings(forms: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield alternatives without patterns for names in any case, or for names of plug-ins."""
    words: list[str] = []
    for form in forms:
        pattern = form.get("pattern", "")
        if pattern not in (f"^{pattern_of(words)}$", "^[A-Za-z][A-Za-z0-9_-]*[+]?$"):
            yield form
        words = [str(word) for word in form.get("enum", ())]


def _merged(kinds: Iterable[str]) -> list[str]:
    """Return types once each, None last; literal texts are texts, and whole numbers are numbers."""
    unique = dict.fromkeys(kinds)
    wider = {"int": "float", "Literal": "str"}
    last = ["None"] if unique.pop("None", 1) is None else []
    return [kind for kind in unique if wider.get(kind.partition("[")[0]) not in unique] + last


if __name__ == "__main__":
    target = Path(keywords.__file__ or sys.exit("sbonnx.recipe.keywords has no file"))
    target.write_text(source())
