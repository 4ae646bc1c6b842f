"""Observers see a cell and its operations, and the core knows none of them."""

from __future__ import annotations

import numpy as np

from nbparallel.session import Session

pytest_plugins = ["tests.harness.sessions"]
COUNTED = "tests.distributed.runtime.counted_bytes"


def test_a_module_that_observes_cells(three_ranks: Session) -> None:
    """It is named, and nothing else: two of them see the same cell, and the next cell is not observed."""
    names = {"np": np, "shared": np.zeros(12)}
    source = "x = np.ones(4)\nall_reduce(x)\nall_reduce(x)\nsend(x, (rank + 1) % 3)\nrecv().nbytes"
    result = three_ranks.run(source, namespace=names, share=["shared"], observers=[COUNTED])
    assert result.findings[COUNTED] == {"all_reduce": 3 * 64, "send": 3 * 32}
    assert list(result.values) == [32] * 3
    both = three_ranks.run(
        source + "\nshared[0] = rank", namespace=names, observers=[COUNTED], check_races=True
    )
    assert both.findings[COUNTED] == result.findings[COUNTED]
    assert both.races[0].array == "shared"
    assert not three_ranks.run(source, namespace=names).findings
