"""Random right calls of everything at once: no false alarm, right results, nothing written beside (F32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.distributed.conformance.cases import ALL, REDUCTIONS, Case, Setting, complete, dtypes_of, groups
from tests.distributed.conformance.guarded import LAYOUTS
from tests.distributed.conformance.oracle import OPERATORS, allowed

SIZES = [0, 1, 7, 300, 1500, 10_000, 60_000]
"""Inside a slot, beyond it, several chunks."""
CHANCES = [0.04, 0.2, 0.34, 0.2, 0.16, 0.05, 0.01]
OBJECTS = ("barrier", "number", "objects", "list")


def plain(c: Communicator, kind: str, group: Any, members: list[int], step: int) -> None:
    """Call what needs no buffers."""
    at, k = members.index(c.rank), len(members)
    if kind == "barrier":
        c.barrier(group=group)
    elif kind == "number":
        assert c.all_reduce(10**30 * at + step, group=group) == 10**30 * sum(range(k)) + k * step
    elif kind == "objects":
        want = [{"step": (step, r)} for r in members]
        assert c.all_gather({"step": (step, c.rank)}, group=group) == want
    else:
        found: list[Any] = [None]
        c.scatter_object_list(found, [(step, r) for r in members] if at == 0 else None, members[0], group)
        assert found == [(step, c.rank)]


def mixed(c: Communicator, count: int, seed: int, layouts: Sequence[str] = LAYOUTS) -> int:
    """Make random calls, the same on all ranks but for layouts and when works are waited for."""
    rng, mine = np.random.default_rng(seed), np.random.default_rng([seed, c.rank])
    teams = list(groups(c))
    begun: list[tuple[Case, Any, Setting]] = []
    for step in range(count):
        group, members = teams[0] if rng.random() < 0.5 else teams[int(rng.integers(len(teams)))]
        name = str(rng.choice([*ALL, *OBJECTS]))
        dtype = str(rng.choice(dtypes_of(name)))
        op = str(rng.choice([o for o in OPERATORS if name not in REDUCTIONS or allowed(o, dtype)]))
        size, root = int(rng.choice(SIZES, p=CHANCES)), int(rng.integers(len(members)))
        later = bool(rng.random() < 0.2)
        if c.rank not in members:
            continue
        if begun and mine.random() < 0.3:
            complete(*begun.pop(int(mine.integers(len(begun)))))
        if name in OBJECTS:
            plain(c, name, group, members, step)
            continue
        layout = layouts[int(mine.integers(len(layouts)))]
        setting = Setting(c, group, members, root, dtype, size, op, layout, later, step)
        case = ALL[name](setting)
        begun.append((case, next(case), setting))
        if not later:
            complete(*begun.pop())
    for left in begun:
        complete(*left)
    return count


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F32")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize(("n", "count"), [(2, 300), (3, 250), (4, 200)])
def test_mixed_collectives(ranks: Any, n: int, count: int) -> None:
    """Collectives and messages, in the world and in groups, some under way at the same time."""
    assert set(ranks(n, lambda c: mixed(c, count, n), seconds=500)) == {count}


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(3600)
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_thousand_collectives(ranks: Any, seed: int) -> None:
    """The whole of it: 10 seeds of 10,000 each, with more processors than ranks and with fewer."""
    for n, cpus, count in ((2, 2, 3000), (2, 1, 2000), (3, 4, 3000), (4, 2, 2000)):
        assert set(
            ranks(n, lambda c, count=count: mixed(c, count, seed), usable_cpus=cpus, seconds=1500)
        ) == {count}
