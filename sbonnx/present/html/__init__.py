"""HTML reports.

Pages are self-contained: inline style and script, no external resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sbonnx.present.html.card import Card
from sbonnx.present.html.cards import render_card
from sbonnx.present.html.network import graph_page_of, network_of
from sbonnx.present.html.overview import overview_of
from sbonnx.present.html.pruning import report_of_pruning
from sbonnx.present.html.templates import environment
from sbonnx.report.pruned import PruningReport
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.batch.jobs.job import BatchReport
    from sbonnx.report import Note, Refusal, Report
    from sbonnx.report.details import Details


def single_page(report: Report | PruningReport) -> str:
    """Render the page of one quantized or pruned model.

    Returns:
        The text of an HTML file. The page is readable without JavaScript.
    """
    pruned = isinstance(report, PruningReport)
    network = network_of(report_of_pruning(report) if isinstance(report, PruningReport) else report)
    return environment().get_template("single.html.j2").render(network=network, pruned=pruned, version=__version__)


def graph_page(
    details: Details,
    *,
    title: str,
    more: str = "",
    notes: Sequence[Note] = (),
    refusals: Iterable[Refusal] = (),
) -> str:
    """Render the page of a graph: nodes with types, ranges, losses and refusals.

    Args:
        details: nodes, losses and histograms.
        title: name of the model.
        more: what the page is about, behind the title.
        notes: listed at the end, after those of the details.
        refusals: what was not done.

    Returns:
        The text of an HTML file, as for `single_page`.
    """
    page = graph_page_of(details, notes, refusals)
    template = environment().get_template("graph_page.html.j2")
    return template.render(page=page, title=title, more=more, version=__version__)


def batch_page(report: BatchReport) -> str:
    """Render the page of a batch: an overview, and one section per job.

    Returns:
        The text of an HTML file, as for `single_page`.
    """
    view = overview_of(report)
    template = environment().get_template("batch.html.j2")
    return template.render(batch=view, version=view.version or __version__)


__all__ = ["Card", "batch_page", "graph_page", "render_card", "single_page"]
