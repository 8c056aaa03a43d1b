"""Validation of feeds against the model: names, ranks, dimensions, types and finite values.

Each error message says how to fix the data.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from sbonnx.calib.data.stored_arrays import StoredArray
from sbonnx.errors import DataError
from sbonnx.spec import Array

Feed = dict[str, Array]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
RAW_BFLOAT16: Final = np.dtype("V2")
"""Type of bfloat16 arrays that NumPy has read from a file."""


@dataclass(frozen=True)
class InputSpec:
    """Name, type and shape of one model input.

    Attributes:
        name: name of the graph input.
        dtype: element type (object for strings), or None if the input is not a tensor.
        shape: dimensions: a number, the name of a dynamic one, or None; None if the rank is unknown.
        optional: it has a default value and may be left out.
        masks: it may hold minus infinity: an attention mask, of which a softmax makes zeros.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[int | str | None, ...] | None
    optional: bool = False
    masks: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        kind = "any value" if self.dtype is None else "string" if self.dtype.kind == "O" else str(self.dtype)
        if self.shape is None:
            return kind
        return f"{kind} ({', '.join('?' if d is None or d == '' else str(d) for d in self.shape)})"


def describe(x: Array | StoredArray) -> str:
    """Format type and shape of an array in the same form as `InputSpec`."""
    return f"{x.dtype} ({', '.join(str(d) for d in x.shape)})"


def as_array(value: Any, what: str) -> Array:
    """Convert `value` to a numpy array: arrays, torch tensors (not imported), numbers, lists.

    Torch tensors are recognised by their methods.

    Raises:
        DataError: it is none of these, or stored in a file that cannot be read.
    """
    if isinstance(value, StoredArray):
        return value.load()
    try:
        if hasattr(value, "detach"):  # torch: detach from autograd and copy to the CPU
            value = value.detach().cpu()
            value = (
                value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value
            )  # numpy has no such type
        if callable(getattr(value, "numpy", None)):
            value = value.numpy()
        array: Array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{what} is a {type(value).__name__} that is no array ({reason}): give numpy arrays") from error
    if array.dtype.kind == "O" and not all(isinstance(item, (str, bytes)) for item in array.flat):
        raise DataError(f"{what} is a {type(value).__name__}, not an array of numbers: give numpy arrays")
    return array


def named(raw: Any, inputs: Sequence[InputSpec], where: str, *, whole: bool = True) -> Feed:
    """Map the arrays of a raw feed to input names. Headers of arrays in files are checked before values are read.

    A mapping is assigned by name (`arr_0`, `arr_1`, ... of an unnamed `np.savez` by position); a list or tuple by
    position, where items past the last input (labels) are left out; any other value is the model's single input. By
    position, if there are as many items as required inputs, they are assigned to those.

    Args:
        whole: the raw feed is one feed; False: it will be cut along the leading axis.

    Raises:
        DataError: an input without an array, too few items, an array in a file that does not fit or cannot be read.
    """
    if isinstance(raw, Mapping):
        pairs = {str(name): value for name, value in raw.items()}
        if pairs and all(name == f"arr_{i}" for i, name in enumerate(pairs)):
            names = by_position(inputs, len(pairs))
            if len(names) == len(pairs) and not set(pairs) & set(names):
                pairs = dict(zip(names, pairs.values(), strict=True))
        _check_names(pairs, inputs, where)
    elif isinstance(raw, (list, tuple)):
        wanted = [spec.name for spec in inputs]
        needed = sum(not spec.optional for spec in inputs)
        if len(raw) < needed:
            raise DataError(f"{where} holds {len(raw)} items and the model has {needed} inputs: {', '.join(wanted)}")
        pairs = dict(zip(by_position(inputs, len(raw)), raw, strict=False))
    else:
        needed_names = [spec.name for spec in inputs if not spec.optional]
        if len(needed_names) != 1 and len(inputs) != 1:
            raise DataError(
                f"{where} is a single array and the model has {len(inputs)} inputs: "
                f"give a dict with {', '.join(repr(spec.name) for spec in inputs)}"
            )
        pairs = {(needed_names or [inputs[0].name])[0]: raw}
    fed = [spec for spec in inputs if spec.name in pairs]
    for spec in fed:
        if isinstance(stored := pairs[spec.name], StoredArray):
            _check_header(stored, spec, where, whole)
    return {spec.name: as_array(pairs[spec.name], f"input '{spec.name}' of {where}") for spec in fed}


