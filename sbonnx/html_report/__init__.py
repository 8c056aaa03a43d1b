"""HTML reports and JUnit XML, rendered from the plain values of a report."""

from __future__ import annotations

from sbonnx.html_report.cases import junit
from sbonnx.html_report.render import batch_page, single_page

__all__ = ["batch_page", "junit", "single_page"]
