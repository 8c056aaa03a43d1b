"""Retrieval with embeddings: nDCG, recall, reciprocal rank, and the similarity of judged pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import only_output, shown
from sbonnx.metrics.classification import Correlation
from sbonnx.spec import Array

DOCUMENT: Final = "document"
"""Label of feeds of documents: the id of each sample."""

QUERY: Final = "query"
"""Label of feeds of queries: the id of each sample."""

RELEVANT: Final = "relevant"
"""Label of feeds of queries: for each sample a mapping of document ids to grades; above 0: relevant."""

SENTENCE: Final = "sentence_embedding"
"""Output of sentence-transformers' exports that is taken if the model has several."""

DIGITS: Final = 12
"""Decimals of a similarity: those of equal documents differ by rounding."""

Judge = Callable[[Array, Array, int | None], float]
"""Value of a query from the grades of the ranked documents, the grades of all judged ones, and the cutoff."""


def ndcg(ranked: Array, judged: Array, cutoff: int | None) -> float:
    """Compute the discounted cumulative gain over that of the best order (trec_eval: `ndcg_cut`, linear gains)."""
    best = np.sort(np.maximum(judged, 0))[::-1][:cutoff]
    gains = np.maximum(ranked, 0)[:cutoff]
    ideal = float((best / np.log2(np.arange(len(best)) + 2)).sum())
    return float((gains / np.log2(np.arange(len(gains)) + 2)).sum()) / ideal if ideal else 0.0


def recall(ranked: Array, judged: Array, cutoff: int | None) -> float:
    """Compute the share of relevant documents among the first `cutoff` (trec_eval: `recall`)."""
    total = int((judged > 0).sum())
    return int((ranked[:cutoff] > 0).sum()) / total if total else 0.0


def reciprocal_rank(ranked: Array, judged: Array, cutoff: int | None) -> float:
    """Compute one over the rank of the first relevant document; 0 without one (trec_eval: `recip_rank`)."""
    hits = np.flatnonzero(ranked[:cutoff] > 0)
    return 1 / (int(hits[0]) + 1) if len(hits) else 0.0


@dataclass
class _Embeddings:
    """Unit vectors of documents and queries, by id, and the grades of judged pairs."""

    documents: dict[str, Array] = field(default_factory=dict)
    queries: dict[str, Array] = field(default_factory=dict)
    grades: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, rows: Array, labels: Mapping[str, Any], metric: str) -> None:
        """Add the embeddings of one feed, shape (samples, size).

        Raises:
            DataError: the labels say neither or do not fit; an id occurs twice.
        """
        roles = [role for role in (DOCUMENT, QUERY) if role in labels]
        if len(roles) != 1:
            names = ", ".join(map(repr, labels)) or "none"
            raise DataError(
                f"{metric} takes a folder with corpus, queries and qrels, or feeds with the labels '{DOCUMENT}', or "
                f"'{QUERY}' and '{RELEVANT}', and the labels are {names}"
            )
        ids = [str(name) for name in labels[roles[0]]]
        vectors = self.documents if roles == [DOCUMENT] else self.queries
        if len(ids) != len(rows):
            raise DataError(f"{metric}: the data has {len(ids)} ids and the output {len(rows)} samples")
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        for name, row in zip(ids, np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths != 0), strict=True):
            if name in vectors:
                raise DataError(f"{metric}: there are two {'documents' if roles == [DOCUMENT] else 'queries'} '{name}'")
            vectors[name] = row
        if roles == [QUERY]:
            for name, judged in zip(ids, _judged(labels, len(ids), metric), strict=True):
                if judged:
                    self.grades[name] = {str(document): float(grade) for document, grade in judged.items()}


def _judged(labels: Mapping[str, Any], samples: int, metric: str) -> Sequence[Mapping[Any, Any]]:
    judged = labels.get(RELEVANT, ())
    if len(judged) != samples or not all(isinstance(row, Mapping) for row in judged):
        raise DataError(f"{metric} takes '{RELEVANT}' as a list of mappings of document ids to grades, one for a query")
    rows: Sequence[Mapping[Any, Any]] = judged
    return rows


