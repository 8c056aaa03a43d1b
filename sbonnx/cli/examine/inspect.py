"""``sbonnx inspect``: interface, operators, parameters, Q/DQ pairs and blocks of a model."""

from __future__ import annotations

from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

HELP: Final = "Show the contents of a model. Interface, operators, parameters, Q/DQ pairs, blocks, branches."


OPTIONS: Final = (options.MODEL, *options.COMMON)


def run(given: Arguments) -> int:
    from sbonnx.api.model_contents import inspect
    from sbonnx.system.sizes import size_text

    printer, facts = given.printer(), given.call(inspect)
    printer.value("inspect", facts)
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
        rows = []
        for tensor in tensors:
            shape = "unknown" if tensor.shape is None else f"({', '.join(map(str, tensor.shape))})"
            rows.append((tensor.name, tensor.type, shape))
        printer.table(side, ("name", "type", "shape"), rows)
    printer.table("operators", ("op", "nodes"), facts.ops.items())
    printer.table("Q/DQ pairs", ("type", "of", "pairs"), [(row.type, row.of, row.pairs) for row in facts.qdq])
    printer.table("blocks", ("kind", "count", "first at"), [(row.kind, row.count, row.first) for row in facts.blocks])
    printer.table("branches", ("body", "nodes"), facts.branches.items())
    for note in facts.notes:
        printer.note(note)
    return 0
