"""One quantization in a process of its own; the last line on stdout says what it cost.

    python -m benchmarks.lowbit.child '{"model": "m.onnx", "data": "d.npz", "count": 512, "overrides": {...}}'

Other keys: "backend", "output" (none: kept in memory), "gains": the loss of each layer is told too.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.calibration.subjects import Samples, Subject
from benchmarks.lowbit.ways import ALL_SAMPLES
from benchmarks.peers.measured import cpu_seconds, peak_mb

Told = dict[str, Any]


def main() -> int:
    """Run the job and print its outcome as JSON."""
    job = json.loads(sys.argv[1])
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    samples = Subject("", Path(job["model"]), Path(job["data"])).samples(job["count"])
    print(json.dumps(quantize(job, samples)))
    return 0


def quantize(job: Told, samples: Samples) -> Told:
    """Quantize the float file without verification and return cpu, wall, peak_mb, refusals, gains."""
    import time

    import onnxruntime  # noqa: F401  # imports are not counted

    import sbonnx
    import sbonnx.pipeline

    start, begin = cpu_seconds(), time.perf_counter()
    wishes: Told = {"backend": job.get("backend", "onnxruntime"), **ALL_SAMPLES, **job["overrides"]}
    if job.get("gains"):
        found = _losses(job, samples, wishes)
    else:
        report = sbonnx.quantize(job["model"], samples, output=job["output"], force=True, verify=False, **wishes)
        found = {"refusals": [str(refusal) for refusal in report.refusals if refusal.what == NOT_DONE]}
    cost = {"cpu": cpu_seconds() - start, "wall": time.perf_counter() - begin, "peak_mb": peak_mb()}
    return cost | found


NOT_DONE = "round by inputs"
"""Refusal of a layer that was not reconstructed."""


def _losses(job: Told, samples: Samples, wishes: Told) -> Told:
    """Return the losses of each layer: {layer: [loss after rounding, loss of nearest rounding]}."""
    from sbonnx.pipeline import solve
    from sbonnx.stages.state import Request, read_recipe

    backend = wishes.pop("backend")
    recipe, rules = read_recipe(None, backend, wishes)
    gains = solve(Request(job["model"], recipe, rules, data=samples)).solution.gains
    return {"gains": {key: [gain.loss, gain.nearest] for key, gain in gains.items()}}


if __name__ == "__main__":
    raise SystemExit(main())
