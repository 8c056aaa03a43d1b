"""A whole module of `prepare` in DistributedDataParallel: two processes against one with both halves of the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from sbonnx import qat  # noqa: E402
from sbonnx.qat.module import origin_of  # noqa: E402
from tests.qat import distributed_worker as worker  # noqa: E402
from tests.support.models import batchnorm, model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
CASES = ("uniform frozen", "lsq frozen", "lsq live")
"""How activations learn, and whether batch norms keep their statistics."""

TEXT = """agraph (float[n,3,8,8] x) => (float[n,2,6,6] y) {
    a = Conv <pads = [1,1,1,1]> (x, w1)
    b = BatchNormalization (a, n_gamma, n_beta, n_mean, n_var)
    c = Relu (b)
    y = Conv (c, w2, b2)
}"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what both processes wrote."""
    folder = tmp_path_factory.mktemp("distributed")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 8, 8)).astype(np.float32)
    weights: dict[str, Any] = {"w1": (4, 3, 3, 3), "w2": (2, 4, 3, 3), "b2": 2, **batchnorm("n", 4)}
    proto = model(TEXT, **weights)
    for activations in ("uniform", "lsq"):
        module = qat.prepare(
            proto, [{"x": x}], backend="virtual", bits="w4a8", fuse_bn=False, weights="lsq", activations=activations
        )
        torch.save(module, folder / f"{activations}.pt")
    with torch.no_grad():
        target = qat.float_twin(module)(x=torch.from_numpy(x))["y"].numpy()
    np.savez(folder / "feeds.npz", x=x, target=target)
    _run(folder)
    return folder


def _run(folder: Path) -> None:
    """Both processes, with a limit of time; none is left behind."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", worker.__file__, str(folder), str(rank), "2", *CASES],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)


def alone(folder: Path, case: str) -> tuple[dict[str, Any], Any]:
    """Gradients of the first step, and the module, of one process with the doubled batch."""
    module = worker.begun(folder, case)
    with np.load(folder / "feeds.npz") as feeds:
        x, target = (torch.from_numpy(feeds[name]) for name in ("x", "target"))
    return worker.steps(module, x, target), module.eval()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_processes_have_the_same_gradients_and_parameters(trained: Path, case: str) -> None:
    (gradients, state), (other_gradients, other_state) = (torch.load(trained / f"{case}_{rank}.pt") for rank in (0, 1))
    assert gradients.keys() == other_gradients.keys() and any(one.any() for one in gradients.values())
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name
        assert torch.equal(state[name], other_state[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("frozen")])
def test_gradients_are_those_of_the_doubled_batch(trained: Path, case: str) -> None:
    """The scale of an activation learns by 1 / sqrt(values in it), and each process sees half of them."""
    found, _ = torch.load(trained / f"{case}_0.pt")
    expected, module = alone(trained, case)
    sites = origin_of(module).sites
    of_activations = {f"{name}.scale" for name, some in sites.items() if some[0].role == "activation"}
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        factor = 2**0.5 if name in of_activations else 1.0
        torch.testing.assert_close(found[name], factor * gradient, rtol=1e-4, atol=1e-6)


def test_training_ends_where_one_process_ends(trained: Path) -> None:
    """Where nothing depends on how large a batch is: norms frozen, scales of activations fixed."""
    _, state = torch.load(trained / "uniform frozen_0.pt")
    _, module = alone(trained, "uniform frozen")
    begun = worker.begun(trained, "uniform frozen").state_dict()
    assert any(not torch.equal(value, begun[name]) for name, value in state.items())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_wrapper_is_exported(trained: Path, case: str) -> None:
    """What the first process wrote through its wrapper is what its parameters give without one."""
    _, state = torch.load(trained / f"{case}_0.pt")
    module = worker.begun(trained, case)
    module.load_state_dict(state)
    path = trained / f"{case}_alone.onnx"
    qat.export(module.eval(), path, verify=False)
    assert onnx.load(str(path)) == onnx.load(str(trained / f"{case}.onnx"))
