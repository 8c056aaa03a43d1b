"""Files are identical for any order of the samples, batch size, number of threads, with and without compiled loops."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.assets import digits
from tests.support.normed import images, zoo
from tests.support.same_bytes import digest, digests_elsewhere

WIDTHS = ("w8a8", "w4a8", "w4a4")

ZOO: dict[str, dict[str, Any]] = {
    **{bits: {"bits": bits} for bits in WIDTHS},
    "fixed observers": {"bits": "w8a8", "observer": "percentile"},
    "gptq at 8 bits": {"bits": "w8a8", "rounding": "gptq"},
    "adaround": {"bits": "w4a8", "rounding": "adaround", "W.ROUNDING.ADAROUND.ITERATIONS": 200},
    "adaquant": {"bits": "w3a8", "rounding": "adaquant", "W.ROUNDING.ADAQUANT.ITERATIONS": 100},
    "one stream": {"bits": "w4a8", "CALIBRATION.MOMENTS.INPUTS": "float"},
    "tuned norms": {"bits": "w4a8", "SCHEDULE.BN_TUNING": True},
    "equalized": {"bits": "w4a8", "EQUALIZE.CROSS_LAYER": True, "EQUALIZE.SMOOTH_QUANT": True},
    "analytic": {"bits": "w4a8", "BIAS_CORRECTION": "analytic"},
    "scaled by activations": {"mode": "weight_only", "w_bit": 4, "EQUALIZE.AWQ": True, "rounding": "gptq"},
}
"""Recipes that use sums over samples, selected rows or held-out samples, and recipes that do not."""

SAMPLES = {"x": images(40)}


@pytest.fixture(scope="module")
def zoo_model() -> onnx.ModelProto:
    """Depthwise, grouped and transposed convolutions, products, batch norms."""
    return zoo(SAMPLES["x"])


@pytest.fixture(scope="module")
def some_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the bundled samples, as a file."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, image=np.load(digits().calib)["image"][:24])
    return path


KNOWN: dict[str, str] = {}
"""Digests of the cases that this process has computed."""


def plain(model: onnx.ModelProto, case: str) -> str:
    """Digest of a case with the samples as they come, in batches of 8, by two threads."""
    if case not in KNOWN:
        KNOWN[case] = digest(model, SAMPLES, split=8, threads=2, backend="virtual", **ZOO[case])
    return KNOWN[case]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ZOO)
def test_order_batches_and_threads(case: str, zoo_model: onnx.ModelProto) -> None:
    found = digest(zoo_model, SAMPLES, shuffle=2, split=7, threads=4, backend="virtual", **ZOO[case])
    assert found == plain(zoo_model, case)


@pytest.mark.slow
def test_compiled_loops_and_hash_seeds(zoo_model: onnx.ModelProto, tmp_path: Path) -> None:
    """In another process with another seed, without the loops."""
    path, data = tmp_path / "zoo.onnx", tmp_path / "zoo.npz"
    onnx.save(zoo_model, path)
    np.savez(data, x=SAMPLES["x"])
    runs = [{"backend": "virtual", "split": 5, **wishes} for wishes in ZOO.values()]
    found = digests_elsewhere(path, data, runs, hash_seed=1, compiled=False, blas_threads=3)
    assert dict(zip(ZOO, found, strict=True)) == {case: plain(zoo_model, case) for case in ZOO}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("bits", "backend"), [*((bits, "onnxruntime") for bits in WIDTHS), ("w8a8", "tensorrt")])
def test_the_bundled_model(bits: str, backend: str, some_digits: Path) -> None:
    data = dict(np.load(some_digits))
    wanted = digest(digits().model, data, bits=bits, split=8, backend=backend)
    assert digest(digits().model, data, bits=bits, shuffle=3, split=5, threads=1, backend=backend) == wanted


def test_a_moving_average_takes_samples_in_their_order(zoo_model: onnx.ModelProto) -> None:
    """An exception, by definition: later samples weigh more. Batches and threads still do not matter."""
    rising = {"x": SAMPLES["x"] * np.linspace(0.1, 2.0, 40, dtype=np.float32)[:, None, None, None]}
    wishes: dict[str, Any] = {"backend": "virtual", "bits": "w8a8", "observer": "moving_average"}
    wanted = digest(zoo_model, rising, split=8, threads=1, **wishes)
    assert digest(zoo_model, rising, split=5, threads=4, **wishes) == wanted
    assert digest(zoo_model, rising, shuffle=1, split=8, **wishes) != wanted


def test_a_limit_takes_the_first_samples(zoo_model: onnx.ModelProto) -> None:
    """An exception: in another order, those are other samples."""
    wishes: dict[str, Any] = {"backend": "virtual", "bits": "w8a8", "split": 1, "samples": 4}
    first = {"x": SAMPLES["x"][:4]}
    assert digest(zoo_model, SAMPLES, **wishes) == digest(zoo_model, first, **wishes)
    assert digest(zoo_model, SAMPLES, shuffle=1, **wishes) != digest(zoo_model, SAMPLES, **wishes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("digits", 16), ("cifar_resnet20", 8)])
def test_real_models(name: str, count: int, pack: Path, tmp_path: Path) -> None:
    """Three orders and three seeds, 1, 2 and 4 threads.

    The bundled model at all widths, with and without the compiled loops; the other, whose sums take numpy minutes, at
    4 bits, in two orders, and with the loops alone.
    """
    widths = WIDTHS if name == "digits" else ("w4a8",)
    model, data = (Path(digits().model), dict(np.load(digits().calib))) if name == "digits" else _of_pack(pack, name)
    data = {key: values[:count] for key, values in data.items()}
    path = tmp_path / "data.npz"
    np.savez(path, **data)
    runs = [{"bits": bits, "split": 4, "threads": 2} for bits in widths]
    wanted = digests_elsewhere(model, path, runs, hash_seed=0, compiled=True, blas_threads=1)
    orders = ((1, 32, 1, True), (2, 5, 4, False))
    for seed, split, threads, compiled in orders if len(widths) > 1 else orders[1:]:
        others = [{"bits": bits, "split": split, "threads": threads, "shuffle": seed} for bits in widths]
        found = digests_elsewhere(
            model, path, others, hash_seed=seed, compiled=compiled or len(widths) == 1, blas_threads=threads
        )
        assert found == wanted


def _of_pack(pack: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A model and its samples."""
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    feeds = reader.load_calib(name, limit=32)
    return pack / "models" / f"{name}.onnx", {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]}
