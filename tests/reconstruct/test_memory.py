"""Memory of moments while a layer with many inputs is rounded, in matrices of K x K numbers in float64."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from sbonnx.pipeline import prepare
from sbonnx.planning import Solution
from sbonnx.stages.state import read_recipe, reconstruction_of, round_by_site
from tests.support.calibration import calibrate
from tests.support.models import model

INPUTS = 1536
TEXT = f"""agraph (float[N,{INPUTS}] x) => (float[N,16] y) {{
    r = Relu(x)
    y = MatMul(r, w)
}}"""


def rounded(memory: str, inputs: str = "quantized") -> tuple[Solution, float]:
    """Round a layer with many inputs by GPTQ; return the result and the matrices that were alive at the peak."""
    wishes = {"w_bit": 4, "a_bit": 8, "block_size": 32, "CALIBRATION.MOMENTS": inputs}
    recipe, backend = read_recipe(None, "virtual", wishes)
    ready = prepare(model(TEXT, w=(INPUTS, 16)), recipe, backend)
    random = np.random.default_rng(0)
    feeds = [{"x": random.standard_normal((8, INPUTS)).astype(np.float32)} for _ in range(10)]
    gc.collect()
    tracemalloc.start()
    try:
        found = calibrate(
            ready.graph, ready.plan, feeds, rounding=reconstruction_of(ready), solve=round_by_site, memory=memory
        )
        return found, tracemalloc.get_traced_memory()[1] / (8 * INPUTS**2)
    finally:
        tracemalloc.stop()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("memory", "inputs", "most"),
    [("1 GiB", "quantized", 4.7), ("264 MiB", "quantized", 2.0), ("1 GiB", "float", 2.0)],
    ids=["two streams", "quantized inputs alone", "float inputs"],
)
def test_matrices_at_the_peak(memory: str, inputs: str, most: float) -> None:
    """Of two streams 4.1, 1.3 of which are rows that wait to be multiplied, less with more inputs; of one 1.6.

    If two streams exceed the memory, the layer is fitted to its quantized inputs, which the report says.
    """
    found, matrices = rounded(memory, inputs)
    assert set(found.gains) == {"w"}
    assert found.gains["w"].loss < 0.1 * found.gains["w"].nearest
    assert matrices < most
    why = [refusal.why for refusal in found.refusals]
    assert len(why) == (memory == "264 MiB")
    assert all("fitted to its quantized inputs" in reason for reason in why)
