"""Tables of embeddings as integers: the provider reads the rows of a Gather in the type and scale of its output.

A Gather of a float table with a QuantizeLinear behind it is computed in float, which the HTP refuses: the file does not
load ("Failed to finalize QNN graph"). A Gather only copies values, so that ``Q(Gather(table))`` equals
``Gather(DQ(Q(table)))`` behind the same pair: the outputs are unchanged. Two different scales are refused as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.backends.base import in_every_scope
from sbonnx.graph import Body, Constant, edit, query
from sbonnx.ops import DEQUANTIZE, EMBEDDING, QUANTIZE
from sbonnx.spec import QParams, QuantSpec


@in_every_scope()
def quantize_tables(body: Body, names: edit.Names) -> Iterator[str]:
    """Store the float table of each Gather that only a pair reads as codes of that pair."""
    outputs = {id(tensor) for tensor in body.outputs}
    for node in [node for node in body.nodes if node.op in EMBEDDING and isinstance(node.inputs[0], Constant)]:
        table, read = node.inputs[0], query.readers(node.outputs[0])
        values = query.constant(table)
        if values is None or values.dtype.kind != "f" or len(read) != 1 or id(node.outputs[0]) in outputs:
            continue
        quantize = read[0][0]
        if quantize.op not in QUANTIZE:
            continue
        behind = [reader for reader, _ in query.readers(quantize.outputs[0]) if reader.op in DEQUANTIZE]
        scale, zero = (query.constant(tensor) for tensor in quantize.inputs[1:3])
        if not behind or scale is None or zero is None or scale.size != 1:
            continue
        spec = QuantSpec(bits=zero.dtype.itemsize * 8, signed=zero.dtype.kind == "i", symmetric=False)
        codes = QParams(scale.reshape(()), zero.reshape(()), spec).quantize(values)
        stored = edit.add_constant(body, f"{table.name}_quantized", codes, names)
        inputs = [stored, *behind[0].inputs[1:]]
        stem = f"{table.name}_DequantizeLinear"
        added = edit.add_node(body, behind[0].op, inputs, names=names, stem=stem, attrs=dict(behind[0].attrs))
        added.outputs[0].dtype, added.outputs[0].shape = table.dtype, table.shape
        edit.replace_input(node, 0, added.outputs[0])
        yield f"{node.name}: its table in the type and scale of the pair behind it"
