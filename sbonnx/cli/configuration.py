"""Configuration files: options of the command line in ``sbonnx.toml`` or ``[tool.sbonnx]`` of ``pyproject.toml``.

They come with the folder in which a command is started, so they cannot make it run code, connect or write: see
`CommandOption.typed` and `_checked`. Files that other users can write are passed over.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sbonnx.cli.options import CommandOption
from sbonnx.errors import RecipeError
from sbonnx.system.input_files import open_regular, read_opened
from sbonnx.system.python_files import names_function

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME: Final = "sbonnx.toml"
PROJECT: Final = "pyproject.toml"

LARGEST: Final = 1 << 18
"""Maximum size of a file in bytes."""

ROOTS: Final = (".git", ".hg", ".svn", ".jj")
"""Entries of the topmost folder of a repository."""

SET: Final = "set"
"""Table of recipe keys, as of ``--set``."""

Commands = Mapping[str, Iterable[CommandOption[Any]]]
"""Options by command; the words of a command are joined by blanks."""


@dataclass(frozen=True)
class Configuration:
    """Options of one file.

    Attributes:
        file: where they are written; None: there is no file.
        values: options by name at the top, which hold for every command that has them; tables by command.
        notes: one sentence each about files that were passed over.
    """

    file: Path | None
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def default_map(self, commands: Commands) -> dict[str, Any]:
        """Return the defaults of options as click takes them, nested by command.

        Paths are relative to the folder of the file.

        Raises:
            RecipeError: a name that is no option or command, a value of a wrong type, or an option or value that is
                not taken from configuration files.
        """
        names = {row.name for rows in commands.values() for row in rows if row.flags} | {SET}
        tables = {words.split()[0] for words in commands}
        for name, value in self.values.items():
            is_table = isinstance(value, Mapping) and _name(name) != SET
            if name not in tables if is_table else _name(name) not in names:
                raise self._unknown(name, (*sorted(names), *sorted(tables)))
        defaults: dict[str, Any] = {}
        for words, rows in commands.items():
            inner = self._table(words)
            place = defaults
            for word in words.split():
                place = place.setdefault(word, {})
            place |= self._options({row.name: row for row in rows if row.flags}, inner, words)
        return defaults

    def _table(self, words: str) -> Mapping[str, Any]:
        table: Any = self.values
        for word in words.split():
            table = table.get(word, {}) if isinstance(table, Mapping) else {}
        return table if isinstance(table, Mapping) else {}

    def _options(self, rows: Mapping[str, CommandOption[Any]], table: Mapping[str, Any], words: str) -> dict[str, Any]:
        """Return the values of a command's options: those at the top, then those of its table."""
        values: dict[str, Any] = {}
        for source, strict in ((self.values, False), (table, True)):
            for given, value in source.items():
                name = _name(given)
                if name in rows and not (isinstance(value, Mapping) and name != SET):
                    values[name] = self._value(rows[name], name, value)
                elif strict and not isinstance(value, Mapping):
                    raise self._unknown(f"{words}.{given}", sorted(rows))
        return values

    def _value(self, row: CommandOption[Any], name: str, value: Any) -> Any:
        from sbonnx.system.terminal import to_json

        if not _is_plain(value):
            raise RecipeError(f"'{name}' in {self.file} has a value of a wrong type: {value!r:.80}")
        if name == SET:
            if not isinstance(value, Mapping):
                raise RecipeError(f"'set' in {self.file} is a table of recipe keys, such as set = {{SAMPLES = 32}}")
            given = {key: self._recipe_value((str(key),), entry) for key, entry in value.items()}
            return [f"{key}={entry if isinstance(entry, str) else to_json(entry)}" for key, entry in given.items()]
        self._check_harmless(row, value)
        if row.type is bool and not isinstance(value, bool):
            raise RecipeError(f"'{name}' in {self.file} is true or false, got {value!r}")
        repeated = "list" in str(row.type)
        if isinstance(value, list) != repeated and not isinstance(value, str | int | float):
            raise RecipeError(f"'{name}' in {self.file} has a value of a wrong type: {value!r:.80}")
        if isinstance(value, str) and (row.is_path or (row.is_word is not None and not row.is_word(value))):
            value = self._beside(value)
        return [value] if repeated and not isinstance(value, list) else value

    def _recipe_value(self, path: tuple[str, ...], value: Any) -> Any:
        """Return the value of a recipe key, whose path may be nested; files are relative to this file."""
        if isinstance(value, Mapping):
            return {key: self._recipe_value((*path, str(key)), entry) for key, entry in value.items()}
        from sbonnx.recipe.names import FILE_KEYS
        from sbonnx.recipe.sections.whole import SHORT_FORMS

        key = ".".join(path)
        words = FILE_KEYS.get(SHORT_FORMS.get(key.lower(), key).upper())
        is_file = words is not None and isinstance(value, str) and value.lower() not in words
        return self._beside(value) if is_file else value

    def _beside(self, path: str) -> str:
        return str(Path(self.file or "").parent / path)

    def _check_harmless(self, row: CommandOption[Any], value: Any) -> None:
        """Check that an option may be taken from a configuration file.

        Raises:
            RecipeError: it writes, replaces or connects, or its value is a function of a Python file.
        """
        if row.typed:
            raise RecipeError(
                f"'{row.name}' in {self.file} is not taken from configuration files, which can come with a downloaded "
                f"folder: remove it there and type {row.flags[0]}"
            )
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, str) and names_function(entry):
                raise RecipeError(
                    f"'{row.name}' in {self.file} is the function '{entry}': code is not run from configuration files, "
                    f"which can come with a downloaded folder: remove it there and type {row.flags[0]} {entry}"
                )

    def _unknown(self, name: str, known: Iterable[str]) -> RecipeError:
        from sbonnx.recipe.problem import suggestion

        hint = suggestion(name.rpartition(".")[2], list(known), count=2)
        return RecipeError(f"'{name}' in {self.file} is no option or command. {hint}".rstrip())


