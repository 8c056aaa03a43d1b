"""``tune``: the kernels of this machine, and the table of costs that plans for it read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from sbonnx.api.arguments import File
from sbonnx.backends.kernel_costs import file_digest
from sbonnx.backends.onnxruntime.costs import load_costs
from sbonnx.errors import DeviceError, OutputError, RecipeError
from sbonnx.graph.storage.output_files import check_target, write_text
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.system.cpu import target_cpu
from sbonnx.system.machine_costs import CACHE, own_table
from sbonnx.tuning.cost_table import cost_table, machine
from sbonnx.tuning.elementwise_cases import every_case
from sbonnx.tuning.kernel_cases import release_values
from sbonnx.tuning.kernel_timing import time_case
from sbonnx.tuning.kernel_trials import QUANTILE, SECONDS, Trial, choose, measure
from sbonnx.tuning.tuned_costs import UNSETTLED, KernelTuning, disagreeing, measured_in, prices
from sbonnx.verify.load import OtherLoad

RESERVE: Final = 1.0
"""Seconds of the time limit for what follows the measurement."""

LEAST_SHARE: Final = 0.5
"""Share of the kernels of the bundled table below which a measurement is none."""


@shown_by_default
def tune(
    output: File | None = None, *, seconds: float = 50.0, force: bool = False, progress: Progress | None = None
) -> KernelTuning:
    """Measure onnxruntime's kernels on this machine, and write the table of costs by which plans for it are made.

    One thread, CPU time. `CPU: this`, the default of recipes, reads the table from then on; with `output`, it is
    written there alone, for ``cpu="FILE"`` on other machines.

    Args:
        output: file of the table; None: that of this machine in the user's cache (`SBONNX_CACHE`).
        seconds: time limit.
        force: overwrite `output`.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix; DeviceError: the machine is too busy.
    """
    if not seconds > 0:
        raise RecipeError(f"--seconds {seconds}: the time limit is above 0")
    begin, load = time.perf_counter(), OtherLoad()
    path = own_table() if output is None else Path(output)
    if output is None:
        _make_folder(path.parent)
    check_target(path, (), force=force or output is None)
    kind, where = target_cpu(), machine(1)
    bundled = load_costs(None, kind).fits
    trials = choose(every_case(), bundled)
    try:
        measure(trials, _time_of, time.perf_counter, begin + seconds - RESERVE, progress or Silent())
    finally:
        release_values()
    result = prices(trials, *measured_in(path))
    if len(result.kernels) < LEAST_SHARE * len(bundled):
        raise DeviceError(
            f"only {len(result.kernels)} of {len(bundled)} kernels could be measured in {seconds:g} s, and no table "
            f"was written: run sbonnx tune when no other programs use the processors, or with --seconds {5 * seconds:g}"
        )
    write_text(path, cost_table({**where, "speed": result.base_speed}, result.rows(bundled), ("measured",)))
    unsettled, timed = disagreeing(trials), sum(bool(trial.times) for trial in trials)
    return KernelTuning(
        path=str(path),
        digest=file_digest(path),
        cpu=kind.name,
        model=where["cpu"],
        onnxruntime=where["onnxruntime"],
        speed=result.speed,
        kernels=result.kernels,
        missing=len(bundled) - len(result.kernels),
        unsettled=unsettled,
        sizes=timed,
        seconds=time.perf_counter() - begin,
        busy=load.busy or unsettled > UNSETTLED * timed,
    )


def _make_folder(folder: Path) -> None:
    """Create the folder of a table.

    Raises:
        OutputError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create '{folder}' ({error.strerror}): set {CACHE} to another folder") from error


def _time_of(trial: Trial) -> float | None:
    try:
        return time_case(trial.case, SECONDS, copies=trial.copies, quantile=QUANTILE)
    except Exception:  # onnxruntime's exceptions share no base class
        return None
