"""Calls of a manager's objects that are interrupted: the next has its own answer."""

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

"""

pytestmark = pytest.mark.time_limit(60)


def test_a_wait_is_interrupted(tmp_path: Path, method: str) -> None:
    """The next calls have answers of their own; the abandoned one still takes what it waited for."""
    run_program(
        PRESS
        + """
with ctx.Manager() as manager:
    queue, names = manager.Queue(), manager.dict(a=np.arange(3))
    interrupted(queue.get)
    assert list(names["a"]) == [0, 1, 2]
    for item in range(3):  # the call that was interrupted takes one
        queue.put(item)
    assert queue.get(timeout=30) < queue.get(timeout=30)

    event, full = manager.Event(), manager.Queue(1)
    full.put(1)
    interrupted(event.wait)
    interrupted(full.put, 2)
    assert not event.is_set() and full.get() == 1 and full.get(timeout=30) == 2
    del queue, names, event, full
""",
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_an_alarm_at_any_time(tmp_path: Path) -> None:
    """Whatever a call was interrupted at, later ones have their own answers."""
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
        # the call that was interrupted takes one
        cell = f"queue.put({number})\nqueue.put({number})\nprint(queue.get(timeout=30))"
        assert ask(cell) == f"{number}\n"
    ask("del queue, names\nmanager.shutdown()")
