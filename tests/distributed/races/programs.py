"""Cells for three ranks: with data races, and without."""

from __future__ import annotations

from typing import NamedTuple


class RacyCell(NamedTuple):
    """A cell with one race, and the cell that has none."""

    source: str
    array: str
    """What both ranks touch."""
    lines: tuple[int, int]
    """Those that the report names, the lower one first."""
    kinds: frozenset[str]
    right: str
    """The cell with what was missing."""


READ, WROTE, BOTH = "read", "wrote", "read and wrote"

CELLS = {
    "counter": RacyCell(
        "counter[0] += 1",
        "counter[0]",
        (1, 1),
        frozenset({BOTH}),
        "with dist.lock('counter'):\n    counter[0] += 1",
    ),
    "halo without barrier": RacyCell(
        """\
mine = slice(4 * rank, 4 * rank + 4)
for step in range(3):
    left = grid[4 * rank - 1] if rank else 0.0
    nap()
    grid[mine] = left + 1
""",
        "grid[3]",
        (3, 5),
        frozenset({READ, WROTE}),
        """\
mine = slice(4 * rank, 4 * rank + 4)
for step in range(3):
    left = grid[4 * rank - 1] if rank else 0.0
    barrier()
    grid[mine] = left + 1
    barrier()
""",
    ),
    "read before the barrier": RacyCell(
        """\
grid[rank] = rank
total = grid[:3].sum()
barrier()
""",
        "grid[0]",
        (1, 2),
        frozenset({READ, WROTE}),
        """\
grid[rank] = rank
barrier()
total = grid[:3].sum()
""",
    ),
    "overlapping slices": RacyCell(
        "grid[3 * rank:3 * rank + 4] = rank",
        "grid[3]",
        (1, 1),
        frozenset({WROTE}),
        "grid[3 * rank:3 * rank + 3] = rank",
    ),
    "transposed": RacyCell(
        """\
square[rank] = rank
column = square.T[rank].copy()
""",
        "square",
        (1, 2),
        frozenset({READ, WROTE}),
        """\
square[rank] = rank
barrier()
column = square.T[rank].copy()
""",
    ),
    "out=": RacyCell(
        "np.add(grid[:2], rank, out=grid[:2])",
        "grid[0:2]",
        (1, 1),
        frozenset({BOTH}),
        "np.add(grid[:2], rank, out=grid[2 * rank + 2:2 * rank + 4])",
    ),
    "gather orders only the root": RacyCell(
        """\
grid[rank] = 1
gather(rank)
total = grid[:3].sum()
""",
        "grid[0]",
        (1, 3),
        frozenset({READ, WROTE}),
        """\
grid[rank] = 1
gather(rank)
total = grid[:3].sum() if rank == 0 else 0
""",
    ),
    "broadcast orders only after the root": RacyCell(
        """\
grid[rank] = 1
broadcast(rank)
value = grid[1]
""",
        "grid[1]",
        (1, 3),
        frozenset({READ, WROTE}),
        """\
if rank == 0:
    grid[1] = 1
broadcast(rank)
value = grid[1]
""",
    ),
    "broadcast into shared rows": RacyCell(
        """\
broadcast(square[rank])
value = square[1].sum()
""",
        "square[1, :]",
        (1, 2),
        frozenset({READ, WROTE}),
        """\
broadcast(square[rank])
value = square[rank].sum()
""",
    ),
    "a flag that is polled": RacyCell(
        """\
if rank == 0:
    grid[1] = 5
    counter[0] = 1
elif rank == 1:
    while not counter[0]:
        pass
    value = grid[1]
""",
        "counter[0]",
        (3, 5),
        frozenset({READ, WROTE}),
        """\
if rank == 0:
    grid[1] = 5
    send(1, 1)
elif rank == 1:
    recv(src=0)
    value = grid[1]
""",
    ),
    "a message that is not received before": RacyCell(
        """\
if rank == 0:
    work = isend(1, 1)
    grid[0] = 1
elif rank == 1:
    recv(src=0)
    grid[0] = 2
""",
        "grid[0]",
        (3, 6),
        frozenset({WROTE}),
        """\
if rank == 0:
    grid[0] = 1
    work = isend(1, 1)
elif rank == 1:
    recv(src=0)
    grid[0] = 2
""",
    ),
    "a work that is waited for too late": RacyCell(
        """\
grid[rank] = 1
work = barrier(async_op=True)
total = grid[:3].sum()
work.wait()
""",
        "grid[0]",
        (1, 3),
        frozenset({READ, WROTE}),
        """\
grid[rank] = 1
work = barrier(async_op=True)
work.wait()
total = grid[:3].sum()
""",
    ),
    "a group that leaves one out": RacyCell(
        """\
pair = dist.new_group([0, 1])
grid[rank] = 1
if rank < 2:
    barrier(group=pair)
    total = grid[:3].sum()
""",
        "grid[2]",
        (2, 5),
        frozenset({READ, WROTE}),
        """\
pair = dist.new_group([0, 1])
grid[rank] = 1
if rank < 2:
    barrier(group=pair)
    total = grid[:2].sum()
""",
    ),
    "two locks": RacyCell(
        """\
with dist.lock("a" if rank else "b"):
    counter[0] += 1
""",
        "counter[0]",
        (2, 2),
        frozenset({BOTH}),
        """\
with dist.lock("a"):
    counter[0] += 1
""",
    ),
    "an array of a rank": RacyCell(
        """\
part = nbp.zeros(4)
parts = all_gather(part, view=True)
part[0] = rank
value = parts[(rank + 1) % world_size][0]
""",
        "part[0]",
        (3, 4),
        frozenset({READ, WROTE}),
        """\
part = nbp.zeros(4)
parts = all_gather(part, view=True)
part[0] = rank
barrier()
value = parts[(rank + 1) % world_size][0]
""",
    ),
}

