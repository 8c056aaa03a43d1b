"""Runs a network and variants of it on the same samples, and compares their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sbonnx.metrics.output_differences import Metric, OutputDifferences
from sbonnx.spec import Array


class RunsFeeds(Protocol):
    """Runs one feed and returns outputs by name, as sessions and simulations do."""

    def __call__(self, feeds: Mapping[str, Array], /, *, where: str = ...) -> Mapping[str, Any]:
        """Run the network; `where`: name of the feed in messages."""


def run_pairs(
    reference: RunsFeeds,
    variants: Sequence[RunsFeeds],
    samples: Iterable[tuple[str, Mapping[str, Array]]],
    names: Sequence[str],
    metric: Metric | None = None,
) -> tuple[OutputDifferences, ...]:
    """Run all networks on each sample, and return the differences of each variant from the reference.

    Outputs are paired by name. `sbonnx.metrics.ErrorSum` has the rule for missing outputs, other shapes and values that
    are not finite.

    Args:
        samples: (name in messages, feed).
        names: outputs to compare.
        metric: loss of a feed, for `OutputDifferences.losses`.

    Raises:
        DataError: a network cannot run on a sample.
    """
    differences = tuple(OutputDifferences(names) for _ in variants)
    for where, feed in samples:
        floats = dict(reference(feed, where=where))
        for variant, sums in zip(variants, differences, strict=True):
            values = variant(feed, where=where)
            sums.add([floats.get(name) for name in names], [values.get(name) for name in names])
            if metric is not None:
                sums.losses.append(float(metric({name: values[name] for name in names}, floats)))
    return differences
