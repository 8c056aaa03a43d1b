"""Options that are often written wrongly: one line that says what to write, and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.cli import main
from sbonnx.cli.create import questions
from sbonnx.errors import RecipeError, SbonnxError
from tests.support.models import model, residual

QUANTIZE = ("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx")

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "an observer of another tool": (
        (*QUANTIZE, "--observer", "entropy"),
        "--observer (A.OBSERVER.TYPE) must be",
    ),
    "its name here": ((*QUANTIZE, "--observer", "entropy"), "kl_histogram is what others call entropy"),
    "a width": ((*QUANTIZE, "--bits", "w5a9"), "for float), got a9"),
    "a key as typed": ((*QUANTIZE, "--set", "W.QUANTIZER.BIT=99"), "--set W.QUANTIZER.BIT must be 0 (float) or"),
    "an option as typed": ((*QUANTIZE, "--effort", "fst"), "--effort must be fast, default or best, got 'fst'"),
    "a pattern": ((*QUANTIZE, "--exclude", "qqq"), "--exclude (EXCLUDE[0]) matches no node of the model, got 'qqq'"),
    "an option of another tool": ((*QUANTIZE, "--nodes-to-exclude", "x"), "--nodes-to-exclude is --exclude here"),
    "one that is not needed": ((*QUANTIZE, "--use-external-data-format"), "is not needed: large weights"),
    "one that the verb lacks": (("lint", "m.onnx", "--nodes-to-exclude", "x"), "No such option: --nodes-to-exclude"),
    "a short path": ((*QUANTIZE, "--set", "W.BITS=4"), "Did you mean W.QUANTIZER.BIT?"),
    "memory without a unit": ((*QUANTIZE, "--memory", "10"), "is 10 bytes: write a unit, such as '10 MiB'"),
    "a version": ((*QUANTIZE, "--backend", "trt@9"), "write tensorrt@11, tensorrt@10 or tensorrt@8.6"),
    "two backends": (
        (*QUANTIZE, "--backend", "virtual", "--backend=tensorrt"),
        "--backend is given 2 times, virtual, tensorrt: one a run; sbonnx batch quantizes for several",
    ),
    "no data": (("quantize", "m.onnx", "-o", "q.onnx"), "--data is missing: give --data FILE or FOLDER (docs/data.md)"),
    "images for the metric alone": (
        ("quantize", "m.onnx", "-o", "q.onnx", "--eval", "coco", "--metric", "top1"),
        "need no labels and are not those of --eval 'coco': sbonnx quantize m.onnx --data FOLDER --output q.onnx",
    ),
    "a decoder": (
        ("quantize", "decoder"),
        "sbonnx llm quantize decoder -o DECODER/ quantizes its weights without data",
    ),
    "two widths": ((*QUANTIZE, "--bits", "w8a8", "--bits=w4a4"), "--bits is given 2 times, w8a8, w4a4: give it once"),
    "a file without a target": (
        ("lint", "m.onnx"),
        "--target is missing, and the file names none: give one of tensorrt",
    ),
    "a loss without a percent sign": ((*QUANTIZE, "--max-loss", "0.5"), "write 0.5% or 50%"),
    "two batches": (("bench", "m.onnx", "--batch", "2", "--split", "2"), "--batch and --split"),
    "a file of PyTorch": (("inspect", "m.pt"), "torch.onnx.export(model, (example_input,), 'model.onnx'"),
    "a command of another tool": (("optimize", "m.onnx"), "No such command 'optimize': it is sbonnx simplify here"),
    "channels last": (
        ("quantize", "m.onnx", "--data", "nhwc.npz", "-o", "q.onnx"),
        "it looks like channels last (NHWC): save np.moveaxis(x, -1, 1)",
    ),
    "a package that is missing": (
        ("quantize", "m.onnx", "--data", "feeds.py:feeds", "-o", "q.onnx"),
        "'feeds.py' cannot be loaded: ModuleNotFoundError: No module named 'skimage': pip install scikit-image",
    ),
    "a metric of another tool": (
        (*QUANTIZE, "--eval", "d.npz", "--metric", "accuracy"),
        "there is no metric 'accuracy': did you mean top1?",
    ),
    "an evaluation without verification": (
        (*QUANTIZE, "--eval", "d.npz", "--metric", "top1", "--no-verify"),
        "an evaluation is part of the verification: drop --no-verify (verify=False)",
    ),
    "an option that is gone": ((*QUANTIZE, "--workers", "2"), "No such option: --workers"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    np.savez(tmp_path / "nhwc.npz", x=np.zeros((8, 8, 8, 3), np.float32))
    (tmp_path / "feeds.py").write_text("raise ModuleNotFoundError(\"No module named 'skimage'\", name='skimage')\n")
    (tmp_path / "coco" / "val").mkdir(parents=True)
    (tmp_path / "coco" / "val" / "1.jpg").touch()
    (tmp_path / "decoder").mkdir()
    (tmp_path / "decoder" / "genai_config.json").write_text("{}")
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words, text = WRONG[case]
    assert main([*words]) == 2
    assert text in " ".join(capfd.readouterr().err.split())


def test_the_same_backend_twice(place: Path) -> None:
    assert main([*QUANTIZE, "--backend", "virtual", "--backend", "virtual", "-q"]) in (0, 1)


def test_a_report_is_one_line_and_settings_have_names(place: Path) -> None:
    report = sbonnx.quantize("m.onnx", "d.npz", backend="virtual", verify=False)
    assert repr(report) == str(report) == f"Report(m.onnx for virtual: {report.verdict.text})"
    assert sbonnx.quantize("m.onnx", "d.npz", "q.onnx", backend="virtual", verify=False).output == "q.onnx"
    with pytest.raises(RecipeError, match="Did you mean virtual"):  # and the type checker refuses it
        sbonnx.quantize("m.onnx", "d.npz", backend="virtul")  # type: ignore[arg-type]
    quantize: Any = sbonnx.quantize
    with pytest.raises(
        TypeError, match="4 arguments by position, where model, data and output may be; name the others: sbonnx"
    ):
        quantize("m.onnx", "d.npz", "q.onnx", "virtual")


LINE = "agraph (bfloat16[N,4] x) => (bfloat16[N,4] y) { y = Relu (x) }"


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_files_of_bfloat16(kind: str, place: Path) -> None:
    """NumPy writes bfloat16 as V2; float32 is rounded. The error of a runtime without kernels says what to do."""
    from sbonnx import graph as graphs
    from sbonnx.calib.data import dataset as datasets

    values = np.random.default_rng(0).standard_normal((6, 4)).astype(ml_dtypes.bfloat16)
    np.savez(place / "b.npz", x=values.astype(kind) if kind == "float32" else values)
    (feed,) = datasets.read(place / "b.npz", graphs.load(model(LINE, opset=18)))
    assert feed["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(feed["x"].astype(np.float32), values.astype(np.float32))
    with pytest.raises(SbonnxError, match="export the model as float32"):
        sbonnx.quantize(model(LINE, opset=18), place / "b.npz")


def test_lint_shows_kinds(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Findings that differ in names alone are one line, with their number; -v lists all."""
    assert main([*QUANTIZE, "-q", "--bits", "w8a8"]) in (0, 1)
    found = []
    for flags in ([], ["-v"]):
        capfd.readouterr()
        main(["lint", "q.onnx", "--target", "tensorrt@10", *flags])
        found.append(capfd.readouterr().out)
    assert "times" in found[0] and "first tensor" in found[0] and "times" not in found[1]
    assert len(found[0].splitlines()) < len(found[1].splitlines())
    assert found[0].splitlines()[0] == found[1].splitlines()[0], "the counts are those of all"


def test_questions_result_in_a_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong answers are asked again; the command that is shown is the one that is returned."""
    answers = iter(["no.onnx", "m.onnx", "no", "d.npz", "", "trt@9", "trt@10", "", "m.onnx", "", "", "n"])
    words = questions.ask(lambda question: next(answers))
    shown = capsys.readouterr().out
    assert words == ["quantize", "m.onnx", "--data", "d.npz", "--backend", "trt@10", "-o", "m.int8.onnx"]
    assert "there is no file 'no.onnx'" in shown and "there is no file or folder 'no'" in shown
    assert "tensorrt has no version '9'" in shown and f"sbonnx {' '.join(words)}\n" in shown
    assert questions.ask(lambda question: next(answers)) is None
    assert "sbonnx quantize m.onnx --mode weight_only -o m.int4.onnx" in capsys.readouterr().out
    assert not questions.can_ask(), "the tests are no terminal"