WITHOUT_RACE = {
    "own rows": "square[rank] += rank\nsquare[rank].sort()",
    "disjoint strides": "grid[rank::3] = rank",
    "all read": "total = grid.sum() + square.T.mean()",
    "all_reduce in place": "part = dist.shard(grid)\npart += 1\nall_reduce(np.ones(2))\ntotal = grid.sum()",
    "a chain of messages": """\
if rank:
    recv(src=rank - 1)
counter[0] += 1
if rank < world_size - 1:
    send(0, rank + 1)
""",
    "a wildcard": """\
if rank == 0:
    for _ in range(2):
        value, source = recv(return_source=True)
        grid[source] += 1
else:
    grid[rank] = 1
    send(0, 0)
""",
    "works out of order": """\
if rank == 0:
    grid[0] = 1
    send(1, 1)
    grid[1] = 1
    send(2, 1)
elif rank == 1:
    first, second = irecv(src=0), irecv(src=0)
    second.wait()
    grid[1] += 1
    first.wait()
    grid[0] += 1
""",
    "sendrecv": """\
grid[rank] = rank
sendrecv(0, (rank + 1) % world_size, (rank - 1) % world_size)
value = grid[(rank - 1) % world_size]
""",
    "scatter and reduce": """\
if rank == 0:
    grid[5] = 1
scatter([0, 1, 2] if rank == 0 else None)
value = grid[5]
reduce(1)
if rank == 0:
    grid[5] = 2
""",
    "broadcast of the shared array itself": """\
broadcast(grid)
broadcast(square.T, 1)
value = grid[0] + square[0, 0]
""",
    "scan": """\
grid[rank] = 1
dist.scan(1)
total = grid[:rank + 1].sum()
""",
    "received into a part of a shared array": """\
if rank == 0:
    send(np.ones(4), 1)
elif rank == 1:
    recv(grid[:4], src=0)
    send(0, 2)
else:
    recv(src=1)
    total = grid[:4].sum()
""",
    "names and lists": """\
views = [grid[4 * r:4 * r + 4] for r in range(world_size)]
views[rank][:] = rank
assert f"{views[rank][0]:.0f}" == str(rank)
barrier()
total = sum(view.sum() for view in views)
""",
}
