"""A segment lives while anything looks at it, here, on a rank or on its way, and not a moment longer."""

import ctypes
import gc
import importlib.util
from pathlib import Path

import pytest

import nbparallel as nbp
from nbparallel.sharing import current_store
from nbparallel.testing.waiting import wait_until
from tests.session.names.memory import holders
from tests.session.names.memory.holders import HOLDERS

SIZE = 100_000


def skip_without_torch(kind):
    """Skip, with its reason, what needs torch."""
    if kind == "tensor" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


def wait_until_gone(segment):
    """Fail unless a segment goes."""
    wait_until(lambda: segment not in segments(), nbp.segments)


def segments():
    """Return the ids of this process's segments."""
    current_store().drain()
    return {record.segment for record in current_store().segments() if record.phase != "pooled"}


@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.parametrize("kind", HOLDERS)
def test_here(kind):
    """Whatever kind of object is the last to look at an array, the memory stays for it and goes with it."""
    skip_without_torch(kind)
    x = nbp.full(SIZE, 7.0)
    segment, address = current_store().location(x).segment, x.ctypes.data
    holder = HOLDERS[kind](x)
    del x
    gc.collect()
    assert segment in segments()
    assert ctypes.c_double.from_address(address + 80).value == 7.0
    del holder
    if kind == "cycle":
        gc.collect()
    assert segment not in segments()


RANK = """
import gc
exec(source)
holder = HOLDERS[kind](x)
del x
"""


@pytest.fixture(scope="module")
def ranks():
    """Start two ranks for all tests."""
    with nbp.Session(2) as session:
        session.run("pass", namespace={})
        yield session


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.parametrize("kind", HOLDERS)
def test_on_a_rank(ranks, kind):
    """An array that only a rank still looks at stays, and goes when the rank has let go."""
    skip_without_torch(kind)
    names = {"x": nbp.full(SIZE, 7.0), "kind": kind, "source": Path(holders.__file__).read_text()}
    segment = current_store().location(names["x"]).segment
    ranks.run(RANK, ranks=[0], namespace=names)
    del names["x"]
    ranks.run("pass", ranks=[1], namespace=names)
    gc.collect()
    look = "gc.collect(); sorted(s.segment for s in nbp.segments() if not s.own)"
    assert ranks.run(look, ranks=[0]).values[0] == [segment]
    assert segment in segments()
    ranks.run("del holder; gc.collect(); None", ranks=[0])
    wait_until_gone(segment)
    names.clear()
    ranks.run("pass", namespace=names)


def test_a_message_on_its_way(ranks):
    """A sent array whose sender has forgotten it lives until it is received and dropped."""
    ranks.run("mine = nbp.full(100_000, 3.0)\nsend(mine, 1, view=True)\ndel mine", ranks=[0])
    held = "[s.nbytes for s in nbp.segments() if s.phase != 'pooled']"
    assert ranks.run(held, ranks=[0]).values[0] != []
    ranks.run("if rank == 1: got = recv(src=0)[5:]")
    assert ranks.run("float(got[-1])", ranks=[1]).values[1] == 3
    assert ranks.run(held, ranks=[1]).values[1] != []
    ranks.run("if rank == 1: del got")
    wait_until(lambda: ranks.run(held).values == [[], []], lambda: ranks.run(held).values)


def test_a_work_that_was_not_waited_for(ranks):
    """A pending operation holds what it sends; the memory goes when it has ended and been dropped."""
    ranks.run("if rank == 0:\n    work = dist.isend(nbp.ones(100_000), 1)\nelse:\n    got = recv(src=0)")
    ranks.run("if rank == 0: work.wait()\nglobals().pop('work', None); globals().pop('got', None); None")
    held = "[s.nbytes for s in nbp.segments() if s.phase != 'pooled']"
    wait_until(lambda: ranks.run(held).values == [[], []], lambda: ranks.run(held).values)


def test_values_of_ranks(ranks):
    """What ranks returned inside other objects is theirs and ours, until both have dropped it."""
    before = segments()
    values = ranks.run("mine = nbp.full(100_000, rank + 1.0)\n{'mine': mine}").values
    ranks.run("del mine")
    assert [float(value["mine"][-1]) for value in values] == [1, 2]
    view = values[1]["mine"][::2]
    del values
    gc.collect()
    assert len(segments() - before) == 1
    assert float(view.sum()) == 100_000
    del view
    assert segments() <= before