def by_position(inputs: Sequence[InputSpec], count: int) -> list[str]:
    """Return the inputs to which `count` unnamed items belong."""
    needed = [spec.name for spec in inputs if not spec.optional]
    return needed if count == len(needed) else [spec.name for spec in inputs][:count]


def without_defaults(raw: Any, defaults: Mapping[str, Callable[[], Array]], where: str) -> Any:
    """Return `raw` without the inputs that are constants of the model; their values must equal the constants.

    Args:
        defaults: functions that load the initializers that the file lists among its inputs.

    Raises:
        DataError: a type, shape or value differs.
    """
    fed = [name for name in raw if name in defaults] if isinstance(raw, Mapping) and defaults else []
    for name in fed:
        held, value = defaults[name](), raw[name]
        same_shape = not isinstance(value, StoredArray) or value.shape == held.shape
        if not same_shape or not _equal(as_array(value, f"input '{name}' of {where}"), held):
            raise DataError(
                f"{where} feeds '{name}' other values than its default in the model, which is quantized as a constant: "
                f"leave '{name}' out, or drop its initializer from the model to make it an input like the others"
            )
    return {name: value for name, value in raw.items() if name not in defaults} if fed else raw


def _equal(fed: Array, held: Array) -> bool:
    """Return whether an array has the same values, in a wider or narrower type of the same kind."""
    if fed.shape != held.shape:
        return False
    if fed.dtype.kind == held.dtype.kind == "f":
        with np.errstate(over="ignore"):
            fed = fed.astype(held.dtype)
    elif (fed.dtype.kind in "iub") != (held.dtype.kind in "iub"):
        return False
    return bool(np.array_equal(fed, held))


def _check_names(pairs: Mapping[str, Any], inputs: Sequence[InputSpec], where: str) -> None:
    """Raise DataError for an input without an array."""
    names = [spec.name for spec in inputs]
    missing = [spec.name for spec in inputs if spec.name not in pairs and not spec.optional]
    extra = [name for name in pairs if name not in names]
    if extra and missing:
        close = difflib.get_close_matches(extra[0], missing, n=1, cutoff=0.0)[0]
        raise DataError(
            f"{where} holds an array '{extra[0]}' and none for the model's input '{close}': name it '{close}'"
        )
    if missing:
        raise DataError(
            f"{where} holds no array for input '{missing[0]}': add it; "
            f"it wants {next(str(spec) for spec in inputs if spec.name == missing[0])}"
        )


def cut(feed: Feed, size: int, inputs: Sequence[InputSpec], where: str) -> Iterator[tuple[str, Feed]]:
    """Split `feed` into batches of `size` along the leading axis; every batch gets the arrays without axes whole.

    Raises:
        DataError: the arrays differ in length, or their length is not a multiple of the model's fixed batch size.
    """
    lengths = {name: x.shape[0] for name, x in feed.items() if x.ndim}
    if not lengths:
        raise DataError(f"{where} holds only arrays without axes: there is nothing to split")
    if len(set(lengths.values())) > 1:
        counted = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
        raise DataError(f"{where} cannot be split: the leading axes differ in length ({counted}); save one feed a file")
    total = next(iter(lengths.values()))
    fixed = {spec.name: spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], int)}
    for name in lengths:
        if name in fixed and (fixed[name] != size or total % size):
            raise DataError(
                f"{where} holds {total} samples; split in {size} does not fit input '{name}', "
                f"whose batch is fixed at {fixed[name]}: use a split of {fixed[name]} and a multiple of it"
            )
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield f"{where}[{start}:{stop}]", {name: x[start:stop] if x.ndim else x for name, x in feed.items()}


def fitted(feed: Feed, inputs: Sequence[InputSpec], where: str) -> Feed:
    """Check `feed` and convert it to the model's types.

    Raises:
        DataError: wrong rank, wrong fixed dimension, wrong type or a non-finite value.
    """
    specs = {spec.name: spec for spec in inputs}
    return {name: _fit_array(x, specs[name], where) for name, x in feed.items()}


def _fit_array(x: Array, spec: InputSpec, where: str) -> Array:
    """Check one array and convert it to the type of its input."""
    mismatch = f"input '{spec.name}' wants {spec}; {where} holds {describe(x)}"
    if spec.shape is not None:
        _check_shape(x.shape, spec.shape, mismatch)
    if x.dtype.kind == "f":
        _check_finite(x, f"input '{spec.name}' of {where}", masks=spec.masks)
    return np.ascontiguousarray(_cast(x, spec, mismatch)) if x.ndim else _cast(x, spec, mismatch)


