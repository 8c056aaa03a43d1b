"""`QuantModel`: the pipeline step by step, with the ancestor's life cycle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sbonnx import graph as graphs
from sbonnx import profile
from sbonnx.calib import data as datasets
from sbonnx.calib.asym import Asym
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.extremes import with_magnitudes
from sbonnx.calib.forward import Forward
from sbonnx.calib.kept import Kept
from sbonnx.calib.progress import Silent
from sbonnx.calib.tuning import Reference, tune_norms
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.mermaid import mermaid
from sbonnx.ops import QDQ
from sbonnx.plan import Solution
from sbonnx.prepare import Source, prepare, read_recipe
from sbonnx.qdq import BITS
from sbonnx.spec import Array

Feeds = Mapping[str, Array] | Array
EXTRA_SUFFIX = "_extra"
"""Added to the name of the file that carries the ancestor's literal ``bits``."""


class LifeCycleError(SbonnxError):
    """A step was asked for before the one it needs."""


def mse(quantized: Array, reference: Array) -> float:
    """Mean squared difference."""
    return float(np.mean((np.asarray(quantized, np.float64) - np.asarray(reference, np.float64)) ** 2))


class QuantModel:
    """A model on its way from float to quantized.

        model = QuantModel("resnet.onnx", "qconfig.yaml")
        model.prepare_calibration()
        for feeds in samples:
            model(feeds)
        model.calc_qparams()
        model.set_quant(w_quant=True, a_quant=True)
        outputs = model(feeds)
        model.export_onnx("resnet.int8.onnx")

    The graph is simplified, fused and planned at construction. Calling the model runs it: in float until
    `set_quant`, then with weights and activations rounded as the exported file will round them. Between
    `prepare_calibration` and `calc_qparams` each call is also observed. Holds onnxruntime sessions; use it
    as a context manager or call `close`.

    Args:
        model: path or ModelProto.
        config: recipe: path, "auto", nested dict, `Recipe`, or None for the backend's defaults.
        backend, overrides: as for `sbonnx.quantize`.

    Raises:
        ModelError, RecipeError: see `sbonnx.prepare.prepare`; MODE: dynamic cannot be simulated.
    """

    def __init__(self, model: Source, config: Any = None, *, backend: str | None = None, **overrides: Any) -> None:
        recipe, rules = read_recipe(config, backend, overrides)
        if recipe.mode == "dynamic":
            why = "the scales of activations are computed as the exported file runs"
            raise RecipeError(f"QuantModel cannot simulate MODE: dynamic, {why}. Use sbonnx.quantize, run its result")
        self.prepared = prepare(model, recipe, rules)
        self._model = model
        self.solution: Solution | None = None
        self._calibrator: Calibrator | None = None
        self._fed: Kept | None = None
        self._tuning: Kept | None = None
        self._quant = (False, False)
        self._forward: Forward | None = None

    def __enter__(self) -> QuantModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all sessions and of what was fed. The model can be used again; sessions are opened anew."""
        if self._forward is not None:
            self._forward.close()
            self._forward = None
        if self._calibrator is not None:
            self._calibrator.close()
            self._calibrator = None
        if self._fed is not None:
            self._fed.close()
            self._fed = None
        if self._tuning is not None:
            self._tuning.close()
            self._tuning = None

    def _feeds(self, feeds: Feeds) -> dict[str, Array]:
        return next(iter(datasets.read([feeds], self.prepared.graph)))

    # --- calibration --------------------------------------------------------------------------------

    def prepare_calibration(self) -> None:
        """Start observing: forget what was observed before.

        From here to `calc_qparams` feeds are kept, past 64 MiB on disk: ``asym`` walks them again.
        """
        self.close()
        self.solution = None
        self._quant = (False, False)
        recipe = self.prepared.recipe
        self._calibrator = Calibrator(
            self.prepared.graph, self.prepared.plan, device=recipe.device, memory=recipe.calibration.memory
        )
        self._fed = Kept(self.prepared.graph)

    def _equalize(self, fed: Kept, calibrator: Calibrator) -> Calibrator:
        """What EQUALIZE asks for on what was fed; then ranges are those of the new graph, and measured again."""
        equalized = self.prepared.equalized(fed.dataset())
        if equalized is self.prepared:
            return calibrator
        calibrator.close()
        self.prepared, recipe = equalized, equalized.recipe
        self._calibrator = Calibrator(
            equalized.graph, equalized.plan, device=recipe.device, memory=recipe.calibration.memory
        )
        self._calibrator.observe_all(fed.dataset(), Silent())
        return self._calibrator

    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> Solution:
        """Turn what was fed into scales, zero points and codes.

        Args:
            asym: walk what was fed once more, layer by layer, with everything upstream quantized. The ranges of
                activations are measured there (in the ancestor only AdaRound saw that stream, and ranges stayed those
                of the float one: CALIBRATION.ASYM.RANGES: false), and weights are rounded there.
            w_quant, a_quant: what `asym` quantizes upstream: weights, activations. With neither, nothing changes.

        Raises:
            LifeCycleError: `prepare_calibration` was not called.
            DataError: nothing was fed.
            NumericError: NaN or Inf in an activation or weight.
        """
        if not self.prepared.needs_data and (self._fed is None or not self._fed.count):
            self.close()
            told = self.prepared.equalized(None)  # says what it would have measured
            self.prepared = replace(told, refusals=tuple(dict.fromkeys(told.refusals)))
            self.solution = self.prepared.corrected(self.prepared.without_data())
            return self.solution
        if self._calibrator is None or self._fed is None:
            raise LifeCycleError("call prepare_calibration() and run some samples before calc_qparams()")
        calibrator = self._equalize(self._fed, self._calibrator)
        solve = self.prepared.round
        wishes = self.prepared.recipe.calibration.asym
        chosen = Asym(weights=w_quant, activations=a_quant, ranges=wishes.ranges, rounding=wishes.rounding)
        rounding = self.prepared.reconstruction
        if rounding is not None:
            stream = chosen if asym else self.prepared.asym
            solution = calibrator.finish_rounding(rounding, stream, self._fed.dataset(), solve, Silent())
        elif asym:
            solution = calibrator.finish_asym(chosen, self._fed.dataset(), solve, Silent())
        else:
            solution = calibrator.finish(solve)
        recipe = self.prepared.recipe
        solution = with_magnitudes(
            solution,
            self.prepared.graph,
            self.prepared.plan,
            self._fed.dataset(),
            device=recipe.device,
            memory=recipe.calibration.memory,
        )
        self.close()
        self.solution = self.prepared.corrected(solution)
        return self.solution

    @contextmanager
    def batchnorm_tuning(self, reference: Reference = "float") -> Iterator[None]:
        """Batch norms get the statistics of the quantized network on what is fed inside, when it is left.

            with model.batchnorm_tuning():
                for feeds in samples:
                    model(feeds)

        Everything before a batch norm is quantized and tuned when it is measured, whatever `set_quant` says. Scales of
        weights and biases change, codes of weights do not. Nothing changes where the block is left by an exception.

        Args:
            reference: "float": tensors get the mean and variance that they have in the float network on the same
                feeds; "norm": those that gamma and beta stand for, as in the ancestor, which takes how the feeds
                differ from the training data for an error as well.

        Raises:
            LifeCycleError: there are no scales yet.
            DataError: nothing was fed.
            NumericError: see `tune_norms`.
        """
        solution = self._solved("batchnorm_tuning")
        self._tuning = kept = Kept(self.prepared.graph)
        try:
            yield
            recipe = self.prepared.recipe
            made = tune_norms(
                self.prepared.graph,
                self.prepared.plan,
                solution,
                kept.dataset(),
                reference=reference,
                device=recipe.device,
                threads=recipe.calibration.threads,
                memory=recipe.calibration.memory,
            )
        finally:
            kept.close()
            self._tuning = None
        self.solution = made
        self.set_quant(*self._quant)

    # --- running ------------------------------------------------------------------------------------

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch what a call applies: rounded weights, rounded activations.

        Raises:
            LifeCycleError: there are no scales yet.
        """
        if (w_quant or a_quant) and self.solution is None:
            raise LifeCycleError("call calc_qparams() before set_quant(): there are no scales yet")
        if self._forward is not None:
            self._forward.close()
            self._forward = None
        self._quant = (w_quant, a_quant)

    def __call__(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name; observed too, while calibrating.

        Args:
            feeds: by input name, or the array itself for a model with one input.

        Raises:
            DataError: the feeds do not fit the model.
        """
        values = self._feeds(feeds)
        if self._tuning is not None:
            self._tuning.add(values)
        if self._calibrator is not None and self._fed is not None:
            outputs = dict(self._calibrator.observe(values))
            self._fed.add(values)
            return outputs
        if self._forward is None:
            w_quant, a_quant = self._quant
            self._forward = self._open_forward(w_quant, a_quant)
        return self._forward(values)

    def _open_forward(self, w_quant: bool, a_quant: bool, tensors: Iterable[str] = ()) -> Forward:
        solution = self.solution or Solution({}, {}, {})
        return Forward(
            self.prepared.graph,
            self.prepared.plan,
            solution,
            w_quant=w_quant,
            a_quant=a_quant,
            device=self.prepared.recipe.device,
            tensors=list(tensors),
        )

    # --- looking ------------------------------------------------------------------------------------

    def init_QAT(self, weights: str | None = None, activations: str | None = None, *, device: str = "cpu") -> Any:
        """The calibrated network as a `torch.nn.Module` to train, for `sbonnx.qat.export`; see `sbonnx.qat.prepare`.

        Raises:
            LifeCycleError: `calc_qparams` was not called.
            ModelError, RecipeError, DeviceError: see `sbonnx.qat.prepare`.
        """
        from sbonnx.qat.api import from_calibration

        solution = self._solved("init_QAT")
        return from_calibration(
            self.prepared, solution, self._model, weights=weights, activations=activations, device=device
        )

    def get_quantization_error(
        self,
        data: Any,
        checker: profile.Checker = mse,
        is_async: bool = True,
        *,
        part: profile.Part = "both",
    ) -> dict[str, float]:
        """Error of each quantized node's output against float: by node name, branches of If included.

        Args:
            data: feeds, any reader.
            checker: any function of (quantized output, float output), called a feed and averaged; or the name of a
                measure over all feeds: "mse", "sqnr" (decibel), "cosine", "max", "kl".
            is_async: each node alone; else with all the error gathered before it.
            part: "both", "weights" or "activations": what is quantized. Nodes that have none of it are left out.

        Raises:
            LifeCycleError: there are no scales yet.
            RecipeError: there is no such measure.
        """
        solution = self._solved("get_quantization_error")
        samples = datasets.read(data, self.prepared.graph)
        graph, plan = self.prepared.graph, self.prepared.plan
        device = self.prepared.recipe.device
        return profile.node_errors(
            graph, plan, solution, samples, checker=checker, alone=is_async, part=part, device=device
        )

    def profile(self, data: Any, checker: profile.Checker = "sqnr", *, limit: int | None = None) -> profile.Profile:
        """What each node loses alone, by its weights, by its activations, and with all that was lost before it.

        Args:
            data: feeds, any reader; the first `limit` are used.
            checker: see `get_quantization_error`.

        Raises:
            LifeCycleError: there are no scales yet.
            RecipeError: there is no such measure.
        """
        solution = self._solved("profile")
        samples = datasets.read(data, self.prepared.graph)
        recipe = self.prepared.recipe
        return profile.losses(
            self.prepared.graph,
            self.prepared.plan,
            solution,
            samples,
            checker=checker,
            limit=limit,
            device=recipe.device,
            memory=recipe.calibration.memory,
        )

    def dump_mermaid(self, path: str | os.PathLike[str], losses: Mapping[str, float] | None = None) -> None:
        """Write the graph as a Mermaid flow chart: the quantized one once there are scales.

        Args:
            losses: by node name, such as `get_quantization_error` gives them with a measure of which more is worse,
                or ``model.profile(data).losses()``: those nodes are coloured from white (0) to red (the largest).
        """
        graph = self.prepared.graph if self.solution is None else self.prepared.quantized(self.solution)
        graphs.write_text(Path(path), mermaid(graph, losses))

    # --- export -------------------------------------------------------------------------------------

    def export_onnx(
        self, path: str | os.PathLike[str], *, extra_info: bool | str = False, force: bool = False
    ) -> Path | None:
        """Write the quantized model.

        Args:
            path: where to.
            extra_info: True or "sparsebit" writes a second file ``<name>_extra.onnx`` whose Q/DQ nodes carry the
                ancestor's literal ``bits`` attribute. No runtime loads that file: the attribute is not legal ONNX.
                (The first file says the same, legally, in ``__bits``.)
            force: overwrite.

        Returns:
            The path of the second file, or None.

        Raises:
            LifeCycleError: there are no scales yet.
            OutputError: the file cannot be written there.
        """
        solution = self._solved("export_onnx")
        target = Path(path)
        graph = self.prepared.quantized(solution)
        graphs.save(graph, target, force=force)
        if not extra_info:
            return None
        for _, body in graphs.query.scopes(graph):
            for node in body.nodes:
                if node.op in QDQ and BITS in node.attrs:
                    node.attrs["bits"] = node.attrs[BITS]
        extra = target.with_name(f"{target.stem}{EXTRA_SUFFIX}{target.suffix}")
        graphs.save(graph, extra, force=force)
        return extra

    def _solved(self, step: str) -> Solution:
        if self.solution is None:
            raise LifeCycleError(f"call calc_qparams() before {step}(): there are no scales yet")
        return self.solution
