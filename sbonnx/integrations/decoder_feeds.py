"""Calibration data of the decoders in a folder of an encoder-decoder model (T5, Marian, BART, Whisper).

A decoder reads the states of the encoder and the tokens so far. Both are computed with the float models of the folder:
the encoder on its calibration data, then greedy decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.dataset import Dataset
from sbonnx.errors import DataError
from sbonnx.llm.encoders.encoder import TokenIds
from sbonnx.spec import Array
from sbonnx.verify.sessions import run, session

ENCODER: Final = "encoder_model"
FIRST: Final = ("decoder_model", "decoder_model_merged")
"""Decoders that run without a past; the first that the folder has decodes."""

DECODERS: Final = (*FIRST, "decoder_with_past_model")
"""Names of Optimum's export without suffix. The merged file has both decoders, as branches of an If."""

TOKENS: Final = 24
"""Tokens to decode for each sample."""

PAST: Final = "past_key_values"
PRESENT: Final = "present"
BRANCH: Final = "use_cache_branch"
"""Prefixes of keys and values among inputs and outputs; the input that selects the branch with a past."""


@dataclass(frozen=True)
class EncoderDecoderFeeds:
    """Feeds of a decoder, computed in each iteration; only the decoded tokens are stored.

    Attributes:
        models: ONNX files by name without suffix.
        name: the decoder that the feeds are for, one of `DECODERS`.
        data: feeds of the encoder.
        tokens: where decoding begins and ends.
    """

    models: Mapping[str, Path]
    name: str
    data: Dataset
    tokens: TokenIds
    _decoded: dict[int, Array] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Yield feeds: all tokens without a past, or the last token with the past of those before it.

        The place of the last token differs from feed to feed. A merged decoder gets both.

        Raises:
            ModelError: a model cannot be loaded.
            DataError: a model does not run, or has an input that is not known.
        """
        encoder = _Model.open(self.models[ENCODER])
        decoder = _Model.open(self.models[next(name for name in FIRST if name in self.models)])
        target = decoder if self.models[self.name] == decoder.path else _Model.open(self.models[self.name])
        has_past = any(name.startswith(PAST) for name in target.inputs)
        for number, feed in enumerate(self.data):
            states = next(iter(encoder.run(feed, number).values()))
            mask = feed.get("attention_mask")
            values = {
                "encoder_hidden_states": states,
                "encoder_attention_mask": np.ones(states.shape[:2], np.int64) if mask is None else mask,
            }
            if number not in self._decoded:
                self._decoded[number] = self._decode(decoder, values, number)
            ids = self._decoded[number]
            if not has_past or BRANCH in target.inputs:
                yield target.feed({**values, **_step(ids, 0)})
            if has_past:
                place = 1 + number % (ids.shape[1] - 1)
                outputs = decoder.run(decoder.feed({**values, **_step(ids[:, :place], 0)}), number)
                past = {
                    f"{PAST}{name.removeprefix(PRESENT)}": value
                    for name, value in outputs.items()
                    if name.startswith(PRESENT)
                }
                yield target.feed({**values, **past, **_step(ids[:, place : place + 1], place)})

    def _decode(self, decoder: _Model, known: Mapping[str, Array], number: int) -> Array:
        """Return token ids (N, tokens) of greedy decoding, at least 2 tokens for each sample."""
        count = len(known["encoder_hidden_states"])
        ids = np.tile(np.asarray(self.tokens.start, np.int64), (count, 1))
        ended = np.zeros(count, bool)
        while ids.shape[1] < 2 or (ids.shape[1] < TOKENS and not ended.all()):
            scores = decoder.run(decoder.feed({**known, **_step(ids, 0)}), number)["logits"]
            tokens = scores[:, -1].argmax(-1)
            ids = np.concatenate([ids, tokens[:, None]], 1)
            ended |= np.isin(tokens, list(self.tokens.end))
        return ids


def _step(ids: Array, before: int) -> dict[str, Array]:
    """Return the inputs of a decoder that depend on the tokens (N, tokens), of which `before` are in the past."""
    count, length = ids.shape
    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "decoder_attention_mask": np.ones((count, before + length), np.int64),
        "cache_position": np.arange(before, before + length),
        BRANCH: np.array([before > 0]),
    }


@dataclass(frozen=True)
class _Model:
    """A float model in onnxruntime.

    Attributes:
        path: its file.
        inputs: shapes by name; axes that are not fixed have a name or None.
    """

    path: Path
    session: Any
    inputs: Mapping[str, list[Any]]

    @classmethod
    def open(cls, path: Path) -> _Model:
        opened = session(path)
        return cls(path, opened, {value.name: value.shape for value in opened.get_inputs()})

    def feed(self, known: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values of the inputs; the branch without a past gets an empty one.

        Raises:
            DataError: an input is not known.
        """
        values = {name: known[name] for name in self.inputs if name in known}
        for name in self.inputs.keys() - values.keys():
            if not name.startswith(PAST):
                raise DataError(
                    f"'{self.path}' has an input '{name}' which decoding does not compute: give data for each file, "
                    "in a folder with an entry for each"
                )
            batch = len(known["encoder_hidden_states"])
            shape = [batch, *(size if isinstance(size, int) else 0 for size in self.inputs[name][1:])]
            values[name] = np.zeros(shape, known["encoder_hidden_states"].dtype)
        return values

    def run(self, feed: Mapping[str, Array], number: int) -> dict[str, Array]:
        names = [value.name for value in self.session.get_outputs()]
        return dict(zip(names, run(self.session, feed, number), strict=True))
