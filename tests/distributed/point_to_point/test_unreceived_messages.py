"""What an operation leaves behind when it does not end as it should: nothing that misleads the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [3, 3000])
def test_floating_point_errors_end_no_operation(ranks: Callable[..., list[Any]], count: int) -> None:
    """`numpy.seterr` on one rank changes nothing: all get the same result, and go on."""

    def work(c: Communicator) -> Any:
        x = np.full(count, 1e308)
        if c.rank == 0:
            np.seterr(all="raise")
        c.all_reduce(x)
        y = np.ones(count)
        c.all_reduce(y)
        return bool(np.isinf(x).all()), float(y[0])

    assert ranks(3, work) == [(True, 3.0)] * 3
