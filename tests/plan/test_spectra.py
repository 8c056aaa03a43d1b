"""Power spectra under a logarithm stay float, up to their bases, and the layers after them do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

import sbonnx
from tests.support.models import model

SPECTRUM = """
    real = Conv <strides=[16]> (sound, cosines)
    imaginary = Conv <strides=[16]> (sound, sines)
    a = Mul (real, real)
    flipped = Neg (imaginary)
    b = Pow (flipped, two)
    power = Add (a, b)
    frames = Transpose <perm=[0,2,1]> (power)
    mel = MatMul (frames, bank)
    floor = Clip (mel, least)
    decibels = Log (floor)
    h = MatMul (decibels, w)
    r = Relu (h)
    y = MatMul (r, v)
"""


def front_end() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    phases = 2 * np.pi * np.arange(1, 33)[:, None] * np.arange(64) / 64
    signal = rng.standard_normal((8, 1, 1, 512)) * np.exp(-rng.uniform(0, 9, (8, 1, 1, 1)))
    proto = model(
        f"agraph (float[1,1,512] sound) => (float[1,29,64] y) {{{SPECTRUM}}}",
        cosines=np.cos(phases)[:, None].astype(np.float32),
        sines=np.sin(phases)[:, None].astype(np.float32),
        bank=rng.uniform(0, 1, (32, 24)).astype(np.float32),
        w=rng.standard_normal((24, 128)).astype(np.float32),
        v=rng.standard_normal((128, 64)).astype(np.float32),
        two=np.float32(2),
        least=np.float32(1e-9),
    )
    return proto, [{"sound": sound.astype(np.float32)} for sound in signal]


def test_bases_and_banks_stay_float(tmp_path: Path) -> None:
    proto, feeds = front_end()
    report = sbonnx.quantize(proto, feeds, tmp_path / "q.onnx", kernel_costs="none", verify=False)
    weights = {site.tensor for site in report.sites if site.role == "weight"}
    assert weights == {"w", "v"}
    assert sum(refusal.code == "log-of-power" for refusal in report.refusals) == 3


def test_bases_that_are_computed_from_constants(tmp_path: Path) -> None:
    """The provider of QNN has integers for every other op: the logarithm of a power of 0 steps would be infinite."""
    proto = model(
        """agraph (float[1,64] sound) => (float[1,16] y) {
            phases = Mul (time, frequencies)
            basis = Cos (phases)
            real = MatMul (sound, basis)
            power = Mul (real, real)
            decibels = Log (power)
            y = MatMul (decibels, w)
        }""",
        time=np.arange(64, dtype=np.float32)[:, None],
        frequencies=(2 * np.pi * np.arange(1, 33)[None] / 64).astype(np.float32),
        w=(32, 16),
    )
    sounds = np.random.default_rng(0).standard_normal((8, 1, 64)) * np.geomspace(1e-3, 1, 8)[:, None, None]
    feeds = [{"sound": sound.astype(np.float32)} for sound in sounds]
    report = sbonnx.quantize(proto, feeds, tmp_path / "q.onnx", backend="qnn")
    left = {refusal.where for refusal in report.refusals if refusal.code == "log-of-power"}
    assert left == {"MatMul_0", "Mul_1", "Log_0"} and report.verdict.accuracy != "lost"
