"""A killed run of weight rounding continues at the layer where it ended: the bytes of an uninterrupted run."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx import llm, quantize
from sbonnx.calib.cache.entries import ROUNDED
from sbonnx.errors import DataError
from sbonnx.llm.kv_cache import OLDEST_KERNEL
from sbonnx.llm.layout import read_decoder
from sbonnx.reconstruct.layer_fit import LayerFitter
from sbonnx.system.runtime import version
from tests.conftest import PACK
from tests.llm.grouped_decoder import grouped_model, write_grouped_folder
from tests.llm.tiny_decoder import decoder_model, token_windows, write_folder
from tests.support.models import residual

ROOT = Path(__file__).resolve().parents[2]
MERGED = PACK / "llm_structures" / "merged_llama"

KILLED = """
import os, signal, sys
from sbonnx import llm
from sbonnx.reconstruct.layer_fit import LayerFitter
from tests.llm.test_resume import settings
from tests.llm.tiny_decoder import token_windows

take, seen = LayerFitter._take, []

def counted(self, one, layer, choice):
    seen.append(layer.node.name)
    if len(seen) > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    take(self, one, layer, choice)

LayerFitter._take = counted
output = sys.argv[2] + "/q"
llm.quantize(sys.argv[1], token_windows(), output=output, overrides=settings(sys.argv[2] + "/cache"), latency=False)
"""


def settings(cache: str | Path | None, **more: Any) -> dict[str, Any]:
    keys = {"MIN_WEIGHT_SIZE": 0, "CALIBRATION.THREADS": 1, "W.ROUNDING.SCALE": "search", "EMBEDDING_BITS": 4}
    return {**keys, **({} if cache is None else {"CALIBRATION.CACHE": str(cache)}), **more}


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that are rounded by moments in this process."""
    take, seen = LayerFitter._take, []

    def counted(self: LayerFitter, one: Any, layer: Any, choice: Any) -> None:
        seen.append(layer.node.name)
        take(self, one, layer, choice)

    monkeypatch.setattr(LayerFitter, "_take", counted)
    return seen


def quantized(folder: Path, output: Path, cache: Path | None, **more: Any) -> bytes:
    llm.quantize(folder, token_windows(), output=output, overrides=settings(cache, **more), latency=False)
    return (output / "model.onnx").read_bytes()


@pytest.mark.slow
def test_a_run_killed_twice(tmp_path: Path, rounded: list[str]) -> None:
    folder = write_folder(tmp_path / "m")
    whole = quantized(folder, tmp_path / "whole", None)
    layers = list(rounded)
    assert len(layers) >= 8
    for done in (2, 3):  # the second process restores two layers and rounds three more
        arguments = [sys.executable, "-c", KILLED, str(folder), str(tmp_path), str(done)]
        assert subprocess.run(arguments, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "q").exists()
    rounded.clear()
    assert quantized(folder, tmp_path / "q", tmp_path / "cache") == whole
    assert rounded == layers[5:]
    rounded.clear()
    assert quantized(folder, tmp_path / "again", tmp_path / "cache") == whole
    assert rounded == []


@pytest.mark.slow
def test_what_the_layers_belong_to(tmp_path: Path, rounded: list[str]) -> None:
    """Other settings round again and replace the layers; damage is noted; another model is an error."""
    folder, cache = write_folder(tmp_path / "m"), tmp_path / "cache"
    whole = quantized(folder, tmp_path / "a", cache)
    count = len(rounded)
    other = quantized(folder, tmp_path / "b", cache, **{"W.ROUNDING.GPTQ": {"DAMPING": 0.1}})
    assert other != whole
    assert len(rounded) == 2 * count
    assert len(list(cache.glob(f"*{ROUNDED}"))) == count
    assert quantized(folder, tmp_path / "c", cache) == whole
    damage(min(cache.glob(f"*{ROUNDED}")))
    rounded.clear()
    report = llm.quantize(folder, token_windows(), output=tmp_path / "d", overrides=settings(cache), latency=False)
    assert (tmp_path / "d" / "model.onnx").read_bytes() == whole
    assert len(rounded) == 1
    assert any("1 damaged entries" in note for note in report.notes)
    with pytest.raises(DataError, match="differs in model"):
        quantized(write_folder(tmp_path / "tied", decoder_model(tied=True)), tmp_path / "e", cache)


