"""Activation cache between blocks: each sample's activations in the float and in the quantized network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sbonnx.calib.data.sample import Unit
from sbonnx.calib.engine.sample_runner import Piece, last_reads
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.spec import Array

FLOAT, QUANTIZED = False, True
"""Keys of the two streams."""


class TwoStreams:
    """Activations by stream, sample and name, until the last piece that reads them has run.

    Tensors that were put into the float stream alone (inputs of the model) are returned for both.

    Args:
        pieces: in the order to run them.
        store: holds the arrays, within its budget.
    """

    def __init__(self, pieces: Sequence[Piece], store: TensorStore) -> None:
        self._store = store
        self._last = last_reads(pieces)
        self._pieces = tuple(pieces)
        self._names: dict[int, list[str]] = {}  # tensors that are dropped after each piece
        for number, piece in enumerate(pieces):
            for name in dict.fromkeys([*piece.reads, *piece.outputs]):
                self._names.setdefault(max(self._last.get(name, -1), number), []).append(name)

    def put(self, stream: bool, unit: Unit, values: Mapping[str, Any], names: Iterable[str]) -> None:
        """Store copies of these tensors."""
        for name in names:
            self._store.put((stream, unit.index, name), np.asarray(values[name]), copy=True)

    def get(self, stream: bool, index: int, name: str) -> Array:
        """Return a tensor of a sample in a stream."""
        key = (stream, index, name)
        return self._store.get(key if key in self._store else (FLOAT, index, name))

    def has_two(self, index: int, name: str) -> bool:
        """Return whether a tensor differs between the streams."""
        return (QUANTIZED, index, name) in self._store

    def reads(self, stream: bool, number: int, unit: Unit) -> dict[str, Array]:
        """Return all tensors that a piece reads of a sample."""
        return {name: self.get(stream, unit.index, name) for name in self._pieces[number].reads}

    def done(self, number: int, units: Iterable[Unit]) -> None:
        """Drop the tensors that no piece after this one reads."""
        names = set(self._names.get(number, ()))
        for unit in units:
            for name in names:
                for stream in (FLOAT, QUANTIZED):
                    self._store.drop((stream, unit.index, name))


__all__ = ["FLOAT", "QUANTIZED", "TwoStreams"]
