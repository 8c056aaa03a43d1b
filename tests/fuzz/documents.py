"""Recipes and job files drawn from their JSON schemas, right and wrong, as hypothesis strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml
from hypothesis import strategies as st

from tests.fuzz.mutations import TEXTS, damaged

WILD: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    8,
    17,
    10**9,
    -(2**63),
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "auto",
    "none",
    "*",
    "re:(",
    "re:(a+)+$",
    "[",
    "8",
    "1e999",
    "0x10",
    "2001-01-01",
    [],
    {},
    [None],
    [[]],
    {"": ""},
    {"a": {"b": []}},
    [["x", "y"], "x"],
    "9" * 20_000,
)
"""Values for a key of any type."""

SMALL: Final = 40
"""Largest number drawn where the schema has no bound: iterations and samples must stay few."""

EXPENSIVE: Final = frozenset({"AUTO", "MIXED", "CACHE", "ITERATIONS", "THREADS", "DEVICE", "scheduler", "output"})
"""Keys that are left as they are: long searches, folders of their own, other machines."""

FITTING: Final = ("*", "Conv_0", "c", "x", "w", "re:^c", "missing", "none", "auto", "m.onnx", "d.npz", "w4a8", "m") * 2
"""Texts that often fit where the schema asks for any text."""

RAW: Final = (
    "",
    "\n",
    "---\n---\n",
    "a: &a [*a]\n",
    "a: &a [x]\nb: [*a, *a]\n",
    "!!python/object/apply:os.mkdir ['executed']\n",
    "!!set {a}\n",
    "BACKEND: virtual\nBACKEND: virtual\n",
    "- 1\n- 2\n",
    "{" * 3000,
    "[" * 3000 + "]" * 3000,
    "a: " * 500,
    "\t\tBACKEND: virtual",
    "BACKEND: virtual\x00",
    "\ufeffBACKEND: virtual\n",
    "? [a]\n: b\n",
    "<<: {BACKEND: virtual}\n",
    "SAMPLES: " + "9" * 90_000 + "\n",
    "W: {QUANTIZER: {BIT: 0b11}}\n",
    "%YAML 9.9\n---\na: b\n",
    "A" * 100_000 + ": 1\n",
)


def wild() -> st.SearchStrategy[Any]:
    """Any value, whatever the schema says."""
    return st.one_of(st.sampled_from(WILD), st.sampled_from(TEXTS))


def from_schema(part: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, or nearly."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return st.deferred(lambda: from_schema(root["$defs"][name], root))
    if "anyOf" in part:
        return st.one_of([from_schema(one, root) for one in part["anyOf"]])
    if "enum" in part:
        return st.sampled_from(part["enum"])
    kind = part.get("type")
    if kind == "object":
        return objects(part, root)
    if kind == "array":
        items = from_schema(part["items"], root) if "items" in part else wild()
        return st.lists(items, min_size=part.get("minItems", 0), max_size=part.get("maxItems", 3))
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "integer":
        low = part.get("minimum", 0)
        return st.integers(low, min(part.get("maximum", low + SMALL), low + SMALL))
    if kind == "number":
        low = part.get("minimum", part.get("exclusiveMinimum", 0))
        return st.floats(low, part.get("maximum", low + 1), allow_nan=False)
    return st.sampled_from((*FITTING, *TEXTS))


@st.composite
def objects(draw: st.DrawFn, part: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with some of the keys of a schema; now and then a wild value or an unknown key."""
    properties: Mapping[str, Any] = part.get("properties", {})
    known = [key for key in properties if key not in EXPENSIVE]
    chosen = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
    found = {}
    for key in (*chosen, *(key for key in part.get("required", ()) if key not in EXPENSIVE)):
        found[key] = draw(wild() if draw(st.integers(0, 7)) == 0 else from_schema(properties[key], root))
    if draw(st.integers(0, 15)) == 0 or not properties:
        found[draw(st.sampled_from(("BITS", "w", "QUANTISER", "x", "", *TEXTS)))] = draw(wild())
    return found


@st.composite
def documents(draw: st.DrawFn, schema: Mapping[str, Any], base: Mapping[str, Any]) -> bytes:
    """A YAML file: from a schema, over or under the sound `base`; damaged; or strange from the start."""
    kind = draw(st.sampled_from(("schema", "schema", "schema", "schema", "raw", "damaged")))
    if kind == "raw":
        return draw(st.sampled_from(RAW)).encode("utf-8")
    drawn = draw(objects(schema, schema))
    value = {**base, **drawn} if draw(st.booleans()) else {**drawn, **base}
    content = yaml.safe_dump(value, allow_unicode=draw(st.booleans()), sort_keys=False).encode("utf-8", "replace")
    return draw(damaged(content)) if kind == "damaged" else content
