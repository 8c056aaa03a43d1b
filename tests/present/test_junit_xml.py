"""JUnit XML by the rules of the schemas of Jenkins (xunit plugin) and Maven (surefire)."""

from __future__ import annotations

import re
from typing import Any, get_args
from xml.etree import ElementTree

import pytest

from sbonnx.batch.jobs.job import Status
from tests.present.reports import EVIL, batch, job, junit_of, network, one_of_each

# element: (attributes that must be there, those that may be, children)
RULES: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"skipped", "time", "timestamp", "hostname", "id", "package"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": (
        {"name", "classname", "time"},  # Maven wants the last two, Jenkins only the first
        {"group"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": ({"type"}, {"message"}, set()),
    "error": ({"type"}, {"message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}
ORDER = ["skipped", "error", "failure", "system-out", "system-err"]
"""Children of a testcase, in Maven's order."""
TIME = re.compile(r"\d+\.\d{3}")
KINDS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


def read(report: dict[str, Any]) -> ElementTree.Element:
    """Check all rules; return the root."""
    text = junit_of(report)
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    root = ElementTree.fromstring(text.encode("utf-8"))
    assert root.tag == "testsuites"
    for element in root.iter():
        required, allowed, children = RULES[element.tag]
        assert required <= set(element.attrib) <= required | allowed, element.attrib
        assert {child.tag for child in element} <= children
        if children:
            assert not (element.text or "").strip(), "only leaves hold text"
        if "time" in element.attrib:
            assert TIME.fullmatch(element.attrib["time"])
    for suite in root.iter("testsuite"):
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        for kind, counted in KINDS.items():
            assert suite.get(counted) == str(sum(case.find(kind) is not None for case in cases))
        work = sum(float(case.get("time", "nan")) for case in cases)
        properties = {row.get("name"): row.get("value", "") for row in suite.iter("property")}
        assert float(properties["seconds of all jobs"]) == pytest.approx(work, abs=1e-3)
        assert suite.get("time") == root.get("time")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
        for case in cases:
            tags = [child.tag for child in case]
            assert tags == sorted(tags, key=ORDER.index) and sum(tag in KINDS for tag in tags) <= 1
    for counted in ("tests", "failures", "errors"):
        assert root.get(counted) == str(sum(int(suite.get(counted, "")) for suite in root))
    return root


def kinds(root: ElementTree.Element) -> dict[str, str]:
    """Result of each case by name: failure, error, skipped, or passed."""
    return {
        case.get("name", ""): next((child.tag for child in case if child.tag in KINDS), "passed")
        for case in root.iter("testcase")
    }


def test_one_of_each() -> None:
    root = read(one_of_each())
    assert kinds(root) == {
        "a-done": "passed",
        "b-fresh": "passed",
        "c-below": "failure",
        "d-refused": "failure",
        "e-failed": "error",
        "f-crashed": "error",
        "g-memory": "error",
        "h-time": "error",
        "i-skipped": "skipped",
    }
    cases = {case.get("name"): case for case in root.iter("testcase")}
    below, died = cases["c-below"].find("failure"), cases["f-crashed"].find("error")
    assert below is not None and died is not None
    assert below.get("message") == "agreement 97.5 % is below 98 %" and below.get("type") == "unaccepted"
    assert "agreement 97.50 %, required ≥ 98.00 %" in (below.text or "") and "SQNR" not in (below.text or "")
    assert died.get("message") == "it died by SIGSEGV" and died.get("type") == "crashed"
    assert root.get("time") == "3908.875", "wall time, from start to finish"
    assert cases["a-done"].get("classname") == "nightly.mobilenet_v2" and cases["a-done"].get("time") == "2.500"
    assert cases["b-fresh"].get("time") == "0.000"
    assert "up to date" in (cases["b-fresh"].findtext("system-out") or "")


@pytest.mark.parametrize("status", get_args(Status))
def test_only_done_passes(status: str) -> None:
    (kind,) = kinds(read(batch([job("a", status, reason="because")]))).values()
    assert (kind == "passed") is (status == "done")


def test_a_status_of_another_version_is_an_error() -> None:
    assert kinds(read(batch([job("a", "vanished")]))) == {"a": "error"}


def test_failed_shared_step_is_one_case() -> None:
    """If all its jobs are skipped, or if it is the outcome of a job."""
    lost = job("calibrate", "crashed", reason="SIGKILL")["outcome"]
    whole = batch([job("a", "skipped", reason="its calibration crashed")])
    whole["steps"]["c"] = {**lost, "key": "c"}
    whole["titles"]["c"] = "calibrate net"
    assert kinds(read(whole)) == {"a": "skipped", "calibrate net": "error"}
    whole["rows"].append(job("b", **{**lost, "key": "c"}))
    assert kinds(read(whole)) == {"a": "skipped", "b": "error"}


def test_characters_that_xml_does_not_allow() -> None:
    rows = [job(name, "failed", reason=name, report=network([])) for name in EVIL]
    root = read(batch(rows, title=EVIL[6]))
    assert len(kinds(root)) == len(EVIL)
    assert EVIL[0] in kinds(root) and EVIL[7] in kinds(root)


def test_logins_are_removed() -> None:
    row = job("a", "failed", reason="https://me:hunter2@host/x is not there")
    row["job"]["model"] = "s3://me:hunter2@bucket/m.onnx"
    assert "hunter2" not in junit_of(batch([row]))


def test_no_jobs() -> None:
    assert kinds(read(batch([]))) == {}
