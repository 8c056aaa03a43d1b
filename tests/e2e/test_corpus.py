"""The onnx package's own models: each is quantized and runs, or is refused in one line; none crashes."""

from __future__ import annotations

import pytest

from benchmarks.corpus import FOLDERS, survey

LEAST = {"light": 1, "pytorch-converted": 4, "node": 15}
"""Cases that must come out quantized for the virtual backend: so that refusing everything does not pass."""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "first"), [("onnxruntime", 0), ("tensorrt", 4), ("virtual", 8)])
def test_no_model_of_the_onnx_package_crashes(backend: str, first: int) -> None:
    """Each twelfth model for a backend. ``python -m benchmarks.corpus`` runs each for all."""
    outcomes = survey(FOLDERS, backend, first, 12)
    crashed = [f"{outcome.folder}/{outcome.case}: {outcome.why}" for outcome in outcomes if outcome.kind == "crashed"]
    assert not crashed, "\n".join(crashed)
    assert len(outcomes) > 1900 / 12
    if backend == "virtual":
        for folder, least in LEAST.items():
            assert sum(o.kind == "quantized" for o in outcomes if o.folder == folder) >= least, folder
