"""Data of retrieval: a folder with a corpus, queries and judged pairs (BEIR, MTEB), as labelled feeds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.labels import LabelledFeed
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.stored_arrays import StoredArray
from sbonnx.errors import DataError
from sbonnx.metrics.retrieval import DOCUMENT, QUERY, RELEVANT
from sbonnx.system.input_files import read_regular

PARTS: Final = ("corpus", "queries")
QRELS: Final = ("qrels.tsv", "qrels.txt", "qrels/test.tsv", "qrels/dev.tsv", "qrels/train.tsv")
"""Files of judged pairs, the first that exists: query, document, grade; of trec_eval: query, 0, document, grade."""

IDS: Final = ("_id", "id")
"""Names of the ids of samples: a key of .jsonl, or an array of .npz."""

LARGEST: Final = 1 << 28


@dataclass(frozen=True)
class RetrievalFolder:
    """A folder of retrieval data.

    Attributes:
        parts: files or folders of the corpus and the queries.
        qrels: file of judged pairs.
    """

    folder: Path
    parts: tuple[Path, Path]
    qrels: Path

    def open(self, open_part: Callable[[Path], Source]) -> Source:
        """Open the corpus, then the queries.

        Raises:
            DataError: a part cannot be opened, or the pairs cannot be read.
        """
        corpus, queries = map(open_part, self.parts)
        judged = read_qrels(self.qrels)

        def feeds() -> Iterator[tuple[str, Any]]:
            yield from ((where, _labelled(raw, where, None)) for where, raw in corpus.feeds())
            yield from ((where, _labelled(raw, where, judged)) for where, raw in queries.feeds())

        count = None if corpus.count is None or queries.count is None else corpus.count + queries.count
        return Source(f"folder '{self.folder}'", feeds, count, notes=(*corpus.notes, *queries.notes))


def retrieval_at(path: Path) -> RetrievalFolder | None:
    """Return the retrieval data in a folder; None if it is none."""
    if not os.path.isdir(path):  # False for names that the system does not allow
        return None
    qrels = next((path / name for name in QRELS if (path / name).is_file()), None)
    corpus, queries = (_part(path, part) for part in PARTS)
    return (
        None if qrels is None or corpus is None or queries is None else RetrievalFolder(path, (corpus, queries), qrels)
    )


def _part(folder: Path, part: str) -> Path | None:
    paths = (folder / f"{part}{suffix}" for suffix in ("", ".jsonl", ".npz"))
    return next((path for path in paths if path.exists()), None)


def read_qrels(path: Path) -> dict[str, dict[str, float]]:
    """Read judged pairs: grades by document, by query.

    Raises:
        DataError: the file cannot be read, or a row is of another form.
    """
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text), "excel-tab") if row]
        rows = [row[0].split() if len(row) == 1 else row for row in rows]
        judged: dict[str, dict[str, float]] = {}
        for number, row in enumerate(rows):
            if len(row) not in (3, 4):
                raise ValueError(f"a row has {len(row)} cells and needs 3, query, document and grade: {row}")
            if number == 0 and not row[-1].lstrip("-").replace(".", "", 1).isdecimal():
                continue  # header
            judged.setdefault(row[0], {})[row[-2]] = float(row[-1])
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"'{path}' holds no judged pairs: {str(error)[:200]}") from error
    return judged


def _labelled(raw: Any, where: str, judged: Mapping[str, Mapping[str, float]] | None) -> Any:
    """Return a raw feed whose labels are the ids of its samples, and the judged documents of queries.

    Raises:
        DataError: its samples have no ids.
    """
    names = raw.labels if isinstance(raw, LabelledFeed) else raw if isinstance(raw, Mapping) else {}
    key = next((name for name in IDS if name in names), None)
    if key is None:
        raise DataError(f"{where} has no ids of its samples: give each row \"_id\", or the .npz an array 'id'")
    values = names[key].load() if isinstance(names[key], StoredArray) else names[key]
    ids = [str(name) for name in np.asarray(values).reshape(-1)]
    labels: dict[str, Any] = {DOCUMENT: ids}
    if judged is not None:
        labels = {QUERY: ids, RELEVANT: [judged.get(name, {}) for name in ids]}
    if isinstance(raw, LabelledFeed):
        return LabelledFeed(raw.feed, labels)
    return {name: value for name, value in raw.items() if name != key}, labels
