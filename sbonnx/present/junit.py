"""JUnit XML of a batch: one test case per job, readable by Jenkins, GitLab, GitHub and Maven tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from sbonnx.present.html.formatting import address, plain, text
from sbonnx.present.html.overview import acceptance_of, elapsed, metric_before
from sbonnx.report.comparison import CommandAdvice

if TYPE_CHECKING:
    from sbonnx.batch.jobs.job import BatchReport, Outcome

WRONG: Final = {"unaccepted": "failure", "refused": "failure", "skipped": "skipped"}
"""JUnit element by status; any other status except "done" is an error.

failure: the result does not meet the requirements. error: something broke.
"""

COUNTED: Final = {"failure": "failures", "error": "errors", "skipped": "skipped"}
"""Attribute of the suite that counts each element."""


def junit(report: BatchReport) -> str:
    """Render the batch as one test suite. Its time is the wall time; jobs run in parallel, and have their own times.

    A failed shared step that no job reports becomes a test case too, so that CI fails whenever the exit code is not 0.

    Returns:
        The text of an XML file, with its declaration.
    """
    name = text(report.title) or "batch"
    cases = [*_jobs(report, name), *_steps(report, name)]
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in COUNTED}
    work = sum(float(case.get("time", "0")) for case in cases)
    wall = elapsed(report.started, report.finished)
    total = f"{work if wall is None else wall:.3f}"
    whole = {"tests": str(len(cases)), "failures": str(counts["failure"]), "errors": str(counts["error"])}
    root = ElementTree.Element("testsuites", {"name": name, **whole, "time": total})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": name, **whole, "skipped": str(counts["skipped"]), "time": total}
    )
    started = text(report.started)
    if started:
        suite.set("timestamp", started[: len("2000-01-01T00:00:00")])  # without a time zone, as the schemas require
    properties = ElementTree.SubElement(suite, "properties")
    shown = {
        "sbonnx.version": report.version,
        "finished": report.finished,
        "seconds of all jobs": f"{work:.3f}",
    }
    for key, value in {**shown, **_metrics(report)}.items():
        ElementTree.SubElement(properties, "property", {"name": key, "value": text(value)})
    suite.extend(cases)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _metrics(report: BatchReport) -> dict[str, str]:
    """Return the metric of each job and that of its run before, as schemas have no properties of test cases."""
    values: dict[str, str] = {}
    for row in report.rows:
        result = row.outcome.result
        asked = None if result is None or result.metrics is None else result.metrics.asked
        if asked is None:
            continue
        name, value = asked
        before = metric_before(report.runs_of(row.job.name), name)
        values[f"{text(row.job.name)}: {text(name)}"] = plain(value)
        if before is not None:
            values[f"{text(row.job.name)}: {text(name)}, before"] = plain(before)
    return values


def _jobs(report: BatchReport, suite: str) -> Iterable[ElementTree.Element]:
    for row in report.rows:
        job = row.job
        model = address(job.model).rstrip("/").rpartition("/")[2].partition("?")[0]
        group = model.removesuffix(".onnx").replace(".", "_") or "model"  # dots would separate packages
        case = _case(text(job.name), f"{suite}.{group}", row.outcome, row.advice)
        lines = [f"model: {address(job.model)}", f"target: {text(job.backend)}", f"output: {address(job.output)}"]
        lines += [f"{limit}: {'met' if limit.met else 'not met'}" for limit in acceptance_of(row.outcome)]
        if row.up_to_date:
            case.set("time", "0.000")  # an up-to-date job took no time in this run
            lines.append("up to date: nothing was to be done")
        ElementTree.SubElement(case, "system-out").text = "\n".join(lines)
        yield case


def _steps(report: BatchReport, suite: str) -> Iterable[ElementTree.Element]:
    """Yield failed steps that no job reports as its outcome."""
    shown = {row.outcome.key for row in report.rows}
    for key, outcome in report.steps.items():
        if key not in shown and outcome.status not in ("done", "skipped"):
            yield _case(text(report.titles[key]), f"{suite}.shared", outcome)


def _case(name: str, group: str, outcome: Outcome, advice: CommandAdvice | None = None) -> ElementTree.Element:
    attributes = {"name": name or "unnamed", "classname": group, "time": f"{outcome.seconds:.3f}"}
    case = ElementTree.Element("testcase", attributes)
    status = text(outcome.status)
    if status != "done":
        missed = [str(limit) for limit in acceptance_of(outcome) if not limit.met]
        reason = address(outcome.reason) or "; ".join(missed) or status
        kind = WRONG.get(status, "error")
        wrong = ElementTree.SubElement(case, kind, {"message": reason, "type": status or "unknown"})
        tries = [] if advice is None else [f"{text(advice.text)}: {address(advice.command)}"]
        wrong.text = "\n".join([f"{status}: {reason}", *missed, *tries])
    return case
