"""A task that cannot be sent: the error names the argument as the caller wrote it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program

SAID = """
def said(call):
    try:
        call()
    except Exception as error:
        return "; ".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("nothing was raised")

def check(call, *words):
    text = said(call)
    for word in words:
        assert word in text, (word, text)
    assert "it[" not in text and "it.args" not in text, text

def numbers():
    yield 1

class Box:
    def __init__(self, content):
        self.content = content

class Refusing:
    def __reduce__(self):
        raise ValueError("this object stays here")

class Exiting:
    def __reduce__(self):
        sys.exit(3)

lock = ctx.Lock()
held = {"content": [lock]}

def closure():
    inner_lock = ctx.Lock()
    return lambda *_: inner_lock
"""


def test_a_pools_tasks(tmp_path: Path) -> None:
    """Position or name of the argument, and where in it; or the function."""
    run_program(
        SAID
        + """
with ctx.Pool(1) as pool:
    check(lambda: pool.apply(print, (1, numbers())), "args[1] of a task", "it is a generator", "in the task")
    check(lambda: pool.apply(print, (1,), {"x": [numbers()]}), "kwargs['x'][0], which is a generator")
    check(lambda: pool.apply_async(print, (held,)).get(), "args[0]['content'][0]", "inheritance")
    check(lambda: pool.apply(closure()), "the function with inner_lock", "initargs=")
    check(lambda: pool.map(print, [1, 2, Box(numbers()), 4]), "args[0].content, which is a generator")
    check(lambda: pool.map(closure(), range(4)), "the function with inner_lock")
    check(lambda: pool.starmap(print, [(1, 2), (3, numbers())]), "args[1] of a task", "it is a generator")
    check(lambda: list(pool.imap(print, [numbers()])), "args[0] of a task")
    check(lambda: list(pool.imap(print, [1, numbers()], 2)), "args[0] of a task")
    check(lambda: list(pool.imap_unordered(print, [numbers()])), "args[0] of a task")
    check(lambda: pool.map(print, [Refusing()]), "this object stays here", "args[0] of a task")
    check(lambda: pool.apply_async(print, (Exiting(),)).get(20), "args[0] of a task", "SystemExit")
    try:
        pool.apply(print, (numbers(),))
    except UnpicklableError as error:
        assert "generator" in str(error.__cause__), error.__cause__
    assert pool.map(abs, [-1, 2]) == [1, 2]
""",
        tmp_path,
    )


@pytest.mark.slow
def test_an_executors_calls(tmp_path: Path, method: str) -> None:
    """As a pool's."""
    run_program(
        SAID
        + """
with mp.Executor(1, ctx) as executor:
    check(lambda: executor.submit(print, 1, numbers()).result(), "args[1] of a task", "it is a generator")
    check(lambda: executor.submit(print, x=[numbers()]).result(), "kwargs['x'][0], which is a generator")
    check(lambda: executor.submit(closure()).result(), "the function with inner_lock")
    check(lambda: list(executor.map(print, [1, Box(numbers())])), "args[0].content")
    check(lambda: list(executor.map(print, [1, 2], [3, numbers()], chunksize=2)), "args[1] of a task")
    check(lambda: executor.submit(print, Refusing()).result(), "this object stays here", "args[0] of a task")
    assert executor.submit(abs, -1).result() == 1
""",
        tmp_path,
        method,
    )


RAISING = """
import threading, urllib.error
import nbparallel as nbp, nbparallel.multiprocessing as mp
class Three(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} of {b}")
        self.a = a
class Locked(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
def three(i): raise Three(i, 3)
def locked(i): raise Locked("holds a lock")
def gone(i): raise urllib.error.HTTPError("http://x", 404, "gone", {}, None)
def divide(i): return 1 / i
"""

