"""Evaluation: against the formula on onnxruntime's logits, and against a trained model's own script."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx.errors import DataError, OutputError
from sbonnx.llm import scores, speed
from sbonnx.llm.api import evaluate
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.evaluate import DecoderLimits, evaluate_windows, worst_block
from sbonnx.llm.generation import generate_with_genai
from sbonnx.llm.layout import read_decoder
from sbonnx.system.runtime import open_session
from sbonnx.verify.sessions import in_turn
from tests.conftest import PACK
from tests.llm.tiny_decoder import decoder_model, perplexity, token_windows, write_folder

CLASSICS = PACK / "classics_llama"
needs_classics = pytest.mark.skipif(not CLASSICS.is_dir(), reason=f"no model in {CLASSICS}")


def disturbed(scale: float = 0.02) -> onnx.ModelProto:
    """The tiny decoder with noise on its head."""
    model = decoder_model()
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head")
    values = numpy_helper.to_array(head)
    noise = np.random.default_rng(1).normal(0, scale, values.shape)
    head.CopyFrom(numpy_helper.from_array((values + noise).astype(np.float32), "head"))
    return model


@pytest.mark.parametrize("piece_bytes", [32 << 20, 4 * 64 * 5])
def test_figures_follow_the_formulas(tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.llm.decoding.PIECE_BYTES", piece_bytes)
    plain, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", disturbed())
    ids = token_windows()
    found = evaluate(other, ids, against=plain, latency=False)
    expected, log_p = perplexity(other / "model.onnx", ids)
    expected_float, log_q = perplexity(plain / "model.onnx", ids)
    assert found.perplexity == pytest.approx(expected, rel=1e-6)
    assert found.float_perplexity == pytest.approx(expected_float, rel=1e-6)
    assert found.kl == pytest.approx((np.exp(log_q) * (log_q - log_p)).sum(-1).mean(), rel=1e-3)
    assert found.late_kl == pytest.approx((np.exp(log_q) * (log_q - log_p))[:, -6:].sum(-1).mean(), rel=1e-3)
    assert found.kl is not None
    assert found.kl > 1e-4
    assert found.agreement == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).mean(), abs=1e-12)
    assert (found.windows, found.tokens) == (16, 16 * 23)
    assert found.cached_perplexity == pytest.approx(found.uncached_perplexity, rel=1e-5)
    assert found.bytes == ((plain / "model.onnx").stat().st_size, (other / "model.onnx").stat().st_size)
    assert found.ok


def test_greedy_decoding_until_the_first_difference(tmp_path: Path) -> None:
    plain = read_decoder(write_folder(tmp_path / "a"))
    other = read_decoder(write_folder(tmp_path / "b", disturbed(0.1)))
    ids = token_windows()
    found = evaluate_windows(other, ids, against=plain, latency=False)
    assert (len(found.greedy), found.continuation) == (16, 32)
    for row, until in zip(ids, found.greedy, strict=True):
        one, two = (DecoderSession(each, threads=1).greedy(row[:6], 32) for each in (other, plain))
        assert one[:until] == two[:until]
        assert until == 32 or one[until] != two[until]
    assert min(found.greedy) < 32
    same = evaluate_windows(plain, ids, against=plain, latency=False)
    assert (same.kl, same.agreement, set(same.greedy)) == (0.0, 1.0, {32})


def test_limits_and_wrong_caches_are_problems(tmp_path: Path) -> None:
    plain = read_decoder(write_folder(tmp_path / "a"))
    other = read_decoder(write_folder(tmp_path / "b", disturbed(0.3)))
    found = evaluate_windows(other, token_windows(), against=plain, limits=DecoderLimits(1e-9, 0.9999), latency=False)
    first, second, third = found.problems
    assert third.startswith("it begins in block 1: the error of the residual stream is 0.00% at its input")
    assert "VERIFY.MIN_AGREEMENT is 99.99%" in second
    assert "above float" in first
    assert "VERIFY.MAX_PERPLEXITY is 0.00%" in first
    forgets = read_decoder(write_folder(tmp_path / "c", decoder_model(forgets=True)))
    (problem,) = evaluate_windows(forgets, token_windows(), latency=False).problems
    assert "the caches are wrong" in problem


def test_one_session_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory is that of one model, and logits of float in a scratch file of any size give the same figures."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most: list[int] = []

    class Counted:
        def __init__(self, *arguments: Any) -> None:
            self.session = open_session(*arguments)
            alive.add(self)
            most.append(len(alive))

        def run(self, *arguments: Any) -> Any:
            return self.session.run(*arguments)

    monkeypatch.setattr("sbonnx.llm.decoding.open_session", Counted)
    plain, other = (
        read_decoder(write_folder(tmp_path / name, model)) for name, model in (("a", None), ("b", disturbed(0.1)))
    )
    ids = token_windows()
    found = evaluate_windows(other, ids, against=plain, latency=False)
    assert max(most) == 1
    monkeypatch.setattr(scores, "SCRATCH", 3 * 4 * 64 * ids.shape[1])
    before = len(most)
    assert evaluate_windows(other, ids, against=plain, latency=False) == found
    assert len(most) - before > before
    monkeypatch.setattr(speed, "TOGETHER", 0)
    speed.compare_speed(other, plain, ids[0])
    assert max(most) == 1


def test_large_float_models_stay_in_the_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures up to float rounding, and only the float model has this option."""
    mapped: list[bool] = []

    def opened(source: Any, options: Any) -> Any:
        with contextlib.suppress(RuntimeError):  # onnxruntime's error for an option that is not set
            mapped.append(options.get_session_config_entry("session.disable_prepacking") == "1")
            return open_session(source, options)
        mapped.append(False)
        return open_session(source, options)

    plain = read_decoder(write_folder(tmp_path / "a"))
    other = read_decoder(write_folder(tmp_path / "b", disturbed()))
    ids = token_windows()
    expected = evaluate_windows(other, ids, against=plain, latency=False)
    monkeypatch.setattr("sbonnx.llm.decoding.open_session", opened)
    monkeypatch.setattr("sbonnx.llm.decoding.MAPPED", 0)
    found = evaluate_windows(other, ids, against=plain, latency=False)
    assert mapped == [True, False, True, False, False]
    assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    assert found.float_perplexity == pytest.approx(expected.float_perplexity, rel=1e-5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_decoder(write_folder(tmp_path / "a"))
    with (
        Path("/dev/full").open("w+b", buffering=0) as full,
        pytest.raises(OutputError, match=r"No space left on device.*point TMPDIR to a larger disk"),
    ):
        monkeypatch.setattr(scores, "_scratch", lambda: full)
        evaluate_windows(plain, token_windows(), against=plain, latency=False)


class Clocked:
    """Session whose steps take given times, without a model."""

    def __init__(self, ticks: list[float], slow: float, clock: list[float]) -> None:
        self.ticks, self.slow, self.clock = ticks, slow, clock

    def decode(self, prompt: Any, source: Any) -> Iterator[int]:
        for tick in self.ticks:
            self.clock[0] += tick * self.slow
            yield 0


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_the_ratio_is_that_of_tokens_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, together: bool
) -> None:
    """Tokens take longer and longer, as on a machine whose load rises: pairs are half as long all the same."""
    plain, other = (read_decoder(write_folder(tmp_path / name)) for name in ("a", "b"))
    clock, ticks = [0.0], [1.0, *(0.01 * (1 + place) for place in range(speed.DECODED))]

    def opened(decoder: Any, **_: Any) -> Clocked:
        return Clocked(ticks, 0.5 if decoder is other else 1.0, clock)

    monkeypatch.setattr(speed, "DecoderSession", opened)
    monkeypatch.setattr(speed, "TOGETHER", 1 << 30 if together else 0)
    monkeypatch.setattr(speed, "in_turn", partial(in_turn, clock=lambda: clock[0]))
    monkeypatch.setattr(speed, "OtherLoad", lambda: SimpleNamespace(busy=busy))
    row = speed.compare_speed(other, plain, token_windows()[0])[0]
    assert row.ratio == pytest.approx(0.5) and row.busy is busy
    assert row.first_token == pytest.approx(500) and row.float_first_token == pytest.approx(1000)
    assert row.float_tokens_per_second == pytest.approx(row.tokens_per_second / 2)
    known = together or not busy
    assert row.ratio_interval == (pytest.approx((0.5, 0.5)) if known else None), "load affects one of the two alone"


