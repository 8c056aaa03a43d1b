"""The benchmarks at 8 bits: scores with intervals, records, whole processes, tables and gains of techniques."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scores, techniques
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers import measured
from benchmarks.scores import Estimate, Outputs, Scores, estimate
from benchmarks.w8a8.runs import Bench, feeds_of
from benchmarks.w8a8.table import HEADER, Row, best, by_tool, lines, verdict
from benchmarks.w8a8.ways import Way, ours

MODEL = "cifar_resnet20"


def record(sqnr: float, metric: float = 0.9, cpu: float = 1.0) -> Record:
    """A record with an interval of one unit, or 0.01, on both sides."""
    made = Scores(Estimate(sqnr, sqnr - 1, sqnr + 1), *2 * [Estimate(metric, metric - 0.01, metric + 0.01)])
    return {"note": "", "cpu": cpu, "mb": 1.0, **asdict(made)}


def row(quantizer: str, found: Record, setting: str = "setting", model: str = MODEL) -> Row:
    return Row(model, setting, Way(quantizer), found)


def test_an_interval_is_that_of_the_mean() -> None:
    """Of 400 normal values: 1.96 standard errors on both sides."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = estimate(lambda rows: float(values[rows].mean()), len(values))
    assert found.value == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)
    assert found.low < found.value < found.high


