"""Accuracy of a small trained mixture of experts and of a small trained hybrid in 4 bits.

    python -m benchmarks.llm.toy_mixture FOLDER
    python -m benchmarks.llm.toy_hybrid FOLDER/hybrid
    python -m benchmarks.llm.mixtures FOLDER [--write]

Records are kept in a file, so an interrupted run continues.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.kept import Kept, Record
from benchmarks.llm.runs import FLOAT, DecoderBench
from benchmarks.llm.table import DIGITS
from benchmarks.llm.toy_hybrid import CONTEXT, RECURRENT
from benchmarks.llm.toy_mixture import ACTIVE, EXPERTS, FORMS, INNER, LAYERS
from benchmarks.llm.ways import OURS, DecoderWay
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import Estimate
from benchmarks.w8a8.table import shown
from sbonnx.llm.decoding import DecoderSession
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.scores import log_softmax
from sbonnx.spec import Array

MODEL: Final = "classics_llama"
HYBRID: Final = "hybrid"
NEAREST: Final = "nearest"
WAYS: Final = {
    "default": DecoderWay(OURS, 4, 32),
    NEAREST: DecoderWay(OURS, 4, 32, ("W.ROUNDING.TYPE=nearest",)),
}

SHARE: Final = 0.6
"""Largest share of the divergence of rounding to nearest, of mixtures."""
INCREASE: Final = 0.01
"""Largest relative increase of the perplexity, of the hybrid."""
PART: Final = 512
"""Tokens of a sequence of `CONTEXT` tokens over which sentences are averaged."""

HEADER: Final = ("form", "weights", "perplexity", "KL from float", "same top token", "MB", "CPU s")

ABOUT: Final = """`python -m benchmarks.llm.mixtures FOLDER --write`, with decoders that `python -m \
benchmarks.llm.toy_mixture FOLDER` and `python -m benchmarks.llm.toy_hybrid FOLDER/hybrid` make: {model} with \
{experts} experts of {inner} channels in place of each MLP, of which {active} are active, and {model} with a causal \
convolution and a gated linear attention in place of attention in {recurrent} of {layers} blocks; both trained to its \
probabilities on text that it writes itself. Forms of the mixture: `com.microsoft.MoE` (written as QMoE), each expert \
on the rows routed to it (NonZero, Gather, ScatterND), and each on all rows times a mask (both MatMulNBits). `sbonnx \
llm quantize` with 4 bits in blocks of 32, calibrated on the windows of {model}; {windows} windows of {length} tokens \
of other books."""

Records = dict[tuple[str, str], Record]


def acceptance(records: Records) -> list[str]:
    """Return a sentence for each requirement, with its figure and whether it is met."""
    sentences = []
    for form in FORMS:
        mine, nearest = (records[form, name] for name in WAYS)
        if not mine["note"] and not nearest["note"]:
            share = mine["kl"]["value"] / nearest["kl"]["value"]
            said = f"KL of {form} over that of the nearest codes: {share:.2f}, at most {SHARE}"
            sentences.append(f"{_met(share <= SHARE)}: {said}")
    mine = records[HYBRID, "default"]
    if not mine["note"]:
        increase = mine["perplexity"]["value"] / records[HYBRID, FLOAT]["perplexity"]["value"] - 1
        said = f"increase of the perplexity of the hybrid: {increase:.2%}, at most {INCREASE:.0%}"
        sentences.append(f"{_met(increase <= INCREASE)}: {said}")
        parts = mine["drift"]
        sentences.append(
            f"KL of the hybrid in a sequence of {CONTEXT} tokens: {parts[0]:.4f} in the first {PART} tokens, "
            f"{parts[-1]:.4f} in the last, at most {max(parts):.4f}"
        )
    return sentences


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def text_of(records: Records, about: str) -> str:
    """Return the section: what is met, and the table."""
    lines = []
    for (form, name), record in records.items():
        if record["note"]:
            lines.append([form, name, record["note"], "", "", "", ""])
            continue
        cells = [shown(Estimate(**record[key]), digits) for key, digits in DIGITS.items()]
        if name == FLOAT:
            lines.append([form, name, cells[0], "", "", f"{record['mb']:.2f}", ""])
        else:
            lines.append([form, name, *cells, f"{record['mb']:.2f}", f"{record['cpu']:.1f}"])
    said = "\n".join(f"- {line}" for line in acceptance(records))
    return "\n\n".join(("## Mixtures of experts, and hybrids", said, about, table(HEADER, lines)))


def drift(bench: DecoderBench, ids: Array) -> list[float]:
    """Return the mean divergence from float of each `PART` tokens of one sequence, of what was quantized last."""
    logits = [
        [log_softmax(values) for _, values in DecoderSession(decoder, threads=1).pieces(ids, PART)]
        for decoder in (bench.decoder, read_decoder(bench.folder / "quantized"))
    ]
    return [float((np.exp(p) * (p - q)).sum(-1).mean()) for p, q in zip(*logits, strict=True)]


def measure(bench: DecoderBench, name: str, sequence: Array | None) -> Record:
    """Return the record of a setting; with the sentences along a sequence, if there is one."""
    record = bench.measure(WAYS[name].form, name, WAYS[name])
    return record if sequence is None or record["note"] else {**record, "drift": drift(bench, sequence)}


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the decoders")
    parser.add_argument("--windows", type=int, default=32, help="windows of the evaluation, at most 160")
    parser.add_argument("--only", nargs="*", default=[*FORMS, HYBRID], help="forms to measure")
    parser.add_argument("--kept", type=Path, default=environments.FOLDER / "mixtures.jsonl", help="file of records")
    options = parser.parse_args()
    kept = Kept(options.kept)
    pack = options.pack / MODEL
    with np.load(pack / "eval.npz") as arrays:
        every = arrays["ids"].astype(np.int64)
    ids, sequence = every[: options.windows], every[:, 1:].reshape(-1)[:CONTEXT]
    records: Records = {}
    with tempfile.TemporaryDirectory(prefix="mixtures-") as work:
        for form in options.only:
            bench = DecoderBench(options.folder / form, pack / "calib.npz", ids, Path(work), minutes=60.0)
            records[form, FLOAT] = kept.record((form, FLOAT), bench.measure_float)
            for name in WAYS:
                along = sequence if form == HYBRID else None
                records[form, name] = kept.record((form, name), partial(measure, bench, name, along))
                print(form, name, records[form, name].get("kl"), file=sys.stderr, flush=True)
    if set(options.only) < {*FORMS, HYBRID}:
        return 0
    about = ABOUT.format(
        model=MODEL,
        experts=EXPERTS,
        active=ACTIVE,
        inner=INNER,
        recurrent=len(RECURRENT),
        layers=LAYERS,
        windows=len(ids),
        length=ids.shape[1],
    )
    text = text_of(records, about)
    print(text)
    if options.write:
        write_section("llm mixtures", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
