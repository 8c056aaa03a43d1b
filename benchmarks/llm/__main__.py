"""Accuracy and speed of decoders with block-wise weights, beside onnxruntime's quantizers and other peers.

    python -m benchmarks.llm [--only sbonnx] [--again] [--forms "w4 g32"] [--write]

Peers other than onnxruntime need their environments (`make peers ARGS="onnx_quantize auto_round"`); the reference of
GPTQ in torch uses that of auto_round. Records are kept in a file, so an interrupted run continues; ``--only sbonnx
--again`` measures the rows of sbonnx again and reads the others from that file.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.kept import Kept, Record
from benchmarks.llm import table as llm_table
from benchmarks.llm.runs import DECODED, FLOAT, PROMPT, DecoderBench
from benchmarks.llm.ways import AUTO, GROUPS, METHODS, OURS, TIMED, DecoderWay, ways
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section

MODEL: Final = "classics_llama"
QUANTIZERS: Final = (OURS, *METHODS)

ABOUT: Final = """`python -m benchmarks.llm --write`. {model} of the pack in the form of onnxruntime-genai: a trained \
Llama of 0.92 M parameters with a tied embedding. `sbonnx llm quantize` without a setting (embedding and head 8 bits \
in one table, int8 arithmetic), with weights rounded to nearest, with `ACCURACY_LEVEL=0` (float32 arithmetic), and \
with the table as narrow as the other weights; with the widths of layers chosen for 3.65 bits on average; with \
quantized caches, also beside float weights (`--bits w0`); at 2 bits also with GPTQ instead of the default, \
and trained in torch (`--effort best`). \
`onnxruntime.quantization.matmul_nbits_quantizer` {version} with each of its methods, which leave \
the embedding float, quantize the head as the rest, and compute in float32. GPTQ of both \
calibrates on the same {calibration} windows. Each file runs in onnxruntime on the same {windows} windows of {length} \
tokens of other books, scored as by `sbonnx llm evaluate`: perplexity, mean KL divergence from float, positions with \
the most likely token of float, each with its 95 % interval (bootstrap over windows). MB: model and external data. \
CPU s: of the whole process; ours evaluates the file too, and the rows of onnxruntime may be of an earlier run, whose \
CPU s do not compare. onnxruntime stores 3 bits in 4. Its GPTQ propagates no \
errors (it takes the update of the remaining columns from below the diagonal of an upper triangular matrix, which is \
0), so without `mse` it equals rounding to nearest. {groups} rounds to nearest, leaves the embedding float, and \
writes DequantizeLinear of 4-bit integers in functions; its version converter fails above opset 21, so the file of \
opset 22 is labelled 21, in which its operators are the same. What it writes then lacks the weight that head and \
embedding share, and scales of products that read one tensor (they are named after it), so onnxruntime rejects it. \
It has no width below 4 bits, no AWQ and no HQQ, and its \
GPTQ has one scale for an output and feeds one input of the model, so it does not calibrate decoders with caches. \
{auto} fits scales and codes of a block by gradients, in transformers, to which the weights are carried, and leaves \
embedding and head float; its codes are written as MatMulNBits. torch GPTQ is a plain reference of the paper's \
algorithm in torch, in one thread, written in the same way (`benchmarks/peers/torch_gptq_llama.py`). Both \
calibrate on the same windows."""

SPEED: Final = """CPU time of one thread, prompt of {prompt} tokens, {decoded} further tokens, {rounds} rounds in \
which the three files alternate; medians with the smallest and largest, ratios of each round. 4 bits in blocks of 32, \
int8 arithmetic in both files (accuracy level 4). Memory: what opening the file, a prompt and a token add to a \
process. In a model of this size, operators other than products take most of the time: larger decoders gain more."""


def text_of(records: llm_table.Records, speed: Record | None, about: str) -> str:
    """Return the section: acceptance, table of accuracy, table of speed."""
    said = "\n".join(f"- {line}" for line in llm_table.acceptance(records))
    parts = ["## Decoders in 2 to 4 bits", said, about, table(llm_table.HEADER, llm_table.lines(records))]
    if speed is not None:
        rounds = len(speed["first"][FLOAT])
        note = SPEED.format(prompt=PROMPT, decoded=DECODED, rounds=rounds)
        parts += ["### Speed and memory", note, table(llm_table.SPEED_HEADER, llm_table.speed_lines(speed))]
    return "\n\n".join(part for part in parts if part)


def measured(kept: Kept, forms: list[str]) -> llm_table.Records:
    """Return the records of the float decoder and of all settings that were measured."""
    names: list[tuple[str, str]] = [(FLOAT, FLOAT), *(key for key in ways() if key[0] in forms)]
    return {key: record for key in names if (record := kept.get(*key)) is not None}


def said(form: str, row: str, record: Record) -> str:
    """Format a record as a line of progress."""
    if record["note"]:
        return f"{form:8s} {row:40s} {record['note']}"
    figures = " ".join(f"{record[key]['value']:.4f}" for key in llm_table.DIGITS)
    return f"{form:8s} {row:40s} {figures}  {record['mb']:.2f} MB  {record.get('cpu', 0):.1f} CPU s"


def main() -> int:
    """Measure, print the tables and, with --write, update docs/results/."""
    known = list(dict.fromkeys(form for form, _ in ways()))
    parser = arguments(__doc__)
    parser.add_argument("--forms", nargs="*", default=known, choices=known, help="widths and block sizes")
    parser.add_argument("--only", nargs="*", default=QUANTIZERS, choices=QUANTIZERS, help="quantizers to run")
    parser.add_argument("--again", action="store_true", help="measure the rows of --only again")
    parser.add_argument("--windows", type=int, default=64, help="windows of the evaluation, at most 160")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the speed comparison; 0: none")
    parser.add_argument("--kept", type=Path, default=environments.FOLDER / "llm.jsonl", help="file of records")
    parser.add_argument("--minutes", type=float, default=10.0, help="the longest that one run may take")
    options = parser.parse_args()
    wanted: dict[tuple[str, str], DecoderWay] = {
        key: way for key, way in ways().items() if way.form in options.forms and way.quantizer in options.only
    }
    kept = Kept(options.kept, [row for _, row in wanted] if options.again else ())
    pack = options.pack / MODEL
    with np.load(pack / "eval.npz") as arrays:
        ids = arrays["ids"][: options.windows].astype(np.int64)
    with tempfile.TemporaryDirectory(prefix="llm-") as folder:
        bench = DecoderBench(pack / "genai", pack / "calib.npz", ids, Path(folder), kept, options.minutes)
        print(said(FLOAT, FLOAT, bench.measure_float()), file=sys.stderr, flush=True)
        for (form, row), way in wanted.items():
            print(said(form, row, bench.measure(form, row, way)), file=sys.stderr, flush=True)
        speed = bench.speed(TIMED, options.rounds) if options.rounds else kept.get("speed")
        calibration = len(bench.windows)
    about = ABOUT.format(
        model=MODEL,
        version=version("onnxruntime"),
        groups=environments.PEERS[GROUPS].versions.split(",")[0],
        auto=environments.PEERS[AUTO].versions.split(",")[0],
        calibration=calibration,
        windows=len(ids),
        length=ids.shape[1],
    )
    text = text_of(measured(kept, options.forms), speed, about)
    print(text)
    if options.write:
        write_section("llm", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
