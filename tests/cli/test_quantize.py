"""``sbonnx quantize`` and ``compare``: files and messages, checked against onnxruntime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.assets import digits
from sbonnx.cli import main, options
from sbonnx.cli.options import Arguments
from sbonnx.recipe import load
from sbonnx.spec import Array
from tests.support.models import model, run

X = np.random.default_rng(3).standard_normal((16, 3, 8, 8)).astype(np.float32)

TEXT = """
agraph (float[N,3,8,8] x) => (float[N,16] y) {
    c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)
    r = Relu(c)
    g = GlobalAveragePool(r)
    f = Flatten(g)
    y = Gemm <transB = 1> (f, v, b)
}"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and its data; the working directory. So small a network may be slower in integers: nothing advises so."""
    monkeypatch.setattr("sbonnx.search.advice.ALTERNATIVES", ())
    monkeypatch.setattr("sbonnx.search.advice.faster", lambda state, before: iter(()))
    onnx.save(model(TEXT, w=(16, 3, 3, 3), v=(16, 16), b=16), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=X)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs(path: str) -> Array:
    return run(path, {"x": X}, level="all")["y"]


def sqnr(reference: Array, value: Array) -> float:
    """Computed independently of `sbonnx.metrics`."""
    return float(10 * np.log10((reference**2).sum() / ((reference - value) ** 2).sum()))


