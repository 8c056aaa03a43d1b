"""Training checkpoints: written atomically, and loaded only by a run with the same settings, data and network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from sbonnx.errors import DataError, OutputError
from sbonnx.graph.storage.files import replacing
from sbonnx.input_files import check_regular

KEYS: Final = frozenset({"identity", "module", "optimizer", "average", "steps", "losses", "sum", "chance"})
"""Keys of a training state."""


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state atomically.

    Raises:
        OutputError: the file cannot be written; an existing checkpoint is kept.
    """
    try:
        with replacing(path) as temporary:
            torch.save(dict(state), temporary)
    except RuntimeError as error:  # torch raises it if the disk is full
        raise OutputError(f"{path}: the checkpoint cannot be written: {str(error).splitlines()[0]}") from error


def read_checkpoint(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state that was written to `path`.

    Args:
        path: checkpoint file.
        identity: identity of the run to resume, compared with the "identity" of the state.

    Raises:
        DataError: the file is not a checkpoint, or the identity differs; the message names the difference.
    """
    try:
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a file that is not a checkpoint, torch raises exceptions of any type
        raise _no_checkpoint(path) from error
    known = state.get("identity") if isinstance(state, dict) else None
    if not isinstance(known, Mapping) or not state.keys() >= KEYS:
        raise _no_checkpoint(path)
    for key, wanted in identity.items():
        if known.get(key) != wanted:
            raise DataError(
                f"{path} is a checkpoint of other {key}{_example(known.get(key), wanted)}: delete it to begin anew, "
                "or name another file"
            )
    found: dict[str, Any] = state
    return found


def _no_checkpoint(path: Path) -> DataError:
    return DataError(f"{path} is no checkpoint of a training: delete it, or name another file")


def _example(known: object, wanted: object) -> str:
    """Describe the first difference between two values."""
    if not isinstance(known, Mapping) or not isinstance(wanted, Mapping):
        return f" ({known}, not {wanted})"
    for name in dict.fromkeys([*wanted, *known]):
        if known.get(name) != wanted.get(name):
            return f" ({name}: {known.get(name)}, not {wanted.get(name)})"
    return ""


__all__ = ["read_checkpoint", "write_checkpoint"]
