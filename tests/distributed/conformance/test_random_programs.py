"""Random correct programs run through: no false alarm, right results (F32)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of

SIZES = [0, 1, 3, 100, 1500, 10_000, 80_000]
CHANCES = [0.05, 0.3, 0.2, 0.2, 0.15, 0.07, 0.03]
KINDS = (
    "scan",
    "exscan",
    "maxloc",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "list",
    "view",
    "object",
)


def movement(c: Communicator, rng: np.random.Generator, kind: str, step: int, shared: bool) -> None:
    """Call one collective in the world or a random group, and compare with the sequential model."""
    members = list(range(c.world_size))
    group = None
    if rng.random() < 0.4:
        size = int(rng.integers(1, c.world_size + 1))
        members = sorted(rng.choice(c.world_size, size, replace=False).tolist())
        group = c.new_group(members)
    n, size, root = len(members), int(rng.choice(SIZES, p=CHANCES)), members[int(rng.integers(len(members)))]
    if c.rank not in members:
        return
    at = members.index(c.rank)
    inputs = {r: np.arange(size, dtype="f8") * (r + 1) + step for r in members}
    x = inputs[c.rank].copy()
    if shared or kind == "view":
        x = context_of(c).store.share(x)
    total = sum(inputs.values())
    parts = {r: np.array_split(inputs[r], n) for r in members}
    if kind == "reduce":
        found = c.reduce(x, root, group=group)
        assert (found is None) == (c.rank != root)
        assert np.array_equal(x, total if c.rank == root else inputs[c.rank])
    elif kind == "scan":
        assert c.scan(x, group=group) is x
        assert np.array_equal(x, sum(inputs[r] for r in members[: at + 1]))
    elif kind == "exscan":
        assert c.exscan(x, group=group) is (x if at else None)
        assert np.array_equal(x, sum(inputs[r] for r in members[:at]) if at else inputs[c.rank])
    elif kind == "maxloc":
        value, where = c.maxloc(x, group=group)
        assert np.array_equal(value, inputs[members[-1]])
        assert (where[1:] == members[-1]).all()  # all first elements are equal
        assert (where[:1] == members[0]).all()
    elif kind == "reduce_scatter":
        assert np.array_equal(c.reduce_scatter(x, group=group), np.array_split(total, n)[at])
    elif kind in ("all_gather", "view"):
        found = c.all_gather(x, group=group, view=kind == "view")
        assert all(np.array_equal(found[i], inputs[r]) for i, r in enumerate(members))
    elif kind == "gather":
        found = c.gather(x, dst=root, group=group)
        assert found is None or all(np.array_equal(found[i], inputs[r]) for i, r in enumerate(members))
    elif kind == "scatter":
        found = c.scatter(x if c.rank == root else None, src=root, group=group)
        assert np.array_equal(found, parts[root][at])
    elif kind == "all_to_all":
        found = c.all_to_all(x, group=group)
        assert all(np.array_equal(found[i], parts[r][at]) for i, r in enumerate(members))
    elif kind == "list":
        outputs = [np.empty(size) for _ in members]
        c.all_gather(outputs, x, group=group)
        assert all(np.array_equal(outputs[i], inputs[r]) for i, r in enumerate(members))
    else:
        assert c.all_gather({"step": (step, c.rank)}, group=group) == [{"step": (step, r)} for r in members]


def program(c: Communicator, operations: int, seed: int) -> int:
    """Run a random program that is the same on all ranks; returns how many operations were right."""
    n, rng = c.world_size, np.random.default_rng(seed)
    mine = np.random.default_rng([seed, c.rank])
    begun: list[tuple[Any, int]] = []
    for step in range(operations):
        if rng.random() < 0.1:  # begun on all at the same place, waited for wherever each rank likes
            begun.append((c.all_reduce(np.full(3, c.rank + step), async_op=True), n * step + sum(range(n))))
        if begun and mine.random() < 0.1:
            w, total = begun.pop(int(mine.integers(len(begun))))
            assert (w.result() == total).all()
        kind = int(rng.integers(8 + len(KINDS)))
        if kind >= 8:
            movement(c, rng, KINDS[kind - 8], step, shared=bool(mine.random() < 0.3))
            continue
        size = int(rng.choice(SIZES, p=CHANCES))
        root, tag = int(rng.integers(n)), int(rng.integers(3))
        if mine.random() < 0.01:
            sum(range(int(mine.integers(20_000))))  # ranks drift apart
        x = np.full(size, c.rank + step, "f8")
        if mine.random() < 0.3:
            x = context_of(c).store.share(x)
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
    assert all((w.result() == total).all() for w, total in begun)
    return operations


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F32")
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("n", "seed", "count"), [(2, 1, 1700), (3, 2, 1200), (4, 3, 800)])
def test_random_programs(ranks: Any, n: int, seed: int, count: int) -> None:
    """Thousands of random correct operations give right results and no error."""
    assert set(ranks(n, lambda c: program(c, count, seed), seconds=100)) == {count}
