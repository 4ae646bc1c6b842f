"""Processes that this one starts become clients of its household, hold what they use, and end with it."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.channel.introduction import IntroducedClient
from nbparallel.errors import ChannelClosedError, ForkedRankError, SupervisorDiedError
from nbparallel.multiprocessing import household
from nbparallel.testing.waiting import wait_until
from tests.multiprocessing.household.family import Child, MailPipe, await_held, held, is_gone, spawned


def test_a_forked_child_has_the_same_memory(root):
    """It reads and writes what its parent shared, large or packed, and sends it on as the same memory."""
    large, small, private = nbp.full((400, 400), 1.0), nbp.full(3, 2.0), np.ones(3)
    pipe = MailPipe()

    def work(point):
        large[0, 0] = small[0] = private[0] = 7.0
        pipe.send({"large": large[::2, 1:], "small": small, "private": private})

    child = Child(work)
    received = pipe.receive()
    assert child.wait() == 0
    assert np.shares_memory(received["large"], large)
    assert np.shares_memory(received["small"], small)
    assert received["large"].strides == large[::2, 1:].strides
    assert (large[0, 0], small[0], private[0], received["private"][0]) == (7.0, 7.0, 1.0, 7.0)
    pipe.close()


def test_what_a_child_inherited_is_not_used_again(root):
    """The parent drops its arrays: as long as a child lives, their memory is not given to new ones."""
    arrays = [nbp.full((400, 400), 1.0), nbp.full(100, 2.0)]
    kept = nbp.full(100, 9.0)  # the region of the small one stays in use

    def work(point):
        point("inherited")
        assert (arrays[0] == 1.0).all()
        assert (arrays[1] == 2.0).all()

    child = Child(work)
    child.await_point("inherited")
    await_held(lambda rows: len(rows) == 2)
    segments = {row.segment for row in held()}
    arrays.clear()
    root.store.drain()
    others = [nbp.full((400, 400), 3.0) for _ in range(4)] + [nbp.full(100, 4.0) for _ in range(50)]
    assert segments <= {row.segment for row in held()}
    child.go_on()
    assert child.wait() == 0
    del others, kept
    await_held(lambda rows: not [row for row in rows if row.segment in segments and row.holders != (0,)])


@pytest.mark.slow
def test_a_spawned_process_is_a_guest(root):
    """It has the array by its handle, as the same memory, and is listed with its parent."""
    pipe = MailPipe()
    array = nbp.full((400, 400), 1.0)
    pipe.send(array)
    code = (
        "from nbparallel.transfer.pickling import loads\n"
        "from tests.multiprocessing.household.family import _LENGTHS\n"
        f"parcel, n = _LENGTHS.unpack(os.read({pipe.read_end}, 16)); data = os.read({pipe.read_end}, n)\n"
        "array = loads(data, member.store, broker=member.broker); member.take(parcel)\n"
        "array[0, 0] = 9; print(member.client, flush=True); sys.stdin.read()"
    )
    process = spawned(code, inherit=[pipe.read_end], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    client = int(process.stdout.readline())
    assert array[0, 0] == 9
    (guest,) = household.report().processes
    assert (guest.client, guest.pid, guest.parent, guest.daemon) == (client, process.pid, 0, True)
    assert [row.holders for row in held()] == [(0, client)]
    process.communicate()
    assert process.returncode == 0
    await_held(lambda rows: [row.holders for row in rows] == [(0,)])
    pipe.close()


def test_guests_of_guests(root):
    """To any depth: what a grandchild sends is the memory that its grandparent shared."""
    array = nbp.full((400, 400), 1.0)
    pipe = MailPipe()

    def grandchild(point):
        pipe.send((household.membership().client, array))

    child = Child(lambda point: Child(grandchild).wait())
    client, received = pipe.receive()
    assert child.wait() == 0
    assert client > 1 << 22
    assert np.shares_memory(received, array)
    pipe.close()


def test_what_only_a_dead_guest_held_is_gone(root, promised):
    """A guest is killed: its memory is gone within a second."""

    def work(point):
        mine = nbp.full((400, 400), 1.0)
        household.membership().store.handle(mine, broker=household.membership().broker)
        point("made")

    child = Child(work)
    child.await_point("made")
    await_held(lambda rows: len(rows) == 1)
    child.kill()
    with promised(1.0):
        await_held(lambda rows: rows == [])


def test_a_child_that_dies_before_it_introduces_itself(root):
    """What was held for it is released with its connection, or when the fork did not happen."""
    array = nbp.full((400, 400), 1.0)
    fork = household.prepare_fork(daemon=True)
    pid = os.fork()
    if not pid:
        os._exit(0)
    fork.parent()
    os.waitpid(pid, 0)
    household.prepare_fork(daemon=True).parent()
    del array
    await_held(lambda rows: rows == [])


def test_a_plain_fork_stays_inert(root):
    """Without `prepare_fork` a child is no client, and nothing it does has an effect."""
    array = nbp.full((400, 400), 1.0)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            household.membership()
        except ForkedRankError:
            code = 0
        finally:
            household.stop()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert household.report() is not None
    assert household.report().processes == ()
    assert array[0, 0] == 1.0


@pytest.mark.slow
def test_other_threads_go_on_after_a_fork(root):
    """A thread that shares arrays while others fork neither hangs nor makes a child hang."""
    stop, made = threading.Event(), []

    def share():
        while not stop.is_set():
            made.append(nbp.full(300, 1.0))
            if len(made) > 50:
                made.clear()

    thread = threading.Thread(target=share)
    thread.start()
    try:
        for _ in range(10):
            assert Child(lambda point: nbp.full((400, 400), 1.0).sum()).wait() == 0
    finally:
        stop.set()
        thread.join()
    made.clear()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_guest_whose_parent_is_killed(root, daemon, promised):
    """A daemonic one ends with its parent; another one lives as long as the root, and can send."""
    pipe = MailPipe()

    def parent(point):
        Child(lambda _: (pipe.send(os.getpid()), signal.pause()), daemon=daemon)
        point("started")

    child = Child(parent)
    pid = pipe.receive()
    child.await_point("started")
    child.kill()
    if daemon:
        with promised(1.0):
            wait_until(lambda: is_gone(pid))
    wait_until(lambda: len(household.report().processes) == (not daemon))
    with promised(2.0):
        household.stop()
        wait_until(lambda: is_gone(pid))
    os.close(pipe.read_end)
    os.close(pipe.write_end)


@pytest.mark.slow
def test_the_root_is_killed(promised):
    """Its guests, their guests and the supervisor are gone within a second, and so are the names."""
    code = """