COMMAND = ("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx")


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_a_backend(backend: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--backend", backend, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["backend"] == backend
    assert report["ok"] is True
    measured = report["metrics"]["outputs"][0]
    assert measured["sqnr_db"] == pytest.approx(sqnr(outputs("m.onnx"), outputs("q.onnx")), rel=1e-3)
    assert measured["sqnr_db"] > 25
    assert "QuantizeLinear" in {node.op_type for node in onnx.load("q.onnx").graph.node}


def test_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    out = capsys.readouterr().out
    assert out.startswith("m.onnx -> q.onnx (onnxruntime, w8a8)\n")
    assert "accuracy kept on the calibration data: outputs within" in out and len(out.splitlines()) <= 12
    assert main([*COMMAND, "--force", "--verbose"]) == 0
    out = capsys.readouterr().out
    for word in ("m.onnx for onnxruntime", "calibrated on", "16 samples", "SQNR", "worst layers"):
        assert word in out
    assert main([*COMMAND, "--force", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_recipe_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits, single keys and splitting reach the pipeline."""
    flags = ["--backend", "virtual", "--bits", "w4a8", "--set", "EXCLUDE=[op:Gemm]", "--split", "4", "--samples", "2"]
    assert main([*COMMAND, *flags, "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["W"]["QUANTIZER"]["BIT"] == 4
    assert report["settings"]["DEVICE"] == "cpu"
    assert report["counts"]["samples"] == 8
    assert report["counts"]["weights"] == 1
    assert any("EXCLUDE" in refusal["why"] for refusal in report["refusals"])
    assert main(["inspect", "q.onnx", "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["qdq"]
    kinds = {(pair["type"].removesuffix(" sym"), pair["of"]) for pair in pairs}  # a zero point may fall on the centre
    assert kinds == {("int4 axis 0", "constants"), ("uint8", "activations")}


def test_calibration_options(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--memory", "1 MiB", "--granularity", "budget", "--set", "CALIBRATION.PICK=random"]
    assert main([*COMMAND, *flags, "--split", "4", "--samples", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["settings"]["CALIBRATION"]
    assert (found["MEMORY"], found["GRANULARITY"], found["PICK"]) == ("1 MiB", "budget", "random")
    assert report["counts"]["samples"] == 12


def test_options_become_overrides() -> None:
    """Whatever characters a path or a name contains. What is not given overrides nothing."""
    given = Arguments(
        {
            options.CACHE: Path('a: "b" #c'),
            options.ASYM: True,
            options.BITS: None,
            options.REQUANTIZE: False,
            options.FEEDBACK: ["stateN=state", "h.out=h=in"],
            options.MEMORY: "1 GiB",
            options.NO_KEEP_IO: True,
            options.OUTPUT: Path("q.onnx"),
            options.SET: ["CALIBRATION.SEED=1"],
        }
    )
    recipe = load(None, overrides=given.overrides())
    found = recipe.calibration
    assert (found.cache, found.asym.enable, found.seed) == ('a: "b" #c', True, 1)
    assert (found.feedback, found.memory, recipe.keep_io) == ({"stateN": "state", "h.out": "h=in"}, "1 GiB", False)
    assert given.overrides(without=[*given.values][:-1]) == ["CALIBRATION.SEED=1"]
    assert Arguments({options.FEEDBACK: [], options.SET: None}).overrides() == []


@pytest.mark.parametrize(
    ("feedback", "says"),
    [
        (["state"], "--feedback is OUT=IN, an output and the input that takes it, got 'state'"),
        (["=x"], "--feedback is OUT=IN"),
        (["y=x", "y=z"], "--feedback maps output 'y' to two inputs, 'x' and 'z'"),
        (["g=x"], "CALIBRATION.FEEDBACK: the model has no output 'g': there are 'y'"),
        (["y=x"], "CALIBRATION.FEEDBACK: input 'x' wants float32 (N, 3, 8, 8) and output 'y' is float32 (N, 16)"),
    ],
)
def test_invalid_feedback(feedback: list[str], says: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for pair in feedback for flag in ("--feedback", pair)]
    assert main([*COMMAND, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err and len(err.splitlines()) == 1
    assert not (place / "q.onnx").exists()


def test_feedback_from_the_command_line(place: Path) -> None:
    """A running sum: the range of the state is that of the sums."""
    text = (
        "agraph (float[N,3] x, float[N,3] h) => (float[N,3] s, float[N,2] y) {\n s = Add (x, h)\n y = MatMul (s, w)\n}"
    )
    onnx.save(model(text, w=(3, 2)), str(place / "m.onnx"))
    np.savez(place / "d.npz", x=np.ones((20, 3), np.float32))
    assert main([*COMMAND, "--split", "1", "--feedback", "s=h", "--set", "observer=minmax", "--quiet"]) == 0
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("q.onnx").graph.initializer}
    scales = [held[node.input[1]] for node in onnx.load("q.onnx").graph.node if node.op_type == "QuantizeLinear"]
    assert max(float(scale) for scale in scales) == pytest.approx(20 / 255, rel=1e-6)


def test_json_progress(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--split", "2", "--json-progress", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    last = json.loads(err.splitlines()[-1])
    assert (last["stage"], last["done"], last["total"]) == ("rounding by input activations", 8, 8)
    assert last["memory_bytes"] is None or last["memory_bytes"] > 10_000_000


def test_calibration_cache_of_tensorrt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """absmax / 127 of the input, as big-endian float32 in hexadecimal."""
    assert main([*COMMAND, "--trt-cache", "m.cache", "--set", "observer=minmax", "--quiet"]) == 0
    lines = dict(line.split(": ") for line in (place / "m.cache").read_text().splitlines()[1:])
    scale = np.frombuffer(bytes.fromhex(lines["x"]), ">f4")[0]
    assert scale == pytest.approx(float(np.abs(X).max()) / 127, rel=1e-6)
    assert main([*COMMAND[:-1], "other.onnx", "--trt-cache", "m.cache"]) == 2
    assert "m.cache" in capsys.readouterr().err
    assert not (place / "other.onnx").exists()


@pytest.mark.slow
def test_a_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "r.yaml").write_text("BACKEND: tensorrt\nW: {QSCHEME: per-tensor-symmetric}\n")
    assert main([*COMMAND, "--recipe", "r.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backend"] == "tensorrt"
    assert main([*COMMAND, "--recipe", "auto", "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "onnxruntime"


def test_report_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--report", "r.json", "--json"]) == 0
    assert json.loads((place / "r.json").read_text()) == json.loads(capsys.readouterr().out)


def test_without_verification(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--no-verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {}
    assert outputs("q.onnx").shape == (16, 16)


def test_below_quality(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with nothing to quantize is written, with exit code 1."""
    onnx.save(model("agraph (float[N,3,8,8] x) => (float[N,3,8,8] y) { y = Abs(x) }"), str(place / "m.onnx"))
    assert main([*COMMAND, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [line for line in err.splitlines() if line.startswith("below quality: ")]
    assert "nothing was quantized" in err
    assert (place / "q.onnx").exists()


def test_compare(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quiet"]) == 0
    assert main(["compare", "m.onnx", "q.onnx", "--data", "d.npz", "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    reference, quantized = outputs("m.onnx"), outputs("q.onnx")
    error = value["outputs"][0]
    assert error["sqnr_db"] == pytest.approx(sqnr(reference, quantized), rel=1e-3)
    assert error["mse"] == pytest.approx(float(((reference - quantized) ** 2).mean()), rel=1e-3)
    figures = {figure["name"] for figure in value["quality"][0]["figures"]}
    assert figures == {"SQNR", "relative error"}, "few values without a name that says classes"
    assert value["bytes_quantized"] == (place / "q.onnx").stat().st_size
    assert value["latency_ratio"] > 0
    assert main(["compare", "m.onnx", "q.onnx", "--data", "d.npz", "-v"]) == 0
    out = capsys.readouterr().out
    assert "SQNR" in out and "relative error" in out
    assert "latency" in out


def test_compare_with_a_broken_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = onnx.load("m.onnx")
    for tensor in lost.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    onnx.save(lost, "lost.onnx")
    assert main(["compare", "m.onnx", "lost.onnx", "--data", "d.npz", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert err.startswith("below quality: output 'y' is the constant 0")
    assert len(err.splitlines()) == 1


def test_compare_has_the_verdict(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quiet"]) == 0
    assert main(["compare", "m.onnx", "q.onnx", "--data", "d.npz"]) == 0
    assert "ccuracy kept: outputs within" in capsys.readouterr().out


def test_compare_in_the_other_order(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--quiet"]) == 0
    assert main(["compare", "q.onnx", "m.onnx", "--data", "d.npz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "q.onnx is quantized and m.onnx is not" in line and "sbonnx compare m.onnx q.onnx" in line
    assert main(["compare", "q.onnx", "q.onnx", "--data", "d.npz"]) == 0, "two quantized files may be compared"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_constant_data_is_refused(value: float, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("z.npz", x=np.full((4, 3, 8, 8), value, np.float32))
    assert main(["quantize", "m.onnx", "--data", "z.npz", "-o", "z.onnx"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"input 'x' is {value:g} everywhere" in line and not (place / "z.onnx").exists()


def test_the_command_of_an_engine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file for TensorRT shows no latency and no kernels of onnxruntime, but how to build the engine."""
    assert main([*COMMAND, "--backend", "tensorrt@10", "--trtexec", "build.sh"]) == 0
    out = capsys.readouterr().out
    assert not [line for line in out.splitlines() if line.startswith(("latency ", "integer kernels "))]
    assert "this CPU" not in out and "engine          sh build.sh (not measured here)" in out
    command = (place / "build.sh").read_text().removeprefix("#!/bin/sh\n").removesuffix("\n")
    assert command.startswith("trtexec --onnx=q.onnx --saveEngine=q.engine --int8 --fp16 --minShapes=x:1x3x8x8")
    assert main([*COMMAND, "--backend", "tensorrt@10", "--force"]) == 0
    assert f"engine          {command} (not measured here)" in capsys.readouterr().out


def test_a_command_of_an_engine_without_an_engine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--trtexec", "build.sh"]) == 2
    assert "--trtexec build.sh: onnxruntime builds no engine" in capsys.readouterr().err
    assert not (place / "q.onnx").exists()


def test_below_quality_names_the_next_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--bits", "w2a2", "--no-advice"]) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[1].startswith("  XX  accuracy lost")
    assert lines[-1] == "next: sbonnx profile m.onnx q.onnx --data d.npz"


def test_too_few_samples_ask_for_more_of_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures near float of few samples are no reason for wider types."""
    np.savez(place / "d.npz", image=np.load(digits().calib)["image"][:12])
    words = ["quantize", str(digits().model), "--data", "d.npz", "-o", "q.onnx", "--bits", "w3a8", "--split", "1"]
    assert main([*words, "--backend", "virtual", "--samples", "8"]) == 0
    shown = capsys.readouterr().out
    assert "too few samples to tell" in shown and "worst layer" not in shown and " try " not in shown
    compare = f"next: sbonnx compare {digits().model} q.onnx --data"
    assert shown.strip().splitlines()[-1] == f"{compare} d.npz --split 1"
    np.savez(place / "d.npz", image=np.load(digits().calib)["image"][:8])
    assert main([*words, "--backend", "virtual", "--force", "--report", "r.html"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == f"{compare} MORE_SAMPLES --split 1"
    page = (place / "r.html").read_text()
    assert "Compare on more samples" in page and "to try" not in page
