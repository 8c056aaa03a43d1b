"""Feeds of functions: of a Python file, `data.py:load_data`, or of a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from sbonnx.calib.data.objects import Sampling, Source, open_object
from sbonnx.errors import DataError, foreign_code
from sbonnx.system.python_files import load_function


def open_python(named: str, sampling: Sampling) -> Source:
    """Open the feeds of a function without parameters; a generator function is called again for each iteration.

    Args:
        named: ``file.py:function``. It returns or yields feeds in any form that objects may have, also (feed, label).

    Raises:
        RecipeError: the function cannot be loaded.
        DataError: it fails, or returns no feeds.
    """
    return open_call(named, load_function(named, "data"), sampling)


def open_call(named: str, function: Callable[[], Any], sampling: Sampling) -> Source:
    """Open the feeds that a function without parameters returns or yields.

    Args:
        named: of the data, for messages.

    Raises:
        DataError: it fails, or returns no feeds.
    """
    returned = _called(named, function)
    if isinstance(returned, Iterator):
        return Source(f"'{named}'", lambda: _numbered(named, iter(_called(named, function))))
    if returned is None or not (
        isinstance(returned, Iterable) or hasattr(returned, "__getitem__") or hasattr(returned, "get_next")
    ):
        raise DataError(
            f"'{named}' must yield or return feeds, dicts of arrays by input name; it returns {returned!r:.60}"
        )
    return open_object(returned, sampling)


def _called(named: str, function: Callable[[], Any]) -> Any:
    with _user_code(named):
        return function()


def _numbered(named: str, feeds: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    number = 0
    while True:
        with _user_code(named):
            try:
                feed = next(feeds)
            except StopIteration:
                return
        yield f"feed {number} of '{named}'", feed
        number += 1


def _user_code(named: str) -> AbstractContextManager[None]:
    return foreign_code(lambda reason: DataError(f"'{named}' failed: {reason}; --debug shows where"))
