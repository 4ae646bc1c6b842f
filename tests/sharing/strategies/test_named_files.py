"""Segments with names: announced before they exist, gone when nobody needs them, whoever is killed."""

import os
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.sharing import Store, current_store
from nbparallel.sharing.strategies.named_files import FileSystemStrategy, MemoryMapStrategy

NAMED = ("file_system", "mmap")


@pytest.fixture(params=NAMED)
def named(request, tmp_path):
    """Make a strategy whose names lie in a folder of the test's own."""
    if request.param == "mmap":
        return MemoryMapStrategy(str(tmp_path))
    return FileSystemStrategy(str(tmp_path))


def test_the_umask_changes_nothing(named):
    """The owner, and nobody else, may read and write, whatever the user's umask."""
    for mask in (0o777, 0):
        before = os.umask(mask)
        try:
            source = named.create(1)
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(source.path).st_mode) == 0o600
        source.close()


@pytest.mark.parametrize("strategy", NAMED)
def test_a_name_goes_with_the_last_user(exchange, strategy):
    """Neither the maker's nor the receiver's end alone removes it; the last one's does."""
    made, other = exchange.store(0), exchange.store(1)
    x = made.share(np.arange(1000), strategy=strategy)
    (path,) = exchange.server.ledger.names
    y = other.attach(made.handle(x))
    assert np.array_equal(x, y)
    del x
    made.drain()
    assert os.path.exists(path)
    assert y[999] == 999
    del y
    other.drain()
    assert not os.path.exists(path)
    made.drain()
    assert exchange.server.ledger.names == {}


def test_what_was_named_before_the_session_is_announced_to_it(fresh_exchange):
    """A session that starts later removes the names that exist already."""
    store = Store(0)
    x = store.share(np.arange(10), strategy="file_system")
    exchange = fresh_exchange()
    exchange.adopt(store)
    (path,) = exchange.server.ledger.names
    assert os.path.exists(path)
    exchange.close()
    assert not os.path.exists(path)
    assert x.sum() == 45, "the memory outlives its name and its session"
    del x
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", NAMED)
def test_a_process_without_a_session_removes_its_names(strategy, tmp_path):
    """At the end of a script nothing is left, also of arrays that were still alive."""
    code = f"""
        import os, numpy as np, nbparallel as nbp
        nbp.set_sharing_strategy({strategy!r})
        x, y = nbp.zeros(100_000), nbp.zeros(100_000)
        paths = [s.path for s in nbp.segments()]
        assert all(map(os.path.exists, paths)), paths
        del y
        nbp.sharing.current_store().drain()
        assert [os.path.exists(path) for path in paths] == [True, False]
        if os.fork() == 0:
            raise SystemExit
        os.wait()
        assert os.path.exists(paths[0]), "a forked child removes nothing"
        print(paths[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(done.stdout.strip())


@pytest.mark.parametrize("strategy", NAMED)
def test_an_unrelated_process_opens_the_memory_by_name(strategy):
    """`nbp.segments` tells the name as long as there is one; what is written by either is seen by both."""
    x = nbp.zeros(100_000, strategy=strategy)
    here = current_store().location(x).segment

    def path():
        (found,) = [record.path for record in nbp.segments() if record.segment == here]
        return found

    x[7] = 3
    code = "import numpy, sys; x = numpy.memmap(sys.argv[1], float, 'r+'); x[8] = 2 * x[7]"
    subprocess.run([sys.executable, "-c", code, path()], check=True, timeout=60)
    assert x[8] == 6
    os.unlink(path())
    assert path() == ""
    assert x[8] == 6
    del x
    current_store().drain()
