"""The pages of docs/results/: their sections in order, and the figure that each one begins with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

Table = list[dict[str, str]]


@dataclass(frozen=True)
class Page:
    """A page of results.

    Attributes:
        title: heading of the page, a question that its key figure answers.
        sections: names of its sections, from top to bottom.
        figure: returns its key figure, from the text of all its sections.
    """

    title: str
    sections: tuple[str, ...]
    figure: Callable[[str], str]


def section_of(text: str, section: str) -> str:
    """Return the text of a section.

    Raises:
        ValueError: there is no such section.
    """
    found = re.search(rf"<!-- begin {section} -->(.*?)<!-- end {section} -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the results have no section {section!r}")
    return found[1]


def table_of(text: str, section: str, *columns: str) -> Table:
    """Return the first table of a section that has all `columns`, each row by the names of the columns.

    Raises:
        ValueError: there is no such section, or it has no such table.
    """
    for lines in re.findall(r"(?:^\|.*\|\n)+", section_of(text, section), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines())
        if set(columns) <= set(head):
            return [dict(zip(head, row, strict=True)) for row in rows]
    raise ValueError(f"section {section!r} of the results has no table with the columns {columns}")


def number(cell: str) -> float | None:
    """Return the first number of a cell; None if it begins with another text."""
    found = re.match(r"[-+]?\d+(?:\.\d+)?", cell.replace("\u2212", "-").strip("*"))
    return None if found is None else float(found[0])


def _numbers(rows: Iterable[dict[str, str]], column: str) -> list[float]:
    return [value for row in rows if (value := number(row[column])) is not None]


def _where(rows: Table, column: str, name: str) -> Table:
    return [row for row in rows if row[column].strip("*").startswith(name)]


def _loss(cell: str) -> str:
    """Format a loss in points; a negative one as a gain: ``gain 0.19``."""
    loss = number(cell)
    if loss is None:
        raise ValueError(f"the cell {cell!r} is no loss")
    return f"{'gain' if loss < 0 else 'loss'} {abs(loss):.2f}"


def _span(values: list[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f} (median; {min(values):.{digits}f} to {max(values):.{digits}f})"


def _accuracy(text: str) -> str:
    found = re.search(r"\*\*(SQNR: at least .*? models)", section_of(text, "w8a8"))
    if found is None:
        raise ValueError("section 'w8a8' of the results has no verdict")
    return f"8 bits for onnxruntime, {found[1]}"


def _low_bits(text: str) -> str:
    rows = _where(table_of(text, "lowbit w4a8", "quantizer", "loss"), "quantizer", "default (gptq)")
    losses = ", ".join(f"{_loss(row['loss'])} on {row['model']}" for row in rows)
    return f"4-bit weights by default, points of top-1: {losses}"


def _latency(text: str) -> str:
    values = _numbers(table_of(text, "default latency", "÷ float"), "÷ float")
    return f"Time of a run over that of float, onnxruntime on CPU: {_span(values)}"


def _calibration(text: str) -> str:
    found = re.findall(r"EFFORT (\w+): ([\d.]+) times", section_of(text, "w8a8 cost"))
    ratios = ", ".join(f"{ratio} with EFFORT {effort}" for effort, ratio in found)
    return f"CPU of the whole command over that of onnxruntime's quantize_static, median: {ratios}"


def _observers(text: str) -> str:
    rows = [row for columns in ("minmax", "auto") for row in table_of(text, "observers", columns)]
    best = Counter(name for row in rows for name, cell in row.items() if cell.startswith("**"))
    name, wins = best.most_common(1)[0]
    metrics = {(row["model"], row["metric"]) for row in rows}
    return f"{name} is the best, or as good, on {wins} of {len(metrics)} metrics"


def _techniques(text: str) -> str:
    rows = table_of(text, "techniques", "widths", "gptq")
    gains = {widths: _numbers(_where(rows, "widths", widths), "gptq") for widths in ("W8A8", "W4A8")}
    return "SQNR that gptq adds, dB: " + ", ".join(f"{widths} {_span(values)}" for widths, values in gains.items())


def _pruning(text: str) -> str:
    rows = _where(table_of(text, "pruning", "way", "as float"), "way", "obs, at most 0.75")
    kept = ", ".join(f"{row['as float'].split()[0]} on {row['model']}" for row in rows)
    return f"Samples that keep their class at 0.75 of the multiplications, not trained: {kept}"


def _qat(text: str) -> str:
    rows = [row for row in table_of(text, "qat cifar", "network", "loss, points") if row["set"] == "clean"]
    losses = {name: _where(rows, "network", name)[0]["loss, points"] for name in ("w4a4 trained", "w4a4 calibrated")}
    trained, calibrated = (_loss(losses[name]) for name in ("w4a4 trained", "w4a4 calibrated"))
    return f"Top-1 of ResNet-20 at w4a4, in points: {trained} trained, {calibrated} only calibrated"


def _decoders(text: str) -> str:
    rows = [row for row in table_of(text, "llm", "KL from float") if row["weights"] == "w4 g32"]
    ours, others = (
        _where(rows, "quantizer", name)[0]["KL from float"].split()[0]
        for name in ("sbonnx default", "onnxruntime asymmetric (default)")
    )
    return f"KL from float in 4 bits, blocks of 32: {ours}, onnxruntime's default {others}"


def _scale(text: str) -> str:
    rows = _where(table_of(text, "scale", "way", "CPU s"), "way", "default")
    return f"A network of {rows[-1]['nodes']} nodes takes {rows[-1]['CPU s']} CPU s and {rows[-1]['peak MB']} MB"


def _kernels(text: str) -> str:
    rows = table_of(text, "cpus", "file", "÷ float")
    values = {name: _numbers(_where(rows, "file", name), "÷ float") for name in ("VNNI", "AVX2, pair-safe")}
    return "CPU time over that of float: " + "; ".join(f"{name} {_span(found)}" for name, found in values.items())


def _backends(text: str) -> str:
    found = re.search(r"SQNR above NNCF's: (.*?\))\.", section_of(text, "openvino"))
    if found is None:
        raise ValueError("section 'openvino' of the results has no mean")
    return f"OpenVINO: SQNR above NNCF's by {found[1].lstrip('+')}"


def _robustness(text: str) -> str:
    rows = table_of(text, "corpus")
    counts = [sum(_numbers(rows, name)) for name in ("quantized", "left float", "refused", "crashed")]
    return f"{counts[-1]:.0f} crashes in {sum(counts):,.0f} runs on the models of the onnx package"


def _zoo(text: str) -> str:
    found = re.search(r"(\d+ pretrained models), all defaults: (.*?\(geometric mean\))", section_of(text, "zoo"))
    if found is None:
        raise ValueError("section 'zoo' of the results has no counts")
    return f"{found[1]}: {found[2]}"


_LOW_BITS: Final = ("w4a8", "weight-only", "w4a4", "mixed", "vit", "time", "memory", "adaround")

PAGES: Final = {
    "accuracy": Page("How accurate are 8-bit files with default settings?", ("w8a8", "effort"), _accuracy),
    "low_bits": Page(
        "How much accuracy do 4-bit weights and activations cost?",
        tuple(f"lowbit {name}" for name in _LOW_BITS),
        _low_bits,
    ),
    "latency": Page(
        "How much faster are quantized files?",
        ("default latency", "default latency avx2", "tuned latency", "targets latency"),
        _latency,
    ),
    "calibration": Page("How much time and memory does a run take?", ("w8a8 cost", "calibration"), _calibration),
    "observers": Page("Which observer finds the best ranges?", ("observers",), _observers),
    "techniques": Page("What does each technique add?", ("techniques",), _techniques),
    "pruning": Page("How much of a network can be pruned?", ("pruning front", "pruning", "sparse weights"), _pruning),
    "training": Page(
        "How much accuracy does training recover?", ("qat cifar", "qat methods", "qat digits", "qat adapters"), _qat
    ),
    "decoders": Page(
        "How good are decoders (LLMs) in 4 bits?",
        ("llm", "llm forms", "llm mixtures", "llm memory", "llm speed"),
        _decoders,
    ),
    "scale": Page(
        "How large can networks and batches be?",
        ("scale", "soak", "batch wall", "batch kills", "batch overhead"),
        _scale,
    ),
    "kernels": Page("How do error and time depend on the CPU?", ("cpus", "kernels"), _kernels),
    "backends": Page(
        "How good are files for TensorRT, QNN and OpenVINO?",
        ("openvino", "openvino weights", "qnn", "targets lint", "targets half", "runtimes", "web levels"),
        _backends,
    ),
    "zoo": Page("Do pretrained models out of packages keep their accuracy?", ("zoo",), _zoo),
    "robustness": Page("Do unusual models or broken files crash it?", ("corpus", "architectures", "fuzz"), _robustness),
}
"""Pages by the name of their file."""
