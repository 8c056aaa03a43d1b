"""``sbonnx llm``: inspect, quantize and evaluate decoders exported to ONNX, as whole folders."""

from __future__ import annotations

import inspect as signatures
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.create.qat import RATE as LEARNING_RATE
from sbonnx.cli.create.qat import SEED, TRAINING
from sbonnx.cli.create.quantize import check_report, write_report
from sbonnx.cli.options import Arguments, CommandOption, required_output
from sbonnx.errors import DataError, RecipeError
from sbonnx.present.text.summary import facts_of, show_summary
from sbonnx.present.text.tables import show_refusals
from sbonnx.recipe.sections import flags

if TYPE_CHECKING:
    from sbonnx.llm import Decoder
    from sbonnx.present.text.printer import Printer
    from sbonnx.report.decoder import DecoderEvaluation

HELP: Final = (
    "Inspect, quantize, evaluate and adapt decoders (LLMs) exported to ONNX. Whole folders, measured by perplexity."
)

TEXTS: Final = flags.TEXTS
"""Help group."""

SOURCE: Final = CommandOption[Path](
    "source",
    (),
    Path,
    "Folder of onnxruntime-genai or optimum, or an .onnx file.",
    "FOLDER|MODEL",
    signatures.Parameter.empty,
)
OUTPUT: Final = replace(options.OUTPUT, help="The folder to write.")
BITS: Final = options.option("--bits w4", str, "Bit width of the weights; default 4.", options.QUANTIZATION)
BLOCK_SIZE: Final = replace(
    options.BLOCK_SIZE, key="", help="Weights along the summed axis that share a scale; default 32 (2 bits: 64)."
)
EFFORT: Final = replace(options.EFFORT, help="Time for accuracy: best also trains 2-bit weights with --text, in torch.")
KV: Final = options.option(
    "--kv 8|4", int, "Bit width of the key/value caches, by texts; default: as they are.", options.QUANTIZATION
)
TEXT: Final = options.option(
    "--text FILE|FOLDER",
    Path,
    "Texts: .txt, .jsonl (text, or messages), a folder of them; .npz with ids: windows of tokens.",
    TEXTS,
)
TOKENIZER: Final = options.option("--tokenizer FILE", Path, "tokenizer.json, if the folder has none.", TEXTS)
WINDOW: Final = options.key_option("LLM.WINDOW", int)
TOKENS: Final = options.key_option("LLM.TOKENS", int)
PAST: Final = options.option("--past PATTERN", str, "Names of the cache inputs of a single file, such as 'past.*'.")
PRESENT: Final = options.option(
    "--present PATTERN", str, "Names of the cache outputs of a single file, such as 'present.*'."
)
AGAINST: Final = options.option("--against FOLDER|MODEL", Path, "The float decoder to compare with.")
MAX_PERPLEXITY: Final = options.key_option("VERIFY.MAX_PERPLEXITY", str)
MIN_AGREEMENT: Final = options.key_option("VERIFY.MIN_AGREEMENT", float)
NO_LATENCY: Final = options.switch("--no-latency", "Do not measure speed and memory.", options.QUALITY)

ADAPTER: Final = options.option("--adapter FILE", Path, "Adapter of the model that is active (.onnx_adapter).")
FORM: Final[CommandOption[Any]] = options.setting(
    "--form branches|merged|inputs",
    "branches",
    "branches of the model; merged: other quantized values, same size; inputs: .onnx_adapter, several for one model.",
    TRAINING,
)
RANK: Final = options.setting("--adapters RANK", 16, "Rank of the adapters.", TRAINING)
EPOCHS: Final = options.setting("--epochs N", 4, "Number of passes over the windows.", TRAINING)
BATCH: Final = options.setting("--batch N", 8, "Windows per step.", TRAINING)
RATE: Final = replace(LEARNING_RATE, default=0.05)
TRAINING_SETTINGS: Final[tuple[CommandOption[Any], ...]] = (EPOCHS, BATCH, RATE, SEED)
"""Fields of `sbonnx.qat.Settings`, with the defaults of `sbonnx.qat.decoder_adapters`."""

