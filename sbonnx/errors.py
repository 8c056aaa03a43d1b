"""The mistakes a user can mend, one exception type a kind.

Every message says what is wrong, where (file, node, tensor, key), what was found and what to do.
The command line prints it as one line and exits with 2; ``--debug`` shows the traceback.
"""

from __future__ import annotations

from typing import Final

NO_RUNTIME: Final = "onnxruntime is not installed: pip install 'sbonnx[cpu]' (or 'sbonnx[gpu]' for NVIDIA)"
"""Said on `import sbonnx`, and where a runtime is needed later."""


class SbonnxError(Exception):
    """Base of everything sbonnx raises on purpose. The message is for the user, on one line."""


class ModelError(SbonnxError):
    """The model file or graph cannot be used as it is."""


class DataError(SbonnxError):
    """The calibration or evaluation data does not fit the model."""


class RecipeError(SbonnxError):
    """A key or value of the recipe (file, dict, keyword or flag) is wrong."""


class NumericError(SbonnxError):
    """A number that must be finite is not, or a range cannot be represented."""


class OutputError(SbonnxError):
    """The output cannot be written where it was asked for."""


class DeviceError(SbonnxError):
    """The runtime or execution provider asked for is not installed or not usable."""