@pytest.mark.slow
def test_speed_and_memory_are_measured_beside_float(tmp_path: Path) -> None:
    plain = read_decoder(write_folder(tmp_path / "a"))
    found = evaluate_windows(plain, token_windows(4), against=plain)
    assert found.speed[0].threads == 1
    for row in found.speed:
        figures = (row.first_token, row.tokens_per_second, row.float_first_token, row.float_tokens_per_second)
        assert all(figure is not None and figure > 0 for figure in figures)
    assert all(size is not None and 1 << 16 < size < 1 << 30 for size in found.memory)


def test_vocabularies_must_be_alike(tmp_path: Path) -> None:
    plain = read_decoder(write_folder(tmp_path / "a"))
    with pytest.raises(DataError, match=r"has 64 tokens and .* 63: only decoders of one vocabulary"):
        evaluate_windows(plain, token_windows(), against=replace(plain, vocabulary=63))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("external", [False, True])
def test_the_block_where_it_begins(tmp_path: Path, layer: int, external: bool) -> None:
    model = decoder_model()
    value = next(tensor for tensor in model.graph.initializer if tensor.name == f"l{layer}_wo")
    value.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(value) * np.float32(1.5), value.name))
    plain, other = write_folder(tmp_path / "a"), write_folder(tmp_path / "b", model)
    if external:
        onnx.save(model, other / "model.onnx", save_as_external_data=True, location="m.data", size_threshold=1024)
    found = worst_block(read_decoder(other), read_decoder(plain), token_windows()[0])
    assert found is not None
    assert found.layer == layer
    assert found.after > 0.01 > found.before


