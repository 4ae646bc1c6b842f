"""What arrives when an array is sent: the table of `docs/reference/multiprocessing.md`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = pytest.mark.matrix(cover=(), size=1)

ECHO = """
def child(inbox, outbox):
    while (request := inbox.get()) is not None:
        outbox.put(request[0](*request[1:]))

inbox, outbox = ctx.Queue(), ctx.Queue()
process = ctx.Process(target=child, args=(inbox, outbox), daemon=True)  # a failed test ends
process.start()

def ask(*request):
    inbox.put(request)
    return outbox.get(timeout=30)
"""
END = """
inbox.put(None)
process.join()
assert process.exitcode == 0, process
"""


def run(body: str, folder: Path, method: str) -> None:
    """Run `body` beside a child that calls what it is asked to."""
    run_program(ECHO + textwrap.dedent(body) + END, folder, method)


def test_a_private_array_is_copied_once(tmp_path: Path, method: str) -> None:
    """It arrives writable in shared memory from 256 KiB on; the sender's stays private and unchanged."""
    run(
        """
        def look(x):
            x[0] = 99
            return nbp.is_shared(x), x.flags.writeable, float(x.sum())

        large, small = np.ones(32768), np.ones(32767)
        assert ask(look, large) == (True, True, 32768 + 98), "262,144 bytes: shared on arrival"
        assert ask(look, small) == (False, True, 32767 + 98), "fewer: in the message"
        assert large[0] == small[0] == 1 and not nbp.is_shared(large)
        """,
        tmp_path,
        method,
    )


def test_a_shared_array_is_the_same_memory(tmp_path: Path, method: str) -> None:
    """Any size, with its rights, in both directions; two views of it alias."""
    run(
        """
        def write(x, y):
            x[1] = 7
            return np.shares_memory(x, y), y

        for size in (3, 100_000):
            x = nbp.zeros(size)
            aliased, back = ask(write, x, x[1:])
            assert aliased and x[1] == 7 and nbp.is_shared(back)
            back[0] = 8
            assert x[1] == 8
        x = nbp.zeros((4, 5))
        assert ask(np.shape, x.T) == (5, 4) and ask(np.shape, x[1, 2]) == ()
        """,
        tmp_path,
        method,
    )


