"""The onnx package's own models: each is quantized and runs, or is refused in one line; none crashes."""

from __future__ import annotations

import pytest

from benchmarks.corpus import FOLDERS, survey

LEAST = {"light": 1, "pytorch-converted": 2, "node": 7}
"""Cases that must come out quantized for the virtual backend: so that refusing everything does not pass."""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "first"), [("onnxruntime", 0), ("tensorrt", 16), ("virtual", 6)])
def test_no_model_of_the_onnx_package_crashes(backend: str, first: int) -> None:
    """Each 24th model for a backend. ``python -m benchmarks.corpus`` runs each for all."""
    outcomes = survey(FOLDERS, backend, first, 24)
    crashed = [f"{outcome.folder}/{outcome.case}: {outcome.why}" for outcome in outcomes if outcome.kind == "crashed"]
    assert not crashed, "\n".join(crashed)
    assert len(outcomes) > 1900 / 24
    if backend == "virtual":
        for folder, least in LEAST.items():
            assert sum(o.kind == "quantized" for o in outcomes if o.folder == folder) >= least, folder
