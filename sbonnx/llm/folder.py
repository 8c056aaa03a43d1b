"""Output folder of a decoder: the quantized model and everything else of its folder, written whole or not at all."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from sbonnx.graph.storage.output_folder import OutputFolder, is_own_file, left_out_notes
from sbonnx.llm.layout import CONFIG, GENAI_CONFIG, TOKENIZER, TOKENIZER_CONFIG, Decoder
from sbonnx.llm.token_texts import TEMPLATE_FILE
from sbonnx.report.codes import Note

PROVENANCE: Final = "sbonnx_llm.json"
"""Recipe, digest of the texts and figures of the evaluation."""

COPIED: Final = frozenset(
    {GENAI_CONFIG, CONFIG, "generation_config.json", "special_tokens_map.json", TOKENIZER, TOKENIZER_CONFIG}
) | {TEMPLATE_FILE, "vocab.json", "merges.txt", "added_tokens.json"}
"""Files that are copied, because they may be edited; others are linked."""


def check_folder(target: Path, decoder: Decoder, *, force: bool) -> None:
    """Check, before the work begins, that a folder may be written here; see `OutputFolder.check`."""
    _folder(target, decoder, force=force).check()


def staged_folder(target: Path, decoder: Decoder, *, force: bool) -> AbstractContextManager[Path]:
    """Return a context with a hidden folder, which becomes `target`; see `OutputFolder.staged`."""
    return _folder(target, decoder, force=force).staged()


def _folder(target: Path, decoder: Decoder, *, force: bool = False) -> OutputFolder:
    return OutputFolder(target, decoder.folder, tuple(decoder.files), PROVENANCE, force)


def model_place(decoder: Decoder, stage: Path) -> Path:
    """Return the path of the model in the output folder, as in the input folder; its folder is created."""
    name = Path(decoder.model.name)
    if decoder.folder is not None:
        name = decoder.model.relative_to(decoder.folder)
    place = stage / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def copy_rest(decoder: Decoder, stage: Path) -> list[Note]:
    """Copy configuration and tokenizer files into the output folder, and link everything else.

    The float model and its external data are left out. A single file gets its tokenizer and configurations beside it.

    Returns:
        A note about files that are not copied; see `OutputFolder.copy_source`.

    Raises:
        OSError: a file cannot be copied.
    """
    notes: list[Note] = []
    if decoder.folder is not None:
        notes = _folder(stage, decoder).copy_source(stage, copied=COPIED)
    else:
        near = [path for name in sorted(COPIED) if (path := decoder.beside(name)) is not None]
        for path in near:
            if is_own_file(path, path.parent):
                shutil.copyfile(path, stage / path.name)
        notes = left_out_notes(decoder.model.parent, [file.name for file in near if not is_own_file(file, file.parent)])
    tokenizer, places = decoder.tokenizer, (decoder.folder, decoder.model.parent, decoder.model.parent.parent)
    copied = tokenizer in [None if place is None else place / TOKENIZER for place in places]
    if tokenizer is not None and not copied and (decoder.folder is None or not (stage / TOKENIZER).exists()):
        shutil.copyfile(tokenizer, stage / TOKENIZER)  # the caller named it
    return notes


def write_provenance(stage: Path, values: dict[str, Any]) -> None:
    """Write `PROVENANCE`."""
    (stage / PROVENANCE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
