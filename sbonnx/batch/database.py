"""Persistent state of a batch: steps, attempts and outcomes in an SQLite database.

The output folder of a step (`Places.made`), which appears atomically, proves that the step is done. The database adds
refusals, durations and attempts. If it is lost, the only cost is that refused steps run again.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from sbonnx.batch.jobs.job import HistoryRow, JobResult, Outcome, Places, Step, encodable
from sbonnx.batch.outcomes import JUDGED_ALONE, Intact, from_json, now, to_json
from sbonnx.batch.process.locks import batch_lock
from sbonnx.errors import OutputError
from sbonnx.report.comparison import Comparison

VERSION: Final = 1
"""Schema version of the tables."""

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
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, finished TEXT NOT NULL, job TEXT NOT NULL, status TEXT NOT NULL, sqnr_db REAL,
    size_ratio REAL, latency_ratio REAL, metric TEXT, value REAL
);
CREATE INDEX IF NOT EXISTS runs_of ON runs (job);
CREATE INDEX IF NOT EXISTS attempts_of ON attempts (key);
CREATE INDEX IF NOT EXISTS steps_called ON steps (kind, title);
"""

ADDED: Final = {"metric": "TEXT", "value": "REAL"}
"""Columns of `runs` that databases of earlier versions do not have."""

TIMED: Final = f"status IN ('done', 'unaccepted') AND instr(outcome, '\"{JUDGED_ALONE}\":') = 0"
"""SQL condition for rows whose duration covers the whole step."""

PASSING: Final = frozenset({"OutputError", "DeviceError"})
"""Refusals caused by the machine, not by anything that the key covers; they are retried."""

HISTORY: Final = 14
"""Runs of a job whose figures are stored: two weeks of nights."""

CUT_OFF: Final = "cut off"
"""Status of an attempt that was still running when the batch was killed."""


class State:
    """State of the batch in a folder, locked by one engine at a time.

        with State(places) as state:
            done = state.settled(steps)
            state.started(step, attempt=1, where="4711")
            state.ended(step, outcome)

    Every change is written when the call returns, so that killing the process loses none of them.

    Raises:
        OutputError: on entry, another batch is running in the folder, or it is not writable.
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
        self._stack.enter_context(batch_lock(self.places))
        try:
            self._open = _opened(self.places.database)
            self._open.execute("UPDATE attempts SET ended = ?, status = ? WHERE ended IS NULL", (now(), CUT_OFF))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and release the lock. Idempotent."""
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
        """Return the outcomes of steps that need not run. Outputs without a row (the batch was killed) get a row."""
        rows = _rows(self._db)
        outcomes = _settled(self.places, steps, rows, remember=True)
        with self._writing():
            for step in steps:
                if step.key in outcomes and rows.get(step.key) != outcomes[step.key]:
                    self._put(step, outcomes[step.key])
        return outcomes

    def forget(self, key: str) -> None:
        """Delete the row of a step, so that it runs again."""
        with self._writing() as db:
            db.execute("DELETE FROM steps WHERE key = ?", (key,))

    def started(self, step: Step, attempt: int, where: str) -> None:
        with self._writing() as db:
            db.execute(
                "INSERT INTO attempts (key, number, place, started) VALUES (?, ?, ?, ?)",
                (step.key, attempt, where, now()),
            )

    def ended(self, step: Step, outcome: Outcome) -> None:
        """Record the end of the last started attempt, and its outcome. Skipped steps have no attempt and no row."""
        if outcome.status == "skipped":
            return
        with self._writing() as db:
            db.execute(
                "UPDATE attempts SET ended = ?, status = ?, reason = ?, seconds = ?, peak_bytes = ? "
                "WHERE key = ? AND ended IS NULL",
                (now(), outcome.status, outcome.reason, outcome.seconds, outcome.peak_bytes, step.key),
            )
            self._put(step, outcome)

    def record(self, results: Iterable[JobResult], finished: str) -> None:
        """Add the figures of the jobs of a run to their history, and remove those before the last `HISTORY` runs."""
        with self._writing() as db:
            for result in results:
                name, status, report = result.job.name, result.outcome.status, result.outcome.result
                metrics = None if report is None else report.metrics
                figures = (None, None, None, None, None) if metrics is None else _figures(metrics)
                db.execute(
                    "INSERT INTO runs (finished, job, status, sqnr_db, size_ratio, latency_ratio, metric, value) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (finished, encodable(name), status, *figures),
                )
                db.execute(
                    "DELETE FROM runs WHERE job = ? AND id NOT IN "
                    "(SELECT id FROM runs WHERE job = ? ORDER BY id DESC LIMIT ?)",
                    (encodable(name), encodable(name), HISTORY),
                )

    def history(self, names: Iterable[str]) -> dict[str, tuple[HistoryRow, ...]]:
        """Return the figures of the last runs of jobs, oldest first."""
        columns = [column.name for column in fields(HistoryRow)]
        runs = {}
        for name in map(encodable, names):
            query = f"SELECT {', '.join(columns)} FROM runs WHERE job = ? ORDER BY id"
            runs[name] = tuple(HistoryRow(*row) for row in self._db.execute(query, (name,)))
        return runs

    def expected(self, step: Step) -> float | None:
        """Return the seconds of the last run of a step with this kind and title, whatever its settings; None if
        unknown.
        """
        row = self._db.execute(
            f"SELECT seconds FROM steps WHERE kind = ? AND title = ? AND {TIMED} ORDER BY finished DESC LIMIT 1",
            (step.kind, step.title),
        ).fetchone()
        return None if row is None else float(row[0])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: commit on success, roll back on an exception.

        Raises:
            OutputError: the database cannot be written.
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
        columns = ("status", "reason", "error", "seconds", "peak_bytes", "attempts", "finished")
        copied = (getattr(stamped, name) for name in columns)
        values = (step.key, step.kind, step.title, *copied, to_json(stamped))
        self._db.execute(f"INSERT OR REPLACE INTO steps VALUES ({', '.join('?' * len(values))})", values)


