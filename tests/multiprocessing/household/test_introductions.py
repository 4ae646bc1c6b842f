"""A process is introduced before it is started: whoever dies in between, all ends and nothing stays."""

import os
import signal

import pytest

import nbparallel as nbp
from nbparallel.multiprocessing import household
from nbparallel.testing.waiting import wait_until
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
        forked(household.membership().fork(daemon=daemon), grandchild)
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
        from nbparallel.multiprocessing.starting.start_methods import present_server

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
