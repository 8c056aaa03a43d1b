"""SQLite database of sketches: one row per sketch, with a checksum of its key and its arrays.

Changes are transactions with a rollback journal: a killed process leaves the previous contents, and several processes
may use a database at once. There is no write-ahead log, because its shared memory does not work on network file
systems. Every call opens and closes the database.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, OutputError
from sbonnx.graph.storage.output_files import is_replaceable
from sbonnx.input_files import check_regular
from sbonnx.spec import Array

DATABASE: Final = "sketches.sqlite"
"""Name of the database in the folder of a cache."""

FORMAT: Final = 2
"""Version of the tables, stored as `user_version`. Version 1 was a folder of binary files."""

APPLICATION: Final = 0x73626E78
"""`application_id` of the database: "sbnx"."""

TABLES: Final = (
    "CREATE TABLE identity (content TEXT NOT NULL, checksum BLOB NOT NULL)",
    "CREATE TABLE sketches (binding TEXT NOT NULL, run TEXT NOT NULL, samples INTEGER NOT NULL, "
    "row_count INTEGER NOT NULL, key TEXT NOT NULL, layout TEXT NOT NULL, payload BLOB NOT NULL, "
    "checksum BLOB NOT NULL, PRIMARY KEY (binding, run, samples, key))",
)

LOCK_SECONDS: Final = 60.0
"""Seconds to wait for another process that writes."""

NARROW: Final = (np.uint8, np.uint16, np.uint32)
"""Types for storing int64 counts: the first one that holds them, in a quarter of the bytes or less."""

STORED: Final = frozenset("biuf")
"""Kinds of the types that can be stored."""


class DamagedError(Exception):
    """The file is not a readable database of this format."""


class SketchRow(NamedTuple):
    """A stored sketch.

    Attributes:
        binding: digest of model, data and settings that the sketch depends on.
        run: digest of the interrupted run that it is a checkpoint of; "" if it is complete.
        samples: number of samples after which the checkpoint was written; 0 if it is complete.
        row_count: number of rows of the checkpoint; 1 if the sketch is complete.
        key: tensor and channel axis, as JSON.
        layout: [name, type, stored type, shape] of each array, as JSON.
        payload: the arrays one after the other.
    """

    binding: str
    run: str
    samples: int
    row_count: int
    key: str
    layout: str
    payload: bytes

    @classmethod
    def of(
        cls, binding: str, key: str, sketch: Sketch, run: str = "", samples: int = 0, row_count: int = 1
    ) -> SketchRow:
        """Pack a sketch."""
        return cls(binding, run, samples, row_count, key, *pack(sketch.to_arrays()))

    @property
    def checksum(self) -> bytes:
        """The sha256 of all columns.

        Raises:
            TypeError: the payload is not bytes, in a damaged database.
        """
        total = hashlib.sha256(repr(self[:-1]).encode("utf-8", "surrogatepass"))
        total.update(self.payload)
        return total.digest()

    def sketch(self) -> Sketch:
        """Unpack the sketch.

        Raises:
            ValueError: sbonnx did not write it.
        """
        try:
            return Sketch.from_arrays(unpack(self.layout, self.payload))
        except (TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"not a sketch: {error}") from error


def pack(arrays: Mapping[str, Array]) -> tuple[str, bytes]:
    """Return layout and payload of arrays of any built-in numpy type except object."""
    layout, pieces = [], []
    for name, values in arrays.items():
        stored = _narrow(values)
        layout.append([name, values.dtype.str, stored.dtype.str, list(values.shape)])
        pieces.append(stored.tobytes())
    return json.dumps(layout), b"".join(pieces)


def unpack(layout: str, payload: bytes) -> dict[str, Array]:
    """Return the arrays by name; those that were not narrowed are read-only views of the payload.

    Raises:
        ValueError, TypeError: not a result of `pack`.
    """
    found: dict[str, Array] = {}
    at = 0
    for name, kind, stored, shape in json.loads(layout):
        if {np.dtype(kind).kind, np.dtype(stored).kind} - STORED or any(length < 0 for length in shape):
            raise ValueError(f"{kind} {shape} is not a stored array")
        values = np.frombuffer(payload, stored, prod(shape), at).reshape(shape)
        found[name] = values.astype(kind, copy=False)
        at += values.nbytes
    return found


def _narrow(values: Array) -> Array:
    """Convert non-negative int64 to the smallest unsigned type that holds all values."""
    if values.dtype != np.int64 or not values.size or values.min() < 0:
        return values
    highest = values.max()
    return next((values.astype(kind) for kind in NARROW if highest <= np.iinfo(kind).max), values)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for a transaction that reads.

    Raises:
        FileNotFoundError: it does not exist, or another process is creating it.
        DamagedError: it is damaged, or of an older format.
        DataError: it is of another application or of a later format, or the system cannot read it.
    """
    try:
        check_regular(path)
        with _connected(path, "rw") as db:
            db.execute("BEGIN")
            if not _check_tables(db, path):
                raise FileNotFoundError(path)
            yield db
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"'{path}' of the calibration cache cannot be read: {error.strerror or error}") from error
    except sqlite3.OperationalError as error:
        raise DataError(f"'{path}' of the calibration cache cannot be read: {error}") from error


