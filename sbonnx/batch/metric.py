"""User-defined metrics of jobs: loading of the code, and tracking of the modules and files that it depends on."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib import machinery
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.file_digests import Digests
from sbonnx.errors import MissingRecipeError, RecipeError
from sbonnx.graph.digests import combined, text

LARGEST_SOURCE: Final = 1 << 24
"""Maximum bytes of a source file that is searched for imports."""

SYSTEM: Final = ("/proc", "/sys", "/dev", "/run", "/etc")
"""Folders with files about the machine, which are not tracked."""

Rows = list[list[str]]
"""[path, digest] of files, and of the listings of folders (their paths end with a slash)."""


class Metric:
    """A user-defined metric "file.py:function"; valid inside `loaded`."""

    def __init__(self, named: str, function: Callable[[str], object], heard: _Heard) -> None:
        self._file, _, self._name = named.rpartition(":")
        self._function = function
        self._heard = heard

    def values(self, model: Path) -> dict[str, float]:
        """Compute the metric for a model file.

        Raises:
            RecipeError: the function does not return numbers by name.
            Exception: any exception of the function.
        """
        returned = self._function(str(model))
        if not isinstance(returned, Mapping) or not returned:
            kind = type(returned).__name__
            raise RecipeError(f"accept.metric: {self._name} of '{self._file}' must return {{name: number}}, got {kind}")
        values: dict[str, float] = {}
        for key, value in returned.items():
            try:
                values[str(key)] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise RecipeError(f"accept.metric: '{key}' of {self._name} in '{self._file}' is not a number") from None
        return values

    def reads(self, digests: Digests) -> Rows:
        """Return the digests of the files that the metric has read so far, if Python opened them."""
        return [[path, digest_of(path, digests)] for path in sorted(self._heard.read - self._heard.written)]


@contextlib.contextmanager
def loaded(named: str, state: Path | None = None) -> Iterator[Metric]:
    """Load a metric. Modules can be imported from the folder of its file, also while it runs.

    They are compiled from source, because `__pycache__` bytecode is validated only by size and mtime in seconds.

    Args:
        state: folder of the batch's own files, which are not tracked.

    Raises:
        RecipeError: the file or function does not exist, or cannot be loaded.
    """
    file, _, name = named.rpartition(":")
    place = Path(file)
    if not place.is_file():
        raise MissingRecipeError(f"accept.metric: there is no file '{file}'")
    with _importing_from(os.path.realpath(place.parent)) as folder, _listening(folder, state) as heard:
        spec = importlib.util.spec_from_file_location(
            f"sbonnx_metric_{place.stem}", place, loader=_SourceLoader(f"sbonnx_metric_{place.stem}", str(place))
        )
        if spec is None or spec.loader is None:
            raise RecipeError(f"accept.metric: '{file}' is not a Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (ImportError, SyntaxError) as error:
            raise RecipeError(f"accept.metric: '{file}' cannot be loaded: {' '.join(str(error).split())}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise RecipeError(f"accept.metric: '{file}' has no function '{name}'")
        yield Metric(named, function, heard)


def sources_of(file: Path) -> list[Path]:
    """List a Python file and the modules that it imports from its own folder, transitively, sorted.

    All import statements are followed, wherever they are in the file. Dynamic imports are not detected.
    """
    folder = file.parent
    sources: set[Path] = set()
    left = [file]
    while left:
        path = left.pop()
        if path in sources:
            continue
        sources.add(path)
        for wanted, base in _imports(path, folder):
            place = base
            for part in wanted.split("."):  # a module and its parent packages
                place /= part
                left += [
                    candidate
                    for candidate in (place.with_name(f"{part}.py"), place / "__init__.py")
                    if candidate.is_file()
                ]
    return sorted(sources)


def digest_of(path: str, digests: Digests) -> str:
    """Return the digest of a row of `Rows`."""
    if not path.endswith(os.sep):
        return digests.of(Path(path))
    try:
        return text(combined("names", *(os.fsencode(name) for name in sorted(os.listdir(path)))))
    except OSError:
        return "missing"


# --- imports ------------------------------------------------------------------------------------------


def _imports(path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names of the modules that a file imports, and the folders to search."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_SOURCE:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # running the file reports the error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, folder) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[min(node.level, len(path.parents)) - 1] if node.level else folder
            head = f"{node.module}." if node.module else ""
            yield from ((head + alias.name, base) for alias in node.names)


class _SourceLoader(machinery.SourceFileLoader):
    """Compiles a module from source each time."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Raise `OSError`, so that no bytecode is read or written."""
        raise OSError("bytecode is not used")


