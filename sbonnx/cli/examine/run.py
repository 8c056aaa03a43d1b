"""``sbonnx run``: run a model on data or on random inputs, and save its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import DataError

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.verify import Feeds

HELP: Final = "Run a model and save its outputs. On data, or on random inputs."

MODEL: Final = options.argument("model", "MODEL", "The ONNX model, float or quantized.")
DATA: Final = replace(options.DATA, help=f"{options.DATA.help} Without it, one feed is drawn at random.")
OUTPUT: Final = replace(
    options.OUTPUT,
    help="Where to write the outputs: FILE.npz (several feeds: joined along the leading axis), or a folder of one .npz "
    "per feed.",
)
SHAPE: Final = options.repeated(
    "--shape INPUT=DIMS", "Random inputs: shape of an input with dynamic axes, such as image=1x3x224x224"
)
BATCH: Final = options.setting("--batch N", 1, "Random inputs: size of dynamic leading axes.")
SEED: Final = options.setting("--seed N", 0, "Random inputs: seed of the values.")
RANDOM: Final = (SHAPE, BATCH, SEED)
"""Options of random inputs."""

OPTIONS: Final = (
    MODEL,
    DATA,
    OUTPUT,
    *options.FEEDS,
    *RANDOM,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.calib.data.saved_outputs import check_outputs_path, saving_outputs
    from sbonnx.metrics.output_statistics import RunOutput, StatisticsOfOutputs
    from sbonnx.verify.runtimes import exact_products
    from sbonnx.verify.sessions import output_names
    from sbonnx.verify.sessions import run as run_session

    printer, model, output = given.printer(), given[MODEL], given[OUTPUT]
    if output is not None:
        check_outputs_path(output, [model], force=given[options.FORCE])
    graph = graphs.load(model, opset=1)
    count, feeds = _feeds(given, graph)
    session = verify.session(model, device=given[options.DEVICE] or "cpu", exact=exact_products(model))
    names, outputs = output_names(session), StatisticsOfOutputs()
    with closing(given.progress()) as progress, ExitStack() as stack:
        save = None if output is None else stack.enter_context(saving_outputs(output))
        progress.start("inference", count)
        for index, feed in enumerate(feeds):
            values = dict(zip(names, run_session(session, feed, index), strict=True))
            outputs.add(values)
            if save is not None:
                save(values)
            progress.advance()
    rows = outputs.rows()
    printer.value("run", RunOutput(str(model), outputs.feeds, None if output is None else str(output), rows))
    printer.table(
        f"{model}: {outputs.feeds} {'feed' if outputs.feeds == 1 else 'feeds'}",
        ("output", "type", "shape", "min", "mean", "max", "not finite"),
        [
            (
                row.name,
                row.type,
                "varies" if row.shape is None else f"({', '.join(map(str, row.shape))})",
                *(row.min, row.mean, row.max),
                row.not_finite or None,
            )
            for row in rows
        ],
    )
    if output is not None:
        printer.line(f"written: {output}")
    return 0


def _feeds(given: Arguments, graph: Graph) -> tuple[int | None, Iterator[Feeds]]:
    """Return the number of feeds, if known, and the feeds."""
    source = given.data(DATA)
    if source is None:
        return 1, iter([random_feeds(given, graph, given[BATCH])])
    from sbonnx.calib.data import dataset as datasets

    data = datasets.read(source, graph, split=given[options.SPLIT], limit=given[options.SAMPLES])
    return data.count, iter(data)


def random_feeds(given: Arguments, graph: Graph, batch: int) -> Feeds:
    """Draw a feed by the options of `RANDOM`."""
    from sbonnx.calib.data.dataset import input_defaults, input_specs
    from sbonnx.calib.data.random_feeds import random_feed

    if batch < 1:
        raise DataError(f"--batch {batch}: a batch has 1 or more samples")
    defaults = input_defaults(graph)
    specs = [spec for spec in input_specs(graph) if spec.name not in defaults]
    return random_feed(specs, batch=batch, shapes=shapes_of(given[SHAPE] or ()), seed=given[SEED])


def shapes_of(texts: Any) -> dict[str, tuple[int, ...]]:
    """Parse ``INPUT=1x3x224x224`` into shapes by input.

    Raises:
        DataError: text of another form, or an input twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        sizes = dims.replace(",", "x").split("x")
        if not equals or not name or not all(size.strip().isdecimal() for size in sizes):
            raise DataError(f"--shape is INPUT=DIMS, such as image=1x3x224x224, got '{text}'")
        if name in shapes:
            raise DataError(f"--shape gives input '{name}' two shapes")
        shapes[name] = tuple(int(size) for size in sizes)
    return shapes