NAMES: Final = (TOKENIZER, PAST, PRESENT)
LENGTHS: Final = (WINDOW, TOKENS)
LIMITS: Final = (MAX_PERPLEXITY, MIN_AGREEMENT)

WIDTHS: Final[dict[str, CommandOption[Any]]] = {
    "backend": options.BACKEND,
    "bits": BITS,
    "block_size": BLOCK_SIZE,
    "kv_bits": KV,
}
"""Options of quantization by keyword of `sbonnx.llm.quantize`."""

INSPECT_OPTIONS: Final = (SOURCE, *NAMES, *options.COMMON)
QUANTIZE_OPTIONS: Final = (
    SOURCE,
    TEXT,
    OUTPUT,
    options.BACKEND,
    BITS,
    BLOCK_SIZE,
    options.AVERAGE_BITS,
    EFFORT,
    KV,
    options.RECIPE,
    options.SET,
    *NAMES,
    *LENGTHS,
    options.DEVICE,
    options.ORT_LIBRARY,
    options.MEMORY,
    options.CACHE,
    options.REQUANTIZE,
    *LIMITS,
    NO_LATENCY,
    options.REPORT,
    options.VERBOSE,
    options.FORCE,
    *options.COMMON_WITH_PROGRESS,
)
EVALUATE_OPTIONS: Final = (
    SOURCE,
    AGAINST,
    TEXT,
    ADAPTER,
    *NAMES,
    *LENGTHS,
    *LIMITS,
    NO_LATENCY,
    options.ORT_LIBRARY,
    options.SET,
    *options.COMMON,
)
ADAPT_OPTIONS: Final[tuple[CommandOption[Any], ...]] = (
    SOURCE,
    AGAINST,
    TEXT,
    OUTPUT,
    RANK,
    FORM,
    *TRAINING_SETTINGS,
    TOKENIZER,
    *LENGTHS,
    options.DEVICE,
    options.ORT_LIBRARY,
    NO_LATENCY,
    options.SET,
    options.FORCE,
    *options.COMMON_WITH_PROGRESS,
)


@dataclass(frozen=True)
class Subcommand:
    """A command of the group: its help, options and function."""

    name: str
    help: str
    options: tuple[CommandOption[Any], ...]
    run: Callable[[Arguments], int]


def run_inspect(given: Arguments) -> int:
    """Show layers, bit widths, caches, ties and tokenizer."""
    from sbonnx.llm.description import describe

    printer, facts = given.printer(), describe(_decoder(given))
    printer.value("llm-inspect", facts)
    cache, sizes = facts.cache, facts.sizes
    printer.facts(
        str(given[SOURCE]),
        {
            "format": facts.format,
            "model": f"{facts.model} ({_size(facts.bytes)})",
            "encoder": facts.encoder,
            "inputs": ", ".join(f"{role.replace('_', ' ')} {name}" for role, name in facts.inputs.items()),
            "layers": f"{sizes.layers}, blocks found: {len(facts.blocks)}",
            "hidden size": sizes.hidden,
            "heads": f"{sizes.heads}, key/value heads {sizes.kv_heads}, head size {sizes.head_size}",
            "vocabulary": sizes.vocabulary,
            "context": sizes.context,
            "caches": None
            if cache is None
            else f"{cache.count} of {cache.bits} bits ({cache.type}), {cache.names}, "
            f"{_size(cache.token_bytes)} per token",
            "embedding and head": facts.ties,
            "tokenizer": facts.tokenizer or "none: give --tokenizer",
        },
    )
    rows = [(row.part, row.operators, f"{row.weights:,}", row.stored) for row in facts.parts]
    printer.table("weights", ("part", "operators", "values", "stored as"), rows)
    return 0


