"""`QuantModel`: the stepwise quantization API of the ancestor (Sparsebit), for an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from sbonnx import graph as graphs
from sbonnx import profiling
from sbonnx.calib.data import dataset as datasets
from sbonnx.errors import DataError
from sbonnx.mermaid import mermaid
from sbonnx.pipeline import quantized_graph
from sbonnx.planning import Solution
from sbonnx.quant_model.controls import LayerControls
from sbonnx.quant_model.onnx_export import DynamicAxes, OnnxExport, write_onnx
from sbonnx.quant_model.pipeline_steps import Feeds
from sbonnx.quant_model.visitor import Hooks
from sbonnx.report.notebook import NotebookView
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from sbonnx.recipe.keywords import BackendForm, RecipeKeywords


from sbonnx.torchnet import torch_module


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor."""
    return hasattr(value, "detach") and hasattr(value, "cpu")


def as_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the tensors of a mapping to NumPy arrays."""
    return {name: value.detach().cpu().numpy() if is_tensor(value) else value for name, value in values.items()}


def as_tensors(values: Mapping[str, Any]) -> Any:
    """Convert a mapping to torch tensors: a single tensor for one value, else a tuple."""
    torch = torch_module()
    tensors = tuple(
        value if is_tensor(value) else torch.from_numpy(np.ascontiguousarray(value)) for value in values.values()
    )
    return tensors[0] if len(tensors) == 1 else tensors


def mse(quantized: Array, reference: Array) -> float:
    """Return the mean squared error (MSE)."""
    return float(np.mean((np.asarray(quantized, np.float64) - np.asarray(reference, np.float64)) ** 2))


class QuantModel(NotebookView, LayerControls):
    """Model that is quantized step by step: calibrate, compute scales, simulate, export.

        model = QuantModel("resnet.onnx", "qconfig.yaml")
        model.prepare_calibration()
        for feeds in samples:
            model(feeds)
        model.calc_qparams()
        model.set_quant(w_quant=True, a_quant=True)
        outputs = model(feeds)
        model.export_onnx("resnet.int8.onnx")

    The graph is simplified, fused and planned at construction. Calling the model runs it: in float until
    `set_quant`, then with weights and activations fake-quantized as in the exported file. Between
    `prepare_calibration` and `calc_qparams` each call also updates the observers. Holds onnxruntime sessions; use it
    as a context manager or call `close`.

    Args:
        model: path or ModelProto.
        config: recipe: path, "auto", nested dict, `Recipe`, or None for the backend's defaults.
        backend, overrides: as for `sbonnx.quantize`.
        custom_fuse_list: names of the fusions to run, from `sbonnx.patterns.FUSE` and "disable_unnecessary_quant".
            None: all. "fuse_bn" runs only if SCHEDULE.FUSE_BN is set.

    Raises:
        ModelError, RecipeError: see `sbonnx.pipeline.prepare`; MODE: dynamic cannot be simulated.
    """

    def __init__(
        self,
        model: Any,
        config: Any = None,
        *,
        backend: BackendForm | None = None,
        custom_fuse_list: Sequence[str] | None = None,
        **overrides: Unpack[RecipeKeywords],
    ) -> None:
        super().__init__(model, config, backend=backend, custom_fuse_list=custom_fuse_list, **overrides)
        self._trained: Any = None
        self.hooks = Hooks()

    @property
    def step_states(self) -> dict[str, str]:
        """State of calibration, simulation and training, for people."""
        weights, activations = self._quant
        on = " and ".join(name for name, flag in (("weights", weights), ("activations", activations)) if flag)
        return {
            "calibration": "running" if self._calibrator is not None else "done" if self.solution else "not yet",
            "simulated": on or "nothing: outputs are float",
            "training": "yes" if self._trained is not None else "no",
        }

    # --- running ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model and return its outputs by name; during calibration also update the observers.

            model({"input_ids": ids, "mask": mask})    # arrays by input name
            model(images)                              # an array, for a model with one input
            model(ids, mask), model(input_ids=ids)     # by position or by name

        If all inputs are torch tensors, the outputs are torch tensors too, as in the ancestor: a single tensor for one
        output, else a tuple. After `init_QAT` they run through the trained torch module, with gradients.

        Raises:
            DataError: the feeds do not fit the model.
        """
        given = [*args, *inputs.values()]
        tensors = bool(given) and all(map(is_tensor, given))
        feeds = self._named(args, inputs)
        if self._trained is not None:
            from sbonnx.qat.workflow import run_module

            outputs = run_module(self._trained, feeds, gradients=tensors)
            return as_tensors(outputs) if tensors else as_arrays(outputs)
        arrays = as_arrays(feeds) if isinstance(feeds, Mapping) else feeds
        graph = self.prepared.graph
        values = self._run(arrays, self.hooks.tensors(graph))
        if self.hooks:
            self.hooks.fire(graph, {**self._feeds(arrays), **values})
        outputs = {tensor.name: values[tensor.name] for tensor in graph.outputs}
        return as_tensors(outputs) if tensors else outputs

    forward = __call__

    def _named(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> Feeds:
        """Map positional and keyword inputs to input names; a single mapping or array is passed through."""
        if len(args) == 1 and not inputs:
            return args[0]  # type: ignore[no-any-return]
        names = [tensor.name for tensor in self.prepared.graph.inputs]
        if len(args) > len(names):
            raise DataError(f"the model has {len(names)} inputs ({', '.join(names)}), and {len(args)} were given")
        return {**dict(zip(names, args, strict=False)), **inputs}

    # --- torch's own calls --------------------------------------------------------------------------

    def to(self, device: Any) -> Self:
        """Run on another device: "cpu", "cuda", "cuda:1", or a torch.device.

        Raises:
            DeviceError: the device is not available.
        """
        self._move(str(device))
        if self._trained is not None:
            self._trained.to(device)
        return self

    def cuda(self, device: int | None = None) -> Self:
        """Run on a GPU, by default the first one. Raises: as `to`."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    def cpu(self) -> Self:
        """Run on the CPU."""
        return self.to("cpu")

    def train(self, mode: bool = True) -> Self:
        """Put the torch module of `init_QAT` into training mode. No-op before `init_QAT`."""
        if self._trained is not None:
            self._trained.train(mode)
        return self

    def eval(self) -> Self:
        """Put the torch module of `init_QAT` into evaluation mode."""
        return self.train(False)

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            """Forward attributes of the torch module of `init_QAT`: parameters, state_dict, zero_grad, ..."""
            trained = self.__dict__.get("_trained")
            if trained is None or name.startswith("_"):
                hint = "; call init_QAT() for what belongs to training" if name in TORCH_CALLS else ""
                raise AttributeError(f"QuantModel has no attribute '{name}'{hint}")
            return getattr(trained, name)

    # --- training -----------------------------------------------------------------------------------

    def init_QAT(self, weights: str | None = None, activations: str | None = None, *, device: str | None = None) -> Any:
        """Convert the calibrated model to a trainable torch module, initialized with the calibrated scales.

        If `calc_qparams` has not been called yet, it is called on the recorded feeds. Weights and activations are both
        quantized. From here on the model uses that module: feeds run through it, `parameters`, `train` and
        `state_dict` are those of the module, and `export_onnx` writes the learned weights and scales.

        Args:
            weights, activations, device: see `sbonnx.qat.prepare`; default device: the device of the recipe.

        Returns:
            The `torch.nn.Module`, for `sbonnx.qat.train` and `sbonnx.qat.export`.

        Raises:
            LifeCycleError: there are no scales, and no feeds to compute them from.
            ModelError, RecipeError, DeviceError: see `sbonnx.qat.prepare`.
        """
        from sbonnx.qat.module import keep_source, trainable

        if self.solution is None and self._fed is not None and self._fed.count:
            self.calc_qparams()
        solution = self._solved("init_QAT")
        self.set_quant(w_quant=True, a_quant=True)
        place = device or self.prepared.recipe.device
        self._trained = trainable(self.prepared, solution, weights=weights, activations=activations, device=place)
        keep_source(self._trained, self._model)
        return self._trained

    def prepare_calibration(self) -> None:
        """Reset the observers, discard trained state, and start observing.

        Until `calc_qparams`, feeds are buffered (beyond 64 MiB on disk), because ``asym`` runs them again.
        """
        self._trained = None
        super().prepare_calibration()

    def _now(self, step: str) -> tuple[Prepared, Solution]:
        """Return plan and quantization parameters, including trained ones."""
        solution = self._solved(step)
        if self._trained is None:
            return self.prepared, solution
        from sbonnx.qat.workflow import learned

        return learned(self._trained)

    # --- looking ------------------------------------------------------------------------------------

    def get_quantization_error(
        self,
        data: Any,
        checker: profiling.Checker = mse,
        is_async: bool = True,
        *,
        part: profiling.Part = "both",
    ) -> dict[str, float]:
        """Compute the error of each quantized node's output against float, by node name, including branches of If.

        Args:
            data: feeds, any reader.
            checker: a function of (quantized output, float output) that returns a number, called for each feed and
                averaged: of numpy arrays, or of torch tensors, such as torch.nn.functional.mse_loss; or the name of a
                metric over all feeds: "mse", "sqnr" (decibel), "cosine", "max", "kl".
            is_async: True: isolated error (only this node is quantized); False: accumulated error (all nodes before
                it are quantized as well).
            part: "both", "weights" or "activations": what is quantized. Nodes without such sites are omitted.

        Raises:
            LifeCycleError: there are no scales yet.
            RecipeError: unknown metric.
        """
        prepared, solution = self._now("get_quantization_error")
        samples = datasets.read(data, prepared.graph)
        return profiling.node_errors(
            prepared.graph,
            prepared.plan,
            solution,
            samples,
            checker=checker,
            alone=is_async,
            part=part,
            device=prepared.recipe.device,
        )

    def profile(self, data: Any, checker: profiling.Checker = "sqnr", *, limit: int | None = None) -> profiling.Profile:
        """Measure the error of each node: isolated, by weights only, by activations only, and accumulated.

        Args:
            data: feeds, any reader; the first `limit` are used.
            checker: see `get_quantization_error`.

        Raises:
            LifeCycleError: there are no scales yet.
            RecipeError: unknown metric.
        """
        prepared, solution = self._now("profile")
        recipe = prepared.recipe
        return profiling.losses(
            prepared.graph,
            prepared.plan,
            solution,
            datasets.read(data, prepared.graph),
            checker=checker,
            options=profiling.WalkOptions(limit, recipe.device, recipe.calibration.memory),
        )

    def dump_mermaid(self, file: str | os.PathLike[str] | TextIO, losses: Mapping[str, float] | None = None) -> None:
        """Write the graph as a Mermaid flow chart; the quantized graph once there are scales.

        Args:
            file: a path, or an open text file.
            losses: loss by node name, from `get_quantization_error` with a metric where higher is worse, or from
                ``model.profile(data).losses()``. These nodes are coloured from white (0) to red (the largest).
        """
        graph = self.prepared.graph
        if self.solution is not None:
            prepared, solution = self._now("dump_mermaid")
            graph = quantized_graph(prepared, solution)
        chart = mermaid(graph, losses)
        if isinstance(file, (str, os.PathLike)):
            graphs.write_text(Path(file), chart)
        else:
            file.write(chart)

    export_mermaid = dump_mermaid

    # --- export -------------------------------------------------------------------------------------

    def export_onnx(  # noqa: PLR0913 - the ancestor's signature
        self,
        dummy_data: Any,
        name: str | os.PathLike[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        opset_version: int | None = None,
        verbose: bool = False,
        extra_info: bool | str = False,
        *,
        force: bool = False,
    ) -> Path | None:
        """Write the quantized model: ``export_onnx("q.onnx")``, or as the ancestor ``export_onnx(images, "q.onnx")``.

        Args:
            dummy_data: the path; or one feed (array, tensor, tuple of them, or dict by name), before the path. Its
                sizes replace the dynamic dimensions of the inputs.
            name: the path, if the first argument is a feed.
            input_names, output_names: new names, in order; the remaining ones are unchanged.
            dynamic_axes: {name: {axis: name of the axis}} or {name: [axes]}: dynamic axes of inputs and outputs. If
                the model has a fixed size there, the model is run with another size before the file is written.
            opset_version: opset of the file; None: the opset of the model, or the one its integer types require.
            verbose: print the graph.
            extra_info: True or "sparsebit" writes a second file ``<name>_extra.onnx`` whose Q/DQ nodes carry the
                ancestor's literal ``bits`` attribute. No runtime loads that file, because the attribute is not valid
                ONNX. (The first file has the same value, validly, in ``__bits``.)
            force: overwrite.

        Returns:
            The path of the second file, or None.

        Raises:
            LifeCycleError: there are no scales yet.
            DataError, RecipeError: `dummy_data`, a name or an axis does not fit the model.
            ModelError: the opset is too old for the integer types, or an axis cannot be made dynamic.
            OutputError: the file cannot be written there.
        """
        prepared, solution = self._now("export_onnx")
        feeds = None
        if name is None:
            if not isinstance(dummy_data, (str, os.PathLike)):
                raise DataError("export_onnx() needs a path: export_onnx('q.onnx'), or export_onnx(images, 'q.onnx')")
            name = dummy_data
        elif dummy_data is not None:
            args = dummy_data if isinstance(dummy_data, tuple) else (dummy_data,)
            named = self._named(args, {})
            feeds = self._feeds(as_arrays(named) if isinstance(named, Mapping) else named)
        export = OnnxExport(
            Path(name),
            feeds=feeds,
            input_names=input_names or (),
            output_names=output_names or (),
            dynamic_axes=dynamic_axes or {},
            opset=opset_version,
            verbose=verbose,
            extra_info=bool(extra_info),
            force=force,
        )
        return write_onnx(quantized_graph(prepared, solution), export)


TORCH_CALLS = frozenset(
    {"parameters", "named_parameters", "state_dict", "load_state_dict", "zero_grad", "buffers", "modules", "graph"}
)
"""Methods of torch.nn.Module that the ancestor's examples call on a QuantModel during training."""


class QuantizationErrorProfiler:
    """Measures the error of each quantized node of one model.

    Args:
        model: a calibrated model.
    """

    def __init__(self, model: QuantModel) -> None:
        self.model = model

    def apply(self, data: Any, checker: profiling.Checker = mse, is_async: bool = True) -> dict[str, float]:
        """Call `QuantModel.get_quantization_error`."""
        return self.model.get_quantization_error(data, checker, is_async)
