"""Metrics of jobs: the user's code, the modules and data files that its values depend on."""

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

from sbonnx.batch.digests import Digests
from sbonnx.errors import RecipeError
from sbonnx.graph.digests import combined, text

LARGEST_SOURCE: Final = 1 << 24
"""Bytes of a source file that is searched for imports."""

SYSTEM: Final = ("/proc", "/sys", "/dev", "/run", "/etc")
"""Folders whose files say something of the machine."""

Rows = list[list[str]]
"""[path, digest] of files, and of the names in folders (those end with a slash)."""


class Metric:
    """The metric that "file.py:function" names, loaded within `loaded`."""

    def __init__(self, named: str, function: Callable[[str], object], heard: _Heard) -> None:
        self._file, _, self._name = named.rpartition(":")
        self._function = function
        self._heard = heard

    def values(self, model: Path) -> dict[str, float]:
        """Its values for a model file.

        Raises:
            RecipeError: it does not give numbers by name.
            Exception: whatever the function raises.
        """
        found = self._function(str(model))
        if not isinstance(found, Mapping) or not found:
            kind = type(found).__name__
            raise RecipeError(f"accept.metric: {self._name} of '{self._file}' must give {{name: number}}, got {kind}")
        values: dict[str, float] = {}
        for key, value in found.items():
            try:
                values[str(key)] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise RecipeError(f"accept.metric: '{key}' of {self._name} in '{self._file}' is no number") from None
        return values

    def reads(self, digests: Digests) -> Rows:
        """Digests of the files that it has read so far, as far as Python opened them."""
        return [[path, digest_of(path, digests)] for path in sorted(self._heard.read - self._heard.written)]


@contextlib.contextmanager
def loaded(named: str, state: Path | None = None) -> Iterator[Metric]:
    """A metric whose modules can be imported from the folder of its file, also while it runs. They are compiled from
    source: bytecode in `__pycache__` is known by its source's size and mtime in seconds alone.

    Args:
        state: folder of the batch's own files, which are none of the metric's.

    Raises:
        RecipeError: there is no such file or function, or it cannot be loaded.
    """
    file, _, name = named.rpartition(":")
    place = Path(file)
    if not place.is_file():
        raise RecipeError(f"accept.metric: there is no file '{file}'")
    with _importing_from(os.path.realpath(place.parent)) as folder, _listening(folder, state) as heard:
        spec = importlib.util.spec_from_file_location(
            f"sbonnx_metric_{place.stem}", place, loader=_SourceLoader(f"sbonnx_metric_{place.stem}", str(place))
        )
        if spec is None or spec.loader is None:
            raise RecipeError(f"accept.metric: '{file}' is no Python file")
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
    """A Python file and the modules that it imports from its own folder, transitively, sorted. Import statements are
    followed wherever they stand; what is imported by a computed name is not known before it is run."""
    folder = file.parent
    found: set[Path] = set()
    left = [file]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for wanted, base in _imports(path, folder):
            left += _modules(base, wanted)
    return sorted(found)


def digest_of(path: str, digests: Digests) -> str:
    """The digest of a row of `Rows`."""
    if not path.endswith(os.sep):
        return digests.of(Path(path))
    try:
        return text(combined("names", *(os.fsencode(name) for name in sorted(os.listdir(path)))))
    except OSError:
        return "missing"


# --- imports ------------------------------------------------------------------------------------------


def _imports(path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Names of modules that a file imports, and where to look for them."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_SOURCE:
            return
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # whoever runs it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, folder) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[min(node.level, len(path.parents)) - 1] if node.level else folder
            head = f"{node.module}." if node.module else ""
            yield from ((head + alias.name, base) for alias in node.names)


def _modules(base: Path, name: str) -> list[Path]:
    """Files of a dotted name: of the packages around it, and its own where it is a module."""
    parts = name.split(".")
    places = [base.joinpath(*parts[: count + 1]) for count in range(len(parts))]
    files = [file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py")]
    return [file for file in files if file.is_file()]


class _SourceLoader(machinery.SourceFileLoader):
    """Compiles a module from its source each time."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Not known: so no bytecode is read or written."""
        raise OSError("bytecode is not used")


@contextlib.contextmanager
def _importing_from(folder: str) -> Iterator[str]:
    """A folder is first on the search path. Modules that were imported from there are forgotten afterwards."""
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
        with contextlib.suppress(ValueError):  # the metric may have changed it
            sys.path.remove(folder)
        forget()
        for name in sys.modules.keys() - before:
            if _within(getattr(sys.modules[name], "__file__", None) or "", [folder]):
                del sys.modules[name]


def _python_folders() -> list[str]:
    """Folders of the standard library and of installed packages."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    found |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return [os.path.realpath(path) for path in found if path]


def _within(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


# --- files that are read ------------------------------------------------------------------------------


class _Heard:
    """Files that Python opened, and folders that it listed.

    Args:
        folder: of the metric, which the import system lists itself.
        outside: folders whose files do not count.
    """

    def __init__(self, folder: str, outside: list[str]) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        self._folder = folder
        self._outside = outside

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event. An exception would be one of the user's code."""
        with contextlib.suppress(OSError, ValueError):  # no working folder, a NUL in a name
            self._hear(event, args)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and len(args) == 3 and isinstance(args[0], (str, bytes)):
            writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            self._note(os.fsdecode(args[0]), self.written if writes else self.read)
        elif event in ("os.listdir", "os.scandir") and args and isinstance(args[0], (str, bytes)):
            self._note(os.fsdecode(args[0]) + os.sep, self.read)

    def _note(self, path: str, known: set[str]) -> None:
        listed = path.endswith(os.sep)
        place = os.path.abspath(path) if "\0" not in path else ""
        if not listed and place.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # no bytecode of a source
                place = importlib.util.source_from_cache(place)
        if not place or _within(place, self._outside) or (listed and place == self._folder):
            return
        known.add(place.rstrip(os.sep) + os.sep if listed else place)


_hear: list[_Heard] = []
"""Those that listen now. A hook cannot be removed: there is one, and it asks here."""


@lru_cache(maxsize=1)
def _install_hook() -> None:
    sys.addaudithook(lambda event, args: _hear[-1](event, args) if _hear else None)


@contextlib.contextmanager
def _listening(folder: str, state: Path | None) -> Iterator[_Heard]:
    """Record the files opened in this process, by any of its threads. Files opened by native code are not seen."""
    _install_hook()
    outside = [*_python_folders(), *SYSTEM]
    if state is not None:
        outside.append(os.path.realpath(state))
    if os.environ.get("TMPDIR") == tempfile.gettempdir():  # of this process alone, see `child`
        outside.append(os.path.realpath(tempfile.gettempdir()))
    heard = _Heard(folder, outside)
    _hear.append(heard)
    try:
        yield heard
    finally:
        _hear.remove(heard)


__all__ = ["Metric", "Rows", "digest_of", "loaded", "sources_of"]