ASKING = """
import re
def look(call):
    for f in three, locked, gone, divide:
        try:
            call(f)
        except* Exception as group:
            (error,) = {repr(e): e for e in group.exceptions}.values()
            text = re.sub(chr(27) + r"\\[[^m]*m", "", str(error.__cause__))
            says = f"in {f.__name__}" in text and "Cell In[" in text
            print(type(error).__name__, error, getattr(error, "a", ""), getattr(error, "code", ""), says)
with mp.Pool(1) as pool:
    look(lambda f: pool.map(f, [0]))
    look(lambda f: pool.apply_async(f, (0,)).get())
with mp.Executor(1) as executor:
    look(lambda f: executor.submit(f, 0).result())
    look(lambda f: list(executor.map(f, [0])))
with nbp.Session(1) as s:
    look(lambda f: s.call(f, 0))
    look(lambda f: s.map(f, [0]))
    try: s.run("three(0)", namespace=globals())
    except* Three: print("caught")
"""


@pytest.mark.time_limit(90)
def test_what_a_function_of_the_notebook_raises(kernel: Kernel) -> None:
    """Its class, text and attributes arrive with the cell's line on every way; else a `RemoteError` does."""
    assert kernel.run(RAISING).status == "ok"
    outcome = kernel.run(ASKING, timeout=80)
    assert outcome.status == "ok", outcome.traceback
    lines = outcome.stdout.splitlines()
    three, locked, gone, divide = (lines[first:24:4] for first in range(4))
    assert set(three) == {"Three 0 of 3 0  True"}
    assert {line.partition(" [")[0] for line in locked} == {"RemoteError Locked: holds a lock"}
    assert all(line.endswith("True") for line in locked)
    assert set(gone) == {"HTTPError HTTP Error 404: gone  404 True"}
    assert set(divide) == {"ZeroDivisionError division by zero   True"}
    assert lines[24:] == ["caught"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_fails_names_its_cell(kernel: Kernel, tmp_path: Path, method: str) -> None:
    """What it writes says ``Cell In[2], line 3`` with that line, and its exit code is the library's."""
    start = (
        "import sys\nimport nbparallel.multiprocessing as mp\n"
        f"def fail():\n    sys.stderr = open({str(tmp_path / 'stderr')!r}, 'w', buffering=1)\n    1 / 0\n"
        f"process = mp.get_context({method!r}).Process(target=fail, name='failing')\n"
        "process.start()\nprocess.join()\nprint(process.exitcode)"
    )
    outcome = kernel.run(start, timeout=60)
    assert outcome.stdout.strip() == "1", outcome.traceback
    written = (tmp_path / "stderr").read_text()
    assert written.startswith("Process failing:\nTraceback (most recent call last):\n")
    assert re.search(r"Cell In\[\d+\], line 5, in fail\n    1 / 0\n", written), written
    assert "process_state" not in written


def test_an_error_that_raises_when_it_is_shown_costs_its_task(tmp_path: Path) -> None:
    """Its class and its text arrive, and the worker goes on."""
    program = """
class Delegating(Exception):
    data = {}
    def __getattr__(self, name):
        return self.data[name]

def fail(number):
    raise Delegating(f"task {number}")

def check(call):
    try:
        call()
    except (nbp.errors.RemoteError, Delegating) as error:  # from 3.14 on nothing asks it on its way
        name = getattr(error, "ename", None) if isinstance(error, nbp.errors.RemoteError) else "Delegating"
        assert name == "Delegating" and "in fail" in str(error) + str(error.__cause__), str(error)
    else:
        raise AssertionError("nothing was raised")

class Interrupting(Exception):
    def __reduce_ex__(self, protocol):
        raise KeyboardInterrupt

class Exiting(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.text = text
    def __setstate__(self, state):
        raise SystemExit

def fail_with(name):
    raise globals()[name]("text")

with ctx.Pool(1) as pool:
    worker = pool.apply(os.getpid)
    check(lambda: pool.apply(fail, (1,)))
    for name in ("Interrupting", "Exiting"):
        try:
            pool.apply(fail_with, (name,))
        except nbp.errors.RemoteError as error:
            assert error.ename == name and "in fail_with" in str(error.__cause__), error
    assert pool.apply(os.getpid) == worker
with mp.Executor(1) as executor:
    check(lambda: executor.submit(fail, 1).result())
    assert executor.submit(abs, -1).result() == 1
"""
    run_program(program, tmp_path)
