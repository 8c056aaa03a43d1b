"""Fixtures of the tests of clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.batch.clusters import Cluster


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two workers, of which one has a GPU, as it says.

    Of one module: three idle processes of a cluster take about a tenth of a core.
    """
    from tests.batch.clusters import GIB, Cluster  # skips where Dask is missing

    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.add("plain", "--resources", f"MEMORY={GIB}")
        made.add("graphic", "--resources", f"MEMORY={2 * GIB} GPU=1")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a batch that the local engine ran."""
    from sbonnx.batch.engine import LocalEngine
    from sbonnx.batch.jobs.job import Places
    from tests.batch.clusters import Seen, steps_in

    output = tmp_path_factory.mktemp("alone")
    found = LocalEngine(2).run(steps_in(output), Places(output), Seen())
    assert {one.status for one in found.values()} == {"done"}
    return output
