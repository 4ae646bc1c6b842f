"""A process is introduced before it is started: whoever dies in between, all ends and nothing stays."""

import os
import signal
import socket
import threading

import pytest

import nbparallel as nbp
from nbparallel.channel.introduction import IntroducedClient
from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.multiprocessing import household
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.frames import Kind, encode
from nbparallel.wire.segments import FIRST_INTRODUCED, Welcome
from tests.multiprocessing.household.family import Child, await_held, held, is_gone
from tests.multiprocessing.programs import run_program


def descriptors(pid="self"):
    """Return what a process has open, but for memory and what lists it."""
    folder = f"/proc/{pid}/fd"
    found = []
    for fd in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{fd}"))
        except FileNotFoundError:
            pass  # the one that lists them
    return sorted(name for name in found if not name.startswith("/memfd:nbp-"))


def report():
    """Return what the supervisor knows; it is asked again if the machine is too busy for an answer."""
    found = []

    def answers():
        found[:] = [household.report()]
        return found[0] is not None

    wait_until(answers)
    return found[0]


def supervisors():
    """Return how many descriptors the supervisor has open, once it has read what was sent."""
    return len(descriptors(report().supervisor))


def forked(fork, work):
    """Fork; the child calls `work` and ends with what it returns."""
    pid = os.fork()
    if not pid:
        code = 99
        try:
            signal.alarm(30)
            code = work(fork)
        finally:
            os._exit(code)
    return pid


def exit_code(pid):
    """Wait for a child's end."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(fork):
    """Begin in the child, which is too late."""
    try:
        fork.child()
    except ChannelClosedError:
        return 7
    return 1


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_the_parent_is_killed_between_the_fork_and_the_announcement(root, daemon, shares, promised):
    """A daemonic child ends when it says who it is; another one lives, a guest, until the household ends."""
    arrays = [nbp.full((400, 400), 1.0)] if shares else []
    said, go_on = os.pipe(), os.pipe()

    def grandchild(fork):
        os.write(said[1], b"%d\n" % os.getpid())
        os.read(go_on[0], 1)
        fork.child()
        os.write(said[1], b"began\n")
        signal.pause()

    def parent(point):
        forked(household.prepare_fork(daemon=daemon), grandchild)
        signal.pause()

    child = Child(parent)
    lines = os.fdopen(said[0])
    pid = int(lines.readline())
    child.kill()  # it has not said which process it forked
    wait_until(lambda: report().processes == ())
    arrays.clear()
    if shares:
        assert held(), "the child is there, and maps it"
    os.write(go_on[1], b"x")
    if not daemon:
        assert lines.readline() == "began\n"
        wait_until(lambda: [guest.pid for guest in report().processes] == [pid])
        os.kill(pid, signal.SIGKILL)
    with promised(1.0):
        wait_until(lambda: is_gone(pid))
        await_held(lambda rows: rows == [])
    lines.close()
    for fd in (said[1], *go_on):
        os.close(fd)


def test_a_copy_of_the_connection_keeps_what_the_child_held(root):
    """Another thread forks in the same moment: its child has the connection of one that ended early."""
    array = nbp.full((400, 400), 1.0)
    fork = household.prepare_fork(daemon=True)
    other = forked(fork, lambda _: signal.pause())
    pid = forked(fork, lambda _: 0)
    fork.parent()
    assert exit_code(pid) == 0
    del array
    os.kill(other, signal.SIGKILL)
    exit_code(other)
    await_held(lambda rows: rows == [])


@pytest.mark.slow
def test_children_that_die_at_once_leave_no_descriptor(root):
    """Neither here nor in the supervisor, which never learns who they were; nor does a fork that failed."""
    before, theirs = descriptors(), supervisors()
    for shares in (False, True):
        array = nbp.full((400, 400), 1.0) if shares else None
        for _ in range(5):
            fork = household.prepare_fork(daemon=True)
            pid = forked(fork, lambda _: 0)
            fork.parent()
            assert exit_code(pid) == 0
            household.prepare_fork(daemon=False).parent()
        del array
    # fewer: when this began it had perhaps not closed yet what another test had left
    wait_until(lambda: supervisors() <= theirs, lambda: (supervisors(), theirs))
    assert descriptors() == before


LOOK = """
        from nbparallel.multiprocessing import household
        from nbparallel.testing.waiting import wait_until

        def descriptors(pid="self"):
            found, folder = [], f"/proc/{pid}/fd"
            for fd in os.listdir(folder):
                try:
                    found.append(os.readlink(f"{folder}/{fd}"))
                except FileNotFoundError:
                    pass
            return sorted(found)

        def rest():
            # how many descriptors the supervisor has when it has seen the end of all guests
            found = []

            def ended():
                found.append(household.report())
                return found[-1] is not None and not found[-1].processes

            wait_until(ended)
            return len(descriptors(found[-1].supervisor))

        def run(**given):
            process = ctx.Process(**given)
            process.start()
            process.join()
            assert process.exitcode == 0
            process.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_start_leaves_no_descriptor(method, tmp_path):
    """The ends that the process got are closed here, and in the supervisor when it has ended."""
    run_program(
        LOOK
        + """
        run(target=abs, args=(1,))  # brings up servers
        before, theirs = descriptors(), rest()
        run(target=abs, args=(1,))
        assert descriptors() == before
        assert rest() <= theirs
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_process_among_the_arguments_of_another(method, tmp_path):
    """Only the one that is started is introduced."""
    run_program(
        LOOK
        + """
        run(target=getattr, args=(ctx.Process(target=abs, args=(1,), name="inner"), "name"))
        before = descriptors()
        run(target=getattr, args=(ctx.Process(target=abs, args=(1,), name="inner"), "name"))
        assert descriptors() == before
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_the_fork_server_is_killed(tmp_path):
    """A process that it has forked goes on, a guest, and sends; one that it was to fork is forgotten."""
    run_program(
        LOOK
        + """
        import threading
        from nbparallel.multiprocessing.starting.fork_server import present_server

        def await_end():
            os.waitid(os.P_PID, present_server._forkserver_pid, os.WEXITED | os.WNOWAIT)

        def work(array, coming, going):
            going.send(os.getpid())
            coming.recv()
            array[0] = 7
            going.send(array)

        array = nbp.full(100_000, 1.0)
        (coming, go), (answers, going) = ctx.Pipe(False), ctx.Pipe(False)
        process = ctx.Process(target=work, args=(array, coming, going))
        process.start()
        pid = answers.recv()
        os.kill(present_server._forkserver_pid, signal.SIGKILL)
        await_end()
        assert [guest.pid for guest in household.report().processes] == [pid]
        go.send(None)
        assert np.shares_memory(answers.recv(), array) and array[0] == 7
        process.join()
        assert process.exitcode == 255  # nobody can say how it ended: so the library, too

        run(target=abs, args=(1,))  # another server
        theirs = rest()
        os.kill(present_server._forkserver_pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, [present_server._forkserver_pid, signal.SIGKILL]).start()
        try:
            ctx.Process(target=abs, args=(1,)).start()
        except StartError as error:
            assert "the fork server, process" in str(error)
        else:
            raise AssertionError("a server that was stopped has forked")
        await_end()
        run(target=abs, args=(1,))
        assert rest() <= theirs
        """,
        tmp_path,
        "forkserver",
    )


def test_a_forked_child_has_no_end_of_its_parents(root):
    """Its parent's connection would seem to live as long as it; generations would pile up lifelines."""

    def look(depth):
        def work(point):
            mine = descriptors()
            connections = {f"socket:[{os.fstat(fd).st_ino}]" for fd in (household.membership().fileno(),)}
            assert not parents & set(mine)
            assert connections <= set(mine)
            assert mine.count(pipe) == 1
            if depth:
                assert Child(look(depth - 1)).wait() == 0

        return work

    parents = {f"socket:[{os.fstat(root.fileno()).st_ino}]"}
    pipe = f"pipe:[{os.fstat(root.lifeline.fileno()).st_ino}]"
    assert Child(look(2)).wait() == 0


def test_the_supervisor_is_killed_before_the_child_begins(root):
    """The child does not begin; the parent goes on, and its next start has another supervisor."""
    array = nbp.full((400, 400), 1.0)
    fork = household.prepare_fork(daemon=True)
    supervisor = report().supervisor
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: is_gone(supervisor))
    pid = forked(fork, refused)
    fork.parent()
    assert exit_code(pid) == 7
    assert Child(lambda point: float(array.sum())).wait() == 0
    assert household.membership() is not root
    assert report().supervisor != supervisor


