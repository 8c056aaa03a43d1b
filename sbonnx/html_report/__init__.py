"""HTML reports and JUnit XML, rendered from the plain values of a report.

Pages are self-contained: inline style and script, no external resources.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from sbonnx.html_report import formatting
from sbonnx.html_report.cards import (
    Card,
    batch_card,
    comparison_card,
    decoder_card,
    evaluation_card,
    pruning_card,
    report_card,
)
from sbonnx.html_report.junit_xml import junit
from sbonnx.html_report.network import graph_page_of, network_of
from sbonnx.html_report.overview import COLUMNS, RESULT_COLUMNS, overview_of
from sbonnx.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

    from sbonnx.report.codes import Note, Refusal


def single_page(report: Mapping[str, Any]) -> str:
    """Render the page of one quantized model.

    Args:
        report: `sbonnx.report.Report.to_dict`, also after a round trip through JSON.

    Returns:
        The text of an HTML file. The page is readable without JavaScript.
    """
    network = network_of(report)
    return _environment().get_template("single.html.j2").render(network=network, version=__version__)


def graph_page(
    details: Mapping[str, Any],
    *,
    title: str,
    more: str = "",
    notes: Sequence[Note] = (),
    refusals: Iterable[Refusal] = (),
) -> str:
    """Render the page of a graph: nodes with types, ranges, losses and refusals.

    Args:
        details: `sbonnx.profile.Details.to_dict`.
        title: name of the model.
        more: what the page is about, behind the title.
        notes: listed at the end, after those of the details.
        refusals: what was not done.

    Returns:
        The text of an HTML file, as for `single_page`.
    """
    page = graph_page_of(details, notes, refusals)
    template = _environment().get_template("graph_page.html.j2")
    return template.render(page=page, title=title, more=more, version=__version__)


def render_card(card: Card) -> str:
    """Render a summary for a notebook: HTML that is part of another page."""
    return _environment().get_template("card.html.j2").render(card=card)


def batch_page(report: Mapping[str, Any]) -> str:
    """Render the page of a batch: an overview, and one section per job.

    Args:
        report: `dataclasses.asdict` of a `sbonnx.batch.jobs.job.BatchReport`, also after a round trip through JSON.

    Returns:
        The text of an HTML file, as for `single_page`.
    """
    view = overview_of(report)
    template = _environment().get_template("batch.html.j2")
    return template.render(
        batch=view, columns=COLUMNS, result_columns=RESULT_COLUMNS, version=view.version or __version__
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Create the Jinja environment: autoescape is on, and undefined names are errors."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_read_file),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: formatting.text(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in ("plain", "decibel", "ratio", "percent", "count", "size", "seconds", "raw", "pieces"):
        environment.filters[name] = getattr(formatting, name)
    for name in ("style", "script"):
        content = _read_file(f"page.{'css' if name == 'style' else 'js'}").strip()
        environment.globals[name] = content
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        environment.globals[f"{name}_hash"] = f"sha256-{digest}"  # hash source of the Content-Security-Policy
    return environment


def _read_file(name: str) -> str:
    """Read a file of this package, which may be zipped."""
    return resources.files("sbonnx.html_report").joinpath(name).read_text(encoding="utf-8")


__all__ = [
    "Card",
    "batch_card",
    "batch_page",
    "comparison_card",
    "decoder_card",
    "evaluation_card",
    "graph_page",
    "junit",
    "pruning_card",
    "render_card",
    "report_card",
    "single_page",
]
