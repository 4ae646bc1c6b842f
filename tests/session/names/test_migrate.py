"""`nbp.migrate`: an array's memory moves to another strategy for everybody, or not at all."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import (
    ParallelError,
    ReadOnlyArrayError,
    SegmentInUseError,
    SharedMemoryFullError,
    StrategyUnavailableError,
)
from nbparallel.sharing import current_store
from nbparallel.sharing.lifecycle import relocation
from nbparallel.sharing.strategies import owned_names, registry

NAMES = ["file_descriptor", "file_system", "file_region", "mmap"]
SIZE = 100_000


def strategy_of(x):
    """Return the strategy of an array's segment."""
    place = current_store().location(x)
    return next(record.strategy for record in nbp.segments() if record.segment == place.segment)


def files_of(x, field=5):
    """Return what lies behind the array's addresses (field 1: with which rights), by /proc/self/maps."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= x.ctypes.data < stop:
            found.append(line.split(maxsplit=5)[field])
    return found


def made_here(directory):
    """Return this process's names in a directory; other tests may run on the machine."""
    prefix = owned_names.fresh().rpartition("_")[0]
    return [name for name in os.listdir(directory) if name.startswith(prefix)]


@pytest.fixture(scope="module")
def ranks():
    """Start two ranks that serve all tests of this page."""
    session = nbp.Session(2)
    session.run("pass")
    yield session
    session.stop()


@pytest.fixture
def names(ranks):
    """Return the notebook's variables; nobody has them afterwards."""
    names = {"np": np, "nbp": nbp}
    ranks.run("pass", namespace=names)
    yield names
    names.clear()
    ranks.run("for name in ('mine', 'kept', 'x'): globals().pop(name, None)", namespace=names)


