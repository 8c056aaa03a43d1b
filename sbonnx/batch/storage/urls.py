"""URLs accessed through fsspec: detection, opening, and display without credentials."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.request import url2pathname

from sbonnx.errors import DeviceError, OutputError, SbonnxError

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")


def is_url(name: str) -> bool:
    """Return whether `name` is a URL, including "file://", and not a path."""
    return _URL.match(name) is not None


def shown(url: str) -> str:
    """Return the URL for display: without user, password, query and fragment."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0] if is_url(url) else url
    return re.sub(r"://[^/@]*@", "://", bare)


def local_path(name: str) -> Path | None:
    """Return the path of a local name or "file://" URL; None for other URLs."""
    if not is_url(name):
        return Path(name)
    scheme, _, rest = name.partition("://")
    if scheme.lower() not in ("file", "local"):
        return None
    return Path(url2pathname(rest[9:] if rest.startswith("localhost/") else rest))


def opened(url: str) -> tuple[Any, str]:
    """Open a URL as (file system, path in it).

    Raises:
        DeviceError: fsspec or the package of the protocol is missing, or the protocol is unknown.
    """
    if importlib.util.find_spec("fsspec") is None:
        raise DeviceError(f"'{shown(url)}' is a URL, and fsspec is not installed: pip install 'sbonnx[cluster]'")
    from fsspec.core import url_to_fs

    try:
        fs, where = url_to_fs(url)
    except ImportError as error:
        raise DeviceError(f"'{shown(url)}' cannot be opened ({error}): install the package that it names") from error
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise
        raise DeviceError(
            f"'{shown(url)}' has a protocol that fsspec does not know: write a path, or install the package for it"
        ) from error
    fs.invalidate_cache()  # listings may be outdated
    return fs, where


@contextmanager
def said(url: str, what: str, kind: type[SbonnxError]) -> Iterator[None]:
    """Convert any exception of a file system to `kind`. File systems raise arbitrary types (of aiohttp, botocore)."""
    try:
        yield
    except SbonnxError:
        raise
    except Exception as error:
        told = " ".join(str(error).replace(url, shown(url)).split())
        secret = _secrets(url)
        for one in secret:
            told = told.replace(one, "...")
        name = type(error).__name__
        why = "there is no such file" if isinstance(error, FileNotFoundError) else f"{name}: {told}" if told else name
        verb = "written" if kind is OutputError else "read"
        # without the cause if its text would show credentials of the URL
        raise kind(f"{what} '{shown(url)}' cannot be {verb} ({why})") from (None if secret else error)


def _secrets(url: str) -> list[str]:
    """Return the parts of a URL that must not be printed, the longest first."""
    found = re.findall(r"://([^/@]*)@", url) + re.findall(r"[?#](.*)$", url)
    parts = {part for one in found for part in (one, *re.split(r"[:&=]", one)) if len(part) > 3}
    return sorted(parts, key=len, reverse=True)


def protocols(fs: Any) -> set[str]:
    """Return the protocol names of a file system."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def stripped(fs: Any, where: str) -> str:
    """Return a path in the form in which the file system lists it."""
    return str(fs._strip_protocol(where))


def parent(where: str) -> str:
    """Return the parent folder of a path or URL, without its query."""
    return re.split(r"[?#]", where)[0].rstrip("/").rpartition("/")[0]


def rename(fs: Any, source: str, target: str) -> None:
    """Rename a file over another one. The `mv` of some file systems does not replace an existing file."""
    try:
        fs.mv(source, target)
    except FileExistsError:
        fs.rm_file(target)
        fs.mv(source, target)


def drop(fs: Any, path: str) -> None:
    """Remove an incomplete file. Errors are ignored, because an earlier error is being handled."""
    try:
        fs.rm_file(path)
    except Exception:  # the file was never created, or the connection is lost
        return


__all__ = ["drop", "is_url", "local_path", "opened", "parent", "protocols", "rename", "said", "shown", "stripped"]
