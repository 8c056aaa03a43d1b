"""Metrics of the real models equal those of the pack's own `eval.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.spec import Array
from sbonnx.verify.labelled import EvaluationData, evaluate

pytestmark = pytest.mark.slow

Pairs = Iterator[tuple[dict[str, Array], dict[str, Array]]]


def code_of(pack: Path, name: str = "pack_eval") -> Any:
    spec = importlib.util.spec_from_file_location(name, pack / "eval.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cifar_resnet20", "mobilenetv2_tin200"])
def test_accuracy(name: str, pack: Path) -> None:
    code = code_of(pack)
    entry = code.entry(name)
    for key, relative in entry["eval_files"].items():
        stored = np.load(pack / relative)
        images = code._prep_images(code._images(stored), entry["preprocess"])
        (only,) = (spec["name"] for spec in entry["inputs"])
        metric = "top5" if f"{key}:top5" in entry["float_metric"] else "top1"
        data = EvaluationData([({only: images}, stored["Y"])], metric, split=16)
        found = evaluate({name: pack / entry["file"]}, data)
        assert round(found.rows[0].metric.value, 5) == entry["float_metric"][f"{key}:{metric}"]
        assert found.samples == entry["float_metric"][f"{key}:n"]


def test_detection(tmp_path: Path, pack: Path) -> None:
    code = code_of(pack)
    entry = code.entry("fastestdet")
    stored = np.load(pack / entry["eval_file"])
    (tmp_path / "own.py").write_text(
        "import sys\ndef decode(outputs):\n    pack = sys.modules['pack_eval']\n"
        "    floor = pack.entry('fastestdet')['score_floor']\n"
        "    return pack._decode_fastestdet(list(outputs.values()), floor)[None]\n"
    )

    def pairs() -> Pairs:
        for number, image in enumerate(code._images(stored)):
            rows = stored["boxes"][stored["boff"][number] : stored["boff"][number + 1]]
            corners = np.concatenate([rows[:, 1:3] - rows[:, 3:5] / 2, rows[:, 1:3] + rows[:, 3:5] / 2], 1)
            feed = {entry["inputs"][0]["name"]: code._prep_images([image], entry["preprocess"])}
            yield feed, {"boxes": corners, "classes": rows[:, 0]}

    data = EvaluationData(list(pairs()), "map50", decode=f"{tmp_path / 'own.py'}:decode")
    found = evaluate({"fastestdet": pack / entry["file"]}, data)
    assert round(found.rows[0].metric.value, 5) == entry["float_metric"]["map50"]


def test_similarity_of_sentences(tmp_path: Path, pack: Path) -> None:
    """Rows of the first sentences, then those of the second, in each feed."""
    code = code_of(pack)
    entry = code.entry("minilm_l6")
    stored = {name: rows[:60] for name, rows in np.load(pack / entry["eval_file"]).items()}
    expected = code.evaluate("minilm_l6", str(pack / entry["file"]), limit=60)["spearman"]
    (tmp_path / "own.py").write_text(
        "def decode(outputs):\n    rows = outputs['sentence_embedding']\n    half = len(rows) // 2\n"
        "    return (rows[:half] * rows[half:]).sum(1)\n"
    )

    def pairs() -> Pairs:
        for start in range(0, len(stored["score"]), 20):
            part = slice(start, start + 20)
            ids, mask = (np.concatenate([stored[a][part], stored[b][part]]) for a, b in (("a", "b"), ("am", "bm")))
            ids, mask = ids.astype(np.int64), mask.astype(np.int64)
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            yield feed, {"score": stored["score"][part]}

    def judged() -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
        for number, (feed, labels) in enumerate(pairs()):
            half, names = len(labels["score"]), [f"{number}.{place}" for place in range(len(labels["score"]))]
            relevant = [{name: score} for name, score in zip(names, labels["score"], strict=True)]
            yield {key: rows[:half] for key, rows in feed.items()}, {"query": names, "relevant": relevant}
            yield {key: rows[half:] for key, rows in feed.items()}, {"document": names}

    data = EvaluationData(list(pairs()), "spearman", labels="score", decode=f"{tmp_path / 'own.py'}:decode")
    found = evaluate({"minilm_l6": pack / entry["file"]}, data)
    assert found.rows[0].metric.value == pytest.approx(expected, abs=1e-5)
    similarity = evaluate({"minilm_l6": pack / entry["file"]}, EvaluationData(list(judged()), "sts"))
    assert similarity.rows[0].metric.value == pytest.approx(expected, abs=1e-5)


def test_recognition_of_text(pack: Path) -> None:
    """The character error rate of lines of text, whose alphabet is in the metadata of the model."""
    zoo = pack.parent / "zoo"
    if not zoo.is_dir():
        pytest.skip("the models of packages are not there")
    code = code_of(zoo, "zoo_eval")
    feeds, texts = code.feeds("ppocr_rec")[:12], code.meta("ppocr_rec")["text"][:12]
    pairs = [(feed, {"text": [text]}) for feed, text in zip(feeds, texts, strict=True)]
    file = zoo / "models" / "ppocr_rec.onnx"
    found = evaluate({"ppocr": file}, EvaluationData(pairs, "cer"))
    names, outputs = code.outputs(str(file), feeds)
    stripped = [text.strip() for text in texts]
    expected = code.t_ppocr_rec(outputs, outputs, {"text": stripped}, names)
    assert found.rows[0].metric.value == pytest.approx(expected["float_cer_truth"], abs=1e-12)
    assert 0 < found.rows[0].metric.value < 0.2
