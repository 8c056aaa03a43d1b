"""Output folder of a decoder: the quantized model and everything else of its folder, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from sbonnx.errors import OutputError
from sbonnx.graph.storage.temporary import MARKER, SUFFIX, temporary_folder
from sbonnx.llm.layout import CONFIG, GENAI_CONFIG, TOKENIZER, TOKENIZER_CONFIG, Decoder
from sbonnx.llm.texts import TEMPLATE_FILE

PROVENANCE: Final = "sbonnx_llm.json"
"""Recipe, digest of the texts and figures of the evaluation."""

COPIED: Final = frozenset(
    {GENAI_CONFIG, CONFIG, "generation_config.json", "special_tokens_map.json", TOKENIZER, TOKENIZER_CONFIG}
) | {TEMPLATE_FILE, "vocab.json", "merges.txt", "added_tokens.json"}
"""Files that are copied, because they may be edited; others are linked."""


def check_folder(target: Path, decoder: Decoder, *, force: bool) -> None:
    """Check, before the work begins, that a folder may be written here.

    Args:
        force: an existing folder may be replaced, if an earlier run wrote it.

    Raises:
        OutputError: it is the input, contains it or is in it, exists and `force` is not set, is no folder of an
            earlier run, or its parent folder is missing or not writable.
    """
    inputs = [path.resolve() for path in decoder.files] + ([decoder.folder.resolve()] if decoder.folder else [])
    there = target.resolve()
    if any(there == path or there in path.parents for path in inputs):
        raise OutputError(f"'{target}' is or contains the input: give another name for the output folder")
    if decoder.folder is not None and decoder.folder.resolve() in there.parents:
        raise OutputError(
            f"'{target}' is in the input folder, and would be copied with it next time: give a name outside of it"
        )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"there is no folder '{parent}' to write '{target.name}' to: create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"'{target}' cannot be written: no permission in '{parent}'")
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise OutputError(f"'{target}' is not a folder: give the name of a folder to write")
    if not any(target.iterdir()):
        return
    if not force:
        raise OutputError(f"'{target}' exists: give --force (force=True) to replace it")
    if not (target / PROVENANCE).is_file():
        raise OutputError(f"'{target}' has no {PROVENANCE}, so no earlier run wrote it: remove it, or name another")


@contextmanager
def staged_folder(target: Path, decoder: Decoder, *, force: bool) -> Iterator[Path]:
    """Yield a hidden folder next to `target`, which becomes `target` when the block ends.

    After an exception, an interrupt or a kill, `target` is as before.

    Raises:
        OutputError: as in `check_folder`, or the disk is full.
    """
    check_folder(target, decoder, force=force)
    try:
        with temporary_folder(next_to=target.absolute()) as temporary:
            stage = temporary / "folder"
            stage.mkdir()
            try:
                yield stage
            except OutputError as error:
                raise OutputError(str(error).replace(str(stage), str(target))) from error
            check_folder(target, decoder, force=force)
            if target.exists():
                os.replace(target, temporary / "replaced")
            try:
                os.replace(stage, target)
            except OSError:
                with suppress(OSError):
                    os.replace(temporary / "replaced", target)
                raise
    except OSError as error:
        raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error


def model_place(decoder: Decoder, stage: Path) -> Path:
    """Return the path of the model in the output folder, as in the input folder; its folder is created."""
    name = Path(decoder.model.name)
    if decoder.folder is not None:
        name = decoder.model.relative_to(decoder.folder)
    place = stage / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def copy_rest(decoder: Decoder, stage: Path) -> None:
    """Copy configuration and tokenizer files into the output folder, and link everything else.

    The float model and its external data are left out. A single file gets its tokenizer and configurations beside it.

    Raises:
        OSError: a file cannot be copied.
    """
    skipped = {path.resolve() for path in decoder.files}
    if decoder.folder is None:
        for name in COPIED:
            path = decoder.beside(name)
            if path is not None:
                shutil.copyfile(path, stage / name)
        if decoder.tokenizer is not None:
            shutil.copyfile(decoder.tokenizer, stage / TOKENIZER)
        return
    for path in sorted(decoder.folder.rglob("*")):
        inside = path.relative_to(decoder.folder)
        hidden = any(part == MARKER or (part.startswith(".") and part.endswith(SUFFIX)) for part in inside.parts)
        if path.is_dir() or path.resolve() in skipped or hidden or inside.name == PROVENANCE:
            continue
        place = stage / inside
        place.parent.mkdir(parents=True, exist_ok=True)
        if inside.name in COPIED:
            shutil.copyfile(path, place)
        else:
            _link(path, place)
    if decoder.tokenizer is not None and not (stage / TOKENIZER).exists():
        shutil.copyfile(decoder.tokenizer, stage / TOKENIZER)


def _link(path: Path, place: Path) -> None:
    """Hard-link a file, or copy it where links are not possible."""
    try:
        os.link(path.resolve(), place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, place)


def write_provenance(stage: Path, values: dict[str, Any]) -> None:
    """Write `PROVENANCE`."""
    (stage / PROVENANCE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
