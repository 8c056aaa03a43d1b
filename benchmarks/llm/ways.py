"""Quantizers of decoders compared with each other: ours, those of onnxruntime for MatMulNBits, and other peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

OURS: Final = "sbonnx"
ORT: Final = "onnxruntime"
GROUPS: Final = "onnx_quantize"
AUTO: Final = "auto_round"
TORCH: Final = "torch"
"""The reference of GPTQ in `benchmarks.peers.torch_gptq_llama`, in the environment of `AUTO`."""
CACHES: Final = "float weights"
"""Form of decoders whose caches alone are quantized."""


@dataclass(frozen=True)
class DecoderWay:
    """One setting of a quantizer.

    Attributes:
        quantizer: `OURS`, `ORT` or a peer with an environment of its own.
        bits, block: width and block size of the weights.
        settings: KEY=VALUE for our command.
        method: method of the peer's script in `benchmarks.peers`.
        level: accuracy level of MatMulNBits; None: the default of the quantizer.
    """

    quantizer: str
    bits: int
    block: int
    settings: tuple[str, ...] = ()
    method: str = ""
    level: int | None = None

    @property
    def form(self) -> str:
        """Width and block size, such as "w4 g32"; "float weights" if only caches are quantized."""
        return f"w{self.bits} g{self.block}" if self.bits else CACHES


FORMS: Final = ((4, 32), (4, 128), (3, 32), (2, 32), (2, 128), (0, 32))
"""Widths and block sizes, in the order of the table."""

EVERY: Final = tuple(f"w{bits} g{block}" for bits, block in FORMS if bits)
KERNELS: Final = tuple(form for form in EVERY if form[:2] in ("w2", "w4"))
"""Forms that MatMulNBits holds as they are."""

OUR_SETTINGS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), EVERY),
    "nearest": (("W.ROUNDING.TYPE=nearest",), EVERY),
    "GPTQ": (("W.ROUNDING.TYPE=gptq",), ("w2 g32", "w2 g128")),
    "--effort best": (("EFFORT=best",), ("w2 g128",)),
    "3.65 bits on average": (("MIXED.BUDGET.BITS=3.65",), ("w4 g128",)),
    "float32 arithmetic": (("ACCURACY_LEVEL=0",), ("w4 g32",)),
    "embedding and head as narrow": (("EMBEDDING_BITS={bits}",), ("w4 g32", "w2 g32")),
    "8-bit caches": (("LLM.KV_BITS=8",), (CACHES, "w4 g32")),
    "4-bit caches": (("LLM.KV_BITS=4",), (CACHES, "w4 g32")),
}
"""Our settings, and the forms that they are measured at; {bits} is the width of the other weights."""

ORT_METHODS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "asymmetric (default)": ("asymmetric", KERNELS),
    "symmetric": ("symmetric", KERNELS),
    "HQQ": ("hqq", KERNELS),
    "k-quant": ("k_quant", ("w4 g32", "w4 g128")),
    "GPTQ": ("gptq", ("w4 g32",)),
    "GPTQ, mse and actorder": ("gptq mse actorder", ("w4 g32",)),
}
"""Methods of onnxruntime, and the forms that they are measured at: k-quant and GPTQ have 4 bits only."""

GROUPS_METHODS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "asymmetric": ("asymmetric", ("w4 g32", "w4 g128")),
    "asymmetric, mse": ("asymmetric mse", ("w4 g32", "w4 g128")),
}
"""Methods of onnx_quantize, which has no weights below 4 bits, and the forms that they are measured at."""

AUTO_METHODS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "asymmetric": ("asymmetric", ("w4 g32", "w4 g128")),
    "symmetric (default)": ("symmetric", ("w4 g32",)),
}
"""Methods of auto-round, and the forms that they are measured at."""

TORCH_METHODS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "GPTQ": ("gptq", ("w4 g32", "w4 g128")),
    "GPTQ, actorder": ("gptq actorder", ("w4 g32",)),
}
"""Methods of the reference in torch, and the forms that they are measured at."""

METHODS: Final = {ORT: ORT_METHODS, GROUPS: GROUPS_METHODS, AUTO: AUTO_METHODS, TORCH: TORCH_METHODS}
"""Methods by quantizer, in the order of the table."""

TIMED: Final[Mapping[str, DecoderWay]] = {
    OURS: DecoderWay(OURS, 4, 32),
    ORT: DecoderWay(ORT, 4, 32, method="asymmetric", level=4),
}
"""Files whose speed is compared: int8 arithmetic in both, the fast kernels."""


def ways() -> dict[tuple[str, str], DecoderWay]:
    """Return all settings by (form, name of the row), in the order of the table."""
    found: dict[tuple[str, str], DecoderWay] = {}
    for bits, block in FORMS:
        for name, (settings, forms) in OUR_SETTINGS.items():
            way = DecoderWay(OURS, bits, block, tuple(text.format(bits=bits) for text in settings))
            if way.form in forms:
                found[way.form, f"{OURS} {name}"] = way
        for quantizer, methods in METHODS.items():
            for name, (method, forms) in methods.items():
                way = DecoderWay(quantizer, bits, block, method=method)
                if way.form in forms:
                    found[way.form, f"{quantizer} {name}"] = way
    return found
