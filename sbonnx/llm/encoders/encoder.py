"""`Encoder`: the model whose outputs are inputs of a decoder, and its session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.errors import DataError
from sbonnx.spec import Array
from sbonnx.system.input_files import read_json
from sbonnx.verify.sessions import run, session

CONFIGS: Final = ("generation_config.json", "config.json", "genai_config.json")
"""Files with the token ids at which a text begins and ends, the first that has them."""

MASK: Final = "attention_mask"
"""Input of an encoder that says which of its tokens are padding."""


@dataclass(frozen=True)
class TokenIds:
    """Token ids that decoding needs.

    Attributes:
        start: ids at the start of every text: that of the decoder, and those that the configuration forces.
        end: ids that end a text.
    """

    start: tuple[int, ...]
    end: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> TokenIds:
        """Read the ids of a model folder.

        Raises:
            DataError: no file names the first token.
        """
        settings: dict[str, Any] = {}
        for name in reversed(CONFIGS):
            if (folder / name).is_file():
                try:
                    values = read_json(folder / name)
                except (OSError, ValueError) as error:
                    raise DataError(f"'{folder / name}' cannot be read: {error}") from error
                if not isinstance(values, dict):
                    raise DataError(f"'{folder / name}' must have a JSON object")
                model = values.get("model")  # of onnxruntime-genai
                values = model if isinstance(model, dict) else values
                settings |= {key: value for key, value in values.items() if value is not None}
        start = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
        if not isinstance(start, int):
            raise DataError(
                f"folder '{folder}' has no decoder_start_token_id in {' or '.join(CONFIGS[:2])}, so its decoders "
                "cannot be run for their calibration data: add it, or give data for each file"
            )
        forced = [token for _, token in sorted(settings.get("forced_decoder_ids") or ()) if token is not None]
        end = settings.get("eos_token_id", ())
        return cls((start, *forced), frozenset([end] if isinstance(end, int) else end))

    @staticmethod
    def are_in(folder: Path) -> bool:
        """Return whether a folder has a file of `CONFIGS`."""
        return any((folder / name).is_file() for name in CONFIGS)


@dataclass(frozen=True)
class Encoder:
    """Encoder of a decoder.

    Attributes:
        model: its file.
        data: external data files of the model.
        outputs: output of the encoder by the input of the decoder that takes it.
        mask: input of the decoder that takes the attention mask of the encoder; None: there is none.
        types: element types of `outputs` and `mask`, by the input of the decoder.
        folder: folder with the configuration, which has the first token of a text.
    """

    model: Path
    data: tuple[Path, ...]
    outputs: Mapping[str, str]
    mask: str | None
    types: Mapping[str, np.dtype[Any]]
    folder: Path

    @property
    def inputs(self) -> frozenset[str]:
        """The inputs of the decoder that are the same for every token."""
        return frozenset(self.outputs) | (frozenset() if self.mask is None else {self.mask})


@final
class EncoderSession:
    """Session of an encoder.

    Args:
        threads: threads inside operators; None: number of cores.

    Raises:
        ModelError: onnxruntime rejects the model.
    """

    def __init__(self, encoder: Encoder, *, threads: int | None = None) -> None:
        self._encoder = encoder
        self._session = session(encoder.model, threads=threads)
        self._names = [value.name for value in self._session.get_outputs()]

    def __call__(self, source: Feed) -> dict[str, Array]:
        """Return the inputs of the decoder for the inputs of the encoder.

        Raises:
            DataError: the encoder cannot run on them.
        """
        encoder = self._encoder
        outputs = dict(zip(self._names, run(self._session, source, 0), strict=True))
        computed = {name: outputs[output] for name, output in encoder.outputs.items()}
        if encoder.mask is not None:
            states = next(iter(computed.values()))
            mask = source.get(MASK)
            computed[encoder.mask] = np.ones(states.shape[:2], np.int64) if mask is None else mask
        return {name: array.astype(encoder.types[name], copy=False) for name, array in computed.items()}
