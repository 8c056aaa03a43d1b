"""Whether each technique lowers accuracy on held-out data when it is added to all others.

    python -m benchmarks.techniques [--models NAME ...] [--bits 8 4] [--draws 4 16] [--kept FILE] [--write]

All techniques on, then each one switched off alone, on several draws of the calibration samples. Exit code 1 if one
costs more than `ALLOWED` dB beyond chance.

Which of many codes of nearly equal error a layer gets depends on the last digits of its moments, and at 4 bits this
choice moves the error at the outputs by about 1 dB. So one file with a technique and one without it do not tell what
the technique gains: each draw of samples is another rounding, and the gain is the mean over the draws.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
from sbonnx.verify.intervals import t_quantile

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

DRAWN: Final = 0.8
"""Share of the calibration samples of a model that a draw has at most."""

WITH_HEADS: Final = ("detect", "faces")
"""Kinds of models that have heads."""

ABOUT: Final = """`python -m benchmarks.techniques --write`. Gain of each technique at the outputs of the evaluation \
data: SQNR of the file with all techniques, less that without this one, dB, mean over draws of the calibration \
samples with its 95 % interval, over draws (Student's t) and evaluation samples (paired bootstrap). {first} draws of \
{share:.0%} of the calibration samples, at most {samples}; {most} if an interval of the first ones includes a loss of \
{allowed:g} dB. At most {limit} evaluation samples. W8A8 and W4A8, backend onnxruntime. Bold: the interval is below \
-{allowed:g} dB; italic: only the mean is. Off: biases not corrected; weights rounded to nearest, with ranges of the \
observer; ranges of the observer; ranges of activations in the float network; no error of the inputs compensated \
(`CALIBRATION.MOMENTS.SHARE: 0`); heads of detectors quantized."""


def drawn(feeds: Sequence[Any], draw: int, most: int) -> list[Any]:
    """Return a random subset of calibration feeds, in their order: `DRAWN` of them, at most `most`."""
    count = min(most, math.ceil(DRAWN * len(feeds)))
    places = np.random.default_rng(draw).choice(len(feeds), count, replace=False)
    return [feeds[place] for place in sorted(places)]


def noise(pack: Any, name: str, overrides: Overrides, feeds: Sequence[Any], limit: int | None) -> Array:
    """Quantize a model; returns the energies of float outputs and errors on the evaluation data, (2, samples)."""
    entry = scores.subject(pack, name)
    with tempfile.TemporaryDirectory(prefix="techniques-") as folder:
        output = Path(folder) / "quantized.onnx"
        sbonnx.quantize(pack.model_path(name), feeds, output=output, verify=False, **overrides)
        found = scores.outputs(pack, name, output, limit)
    return np.stack(scores.energies(_floats(pack, name, limit), found, streams=entry["kind"] == "vad"))


@cache
def _floats(pack: Any, name: str, limit: int | None) -> scores.Outputs:
    """Return the outputs of the float model."""
    return scores.outputs(pack, name, limit=limit)


def gain(on: Sequence[Array], off: Sequence[Array]) -> Estimate:
    """Compute the mean gain in SQNR over draws, dB, with an interval over draws and evaluation samples.

    The half width is the root of the summed squares of that of the mean over draws (Student's t) and of that of the
    evaluation samples (paired bootstrap); with one draw, the latter.

    Args:
        on, off: by draw, energies of outputs and errors (2, samples), with the technique and without.
    """

    def by_draw(rows: Array) -> list[float]:
        return [
            _db(a[:, rows]) - _db(b[:, rows]) if not np.array_equal(a, b) else 0.0 for a, b in zip(on, off, strict=True)
        ]

    by_samples = scores.estimate(lambda rows: statistics.fmean(by_draw(rows)), on[0].shape[1])
    each = by_draw(np.arange(on[0].shape[1]))
    spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    half = t_quantile(len(each) - 1) * spread if spread else 0.0
    value = by_samples.value
    below, above = (math.hypot(half, value - end) for end in (by_samples.low, by_samples.high))
    return Estimate(value, value - below, value + above)


def _db(energies: Array) -> float:
    signal, error = (float(row.sum()) for row in energies)
    return ratio_db(signal, error)


def harms(found: Estimate) -> bool:
    """Return whether a technique costs more than `ALLOWED` dB, and chance does not explain it."""
    return found.high < -ALLOWED


def is_open(found: Estimate) -> bool:
    """Return whether a mean loss of `ALLOWED` dB is within the interval."""
    return found.low <= -ALLOWED <= found.high


def shown(found: Estimate | None) -> str:
    """Format a gain as a table cell; None: the technique does not apply."""
    if found is None:
        return "no head"
    text = f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
    return f"**{text}**" if harms(found) else f"*{text}*" if found.value < -ALLOWED else text


def verdict(rows: Mapping[tuple[int, str], Mapping[str, Estimate | None]]) -> str:
    """Say which techniques lower the SQNR by more than `ALLOWED`, and for which the mean does but not the interval.

    Args:
        rows: gains by bits and model, and by technique.
    """
    harmful: list[str] = []
    unclear: list[str] = []
    for (bits, name), cells in rows.items():
        for who, found in cells.items():
            if found is not None and found.value < -ALLOWED:
                (harmful if harms(found) else unclear).append(f"{who} on {name} at {bits} bits")
    said = f"These lower it by more: {'; '.join(harmful)}." if harmful else "None lowers it by more."
    return said + (f" The mean is lower, but not the interval: {'; '.join(unclear)}." if unclear else "")


@dataclass
class Measured:
    """Runs of the models.

    Attributes:
        pack: evaluation module of the pack.
        kept: records of earlier runs.
        samples, limit: largest numbers of calibration and evaluation samples.
        draws: first number of draws, and the number if the first ones leave a technique open.
    """

    pack: Any
    kept: Kept
    samples: int
    limit: int
    draws: tuple[int, int]

    def row(self, name: str, bits: int) -> tuple[int, dict[str, Estimate | None]]:
        """Return the number of draws and the gains of all techniques on a model; None if one does not apply."""
        has_head = self.pack.entry(name)["kind"] in WITH_HEADS
        used = [who for who in TECHNIQUES if who != "heads" or has_head]
        for count in self.draws:
            on = self._runs(name, bits, "all", count)
            gains = {who: gain(on, self._runs(name, bits, who, count)) for who in used}
            if not any(is_open(found) for found in gains.values()):
                break
        return count, {who: gains.get(who) for who in TECHNIQUES}

    def _runs(self, name: str, bits: int, off: str, count: int) -> list[Array]:
        """Return the energies of each draw with all techniques but `off`."""
        return [
            np.array(self.kept.record(key, partial(self._run, name, bits, off, draw))["energies"])
            for draw in range(count)
            for key in [(name, str(bits), f"{self.samples} {self.limit}", str(draw), off)]
        ]

    def _run(self, name: str, bits: int, off: str, draw: int) -> Record:
        feeds = drawn(self.pack.load_calib(name), draw, self.samples)
        settings = {**ON, "w_bit": bits, **TECHNIQUES.get(off, {})}
        return {"energies": noise(self.pack, name, settings, feeds, self.limit).tolist()}


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(scores.METRICS), choices=list(scores.METRICS))
    parser.add_argument("--bits", nargs="*", type=int, default=[8, 4], help="widths of weights")
    parser.add_argument(
        "--draws", nargs=2, type=int, default=[4, 16], help="draws, and draws where these leave it open"
    )
    parser.add_argument("--samples", type=int, default=128, help="largest number of calibration samples")
    parser.add_argument("--limit", type=int, default=400, help="largest number of evaluation samples")
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    options = parser.parse_args()
    first, most = options.draws
    if not 1 <= first <= most:
        parser.error("--draws wants two numbers, the smaller one first")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    measured = Measured(load_pack(options.pack), Kept(options.kept), options.samples, options.limit, (first, most))
    found, rows = {}, []
    for bits in options.bits:
        for name in options.models:
            count, gains = measured.row(name, bits)
            found[bits, name] = gains
            rows.append([f"W{bits}A8", name, str(count), *map(shown, gains.values())])
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    about = ABOUT.format(
        first=first, most=most, share=DRAWN, samples=options.samples, limit=options.limit, allowed=ALLOWED
    )
    text = (
        f"## Techniques one by one\n\n**Whether a technique, added to the others, lowers held-out SQNR by more than "
        f"{ALLOWED:g} dB. {verdict(found)}**\n\n{about}\n\n" + table(("widths", "model", "draws", *TECHNIQUES), rows)
    )
    print(text)
    if options.write:
        write_section("techniques", text)
    return int(any(harms(each) for cells in found.values() for each in cells.values() if each is not None))


if __name__ == "__main__":
    raise SystemExit(main())
