"""``sbonnx tune``: measure the kernels of this machine, for the costs by which plans are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments

if TYPE_CHECKING:
    from sbonnx.tuning.tuned_costs import KernelTuning

HELP: Final = "Measure onnxruntime's kernels on this machine. Plans for it then read these costs (--cpu this)."

OUTPUT: Final = options.output_option(
    "--output -o FILE.json", "Write the table there instead, for --cpu FILE on other machines."
)
SECONDS: Final = options.setting("--seconds S", 50.0, "Time limit of the measurement.")

OPTIONS: Final = (OUTPUT, SECONDS, options.FORCE, *options.COMMON_WITH_PROGRESS)


def run(given: Arguments) -> int:
    from sbonnx.api.kernel_tuning import tune

    printer = given.printer()
    result = given.call(tune)
    printer.value("tune", result)
    for text in _summary(result):
        printer.line(text)
    printer.table(
        f"kernels whose price is not that of {result.cpu} CPUs",
        ("kernel", "variant", "type", "price relative to it", "measured"),
        [(row.kernel, row.variant, row.type, row.factor, f"{row.measured:.2f}") for row in result.changed],
    )
    if result.busy:
        printer.note(
            f"other programs used the processors: the times of {result.unsettled} of {result.sizes} sizes do not "
            "agree; run sbonnx tune again when the machine is idle"
        )
    return 0


def _summary(result: KernelTuning) -> list[str]:
    speed = f"{result.speed:.2f} times the table of {result.cpu} CPUs"
    return [
        f"{len(result.kernels)} kernels in {result.seconds:.0f} s on {result.model or 'this CPU'}, median {speed}",
        f"{len(result.changed)} prices differ from that table",
        f"table {result.digest} in {result.path}",
    ]
