"""``sbonnx init``: write a commented recipe, or job file, for one model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.heads.recognition import HeadLayout
    from sbonnx.recipe import Recipe

HELP: Final = "Write a commented recipe for a model. With --jobs: a job file for several targets."

OUTPUT: Final = replace(options.OUTPUT, help="The file to write; without it, it is printed.")
JOBS: Final = options.switch("--jobs", "Write a job file for `sbonnx batch` instead of a recipe.")

OPTIONS: Final = (options.MODEL, OUTPUT, options.BACKEND, options.BITS, JOBS, options.FORCE, *options.COMMON)


@dataclass(frozen=True)
class InitOutput:
    """Output of init.

    Attributes:
        kind: what was written.
        model: the model.
        output: the file; null: none.
        text: its text.
    """

    kind: Literal["recipe", "jobs"]
    model: str
    output: str | None
    text: str


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx.heads.recognition import head_layout
    from sbonnx.pipeline import prepare
    from sbonnx.stages.state import read_recipe

    printer, model, output = given.printer(), given[options.MODEL], given[OUTPUT]
    if output is not None:
        graphs.check_target(output, inputs=[model], force=given[options.FORCE])
    recipe, rules = read_recipe(None, given[options.BACKEND], given.overrides())
    if given[JOBS]:
        graphs.load(model)  # validates the file
        text = "\n".join(_jobs(model, output))
    else:
        prepared = prepare(model, recipe, rules)
        text = "\n".join(_recipe(model, recipe, graphs.load(model), head_layout(prepared.graph)))
    if output is not None:
        graphs.write_text(output, f"{text}\n")
    written = None if output is None else str(output)
    printer.value("init", InitOutput("jobs" if given[JOBS] else "recipe", str(model), written, text))
    if output is None:
        printer.text(text)
    else:
        printer.line(f"written: {output}")
    return 0


def _recipe(model: Path, recipe: Recipe, graph: Graph, head: HeadLayout | None) -> Iterator[str]:
    """Yield the lines of a recipe: what is set, and suggestions by the model's structure as comments."""
    from sbonnx.graph import query
    from sbonnx.ops import LINEAR

    nodes = list(query.all_nodes(graph))
    layers = [node for node in nodes if node.op in LINEAR]
    named = f"{recipe.backend}@{recipe.version}" if recipe.version else recipe.backend
    yield f"# Recipe for {_line(model.name)}: {len(nodes)} nodes, {len(layers)} of them convolutions and products."
    yield "# Lines that begin with '# ' and a key are suggestions: remove the '# '. `sbonnx recipe` has all keys,"
    yield "# `sbonnx explain KEY` explains one, `sbonnx plan MODEL --recipe FILE` shows the effect."
    yield f"BACKEND: {named}"
    yield "W:"
    yield "  QUANTIZER:"
    yield f"    BIT: {recipe.w.quantizer.bit}"
    yield "A:"
    yield "  QUANTIZER:"
    yield f"    BIT: {recipe.a.quantizer.bit}"
    if head is not None:
        yield f"# This network has a head: {_line(head.kind)}. If accuracy is lost there, it stays float so:"
        yield "# EXCLUDE: [head]"
    if layers:
        yield "# The first and last layers are often the most sensitive ones; node names are those of the model:"
        first, last = (json.dumps(layers[place].name) for place in (0, -1))
        yield f"# SKIP_TRACE_MODULES: [{first}, {last}]" if first != last else f"# SKIP_TRACE_MODULES: [{first}]"
    yield "# Layers get more bits until at most this is lost on samples held out:"
    yield "# MIXED: {MAX_LOSS: 0.5%}"
    yield "# The search for a better rounding takes longest, and uses all samples:"
    yield "# EFFORT: best"
    yield "# `sbonnx quantize` fails (exit code 1) below this signal to noise, in decibel:"
    yield "# VERIFY: {MIN_SQNR_DB: 20}"


def _jobs(model: Path, output: Path | None) -> Iterator[str]:
    """Yield the lines of a job file; its paths are relative to its folder."""
    import os

    folder = Path() if output is None else output.parent
    path = json.dumps(Path(os.path.relpath(model, folder)).as_posix())
    yield "# Jobs for `sbonnx batch FILE`; `sbonnx batch FILE --dry-run` shows them."
    yield "title: quantization"
    yield "output: out  # folder of models, reports and state"
    yield 'naming: "{model}/{backend}-{bits}"'
    yield "defaults:"
    yield "  data: calib  # file or folder, as of `sbonnx quantize`"
    yield "  # set: {samples: 32}  # any key of a recipe"
    yield "  # accept: {min_sqnr: 20}  # exit code 1 below"
    yield "matrix:"
    yield "  backend: [onnxruntime, tensorrt@10]"
    yield "  bits: [w8a8]"
    yield "jobs:"
    yield f"  - model: {path}"


def _line(text: str) -> str:
    from sbonnx.system.terminal import one_line

    return one_line(text, 80)