def script() -> Any:
    """The evaluation script that comes with the model."""
    spec = importlib.util.spec_from_file_location("classics_eval", CLASSICS / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_classics
@pytest.mark.slow
@pytest.mark.parametrize("form", ["genai", "optimum"])
def test_a_trained_model_has_the_perplexity_of_its_own_script(form: str) -> None:
    """The script says 36.14976; both forms, at once and through the caches."""
    decoder = read_decoder(CLASSICS / form)
    ids = np.load(CLASSICS / "eval.npz")["ids"].astype(np.int64)
    found = evaluate_windows(decoder, ids, latency=False)
    assert (found.windows, found.tokens) == (160, 30560)
    assert found.perplexity == pytest.approx(36.14976, abs=5e-5)
    assert found.cached_perplexity == pytest.approx(found.uncached_perplexity, rel=1e-6)


@needs_classics
@pytest.mark.slow
def test_distance_from_float_is_that_of_the_script(tmp_path: Path) -> None:
    """Of a model whose weights were rounded to half precision, on the first windows."""
    module = script()
    model = onnx.load(CLASSICS / "optimum" / "model.onnx")
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2 and values.dtype == np.float32:
            step = np.abs(values).max() / 15
            tensor.CopyFrom(numpy_helper.from_array((np.round(values / step) * step).astype(np.float32), tensor.name))
    path = tmp_path / "rounded.onnx"
    onnx.save(model, path)
    expected = module.evaluate(str(path), limit=8)
    ids = np.load(CLASSICS / "eval.npz")["ids"][:8].astype(np.int64)
    found = evaluate_windows(read_decoder(path), ids, against=read_decoder(CLASSICS / "optimum"), latency=False)
    assert found.perplexity == pytest.approx(expected["ppl"], rel=1e-6)
    assert found.agreement == pytest.approx(expected["top1_agree_with_float"], abs=1e-3)
    assert found.kl == pytest.approx(expected["kl_from_float"], rel=1e-2)  # the script has float logits in float16


@needs_classics
@pytest.mark.slow
def test_genai_generates_the_same_tokens() -> None:
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    decoder = read_decoder(CLASSICS / "genai")
    row = np.load(CLASSICS / "eval.npz")["ids"][0].astype(np.int64)
    made = generate_with_genai(decoder, row)
    assert made.error == ""
    assert list(made.tokens) == DecoderSession(decoder, threads=1).greedy(row[:16], 16)


def test_without_genai_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.llm.generation.PACKAGE", "no_such_package")
    made = generate_with_genai(read_decoder(write_folder(tmp_path / "a")), token_windows()[0])
    assert not made.installed
    assert "not installed" in made.error
