"""Tables of decoders: accuracy by width and quantizer, speed beside float and onnxruntime's own file, acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.calibration.table import Cell
from benchmarks.kept import Record
from benchmarks.llm.runs import FLOAT
from benchmarks.llm.ways import CACHES, ORT, OURS, TORCH
from benchmarks.scores import Estimate
from benchmarks.w8a8.table import shown

HEADER: Final = ("weights", "quantizer", "perplexity", "KL from float", "same top token", "MB", "CPU s")
SPEED_HEADER: Final = ("", "float", ORT, OURS, f"{OURS} / float", f"{OURS} / {ORT}")
DIGITS: Final = {"perplexity": 2, "kl": 4, "agreement": 4}
SPEEDS: Final = {"first": "time to first token, ms", "token": "time of a further token, ms"}

KL_SHARE: Final = 1 / 3
"""Largest share of the divergence of onnxruntime's default (asymmetric) at 4 bits, blocks of 32."""
TWO_BIT_RATIO: Final = 40 / 36.15
"""Largest ratio of the perplexity at 2 bits to float: 40 on all 160 windows, on which float has 36.15."""

TRAINED_SHARE: Final = 0.6
"""Largest share of the divergence of the default that is left after training, at 2 bits."""

CACHE_INCREASES: Final = {8: 0.0005, 4: 0.007}
"""Largest relative increase of the perplexity by quantized caches, by their bits."""

Records = Mapping[tuple[str, str], Record]
"""Records by (form, name of the row)."""


def lines(records: Records) -> list[list[str]]:
    """Return the rows of the table of accuracy."""
    return [_line(form, row, record) for (form, row), record in records.items()]


def _line(form: str, row: str, record: Record) -> list[str]:
    if record["note"]:
        return [form, row, record["note"].replace("|", "/"), "", "", "", ""]
    figures = {name: Estimate(**record[name]) for name in DIGITS}
    cells = [shown(figures[name], digits) for name, digits in DIGITS.items()]
    if form == FLOAT:
        return ["", row, cells[0], "", "", f"{record['mb']:.2f}", ""]
    return [form, row, *cells, f"{record['mb']:.2f}", f"{record['cpu']:.1f}"]


def acceptance(records: Records) -> list[str]:
    """Return a sentence for each requirement, with its figures and whether it is met.

    Requirements without the records of both sides are left out.
    """
    return [f"{'met' if met else '**missed**'}: {text}" for met, text in _requirements(records)]


def _requirements(records: Records) -> Iterator[tuple[bool, str]]:
    own = records.get(("w4 g32", f"{OURS} default"))
    plain = records.get(("w4 g32", f"{ORT} asymmetric (default)"))
    if own is not None and plain is not None:
        share = own["kl"]["value"] / plain["kl"]["value"]
        limit = f"at most {KL_SHARE:.2f}"
        yield share <= KL_SHARE, f"KL at w4 g32 over that of {ORT}'s default: {share:.2f}, {limit}"
    torch = records.get(("w4 g32", f"{TORCH} GPTQ"))
    if own is not None and torch is not None and not (own["note"] or torch["note"]):
        text = (
            f"CPU seconds at w4 g32 over those of GPTQ in torch, whole processes, ours with its evaluation: "
            f"{own['cpu']:.1f} / {torch['cpu']:.1f}, at most 1"
        )
        yield own["cpu"] <= torch["cpu"], text
    for form in dict.fromkeys(form for form, _ in records):
        mine = records.get((form, f"{OURS} default"))
        peers = {row: one for (at, row), one in records.items() if at == form and not row.startswith(OURS)}
        scored = {row: one for row, one in peers.items() if not one["note"]}
        if mine is None or mine["note"] or not scored:
            continue
        ahead = [row for row, one in scored.items() if _better(mine, one)]
        best = min(scored, key=lambda row: scored[row]["kl"]["value"])
        text = (
            f"lower KL and perplexity at {form}, in no larger file, than {len(ahead)} of {len(scored)} settings of "
            f"others; KL {mine['kl']['value']:.4f}, their lowest {scored[best]['kl']['value']:.4f} ({best})"
        )
        for row in (row for row in scored if row not in ahead):
            text += f"; {_figures(row, scored[row])}, {_figures('ours', mine)}"
        yield len(ahead) == len(scored), text
    plain = records.get((FLOAT, FLOAT))
    for bits, largest in CACHE_INCREASES.items():
        mine = records.get((CACHES, f"{OURS} {bits}-bit caches"))
        if plain is not None and mine is not None and not mine["note"]:
            increase = mine["perplexity"]["value"] / plain["perplexity"]["value"] - 1
            text = f"increase of the perplexity by {bits}-bit caches: {increase:.3%}, at most {largest:.2%}"
            yield increase <= largest, text
    for form in dict.fromkeys(form for form, _ in records if form.startswith("w2")):
        mine = records.get((form, f"{OURS} default"))
        if plain is not None and mine is not None and not mine["note"]:
            ratio = mine["perplexity"]["value"] / plain["perplexity"]["value"]
            trained = records.get((form, f"{OURS} --effort best"))
            if trained is not None and not trained["note"]:
                share = trained["kl"]["value"] / mine["kl"]["value"]
                text = f"KL at {form} after training over that without: {share:.2f}, at most {TRAINED_SHARE:.2f}"
                yield share <= TRAINED_SHARE, text
            yield ratio <= TWO_BIT_RATIO, f"perplexity at {form} over float: {ratio:.3f}, at most {TWO_BIT_RATIO:.3f}"


def _figures(name: str, record: Record) -> str:
    kl, perplexity = record["kl"]["value"], record["perplexity"]["value"]
    return f"{name} has perplexity {perplexity:.3f} and KL {kl:.4f} in {record['mb']:.2f} MB"


def _better(mine: Record, other: Record) -> bool:
    return mine["mb"] <= other["mb"] and all(
        mine[name]["value"] < other[name]["value"] for name in ("kl", "perplexity")
    )


def speed_lines(record: Record) -> list[list[str]]:
    """Return the rows of the table of speed: times, tokens per second and memory, with ratios of alternating rounds."""
    found = []
    for key, name in SPEEDS.items():
        times = record[key]
        cells = [str(Cell(tuple(times[each]))) for each in (FLOAT, ORT, OURS)]
        found.append([name, *cells, *(str(_ratio(times[OURS], times[other])) for other in (FLOAT, ORT))])
    rates = {name: [1000 / value for value in values] for name, values in record["token"].items()}
    cells = [str(Cell(tuple(rates[each]))) for each in (FLOAT, ORT, OURS)]
    found.append(["tokens/s", *cells, *(str(_ratio(rates[OURS], rates[other])) for other in (FLOAT, ORT))])
    memory = record["memory"]
    cells = [f"{memory[each]:.1f}" for each in (FLOAT, ORT, OURS)]
    found.append(["peak memory, MB", *cells, *(f"{memory[OURS] / memory[other]:.2f}" for other in (FLOAT, ORT))])
    return found


def _ratio(mine: list[float], other: list[float]) -> Cell:
    return Cell(tuple(a / b for a, b in zip(mine, other, strict=True)))
