"""Remote models, data and outputs, named by URLs: cached downloads, and upload of results.

All fsspec protocols are supported: "s3://", "gs://", "abfs://", "sftp://", "http://", "memory://" and others, and
chains of them. Credentials are found by fsspec and its protocols (environment, fsspec's configuration). They are never
shown: users, passwords and queries of URLs are removed from messages.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sbonnx.batch.digests import is_inside
from sbonnx.batch.jobs.job import Job
from sbonnx.batch.storage.urls import (
    drop,
    is_url,
    local_path,
    opened,
    parent,
    protocols,
    rename,
    said,
    shown,
    stripped,
)
from sbonnx.errors import DataError, ModelError, OutputError
from sbonnx.graph.digests import combined, file_digest, text
from sbonnx.graph.storage.source import external_names

if sys.platform != "win32":
    import fcntl

FOLDER: Final = "remote"
"""Subfolder of the state folder with downloads."""

SAYS: Final = ("ETag", "etag", "e_tag", "Content-MD5", "content_md5", "md5Hash", "md5", "checksum", "crc32c", "hash")
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


def fetch(name: str, folder: Path, *, what: str = "model", version: str | None = None) -> Fetched:
    """Download the content of a URL to `folder` unless it is cached; a local path is returned unchanged.

    A folder is downloaded recursively, a model together with its external data files. The cache is validated by the
    server's metadata (ETag, checksum, else size and modification time). Without metadata, the content is downloaded
    every time and identified by its digest. Safe for concurrent processes.

    Args:
        folder: created if missing; used only for downloads.
        what: "model" or "data": determines the type of errors, and whether to fetch external data files.
        version: required version; None: the current one. A cached version is returned without asking the server.

    Raises:
        ModelError, DataError: it does not exist, cannot be read, or differs from `version`.
        DeviceError: fsspec, or the package of the protocol, is not installed.
    """
    path = local_path(name)
    if path is not None:
        return Fetched(path, "", False)
    kind = ModelError if what == "model" else DataError
    home = folder / text(combined("url", name.encode()))[:16]
    if version is not None and (found := _held(home, version)) is not None:
        return Fetched(found, version, False)
    with said(name, f"the {what}", kind):
        fs, where = opened(name)
        files = _files(fs, where)
        home.mkdir(parents=True, exist_ok=True)
        got = _current(fs, where, files, home)
        if got is None:
            with _locked(home):  # check again: another process may have downloaded it
                got = _current(fs, where, files, home) or _download(fs, where, files, home, beside=what == "model")
    if version is not None and got.version != version:
        raise kind(f"'{shown(name)}' changed while the batch ran: run the batch again")
    return got


def localized(job: Job, folder: Path, versions: Mapping[str, str] | None = None) -> Job:
    """Return `job` with model, data and recipe as local paths; the output is unchanged.

    Args:
        folder: see `fetch`.
        versions: required versions by URL.

    Raises: see `fetch`.
    """
    known = versions or {}
    changes: dict[str, Any] = {}
    for field, what in (("model", "model"), ("data", "data"), ("recipe", "data")):
        name = getattr(job, field)
        if name is not None and is_url(name):
            changes[field] = str(fetch(name, folder, what=what, version=known.get(name)).path)
    return replace(job, **changes) if changes else job


def versions_of(jobs: Iterable[Job], folder: Path) -> dict[str, str]:
    """Fetch every URL that jobs read once, and return the versions by URL.

    Raises: see `fetch`.
    """
    found: dict[str, str] = {}
    for job in jobs:
        for name, what in ((job.model, "model"), (job.data, "data"), (job.recipe, "data")):
            if name is not None and name not in found and local_path(name) is None:
                found[name] = fetch(name, folder, what=what).version
    return found


def upload(files: Sequence[Path], url: str) -> None:
    """Upload files to one folder. The last one is written to `url`, the others next to it.

    Each file appears atomically and replaces an existing one. The last one is written last, so that the others exist
    when it appears.

    Raises:
        OutputError: it cannot be written.
        DeviceError: see `fetch`.
    """
    with said(url, "the output", OutputError):
        fs, where = opened(url)
        if protocols(fs) & HTTP:
            raise OutputError(f"'{shown(url)}' cannot be written: a web server only gives files; name another place")
        whole, folder = bool(protocols(fs) & WHOLE), parent(where)
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
        rename(fs, temporary, target)
    except BaseException:
        drop(fs, temporary)
        raise


# --- versions and downloads -------------------------------------------------------------------------


def _held(home: Path, version: str) -> Path | None:
    """Return the cached content of a version, marked as used now; None if it is not cached."""
    place = home / version[:24]
    try:
        name = str(json.loads((place / HEAD).read_text())["name"])
        os.utime(place)
    except FileNotFoundError:
        return None
    return place / "content" / name


def _current(fs: Any, where: str, files: Mapping[str, Mapping[str, Any]], home: Path) -> Fetched | None:
    """Return the cached content if it is current, including external data files, which may change separately."""
    for head in sorted(home.glob(f"*/{HEAD}")):
        try:
            beside = _beside(fs, where, json.loads(head.read_text())["beside"])
        except FileNotFoundError:  # the server no longer has a data file of that version
            continue
        version = _version({**files, **beside})
        if version is not None and (found := _held(home, version)) is not None:
            return Fetched(found, version, False)
    return None


def _beside(fs: Any, where: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the file information of files next to `where`."""
    return {f"../{name}": fs.info(f"{parent(where)}/{name}") for name in names}