def _check_header(stored: StoredArray, spec: InputSpec, where: str, whole: bool) -> None:
    """Run those checks of `_fit_array` that need only the header."""
    mismatch = f"input '{spec.name}' wants {spec}; {where} holds {describe(stored)}"
    if spec.shape is not None:
        _check_shape(
            stored.shape, spec.shape if whole else (*(None for _ in spec.shape[:1]), *spec.shape[1:]), mismatch
        )
    _check_type(stored.dtype, spec, mismatch)


def _check_shape(shape: tuple[int, ...], wanted: tuple[int | str | None, ...], found: str) -> None:
    if len(shape) == len(wanted) - 1:
        raise DataError(f"{found}. Is the batch axis missing? Give x[None]")
    if len(shape) != len(wanted):
        raise DataError(f"{found}: the number of axes differs")
    if shape and shape[0] == 0 and wanted[0] != 0:
        raise DataError(f"{found}: there is no sample in it; leave empty batches out")
    for axis, (have, want) in enumerate(zip(shape, wanted, strict=True)):
        if isinstance(want, int) and have != want:
            fix = "cut the samples into batches with --split" if axis == 0 and want else _layout_fix(shape, wanted)
            raise DataError(f"{found}: axis {axis} must be {want}; {fix}")


def _layout_fix(shape: tuple[int, ...], wanted: tuple[int | str | None, ...]) -> str:
    """Return how to change data whose shape is not as wanted: images with the channels on another axis are named."""

    def fits(axes: tuple[int, ...]) -> bool:
        return all(not isinstance(want, int) or have == want for have, want in zip(axes, wanted[1:], strict=True))

    rest = shape[1:]
    if len(rest) > 1 and fits((rest[-1], *rest[:-1])):
        return "it looks like channels last (NHWC): save np.moveaxis(x, -1, 1)"
    if len(rest) > 1 and fits((*rest[1:], rest[0])):
        return "it looks like channels first (NCHW): save np.moveaxis(x, 1, -1)"
    return "resize or transpose the data"


def _check_finite(x: Array, what: str, *, masks: bool) -> None:
    """Raise DataError for NaN or Inf, but -Inf of `masks`; the message names the first sample with one."""
    finite = np.isfinite(x) | (np.isneginf(x) & masks)
    if finite.all():
        return
    nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
    row = f", first in sample {int(np.argwhere(~finite)[0][0])}" if x.ndim else ""
    raise DataError(f"{what} holds {nan} NaN and {inf} infinite values{row}: clean or drop that sample")


def _cast(x: Array, spec: InputSpec, found: str) -> Array:
    """Convert `x` to the type of `spec` if nothing is lost except float rounding, else raise DataError with a fix."""
    _check_type(x.dtype, spec, found)
    want = spec.dtype
    if want is None or x.dtype == want:
        return x
    if want.kind == "O":
        return x.astype(object)
    if want == BFLOAT16:
        y = x.view(want) if x.dtype == RAW_BFLOAT16 else x.astype(want)
        _check_finite(y, f"input '{spec.name}'", masks=spec.masks)
        return y
    if want.kind == "f":
        with np.errstate(over="ignore"):
            y = x.astype(want)
        if (np.isfinite(x) & ~np.isfinite(y)).any():
            raise DataError(f"{found}: its largest value {np.abs(x).max():.4g} does not fit {want}")
        return y
    limits = np.iinfo(want)
    if x.size and (int(x.min()) < limits.min or int(x.max()) > limits.max):
        raise DataError(f"{found}: its values {x.min()} .. {x.max()} do not fit {want}")
    return x.astype(want)


def _check_type(dtype: np.dtype[Any], spec: InputSpec, found: str) -> None:
    """Raise DataError for types that cannot represent every value in the type of `spec`."""
    want = spec.dtype
    if want is None or dtype == want:
        return
    have, kind = dtype.kind, want.kind
    if want == BFLOAT16 and (have == "f" or dtype == RAW_BFLOAT16):
        return
    if (kind == "O" and have in "OUS") or have == kind == "f" or (kind in "iu" and have in "iub"):
        return
    if kind == "f" and have == "u":
        fix = f"preprocess it as for inference (scale, mean, layout) and save as {want}"
    elif kind == "f" and have in "ib":
        fix = f"save it as {want}"
    elif kind in "iu" and have == "f":
        fix = f"round it on purpose and save as {want}"
    else:
        fix = f"save it as {'text' if kind == 'O' else want}"
    raise DataError(f"{found}: {fix}")
