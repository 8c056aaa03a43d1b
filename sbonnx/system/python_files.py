"""Functions of the user, given as ``script.py:function``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sbonnx.errors import MissingRecipeError, RecipeError, foreign_code


def names_function(text: str) -> bool:
    """Return whether a text has the form ``script.py:function``."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def input_paths(paths: Iterable[object], words: Iterable[object] = ()) -> list[str]:
    """Return the files and folders that values name; of ``script.py:function``, the file.

    Args:
        paths: paths; other values have none.
        words: paths of files, or words such as presets, which may also be names of folders.
    """
    given = [_file_of(os.fspath(entry)) for entry in paths if isinstance(entry, (str, os.PathLike))]
    files = [_file_of(os.fspath(entry)) for entry in words if isinstance(entry, (str, os.PathLike))]
    return [*given, *filter(os.path.isfile, files)]


def _file_of(text: str) -> str:
    return text.rpartition(":")[0] if names_function(text) and not os.path.exists(text) else text


def load_function(named: str, option: str) -> Callable[..., Any]:
    """Load a function of a Python file. The file can import modules of its own folder while it is loaded.

    Args:
        named: ``script.py:function``.
        option: what names it, for messages.

    Raises:
        RecipeError: the file or the function does not exist, or the file cannot be loaded.
    """
    file, _, name = named.rpartition(":")
    path = Path(file)
    if not names_function(named):
        raise RecipeError(f"{option}: '{named}' is not script.py:function")
    if not path.is_file():
        raise MissingRecipeError(f"{option}: there is no file '{file}'")
    spec = importlib.util.spec_from_file_location(f"sbonnx_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{option}: '{file}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    failing = foreign_code(lambda reason: RecipeError(f"{option}: '{file}' cannot be loaded: {reason}"))
    with _importing_from(path.resolve().parent), failing:
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"{option}: '{file}' has no function '{name}'")
    loaded: Callable[..., Any] = function
    return loaded


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
