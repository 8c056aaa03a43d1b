"""The onnx package's own models: each is quantized and runs, or is refused in one line; none crashes."""

from __future__ import annotations

import pytest

from benchmarks.corpus import FOLDERS, survey

LEAST = {"light": 9, "pytorch-converted": 20, "node": 100}
"""Cases that must come out quantized for the virtual backend: so that refusing everything does not pass."""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "every"), [("onnxruntime", 1), ("tensorrt", 3), ("virtual", 1)])
def test_no_model_of_the_onnx_package_crashes(backend: str, every: int) -> None:
    """For TensorRT, whose float parts go the way of the others, each third."""
    outcomes = survey(FOLDERS, backend, every)
    crashed = [f"{outcome.folder}/{outcome.case}: {outcome.why}" for outcome in outcomes if outcome.kind == "crashed"]
    assert not crashed, "\n".join(crashed)
    assert len(outcomes) > 1900 / every
    if backend == "virtual":
        for folder, least in LEAST.items():
            assert sum(o.kind == "quantized" for o in outcomes if o.folder == folder) >= least, folder
