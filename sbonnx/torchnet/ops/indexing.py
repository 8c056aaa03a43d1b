"""Gather, scatter, selection, sorting and cumulative sums."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, axis_of, number
from sbonnx.torchnet.ops.movement import nonnegative
from sbonnx.torchnet.ops.pointwise import torch_type


def gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    """ONNX GatherND: the last axis of the indices holds coordinates in x, after its batch axes."""
    batch = call.integer("batch_dims", 0)
    lead = x.shape[:batch]
    flat = x.reshape(-1, *x.shape[batch:])
    depth = indices.shape[-1]
    picks = indices.to(x.device).to(call.torch.int64).reshape(flat.shape[0], -1, depth)
    rows = call.torch.arange(flat.shape[0], device=x.device)[:, None].expand(picks.shape[:2])
    places = (rows, *picks.unbind(-1))
    values = flat[places]
    return values.reshape(*lead, *indices.shape[batch:-1], *x.shape[batch + depth :])


def scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """ONNX ScatterElements, formerly Scatter."""
    axis = axis_of(call.integer("axis", 0), x.dim())
    picks = nonnegative(call, indices, x, x.shape[axis])
    how = call.text("reduction", "none")
    if how == "none":
        return x.scatter(axis, picks, updates)
    return x.scatter_reduce(axis, picks, updates, _REDUCTIONS[how], include_self=True)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    torch, depth, how = call.torch, indices.shape[-1], call.text("reduction", "none")
    picks = indices.to(x.device).to(torch.int64)
    if how in ("none", "add"):
        return x.index_put(tuple(picks.unbind(-1)), updates, accumulate=how == "add")
    place = torch.zeros(picks.shape[:-1], dtype=torch.int64, device=x.device)
    for axis in range(depth):
        place = place * x.shape[axis] + nonnegative(call, picks[..., axis], x, x.shape[axis])
    rows = x.reshape(-1, *x.shape[depth:]) if depth else x[None]
    wide = place.reshape([-1] + [1] * (x.dim() - depth)).expand(-1, *x.shape[depth:])
    y = rows.scatter_reduce(0, wide, updates.reshape(wide.shape), _REDUCTIONS[how], include_self=True)
    return y.reshape(x.shape)


def tensor_scatter(call: Call, past: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
    """ONNX TensorScatter: write new entries into a cache along one axis, at the start index of each sample."""
    torch, axis, batch = call.torch, axis_of(call.integer("axis", -2), past.dim()), past.shape[0]
    begin = torch.zeros(batch, dtype=torch.int64) if start is None else start.to(torch.int64)
    at = begin.to(past.device)[:, None] + torch.arange(update.shape[axis], device=past.device)
    if call.text("mode", "linear") == "circular":
        at = at % past.shape[axis]
    shape = [1] * past.dim()
    shape[0], shape[axis] = batch, update.shape[axis]
    return past.scatter(axis, at.reshape(shape).expand(update.shape), update)


def compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    """ONNX Compress: select by a condition along an axis, or from the flattened input."""
    axis = call.attributes.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis_of(int(axis), x.dim()))
    return x.index_select(axis, call.torch.nonzero(condition.to(x.device)).reshape(-1))


def one_hot(call: Call, indices: Tensor, depth: Any, values: Tensor) -> Tensor:
    """ONNX OneHot: an index out of range gives only off values."""
    size, torch = int(number(depth)), call.torch
    axis = axis_of(call.integer("axis", -1), indices.dim() + 1)
    picks = torch.remainder(indices, size) if indices.dtype.is_floating_point else indices
    picks = torch.where(picks < 0, picks + size, picks).to(torch.int64)
    shape = [-1 if dim == axis else 1 for dim in range(indices.dim() + 1)]
    hot = picks.unsqueeze(axis) == torch.arange(size, device=indices.device).reshape(shape)
    off, on = values.to(indices.device).unbind(0)
    return torch.where(hot, on, off)


def top_k(call: Call, x: Tensor, k: Any = None) -> tuple[Tensor, Tensor]:
    """ONNX TopK → values, indices; the first of equal values comes first."""
    axis, count = axis_of(call.integer("axis", -1), x.dim()), call.integer("k", 0) if k is None else number(k)
    values, places = call.torch.sort(x, dim=axis, descending=bool(call.integer("largest", 1)), stable=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


def unique(call: Call, x: Tensor) -> tuple[Tensor, ...]:
    """ONNX Unique → values, indices of first occurrences, inverse, counts.

    Raises:
        Unfit: the attribute axis is set.
    """
    if call.attributes.get("axis") is not None:
        raise Unfit("Unique along an axis is not supported")
    torch, flat = call.torch, x.reshape(-1)
    values, inverse, counts = torch.unique(flat, sorted=True, return_inverse=True, return_counts=True)
    at = torch.arange(flat.numel(), device=x.device)
    first = torch.full_like(counts, flat.numel()).scatter_reduce(0, inverse, at, "amin")
    if call.integer("sorted", 1):
        return values, first, inverse, counts
    order = torch.argsort(first)
    back = torch.argsort(order)
    return values[order], first[order], back[inverse], counts[order]


def reverse_sequence(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    """ONNX ReverseSequence: reverse the first `lengths` values of each sample."""
    torch = call.torch
    time, batch = call.integer("time_axis", 0), call.integer("batch_axis", 1)
    shape = [1] * x.dim()
    shape[time] = -1
    at = torch.arange(x.shape[time], device=x.device).reshape(shape)
    shape[time], shape[batch] = 1, -1
    ends = lengths.to(x.device).to(torch.int64).reshape(shape)
    picks = torch.where(at < ends, ends - 1 - at, at)
    return x.gather(time, picks.expand(x.shape))


def trilu(call: Call, x: Tensor, k: Any = None) -> Tensor:
    diagonal = 0 if k is None else int(number(k))
    return (call.torch.triu if call.integer("upper", 1) else call.torch.tril)(x, diagonal)


def cumulative(name: str, start: int) -> Function:
    """Return the function of CumSum or CumProd; an exclusive one starts with `start` and omits the last value."""

    def function(call: Call, x: Tensor, axis: Any) -> Tensor:
        dim = axis_of(int(number(axis)), x.dim())
        x = x.flip(dim) if call.integer("reverse", 0) else x
        if call.integer("exclusive", 0):
            first = call.torch.full_like(x.narrow(dim, 0, 1), start)
            x = call.torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim=dim)
        y = getattr(call.torch, name)(x, dim, dtype=x.dtype)
        return y.flip(dim) if call.integer("reverse", 0) else y

    return function


def eye_like(call: Call, x: Tensor) -> Tensor:
    kind = call.attributes.get("dtype")
    ones = call.torch.ones_like(x, dtype=x.dtype if kind is None else torch_type(call.torch, kind))
    k = call.integer("k", 0)
    return call.torch.triu(call.torch.tril(ones, k), k)