def _rows(outputs: Mapping[str, Array], wanted: str | None, metric: str) -> Array:
    """Return embeddings, shape (samples, size), float64."""
    rows = only_output(outputs, SENTENCE if wanted is None and SENTENCE in outputs else wanted, metric)
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise DataError(
            f"{metric} takes embeddings (samples, size) and the output is {shown(rows)}: choose another output, or "
            "convert it with --decode script.py:function"
        )
    return rows.astype(np.float64)


@dataclass
class Retrieval:
    """Mean over queries of a value of the ranking of all documents by cosine similarity.

    Of equal similarities the document with the larger id comes first, as in trec_eval. Queries without judged documents
    do not count; judged documents that are not in the corpus are not found.

    Attributes:
        judge: value of one query.
        name: for messages.
        cutoff: number of ranked documents that count; None: all.
        output: name of the output.
    """

    judge: Judge
    name: str
    cutoff: int | None = None
    output: str | None = None
    labels: str | None = None
    _embeddings: _Embeddings = field(default_factory=_Embeddings)
    _values: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of queries with judged documents."""
        return len(self._embeddings.grades)

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        asked = self.name if self.cutoff is None else f"{self.name}@{self.cutoff}"
        self._embeddings.add(_rows(outputs, self.output, asked), labels, self.name)
        self._values.clear()

    def value(self, weights: Array | None = None) -> float:
        if not self._values:
            self._values.extend(self._by_query())
        return float(np.average(self._values, weights=weights)) if self._values else float("nan")

    def _by_query(self) -> list[float]:
        store = self._embeddings
        if not store.documents and store.grades:
            raise DataError(f"{self.name}: the data has queries and no documents: are they left out by --samples?")
        names = sorted(store.documents, reverse=True)
        corpus = np.stack([store.documents[name] for name in names]) if names else np.zeros((0, 0))
        values = []
        for query, grades in store.grades.items():
            scores = np.round(corpus @ store.queries[query], DIGITS)
            if np.isnan(scores).any():
                values.append(float("nan"))
                continue
            order = np.argsort(-scores, kind="stable")[: self.cutoff]
            ranked = np.array([grades.get(names[place], 0.0) for place in order])
            values.append(self.judge(ranked, np.array(list(grades.values())), self.cutoff))
        return values


@dataclass
class Similarity:
    """Spearman's correlation of the cosine similarity of judged pairs with their grades (MTEB: STS).

    Attributes:
        output: name of the output.
    """

    output: str | None = None
    labels: str | None = None
    _embeddings: _Embeddings = field(default_factory=_Embeddings)
    _ranked: list[Correlation] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of pairs of a query and a document that were both fed."""
        return self._correlation().count

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        self._embeddings.add(_rows(outputs, self.output, "sts"), labels, "sts")
        self._ranked.clear()

    def value(self, weights: Array | None = None) -> float:
        return self._correlation().value(weights)

    def _correlation(self) -> Correlation:
        if not self._ranked:
            store, metric = self._embeddings, Correlation(ranks=True)
            pairs = [
                (store.queries[query] @ store.documents[name], grade)
                for query, grades in store.grades.items()
                for name, grade in grades.items()
                if name in store.documents
            ]
            if pairs:
                cosines, grades = np.array(pairs).T
                metric.add({"cosine": cosines}, {"label": grades})
            self._ranked.append(metric)
        return self._ranked[0]


def mean_pooled(outputs: Mapping[str, Any], wanted: str | None, mask: Array | None) -> dict[str, Any]:
    """Return outputs with token embeddings (samples, tokens, size) averaged over the tokens that the mask has.

    Args:
        wanted: name of the output; None: all of three axes, unless there is an output `SENTENCE`.
        mask: attention mask, shape (samples, tokens); None, or of another shape: all tokens count.
    """
    pooled = dict(outputs)
    if wanted is None and SENTENCE in pooled:
        return pooled
    for name, value in outputs.items():
        array = np.asarray(value)
        if array.ndim == 3 and array.dtype.kind == "f" and wanted in (None, name):
            whole = mask is None or mask.shape != array.shape[:2]
            weights = np.ones(array.shape[:2]) if whole else np.asarray(mask, np.float64)
            sums = np.einsum("ntd,nt->nd", array.astype(np.float64), weights)
            pooled[name] = sums / np.maximum(weights.sum(1, keepdims=True), 1e-9)
    return pooled
