"""Table of kernel costs of this machine: that of its kind of CPU, with other prices where the measured ones differ.

A price is a formula of the sizes of a node. Its factor to that of the table of the kind is the median over the measured
sizes whose times agree, relative to the median of all kernels, the speed of the machine. Small differences are noise:
below `NOISE` the price stays that of the kind, or of the table that is replaced, so that two measurements lead to equal
plans. The table contains the measured factors, by which the next measurement is compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from math import copysign, exp, inf, log
from pathlib import Path
from statistics import median
from typing import ClassVar, Final

from sbonnx.backends.kernel_costs import Fit
from sbonnx.report.notebook import Result
from sbonnx.system.input_files import read_json
from sbonnx.tuning.cost_fit import Row, fits
from sbonnx.tuning.kernel_trials import Key, Trial

NOISE: Final = 1.25
"""Ratio of two times of a kernel that is not beyond noise."""

AGREEMENT: Final = 1.1
"""Ratio of the two shortest times of a size from which on the size does not count: a busy machine changes no price."""

RESOLUTION_NS: Final = 200.0
"""Time that is added to both sides of a ratio: shorter kernels are mostly the overhead of their call."""

UNSETTLED: Final = 0.1
"""Share of sizes whose times do not agree from which on the machine was busy."""

LEAST_NS: Final = 1.0


@dataclass(frozen=True)
class KernelPrice:
    """Measured price of a kernel.

    Attributes:
        kernel, variant, type: as in the table.
        measured: time relative to the table of the kind of CPU and to the speed of the machine; 1 is as expected.
        factor: of the price in the new table to that of the kind of CPU, relative to the speed of the new table.
        sizes: number of measured sizes.
    """

    kernel: str
    variant: str
    type: str
    measured: float
    factor: float
    sizes: int


@dataclass(frozen=True, repr=False)
class KernelTuning(Result):
    """Measurement of this machine's kernels.

    Attributes:
        path: file of the table.
        digest: of the table, as reports and the metadata of files name it.
        cpu: kind of CPU, whose table was the start.
        model: model of the CPU.
        onnxruntime: version.
        speed: median time of the kernels relative to the table of the kind of CPU.
        kernels: measured kernels; those with another price than that of the kind of CPU first.
        missing: kernels of the table that were not measured: without time, or not in this onnxruntime.
        unsettled: measured sizes whose times did not agree.
        sizes: measured sizes.
        seconds: duration of the measurement.
        busy: whether other processes used the processors meanwhile, or too many sizes are unsettled.
    """

    frame_of: ClassVar = "kernels"

    path: str
    digest: str
    cpu: str
    model: str
    onnxruntime: str
    speed: float
    kernels: tuple[KernelPrice, ...]
    missing: int
    unsettled: int
    sizes: int
    seconds: float
    busy: bool

    @property
    def changed(self) -> tuple[KernelPrice, ...]:
        """Return the kernels whose price is not that of the kind of CPU."""
        return tuple(kernel for kernel in self.kernels if kernel.factor != 1)


@dataclass(frozen=True)
class TunedPrices:
    """Prices by measured times.

    Attributes:
        speed: as it was measured.
        kernels: one for each measured kernel with an expected time.
        base: times on which the prices of the table are based, by kernel: measured now, or those of the table that is
            replaced.
        base_speed: likewise.
        new: formulas of kernels without an expected time.
    """

    speed: float
    kernels: tuple[KernelPrice, ...]
    base: Mapping[Key, float]
    base_speed: float
    new: tuple[Row, ...]

    def rows(self, bundled: Mapping[Key, Fit]) -> list[Row]:
        """Return the rows of the table: those of the kind of CPU times factor and speed, and new ones."""
        rows = []
        for key, fit in bundled.items():
            measured = self.base.get(key, 1.0)
            factor = factor_of(self.base_speed) * factor_of(measured)
            costs = {item.name: _rounded(factor * getattr(fit, item.name), 4) for item in fields(Fit)}
            rows.append({"kernel": key[0], "variant": key[1], "type": key[2], **costs, "measured": measured})
        return [*rows, *({**row, "measured": 1.0} for row in self.new)]


def factor_of(measured: float) -> float:
    """Return the factor of a price: 1 within noise of 1.

    Between `NOISE` and its square, the logarithm rises from 0 to that of the measured factor. So measurements on either
    side of the limit lead to factors that differ by no more than the times do twice.
    """
    size = abs(log(measured))
    beyond = min(size, 2 * max(size - log(NOISE), 0.0))
    return _rounded(exp(copysign(beyond, log(measured))), 2)


def retained(measured: float, before: float | None) -> float:
    """Return the measured time of the table that is replaced if the new one is within noise of it, else the new one."""
    if before is not None and abs(log(measured / before)) <= log(NOISE):
        return before
    return _rounded(measured, 3)


def prices(trials: Sequence[Trial], before: Mapping[Key, float], speed_before: float | None = None) -> TunedPrices:
    """Compute prices from times.

    Args:
        trials: with their times.
        before: measured times in the table that is replaced, by kernel.
        speed_before: its speed; None: there is no such table.
    """
    ratios: dict[Key, list[float]] = defaultdict(list)
    new: list[Row] = []
    for trial in trials:
        if trial.refused or not trial.agrees(AGREEMENT):
            continue
        ns = max(min(trial.times), LEAST_NS)
        if trial.expected_ns is None:
            new.append({**trial.case.row, "ns": ns})
        else:
            ratios[trial.key].append((ns + RESOLUTION_NS) / (trial.expected_ns + RESOLUTION_NS))
    middle = {key: median(values) for key, values in ratios.items()}
    speed = median(middle.values()) if middle else 1.0
    base = {**before, **{key: retained(value / speed, before.get(key)) for key, value in middle.items()}}
    kernels = [
        KernelPrice(*key, value / speed, factor_of(base[key]), len(ratios[key])) for key, value in middle.items()
    ]
    kernels.sort(key=lambda price: -abs(log(price.factor)))
    return TunedPrices(speed, tuple(kernels), base, retained(speed, speed_before), tuple(fits(new)))


def measured_in(path: Path) -> tuple[dict[Key, float], float | None]:
    """Return the measured times of a table and its speed; none and None if `sbonnx tune` did not write the file."""
    try:
        table = read_json(path)
        times = {(row["kernel"], row["variant"], row["type"]): row["measured"] for row in table["fits"]}
        numbers = [*times.values(), table["machine"]["speed"]]
    except (OSError, ValueError, KeyError, TypeError):  # it is replaced
        return {}, None
    if not all(isinstance(number, int | float) and 0 < number < inf for number in numbers):
        return {}, None
    return times, numbers[-1]


def disagreeing(trials: Collection[Trial]) -> int:
    """Return the number of sizes whose times do not agree."""
    return sum(bool(trial.times) and not trial.refused and not trial.settled for trial in trials)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
