"""Plug-ins of installed packages: found, used, checked; broken ones are one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from examples.plugin.src.sbonnx_example_plugin.metric import BalancedAccuracy
from sbonnx import cli, testing
from sbonnx import graph as graphs
from sbonnx.assets import digits
from sbonnx.backends import BACKENDS, Placement
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.calib.data import READERS, InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.calib.observers import OBSERVERS, Observer
from sbonnx.calib.observers.base import Needs
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics import TASK_METRICS, MetricDefinition, task_metric
from sbonnx.moments import Moments
from sbonnx.plugins import registry
from sbonnx.recipe import limits_table, load
from sbonnx.rounding import ROUNDERS, Rounded, Rounder
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule
from sbonnx.testing.metrics import LabelledOutputs
from sbonnx.verify.labelled import EvaluationData, evaluate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
CONSOLE = "import sys; from sbonnx.cli import main; sys.exit(main())"


def write_metadata(folder: Path, points: str) -> None:
    """Metadata of a package with these entry points, which is installed where the folder is on the path."""
    metadata = folder / "acme_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)


def install_here(folder: Path, points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with these entry points in this process."""
    write_metadata(folder, points)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(registry, "_installed", registry._installed.__wrapped__)


def example(folder: Path, package: Path = EXAMPLE) -> dict[str, str]:
    """Environment with an example package."""
    text = (package / "pyproject.toml").read_text()
    tables = re.findall(r'^\[project\.entry-points\."(.+?)"\]\n((?:.+\n)+)', text, re.MULTILINE)
    write_metadata(folder, "".join(f"[{group}]\n{rows}".replace('"', "") for group, rows in tables))
    places = (str(folder), str(ROOT), str(package / "src"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def sbonnx(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CONSOLE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_example_keeps_the_contracts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = subprocess.run(command, env=example(tmp_path), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


@pytest.mark.slow
def test_the_backend_with_a_runtime_keeps_the_contract(tmp_path: Path) -> None:
    package = ROOT / "examples" / "plugin_backend"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")]
    environment = example(tmp_path / "site", package)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_plugins_are_used_by_name(tmp_path: Path) -> None:
    files, environment = digits(), example(tmp_path / "site")
    target = str(tmp_path / "out.onnx")
    settings = ("--set", "observer=trimmed", "--set", "rounding=half_up")
    named = (str(files.model), "--data", str(files.calib), "--split", "32", "-o", target, "--backend", "convolver")
    done = sbonnx(environment, "quantize", *named, *settings)
    assert done.returncode == 0, done.stderr
    assert "(convolver, " in done.stdout
    found = sbonnx(environment, "lint", str(files.model), "--target", "onnxruntime", "--json")
    assert found.returncode == 0, found.stderr
    missing = sbonnx(dict(os.environ, PYTHONPATH=str(ROOT)), "quantize", *named)
    assert missing.returncode == 2
    assert "convolver" in missing.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("points", "arguments", "said"),
    [
        (
            "[sbonnx.observers]\ngone = acme_nowhere:Thing\n",
            ("--set", "observer=gone"),
            "plug-in 'gone' of acme-plugin (sbonnx.observers) cannot be imported: ModuleNotFoundError",
        ),
        (
            "[sbonnx.observers]\nodd = json:dumps\n",
            ("--set", "observer=odd"),
            "plug-in 'odd' of acme-plugin (sbonnx.observers): json:dumps is no subclass of",
        ),
        (
            "[sbonnx.observers]\nhalf = sbonnx.calib.observers.base:Observer\n",
            ("--set", "observer=half"),
            "does not define bounds",
        ),
        (
            "[sbonnx.observers]\nmse = sbonnx.calib.observers:MinMax\n",
            ("--set", "observer=mse"),
            "plug-in 'mse' of acme-plugin (sbonnx.observers) has the name of a built-in one: rename it",
        ),
        (
            "[sbonnx.backends]\nodd = json:dumps\n",
            ("--backend", "odd"),
            "plug-in 'odd' of acme-plugin (sbonnx.backends): json:dumps is no sbonnx.backends.Backend",
        ),
    ],
    ids=["module gone", "no observer", "abstract", "built-in name", "no backend"],
)
def test_a_broken_plugin_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    points: str,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    install_here(tmp_path / "site", points, monkeypatch)
    files, target = digits(), tmp_path / "out.onnx"
    named = (str(files.model), "--data", str(files.calib), "--split", "32", "-o", str(target))
    code = cli.main(["quantize", *named, *arguments])
    out, err = capfd.readouterr()
    assert code == 2, out + err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not target.exists()


EXAMPLE_PARTS = {
    registry.METRICS: EntryPoint("balanced", "examples.plugin.src.sbonnx_example_plugin.metric:BALANCED", "m"),
    registry.READERS: EntryPoint("csv", "examples.plugin.src.sbonnx_example_plugin.reader:read_table", "r"),
}


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> dict[str, EntryPoint]:
    """Installed entry points by group: those of the example. Tables forget what they have loaded."""
    found = dict(EXAMPLE_PARTS)
    monkeypatch.setattr(
        registry, "_installed", lambda group: {found[group].name: found[group]} if group in found else {}
    )
    for table in (TASK_METRICS, READERS):
        monkeypatch.setattr(table, "_parts", dict(table._parts))
    return found


@pytest.mark.usefixtures("points")
def test_a_metric_of_a_plugin_equals_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(60, 4)), np.minimum(rng.geometric(0.5, 60) - 1, 3)
    metric = task_metric("balanced:s").make()
    for start in range(0, 60, 7):
        batch = slice(start, start + 7)
        metric.add({"s": scores[batch], "other": labels[batch]}, {"label": labels[batch]})
    assert metric.value() == pytest.approx(metrics.balanced_accuracy_score(labels, scores.argmax(1)))
    weights = rng.integers(0, 3, 60)
    expected = metrics.balanced_accuracy_score(labels, scores.argmax(1), sample_weight=weights)
    assert metric.value(weights) == pytest.approx(expected)


def classifier() -> ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3] x) => (float[N,3] y) { y = Identity(x) }'
    )


