"""What every operation over hosts returns, compared with numpy, and how ranks there are interrupted.

`hosts` is a session with four ranks.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session.monitoring.timeline import Timeline
from tests.cluster.sink import Sink
from tests.harness.turns import Promised

SIZES = [0, 1, 1000, 400_000]
"""Elements: none, one, some, and more than a leader combines alone."""
DTYPES = ["f8", "f4", "i8", "c16"]


def data(rank: int, size: int, dtype: str) -> Any:
    """Return what a rank brings."""
    return (np.arange(size) % 17 + 3 * rank).astype(dtype) * (1 if dtype == "i8" else 0.7)


def own(size: int, dtype: str) -> str:
    """Return the cell's text for it."""
    return f"((np.arange({size}) % 17 + 3 * rank).astype({dtype!r}) * {1 if dtype == 'i8' else 0.7})"


PROGRAM = """
def weigh(values, first=1): return sum((i + first) * v for i, v in enumerate(values))
four = range(4)
x = (np.arange(size) * 7 + rank) % 1009
for name, root in program:
    if name == "broadcast": y = broadcast(x if rank == root else None, root)
    elif name == "fill": y = x.copy(); broadcast(y, root)
    elif name == "all_reduce": y = x.copy(); all_reduce(y, "sum" if root % 2 else "max")
    elif name == "reduce": y = reduce(x.copy(), root); y = x if y is None else y
    elif name == "gather": y = gather(x, dst=root); y = x if y is None else weigh(y)
    elif name == "all_gather": y = weigh(all_gather(x))
    elif name == "scatter": y = scatter([x + i for i in four] if rank == root else None, src=root)
    elif name == "reduce_scatter": y = x + reduce_scatter([x[:5] * i for i in range(4)]).sum()
    elif name == "all_to_all": y = weigh(all_to_all([x + i for i in four]), 2)
    elif name == "inside": y = x + all_reduce(root, group=dist.host_group()) - root * dist.host_group().size()
    elif name == "object": y = x + all_gather({"r": rank})[root]["r"]
    elif name == "number": y = x + all_reduce(rank + root)
    else: barrier(); y = x
    x = y % 1009
x
"""
NAMES = [
    "broadcast",
    "fill",
    "all_reduce",
    "reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "inside",
    "object",
    "number",
    "barrier",
]


def model(size: int, program: list[tuple[str, int]]) -> list[Any]:
    """Return what the program leaves on each rank, without ranks."""
    xs = [(np.arange(size) * 7 + rank) % 1009 for rank in range(4)]
    for name, root in program:
        weighted = sum((i + 1) * x for i, x in enumerate(xs))
        total = np.sum(xs, axis=0)
        ys: list[Any] = list(xs)
        if name in ("broadcast", "fill"):
            ys = [xs[root]] * 4
        elif name == "all_reduce":
            ys = [total if root % 2 else np.max(xs, axis=0)] * 4
        elif name == "reduce":
            ys[root] = total
        elif name == "gather":
            ys[root] = weighted
        elif name == "all_gather":
            ys = [weighted] * 4
        elif name == "scatter":
            ys = [xs[root] + rank for rank in range(4)]
        elif name == "reduce_scatter":
            ys = [x + (total[:5] * rank).sum() for rank, x in enumerate(xs)]
        elif name == "all_to_all":
            ys = [sum((i + 2) * (x + rank) for i, x in enumerate(xs)) for rank in range(4)]
        elif name == "object":
            ys = [x + root for x in xs]
        elif name == "number":
            ys = [x + 6 + 4 * root for x in xs]
        xs = [y % 1009 for y in ys]
    return xs


def meeting(timeline: Timeline | None, line: int) -> tuple[float, float]:
    """Return when the last rank came to the operation on a line of a cell, and when the first one left it."""
    assert timeline is not None
    spans = [[span for span in row.spans if span.line == line] for row in timeline.rows]
    return max(own[0].begin for own in spans), min(own[-1].end for own in spans)