def test_what_a_child_inherited_is_not_used_again(tmp_path: Path, method: str) -> None:
    """Its parent drops its arrays: as long as a child lives, their memory is not given to new ones."""
    run_program(
        """
        def look(arrays, go, end):
            go.wait()
            end.send([(float(x.min()), float(x.max())) for x in arrays])

        arrays = [nbp.full((400, 400), 1.0), nbp.full(100, 2.0)]
        kept = nbp.full(100, 9.0)  # what the small one is packed with stays in use
        go, (here, there) = ctx.Event(), ctx.Pipe()
        process = ctx.Process(target=look, args=(arrays, go, there))
        process.start()
        arrays.clear()
        others = []
        for _ in range(20):
            time.sleep(0.01)  # for what the supervisor says of memory that no process uses
            others += nbp.full((400, 400), 3.0), nbp.full(100, 4.0)
        go.set()
        assert here.recv() == [(1, 1), (2, 2)]
        process.join()
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_other_threads_go_on_when_a_process_is_started(tmp_path: Path, method: str) -> None:
    """A thread that shares arrays meanwhile neither hangs nor makes the process hang."""
    run_program(
        """
        import threading

        def share():
            made = []
            while not stop.is_set():
                made = [*made[-50:], nbp.full(300, 1.0)]

        def work():
            nbp.full((400, 400), 1.0).sum()

        stop, started = threading.Event(), []
        thread = threading.Thread(target=share)
        thread.start()
        try:
            for _ in range(10):
                process = ctx.Process(target=work)
                process.start()
                process.join(30)
                started.append(process.exitcode)
        finally:
            stop.set()
            thread.join()
        assert started == [0] * 10, started
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_comes_from_a_child_is_the_same_memory(tmp_path: Path, method: str) -> None:
    """An array that a child was started with, and what it makes, is shared with its parent."""
    run_program(
        """
        def child(x, q):
            x[0] = 1
            made = nbp.zeros(5)
            q.put(made)
            while made[0] == 0:
                time.sleep(0.01)
            x[1] = 2

        x, q = nbp.zeros(1000), ctx.Queue()
        p = ctx.Process(target=child, args=(x, q))
        p.start()
        q.get(timeout=30)[0] = 1
        p.join()
        assert p.exitcode == 0 and x[:2].tolist() == [1, 2]
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_shapes_and_types_are_kept(tmp_path: Path, method: str) -> None:
    """0-d, empty, strided, structured and object arrays arrive as what they are; other buffers too."""
    run(
        """
        def same(x):
            return x
        record = np.zeros(40_000, dtype=[("a", "i4"), ("b", "f8")])
        record["b"] = np.arange(40_000)
        square = np.arange(90_000.0).reshape(300, 300)
        for x in (np.array(3.5), np.zeros((0, 3)), np.arange(12).reshape(3, 4).T, record, square.T,
                  np.arange(200_000.0)[::2], np.array([1, "a", None], object)):
            y = ask(same, x)
            assert y.dtype == x.dtype and y.shape == x.shape and y.tolist() == x.tolist()
        assert ask(same, bytearray(1_000_000)) == bytearray(1_000_000)
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_producer_may_be_gone(tmp_path: Path, method: str) -> None:
    """What a process has put before it ended, or was killed, can be got."""
    run_program(
        """
        def produce(q, killed):
            q.put(np.full(100_000, 3.0))
            q.put("last")
            if killed:
                q.close(); q.join_thread()
                os.kill(os.getpid(), signal.SIGKILL)

        for killed in (False, True):
            q = ctx.Queue()
            p = ctx.Process(target=produce, args=(q, killed))
            p.start(); p.join()
            x = q.get(timeout=30)
            assert nbp.is_shared(x) and x.sum() == 300_000 and q.get(timeout=30) == "last"
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_workers_follow_a_switch_of_the_strategy(tmp_path: Path, method: str) -> None:
    """Each worker of a pool uses the pool's present strategy from its next task on; what there is stays."""
    run_program(
        """
        def begin(barrier):
            global pair
            pair = barrier

        def look(n):
            pair.wait(30)  # both workers get some
            return os.getpid(), nbp.get_sharing_strategy(), np.ones(n)

        both = ctx.Barrier(2)
        with ctx.Pool(2, begin, (both,)) as pool:
            kept = []
            for name in ("file_system", "mmap", "copy", "file_descriptor"):
                nbp.set_sharing_strategy(name)
                found = pool.map(look, [100_000] * 2, chunksize=1)
                assert {strategy for _, strategy, _ in found} == {name}, found
                assert len({pid for pid, _, _ in found}) == 2
                assert all(nbp.is_shared(x) == (name != "copy") for _, _, x in found)
                kept += found
            assert all(x.sum() == 100_000 for _, _, x in kept)
        # what a worker chose itself stays until the pool's process chooses anew
        with ctx.Pool(1, nbp.set_sharing_strategy, ("file_system",)) as pool:
            ask = lambda: nbp.get_sharing_strategy()
            assert [pool.apply(ask), pool.apply(ask)] == ["file_system"] * 2
            nbp.set_sharing_strategy("mmap")
            assert pool.apply(ask) == "mmap"
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_strategies(tmp_path: Path, method: str) -> None:
    """A child starts with its parent's strategy; under `copy` arrays are copied as by the library."""
    run_program(
        """
        nbp.set_sharing_strategy("copy")
        q, q2 = ctx.Queue(), ctx.Queue()
        def child(q, q2):
            q.put(nbp.get_sharing_strategy())
            q.put(nbp.is_shared(q2.get()))
        p = ctx.Process(target=child, args=(q, q2))
        p.start()
        assert q.get(timeout=30) == "copy"
        q2.put(np.ones(100_000))
        assert q.get(timeout=30) is False
        p.join()
        """,
        tmp_path,
        method,
    )


def test_every_carrier(tmp_path: Path, method: str) -> None:
    """Pipes, all queues, pools and managers carry a shared array as the same memory."""
    run_program(
        """
        def fill(end, x):
            end.send(x) if hasattr(end, "send") else end.put(x)

        def double(x):
            x *= 2
            return x

        first, second = ctx.Pipe()
        queues = ctx.Queue(), ctx.SimpleQueue(), ctx.JoinableQueue()
        for taker, giver in ((first, second), *zip(queues, queues)):
            x = nbp.ones(1000)
            p = ctx.Process(target=fill, args=(giver, x))
            p.start()
            y = taker.recv() if hasattr(taker, "recv") else taker.get()
            p.join()
            y[:] = 5
            assert x[0] == 5, taker
        x = nbp.ones(1000)
        with ctx.Pool(2) as pool:
            assert pool.apply(double, (x,))[0] == 2 and x[0] == 2
            pool.map(double, [x[:500], x[500:]])
            assert x[0] == x[999] == 4
        with ctx.Manager() as manager:
            d = manager.dict()
            d["x"] = x
            d["x"][0] = 9
            assert x[0] == 9
            del d
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_proxies_arrive(tmp_path: Path, method: str) -> None:
    """What a manager holds is reached from processes and workers that have not imported it."""
    run_program(
        """
        def write(name, names, found):
            names[name] = len(found)
            found.append(name)

        with ctx.Manager() as manager, ctx.Pool(1) as pool:
            names, found = manager.dict(), manager.list()
            p = ctx.Process(target=write, args=("process", names, found))
            p.start()
            p.join()
            pool.apply(write, ("worker", names, found))
            assert dict(names) == {"process": 0, "worker": 1} and list(found) == ["process", "worker"]
            del names, found
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_stock_process_is_named(tmp_path: Path) -> None:
    """A handle that comes to a process of the library's own is an error that says what to start instead."""
    out = run_program(
        """
        import multiprocessing

        def child(q, back):
            try:
                q.get()
            except InvalidHandleError as error:
                back.put(str(error))

        q, back = ctx.Queue(), ctx.Queue()
        p = multiprocessing.get_context("fork").Process(target=child, args=(q, back))
        p.start()
        q.put(nbp.ones(5))
        print(back.get(timeout=30))
        p.join()
        """,
        tmp_path,
    )
    assert "nbparallel.multiprocessing's Process" in out


def test_messages_that_no_process_can_read_are_dropped(tmp_path: Path) -> None:
    """When the last reading end of a pipe is closed, the memory of what was in it is released."""
    run_program(
        """
        from nbparallel.multiprocessing import household
        from nbparallel.testing.waiting import wait_until

        def held():
            report = household.report()  # None while its process starts, on a busy machine
            return None if report is None else any(row.messages for row in report.segments)

        first, second = ctx.Pipe()
        second.send(np.ones(50_000))
        wait_until(held, household.report)
        first.close()
        wait_until(lambda: held() is False, household.report)
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_the_end_of_a_program_waits_for_its_processes(tmp_path: Path, method: str) -> None:
    """As from the library: only daemonic ones are ended; the others finish, and what they send arrives."""
    out = run_program(
        """
        def work(started, x):
            started.set()
            time.sleep(0.5)
            print("finished", x.sum(), flush=True)

        started = ctx.Event()
        ctx.Process(target=work, args=(started, nbp.full(5, 2.0))).start()
        started.wait(30)
        """,
        tmp_path,
        method,
    )
    assert out == "finished 10.0\n"


def test_a_process_does_its_last_steps(tmp_path: Path, method: str) -> None:
    """Messages are sent to the last, `atexit` runs where the library's runs it, children are waited for.

    Shared memory of the library that a child has made for another process stays.
    """
    run_program(
        """
        import atexit
        from multiprocessing import resource_tracker, shared_memory
        resource_tracker.ensure_running()  # else each forked process has its own, as in the library

        def grandchild(path):
            time.sleep(0.3)
            open(path, "w").close()

        def child(q, path):
            atexit.register(os.write, 1, b"atexit ")
            for number in range(200):
                q.put(number)
            memory = shared_memory.SharedMemory(create=True, size=10)
            memory.buf[0] = 7
            q.put(memory.name)
            memory.close()
            ctx.Process(target=grandchild, args=(path,)).start()

        q, path = ctx.Queue(), os.path.abspath("done")
        process = ctx.Process(target=child, args=(q, path))
        process.start()
        assert [q.get(timeout=20) for _ in range(200)] == list(range(200))
        name = q.get(timeout=20)
        process.join()
        assert (process.exitcode, os.path.exists(path)) == (0, True)
        memory = shared_memory.SharedMemory(name=name)
        assert memory.buf[0] == 7
        memory.close()
        memory.unlink()
        """,
        tmp_path,
        method,
    )
