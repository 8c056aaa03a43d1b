"""``sbonnx view``: open the report page of a quantization in the browser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import DataError

HELP: Final = "Open the page of a report in the browser. The report is the JSON of quantize or batch."

REPORT: Final = options.argument(
    "report", "REPORT.json", "What --report FILE.json or --json of quantize, qat or batch wrote."
)
OUTPUT: Final = replace(options.OUTPUT, help="The HTML file to write instead of a temporary one.")
NO_OPEN: Final = options.switch("--no-open", "Only write the page.")

OPTIONS: Final = (REPORT, OUTPUT, NO_OPEN, options.FORCE, *options.COMMON)

KEYS: Final = {"counts", "metrics", "settings"}
"""Keys of the report of one model that the page needs; that of a batch has `rows`."""


def run(given: Arguments) -> int:
    import tempfile
    import webbrowser

    from sbonnx import graph as graphs

    printer, file, output = given.printer(), given[REPORT], given[OUTPUT]
    if output is not None:
        graphs.check_target(output, inputs=[file], force=given[options.FORCE])
    page = _page(file)
    if output is None:
        folder = Path(tempfile.mkdtemp(prefix="sbonnx-view-"))  # remains: the browser reads it after the end
        output = folder / f"{file.stem}.html"
    graphs.write_text(output, page)
    opened = False if given[NO_OPEN] else webbrowser.open(output.resolve().as_uri())
    printer.value("view", {"page": output, "opened": opened})
    printer.line(f"written: {output}")
    if not (opened or given[NO_OPEN]):
        printer.note("no browser was found: open the file yourself")
    return 0


def _page(file: Path) -> str:
    """Render the page of a report.

    Raises:
        DataError: the file cannot be read, or is no report.
    """
    from sbonnx.html_report import batch_page, single_page

    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the report '{file}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"the report '{file}' is no JSON: write it with --report FILE.json") from error
    if isinstance(report, Mapping) and report.keys() >= KEYS:
        return _rendered(single_page, report, file)
    if isinstance(report, Mapping) and "rows" in report and "title" in report:
        return _rendered(batch_page, report, file)
    raise DataError(f"'{file}' is no report of quantize, qat or batch: write it with --report FILE.json")


def _rendered(render: Any, report: Mapping[str, Any], file: Path) -> str:
    try:
        page: str = render(report)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"the report '{file}' is not complete, or of another version: write it again") from error
    return page