@contextmanager
def writing(path: Path, identity: str) -> Iterator[sqlite3.Connection]:
    """Open a database for a transaction that writes: it is committed at the end, or rolled back on an exception.

    A database that does not exist is created.

    Args:
        identity: stored in a new database.

    Raises:
        DamagedError: it is damaged, or of an older format.
        DataError: it is of another application or of a later format.
        OutputError: it cannot be written.
    """
    is_replaceable(path)
    try:
        with _connected(path, "rwc") as db:
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA auto_vacuum=FULL")  # for a new database; the file shrinks when checkpoints are removed
            db.execute("BEGIN IMMEDIATE")
            if not _check_tables(db, path):
                for statement in (*TABLES, f"PRAGMA application_id={APPLICATION}", f"PRAGMA user_version={FORMAT}"):
                    db.execute(statement)
                put_identity(db, identity)
            yield db
            db.execute("COMMIT")
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error
    except sqlite3.OperationalError as error:
        raise OutputError(f"'{path}' cannot be written: {error}") from error


@contextmanager
def _connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open a connection; an open transaction is rolled back at the end.

    Raises:
        DamagedError: it is damaged.
        OSError: its journal is not a regular file, on which SQLite could wait forever.
    """
    with suppress(FileNotFoundError):
        check_regular(_journal(path))
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", LOCK_SECONDS, isolation_level=None, uri=True)
    db.text_factory = lambda content: content.decode("utf-8", "replace")  # a wrong checksum, not an exception
    try:
        db.execute("PRAGMA trusted_schema=OFF")
        yield db
    except sqlite3.OperationalError:  # locked, full, not readable: not damage
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # UnicodeDecodeError: an error about a damaged name
        raise DamagedError(str(error)) from error
    finally:
        db.close()


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def _check_tables(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether the database has its tables; False if it is empty.

    Raises:
        DamagedError: it is damaged, or of an older format.
        DataError: it is of another application, or of a later format.
    """
    tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
    (application,), (version,) = (
        db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    if application != APPLICATION:
        if not tables:
            return False
        raise DataError(f"'{path}' is not of a calibration cache: name an empty or a new folder")
    if version > FORMAT:
        raise DataError(
            f"the calibration cache '{path.parent}' is of another version of sbonnx (format {version}, this one has "
            f"{FORMAT}): name another folder, or delete it"
        )
    if tables != list(TABLES):
        raise DamagedError("it has other tables")
    return True


def remove_database(path: Path) -> None:
    """Remove a damaged database and its journal.

    Raises:
        OutputError: it cannot be removed.
    """
    for file in (_journal(path), path):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"'{file}' cannot be removed: {error.strerror or error}") from error


def put_identity(db: sqlite3.Connection, content: str) -> None:
    """Store the identity of the cache."""
    db.execute("DELETE FROM identity")
    db.execute("INSERT INTO identity VALUES (?, ?)", (content, hashlib.sha256(content.encode()).digest()))


def get_identity(db: sqlite3.Connection) -> str | None:
    """Return the identity of the cache; None if it is damaged."""
    row = db.execute("SELECT content, checksum FROM identity").fetchone()
    if row is None or not isinstance(row[0], str) or hashlib.sha256(row[0].encode()).digest() != row[1]:
        return None
    return str(row[0])


def put_rows(db: sqlite3.Connection, rows: Iterable[SketchRow], *, replace: bool = True) -> None:
    """Store rows; those of existing keys are replaced, or else ignored."""
    conflict = "REPLACE" if replace else "IGNORE"
    statement = f"INSERT OR {conflict} INTO sketches VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    db.executemany(statement, ((*row, row.checksum) for row in rows))


def get_rows(db: sqlite3.Connection, where: str = "TRUE", values: Sequence[Any] = ()) -> Iterator[SketchRow | None]:
    """Yield the rows that an SQL condition selects; None for a damaged one."""
    for *columns, checksum in db.execute(f"SELECT * FROM sketches WHERE {where}", values):
        row = SketchRow(*columns)
        try:
            yield row if row.checksum == checksum else None
        except TypeError:
            yield None


def copy_database(source: Path, target: Path) -> None:
    """Add the undamaged rows of one database to another, which is created if it is missing; existing rows stay.

    Raises:
        OutputError: `target` cannot be written.
    """
    try:
        with reading(source) as db:
            identity, rows = get_identity(db), [row for row in get_rows(db) if row is not None]
    except (FileNotFoundError, DamagedError, DataError):  # as if it were missing
        return
    _add(target, identity, rows)


def merge_databases(parts: Sequence[Path], target: Path) -> None:
    """Merge the complete sketches of databases of parts of the data, key by key, into the database `target`.

    Rows that exist in `target` stay. A sketch that some part lacks is left out.

    Raises:
        OutputError: `target` cannot be written.
    """
    (identity, first), *others = (_complete(part) for part in parts)
    known = _complete(target)[1]
    merged = []
    for key, row in first.items():
        rest = [rows[key] for _, rows in others if key in rows]
        if key in known or len(rest) < len(others):
            continue
        sketch = row.sketch()
        for other in rest:
            sketch.merge(other.sketch())
        merged.append(SketchRow.of(row.binding, row.key, sketch))
    if merged:
        _add(target, identity, merged)


def _complete(path: Path) -> tuple[str | None, dict[tuple[str, str], SketchRow]]:
    """Return the identity and the complete sketches of a database; nothing if it is missing or damaged."""
    try:
        with reading(path) as db:
            return get_identity(db), {
                (row.binding, row.key): row for row in get_rows(db, "run = ''") if row is not None
            }
    except (FileNotFoundError, DamagedError, DataError):
        return None, {}


def _add(target: Path, identity: str | None, rows: Iterable[SketchRow]) -> None:
    """Add rows to a database, which replaces a damaged one; rows without a valid identity are left out."""
    if identity is None:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"'{target.parent}' cannot be made: {error.strerror or error}") from error
    for _ in range(2):
        try:
            with writing(target, identity) as db:
                put_rows(db, rows, replace=False)
            return
        except DamagedError:
            remove_database(target)
