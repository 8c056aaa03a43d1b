"""Charts on the pages of results, drawn from their tables while the site is built.

Each chart is an SVG file in light and in dark colours, which the theme shows by its `#only-light` and `#only-dark`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, Final

import matplotlib as mpl
import mkdocs_gen_files
from cycler import cycler

from benchmarks.pages import number, table_of

PAGES: Final = {"accuracy": ["accuracy"], "latency": ["latency"], "calibration": ["time", "memory"]}
"""Charts by page."""
HOME: Final = "index.md"
BEFORE: Final = "## What it promises\n"

Series = Mapping[str, Sequence[float | None]]

COLOURS: Final = {
    "light": {"text": "#333333", "grid": "#dddddd", "bars": ["#3949ab", "#e65100", "#2e7d32", "#8e24aa", "#757575"]},
    "dark": {"text": "#dddddd", "grid": "#444444", "bars": ["#9fa8da", "#ffb74d", "#81c784", "#ce93d8", "#bdbdbd"]},
}

MODELS: Final = {
    "mobilenetv2_tin200": "mobilenetv2",
    "mobilenetv1_tin200": "mobilenetv1",
    "ultraface_rfb320": "ultraface",
}
"""Shorter names of models, for the axes."""


def accuracy(text: str) -> tuple[list[str], Series]:
    """Return the SQNR of the outputs by model and quantizer, at 8 bits for onnxruntime."""
    rows = [row for row in table_of(text, "w8a8") if row["quantizer"] != "float"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    quantizers = list(dict.fromkeys(row["quantizer"] for row in rows))
    cells = {(row["model"], row["quantizer"]): number(row["SQNR, dB"]) for row in rows}
    return models, {name: [cells.get((model, name)) for model in models] for name in quantizers}


def latency(text: str) -> tuple[list[str], Series]:
    """Return the time of default files over float by model."""
    rows = table_of(text, "default latency")
    return [row["model"] for row in rows], {"time ÷ float": [number(row["÷ float"]) for row in rows]}


def calibration(text: str) -> tuple[list[str], Series]:
    """Return CPU seconds of whole commands by model."""
    rows = table_of(text, "w8a8 cost")
    columns = {
        "sbonnx --effort fast": "fast, CPU s",
        "sbonnx": "default, CPU s",
        "onnxruntime quantize_static": "quantize_static, CPU s",
    }
    return [row["model"] for row in rows], {
        name: [number(row[column]) for row in rows] for name, column in columns.items() if column in rows[0]
    }


def memory(text: str) -> tuple[list[str], Series]:
    """Return peaks of memory in MB of calibration by model: ours with mse, and the calibrators of onnxruntime."""
    rows = {row["figure"]: row for row in table_of(text, "calibration")}
    models = [name for name in next(iter(rows.values())) if name != "figure"]

    def values(figure: str) -> list[float | None]:
        return [number(rows[figure][model]) for model in models]

    extra = values("mse, peak \u2212 that of the float loop")
    ours = [
        None if base is None or more is None else base + more
        for base, more in zip(values("float loop, peak"), extra, strict=True)
    ]
    peers = {f"onnxruntime {name}": values(f"peer's {name}, peak") for name in ("MinMax", "Percentile", "Entropy")}
    return models, {"sbonnx mse": ours, **peers}


CHARTS: Final = {
    "accuracy": (accuracy, "SQNR of the outputs at 8 bits", "dB, more is better"),
    "latency": (latency, "Time of a run of default files on CPU", "of float, less is better"),
    "time": (calibration, "CPU time of the whole command", "s, less is better"),
    "memory": (memory, "Peak of memory of a calibration", "MB, less is better"),
}
"""Charts by name of their files: function, title and unit."""


def drawn(names: Sequence[str], series: Series, unit: str, scheme: str) -> str:
    """Draw grouped bars as SVG.

    Args:
        scheme: a key of `COLOURS`.
    """
    from matplotlib import pyplot as plt

    colours: Any = COLOURS[scheme]
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["text"])
    settings = {**text, "svg.fonttype": "none", "svg.hashsalt": "sbonnx", "font.family": "sans-serif", "font.size": 11}
    with mpl.rc_context({**settings, "axes.prop_cycle": cycler(color=colours["bars"])}):
        figure, axes = plt.subplots(figsize=(5.4, 3.7), layout="constrained")
        width = 0.84 / len(series)
        for index, (label, values) in enumerate(series.items()):
            places = [place - 0.42 + (index + 0.5) * width for place in range(len(names))]
            axes.bar(places, [0.0 if value is None else value for value in values], width, label=label)
        axes.set_xticks(range(len(names)), [MODELS.get(name, name) for name in names], rotation=35, ha="right")
        axes.set_ylabel(unit)
        axes.grid(axis="y", color=colours["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        if len(series) > 1:
            axes.legend(
                frameon=False,
                ncols=2 if len(series) == 4 else 3,
                loc="lower center",
                bbox_to_anchor=(0.45, 1.0),
                fontsize=9,
            )
        else:
            axes.axhline(1.0, color=colours["text"], linewidth=1)
        out = StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()


def chart(name: str, text: str, folder: str) -> str:
    """Write a chart in both schemes and return its block for a page.

    Args:
        name: a key of `CHARTS`.
        text: the page of results.
        folder: from the page of the block to the folder of results: "" or "results/".
    """
    read, title, unit = CHARTS[name]
    names, series = read(text)
    images = []
    for scheme in COLOURS:
        path = f"{name}_{scheme}.svg"
        with mkdocs_gen_files.open(f"results/{path}", "w") as out:
            out.write(drawn(names, series, unit, scheme))
        images.append(f"![{title}: {unit}]({folder}{path}#only-{scheme})")
    return f"<div markdown>\n**{title}** ({unit})\n\n{' '.join(images)}\n</div>\n"


def grid(charts: Sequence[str]) -> str:
    """Return charts side by side."""
    return "\n".join(['\n<div class="grid" markdown>\n', *charts, "</div>\n\n"])


def main() -> None:
    """Write the charts, and put them before the tables, and on the home page."""
    mpl.use("svg")
    home_charts = []
    for page, names in PAGES.items():
        with mkdocs_gen_files.open(f"results/{page}.md", "r") as file:
            text = file.read()
        title, rest = text.split("\n", 1)
        with mkdocs_gen_files.open(f"results/{page}.md", "w") as out:
            out.write(title + "\n" + grid([chart(name, text, "") for name in names]) + rest)
        home_charts += [chart(name, text, "results/") for name in names]
    with mkdocs_gen_files.open(HOME, "r") as file:
        home = file.read()
    more = "All models, tools and intervals: [Results](results/index.md).\n\n"
    assert BEFORE in home, f"{HOME} has no heading {BEFORE!r}"
    with mkdocs_gen_files.open(HOME, "w") as out:
        out.write(home.replace(BEFORE, "\n".join((grid(home_charts), more, BEFORE)), 1))


main()