def run_quantize(given: Arguments) -> int:
    """Quantize a decoder and evaluate it."""
    from sbonnx.llm import quantize

    output, page = required_output(given[OUTPUT]), given[options.REPORT]
    check_report(page, [given[SOURCE]], force=given[options.FORCE])
    with closing(given.progress()) as progress:
        report = quantize(
            given[SOURCE],
            given[TEXT],
            output=output,
            recipe=given[options.RECIPE],
            **_names(given),
            **{name: given[row] for name, row in WIDTHS.items() if given[row] is not None},
            force=given[options.FORCE],
            latency=not given[NO_LATENCY],
            details=page is not None,
            progress=progress,
            overrides=given.overrides(),
        )
    printer = given.printer()
    code = printer.problems(report.problems)
    write_report(page, report)
    printer.value("quantize", report)
    details = "-v, or --report FILE.html" if page is None else str(page)
    counts = ("quantized", f"{report.counts.weights} weights")
    facts = [row for row in facts_of(report) if row[0] != "weights"]  # of integer products, which it has none of
    show_summary(printer, report, [counts, *facts, ("details", details)])
    if given[options.VERBOSE]:
        printer.line("")
        _show_figures(printer, report.model, None if report.metrics is None else report.metrics.llm)
        show_refusals(printer, report.refusals, verbose=True)
        printer.notes(report.notes, every=True)
    for line in _use(output):
        printer.line(line)
    return code


def _use(folder: Path) -> tuple[str, ...]:
    """Return the lines of Python that load a folder, for the program that it is for; none for a single model."""
    if (folder / "genai_config.json").is_file():
        return (
            "use it:",
            "  import onnxruntime_genai as og",
            f'  model = og.Model("{folder}"); tokenizer = og.Tokenizer(model)',
            "  generator = og.Generator(model, og.GeneratorParams(model))",
        )
    if (folder / "config.json").is_file():
        encoder = next(folder.rglob("encoder_model.onnx"), None)
        name = "ORTModelForCausalLM" if encoder is None else "ORTModelForSeq2SeqLM"
        if (folder / "preprocessor_config.json").is_file() and encoder is not None:
            name = "ORTModelForSpeechSeq2Seq"
        return (
            "use it:",
            f"  from optimum.onnxruntime import {name}",
            f'  model = {name}.from_pretrained("{folder}")',
        )
    return ()


def run_evaluate(given: Arguments) -> int:
    """Measure perplexity, distance from float, speed and memory."""
    from sbonnx.llm import DecoderLimits, evaluate
    from sbonnx.recipe import load
    from sbonnx.report.comparison import DecoderFigures
    from sbonnx.report.verdict import verdict_of

    text = _required_text(given)
    settings = load(None, overrides=given.overrides())
    evaluation = evaluate(
        given[SOURCE],
        text,
        against=given[AGAINST],
        **_names(given),
        window=settings.llm.window,
        tokens=settings.llm.tokens,
        adapter=given[ADAPTER],
        limits=DecoderLimits(settings.verify.max_perplexity, settings.verify.min_agreement),
        latency=not given[NO_LATENCY],
    )
    printer = given.printer()
    code = printer.problems(evaluation.problems)
    printer.value("llm-evaluate", evaluation)
    if evaluation.against:
        figures = DecoderFigures(llm=evaluation)
        printer.verdict(verdict_of(figures, problems=evaluation.problems))
    _show_figures(printer, str(given[SOURCE]), evaluation)
    for note in evaluation.notes:
        printer.note(note)
    return code


def run_adapt(given: Arguments) -> int:
    """Train adapters on a quantized decoder and evaluate it before and after."""
    from sbonnx.llm import adapt
    from sbonnx.qat import Settings
    from sbonnx.recipe import load

    output, text = required_output(given[OUTPUT]), _required_text(given)
    try:
        settings = Settings(**{row.name: given[row] for row in TRAINING_SETTINGS})
    except ValueError as error:
        raise RecipeError(f"--{error}") from error
    section = load(None, overrides=given.overrides(without=[options.DEVICE])).llm
    with closing(given.progress()) as progress:
        adapted = adapt(
            given[SOURCE],
            text,
            output=output,
            against=given[AGAINST],
            adapters=given[RANK],
            form=given[FORM],
            settings=settings,
            window=section.window,
            tokens=section.tokens,
            tokenizer=given[TOKENIZER],
            device=given[options.DEVICE] or "cpu",
            force=given[options.FORCE],
            latency=not given[NO_LATENCY],
            progress=progress,
        )
    printer = given.printer()
    code = printer.problems(adapted.after.problems)
    printer.value("llm-adapt", adapted)
    printer.facts(f"{given[SOURCE]}, before", _facts(adapted.before))
    _show_figures(printer, f"{output}, {adapted.weights} adapters", adapted.after)
    for note in adapted.after.notes:
        printer.note(note)
    printer.line(f"written: {output}")
    return code


