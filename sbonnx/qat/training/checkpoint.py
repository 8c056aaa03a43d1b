"""Checkpoints of training: written whole or not at all, and read only by the run that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from sbonnx.errors import DataError, OutputError
from sbonnx.graph.storage.files import replacing
from sbonnx.input_files import check_regular

KEYS: Final = frozenset({"identity", "module", "optimizer", "average", "steps", "losses", "sum", "chance"})
"""Entries of a training state."""


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state, whole or not at all.

    Raises:
        OutputError: it cannot be written; an older checkpoint stays as it is.
    """
    try:
        with replacing(path) as temporary:
            torch.save(dict(state), temporary)
    except RuntimeError as error:  # torch's name for a full disk
        raise OutputError(f"{path}: the checkpoint cannot be written: {str(error).splitlines()[0]}") from error


def read_checkpoint(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The state that was written to `path`.

    Args:
        identity: of the run that would go on; see the "identity" of the state.

    Raises:
        DataError: the file is no checkpoint, or one of another run; it says of what.
    """
    try:
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what it meets in a file that is not its own: any kind
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
    """Where two values differ, the first place."""
    if not isinstance(known, Mapping) or not isinstance(wanted, Mapping):
        return f" ({known}, not {wanted})"
    for name in dict.fromkeys([*wanted, *known]):
        if known.get(name) != wanted.get(name):
            return f" ({name}: {known.get(name)}, not {wanted.get(name)})"
    return ""


__all__ = ["read_checkpoint", "write_checkpoint"]
