"""`Comparison`: measurements of a quantized file against its float model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from sbonnx.metrics import OutputDifference
from sbonnx.verify.kernels import Kernels

COLLAPSED_DB: Final = 3.0
"""Signal-to-noise ratio in dB below which an output is considered lost."""

GAP_DB: Final = 6.0
"""Gap in dB between calibration samples and hold-out samples above which calibration did not generalize."""

SURE: Final = 3.0
"""Minimum size of the gap in standard errors: outputs that depend on few samples differ by chance."""

FAIR_DB: Final = 15.0
"""With such a gap, a lower signal-to-noise ratio in dB on the hold-out set is a problem; a higher one gives a note."""


UNLIKE: Final = "calibrate on more samples, or on more different ones"


@dataclass(frozen=True)
class LevelDifference:
    """Error of one output of the quantized file at one of onnxruntime's optimization levels.

    Attributes:
        level: one of `sbonnx.verify.LEVEL_NAMES`.
        output: its name.
        sqnr_db: signal-to-noise ratio in dB against the float model.
        off_db: signal-to-noise ratio in dB against the same file at level "off"; inf if they are equal.
        max_abs: largest absolute difference from level "off", in units of the output.
        feeds: number of feeds that were run.
    """

    level: str
    output: str
    sqnr_db: float
    off_db: float
    max_abs: float
    feeds: int


@dataclass(frozen=True)
class Comparison:
    """Comparison of a quantized file with its float model, on the same feeds.

    Attributes:
        outputs: errors by output, in graph order.
        feeds: number of feeds that `outputs` were measured on.
        bytes_float, bytes_quantized: sizes of the files with their external data; 0 if there is no file.
        ms_float, ms_quantized: best latency of one run of the first feed, in milliseconds; both measured
            alternately in this process, with onnxruntime's default number of threads. 0 if not measured.
        median_ms_float, median_ms_quantized: median latency of the same runs.
        latency_runs: number of runs of each model.
        levels: errors by output and optimization level; empty if not measured.
        kernels: integer kernels on onnxruntime's CPU provider; None if not counted.
        dot_product: whether the CPU adds 8-bit products without saturation (VNNI, AMX).
        held_out: number of hold-out samples that `feeds` consist of; 0: none were held out.
        calibration: errors by output on calibration samples, if `outputs` are from a hold-out set.
    """

    outputs: tuple[OutputDifference, ...]
    feeds: int
    bytes_float: int
    bytes_quantized: int
    ms_float: float = 0.0
    ms_quantized: float = 0.0
    median_ms_float: float = 0.0
    median_ms_quantized: float = 0.0
    latency_runs: int = 0
    levels: tuple[LevelDifference, ...] = ()
    kernels: Kernels | None = None
    dot_product: bool = True
    held_out: int = 0
    calibration: tuple[OutputDifference, ...] = ()

    @property
    def latency_ratio(self) -> float | None:
        """Median latency of the quantized model divided by that of the float model: below 1 is faster."""
        return self.median_ms_quantized / self.median_ms_float if self.median_ms_float else None

    @property
    def size_ratio(self) -> float | None:
        """Size of the quantized file divided by that of the float one."""
        return self.bytes_quantized / self.bytes_float if self.bytes_float else None

    def problems(self) -> tuple[str, ...]:
        """List the reasons why the quantized model is unusable, one sentence per output."""
        found = [_collapsed(error) for error in self.outputs]
        found += [text for error, text in self._unlike() if error.sqnr_db < FAIR_DB and not _collapsed(error)]
        return tuple(text for text in found if text)

    def notes(self) -> tuple[str, ...]:
        """Warnings about outputs that pass the threshold, one sentence for each output."""
        return tuple(text for error, text in self._unlike() if error.sqnr_db >= FAIR_DB)

    def _unlike(self) -> Iterator[tuple[OutputDifference, str]]:
        """Yield the outputs that are much worse on the hold-out set than on calibration samples."""
        calibrated = {error.name: error for error in self.calibration}
        for error in self.outputs:
            other = calibrated.get(error.name, error)
            chance = SURE * math.hypot(error.spread_db, other.spread_db)
            if other.sqnr_db - error.sqnr_db > max(GAP_DB, chance):
                figures = f"{error.sqnr_db:.1f} dB on samples held out, {other.sqnr_db:.1f} dB on those calibrated on"
                yield error, f"output '{error.name}' has {figures}: {UNLIKE}"

    def collapsed(self) -> frozenset[str]:
        """Return the names of unusable outputs: of another shape, not finite, constant, frozen or lost in error."""
        return frozenset(error.name for error in self.outputs if _collapsed(error))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        plain = asdict(replace(self, kernels=None))
        kernels = None if self.kernels is None else self.kernels.to_dict()
        return {**plain, "kernels": kernels, "latency_ratio": self.latency_ratio, "size_ratio": self.size_ratio}


def _collapsed(error: OutputDifference) -> str:
    """Return the reason why an output is unusable, or ""."""
    if not error.compared:
        return f"output '{error.name}' has another shape than in float on all {error.mismatched} feeds"
    if error.not_finite:
        return f"output '{error.name}' has {error.not_finite} NaN or infinite values where float has none"
    if error.constant:
        return f"output '{error.name}' is the constant {error.low:.6g}, whatever the input"
    if error.frozen:
        return f"output '{error.name}' is the same for every sample, in float it is not"
    if error.sqnr_db < COLLAPSED_DB:
        return f"output '{error.name}' is lost in error: {error.sqnr_db:.1f} dB signal to noise"
    return ""
