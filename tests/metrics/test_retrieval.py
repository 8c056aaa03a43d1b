"""Rankings are judged as by trec_eval and scikit-learn; folders of retrieval data; pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.calib.data import DataPath
from sbonnx.cli import main
from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics import TaskMetric, task_metric
from sbonnx.metrics.retrieval import Retrieval, mean_pooled
from sbonnx.verify.labelled import EvaluationData, evaluate
from tests.support.models import model

REFERENCE: dict[str, Any] = json.loads(Path(__file__).with_name("reference_values.json").read_text("utf-8"))


def filled(name: str, case: dict[str, Any]) -> TaskMetric:
    """The metric of a case: query q is the unit vector q of the queries' space, rotated so that cosines are scores.

    A document is (its scores of all queries, the rest of length 1); a query is a unit vector of the first axes.
    """
    queries = list(case["scores"])
    documents = list(case["scores"][queries[0]])
    rows = np.array([[case["scores"][query][name] for query in queries] for name in documents]) / 10
    rest = np.sqrt(1 - (rows**2).sum(1, keepdims=True))
    metric = task_metric(name).make()
    for part in (slice(0, 3), slice(3, None)):
        metric.add({"y": np.concatenate([rows, rest], 1)[part]}, {"document": documents[part]})
    eye = np.eye(len(queries), len(queries) + 1) * 3
    metric.add({"y": eye}, {"query": queries, "relevant": [case["relevant"][query] for query in queries]})
    return metric


@pytest.mark.parametrize("name", ["ndcg@10", "ndcg@3", "recall@10", "mrr"])
def test_rankings_equal_trec_eval(name: str) -> None:
    """Also with equal similarities and judged documents that are not in the corpus."""
    for case in REFERENCE["rankings"]:
        metric = filled(name, case)
        assert metric.value() == pytest.approx(case[name], abs=1e-12)
        weights = np.zeros(metric.count)
        weights[0] = 2
        query = next(iter(case["scores"]))
        alone = {"scores": {query: case["scores"][query]}, "relevant": case["relevant"]}
        assert metric.value(weights) == pytest.approx(filled(name, alone).value())


def test_gains_equal_scikit_learn() -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    names = [f"{number:02}" for number in range(30)]
    scores, grades = rng.random((4, 30)), rng.integers(0, 4, (4, 30))
    case = {
        "scores": {f"q{place}": dict(zip(names, row, strict=True)) for place, row in enumerate(scores)},
        "relevant": {f"q{place}": dict(zip(names, row.tolist(), strict=True)) for place, row in enumerate(grades)},
    }
    assert filled("ndcg@5", case).value() == pytest.approx(sk.ndcg_score(grades, scores, k=5))
    assert filled("ndcg", case).value() == pytest.approx(sk.ndcg_score(grades, scores))
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert filled("sts", case).value() == pytest.approx(stats.spearmanr(scores.ravel(), grades.ravel())[0])


def test_pooling_leaves_padding_out() -> None:
    rows = np.array([[[1.0, 0], [3, 2], [9, 9]]])
    pooled = mean_pooled({"h": rows}, None, np.array([[1, 1, 0]]))["h"]
    assert pooled.tolist() == [[2, 1]]
    assert mean_pooled({"h": rows, "sentence_embedding": rows}, None, None)["h"] is rows


def test_a_folder_of_corpus_queries_and_judged_pairs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(model("agraph (float[N, 2] x) => (float[N, 2] y) { y = Identity(x) }"), tmp_path / "m.onnx")
    data = tmp_path / "data"
    (data / "qrels").mkdir(parents=True)
    corpus = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
    np.savez(data / "corpus.npz", x=corpus, id=np.array(["a", "b", "c"]))
    np.savez(data / "queries.npz", x=corpus[:2] + np.float32(0.1), id=np.array([1, 2]))
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\ta\t1\n2\ta\t1\n2\tnone\t1\n")
    values = {}
    for metric in ("recall@1", "mrr@10", "ndcg@10"):
        assert main(["eval", str(tmp_path / "m.onnx"), "--data", str(data), "--metric", metric, "--json"]) == 0
        values[metric] = json.loads(capfd.readouterr().out)["rows"][0]["metric"]["value"]
    gain = 1 / np.log2(3)
    assert values == {"recall@1": 0.5, "mrr@10": 0.75, "ndcg@10": pytest.approx((1 + gain / (1 + gain)) / 2)}
    with pytest.raises(DataError, match=r"choose one, as in recall@1:a"):
        Retrieval(lambda *values: 0.0, "recall", 1).add({"a": corpus, "b": corpus}, {"document": ["a", "b", "c"]})
    np.savez(data / "queries.npz", x=corpus[:2])
    with pytest.raises(DataError, match=r"queries\.npz' has no ids of its samples"):
        evaluate({"m": tmp_path / "m.onnx"}, EvaluationData(data, "mrr"))
    (data / "qrels" / "test.tsv").write_text("1\ta\n")
    with pytest.raises(DataError, match=r"test\.tsv' holds no judged pairs: a row has 2 cells"):
        evaluate({"m": tmp_path / "m.onnx"}, EvaluationData(data, "mrr"))


def test_texts_whose_tokens_are_averaged(tmp_path: Path) -> None:
    """A query of one word finds the document with its title, behind padding."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {word: number for number, word in enumerate(("[PAD]", "sun", "moon", "sea"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = (
        "agraph (int64[2, 4] input_ids, int64[2, 4] attention_mask) => (float[2, 4, 4] h) { h = Gather(w, input_ids) }"
    )
    weights = np.eye(4, dtype=np.float32)
    weights[0] = -9
    onnx.save(model(text, w=weights), tmp_path / "m.onnx")
    data = tmp_path / "beir"
    data.mkdir()
    rows = [{"_id": "d1", "title": "sun", "text": "sea"}, {"_id": "d2", "title": "", "text": "moon"}]
    (data / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"_id": "q1", "text": "sun"}, {"_id": "q2", "text": "moon moon"}]
    (data / "queries.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (data / "qrels.tsv").write_text("q1\td1\t1\nq2\td2\t1\n")
    source = DataPath(data, tmp_path / "tokenizer.json")
    found = evaluate({"m": tmp_path / "m.onnx"}, EvaluationData(source, "mrr"))
    assert (found.rows[0].metric.value, found.samples) == (1.0, 2)


def test_mistakes() -> None:
    with pytest.raises(RecipeError, match=r"'top1@5': @ and a number .* ndcg@10, recall@10, mrr@10"):
        task_metric("top1@5")
    with pytest.raises(DataError, match="takes a folder with corpus, queries and qrels"):
        task_metric("ndcg@10").make().add({"y": np.ones((1, 2))}, {"label": [1]})
    metric = task_metric("mrr").make()
    metric.add({"y": np.ones((1, 2))}, {"document": ["a"]})
    with pytest.raises(DataError, match="two documents 'a'"):
        metric.add({"y": np.ones((1, 2))}, {"document": ["a"]})
