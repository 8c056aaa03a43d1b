"""Dask, Optimum, Olive and MLflow: parts of this distribution that the core does not import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import onnx
import pytest

from sbonnx.errors import RecipeError
from sbonnx.plugins import ENGINES, MODEL_FOLDERS, optional_part, registry
from tests.support.models import residual
from tests.test_floors import imports

OPTIONAL = ("sbonnx.batch.dask", "sbonnx.integrations")

CORE = """
import pathlib, sys
import numpy as np
import sbonnx, sbonnx.batch.api, sbonnx.cli.create.quantize, sbonnx.cli.create.batch
folder = pathlib.Path(sys.argv[1])
np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
line = ["quantize", str(folder / "m.onnx"), "--data", str(folder / "x.npy"), "-o", str(folder / "q.onnx"), "-q"]
code = sbonnx.cli.main([*line, "--set", "kernel_costs=none"])  # nothing of so small a network pays
(folder / "jobs.yaml").write_text("output: out\\njobs: [{model: m.onnx, data: x.npy}]")
planned = sbonnx.cli.main(["batch", str(folder / "jobs.yaml"), "--dry-run", "-q"])
print(code, planned, [name for name in sys.modules if name.startswith(("sbonnx.batch.dask", "sbonnx.integrations"))])
"""


def test_no_module_of_the_core_names_them_in_an_import() -> None:
    wrong = [
        str(found) for found in imports() if found.target.startswith(OPTIONAL) and not found.module.startswith(OPTIONAL)
    ]
    assert not wrong, "\n".join(wrong)


def test_quantize_and_batch_run_without_them(tmp_path: Path) -> None:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 0 []"


def test_each_is_found_by_its_entry_point() -> None:
    from sbonnx.batch.dask.cluster import DaskEngine
    from sbonnx.integrations import optimum

    assert optional_part(ENGINES, "dask") is DaskEngine
    assert optional_part(MODEL_FOLDERS, "optimum") is optimum


def test_one_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("dask", "sbonnx.batch.no_such_module:Engine", ENGINES)
    monkeypatch.setattr(registry, "OPTIONAL", (broken,))
    with pytest.raises(RecipeError, match=r"'dask' of sbonnx \(sbonnx.engines\) cannot be imported: .*no_such_module"):
        optional_part(ENGINES, "dask")
