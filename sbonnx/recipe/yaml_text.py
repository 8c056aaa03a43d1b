"""Parsing of YAML text to plain values, with the line of every key.

It is stricter than a general YAML parser to protect the user, and more tolerant to help: duplicate keys, tags and
files that are not UTF-8 are refused; ``1e-3`` is a number; dates and base-60 numbers stay text.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, Final

import yaml

from sbonnx.errors import MissingRecipeError, RecipeError
from sbonnx.recipe.problem import short
from sbonnx.system.input_files import read_regular

Lines = dict[str, int]

MAX_DEPTH: Final = 20
"""Maximum nesting of a recipe; deeper nesting is a mistake or an attack."""

MAX_BYTES: Final = 4 << 20
"""Maximum size of a recipe; a larger file is something else, such as a model."""

MAX_NODES: Final = 100_000
"""Maximum values in one file, aliases expanded: a few lines of nested aliases can expand to billions."""

MAX_TEXT: Final = 10_000
"""Maximum characters of one text in a recipe. Names of tensors and paths are shorter."""

_TAG = "tag:yaml.org,2002:"
_KINDS = frozenset({"null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value"})

_TRUE = frozenset({"true", "yes", "on"})
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}|[0-9]+\.[0-9]*|\.[0-9]+([eE][-+]?[0-9]{1,3})?)")


class _YamlFault(Exception):
    """A problem at a position in the text."""

    def __init__(self, text: str, mark: yaml.Mark) -> None:
        super().__init__(text)
        self.mark = mark


def _scalar(node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in _TRUE
    if node.style is None and _INTEGER.fullmatch(text):
        return int(text)
    if node.style is None and _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Loader(yaml.SafeLoader):
    """YAML loader that limits number and length of nodes: PyYAML needs a minute to compose those of 4 MB."""

    _composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_NODES:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _YamlFault(f"contains more than {MAX_NODES} values", event.start_mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MAX_TEXT:
            raise _YamlFault(f"contains a text of {len(node.value)} characters", node.start_mark)
        return node


class _NodeReader:
    """Converter of composed YAML nodes to values; records the line of every key."""

    def __init__(self) -> None:
        self.lines: Lines = {}
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        if len(path) > MAX_DEPTH or id(node) in self._open:
            raise _YamlFault("is nested too deeply, or refers to itself", node.start_mark)
        self._count += 1
        if self._count > MAX_NODES:
            raise _YamlFault(f"contains more than {MAX_NODES} values", node.start_mark)
        self.lines.setdefault(".".join(path).lower(), node.start_mark.line + 1)

        if node.tag.removeprefix(_TAG) not in _KINDS:
            raise _YamlFault(f"has the tag {short(node.tag)}, which has no meaning in a recipe", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if name_node.tag == f"{_TAG}merge":
                merged = self._merge(value_node, path) | merged
                continue
            if not isinstance(name_node, yaml.ScalarNode):
                raise _YamlFault("has a key that is not text", name_node.start_mark)
            if name_node.style is None and not isinstance(_scalar(name_node), str):
                raise _YamlFault(
                    f"has the key {name_node.value}, which YAML does not read as text: put it in quotes",
                    name_node.start_mark,
                )
            name = name_node.value
            if name in out:
                raise _YamlFault(f"has the key {short(name)} twice in one mapping", name_node.start_mark)
            self.lines[".".join((*path, name)).lower()] = name_node.start_mark.line + 1
            out[name] = self.value(value_node, (*path, name))
        return merged | out

    def _merge(self, node: yaml.Node, path: tuple[str, ...]) -> dict[str, Any]:
        """Resolve ``<<: *other``, or a list of mappings of which the first wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        out: dict[str, Any] = {}
        for source in sources:
            merged = self.value(source, path)
            if not isinstance(merged, dict):
                raise _YamlFault("merges (<<) something that is not a mapping", source.start_mark)
            out = merged | out
        return out


def parse(text: str, name: str) -> tuple[Any, Lines]:
    """Parse a YAML text; return its value and the line of every key (path joined with dots, lower case).

    Args:
        name: name of the text in error messages.

    Raises:
        RecipeError: not YAML, or YAML that recipes do not use; with line and column.
    """
    reader = _NodeReader()
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else reader.value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RecipeError(f"{name} is not YAML: {_place(mark)}{_reason(error.problem)}") from error
    except yaml.reader.ReaderError as error:
        raise RecipeError(f"{name} is not YAML: character {short(chr(error.character))} is not allowed") from error
    except RecursionError as error:
        raise RecipeError(f"{name} is nested too deeply to be a recipe") from error
    except (ValueError, OverflowError) as error:  # PyYAML: an escape such as "\UFFFFFFFF", a directive of many digits
        raise RecipeError(f"{name} is not YAML: {_reason(str(error))}") from error
    except _YamlFault as error:
        raise RecipeError(f"{name} {error} ({_place(error.mark).rstrip(', :')})") from error
    return value, reader.lines


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _reason(problem: str | None) -> str:
    text = " ".join((problem or "syntax error").split())
    return f"{text}: indent with blanks" if "'\\t'" in text else text


def read(path: str | os.PathLike[str]) -> tuple[Any, Lines]:
    """Parse a YAML file; return its value and its lines, as `parse` does.

    Raises:
        RecipeError: the file is missing, unreadable, a directory, too large, not UTF-8 or not YAML.
    """
    name = shown(path)
    try:
        data = read_regular(path, MAX_BYTES)
    except FileNotFoundError as error:
        raise MissingRecipeError(f"the recipe {name} does not exist") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{name} is a directory; a recipe is a YAML file") from error
    except OSError as error:
        hint = "; a recipe is a YAML file of a few kilobytes" if error.errno == errno.EFBIG else ""
        raise RecipeError(f"the recipe {name} cannot be read: {error.strerror or error}{hint}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RecipeError(f"{name} is not UTF-8 text: line {line} has the byte 0x{data[error.start]:02x}") from error
    return parse(text, name)


def dump(value: dict[str, Any]) -> str:
    """Format plain values as YAML text that `parse` reads back; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which this module, or another YAML parser, would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # Single quotes lose line separators such as U+0085 (PyYAML 6.0.3).
        style = None if data.isprintable() and not _FLOAT.fullmatch(data) else '"'
        return self.represent_scalar(f"{_TAG}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def shown(path: str | os.PathLike[str]) -> str:
    """Format a file name for a line of text."""
    text = os.fsdecode(path)
    return text if text.isprintable() and text else short(text)
