"""Charts of losses by layer with matplotlib, and tables with pandas. Both are optional: ``sbonnx[plot]``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

TOP: Final = 20
"""Default number of layers in a chart."""

NAME_LENGTH: Final = 44
"""Characters of a layer's name; the middle of longer ones is left out."""


def optional(package: str, what: str) -> Any:
    """Import an optional package.

    Args:
        what: what needs it, for the message.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise ImportError(f"{what} needs {name}: pip install 'sbonnx[plot]'", name=name) from error


def bar_chart(
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    unit: str,
    higher_is_better: bool = False,
    limit: float | None = None,
    ax: Any = None,
) -> Any:
    """Draw horizontal bars, one group for each name, the first on top. A longer bar is a larger loss.

    Args:
        names: labels of the groups.
        series: values by name of the series; None and NaN leave a gap, infinite ones too, with a mark.
        title, unit: labels of the chart and of its axis.
        higher_is_better: bars go from the largest value down to each one, and the axis is inverted.
        limit: value that outputs must reach, drawn as a line; None: no line.
        ax: matplotlib axes to draw into; None: new ones, as high as the names need.

    Returns:
        The matplotlib axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is None:
        plt = optional("matplotlib.pyplot", "plot()")
        _, ax = plt.subplots(figsize=(8, 0.8 + 0.3 * max(len(names), 2)), layout="constrained")
    height = 0.8 / max(len(series), 1)
    every = [value for values in series.values() for value in values if value is not None and math.isfinite(value)]
    every += [] if limit is None else [limit]
    base = math.ceil(max(every, default=0.0) / 10) * 10.0 if higher_is_better else 0.0
    for index, (label, values) in enumerate(series.items()):
        places = [place - 0.4 + (index + 0.5) * height for place in range(len(names))]
        drawn = [value - base if value is not None and math.isfinite(value) else 0.0 for value in values]
        ax.barh(places, drawn, height, left=base, label=label)
        for place, value in zip(places, values, strict=True):
            if value is not None and math.isinf(value):
                ax.text(base, place, " ∞" if value > 0 else " −∞", va="center", fontsize="small")
    if limit is not None:
        ax.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"limit of the outputs, {limit:.3g}")
    ax.set_yticks(range(len(names)), _shortened(names))
    ax.invert_yaxis()
    if higher_is_better:
        ax.invert_xaxis()
    ax.set_xlabel(f"{unit}: a longer bar is a larger loss")
    ax.set_title(title)
    if len(series) > 1 or limit is not None:
        columns = len(series) + (limit is not None)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns)  # below, not over the bars
    return ax


def layer_names(layers: Sequence[tuple[str, str]]) -> list[str]:
    """Return unique names of (node, tensor): if a node reads several tensors, the tensor is named too."""
    times = Counter(node for node, _ in layers)
    return [node if times[node] == 1 else f"{node} ← {tensor}" for node, tensor in layers]


def _shortened(names: Sequence[str]) -> list[str]:
    """Leave out the middle of long names, but no part that tells them from others."""
    return [_shortest(name, set(names) - {name}) for name in names]


def _shortest(name: str, others: Collection[str]) -> str:
    lengths = range(NAME_LENGTH, len(name))
    short = ((_cut(name, length), {_cut(other, length) for other in others}) for length in lengths)
    return next((text for text, taken in short if text not in taken), name)


def _cut(name: str, length: int) -> str:
    half = length // 2
    return name if len(name) <= length else f"{name[: length - half - 1]}…{name[-half:]}"
