"""Verbs as functions of `sbonnx`: the same words and defaults as the command line, and equal results."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.cli import main, options
from sbonnx.cli.app import VERBS, rows_of_commands
from sbonnx.errors import DataError, ModelError
from sbonnx.metrics import output_statistics
from sbonnx.report.notebook import Result
from sbonnx.report.outcome import QuantizedFolder
from sbonnx.system.terminal import to_json, versioned
from sbonnx.verify import benchmark, sessions
from tests.support.kernels import fake_kernels

MODEL, CALIB, EVAL = (str(path) for path in (digits().model, digits().calib, digits().eval))

ELSEWHERE = {
    "batch": "sbonnx.batch.api",
    "qat": "sbonnx.qat",
    "init": "recipes and job files are written by hand in Python",
    "recipe": "as init",
    "demo": "a tour of the command line",
    **dict.fromkeys(("explain", "doctor", "schema", "version", "completion"), "about the command line"),
}
"""Verbs without a function of their name, and why."""

DATA: dict[str, Any] = {"data": CALIB, "split": 16, "samples": 1}
DATA_FLAGS = f"--data {CALIB} --split 16 --samples 1"

ReadModel = Callable[[str], Any]
"""Function that returns the model of a file: its path, or in memory."""

CALLS: dict[str, tuple[str, Callable[[ReadModel], Any]]] = {
    "quantize": (
        f"{MODEL} --data {CALIB} --split 16 -o out.onnx --bits w4a4 --effort fast --no-verify",
        lambda m: sbonnx.quantize(m(MODEL), CALIB, "out.onnx", split=16, bits="w4a4", effort="fast", verify=False),
    ),
    "prune": (
        f"{MODEL} --ratio 0.25 -o out.onnx",
        lambda m: sbonnx.prune(m(MODEL), output="out.onnx", ratio=0.25),
    ),
    "simplify": (f"{MODEL} -o out.onnx --no-fuse", lambda m: sbonnx.simplify(m(MODEL), output="out.onnx", fuse=False)),
    "inspect": ("q.onnx", lambda m: sbonnx.inspect(m("q.onnx"))),
    "plan": (
        f"{MODEL} --backend virtual --bits w4a8 --set w.block_size=16",
        lambda m: sbonnx.plan(m(MODEL), backend="virtual", bits="w4a8", block_size=16),
    ),
    "lint": (
        "q.onnx --target trt@10 --fix -o out.onnx --sarif out.sarif",
        lambda m: sbonnx.lint(m("q.onnx"), "trt@10", fix=True, output="out.onnx", sarif="out.sarif"),
    ),
    "run": (
        f"q.onnx {DATA_FLAGS} -o out.npz",
        lambda m: sbonnx.run(m("q.onnx"), **DATA, output="out.npz"),
    ),
    "bench": (
        f"{MODEL} q.onnx --threads 1,2 --shape image=3x1x8x8 --seed 1",
        lambda m: sbonnx.bench([m(MODEL), m("q.onnx")], threads=(1, 2), shape={"image": (3, 1, 8, 8)}, seed=1),
    ),
    "compare": (
        f"{MODEL} q.onnx {DATA_FLAGS} --min-sqnr 90 --eval {EVAL} --metric top1 --max-loss 1%",
        lambda m: sbonnx.compare(
            m(MODEL),
            m("q.onnx"),
            **DATA,
            min_sqnr=90,
            evaluation=sbonnx.EvaluationData(EVAL, "top1", split=16),
            max_loss="1%",
        ),
    ),
    "diff": ("q.onnx p.onnx", lambda m: sbonnx.diff(m("q.onnx"), m("p.onnx"))),
    "eval": (
        f"{MODEL} q.onnx --data {EVAL} --metric top1",
        lambda m: sbonnx.eval([m(MODEL), m("q.onnx")], sbonnx.EvaluationData(EVAL, "top1")),
    ),
    "profile": (
        f"{MODEL} q.onnx {DATA_FLAGS} --sort weights --top 3 --metric mse",
        lambda m: sbonnx.profile(
            m(MODEL), m("q.onnx"), CALIB, split=16, samples=1, sort="weights", top=3, metric="mse"
        ),
    ),
    "tune": ("-o out.json --seconds 9", lambda m: sbonnx.tune("out.json", seconds=9)),
    "view": ("q.onnx -o out.html --no-open", lambda m: sbonnx.view(m("q.onnx"), output="out.html", open=False)),
}
"""Options of each verb, and the call with the form of its models; outputs are named ``out``."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two quantized models, q.onnx and p.onnx."""
    folder = tmp_path_factory.mktemp("verbs")
    for name, bits in (("q", "w8a8"), ("p", "w4a8")):
        sbonnx.quantize(MODEL, CALIB, folder / f"{name}.onnx", bits=bits, split=16, samples=1, verify=False)
    return folder


