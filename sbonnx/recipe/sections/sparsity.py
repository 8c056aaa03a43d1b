"""SPARSE: pruning before quantization. Sparsebit's section SPARSER is read as this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, final

from sbonnx.recipe.problem import Wrong, one_of
from sbonnx.recipe.sections import flags
from sbonnx.recipe.sections.base import Section, from_pairs, key, new_key, rows_of
from sbonnx.recipe.sections.flags import Flag

if TYPE_CHECKING:
    from sbonnx.linear.zero_patterns import SparsityPattern
    from sbonnx.recipe import value_types

ANCESTOR: Final = "SPARSER"
"""Sparsebit's name of the section."""

SPARSER_DEFAULTS: Final[Mapping[str, Any]] = {"STRATEGY": "l1norm", "RATIO": 0.0, "MULTIPLE": 1, "FUSE_BN": False}
"""Values of keys that a section SPARSER does not set: what Sparsebit does."""


def modern_key(path: str) -> str:
    """Replace the head SPARSER of a key path, in any case, by SPARSE."""
    head, dot, rest = path.partition(".")
    return f"SPARSE{dot}{rest}" if head.upper() == ANCESTOR else path


def modern_section(data: dict[str, Any]) -> dict[str, Any]:
    """Rename SPARSER to SPARSE, with Sparsebit's defaults; an empty text is its spelling of an absent key.

    Args:
        data: a recipe with canonical keys.

    Raises:
        Wrong: both sections are given.
    """
    theirs = data.get(ANCESTOR)
    if not isinstance(theirs, Mapping):
        return data
    if "SPARSE" in data:
        raise Wrong("is Sparsebit's name of SPARSE, which is given too: drop one", path=(ANCESTOR,))
    given = {name: value for name, value in theirs.items() if value != ""}
    rest = {name: value for name, value in data.items() if name != ANCESTOR}
    return {**rest, "SPARSE": {**SPARSER_DEFAULTS, **given}}


@final
class SparseBudget(Section):
    """SPARSE.BUDGET: what may remain of the model."""

    macs: value_types.PartialShare | None = new_key(
        None,
        "share of the multiplications that may remain",
        "between 0 and 1",
        shown="none",
        prune_forms="macs",
        example="0.75",
        flag=Flag("--macs SHARE", "Share of the multiplications that may remain, such as 0.5.", flags.GOAL),
    )
    size: value_types.PartialShare | None = new_key(
        None,
        "share of the bytes of all constants that may remain",
        "between 0 and 1",
        shown="none",
        prune_forms="size",
        example="0.6",
        flag=Flag("--size SHARE", "Share of the bytes of all constants that may remain.", flags.GOAL),
    )
    latency: value_types.PartialShare | None = new_key(
        None,
        "share of the time of a sample in float that may remain, by KERNEL_COSTS; onnxruntime",
        "between 0 and 1",
        shown="none",
        prune_forms="latency",
        example="0.7",
        flag=Flag(
            "--latency SHARE",
            "Share of the time in float that may remain, by the backend's kernel costs (onnxruntime).",
            flags.GOAL,
        ),
    )


@final
class SparseFinetune(Section):
    """SPARSE.FINETUNE: training of the remaining weights by distillation from the original, without labels."""

    epochs: value_types.CountOrNone = new_key(
        0,
        "passes over the samples that train the remaining weights (needs torch)",
        "0 (off) or more",
        prune_forms="finetune",
        flag=Flag("--finetune EPOCHS", "Train the remaining weights, without labels; needs torch.", flags.GOAL),
    )
    lr: value_types.AboveZero = new_key(
        0.5,
        "peak learning rate, relative to the weights of a layer",
        "above 0",
        prune_forms="lr",
        flag=Flag("--lr X", "Peak learning rate of --finetune; default 0.5.", flags.GOAL),
    )
    augment: value_types.Augment = new_key(
        "auto",
        "augmentations of images in training",
        "auto (flip, shift, mixup if the only input is images), none, or some of flip, shift, cutmix, mixup",
        prune_forms="augment",
        flag=Flag(
            "--augment auto|none|flip,shift,cutmix,mixup",
            "Augmentations of images in --finetune; default auto.",
            flags.GOAL,
        ),
    )


