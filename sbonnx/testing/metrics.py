"""The contract of task metrics."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.errors import SbonnxError
from sbonnx.metrics import TaskMetric, task_metric
from sbonnx.spec import Array

RELATIVE: Final = 1e-9
"""Tolerance of values whose sums are taken in another order."""

LabelledOutputs = tuple[Mapping[str, Array], Mapping[str, Any]]
"""Outputs of one feed by name, and its labels by name."""


def check_metric(name: str, feeds: Sequence[LabelledOutputs], worse: Sequence[LabelledOutputs]) -> None:
    """Check the task metric with this name.

    The clauses: `count` is 0 at first and grows with each feed; the value is finite and does not depend on the order of
    the feeds; a sample of weight 2 counts as two samples, and one of weight 0 as none; outputs and labels are not
    changed; worse outputs have a worse value, in the direction of `higher_is_better`; outputs that are not those of the
    metric raise an error of sbonnx.

    Args:
        name: of an installed or built-in metric.
        feeds: outputs and labels of at least two feeds.
        worse: the same labels with outputs that are worse.

    Raises:
        AssertionError: a clause is broken.
        RecipeError: there is no such metric.
    """
    assert len(feeds) > 1, f"metric '{name}': the check needs two feeds"
    kind = task_metric(name)
    where = f"metric '{name}'"
    empty = kind.make()
    assert empty.count == 0, f"{where}: its count is 0 without samples"
    counts, metric = [0], kind.make()
    for outputs, labels in feeds:
        before = copy.deepcopy((dict(outputs), dict(labels)))
        metric.add(outputs, labels)
        assert metric.count > counts[-1], f"{where}: its count grows with each feed"
        counts.append(metric.count)
        _check_equal(where, before, (dict(outputs), dict(labels)))
    value = metric.value()
    assert np.isfinite(value), f"{where}: the value is {value} and must be finite"
    assert _close(value, _filled(name, reversed(feeds)).value()), f"{where}: the order of the feeds does not matter"
    _check_weights(where, name, feeds, counts)
    other = _filled(name, worse).value()
    wrong = other >= value if kind.higher_is_better else other <= value
    assert not wrong, f"{where}: worse outputs have {other:g}, the others {value:g}, and higher_is_better is wrong"
    try:
        kind.make().add({}, {})
    except SbonnxError as error:
        assert "\n" not in str(error), f"{where}: its errors have one line"
    except Exception as error:
        raise AssertionError(f"{where}: outputs of other models raise DataError, not {error!r}") from error
    else:
        raise AssertionError(f"{where}: outputs of other models raise DataError")


def _check_weights(where: str, name: str, feeds: Sequence[LabelledOutputs], counts: Sequence[int]) -> None:
    """Compare weights 2 and 0 for the samples of the first feed with that feed twice, and without it."""
    metric = _filled(name, feeds)
    weights = np.ones(metric.count)
    assert _close(metric.value(), metric.value(weights)), f"{where}: weights of 1 change nothing"
    weights[: counts[1]] = 2
    twice = _filled(name, [feeds[0], *feeds]).value()
    assert _close(metric.value(weights), twice), f"{where}: a sample of weight 2 counts as two samples"
    weights[: counts[1]] = 0
    without = _filled(name, feeds[1:]).value()
    assert _close(metric.value(weights), without), f"{where}: a sample of weight 0 counts as none"


def _filled(name: str, feeds: Any) -> TaskMetric:
    metric = task_metric(name).make()
    for outputs, labels in feeds:
        metric.add(outputs, labels)
    return metric


def _close(one: float, other: float) -> bool:
    return bool(np.isclose(one, other, rtol=RELATIVE, atol=RELATIVE, equal_nan=True))


def _check_equal(where: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> None:
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys(), f"{where}: outputs and labels are not changed"
        for key in old:
            assert np.array_equal(old[key], new[key], equal_nan=np.asarray(old[key]).dtype.kind in "fc"), (
                f"{where}: '{key}' is not changed"
            )
