"""`sbonnx tune`: prices of a machine, where they are stored, and which plans, reports and files read them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import sbonnx
from sbonnx.api import kernel_tuning
from sbonnx.assets import digits
from sbonnx.backends.onnxruntime.costs import MEASURED, load_costs
from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import Job
from sbonnx.batch.jobs.steps import job_inputs
from sbonnx.cli import main
from sbonnx.errors import DeviceError, OutputError, RecipeError
from sbonnx.progress import Silent
from sbonnx.system import machine_costs
from sbonnx.system.cpu import CPUS, target_cpu
from sbonnx.system.machine_costs import CACHE, RECORDED_COSTS, own_table, user_cache
from sbonnx.tuning.elementwise_cases import every_case
from sbonnx.tuning.kernel_trials import Trial, choose, measure
from sbonnx.tuning.tuned_costs import NOISE, factor_of, prices, retained
from tests.support.kernels import cases, fake_kernels

MODEL, CALIB = digits().model, digits().calib


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def sites(cpu: str = "this") -> set[str]:
    return {site.tensor for site in sbonnx.plan(MODEL, backend="onnxruntime", cpu=cpu).sites}


def test_plans_reports_and_files_name_the_table(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured twice with noise, the table is the same. Slow integer kernels change the plan."""
    before, kind = sites(), target_cpu().name
    fake_kernels(monkeypatch, {"QLinearConv": 1.1, "QuantizeLinear": 0.9})
    first = sbonnx.tune()
    assert Path(first.path) == own_table() and first.cpu == kind and not first.changed and not first.busy
    assert sites() == before
    job = Job("a", str(MODEL), str(CALIB), "onnxruntime", str(tmp_path / "q.onnx"))
    keys = [job_inputs(job, Digests()).recipe_digest]
    fake_kernels(monkeypatch, {"QLinearConv": 1000.0})
    slow = sbonnx.tune()
    assert {price.kernel for price in slow.changed} == {"QLinearConv"} and slow.changed[0].factor > 100
    keys.append(job_inputs(job, Digests()).recipe_digest)
    fake_kernels(monkeypatch, {"QLinearConv": 1100.0})
    assert sbonnx.tune().digest == slow.digest != first.digest
    keys.append(job_inputs(job, Digests()).recipe_digest)
    assert keys[0] != keys[1] == keys[2]
    assert sites() < before == sites(kind)
    path = tmp_path / "q.onnx"
    assert main(["quantize", str(MODEL), "--data", str(CALIB), "-o", str(path), "--no-verify"]) == 0
    assert f"kernel costs    of this machine (sbonnx tune), table {slow.digest}" in capsys.readouterr().out
    assert {entry.key: entry.value for entry in onnx.load(path).metadata_props}[RECORDED_COSTS] == slow.digest
    report = sbonnx.quantize(MODEL, CALIB, cpu=kind, verify=False)
    assert report.kernel_costs == load_costs(None, target_cpu()).source and report.quantized is not None
    assert RECORDED_COSTS not in {entry.key for entry in report.quantized.metadata_props}


@pytest.mark.slow
@pytest.mark.skipif(target_cpu().name == "avx2", reason="the bundled table is that of the other machine")
def test_two_measurements_of_another_kind_of_machine(cache: Path, monkeypatch: pytest.MonkeyPatch, pack: Path) -> None:
    """Times are those of AVX2 with 6 % of noise: both tables are equal, and a detector gets another plan."""
    fits, rng = load_costs(None, CPUS["avx2"]).fits, np.random.default_rng(0)

    def time_of(trial: Trial) -> float | None:
        return fits[trial.key].ns(trial.case.amounts) * rng.lognormal(0, 0.06) if trial.key in fits else None

    fake_kernels(monkeypatch, {})
    monkeypatch.setattr(kernel_tuning, "every_case", every_case)
    monkeypatch.setattr(kernel_tuning, "_time_of", time_of)
    model = pack / "models" / "ultraface_rfb320.onnx"
    plans = [sbonnx.plan(model, backend="onnxruntime", cpu=target_cpu().name)]
    digests = []
    for _ in range(2):
        digests.append(sbonnx.tune().digest)
        plans.append(sbonnx.plan(model, backend="onnxruntime"))
    assert digests[0] == digests[1] == plans[1].kernel_costs
    assert plans[1] == plans[2]
    assert len(plans[1].of_role("weight")) < len(plans[0].of_role("weight"))


