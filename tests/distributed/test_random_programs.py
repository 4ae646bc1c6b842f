"""Random correct programs run through: no false alarm, right results (F32)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator

CHANCES = [0.05, 0.3, 0.2, 0.2, 0.15, 0.07, 0.03]


def program(c: Communicator, operations: int, seed: int) -> int:
    """Run a random program that is the same on all ranks; returns how many operations were right."""
    n, rng = c.world_size, np.random.default_rng(seed)
    mine = np.random.default_rng([seed, c.rank])
    for step in range(operations):
        kind = int(rng.integers(8))
        size = int(
            rng.choice([0, 1, 3, 100, 1500, 10_000, 80_000], p=[0.05, 0.3, 0.2, 0.2, 0.15, 0.07, 0.03])
        )
        root, tag = int(rng.integers(n)), int(rng.integers(3))
        if mine.random() < 0.01:
            sum(range(int(mine.integers(20_000))))  # ranks drift apart
        x = np.full(size, c.rank + step, "f8")
        if mine.random() < 0.3:
            x = c._member.store.share(x)
        if kind in (0, 1):
            c.all_reduce(x)
            assert (x == sum(range(n)) + n * step).all()
        elif kind == 2:
            assert c.all_reduce(c.rank + step, "max") == n - 1 + step
        elif kind == 3:
            c.barrier()
        elif kind == 4:
            c.broadcast(x, src=root)
            assert (x == root + step).all()
        elif kind == 5:
            assert c.broadcast([step, size] if c.rank == root else None, src=root) == [step, size]
        elif kind == 6:
            c.send(x, (c.rank + 1) % n, tag=tag)
            assert (c.recv(src=(c.rank - 1) % n, tag=tag) == (c.rank - 1) % n + step).all()
        elif c.rank == root:
            values = {c.recv(tag=7 + step) for _ in range(n - 1)}
            assert values == {r * 1000 + step for r in range(n) if r != root}
        else:
            c.send(c.rank * 1000 + step, root, tag=7 + step)
    return operations


@pytest.mark.fault("F32")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize(("n", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_random_programs(ranks: Any, n: int, seed: int) -> None:
    """5,000 random correct operations give right results and no error."""
    assert set(ranks(n, lambda c: program(c, 1700, seed), seconds=50)) == {1700}


@pytest.mark.stress
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("seed", range(6))
def test_many_random_programs(ranks: Any, seed: int) -> None:
    """100,000 random correct operations, with spinning and without."""
    for n, cpus in ((2, 2), (2, 1), (3, 4), (4, 2)):
        assert set(ranks(n, lambda c: program(c, 4200, seed), usable_cpus=cpus, seconds=200)) == {4200}
