"""JUnit XML of a batch: one test case per job, readable by Jenkins, GitLab, GitHub and Maven tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from xml.etree import ElementTree

from sbonnx.present.html.formatting import address, number, text
from sbonnx.present.html.overview import acceptance_of, elapsed

WRONG: Final = {"unaccepted": "failure", "refused": "failure", "skipped": "skipped"}
"""JUnit element by status; any other status except "done" is an error.

failure: the result does not meet the requirements. error: something broke.
"""

COUNTED: Final = {"failure": "failures", "error": "errors", "skipped": "skipped"}
"""Attribute of the suite that counts each element."""


def junit(report: Mapping[str, Any]) -> str:
    """Render the batch as one test suite. Its time is the wall time; jobs run in parallel, and have their own times.

    A failed shared step that no job reports becomes a test case too, so that CI fails whenever the exit code is not 0.

    Args:
        report: `dataclasses.asdict` of a `sbonnx.batch.jobs.job.BatchReport`, also after a round trip through JSON.

    Returns:
        The text of an XML file, with its declaration.
    """
    name = text(report.get("title")) or "batch"
    cases = [*_jobs(report, name), *_steps(report, name)]
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in COUNTED}
    work = sum(float(case.get("time", "0")) for case in cases)
    wall = elapsed(report.get("started"), report.get("finished"))
    total = f"{work if wall is None else wall:.3f}"
    whole = {"tests": str(len(cases)), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    root = ElementTree.Element("testsuites", {"name": name, **whole, "time": total})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": name, **whole, "skipped": str(counts["skipped"]), "time": total}
    )
    started = text(report.get("started"))
    if started:
        suite.set("timestamp", started[: len("2000-01-01T00:00:00")])  # without a time zone, as the schemas require
    properties = ElementTree.SubElement(suite, "properties")
    known = {
        "sbonnx.version": report.get("version"),
        "finished": report.get("finished"),
        "seconds of all jobs": f"{work:.3f}",
    }
    for key, value in known.items():
        ElementTree.SubElement(properties, "property", {"name": key, "value": text(value)})
    suite.extend(cases)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _jobs(report: Mapping[str, Any], suite: str) -> Iterable[ElementTree.Element]:
    for row in report.get("rows") or ():
        job, outcome = row["job"], row["outcome"]
        model = address(job.get("model")).rstrip("/").rpartition("/")[2].partition("?")[0]
        group = model.removesuffix(".onnx").replace(".", "_") or "model"  # dots would separate packages
        case = _case(text(job.get("name")), f"{suite}.{group}", outcome, row.get("advice") or {})
        lines = [f"model: {address(job.get('model'))}", f"target: {text(job.get('backend'))}"]
        lines.append(f"output: {address(job.get('output'))}")
        lines += [f"{one}: {'met' if one.met else 'not met'}" for one in acceptance_of(outcome)]
        if row.get("up_to_date"):
            case.set("time", "0.000")  # an up-to-date job took no time in this run
            lines.append("up to date: nothing was to be done")
        ElementTree.SubElement(case, "system-out").text = "\n".join(lines)
        yield case


def _steps(report: Mapping[str, Any], suite: str) -> Iterable[ElementTree.Element]:
    """Yield failed steps that no job reports as its outcome."""
    shown = {row["outcome"].get("key") for row in report.get("rows") or ()}
    titles = report.get("titles") or {}
    for key, outcome in (report.get("steps") or {}).items():
        if key not in shown and outcome.get("status") not in ("done", "skipped"):
            yield _case(text(titles.get(key) or key), f"{suite}.shared", outcome)


def _case(
    name: str, group: str, outcome: Mapping[str, Any], advice: Mapping[str, Any] | None = None
) -> ElementTree.Element:
    took = number(outcome.get("seconds")) or 0.0
    case = ElementTree.Element("testcase", {"name": name or "unnamed", "classname": group, "time": f"{took:.3f}"})
    status = text(outcome.get("status"))
    if status != "done":
        missed = [str(one) for one in acceptance_of(outcome) if not one.met]
        reason = address(outcome.get("reason")) or "; ".join(missed) or status
        kind = WRONG.get(status, "error")
        wrong = ElementTree.SubElement(case, kind, {"message": reason, "type": status or "unknown"})
        tries = [f"{text(advice.get('text'))}: {address(advice.get('command'))}"] if advice else []
        wrong.text = "\n".join([f"{status}: {reason}", *missed, *tries])
    return case