def damage(path: Path) -> None:
    """Change the values of one layer."""
    content = path.read_bytes()
    path.write_bytes(content[:-100] + bytes(100))


class StoppedError(Exception):
    pass


def test_biases_and_measured_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions with corrected biases and quantized activations, stopped after each layer."""
    feeds = [{"x": x} for x in np.random.default_rng(0).standard_normal((16, 1, 3, 8, 8)).astype(np.float32)]
    recipe: dict[str, Any] = {"W.QUANTIZER.BIT": 4, "VERIFY.LATENCY": False, "MIN_WEIGHT_SIZE": 0}
    cached = {**recipe, "CALIBRATION.CACHE": str(tmp_path / "cache")}
    model = residual()
    quantize(model, feeds, output=tmp_path / "whole.onnx", recipe=recipe)
    take, stop, seen = LayerFitter._take, [0], []

    def stopped(self: LayerFitter, one: Any, layer: Any, choice: Any) -> None:
        seen.append(layer.node.name)
        if len(seen) > stop[0]:
            raise StoppedError
        take(self, one, layer, choice)

    monkeypatch.setattr(LayerFitter, "_take", stopped)
    runs = 0
    while not (tmp_path / "q.onnx").exists():
        seen.clear()
        stop[0], runs = 1, runs + 1
        with suppress(StoppedError):
            quantize(model, feeds, output=tmp_path / "q.onnx", recipe=cached)
        assert runs < 20, f"no progress: {seen}"
    assert runs > 3
    assert (tmp_path / "q.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(version() < OLDEST_KERNEL, reason="onnxruntime has no kernel for quantized caches")
def test_widths_and_quantized_caches_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`average_bits` with `kv_bits`: widths of layers, 8-bit caches, and the same bytes."""
    folder, cache = write_grouped_folder(tmp_path / "m", grouped_model(1)), {"CALIBRATION.CACHE": str(tmp_path / "c")}
    take, left = LayerFitter._take, 3

    def write(name: str, **more: Any) -> bytes:
        keys = {"MIN_WEIGHT_SIZE": 0, "CALIBRATION.THREADS": 1, "EFFORT": "fast", "MIXED.FEEDS": 4, **more}
        output = tmp_path / name
        llm.quantize(folder, token_windows(), output=output, average_bits=4.5, kv_bits=8, overrides=keys, latency=False)
        return (output / "model.onnx").read_bytes()

    def interrupted(self: LayerFitter, one: Any, layer: Any, choice: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        take(self, one, layer, choice)

    whole = write("whole")
    decoder = read_decoder(tmp_path / "whole")
    assert len({weight.bits for weight in decoder.structure.weights}) > 1
    assert decoder.cache[0].dtype == np.int8
    with monkeypatch.context() as patch:
        patch.setattr(LayerFitter, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write("q", **cache)
    assert not (tmp_path / "q").exists()
    assert write("q", **cache) == whole
    assert write("again", **cache) == whole


@pytest.mark.slow
@pytest.mark.skipif(not MERGED.is_dir(), reason=f"no model in {MERGED}")
def test_layers_of_branches(tmp_path: Path, rounded: list[str]) -> None:
    """A merged decoder has its layers in branches, which are models of their own."""
    ids = np.random.default_rng(0).integers(2, 300, (16, 24))
    done = []
    for name, cache in (("whole", None), ("first", tmp_path / "cache"), ("again", tmp_path / "cache")):
        rounded.clear()
        llm.quantize(MERGED, ids, output=tmp_path / name, overrides=settings(cache), latency=False)
        done.append(((tmp_path / name / "decoder_model_merged.onnx").read_bytes(), len(rounded)))
    (whole, count), (first, stored), (again, repeated) = done
    assert first == again == whole
    assert count == stored > repeated == 0