def find(folder: Path) -> Configuration:
    """Find the configuration of a folder: in it, or in the nearest folder above; ``sbonnx.toml`` goes first.

    The search ends at the root of a repository or at the home folder. Files that another user owns or can write to, or
    whose folder is such, are passed over with a note.

    Raises:
        RecipeError: the file cannot be read, or is not TOML.
    """
    notes: list[str] = []
    for place in _working_tree(folder):
        for name in (NAME, PROJECT):
            file = place / name
            if not os.path.lexists(file):
                continue
            try:
                values, reason = _read(file)
            except OSError as error:
                if name == PROJECT:
                    continue
                raise RecipeError(f"the configuration {file} cannot be read: {error.strerror or error}") from error
            except (ValueError, RecursionError) as error:
                if name == PROJECT:  # the file of other tools, which report it
                    continue
                raise RecipeError(f"the configuration {file} is not TOML: {str(error)[:200]}") from error
            if not isinstance(values, Mapping):
                continue
            if reason is None:
                return Configuration(file, values, tuple(notes))
            notes.append(f"the configuration {file} is not used: {reason}; make it yours alone, or remove it")
    return Configuration(None, {}, tuple(notes))


def _working_tree(folder: Path) -> Iterator[Path]:
    """Yield a folder and those above it, up to the root of a repository or the home folder."""
    home = os.path.realpath(os.path.expanduser("~"))
    for place in (folder, *folder.parents):
        yield place
        if os.path.realpath(place) == home or any(os.path.lexists(place / name) for name in ROOTS):
            return


def _read(file: Path) -> tuple[Any, str | None]:
    """Read the options of a file.

    Returns:
        The options, None if it has none, and why they must not be used.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError, RecursionError: it is not TOML.
    """
    with open_regular(file) as opened:
        reason = _who_writes(os.fstat(opened.fileno()), "it") or _who_writes(os.stat(file.parent), "its folder")
        values: Any = tomllib.loads(read_opened(opened, LARGEST).decode("utf-8"))
    if file.name == PROJECT:
        tool = values.get("tool")
        values = tool.get("sbonnx") if isinstance(tool, Mapping) else None
    return values, reason


def _who_writes(found: os.stat_result, what: str) -> str | None:
    """Return why a file or folder can be changed by other users than this one and root; None if it cannot."""
    if sys.platform == "win32":
        return None
    import grp
    import pwd

    user = os.geteuid()
    if found.st_uid not in (user, 0):
        return f"{what} belongs to another user (id {found.st_uid})"
    if found.st_mode & stat.S_IWOTH:
        return f"all users can write to {what}"
    if found.st_mode & stat.S_IWGRP and found.st_gid != 0:
        try:
            group, own = grp.getgrgid(found.st_gid), pwd.getpwuid(user)
        except KeyError:
            return f"group {found.st_gid} can write to {what}"
        # many systems give every user a group of that name, which nobody else is in
        if group.gr_name != own.pw_name or set(group.gr_mem) - {own.pw_name}:
            return f"group {group.gr_name} can write to {what}"
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value of TOML has a counterpart in JSON: it holds no dates and times."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float))


def _name(option: str) -> str:
    return option.replace("-", "_").lower()


__all__ = ["Configuration", "find"]
