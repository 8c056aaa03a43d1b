"""Samples of an encoder, and the texts that the float encoder-decoder generates for them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx.calib.data import Feed, with_preprocess
from sbonnx.calib.data.dataset import read
from sbonnx.calib.data.files import media_at
from sbonnx.errors import DataError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.encoders.encoder import TokenIds
from sbonnx.llm.layout import Decoder
from sbonnx.spec import Array

TEXT: Final = 64
"""Default of LLM.WINDOW of an encoder-decoder: tokens of a generated text at most."""

PROCESSORS: Final = ("preprocessor_config.json", "tokenizer.json")
"""Files that say how sounds, images and texts become inputs of an encoder."""

SHORTEST: Final = 2
"""Fewest tokens of a text: one is predicted from the other."""


def read_sources(
    decoder: Decoder, data: Any, *, window: int | None = None, tokens: int
) -> tuple[Array, tuple[Feed, ...]]:
    """Read samples of the encoder, and generate the text of each with the float model.

    Args:
        data: data of the encoder as `sbonnx.quantize` takes it; texts, sounds and images are prepared by the processor
            of the folder.
        window: tokens of a text, at most; None: `TEXT`, or the context of the decoder.
        tokens: of all texts together, at most.

    Returns:
        Token ids, int64 (samples, tokens), with -1 after the end of a text; and the inputs of the encoder by sample.

    Raises:
        DataError: the data does not fit the encoder, or no configuration names the first token of a text.
    """
    encoder = decoder.encoder
    assert encoder is not None
    places = (encoder.folder, encoder.folder.parent)
    ids = TokenIds.read(next(filter(TokenIds.are_in, places), encoder.folder))
    length = min(window or TEXT, decoder.context or TEXT)
    count = max(1, tokens // length)
    processor = next((path for name in PROCESSORS for place in places if (path := place / name).is_file()), None)
    is_media = isinstance(data, (str, Path)) and media_at(Path(data)) is not None
    dataset = read(with_preprocess(data, processor if is_media else None), graphs.load(encoder.model), split=1)
    sources = tuple(islice(dataset, count))
    if not sources:
        raise DataError("the data has no samples of the encoder")
    session = DecoderSession(decoder)
    rows = [_text(session, source, ids, length) for source in sources]
    padded = np.full((len(rows), max(map(len, rows))), -1, np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded, sources


def _text(session: DecoderSession, source: Feed, ids: TokenIds, length: int) -> list[int]:
    """Return the token ids of the text that is generated for a sample, from its first to its end."""
    row = list(ids.start)
    for token in session.decode(np.asarray(row, np.int64), source):
        row.append(token)
        if len(row) >= SHORTEST and (len(row) >= length or token in ids.end):
            break
    return row
