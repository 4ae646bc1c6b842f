"""Calls of a manager's objects that are interrupted: the next has its own answer, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program

PRESS = """
import threading

def is_waiting(thread):
    "Whether a thread waits for the answer to a call, which it has sent."
    names, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[0] == "_recv" and "_callmethod" in names and not {"_connect", "_renew"} & {*names}

def interrupted(call, *args):
    main = threading.get_ident()

    def wait_and_press():
        while not is_waiting(main):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_press)
    thread.start()
    try:
        call(*args)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("no KeyboardInterrupt")
    finally:
        thread.join()

def in_thread(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()
"""

pytestmark = pytest.mark.time_limit(60)


def test_a_wait_is_interrupted(tmp_path: Path, method: str) -> None:
    """What the abandoned call would have taken, an item or a lock, is there for the next one."""
    run_program(
        PRESS
        + """
with ctx.Manager() as manager:
    queue, names, lock = manager.Queue(), manager.dict(a=np.arange(3)), manager.Lock()
    interrupted(queue.get)
    assert list(names["a"]) == [0, 1, 2]
    queue.put("first")
    queue.put("second")
    assert {queue.get(timeout=30), queue.get(timeout=30)} == {"first", "second"}

    in_thread(lock.acquire)
    interrupted(lock.acquire)
    lock.release()
    assert lock.acquire(True, 30)
    lock.release()

    event, full = manager.Event(), manager.Queue(1)
    full.put(1)
    interrupted(event.wait)
    interrupted(full.put, 2)
    assert not event.is_set() and full.get() == 1 and full.get(timeout=30) == 2
    del queue, names, lock, event, full
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_locks_of_threads(tmp_path: Path) -> None:
    """A lock that only its thread releases is free when the call that was interrupted has ended."""
    run_program(
        PRESS
        + """
class Napping:
    def nap(self):
        time.sleep(0.2)

class Manager(mp.managers.SyncManager):
    pass

Manager.register("Napping", Napping)
manager = Manager(ctx=ctx)
manager.start()
napping, lock, queue, condition = manager.Napping(), manager.RLock(), manager.Queue(), manager.Condition()

def release_late(held):
    try:
        held.release()
    except RuntimeError as error:  # the connection that has it is gone
        assert "release" in str(error)
    else:
        raise AssertionError("it was released")

lock.acquire()
interrupted(napping.nap)
release_late(lock)
in_thread(lambda: (lock.acquire(), lock.release()))

lock.acquire()
interrupted(queue.get)
release_late(lock)
queue.put(1)
in_thread(lambda: (lock.acquire(), lock.release()))
assert queue.get(timeout=30) == 1

condition.acquire()
interrupted(condition.wait)
release_late(condition)
for _ in range(2):
    with condition:
        condition.notify_all()
del napping, lock, queue, condition
manager.shutdown()
""",
        tmp_path,
    )


@pytest.mark.slow
def test_a_killed_process_takes_nothing(tmp_path: Path) -> None:
    """A process that was killed while it waited for an item or a lock."""
    run_program(
        """
        def wait_for(ready, call):
            ready.send(1)
            call()

        with ctx.Manager() as manager:
            queue, lock = manager.Queue(), manager.Lock()
            lock.acquire()
            for call in (queue.get, lock.acquire):
                seen, ready = ctx.Pipe(False)
                process = ctx.Process(target=wait_for, args=(ready, call))
                process.start()
                seen.recv()
                with open(f"/proc/{process.pid}/wchan") as file:
                    while "read" not in file.read():
                        file.seek(0)
                process.kill()
                process.join()
            queue.put("item")
            assert queue.get(timeout=30) == "item"
            lock.release()
            assert lock.acquire(True, 30)
            del queue, lock, call
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_an_alarm_at_any_time(tmp_path: Path) -> None:
    """Whatever a call was interrupted at, later ones have their own answers, and items keep their order."""
    run_program(
        """
        import random
        random.seed(1)

        armed = []
        def ring(*_):
            if armed:
                armed.clear()
                raise TimeoutError("alarm")

        def ring_after(seconds, again=0.0):
            armed.append(1)
            signal.setitimer(signal.ITIMER_REAL, seconds, again)

        signal.signal(signal.SIGALRM, ring)
        with ctx.Manager() as manager:
            names, queue = manager.dict({n: n for n in range(100)}), manager.Queue()
            rang = 0
            for number in range(600):
                try:
                    try:
                        ring_after(random.uniform(1e-5, 1e-3))
                        while True:
                            key = random.randrange(100)
                            assert names[key] == key
                            assert len(names) == 100
                            assert queue.empty()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except TimeoutError:
                    rang += 1
                if number % 50 == 0:  # an alarm just before the system call of a wait ends nothing: again
                    try:
                        ring_after(random.uniform(1e-3, 1e-2), again=0.5)
                        queue.get()
                    except TimeoutError:
                        pass
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    queue.put(number)
                    assert queue.get(timeout=30) == number
            assert rang == 600
            del names, queue
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_in_a_notebook(kernel: Kernel) -> None:
    """A cell that waits for an item is interrupted; the next cells read and write."""

    def ask(code: str) -> str:
        outcome = kernel.run(code, timeout=40)
        assert outcome.status == "ok", outcome.traceback
        return outcome.stdout

    ask("import nbparallel.multiprocessing as mp\nmanager = mp.Manager()")
    ask("queue, names = manager.Queue(), manager.dict(a=1)")
    for number in range(3):
        cell = kernel.begin("print('waits', flush=True)\nqueue.get()")
        cell.wait_for("waits")
        kernel.interrupt()
        assert cell.wait(20).ename == "KeyboardInterrupt"
        assert ask("print(names['a'])") == "1\n"
        assert ask(f"queue.put({number})\nprint(queue.get(timeout=30))") == f"{number}\n"
    ask("del queue, names\nmanager.shutdown()")


@pytest.mark.slow
def test_a_manager_goes_on_after_a_caller_for_which_it_has_no_thread(tmp_path: Path, method: str) -> None:
    """Which has an EOFError, as if the manager had ended; the next caller is served."""
    run_program(
        """
import threading

def starve():
    "Let the start of this process's third thread fail: the second caller's."
    start, left = threading.Thread.start, [3]

    def fail_once(thread):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = fail_once

manager = mp.managers.SyncManager(ctx=ctx)
manager.start(starve)
try:
    manager.list()  # one call to make it, and one to know that it is used
except EOFError:
    pass
else:
    raise AssertionError("nothing failed")
assert list(manager.list([1])) == [1]
""",
        tmp_path,
        method,
    )
