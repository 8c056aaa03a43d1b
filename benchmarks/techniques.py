"""Whether each technique lowers accuracy on held-out data when it is added to all others.

    python -m benchmarks.techniques [--models NAME ...] [--bits 8 4] [--samples 128] [--limit 400] [--write]

All techniques on, then each one switched off alone. Exit code 1 if one costs more than `ALLOWED` dB beyond chance.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks import scores
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import Estimate
from sbonnx.metrics import ratio_db
from sbonnx.spec import Array

ALLOWED: Final = 0.3
"""Largest loss of SQNR by a technique, dB."""

Overrides = Mapping[str, Any]

ON: Final[Overrides] = {
    "rounding": "gptq",
    "weight_scale": "search",
    "BIAS_CORRECTION": "empirical",
    "CALIBRATION.ASYM.ENABLE": True,
    "HEADS": "auto",
    "VERIFY.HELD_OUT": 0,
}
"""All techniques on."""

TECHNIQUES: Final[Mapping[str, Overrides]] = {
    "bias correction": {"BIAS_CORRECTION": "none"},
    "gptq": {"rounding": "nearest", "weight_scale": "observer"},
    "scale search": {"weight_scale": "observer"},
    "asym ranges": {"CALIBRATION.ASYM.RANGES": False},
    "share": {"CALIBRATION.MOMENTS.SHARE": 0.0},
    "heads": {"HEADS": "none"},
}
"""Settings that switch each technique off. Scale search reads moments that only rounding by inputs has: without gptq
there is none."""

ABOUT: Final = """`python -m benchmarks.techniques --write`. Gain of each technique at the outputs of the evaluation \
data: SQNR of the file with all techniques, less that without this one, dB, with its 95 % interval (paired bootstrap \
over samples). W8A8 and W4A8, backend onnxruntime, at most {samples} calibration and {limit} evaluation samples a \
model. Bold: a loss of more than {allowed:g} dB that chance does not explain. Off: biases not corrected; weights \
rounded to nearest, with ranges of the observer; ranges of the observer; ranges of activations in the float network; \
no error of the inputs compensated (`CALIBRATION.MOMENTS.SHARE: 0`); heads of detectors quantized."""


def noise(pack: Any, name: str, overrides: Overrides, samples: int | None, limit: int | None) -> Array:
    """Quantize a model; returns the energies of float outputs and errors on the evaluation data, (2, samples)."""
    feeds = pack.load_calib(name, limit=samples)
    entry = scores.subject(pack, name)
    with tempfile.TemporaryDirectory(prefix="techniques-") as folder:
        output = Path(folder) / "quantized.onnx"
        sbonnx.quantize(pack.model_path(name), feeds, output=output, verify=False, **overrides)
        found = scores.outputs(pack, name, output, limit)
    reference = scores.outputs(pack, name, limit=limit)
    return np.stack(scores.energies(reference, found, streams=entry["kind"] == "vad"))


def gain(on: Array, off: Array) -> Estimate:
    """Compute the gain in SQNR, dB, by paired bootstrap over samples.

    Args:
        on, off: energies of outputs and errors (2, samples), with the technique and without.
    """

    def difference(rows: Array) -> float:
        with_it, without = (ratio_db(*(float(x) for x in part[:, rows].sum(1))) for part in (on, off))
        return 0.0 if with_it == without else with_it - without

    return scores.estimate(difference, on.shape[1])


def harms(found: Estimate) -> bool:
    """Return whether a technique costs more than `ALLOWED` dB, and chance does not explain it."""
    return found.high < -ALLOWED


def shown(record: Record) -> str:
    """Format a gain as a table cell."""
    found = Estimate(**record)
    text = f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
    return f"**{text}**" if harms(found) else text


def main() -> int:
    """Measure, print the table and, with --write, update docs/results.md."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(scores.METRICS), choices=list(scores.METRICS))
    parser.add_argument("--bits", nargs="*", type=int, default=[8, 4], help="widths of weights")
    parser.add_argument("--samples", type=int, default=128, help="largest number of calibration samples")
    parser.add_argument("--limit", type=int, default=400, help="largest number of evaluation samples")
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pack, kept = load_pack(options.pack), Kept(options.kept)
    rows, harmful = [], []
    for bits in options.bits:
        for name in options.models:
            cells = _row(pack, kept, name, bits, (options.samples, options.limit))
            harmful += [f"{who} on {name} at {bits} bits" for who, one in cells.items() if harms(Estimate(**one))]
            rows.append([f"W{bits}A8", name, *map(shown, cells.values())])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    verdict = f"These lower it by more: {'; '.join(harmful)}." if harmful else "None lowers it by more."
    text = (
        f"## Techniques one by one\n\n**Whether a technique, added to the others, lowers held-out SQNR by more than "
        f"{ALLOWED:g} dB. {verdict}**\n\n"
        + ABOUT.format(samples=options.samples, limit=options.limit, allowed=ALLOWED)
        + "\n\n"
        + table(("widths", "model", *TECHNIQUES), rows)
    )
    print(text)
    if options.write:
        write_section("techniques", text)
    return int(bool(harmful))


def _row(pack: Any, kept: Kept, name: str, bits: int, most: tuple[int, int]) -> dict[str, Record]:
    """Return the gains of all techniques on one model."""
    start, runs = {**ON, "w_bit": bits}, dict[str, Array]()

    def measure(off: Overrides) -> Record:
        if "on" not in runs:
            runs["on"] = noise(pack, name, start, *most)
        return asdict(gain(runs["on"], noise(pack, name, {**start, **off}, *most)))

    return {
        who: kept.record((name, str(bits), str(most), who), partial(measure, off)) for who, off in TECHNIQUES.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