def test_the_household_ends_before_the_child_begins(root):
    """The child, of which the supervisor cannot know which process it is, does not begin."""
    go_on = os.pipe()

    def late(fork):
        os.read(go_on[0], 1)
        return refused(fork)

    fork = household.prepare_fork(daemon=False)
    pid = forked(fork, late)
    fork.parent()
    household.stop()
    os.write(go_on[1], b"x")
    assert exit_code(pid) == 7
    for fd in go_on:
        os.close(fd)


@pytest.mark.slow
def test_answers_of_the_supervisor():
    """A process waits for it; one that comes no more, or is another one, is an error."""

    def begin(speak, *, after=0.0):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client = IntroducedClient(ours)
        timer = threading.Timer(after, speak, [theirs])
        timer.start()
        if not after:
            timer.join()
        try:
            return client.begin(os.getpid()).client
        finally:
            timer.join()
            client.close()
            theirs.close()

    def welcome(end):
        end.send(encode(Kind.WELCOME, Welcome(FIRST_INTRODUCED + 5).pack()))

    def end(end):
        end.shutdown(socket.SHUT_WR)

    for after in (0.0, 0.2):
        assert begin(welcome, after=after) == FIRST_INTRODUCED + 5
        with pytest.raises(ChannelClosedError):
            begin(end, after=after)
        with pytest.raises(ProtocolError, match="INTRODUCE"):
            begin(lambda end: end.send(encode(Kind.IDLE, Welcome(FIRST_INTRODUCED).pack())), after=after)


def test_an_interpreter_that_ends_at_once(tmp_path):
    """A process whose interpreter ends before it has read its task is an error, not a wait without end."""
    run_program(
        LOOK
        + """
        ctx.set_executable("/bin/true")
        try:
            ctx.Process(target=len, args=(bytes(1 << 20),)).start()
        except StartError as error:
            assert "ended before it had read what" in str(error)
        else:
            raise AssertionError("it was started")
        """,
        tmp_path,
        "spawn",
    )
