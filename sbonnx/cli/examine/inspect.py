"""``sbonnx inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.summary import first_of, show_facts

if TYPE_CHECKING:
    from sbonnx.report.contents import ModelContents, ModelInterface

HELP: Final = "Show the contents of a model. Interface, operators, parameters, Q/DQ pairs, blocks, branches."


OPTIONS: Final = (options.MODEL, options.VERBOSE, *options.COMMON)

MOST: Final = 3
"""Inputs, outputs and notes that are named, unless more are asked for."""

MOST_OPS: Final = 8
"""Types of operators that are named."""


def run(given: Arguments) -> int:
    from sbonnx.api.model_contents import inspect

    printer, facts = given.printer(), given.call(inspect)
    printer.value("inspect", facts)
    (_show_details if given[options.VERBOSE] else _show_summary)(printer, facts)
    return 0


def _show_summary(printer: Printer, facts: ModelContents) -> None:
    from sbonnx.system.sizes import size_text

    domains = [f"{name} {version}" for name, version in facts.domains.items()]
    facts_of_file = filter(None, (*domains, f"IR {facts.ir_version}", facts.producer))
    printer.line(f"{facts.file}: {size_text(facts.bytes)}, opset {facts.opset}, {', '.join(facts_of_file)}")
    ops = [f"{count} {name}" for name, count in facts.ops.items()]
    pairs = [f"{row.pairs} of {row.type} {row.of}" for row in facts.qdq]
    blocks = [f"{row.count} {row.kind}" for row in facts.blocks]
    branches = [f"{name} ({nodes} nodes)" for name, nodes in facts.branches.items()]
    rows = [
        ("inputs", first_of([_tensor_text(row) for row in facts.inputs], MOST)),
        ("outputs", first_of([_tensor_text(row) for row in facts.outputs], MOST)),
        ("parameters", f"{facts.parameters:,} ({size_text(facts.parameter_bytes)})"),
        ("operators", f"{facts.nodes}: {first_of(ops, MOST_OPS)}"),
        ("Q/DQ pairs", first_of(pairs, MOST)),
        ("blocks", first_of(blocks, MOST)),
        ("branches", first_of(branches, MOST)),
        *(("note", note) for note in facts.notes[:MOST]),
        ("details", "-v"),
    ]
    show_facts(printer, rows)


def _shape_text(tensor: ModelInterface) -> str:
    return "unknown" if tensor.shape is None else f"({', '.join(map(str, tensor.shape))})"


def _tensor_text(tensor: ModelInterface) -> str:
    return f"{tensor.name} {tensor.type} {_shape_text(tensor)}"


def _show_details(printer: Printer, facts: ModelContents) -> None:
    from sbonnx.system.sizes import size_text

    printer.facts(
        facts.file,
        {
            "size": size_text(facts.bytes),
            "opset": facts.opset,
            "other domains": ", ".join(f"{name} {version}" for name, version in facts.domains.items()) or None,
            "IR version": facts.ir_version,
            "producer": facts.producer or None,
            "nodes": facts.nodes,
            "parameters": f"{facts.parameters:,} ({size_text(facts.parameter_bytes)})",
        },
    )
    for side, tensors in (("inputs", facts.inputs), ("outputs", facts.outputs)):
        rows = [(tensor.name, tensor.type, _shape_text(tensor)) for tensor in tensors]
        printer.table(side, ("name", "type", "shape"), rows)
    printer.table("operators", ("op", "nodes"), facts.ops.items())
    printer.table("Q/DQ pairs", ("type", "of", "pairs"), [(row.type, row.of, row.pairs) for row in facts.qdq])
    printer.table("blocks", ("kind", "count", "first at"), [(row.kind, row.count, row.first) for row in facts.blocks])
    printer.table("branches", ("body", "nodes"), facts.branches.items())
    for note in facts.notes:
        printer.note(note)
