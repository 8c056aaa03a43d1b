"""URLs of models, data and outputs, through fsspec: cached downloads, uploads, and display without credentials.

All fsspec protocols are supported: "s3://", "gs://", "abfs://", "sftp://", "http://", "memory://" and others, and
chains of them. Credentials are found by fsspec and its protocols (environment, fsspec's configuration). They are never
shown: users, passwords and queries of URLs are removed from messages.

The caches of fsspec (`filecache`, `simplecache`) are not used: they regard files of web servers as static, so that a
newer model is not noticed, and give each file one flat name, so that a model is apart from its external data.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.request import url2pathname

from filelock import lock_descriptor

from sbonnx.batch.file_digests import is_inside
from sbonnx.batch.jobs.job import Job
from sbonnx.errors import DataError, DeviceError, MissingPackageError, ModelError, OutputError, SbonnxError
from sbonnx.graph.digests import combined, file_digest, text
from sbonnx.graph.storage.model_file import external_names

FOLDER: Final = "remote"
"""Subfolder of the state folder with downloads."""

CONTENT_KEYS: Final = (
    *("ETag", "etag", "e_tag", "Content-MD5", "content_md5"),
    *("md5Hash", "md5", "checksum", "crc32c", "hash"),
)
"""Names of content identifiers in the file information of file systems."""

DATES: Final = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""Names of the modification time, used together with the size if there is no content identifier."""

WHOLE: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})
"""Protocols with atomic writes. For others, files are written under a temporary name first."""

HTTP: Final = frozenset({"http", "https", "sync-http", "sync-https"})
"""Read-only protocols without reliable folder listings."""

UNUSED: Final = 24 * 3600.0
"""Seconds until an unused version is removed after a newer one was downloaded."""

HEAD: Final = "fetched.json"
"""Metadata file of a version: its name, its digest, and its external data files."""

TEMPORARY: Final = ".fetch-"

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


@dataclass(frozen=True)
class Fetched:
    """A fetched version of a URL.

    Attributes:
        path: local file or folder with the content.
        version: identifier of the content; equal versions mean equal content.
        fresh: whether it was downloaded by this call.
    """

    path: Path
    version: str
    fresh: bool


def fetch(name: str, folder: Path, *, what: str = "model") -> Fetched:
    """Download the content of a URL to `folder` unless it is cached; a local path is returned unchanged.

    A folder is downloaded recursively, a model together with its external data files. The cache is validated by the
    server's metadata (ETag, checksum, else size and modification time). Without metadata, the content is downloaded
    every time and identified by its digest. Safe for concurrent processes.

    Args:
        folder: created if missing; used only for downloads.
        what: "model" or "data": determines the type of errors, and whether to fetch external data files.

    Raises:
        ModelError, DataError: it does not exist, or cannot be read.
        DeviceError: fsspec, or the package of the protocol, is not installed.
    """
    path = local_path(name)
    if path is not None:
        return Fetched(path, "", False)
    kind = ModelError if what == "model" else DataError
    home = folder / text(combined("url", name.encode()))[:16]
    with _reporting(name, f"the {what}", kind):
        fs, where = _open_url(name)
        files = _files(fs, where)
        home.mkdir(parents=True, exist_ok=True)
        got = _current(fs, where, files, home)
        if got is None:
            with open(home / "lock", "w") as file:
                lock_descriptor(file.fileno())
                # check again: another process may have downloaded it
                got = _current(fs, where, files, home) or _download(fs, where, files, home, beside=what == "model")
    return got


def localized(job: Job, folder: Path) -> Job:
    """Return `job` with model, data and recipe as local paths; the output is unchanged.

    Raises: see `fetch`.
    """
    changes: dict[str, Any] = {}
    for field, what in (("model", "model"), ("data", "data"), ("preprocess", "data"), ("recipe", "data")):
        name = getattr(job, field)
        if name is not None and is_url(name):
            changes[field] = str(fetch(name, folder, what=what).path)
    if job.evaluation is not None and is_url(job.evaluation.data):
        path = str(fetch(job.evaluation.data, folder, what="data").path)
        changes["evaluation"] = replace(job.evaluation, data=path)
    return replace(job, **changes) if changes else job


