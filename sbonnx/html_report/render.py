"""Rendering of self-contained HTML pages: inline style and script, no external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from sbonnx.html_report import accepted, figures
from sbonnx.html_report.network import network_of
from sbonnx.html_report.overview import COLUMNS, FIGURES, overview_of
from sbonnx.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment


def single_page(report: Mapping[str, Any]) -> str:
    """Render the page of one quantized model.

    Args:
        report: `sbonnx.report.Report.to_dict`, also after a round trip through JSON.

    Returns:
        The text of an HTML file. The page is readable without JavaScript.
    """
    network = network_of(report)
    return _environment().get_template("single.html.j2").render(network=network, version=__version__)


def batch_page(report: Mapping[str, Any]) -> str:
    """Render the page of a batch: an overview, and one section per job.

    Args:
        report: `dataclasses.asdict` of a `sbonnx.batch.jobs.job.BatchReport`, also after a round trip through JSON.

    Returns:
        The text of an HTML file, as for `single_page`.
    """
    view = overview_of(report)
    template = _environment().get_template("batch.html.j2")
    return template.render(batch=view, columns=COLUMNS, figures=FIGURES, version=view.version or __version__)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Create the Jinja environment: autoescape is on, and undefined names are errors."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made = Environment(
        loader=FunctionLoader(_packed),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: figures.text(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("plain", "decibel", "ratio", "percent", "count", "size", "seconds", "raw"):
        made.filters[name] = getattr(figures, name)
    made.globals["summary"] = accepted.summary
    for name in ("style", "script"):
        content = _packed(f"page.{'css' if name == 'style' else 'js'}").strip()
        made.globals[name] = content
        made.globals[f"{name}_hash"] = _hashed(content)
    return made


def _packed(name: str) -> str:
    """Read a file of this package, which may be zipped."""
    return resources.files("sbonnx.html_report").joinpath(name).read_text(encoding="utf-8")


def _hashed(content: str) -> str:
    """Return the SHA-256 hash source of an inline text for the Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
