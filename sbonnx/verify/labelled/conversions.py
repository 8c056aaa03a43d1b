"""Conversion of the outputs of a feed to those that a metric takes: by a function, to boxes or texts, by pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx.calib.data import LabelledFeed
from sbonnx.calib.data.readers.vocabulary import read_vocabulary, vocabulary_in, with_blank
from sbonnx.detectors import HeadDecoder, head_choice
from sbonnx.errors import DataError, foreign_code
from sbonnx.graph import Graph
from sbonnx.metrics import TaskMetricKind
from sbonnx.metrics.retrieval import mean_pooled
from sbonnx.metrics.text_metrics import is_text
from sbonnx.metrics.transcription import Transcriber, Vocabulary
from sbonnx.verify.runtimes import metadata_of

Convert = Callable[[Mapping[str, Any], LabelledFeed], Mapping[str, Any]]
"""Converts the outputs of a feed, by name, to those that the metric takes."""

MASKS = ("attention_mask", "input_mask")
"""Inputs that tell tokens from padding."""

Metadata = Callable[[], Mapping[str, str]]
"""Reads the metadata of a model."""


@dataclass(frozen=True)
class ModelReaders:
    """Facts of a model that conversions need; each is read when it is called.

    Attributes:
        metadata: reads its metadata.
        graph: loads its graph.
    """

    metadata: Metadata
    graph: Callable[[], Graph]


def readers_of(model: Path | bytes) -> ModelReaders:
    """Return the readers of a file, or of a serialized model."""
    source: Any = partial(onnx.load_model_from_string, model) if isinstance(model, bytes) else lambda: model
    return ModelReaders(partial(metadata_of, model), lambda: graphs.load(source()))


def unchanged(outputs: Mapping[str, Any], feed: LabelledFeed) -> Mapping[str, Any]:
    """Return the outputs as they are."""
    return outputs


def of_function(decode: Callable[[dict[str, Any]], Any]) -> Convert:
    """Return the conversion by a function of the user, which returns a mapping or one array.

    The conversion raises DataError if the function fails.
    """

    def convert(outputs: Mapping[str, Any], feed: LabelledFeed) -> Mapping[str, Any]:
        with foreign_code(lambda reason: DataError(f"--decode failed: {reason}")):
            decoded = decode(dict(outputs))
            return dict(decoded) if isinstance(decoded, Mapping) else {"decoded": np.asarray(decoded)}

    return convert


def to_boxes(head: str | None, graph: Callable[[], Graph]) -> Convert:
    """Return the conversion of the outputs of a detector to boxes, see `HeadDecoder`.

    Args:
        head: as the user states it; None: recognized by the structure.
        graph: loads the model.

    Raises:
        RecipeError: there is no such head.
    """
    decoder = HeadDecoder(graph, None if head is None else head_choice(head))
    return lambda outputs, feed: decoder(outputs, feed.feed, feed.labels)


def to_texts(kind: TaskMetricKind, file: str | None, blank: int | None, metadata: Metadata) -> Convert:
    """Return the conversion of tokens, or of the scores of CTC, to texts.

    Args:
        kind: the metric; its name stands in messages.
        file: of the vocabulary; None: the metadata of the model.
        blank: number of the blank of CTC; None: as the vocabulary or the metadata says.

    Raises:
        DataError: the vocabulary cannot be read.
    """
    opened: list[Vocabulary] = []

    def convert(outputs: Mapping[str, Any], feed: LabelledFeed) -> Mapping[str, Any]:
        if kind.takes == "tokens" and not any(map(is_text, feed.labels.values())):
            return outputs
        if kind.output is None and len(outputs) == 1 and is_text(next(iter(outputs.values()))):
            return outputs
        if not opened:
            opened.append(_vocabulary(kind.name, file, blank, metadata()))
        samples = {len(values) for values in feed.labels.values() if isinstance(values, list) or np.ndim(values)}
        return Transcriber(opened[0], kind.output).texts(
            outputs, samples.pop() if len(samples) == 1 else None, kind.name
        )

    return convert


def to_embeddings(kind: TaskMetricKind) -> Convert:
    """Return the conversion of token embeddings to their mean over the tokens of the attention mask."""

    def convert(outputs: Mapping[str, Any], feed: LabelledFeed) -> Mapping[str, Any]:
        mask = next((np.asarray(feed.feed[name]) for name in MASKS if name in feed.feed), None)
        return mean_pooled(outputs, kind.output, mask)

    return convert


def _vocabulary(metric: str, file: str | None, blank: int | None, metadata: Mapping[str, str]) -> Vocabulary:
    vocabulary = vocabulary_in(metadata) if file is None else read_vocabulary(Path(file))
    if vocabulary is None:
        raise DataError(
            f"{metric} needs the tokens of the output: give --vocabulary tokens.txt (or vocab.json, tokenizer.json)"
        )
    return with_blank(vocabulary, blank, metadata)
