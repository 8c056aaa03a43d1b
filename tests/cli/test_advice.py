"""Advice below the quality line: a command that runs as it is printed, and that repairs what was measured."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import pipeline
from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.report.searched import Advice, keywords_of, override_texts, python_call
from sbonnx.search.advice import with_advice
from sbonnx.search.error_sources import sensitive_layers
from sbonnx.stages.state import PipelineState, Request, read_recipe
from sbonnx.stages.verify import with_causes, with_details
from tests.profile.test_causes import images, network
from tests.support.models import model
from tests.support.values import some

FOLDER = "it's a folder"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained classifier in a folder that needs quoting."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    onnx.save(onnx.load(digits().model), str(folder / "m.onnx"))
    np.savez(folder / "d.npz", image=np.load(digits().calib)["image"][:96])
    monkeypatch.chdir(tmp_path)
    return folder


COMMAND = ("quantize", f"{FOLDER}/m.onnx", "--data", f"{FOLDER}/d.npz", "-o", f"{FOLDER}/q.onnx", "--split", "1")
WORSE = ("--bits", "w2a2", "--set", "W.ROUNDING.TYPE=nearest")
"""KL 1.2 to 1.7 nats, and the line is at 0.1."""


def advice_of(err: str) -> str:
    """The command at the end of the one line."""
    (line,) = [line for line in err.splitlines() if line.startswith("advice: ")]
    return line[line.rindex(": sbonnx ") + 2 :]


def test_data_in_doubt_gets_no_advice_on_layers(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez(place / "d.npz", image=np.load(digits().calib)["image"][:96] * 255)
    main([*COMMAND, "--bits", "w3a3", "--effort", "fast", "--backend", "virtual"])
    out = capfd.readouterr().out
    assert "data in doubt" in out
    assert "worst layer" not in out and "next:" not in out


@pytest.mark.slow
def test_the_command_repairs(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *WORSE, "--json"]) == 1
    out, err = capfd.readouterr()
    before, command = json.loads(out), advice_of(err)
    advice = before["advice"]
    assert advice["tested"] and advice["repaired"] and advice["command"] == command
    assert "w2a2" not in command, "an option that the change replaces is left out"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, check=False, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    after = json.loads(done.stdout)
    assert after["ok"] and after["advice"] == {}
    kl = [next(f for f in one["metrics"]["quality"][0]["figures"] if f["name"] == "KL") for one in (before, after)]
    assert kl[1]["value"] < kl[0]["line"] < kl[0]["value"]
    agreement = next(f for f in after["metrics"]["quality"][0]["figures"] if f["name"] == "agreement")
    assert agreement["value"] > 0.9


@pytest.mark.slow
def test_without_advice(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *WORSE, "--no-advice", "--quiet"]) == 1
    assert "advice" not in capfd.readouterr().err
    report = sbonnx.quantize(
        place / "m.onnx", place / "d.npz", split=1, bits="w2a2", recipe={"W.ROUNDING.TYPE": "nearest"}
    )
    assert not report.ok and report.advice is None, "nothing is tried unless it is asked for"


@pytest.mark.slow
def test_compare_names_the_profile_of_the_same_files(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *WORSE, "--no-advice", "--quiet"]) == 1
    capfd.readouterr()
    files = [f"{FOLDER}/m.onnx", f"{FOLDER}/q.onnx", "--data", f"{FOLDER}/d.npz", "--split", "1", "--samples", "8"]
    assert main(["compare", *files, "--json"]) == 1
    out, err = capfd.readouterr()
    command = advice_of(err)
    assert json.loads(out)["advice"]["command"] == command
    assert shlex.split(command) == ["sbonnx", "profile", *files]
    assert main(shlex.split(command)[1:]) == 0
    assert "8 feeds" in capfd.readouterr().out
    assert main([*COMMAND, "--quiet", "--force"]) == 0
    assert main(["compare", *files, "--max-size", "0.001", "--json"]) == 1
    out, err = capfd.readouterr()
    assert "advice: " not in err and json.loads(out)["advice"] == {}, "sizes are no matter of layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "next_thing", "command"),
    [
        (["--recipe", "auto", *WORSE], "use 4-bit weights and 8-bit activations", "bits=w4a8"),
        (["--average-bits", "2", "--set", "MIXED.WEIGHTS=2/3", *WORSE], "raise MIXED.BUDGET.BITS, 2", ""),
    ],
)
def test_after_a_search(
    place: Path, capfd: pytest.CaptureFixture[str], flags: list[str], next_thing: str, command: str
) -> None:
    """What was tried with its figures, the best of it, and what is next, which was not tried."""
    assert main([*COMMAND, *flags, "--json", "--set", "VERIFY.LATENCY=false"]) == 1
    out, err = capfd.readouterr()
    report = json.loads(out)
    advice, search = report["advice"], report["search"]
    assert advice["what"] == next_thing and not advice["tested"]
    rows = [search["plain"], *search["steps"]] if search["plain"] else search["mixed"]["tried"]
    assert [row["sqnr_db"] for row in rows if "sqnr_db" in row] == pytest.approx(
        [float(figure.removesuffix(" dB")) for _, figure in advice["tried"]], abs=0.06
    )
    (line,) = [line for line in err.splitlines() if line.startswith("advice: ")]
    assert all(f"{what}: {figure}" in line for what, figure in advice["tried"])
    assert f"has {search['best']['sqnr_db']:.1f} dB" in line and f"next: {next_thing} (not tried; " in line
    assert line.endswith(")") and not advice["command"], "it was not tried"
    assert advice["overrides"] == ([command] if command else [])


def outlier() -> onnx.ModelProto:
    """Two branches, of which one has an input with an outlier that hides the rest from 8 bits."""
    return model(
        """agraph (float[N,8,6,6] x) => (float[N,4,6,6] y) {
            a = Conv (x, w) r = Relu (a) m = Mul (r, big) b = Conv (m, v) s = Relu (b) y = Conv (s, u) }""",
        w=(8, 8, 1, 1),
        v=(np.eye(8) * np.array([1e-4, 1, 1, 1, 1, 1, 1, 1])).reshape(8, 8, 1, 1).astype(np.float32),
        u=(4, 8, 1, 1),
        big=np.array([3e3, 1, 1, 1, 1, 1, 1, 1], np.float32).reshape(1, 8, 1, 1),
    )


def finished(proto: onnx.ModelProto, feeds: Any, target: str = "onnxruntime", **wishes: Any) -> PipelineState:
    recipe, backend = read_recipe(None, target, wishes)
    return pipeline.quantize(Request(proto, recipe, backend, data=feeds))


def test_a_sensitive_layer_stays_float() -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((1, 8, 6, 6)).astype(np.float32)} for _ in range(12)]
    state = finished(outlier(), feeds, a_observer="minmax", heads="none", kernel_costs="none", effort="fast")
    names = sensitive_layers(state)
    assert names and len(names) <= 3
    advice = with_advice(state, 600.0).report.advice
    assert advice is not None and advice.tested and advice.repaired
    assert any("EXCLUDE" in text for text in advice.overrides), advice.tried


def test_causes_of_an_uncertain_accuracy_are_tried_together() -> None:
    proto = network()
    state = with_causes(finished(proto, images(), w_bit=4))
    assert state.report.verdict.accuracy == "uncertain"
    whole = with_details(replace(state, request=replace(state.request, details=True)))
    assert state.report.causes == whole.report.causes, "those of the losses of all layers by part"
    report = with_advice(state, 600.0).report
    advice = some(report.advice)
    assert advice.repaired and some(advice.gain_db) > 10 and len(advice.tried) == 1
    assert len(report.causes) == 2 and all(cause.together for cause in report.causes)
    assert {cause.gain_db for cause in report.causes} == {advice.gain_db}
    changes = {key: json.loads(value) for key, _, value in (text.partition("=") for text in advice.overrides)}
    again = finished(proto, images(), w_bit=4, **changes).report
    assert again.verdict.accuracy == "kept"
    assert some(again.sqnr_db) == pytest.approx(some(state.report.sqnr_db) + some(advice.gain_db), abs=0.1)


def test_the_command_of_an_uncertain_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scale of its own, measured; without time, the remedy of the worst layer is not measured."""
    onnx.save(network(gain=20.0), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.concatenate([feed["x"] for feed in images()]))
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx", "--backend", "tensorrt", "--force"]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert "accuracy uncertain" in out and "      try  " not in out
    (line,) = [line for line in out.splitlines() if line.startswith("next: ")]
    assert line == f"next: {advice_of(err)}" and "OWN_SCALES" in line
    assert main([*shlex.split(line.removeprefix("next: sbonnx")), "--no-advice"]) == 0
    assert "accuracy kept" in capfd.readouterr().out
    monkeypatch.setattr("sbonnx.search.advice.UNCERTAIN_SHARE", -1.0)
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert "advice" not in err and "give it a scale of its own (not measured): --set" in out