def _figures(metrics: Comparison) -> tuple[float | None, float | None, float | None, str | None, float | None]:
    """Return the figures of a `HistoryRow`: None for those that are unknown or not finite."""
    least = min((row.sqnr_db for row in metrics.outputs), default=math.nan)
    name, value = metrics.asked or (None, None)
    return least if math.isfinite(least) else None, metrics.size_ratio, metrics.latency_ratio, name, value


def peek(places: Places, steps: Iterable[Step]) -> dict[str, Outcome]:
    """Return `State.settled` read-only, also while a batch is running."""
    with _aside(places) as db:
        return _settled(places, steps, {} if db is None else _rows(db), remember=False)


def past(places: Places) -> dict[tuple[str, str], float]:
    """Return the seconds of earlier steps by kind and title, for estimates; also while a batch is running."""
    with _aside(places) as db:
        if db is None:
            return {}
        rows = db.execute(f"SELECT kind, title, seconds FROM steps WHERE {TIMED} ORDER BY finished")
        return {(kind, title): float(seconds) for kind, title, seconds in rows}


@contextmanager
def _aside(places: Places) -> Iterator[sqlite3.Connection | None]:
    """Open the database read-only; None if it does not exist or cannot be read."""
    db = None
    try:
        if places.database.is_file():
            db = sqlite3.connect(f"{places.database.resolve().as_uri()}?mode=ro", uri=True, timeout=5)
            db.execute("SELECT key FROM steps LIMIT 1").fetchall()
    except sqlite3.Error:  # damaged, or not ours: the batch itself reports it
        if db is not None:
            db.close()
        db = None
    try:
        yield db
    finally:
        if db is not None:
            db.close()


def _rows(db: sqlite3.Connection) -> dict[str, Outcome]:
    outcomes = {}
    for key, text in db.execute("SELECT CAST(key AS BLOB), CAST(outcome AS BLOB) FROM steps"):  # text may be damaged
        try:
            outcomes[bytes(key).decode()] = from_json(bytes(text).decode())
        except (ValueError, TypeError, KeyError, IndexError):  # written by another version: treat as missing
            continue
    return outcomes


def _settled(
    places: Places, steps: Iterable[Step], rows: Mapping[str, Outcome], *, remember: bool
) -> dict[str, Outcome]:
    """Return the outcomes of steps that need not run: their output is intact, or they would be refused again.

    Args:
        remember: whether to save the digests of files.
    """
    outcomes: dict[str, Outcome] = {}
    intact = Intact(places)
    for step in steps:
        row, produced = rows.get(step.key), intact.outcome(step)
        if produced is not None:
            # prefer the row: it was measured by the parent, with the memory of the whole process
            outcomes[step.key] = row if row is not None and row.status == produced.status else produced
        elif row is not None and row.status == "refused" and row.error not in PASSING:
            outcomes[step.key] = row
    if remember:
        intact.digests.save()
    return outcomes


def _opened(path: Path) -> sqlite3.Connection:
    """Open the database and create its tables. A damaged one is renamed, because it is not essential.

    Raises:
        OutputError: it was written by a later version, or cannot be opened.
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
        # a kill loses nothing; a power failure may lose the last rows, which outputs on disk make up for
        db.execute("PRAGMA synchronous=NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise OutputError(
                f"'{path}' was written by a later version of sbonnx: use that one, or another output folder"
            )
        if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("malformed")
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={VERSION}; COMMIT;")
        columns = {row[1] for row in db.execute("PRAGMA table_info(runs)")}
        for name, kind in ADDED.items():
            if name not in columns:
                db.execute(f"ALTER TABLE runs ADD COLUMN {name} {kind}")
    except BaseException:
        db.close()
        raise
    return db
