"""`Comparison`: what was measured of a quantized file beside its float model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from sbonnx.metrics import OutputDifference
from sbonnx.verify.kernels import Kernels

COLLAPSED_DB: Final = 3.0
"""Below this ratio of signal to error an output tells next to nothing of the float one."""

GAP_DB: Final = 6.0
"""Samples held out that are further than this below those calibrated on are not what calibration prepared for."""

SURE: Final = 3.0
"""Standard errors that the distance must be worth as well: outputs of which few samples matter differ by chance."""

FAIR_DB: Final = 15.0
"""With such a gap, less than this on samples held out is a problem; else it is a note."""


UNLIKE: Final = "calibrate on more samples, or on more different ones"


@dataclass(frozen=True)
class LevelDifference:
    """One output of the quantized file at one of onnxruntime's optimisation levels.

    Attributes:
        level: of `sbonnx.verify.LEVEL_NAMES`.
        output: its name.
        sqnr_db: signal to noise against the float model, decibel.
        off_db: signal to noise against the same file at level "off", decibel; inf where they are equal.
        max_abs: largest difference from level "off", units of the output.
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
    """A quantized file beside its float model, on the same feeds.

    Attributes:
        outputs: errors by output, in graph order.
        feeds: number of feeds that `outputs` are of.
        bytes_float, bytes_quantized: sizes of the files with their external data; 0 where there is no file.
        ms_float, ms_quantized: best latency of one run of the first feed, milliseconds; both measured
            turn by turn in this process, on as many threads as onnxruntime takes by itself. 0 where not measured.
        median_ms_float, median_ms_quantized: the median of the same runs.
        latency_runs: number of runs of each.
        levels: outputs by optimisation level; empty where not measured.
        kernels: what became an integer kernel on onnxruntime's CPU; None where not counted.
        dot_product: whether the processor that ran it adds products of 8 bits without saturation (VNNI, AMX).
        held_out: number of samples that were held out of calibration, and that `feeds` are made of; 0: none were.
        calibration: errors by output on samples that were calibrated on, where `outputs` are of others.
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
        """Quantized over float, of the medians: below 1 is faster."""
        return self.median_ms_quantized / self.median_ms_float if self.median_ms_float else None

    @property
    def size_ratio(self) -> float | None:
        """Quantized over float."""
        return self.bytes_quantized / self.bytes_float if self.bytes_float else None

    def problems(self) -> tuple[str, ...]:
        """What makes the quantized model useless, one sentence an output."""
        found = [_collapsed(error) for error in self.outputs]
        found += [text for error, text in self._unlike() if error.sqnr_db < FAIR_DB and not _collapsed(error)]
        return tuple(text for text in found if text)

    def notes(self) -> tuple[str, ...]:
        """Warnings about outputs that pass the threshold, one sentence for each output."""
        return tuple(text for error, text in self._unlike() if error.sqnr_db >= FAIR_DB)

    def _unlike(self) -> Iterator[tuple[OutputDifference, str]]:
        """Outputs that are much worse on samples held out than on those calibrated on."""
        calibrated = {error.name: error for error in self.calibration}
        for error in self.outputs:
            other = calibrated.get(error.name, error)
            chance = SURE * math.hypot(error.spread_db, other.spread_db)
            if other.sqnr_db - error.sqnr_db > max(GAP_DB, chance):
                figures = f"{error.sqnr_db:.1f} dB on samples held out, {other.sqnr_db:.1f} dB on those calibrated on"
                yield error, f"output '{error.name}' has {figures}: {UNLIKE}"

    def collapsed(self) -> frozenset[str]:
        """The outputs that `problems` names."""
        return frozenset(error.name for error in self.outputs if _collapsed(error))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, kernels=None))
        kernels = None if self.kernels is None else self.kernels.to_dict()
        return {**plain, "kernels": kernels, "latency_ratio": self.latency_ratio, "size_ratio": self.size_ratio}


def _collapsed(error: OutputDifference) -> str:
    """What makes an output useless, or ""."""
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
