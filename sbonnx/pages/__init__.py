"""Reports as pages for people and as JUnit XML for a CI, made of the plain values of a report."""

from __future__ import annotations

from sbonnx.pages.cases import junit
from sbonnx.pages.render import batch_page, single_page

__all__ = ["batch_page", "junit", "single_page"]
