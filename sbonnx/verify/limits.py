"""Thresholds for the comparison of a quantized file with its float model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from sbonnx.errors import RecipeError
from sbonnx.report.codes import Problem
from sbonnx.report.comparison import Comparison

LEVELS_DB: Final = 20.0
"""Signal-to-noise ratio in dB against level "off" above which a level agrees with it."""

LEVELS_MARGIN_DB: Final = 3.0
"""Levels further apart still agree if their signal-to-noise ratios against float differ by no more than this.

With few bits, a code that rounds the other way changes the output as much as quantization does.
"""

Least = float | Mapping[str, float] | None
"""One threshold for all outputs, or one per output name."""


@dataclass(frozen=True)
class Limits:
    """Thresholds, each None if not set. The names are those of the recipe's VERIFY section.

    Attributes:
        min_sqnr_db: minimum signal-to-noise ratio of the outputs against float, in dB.
        min_cosine: minimum cosine similarity between the outputs and the float ones.
        max_size_ratio: maximum file size relative to the float file.
        max_latency_ratio: maximum latency relative to the float model.
        min_integer: minimum share of the planned ops that run in integers.
        levels_db: minimum signal-to-noise ratio of each optimization level against "off", in dB; None: see `LEVELS_DB`.
        names: display names of the thresholds by their keys in VERIFY; the key is the default.
    """

    min_sqnr_db: Least = None
    min_cosine: Least = None
    max_size_ratio: float | None = None
    max_latency_ratio: float | None = None
    min_integer: float | None = None
    levels_db: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def _name(self, key: str) -> str:
        return self.names.get(key, f"VERIFY.{key}")

    def check_outputs(self, names: Collection[str]) -> None:
        """Check that all outputs with their own threshold exist.

        Raises:
            RecipeError: an output does not exist.
        """
        for key, wanted in (("MIN_SQNR_DB", self.min_sqnr_db), ("MIN_COSINE", self.min_cosine)):
            for name in wanted if isinstance(wanted, Mapping) else ():
                if name not in names:
                    there = ", ".join(f"'{output}'" for output in names)
                    raise RecipeError(f"{self._name(key)}: the model has no output '{name}': there are {there}")

    def problems(self, comparison: Comparison) -> tuple[Problem, ...]:
        """List one sentence per violated threshold: quantity, measured value, threshold, name of the threshold."""
        return (
            *self._outputs(comparison),
            *self.quality(comparison),
            *self._levels(comparison),
            *self._ratios(comparison),
            *self._not_judged(comparison),
        )

    def below(self, comparison: Comparison) -> tuple[Problem, ...]:
        """List the outputs that are unusable, or below a threshold or their quality line."""
        return (*comparison.problems(), *self._outputs(comparison), *self.quality(comparison))

    def _not_judged(self, comparison: Comparison) -> Iterator[Problem]:
        compared = {error.name for error in comparison.outputs}
        for key, wanted in (("MIN_SQNR_DB", self.min_sqnr_db), ("MIN_COSINE", self.min_cosine)):
            if wanted is not None and not comparison.feeds:
                text = f"nothing was compared with float, as there was no data; {self._name(key)} asks for it"
                yield Problem("limit-not-judged", text)
            elif isinstance(wanted, Mapping):
                for name in sorted(wanted.keys() - compared):
                    text = f"output '{name}' is not numeric; {self._name(key)} asks for {wanted[name]:g}"
                    yield Problem("limit-not-judged", text)

    def _outputs(self, comparison: Comparison) -> Iterator[Problem]:
        lost = comparison.collapsed()
        for error in comparison.outputs:
            if error.name in lost:
                continue  # `Comparison.problems` already reports it
            least = _for(self.min_sqnr_db, error.name)
            if least is not None and error.sqnr_db < least:
                figure = f"has {error.sqnr_db:.2f} dB SQNR"
                text = f"output '{error.name}' {figure}, {self._name('MIN_SQNR_DB')} asks for {least:g}"
                yield Problem("limit-missed", text)
            least = _for(self.min_cosine, error.name)
            if least is not None and error.cosine < least:
                figure = f"has the cosine {error.cosine:.6f} to the float one"
                text = f"output '{error.name}' {figure}, {self._name('MIN_COSINE')} asks for {least:g}"
                yield Problem("limit-missed", text)

    def quality(self, comparison: Comparison) -> Iterator[Problem]:
        """Yield the outputs that are lost, except outputs for which the user set a threshold. Labels decide alone."""
        if comparison.evaluation is not None:
            return
        lost = comparison.collapsed()
        for output in comparison.quality:
            limited = any(_for(least, output.name) is not None for least in (self.min_sqnr_db, self.min_cosine))
            if output.problem is not None and output.name not in lost and not limited:
                yield output.problem

    def _levels(self, comparison: Comparison) -> Iterator[Problem]:
        off = {row.output: row for row in comparison.levels if row.level == "off"}
        for name, plain in off.items():
            others = [row for row in comparison.levels if row.output == name and row.level != "off"]
            if self.levels_db is not None:
                apart = [row for row in others if row.off_db < self.levels_db]
            else:
                apart = [row for row in others if row.off_db < LEVELS_DB]
                apart = [row for row in apart if abs(row.sqnr_db - plain.sqnr_db) > LEVELS_MARGIN_DB]
            if apart:
                worst = min(apart, key=lambda row: row.off_db)
                levels = " and ".join(f"'{row.level}'" for row in apart)
                asked = "" if self.levels_db is None else f", {self._name('LEVELS_DB')} asks for {self.levels_db:g}"
                own = comparison.cpu if comparison.saturating else "this CPU"
                why = "" if comparison.dot_product else f"; 8-bit products of {own} saturate: it has no VNNI"
                yield Problem(
                    "levels-differ",
                    f"output '{name}' depends on onnxruntime's optimisation level: at {levels} it is "
                    f"{worst.off_db:.1f} dB from that at 'off'{asked} ({worst.sqnr_db:.1f} dB from float, "
                    f"at 'off' {plain.sqnr_db:.1f} dB){why}",
                )

    def _ratios(self, comparison: Comparison) -> Iterator[Problem]:
        size, latency = comparison.size_ratio, comparison.latency_ratio
        kernels = comparison.kernels
        share = None if kernels is None else kernels.share
        if self.max_size_ratio is not None and size is not None and size > self.max_size_ratio:
            key = f"{self._name('MAX_SIZE_RATIO')} allows {self.max_size_ratio:g}"
            yield Problem("limit-missed", f"the file has {size:.3f} of the float size, {key}")
        if self.max_latency_ratio is not None:
            key = f"{self._name('MAX_LATENCY_RATIO')} allows {self.max_latency_ratio:g}"
            if latency is None:
                why = "models over 1 GiB are opened one after the other" if comparison.feeds else "there was no data"
                why = f"the file is for another CPU, {comparison.cpu}" if comparison.for_other_cpu else why
                yield Problem("limit-not-judged", f"the latency was not measured: {why}; {key}")
            elif latency > self.max_latency_ratio:
                yield Problem("limit-missed", f"a run takes {latency:.3f} of the float time, {key}")
        if self.min_integer is not None:
            key = f"{self._name('MIN_INTEGER')} asks for {self.min_integer:g}"
            if kernels is None or kernels.skipped:
                skipped = "" if kernels is None else f": {kernels.skipped}"
                yield Problem("limit-not-judged", f"integer kernels were not counted{skipped}, {key}")
            elif share is not None and share < self.min_integer:
                first = next(iter(kernels.left_float), None)
                example = f" (first: '{first.node}': {first.why})" if first is not None else ""
                text = f"{kernels.summary()} run in integers, a share of {share:.3f}, {key}{example}"
                yield Problem("limit-missed", text)


def _for(least: Least, output: str) -> float | None:
    return least.get(output) if isinstance(least, Mapping) else least
