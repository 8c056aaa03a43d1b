"""Text for terminals and logs: control characters escaped, errors on one line of bounded length.

Names in models and files are not trusted. Escape sequences in them could clear a terminal or rewrite lines, and
bidirectional overrides could make one name look like another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from sbonnx.values import json_values

LINE_LENGTH: Final = 500
"""Maximum number of characters of an error or note."""

WORD_LENGTH: Final = 100
"""In a line that is too long, words longer than this (mostly names) are shortened first."""

ELLIPSIS: Final = "…"

DONE: Final = 0
BELOW_QUALITY: Final = 1
FAILED: Final = 2
"""Exit codes. 2 also covers internal errors, whose message says so."""

_UNSEEN: Final = (
    "\x7f-\x9f"  # DEL and C1, of which U+009B begins control sequences as ESC [ does
    "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, bidirectional
    "\ud800-\udfff"  # unpaired surrogates, which cannot be encoded
    "\U000e0000-\U000e007f"  # tags
)
_CONTROL: Final = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_CONTROL_IN_JSON: Final = re.compile(f"[{_UNSEEN}]")
_LONG_WORD: Final = re.compile(rf"\S{{{WORD_LENGTH + 1},}}")


def escaped(text: str, *, keep: str = "") -> str:
    r"""Replace control, bidirectional and invisible characters by backslash escapes, such as ``\x1b``.

    Args:
        keep: characters that stay unchanged, such as line feeds.
    """
    return _CONTROL.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def number_text(value: float, form: str) -> str:
    """Format a number, as `format` does; infinity is ``∞``."""
    return f"{value:{form}}".replace("inf", "∞")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def json_escaped(text: str) -> str:
    """Escape these characters in a JSON text, which keeps its value. JSON itself requires that for C0 only."""
    return _CONTROL_IN_JSON.sub(lambda match: _json_escape(match[0]), text)


def _json_escape(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else json.dumps(character)[1:-1]


def to_json(value: Any) -> str:
    """Format `value` as indented JSON without a trailing newline and without terminal control characters."""
    return json_escaped(json.dumps(json_values(value), indent=2, ensure_ascii=False, allow_nan=False))


def one_line(text: object, limit: int | None = None) -> str:
    """Join text to one line: every run of white space becomes one blank, control characters are escaped.

    Args:
        limit: maximum length. Long words lose their middle first, then the line; the end, which holds the fix in error
            messages, stays.
    """
    line = escaped(" ".join(str(text).split()))
    if limit is None or len(line) <= limit:
        return line
    return _without_middle(_LONG_WORD.sub(lambda match: _without_middle(match[0], WORD_LENGTH), line), limit)


def _without_middle(text: str, length: int) -> str:
    """Shorten text to at most `length` characters: three fifths of them from the start, the rest from the end."""
    if len(text) <= length:
        return text
    head = 3 * length // 5
    tail = length - head - len(ELLIPSIS)
    return f"{text[:head]}{ELLIPSIS}{text[-tail:]}"


def relative_paths(text: str, *folders: str | os.PathLike[str]) -> str:
    """Shorten the paths in a text that are below the working folder, or else below `folders`, to relative ones."""
    for base in (os.getcwd(), *folders):
        folder = os.fspath(base).rstrip(os.sep) + os.sep
        if folder != os.sep:
            text = re.sub(rf"(?<![\w./\\-]){re.escape(folder)}(?=[^\s/\\])", "", text)
    return text


SCHEMA_VERSIONS: Final[Mapping[str, int]] = {}
"""Versions of the schemas of JSON outputs that are above 1. A key that is removed or changes its meaning raises it."""


def versioned(schema: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON output with the name and version of its schema as first keys, `schema` and `schema_version`.

    Args:
        schema: a key of `sbonnx.cli.schemas.published.SCHEMAS`.
    """
    return {"schema": schema, "schema_version": SCHEMA_VERSIONS.get(schema, 1), **values}


def map_strings(change: Callable[[str], str], value: Any) -> Any:
    """Apply a function to all strings in nested JSON values, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(change, key): map_strings(change, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_strings(change, item) for item in value)
    return value


__all__ = [
    "LINE_LENGTH",
    "escaped",
    "json_escaped",
    "map_strings",
    "one_line",
    "relative_paths",
    "to_json",
    "versioned",
]
