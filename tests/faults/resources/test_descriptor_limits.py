"""Few descriptors, many segments, names that somebody removes (F42-F45): an error, and all goes on."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from nbparallel.errors import SharedMemoryFullError
from nbparallel.sharing import Store
from nbparallel.sharing.memory import memory_limits

PRELUDE = """
import os, resource, sys, time
import numpy as np
import nbparallel as nbp
from nbparallel.errors import FileDescriptorLimitError, ParallelError, SharedMemoryFullError
from nbparallel.testing.waiting import wait_until

def descriptors(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))

def lower(limit, hard=None):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
MANY = """
import gc
BITES = WHO != "ranks"  # what a rank maps keeps no descriptor
nbp.set_sharing_strategy(STRATEGY)
if WHO == "all":
    lower(LIMIT, LIMIT)
with nbp.Session(2) as session:
    session.run("import resource\\nkept = []")
    supervisor = session.statistics().supervisor_pid
    if WHO == "notebook":
        lower(LIMIT)
    elif WHO == "ranks":
        session.run(f"resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))")
    before = descriptors(supervisor)
    arrays, error = [], None
    for number in range(5000 if BITES else 4 * LIMIT):
        try:
            array = nbp.full(300_000, number % 256, "u1")
            session.push(array=array)
            seen = list(session.run("kept.append(array)\\nint(array[-1])").values)
            assert seen == [number % 256] * 2, seen
            arrays.append(array)
        except (FileDescriptorLimitError, ParallelError) as caught:
            error = caught
            break
    if BITES:
        text = str(error)
        assert "descriptor" in text and "ulimit -n" in text, text
        assert WHO == "all" or f"limit of {LIMIT} (" in text, text
    else:
        assert error is None, error
    if isinstance(error, ParallelError):
        assert all(isinstance(e, FileDescriptorLimitError) for e in error.errors.values()), error.errors
    assert len(arrays) > 5, len(arrays)
    # everybody lives, knows what it knew, and can do all else
    assert min(session.run("all_reduce(1)\\nlen(kept)").values) >= len(arrays)
    assert all((array == number % 256).all() for number, array in enumerate(arrays))
    open(os.devnull).close()
    caught = error = None
    del array, arrays
    gc.collect()
    session.run("kept.clear()\\narray = None")
    # What ranks let go of reaches the supervisor, and from there this process, a moment later; which of the
    # three is short of descriptors depends on which limit it was.
    deadline = time.monotonic() + 10
    while True:
        fresh = nbp.ones(300_000)
        try:
            session.push(fresh=fresh)
            assert list(session.run("float(fresh.sum())").values) == [300_000.0] * 2
            break
        except ParallelError as late:
            assert time.monotonic() < deadline, late
            del late
    session.restart(1)
    assert list(session.run("rank").values) == [0, 1]
    wait_until(lambda: descriptors(supervisor) - before < 20, "dropped segments keep descriptors", seconds=30)
"""


