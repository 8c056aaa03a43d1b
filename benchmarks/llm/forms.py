"""Every export form of decoders through `sbonnx llm quantize`: error, caches, ties, onnxruntime-genai.

python -m benchmarks.llm.forms [--write]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.results import arguments, table, write_section
from sbonnx import llm
from sbonnx.errors import SbonnxError
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.generation import GENERATED, PROMPT
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.windows import read_windows
from sbonnx.report.decoder import DecoderEvaluation, GenAIRun
from sbonnx.spec import Array

TRAINED: Final = "classics_llama"
STRUCTURES: Final = "llm_structures"

COUNT: Final = 24
LENGTH: Final = 64
FIRST_WORD: Final = 3
"""Windows of random tokens for decoders with random weights; ids below are special tokens."""

SETTINGS: Final = {"MIN_WEIGHT_SIZE": 0, "REQUANTIZE": True}

HEADER: Final = (
    "folder",
    "form",
    "bits before",
    "perplexity over float",
    "KL from float",
    "caches over at once",
    "MB",
    "embedding and head",
    "onnxruntime-genai",
)

ABOUT: Final = """`python -m benchmarks.llm.forms --write`. `sbonnx llm quantize` without a setting but \
`MIN_WEIGHT_SIZE=0` and `--requantize`: {structures} has tiny decoders with random weights in each form of export, on \
{count} windows of {length} random tokens; {trained} is trained, on its texts; every eighth window is held out, for \
these figures. "float" is the decoder of the folder, which may be quantized already. Perplexity token by token through \
the caches over that at once is of the quantized decoder. The last column: whether onnxruntime-genai opens the folder \
and generates the {generated} tokens that onnxruntime decodes greedily; folders with provider options for CUDA need a \
GPU."""


def windows(pack: Path, folder: Path, decoder: Decoder) -> Array:
    """Return windows of tokens for a decoder, int64, (windows, length)."""
    if folder.parent.name == TRAINED:
        with np.load(pack / TRAINED / "calib.npz") as arrays:
            return np.asarray(arrays["ids"][:COUNT], np.int64)
    words = decoder.vocabulary or 0
    return np.random.default_rng(0).integers(FIRST_WORD, words, (COUNT, LENGTH))


def generated(decoder: Decoder, found: GenAIRun | None, ids: Array) -> str:
    """Say whether onnxruntime-genai generates what onnxruntime does; "" for other forms."""
    if found is None:
        return ""
    if found.error:
        return str(found.error).split(":")[1 if found.installed else 0].strip()
    expected = DecoderSession(decoder, threads=1).greedy(ids[:PROMPT], GENERATED)
    return "the same" if list(found.tokens) == expected else "other tokens"


def row(pack: Path, folder: Path, output: Path) -> list[str]:
    """Quantize a folder and return its row of the table."""
    decoder = read_decoder(folder)
    name = f"{folder.parent.name}/{folder.name}" if folder.parent.name == TRAINED else folder.name
    labels = {weight.bits for block in decoder.structure.blocks for weight in block.weights}
    before = [name, decoder.format, ", ".join(str(bits) for bits in sorted(labels))]
    ids = windows(pack, folder, decoder)
    try:
        report = llm.quantize(folder, ids, output=output, overrides=SETTINGS, latency=False)
    except SbonnxError as error:
        return [*before, f"fails: {error}", *[""] * (len(HEADER) - len(before) - 1)]
    written, figures = read_decoder(output), report.metrics and report.metrics.llm
    assert isinstance(figures, DecoderEvaluation) and figures.float_perplexity
    cached = figures.cached_perplexity
    return [
        *before,
        f"{figures.perplexity / figures.float_perplexity:.4f}",
        f"{figures.kl:.4f}",
        "" if not cached or not figures.uncached_perplexity else f"{cached / figures.uncached_perplexity:.4f}",
        f"{decoder.bytes / 1e6:.2f} to {written.bytes / 1e6:.2f}",
        f"{decoder.ties}, {written.ties}" if decoder.ties != written.ties else written.ties,
        generated(written, figures.genai, read_windows(decoder, ids).held_out[0]),
    ]


def rows(pack: Path) -> Iterator[list[str]]:
    """Yield the row of every folder."""
    folders = [path for place in (STRUCTURES, TRAINED) for path in sorted((pack / place).iterdir()) if path.is_dir()]
    with tempfile.TemporaryDirectory(prefix="llm-forms-") as work:
        for folder in folders:
            line = row(pack, folder, Path(work) / f"{folder.parent.name}_{folder.name}")
            print(" | ".join(line), file=sys.stderr, flush=True)
            yield line


def text_of(lines: list[list[str]]) -> str:
    """Return the section."""
    about = ABOUT.format(structures=STRUCTURES, trained=TRAINED, count=COUNT, length=LENGTH, generated=GENERATED)
    return "\n\n".join(("## Forms of decoders", about, table(HEADER, lines)))


def main() -> int:
    """Quantize every folder, print the table and, with --write, update docs/results/."""
    options = arguments(__doc__).parse_args()
    text = text_of(list(rows(options.pack)))
    print(text)
    if options.write:
        write_section("llm forms", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