def test_a_table_of_another_machine(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is read by --cpu FILE alone, with its kind of CPU."""
    fake_kernels(monkeypatch, {"QLinearConv": 1000.0})
    path = tmp_path / "laptop.json"
    tuned = sbonnx.tune(path)
    assert not own_table().exists() and json.loads(path.read_text())["machine"]["class"] == target_cpu().name
    with pytest.raises(OutputError, match=r"laptop\.json"):
        sbonnx.tune(path)
    plan = sbonnx.plan(MODEL, backend="onnxruntime", cpu=path)
    assert plan.kernel_costs == tuned.digest and plan.cpu == target_cpu().name
    assert len(plan.sites) < len(sites())
    path.write_text(path.read_text().replace(f'"class": "{target_cpu().name}"', '"class": "avx2"'))
    assert sbonnx.plan(MODEL, backend="onnxruntime", cpu=path).cpu == "avx2"
    path.write_text(path.read_text().replace('"class": "avx2"', '"class": "6502"'))
    with pytest.raises(RecipeError, match=r"CPU: '.*laptop\.json' is neither .*'6502'.*sbonnx tune --output FILE"):
        sbonnx.plan(MODEL, backend="onnxruntime", cpu=path)
    with pytest.raises(RecipeError, match=r"cpu= must be this, avx2.*\.json"):
        sbonnx.plan(MODEL, backend="onnxruntime", cpu="avx3")


def test_a_damaged_table(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the file and the fix, which replaces it."""
    own_table().parent.mkdir(parents=True)
    own_table().write_text('{"fits": [')
    assert main(["plan", str(MODEL)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"RecipeError: KERNEL_COSTS: {own_table()} is not a table") and "sbonnx tune" in error
    assert len(error.splitlines()) == 1
    fake_kernels(monkeypatch, {})
    assert main(["tune"]) == 0
    assert main(["plan", str(MODEL)]) == 0
    monkeypatch.setattr(kernel_tuning, "_time_of", lambda trial: None)
    before = own_table().read_text()
    with pytest.raises(DeviceError, match=r"only 0 of .* kernels could be measured in 7 s.*--seconds 35"):
        sbonnx.tune(seconds=7)
    assert own_table().read_text() == before
    monkeypatch.setenv(CACHE, os.devnull)
    with pytest.raises(OutputError, match=CACHE):
        sbonnx.tune()


@example(0.12497634743751747, 0.8)
@given(st.floats(0.01, 100), st.floats(0.8, 1.25))
def test_small_differences_are_noise(measured: float, noise: float) -> None:
    """Prices follow times steadily, and stay what they are within noise of the table that is replaced."""
    factor, size = factor_of(measured), max(measured, 1 / measured)
    assert factor == 1 if size <= NOISE else 0.94 < factor / measured < 1.06 or size < 1.01 * NOISE**2
    assert factor_of(measured * noise) / factor == pytest.approx(1, rel=1.06 * NOISE**2 - 1)
    assert factor_of(measured * 1.001) / factor == pytest.approx(1, rel=0.101), "one step of two digits"
    base = retained(measured, None)
    assert base == pytest.approx(measured, rel=0.005)
    assert retained(base * noise**0.99, base) == base
    assert retained(base * 1.3, base) == pytest.approx(base * 1.3, rel=0.005)


def test_the_time_limit_and_what_is_timed_again() -> None:
    fits = load_costs().fits
    trials = choose(cases(), fits)
    assert len({trial.key for trial in trials[:5]}) == 5, "one size of each kernel before the second one of any"
    ticks, noisy = itertools.count(), trials[3]

    def time_of(trial: Trial) -> float | None:
        if trial.case.kernel == "DynamicQuantizeLinear":
            return None
        return 1000.0 / (1 + len(trial.times)) if trial is noisy and len(trial.times) < 5 else 1000.0 / 6

    measure(trials, time_of, lambda: float(next(ticks)), 1000, Silent())
    assert len(noisy.times) > 2
    refused = [trial for trial in trials if trial.refused]
    assert {trial.case.kernel for trial in refused} == {"DynamicQuantizeLinear"}
    assert {len(trial.times) for trial in trials if trial not in (noisy, *refused)} == {2}
    late = choose(cases(), fits)
    measure(late, time_of, lambda: float(next(ticks)), next(ticks) + 5, Silent())
    assert sum(len(trial.times) for trial in late) <= 5
    assert prices(late, {}).kernels == (), "times that were measured once change nothing"


def test_kernels_without_a_price_get_a_formula() -> None:
    """As on a machine whose float convolutions have no blocks of channels."""
    fits = {key: fit for key, fit in load_costs().fits.items() if key[0] != "QLinearConv"}
    trials = [replace(trial, times=[5000.0, 5000.0]) for trial in choose(cases(), fits)]
    tuned = prices(trials, {})
    assert [row["kernel"] for row in tuned.new] == ["QLinearConv"]
    rows = tuned.rows(fits)
    assert len(rows) == len(fits) + 1 and 0 < rows[-1]["fixed_ns"] <= 5000


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/sbonnx")),
        ("linux", {"HOME": "/home/me"}, Path("/home/me/.cache/sbonnx")),
        ("darwin", {"HOME": "/Users/me"}, Path("/Users/me/Library/Caches/sbonnx")),
        ("win32", {"LOCALAPPDATA": "/local"}, Path("/local/sbonnx")),
        ("linux", {CACHE: "/own", "XDG_CACHE_HOME": "/x"}, Path("/own")),
    ],
)
def test_the_folder_of_the_user(
    platform: str, variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CACHE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert user_cache() == expected


def test_machines_have_tables_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the model of the CPU, its vector instructions and the version of onnxruntime."""
    text = "model name : One\nflags : sse4_2 avx2 fma lm\n"
    listed: dict[str, Any] = {"plain": text, "other order": text.replace("avx2 fma lm", "fma avx2 hypervisor")}
    listed |= {"model": text.replace("One", "Two"), "vectors": text.replace("fma", "avx512f")}
    digest = {}
    for name, content in listed.items():
        (tmp_path / name).write_text(content)
        monkeypatch.setattr(machine_costs, "CPU_FLAGS", tmp_path / name)
        digest[name] = machine_costs.fingerprint().digest
    assert digest["plain"] == digest["other order"] and len(set(digest.values())) == 3
    assert replace(machine_costs.fingerprint(), onnxruntime="0.1").digest not in digest.values()
    assert set(MEASURED) == {"vnni", "avx2", "avx512"}