@contextlib.contextmanager
def _importing_from(folder: str) -> Iterator[str]:
    """Put a folder first on the search path. Modules imported from it are unloaded afterwards."""
    loaders = (
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (_SourceLoader, machinery.SOURCE_SUFFIXES),
    )
    outside = _python_folders()

    def finder(path: str) -> machinery.FileFinder:
        if not _within(path, [folder]) or _within(path, outside):
            raise ImportError
        return machinery.FileFinder(path, *loaders)

    def forget() -> None:
        for path in [path for path in sys.path_importer_cache if _within(path, [folder])]:
            del sys.path_importer_cache[path]

    before = set(sys.modules)
    forget()
    sys.path.insert(0, folder)
    sys.path_hooks.insert(0, finder)
    try:
        yield folder
    finally:
        sys.path_hooks.remove(finder)
        with contextlib.suppress(ValueError):  # the metric may have changed sys.path
            sys.path.remove(folder)
        forget()
        for name in sys.modules.keys() - before:
            if _within(getattr(sys.modules[name], "__file__", None) or "", [folder]):
                del sys.modules[name]


def _python_folders() -> list[str]:
    """List the folders of the standard library and of installed packages."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    folders |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return [os.path.realpath(path) for path in folders if path]


def _within(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


# --- files that are read ------------------------------------------------------------------------------


class _Heard:
    """Records the files that Python opens and the folders that it lists.

    Args:
        folder: folder of the metric; listings of it by the import system are ignored.
        outside: folders whose files are ignored.
    """

    def __init__(self, folder: str, outside: list[str]) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        self._folder = folder
        self._outside = outside

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Handle an audit event. An exception here would propagate into the user's code."""
        with contextlib.suppress(OSError, ValueError):  # no working directory, or NUL in a name
            if event == "open" and len(args) == 3 and isinstance(args[0], (str, bytes)):
                writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
                self._note(os.fsdecode(args[0]), self.written if writes else self.read)
            elif event in ("os.listdir", "os.scandir") and args and isinstance(args[0], (str, bytes)):
                self._note(os.fsdecode(args[0]) + os.sep, self.read)

    def _note(self, path: str, known: set[str]) -> None:
        listed = path.endswith(os.sep)
        place = os.path.abspath(path) if "\0" not in path else ""
        if not listed and place.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # a .pyc file without a source
                place = importlib.util.source_from_cache(place)
        if not place or _within(place, self._outside) or (listed and place == self._folder):
            return
        known.add(place.rstrip(os.sep) + os.sep if listed else place)


_hear: list[_Heard] = []
"""Active recorders. An audit hook cannot be removed, so a single hook forwards events to the last recorder."""


@lru_cache(maxsize=1)
def _install_hook() -> None:
    sys.addaudithook(lambda event, args: _hear[-1](event, args) if _hear else None)


@contextlib.contextmanager
def _listening(folder: str, state: Path | None) -> Iterator[_Heard]:
    """Record the files opened in this process by any thread. Files opened by native code are not recorded."""
    _install_hook()
    outside = [*_python_folders(), *SYSTEM]
    if state is not None:
        outside.append(os.path.realpath(state))
    if os.environ.get("TMPDIR") == tempfile.gettempdir():  # private to this process, see `step_main`
        outside.append(os.path.realpath(tempfile.gettempdir()))
    heard = _Heard(folder, outside)
    _hear.append(heard)
    try:
        yield heard
    finally:
        _hear.remove(heard)