def run(script, *, before=(), **constants):
    """Run a script in a process of its own; it has to end well and say nothing."""
    head = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    done = subprocess.run(
        [*before, sys.executable, "-c", head + PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize(
    ("who", "limit"),
    [("notebook", 64), ("notebook", 256), ("ranks", 64), ("ranks", 128), ("all", 64), ("all", 128)],
)
def test_f42_five_thousand_arrays(strategy, who, limit):
    """Wherever the limit bites, the error names it, nobody dies, and what was dropped makes room again."""
    run(MANY, WHO=who, LIMIT=limit, STRATEGY=strategy)


@pytest.mark.time_limit(60)
def test_f42_descriptors_that_are_lost_on_the_way():
    """A frame that lost descriptors is refused whole, what did come is closed, the next frame is read."""
    run(
        """
        import fcntl
        from nbparallel.channel import Channel
        from nbparallel.errors import ProtocolError
        from nbparallel.wire.frames import Kind

        def taken():
            count = 0
            for fd in range(64):
                try:
                    fcntl.fcntl(fd, fcntl.F_GETFD)
                except OSError:
                    continue
                count += 1
            return count

        ours, theirs = map(Channel, Channel.pair())
        lower(64)
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            os.close(spare.pop())  # room for one
        ours.send(Kind.STREAM, b"three", fds=[0, 1, 2])
        ours.send(Kind.STREAM, b"one", fds=[0])
        before = taken()
        try:
            theirs.receive(5)
        except ProtocolError as error:
            assert "lost" in str(error), error
        else:
            raise AssertionError("it was taken for whole")
        assert taken() == before, "what did arrive stays open"
        frame = theirs.receive(5)
        assert (frame.payload, len(frame.fds)) == (b"one", 1)
        frame.close()
        """
    )


def without_privileges():
    """Return the words before a command that take from root what other users do not have either."""
    if os.geteuid() or shutil.which("setpriv") is None:
        return []
    drop = "-sys_resource,-sys_admin"
    return ["setpriv", "--bounding-set", drop, "--inh-caps", drop]


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_f43_a_thousand_segments_in_one_message():
    """They arrive, each with a descriptor of its own."""
    run(
        """
        lower(4096, 4096)
        many = [nbp.full(300_000, number % 256, "u1") for number in range(1000)]
        expected = [number % 256 for number in range(1000)]
        with nbp.Session(2) as session:
            session.push(many=many)
            assert list(session.run("[int(x[-1]) for x in many]").values) == [expected] * 2
        """,
        before=without_privileges(),
    )


@pytest.mark.time_limit(60)
def test_f43_too_many_descriptors_under_way():
    """Who may have no more of them in sockets (ETOOMANYREFS) waits until some have been taken."""
    run(
        """
        import threading, time
        from nbparallel.channel import Channel
        from nbparallel.wire.frames import Kind
        ours, theirs = map(Channel, Channel.pair())
        lower(40, 40)
        taken = []

        def take():
            time.sleep(0.2)
            while len(taken) < 150:
                frame = theirs.receive(10)
                taken.append(len(frame.fds))
                frame.close()

        thread = threading.Thread(target=take)
        thread.start()
        for _ in range(150):
            ours.send(Kind.STREAM, fds=[0])
        thread.join()
        assert taken == [1] * 150
        ours.close()
        theirs.close()
        """,
        before=without_privileges(),
    )


@pytest.mark.time_limit(60)
def test_f44_many_mappings(monkeypatch):
    """Before the table of mappings is full there is an error that names it; small arrays find room."""
    store = Store()
    monkeypatch.setattr(memory_limits, "most_mappings", lambda: 10)
    made = [store.zeros(300_000, "u1", strategy="file_descriptor") for _ in range(10)]
    with pytest.raises(SharedMemoryFullError, match=r"10 segments .* vm\.max_map_count"):
        store.zeros(300_000, "u1", strategy="file_descriptor")
    del made[:2]
    small = [store.zeros(100, strategy="file_descriptor") for _ in range(1000)]
    del made, small
    store.close()


def test_f44_the_limit_leaves_room():
    """Python itself needs mappings: what shared arrays take stays under the system's limit."""
    with open("/proc/sys/vm/max_map_count") as file:
        limit = int(file.read())
    assert limit // 2 < memory_limits.most_mappings() < limit


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("nbytes", [800, 800_000])
def test_f45_a_name_that_somebody_removes(nbytes):
    """Ranks that have the memory go on, and those that come later get it from the supervisor."""
    run(
        """
        nbp.set_sharing_strategy("file_system")
        with nbp.Session(2) as session:
            x = nbp.ones(NBYTES, "u1")
            session.push(x=x)
            assert list(session.run("int(x.sum())").values) == [NBYTES] * 2
            y = nbp.full(NBYTES, 2, "u1")
            for name in os.listdir("/dev/shm"):
                if name.startswith("nbp") and f"/dev/shm/{name}" in open("/proc/self/maps").read():
                    os.unlink(f"/dev/shm/{name}")
            session.restart(1)
            session.push(x=x, y=y)
            assert list(session.run("int(x.sum()), int(y.sum())").values) == [(NBYTES, 2 * NBYTES)] * 2
            x[0] = 7
            assert list(session.run("int(x[0])").values) == [7, 7]
        """,
        NBYTES=nbytes,
    )


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_f42_what_the_supervisor_refused_goes_out_when_there_is_room_again():
    """The same array, from the notebook as from a rank; not only a new one."""
    run(
        """
        with nbp.Session(2) as session:
            session.run("1")
            supervisor = session.statistics().supervisor_pid
            limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
            array = nbp.full(300_000, 7.0)
            session.run("mine = nbp.full(300_000, 3.0) if rank == 0 else None")
            hand_out = "if rank == 0: send(mine, 1, view=True)\\nelse: x = recv(src=0); assert x[-1] == 3"
            # it leaves a quarter of the table free
            used = max(map(int, os.listdir(f"/proc/{supervisor}/fd")))
            resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (used + 1, limits[1]))
            for attempt in range(2):
                for refused in (lambda: session.push(array=array), lambda: session.run(hand_out)):
                    try:
                        refused()
                    except ParallelError as error:
                        texts = [str(each) for each in error.errors.values()]
                        assert any("supervisor has no file descriptor left" in text for text in texts), texts
                    else:
                        raise AssertionError("it was handed out")
            resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
            session.run(hand_out)
            session.push(array=array)
            assert list(session.run("float(array[-1])").values) == [7.0] * 2
        """
    )


@pytest.mark.slow
def test_f42_the_reserve_is_left_to_other_code():
    """Shared arrays stop early: files, pipes and a session can still be opened, as many as the error says."""
    run(
        """
        from nbparallel.sharing.memory.memory_limits import LEAST_SPARE, MOST_SPARE, spare
        for limit, expected in ((48, LEAST_SPARE), (256, 32), (1024, MOST_SPARE)):
            lower(limit)
            assert spare() == expected, spare()
            arrays = []
            try:
                while len(arrays) < limit:
                    arrays.append(nbp.empty(300_000, "u1"))
            except FileDescriptorLimitError as error:
                assert f"of which shared arrays leave {expected} to other code" in str(error), error
            else:
                raise AssertionError("there was no limit")
            files = []
            try:
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
            for file in files:
                os.close(file)
            assert expected <= len(files) <= expected + 2, (limit, len(files), expected)
            arrays = None
        """
    )
