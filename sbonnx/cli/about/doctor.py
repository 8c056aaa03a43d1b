"""``sbonnx doctor``: versions, compiled loops, processor, memory, runtimes and optional packages."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.version import __version__

HELP: Final = "Show the installation and this machine. Versions, compiled loops, CPU features, CUDA, memory, extras."

REQUIRED: Final = ("numpy", "onnx", "onnx-graphsurgeon", "ml-dtypes", "pydantic", "typer", "rich")
RUNTIMES: Final = {"onnxruntime": "cpu", "onnxruntime-gpu": "gpu"}
EXTRAS: Final = {"torch": "qat", "tokenizers": "llm", "distributed": "cluster", "fsspec": "cluster", "pillow": "images"}
"""Optional packages, and the extra that installs each."""

FEATURES: Final = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""CPU flags that integer kernels use, of x86 and Arm."""

OPTIONS: Final = options.COMMON


@dataclass(frozen=True)
class CpuFacts:
    """The processor.

    Attributes:
        cores: usable cores.
        of: cores of the machine.
        features: CPU flags that integer kernels use.
        exact_products: whether 8-bit products are added without saturation.
        kernel_costs: table of kernel costs for plans of this machine: its path if `sbonnx tune` was run, else the kind
            of CPU of the bundled one.
    """

    cores: int
    of: int | None
    features: tuple[str, ...]
    exact_products: bool
    kernel_costs: str


@dataclass(frozen=True)
class MemoryFacts:
    """Memory in bytes."""

    total: int
    available: int


@dataclass(frozen=True)
class TemporaryFacts:
    """Folder of temporary files, and its free bytes."""

    folder: str
    free: int


@dataclass(frozen=True)
class RuntimeFacts:
    """onnxruntime.

    Attributes:
        version: null if it is not usable.
        providers: execution providers.
        packages: installed packages.
        cuda: whether CUDA is available.
    """

    version: str | None
    providers: tuple[str, ...]
    packages: tuple[str, ...]
    cuda: bool


@dataclass(frozen=True)
class DoctorOutput:
    """Output of doctor.

    Attributes:
        sbonnx, python, system: versions.
        missing_loops: loops that were not compiled.
        cpu, memory, temporary: the machine.
        onnxruntime: the runtime.
        packages, extras: versions of required and optional packages; null: not installed.
        problems: what is wrong, one sentence each.
    """

    sbonnx: str
    python: str
    system: str
    missing_loops: tuple[str, ...]
    cpu: CpuFacts
    memory: MemoryFacts
    temporary: TemporaryFacts
    onnxruntime: RuntimeFacts
    packages: dict[str, str | None]
    extras: dict[str, str | None]
    problems: tuple[str, ...]


def run(given: Arguments) -> int:
    printer, facts = given.printer(), _facts()
    printer.value("doctor", facts)
    cpu, memory, temporary = facts.cpu, facts.memory, facts.temporary
    printer.facts(
        f"sbonnx {facts.sbonnx}",
        {
            "Python": facts.python,
            "system": facts.system,
            "compiled loops": "all" if not facts.missing_loops else f"missing: {', '.join(facts.missing_loops)}",
            "CPU": f"{cpu.cores} cores, {' '.join(cpu.features) or 'no features of integer kernels'}",
            "8-bit products": "exact"
            if cpu.exact_products
            else "saturate: weights get 8 bits, pair-safe (REDUCE_RANGE)",
            "kernel costs": cpu.kernel_costs,
            "memory": f"{_size(memory.available)} of {_size(memory.total)} available",
            "temporary files": f"{temporary.folder}, {_size(temporary.free)} free",
            "onnxruntime": _runtime_text(facts.onnxruntime),
        },
    )
    for title, versions in (("packages", facts.packages), ("optional packages", facts.extras)):
        rows = [(name, version or "not installed") for name, version in versions.items()]
        printer.table(title, ("package", "version"), rows)
    for problem in facts.problems:
        printer.note(problem)
    return 0


def _facts() -> DoctorOutput:
    import shutil
    import tempfile

    import psutil

    from sbonnx.system.cpu import CPU_FLAGS, THIS, cores, target_cpu
    from sbonnx.system.machine_costs import table_of
    from sbonnx.system.native import missing

    text = CPU_FLAGS.read_text(errors="replace") if CPU_FLAGS.exists() else ""
    flags = {
        word for line in text.splitlines() if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    memory, kind = psutil.virtual_memory(), target_cpu()
    runtime, problems = _runtime()
    loops = tuple(missing())
    if loops:
        problems.append("loops without compilation run in numpy, slower: install a C compiler, then sbonnx again")
    folder = tempfile.gettempdir()
    features = tuple(flag for flag in FEATURES if flag in flags)
    return DoctorOutput(
        sbonnx=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        missing_loops=loops,
        cpu=CpuFacts(cores(), os.cpu_count(), features, kind.exact, str(table_of(THIS) or kind.name)),
        memory=MemoryFacts(memory.total, memory.available),
        temporary=TemporaryFacts(folder, shutil.disk_usage(folder).free),
        onnxruntime=runtime,
        packages={name: _version(name) for name in REQUIRED},
        extras={name: _version(name) for name in EXTRAS},
        problems=tuple(problems),
    )


def _runtime() -> tuple[RuntimeFacts, list[str]]:
    """Return version and providers of onnxruntime, and what is wrong with it."""
    from sbonnx.errors import DeviceError
    from sbonnx.system.cpu import CUDA
    from sbonnx.system.runtime import onnxruntime

    installed = tuple(name for name in RUNTIMES if _version(name))
    try:
        module = onnxruntime()
    except DeviceError as error:
        return RuntimeFacts(None, (), installed, cuda=False), [str(error)]
    providers = tuple(module.get_available_providers())
    problems = []
    if len(installed) > 1:
        problems.append("onnxruntime and onnxruntime-gpu share one folder: remove both, then install one")
    elif "onnxruntime-gpu" in installed and CUDA not in providers:
        problems.append("onnxruntime-gpu is installed, but CUDA is not available: check the driver and CUDA version")
    return RuntimeFacts(str(module.__version__), providers, installed, cuda=CUDA in providers), problems


def _runtime_text(runtime: RuntimeFacts) -> str:
    if runtime.version is None:
        return "not usable"
    return f"{runtime.version} ({', '.join(name.removesuffix('ExecutionProvider') for name in runtime.providers)})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _size(count: int) -> str:
    from sbonnx.system.sizes import size_text

    return size_text(count)
