"""Functions of the user, given as ``script.py:function``."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sbonnx.errors import RecipeError


def names_function(text: str) -> bool:
    """Return whether a text has the form ``script.py:function``."""
    file, colon, name = text.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


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
        raise RecipeError(f"{option}: there is no file '{file}'")
    spec = importlib.util.spec_from_file_location(f"sbonnx_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{option}: '{file}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with _importing_from(path.resolve().parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # any exception of the user's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RecipeError(f"{option}: '{file}' cannot be loaded: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"{option}: '{file}' has no function '{name}'")
    found: Callable[..., Any] = function
    return found


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