def test_energies_are_those_of_samples() -> None:
    a = Outputs([[np.ones((2, 3)), np.ones((2, 1, 2))], [np.full((1, 3), 2.0), np.zeros((1, 1, 2))]], {})
    b = Outputs([[np.zeros((2, 3)), np.ones((2, 1, 2))], [np.full((1, 3), 2.5), np.zeros((1, 1, 2))]], {})
    signal, noise = scores.energies(a, b)
    assert signal.tolist() == [5, 5, 12] and noise.tolist() == [3, 3, 0.75]
    steps = Outputs([[np.ones((2, 1))], [np.ones((2, 1))]], {})
    assert scores.energies(steps, steps, streams=True)[0].tolist() == [2, 2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", scores.METRICS)
def test_figures_of_the_float_file_are_those_of_the_pack(pack: Path, name: str) -> None:
    """The metric is the one that the pack's evaluation gives, on the same samples."""
    module, limit = load_pack(pack), 4
    found = scores.outputs(module, name, limit=limit)
    made = scores.evaluate(module, name, found, found, limit)
    assert made.sqnr.value == math.inf and made.agreement.value == pytest.approx(1.0)
    metrics = module.evaluate(name, limit=limit)
    keys = {"jpeg:top1", "val:top1", "sample:top1", "spearman", "map50"} & metrics.keys()
    for key in keys:
        assert made.metric.value == pytest.approx(metrics[key], nan_ok=True)
    assert keys or name in ("ultraface_rfb320", "silero_vad")


def test_records_are_measured_once_and_again_on_request(tmp_path: Path) -> None:
    path, calls = tmp_path / "kept.jsonl", list[int]()

    def measure() -> Record:
        calls.append(1)
        return record(math.inf if len(calls) == 1 else float(len(calls)))

    kept = Kept(path)
    assert kept.record(("m", "a"), measure) == kept.record(("m", "a"), measure) == Kept(path).get("m", "a")
    assert Kept(path).record(("m", "a"), measure)["sqnr"]["value"] == math.inf and len(calls) == 1
    again = Kept(path, again=("a",))
    assert [again.record(("m", "a"), measure)["sqnr"]["value"] for _ in range(2)] == [2.0, 2.0]
    assert again.record(("m", "b"), measure)["sqnr"]["value"] == 3.0
    held = Kept(path).get("m", "a")
    assert held is not None and held["sqnr"]["value"] == 2.0 and Kept(path).get("m", "c") is None


def test_our_command_and_those_of_peers(pack: Path, tmp_path: Path) -> None:
    """The default has no setting; a peer that is not there says why; feeds with a state reach peers whole."""
    bench = Bench(load_pack(pack), tmp_path, tmp_path, count=4)
    plain, fast = ours(("default", "fast")).values()
    command = bench.command(MODEL, plain, tmp_path / "q.onnx")
    assert command[1:4] == ["-m", "sbonnx", "quantize"] and "--set" not in command
    assert bench.command(MODEL, fast, tmp_path / "q.onnx")[-2:] == ["--set", "EFFORT=fast"]
    with np.load(command[command.index("--data") + 1]) as held:
        assert held["input"].shape == (4, 3, 32, 32)
    missing = bench.measure(MODEL, "NNCF", Way("nncf"))
    assert missing["note"] == "fails: cannot be had: not built: make peers"
    folder, whole = bench.data("silero_vad")
    assert whole and len(list(folder.iterdir())) == 4
    (first, *_) = measured.feeds({"data": feeds_of(folder), "batch": 1})
    assert first["state"].shape == (2, 1, 128) and first["sr"].shape == ()


def test_a_quantizer_counts_by_its_best_setting() -> None:
    failed = row("aimet", {"note": "fails: a | b"})
    unquantized = row("quark", record(math.inf))
    found = [row("nncf", record(20.0)), row("nncf", record(25.0), "accurate"), failed, unquantized]
    chosen = best(found)
    assert chosen is not None and chosen.setting == "accurate"
    assert [one.way.quantizer for one in by_tool(found)] == ["nncf", "quark", "aimet"]
    table = lines([row("float", record(math.inf)), *found])
    assert {len(line) for line in table} == {len(HEADER)}
    assert [line[1] for line in table] == ["float", "NNCF", "Quark", "AIMET"]
    assert table[1][2] == "25.00 (24.00 to 26.00)" and table[1][-1] == "accurate, best of 2"
    assert table[2][2] == "leaves the model float" and table[3][2] == "fails: a / b"


@pytest.mark.parametrize(
    ("sqnr", "said"),
    [
        (25.0, "on 1 of 1 models."),
        (24.5, f"below it within our 95 % interval on {MODEL} (24.50, NNCF 25.00)."),
        (20.0, f"below it by more on {MODEL} (20.00, NNCF 25.00)."),
    ],
)
def test_verdict_beside_the_best_peer(sqnr: float, said: str) -> None:
    text = verdict([row("sbonnx", record(sqnr)), row("nncf", record(25.0)), row("aimet", record(21.0))], [MODEL])
    assert said in text.split("Metric:")[0]
    assert verdict([row("sbonnx", record(sqnr)), row("nncf", record(math.inf))], [MODEL]) == "**No peer was measured.**"
    assert "Metric: at least that of the best peer on 1 of 1 models." in text


def test_a_gain_is_the_mean_over_draws_with_the_interval_of_students_t() -> None:
    signal, noise = np.full(200, 100.0), np.ones(200)
    gains = np.array([-2.0, -0.5, 0.1])
    on = [np.stack([signal, noise * 10 ** (-each / 10)]) for each in gains]
    found = techniques.gain(on, 3 * [np.stack([signal, noise])])
    half = 4.3027 * gains.std(ddof=1) / math.sqrt(3)  # equal samples: only the draws differ
    assert found.value == pytest.approx(-0.8, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((-0.8 - half, -0.8 + half), abs=1e-3)
    assert techniques.is_open(found) and not techniques.harms(found)
    said = techniques.verdict({(4, MODEL): {"gptq": found, "heads": None, "share": Estimate(-1.0, -1.2, -0.8)}})
    assert "lower it by more: share on cifar_resnet20 at 4 bits." in said and "not the interval: gptq on" in said
    feeds = list(range(10))
    assert techniques.drawn(feeds, 1, 99) != techniques.drawn(feeds, 2, 99) and len(techniques.drawn(feeds, 1, 99)) == 8
    assert techniques.drawn(feeds, 1, 3) == sorted(techniques.drawn(feeds, 1, 3))


def test_more_draws_where_the_first_ones_leave_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on the draw but the technique in question, which loses 0.6 dB on every other one."""
    samples = np.stack([np.full(50, 100.0), np.ones(50)])

    class Pack:
        def entry(self, name: str) -> Record:
            return {"kind": "classify"}

        def load_calib(self, name: str) -> list[int]:
            return list(range(100))

    def noise(pack: Pack, name: str, settings: Record, feeds: list[int], limit: int) -> np.ndarray:
        loses = settings["BIAS_CORRECTION"] == "none" and sum(feeds) % 2
        return samples * [[1.0], [10**-0.06 if loses else 1.0]]

    monkeypatch.setattr(techniques, "noise", noise)
    measured = techniques.Measured(Pack(), Kept(), samples=64, limit=50, draws=(3, 12))
    count, gains = measured.row(MODEL, 4)
    assert count == 12 and gains["heads"] is None and gains["gptq"] == Estimate(0.0, 0.0, 0.0)
    found = gains["bias correction"]
    assert found is not None and -0.5 < found.value < -0.1 and found.low < found.value < found.high