@pytest.mark.parametrize("there", NAMES)
@pytest.mark.parametrize("here", NAMES)
def test_everything_here_sees_the_new_memory(here, there):
    """Views, views of views, memoryviews and other names stay what they are and show one memory."""
    x = nbp.share(np.arange(2_000_000.0), strategy=here)
    view, part, raw = x[::-2], x[10:20][3:], memoryview(x)
    outside = np.frombuffer(raw, "u1")
    address, inside = x.ctypes.data, [x]
    assert nbp.migrate(view, there) is view
    assert strategy_of(x) == strategy_of(part) == there
    assert (x.ctypes.data, float(x[-1]), float(part[0])) == (address, 1_999_999, 13)
    x[13] = -1
    assert part[0] == raw[13] == inside[0][13] == view[(1_999_999 - 13) // 2] == -1
    assert outside[13 * 8 : 14 * 8].view("f8")[0] == -1
    assert nbp.is_shared(outside)
    assert nbp.share(x, strategy=here) is x


def test_the_old_memory_is_gone():
    """After a move to a disk nothing of the old memory is left: mapped, open or named."""
    for strategy in ("file_descriptor", "file_system"):
        x = nbp.share(np.arange(200_000.0), strategy=strategy)
        (old,) = files_of(x)
        nbp.migrate(x, "mmap")
        assert files_of(x) != [old]
        fds = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        links = [os.readlink(fd) for fd in fds if os.path.islink(fd)]
        assert not [link for link in links if link.startswith(old.removesuffix(" (deleted)"))], links
        assert not made_here("/dev/shm")
        assert x.sum() == 199_999 * 100_000
        del x
    current_store().drain()
    assert not made_here("/var/tmp")


def test_ranks_follow(ranks, names):
    """The next cell gets the array from its new place, with its rights, under all its names."""
    names["x"] = nbp.zeros(SIZE)
    names["again"], names["part"] = names["x"], names["x"][5:]
    names["y"] = np.arange(50_000.0)
    assert ranks.run("x[rank] = rank + 1\nfloat(y.sum() + part.sum())", namespace=names).ranks
    nbp.migrate(names["x"], "mmap")
    nbp.migrate(names["y"], "file_system")
    names["x"][5] = 9
    assert ranks.run("x is again, float(part[0]), float(x[1])", namespace=names).values == [(True, 9, 2)] * 2
    ranks.run("x[10 + rank] = 7", namespace=names)
    assert names["x"][10:12].tolist() == [7, 7]
    with pytest.raises(ParallelError) as caught:
        ranks.run("y[0] = 1", namespace=names)
    assert isinstance(caught.value.errors[0], ReadOnlyArrayError)
    assert nbp.migrate(names["x"], "mmap") is names["x"]


def test_a_rank_that_looks_on_stops_it(ranks, names):
    """A variable of the rank's own that still shows the memory is named, and everything stays as it was."""
    names["x"] = nbp.zeros(SIZE)
    ranks.run("kept = {'a': [x[3:]]} if rank else None", namespace=names)
    before = current_store().location(names["x"])
    with pytest.raises(SegmentInUseError, match=r"rank 1: `kept`"):
        nbp.migrate(names["x"], "mmap")
    assert current_store().location(names["x"]) == before
    ranks.run("x[3] = 5", ranks=[0], namespace=names)
    assert ranks.run("float(kept['a'][0][0])", ranks=[1], namespace=names).values[1] == 5
    ranks.run("del kept", namespace=names)
    assert strategy_of(nbp.migrate(names["x"], "mmap")) == "mmap"
    assert ranks.run("float(x[3])", namespace=names).values == [5, 5]


def test_a_message_on_its_way_stops_it(ranks, names):
    """What was sent and not received yet looks at the memory as well."""
    names["x"] = nbp.zeros(SIZE)
    ranks.run("if rank == 0: send(x, 1, view=True)", namespace=names)
    with pytest.raises(SegmentInUseError, match=r"rank 0: something that is no variable"):
        nbp.migrate(names["x"], "mmap")
    ranks.run("if rank == 1: mine = recv(src=0)", namespace=names)
    with pytest.raises(SegmentInUseError, match=r"rank 1: `mine`"):
        nbp.migrate(names["x"], "mmap")
    ranks.run("if rank == 1: del mine", namespace=names)
    nbp.migrate(names["x"], "mmap")


def test_what_the_rank_assigned_stays(ranks, names):
    """A move is no change of the array: a rank that has its own value under the name keeps it."""
    names["x"] = nbp.zeros(SIZE)
    ranks.run("float(x[0])", namespace=names)
    ranks.run("x = 'mine'", ranks=[0], namespace=names)
    nbp.migrate(names["x"], "file_system")
    assert ranks.run("x if isinstance(x, str) else float(x[0])", namespace=names).values == ["mine", 0.0]


def test_a_failed_cell_does_not_stand_in_the_way(ranks, names):
    """The frames of the last traceback, and the last value, let go of what they saw."""
    names["x"] = nbp.zeros(SIZE)
    with pytest.raises(ParallelError):
        ranks.run("def f(a):\n    view = a[1:]\n    1 / 0\nf(x)", namespace=names)
    nbp.migrate(names["x"], "mmap")
    ranks.run("x[1:]", namespace=names)
    nbp.migrate(names["x"], "file_descriptor")


def test_what_cannot_move_is_refused(ranks, names, tmp_path, monkeypatch):
    """Private, packed and others' arrays, unknown strategies, no room: each is refused in a sentence."""
    x = nbp.zeros(SIZE)
    with pytest.raises(ValueError, match="only an array in shared memory"):
        nbp.migrate(np.zeros(3), "mmap")
    with pytest.raises(ValueError, match="available:"):
        nbp.migrate(x, "none_such")
    with pytest.raises(StrategyUnavailableError, match="no shared memory"):
        nbp.migrate(x, "copy")
    with pytest.raises(SegmentInUseError, match="packed"):
        nbp.migrate(nbp.share(np.arange(10), strategy="file_region"), "mmap")
    theirs = ranks.run("nbp.ones(100_000)[:]", namespace=names).values[0]
    assert not nbp.is_shared(theirs)
    with pytest.raises(ParallelError, match="only the notebook migrates"):
        ranks.run("nbp.migrate(nbp.zeros(100_000), 'mmap')", namespace=names)

    def full(*_):
        raise SharedMemoryFullError("there is no room")

    monkeypatch.setattr(type(registry.find_strategy("mmap")), "create", full)
    with pytest.raises(SharedMemoryFullError):
        nbp.migrate(x, "mmap")
    assert strategy_of(x) == "file_descriptor"


def test_pooled_memory_makes_room(monkeypatch):
    """What is only kept for reuse is given back before a move is refused."""
    x = nbp.zeros(SIZE)
    current_store().trim()
    spare = nbp.zeros(SIZE)
    del spare
    current_store().drain()
    strategy = type(registry.find_strategy("file_system"))
    create, calls = strategy.create, []

    def full_once(self, *args):
        calls.append(1)
        if len(calls) == 1:
            raise SharedMemoryFullError("there is no room")
        return create(self, *args)

    monkeypatch.setattr(strategy, "create", full_once)
    assert strategy_of(nbp.migrate(x, "file_system")) == "file_system"
    assert len(calls) == 2
    assert not [record for record in nbp.segments() if getattr(record, "phase", "") == "pooled"]


def test_a_file_is_left_behind(tmp_path):
    """A file that was opened keeps what it had; the array lives on in memory, for writing only if it was."""
    path = tmp_path / "x.npy"
    x = nbp.from_file(path, float, 1000, mode="w+")
    x[:] = 1
    nbp.migrate(x, "file_descriptor")
    x[:] = 2
    assert np.load(path).sum() == 1000
    assert x.sum() == 2000
    y = nbp.from_file(path)
    nbp.migrate(y, "file_descriptor")
    assert not y.flags.writeable
    assert files_of(y, 1) == ["r--s"]
    assert y.sum() == 1000
    with pytest.raises(ReadOnlyArrayError):
        nbp.share(y)
    with pytest.raises(ValueError, match="WRITEABLE"):
        y.flags.writeable = True


def test_not_while_a_cell_runs(ranks, names):
    """A cell that runs in another thread is in the way; nothing waits."""
    names["x"] = nbp.zeros(SIZE)
    names["go"] = nbp.zeros(1)
    cell = "x[0] = 1\nwhile not go[0]: pass"
    thread = threading.Thread(target=ranks.run, args=(cell,), kwargs={"namespace": names})
    thread.start()
    while not names["x"][0]:
        pass
    try:
        with pytest.raises(RuntimeError, match="busy"):
            nbp.migrate(names["x"], "mmap")
    finally:
        names["go"][0] = 1
        thread.join(20)
    nbp.migrate(names["x"], "mmap")


@pytest.mark.parametrize("step", ["_map_over", "_give_up", "after"])
def test_an_interrupt_between_the_steps(monkeypatch, step):
    """An interrupt in the middle leaves the array wholly at its new place, and nothing behind."""
    x = nbp.share(np.arange(50_000.0), strategy="file_system")
    original = getattr(relocation, step, None) or type(current_store()._table).renew
    calls = []

    def once(*args, **keywords):
        original(*args, **keywords)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    if step == "after":
        monkeypatch.setattr(type(current_store()._table), "renew", once)
    else:
        monkeypatch.setattr(relocation, step, once)
    with pytest.raises(KeyboardInterrupt):
        nbp.migrate(x, "file_descriptor")
    monkeypatch.undo()
    assert strategy_of(x) == "file_descriptor"
    assert not made_here("/dev/shm")
    assert "memfd" in files_of(x)[0]
    x[0] = 4
    with nbp.Session(1) as session:
        assert session.run("float(x[0] + x[-1])", namespace={"x": x}).values == [50_003]
    del x
    gc.collect()
    current_store().drain()