def upload(files: Sequence[Path], url: str) -> None:
    """Upload files to one folder. The last one is written to `url`, the others next to it.

    Each file appears atomically and replaces an existing one. The last one is written last, so that the others exist
    when it appears.

    Raises:
        OutputError: it cannot be written.
        DeviceError: see `fetch`.
    """
    with _reporting(url, "the output", OutputError):
        fs, where = _open_url(url)
        if _protocols(fs) & HTTP:
            raise OutputError(f"'{shown(url)}' cannot be written: web servers are read-only; name another place")
        whole, folder = bool(_protocols(fs) & WHOLE), _parent(where)
        if folder.strip("/") and not whole:
            fs.makedirs(folder, exist_ok=True)
        for path in files:
            target = where if path is files[-1] else f"{folder}/{path.name}"
            if whole:
                fs.put_file(str(path), target)
            else:
                _put(fs, path, folder, target)


def _put(fs: Any, path: Path, folder: str, target: str) -> None:
    """Upload one file under a temporary name, and rename it."""
    temporary = f"{folder}/.{Path(target).name}.{secrets.token_hex(4)}.tmp"
    try:
        fs.put_file(str(path), temporary)
        try:
            fs.mv(temporary, target)
        except FileExistsError:  # the `mv` of some file systems does not replace an existing file
            fs.rm_file(target)
            fs.mv(temporary, target)
    except BaseException:
        with suppress(Exception):  # the file was never created, or the connection is lost
            fs.rm_file(temporary)
        raise


# --- versions and downloads -------------------------------------------------------------------------


def _current(fs: Any, where: str, files: Mapping[str, Mapping[str, Any]], home: Path) -> Fetched | None:
    """Return the cached content if it is current, including external data files, which may change separately."""
    for head in sorted(home.glob(f"*/{HEAD}")):
        try:
            beside = _beside(fs, where, json.loads(head.read_text())["beside"])
        except FileNotFoundError:  # the server no longer has a data file of that version
            continue
        version = _version({**files, **beside})
        if version is None:
            continue
        place = home / version[:24]
        try:
            name = str(json.loads((place / HEAD).read_text())["name"])
            os.utime(place)  # it is in use
        except FileNotFoundError:
            continue
        return Fetched(place / "content" / name, version, False)
    return None


