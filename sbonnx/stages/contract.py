"""Contract of stages: what a stage needs, and what it sets.

The values that stages pass on are fields of `sbonnx.stages.state.PipelineState`. They are absent (None) until the stage
that sets them has run; a stage in the wrong place is an error before it computes anything. As the passes of onnx-ir
declare what they require and ensure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, final

from sbonnx.options import RunOptions

if TYPE_CHECKING:
    from sbonnx.stages.state import PipelineState

S = TypeVar("S", bound="PipelineState")
"""The state, or a class of it with more values."""

Value = Literal[
    "graph",
    "plan",
    "data",
    "ranges",
    "solution",
    "quantized",
    "report",
    "removed",
    "pruned",
    "simplified",
    "texts",
    "folder",
    "adapters",
    "evaluation",
]
"""A value of the state: the float graph, its plan, samples, ranges of activations, scales and weights, the quantized
graph, the report, the graph without channels, the pruned model, the report of a simplification; of decoders, windows of
tokens, the staged folder, trained adapters and the evaluation.
"""

MayBeNone: Final[frozenset[Value]] = frozenset({"data", "ranges", "texts", "evaluation"})
"""Values that can be None after their stage has run: there was nothing to read or to measure."""


@final
class Stage:
    """A function ``(state, options) -> state`` with its contract.

    Attributes:
        needs: values that earlier stages set.
        sets: values that are set when it has run. A stage that edits the graph in place sets it.
    """

    __name__: str

    def __init__(
        self,
        run: Callable[[Any, RunOptions], Any],
        needs: Iterable[Value],
        sets: Iterable[Value],
    ) -> None:
        self._run = run
        self.needs = frozenset(needs)
        self.sets = frozenset(sets)
        update_wrapper(self, run)

    def __repr__(self) -> str:
        return f"<stage {self.__name__}>"

    def __call__(self, state: S, options: RunOptions) -> S:
        """Run the stage.

        Raises:
            RuntimeError: a value that it needs is absent: the order of the stages is wrong.
        """
        absent = sorted(self.needs - MayBeNone - state.present)
        if absent:
            raise RuntimeError(f"stage {self.__name__} needs {', '.join(absent)}, which no stage before it has set")
        following: S = self._run(state, options)
        return following


def stage(
    *, needs: Iterable[Value] = (), sets: Iterable[Value] = ()
) -> Callable[[Callable[[S, RunOptions], S]], Stage]:
    """Declare the contract of a stage, see `Stage`."""
    return lambda run: Stage(run, needs, sets)
