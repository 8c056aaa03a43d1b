"""What a result is held against."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sbonnx.batch.accept import judge, metric_values
from sbonnx.batch.jobs.job import Acceptance, Places
from sbonnx.batch.metric import loaded
from sbonnx.errors import DataError, RecipeError
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import OwnMetric
from tests.support.values import compared

METRICS = compared(
    {
        "outputs": [
            {"sqnr_db": 31.0, "agreement": None},
            {"sqnr_db": 24.5, "agreement": 0.97},
            {"sqnr_db": math.inf, "agreement": 1.0},
        ],
        "size_ratio": 0.27,
        "latency_ratio": 0.5,
    }
)

ASKED: dict[str, Any] = {
    "min_sqnr": (24.0, 24.5, 25.0),
    "min_agreement": (0.97, 0.97, 0.98),
    "max_size_ratio": (0.27, 0.27, 0.26),
    "max_latency_ratio": (1.0, 0.5, 0.4),
}


def run_metric(named: str, model: Path) -> dict[str, float]:
    with loaded(named) as metric:
        return metric.values(model)


"""By key: a threshold that is met, what is found, one that is not met."""


def asking(key: str, threshold: float) -> Acceptance:
    """For one thing."""
    wanted: Any = {key: threshold}
    return Acceptance(**wanted)


@pytest.mark.parametrize("key", ASKED)
def test_the_worst_output_counts(key: str) -> None:
    """What is found beside what is wanted; a reason where it is missed."""
    good, found, bad = ASKED[key]
    met = judge(asking(key, good), METRICS)
    assert (met.rows, met.reasons) == (((key, found, good, True),), ())
    missed = judge(asking(key, bad), METRICS)
    assert missed.rows == ((key, found, bad, False),)
    assert len(missed.reasons) == 1
    assert f"{bad:g}" in missed.reasons[0] and f"{found:g}" in missed.reasons[0]


def test_no_threshold_accepts_any_result() -> None:
    """Whatever it is."""
    assert judge(Acceptance(), Comparison()) == judge(Acceptance(), METRICS)
    assert judge(Acceptance(), METRICS).rows == ()


@pytest.mark.parametrize("key", ASKED)
def test_what_was_not_measured_is_not_accepted(key: str) -> None:
    """No figure is no pass, whichever way round it is compared."""
    wanted = ASKED[key][0]
    for metrics in (Comparison(), Comparison(bytes_float=4, latency_ratio=0.0)):
        found = judge(asking(key, wanted), metrics)
        assert found.rows[0][3] is False
        assert "cannot be judged" in found.reasons[0]


def test_an_agreement_is_reported_with_its_interval() -> None:
    """16 samples tell little."""
    figure = {"name": "agreement", "value": 0.875, "low": 0.64, "high": 0.965}
    metrics = compared({"outputs": [{"agreement": 0.875}], "quality": [{"samples": 16, "figures": [figure]}]})
    (reason,) = judge(Acceptance(min_agreement=0.95), metrics).reasons
    assert reason == "min_agreement: 0.875 (0.64 to 0.965, 16 samples), and at least 0.95 is accepted"


def test_a_figure_that_is_no_number_is_the_worst() -> None:
    """Of an output whose error cannot be told."""
    outputs = [{"sqnr_db": 40.0, "agreement": 1.0}, {"sqnr_db": math.nan, "agreement": 1.0}]
    assert judge(Acceptance(min_sqnr=10), compared({"outputs": outputs})).rows[0][3] is False


def metric_file(folder: Path, body: str) -> str:
    """A metric in a file of its own, with a module beside it; each call leaves a line."""
    (folder / "beside.py").write_text("SIZE = 2.0\n")
    (folder / "metric.py").write_text(
        "import beside\n"
        "from pathlib import Path\n"
        "def score(path):\n"
        f"    with open({str(folder / 'calls')!r}, 'a') as log:\n"
        "        log.write(Path(path).name + '\\n')\n"
        f"    {body}\n"
    )
    return f"{folder / 'metric.py'}:score"


def test_metric_values_of_a_users_function(tmp_path: Path) -> None:
    """It sees both files; the float one once, as long as neither it nor the code changes."""
    named = metric_file(tmp_path, "return {'size': Path(path).stat().st_size * beside.SIZE}")
    model, quantized = tmp_path / "m.onnx", tmp_path / "q.onnx"
    model.write_bytes(b"1234")
    quantized.write_bytes(b"12")
    places = Places(tmp_path / "out")
    wanted = {"size": {"float": 8.0, "quantized": 4.0}}
    assert metric_values(named, model, quantized, places)[0] == wanted
    assert metric_values(named, model, quantized, places)[0] == wanted
    assert (tmp_path / "calls").read_text().split() == ["q.onnx", "m.onnx", "q.onnx"]
    model.write_bytes(b"123456")
    own, _ = metric_values(named, model, quantized, places)
    assert own["size"]["float"] == 12.0
    accept = Acceptance(min_metric=(("size", 4.0), ("top1", 0.5)), metric=named)
    judged = judge(accept, METRICS, own)
    assert judged.rows[0] == ("min_metric.size", 4.0, 4.0, True)
    assert judged.rows[1][0] == "min_metric.top1" and math.isnan(judged.rows[1][1]) and not judged.rows[1][3]
    assert judged.metrics == (OwnMetric("size", 12.0, 4.0),)
    assert "returns no value of that name" in judged.reasons[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", "must return {name: number}"),
        ("return {}", "must return {name: number}"),
        ("return {'a': 'good'}", "'a' of score in .* is not a number"),
    ],
)
def test_a_metric_that_gives_no_numbers(tmp_path: Path, body: str, said: str) -> None:
    """It is said what it must give."""
    (tmp_path / "m.onnx").write_bytes(b"m")
    with pytest.raises(RecipeError, match=said):
        run_metric(metric_file(tmp_path, body), tmp_path / "m.onnx")


def test_a_metric_that_is_not_there(tmp_path: Path) -> None:
    """The file, the function, what it imports."""
    named = metric_file(tmp_path, "return {'a': 1}")
    with pytest.raises(RecipeError, match="there is no file"):
        run_metric(f"{tmp_path / 'none.py'}:score", tmp_path)
    with pytest.raises(RecipeError, match="has no function 'scores'"):
        run_metric(f"{named}s", tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_module_of_anybody\n")
    with pytest.raises(RecipeError, match="cannot be loaded: No module named"):
        run_metric(f"{tmp_path / 'broken.py'}:score", tmp_path)


def test_names_that_change_with_the_model(tmp_path: Path) -> None:
    """There is nothing to compare."""
    named = metric_file(tmp_path, "return {Path(path).stem: 1.0}")
    for name in ("m.onnx", "q.onnx"):
        (tmp_path / name).write_bytes(name.encode())
    with pytest.raises(DataError, match="returns no name for both"):
        metric_values(named, tmp_path / "m.onnx", tmp_path / "q.onnx", Places(tmp_path / "out"))