def without_outputs(folder: Path) -> None:
    for file in folder.glob("out.*"):
        file.unlink()


def same_times(models: Sequence[Any], feeds: Any, *, seconds: float, most: int) -> list[list[float]]:
    """Times that do not depend on the machine."""
    return [[1.0 + place + 0.01 * turn for turn in range(10)] for place, _ in enumerate(models)]


def test_the_table_has_every_verb() -> None:
    verbs = {verb.__name__.rpartition(".")[2] for verb in VERBS}
    assert verbs == CALLS.keys() | ELSEWHERE.keys()
    assert CALLS.keys() <= set(sbonnx.__all__) and not ELSEWHERE.keys() & set(sbonnx.__all__)


@pytest.mark.parametrize("verb", CALLS)
def test_equal_results(
    verb: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command line and Python write the same values. Results have the methods that notebooks and scripts use."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sessions, "alternately", same_times)
    monkeypatch.setattr(benchmark, "alternately", same_times)
    fake_kernels(monkeypatch, {"QLinearConv": 2.0})
    words, call = CALLS[verb]
    assert main([verb, *words.split(), "--json", "--no-config"]) in (0, 1)
    output = json.loads(capsys.readouterr().out)
    without_outputs(place)
    result = call(str)
    without_outputs(place)
    assert output == json.loads(to_json(versioned(verb, result.to_dict())))
    assert isinstance(result, Result) and capsys.readouterr().out == ""
    assert repr(result).startswith(f"{type(result).__name__}(") and "\n" not in repr(result)
    assert result.summary().splitlines()[0] in repr(result) and "<div" in result._repr_html_()
    assert without_names(call(in_memory).to_dict()) == without_names(result.to_dict())
    without_outputs(place)
    pandas = pytest.importorskip("pandas", reason="an extra: sbonnx[plot]")
    assert isinstance(result.frame(), pandas.DataFrame)


def in_memory(path: str) -> Any:
    """Return the bytes of the float model, and others as protobuf messages."""
    return Path(path).read_bytes() if path == MODEL else onnx.load(path)


def without_names(result: Mapping[str, Any]) -> Any:
    """Return a result without the names of models and the commands with them."""
    text = json.dumps({**json.loads(to_json(result)), "advice": None})
    return json.loads(re.sub(rf"model( \d)? in memory|{re.escape(MODEL)}|[pq]\.onnx", "MODEL", text))


@pytest.mark.parametrize("verb", [verb for verb in CALLS if verb != "tune"])
def test_other_types_of_models(verb: str) -> None:
    _, call = CALLS[verb]
    for model, answer in ((3, "cannot be of type int"), (b"PK\x03\x04", "the given model cannot.*a zip archive")):
        with pytest.raises(ModelError, match=answer):
            call(partial(_replaced, model))


def _replaced(model: Any, path: str) -> Any:
    return model


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("inspect q.onnx", "Q/DQ pairs"),
        ("diff q.onnx p.onnx", "scale B / A"),
        (f"plan {MODEL}", "shares its scale with"),
        ("lint q.onnx --target trt@10", "33 errors"),
        (f"profile {MODEL} q.onnx {DATA_FLAGS}", "output"),
    ],
)
def test_short_by_default(
    words: str, more: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert main([*words.split(), "--no-config"]) in (0, 1)
    short = capsys.readouterr().out
    assert 2 < len(short.strip().splitlines()) <= 12
    assert main([*words.split(), "--no-config", "-v"]) in (0, 1)
    long = capsys.readouterr().out
    assert more in long and len(long.splitlines()) > len(short.splitlines())


def test_unknown_keywords() -> None:
    with pytest.raises(TypeError, match=r"compare has no keyword metric: did you mean evaluation=sbonnx\.Eval"):
        sbonnx.compare(MODEL, MODEL, CALIB, metric="top1")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bench has no keyword thread: did you mean threads"):
        sbonnx.bench(MODEL, thread=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="diff has no keyword xyz: it has first, second"):
        sbonnx.diff(MODEL, MODEL, xyz=1)  # type: ignore[call-arg]


def test_outputs_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of onnxruntime, joined over feeds; outputs above the limit are not kept."""
    result = sbonnx.run(MODEL, CALIB, split=16, samples=2)
    feed = {"image": np.load(CALIB)["image"][:32]}
    (expected,) = ort.InferenceSession(MODEL, providers=["CPUExecutionProvider"]).run(["scores"], feed)
    np.testing.assert_allclose(result["scores"], expected, rtol=1e-4, atol=1e-5)
    assert result.values is not None and [len(values["scores"]) for values in result.values] == [16, 16]
    assert "values" not in result.to_dict()
    with pytest.raises(DataError, match="has no output 'score': its outputs are scores"):
        result["score"]
    monkeypatch.setattr(output_statistics, "KEPT_BYTES", 1)
    with pytest.raises(DataError, match=r"are not kept: run with output=FILE\.npz"):
        sbonnx.run(MODEL, CALIB, split=16, samples=1)["scores"]


def test_results_of_a_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    report = sbonnx.quantize(MODEL, CALIB, split=16, samples=2, details=False)
    folder = QuantizedFolder({"a": report, "b": report})
    assert repr(folder) == "QuantizedFolder(2 quantized models: 2 of them without problems)"
    assert report.verdict.text in folder.summary() and "<div" in folder._repr_html_()
    pandas = pytest.importorskip("pandas", reason="an extra: sbonnx[plot]")
    frame = folder.frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame["sqnr_db"]) == [report.sqnr_db] * 2


OF_THE_TERMINAL = {
    *(*options.COMMON_WITH_PROGRESS, options.VERBOSE, options.ORT_LIBRARY),
}
OF_THE_RECIPE = {options.BITS, options.SET}
OF_THE_OUTPUT = {"output_format", "top", "plan", "no_advice", "report", "trtexec", "max_download"}
"""Options of what is printed and written beside the result, and of another result (`prune --plan`, or a folder for
browsers, which `sbonnx.integrations` writes). In Python, `advise` is off."""


@pytest.mark.parametrize("verb", CALLS)
def test_equal_words_and_defaults(verb: str) -> None:
    parameters = inspect.signature(getattr(sbonnx, verb)).parameters
    takes_keys = any(row.kind is row.VAR_KEYWORD for row in parameters.values())
    for option in rows_of_commands()[verb]:
        name, value = option.name, option.default
        if name.startswith("no_"):
            name, value = name.removeprefix("no_"), not value
        parameter = parameters.get(name)
        if parameter is None or parameter.kind is parameter.VAR_KEYWORD:
            of_recipe = takes_keys and (option.key or option in OF_THE_RECIPE)
            of_labels = option in options.EVALUATING and "evaluation" in parameters
            of_terminal = option in OF_THE_TERMINAL or option.name in OF_THE_OUTPUT
            assert of_recipe or of_labels or of_terminal, f"{verb} has no parameter for {option.name}"
            continue
        if parameter.default is inspect.Parameter.empty:
            assert value in (None, inspect.Parameter.empty)
        else:
            shown = option.shown or ("cpu" if option is options.DEVICE else None)
            assert str(parameter.default) in (str(value), str(shown)), f"{verb}: {option.name}"