import os, signal, sys
from tests.multiprocessing.household.family import Child, MailPipe
import nbparallel as nbp
from nbparallel.multiprocessing import household
nbp.set_sharing_strategy("file_system")
pipe = MailPipe()
array = nbp.full((400, 400), 1.0)
def say(number):
    os.write(1, b"%d\\n" % number)
def inner(point):
    pipe.send(nbp.full((400, 400), 2.0)); say(os.getpid()); signal.pause()
def outer(point):
    Child(inner, daemon=False); say(os.getpid()); signal.pause()
Child(outer, daemon=False)
pipe.send(array)
say(household.report().supervisor)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pids = [int(process.stdout.readline()) for _ in range(3)]
    process.kill()
    with promised(1.0):
        wait_until(lambda: all(map(is_gone, pids)))
    process.communicate()


def test_the_supervisor_is_killed(root):
    """Operations that need it say so; arrays stay; the root's next need starts another one."""
    array = nbp.full((400, 400), 1.0)
    pipe = MailPipe()

    def work(point):
        point("started")
        try:
            with household.supervised():
                pipe.send(array)
        except SupervisorDiedError:
            return
        raise AssertionError("it was not noticed")

    child = Child(work)
    child.await_point("started")
    supervisor = household.report().supervisor
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: is_gone(supervisor))
    assert household.report() is None
    child.go_on()
    assert child.wait() == 0
    with pytest.raises(SupervisorDiedError), household.supervised():
        root.take(root.new_mailbox())
    assert household.membership() is not root
    assert array[0, 0] == 1.0
    os.close(pipe.read_end)
    os.close(pipe.write_end)
    other = MailPipe()
    other.send(array)
    assert np.shares_memory(other.receive(), array)
    other.close()


@pytest.mark.slow
def test_introduced_twice_or_too_late(root):
    """A process is a client once; one that begins after the supervisor's end does not begin."""
    ends = household.introduce_guest(daemon=True)
    copies = os.dup(ends.connection.fileno()), os.dup(ends.lifeline.fileno())
    with pytest.raises(RuntimeError, match="client of a supervisor already"):
        household.begin_as_guest(copies[0], lifeline=copies[1])
    for fd in copies:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    process = spawned("import sys; sys.exit(0 if household.current_membership() is member else 1)")
    assert process.wait() == 0
    household.stop()
    with pytest.raises(ChannelClosedError):
        IntroducedClient(ends.connection).begin(os.getpid())
    ends.close()