@pytest.mark.usefixtures("points")
def test_files_of_a_plugin_are_data_alone_and_in_folders(tmp_path: Path) -> None:
    (tmp_path / "10.csv").write_text("a,b,c,label\n7,8,9,2\n")
    (tmp_path / "2.CSV").write_text("a,b,c,label\n1,2,3,0\n4,6,5,1\n")
    alone = read(tmp_path / "2.CSV", graphs.load(classifier()))
    assert [feed["x"].tolist() for feed in alone] == [[[1, 2, 3]], [[4, 6, 5]]]
    assert [feed["x"].tolist() for feed in read(tmp_path / "2.CSV", alone.inputs, limit=1)] == [[[1, 2, 3]]]
    (tmp_path / "2.CSV").rename(tmp_path / "2.csv")
    whole = read(tmp_path, graphs.load(classifier()))
    assert [feed["x"][0, 0] for feed in whole] == [1, 4, 7]
    assert [piece.labels["label"][0] for _, piece in whole.labelled()] == [0, 1, 2]
    found = evaluate({"float": classifier().SerializeToString()}, EvaluationData(str(tmp_path), "balanced"))
    assert found.rows[0].metric.value == pytest.approx(2 / 3)
    (tmp_path / "3.csv").write_text("a,b,c,label\n7,8,nine,2\n")
    with pytest.raises(DataError, match=r"3\.csv', row 1: could not convert string to float: 'nine'"):
        list(read(tmp_path, whole.inputs))


@pytest.mark.parametrize(
    ("group", "name", "value", "said"),
    [
        (registry.METRICS, "balanced", "json:dumps", "json:dumps is no sbonnx.metrics.MetricDefinition"),
        (registry.METRICS, "top1", "json:dumps", "plug-in 'top1' of .* has the name of a built-in one: rename it"),
        (registry.READERS, "csv", "acme_nowhere:f", "cannot be imported: ModuleNotFoundError"),
        (registry.READERS, "csv", "json:JSONDecoder", "json:JSONDecoder is no function"),
        (registry.READERS, "jpg", "json:dumps", "plug-in 'jpg' of .* has the name of a built-in one: rename it"),
        (registry.READERS, "npz", "json:dumps", "plug-in 'npz' of .* has the name of a built-in one: rename it"),
    ],
)
def test_broken_metrics_and_readers(
    tmp_path: Path, points: dict[str, EntryPoint], group: str, name: str, value: str, said: str
) -> None:
    points[group] = EntryPoint(name, value, group)
    (tmp_path / f"rows.{name}").write_text("")
    with pytest.raises(RecipeError, match=said):
        if group == registry.METRICS:
            task_metric(name)
        else:
            read(tmp_path / f"rows.{name}", graphs.load(classifier()))


def test_a_reader_that_fails_is_one_line(tmp_path: Path, points: dict[str, EntryPoint]) -> None:
    points[registry.READERS] = EntryPoint("csv", "json:loads", "r")
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(DataError, match=r"rows\.csv' failed: TypeError: loads\(\) takes 1 positional"):
        read(tmp_path / "rows.csv", graphs.load(classifier()))


