"""Models, data and outputs that are named by URLs: downloaded once into a folder, uploaded when they are done.

Whatever fsspec reads and writes: "s3://", "gs://", "abfs://", "sftp://", "http://", "memory://" and others, and
chains of them. Credentials come from where fsspec and its protocols look for them (environment, fsspec's own
configuration), and are in no message: users, passwords and queries of URLs are left out of what is said.
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
"""Where downloads lie in the state folder of a batch."""

SAYS: Final = ("ETag", "etag", "e_tag", "Content-MD5", "content_md5", "md5Hash", "md5", "checksum", "crc32c", "hash")
"""What file systems call that which changes with the content."""

DATES: Final = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""What they call the time of the last change: good with the size, where there is nothing better."""

WHOLE: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})
"""Protocols under which a file appears when all of it is there. Elsewhere it is written under another name first."""

HTTP: Final = frozenset({"http", "https", "sync-http", "sync-https"})
"""Protocols that only read, and list no folders that could be relied on."""

UNUSED: Final = 24 * 3600.0
"""Seconds after which a version that nobody asked for goes when a newer one has come."""

HEAD: Final = "fetched.json"
"""What a version is: its name, its digest, the data files beside it."""

TEMPORARY: Final = ".fetch-"


@dataclass(frozen=True)
class Fetched:
    """What a URL was when it was asked for.

    Attributes:
        path: file or folder with its content.
        version: digest of what tells this content from another; equal versions, equal content.
        fresh: whether it was downloaded just now.
    """

    path: Path
    version: str
    fresh: bool


def fetch(name: str, folder: Path, *, what: str = "model", version: str | None = None) -> Fetched:
    """The content of a URL in `folder`, downloaded where it is not there yet; a local path as it is.

    A folder is downloaded with all that is in it, a model with the data files that it names beside itself. What is
    there already is known by what the server says of the content (ETag, checksum, else size and time of change);
    where it says nothing, by the content: that is downloaded every time. Several processes may ask at once.

    Args:
        folder: made where it is missing; it holds nothing else.
        what: "model" or "data": which kind of error to raise, and whether to look for data files.
        version: the one that is wanted; None: the one that the server has now. One that is there is not asked for.

    Raises:
        ModelError, DataError: it is not there, cannot be read, or has changed from `version`.
        DeviceError: fsspec, or a package that it needs for the protocol, is not installed.
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
            with _locked(home):  # a process beside us may have been quicker
                got = _current(fs, where, files, home) or _download(fs, where, files, home, beside=what == "model")
    if version is not None and got.version != version:
        raise kind(f"'{shown(name)}' changed while the batch ran: run the batch again")
    return got


def localized(job: Job, folder: Path, versions: Mapping[str, str] | None = None) -> Job:
    """`job` with model, data and recipe as local paths; its output stays as it is.

    Args:
        folder: see `fetch`.
        versions: of URLs, that must not have changed.

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
    """The version of every URL that jobs read, each asked for once and downloaded.

    Raises: see `fetch`.
    """
    found: dict[str, str] = {}
    for job in jobs:
        for name, what in ((job.model, "model"), (job.data, "data"), (job.recipe, "data")):
            if name is not None and name not in found and local_path(name) is None:
                found[name] = fetch(name, folder, what=what).version
    return found


def upload(files: Sequence[Path], url: str) -> None:
    """Put files beside one another where `url` says; the last of them is the one that it names.

    A file appears whole, over one that is there, and the last one last: who finds it finds the others.

    Raises:
        OutputError: it cannot be written there.
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
    """One file, under another name first."""
    temporary = f"{folder}/.{Path(target).name}.{secrets.token_hex(4)}.tmp"
    try:
        fs.put_file(str(path), temporary)
        rename(fs, temporary, target)
    except BaseException:
        drop(fs, temporary)
        raise


# --- what is there ----------------------------------------------------------------------------------


def _held(home: Path, version: str) -> Path | None:
    """What of a version is in its folder; it counts as used now."""
    place = home / version[:24]
    try:
        name = str(json.loads((place / HEAD).read_text())["name"])
        os.utime(place)
    except FileNotFoundError:
        return None
    return place / "content" / name


def _current(fs: Any, where: str, files: Mapping[str, Mapping[str, Any]], home: Path) -> Fetched | None:
    """What the server has now, where that is here. A model may be as it was and the data files beside it others."""
    for head in sorted(home.glob(f"*/{HEAD}")):
        try:
            beside = _beside(fs, where, json.loads(head.read_text())["beside"])
        except FileNotFoundError:  # a data file of that version is gone from the server
            continue
        version = _version({**files, **beside})
        if version is not None and (found := _held(home, version)) is not None:
            return Fetched(found, version, False)
    return None


def _beside(fs: Any, where: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What the file system says of files beside `where`."""
    return {f"../{name}": fs.info(f"{parent(where)}/{name}") for name in names}


def _files(fs: Any, where: str) -> dict[str, dict[str, Any]]:
    """What the file system says of every file there, by path relative to `where` ("" for `where` itself)."""
    if protocols(fs) & HTTP and not where.endswith("/"):  # a page with links is no folder
        return {"": fs.info(where)}
    info = fs.info(where)
    if info.get("type") != "directory":
        return {"": info}
    found = fs.find(where, detail=True)
    root = stripped(fs, where).rstrip("/") + "/"
    return {name[len(root) :]: info for name, info in sorted(found.items()) if name.startswith(root)}


def _version(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What tells the content from another without reading it; None where the file system says nothing of it."""
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
    """All files into a folder that appears whole."""
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
    """One file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fs.get_file(source, str(target))


def _inside(root: Path, part: str) -> Path:
    """A path below `root`.

    Raises:
        ValueError: it leads elsewhere.
    """
    if not is_inside(part):
        raise ValueError(f"the name '{part}' leads out of its folder")
    return root / part


def _content(folder: Path) -> str:
    """A digest of all files below a folder."""
    parts: list[bytes] = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        parts += [path.relative_to(folder).as_posix().encode(), file_digest(path)]
    return text(combined("content", *parts))


def _sweep(home: Path) -> None:
    """Versions that nobody asked for lately, and what killed processes left; nobody else writes there meanwhile."""
    for path in home.iterdir():
        if path.is_dir() and (path.name.startswith(TEMPORARY) or time.time() - path.stat().st_mtime > UNUSED):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One process at a time downloads a URL."""
    with open(home / "lock", "w") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["FOLDER", "Fetched", "fetch", "is_url", "local_path", "localized", "shown", "upload", "versions_of"]
