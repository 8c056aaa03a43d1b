"""Lints several model files, for pre-commit and CI: ``python -m sbonnx.integrations.lint_files --target T FILE...``.

One line for each finding, or with ``--github`` an annotation. Exit code 1 if a file has errors (with ``--strict`` also
warnings), 2 if a file cannot be read. Of a folder, such as those for transformers.js, all ONNX files are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sbonnx.errors import SbonnxError
from sbonnx.linting import TARGETS, ci_formats, lint


def main(arguments: Sequence[str]) -> int:
    """Lint the files and print the findings; return the exit code."""
    parser = argparse.ArgumentParser("lint_files", description="Check Q/DQ models against the rules of a runtime.")
    parser.add_argument("--target", required=True, help=f"the runtime: {', '.join(TARGETS)}")
    parser.add_argument("--strict", action="store_true", help="warnings fail, too")
    parser.add_argument("--github", action="store_true", help="print annotations of GitHub Actions")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    failing = {"error", "warning"} if given.strict else {"error"}
    code = 0
    for path in (file for place in given.files for file in _models(place)):
        try:
            findings = lint(path, given.target)
        except SbonnxError as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            code = 2
            continue
        if given.github:
            text = ci_formats.github(findings, path)
            print(text, end="\n" if text else "")
        else:
            for finding in findings:
                where = finding.node or finding.tensor
                print(
                    f"{path}: {finding.severity} {finding.rule} at '{where}': {finding.why}. To fix it: {finding.mend}."
                )
        if any(finding.severity in failing for finding in findings):
            code = max(code, 1)
    return code


def _models(place: Path) -> list[Path]:
    return sorted(place.rglob("*.onnx")) if place.is_dir() else [place]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
