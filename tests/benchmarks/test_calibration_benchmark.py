"""The benchmark of calibration: its arithmetic, and that both sides look at the same values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.calibration.runs import FIGURES, Effort, measure
from benchmarks.calibration.subjects import Subject, save_feeds
from benchmarks.calibration.table import Cell

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
small (float[N, 3, 8, 8] image) => (float[N, 4, 8, 8] y)
<float[4, 3, 3, 3] w, float[4, 4, 1, 1] v>
{
    c = Conv <pads = [1, 1, 1, 1]> (image, w)
    r = Relu (c)
    y = Conv (r, v)
}
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A small net with three samples."""
    folder = tmp_path_factory.mktemp("subject")
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(MODEL)
    for name, shape in (("w", (4, 3, 3, 3)), ("v", (4, 4, 1, 1))):
        tensor = onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        model.graph.initializer.append(tensor)
    onnx.save(model, str(folder / "small.onnx"))
    feeds = [{"image": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    save_feeds(folder / "small.npz", feeds)
    return Subject("small", folder / "small.onnx", folder / "small.npz")


@pytest.mark.slow
def test_every_figure_can_be_taken(subject: Subject) -> None:
    """The peer's agreement is checked on the way: it exits where its tensors or ranges are others."""
    found = measure(subject, Effort(repeats=1, count=3, peer_count=3, figures=FIGURES))
    assert not [remark for remark in found.remarks if not remark.startswith("other processes took")]
    for name in ("minmax ÷ float loop", "auto ÷ float loop", "minmax, peak − that of the float loop"):
        assert isinstance(found.cells[name], Cell), name
    assert "peer's Entropy s ÷ kl_histogram" in found.cells
