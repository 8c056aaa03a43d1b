"""What is known of a batch from before: which steps there were, how often they were tried, and what became of them.

What a step has made is proved by its folder (`Places.made`), which appears whole. The database says the rest: what was
refused, how long things took, every attempt. Should it be lost, steps that were refused are tried again; no more.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from sbonnx.batch.intact import Intact
from sbonnx.batch.jobs.job import Outcome, Places, Step
from sbonnx.batch.outcomes import JUDGED_ALONE, from_json, now, to_json
from sbonnx.batch.process.locks import sole
from sbonnx.errors import OutputError

VERSION: Final = 1
"""Of the tables."""

TABLES: Final = """
CREATE TABLE IF NOT EXISTS steps (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, title TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
    error TEXT NOT NULL, seconds REAL NOT NULL, peak_bytes INTEGER NOT NULL, attempts INTEGER NOT NULL,
    finished TEXT NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS attempts (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, number INTEGER NOT NULL, place TEXT NOT NULL, started TEXT NOT NULL,
    ended TEXT, status TEXT, reason TEXT, seconds REAL, peak_bytes INTEGER
);
CREATE INDEX IF NOT EXISTS attempts_of ON attempts (key);
CREATE INDEX IF NOT EXISTS steps_called ON steps (kind, title);
"""

TIMED: Final = f"status IN ('done', 'unaccepted') AND instr(outcome, '\"{JUDGED_ALONE}\":') = 0"
"""Of rows whose times are those of the whole step."""

PASSING: Final = frozenset({"OutputError", "DeviceError"})
"""Refusals that are about the machine and not about what the key covers: tried again."""

CUT_OFF: Final = "cut off"
"""Status of an attempt that the batch did not live to see the end of."""


class State:
    """The state of the batch in a folder, for one engine at a time.

        with State(places) as state:
            done = state.settled(steps)
            state.started(step, attempt=1, where="4711")
            state.ended(step, outcome)

    Every change is on its way to the disk when the call returns: a killed process takes none with it.

    Raises:
        OutputError: on entry, another batch is at work there, or the folder cannot be written to.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._stack = ExitStack()
        self._open: sqlite3.Connection | None = None

    def __enter__(self) -> State:
        try:
            (self.places.state / "steps").mkdir(parents=True, exist_ok=True)
            self.places.log("").parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"'{self.places.output}' cannot be written to: {error.strerror or error}") from error
        self._stack.enter_context(sole(self.places))
        try:
            self._open = _opened(self.places.database)
            self._open.execute(
                "UPDATE attempts SET ended = ?, status = ? WHERE ended IS NULL",
                (now(), CUT_OFF),
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another batch begin. Twice is once."""
        rows, self._open = self._open, None
        if rows is not None:
            rows.close()
        self._stack.close()

    @property
    def _db(self) -> sqlite3.Connection:
        if self._open is None:
            raise ValueError("the state of the batch is not open")
        return self._open

    def settled(self, steps: Sequence[Step]) -> dict[str, Outcome]:
        """Outcomes of steps that need not run again. What was made and has no row (its batch was killed) gets one."""
        rows = _rows(self._db)
        found = _settled(self.places, steps, rows, remember=True)
        with self._writing():
            for step in steps:
                if step.key in found and rows.get(step.key) != found[step.key]:
                    self._put(step, found[step.key])
        return found

    def forget(self, key: str) -> None:
        """The step is to run again, whatever became of it."""
        with self._writing() as db:
            db.execute("DELETE FROM steps WHERE key = ?", (key,))

    def started(self, step: Step, attempt: int, where: str) -> None:
        """An attempt begins."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO attempts (key, number, place, started) VALUES (?, ?, ?, ?)",
                (step.key, attempt, where, now()),
            )

    def ended(self, step: Step, outcome: Outcome) -> None:
        """An attempt, the last that was begun, has ended; the step's row says so. One of a step that was skipped has
        no attempt, and makes no row."""
        if outcome.status == "skipped":
            return
        with self._writing() as db:
            db.execute(
                "UPDATE attempts SET ended = ?, status = ?, reason = ?, seconds = ?, peak_bytes = ? "
                "WHERE key = ? AND ended IS NULL",
                (now(), outcome.status, outcome.reason, outcome.seconds, outcome.peak_bytes, step.key),
            )
            self._put(step, outcome)

    def expected(self, step: Step) -> float | None:
        """Seconds that a step of this name took the last time it was done, whatever was asked of it then."""
        row = self._db.execute(
            f"SELECT seconds FROM steps WHERE kind = ? AND title = ? AND {TIMED} ORDER BY finished DESC LIMIT 1",
            (step.kind, step.title),
        ).fetchone()
        return None if row is None else float(row[0])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """All that is written within, or nothing.

        Raises:
            OutputError: it cannot be written (any more).
        """
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise OutputError(f"'{self.places.database}' cannot be written: {error}") from error

    def _put(self, step: Step, outcome: Outcome) -> None:
        stamped = outcome if outcome.finished else replace(outcome, finished=now())
        values: tuple[Any, ...] = (
            step.key,
            step.kind,
            step.title,
            stamped.status,
            stamped.reason,
            stamped.error,
            stamped.seconds,
            stamped.peak_bytes,
            stamped.attempts,
            stamped.finished,
            to_json(stamped),
        )
        self._db.execute(f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(values))})", values)


