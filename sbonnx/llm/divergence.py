"""The block in which a quantized decoder leaves the float one: errors of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from sbonnx.errors import ModelError
from sbonnx.graph import read_proto
from sbonnx.llm.decoding import ActiveAdapter, decoder_feed
from sbonnx.llm.layout import Decoder
from sbonnx.spec import Array
from sbonnx.system.runtime import open_session, reason, session_options

DATA_FOLDER = "session.model_external_initializers_file_folder_path"
"""onnxruntime's option for the place of external data of a model that is not a file."""


@dataclass(frozen=True)
class BlockError:
    """Error that one block adds to the residual stream.

    Attributes:
        layer: number of the block.
        before, after: norm of the error over that of the float stream, at its input and output.
    """

    layer: int
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"it begins in block {self.layer}: the error of the residual stream is {self.before:.2%} at its input and "
            f"{self.after:.2%} at its output"
        )


def worst_block(decoder: Decoder, against: Decoder, ids: Array) -> BlockError | None:
    """Return the block that adds most to the error of the residual stream on a window.

    Args:
        ids: token ids, (length,).

    Returns:
        None for merged decoders, whose streams are inside an If, and for decoders with different blocks.

    Raises:
        ModelError: onnxruntime does not give the streams of a model.
    """
    streams = [[block.stream for block in each.structure.blocks] for each in (decoder, against)]
    alike = len(streams[0]) == len(streams[1]) > 0
    if not alike or "merged" in (decoder.format, against.format) or decoder.branch or against.branch:
        return None
    values, floats = (_streams(each, names, ids) for each, names in zip((decoder, against), streams, strict=True))
    errors = [
        float(np.linalg.norm(one - other) / max(np.linalg.norm(other), np.finfo(np.float64).tiny))
        for one, other in zip(values, floats, strict=True)
    ]
    layers = [block.layer for block in decoder.structure.blocks]
    rows = [BlockError(*row) for row in zip(layers, errors, errors[1:], strict=False)]
    return max(rows, key=lambda row: row.after - row.before)


def _streams(decoder: Decoder, names: list[str], ids: Array) -> list[Array]:
    """Return the residual stream at the input of each block, then the logits, in float64."""
    model = read_proto(decoder.model)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    options: Any = session_options()
    options.add_session_config_entry(DATA_FOLDER, str(decoder.model.parent))
    try:
        session = open_session(model.SerializeToString(), options)
        adapter = ActiveAdapter(decoder.adapter)
        found = session.run([*names, decoder.logits], decoder_feed(decoder, ids[None]), adapter.options)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise ModelError(f"onnxruntime gives no residual stream of '{decoder.model}': {reason(error)}") from error
    return [np.asarray(values, np.float64) for values in found]
