"""Segments with names: announced before they exist, gone when nobody needs them, whoever is killed."""

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ChannelClosedError, SharedMemoryFullError
from nbparallel.sharing import Store, current_store
from nbparallel.sharing.strategies.file_system import FileSystemStrategy
from nbparallel.sharing.strategies.memory_map import MemoryMapStrategy
from nbparallel.sharing.strategies.owned_names import process_names
from nbparallel.testing.waiting import wait_until
from tests.harness.sandboxes import missing_reason, on_small_tmpfs, run_script
from tests.harness.stores import names_of, own_sources, store_brokers

SHM = Path("/dev/shm")
NAMED = ("file_system", "mmap")


def names(folder=SHM):
    """Return the names of ours in a folder."""
    return {path.name for path in Path(folder).glob("nbp_*")}


@pytest.fixture(params=NAMED)
def named(request, tmp_path):
    """Make a strategy whose names lie in a folder of the test's own."""
    if request.param == "mmap":
        return MemoryMapStrategy(str(tmp_path))
    return FileSystemStrategy(str(tmp_path))


def test_a_name_is_announced_before_it_exists(named, tmp_path):
    """Whenever its maker is killed, somebody knows what to remove."""
    seen = []

    def intend(path):
        assert not os.path.lexists(path)
        seen.append(path)

    source = named.create(5000, None, intend)
    assert seen == [source.path]
    status = os.lstat(source.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_size, status.st_blocks * 512) == (8192, 8192)
    assert len(os.path.basename(source.path)) <= 25
    source.close()
    source.close()
    assert names(tmp_path) == set()


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


def test_a_full_folder_is_an_error(named, tmp_path):
    """More than there is room for is refused with the numbers, and nothing is left."""
    with pytest.raises(SharedMemoryFullError, match=r"needs 1\.0 EiB, .* free on"):
        named.create(1 << 60)
    assert names(tmp_path) == set()


def test_space_that_goes_between_the_look_and_the_use(named, tmp_path, monkeypatch):
    """`posix_fallocate` decides: an exception, no signal, and no name is left behind."""

    def full(fd, start, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryFullError):
        named.create(1 << 20)
    assert names(tmp_path) == set()


def test_names_are_taken_only_by_their_maker(named, tmp_path, monkeypatch):
    """A file or link that is there already is left alone, and another name is drawn."""
    from nbparallel.sharing.strategies.owned_names import process_names

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "nbp_a_1").symlink_to(victim)
    drawn = iter(["nbp_a_1", "nbp_a_2"])
    monkeypatch.setattr(process_names, "draw", lambda: next(drawn))
    source = named.create(100)
    assert os.path.basename(source.path) == "nbp_a_2"
    source.close()
    assert victim.read_text() == "precious"
    assert (tmp_path / "nbp_a_1").is_symlink()


@pytest.mark.parametrize("strategy", NAMED)
def test_the_ledger_removes_what_a_killed_client_made(exchange, strategy):
    """A rank that dies takes its names along, unless another one still uses the segment."""
    made, other = exchange.store(1), exchange.store(2)
    lonely = made.share(np.arange(100_000), strategy=strategy)
    shared = made.share(np.arange(200_000), strategy=strategy)
    both = other.attach(made.handle(shared))
    first, second = exchange.server.ledger.names
    assert os.path.exists(first)
    assert os.path.exists(second)
    # As if its process had been killed: it says nothing, and removes nothing.
    for source in own_sources(made).values():
        source.path = ""
    for path in (first, second):
        process_names.disclaim(path)
    exchange.kill(1)
    assert not os.path.exists(first)
    assert os.path.exists(second)
    assert both[190] == 190
    del both
    other.drain()
    assert not os.path.exists(second)
    assert exchange.server.ledger.names == {}
    del lonely, shared
    made.close()


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


@pytest.mark.slow
def test_names_of_a_killed_rank_go_within_a_second():
    """``kill -9`` of a rank: its names in /dev/shm are gone within a second, while the session lives."""
    with nbp.Session(2) as session:
        session.run("x = nbp.share(np.ones(100_000), strategy='file_system')", namespace={"np": np})
        assert len(names_of(os.getpid())) == 2
        os.kill(session.statistics().ranks[1].pid, 9)
        wait_until(lambda: len(names_of(os.getpid())) <= 1, lambda: names_of(os.getpid()), seconds=1.0)
        assert session.run("float(x.sum())", ranks=[0]).values[0] == 1e5
    assert names_of(os.getpid()) == []


@pytest.mark.slow
def test_names_of_a_killed_notebook_go_with_the_session():
    """``kill -9`` of the notebook: its own names and the ranks' are gone once the supervisor has ended."""
    before = names()
    code = """
        import os, numpy as np, nbparallel as nbp
        session = nbp.Session(2)
        session.start()
        x = nbp.share(np.ones(100_000), strategy="file_system")
        session.run("y = nbp.share(x + 1, strategy='file_system')", namespace={"x": x})
        made = {name for name in os.listdir("/dev/shm") if name.startswith("nbp_")}
        print(len(made), flush=True)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert int(done.stdout) >= 3, done.stderr
    wait_until(lambda: names() <= before, lambda: names() - before, seconds=2.0)


@pytest.mark.parametrize(("client", "made"), [(0, True), (1, False)])
def test_no_name_that_nobody_knows_of(exchange, monkeypatch, client, made):
    """A rank that cannot announce a name makes none; the notebook removes its own at exit in any case."""
    store = exchange.store(client)
    (broker,) = store_brokers(store)

    def gone(message, fd=None):
        raise ChannelClosedError("the other process is gone")

    monkeypatch.setattr(broker, "send", gone)
    before = names()
    if made:
        x = store.share(np.arange(100_000), strategy="file_system")
        assert len(names() - before) == 1
        del x
    else:
        with pytest.raises(ChannelClosedError):
            store.share(np.arange(100_000), strategy="file_system")
    store.drain()
    assert names() <= before


MOUNTED_OVER = """
import subprocess, sys, tempfile
from nbparallel.sharing.strategies.page_allocation import file_system_of
with tempfile.TemporaryDirectory() as folder:
    before = file_system_of(folder)
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
    assert file_system_of(folder) == before and not opened, opened
    subprocess.run(["mount", "-t", "ramfs", "nbp", folder], check=True)
    print(before, file_system_of(folder))
    subprocess.run(["umount", folder], check=True)
    assert file_system_of(folder) == before
"""


def test_the_mount_table_is_read_once_and_again_when_something_is_mounted(tmp_path):
    """Every allocation on a disk asks for the kind of file system; reading the table costs as much as it."""
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    done = run_script(MOUNTED_OVER, on_small_tmpfs(tmp_path, "64k"))
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split()
    assert before != after == "ramfs"
