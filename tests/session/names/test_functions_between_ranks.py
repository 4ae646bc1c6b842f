"""Functions and classes that one rank sends to another are rebuilt over the receiver's namespace."""

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError


@pytest.fixture
def run(two_ranks):
    """Return what runs a cell and returns its values."""
    return lambda cell: list(two_ranks.run(cell, namespace={}).values)


SEND = "send(who, 1) if rank == 0 else None\n"
RECEIVE = "got = recv(src=0) if rank == 1 else who\n"


@pytest.mark.slow
def test_a_function_reads_the_receivers_rank(run):
    """What is predefined is the receiver's: `rank` is its own number."""
    assert run(f"if rank == 0:\n    def who(): return rank\n{SEND}{RECEIVE}got()") == [0, 1]


def test_a_function_reads_and_writes_the_receivers_globals(run):
    """A global that the receiver has is read and assigned there, now and later; the sender's stays."""
    cell = f"""
level = 10 * rank
if rank == 0:
    def who():
        global calls
        calls = level + 1
        return level
{SEND}{RECEIVE}
first = got()
level += 1
(first, got(), calls)
"""
    assert run(cell) == [(0, 1, 2), (10, 11, 12)]
    assert run("(level, calls)") == [(1, 2), (11, 12)]


def test_names_that_the_receiver_lacks_come_along(run):
    """Also those that only another function reads; they are names of the receiver from then on."""
    cell = f"""
if rank == 0:
    import math
    big = np.arange(100_000.0)  # out of band
    factor = 3
    def inner(x): return math.floor(factor * x + big[-1] - 99_999)
    def who(): return inner(rank + 0.5)
{SEND}{RECEIVE}
got()
"""
    assert run("import numpy as np\n" + cell) == [1, 4]
    assert run("factor = 5 if rank == 1 else factor\n(got(), inner(1), float(big[7]))") == [
        (1, 3, 7.0),
        (7, 5, 7.0),
    ]


def test_arrays_of_the_notebook_that_come_along_are_the_same_memory(two_ranks):
    """With the rights that the sender has: read-only, or writable where the notebook shares it."""
    notebook = {"x": np.arange(100_000.0), "w": nbp.share(np.zeros(100_000))}
    two_ranks.run(
        "def who():\n    w[0] += rank + 1\n    return x[5], x.flags.writeable", ranks=[0], namespace=notebook
    )
    assert two_ranks.run("'x' in globals(), 'w' in globals()", namespace={}).values[1] == (False, False)
    assert list(two_ranks.run(f"{SEND}{RECEIVE}got()", namespace={}).values) == [(5.0, False)] * 2
    assert notebook["w"][0] == 3.0


def test_names_that_the_receiver_has_are_not_replaced_and_need_not_travel(run):
    """A global that cannot be pickled is no obstacle where the receiver has its own, else it is named."""
    cell = """
import threading
if rank in owners:
    lock, tag = threading.Lock(), f"of rank {rank}"
if rank == 0:
    def who():
        with lock:
            return tag
"""
    both = f"owners = (0, 1)\n{cell}{SEND}{RECEIVE}got()"
    assert run(both) == ["of rank 0", "of rank 1"]
    with pytest.raises(ParallelError, match=r"reads the global 'lock', which this rank lacks"):
        run(f"if rank == 1: del lock\nowners = (0,)\n{cell}{SEND}{RECEIVE}")


def test_a_class_with_methods_is_rebuilt_too(run):
    """Methods, properties and inherited methods read the receiver's globals; instances know their class."""
    cell = """
if rank == 0:
    scale = 2
    class Base:
        def where(self): return rank
    class Model(Base):
        def __init__(self, w): self.w = w
        def step(self): return Model(self.w * scale + rank)
        @property
        def place(self): return (self.where(), self.w)
    who = Model(1)
send(who, 1) if rank == 0 else None
got = recv(src=0) if rank == 1 else who
scale = 2 + rank
(got.place, got.step().place, type(got.step()) is type(got), type(got).__name__)
"""
    assert run(cell) == [((0, 1), (0, 2), True, "Model"), ((1, 1), (1, 4), True, "Model")]


def test_closures_keep_their_cells_and_read_the_receivers_globals(run):
    """Variables of the enclosing function travel, shared between closures; globals are the receiver's."""
    cell = """
if rank == 0:
    def counter(start):
        count = start
        def add():
            nonlocal count
            count += rank + 1
            return count
        def read(): return count
        return add, read
    who = counter(10)
send(who, 1) if rank == 0 else None
add, read = recv(src=0) if rank == 1 else who
add()
(read(), add(), read())
"""
    assert run(cell) == [(11, 12, 12), (12, 14, 14)]


def test_a_recursive_function_that_the_receiver_lacks(run):
    """It finds itself under its own name."""
    cell = f"""
if rank == 0:
    def who(n=4): return rank if n == 0 else n + who(n - 1)
{SEND}{RECEIVE}
got()
"""
    assert run(cell) == [10, 11]


@pytest.mark.parametrize(
    "movement",
    [
        "all_gather(mine)",
        "[broadcast(mine if rank == r else None, src=r) for r in range(2)]",
        "all_gather(mine, async_op=True).result()",
        "gather(mine, dst=0) or [mine, mine]",
        "[s := isend(mine, 1 - rank), irecv(src=1 - rank).result(), s.wait()][1:2]",
    ],
)
def test_collectives_and_nonblocking_operations_move_functions_alike(run, movement):
    """Whatever moved it, a function reads the globals of the rank that calls it."""
    cell = f"""
shift = 100 * rank
def mine(): return shift + rank
got = {movement}
sorted({{f() for f in got}})
"""
    assert run(cell) == [[0], [101]]


def test_a_name_that_came_along_is_an_ordinary_name(two_ranks, run):
    """The notebook's value of such a name replaces it, with a line that says so."""
    run(f"if rank == 0:\n    extra = 1\n    def who(): return extra\n{SEND}{RECEIVE}")
    assert run("got()") == [1, 1]
    result = two_ranks.run("got(), extra", namespace={"extra": 2})
    assert list(result.values) == [(2, 2), (2, 2)]
    assert any("extra was replaced" in note for note in result.notes)