def _files(fs: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return the file information of every file, by path relative to `where` ("" for `where` itself)."""
    if protocols(fs) & HTTP and not where.endswith("/"):  # a page with links is not a folder
        return {"": fs.info(where)}
    info = fs.info(where)
    if info.get("type") != "directory":
        return {"": info}
    found = fs.find(where, detail=True)
    root = stripped(fs, where).rstrip("/") + "/"
    return {name[len(root) :]: info for name, info in sorted(found.items()) if name.startswith(root)}


def _version(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a content identifier from file information alone; None if there is too little."""
    parts = []
    for name, info in files.items():
        said = next((f"{key} {info[key]}" for key in SAYS if info.get(key)), None)
        if said is None:
            dated = next((f"{key} {info[key]}" for key in DATES if info.get(key)), None)
            if dated is None or info.get("size") is None:
                return None
            said = dated
        parts.append(f"{name} {info.get('size')} {said}".encode())
    return text(combined("version", *parts))


def _download(fs: Any, where: str, files: Mapping[str, Mapping[str, Any]], home: Path, *, beside: bool) -> Fetched:
    """Download all files to a folder that appears atomically."""
    if not files:
        raise FileNotFoundError("the folder is empty")
    _sweep(home)
    place = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=home))
    try:
        name = Path(re.split(r"[?#]", where)[0].rstrip("/")).name or "content"
        root = place / "content" / name
        for part in files:
            source = f"{where.rstrip('/')}/{part}" if part else where
            _get(fs, source, _inside(root, part) if part else root)
        others = external_names(root) if beside and root.is_file() else []
        for part in others:
            _get(fs, f"{parent(where)}/{part}", _inside(root.parent, part))
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
    """Return the digest of all files below a folder."""
    parts: list[bytes] = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        parts += [path.relative_to(folder).as_posix().encode(), file_digest(path)]
    return text(combined("content", *parts))


def _sweep(home: Path) -> None:
    """Remove unused versions and incomplete downloads. The caller holds the lock."""
    for path in home.iterdir():
        if path.is_dir() and (path.name.startswith(TEMPORARY) or time.time() - path.stat().st_mtime > UNUSED):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Lock the folder of a URL, so that only one process downloads it."""
    with open(home / "lock", "w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["FOLDER", "Fetched", "fetch", "is_url", "local_path", "localized", "shown", "upload", "versions_of"]
