"""Recurrent models: the state outputs of one step are the state inputs of the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbonnx.calib.data import Feed, InputSpec, Pick, Source
from sbonnx.calib.data.dataset import Dataset, input_specs, read
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.graph import Graph, Tensor
from sbonnx.graph.extract import extract
from sbonnx.graph.query import dtype, shape


def unroll(
    data: Any,
    graph: Graph,
    feedback: Mapping[str, str],
    *,
    device: str = "cpu",
    split: int | None = None,
    limit: int | None = None,
    pick: Pick = "first",
    seed: int = 0,
) -> Dataset:
    """Build a data set whose feeds include the state of a recurrent model, so that each can be run independently.

    `data` holds the steps of one sequence after the other. A feed that lacks the inputs of `feedback` gets the state
    that the float model computed from the previous feed; the first one gets zeros. A feed that has any of them begins a
    new sequence (those that it lacks are zeros). Zeros have the shape of the input: a dynamic dimension has the length
    of the other inputs' dimension of that name; else the first one has the length of their dynamic leading axis (the
    batch), and others have 1.

    Every iteration runs the part of the model that computes the states, on one thread, one step at a time, as steps are
    requested. Only the last step is held in memory.

    Args:
        data: steps in order; any input that `read` accepts.
        graph: the float model; not changed.
        feedback: maps each state output to the input that takes it at the next step.
        device: see `providers`.
        split, limit, pick, seed: see `read`; steps are picked after the states were computed through all of them.

    Raises:
        RecipeError: an output or input that does not exist, an input named twice, types or shapes that do not fit.
        DataError: see `read`; and, when they are reached, steps that do not continue the previous one.
        NumericError: a non-finite state, when it is reached.
    """
    steps = read_steps(data, graph, feedback, split=split, limit=limit if pick == "first" else None)
    walk = _Unrolled(steps, graph, feedback, device)
    return read(Source(steps.name, walk.feeds, steps.count), graph, limit=limit, pick=pick, seed=seed)


def read_steps(
    data: Any, graph: Graph, feedback: Mapping[str, str], *, split: int | None = None, limit: int | None = None
) -> Dataset:
    """Read feeds of a recurrent model without their states; a feed may include them.

    Args and errors: see `unroll`.
    """
    _check_pairs(graph, feedback)
    return read(data, graph, split=split, limit=limit, optional=list(feedback.values()))


@dataclass(frozen=True)
class _Unrolled:
    """Steps of a recurrent model, and the model that computes their states.

    Attributes:
        pairs: input by output.
    """

    steps: Dataset
    graph: Graph
    pairs: Mapping[str, str]
    device: str

    def feeds(self) -> Iterator[tuple[str, Feed]]:
        """Yield (where, feed with its state) in order."""
        specs = {spec.name: spec for spec in self.steps.inputs}
        states = [specs[name] for name in self.pairs.values()]
        piece = extract(self.graph, [tensor.name for tensor in self.graph.inputs], list(self.pairs))
        with LayerRunner(piece, device=self.device, threads=1, name="the model of the states") as run:
            before: tuple[str, Feed, dict[str, tuple[int, ...]]] | None = None
            for where, feed in self.steps.items():
                shapes = {spec.name: _zero_shape(spec, feed, specs, states) for spec in states}
                begins = before is None or any(spec.name in feed for spec in states)
                following = {} if before is None or begins else self._next(run, before, where, shapes, specs)
                zeros = {
                    spec.name: np.zeros(shapes[spec.name], spec.dtype) for spec in states if spec.name not in following
                }
                full = {**zeros, **following, **feed}
                yield where, full
                before = where, full, shapes

    def _next(
        self,
        run: LayerRunner,
        before: tuple[str, Feed, dict[str, tuple[int, ...]]],
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        specs: Mapping[str, InputSpec],
    ) -> Feed:
        """Compute and check the states after the previous step, for the step at `where`."""
        last, feed, earlier = before
        values = run.run(feed, list(self.pairs), where=last)
        for output, name in self.pairs.items():
            value, spec = values[output], specs[name]
            if not _takes(spec, value.dtype, value.shape):
                raise DataError(
                    f"output '{output}' is {value.dtype} {value.shape} after {last}, and input '{name}', "
                    f"to which CALIBRATION.FEEDBACK leads it, wants {spec}: check the pair"
                )
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise NumericError(
                    f"output '{output}' holds NaN or Inf after {last}, and {where} would go on from it: "
                    f"begin a new sequence there (feed '{name}'), or check the data before"
                )
            for have, want, was in zip(value.shape, shapes[name], earlier[name], strict=True):
                if have == was != want:
                    raise DataError(
                        f"{where} needs a state '{name}' of {shapes[name]}, and {last}, from which it goes on, leaves "
                        f"one of {value.shape}: keep the size of the batch, or feed '{name}' to begin a new sequence"
                    )
        return {name: values[output] for output, name in self.pairs.items()}


def _takes(spec: InputSpec, kind: np.dtype[Any] | None, dims: tuple[int | str | None, ...] | None) -> bool:
    """Return whether a tensor may have the type and the fixed dimensions of an input, as far as both are known."""
    if kind is not None and kind != spec.dtype:
        return False
    if dims is None or spec.shape is None:
        return True
    pairs = zip(dims, spec.shape, strict=False)
    return len(dims) == len(spec.shape) and all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _zero_shape(
    spec: InputSpec, feed: Feed, specs: Mapping[str, InputSpec], states: list[InputSpec]
) -> tuple[int, ...]:
    """Return the shape of an initial state; see `unroll`."""
    others = [(specs[name].shape or (), x) for name, x in feed.items() if name not in {state.name for state in states}]
    lengths = {
        dim: length
        for dims, x in others
        for dim, length in zip(dims, x.shape, strict=False)
        if isinstance(dim, str) and dim
    }
    batch = next((x.shape[0] for dims, x in others if x.ndim and not isinstance((*dims, None)[0], int)), 1)
    sizes = []
    for dim in spec.shape or ():
        if isinstance(dim, int):
            sizes.append(dim)
        elif dim in lengths:
            sizes.append(lengths[dim])
        else:
            sizes.append(batch)
            batch = 1
    return tuple(sizes)


def _check_pairs(graph: Graph, feedback: Mapping[str, str]) -> None:
    """Raise RecipeError for outputs that cannot be fed to their inputs."""
    outputs = {tensor.name: tensor for tensor in graph.outputs}
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    specs = {spec.name: spec for spec in input_specs(graph)}
    for output, name in feedback.items():
        _there(output, outputs, "output")
        _there(name, inputs, "input")
        wanted = specs[name]
        if wanted.dtype is None or wanted.dtype.kind == "O" or wanted.shape is None:
            raise RecipeError(
                f"CALIBRATION.FEEDBACK: input '{name}' is no tensor of numbers with a known number of axes: "
                "a state must be one; feed it with the data"
            )
        declared = InputSpec(output, dtype(outputs[output]), shape(outputs[output]))
        if not _takes(wanted, declared.dtype, declared.shape):
            raise RecipeError(
                f"CALIBRATION.FEEDBACK: input '{name}' wants {wanted} and output '{output}' is {declared}: "
                "they do not fit; check the pair"
            )
    for name in feedback.values():
        if list(feedback.values()).count(name) > 1:
            raise RecipeError(f"CALIBRATION.FEEDBACK: input '{name}' is fed by two outputs: name each input once")


def _there(name: str, known: Mapping[str, Tensor], kind: str) -> None:
    """Raise RecipeError if the model does not have this name."""
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'" if close else f"there are {', '.join(repr(existing) for existing in known)}"
    raise RecipeError(f"CALIBRATION.FEEDBACK: the model has no {kind} '{name}': {hint}")