class SparseChange(Section):
    """One entry of SPARSE.SPECIFIC."""

    ratio: value_types.Share | None = new_key(
        None, "share of the layer's output channels to remove; unstructured: of its weights", "0 to 1"
    )
    strategy: value_types.PruningStrategy | None = new_key(None, "order of removal", "as SPARSE.STRATEGY")
    skip: value_types.Flag = new_key(
        False, "leave the layer as it is: inputs, outputs and weights are not changed", "true, false"
    )

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return from_pairs(data)


GOALS: Final = ("RATIO", *(f"BUDGET.{name}" for name in rows_of(SparseBudget)), "MAX_LOSS", "SPARSITY")
"""Keys of SPARSE that say how much to remove; one of them is set."""


@final
class Sparse(Section):
    """SPARSE: removal of channels before quantization; off unless a goal is set."""

    type: value_types.PruningType = key(
        "structured",
        "parts that are removed: whole channels, or single weights, which become zero; N:M: at most N of M input "
        "channels at one kernel tap are not zero, and no other goal is needed",
        "structured (structed in Sparsebit), unstructured, N:M (TensorRT: 2:4)",
        prune_forms="type pattern",
        flag=Flag("--pattern N:M", "Zeros in a pattern; 2:4 is that of TensorRT's sparse kernels.", flags.GOAL),
    )
    strategy: value_types.PruningStrategy = key(
        "auto",
        "order of removal",
        "auto (obs with data, l1norm without), obs, output, l1norm, l2norm, random",
        prune_forms="strategy",
        flag=Flag(
            "--strategy auto|obs|output|l1norm|l2norm|random",
            "Order of removal; auto (default): obs with data, l1norm without.",
            flags.GOAL,
        ),
    )
    ratio: value_types.Share | None = key(
        None,
        "share of the channels to remove from each dimension; unstructured: of the weights of each layer",
        "0 to 1",
        shown="none",
        prune_forms="ratio",
        example="0.3",
        flag=Flag("--ratio SHARE", "Share of the channels to remove from each dimension.", flags.GOAL),
    )
    sparsity: value_types.PartialShare | None = new_key(
        None,
        "share of the weights of each layer that become zero; TYPE is unstructured then",
        "between 0 and 1",
        shown="none",
        prune_forms="sparsity",
        example="0.5",
        flag=Flag(
            "--sparsity SHARE",
            "Share of the weights of each layer that become zero, in any positions: shapes unchanged.",
            flags.GOAL,
        ),
    )
    budget: SparseBudget = SparseBudget()
    max_loss: value_types.Percentage | None = new_key(
        None,
        "loss that is allowed on samples held out: as many multiplications are removed as it allows",
        "0 to 1, or in percent: 1%",
        shown="none",
        prune_forms="max_loss",
        example="1%",
        flag=Flag("--max-loss SHARE", "Prune as much as this loss on held-out samples allows, such as 1%.", flags.GOAL),
    )
    loss: Annotated[Literal["auto", "top1", "relative"], value_types.ANY_CASE] = new_key(
        "auto",
        "measure of MAX_LOSS, as MIXED.LOSS",
        "auto (top1 for one output of classes), top1, relative",
        prune_forms="loss",
    )
    multiple: value_types.Multiple | None = new_key(
        None,
        "remaining channels of a dimension are a multiple of this, or all of them",
        "1 or more, auto (the blocks of the backend's kernels)",
        shown="auto with BUDGET.LATENCY, else 1",
        prune_forms="multiple",
        example="auto",
        flag=Flag(
            "--multiple N|auto",
            "Remaining channels are a multiple of N, or all; auto (default with --latency): blocks of the backend's "
            "kernels.",
            flags.GOAL,
        ),
    )
    rounds: value_types.Count = new_key(
        1,
        "with BUDGET: number of measurements, each on the network that the round before left",
        "1 or more",
        prune_forms="rounds",
        flag=Flag("--rounds N", "Measure so many times, each time on what remains; default 1.", flags.GOAL),
    )
    least: value_types.Ratio = new_key(
        0.1,
        "with a budget: share of each dimension that always remains",
        "0 to below 1",
        prune_forms="least",
        flag=Flag("--least SHARE", "Share of each dimension that always remains; default 0.1.", flags.GOAL),
    )
    refit: value_types.PruningRefit = new_key(
        "pruned",
        "fit the remaining weights on inputs from the pruned network",
        "pruned (true), none (false)",
        prune_forms="refit",
        flag=Flag("--no-refit", "Do not refit the remaining weights.", flags.GOAL),
    )
    fuse_bn: value_types.Flag = new_key(
        True,
        "fold batch normalization before pruning, so that norms are those of the folded weights; false: afterwards, as "
        "Sparsebit, whose SPARSER has this default",
        "true, false",
    )
    finetune: SparseFinetune = SparseFinetune()
    specific: Annotated[
        tuple[Annotated[dict[value_types.NodePattern, SparseChange], value_types.MAPPING], ...], value_types.ONE_OR_LIST
    ] = new_key(
        (),
        "other values for some layers; the first match wins",
        "list of {node pattern: {RATIO, STRATEGY, SKIP}}",
        prune_forms="specific",
        example='[{"/layer1/*": {RATIO: 0.25}}, {"head": {SKIP: true}}]',
    )

    @property
    def goals(self) -> tuple[str, ...]:
        """Keys of the goals that are set."""
        budgets = [f"BUDGET.{name}" for name in self.budget.to_keys(empty=False)]
        others = {"RATIO": self.ratio, "MAX_LOSS": self.max_loss, "SPARSITY": self.sparsity}
        pattern = ["TYPE"] if ":" in self.type else []
        return (*budgets, *(name for name, value in others.items() if value is not None), *pattern)

    @property
    def pattern(self) -> SparsityPattern | None:
        """Pattern of zeros; None: channels are removed."""
        from sbonnx.linear.zero_patterns import Unstructured, sparsity_pattern

        if ":" in self.type:
            return sparsity_pattern(self.type)
        if self.sparsity is not None:
            return Unstructured(self.sparsity)
        return Unstructured(self.ratio or 0.0) if self.type == "unstructured" else None

    @property
    def wanted(self) -> bool:
        """Whether anything is to be removed."""
        ratios = [self.ratio, *(change.ratio for _, _, change in self.entries())]
        return any(name != "RATIO" for name in self.goals) or any(ratios)

    def entries(self) -> Iterator[tuple[int, str, SparseChange]]:
        """Yield the entries of SPECIFIC in order: position in the list, pattern and change."""
        for index, entry in enumerate(self.specific):
            for pattern, change in entry.items():
                yield index, pattern, change

    @property
    def problem(self) -> Wrong | None:
        """Why nothing can be pruned: several goals, or keys without a goal; None for an empty section."""
        goals = self.goals
        if len(goals) > 1:
            text = f"has {len(goals)} goals, {', '.join(goals)}: channels or weights are removed for one of them"
            return Wrong(text, "Drop the others", path=("SPARSE",))
        if self.type == "unstructured" and (goals and goals[0] not in ("RATIO", "SPARSITY")):
            text = f"counts channels, and TYPE {self.type} removes none"
            return Wrong(text, "Set SPARSITY", path=("SPARSE", *goals[0].split(".")))
        if not goals and not self.wanted and self != Sparse():
            text = "has no goal, so that nothing would be removed"
            return Wrong(text, f"Set {one_of(GOALS)}", path=("SPARSE",))
        if self.rounds > 1 and not any(name.startswith("BUDGET") for name in goals):
            return Wrong("go step by step to a budget, and none is set", "Set a BUDGET", path=("SPARSE", "ROUNDS"))
        return None