def random_program(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a cell that calls operations at random, and its names."""
    random = Random(seed)
    size = random.choice([5, 1000, 200_000])
    program = [(random.choice(NAMES), random.randrange(4)) for _ in range(40)]
    return PROGRAM, {"size": size, "program": program}


class HostOperationsTests:
    """Derive a class of tests, with a fixture `hosts`."""

    def values(self, hosts: nbp.Session, cell: str) -> list[Any]:
        """Run a cell, and return every rank's value."""
        return list(hosts.run(cell, namespace={"np": np}).values)

    def test_barrier(self, hosts: nbp.Session) -> None:
        """No rank passes before all have come."""
        cell = """
import time
if rank == 3:
    time.sleep(0.3)
came = time.time()
barrier()
dist.monitored_barrier()
(came, time.time())
"""
        found = self.values(hosts, cell)
        assert max(came for came, _ in found) <= min(went for _, went in found)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("op", ["sum", "max", "avg", "product"])
    def test_reductions(self, hosts: nbp.Session, dtype: str, op: str) -> None:
        """In place, on the destination, and in parts; the same bits on every rank."""
        if (op == "max" and dtype == "c16") or (op == "avg" and dtype == "i8"):
            pytest.skip("no such reduction")
        cell = "\n".join(
            f"x{size} = {own(size, dtype)}; all_reduce(x{size}, {op!r})\n"
            f"y{size} = reduce({own(size, dtype)}, 2, {op!r})\n"
            f"z{size} = reduce_scatter({own(size, dtype)}, op={op!r})"
            for size in SIZES
        )
        found = self.values(
            hosts,
            cell + f"\n[(v['x%d' % n], v['y%d' % n], v['z%d' % n]) for v in [globals()] for n in {SIZES}]",
        )
        for k, size in enumerate(SIZES):
            parts = [data(rank, size, dtype) for rank in range(4)]
            combine: Any = {"sum": np.add, "avg": np.add, "max": np.maximum, "product": np.multiply}[op]
            wanted = combine(combine(parts[0], parts[1]), combine(parts[2], parts[3]))
            wanted = (wanted / 4 if op == "avg" else wanted).astype(dtype)
            first = found[0][k][0]
            np.testing.assert_allclose(first, wanted, rtol=1e-6)
            assert first.dtype == np.dtype(dtype)
            assert all(found[rank][k][0].tobytes() == first.tobytes() for rank in range(4))
            assert [found[rank][k][1] is None for rank in range(4)] == [True, True, False, True]
            assert found[2][k][1].tobytes() == first.tobytes()
            together = np.concatenate([found[rank][k][2] for rank in range(4)])
            assert together.tobytes() == first.tobytes()

    def test_numbers(self, hosts: nbp.Session) -> None:
        """They travel with the calls; ints stay exact."""
        cell = """
parts = reduce_scatter([rank * 10 + i for i in range(4)])
o = np.zeros(1); dist.reduce_scatter(o, [rank * 10 + i for i in range(4)])
parts = parts, o[0]
(all_reduce(rank + 2**70), all_reduce(rank, 'max'), all_reduce(rank / 2, 'avg'), reduce(rank, 3), *parts)
"""
        assert self.values(hosts, cell) == [
            (6 + 4 * 2**70, 3, 0.75, 6 if rank == 3 else None, *2 * (60 + 4 * rank,)) for rank in range(4)
        ]

    @pytest.mark.parametrize("size", SIZES)
    def test_movements_of_arrays(self, hosts: nbp.Session, size: int) -> None:
        """New arrays, and arrays that are filled."""
        cell = f"""
x = {own(size, "f8")}
shape = x.shape
b = broadcast(x if rank == 3 else None, 3)
c = np.empty(shape); broadcast(x.copy() if rank == 1 else c, 1)
g = gather(x, dst=1)
a = all_gather(x)
into = [np.empty(shape) for _ in range(4)]; all_gather(into, x)
s = scatter([x + i for i in range(4)] if rank == 2 else None, src=2)
t = all_to_all([x + i for i in range(4)])
u = np.empty(shape); scatter(u, [x - i for i in range(4)] if rank == 0 else None, 0)
(b, c if rank != 1 else x, g, a, into, s, t, u)
"""
        found = self.values(hosts, cell)
        x = [data(rank, size, "f8") for rank in range(4)]
        for rank, (b, c, g, a, into, s, t, u) in enumerate(found):
            np.testing.assert_array_equal(b, x[3])
            np.testing.assert_array_equal(c, x[1])
            assert (g is None) == (rank != 1)
            for got in (g or a, a, into):
                assert all(np.array_equal(one, other) for one, other in zip(got, x, strict=True))
            np.testing.assert_array_equal(s, x[2] + rank)
            assert all(np.array_equal(one, other + rank) for one, other in zip(t, x, strict=True))
            np.testing.assert_array_equal(u, x[0] - rank)

    def test_movements_of_objects(self, hosts: nbp.Session) -> None:
        """Anything that can be pickled, classes of the cell among it, and torch's forms for lists."""
        cell = """
class Point:
    def __init__(self, x): self.x = x
lists = [None] * 4; dist.all_gather_object(lists, {"rank": rank})
gathered = [None] * 4 if rank == 3 else None; dist.gather_object(("a", rank), gathered, 3)
shared = [f"{rank}", rank]; dist.broadcast_object_list(shared, 2)
mine = [None]; dist.scatter_object_list(mine, [f"for {i}" for i in range(4)] if rank == 1 else None, 1)
points = [p.x for p in all_gather(Point(rank))]
odd = all_to_all([(rank, i) for i in range(4)])
(lists, gathered, shared, mine, points, odd, all_gather("x" * rank), broadcast({1: [rank]}, 3))
"""
        for rank, found in enumerate(self.values(hosts, cell)):
            assert found == (
                [{"rank": r} for r in range(4)], [("a", r) for r in range(4)] if rank == 3 else None,
                ["2", 2], [f"for {rank}"], [0, 1, 2, 3], [(r, rank) for r in range(4)],
                ["", "x", "xx", "xxx"], {1: [3]},
            )  # fmt: skip

    def test_arrays_as_they_lie(self, hosts: nbp.Session) -> None:
        """Shared, strided, without axes, of odd dtypes; what was received belongs to the receiver."""
        cell = """
shared = nbp.full(5, rank + 1.0); all_reduce(shared)
wide = np.zeros((4, 6)); strided = wide[:, ::2]; strided[...] = rank; all_reduce(strided)
point = np.array(float(rank)); all_reduce(point)
times = all_gather(np.array([rank], "m8[s]"))
same = all_gather(shared); same[0][...] = 7; same[3][...] = 8
one = np.empty((4, 2)); dist.all_gather_into_tensor(one, np.full(2, rank + 0.5))
part = np.empty(3); dist.reduce_scatter_tensor(part, np.arange(12.0))
swapped = np.empty(4); dist.all_to_all_single(swapped, np.arange(4.0) + 10 * rank)
seconds = [int(t[0].astype(int)) for t in times]
lists = one[:, 0].tolist(), part.tolist(), swapped.tolist()
(shared.tolist(), wide.sum(), float(point), seconds, *lists, shared[0])
"""
        for rank, found in enumerate(self.values(hosts, cell)):
            assert found == (
                [10.0] * 5, 6 * 12, 6.0, [0, 1, 2, 3], [0.5, 1.5, 2.5, 3.5],
                (np.arange(12.0) * 4)[3 * rank : 3 * rank + 3].tolist(),
                [rank + 10.0 * r for r in range(4)], 10.0,
            )  # fmt: skip

    def test_groups_over_hosts(self, hosts: nbp.Session) -> None:
        """Of some ranks, of all under another name, and those that `split` makes; side by side."""
        cell = """
outer = dist.new_group([0, 3])
every = dist.new_group(tag="mine")
odd = dist.split(rank % 2)
found = [all_gather(rank, group=every), all_reduce(rank + 1, group=odd), list(odd)]
if rank in outer:
    x = np.full(100_000, 1.0 + rank); all_reduce(x, group=outer)
    found += [x[-1], broadcast(rank if rank else None, 3, group=outer), gather(rank, group=outer, dst=3)]
    send(rank, 3 - rank, group=outer)
    found += [recv(group=outer), all_to_all([(rank, i) for i in range(2)], group=outer)]
else:
    barrier()
if rank in outer: barrier()
found
"""
        for rank, found in enumerate(self.values(hosts, cell)):
            assert found[:3] == [[0, 1, 2, 3], 4 if rank % 2 == 0 else 6, [rank % 2, rank % 2 + 2]]
            place = rank // 3
            gathered = [0, 3] if rank == 3 else None
            swapped = [(0, place), (3, place)]
            assert found[3:] == ([5.0, 3, gathered, 3 - rank, swapped] if rank in (0, 3) else [])

    def test_a_group_that_does_not_agree(self, hosts: nbp.Session) -> None:
        """Its members get the table of their calls, by their numbers among all ranks."""
        cell = "g = dist.new_group([1, 3])\n"
        cell += "if rank in g: barrier(group=g) if rank == 1 else all_reduce(1, group=g)"
        with pytest.raises(nbp.ParallelError, match="CollectiveMismatchError") as caught:
            hosts.run(cell)
        for text in ("1 (host a)  barrier", "3 (host b)  all_reduce"):
            assert all(text in str(error) for error in caught.value.errors.values())

    @pytest.mark.parametrize("size", [1, 100_000])
    def test_scans(self, hosts: nbp.Session, size: int) -> None:
        """Of numbers and of arrays, with and without what a rank brings itself."""
        cell = f"""
x, y = np.full({size}, 2.0**rank), np.full({size}, 2.0**rank)
dist.scan(x), dist.exscan(y, "max")
(dist.scan(rank + 1), dist.exscan(rank + 1), dist.scan(float(rank), "avg"), x[-1], y[-1])
"""
        for rank, found in enumerate(self.values(hosts, cell)):
            before = sum(range(1, rank + 1)) if rank else None
            assert found == (
                (before or 0) + rank + 1,
                before,
                rank / 2,
                2.0 ** (rank + 1) - 1,
                2.0 ** max(0, rank - 1),
            )

    def test_many_calls_in_a_row(self, hosts: nbp.Session) -> None:
        """In step, beside operations inside each host."""
        cell = """
g = dist.host_group()
total = 0
for i in range(50):
    total += all_reduce(rank + i) + len(all_gather(i)) + all_reduce(1, group=g)
    x = np.full(200_000 * (i % 2), float(i)); all_reduce(x)
    assert (x == 4 * i).all()
total - 50 * g.size()
"""
        assert self.values(hosts, cell) == [sum(6 + 4 * i + 4 for i in range(50))] * 4

    @pytest.mark.parametrize("seed", range(4))
    def test_random_programs(self, hosts: nbp.Session, seed: int) -> None:
        """Any operations in any order leave what the model does."""
        cell, names = random_program(seed)
        found = hosts.run(cell, namespace={"np": np, **names}).values
        for rank, wanted in enumerate(model(**names)):
            np.testing.assert_array_equal(found[rank], wanted, f"rank {rank}: {names['program']}")


INTERRUPTED = {
    "sleep": "time.sleep(60)",
    "computation": "while True: sum(range(1000))",
    "exchange": "while True: all_reduce(x, 'max')",
    "a wait for a host": "time.sleep(60) if rank == 3 else barrier()",
    "inside a host": "while True: all_reduce(x, 'max', group=dist.host_group())",
}


class HostInterruptsTests:
    """Derive a class of tests, with a fixture `hosts`."""

    @pytest.mark.parametrize("kind", INTERRUPTED)
    def test_every_rank_is_free_within_a_second(
        self, hosts: nbp.Session, kind: str, promised: Promised
    ) -> None:
        """Wherever it is; it keeps its variables, and the next operation over hosts is right."""
        hosts.run("kept, ended = rank, None")
        # In a function: CPython 3.11 leaves out ``finally`` for an exception at the end of ``while True:``.
        cell = f"import time\nx = np.ones(300_000)\ndef work():\n    {INTERRUPTED[kind]}\n"
        cell += "try: work()\nfinally: ended = True"
        pending = hosts.submit(cell, namespace={"np": np})
        time.sleep(0.5)
        with promised(1.0):
            pending.cancel()
            with pytest.raises(KeyboardInterrupt):
                pending.result(30)
        found = hosts.run("kept, ended, all_reduce(rank)").values
        assert found == [(rank, True, 6) for rank in range(4)], found

    def test_presses(self, hosts: nbp.Session) -> None:
        """The second one names the ranks that have not stopped, the third one ends them, and no others."""
        sink = Sink()
        hosts.run("kept = rank")
        cell = """
import time
while rank == 3:
    try: time.sleep(60)
    except KeyboardInterrupt: pass
time.sleep(60)
"""
        pending = hosts.submit(cell, sink=sink)
        time.sleep(0.5)
        began = time.monotonic()
        for seconds in (1.2, 1.2, 0.5):  # half a second was not enough for the others on a busy machine
            pending.cancel()
            time.sleep(seconds)
        with pytest.raises(KeyboardInterrupt):
            pending.result(30)
        assert time.monotonic() - began < 4  # five seconds end it, too
        assert any("rank 3 (host b) not stopped yet" in note for note in sink.notes), sink.notes
        assert hosts.run("'kept' in globals()").values == [True, True, True, False]