def _required_text(given: Arguments) -> Path:
    text = given[TEXT]
    if text is None:
        raise DataError("--text is missing: give a .txt or .jsonl file, or a folder of them")
    return text


def _names(given: Arguments) -> dict[str, Any]:
    """Return tokenizer and caches of a single file, as `read_decoder` takes them."""
    return {"tokenizer": given[TOKENIZER], "past": given[PAST], "present": given[PRESENT]}


def _facts(figures: DecoderEvaluation | None) -> dict[str, object]:
    """Return the rows of an evaluation; none if there is no evaluation."""
    if figures is None:
        return {}
    compared, greedy, genai = figures.against is not None, figures.greedy, figures.genai
    float_bytes, own_bytes = figures.bytes
    float_memory, own_memory = figures.memory
    float_cache, own_cache = figures.cache_bytes
    late = "" if figures.late_kl is None else f", {figures.late_kl:.4g} in the last quarter of the windows"
    beside = f" ({figures.float_perplexity:.5g} float)" if compared else ""
    return {
        "perplexity": f"{figures.perplexity:.5g}{beside}, {figures.tokens:,} tokens",
        "KL divergence": f"{figures.kl:.4g} nats{late}" if compared else None,
        "same top token": f"{figures.agreement:.2%}" if compared else None,
        "greedy": f"{sum(greedy) / len(greedy):.3g} of {figures.continuation} tokens until the first difference, "
        f"mean of {len(greedy)} prompts, {sum(count == figures.continuation for count in greedy)} without any"
        if greedy
        else None,
        "through the caches": None
        if figures.cached_perplexity is None
        else f"perplexity {figures.cached_perplexity:.5g}, at once {figures.uncached_perplexity:.5g}, on a few windows",
        "size": _size(own_bytes) + (f" ({_size(float_bytes)} float)" if float_bytes is not None else ""),
        "caches": None
        if not own_cache
        else _size(own_cache) + " per token" + (f" ({_size(float_cache)} float)" if float_cache is not None else ""),
        "memory": None
        if own_memory is None
        else _size(own_memory) + (f" ({_size(float_memory)} float)" if float_memory is not None else ""),
        "onnxruntime-genai": None if genai is None else genai.error or f"generated {len(genai.tokens)} tokens",
    }


def _show_figures(printer: Printer, title: str, figures: DecoderEvaluation | None) -> None:
    """Print an evaluation."""
    from sbonnx.report.verdict import latency_text

    printer.facts(title, _facts(figures))
    rows = [
        (
            row.threads,
            row.prompt,
            row.first_token,
            row.float_first_token,
            row.tokens_per_second,
            row.float_tokens_per_second,
            None
            if row.ratio is None
            else latency_text(row.ratio, *(row.ratio_interval or (-math.inf, math.inf)), busy=row.busy),
        )
        for row in (() if figures is None else figures.speed)
    ]
    columns = ("threads", "prompt", "first token, ms", "float", "tokens/s", "float", "time of a token, of float")
    printer.table("speed", columns, rows)


def _decoder(given: Arguments) -> Decoder:
    from sbonnx.llm import read_decoder

    return read_decoder(given[SOURCE], **_names(given))


def _size(count: int) -> str:
    from sbonnx.system.sizes import size_text

    return size_text(count)


COMMANDS: Final = (
    Subcommand("inspect", "Show layers, bit widths, caches, ties and tokenizer.", INSPECT_OPTIONS, run_inspect),
    Subcommand(
        "quantize",
        "Quantize weights and caches. Writes a folder for the same program; texts are for rounding and evaluation.",
        QUANTIZE_OPTIONS,
        run_quantize,
    ),
    Subcommand(
        "evaluate",
        "Measure perplexity, agreement with float, tokens/s and memory.",
        EVALUATE_OPTIONS,
        run_evaluate,
    ),
    Subcommand(
        "adapt",
        "Train low-rank adapters (QLoRA). Branches of the file of a quantized decoder; needs torch.",
        ADAPT_OPTIONS,
        run_adapt,
    ),
)
