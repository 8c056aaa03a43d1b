"""Plug-ins of installed packages: found, used, checked; broken ones are one line. Each runs in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from sbonnx import testing
from sbonnx.assets import digits
from sbonnx.backends import BACKENDS
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.calib.observers import OBSERVERS, Observer
from sbonnx.calib.observers.base import Needs
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import RecipeError
from sbonnx.moments import Moments
from sbonnx.plugins import registry
from sbonnx.rounding import ROUNDERS, Rounded, Rounder
from sbonnx.rounding.adaround import BLOCKS
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, ScaleRule

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugin"
CONSOLE = "import sys; from sbonnx.cli import main; sys.exit(main())"
FAST = {"adaround": {"iterations": 100}, "adaquant": {"iterations": 100}}


def installed(folder: Path, points: str, source: Path | None = None) -> dict[str, str]:
    """Environment in which a package with these entry points is installed: its metadata lies on the path."""
    metadata = folder / "acme_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    places = [str(folder), str(ROOT), *([str(source)] if source else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def example(folder: Path, package: Path = EXAMPLE) -> dict[str, str]:
    """Environment with an example package."""
    text = (package / "pyproject.toml").read_text()
    tables = re.findall(r'^\[project\.entry-points\."(.+?)"\]\n((?:.+\n)+)', text, re.MULTILINE)
    points = "".join(f"[{group}]\n{rows}".replace('"', "") for group, rows in tables)
    return installed(folder, points, package / "src")


def sbonnx(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CONSOLE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_example_keeps_the_contracts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    done = subprocess.run(command, env=example(tmp_path), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_backend_with_a_runtime_keeps_the_contract(tmp_path: Path) -> None:
    package = ROOT / "examples" / "plugin_backend"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package / "tests")]
    environment = example(tmp_path / "site", package)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_plugins_are_used_by_name(tmp_path: Path) -> None:
    files, environment = digits(), example(tmp_path / "site")
    target = str(tmp_path / "out.onnx")
    settings = ("--set", "observer=trimmed", "--set", "rounding=half_up")
    named = (str(files.model), "--data", str(files.calib), "--split", "32", "-o", target, "--backend", "convolver")
    done = sbonnx(environment, "quantize", *named, *settings)
    assert done.returncode == 0, done.stderr
    assert "for convolver" in done.stdout
    found = sbonnx(environment, "lint", str(files.model), "--target", "onnxruntime", "--json")
    assert found.returncode == 0, found.stderr
    missing = sbonnx(dict(os.environ, PYTHONPATH=str(ROOT)), "quantize", *named)
    assert missing.returncode == 2
    assert "convolver" in missing.stderr


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
def test_a_broken_plugin_is_one_line(tmp_path: Path, points: str, arguments: tuple[str, ...], said: str) -> None:
    files, target = digits(), tmp_path / "out.onnx"
    named = (str(files.model), "--data", str(files.calib), "--split", "32", "-o", str(target))
    done = sbonnx(installed(tmp_path / "site", points), "quantize", *named, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not target.exists()


def test_a_broken_plugin_that_is_not_used_harms_nothing(tmp_path: Path) -> None:
    environment = installed(tmp_path / "site", "[sbonnx.observers]\ngone = acme_nowhere:Thing\n")
    files = digits()
    model = shutil.copy(files.model, tmp_path)
    done = sbonnx(environment, "plan", str(model))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OBSERVERS)
def test_built_in_observers_keep_the_contract(name: str) -> None:
    testing.check_observer(name)


@pytest.mark.parametrize("name", [name for name in ROUNDERS if name != BLOCKS])
def test_built_in_roundings_keep_the_contract(name: str) -> None:
    testing.check_rounding(name, FAST.get(name))


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
    monkeypatch.setitem(BACKENDS, "idle", replace(VIRTUAL, name="idle", linear=frozenset(), rules=(), embedding=False))
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
    point = EntryPoint("zz", "acme_nowhere:Thing", registry.OBSERVERS)
    monkeypatch.setattr(registry, "_installed", lambda group: {"zz": point} if group == registry.OBSERVERS else {})
    assert list(OBSERVERS)[-1] == "zz"
    assert "zz" in OBSERVERS and len(OBSERVERS) == 8
    with pytest.raises(RecipeError, match="cannot be imported"):
        OBSERVERS["zz"]
