"""Exceptions for errors that the user can fix, one type for each kind, derived from the built-in exception for it.

Every message names the problem, the place (file, node, tensor, key), the invalid value and the fix.
The command line prints it as one line and exits with 2; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

NO_RUNTIME: Final = "onnxruntime is not installed: pip install 'sbonnx[cpu]' (or 'sbonnx[gpu]' for NVIDIA)"
"""Error message if onnxruntime is missing, on first use of a public name and in later calls."""


class SbonnxError(Exception):
    """Base class of all errors that sbonnx raises on purpose. The message is for the user, on one line."""

    @property
    def kind(self) -> str:
        """Name of the kind of error, for the user: ``ModelError`` for each of its subclasses."""
        names = [base.__name__ for base in type(self).__mro__ if issubclass(base, SbonnxError)]
        return names[-2] if len(names) > 1 else names[0]


class ModelError(SbonnxError, ValueError):
    """The model file or graph cannot be used as it is."""


class UnknownOperatorError(ModelError):
    """onnxruntime does not know an operator of a model.

    Attributes:
        domain, op: of its type.
    """

    def __init__(self, domain: str, op: str) -> None:
        self.domain, self.op = domain, op
        kind = f"{domain}:{op}" if domain else op
        super().__init__(
            f"onnxruntime does not know the operator {kind}: give the library of custom operators that has it "
            "(--ort-library FILE.so, or ort_libraries in Python)"
        )


class DataError(SbonnxError, ValueError):
    """The calibration or evaluation data does not fit the model."""


class RecipeError(SbonnxError, ValueError):
    """A key or value of the recipe (file, dict, keyword or flag) is wrong."""


class NumericError(SbonnxError, ArithmeticError):
    """A number that must be finite is not, or a range cannot be represented."""


class OutputError(SbonnxError, OSError):
    """The output cannot be written to the requested path."""


class DeviceError(SbonnxError, RuntimeError):
    """The requested runtime or execution provider is not usable."""


class LifeCycleError(SbonnxError, RuntimeError):
    """A step was called before a step that it requires."""


class MissingModelError(FileNotFoundError, ModelError):
    """There is no model file or folder at a path."""


class MissingDataError(FileNotFoundError, DataError):
    """There is no calibration or evaluation data at a path."""


class MissingRecipeError(FileNotFoundError, RecipeError):
    """There is no recipe, or other file of settings, at a path."""


class MissingPackageError(ImportError, DeviceError):
    """A runtime, or a package that the requested step needs, is not installed."""


class MissingReaderError(ImportError, DataError):
    """A package that reads the given kind of data is not installed."""


class Interrupted(KeyboardInterrupt):
    """An interrupt; the message says what is complete."""


REASON_LENGTH: Final = 300
"""Maximum length of the quoted message of foreign code."""


@contextmanager
def foreign_code(failure: Callable[[str], SbonnxError]) -> Iterator[None]:
    """Convert exceptions of code that is not part of sbonnx, in the context: scripts of users, packages in native code.

    Those that are no `Exception` are converted too: SystemExit of a script, which would end the run with the script's
    exit code, and PanicException of packages in Rust. Errors of sbonnx and interrupts are not changed.

    Args:
        failure: returns the error for a reason, see `reason_of`.
    """
    try:
        yield
    except (SbonnxError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise failure(reason_of(error)) from error


PACKAGES: Final = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "pyyaml",
    **{
        name: name
        for name in ("datasets", "h5py", "librosa", "pandas", "scipy", "soundfile", "torch", "torchvision", "tqdm")
    },
    **{name: name for name in ("torchaudio", "transformers", "tokenizers", "tensorflow")},
}
"""Packages to install, by the module that scripts of users often import."""

NOT_FOUND: Final = "install its package in the environment of sbonnx, or put the file beside the script"


def reason_of(error: BaseException) -> str:
    """Return type and message of an exception, on one line."""
    kind = "it calls sys.exit, SystemExit" if isinstance(error, SystemExit) else type(error).__name__
    reason = f"{kind}: {' '.join(text_of(error)[:REASON_LENGTH].split())}"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return reason
    module = error.name.partition(".")[0]
    return f"{reason}: " + (f"pip install {PACKAGES[module]}" if module in PACKAGES else NOT_FOUND)


def text_of(error: BaseException) -> str:
    """Return the message of an exception; "" if its own code for that fails."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


_OUT_OF_MEMORY: Final = re.compile(
    r"bad_alloc|cannot allocate memory|failed to allocate memory|memory allocation .*failed|not enough memory|"
    r"out of memory|"
    r"failed to map segment|can't start new thread",
    re.IGNORECASE,
)
"""Messages of Python, numpy, the dynamic linker, onnxruntime and torch when memory is exhausted. If a thread cannot be
started, memory for its stack is usually missing."""


def out_of_memory(reason: str) -> str:
    """Format the error message for exhausted memory.

    Args:
        reason: the original message; may be empty.
    """
    return (
        f"MemoryError: there is not enough memory{f' ({reason})' if reason else ''}: use smaller batches (--split), "
        "less memory for activations (--memory '256 MiB'), fewer --workers, or a larger machine"
    )


def is_memory_message(text: str) -> bool:
    """Whether a message of a library or of the system reports exhausted memory."""
    return bool(_OUT_OF_MEMORY.search(text))


def memory_failure(error: BaseException) -> BaseException | None:
    """Return the first exception among `error` and its causes that reports exhausted memory, or None.

    An error of sbonnx raised from a Python MemoryError does not count: its own message is more specific, such as a
    wrong shape in a file.
    """
    explained = isinstance(error, SbonnxError)
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return None if explained else error
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return error
        if not isinstance(error, SbonnxError) and is_memory_message(text_of(error)):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__) or error
    return None
