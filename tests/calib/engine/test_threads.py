"""Work on several samples at a time."""

from __future__ import annotations

import threading
import time

import pytest
from threadpoolctl import threadpool_info

from sbonnx.calib.engine.threads import TRIED, in_order, one_blas_thread


@pytest.mark.parametrize("count", [0, 3, TRIED, 40])
@pytest.mark.parametrize(("least", "seconds"), [(0.0, 0.0), (0.001, 0.002), (0.1, 0.0)])
def test_results_come_in_the_order_of_the_items(count: int, least: float, seconds: float) -> None:
    """Whoever does them: all are done here where they take less than they must; else other threads take part."""
    doers = set()

    def work(item: int) -> int:
        doers.add(threading.get_ident())
        time.sleep(seconds)
        return item * item

    found = list(in_order(work, iter(range(count)), 3, least=least))
    assert found == [(item, item * item) for item in range(count)]
    others = doers - {threading.get_ident()}
    assert bool(others) is (seconds >= least and count > (TRIED if least else 0))


def test_one_blas_thread() -> None:
    import numpy as np

    np.ones((2, 2)) @ np.ones((2, 2))
    before = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
    with one_blas_thread():
        assert {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"} <= {1}
    assert [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"] == before
