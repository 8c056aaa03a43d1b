"""Settings of verification: the runtime, and onnxruntime graph transformers to disable, with the notes about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sbonnx.backends import Backend
from sbonnx.planning import Plan
from sbonnx.report.codes import Note
from sbonnx.report.verdict import ON_CPU
from sbonnx.verify.natures import Tasks

FUSES_PAIRS = ("QDQSelectorActionTransformer", "ReluQuantRewrite", "ClipQuantRewrite")
"""onnxruntime's graph transformers of pairs and the ops between them.

Up to 1.31 they treat fp8 as integers: they fuse fp8 pairs to QLinearConv and similar ops, which do not support fp8, and
drop a Relu as if a zero point of 0 were the lowest code.
"""

FUSES_BLOCKS = FUSES_PAIRS[0]
"""The transformer that creates MatMulNBits from block-wise weights.

In float16 at level "extended", onnxruntime 1.31 computes other results with it than at any other level.
"""

NO_FP8 = Note(
    "fp8-rewrites",
    "onnxruntime's rewrites take fp8 pairs for integers and refuse the file, or compute something else: it was "
    "compared without them, and is for TensorRT alone",
)

NO_CHANNELS = Note(
    "channel-rewrites",
    "onnxruntime's integer kernels take one scale an activation: the file was compared without its rewrites of pairs "
    "to such kernels, and sessions that read it must leave them out as well",
)


@dataclass(frozen=True)
class VerifyOptions:
    """Conditions under which a file is compared with its float model.

    Attributes:
        without: names of onnxruntime's graph transformers to disable.
        opens: whether to also open it at every optimization level with all transformers, as users will.
        exact: whether sums of 8-bit products of the quantized model are exact where it will run, see
            `sbonnx.verify.session`; None: as on this CPU. If they saturate and do not on this CPU, there is no latency.
        notes: for the report.
        device: device that the models run on.
        runtime: name of the backend whose runtime executes the quantized model. Optimization levels are those of
            onnxruntime in any case, and so are the outputs of the float model.
        task: what outputs mean ("segmentation", ...), or {output: task}: selects the figures of their quality. None: by
            the structure of the float model.
        head: of outputs whose task is detection, see `sbonnx.detectors.head_choice`; None: recognized.
    """

    without: tuple[str, ...] = ()
    opens: bool = True
    exact: bool | None = None
    notes: tuple[Note, ...] = ()
    device: str = "cpu"
    runtime: str = ON_CPU
    task: Tasks = None
    head: str | None = None

    @classmethod
    def of(cls, plan: Plan, backend: Backend) -> VerifyOptions:
        """Choose the transformers that the backend disables, and those that break a type or cannot run it."""
        half = plan.float_type == "fp16"
        fp8 = backend.numbers.fp8 == "kernels" and any(site.spec.kind == "fp8" for site in plan.sites)
        channels = any(site.role == "activation" and site.spec.axis is not None for site in plan.sites)
        without = list(backend.files.judged_without)
        if half and any(site.spec.block_size for site in plan.sites):
            without.append(FUSES_BLOCKS)
        if fp8 or channels:
            without.extend(FUSES_PAIRS)
        notes = tuple(note for note, applies in ((NO_FP8, fp8), (NO_CHANNELS, channels)) if applies)
        return cls(tuple(dict.fromkeys(without)), opens=not fp8, exact=plan.exact_products, notes=notes)


ALL_TRANSFORMERS: Final = VerifyOptions()
"""Nothing is disabled."""
