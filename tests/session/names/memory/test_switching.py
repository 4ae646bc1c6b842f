"""Switching the sharing strategy of a running session: everywhere, for new arrays only."""

import os
import select
import signal

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry

NEW = """
import nbparallel as nbp
a = nbp.zeros(10)
here = nbp.sharing.current_store().location(a).segment
nbp.get_sharing_strategy(), *(record.strategy for record in nbp.segments() if record.segment == here)
"""


@pytest.fixture(autouse=True)
def registry_as_it_was():
    """Undo what a test does to the registry."""
    with temporary_registry():
        yield


@pytest.fixture(scope="module")
def ranks():
    """Start two ranks for all tests."""
    with nbp.Session(2) as session:
        session.run("pass")
        yield session


@pytest.fixture
def names():
    """Return the notebook's variables."""
    return {}


@pytest.fixture
def two(ranks, names):
    """Give the ranks to a test, and take its variables away afterwards, there and here."""
    ranks.run("pass", namespace=names)
    yield ranks
    names.clear()
    ranks.run("for name in ('a', 'mine', 'y'): globals().pop(name, None)", namespace=names)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("name", ["file_system", "file_region", "mmap", "file_descriptor"])
def test_a_switch_reaches_notebook_and_ranks(two, names, name):
    """What is made after the switch is made with the new strategy, in the notebook and on every rank."""
    nbp.set_sharing_strategy(name)
    assert two.run(NEW, namespace=names).values == [(name, name)] * 2
    names["x"] = np.arange(1000.0)
    assert two.run("float(x.sum())", namespace=names).values == [499500.0] * 2
    place = nbp.sharing.current_store().location(names["x"])
    (segment,) = (record for record in nbp.segments() if record.segment == place.segment)
    assert segment.strategy == name


def test_what_is_shared_stays_where_it_is(two, names):
    """Sending an array again shows the same memory to old and new receivers: no split brain."""
    names["x"] = nbp.zeros(3)
    two.run("mine = x\nx[0] = 1", ranks=[0], namespace=names)
    before = nbp.sharing.current_store().location(names["x"])
    nbp.set_sharing_strategy("file_system")
    two.run("y = x\ny[1] = 2", ranks=[1], namespace=names)
    assert nbp.sharing.current_store().location(names["x"]) == before
    assert two.run("mine.tolist()", ranks=[0]).values[0] == [1, 2, 0]
    assert nbp.share(names["x"]) is names["x"]


def test_one_array_its_own_way(two, names):
    """`strategy=` is for one array; arrays of several strategies live side by side."""
    kinds = ["file_descriptor", "file_system", "file_region", "mmap"]
    names.update((f"x{i}", nbp.share(np.full(100, i), strategy=kind)) for i, kind in enumerate(kinds))
    cell = "x0[rank], x1[rank], x2[rank], x3[rank] = 10, 11, 12, 13\n[int(x.sum()) for x in (x0, x1, x2, x3)]"
    assert two.run(cell, ranks=[0], namespace=names).values[0] == [10, 110, 210, 310]
    assert [x[0] for x in names.values()] == [10, 11, 12, 13]
    assert nbp.get_sharing_strategy() == "file_descriptor"


@pytest.mark.slow
def test_a_dead_rank_hears_of_it_when_it_is_back():
    """Switching with a dead rank works; the fresh process uses the new strategy."""
    with nbp.Session(2) as session:
        session.run("pass")
        pidfd = os.pidfd_open(session.statistics().ranks[1].pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], 10)
        os.close(pidfd)
        nbp.set_sharing_strategy("file_system")
        assert session.run(NEW, namespace={}).values == [("file_system", "file_system")] * 2


@pytest.mark.slow
def test_a_session_that_starts_later_uses_it(tmp_path):
    """A choice made without any session holds for the next one, options included."""
    nbp.set_sharing_strategy("mmap", directory=tmp_path)
    for method in ("forkserver", "spawn"):
        with nbp.Session(1, start_method=method) as session:
            assert session.run(NEW, namespace={}).values == [("mmap", "mmap")]
            assert len(os.listdir(tmp_path)) == 1
        assert os.listdir(tmp_path) == []


def test_a_rank_decides_for_itself(two):
    """Within a cell a rank may choose its own, until the notebook decides again."""
    two.run("import nbparallel as nbp\nif rank: nbp.set_sharing_strategy('file_system')")
    assert two.run("nbp.get_sharing_strategy()").values == ["file_descriptor", "file_system"]
    nbp.set_sharing_strategy("file_region")
    assert two.run("nbp.get_sharing_strategy()").values == ["file_region", "file_region"]


def test_copy_everywhere(two, names):
    """Under `copy` ranks have copies, which they may write, and nobody can make shared memory."""
    nbp.set_sharing_strategy("copy")
    names.update(x=np.arange(100_000.0), np=np)
    assert two.run("x[0] = rank\nfloat(x[0])", namespace=names).values == [0.0, 1.0]
    assert names["x"][0] == 0
    with pytest.raises(ParallelError, match="has no shared memory"):
        two.run("import nbparallel as nbp\nnbp.zeros(3)")
    assert two.run("all_reduce(np.ones(200_000))[0]", namespace=names).values == [2.0, 2.0]


@pytest.mark.slow
def test_a_strategy_of_ones_own_reaches_the_ranks(two, names):
    """A strategy that a script registers is sent to the ranks, which make and map its segments."""

    class Traced(FileDescriptorStrategy):
        @property
        def name(self):
            return "traced"

        def adopt(self, fd, nbytes):
            source = super().adopt(fd, nbytes)
            source.strategy = "traced"
            return source

        def create(self, nbytes, content=None, intend=None):
            source = super().create(nbytes, content)
            source.strategy = "traced"
            return source

    nbp.register_sharing_strategy("traced", Traced())
    names["x"] = nbp.share(np.arange(5), strategy="traced")
    assert two.run("int(x.sum())", namespace=names).values == [10, 10]
    nbp.set_sharing_strategy("traced")
    assert two.run(NEW, namespace=names).values == [("traced", "traced")] * 2

    class Again(Traced):
        """What a cell that ran again has made."""

    nbp.register_sharing_strategy("traced", Again())
    names["y"] = nbp.share(np.arange(6))
    kind = "type(nbp.sharing.strategies.registry.find_strategy('traced')).__name__"
    assert two.run(f"{kind}, int((x + y[1:]).sum())", namespace=names).values == [("Again", 25)] * 2
