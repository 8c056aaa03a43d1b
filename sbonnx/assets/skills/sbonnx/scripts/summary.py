"""Summarize a JSON output of sbonnx: `python summary.py FILE`. The exit code is 1 if the result is not good enough."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Output = dict[str, Any]


def verdict(output: Output) -> list[str]:
    """Return the verdict, its problems, size and time of quantize, compare and prune."""
    metrics = output.get("metrics") or output
    lines = [f"{output['verdict']['accuracy']}: {output['verdict']['text']}"]
    lines += [f"problem: {problem}" for problem in output["problems"]]
    if metrics.get("bytes_float") and metrics.get("bytes_quantized"):
        lines.append(f"size: {metrics['bytes_quantized'] / metrics['bytes_float']:.2f} of float")
    if metrics.get("latency_ratio") is not None:
        interval = metrics.get("latency_interval")
        bounds = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "too few runs for an interval"
        busy = "; the machine was busy: no measurement" if metrics.get("busy") else ""
        lines.append(f"time: {metrics['latency_ratio']:.2f} of float ({bounds}){busy}")
    return lines


def findings(output: Output) -> list[str]:
    """Return counts and an example of each rule of lint."""
    rows: dict[str, list[Output]] = {}
    for finding in output["findings"]:
        rows.setdefault(finding["rule"], []).append(finding)
    lines = [", ".join(f"{count} {severity}" for severity, count in output["counts"].items())]
    for rule, places in rows.items():
        first = places[0]
        place = first["node"] or first["tensor"]
        lines.append(
            f"{rule} ({first['severity']}), {len(places)} x, first at {place}: {first['why']}. Fix: {first['mend']}"
        )
    return lines


def plan(output: Output) -> list[str]:
    """Return how many tensors would be quantized, and why others would not."""
    roles = Counter(site["role"] for site in output["sites"])
    lines = [f"{output['backend']}: " + ", ".join(f"{count} x {role}" for role, count in roles.items())]
    reasons = Counter(row["code"] or row["why"] for row in output["refusals"])
    first = {row["code"] or row["why"]: row for row in reversed(output["refusals"])}
    lines += [
        f"stays float, {count} x {key}: {first[key]['where']}: {first[key]['why']}" for key, count in reasons.items()
    ]
    return lines


def times(output: Output) -> list[str]:
    """Return the rows of bench."""
    return [
        f"{row['model']}: {row['median_ms']:.3f} ms, {row['ratio']:.2f} of the first"
        f"{'; the machine was busy: no measurement' if row['busy'] else ''}"
        for row in output["rows"]
    ]


SUMMARIES: Final[dict[str, Callable[[Output], list[str]]]] = {
    "quantize": verdict,
    "compare": verdict,
    "prune": verdict,
    "lint": findings,
    "plan": plan,
    "bench": times,
}


def main(path: str) -> int:
    """Print the summary of a file; return the exit code."""
    output = json.loads(Path(path).read_text(encoding="utf-8"))
    if output["schema"] not in SUMMARIES:
        print(f"no summary of {output['schema']}: there are {', '.join(SUMMARIES)}", file=sys.stderr)
        return 2
    print("\n".join(SUMMARIES[output["schema"]](output)))
    return int(not output.get("ok", True) or bool(output.get("counts", {}).get("error")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
