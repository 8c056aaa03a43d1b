"""Configuration files: options of the command line in ``sbonnx.toml`` or ``[tool.sbonnx]`` of ``pyproject.toml``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sbonnx.cli.options import CommandOption
from sbonnx.errors import RecipeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME: Final = "sbonnx.toml"
PROJECT: Final = "pyproject.toml"

SET: Final = "set"
"""Table of recipe keys, as of ``--set``."""

Commands = Mapping[str, Iterable[CommandOption[Any]]]
"""Options by command; the words of a command are joined by blanks."""


@dataclass(frozen=True)
class Configuration:
    """Options of one file.

    Attributes:
        file: where they are written.
        values: options by name at the top, which hold for every command that has them; tables by command.
    """

    file: Path
    values: Mapping[str, Any]

    def default_map(self, commands: Commands) -> dict[str, Any]:
        """Return the defaults of options as click takes them, nested by command.

        Paths are relative to the folder of the file.

        Raises:
            RecipeError: a name that is no option or command, or a value of a wrong type.
        """
        known = {row.name for rows in commands.values() for row in rows if row.flags} | {SET}
        tables = {words.split()[0] for words in commands}
        for name, value in self.values.items():
            is_table = isinstance(value, Mapping) and _name(name) != SET
            if name not in tables if is_table else _name(name) not in known:
                raise self._unknown(name, (*sorted(known), *sorted(tables)))
        found: dict[str, Any] = {}
        for words, rows in commands.items():
            inner = self._table(words)
            place = found
            for word in words.split():
                place = place.setdefault(word, {})
            place |= self._options({row.name: row for row in rows if row.flags}, inner, words)
        return found

    def _table(self, words: str) -> Mapping[str, Any]:
        table: Any = self.values
        for word in words.split():
            table = table.get(word, {}) if isinstance(table, Mapping) else {}
        return table if isinstance(table, Mapping) else {}

    def _options(self, rows: Mapping[str, CommandOption[Any]], table: Mapping[str, Any], words: str) -> dict[str, Any]:
        """Return the values of a command's options: those at the top, then those of its table."""
        found: dict[str, Any] = {}
        for source, strict in ((self.values, False), (table, True)):
            for given, value in source.items():
                name = _name(given)
                if name in rows and not (isinstance(value, Mapping) and name != SET):
                    found[name] = self._value(rows[name], name, value)
                elif strict and not isinstance(value, Mapping):
                    raise self._unknown(f"{words}.{given}", sorted(rows))
        return found

    def _value(self, row: CommandOption[Any], name: str, value: Any) -> Any:
        from sbonnx.cli.output.printer import to_json

        if name == SET:
            if not isinstance(value, Mapping):
                raise RecipeError(f"'set' in {self.file} is a table of recipe keys, such as set = {{SAMPLES = 32}}")
            return [f"{key}={each if isinstance(each, str) else to_json(each)}" for key, each in value.items()]
        if row.type is bool and not isinstance(value, bool):
            raise RecipeError(f"'{name}' in {self.file} is true or false, got {value!r}")
        repeated = "list" in str(row.type)
        if isinstance(value, list) != repeated and not isinstance(value, str | int | float):
            raise RecipeError(f"'{name}' in {self.file} has a value of a wrong type: {value!r}")
        if repeated and not isinstance(value, list):
            value = [value]
        is_path = "Path" in str(row.type) or (name == "recipe" and value != "auto")
        return str(self.file.parent / value) if is_path and isinstance(value, str) else value

    def _unknown(self, name: str, known: Iterable[str]) -> RecipeError:
        from sbonnx.recipe.problem import suggestion

        hint = suggestion(name.rpartition(".")[2], list(known), count=2)
        return RecipeError(f"'{name}' in {self.file} is no option or command. {hint}".rstrip())


def find(folder: Path) -> Configuration | None:
    """Find the configuration of a folder: in it, or in the nearest folder above; ``sbonnx.toml`` goes first.

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    for place in (folder, *folder.parents):
        for name in (NAME, PROJECT):
            file = place / name
            if not file.is_file():
                continue
            try:
                values = tomllib.loads(file.read_text(encoding="utf-8"))
            except OSError as error:
                raise RecipeError(f"the configuration {file} cannot be read: {error.strerror or error}") from error
            except ValueError as error:
                if name == PROJECT:  # the file of other tools, which report it
                    continue
                raise RecipeError(f"the configuration {file} is not TOML: {error}") from error
            if name == PROJECT:
                values = values.get("tool", {}).get("sbonnx")
            if isinstance(values, Mapping):
                return Configuration(file, values)
    return None


def _name(option: str) -> str:
    return option.replace("-", "_").lower()


__all__ = ["Configuration", "find"]