def labelled_feeds(scale: float) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """Return scores of 4 classes with noise, and their classes."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 4, (5, 12))
    return [({"scores": np.eye(4)[row] + scale * rng.normal(size=(12, 4))}, {"label": row}) for row in rows]


@pytest.mark.parametrize("name", ["top1", "f1", "auc", "mse", "spearman"])
def test_built_in_metrics_keep_the_contract(name: str) -> None:
    def shaped(feeds: list[tuple[dict[str, Array], dict[str, Array]]]) -> list[LabelledOutputs]:
        if name in ("mse", "spearman"):
            return [({"y": out["scores"].max(1)}, {"label": out["scores"].max(1) ** 2 + 1}) for out, _ in feeds]
        return [({"y": out["scores"]}, known) for out, known in feeds]

    good, bad = labelled_feeds(0.2), labelled_feeds(2.0)
    feeds, worse = shaped(good), shaped(bad)
    if name in ("mse", "spearman"):
        worse = [({"y": -out["y"]}, known) for out, known in feeds]
    testing.check_metric(name, feeds, worse)


def test_a_metric_that_depends_on_the_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(self: BalancedAccuracy, weights: Array | None = None) -> float:
        return float(self._rows[-1][:, 1].mean())

    monkeypatch.setattr(BalancedAccuracy, "value", last)
    monkeypatch.setitem(TASK_METRICS, "last", MetricDefinition(BalancedAccuracy))
    feeds = [({"y": np.eye(2)}, {"label": np.array(row)}) for row in ([0, 1], [1, 1])]
    with pytest.raises(AssertionError, match="the order of the feeds does not matter"):
        testing.check_metric("last", feeds, feeds)


def test_a_reader_that_can_be_read_only_once_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.once").write_text("1 2 3")
    files = [tmp_path / "rows.once"]

    def once(path: Path, inputs: Sequence[InputSpec]) -> Iterator[Array]:
        if path.stat().st_size:
            values = np.loadtxt(path, np.float32, ndmin=2)
            yield values + len(files)
            files.append(path)

    monkeypatch.setitem(READERS, "once", once)
    with pytest.raises(AssertionError, match="each iteration gives the same values"):
        testing.check_reader(files[0], classifier())


@pytest.mark.slow
def test_a_broken_plugin_that_is_not_used_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_here(tmp_path / "site", "[sbonnx.observers]\ngone = acme_nowhere:Thing\n", monkeypatch)
    assert "gone" in OBSERVERS
    assert cli.main(["plan", str(digits().model)]) == 0


def test_texts_about_backends_leave_out_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_here(tmp_path / "site", "[sbonnx.backends]\ngone = acme_nowhere:Thing\n", monkeypatch)
    assert "gone" in BACKENDS and "gone" not in BACKENDS.usable()
    assert "`gone`" not in limits_table()
    assert cli.main(["recipe"]) == 0
    with pytest.raises(RecipeError, match=r"for the backends tensorrt and virtual, with MODE: static"):
        load(None, overrides={"bits": "fp8"})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BACKENDS)
def test_built_in_backends_keep_the_contract(name: str) -> None:
    testing.check_backend(name)


def test_an_observer_that_leaves_the_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Wide(Observer):
        needs: ClassVar[Needs] = "range"

        def bounds(self, sketch: Sketch, spec: QuantSpec, rule: ScaleRule = "exact") -> Bounds:
            return Bounds(np.float32(-1e9), np.float32(1e9))

    monkeypatch.setitem(OBSERVERS, "wide", Wide)
    with pytest.raises(AssertionError, match="within the data"):
        testing.check_observer("wide")


def test_a_backend_that_quantizes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "idle", replace(VIRTUAL, name="idle", placement=Placement(frozenset())))
    with pytest.raises(AssertionError, match="quantizes nothing"):
        testing.check_backend("idle")


def test_a_rounding_that_is_worse_than_nearest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rounder = ROUNDERS["nearest"]

    def lowest(self: Rounder, weight: Array, qparams: QParams, moments: Moments | None = None) -> Rounded:
        return Rounded(np.full(weight.shape, qparams.spec.qmin, qparams.spec.dtype), qparams)

    monkeypatch.setattr(rounder, "round", lowest)
    with pytest.raises(AssertionError, match="at least as close as by nearest"):
        testing.check_rounding("nearest")


def test_names_are_listed_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    point, before = EntryPoint("zz", "acme_nowhere:Thing", registry.OBSERVERS), list(OBSERVERS)
    monkeypatch.setattr(registry, "_installed", lambda group: {"zz": point} if group == registry.OBSERVERS else {})
    assert list(OBSERVERS) == [*before, "zz"]
    assert "zz" in OBSERVERS and len(OBSERVERS) == len(before) + 1
    with pytest.raises(RecipeError, match="cannot be imported"):
        OBSERVERS["zz"]
