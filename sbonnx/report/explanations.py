"""Explanations of the codes of reasons and notes: meaning, fix and page. `sbonnx explain` reads this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Explanation:
    """Meaning of some codes.

    Attributes:
        id: short and stable, such as R02.
        codes: codes of reasons and notes (`sbonnx.report.codes`), separated by blanks; each has one explanation.
        meaning: why it is so.
        fix: what changes it.
        page: page of the documentation.
    """

    id: str
    codes: str
    meaning: str
    fix: str
    page: str


EXPLANATIONS: Final = (
    Explanation(
        "R01",
        "no-integer-kernel state-inside kept-in-float not-matrix-product no-integer-operator executed-in-float "
        "by-backend",
        "the runtime has no integer kernel for this operator: pairs around it would only add conversions",
        "nothing, or another backend; QUANTIZE_INPUTS_OF forces it where the backend has a rule",
        "docs/recipe.md",
    ),
    Explanation(
        "R02",
        "slower-in-integers",
        "by the table of kernel costs, the integer kernel and the conversions at its edges take longer than float",
        "QUANTIZE_INPUTS_OF: {OP: true} quantizes it nevertheless; sbonnx tune measures the kernels of this machine",
        "docs/decisions/0014-never-slower-in-silence.md",
    ),
    Explanation(
        "R03",
        "few-channels few-channels-in-groups small-weight",
        "the number of channels does not fill the blocks of the runtime's integer kernels, so that fp16 is faster",
        "pad the channels, or QUANTIZE_INPUTS_OF: {OP: true} to quantize it nevertheless",
        "docs/tensorrt.md",
    ),
    Explanation(
        "R04",
        "recipe skipped",
        "the recipe, --exclude or --include leaves this node or tensor in float",
        "change EXCLUDE, INCLUDE or the entry of SPECIFIC that the reason names",
        "docs/recipe.md",
    ),
    Explanation(
        "R05",
        "input-stays-float weight-stays-float weights-alone first-layer-features",
        "a weight is quantized only with the input of the same operator: alone, it gains no integer kernel",
        "see why the input stays float; MODE: weight_only quantizes weights alone",
        "docs/recipe.md",
    ),
    Explanation(
        "R06",
        "in-loop-body body-needs-weight body-not-observed states-not-observed branch-in-loop",
        "operators in the body of Loop or Scan run a varying number of steps, whose tensors are not calibrated",
        "unroll the loop in the export",
        "docs/architecture.md",
    ),
    Explanation(
        "R07",
        "already-quantized already-has-pairs pairs-removed",
        "the file has Q/DQ pairs, which are kept",
        "--requantize removes them first; the float model gives better results",
        "docs/recipe.md",
    ),
    Explanation(
        "R08",
        "input-absent input-constant infinite-values type-unknown type-not-float type-not-float32",
        "only finite float activations with a known type are quantized",
        "export the model with shapes and types (onnx.shape_inference); what holds infinite numbers stays float",
        "docs/architecture.md",
    ),
    Explanation(
        "R09",
        "bias-without-scale bias-not-int32 scales-for-bias",
        "an int32 bias has the product of the scales of input and weight, and one of them is missing or too small",
        "nothing: the bias stays float and the file is as exact",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R10",
        "float16-model",
        "the model is in float16, for which onnxruntime has no integer kernels on CPUs",
        "quantize the float32 model",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R11",
        "no-data rounding-without-data not-compared no-texts",
        "the step measures activations, and no data was given",
        "give --data",
        "docs/data.md",
    ),
    Explanation(
        "R12",
        "scales-raised",
        "a scale was below the smallest one that the runtime represents; values below it become zero",
        "nothing, if the accuracy is kept: the tensor is almost constant",
        "docs/tensorrt.md",
    ),
    Explanation(
        "R13",
        "data-not-used labels-not-used array-renamed preprocessing-not-applied",
        "arrays, files or samples of the data are not inputs of the model or do not fill a batch",
        "nothing for labels; else name arrays as the inputs of the model",
        "docs/data.md",
    ),
    Explanation(
        "R14",
        "data-constant data-unlike-training data-too-large-or-small channel-order channels-constant",
        "the values of the data do not fit what the first layer was trained on: scale, offset or channel order",
        "check --preprocess: it must be that of inference",
        "docs/data.md",
    ),
    Explanation(
        "R15",
        "slower latency-above-budget",
        "the quantized file was measured and takes longer than the float one",
        "run the command of the advice, or benchmark on the target machine (sbonnx bench)",
        "docs/decisions/0014-never-slower-in-silence.md",
    ),
    Explanation(
        "R16",
        "int4-not-for-op int4-odd-dimension int4-block-size fp8-with-groups fp8-large-filter",
        "the shape of the weight does not fit the int4 or fp8 kernels of TensorRT",
        "--bits w8a8 for these layers (SPECIFIC), or a --block-size that divides the summed axis",
        "docs/tensorrt.md",
    ),
    Explanation(
        "R17",
        "head-worth-float head-left-float head-quantized head-not-alone",
        "by measurement, integers in this region or layer lose more accuracy than they gain time",
        "HEADS: none quantizes it nevertheless",
        "docs/heads.md",
    ),
    Explanation(
        "R18",
        "both-inputs-constant two-activations constant-on-left input-not-matrix weight-not-matrix "
        "gemm-transposes-input gemm-alpha gemm-beta weight-type weight-empty weight-shape-not-known",
        "kernels with a quantized weight compute data times a constant matrix, and this product has another form",
        "export it with the constant on the right and known shapes; sbonnx simplify folds constants",
        "docs/recipe.md",
    ),
    Explanation(
        "R19",
        "writes-output",
        "outputs of the model stay float, and the integer kernel of this operator writes integers only",
        "nothing: names, types and values of outputs are kept",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R20",
        "weight-too-small",
        "the weight is so small that integers gain neither size nor time",
        "MIN_WEIGHT_SIZE: 0 quantizes every size",
        "docs/recipe.md",
    ),
    Explanation(
        "R21",
        "too-few-to-share types-differ scale-per-channel own-scale",
        "tensors can share a scale only if they are quantized activations of one integer type",
        "correct the group, or give its tensors the same bits and scheme (SPECIFIC)",
        "docs/recipe.md",
    ),
    Explanation(
        "R22",
        "activations-are-folded range-not-used nothing-measured needs-training not-searched not-pruned "
        "module-not-in-file",
        "a key of the recipe has no effect with this backend, mode or model",
        "remove the key; sbonnx explain KEY says what it needs",
        "docs/recipe.md",
    ),
    Explanation(
        "R23",
        "one-type-for-readers one-scale-for-tensor one-method-for-readers",
        "a tensor is quantized in one way for all operators that read it, as their kernels need it",
        "nothing, or the same settings for all of its readers",
        "docs/recipe.md",
    ),
    Explanation(
        "R24",
        "slow-block-kernel",
        "onnxruntime has no fast kernel for weights of this width and block size",
        "the setting that the reason names",
        "docs/llm.md",
    ),
    Explanation(
        "R25",
        "no-values always-zero branch-never-ran not-reached",
        "the calibration data never gave this tensor values from which a range follows",
        "add samples that reach it, such as both branches of an If",
        "docs/data.md",
    ),
    Explanation(
        "R26",
        "scale-out-of-reach bias-overflows",
        "the range of the tensor is too large or too small for a scale that all runtimes represent",
        "check the data for outliers, or fix the range (RANGES)",
        "docs/recipe.md",
    ),
    Explanation(
        "R27",
        "rows-not-in-blocks",
        "rows of an embedding are quantized in blocks",
        "MODE: weight_only, with a --block-size that divides the rows",
        "docs/recipe.md",
    ),
    Explanation(
        "R28",
        "override-not-used reduce-range-without-effect",
        "an override names a tensor that has no scale, or asks for a reduced range, which these kernels do not need",
        "remove the entry, or name a tensor of `sbonnx plan`",
        "docs/qnn.md",
    ),
    Explanation(
        "R29",
        "same-on-every-cpu",
        "the kernels of this backend do not depend on the CPU, so CPU changes nothing",
        "drop --cpu, or choose the backend onnxruntime",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R30",
        "graph-named sizes-dynamic output-sizes-dynamic functions-inlined sparse-constants nodes-sorted "
        "nodes-named nodes-renamed training-dropped initializers-listed opset-converted opset-lowered "
        "shapes-not-inferred debug-metadata",
        "reading changes a file where runtimes and passes need it: names, order, opset, sizes; its results stay equal",
        "nothing: the float file itself is not changed",
        "docs/architecture.md",
    ),
    Explanation(
        "R31",
        "training-mode-on training-mode-computed batch-norm-needs-rank-2 kernel-crosses-edge not-constant "
        "weight-axes-are-output-axes axis-in-every-operand sums-over-all-axes summed-in-one-input "
        "einsum-with-ellipsis einsum-with-diagonal not-one-number-per-channel channels-not-known "
        "weight-not-float-constant bias-does-not-fit matmul-without-bias folded-weight-not-finite "
        "folded-bias-not-finite pads-below-maximum pads-mode pads-do-not-fit-axes axes-do-not-fit-rank "
        "pads-batch-or-channels negative-pads auto-pad kernel-does-not-fit-pads ceil-mode dilated-pool "
        "pads-not-smaller-than-kernel padding-not-counted pad-value-not-known pads-with-another-value "
        "both-outputs output-is-input output-without-producer output-of-body second-output-used "
        "read-by-another-node read-in-branch is-output sizes-are-rounded "
        "axes-repeat numbers-do-not-fit-axes region-not-constant rank-not-known shape-does-not-fit not-linear "
        "weight-without-channels",
        "a pattern replaces operators only where the result is the same for every input; here it would not be, or "
        "that is not known",
        "export the model in inference mode, with constants as initializers and known shapes; sbonnx explain "
        "PATTERN says why it is valid",
        "docs/architecture.md",
    ),
    Explanation(
        "R32",
        "constant-too-large size-not-known cannot-be-run",
        "constants are computed in advance only if onnxruntime can, and if the file does not grow much",
        "nothing: the runtime computes them when it loads the file",
        "docs/architecture.md",
    ),
    Explanation(
        "R33",
        "weight-computed bias-computed weight-is-shared summed-over channels-on-several-axes "
        "channels-not-preserved inputs-unscaled comes-from-untraced is-input reader-without-bias no-bias "
        "pads-zeros awq-output no-scale-lowers-error no-constant-absorbs-scale scaled-weight-not-finite "
        "reads-unscaled-channels reads-unscaled-tensor divided-by normalized-over adds-to-all-channels "
        "clips-all-channels nothing-reads "
        "channels-have-similar-ranges products-scaled",
        "a channel can be scaled if everything that writes or reads it can absorb the factor; here something cannot",
        "nothing: these channels keep their ranges; EQUALIZE has other methods",
        "docs/recipe.md",
    ),
    Explanation(
        "R34",
        "biases-corrected mean-not-known norms-tuned no-batch-norm nothing-quantized norm-was-folded "
        "no-bias-for-mean outputs-do-not-fit-channels groups-share-weight shares-scales one-scale-for-outputs "
        "statistics-computed in-branch",
        "corrections need known statistics of a batch normalization, and a bias or scale that no other layer reads",
        "BIAS_CORRECTION: measured uses data instead of statistics",
        "docs/recipe.md",
    ),
    Explanation(
        "R35",
        "rounding-gain moments-failed moments-too-large weight-in-another-layout weight-without-rows "
        "branch-without-stream branch-not-alone masks-left-out expert-never-reached",
        "rounding by the inputs of a layer needs moments of these inputs that fit into the memory and are finite; "
        "else weights are rounded to nearest",
        "raise CALIBRATION.MEMORY, or add samples that reach the layer",
        "docs/recipe.md",
    ),
    Explanation(
        "R36",
        "readers-have-other-scales rectifier-has-effect read-in-float scale-not-constant type-of-codes "
        "input-not-float32 scales-in-blocks scales-along-another-axis scales-not-in-blocks type-not-supported "
        "block-or-width-not-supported rows-share-bytes rows-misread input-per-channel weight-float "
        "bias-not-constant zero-points-differ groups-share-scales not-in-opset positions-of-ties "
        "attributes-not-supported channels-last no-float-operator scale-not-dynamic scales-do-not-follow "
        "rows-reordered zero-points-are-floats table-computed table-not-packed codes-computed "
        "codes-read-elsewhere",
        "operators with integers inside have fixed forms, types and layouts of scales, and this place has another one",
        "nothing: it keeps its Q/DQ pairs, or its integer operator",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R37",
        "input-float rectifier-stays-float joined-with-add scales-differ op-before-pair activation-signed "
        "computes-new-values",
        "onnxruntime replaces a pattern of pairs around an operator by an integer kernel, and this place does not "
        "match",
        "sbonnx lint FILE says which rule is broken and how to repair it",
        "docs/lint.md",
    ),
    Explanation(
        "R38",
        "float-converted edges-stay-float guard-raised mask-reduced limit-reduced reads-positions scale-not-exact "
        "accuracy-level operator-not-known too-large too-small whole-numbers sum-too-large type-is-attribute",
        "values that half precision cannot represent, or that a node would lose inside, stay in float32",
        "nothing; or HIGH_PRECISION: fp32, or bf16 for large values",
        "docs/recipe.md",
    ),
    Explanation(
        "R39",
        "channels-pinned no-rule multiplied-with-pinned combined-with-pinned combined-with-all gathered-alone "
        "removed-with-groups size-is-read weight-read-in-two-ways positions-are-read reshape-computed "
        "resize-computed slice-with-step channels-not-apart weight-empty-or-left depthwise first-layer "
        "no-zeros-wanted channels-not-multiple channels-not-in-blocks no-sparse-kernels tuning-without-gain "
        "tuning-ended",
        "channels are removed, and zeros chosen, only where all layers that share them allow it",
        "name other layers or budgets in SPARSE; the reason names the node that keeps them",
        "docs/pruning.md",
    ),
    Explanation(
        "R40",
        "emulated runtime-absent larger levels-left-out fp8-rewrites "
        "channel-rewrites sums-of-other-cpu rewrites-left-out not-run nothing-to-check",
        "the file was compared with float under these conditions",
        "see the reason; more samples (--samples), or verification on the target machine",
        "docs/verification.md",
    ),
    Explanation(
        "R41",
        "not-in-costs widths-chosen widths-measured node-not-in-file not-tried search-trials search-reached "
        "search-gain",
        "what the search for widths or settings tried and chose",
        "nothing; MIXED and AUTO have the limits and candidates",
        "docs/recipe.md",
    ),
    Explanation(
        "R42",
        "loss-not-explained outputs-not-compared weights-not-of-float nodes-without-pairs layer-not-measured "
        "layer-not-always-run other-branch branch-not-always-taken losses-not-measured",
        "losses of layers are measured on the feeds that reach them, for outputs of the same shape as in float",
        "more feeds that reach the layer (--samples)",
        "docs/command_line.md",
    ),
    Explanation(
        "R43",
        "few-windows decoder-without-caches speed-not-measured",
        "figures of a decoder need texts, caches and time",
        "--text with more text; --latency",
        "docs/llm.md",
    ),
    Explanation(
        "R44",
        "cache-damaged cache-old cache-other-settings",
        "statistics are stored in the calibration cache and belong to its settings, model and version",
        "nothing: they are measured again",
        "docs/data.md",
    ),
    Explanation(
        "R45",
        "files-not-copied",
        "only regular files of the model's folder are copied to the output",
        "copy them yourself if the model needs them",
        "docs/llm.md",
    ),
    Explanation(
        "R46",
        "written-in-format written-for-backend without-compiled-loops other-defaults empty-recipe",
        "how the file was written, or with which defaults and code",
        "nothing: values are the same",
        "docs/recipe.md",
    ),
    Explanation(
        "R47",
        "output-unusable output-far-from-float worse-held-out first-lost-layer first-lost-block",
        "outputs are so far from float that accuracy is lost; an error begins in the layer or block that is named",
        "run the command of the advice; sbonnx profile shows which layers lose most",
        "docs/verification.md",
    ),
    Explanation(
        "R48",
        "limit-missed limit-not-judged loss-above-limit goal-missed",
        "the result misses a limit that was set, or the figure that it needs was not measured",
        "change the limit that the sentence names, or give the data that it needs",
        "docs/verification.md",
    ),
    Explanation(
        "R49",
        "levels-differ sums-unknown",
        "8-bit sums saturate on some CPUs and at some optimization levels, so that numbers differ between them",
        "REDUCE_RANGE, or --cpu of the target machine",
        "docs/onnxruntime.md",
    ),
    Explanation(
        "R50",
        "outputs-differ not-verified differs-from-module removal-differs caches-differ",
        "the file must compute what its source computes, and does not, or was not compared with it",
        "give --data if the model was not run; else report the model",
        "docs/verification.md",
    ),
    Explanation(
        "R51",
        "no-tensor-quantized",
        "no tensor of the model can be quantized with this backend and recipe",
        "see the reasons of the refusals (--verbose)",
        "docs/recipe.md",
    ),
    Explanation(
        "R52",
        "shared-scale few-bits range-exceeded outliers rare-outliers one-weight-scale wide-range",
        "why a layer loses more than others: its tensor has a scale that does not fit its values, or too few bits",
        "the change that the sentence names: OWN_SCALES, SPECIFIC, SAMPLES or EXCLUDE",
        "docs/profiling.md",
    ),
    Explanation(
        "R53",
        "no-rule-for-operator rule-is-off rule-does-not-apply in-kernel-before not-as-planned not-planned",
        "by the rules of the backend, integers in this operator gain nothing where it is, or they were left out",
        "nothing; QUANTIZE_INPUTS_OF: {OP: true} quantizes it where the backend has a rule that is off",
        "docs/recipe.md",
    ),
    Explanation(
        "R54",
        "runtime-differs runtime-refuses",
        "a runtime computes an operator of the file otherwise than the reference, beyond rounding, or does not load it",
        "quantize for the backend of that runtime, or keep the operator in float; --runtimes selects runtimes",
        "docs/runtimes.md",
    ),
    Explanation(
        "R55",
        "input-filled",
        "inputs besides the image take its size: they get that of the model's input, so that boxes are in its pixels",
        "nothing; for other values give a Python file, --data data.py:f",
        "docs/data.md",
    ),
    Explanation(
        "R56",
        "trained not-trained",
        "the loss is the distance of the quantized outputs from those of float, on the training samples; it takes "
        "torch and, for the 2-bit weights of a decoder, memory",
        "more --epochs or training data (--train-data) if the loss still falls; sbonnx[qat] and --memory",
        "docs/qat.md",
    ),
    Explanation(
        "R57",
        "activations-widened",
        "with 8-bit activations alone the outputs would be lost: a few of them have 16 bits",
        "nothing; WIDE_ACTIVATIONS sets the largest share, 0 widens none",
        "docs/qnn.md",
    ),
    Explanation(
        "R58",
        "log-of-power",
        "a logarithm turns relative errors into absolute ones, and powers of a spectrum span more than 8 bits hold",
        "nothing: the spectrum in front of a network is computed in float",
        "docs/architecture.md",
    ),
    Explanation(
        "R59",
        "steps-stay-float",
        "of separate decoders for the first and further tokens, the one without a past is quantized",
        "the merged decoder: export without --no-post-process",
        "docs/llm.md",
    ),
)

_BY_NAME: Final = {name: row for row in EXPLANATIONS for name in (row.id.lower(), *row.codes.split())}


def explanation_of(code: str) -> Explanation | None:
    """Return the explanation of a code, or of an id (R02); None: there is none."""
    return _BY_NAME.get(code.strip().lower())


__all__ = ["EXPLANATIONS", "Explanation", "explanation_of"]
