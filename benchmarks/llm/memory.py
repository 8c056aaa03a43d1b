"""Peak memory and time of `sbonnx llm quantize` on large decoders with random weights, one process for each row.

    python -m benchmarks.llm.memory [--shapes "8 B"] [--ways nearest] [--windows 4] [--again] [--write]

The decoders are written to the folder of temporary files and removed. Records are kept in a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.kept import Kept, Record
from benchmarks.llm.random_decoder import DecoderSize, write_random_decoder
from benchmarks.peers import environments
from benchmarks.results import ROOT, arguments, table, write_section

LENGTH: Final = 256
"""Tokens of a window."""


@dataclass(frozen=True)
class Shape:
    """A decoder that is measured.

    Attributes:
        about: of the row.
        size: sizes of the decoder.
    """

    about: str
    size: DecoderSize


SHAPES: Final[Mapping[str, Shape]] = {
    "2 GB": Shape(
        "8 blocks of 2048 / 5632, 32,000 tokens, float32",
        DecoderSize(hidden=2048, inner=5632, layers=8, heads=16, kv_heads=8, vocabulary=32000, context=LENGTH),
    ),
    "8 B, head": Shape(
        "2 of 32 blocks of 4096 / 14,336, 128,256 tokens, float16",
        DecoderSize(
            hidden=4096, inner=14336, layers=2, heads=32, kv_heads=8, vocabulary=128256, context=LENGTH, half=True
        ),
    ),
    "8 B, block": Shape(
        "1 of 32 blocks of 4096 / 14,336, 512 tokens, float16",
        DecoderSize(
            hidden=4096, inner=14336, layers=1, heads=32, kv_heads=8, vocabulary=512, context=LENGTH, half=True
        ),
    ),
}

WAYS: Final[Mapping[str, tuple[str, ...]]] = {
    "nearest, minmax": ("--set", "W.OBSERVER.TYPE=minmax"),
    "nearest, mse": (),
    "gptq": ("--text",),
}
"""Flags of our command; ``--text`` is followed by the windows."""

CHILD: Final = """
import json, resource, sys
from pathlib import Path
from sbonnx.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
used = resource.getrusage(resource.RUSAGE_SELF)
peak = int(status["VmHWM"].split()[0]) * 1024
print("\\n" + json.dumps({"code": code, "peak": peak, "cpu": used.ru_utime + used.ru_stime}))
"""

HEADER: Final = (
    "decoder",
    "weights, GB",
    "way",
    "tokens",
    "peak, GB",
    "peak / weights",
    "CPU s",
    "alone",
)

ABOUT: Final = """`python -m benchmarks.llm.memory --write`. The decoders have random weights and \
are in the form of onnxruntime-genai. Each row is one process of `sbonnx llm quantize --no-latency` (4 bits in blocks \
of 32, embedding and head 8 bits) with a report, whose losses \
are its peak. Peak: VmHWM, which includes pages of the mapped weights. CPU s: of the process, \
with the check of the file and, with texts, the evaluation on an eighth of the windows. Only some of the blocks of \
an 8 B decoder are measured: one block is in memory at a time, so further blocks add only mapped pages. Alone: layers \
whose moments and errors exceed `--memory` (2 GiB by default), which are fitted to their quantized inputs without \
compensation. Time with texts grows with the tokens; the peak grows by what fits into `--memory`."""


def measure(name: str, way: str, windows: int) -> Record:
    """Write a decoder, quantize it in a process, and return peak (bytes), CPU seconds and what was not fitted.

    Raises:
        RuntimeError: the command fails; with its last line.
    """
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="llm-memory-") as folder:
        source = write_random_decoder(Path(folder) / "m", shape.size)
        weights = (source / "model.onnx.data").stat().st_size
        flags, tokens = list(WAYS[way]), 0
        if "--text" in flags:
            ids = np.random.default_rng(0).integers(2, shape.size.vocabulary, (windows, LENGTH))
            np.savez(Path(folder) / "ids.npz", ids=ids)
            flags, tokens = [*flags, str(Path(folder) / "ids.npz")], ids.size
        report = Path(folder) / "report.json"
        files = [str(source), "-o", str(Path(folder) / "q"), "--report", str(report)]
        words = ["llm", "quantize", *files, "--no-latency", "--quiet", *flags]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        if done.returncode or not report.is_file():
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        figures = json.loads(lines[-1])
        refusals = json.loads(report.read_text(encoding="utf-8"))["refusals"]
        alone = sum("fitted to its quantized inputs" in one["why"] for one in refusals)
        return {**figures, "weights": weights, "tokens": tokens, "alone": alone}


def line(name: str, way: str, record: Record) -> list[str]:
    """Return the row of a record."""
    shape = SHAPES[name]
    return [
        f"{name}: {shape.about}",
        f"{record['weights'] / 1e9:.2f}",
        way,
        f"{record['tokens']:,}" if record["tokens"] else "",
        f"{record['peak'] / 1e9:.2f}",
        f"{record['peak'] / record['weights']:.2f}",
        f"{record['cpu']:.0f}",
        str(record["alone"]) if record["tokens"] else "",
    ]


def text_of(kept: Kept) -> str:
    """Return the section."""
    rows = [
        line(name, way, record)
        for name in SHAPES
        for way in WAYS
        if (record := kept.get("memory", name, way)) is not None
    ]
    return "\n\n".join(["## Memory of large decoders", ABOUT, table(HEADER, rows)])


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="decoders")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="settings")
    parser.add_argument("--windows", type=int, default=16, help=f"windows of {LENGTH} tokens; an eighth is held out")
    parser.add_argument("--again", action="store_true", help="measure all of them again")
    parser.add_argument("--kept", type=Path, default=environments.FOLDER / "llm_memory.jsonl", help="file of records")
    options = parser.parse_args()
    kept = Kept(options.kept, options.ways if options.again else ())
    for name in options.shapes:
        for way in options.ways:
            key = ("memory", name, way)
            record = kept.record(key, lambda name=name, way=way: measure(name, way, options.windows))  # type: ignore[misc]
            print(" | ".join(line(name, way, record)), file=sys.stderr, flush=True)
    text = text_of(kept)
    print(text)
    if options.write:
        write_section("llm memory", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
