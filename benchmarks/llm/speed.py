"""CPU time and layer error of our rounding of wide layers beside GPTQ in torch, on the same weights and rows.

    python -m benchmarks.llm.speed [--shapes "4096 x 1024"] [--again] [--write]

Needs torch. Each is run once, with one thread. Records are kept in a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.kept import Kept, Record
from benchmarks.peers import environments, torch_gptq_llama
from benchmarks.results import arguments, table, write_section
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.linear.im2col import geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments, MomentSums, shrinkage_of
from sbonnx.rounding import make_rounder
from sbonnx.rounding.output_slices import round_in_slices
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds

TOKENS: Final = 1024
BLOCK: Final = 32
LARGEST: Final = 15


@dataclass(frozen=True)
class ProductShape:
    """A matrix product that is measured.

    Attributes:
        about: of the row.
        inputs, outputs: of the weight; some of the outputs of the layer, where they are fewer.
        errors: errors of the inputs are compensated, as where they fit into the memory.
    """

    about: str
    inputs: int
    outputs: int
    errors: bool = True


PRODUCTS: Final[Mapping[str, ProductShape]] = {
    "4096 x 1024": ProductShape("key or value", 4096, 1024),
    "4096 x 4096": ProductShape("query or output", 4096, 4096),
    "14336 x 1024": ProductShape("a quarter of down", 14336, 1024, errors=False),
}

HEADER: Final = (
    "inputs x outputs",
    "CPU s",
    "GPTQ in torch, CPU s",
    "ratio",
    "error",
    "GPTQ in torch, error",
    "error of other rows",
    "GPTQ in torch, error of other rows",
)

ABOUT: Final = f"""`python -m benchmarks.llm.speed --write`. Products of an 8 B decoder, {TOKENS:,} rows, 4 bits in \
blocks of {BLOCK}, one thread; errors are relative to nearest codes. Random weights; inputs are 1,024 directions with \
falling energy and noise, with 2 % errors of quantization; a fifth of the rows is held out for the shrinkage, as in a \
run. CPU s: moments and rounding. Error: of all rows that are rounded by; other rows: {TOKENS:,} of the same \
distribution. GPTQ in torch is that of the table of decoders, on quantized inputs; ours compensates the errors of \
4,096 inputs, with three products of rows in place of one and three more of the weight."""

MOST: Final = 1.2
"""CPU time over that of GPTQ in torch at most."""


def rows_of(inputs: int, seed: int) -> Array:
    """Return `TOKENS` rows of correlated inputs, float32 (n, K), in which a few channels are large."""
    about, own = np.random.default_rng(0), np.random.default_rng((1, seed))
    fall = np.arange(1, 1025, dtype=np.float32) ** -0.5
    size = np.exp(0.5 * about.standard_normal(inputs, np.float32))
    size[about.choice(inputs, 6, replace=False)] *= 20
    directions = about.standard_normal((len(fall), inputs), np.float32)
    common = (own.standard_normal((TOKENS, len(fall)), np.float32) * fall) @ directions
    noise = 0.3 * np.sqrt(np.square(fall).sum()) * own.standard_normal((TOKENS, inputs), np.float32)
    return np.asarray((common + noise) * size)


def quantized_rows(x: Array, seed: int) -> Array:
    """Return the rows with errors of 2 % of the size of each channel."""
    noise = np.random.default_rng((2, seed)).standard_normal(x.shape, np.float32)
    return np.asarray(x + 0.02 * x.std(axis=0) * noise)


def ours(weight: Array, x: Array, other: Array, *, errors: bool) -> Callable[[], Array]:
    """Return a run of our rounding of `weight` (O, K), as values; `x` and `other`: rows of both streams."""
    layout = LinearLayer("MatMul", weight.shape[::-1], 1, 0)
    spec = QuantSpec(bits=4, signed=False, symmetric=False, axis=0, block_size=BLOCK)
    blocks = weight.T.reshape(-1, BLOCK, len(weight))
    qparams = params_from_bounds(Bounds(blocks.min(axis=1), blocks.max(axis=1)), spec)

    def run() -> Array:
        fit, held = (
            _moments(layout, (x[some], other[some]) if errors else (other[some],))
            for some in (slice(TOKENS // 5, None), slice(TOKENS // 5))
        )
        chance = shrinkage_of(fit, held) * fit.rows / TOKENS
        moments = fit.merged(held, in_place=True).shrunk(chance, in_place=True)
        rounder = make_rounder("gptq", {})
        rounded = round_in_slices(rounder, np.ascontiguousarray(weight.T), qparams, moments)
        return np.asarray(qparams.dequantize(rounded.codes).T)

    return run


def _moments(layout: LinearLayer, streams: tuple[Array, ...]) -> Moments:
    sums = MomentSums(geometry_of(layout, {}), two_streams=len(streams) > 1, compact=True)
    sums.add(*streams, sample=0)
    return sums.moments()


def in_torch(weight: Array, other: Array) -> Callable[[], Array]:
    """Return a run of GPTQ in torch, as values."""
    import torch

    torch.set_num_threads(1)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = torch.tensor(weight)

    def run() -> Array:
        with torch.no_grad():
            rows = torch.tensor(other)
            torch_gptq_llama.round_layer(layer, rows.T @ rows * (2 / TOKENS), BLOCK, LARGEST, reorders=False)
        return np.asarray(layer.weight.detach().numpy())

    return run


def measure(shape: ProductShape) -> Record:
    """Return CPU seconds and relative errors on the rows, and on others, of both."""
    weight = np.random.default_rng(3).standard_normal((shape.outputs, shape.inputs), np.float32)
    weight *= shape.inputs**-0.5
    x, test = rows_of(shape.inputs, 0), rows_of(shape.inputs, 1)
    other, tested = quantized_rows(x, 0), quantized_rows(test, 1)
    wide = weight.reshape(len(weight), -1, BLOCK)
    low, high = wide.min(axis=2, keepdims=True), wide.max(axis=2, keepdims=True)
    scale = (high - low) / LARGEST
    nearest = (np.rint((wide - low) / scale) * scale + low).reshape(weight.shape)

    def errors(values: Array) -> Array:
        pairs = ((x, other), (test, tested))
        return np.array([np.square(a @ weight.T - b @ values.T).sum(dtype=np.float64) for a, b in pairs])

    base, record = errors(nearest), {}
    for name, run in (
        ("ours", ours(weight, x, other, errors=shape.errors)),
        ("torch", in_torch(weight, other)),
    ):
        start = time.process_time()
        values = run()
        record[name] = {"cpu": time.process_time() - start, "errors": (errors(values) / base).tolist()}
    return record


def line(name: str, record: Record) -> list[str]:
    """Return the row of a record."""
    both: list[dict[str, Any]] = [record["ours"], record["torch"]]
    cpu = [side["cpu"] for side in both]
    figures = [f"{side['errors'][place]:.4f}" for place in (0, 1) for side in both]
    return [f"{name}: {PRODUCTS[name].about}", *(f"{value:.1f}" for value in cpu), f"{cpu[0] / cpu[1]:.2f}", *figures]


def text_of(kept: Kept) -> str:
    """Return the section."""
    records = {name: kept.get("speed", name) for name in PRODUCTS}
    rows = [line(name, record) for name, record in records.items() if record is not None]
    ratio = max((record["ours"]["cpu"] / record["torch"]["cpu"] for record in records.values() if record), default=0.0)
    met = "met" if ratio <= MOST else "**missed**"
    goal = f"- {met}: CPU seconds over those of GPTQ in torch: {ratio:.2f}, at most {MOST}"
    return "\n\n".join(["## Speed of rounding", goal, ABOUT, table(HEADER, rows)])


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(PRODUCTS), choices=list(PRODUCTS), help="products")
    parser.add_argument("--again", action="store_true", help="measure them again")
    parser.add_argument("--kept", type=Path, default=environments.FOLDER / "llm_speed.jsonl", help="file of records")
    options = parser.parse_args()
    kept = Kept(options.kept, options.shapes if options.again else ())
    for name in options.shapes:
        with one_blas_thread():
            record = kept.record(("speed", name), lambda name=name: measure(PRODUCTS[name]))  # type: ignore[misc]
        print(" | ".join(line(name, record)), file=sys.stderr, flush=True)
    text = text_of(kept)
    print(text)
    if options.write:
        write_section("llm speed", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