def test_a_change_that_gains_and_does_not_repair() -> None:
    advice = Advice("8 bits", ("bits=w8a8",), True, False, "KL", "1.2", "0.4", gain_db=4.04, untried="16 bits")
    assert advice.text == "8 bits (measured, 4.0 dB gained, not enough: KL 0.4, before 1.2; not tried: 16 bits)"
    changes = override_texts({"bits": "w8a8", "EXCLUDE": ["a"], "W.ROUNDING.SCALE": "mse", "SMOOTH.ENABLE": True})
    call = "quantize(..., bits='w8a8', EXCLUDE=['a'], **{'W.ROUNDING.SCALE': 'mse', 'SMOOTH.ENABLE': True})"
    assert python_call(changes) == f"sbonnx.{call}" and python_call(()) == ""
    assert keywords_of(changes)["EXCLUDE"] == ["a"] and advice.keywords == {"bits": "w8a8"}


def test_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is tried: the advice says so, and has no figure."""
    monkeypatch.setattr("sbonnx.search.advice.SECONDS", -1.0)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((1, 8, 6, 6)).astype(np.float32)} for _ in range(12)]
    state = finished(outlier(), feeds, a_observer="minmax", heads="none")
    advice = with_advice(state, -1.0).report.advice
    assert advice is not None and not advice.tested and advice.after == "" and advice.tried == ()
    assert "not tried" in advice.text


def test_a_good_result_needs_none() -> None:
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, 8, 6, 6)).astype(np.float32)} for seed in range(8)]
    plain = model("agraph (float[N,8,6,6] x) => (float[N,4,6,6] y) { y = Conv (x, u) }", u=(4, 8, 1, 1))
    assert with_advice(finished(plain, feeds), 600.0).report.advice is None


def test_another_form_where_integers_do_not_pay() -> None:
    """A file that was measured to be slower than float, by products alone: weights alone in integers are smaller."""
    rng = np.random.default_rng(0)
    proto = model("agraph (float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }",
                  w=(64, 64), v=(64, 64))  # fmt: skip
    state = finished(proto, [{"x": rng.standard_normal((4, 64)).astype(np.float32)} for _ in range(12)], effort="fast")
    before = replace(some(state.comparison), latency_ratio=1.5, latency_interval=(1.4, 1.6), busy=False)
    slow = replace(before, median_ms_float=10.0, median_ms_quantized=15.0)
    advice = some(with_advice(replace(state, comparison=slow), 1.0).report.advice)
    assert advice.overrides == ("MODE=weight_only",) and advice.tested and "time 1.50 (1.40 to 1.60)" in advice.before
    assert float(advice.after.split(",")[0]) < 0.5
