"""What ``__main__`` defines travels by value: no guard, nothing is run again, in scripts and in notebooks."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program

pytestmark = pytest.mark.matrix(cover=(), size=1)


def test_targets_closures_and_subclasses(tmp_path: Path, method: str) -> None:
    """A lambda, a closure with a lock, a `Process` of a class of the script; the script is not run again."""
    out = run_program(
        """
        print("once")
        scale = 3
        def helper(x):
            return x * scale

        def closure(lock, q):
            def target(x):
                with lock:
                    q.put(helper(x))
            return target

        class Point:
            def __init__(self, x):
                self.x = x

        class Worker(ctx.Process):
            def __init__(self, q):
                super().__init__(daemon=True)
                self.q, self.method = q, self.named
            def named(self):
                return Point(self.name)
            def run(self):
                self.q.put(self.method())

        q, lock = ctx.Queue(), ctx.Lock()
        for p in (
            ctx.Process(target=lambda q: q.put(helper(1)), args=(q,)),
            ctx.Process(target=closure(lock, q), args=(1,)),
        ):
            p.start()
            assert q.get(timeout=30) == 3
            p.join()
        p = Worker(q)
        p.start()
        point = q.get(timeout=30)
        assert type(point) is Point and point.x == p.name
        p.join()
        """,
        tmp_path,
        method,
    )
    assert out == "once\n"


@pytest.mark.slow
def test_globals_of_workers(tmp_path: Path, method: str) -> None:
    """Tasks see what the initializer assigned, and what the script has assigned since."""
    run_program(
        """
        state, scale = None, 2

        def initialise(value, lock):
            global state, guard
            state, guard = value, lock

        def task(x):
            with guard:
                return state, x * scale

        def other(x):
            return task(x)[1] + 1

        with ctx.Pool(2, initialise, ("ready", ctx.Lock())) as pool:
            assert pool.map(task, range(3)) == [("ready", 0), ("ready", 2), ("ready", 4)]
            assert pool.map(other, range(3)) == [1, 3, 5]
            scale = 5
            assert pool.map(task, range(3)) == [("ready", 0), ("ready", 5), ("ready", 10)]
            def task(x):
                return "new"
            assert pool.apply(task, (1,)) == "new"
            assert pool.apply(lambda x: task(x), (1,)) == "new"
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_a_number_that_changed_before_the_first_task(tmp_path: Path, method: str) -> None:
    """A worker that has had no task yet has the new value, and what its initializer assigned or filled."""
    run_program(
        """
        state, scale, found = None, 2, []

        def initialise(value):
            global state
            state = value
            found.append(value)

        def task(x):
            return state, x * scale, found

        with ctx.Pool(1, initialise, ("ready",)) as pool:
            scale = 5
            assert pool.apply(task, (2,)) == ("ready", 10, ["ready"])
            scale = 7
            assert pool.apply(task, (2,)) == ("ready", 14, ["ready"])
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_plain_pickle_in_a_child_finds_classes(tmp_path: Path, method: str) -> None:
    """A class that arrived is an attribute of the child's ``__main__``."""
    run_program(
        """
        import pickle

        class Point:
            x = 1

        def there_and_back(point):
            return pickle.loads(pickle.dumps(point)).x

        with ctx.Pool(1) as pool:
            assert pool.apply(there_and_back, (Point(),)) == 1
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_exceptions_keep_type_and_traceback(tmp_path: Path, method: str) -> None:
    """An exception of the script's own class arrives as that, with the remote traceback as its cause."""
    run_program(
        """
        class Trouble(Exception):
            pass

        def fail():
            raise Trouble("here")

        with ctx.Pool(1) as pool:
            try:
                pool.apply(fail)
            except Trouble as error:
                assert "line" in str(error.__cause__) and "fail" in str(error.__cause__)
            else:
                raise AssertionError
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    """A generator in a task, and a lock, which says where locks go."""
    out = run_program(
        """
        with ctx.Pool(1) as pool:
            for thing in ({"a": (i for i in range(3))}, [ctx.Lock()]):
                try:
                    pool.apply(print, (thing,))
                except (TypeError, RuntimeError) as error:
                    print(error, *getattr(error, "__notes__", ()))
        """,
        tmp_path,
    )
    assert "['a'], which is a generator" in out
    assert "initargs=" in out


@pytest.mark.slow
def test_daemonic_processes_may_have_children(tmp_path: Path, method: str) -> None:
    """A pool inside a pool's worker."""
    run_program(
        """
        def outer(n):
            with mp.get_context(ctx.get_start_method()).Pool(2) as pool:
                return pool.map(abs, range(-n, 0))

        with ctx.Pool(1) as pool:
            assert pool.apply(outer, (3,)) == [3, 2, 1]
        """,
        tmp_path,
        method,
    )


NOTEBOOK = """
import numpy as np
import nbparallel as nbp, nbparallel.multiprocessing as mp
def producer(q, n):
    for i in range(n):
        q.put(np.full(100_000, float(i)))
q = mp.Queue()
p = mp.Process(target=producer, args=(q, 3))
p.start()
arrays = [q.get(timeout=30) for _ in range(3)]
p.join()
print(mp.get_start_method(), [float(x[0]) for x in arrays], all(map(nbp.is_shared, arrays)), p.exitcode)
"""


@pytest.mark.slow
@pytest.mark.every_kernel
def test_producer_and_consumer_in_a_notebook(any_kernel: Kernel) -> None:
    """Functions of cells are targets and tasks; the start method is forkserver."""
    reply = any_kernel.run(textwrap.dedent(NOTEBOOK))
    assert reply.stdout == "forkserver [0.0, 1.0, 2.0] True 0\n", reply
    reply = any_kernel.run("with mp.Pool(2) as pool:\n    print(pool.map(lambda x: x * x, range(4)))")
    assert reply.stdout == "[0, 1, 4, 9]\n", reply


@pytest.mark.slow
def test_new_workers_have_a_reloaded_module(tmp_path: Path, method: str) -> None:
    """As the reference says: those that run keep its old code, those of a new pool have the new one."""
    program = """
import importlib, pathlib
file = pathlib.Path("steps.py")
file.write_text("def step():\\n    return 'old'\\n")
import steps

def run(pool):
    return pool.apply(steps.step)

with ctx.Pool(1) as pool:
    assert run(pool) == "old"
    file.write_text("def step():\\n    return 'renewed'\\n")
    importlib.reload(steps)
    print(run(pool))
with ctx.Pool(1) as pool:
    print(run(pool))
"""
    assert run_program(program, tmp_path, method).split() == ["old", "renewed"]
