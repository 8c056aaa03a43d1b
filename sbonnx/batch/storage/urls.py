"""URLs that are read and written through fsspec: what is one, how it is opened, how it and its errors are shown."""

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
    """Whether `name` is a URL and no path; "file://" is one."""
    return _URL.match(name) is not None


def shown(url: str) -> str:
    """The URL as it may be printed: without user, password, query and fragment."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0] if is_url(url) else url
    return re.sub(r"://[^/@]*@", "://", bare)


def local_path(name: str) -> Path | None:
    """The path that `name` is: itself, or that of a "file://" URL; None where it is a URL of another kind."""
    if not is_url(name):
        return Path(name)
    scheme, _, rest = name.partition("://")
    if scheme.lower() not in ("file", "local"):
        return None
    return Path(url2pathname(rest[9:] if rest.startswith("localhost/") else rest))


def opened(url: str) -> tuple[Any, str]:
    """(file system, path in it).

    Raises:
        DeviceError: fsspec or the protocol's package is missing, or there is no such protocol.
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
    fs.invalidate_cache()  # listings of an earlier night
    return fs, where


@contextmanager
def said(url: str, what: str, kind: type[SbonnxError]) -> Iterator[None]:
    """Whatever a file system raises, as ours. They raise what they like: errors of their own, aiohttp's, botocore's."""
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
        # the cause is left out where its text would show what the URL hides
        raise kind(f"{what} '{shown(url)}' cannot be {verb} ({why})") from (None if secret else error)


def _secrets(url: str) -> list[str]:
    """Parts of a URL that are not to be printed, the longest first."""
    found = re.findall(r"://([^/@]*)@", url) + re.findall(r"[?#](.*)$", url)
    parts = {part for one in found for part in (one, *re.split(r"[:&=]", one)) if len(part) > 3}
    return sorted(parts, key=len, reverse=True)


def protocols(fs: Any) -> set[str]:
    """Names of a file system's protocol."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def stripped(fs: Any, where: str) -> str:
    """A path as the file system lists it."""
    return str(fs._strip_protocol(where))


def parent(where: str) -> str:
    """The folder of a path or URL, its query left out."""
    return re.split(r"[?#]", where)[0].rstrip("/").rpartition("/")[0]


def rename(fs: Any, source: str, target: str) -> None:
    """One file over another. Not every file system's own `mv` goes over one that is there."""
    try:
        fs.mv(source, target)
    except FileExistsError:
        fs.rm_file(target)
        fs.mv(source, target)


def drop(fs: Any, path: str) -> None:
    """Remove what was begun. The error that led here is the one to hear of."""
    try:
        fs.rm_file(path)
    except Exception:  # it was never there, or the connection is gone
        return


__all__ = ["drop", "is_url", "local_path", "opened", "parent", "protocols", "rename", "said", "shown", "stripped"]