def _beside(fs: Any, where: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {f"../{name}": fs.info(f"{_parent(where)}/{name}") for name in names}


def _files(fs: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return the file information of every file, by path relative to `where` ("" for `where` itself)."""
    info = fs.info(where)
    page = _protocols(fs) & HTTP and not where.endswith("/")  # a page with links is not a folder
    if page or info.get("type") != "directory":
        return {"": info}
    listed = fs.find(where, detail=True)
    root = str(fs._strip_protocol(where)).rstrip("/") + "/"  # the form in which the file system lists it
    return {name[len(root) :]: info for name, info in sorted(listed.items()) if name.startswith(root)}


def _version(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a content identifier from file information alone; None if there is too little."""
    parts = []
    for name, info in files.items():
        identifier = next((f"{key} {info[key]}" for key in CONTENT_KEYS if info.get(key)), None)
        if identifier is None:
            identifier = next((f"{key} {info[key]}" for key in DATES if info.get(key)), None)
            if identifier is None or info.get("size") is None:
                return None
        parts.append(f"{name} {info.get('size')} {identifier}".encode())
    return text(combined("version", *parts))


def _download(fs: Any, where: str, files: Mapping[str, Mapping[str, Any]], home: Path, *, beside: bool) -> Fetched:
    """Download all files to a folder that appears atomically."""
    if not files:
        raise FileNotFoundError("the folder is empty")
    for path in home.iterdir():  # unused versions and incomplete downloads; the caller holds the lock
        if path.is_dir() and (path.name.startswith(TEMPORARY) or time.time() - path.stat().st_mtime > UNUSED):
            shutil.rmtree(path, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=home))
    try:
        name = Path(re.split(r"[?#]", where)[0].rstrip("/")).name or "content"
        root = place / "content" / name
        for part in files:
            source = f"{where.rstrip('/')}/{part}" if part else where
            _get(fs, source, _inside(root, part) if part else root)
        others = external_names(root) if beside and root.is_file() else []
        for part in others:
            _get(fs, f"{_parent(where)}/{part}", _inside(root.parent, part))
        version = _version({**files, **_beside(fs, where, others)}) or _content(place / "content")
        (place / HEAD).write_text(json.dumps({"name": name, "version": version, "beside": others}))
        final = home / version[:24]
        if not final.is_dir():
            os.rename(place, final)
        return Fetched(final / "content" / name, version, True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _get(fs: Any, source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fs.get_file(source, str(target))


def _inside(root: Path, part: str) -> Path:
    """Return a path below `root`.

    Raises:
        ValueError: it leads out of `root`.
    """
    if not is_inside(part):
        raise ValueError(f"the name '{part}' leads out of its folder")
    return root / part


def _content(folder: Path) -> str:
    parts: list[bytes] = []
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        parts += [path.relative_to(folder).as_posix().encode(), file_digest(path)]
    return text(combined("content", *parts))


# --- file systems ------------------------------------------------------------------------------------


def _open_url(url: str) -> tuple[Any, str]:
    """Open a URL as (file system, path in it).

    Raises:
        DeviceError: fsspec or the package of the protocol is missing, or the protocol is unknown.
    """
    if importlib.util.find_spec("fsspec") is None:
        raise MissingPackageError(
            f"'{shown(url)}' is a URL, and fsspec is not installed: pip install 'sbonnx[cluster]'"
        )
    from fsspec.core import url_to_fs

    try:
        fs, where = url_to_fs(url)
    except ImportError as error:
        raise MissingPackageError(
            f"'{shown(url)}' cannot be opened ({error}): install the package that it names"
        ) from error
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise
        raise DeviceError(
            f"'{shown(url)}' has a protocol that fsspec does not know: write a path, or install the package for it"
        ) from error
    fs.invalidate_cache()  # listings may be outdated
    return fs, where


@contextmanager
def _reporting(url: str, what: str, kind: type[SbonnxError]) -> Iterator[None]:
    """Convert any exception of a file system to `kind`. File systems raise arbitrary types (of aiohttp, botocore)."""
    try:
        yield
    except SbonnxError:
        raise
    except Exception as error:
        message = " ".join(str(error).replace(url, shown(url)).split())
        credentials = _secrets(url)
        for credential in credentials:
            message = message.replace(credential, "...")
        name = type(error).__name__
        why = f"{name}: {message}" if message else name
        if isinstance(error, FileNotFoundError):
            why = "there is no such file"
        verb = "written" if kind is OutputError else "read"
        # without the cause if its text would show credentials of the URL
        raise kind(f"{what} '{shown(url)}' cannot be {verb} ({why})") from (None if credentials else error)


def _secrets(url: str) -> list[str]:
    """Return the parts of a URL that must not be printed, the longest first."""
    matches = re.findall(r"://([^/@]*)@", url) + re.findall(r"[?#](.*)$", url)
    parts = {part for match in matches for part in (match, *re.split(r"[:&=]", match)) if len(part) > 3}
    return sorted(parts, key=len, reverse=True)


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _parent(where: str) -> str:
    """Return the parent folder of a path or URL, without its query."""
    return re.split(r"[?#]", where)[0].rstrip("/").rpartition("/")[0]
