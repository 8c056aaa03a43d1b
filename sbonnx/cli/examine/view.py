"""``sbonnx view``: open the page of a report, or the graph of a model, in the browser."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

HELP: Final = (
    "Open a report or the graph of a model in the browser. The graph shows bits, ranges, and why nodes stay float; "
    "with data, layers are coloured by their loss."
)

FILE: Final = options.argument(
    "file", "FILE", "A model (float, or quantized by any tool), or the JSON of --report or --json of a verb."
)
QUANT: Final = options.optional_argument("quantized", "QUANT", "A quantized file of the float model FILE.")
OUTPUT: Final = replace(options.OUTPUT, help="The HTML file to write instead of a temporary one.")
EXPORT: Final = options.option(
    "--export netron|model-explorer",
    str,
    "Write what is known of the nodes for another viewer, to -o, and no page: a copy of the model with metadata "
    "(netron), or node data in JSON (model-explorer).",
)
NO_OPEN: Final = options.switch("--no-open", "Only write the page.")

OPTIONS: Final = (
    FILE,
    QUANT,
    options.DATA,
    options.BACKEND,
    options.RECIPE,
    *options.FEEDS,
    OUTPUT,
    EXPORT,
    NO_OPEN,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx.viewing import view

    printer, written = given.printer(), given.call(view, quantized=given[QUANT])
    printer.value("view", written)
    printer.line(f"written: {written.page}")
    if not (written.opened or given[NO_OPEN] or given[EXPORT]):
        printer.note("no browser was found: open the file yourself")
    return 0
