"""Metrics of models on labelled data: values of a plain onnxruntime loop, intervals, and errors that name the cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.errors import DataError
from sbonnx.verify import intervals
from sbonnx.verify.labelled import EvaluationData, evaluate
from tests.support.models import model

NETWORK, EVAL = digits().model, digits().eval


def test_equals_a_plain_loop_and_compares_side_by_side() -> None:
    data = np.load(EVAL)
    (name,) = (key for key in data.files if key != "label")
    session = ort.InferenceSession(str(NETWORK))
    scores = session.run(None, {session.get_inputs()[0].name: data[name]})[0]
    expected = float((scores.argmax(1) == data["label"]).mean())
    found = evaluate({"a": NETWORK, "b": NETWORK}, EvaluationData(EVAL, "top1", split=50))
    first, second = found.rows
    assert first.metric.value == expected == second.metric.value
    assert found.samples == len(data["label"])
    assert (first.metric.low, first.metric.high) == intervals.wilson(round(expected * found.samples), found.samples)
    assert first.difference is None and second.difference is not None
    assert (second.difference.low, second.difference.high) == intervals.paired(0, 0, found.samples), "paired"
    assert found.chance == 0.1
    assert replace(found, max_loss=0.0).problems() == ()
    batches = ({name: data[name][i : i + 50], "label": data["label"][i : i + 50]} for i in range(0, 450, 50))
    assert evaluate({"a": NETWORK, "b": NETWORK}, EvaluationData(batches, "top1")) == found, "of a generator"


@pytest.mark.slow
def test_the_interval_of_the_bootstrap_covers_the_mean() -> None:
    """About 57 of 60 intervals of 95 % contain the mean of a normal distribution."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        values = rng.standard_normal(50)
        draws = intervals.resampled([lambda counts, values=values: float(np.average(values, weights=counts))], 50)  # type: ignore[misc]
        low, high = intervals.percentile(draws[0])
        hits += low <= 0 <= high
    assert 51 <= hits <= 60
    assert intervals.percentile(np.full(10, np.nan)) == intervals.UNKNOWN


def test_errors_name_model_and_feed(tmp_path: Path) -> None:
    data = np.load(EVAL)
    (name,) = (key for key in data.files if key != "label")
    np.savez(tmp_path / "no.npz", **{name: data[name]})
    with pytest.raises(DataError, match=r"digits: top1 needs labels .*no\.npz"):
        evaluate({"digits": NETWORK}, EvaluationData(tmp_path / "no.npz", "top1"))
    np.savez(tmp_path / "far.npz", **{name: data[name], "Y": data["label"] + 1})
    with pytest.raises(DataError, match="label 10 and the output has the classes 0 to 9: are the classes counted"):
        evaluate({"digits": NETWORK}, EvaluationData(tmp_path / "far.npz", "top1"))


def test_decoders(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def first(outputs):\n    return next(iter(outputs.values()))\ndef broken(outputs):\n    return outputs['no']\n"
    )
    plain = EvaluationData(EVAL, "f1")
    decoded = EvaluationData(EVAL, "f1", decode=f"{tmp_path / 'own.py'}:first")
    models = {"m": NETWORK}
    assert evaluate(models, decoded) == evaluate(models, plain)
    with pytest.raises(DataError, match=r"--decode failed: KeyError: 'no' .*digits_eval"):
        evaluate(models, EvaluationData(EVAL, "f1", decode=f"{tmp_path / 'own.py'}:broken"))


def ctc(tmp_path: Path, **metadata: str) -> Path:
    """A file of a model that returns its input as scores (N, steps, 3)."""
    proto = model("agraph (float[N, T, 3] x) => (float[N, T, 3] logits) { logits = Identity(x) }")
    onnx.helper.set_model_props(proto, metadata)
    onnx.save(proto, tmp_path / "ctc.onnx")
    return tmp_path / "ctc.onnx"


def test_texts_next_to_arrays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Scores of "ab" and "b" in .npz files; the second reference is "bb", which is one error in three words."""
    file, data = ctc(tmp_path), tmp_path / "data"
    data.mkdir()
    for number, path in enumerate(([1, 1, 0, 2], [2])):
        np.savez(data / f"{number}.npz", x=np.eye(3, dtype=np.float32)[path][None])
    (data / "labels.tsv").write_text("file\tduration\ttranscript\n0.npz\t1.5\tab\n1.npz\t0.5\tbb\n")
    (tmp_path / "tokens.txt").write_text("<blk> 0\na 1\nb 2\n")
    command = ["eval", str(file), "--data", str(data), "--vocabulary", str(tmp_path / "tokens.txt"), "--json"]
    values = {}
    for metric in ("wer", "cer", "exact"):
        assert main([*command, "--metric", metric]) == 0
        values[metric] = json.loads(capfd.readouterr().out)["rows"][0]["metric"]["value"]
    assert values == {"wer": 0.5, "cer": 0.25, "exact": 0.5}
    assert main(["eval", str(file), "--data", str(data), "--metric", "wer"]) == 2
    assert "wer needs the tokens of the output: give --vocabulary" in capfd.readouterr().err
    (data / "labels.tsv").write_text("9.npz\tab\n")
    with pytest.raises(DataError, match=r"labels\.tsv' has labels of none of the files, such as '0\.npz': it names"):
        evaluate({"m": file}, EvaluationData(data, "wer"))


def test_vocabulary_of_the_metadata(tmp_path: Path) -> None:
    """PaddleOCR stores its characters: the blank comes before them, a space after them."""
    file = ctc(tmp_path, character="a")
    pairs = [({"x": np.eye(3, dtype=np.float32)[[1, 2, 1]][None]}, {"text": ["a a"]})]
    assert evaluate({"m": file}, EvaluationData(pairs, "cer")).rows[0].metric.value == 0