def peek(places: Places, steps: Iterable[Step]) -> dict[str, Outcome]:
    """`State.settled`, beside a batch at work, and without writing anything."""
    with _aside(places) as db:
        return _settled(places, steps, {} if db is None else _rows(db), remember=False)


def past(places: Places) -> dict[tuple[str, str], float]:
    """Seconds by kind and title of steps that were done before; for estimates, beside a batch at work."""
    with _aside(places) as db:
        if db is None:
            return {}
        rows = db.execute(f"SELECT kind, title, seconds FROM steps WHERE {TIMED} ORDER BY finished")
        return {(kind, title): float(seconds) for kind, title, seconds in rows}


@contextmanager
def _aside(places: Places) -> Iterator[sqlite3.Connection | None]:
    """The database, to be read only; None where there is none that can be."""
    db = None
    try:
        if places.database.is_file():
            db = sqlite3.connect(f"{places.database.resolve().as_uri()}?mode=ro", uri=True, timeout=5)
            db.execute("SELECT key FROM steps LIMIT 1").fetchall()
    except sqlite3.Error:  # damaged, or of somebody else: the batch itself will say so
        if db is not None:
            db.close()
        db = None
    try:
        yield db
    finally:
        if db is not None:
            db.close()


def _rows(db: sqlite3.Connection) -> dict[str, Outcome]:
    """Last outcomes by key."""
    found = {}
    for key, text in db.execute("SELECT CAST(key AS BLOB), CAST(outcome AS BLOB) FROM steps"):  # damaged text
        try:
            found[bytes(key).decode()] = from_json(bytes(text).decode())
        except (ValueError, TypeError, KeyError, IndexError):  # of another version: as if there were none
            continue
    return found


def _settled(
    places: Places, steps: Iterable[Step], rows: Mapping[str, Outcome], *, remember: bool
) -> dict[str, Outcome]:
    """Outcomes of steps that need not run again: what they made is there and intact, or they would be refused again.

    Args:
        remember: the digests of files.
    """
    found: dict[str, Outcome] = {}
    intact = Intact(places)
    for step in steps:
        row, made = rows.get(step.key), intact.outcome(step)
        if made is not None:
            # the row was measured from outside, with the memory of the whole process
            found[step.key] = row if row is not None and row.status == made.status else made
        elif row is not None and row.status == "refused" and row.error not in PASSING:
            found[step.key] = row
    if remember:
        intact.save()
    return found


def _opened(path: Path) -> sqlite3.Connection:
    """The database with its tables. One that is damaged is put aside: it can be done without.

    Raises:
        OutputError: a later version wrote it, or it cannot be opened.
    """
    try:
        return _connected(path)
    except sqlite3.OperationalError as error:
        raise OutputError(f"'{path}' cannot be opened: {error}") from error
    except sqlite3.DatabaseError:  # "file is not a database", "disk image is malformed"
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            file = path.with_name(name)
            if file.exists():
                os.replace(file, path.with_name(f"{name}.damaged"))
        return _connected(path)


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        # a kill loses nothing; a loss of power may lose the last rows, and what was made proves itself
        db.execute("PRAGMA synchronous=NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise OutputError(
                f"'{path}' was written by a later version of sbonnx: use that one, or another output folder"
            )
        if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("malformed")
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
