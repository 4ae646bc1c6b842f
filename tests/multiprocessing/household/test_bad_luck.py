"""What a process is not given, or gets damaged: an error that says so, and everything else goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.matrix(cover=(), size=1)]  # each start method by turns

ECHO = """
def echo(end):
    while True:
        try:
            end.send(end.recv())
        except NbParallelError as error:
            end.send(f"{type(error).__name__}: {error}")

here, there = ctx.Pipe()
process = ctx.Process(target=echo, args=(there,), daemon=True)
process.start()
there.close()

def answer(message):
    here.send(message)
    assert here.poll(30)
    return here.recv()
"""


def test_a_supervisor_that_is_killed(tmp_path: Path, method: str) -> None:
    """Arrays can no longer be sent to its processes, other messages can; new processes get a new one."""
    run_program(
        ECHO
        + """
from nbparallel.multiprocessing import household
x = nbp.ones(10)
assert answer(x)[0] == 1
supervisor = household.report().supervisor
os.kill(supervisor, signal.SIGKILL)
os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)
assert answer({"small": 1}) == {"small": 1}
for array in (x, np.ones(100_000)):
    text = answer(array)
    assert text.startswith("SupervisorDiedError: ") and "other messages still can" in text, text
assert answer([1, 2]) == [1, 2]
assert x.sum() == 10
process.terminate()
process.join(30)
with ctx.Pool(1) as pool:
    assert pool.apply(np.sum, (np.ones(100_000),)) == 1e5
""",
        tmp_path,
        method,
    )


def test_shared_memory_that_is_full(tmp_path: Path, method: str) -> None:
    """It is an error where a message is made; pipes, queues, pools and executors stay usable."""
    run_program(
        """
        import resource
        big, nbytes = np.ones(1_000_000), 4_000_000
        pipe, queue = ctx.Pipe(), ctx.SimpleQueue()
        # what one file may hold stands for what all of shared memory may
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

        def refused(function, *args):
            try:
                function(*args)
            except Exception as error:
                return type(error).__name__ + str(error)
            raise AssertionError(f"{function} was not refused")

        with ctx.Pool(1) as pool, mp.Executor(1, ctx) as executor:
            for call in (
                (pipe[0].send, big),
                (queue.put, big),
                (pool.apply, np.sum, (big,)),
                (pool.map, np.sum, [big, big]),
                (pool.apply, np.ones, (1_000_000,)),
                (executor.submit(np.sum, big).result, 30),
                (executor.submit(np.ones, 1_000_000).result, 30),
            ):
                text = refused(*call)
                assert "SharedMemoryFullError" in text and "a shared array needs 7.6 MiB" in text, text
            pipe[0].send(1)
            queue.put(2)
            assert (pipe[1].recv(), queue.get()) == (1, 2)
            assert pool.apply(abs, (-1,)) == executor.submit(abs, -1).result(30) == 1
        """,
        tmp_path,
        method,
    )


def test_descriptors_that_run_out_where_a_message_arrives(tmp_path: Path, method: str) -> None:
    """The receiver, whose own files use them up, gets an error for each array, and goes on behind it."""
    run_program(
        """
        import resource

        def receive(end):
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
            kept, files, refused = [], [], 0
            for number in range(60):
                if number == 20:
                    try:
                        while True:
                            files.append(os.open(os.devnull, os.O_RDONLY))
                    except OSError:
                        os.close(files.pop())  # room for what travels
                try:
                    kept.append(end.recv())
                except FileDescriptorLimitError as error:
                    assert "ulimit -n" in str(error)
                    refused += 1
                    if refused == 10:
                        for file in files:
                            os.close(file)
            end.send((refused, len(kept), end.recv()))

        here, there = ctx.Pipe()
        process = ctx.Process(target=receive, args=(there,))
        process.start()
        for number in range(60):
            here.send(np.full(100_000, float(number)))
        here.send("end")
        assert here.poll(30)
        assert here.recv() == (10, 50, "end")
        process.join(30)
        """,
        tmp_path,
        method,
    )


def test_a_damaged_message(tmp_path: Path) -> None:
    """It is an error of ours at whichever byte; other messages of the pipe arrive."""
    run_program(
        """
        import pickle
        from nbparallel.multiprocessing.messages.parcels import open_parcel, pack

        here, there = mp.Pipe()
        for value in (nbp.ones(100_000), {"x": np.ones(100_000), "f": lambda: value}):
            parcel, data = pack(value, there.outbox if hasattr(there, "outbox") else 0)
            wrong = 0
            for place in range(0, len(data), max(1, len(data) // 300)):
                damaged = bytearray(data)
                damaged[place] ^= 0x55
                try:
                    open_parcel(parcel, bytes(damaged))
                except NbParallelError:
                    wrong += 1
            assert wrong > 20, wrong
            open_parcel(parcel, data)
        here.send(nbp.ones(3))
        assert there.recv()[0] == 1
        """,
        tmp_path,
    )


def test_ranks_are_not_started_below(tmp_path: Path, method: str) -> None:
    """A session belongs to the notebook or script itself."""
    run_program(
        """
        def begin(end):
            try:
                nbp.Session(2)
            except RuntimeError as error:
                end.send(str(error))

        here, there = ctx.Pipe()
        process = ctx.Process(target=begin, args=(there,))
        process.start()
        assert here.poll(30)
        assert here.recv() == "a rank or worker cannot start ranks: use a session of the notebook or script"
        process.join(30)
        """,
        tmp_path,
        method,
    )
