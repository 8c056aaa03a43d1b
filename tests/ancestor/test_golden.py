"""The ancestor's numbers, reproduced through the whole pipeline and read back from the exported file.

The cells were measured on the ancestor's own code, to six decimals. They hold under ``SCALE_RULE: sparsebit``, whose
symmetric scale is 2 absmax / (qmax - qmin); the default rule differs in the symmetric columns, on purpose.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.api.create import quantize
from sbonnx.quant_model import QuantModel
from sbonnx.spec import Array
from tests.ancestor.qconfigs import SPARSEBIT, scale_and_zero, virtual, written
from tests.support.models import model

Cell = tuple[float, int]

COLUMNS = (
    ("symmetric", 8, "x"),
    ("symmetric", 4, "x"),
    ("affine", 8, "x"),
    ("affine", 4, "x"),
    ("affine", 8, "relu"),
    ("affine", 4, "relu"),
)
"""Scheme, bits, and the tensor: the activation as it is, or without its negatives."""

GOLDEN: dict[str, tuple[Cell, ...]] = {
    "MINMAX": ((0.094401, 0), (1.604821, 0), (0.061256, 59), (1.041344, 3), (0.047201, 0), (0.802411, 0)),
    "MOVING_AVERAGE": ((0.061278, 0), (1.041729, 0), (0.039789, 59), (0.676410, 3), (0.030639, 0), (0.520865, 0)),
    "MSE": ((0.093457, 0), (1.412243, 0), (0.061256, 59), (0.905969, 3), (0.047201, 0), (0.746242, 0)),
    "PERCENTILE": ((0.093002, 0), (1.581043, 0), (0.060556, 59), (1.029455, 3), (0.045809, 0), (0.778750, 0)),
    "ACIQ": ((0.073447, 0), (0.812226, 0), (0.073447, 128), (0.812226, 8), (0.030319, 0), (0.359564, 0)),
}
"""Scale and zero point by observer, one cell a column."""

CASES = [
    pytest.param(observer, *column, *cell, id=f"{observer}-{'-'.join(map(str, column))}")
    for observer, cells in GOLDEN.items()
    for column, cell in zip(COLUMNS, cells, strict=True)
]

PRINTED = 0.5e-6 + 1e-9
"""Half of the last printed decimal, and the width of a float32 of this size."""

UNIFORM_WEIGHT_SCALE = 0.093333


def activation() -> Array:
    """The tensor of the golden table, (4, 8, 8, 8); -3.584 to 12.036158."""
    index = np.arange(4 * 8 * 8 * 8)
    t = ((37 * index) % 1009) / 504.5 - 0.8
    samples = 1 + 0.25 * np.arange(4)
    return np.asarray((4 * t**3).reshape(4, 8, 8, 8) * samples.reshape(4, 1, 1, 1), np.float32)


def weight() -> Array:
    """The weight of the golden table, (3, 2, 3, 3)."""
    return np.asarray((((17 * np.arange(54)) % 29) - 14) / 20, np.float32).reshape(3, 2, 3, 3)


def network() -> onnx.ModelProto:
    """Reads the golden activation as it is, and without its negatives."""
    return model(
        """agraph (float[N,8,8,8] x) => (float[N,3,6,6] y, float[N,2,8,8] z) {
            relu = Relu (x)
            c = Conv (x, w1)
            y = Conv (c, golden)
            z = Conv (relu, w1)
        }""",
        w1=(2, 8, 1, 1),
        golden=weight(),
    )


def check_cell(made: onnx.ModelProto, tensor: str, scale: float, zero_point: int) -> None:
    """Against the printed cell; by the file's initializers alone."""
    found, zero = scale_and_zero(made, tensor)
    assert float(found) == pytest.approx(scale, abs=PRINTED, rel=0)
    assert int(zero) == zero_point


def test_the_migration_guide_has_these_cells() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "migration" / "sparsebit.md").read_text(encoding="utf-8")
    for observer, cells in GOLDEN.items():
        assert f"| {observer} | {' | '.join(f'{scale:.6f}, {zero}' for scale, zero in cells)} |" in page


def test_the_table_is_fed_what_it_was_made_of() -> None:
    x = activation()
    assert (float(x.min()), float(x.max())) == pytest.approx((-3.584, 12.036158), abs=1e-6)


@pytest.mark.parametrize(("observer", "scheme", "bits", "tensor", "scale", "zero_point"), CASES)
def test_activations_by_hand(
    observer: str, scheme: str, bits: int, tensor: str, scale: float, zero_point: int, tmp_path: Path
) -> None:
    """The life cycle, two batches of two, and both readers of the file."""
    config = written(tmp_path, virtual(bits, scheme=scheme, observer=observer) + SPARSEBIT)
    x, path = activation(), tmp_path / "golden.onnx"
    with QuantModel(network(), config) as quantized:
        quantized.prepare_calibration()
        for batch in (x[:2], x[2:]):
            quantized({"x": batch})
        quantized.calc_qparams()
        quantized.export_onnx(path)
    check_cell(onnx.load(str(path)), tensor, scale, zero_point)
    (pair,) = [pair for pair in qdq.read(graphs.load(path)) if pair.source == tensor]
    assert float(pair.qparams.scale) == pytest.approx(scale, abs=PRINTED, rel=0)
    assert int(pair.qparams.zero_point) == zero_point
    assert (pair.qparams.spec.bits, pair.qparams.spec.signed) == (bits, scheme == "symmetric")


def test_how_the_samples_are_batched_does_not_matter(tmp_path: Path) -> None:
    """Each sample counts once in the moving average, whatever batch it came in."""
    config = written(tmp_path, virtual(8, observer="MOVING_AVERAGE") + SPARSEBIT)
    x, found = activation(), []
    for cuts in ([2], [1, 2, 3], [1], []):
        report = quantize(network(), [{"x": part} for part in np.split(x, cuts)], recipe=config, verify=False)
        assert report.quantized is not None
        found.append(float(scale_and_zero(report.quantized, "x")[0]))
    assert found == pytest.approx([0.039789] * 4, abs=PRINTED, rel=0)


def test_uniform_weights(tmp_path: Path) -> None:
    """4 bits, one symmetric scale an output channel; codes by hand from that scale."""
    config = written(tmp_path, virtual(4) + SPARSEBIT)
    report = quantize(network(), [{"x": activation()}], recipe=config, verify=False, rounding="nearest")
    assert report.quantized is not None
    scale, zero = scale_and_zero(report.quantized, "golden_quantized")
    assert scale.tolist() == pytest.approx([UNIFORM_WEIGHT_SCALE] * 3, abs=PRINTED, rel=0)
    assert zero.astype(np.int32).tolist() == [0, 0, 0]
    (codes,) = [one for one in report.quantized.graph.initializer if one.name == "golden_quantized"]
    by_hand = np.clip(np.rint(weight() / scale.reshape(3, 1, 1, 1)), -8, 7)
    assert np.array_equal(onnx.numpy_helper.to_array(codes).astype(np.int32), by_hand)
    assert codes.data_type == onnx.TensorProto.INT4


def test_the_default_rule_clips_nothing(tmp_path: Path) -> None:
    """absmax / 127, where the ancestor divides by 127.5 and clips the largest value by half a step."""
    config = written(tmp_path, virtual(8, scheme="symmetric"))
    x = activation()
    report = quantize(network(), [{"x": x}], recipe=config, verify=False)
    assert report.quantized is not None
    scale, _ = scale_and_zero(report.quantized, "x")
    assert float(scale) == pytest.approx(float(np.abs(x).max()) / 127, rel=1e-6)
