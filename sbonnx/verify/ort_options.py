"""Without which of onnxruntime's rewrites a result is judged, and what is said of that."""

from __future__ import annotations

from dataclasses import dataclass

from sbonnx.backends import Backend
from sbonnx.plan import Plan

FUSES_PAIRS = ("QDQSelectorActionTransformer", "ReluQuantRewrite", "ClipQuantRewrite")
"""onnxruntime's rewrites of pairs and what stands between. Up to 1.31 they take fp8 for integers: QLinearConv and its
kin, which have no fp8, are made of fp8 pairs, and a Relu is dropped because a zero point of 0 were the lowest code."""

FUSES_BLOCKS = FUSES_PAIRS[0]
"""The one of them that makes MatMulNBits of weights in blocks: in float16 at the level "extended", onnxruntime 1.31
computes something else with it than at any other."""

NO_FP8 = (
    "onnxruntime's rewrites take fp8 pairs for integers and refuse the file, or compute something else: it was "
    "compared without them, and is for TensorRT alone"
)

NO_CHANNELS = (
    "onnxruntime's integer kernels take one scale an activation: the file was compared without its rewrites of pairs "
    "to such kernels, and sessions that read it must leave them out as well"
)


@dataclass(frozen=True)
class Judged:
    """How a file is held against its float model.

    Attributes:
        without: names of onnxruntime's rewrites that are switched off meanwhile.
        opens: whether it is opened at every level of optimisation with all rewrites, as users will.
        notes: for the report.
    """

    without: tuple[str, ...]
    opens: bool
    notes: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, backend: Backend) -> Judged:
        """Those of the backend, and what ruins a type or cannot run it."""
        half = plan.float_type == "fp16"
        fp8 = backend.name != "virtual" and any(site.spec.is_fp8 for site in plan.sites)
        channels = any(site.role == "activation" and site.spec.axis is not None for site in plan.sites)
        without = list(backend.judged_without)
        if half and any(site.spec.block_size for site in plan.sites):
            without.append(FUSES_BLOCKS)
        if fp8 or channels:
            without.extend(FUSES_PAIRS)
        said = {NO_FP8: fp8, NO_CHANNELS: channels}
        notes = tuple(note for note, applies in said.items() if applies)
        return cls(tuple(dict.fromkeys(without)), opens=not fp8, notes=notes)
